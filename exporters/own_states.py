"""States that a file's recurrent nodes take from graph inputs and give to graph outputs already.

A single layer reads the input as it is. For stacked layers torch's exporters cut h0 [L*N, B, HD] along its first axis,
a piece per layer, and put the layers' final states together again in that order: the output continues the input then.
"""

from __future__ import annotations

import itertools

from onnx import NodeProto

from flashrnn_deploy.exporters.onnx_nodes import is_onnx_rnn, optional_input
from flashrnn_deploy.exporters.onnx_scope import Scope, constant, type_of

Piece = tuple[str, int, int | None]
"""Source, first row and end of a piece along axis 0; an end of None is the source's."""


def own_pairs(scope: Scope) -> dict[str, str]:
    """Graph input -> graph output, for each whole state of the LSTM, GRU and RNN nodes of the main graph.

    Every row of the input starts a node, and the output holds what that node ends in, at the same row.
    """
    initialized = {tensor.name for tensor in scope.graph.initializer}
    inputs = {value.name for value in scope.graph.input} - initialized
    initial = {
        node.output[o]: optional_input(node, i)
        for node in scope.graph.node
        if is_onnx_rnn(node)
        for i, o in (((5, 1), (6, 2)) if node.op_type == "LSTM" else ((5, 1),))
        if o < len(node.output) and node.output[o] and optional_input(node, i)
    }
    pairs: dict[str, str] = {}
    for value in scope.graph.output:
        finals = _stacked(scope, value.name)
        pieces = [_piece(scope, initial[name]) for name in finals if name in initial]
        if pieces and len(pieces) == len(finals) and pieces[0][0] in inputs and _whole(scope, pieces):
            pairs.setdefault(pieces[0][0], value.name)
    return pairs


def _whole(scope: Scope, pieces: list[Piece]) -> bool:
    """Whether the pieces are one source's rows from the first to the last, in order."""
    source, first, _ = pieces[0]
    if first != 0 or any(a[0] != b[0] or a[2] != b[1] for a, b in itertools.pairwise(pieces)):
        return False
    end, size = pieces[-1][2], _rows(scope, source)
    return end is None or (size is not None and end >= size)


def _rows(scope: Scope, name: str) -> int | None:
    """The fixed size of a tensor's first axis."""
    dims = type_of(scope, name)[1]
    return dims[0] if dims and isinstance(dims[0], int) else None


def _stacked(scope: Scope, name: str) -> list[str]:
    """What a Concat along axis 0 puts together; without one, the tensor itself."""
    node = scope.producers.get(name)
    while node is not None and node.op_type == "Identity":
        name = node.input[0]
        node = scope.producers.get(name)
    if node is not None and node.op_type == "Concat" and [a.i for a in node.attribute if a.name == "axis"] == [0]:
        return list(node.input)
    return [name]


def _piece(scope: Scope, name: str) -> Piece:
    """The rows of a source that a tensor is; a tensor that is cut in another way is its own source."""
    node = scope.producers.get(name)
    if node is None or node.domain not in ("", "ai.onnx"):
        return name, 0, None
    if node.op_type == "Identity":
        return _piece(scope, node.input[0])
    rows = _CUTS[node.op_type](scope, node, name) if node.op_type in _CUTS else None
    return (node.input[0], *rows) if rows else (name, 0, None)


def _sliced(scope: Scope, node: NodeProto, _name: str) -> tuple[int, int] | None:
    """Start and end of a Slice by constants, along axis 0 alone and in steps of 1."""
    operands = [constant(scope, optional_input(node, k)) if optional_input(node, k) else None for k in range(1, 5)]
    starts, ends, axes, steps = (None if c is None else c.array.reshape(-1).tolist() for c in operands)
    given = [optional_input(node, k) for k in (3, 4)]
    if starts is None or ends is None or (given[0] and axes != [0]) or (given[1] and steps != [1]):
        return None
    return (starts[0], ends[0]) if len(starts) == len(ends) == 1 and 0 <= starts[0] < ends[0] else None


def _split(scope: Scope, node: NodeProto, name: str) -> tuple[int, int] | None:
    """Start and end of one output of a Split along axis 0 of a known size."""
    rows, count = _rows(scope, node.input[0]), len(node.output)
    sizes = constant(scope, optional_input(node, 1)) if optional_input(node, 1) else None
    if any(a.i for a in node.attribute if a.name == "axis") or (optional_input(node, 1) and sizes is None):
        return None
    if sizes is not None:
        parts = sizes.array.reshape(-1).tolist()
    elif rows is not None and rows % count == 0:
        parts = [rows // count] * count
    else:
        return None
    place = list(node.output).index(name)
    return (sum(parts[:place]), sum(parts[: place + 1])) if len(parts) == count else None


_CUTS = {"Slice": _sliced, "Split": _split}
