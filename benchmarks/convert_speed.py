"""Time and peak memory of ``convert``, each file in a process of its own.

    python benchmarks/convert_speed.py            # generated models of 50 MB
    python benchmarks/convert_speed.py A.onnx ... # these files

Peak memory is the resident set's high-water mark during the conversion above the resident set right before it (all
modules imported), read from /proc, so Linux only. The bounds to hold: 10 s, and 3 times the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MAX_SECONDS, MAX_RATIO = 10.0, 3.0
_MEASURE = """
import json, re, sys, time
from pathlib import Path
import onnx.reference
try:
    import onnxruntime
except ImportError:
    onnxruntime = None
from flashrnn_deploy.exporters.convert import convert_file
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024
source, output = Path(sys.argv[1]), Path(sys.argv[2])
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
start = time.perf_counter()
report = convert_file(source, output, expose_states=True)
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "peak": status("VmHWM") - before, "rewritten": report["rewritten"]}))
"""


def stack(num_layers: int, hidden: int, opset: int, as_constants: bool = False) -> onnx.ModelProto:
    """LSTM layers of equal width, Squeeze between them; about ``num_layers * 32 * hidden**2`` bytes."""
    rng = np.random.default_rng(0)
    nodes, tensors, x = [], [], "x"
    axes = {} if opset >= 13 else {"axes": [1]}
    if opset >= 13:
        tensors.append(numpy_helper.from_array(np.array([1]), "axis"))
    for k in range(num_layers):
        shapes = {"W": (1, 4 * hidden, hidden), "R": (1, 4 * hidden, hidden), "B": (1, 8 * hidden)}
        for letter, shape in shapes.items():
            array = rng.standard_normal(shape, np.float32) * 0.02
            tensor = numpy_helper.from_array(array, f"{letter}{k}")
            if as_constants:
                nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
            else:
                tensors.append(tensor)
        weights = [f"{letter}{k}" for letter in shapes]
        nodes.append(helper.make_node("LSTM", [x, *weights], [f"y{k}"], name=f"lstm_{k}", hidden_size=hidden))
        squeeze = [f"y{k}"] if axes else [f"y{k}", "axis"]
        x = f"x{k}"
        nodes.append(helper.make_node("Squeeze", squeeze, [x], **axes))
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["time", "batch", hidden]) for n in ("x", x)]
    graph = helper.make_graph(nodes, "stack", info[:1], info[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def convolutions(opset: int) -> onnx.ModelProto:
    """Mostly other weights: a 45 MB MatMul in front of one small LSTM, as recognition models are."""
    model = stack(1, 384, opset)
    big = np.random.default_rng(1).standard_normal((384, 30000), np.float32)
    model.graph.initializer.append(numpy_helper.from_array(big, "big"))
    model.graph.node.append(helper.make_node("MatMul", ["x0", "big"], ["wide"]))
    model.graph.output.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, ["time", "batch", 30000]))
    return model


def measure(source: Path, folder: Path) -> dict[str, float]:
    """Convert one file in a child process: seconds, peak bytes above idle, nodes rewritten."""
    command = [sys.executable, "-c", _MEASURE, str(source), str(folder / "out.onnx")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout)
    return result


def main(paths: list[str]) -> int:
    generated = {
        "6 LSTM, H=512, opset 17": lambda: stack(6, 512, 17),
        "6 LSTM, H=512, opset 11": lambda: stack(6, 512, 11),
        "1 LSTM, H=1250, opset 17": lambda: stack(1, 1250, 17),
        "6 LSTM, H=512, weights as Constant nodes": lambda: stack(6, 512, 17, as_constants=True),
        "1 LSTM, H=384, and a MatMul, opset 13": lambda: convolutions(13),
    }
    worst = 0
    print(f"{'model':45} {'MB':>6} {'nodes':>5} {'s':>6} {'peak MB':>8} {'peak/file':>9}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in paths or generated:
            source = Path(name) if paths else folder / "in.onnx"
            if not paths:
                source.write_bytes(generated[name]().SerializeToString())
            size = source.stat().st_size
            found = measure(source, folder)
            ratio = found["peak"] / size
            good = found["seconds"] < MAX_SECONDS and ratio < MAX_RATIO
            print(
                f"{name[-45:]:45} {size / 1e6:6.1f} {found['rewritten']:5} {found['seconds']:6.2f} "
                f"{found['peak'] / 1e6:8.1f} {ratio:9.2f}{'' if good else '  OVER THE BOUND'}"
            )
            worst |= not good
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
