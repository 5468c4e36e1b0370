"""What an ONNX LSTM, GRU or RNN node says, and whether a ``flashrnn`` node can say the same.

Source: the operator texts of ONNX (LSTM-1..22, GRU-1..22, RNN-1..22). Everything that this file cannot express
exactly raises ``LeftAlone`` with the name of the attribute or input.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import AttributeProto, helper

CELL_OF_ONNX = {"LSTM": "lstm", "GRU": "gru", "RNN": "elman"}
GATES_OF_ONNX = {"LSTM": "iofc", "GRU": "zrh", "RNN": "i"}

# ONNX's default activations of one direction; an alpha or beta given beside them is ignored, as none of them takes one.
_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_KNOWN = {"activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size", "layout"}
_KNOWN_OF_OP = {"LSTM": {"input_forget"}, "GRU": {"linear_before_reset"}, "RNN": set[str]()}
_DIRECTIONS = {"forward": (1, 0), "reverse": (1, 1), "bidirectional": (2, 0)}


class LeftAlone(Exception):
    """The node stays as it is."""


def first_line(error: Exception) -> str:
    """The first line of another program's message, short enough for a report."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


@dataclass(frozen=True)
class OnnxRNN:
    """The attributes of one node. ``hidden_size`` is None where the node leaves it to the shape of ``R``."""

    op_type: str
    num_directions: int
    reverse: int
    layout: int
    clip: float
    relu: int
    hidden_size: int | None


def is_onnx_rnn(node: onnx.NodeProto) -> bool:
    """Whether a node is a standard LSTM, GRU or RNN; quantised relatives live in other domains."""
    return node.domain in ("", "ai.onnx") and node.op_type in CELL_OF_ONNX


def located_nodes(nodes: Iterable[onnx.NodeProto], path: str) -> Iterator[tuple[str, onnx.NodeProto]]:
    """Every LSTM, GRU and RNN among ``nodes`` and in the graphs inside them, with the path that a report names."""
    for node in nodes:
        if is_onnx_rnn(node):
            yield path, node
        for name, graph in named_subgraphs(node):
            yield from located_nodes(graph.node, f"{path} > {name}")


def named_subgraphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The graphs in a node's attributes, each with ``node.attribute`` as its name."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield f"{node.name or node.op_type}.{attribute.name}", attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from ((f"{node.name or node.op_type}.{attribute.name}", graph) for graph in attribute.graphs)


def is_batch_first(node: onnx.NodeProto) -> bool:
    """Whether a node has layout 1, which ONNX Runtime's CPU kernels refuse."""
    given = [a for a in node.attribute if a.name == "layout"]
    return len(given) == 1 and given[0].type == AttributeProto.INT and given[0].i == 1


def optional_input(node: onnx.NodeProto, index: int) -> str:
    """The name of an input, "" where it is absent (left out at the end, or empty in the middle)."""
    return node.input[index] if index < len(node.input) else ""


def attribute(node: onnx.NodeProto, name: str, kind: int, default: Any) -> Any:
    """The value of an attribute of type ``kind`` (an ``AttributeProto.AttributeType``); strings come as text.

    Raises:
        LeftAlone: it is given twice, has another type, or is no text where it should be.
    """
    given = [a for a in node.attribute if a.name == name]
    if not given:
        return default
    if len(given) > 1:
        raise LeftAlone(f"{name} is given {len(given)} times")
    if given[0].ref_attr_name:
        raise LeftAlone(f"{name} refers to an attribute of a function, but the node is in none")
    if given[0].type != kind:
        found, wanted = (AttributeProto.AttributeType.Name(k) for k in (given[0].type, kind))
        raise LeftAlone(f"{name} is of type {found}, where ONNX has {wanted}")
    value = helper.get_attribute_value(given[0])
    try:
        if kind == AttributeProto.STRING:
            return value.decode()
        return [v.decode() for v in value] if kind == AttributeProto.STRINGS else value
    except UnicodeDecodeError:
        raise LeftAlone(f"{name}={value!r} is not UTF-8") from None


def read_node(node: onnx.NodeProto) -> OnnxRNN:
    """Read the attributes.

    Raises:
        LeftAlone: an attribute whose effect the op does not have, or that ONNX does not allow.
    """
    op = node.op_type
    if unknown := sorted({a.name for a in node.attribute} - _KNOWN - _KNOWN_OF_OP[op]):
        raise LeftAlone(f"unknown attribute {', '.join(unknown)}")
    direction = attribute(node, "direction", AttributeProto.STRING, "forward")
    if direction not in _DIRECTIONS:
        raise LeftAlone(f"direction={direction!r} is not one of {', '.join(_DIRECTIONS)}")
    num_directions, reverse = _DIRECTIONS[direction]
    for name in ("activation_alpha", "activation_beta"):
        attribute(node, name, AttributeProto.FLOATS, None)
    relu = _read_activations(op, num_directions, attribute(node, "activations", AttributeProto.STRINGS, []))
    if input_forget := attribute(node, "input_forget", AttributeProto.INT, 0):
        raise LeftAlone(f"input_forget={input_forget} couples the input and forget gates")
    if op == "GRU" and not attribute(node, "linear_before_reset", AttributeProto.INT, 0):
        raise LeftAlone("linear_before_reset=0 applies the reset gate before the recurrent product")
    layout = attribute(node, "layout", AttributeProto.INT, 0)
    if layout not in (0, 1):
        raise LeftAlone(f"layout={layout} is neither 0 nor 1")
    clip = attribute(node, "clip", AttributeProto.FLOAT, math.inf)
    if math.isnan(clip) or clip <= 0:  # 0 would bound every activation's input to 0, which no writer means
        raise LeftAlone(f"clip={clip:g} is not a positive bound")
    hidden_size = attribute(node, "hidden_size", AttributeProto.INT, None)
    if hidden_size is not None and hidden_size < 1:
        raise LeftAlone(f"hidden_size={hidden_size} is not positive")
    return OnnxRNN(
        op_type=op,
        num_directions=num_directions,
        reverse=reverse,
        layout=layout,
        clip=0.0 if math.isinf(clip) else clip,
        relu=relu,
        hidden_size=hidden_size,
    )


def why_left(node: onnx.NodeProto) -> str:
    """Which attribute keeps a node from being rewritten, "" if none does."""
    try:
        read_node(node)
    except LeftAlone as reason:
        return str(reason)
    return ""


def _read_activations(op: str, num_directions: int, activations: list[str]) -> int:
    """1 for ReLU, 0 for the defaults; one set per direction, in any case."""
    lower = [a.lower() for a in activations]
    if not activations or lower == list(_ACTIVATIONS[op]) * num_directions:
        return 0
    if op == "RNN" and lower == ["relu"] * num_directions:
        return 1
    raise LeftAlone(f"activations={activations} are not the cell's own")
