"""State outputs of a half-precision file, in float32 as the op has them: a state rounded at every call would drift."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
from onnx import TensorProto, helper

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def keep_states_float(model: onnx.ModelProto, names: Collection[str]) -> None:
    """Make the graph outputs ``names`` float32, in place.

    torch's layers give states in the dtype of their input, so that a cast stands before the output: it is passed by.
    Where something else stands there, the rounded state is cast back, so that it fits the float32 state input.
    """
    graph = model.graph
    for value in graph.output:
        if value.name not in names or value.type.tensor_type.elem_type not in _HALF:
            continue
        node = next(n for n in graph.node if value.name in n.output)
        half = f"{value.name}.half"
        source, operator = (node.input[0], "Identity") if node.op_type == "Cast" else (half, "Cast")
        for reader in graph.node:
            for names_of in (reader.input, reader.output):
                for k, name in enumerate(names_of):
                    if name == value.name:
                        names_of[k] = half
        attributes: dict[str, Any] = {"to": TensorProto.FLOAT} if operator == "Cast" else {}
        graph.node.append(helper.make_node(operator, [source], [value.name], name=f"{value.name}.float", **attributes))
        if not any(half in n.input for n in graph.node):
            graph.node.remove(node)
        value.type.tensor_type.elem_type = TensorProto.FLOAT
