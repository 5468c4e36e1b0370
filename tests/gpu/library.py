"""The CUDA kernels from Python: build the test driver, call it through ctypes with torch tensors."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.op import DTYPES, RNNSpec

FIELDS = (
    "cell", "dtype", "compute_capability", "min_batch", "max_batch", "clips", "mode", "padded_head_dim",
    "cluster_size", "units_per_block", "batch_tile", "tiles_per_block", "row_warps", "k_warps", "register_k_steps",
    "accumulator_sets", "ring_depth", "replicas", "spare_warp",
)  # fmt: skip
"""The values of one line of kernel_configs.inc, in order (plugins/kernels/cuda/config.h)."""

ALTERNATING = -1


def render(**values: Any) -> str:
    """One line of kernel_configs.inc."""
    names = {"cell": {c: f"k{c.capitalize()}" for c in CELLS}, "dtype": {d: f"k{d.capitalize()}" for d in DTYPES}}
    names["mode"] = {"local": "kLocal", "cluster": "kCluster", "grid": "kGrid"}
    texts = [str(names[f][values[f]] if f in names else int(values[f])) for f in FIELDS]
    return f"FLASHRNN_KERNEL({', '.join(texts)})"


def build(folder: Path, rows: Sequence[dict[str, Any]], architectures: str = "90a", ptx: str = "") -> Path:
    """Compile the driver with these kernels, as PTX of one target where ``ptx`` names it. Returns the library.

    Needs nvcc, CMake and ninja.
    """
    configure(folder, rows, architectures, ptx)
    subprocess.run(["cmake", "--build", folder, "--parallel", str(os.cpu_count())], check=True)
    return folder / "libflashrnn_cuda_driver.so"


def configure(folder: Path, rows: Sequence[dict[str, Any]], architectures: str = "90a", ptx: str = "") -> None:
    """What ``build`` does first."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = folder / "kernel_configs.inc"
    configs.write_text("".join(f"{render(**row)}\n" for row in rows))
    options = {
        "FLASHRNN_CUDA_ARCHITECTURES": architectures,
        "FLASHRNN_KERNEL_CONFIGS": configs.resolve(),
        "FLASHRNN_PTX": ptx,
        "FLASHRNN_KERNELS_PER_FILE": 1 if ptx else 4,  # the driver compiles a file when its first kernel runs
    }
    flags = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-S", Path(__file__).parent, "-B", folder, "-G", "Ninja", *flags], check=True)


class Attributes(ctypes.Structure):
    _fields_ = [
        ("layout", ctypes.c_int),
        ("reverse", ctypes.c_int),
        ("clip", ctypes.c_float),
        ("relu", ctypes.c_int),
        ("normalizer_floor", ctypes.c_float),
    ]


class Params(ctypes.Structure):
    """Mirror of plugins/kernels/op.h; loading checks its size."""

    _fields_ = [
        ("cell", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("attributes", Attributes),
        *[(name, ctypes.c_int64) for name in "TBNHD"],
        ("wx", ctypes.c_void_p),
        ("r", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("sequence_lens", ctypes.c_void_p),
        ("num_lens", ctypes.c_int64),
        ("initial_states", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("final_states", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Call:
    """One call of the op on device tensors, with outputs and workspace of its own."""

    params: Params
    tensors: dict[str, Any]
    y: Any
    final_states: Any
    workspace: Any


class Library:
    def __init__(self, path: Path, rows: Sequence[dict[str, Any]]) -> None:
        self._lib = ctypes.CDLL(str(path.resolve()))
        for name in ("workspace_bytes", "max_workspace_bytes", "params_bytes"):
            getattr(self._lib, name).restype = ctypes.c_size_t
        self._lib.error_text.restype = ctypes.c_char_p
        if self._lib.params_bytes() != ctypes.sizeof(Params):
            raise RuntimeError("Params of library.py and of op.h differ")
        if self._lib.num_kernels() != len(rows):
            raise RuntimeError(f"{path} holds {self._lib.num_kernels()} kernels, expected {len(rows)}: build it again")
        self.rows = list(rows)

    def call(self, spec: RNNSpec, tensors: dict[str, Any]) -> Call:
        """Prepare a call. Outputs and workspace start as NaN bits."""
        import torch

        T, B = tensors["wx"].shape[1 if spec.layout else 0], tensors["wx"].shape[0 if spec.layout else 1]
        shapes = spec.shapes(T, B)
        wx = tensors["wx"]
        y = poisoned(torch.empty(shapes["y"], dtype=wx.dtype, device=wx.device))
        final = poisoned(torch.empty(shapes["final_states"], dtype=torch.float32, device=wx.device))
        attributes = Attributes(spec.layout, spec.reverse, spec.clip, spec.relu, spec.normalizer_floor)
        params = Params(
            list(CELLS).index(spec.cell), list(DTYPES).index(spec.dtype), attributes,
            T, B, spec.num_directions, spec.num_heads, spec.head_dim,
            *(tensors[n].data_ptr() for n in ("wx", "r", "b", "sequence_lens")), len(tensors["sequence_lens"]),
            tensors["initial_states"].data_ptr(), y.data_ptr(), final.data_ptr(),
        )  # fmt: skip
        size = self._lib.max_workspace_bytes(ctypes.byref(params))  # enough for any row
        workspace = poisoned(torch.empty(size, dtype=torch.uint8, device=wx.device))
        if self._lib.workspace_bytes(ctypes.byref(params)) > size:
            raise RuntimeError("workspace_bytes is larger than max_workspace_bytes")
        return Call(params, tensors, y, final, workspace)

    def launch(self, call: Call, row: int | None = None) -> None:
        """Launch on torch's current stream: the row that the library chooses, or a given one."""
        import torch

        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        workspace = ctypes.c_void_p(call.workspace.data_ptr())
        if row is None:
            error = self._lib.launch(ctypes.byref(call.params), workspace, stream)
        else:
            error = self._lib.launch_row(row, ctypes.byref(call.params), workspace, stream)
        if error:
            raise RuntimeError(f"launch of row {row}: {self._lib.error_text(error).decode()}")

    def serves(self, spec: RNNSpec, modes: Sequence[str]) -> bool:
        """Whether a row of these modes is made for this layer's size."""
        same = (r for r in self.rows if (r["cell"], r["dtype"], r["clips"]) == (spec.cell, spec.dtype, spec.clip > 0))
        return any(r["mode"] in modes and r["padded_head_dim"] == -(-spec.head_dim // 32) * 32 for r in same)

    def choose(self, call: Call) -> int:
        return int(self._lib.choose_kernel(ctypes.byref(call.params)))

    def resident(self, row: int) -> int:
        return int(self._lib.resident(row))


def stale(workspace: Any, which: int) -> Any:
    """Fill with what a grid kernel could take for h of its own: short packets, long ones, their steps."""
    import torch

    words = (0x00004000, 0x40004000, 0x3F803F80, 1)
    workspace[: workspace.numel() // 4 * 4].view(torch.int32).fill_(words[which % len(words)])
    return workspace


def poisoned(tensor: Any) -> Any:
    """Fill with bytes that are NaN in every float dtype."""
    import torch

    if tensor.numel():
        tensor.view(torch.uint8).fill_(0xFF)
    return tensor
