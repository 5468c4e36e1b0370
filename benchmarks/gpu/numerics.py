"""Errors of the CUDA kernels over long sequences against float64: every cell, dtype and mode, up to 100,000 steps.

python benchmarks/gpu/numerics.py [--build FOLDER] [--steps T] [--modes MODE ...]

One layer of head_dim 64, 4 rows, random inputs that all dtypes hold exactly, states that are not zero. float64 is the
op in PyTorch on the CPU, one process for each cell. Printed: the largest absolute error of y up to a step, and of the
final states relative to the largest value of each.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import configs  # noqa: E402
import grid_configs  # noqa: E402
import torch  # noqa: E402
from judge import Case  # noqa: E402
from library import Library, build  # noqa: E402
from pairs import MODES  # noqa: E402
from run import row_for  # noqa: E402

from flashrnn_deploy.cells import CELLS  # noqa: E402
from flashrnn_deploy.op import DTYPES, FULL_LENGTH, RNNSpec  # noqa: E402
from flashrnn_deploy.recurrence import recurrence  # noqa: E402

HEAD_DIM, BATCH = 64, 4
ENDS = (100, 1_000, 10_000, 100_000)


def layer(cell: str, dtype: str) -> RNNSpec:
    return RNNSpec(cell, 1, HEAD_DIM, 1, dtype)


def inputs(cell: str, steps: int) -> dict[str, torch.Tensor]:
    """Float32 values, those of wx and r exact in all dtypes."""
    generator = torch.Generator().manual_seed(list(CELLS).index(cell))
    shapes = layer(cell, "float32").shapes(steps, BATCH)

    def normal(name: str, scale: float) -> torch.Tensor:
        return torch.randn(shapes[name], generator=generator) * scale

    exact = {
        name: normal(name, scale).to(torch.bfloat16).to(torch.float16).float()
        for name, scale in (("wx", 1.0), ("r", 1 / math.sqrt(HEAD_DIM)))
    }
    states = normal("initial_states", 0.5)
    if cell == "slstm":
        states[2] = states[2].abs() + 1
    return exact | {"b": normal("b", 0.5), "initial_states": states}


def reference(job: tuple[str, int]) -> tuple[Any, Any]:
    cell, steps = job
    torch.set_num_threads(1)
    given = {name: value.double() for name, value in inputs(cell, steps).items()}
    with torch.no_grad():
        y, final = recurrence(
            layer(cell, "float32"), given["wx"], given["r"], given["b"], None, given["initial_states"]
        )
    return y.numpy(), final.numpy()


def errors(lib: Library, mode: str, dtype: str, cell: str, steps: int, exact: Any) -> list[float]:
    """Of y up to each of ENDS, then of the final states, h first."""
    case = Case(layer(cell, dtype), steps, BATCH)
    given = {name: value.cuda() for name, value in inputs(cell, steps).items()}
    for name in ("wx", "r"):
        given[name] = given[name].to(getattr(torch, dtype))
    given["sequence_lens"] = torch.tensor([FULL_LENGTH], dtype=torch.int32, device="cuda")
    call = lib.call(case.spec, given)
    lib.launch(call, row_for(lib, mode, case))
    torch.cuda.synchronize()
    y, final = exact
    error = (call.y.double() - y).abs().flatten(1).amax(1)
    found = [error[:end].max().item() for end in ENDS if end <= steps]
    for ours, true in zip(call.final_states.double(), final, strict=True):
        found.append(((ours - true).abs().max() / true.abs().max()).item())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu", help="build folder")
    parser.add_argument("--steps", type=int, default=ENDS[-1])
    parser.add_argument("--modes", nargs="*", default=MODES, help="these only, in a build folder of their own")
    options = parser.parse_args()
    path = options.build / "libflashrnn_cuda_driver.so"
    rows = [row for row in configs.ROWS + grid_configs.ROWS if row["mode"] in options.modes]
    lib = Library(path if path.is_file() else build(options.build, rows), rows)
    ends = [end for end in ENDS if end <= options.steps]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; head_dim {HEAD_DIM}, B {BATCH}")
    print("| cell | dtype | mode | " + " | ".join(f"y, T <= {end:,}" for end in ends) + " | final states |")
    print("|---" * (len(ends) + 4) + "|")
    wrong = 0
    jobs = [(cell, options.steps) for cell in CELLS]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        for cell, found in zip(CELLS, pool.imap(reference, jobs), strict=True):
            exact = [torch.from_numpy(array).cuda() for array in found]
            for dtype in DTYPES:
                for mode in options.modes:
                    line = errors(lib, mode, dtype, cell, options.steps, exact)
                    wrong += not all(math.isfinite(e) for e in line)
                    states = ", ".join(
                        f"{name} {e:.1e}" for name, e in zip(CELLS[cell].states, line[len(ends) :], strict=True)
                    )
                    texts = " | ".join(f"{e:.1e}" for e in line[: len(ends)])
                    print(f"| {cell} | {dtype} | {mode} | {texts} | {states} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
