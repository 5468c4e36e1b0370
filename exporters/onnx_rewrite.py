"""One ONNX LSTM, GRU or RNN node -> one ``flashrnn`` node, its input projection, and the shapes around it.

ONNX shapes: X [T, B, I], W [N, G*HD, I], R [N, G*HD, HD], B [N, 2*G*HD], initial_h and initial_c [N, B, HD],
Y [T, N, B, HD], Y_h and Y_c [N, B, HD]; with layout 1, X [B, T, I], states [B, N, HD], Y [B, T, N, HD].
Letters as in ``op``; ``HD`` is the hidden size, one head.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from flashrnn_deploy.exporters.onnx_builder import Builder, Operand, array_of
from flashrnn_deploy.exporters.onnx_edit import delete_where, reads, remove_dead
from flashrnn_deploy.exporters.onnx_fit import check_inputs
from flashrnn_deploy.exporters.onnx_nodes import (
    CELL_OF_ONNX,
    LeftAlone,
    is_batch_first,
    is_onnx_rnn,
    optional_input,
    read_node,
)
from flashrnn_deploy.exporters.onnx_scope import Constant, Dims, Scope, constant, type_of
from flashrnn_deploy.op import DTYPES, FULL_LENGTH, RNNSpec, make_node

# The op's gates, as positions in ONNX's order: i f z o out of i o f c; r u n out of z r h.
_GATE_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}


@dataclass(eq=False)
class Shared:
    """What the replacements of one model have in common: all names, and weights already arranged."""

    taken: set[str]
    arranged: dict[Any, tuple[str, str, str]] = field(default_factory=dict)
    lengths: dict[Scope, str] = field(default_factory=dict)
    changed: bool = False
    ragged: list[str] = field(default_factory=list)
    """Nodes whose lengths are known at run time only, and whose initial state may differ from zero."""
    not_finite: list[str] = field(default_factory=list)
    """Nodes whose stored weights or states hold NaN or infinity."""
    clipped: list[str] = field(default_factory=list)
    """LSTM nodes with a clip, which bounds c before its tanh."""


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    name: str
    path: str
    op: str
    action: str
    reason: str


def rewrite_scope(scope: Scope, shared: Shared) -> list[Row]:
    """Replace every node of one graph that the op can express; the others stay, with the reason in their row."""
    rows: list[Row] = []
    nodes: list[NodeProto] = []
    freed: list[str] = []
    used = reads(scope.graph)
    for node in scope.graph.node:
        if not is_onnx_rnn(node):
            nodes.append(node)
            continue
        try:
            nodes += _replacement(node, scope, shared, used)
        except LeftAlone as why:
            relaid = _relaid(node, scope, shared)
            nodes += relaid or [node]
            shared.changed |= bool(relaid)
            reason = f"{why}{'; layout=1 became 0 between transposes, as ONNX Runtime needs it' if relaid else ''}"
            rows.append(Row(node.name, scope.path, node.op_type, "left", reason))
        else:
            freed += [name for name in node.input if name]
            rows.append(Row(node.name, scope.path, node.op_type, "rewritten", ""))
            shared.changed = True
    if rows:
        kept = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del scope.graph.node[:]
        scope.graph.node.extend(kept)
        _remove_stale_infos(scope.graph)
        place: Scope | None = scope
        names = set(freed)
        while place is not None:
            names = remove_dead(place.graph, names)
            place = place.parent
    return rows


def _replacement(node: NodeProto, scope: Scope, shared: Shared, used: set[str]) -> list[NodeProto]:
    """The nodes that take a node's place.

    Raises:
        LeftAlone: the op cannot express the node.
    """
    onnx_rnn = read_node(node)
    dtype, hidden = check_inputs(node, onnx_rnn, scope)
    w, r, b, lens, h, c, peepholes = (_operand(scope, optional_input(node, k)) for k in range(1, 8))
    if peepholes is not None and not (isinstance(peepholes, Constant) and not np.any(peepholes.array)):
        raise LeftAlone("peepholes (input P) add the cell state to the gates")
    if w is None or r is None:
        raise AssertionError("check_inputs lets no node without W and R pass")
    x_name = node.input[0]
    spec = RNNSpec(
        CELL_OF_ONNX[node.op_type],
        num_heads=1,
        head_dim=hidden,
        num_directions=onnx_rnn.num_directions,
        dtype=dtype,
        layout=onnx_rnn.layout,
        reverse=onnx_rnn.reverse,
        clip=onnx_rnn.clip,
        relu=onnx_rnn.relu,
    )
    build = Builder(scope, _prefix(node), shared.taken)
    if all(isinstance(operand, Constant) or operand is None for operand in (w, r, b)):
        key = (spec.cell, spec.num_directions, dtype, *map(_fingerprint, (w, r, b)))
        if key not in shared.arranged:
            shared.arranged[key] = _arrange(build, node.op_type, spec, w, r, b)
        weights = shared.arranged[key]
    else:
        weights = _arrange(build, node.op_type, spec, w, r, b)
    wx = build.node("MatMul", [x_name, weights[0]], "wx")
    states = _initial_states(build, spec, x_name, h, c if node.op_type == "LSTM" else None)
    inputs = [wx, weights[1], weights[2], _lengths(build, shared, scope, lens), build.name(states, "initial_states")]
    y, final = build.unique("y"), build.unique("final_states")
    name = node.name or build.unique("node")
    build.nodes.append(make_node(spec, inputs, [y, final], name=name))
    _write_infos(scope, spec, type_of(scope, x_name)[1], y, final)
    _restore_outputs(build, spec, node, y, final, used)
    if spec.clip and node.op_type == "LSTM":
        shared.clipped.append(name)
    if isinstance(lens, str) and any(s is not None and _may_differ_from_zero(s) for s in (h, c)):
        shared.ragged.append(name)
    if any(isinstance(o, Constant) and not np.isfinite(o.array.astype(np.float32)).all() for o in (w, r, b, h, c)):
        shared.not_finite.append(name)
    return build.nodes


def _may_differ_from_zero(operand: Operand) -> bool:
    return not isinstance(operand, Constant) or bool(np.any(operand.array))


def _relaid(node: NodeProto, scope: Scope, shared: Shared) -> list[NodeProto]:
    """A node that stays, with layout 1 turned into 0 (ONNX Runtime runs no other); nothing to do for layout 0: []."""
    shapes = [type_of(scope, name)[1] for k in (0, 5, 6) if (name := optional_input(node, k))]
    if not is_batch_first(node) or any(dims is not None and len(dims) != 3 for dims in shapes):
        return []
    build = Builder(scope, _prefix(node), shared.taken)
    result = NodeProto.FromString(node.SerializeToString())
    kept = [a for a in result.attribute if a.name != "layout"]
    del result.attribute[:]
    result.attribute.extend(kept)
    for k in (0, 5, 6):
        if name := optional_input(node, k):
            result.input[k] = build.node("Transpose", [name], "time_first", perm=[1, 0, 2])
    build.nodes.append(result)
    for k, output in enumerate(node.output):
        if output:  # [T, N, B, HD] -> [B, T, N, HD], [N, B, HD] -> [B, N, HD]
            result.output[k] = build.unique("time_first")
            build.node("Transpose", [result.output[k]], "batch_first", output, perm=[1, 0, 2] if k else [2, 0, 1, 3])
    return build.nodes


def _prefix(node: NodeProto) -> str:
    """What names of the replacement start with."""
    return node.name or f"{node.op_type}_{next((o for o in node.output if o), 'unused')}"


def _operand(scope: Scope, name: str) -> Operand | None:
    return (constant(scope, name) or name) if name else None


def _fingerprint(operand: Operand | None) -> tuple[Any, ...]:
    """Equal for constants of equal content and place: branches often hold the same weights under different names."""
    if not isinstance(operand, Constant):
        return ()
    content = np.ascontiguousarray(operand.array).reshape(-1).view(np.uint8)
    return operand.scope, operand.array.shape, hashlib.blake2b(content.data).digest()


def _arrange(
    build: Builder, op_type: str, spec: RNNSpec, w: Operand, r: Operand, b: Operand | None
) -> tuple[str, str, str]:
    """W -> [I, N*HD*G] (gate innermost), R -> [N, G, 1, HD, HD], B -> float32 [N, Gb, 1, HD]: their names."""
    N, G, HD, order = spec.num_directions, spec.definition.num_gates, spec.hidden_size, _GATE_ORDER[op_type]
    w = build.reshape(w, [N, G, HD, -1], "W.gates")
    w = build.transpose(build.take(w, order, 1, "W.ordered"), [3, 0, 2, 1], "W.columns")
    w = build.reshape(w, [-1, N * HD * G], "W")
    r = build.reshape(build.take(build.reshape(r, [N, G, HD, HD], "R.gates"), order, 1, "R.ordered"), _r(spec), "R")
    if b is None:
        bias: Operand = Constant(np.zeros((N, spec.definition.num_biases, 1, HD), np.float32), _place(build, w, r))
    else:
        both = build.reshape(build.cast(b, TensorProto.FLOAT, "B.float"), [N, 2, G, HD], "B.gates")
        of_w, of_r = (
            build.reshape(build.take(both, [k], 1, f"B.{part}"), [N, G, HD], f"B.{part}.gates")
            for k, part in enumerate("wr")
        )
        summed = build.add(of_w, of_r, "B.sum")
        if op_type == "GRU":  # the candidate's two biases stay apart: the reset gate scales one of them
            pieces = [build.take(summed, order[:2], 1, "B.ru"), build.take(of_w, [2], 1, "B.n")]
            bias = build.concat([*pieces, build.take(of_r, [2], 1, "B.q")], 1, "B.runq")
        else:
            bias = build.take(summed, order, 1, "B.ordered")
        bias = build.reshape(bias, [N, spec.definition.num_biases, 1, HD], "B")
    return build.name(w, "W"), build.name(r, "R"), build.name(bias, "B")


def _r(spec: RNNSpec) -> list[int]:
    HD = spec.hidden_size
    return [spec.num_directions, spec.definition.num_gates, 1, HD, HD]


def _place(build: Builder, *operands: Operand) -> Scope:
    """Where the zeros of an absent bias belong: beside the weights, so that nodes that share them share those too."""
    places = [o.scope for o in operands if isinstance(o, Constant)]
    return max(places, key=lambda scope: scope.depth) if len(places) == len(operands) else build.scope


def _lengths(build: Builder, shared: Shared, scope: Scope, lens: Operand | None) -> str:
    """int32 lengths; "every row is full" is one constant per graph."""
    if lens is None:
        if scope not in shared.lengths:
            shared.lengths[scope] = build.name(Constant(np.array([FULL_LENGTH], np.int32), scope), "full_length")
        return shared.lengths[scope]
    if isinstance(lens, str) and type_of(scope, lens)[0] == TensorProto.INT32:
        return lens
    if isinstance(lens, Constant):  # an int64 "all steps" must not wrap around
        lens = Constant(np.clip(lens.array, 0, FULL_LENGTH), lens.scope)
    return build.name(build.cast(lens, TensorProto.INT32, "sequence_lens"), "sequence_lens")


def _initial_states(build: Builder, spec: RNNSpec, x: str, h: Operand | None, c: Operand | None) -> Operand:
    """float32 [S, N, B, HD]; what is absent is zero."""
    count = spec.definition.num_states
    given = [None if s is None else _state(build, spec, s, part) for s, part in zip((h, c), "hc", strict=True)][:count]
    known = next((s for s in given if s is not None), None)
    if known is None:
        batch = build.dimension(x, 1 - spec.layout, "batch")
        sizes = [build.integers([count, spec.num_directions]), batch, build.integers([spec.hidden_size])]
        return build.zeros(build.concat(sizes, 0, "states.shape"), "states.zero")
    parts = [build.zeros_like(known, "states.zero") if s is None else s for s in given]
    return build.concat(parts, 0, "states.all")


def _state(build: Builder, spec: RNNSpec, state: Operand, part: str) -> Operand:
    """One initial state -> float32 [1, N, B, HD]."""
    if spec.dtype != "float32" or array_of(state) is not None:
        state = build.cast(state, TensorProto.FLOAT, f"{part}.float")
    if spec.layout:
        state = build.transpose(state, [1, 0, 2], f"{part}.directions")
    return build.unsqueeze(state, 0, f"{part}.state")


def _restore_outputs(build: Builder, spec: RNNSpec, node: NodeProto, y: str, final: str, used: set[str]) -> None:
    """Make the ONNX outputs that something reads, under their old names."""
    N, HD, S = spec.num_directions, spec.hidden_size, spec.definition.num_states
    outputs = [*node.output, "", "", ""][: 1 + S]
    if outputs[0] in used - {""}:
        if N == 1:  # [T, B, HD] -> [T, 1, B, HD], or [B, T, HD] -> [B, T, 1, HD]
            build.unsqueeze(y, 2 if spec.layout else 1, "Y", outputs[0])
        elif spec.layout:
            build.reshape(y, [0, 0, N, HD], "Y", outputs[0])
        else:
            build.transpose(build.reshape(y, [0, 0, N, HD], "Y.directions"), [0, 2, 1, 3], "Y", outputs[0])
    for k, output in enumerate(outputs[1:]):
        if output not in used - {""}:
            continue
        part = ("Y_h", "Y_c")[k]
        to_cast, to_swap = spec.dtype != "float32", bool(spec.layout)
        # The last step writes the graph's own name.
        state = build.node("Gather", [final, _index(build, k)], part, "" if to_cast or to_swap else output, axis=0)
        if to_swap:
            swapped = build.transpose(state, [1, 0, 2], f"{part}.batch_first", "" if to_cast else output)
            state = build.name(swapped, part)
        if to_cast:
            build.cast(state, DTYPES[spec.dtype], f"{part}.cast", output)


def _index(build: Builder, k: int) -> Constant:
    return Constant(np.asarray(k, np.int64), build.scope)


def _write_infos(scope: Scope, spec: RNNSpec, x_dims: Dims | None, y: str, final: str) -> None:
    """Shapes of y and final_states: inference through a function body does not find them."""
    lead: Dims = list(x_dims[:2]) if x_dims is not None and len(x_dims) == 3 else [None, None]
    S, N, HD = spec.definition.num_states, spec.num_directions, spec.hidden_size
    final_dims: Dims = [S, N, lead[1 - spec.layout], HD]
    info = helper.make_tensor_value_info
    scope.graph.value_info.append(info(y, DTYPES[spec.dtype], [*lead, N * HD]))
    scope.graph.value_info.append(info(final, TensorProto.FLOAT, final_dims))


def _remove_stale_infos(graph: GraphProto) -> None:
    """Drop the value_info of outputs that nobody read and that are gone."""
    made = {output for node in graph.node for output in node.output}
    made |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    delete_where(graph.value_info, lambda value: value.name not in made)
