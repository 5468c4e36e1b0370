"""A grid of layers on one GPU: the kernel that `solve` chooses for each layer and batch, its prediction, and cuDNN.

python benchmarks/gpu/grid.py --json FILE                 builds the kernels (nvcc, CMake, ninja), checks and times
python benchmarks/gpu/grid.py --only-build --gpu h200     builds them where there is no GPU
python benchmarks/gpu/grid.py --dtypes float32 --batches 1 16
python benchmarks/gpu/tables.py FILE                      the tables of docs/benchmarks.md

Each kernel is compared with float64 over 64 steps, float32 256 (the device tests' judge), and its 1024 timed steps are
to be finite. cuDNN is dense, hence for one head only: in float16, its fast path, beside 16-bit types, and in the dtype
of the row (in bfloat16 for 1 and 16 rows of the batch: every step takes it kernel launches). Losses, and predictions
off by more than a quarter, are named at the end.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import kernels  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
from library import ALTERNATING, Library, build  # noqa: E402
from timing import STEPS, median_us  # noqa: E402

from flashrnn_deploy import gpus, kernel_config, kernel_table, machine  # noqa: E402
from flashrnn_deploy.cells import CELLS  # noqa: E402
from flashrnn_deploy.op import RNNSpec  # noqa: E402

SHAPES = ((1, 64), (12, 64), (1, 128), (6, 128), (1, 256), (3, 256), (1, 512), (1, 768), (1, 1024), (1, 2048))
FLOAT_SHAPES = (*SHAPES[:6], (1, 384), *SHAPES[6:9])
# Over 64 steps of one float32 row, 8192 numbers, PyTorch's own error, which ours is measured by, can be small by luck:
# once 1.03 of what is allowed (Elman, 1x128 B1), where 17 other draws of the same kernel gave 0.61 to 0.96.
CHECKED_STEPS = {"bfloat16": 64, "float16": 64, "float32": 256}
PEERS = ("cudnn_fp16", "cudnn_same")
OFF = 0.25
"""How far a prediction may be from the measured time before it is named."""


def plan(cells: list[str], dtypes: list[str], batches: list[int], gpu: gpus.GPU) -> list[dict[str, Any]]:
    """The solver's choice for each layer and batch; ``row`` is None for the alternating mode."""
    found = []
    for dtype, cell in product(dtypes, cells):
        for (heads, head_dim), batch in product(FLOAT_SHAPES if dtype == "float32" else SHAPES, batches):
            spec = RNNSpec(cell, heads, head_dim, dtype=dtype, normalizer_floor=float(cell == "slstm"))
            solution = kernel_config.solve(spec, batch, gpu)
            row = None
            if solution.config.mode != "alternating":
                row = kernel_table.row(spec, gpu, solution.config)
            found.append({"spec": asdict(spec), "batch": batch, "row": row, "predicted": solution.predicted_step_us})
    return found


def rows_of(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What to compile: each kernel once."""
    return [dict(row) for row in dict.fromkeys(tuple(x["row"].items()) for x in layers if x["row"])]


def measure(lib: Library, layer: dict[str, Any], with_peers: bool) -> dict[str, Any]:
    """A line: the layer, microseconds per step, the error in parts of what is allowed."""
    spec, batch = RNNSpec(**layer["spec"]), layer["batch"]
    index = ALTERNATING if layer["row"] is None else lib.rows.index(layer["row"])
    line = layer | kernels.measure(lib, spec, batch, index, with_peers=False, checked_steps=CHECKED_STEPS[spec.dtype])
    return line | (beside(spec, batch) if with_peers else dict.fromkeys(PEERS))


def beside(spec: RNNSpec, batch: int) -> dict[str, float | None]:
    """cuDNN in float16 and in the dtype of the row."""
    dense, float32 = spec.num_heads == 1, spec.dtype == "float32"
    same = float32 or (spec.dtype == "bfloat16" and batch in (1, 16))
    wanted = ("float16" if dense and not float32 else None, spec.dtype if dense and same else None)
    each = (cudnn(spec.cell, spec.head_dim, batch, dtype) if dtype else None for dtype in wanted)
    return dict(zip(PEERS, each, strict=True))


@functools.cache
def cudnn(cell: str, head_dim: int, batch: int, dtype: str) -> float | None:
    return peers.cudnn(RNNSpec(cell, 1, head_dim), batch, STEPS, getattr(torch, dtype), lambda run: median_us(run, 5))


def show(line: dict[str, Any]) -> str:
    name = f"{line['cell']:>6} {line['dtype']:>9} {line['shape']:>6} B{line['B']:<3} {line['mode']:>11}"
    text = f"{name} {line['error']:5.2f} {line['us']:7.3f} {line['predicted']:7.3f} {line['with_gemm_us']:7.3f}"
    return text + "".join(f" {line[p]:7.2f}" if line[p] else "       -" for p in PEERS)


def verdicts(lines: list[dict[str, Any]]) -> list[str]:
    """What a reader has to know: wrong results, losses, predictions that are off."""
    found = []
    for line in lines:
        name = f"{line['cell']} {line['dtype']} {line['shape']} B{line['B']}"
        if not line["error"] <= 1:
            found.append(f"wrong: {name}, error {line['error']:.2f}")
        slower = [peer for peer in PEERS if line[peer] and line[peer] < line["with_gemm_us"]]
        found += [f"loss: {name}, {line['with_gemm_us']:.3f} with GEMM, {p} {line[p]:.3f}" for p in slower]
        if abs(line["predicted"] / line["us"] - 1) > OFF:
            found.append(f"prediction off: {name}, {line['us']:.3f}, predicted {line['predicted']:.3f}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu-grid", help="build folder")
    parser.add_argument("--gpu", default="local", help="the device, as `solve` names it")
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16"])
    parser.add_argument("--batches", nargs="*", type=int, default=list(kernel_table.BATCHES))
    parser.add_argument("--only-build", action="store_true")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--json", type=Path, help="write the lines here, each as soon as it is known")
    options = parser.parse_args()
    path, planned = options.build / "libflashrnn_cuda_driver.so", options.build / "layers.json"
    if not (path.is_file() and planned.is_file()):  # a library goes with the choices that it was built for
        layers = plan(options.cells, options.dtypes, options.batches, gpus.get(options.gpu))
        build(options.build, rows_of(layers))
        planned.write_text(json.dumps(layers))
    if options.only_build:
        return 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    layers = json.loads(planned.read_text())
    lib = Library(path, rows_of(layers))
    about = f"{torch.cuda.get_device_name()}, driver {machine.nvidia_driver()}, torch {torch.__version__}"
    print(f"{about}, {peers.versions()}; us per step, T = {STEPS}")
    print("  cell     dtype  shape B           mode error    ours  predicted w. GEMM, cuDNN float16, cuDNN same dtype")
    lines, failed = [], []
    for layer in layers:
        spec = layer["spec"]
        if spec["cell"] in options.cells and spec["dtype"] in options.dtypes and layer["batch"] in options.batches:
            try:
                lines.append(measure(lib, layer, not options.no_peers))
            except RuntimeError as error:
                failed.append(f"wrong: {RNNSpec(**spec)} B{layer['batch']}: {error}")
                continue
            print(show(lines[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps({"about": about, "lines": lines}))
    found = failed + verdicts(lines)
    print("\n".join([*found, f"{len(lines)} lines, {len(found)} to look at"]))
    return int(any(text.startswith("wrong") for text in found))


if __name__ == "__main__":
    sys.exit(main())
