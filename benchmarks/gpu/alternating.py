"""The alternating mode beside what a framework would run: layers whose R does not stay on chip. us per step.

python benchmarks/gpu/alternating.py                  builds the kernels (needs nvcc, CMake, ninja), checks and times
python benchmarks/gpu/alternating.py --build FOLDER   builds there, or takes the library that is there

Every output is compared with float64 first (the device tests' judge). Then the engines take turns, each timed between
CUDA events behind an untimed call of its own; medians.

* loop: a product of cuBLAS and PyTorch's fused pointwise kernel in every step, T steps in one CUDA graph, dtype of the
  row. GRU and LSTM; it has no lengths and no states in float32;
* cuDNN: torch.nn on packed weights, float16, one head. Its figure contains the input projection, for which torch's GEMM
  is added to ours.

"R from memory" is what reading R once takes at the device memory's 4.8 TB/s, the figure to beat for what does not stay
on chip. A ratio below 1 is a loss.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import peers  # noqa: E402
import torch  # noqa: E402
from judge import Case, judge, references, tensors  # noqa: E402
from library import ALTERNATING, Library, build  # noqa: E402

from flashrnn_deploy.op import RNNSpec  # noqa: E402

BANDWIDTH = 4.8e6  # bytes per us
LARGE = ((1, 3072), (1, 4096), (8, 1024), (16, 1024), (4, 2048))
LAYERS = (
    *(("lstm", "bfloat16", *layer, batch) for layer in LARGE for batch in (1, 4, 16, 64)),
    *(("lstm", "bfloat16", 1, size, 64) for size in (1024, 2048)),
    *(("lstm", "float16", 1, 3072, batch) for batch in (1, 16, 64)),
    *(("gru", "bfloat16", 1, 4096, batch) for batch in (1, 16, 64)),
    *(("lstm", "float32", 1, size, batch) for size in (768, 1024, 2048) for batch in (1, 16, 64)),
)


def times(engines: dict[str, Callable[[], Any]], steps: int, repeats: int) -> dict[str, float]:
    """Medians of calls that take turns, us per step."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, run in engines.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            run()
            begin.record()
            run()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end))
    return {name: statistics.median(values) * 1000 / steps for name, values in found.items()}


def loop(spec: RNNSpec, batch: int, steps: int) -> Callable[[], Any]:
    """Replays a graph of products and fused pointwise kernels; heads are a batch of products."""
    H, D, G = spec.num_heads, spec.head_dim, spec.definition.num_gates
    options = {"device": "cuda", "dtype": getattr(torch, spec.dtype)}
    wx = torch.randn(steps, H * batch, G * D, **options)
    r = torch.randn(H, G * D, D, **options) / D**0.5
    h, c = (torch.zeros(H * batch, D, **options) for _ in range(2))

    def run() -> list[torch.Tensor]:
        hidden, cell, outputs = h, c, []
        for t in range(steps):
            gates = torch.bmm(hidden.view(H, batch, D), r.transpose(1, 2)).view(H * batch, G * D)
            if spec.cell == "lstm":
                hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(wx[t], gates, cell)
            else:
                hidden, _ = torch.ops.aten._thnn_fused_gru_cell(wx[t], gates, hidden)
            outputs.append(hidden)
        return outputs

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        kept = run()

    def replay() -> list[torch.Tensor]:
        graph.replay()
        return kept  # and with it the graph's memory

    return replay


def measure(lib: Library, spec: RNNSpec, batch: int, steps: int, repeats: int) -> dict[str, float]:
    case = Case(spec, steps, batch, seed=1)
    given = tensors(case)
    call = lib.call(spec, given)
    lib.launch(call, ALTERNATING)
    torch.cuda.synchronize()
    verdict = judge(case, *references(case, given), call.y, call.final_states)
    engines = {"ours": lambda: lib.launch(call, ALTERNATING), "loop": loop(spec, batch, steps)}
    if spec.num_heads == 1:  # cuDNN is dense
        x = torch.randn(steps * batch, spec.head_dim, device="cuda", dtype=given["wx"].dtype)
        weight = torch.randn(spec.head_dim, given["wx"].shape[2], device="cuda", dtype=x.dtype) / spec.head_dim**0.5
        out = given["wx"].flatten(0, 1)

        def with_gemm() -> None:
            torch.mm(x, weight, out=out)
            lib.launch(call, ALTERNATING)

        engines["with_gemm"] = with_gemm
    line = times(engines, steps, repeats)
    dtype = torch.float32 if spec.dtype == "float32" else torch.float16
    peer = peers.cudnn(spec, batch, steps, dtype, lambda run: times({"cudnn": run}, steps, repeats)["cudnn"])
    return line | ({} if peer is None else {"cudnn": peer}) | {"error": verdict.worst}


def ratio(peer: float | None, ours: float | None) -> str:
    if peer is None or ours is None:
        return "-"
    times_faster = peer / ours
    text = f"{peer:.1f} ({times_faster:.2f}x)"
    return text if times_faster >= 1 else f"**{text[:-1]}, a loss)**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu-alternating", help="build folder")
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    path = options.build / "libflashrnn_cuda_driver.so"
    lib = Library(path if path.is_file() else build(options.build, []), [])
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {peers.versions()}; T = {options.steps}")
    print(
        "| cell, dtype | heads x D, batch | R, MB | R from memory | ours | loop | ours with GEMM | cuDNN | error |\n"
        + "|---" * 9
        + "|"
    )
    wrong = 0
    for cell, dtype, heads, head_dim, batch in LAYERS:
        spec = RNNSpec(cell, heads, head_dim, dtype=dtype)
        line = measure(lib, spec, batch, options.steps, options.repeats)
        size = heads * head_dim**2 * spec.definition.num_gates * (4 if dtype == "float32" else 2)
        both = f"{line['with_gemm']:.2f}" if heads == 1 else "-"
        print(
            f"| {cell}, {dtype} | {heads}x{head_dim} B{batch} | {size / 1e6:.0f} | {size / BANDWIDTH:.1f} "
            f"| {line['ours']:.2f} | {ratio(line['loop'], line['ours'])} | {both} "
            f"| {ratio(line.get('cudnn'), line.get('with_gemm'))} | {line['error']:.2f} |",
            flush=True,
        )
        wrong += not line["error"] <= 1
        torch.cuda.empty_cache()
    print(f"{len(LAYERS)} lines, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
