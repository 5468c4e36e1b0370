"""Time per step of the CUDA kernels beside the engines a user would pick instead, on one GPU, checked first.

python benchmarks/gpu/kernels.py [--cells CELL ...] [--json FILE]

Every shape of docs/benchmarks.md: the kernel that the library chooses is compared with float64 (the device tests'
judge), then timed; so are the peers, in the same process:

* cuDNN through torch.nn (packed weights), in float16 (its fast path) and in the dtype of the row; its figure contains
  the input projection;
* FlashRNN 1.0.8, where it is installed and builds;
* ONNX Runtime's own LSTM and GRU on its CUDA execution provider, where onnxruntime-gpu is installed.

"with GEMM" adds the input projection of an input as wide as the hidden state, by torch, to our launch. Medians of
single launches between CUDA events. A ratio below 1 is a loss and is marked with "!".
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import configs  # noqa: E402
import grid_configs  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
from judge import Case, judge, references, tensors  # noqa: E402
from library import ALTERNATING, Library, build  # noqa: E402
from timing import STEPS, median_us  # noqa: E402

from flashrnn_deploy.op import RNNSpec  # noqa: E402

SHAPES = (
    (1, 64, 1), (12, 64, 16), (12, 64, 64), (1, 128, 1), (1, 128, 16), (6, 128, 16),
    (1, 256, 1), (1, 256, 16), (3, 256, 16), (1, 512, 1), (1, 512, 16),
    (1, 768, 1), (1, 768, 16), (1, 1024, 1), (1, 1024, 16), (1, 2048, 1), (1, 2048, 8),
)  # fmt: skip


def error(lib: Library, case: Case, row: int) -> float:
    """The largest error against float64, in parts of what is allowed."""
    given = tensors(case)
    call = lib.call(case.spec, given)
    lib.launch(call, row)
    torch.cuda.synchronize()
    return judge(case, *references(case, given), call.y, call.final_states).worst


def measure(
    lib: Library,
    spec: RNNSpec,
    B: int,
    row: int | None = None,
    with_peers: bool = True,
    checked_steps: int = STEPS,
) -> dict[str, Any]:
    """One line of the table: the kernel that the library chooses, or a given one."""
    case = Case(spec, STEPS, B, seed=1)
    given = tensors(case)
    call = lib.call(spec, given)
    row = lib.choose(call) if row is None else row
    wrong = error(lib, replace(case, T=checked_steps), row)
    dtype, width = given["wx"].dtype, spec.num_directions * spec.hidden_size
    x = torch.randn(STEPS, B, width, device="cuda", dtype=dtype)
    weight = torch.randn(width, given["wx"].shape[2], device="cuda", dtype=dtype) / width**0.5
    out = given["wx"].flatten(0, 1)

    def with_gemm() -> None:
        torch.mm(x.flatten(0, 1), weight, out=out)
        lib.launch(call, row)

    line = {
        "cell": spec.cell,
        "dtype": spec.dtype,
        "shape": f"{spec.num_heads}x{spec.head_dim}",
        "B": B,
        "N": spec.num_directions,
        "mode": "alternating" if row == ALTERNATING else lib.rows[row]["mode"],
        "us": median_us(lambda: lib.launch(call, row)),
        "error": wrong if call.y.isfinite().all() else math.nan,  # the outputs of all steps were NaN before
        "with_gemm_us": median_us(with_gemm),
    }
    return line | (peers.measure(spec, B, STEPS, median_us) if with_peers else {})


def cases(lib: Library) -> list[tuple[RNNSpec, int]]:
    def spec(cell: str, dtype: str, heads: int, D: int, N: int = 1) -> RNNSpec:
        return RNNSpec(cell, heads, D, N, dtype, normalizer_floor=float(cell == "slstm"))

    found = [(spec(c, "bfloat16", h, d), b) for c in ("lstm", "gru", "slstm", "elman") for h, d, b in SHAPES]
    found += [(spec("lstm", "float16", h, d), b) for h, d, b in SHAPES]
    both = ((1, 64, 1), (1, 128, 16), (1, 256, 1), (1, 256, 16), (1, 512, 1))
    found += [(spec(c, "float16", h, d, 2), b) for c in ("lstm", "gru") for h, d, b in both]
    return found + [(spec("lstm", "float32", 1, d), b) for d in (64, 256, 512) for b in (1, 16)]


def show(line: dict[str, Any]) -> str:
    texts = [f"{line[k]:>{w}}" for k, w in (("cell", 6), ("dtype", 9), ("shape", 7), ("B", 3), ("N", 2), ("mode", 12))]
    texts += [f"{line['error']:5.2f}", f"{line['us']:8.3f}", f"{line['with_gemm_us']:8.3f}"]
    for name in peers.NAMES:
        value = line.get(name)
        if value is None:
            texts.append(f"{'-':>16}")
        else:
            ratio = value / line["with_gemm_us" if peers.HAS_PROJECTION[name] else "us"]
            texts.append(f"{value:7.2f} {ratio:5.1f}x{' ' if ratio >= 1 else '!'}")
    return "  ".join(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu", help="build folder")
    parser.add_argument("--json", type=Path, help="also write the lines here")
    parser.add_argument("--cells", nargs="*", help="only these cells")
    parser.add_argument("--modes", nargs="*", help="only kernels of these modes; what they do not serve is left out")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    path = options.build / "libflashrnn_cuda_driver.so"
    rows = [r for r in configs.ROWS + grid_configs.ROWS if not options.modes or r["mode"] in options.modes]
    lib = Library(path if path.is_file() else build(options.build, rows), rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {peers.versions()}; us per step, T = {STEPS}")
    print(
        "  cell      dtype    shape   B   N          mode  error     ours  w. GEMM  "
        + "  ".join(f"{n:>15}" for n in peers.NAMES)
    )
    lines = []
    for spec, B in cases(lib):
        if options.cells and spec.cell not in options.cells:
            continue
        if options.modes and not lib.serves(spec, options.modes):
            continue
        lines.append(measure(lib, spec, B, with_peers=not options.no_peers))
        print(show(lines[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(lines, indent=1))
    wrong = [line for line in lines if not line["error"] <= 1]
    print(f"{len(lines)} lines, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
