"""A float64 copy of a model: what the judge of ``verify`` evaluates."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from flashrnn_deploy.graph import walk_graphs
from flashrnn_deploy.op import DOMAIN

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
F64 = TensorProto.DOUBLE
_DTYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type")


def to_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which every float tensor is float64: inputs, weights, constants, Cast targets and declarations.

    Values are those of the file: a weight stored in float16 keeps its rounded value. FlashRNN function bodies are
    dropped, since the judge brings its own op.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    others = [f for f in copy.functions if f.domain != DOMAIN]
    del copy.functions[:]
    copy.functions.extend(others)
    for graph in walk_graphs(copy.graph):
        for weight in graph.initializer:
            _widen(weight)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in FLOATS:
                value.type.tensor_type.elem_type = F64
        _nodes(graph.node)
    for function in copy.functions:
        _nodes(function.node)
    return copy


def _widen(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def _nodes(nodes: Iterable[onnx.NodeProto]) -> None:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                _widen(attribute.t)
            elif attribute.name in _DTYPE_ATTRIBUTES and attribute.i in FLOATS:
                attribute.i = F64
        if node.op_type == "Constant":
            _constant(node)


def _constant(node: onnx.NodeProto) -> None:
    """``value_float`` and ``value_floats`` make float32; as tensors they can be float64."""
    for attribute in list(node.attribute):
        if attribute.name in ("value_float", "value_floats") and not attribute.ref_attr_name:
            value = np.asarray(helper.get_attribute_value(attribute), np.float32).astype(np.float64)
            node.attribute.remove(attribute)
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(value)))
