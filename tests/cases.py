"""Seeded cases of one op, shared by the tests: tensors, and a model that holds one node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from ml_dtypes import bfloat16
from onnx import TensorProto, helper

from flashrnn_deploy import functions
from flashrnn_deploy.op import DOMAIN, DTYPES, INPUTS, OPSET_VERSION, OUTPUTS, RNNSpec, make_node

NUMPY_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(bfloat16)}


def tensors(
    spec: RNNSpec, T: int, B: int, lens: Any = None, seed: int = 0, scale: float = 1.0
) -> dict[str, np.ndarray]:
    """The five inputs: non-zero states and biases, ``r`` scaled by 1/sqrt(D), a positive sLSTM normalizer."""
    rng = np.random.default_rng(seed)
    shapes, dtype = spec.shapes(T, B), NUMPY_DTYPES[spec.dtype]
    states = rng.standard_normal(shapes["initial_states"]) * 0.5 * scale
    if spec.cell == "slstm":
        states[2] = np.abs(states[2]) + 1.0
    lens = [T] * B if lens is None else lens
    return {
        "wx": rng.standard_normal(shapes["wx"]).astype(dtype),
        "r": (rng.standard_normal(shapes["r"]) / np.sqrt(spec.head_dim)).astype(dtype),
        "b": (rng.standard_normal(shapes["b"]) * 0.5).astype(np.float32),
        "sequence_lens": np.asarray(lens, np.int32),
        "initial_states": states.astype(np.float32),
    }


def model(spec: RNNSpec, opset: int = 17, body: bool = True) -> onnx.ModelProto:
    """One node with dynamic T and B, every tensor an input of the graph."""
    wx_type, f32 = DTYPES[spec.dtype], TensorProto.FLOAT
    lead = ["batch", "time"] if spec.layout else ["time", "batch"]
    shapes = spec.shapes(0, 0)
    types = {"wx": wx_type, "r": wx_type, "b": f32, "sequence_lens": TensorProto.INT32, "initial_states": f32}
    dims: dict[str, list[Any]] = {
        "wx": [*lead, shapes["wx"][2]],
        "r": list(shapes["r"]),
        "b": list(shapes["b"]),
        "sequence_lens": ["lens"],
        "initial_states": [*shapes["initial_states"][:2], "batch", shapes["initial_states"][3]],
    }
    graph = helper.make_graph(
        [make_node(spec, INPUTS, OUTPUTS, name="rnn")],
        "one_node",
        [helper.make_tensor_value_info(n, types[n], dims[n]) for n in INPUTS],
        [
            helper.make_tensor_value_info("y", wx_type, [*lead, shapes["y"][2]]),
            helper.make_tensor_value_info("final_states", f32, dims["initial_states"]),
        ],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, OPSET_VERSION)]
    result = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    if body:
        functions.add_functions(result)
    return result
