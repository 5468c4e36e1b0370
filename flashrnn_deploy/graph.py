"""Walking and reading ONNX graphs: small facts that several modules need."""

from __future__ import annotations

from collections.abc import Iterator

import onnx


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node's attributes (If branches, Loop and Scan bodies)."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def walk_graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """``graph`` and every graph inside its nodes, outer before inner."""
    yield graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from walk_graphs(inner)


def walk_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Every node of the main graph and of the graphs inside it; function bodies are not entered."""
    for graph in walk_graphs(model.graph):
        yield from graph.node


def opset_of(model: onnx.ModelProto, domain: str = "") -> int:
    """The imported version of ``domain`` (0 if it is not imported); "" and "ai.onnx" are the same domain."""
    names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
    return max((entry.version for entry in model.opset_import if entry.domain in names), default=0)


def dim_of(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    """A dimension as its size, its name, or None where it is unknown."""
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return str(dim.dim_param) or None


def shape_of(value: onnx.ValueInfoProto) -> list[int | str | None] | None:
    """The dimensions of a tensor value, or None where its rank is unknown."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return [dim_of(d) for d in value.type.tensor_type.shape.dim]


def free_inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The graph's inputs that have no initializer: what a caller must feed."""
    initialized = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in initialized]
