"""What an ONNX LSTM, GRU or RNN node says, and whether a ``flashrnn`` node can say the same.

Source: the operator texts of ONNX (LSTM-1..22, GRU-1..22, RNN-1..22). Everything that this file cannot express
exactly raises ``LeftAlone`` with the name of the attribute or input.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx
from onnx import helper

CELL_OF_ONNX = {"LSTM": "lstm", "GRU": "gru", "RNN": "elman"}
GATES_OF_ONNX = {"LSTM": "iofc", "GRU": "zrh", "RNN": "i"}

# ONNX's default activations of one direction; an alpha or beta given beside them is ignored, as none of them takes one.
_ACTIVATIONS = {"LSTM": ("sigmoid", "tanh", "tanh"), "GRU": ("sigmoid", "tanh"), "RNN": ("tanh",)}
_KNOWN = {"activation_alpha", "activation_beta", "activations", "clip", "direction", "hidden_size", "layout"}
_KNOWN_OF_OP = {"LSTM": {"input_forget"}, "GRU": {"linear_before_reset"}, "RNN": set[str]()}
_DIRECTIONS = {"forward": (1, 0), "reverse": (1, 1), "bidirectional": (2, 0)}


class LeftAlone(Exception):
    """The node stays as it is."""


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


def is_batch_first(node: onnx.NodeProto) -> bool:
    """Whether a node has layout 1, which ONNX Runtime's CPU kernels refuse."""
    return any(a.name == "layout" and a.i == 1 for a in node.attribute)


def optional_input(node: onnx.NodeProto, index: int) -> str:
    """The name of an input, "" where it is absent (left out at the end, or empty in the middle)."""
    return node.input[index] if index < len(node.input) else ""


def read_node(node: onnx.NodeProto) -> OnnxRNN:
    """Read the attributes.

    Raises:
        LeftAlone: an attribute whose effect the op does not have.
    """
    op = node.op_type
    given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    if unknown := sorted(set(given) - _KNOWN - _KNOWN_OF_OP[op]):
        raise LeftAlone(f"unknown attribute {', '.join(unknown)}")
    direction = given.get("direction", b"forward").decode()
    if direction not in _DIRECTIONS:
        raise LeftAlone(f"direction={direction!r} is not one of {', '.join(_DIRECTIONS)}")
    num_directions, reverse = _DIRECTIONS[direction]
    relu = _read_activations(op, num_directions, [a.decode() for a in given.get("activations", ())])
    if given.get("input_forget", 0):
        raise LeftAlone(f"input_forget={given['input_forget']} couples the input and forget gates")
    if op == "GRU" and not given.get("linear_before_reset", 0):
        raise LeftAlone("linear_before_reset=0 applies the reset gate before the recurrent product")
    layout = given.get("layout", 0)
    if layout not in (0, 1):
        raise LeftAlone(f"layout={layout} is neither 0 nor 1")
    clip = given.get("clip", math.inf)
    if math.isnan(clip) or clip <= 0:  # 0 would bound every activation's input to 0, which no writer means
        raise LeftAlone(f"clip={clip:g} is not a positive bound")
    return OnnxRNN(
        op_type=op,
        num_directions=num_directions,
        reverse=reverse,
        layout=layout,
        clip=0.0 if math.isinf(clip) else clip,
        relu=relu,
        hidden_size=given.get("hidden_size") or None,
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
