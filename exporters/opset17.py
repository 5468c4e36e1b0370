"""Bring a model that was written at opset 18 to opset 17, which older engines read."""

from __future__ import annotations

import onnx
from onnx import helper, numpy_helper

from flashrnn_deploy.graph import opset_of, shape_of, walk_graphs

_AXES_INPUT = {
    "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceSumSquare",
}  # fmt: skip


def lower_to_17(model: onnx.ModelProto) -> str | None:
    """Rewrite ``model`` (opset 18, no functions) in place.

    Returns:
        None, or the reason why it stays as it was: the first node that opset 17 cannot express.
    """
    if opset_of(model) != 18 or model.functions:
        raise ValueError("lower_to_17 takes a model of opset 18 without functions")
    lowered = onnx.ModelProto()
    lowered.CopyFrom(model)
    for graph in walk_graphs(lowered.graph):
        known = _Known(graph)
        for node in graph.node:
            if node.domain in ("", "ai.onnx") and (reason := _lower_node(node, known)):
                return f"node '{node.name}' ({node.op_type}) needs opset 18: {reason}"
    for entry in lowered.opset_import:
        if entry.domain in ("", "ai.onnx"):
            entry.version = 17
    model.CopyFrom(lowered)
    return None


class _Known:
    """Constants and shapes of one graph."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.constants = {t.name: t for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = node.attribute[0].t
        self.shapes = {v.name: shape_of(v) for v in (*graph.input, *graph.value_info, *graph.output)}


def _lower_node(node: onnx.NodeProto, known: _Known) -> str | None:
    if not onnx.defs.has(node.op_type, 17, ""):
        return "the operator is new"
    versions = [onnx.defs.get_schema(node.op_type, opset, "").since_version for opset in (17, 18)]
    if versions[0] == versions[1]:
        return None
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if node.op_type in _AXES_INPUT:
        axes = []
        if len(node.input) > 1 and node.input[1]:
            if node.input[1] not in known.constants:
                return "its axes are computed"
            axes = numpy_helper.to_array(known.constants[node.input[1]]).tolist()
        if not axes and attributes.get("noop_with_empty_axes"):
            return "noop_with_empty_axes"
        del node.input[1:]
        _drop(node, "noop_with_empty_axes")
        if axes:
            node.attribute.append(helper.make_attribute("axes", axes))
        return None
    if node.op_type == "Split":
        if len(node.input) < 2 or not node.input[1]:  # opset 17 splits evenly only
            shape, axis = known.shapes.get(node.input[0]), attributes.get("axis", 0)
            size = shape[axis] if shape else None
            if not isinstance(size, int) or size % len(node.output):
                return "num_outputs on an axis that may not divide evenly"
        _drop(node, "num_outputs")
        return None
    if node.op_type == "Pad":
        return "axes" if len(node.input) > 3 and node.input[3] else None
    if node.op_type in ("ScatterElements", "ScatterND"):
        return "its reduction" if attributes.get("reduction") in (b"max", b"min") else None
    if node.op_type == "Resize":
        if attributes.get("antialias") or "axes" in attributes:
            return "antialias or axes"
        if attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
            return "keep_aspect_ratio_policy"
        _drop(node, "antialias")
        _drop(node, "keep_aspect_ratio_policy")
        return None
    return "its meaning changed"


def _drop(node: onnx.NodeProto, name: str) -> None:
    kept = [a for a in node.attribute if a.name != name]
    del node.attribute[:]
    node.attribute.extend(kept)
