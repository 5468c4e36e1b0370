"""FlashLSTM and FlashGRU on the CPU against ONNX Runtime's own LSTM and GRU, side by side.

Both models hold the same weights and contain the input projection: ONNX Runtime's inside its node, ours as a MatMul in
front. One run of each alternates with the other, and the medians are compared, so that whatever else the machine does
hits both. Outputs are compared first: a fast wrong answer is no result.

Each session has a thread pool of its own, whose threads spin for some milliseconds after a run and would take the cores
from the other session's. So each timed run follows a pause and an untimed run of the same session.

    cmake -S . -B build -G Ninja && cmake --build build
    python benchmarks/cpu_vs_onnxruntime.py --library build/libflashrnn.so
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path

import click
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy.op import FULL_LENGTH, RNNSpec, make_node

# Position of each gate of ours in ONNX's order: LSTM i o f c, GRU z r h.
ONNX_GATES = {"lstm": (0, 2, 3, 1), "gru": (1, 0, 2)}
IR_VERSION, OPSET = 8, 17
PAUSE_S = 0.02


def weights(cell: str, hidden: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random W [G, H, I = H], R [G, H, H] and biases [2, G, H] in our gate order."""
    gates = len(ONNX_GATES[cell])
    scale = 1 / np.sqrt(hidden)
    shapes = (gates, hidden, hidden), (gates, hidden, hidden), (2, gates, hidden)
    return tuple(rng.uniform(-scale, scale, shape).astype(np.float32) for shape in shapes)


def stock_model(cell: str, hidden: int, w: np.ndarray, r: np.ndarray, b: np.ndarray) -> onnx.ModelProto:
    """ONNX Runtime's own node."""
    to_onnx = np.argsort(ONNX_GATES[cell])
    constants = {
        "W": w[to_onnx].reshape(1, -1, hidden),
        "R": r[to_onnx].reshape(1, -1, hidden),
        "B": b[:, to_onnx].reshape(1, -1),
    }
    extra = {"linear_before_reset": 1} if cell == "gru" else {}
    node = helper.make_node(cell.upper(), ["x", "W", "R", "B"], ["y"], hidden_size=hidden, **extra)
    return model([node], constants, hidden, 4)


def flash_model(cell: str, batch: int, hidden: int, w: np.ndarray, r: np.ndarray, b: np.ndarray) -> onnx.ModelProto:
    """MatMul, then the FlashRNN op."""
    spec = RNNSpec(cell, num_heads=1, head_dim=hidden)
    bias = b[0] + b[1] if cell == "lstm" else np.stack([*(b[0] + b[1])[:2], b[0, 2], b[1, 2]])
    constants = {
        "W": w.transpose(2, 1, 0).reshape(hidden, -1),
        "r": r.reshape(spec.shapes(1, 1)["r"]),
        "b": bias.reshape(spec.shapes(1, 1)["b"]),
        "lens": np.array([FULL_LENGTH], np.int32),
        "s0": np.zeros(spec.shapes(1, batch)["initial_states"], np.float32),
    }
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["wx"]),
        make_node(spec, ["wx", "r", "b", "lens", "s0"], ["y", "states"]),
    ]
    return model(nodes, constants, hidden, 3)


def model(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], hidden: int, rank: int) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["T", "B", hidden])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * rank)
    initializers = [numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "benchmark", [x], [y], initializers)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid("flashrnn", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=IR_VERSION)


def session(proto: onnx.ModelProto, threads: int, library: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


def compare(cell: str, hidden: int, batch: int, steps: int, threads: int, repeats: int, library: Path) -> dict:
    """Median milliseconds of both models, interleaved."""
    rng = np.random.default_rng(0)
    w, r, b = weights(cell, hidden, rng)
    stock = session(stock_model(cell, hidden, w, r, b), threads, library)
    flash = session(flash_model(cell, batch, hidden, w, r, b), threads, library)
    feed = {"x": rng.standard_normal((steps, batch, hidden)).astype(np.float32)}
    error = np.abs(stock.run(["y"], feed)[0][:, 0] - flash.run(["y"], feed)[0]).max()
    if not error < 1e-4:
        raise click.ClickException(f"{cell} H={hidden} B={batch}: the outputs differ by {error}")
    times: dict[str, list[float]] = {"onnxruntime_ms": [], "flashrnn_ms": []}
    for _ in range(repeats):
        for key, runner in zip(times, (stock, flash), strict=True):
            time.sleep(PAUSE_S)
            runner.run(["y"], feed)
            start = time.perf_counter()
            runner.run(["y"], feed)
            times[key].append(1e3 * (time.perf_counter() - start))
    medians = {key: statistics.median(values) for key, values in times.items()}
    ratio = medians["flashrnn_ms"] / medians["onnxruntime_ms"]
    case = {"cell": cell, "hidden": hidden, "batch": batch, "steps": steps, "threads": threads}
    return {**case, **{k: round(v, 3) for k, v in medians.items()}, "ratio": round(ratio, 3)}


@click.command()
@click.option(
    "--library", type=click.Path(exists=True, resolve_path=True, path_type=Path), required=True, help="libflashrnn.so"
)
@click.option("--cell", "cells", multiple=True, default=("lstm", "gru"), type=click.Choice(["lstm", "gru"]))
@click.option("--hidden", "hiddens", multiple=True, default=(128, 256, 512), type=int)
@click.option("--batch", "batches", multiple=True, default=(1, 16), type=int)
@click.option("--threads", "thread_counts", multiple=True, default=(1, 2), type=int)
@click.option("--steps", default=100, type=click.IntRange(1), help="T")
@click.option("--repeats", default=31, type=click.IntRange(1), help="runs of each model")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object per case")
def main(library, cells, hiddens, batches, thread_counts, steps, repeats, as_json) -> None:
    """Time FlashRNN's CPU kernel against ONNX Runtime's own nodes."""
    if not as_json:
        click.echo(f"onnxruntime {ort.__version__}, {platform.machine()}, T={steps}, medians of {repeats} runs")
        click.echo(f"{'cell':5} {'H':>4} {'B':>3} {'threads':>7} {'onnxruntime':>12} {'flashrnn':>9}  ratio")
    for threads in thread_counts:
        for cell in cells:
            for hidden in hiddens:
                for batch in batches:
                    r = compare(cell, hidden, batch, steps, threads, repeats, library)
                    line = (
                        f"{cell:5} {hidden:4} {batch:3} {threads:7} {r['onnxruntime_ms']:9.2f} ms "
                        f"{r['flashrnn_ms']:6.2f} ms  {r['ratio']:.2f}"
                    )
                    click.echo(json.dumps(r) if as_json else line)


if __name__ == "__main__":
    main()
