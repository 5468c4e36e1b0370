"""What the function body costs on a CPU, beside ONNX Runtime's own LSTM and the plugin library.

cmake -S . -B build -G Ninja && cmake --build build
python benchmarks/function_body.py --library build/libflashrnn.so
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy import register
from flashrnn_deploy.exporters import convert_file

STEPS, WIDTH, REPEATS, PAUSE_S = 64, 64, 9, 0.02


def lstm(hidden: int) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    shapes = {"W": (1, 4 * hidden, WIDTH), "R": (1, 4 * hidden, hidden), "B": (1, 8 * hidden)}
    graph = helper.make_graph(
        [helper.make_node("LSTM", ["x", *shapes], ["y"], name="lstm", hidden_size=hidden)],
        "lstm",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["time", 1, "batch", hidden])],
        [
            numpy_helper.from_array((rng.standard_normal(s) / np.sqrt(hidden)).astype(np.float32), n)
            for n, s in shapes.items()
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def session(path: Path, library: Path | None = None) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    if library is not None:
        register(options, library)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=Path, required=True)
    library = parser.parse_args().library
    print(f"ONNX Runtime {ort.__version__}, one thread, float32, T = {STEPS}: microseconds per step, medians")
    print(" H    B   own LSTM    body   library   body/own   body/library")
    for hidden in (128, 256, 512):
        with tempfile.TemporaryDirectory() as folder:
            old, new = Path(folder) / "old.onnx", Path(folder) / "new.onnx"
            onnx.save(lstm(hidden), old)
            convert_file(old, new)
            sessions = (session(old), session(new), session(new, library))
        for batch in (1, 16):
            x = np.random.default_rng(1).standard_normal((STEPS, batch, WIDTH)).astype(np.float32)
            expected = sessions[0].run(None, {"x": x})[0]
            times: list[list[float]] = [[], [], []]
            for _ in range(REPEATS):
                for row, one in zip(times, sessions, strict=True):
                    time.sleep(PAUSE_S)
                    assert np.abs(one.run(None, {"x": x})[0] - expected).max() < 1e-4
                    start = time.perf_counter()
                    one.run(None, {"x": x})
                    row.append((time.perf_counter() - start) * 1e6 / STEPS)
            own, body, ours = (float(np.median(row)) for row in times)
            print(f"{hidden:3} {batch:4} {own:10.1f} {body:7.1f} {ours:9.1f} {body / own:10.1f} {body / ours:14.1f}")


if __name__ == "__main__":
    main()
