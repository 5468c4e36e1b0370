"""ONNX's LSTM, GRU and RNN in NumPy, written from the operators' texts alone: the judge of ``convert``.

``run`` shares nothing with the package, and knows what no engine implements in full: clip on every activation, both GRU
forms, peepholes, input_forget, layouts and ragged lengths. ``node_model`` makes the file that holds one such node.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from flashrnn_deploy.exporters.convert import convert_file
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import is_flashrnn

NUM_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
INPUTS = {
    "LSTM": ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"),
    "GRU": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
    "RNN": ("X", "W", "R", "B", "sequence_lens", "initial_h"),
}
OUTPUTS = {"LSTM": ("Y", "Y_h", "Y_c"), "GRU": ("Y", "Y_h"), "RNN": ("Y", "Y_h")}
ACTIVATIONS = {
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Tanh": np.tanh,
    "Relu": lambda x: np.maximum(x, 0),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
}
DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def run(op: str, attributes: dict[str, Any], feeds: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """Y, Y_h (and Y_c) in float64. Rows end at their length: Y is 0 behind it, the final states are the last valid."""
    f = {k: np.asarray(v, np.float64) for k, v in feeds.items() if v is not None}
    layout, clip = attributes.get("layout", 0), attributes.get("clip", np.inf)
    x = f["X"].swapaxes(0, 1) if layout else f["X"]
    (T, B, _), N, HD = x.shape, f["R"].shape[0], f["R"].shape[2]
    G = NUM_GATES[op]
    names = attributes.get("activations") or DEFAULTS[op] * N
    bias = f.get("B", np.zeros((N, 2 * G * HD)))
    lens = np.asarray(feeds.get("sequence_lens") if feeds.get("sequence_lens") is not None else [T] * B)
    start = [f.get(k, np.zeros((B, N, HD) if layout else (N, B, HD))) for k in ("initial_h", "initial_c")]
    start = [s.swapaxes(0, 1) if layout else s for s in start]
    peepholes = f.get("P", np.zeros((N, 3 * HD)))
    Y, Y_h, Y_c = np.zeros((T, N, B, HD)), np.zeros((N, B, HD)), np.zeros((N, B, HD))
    per = len(DEFAULTS[op])
    for n in range(N):
        acts = [ACTIVATIONS[a] for a in names[n * per : (n + 1) * per]]
        step = [lambda v, a=a: a(np.clip(v, -clip, clip)) for a in acts]
        w, r = f["W"][n].reshape(G, HD, -1), f["R"][n].reshape(G, HD, HD)
        wb, rb = bias[n].reshape(2, G, HD)
        backward = attributes.get("direction", "forward") == "reverse" or n == 1
        for row in range(B):
            h, c = start[0][n, row], start[1][n, row]
            valid = range(int(lens[row]))
            for t in reversed(valid) if backward else valid:
                xw, hr = w @ x[t, row] + wb, r @ h + rb
                if op == "LSTM":
                    p_i, p_o, p_f = peepholes[n].reshape(3, HD)
                    i = step[0](xw[0] + hr[0] + p_i * c)
                    forget = 1 - i if attributes.get("input_forget") else step[0](xw[2] + hr[2] + p_f * c)
                    c_new = forget * c + i * step[1](xw[3] + hr[3])
                    h = step[0](xw[1] + hr[1] + p_o * c_new) * step[2](c_new)
                    c = c_new
                elif op == "GRU":
                    z, reset = step[0](xw[0] + hr[0]), step[0](xw[1] + hr[1])
                    inner = reset * hr[2] if attributes.get("linear_before_reset") else r[2] @ (reset * h) + rb[2]
                    h = (1 - z) * step[1](xw[2] + inner) + z * h
                else:
                    h = step[0](xw[0] + hr[0])
                Y[t, n, row] = h
            Y_h[n, row], Y_c[n, row] = h, c
    if layout:
        Y, Y_h, Y_c = Y.transpose(2, 0, 1, 3), Y_h.swapaxes(0, 1), Y_c.swapaxes(0, 1)
    return (Y, Y_h, Y_c)[: len(OUTPUTS[op])]


def random_feeds(
    op: str, attributes: dict[str, Any], T: int, B: int, width: int, HD: int, seed: int = 0
) -> dict[str, Any]:
    """Every input of one node, float32; R scaled by 1/sqrt(HD); non-zero states; ragged lengths. P is left out."""
    rng = np.random.default_rng(seed)
    N, G = 2 if attributes.get("direction") == "bidirectional" else 1, NUM_GATES[op]
    states = (B, N, HD) if attributes.get("layout") else (N, B, HD)
    feeds = {
        "X": rng.standard_normal((B, T, width) if attributes.get("layout") else (T, B, width)),
        "W": rng.standard_normal((N, G * HD, width)) / np.sqrt(width),
        "R": rng.standard_normal((N, G * HD, HD)) / np.sqrt(HD),
        "B": rng.standard_normal((N, 2 * G * HD)) * 0.5,
        "initial_h": rng.standard_normal(states) * 0.5,
    }
    if op == "LSTM":
        feeds["initial_c"] = rng.standard_normal(states)
    result: dict[str, Any] = {k: v.astype(np.float32) for k, v in feeds.items()}
    result["sequence_lens"] = rng.integers(1, T + 1, B).astype(np.int32)
    return result


def node_model(
    op: str,
    attributes: dict[str, Any],
    feeds: dict[str, Any],
    weights: str = "initializer",
    opset: int = 17,
    outputs: tuple[str, ...] | None = None,
    name: str = "rnn",
) -> onnx.ModelProto:
    """One node. X, lengths and states are graph inputs; W, R, B and P are "initializer", "constant" nodes or "input".

    An input that ``feeds`` lacks is left out of the node: as "" in the middle, dropped at the end.
    """
    names = [n if feeds.get(n) is not None else "" for n in INPUTS[op]]
    while not names[-1]:
        names.pop()
    outputs = OUTPUTS[op] if outputs is None else outputs
    node = helper.make_node(op, names, list(outputs), name=name, **attributes)
    stored = [n for n in names if n in ("W", "R", "B", "P") and weights != "input"]
    tensors = [onnx.numpy_helper.from_array(feeds[n], n) for n in stored]
    nodes = [helper.make_node("Constant", [], [t.name], value=t) for t in tensors] if weights == "constant" else []
    batch = 0 if attributes.get("layout") else 1
    dims = {"X": ["batch", "time"] if batch == 0 else ["time", "batch"], "sequence_lens": ["batch"]}
    inputs = []
    for n in names:
        if n and n not in stored:
            shape: list[Any] = list(feeds[n].shape)
            if n in dims:
                shape[: len(dims[n])] = dims[n]
            elif n.startswith("initial"):
                shape[batch] = "batch"
            inputs.append(helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(feeds[n].dtype), shape))
    elem = helper.np_dtype_to_tensor_dtype(feeds["X"].dtype)
    ranks = dict(zip(OUTPUTS[op], (4, 3, 3), strict=False))
    infos = [helper.make_tensor_value_info(o, elem, [None] * ranks[o]) for o in outputs if o]
    graph = helper.make_graph([*nodes, node], "one", inputs, infos, [] if weights == "constant" else tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8 if opset < 19 else 10)


def session(model: onnx.ModelProto | Path) -> Any:
    """A quiet ONNX Runtime session on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    content = str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run_file(model: onnx.ModelProto | Path, feeds: dict[str, Any]) -> list[np.ndarray]:
    """Run a model in ONNX Runtime on those of ``feeds`` that it takes."""
    s = session(model)
    return s.run(None, {i.name: feeds[i.name] for i in s.get_inputs()})


def max_error(found: Any, expected: Any) -> float:
    """Largest absolute difference over all outputs; a different shape is infinite."""
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if np.shape(a) != np.shape(b):
            return np.inf
        if np.size(a):
            worst = max(worst, float(np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)))))
    return worst


def convert(model: onnx.ModelProto, folder: Path, **options: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The converted model and the report; the files are ``in.onnx`` and ``out.onnx`` of ``folder``."""
    (folder / "in.onnx").write_bytes(model.SerializeToString())
    report = convert_file(folder / "in.onnx", folder / "out.onnx", **options)
    return onnx.load(folder / "out.onnx"), report


def flash_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The ``flashrnn`` nodes of the main graph and of the graphs inside it."""
    return [node for node in walk_nodes(model) if is_flashrnn(node)]
