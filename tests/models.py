"""Small models around the op: projection -> one cell -> projection, with states in and out and the metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from cases import NUMPY_DTYPES
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy import functions
from flashrnn_deploy.op import DOMAIN, DTYPES, FULL_LENGTH, OPSET_VERSION, RNNSpec, make_node

IN, OUT = 5, 3


def network(
    spec: RNNSpec,
    states: bool = True,
    lens: bool = False,
    metadata: bool = True,
    body: bool = True,
    seed: int = 0,
    **names: str,
) -> onnx.ModelProto:
    """x [time, batch, 5] -> MatMul, op, MatMul -> out [time, batch, 3] (layout 1: [batch, time, ...]).

    Args:
        spec: of the op.
        states: state0 and state1 are an input and an output; otherwise the initial state is a zero of batch 2.
        lens: the lengths are the input ``lens`` (int64); otherwise every row is full.
        metadata: write flashrnn.states and flashrnn.axes.
        body: append the function body.
        seed: of the weights.
        names: other names for tensors, by their name here (``out="../x"``).
    """
    rng = np.random.default_rng(seed)
    dtype, elem = NUMPY_DTYPES[spec.dtype], DTYPES[spec.dtype]
    shapes = spec.shapes(1, 2)
    weights = {
        "w_in": (rng.standard_normal((IN, shapes["wx"][2])) / np.sqrt(IN)).astype(dtype),
        "w_out": (rng.standard_normal((shapes["y"][2], OUT)) / np.sqrt(shapes["y"][2])).astype(dtype),
        "r": (rng.standard_normal(shapes["r"]) / np.sqrt(spec.head_dim)).astype(dtype),
        "b": (rng.standard_normal(shapes["b"]) * 0.5).astype(np.float32),
    }
    if not lens:
        weights["lens32"] = np.asarray([FULL_LENGTH], np.int32)
    if not states:
        weights["state0"] = np.zeros(shapes["initial_states"], np.float32)
    name = {n: names.get(n, n) for n in ("x", "lens", "state0", "state1", "out")}
    lead = ["batch", "time"] if spec.layout else ["time", "batch"]
    state_dims: list[Any] = [*shapes["initial_states"][:2], "batch", shapes["initial_states"][3]]
    nodes = [
        helper.make_node("MatMul", [name["x"], "w_in"], ["wx"], name="project"),
        make_node(spec, ["wx", "r", "b", "lens32", name["state0"]], ["y", name["state1"]], name="rnn"),
        helper.make_node("MatMul", ["y", "w_out"], [name["out"]], name="head"),
    ]
    inputs = [helper.make_tensor_value_info(name["x"], elem, [*lead, IN])]
    outputs = [helper.make_tensor_value_info(name["out"], elem, [*lead, OUT])]
    if lens:
        nodes.insert(0, helper.make_node("Cast", [name["lens"]], ["lens32"], to=TensorProto.INT32))
        inputs.append(helper.make_tensor_value_info(name["lens"], TensorProto.INT64, ["batch"]))
    if states:
        inputs.append(helper.make_tensor_value_info(name["state0"], TensorProto.FLOAT, state_dims))
        outputs.append(helper.make_tensor_value_info(name["state1"], TensorProto.FLOAT, state_dims))
    graph = helper.make_graph(
        nodes, "network", inputs, outputs, [numpy_helper.from_array(v, k) for k, v in weights.items()]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    if body:
        functions.add_functions(model)
    if metadata:
        time, batch = lead.index("time"), lead.index("batch")
        sequence = {"time": time, "batch": batch}
        axes: dict[str, Any] = {name["x"]: sequence, name["out"]: sequence}
        if lens:
            axes[name["lens"]] = {"time": None, "batch": 0}
        if states:
            axes |= {key: {"time": None, "batch": 2} for key in (name["state0"], name["state1"])}
            set_metadata(model, "flashrnn.states", {name["state0"]: name["state1"]})
        set_metadata(model, "flashrnn.axes", axes)
    return model


def set_metadata(model: onnx.ModelProto, key: str, value: Any) -> None:
    """Write a JSON value under ``key``, in place of an older one."""
    kept = [p for p in model.metadata_props if p.key != key]
    del model.metadata_props[:]
    model.metadata_props.extend([*kept, onnx.StringStringEntryProto(key=key, value=json.dumps(value))])


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write the model and give the path back."""
    path.write_bytes(model.SerializeToString())
    return path
