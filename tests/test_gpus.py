"""The GPU table and the reading of a device through a driver library."""

import ctypes
from dataclasses import replace

import pytest

from flashrnn_deploy import gpus
from flashrnn_deploy.errors import FlashRNNError

NAMES = ["t4", "a10", "a100", "l4", "l40s", "h100", "h200", "b200", "rtx3090", "rtx4090", "rtx5090"]
NAMES += ["orin-agx", "orin-nx", "orin-nano", "thor"]


def test_the_names():
    assert list(gpus.GPUS) == NAMES
    assert all(gpus.get(name).name == name for name in NAMES)
    with pytest.raises(FlashRNNError, match=r"unknown GPU 'h20'; the names are t4, a10, .*local"):
        gpus.get("h20")


@pytest.mark.parametrize("gpu", gpus.GPUS.values(), ids=NAMES)
def test_a_row_is_complete_and_consistent(gpu):
    assert gpu.arch == f"sm_{gpu.compute_capability}"
    assert gpu.smem_per_sm - gpu.smem_per_block == (1024 if gpu.compute_capability >= 80 else 0)
    assert gpu.registers_per_sm == 65536
    assert (gpu.max_cluster_size > 1) == (gpu.gpcs > 0) == (gpu.compute_capability >= 90)
    assert gpu.portable_cluster_size in (1, 8)
    assert gpu.sources[0] == "C"
    assert any("NVIDIA" in s for s in gpu.sources), "each row names the product's document"
    assert gpu.measured == (gpu.name == "h200")


# Dense f16 TFLOPS with fp32 accumulation, from the datasheets; Jetson: a quarter of the sparse INT8 TOPS.
TFLOPS = {"t4": 65, "a10": 125, "a100": 312, "l4": 121, "l40s": 362, "h100": 989, "h200": 989, "b200": 2250}
TFLOPS |= {"rtx3090": 71, "rtx4090": 165, "rtx5090": 209.5, "orin-agx": 42.5, "thor": 258}


@pytest.mark.parametrize("name", TFLOPS)
def test_tensor_rate_gives_the_published_throughput(name):
    """SMs, clock and rate multiply to the datasheet's TFLOPS (tensor clocks may be a little lower than boost)."""
    gpu = gpus.GPUS[name]
    assert 2e-6 * gpu.sms * gpu.clock_mhz * gpu.tensor_macs == pytest.approx(TFLOPS[name], rel=0.10)


def test_resident_clusters_as_the_occupancy_api_reports_them_on_an_h200():
    assert [gpus.GPUS["h200"].resident_clusters(size) for size in (4, 8, 16, 1, 32)] == [31, 15, 7, 0, 0]
    assert gpus.GPUS["a100"].resident_clusters(2) == 0


class FakeDriver:
    """The four functions of libcuda that are used; ``values`` by attribute number of cuda.h."""

    def __init__(self, name, values, failing=None):
        self.name, self.values, self.failing = name.encode(), values, failing

    def status(self, function):
        return 100 if function == self.failing else 0

    def cuInit(self, flags):
        return self.status("cuInit")

    def cuDeviceGet(self, device, ordinal):
        return self.status("cuDeviceGet")

    def cuDeviceGetName(self, text, length, device):
        ctypes.memmove(text, self.name + b"\0", len(self.name) + 1)
        return 0

    def cuDeviceGetAttribute(self, result, attribute, device):
        ctypes.cast(result, ctypes.POINTER(ctypes.c_int))[0] = self.values[attribute]
        return 0


H200 = {13: 1980000, 16: 132, 36: 3201000, 37: 6144, 38: 50 * 2**20, 75: 9, 76: 0, 81: 233472, 82: 65536, 97: 232448}


def test_local_reads_the_device():
    gpu = gpus.read_device(FakeDriver("NVIDIA H200", H200))
    row = gpus.GPUS["h200"]
    assert gpu.product == "NVIDIA H200"
    assert gpu.memory_gbs == pytest.approx(row.memory_gbs, rel=0.05)
    same = {"name": "h200", "product": row.product, "memory_gbs": row.memory_gbs, "sources": row.sources}
    assert replace(gpu, **same) == row


def test_local_of_another_size_and_of_an_unknown_architecture():
    half = gpus.read_device(FakeDriver("NVIDIA H100 PCIe", H200 | {16: 114}))
    assert (half.sms, half.gpcs, half.max_cluster_size, half.measured) == (114, 8, 16, False)
    unknown = gpus.read_device(FakeDriver("NVIDIA Future", H200 | {75: 13, 16: 10}))
    assert (unknown.arch, unknown.sms, unknown.max_cluster_size) == ("sm_130", 10, 1)


def test_local_mistakes_are_one_clear_line(monkeypatch):
    with pytest.raises(FlashRNNError, match=r"cuInit of the CUDA driver failed with error 100"):
        gpus.read_device(FakeDriver("NVIDIA H200", H200, failing="cuInit"))
    with pytest.raises(FlashRNNError, match=r"compute capability 7.0; the kernels need 7.5"):
        gpus.read_device(FakeDriver("Tesla V100", H200 | {75: 7}))

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(gpus.ctypes, "CDLL", missing)
    with pytest.raises(
        FlashRNNError, match=r"needs an NVIDIA driver, but libcuda.so.1 does not load .* name a GPU"
    ) as e:
        gpus.get("local")
    assert "\n" not in str(e.value)
