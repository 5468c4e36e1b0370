"""Whether a model can run in chunks of time, read off its graph: the pairs of states, and what carries them.

A chunked run equals a whole one only where every recurrent node runs forward and takes its state from the previous
chunk, which is told here, and everything else in the model looks at one time step at a time, which ``chunks.py`` finds
out by running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import json_metadata, printable
from flashrnn_deploy.graph import subgraphs, walk_nodes
from flashrnn_deploy.op import DOMAIN, FULL_LENGTH, is_flashrnn
from flashrnn_deploy.shapes import (
    Axes,
    Tensors,
    attribute,
    describe,
    is_standard_rnn,
    node_label,
    spec_of,
    value_tensor,
)

_EXPOSE = (
    "where it is an input of the file, name the output that continues it with --state IN=OUT; otherwise make it one "
    "with `flashrnn-deploy convert --expose-states`"
)
# The first input is what they move; the others say where to.
_MOVES = {"Reshape", "Unsqueeze", "Squeeze", "Transpose", "Slice", "Split", "Gather", "Expand", "Flatten", "Pad"}
_MOVES |= {"Identity", "Cast", "CastLike"}
_LENGTH_MOVES = {"Cast", "Identity", "Squeeze", "Unsqueeze", "Reshape"}
_REORDERS = {"TopK", "Gather", "GatherND", "GatherElements"}


def state_pairs(model: onnx.ModelProto, options: Sequence[str] = ()) -> dict[str, str]:
    """State inputs and the outputs that continue them: the metadata ``flashrnn.states``, then each ``IN=OUT``.

    Raises:
        FlashRNNError: a name is no input or output of the graph, is used twice, or the two tensors differ.
    """
    pairs: dict[str, Any] = json_metadata(model, "flashrnn.states")
    for option in options:
        source, _, target = option.partition("=")
        pairs[source] = target
    inputs = {v.name: value_tensor(v) for v in model.graph.input}
    outputs = {v.name: value_tensor(v) for v in model.graph.output}
    for source, target in pairs.items():
        label = f"state pair {source}={target}"
        if not isinstance(target, str):
            raise FlashRNNError(f"{label}: the metadata 'flashrnn.states' must give one output name for each input")
        if source not in inputs:
            raise FlashRNNError(f"{label}: the inputs are {_names(inputs)}")
        if target not in outputs:
            raise FlashRNNError(f"{label}: the outputs are {_names(outputs)}")
        given, back = inputs[source], outputs[target]
        if given.dtype != back.dtype or not _may_agree(given.shape, back.shape):
            raise FlashRNNError(f"{label}: the input is {given}, the output {back}; they must agree")
    if twice := sorted({t for t in pairs.values() if list(pairs.values()).count(t) > 1}):
        raise FlashRNNError(f"the output(s) {_names(twice)} continue more than one state input: {_listed(pairs)}")
    return pairs


def _may_agree(a: Sequence[Any] | None, b: Sequence[Any] | None) -> bool:
    if a is None or b is None:
        return True
    sizes = [(x, y) for x, y in zip(a, b, strict=False) if isinstance(x, int) and isinstance(y, int)]
    return len(a) == len(b) and all(x == y for x, y in sizes)


def _names(names: Any) -> str:
    return ", ".join(map(printable, names)) or "(none)"


def _listed(pairs: Mapping[str, str]) -> str:
    return _names(f"{source}={target}" for source, target in pairs.items())


def length_inputs(model: onnx.ModelProto, reordered: bool = False) -> dict[str, list[onnx.NodeProto]]:
    """Graph inputs that reach the ``sequence_lens`` of recurrent nodes unchanged, and those nodes; an engine's
    signature has no nodes, and names the inputs in the metadata ``flashrnn.lengths``. With ``reordered``, also those
    that get there in another order of rows."""
    moves = _LENGTH_MOVES | _REORDERS if reordered else _LENGTH_MOVES
    produced = {name: node for node in walk_nodes(model) for name in node.output}
    inputs = {value.name for value in model.graph.input}
    found: dict[str, list[onnx.NodeProto]] = {name: [] for name in json_metadata(model, "flashrnn.lengths")}
    for node in walk_nodes(model):
        position = 3 if is_flashrnn(node) else 4 if is_standard_rnn(node) else None
        if position is None or len(node.input) <= position:
            continue
        name = node.input[position]
        while name in produced and produced[name].op_type in moves and name == produced[name].output[0]:
            name = produced[name].input[0]
        if name in inputs:
            found.setdefault(name, []).append(node)
    return found


def check_chunkable(
    model: onnx.ModelProto, tensors: Tensors, axes: Mapping[str, Axes], pairs: Mapping[str, str]
) -> None:
    """Refuse a model whose chunks cannot add up to the whole.

    Raises:
        FlashRNNError: a recurrent node runs backward, or its state is not carried by ``pairs``; the time axis is not
            known; or an output has none. The node or tensor is named.
    """
    if not any(axes[v.name].time is not None for v in model.graph.input if v.name not in pairs):
        dims = "; ".join(describe(v.name, value_tensor(v)) for v in model.graph.input) or "there is none"
        raise FlashRNNError(
            f"--chunk: no input has a known time axis ({dims}); export the model with a dynamic time axis, or convert "
            "it with `flashrnn-deploy convert`"
        )
    for value in model.graph.input:
        axis, shape = axes[value.name].time, value_tensor(value).shape
        if axis is not None and value.name not in pairs and shape and isinstance(shape[axis], int):
            raise FlashRNNError(
                f"--chunk: the input '{printable(value.name)}' has a fixed length of {shape[axis]} steps; export the "
                f"model with a dynamic time axis (--dynamic {printable(value.name)}:{axis}=time)"
            )
    settled = _from_final_states(model, pairs)
    for value in model.graph.output:
        if axes[value.name].time is None and value.name not in settled:
            raise FlashRNNError(
                f"--chunk: the output '{printable(value.name)}' has no time axis, so that its value would be the last "
                "chunk's; run without --chunk, or, if it continues a state input, say so with --state IN=OUT"
            )
    for function in model.functions:
        for node in function.node:
            if function.domain != DOMAIN and (is_flashrnn(node) or _is_recurrent(node)):
                raise FlashRNNError(f"--chunk: the {node_label(node)} is inside the function {function.name}")
    inner = [n for node in model.graph.node if not _is_recurrent(node) for g in subgraphs(node) for n in g.node]
    for node in inner:
        if _is_recurrent(node):
            raise FlashRNNError(f"--chunk: the {node_label(node)} is inside the branch of another node")
    _check_lengths(model)
    _check_states(model, tensors, pairs)


def _check_lengths(model: onnx.ModelProto) -> None:
    """Lengths are cut per chunk where they are an input; computed ones would count from the start of every chunk."""
    inputs = {node.output[0] for nodes in length_inputs(model).values() for node in nodes}
    constants = [(t.name, t) for t in model.graph.initializer]
    constants += [(n.output[0], n.attribute[0].t) for n in model.graph.node if n.op_type == "Constant" and n.attribute]
    full = {n for n, t in constants if t.data_type == 6 and np.all(numpy_helper.to_array(t) == FULL_LENGTH)}  # int32
    for node in model.graph.node:
        if is_standard_rnn(node) and len(node.input) > 4 and node.input[4]:
            raise FlashRNNError(
                f"--chunk: the {node_label(node)} has lengths, and an engine resets the final state of a row that has "
                "ended; convert it to the FlashRNN op, or run without --chunk"
            )
        if is_flashrnn(node) and node.output[0] not in inputs and node.input[3] not in full:
            raise FlashRNNError(
                f"--chunk: the lengths of the {node_label(node)} are computed in the model, and would count from the "
                "start of every chunk; make them an input, or run without --chunk"
            )


def _from_final_states(model: onnx.ModelProto, pairs: Mapping[str, str]) -> set[str]:
    """Tensors that depend on the sequence through final states alone: the last chunk's value is the whole's."""
    settled = {"", *pairs.values(), *(tensor.name for tensor in model.graph.initializer)}
    for node in model.graph.node:
        if is_flashrnn(node) or is_standard_rnn(node):
            settled.update(node.output[1:])
        elif not any(True for _ in subgraphs(node)) and all(name in settled for name in node.input):
            settled.update(node.output)
    return settled


def _check_states(model: onnx.ModelProto, tensors: Tensors, pairs: Mapping[str, str]) -> None:
    """One pass in graph order: which state inputs each tensor comes from, wholly or in part, and which nodes."""
    states: dict[str, frozenset[str]] = {name: frozenset([name]) for name in pairs}
    whole = set(pairs)
    origin: dict[str, frozenset[int]] = {}
    none: frozenset[Any] = frozenset()
    recurrent: dict[int, tuple[onnx.NodeProto, frozenset[str]]] = {}
    for index, node in enumerate(model.graph.node):
        if _is_recurrent(node):
            _check_forward(node, tensors)
            carriers = _state_inputs(node)
            in_part = bool(states.get(node.input[0], none)) and any(states.get(name, none) for name in carriers)
            # With a projected LSTM only part of the state goes in here, the rest into the input sequence.
            if not carriers or not (all(name in whole for name in carriers) or in_part):
                raise FlashRNNError(
                    f"--chunk would reset the state of the {node_label(node)} at every chunk, since its initial state "
                    f"does not come from a state input: {_EXPOSE}"
                )
            recurrent[index] = node, none.union(*(states.get(name, none) for name in carriers))
            for name in node.output:
                origin[name] = frozenset([index])
            continue
        names = [*node.input, *(name for g in subgraphs(node) for n in g.node for name in n.input)]
        moved = names[:1] if node.op_type in _MOVES else names
        reached = none.union(*(states.get(name, none) for name in moved))
        behind = none.union(*(origin.get(name, none) for name in moved))
        every = all if node.op_type == "Concat" else any
        for name in node.output:
            states[name], origin[name] = reached, behind
            if every(part in whole for part in moved):
                whole.add(name)
    for index, (node, given) in recurrent.items():
        if not any(index in origin.get(pairs[name], none) for name in given):
            raise FlashRNNError(
                f"--chunk: the {node_label(node)} starts from {_names(sorted(given))}, but no output paired with that "
                f"continues it (the pairs are {_listed(pairs)}): {_EXPOSE}"
            )


def _is_recurrent(node: onnx.NodeProto) -> bool:
    """Whether the node carries something from step to step; a Scan or Loop without a state does not."""
    return (
        is_flashrnn(node) or is_standard_rnn(node) or (node.op_type in ("Scan", "Loop") and bool(_state_inputs(node)))
    )


def _state_inputs(node: onnx.NodeProto) -> list[str]:
    """Names of the inputs that hold what a recurrent node carries; an empty list where one is absent."""
    if is_flashrnn(node):
        return [node.input[4]]
    if is_standard_rnn(node):
        names = list(node.input[5 : 7 if node.op_type == "LSTM" else 6])
        return names if all(names) and len(names) == (2 if node.op_type == "LSTM" else 1) else []
    if node.op_type == "Loop":
        return list(node.input[2:])
    scanned: Any = attribute(node, "num_scan_inputs", 0)
    return list(node.input[: len(node.input) - scanned])


def _check_forward(node: onnx.NodeProto, tensors: Tensors) -> None:
    why = ""
    if is_flashrnn(node):
        spec = spec_of(node, tensors)
        why = "runs in both directions" if spec.num_directions == 2 else "runs backward" if spec.reverse else ""
    elif is_standard_rnn(node):
        direction: Any = attribute(node, "direction", b"forward")
        why = "" if direction == b"forward" else f"has direction {direction.decode()}"
    else:
        for name in ("scan_input_directions", "scan_output_directions"):
            directions: Any = attribute(node, name, [])
            why = "runs backward" if any(directions) else why
    if why:
        raise FlashRNNError(f"--chunk: the {node_label(node)} {why}, and its first chunk needs the last; run it whole")
