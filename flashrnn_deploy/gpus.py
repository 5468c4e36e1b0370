"""What the solver knows about GPUs. Every number names its source; ``get("local")`` reads the installed device.

Sources, by the letter used in ``GPU.sources``:

* C: limits per compute capability, CUDA C++ Programming Guide, "Compute Capabilities", and NVIDIA's libcu++ header
  ``cuda/__device/arch_traits.h``: 65,536 registers per SM; shared memory per SM / opt-in per block in KiB: 64 / 64
  (7.5), 164 / 163 (8.0, 8.7), 100 / 99 (8.6, 8.9, 12.0), 228 / 227 (9.0, 10.0, 11.0); clusters from 9.0 on. A cluster
  of 8 is portable; the Hopper and Blackwell Tuning Guides allow 16 on 9.0 and 10.0 by the non-portable attribute.
  NVIDIA Warp's ``get_cuda_max_cluster_dim`` says that integrated parts (Thor) stop at 8.
* M: measured here on an H200: clock, SMs, resident clusters (31 of 4, 15 of 8, 7 of 16) and every latency of the model.
* A: assumed, because NVIDIA does not publish it; it moves estimates only, never correctness: a launch asks the device.
* other entries: the NVIDIA document with the product's SMs, L2, boost clock, memory bandwidth and tensor throughput.

``tensor_macs`` is dense f16 multiply-accumulates with fp32 accumulation per clock and SM: TFLOPS / (2 SMs clock).
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, replace
from typing import Any

from flashrnn_deploy.errors import FlashRNNError

_KIB, _MIB = 1024, 1024 * 1024
_SHARED_KIB = {75: 64, 80: 164, 86: 100, 87: 164, 89: 100, 90: 228, 100: 228, 110: 228, 120: 100}


@dataclass(frozen=True)
class GPU:
    """One device.

    Args:
        name: its key in ``GPUS``.
        product: the product the row describes.
        compute_capability: major * 10 + minor.
        sms: streaming multiprocessors.
        smem_per_sm: bytes of shared memory per SM.
        smem_per_block: bytes one block may opt in to.
        l2_bytes: size of the L2 cache.
        clock_mhz: boost clock of the SMs.
        memory_gbs: memory bandwidth in 10^9 bytes per second.
        tensor_macs: f16 multiply-accumulates per clock and SM on the tensor cores.
        gpcs: groups of SMs a cluster cannot cross; 0 where there are no clusters.
        max_cluster_size: blocks, with the non-portable attribute where the device has it; 1 without clusters.
        registers_per_sm: 32-bit registers.
        measured: the device on which the cost model was measured.
        sources: where the numbers come from; the letters are explained in the module's text.
    """

    name: str
    product: str
    compute_capability: int
    sms: int
    smem_per_sm: int
    smem_per_block: int
    l2_bytes: int
    clock_mhz: int
    memory_gbs: float
    tensor_macs: int
    gpcs: int = 0
    max_cluster_size: int = 1
    registers_per_sm: int = 65536
    measured: bool = False
    sources: tuple[str, ...] = ()

    @property
    def arch(self) -> str:
        """What ``nvcc -arch`` calls it."""
        return f"sm_{self.compute_capability}"

    @property
    def capability(self) -> str:
        """The compute capability as NVIDIA writes it, "9.0"."""
        return f"{self.compute_capability // 10}.{self.compute_capability % 10}"

    @property
    def portable_cluster_size(self) -> int:
        """Largest cluster that needs no attribute."""
        return min(8, self.max_cluster_size)

    def resident_clusters(self, size: int) -> int:
        """Clusters of ``size`` blocks resident at once, one block per SM; 0 where the device has none of that size.

        Clusters stay inside a GPC. One GPC is taken to have one TPC (two SMs) less than the others, which gives the
        31, 15 and 7 clusters of 4, 8 and 16 that the occupancy API reports on an H200.
        """
        if not 1 < size <= self.max_cluster_size:
            return 0
        per_gpc = self.sms // self.gpcs
        return (self.gpcs - 1) * (per_gpc // size) + max(0, per_gpc - 2) // size


def _gpu(
    name: str, product: str, cc: int, sms: int, l2_mib: int, clock: int, gbs: float, macs: int, *sources: str,
    gpcs: int = 0, cluster: int = 1, measured: bool = False,
) -> GPU:  # fmt: skip
    shared = _SHARED_KIB[cc] * _KIB
    block = shared - (_KIB if cc >= 80 else 0)  # the driver keeps 1 KiB per block from compute capability 8.0 on
    return GPU(
        name, product, cc, sms, shared, block, l2_mib * _MIB, clock, gbs, macs, gpcs, cluster, 65536, measured,
        ("C", *sources),
    )  # fmt: skip


_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, appendix A"
_AD102 = "NVIDIA Ada GPU Architecture whitepaper, appendix A"
_ORIN = "NVIDIA Jetson AGX Orin Series technical brief"
_THOR = "A: tensor rate, from 517 dense FP8 TFLOPS"

# fmt: off
GPUS = {
    gpu.name: gpu
    for gpu in (
        #    name         product                   cc   SMs  L2   MHz   GB/s   MACs  sources
        _gpu("t4",        "T4",                      75,  40,   4, 1590,  320.0,  512, "NVIDIA T4 datasheet",
             "NVIDIA Turing GPU Architecture whitepaper, appendix"),
        _gpu("a10",       "A10",                     86,  72,   6, 1695,  600.0,  512, "NVIDIA A10 datasheet", _GA102),
        _gpu("a100",      "A100 SXM4 80 GB",         80, 108,  40, 1410, 2039.0, 1024, "NVIDIA A100 datasheet",
             "NVIDIA A100 Tensor Core GPU Architecture whitepaper"),
        _gpu("l4",        "L4",                      89,  58,  48, 2040,  300.0,  512, "NVIDIA L4 datasheet", _AD102),
        _gpu("l40s",      "L40S",                    89, 142,  96, 2520,  864.0,  512, "NVIDIA L40S datasheet", _AD102),
        _gpu("h100",      "H100 SXM5 80 GB",         90, 132,  50, 1980, 3350.0, 2048, "NVIDIA H100 datasheet",
             "NVIDIA H100 Tensor Core GPU Architecture whitepaper: 8 GPCs", gpcs=8, cluster=16),
        _gpu("h200",      "H200 SXM",                90, 132,  50, 1980, 4800.0, 2048, "NVIDIA H200 datasheet", "M",
             "NVIDIA H100 Tensor Core GPU Architecture whitepaper: 8 GPCs", gpcs=8, cluster=16, measured=True),
        _gpu("b200",      "B200 SXM",               100, 148, 126, 1965, 8000.0, 4096, "NVIDIA HGX B200 datasheet",
             "NVIDIA Blackwell Tuning Guide: L2", "A: 8 GPCs; clock as nvidia-smi reports it", gpcs=8, cluster=16),
        _gpu("rtx3090",   "GeForce RTX 3090",        86,  82,   6, 1695,  936.0,  256, _GA102),
        _gpu("rtx4090",   "GeForce RTX 4090",        89, 128,  72, 2520, 1008.0,  256, _AD102),
        _gpu("rtx5090",   "GeForce RTX 5090",       120, 170,  96, 2407, 1792.0,  256,
             "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix: 11 GPCs", gpcs=11, cluster=8),
        _gpu("orin-agx",  "Jetson AGX Orin 64 GB",   87,  16,   4, 1300,  204.8, 1024, _ORIN),
        _gpu("orin-nx",   "Jetson Orin NX 16 GB",    87,   8,   2,  918,  102.4, 1024,
             "NVIDIA Jetson Orin NX Series datasheet", "A: L2, half of AGX Orin's"),
        _gpu("orin-nano", "Jetson Orin Nano 8 GB",   87,   8,   2,  625,   68.0, 1024,
             "NVIDIA Jetson Orin Nano Series datasheet, without Super mode", "A: L2, half of AGX Orin's"),
        _gpu("thor",      "Jetson AGX Thor T5000",  110,  20,  32, 1575,  273.0, 4096, "NVIDIA Jetson Thor datasheet",
             "NVIDIA Thor SoC technical reference manual: 3 GPCs", _THOR, gpcs=3, cluster=8),
    )
}
# fmt: on


def get(name: str, others: str = "local for the installed one") -> GPU:
    """A GPU by name; ``local`` reads device 0 through the driver. ``others`` is what a message adds to the names.

    Raises:
        FlashRNNError: the name is not in the table, or ``local`` finds no driver or no device.
    """
    name = name.lower()
    if name == "local":
        return read_device(_load_driver())
    if name not in GPUS:
        raise FlashRNNError(f"unknown GPU {name!r}; the names are {', '.join(GPUS)}, or {others}")
    return GPUS[name]


def same_product(gpu: GPU, product: str, compute_capability: int, sms: int) -> bool:
    """Whether a device that its driver describes so is ``gpu``: by its name in the product's, and its size.

    "NVIDIA H100 PCIe" is no "h100", whose row has the SMs of the SXM module.
    """
    if (gpu.compute_capability, gpu.sms) != (compute_capability, sms):
        return False
    name = re.sub(r"(?<=[a-z])(?=\d)", " ?", gpu.name.split("-")[0])  # "rtx3090" stands in "RTX 3090", no "l4" in "L40"
    return product == gpu.product or re.search(rf"(?<![a-z]){name}(?![a-z\d])", product.lower()) is not None


def _load_driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise FlashRNNError(
            f"--gpu local needs an NVIDIA driver, but libcuda.so.1 does not load ({error}); "
            f"name a GPU instead: {', '.join(GPUS)}"
        ) from None


# Values of CUdevice_attribute, cuda.h.
_ATTRIBUTES = {
    "clock_khz": 13, "sms": 16, "memory_khz": 36, "bus_bits": 37, "l2_bytes": 38, "major": 75, "minor": 76,
    "smem_per_sm": 81, "registers_per_sm": 82, "smem_per_block": 97,
}  # fmt: skip


def read_device(driver: Any, ordinal: int = 0) -> GPU:
    """Device ``ordinal`` as the CUDA driver library describes it.

    GPCs, the largest cluster and the tensor rate have no attribute: they come from the row of the table with the same
    compute capability and SM count, else from one with the same compute capability, else they are assumed.

    Raises:
        FlashRNNError: the driver reports an error, a device below compute capability 7.5, or no device.
    """

    def call(function: str, *arguments: Any) -> None:
        if status := getattr(driver, function)(*arguments):
            raise FlashRNNError(
                f"--gpu local: {function} of the CUDA driver failed with error {status}; is a GPU free?"
            )

    device, text = ctypes.c_int(), ctypes.create_string_buffer(256)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), ordinal)
    call("cuDeviceGetName", text, len(text), device)
    value = {}
    for name, attribute in _ATTRIBUTES.items():
        result = ctypes.c_int()
        call("cuDeviceGetAttribute", ctypes.byref(result), attribute, device)
        value[name] = result.value
    product, cc = text.value.decode(), value["major"] * 10 + value["minor"]
    if cc < 75:
        raise FlashRNNError(f"--gpu local: {product} has compute capability {cc / 10}; the kernels need 7.5 or more")
    same = [g for g in GPUS.values() if g.compute_capability == cc]
    twin = next((g for g in same if g.sms == value["sms"]), None)
    like = twin or (same[0] if same else GPUS["rtx3090"])
    if twin is None and same and like.gpcs:
        like = replace(like, gpcs=-(-value["sms"] // (like.sms // like.gpcs)))
    return replace(
        like,
        name="local",
        product=product,
        compute_capability=cc,
        sms=value["sms"],
        smem_per_sm=value["smem_per_sm"],
        smem_per_block=value["smem_per_block"],
        registers_per_sm=value["registers_per_sm"],
        l2_bytes=value["l2_bytes"],
        clock_mhz=value["clock_khz"] // 1000,
        memory_gbs=2 * value["memory_khz"] * value["bus_bits"] / 8 / 1e6,
        measured="H200" in product and twin is not None,
        sources=("the CUDA driver", f"{like.name}: tensor rate, GPCs, cluster limit"),
    )
