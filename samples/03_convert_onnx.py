"""Replace the LSTM node of an existing ONNX file, here one made by hand, and compare both files."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy.exporters import convert_file

rng = np.random.default_rng(0)
weights = {"W": (1, 4 * 12, 6), "R": (1, 4 * 12, 12), "B": (1, 8 * 12)}
graph = helper.make_graph(
    [helper.make_node("LSTM", ["x", "W", "R", "B"], ["y", "h"], name="lstm", hidden_size=12)],
    "old",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", 6])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["time", 1, "batch", 12])],
    [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32) * 0.3, n) for n, s in weights.items()],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "old.onnx")

report = convert_file(Path("old.onnx"), Path("new.onnx"))
x = rng.standard_normal((9, 2, 6)).astype(np.float32)
old, new = (
    onnxruntime.InferenceSession(name, providers=["CPUExecutionProvider"]).run(["y"], {"x": x})[0]
    for name in ("old.onnx", "new.onnx")
)
print(f"rewritten {report['rewritten']}, left {report['left']}, largest difference {np.abs(old - new).max():.1e}")
assert report["rewritten"] == 1
assert np.abs(old - new).max() < 1e-5
