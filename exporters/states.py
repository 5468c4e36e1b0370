"""States and axes of a finished ONNX graph: default states become inputs and outputs, metadata names the axes.

Two entries of ``metadata_props`` are written here, both JSON objects:

* ``flashrnn.states``: graph input -> graph output, the pairs a caller feeds back between two calls;
* ``flashrnn.axes``: graph tensor -> ``{"time": axis or null, "batch": axis or null}``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy.cells import CELL_OF_OP
from flashrnn_deploy.exporters.onnx_edit import (
    all_names,
    delete_where,
    operands_of,
    producers_of,
    remove_dead,
    rename,
    unique,
)
from flashrnn_deploy.exporters.onnx_shapes import Shapes, known_shapes, probe
from flashrnn_deploy.files import json_metadata
from flashrnn_deploy.graph import free_inputs, shape_of, subgraphs
from flashrnn_deploy.op import is_flashrnn

STATES_KEY = "flashrnn.states"
AXES_KEY = "flashrnn.axes"

# Operators whose output holds nothing but elements of the inputs listed (None: of all inputs). All-zero in, all-zero
# out; a shape operand may be anything. Pad has a fill value, a third input, that has to be zero too.
_MOVES: dict[str, tuple[int, ...] | None] = {
    **dict.fromkeys(("Cast", "CastLike", "Expand", "Flatten", "Gather", "GatherElements", "GatherND"), (0,)),
    **dict.fromkeys(("Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze"), (0,)),
    **dict.fromkeys(("Abs", "Neg"), (0,)),
    **dict.fromkeys(("Add", "Concat", "Sub"), None),
    "Pad": (0, 2),
    "Where": (1, 2),
}


def expose_states(model: onnx.ModelProto) -> dict[str, str]:
    """Turn default states of ``flashrnn`` nodes of the main graph into graph inputs and outputs, in place.

    A default is an ``initial_states`` that is zero whatever is fed: zero constants, or shapes filled with zeros. It
    becomes the float32 graph input ``<node>.states`` [S, N, B, H*D], and the node's final states, same shape, the graph
    output ``<node>.final_states``. A constant that is not zero keeps its value (a caller who starts with zeros would
    change the result), and a state that the model computes is left alone, as is one whose batch is made of several
    sizes, such as time*batch behind a reshape: ``kept_states`` names them all.

    Returns:
        The new pairs, graph input -> graph output. They are merged into ``metadata_props``.
    """
    graph = model.graph
    nodes = [node for node in graph.node if is_flashrnn(node)]
    sources = _sources(graph, [node.input[4] for node in nodes])
    candidates = [node for node in nodes if sources[node.input[4]] == "zero"]
    shapes = known_shapes(model) if candidates else {}
    made = _made_batches(graph, nodes, shapes)
    candidates = [node for node in candidates if node.output[0] not in made]
    taken = all_names(model)
    outputs = {value.name for value in graph.output}
    exposed: dict[str, str] = {}
    renamed: dict[str, str] = {}
    freed = []
    for node in candidates:
        base = re.sub(r"[^\w.-]+", ".", node.name).strip(".") or node.op_type
        dims = _state_dims(graph, node, shapes, f"{base}.batch")
        new_input, output = unique(f"{base}.states", taken), node.output[1]
        taken.add(new_input)
        freed.append(node.input[4])
        node.input[4] = new_input
        graph.input.append(helper.make_tensor_value_info(new_input, TensorProto.FLOAT, dims))
        if output not in outputs:
            new_output = f"{base}.final_states"
            if output != new_output:
                new_output = unique(new_output, taken)
                taken.add(new_output)
            renamed[output] = output = new_output
            graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, dims))
        exposed[new_input] = output
    rename(graph, renamed)
    declared = set(renamed.values())
    delete_where(graph.value_info, lambda value: value.name in declared)
    remove_dead(graph, freed)
    if exposed:
        write_metadata(model, STATES_KEY, read_metadata(model, STATES_KEY) | exposed)
    return exposed


def kept_states(model: onnx.ModelProto) -> dict[str, str]:
    """Why a node has no state input: node name -> reason, for every ``flashrnn`` node whose states are not fed.

    Call it after ``expose_states``. A node whose states come from graph inputs is not listed.
    """
    kept: dict[str, str] = {}
    main = [node for node in model.graph.node if is_flashrnn(node)]
    sources = _sources(model.graph, [node.input[4] for node in main])
    made = _made_batches(model.graph, main, known_shapes(model)) if "zero" in sources.values() else {}
    for fed, graph in _walk_fed(model.graph, {value.name for value in free_inputs(model.graph)}):
        for node in filter(is_flashrnn, graph.node):
            source = sources[node.input[4]] if graph is model.graph else "inner"
            if node.input[4] in fed and source not in ("zero", "constant"):
                continue
            kept[node.name] = {
                "inner": "inside the body of another node: only nodes of the main graph get state inputs",
                "constant": "starts from a constant that is not zero; the constant is kept",
                "zero": made.get(node.output[0], "starts from zeros made inside the model"),
                "computed": "starts from a state that the model computes from no graph input",
            }[source]
    return kept


def given_states(model: onnx.ModelProto) -> dict[str, str | None]:
    """Graph inputs that are, whole or in part, states of ``flashrnn`` nodes of the main graph, with the output that is
    known to continue each."""
    graph, pairs = model.graph, read_metadata(model, STATES_KEY)
    producers, pending = producers_of(graph), [node.input[4] for node in graph.node if is_flashrnn(node)]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name and name not in seen:
            seen.add(name)
            node = producers.get(name)
            if node is not None and node.op_type in _MOVES:
                places = _MOVES[node.op_type]
                pending += [n for k, n in enumerate(node.input) if places is None or k in places]
    return {value.name: pairs.get(value.name) for value in free_inputs(graph) if value.name in seen}


def write_axes(model: onnx.ModelProto) -> dict[str, dict[str, int | None]]:
    """Find the time and batch axis of every graph input and output, and write them to ``metadata_props``.

    Each dynamic dimension of the inputs gets a large prime as its size. Where shape inference then finds that prime as
    T or B of a ``flashrnn`` node, the dimension is time or batch; so is every axis of an input or output that has it.
    (Symbols do not survive a Reshape whose target the model computes; numbers do.) A fixed dimension is null, and so is
    one that only determines T, as an image's width does behind a strided convolution.

    Returns:
        ``{name: {"time": axis or None, "batch": axis or None}}`` for the free graph inputs and the outputs.
    """
    graph = model.graph
    shapes, names = probe(model)
    symbols: dict[str, set[int | str | None]] = {"time": set(), "batch": set()}
    for node in filter(is_flashrnn, graph.node):
        layout = next(a.i for a in node.attribute if a.name == "layout")
        places = [(value, {"time": layout, "batch": 1 - layout}) for value in (node.input[0], node.output[0])]
        places += [(value, {"batch": 2}) for value in (node.input[4], node.output[1])]
        for value, axes in places:
            shape = shapes.get(value) or []
            for kind, axis in axes.items():
                if axis < len(shape) and shape[axis] in names:
                    symbols[kind].add(shape[axis])
    symbols["time"] -= symbols["batch"]
    wanted = {kind: found | {names[prime] for prime in found} for kind, found in symbols.items()}
    states = read_metadata(model, STATES_KEY)
    result: dict[str, dict[str, int | None]] = {}
    for value in (*free_inputs(graph), *graph.output):
        declared = shape_of(value) or []
        probed = shapes.get(value.name) or declared
        result[value.name] = {
            kind: next((k for k, dims in enumerate(zip(declared, probed, strict=False)) if found & set(dims)), None)
            for kind, found in wanted.items()
        }
    op_shaped = {name for node in filter(is_flashrnn, graph.node) for name in (node.input[4], node.output[1])}
    for name in (*states, *states.values()):
        if name in result:
            result[name]["time"] = None
            if result[name]["batch"] is None and name in op_shaped:
                result[name]["batch"] = 2
    write_metadata(model, AXES_KEY, result)
    return result


def read_metadata(model: onnx.ModelProto, key: str) -> dict[str, Any]:
    """The JSON object under ``key`` of the model's metadata, {} if there is none."""
    return json_metadata(model, key)


def write_metadata(model: onnx.ModelProto, key: str, value: dict[str, Any]) -> None:
    """Set one entry of the model's metadata to a JSON object."""
    text = json.dumps(value, ensure_ascii=False)
    for entry in model.metadata_props:
        if entry.key == key:
            entry.value = text
            return
    model.metadata_props.add(key=key, value=text)


def _sources(graph: onnx.GraphProto, names: Sequence[str]) -> dict[str, str]:
    """Where the content of ``names`` comes from: "zero", "constant" (not all zero), or "computed" (inputs included)."""
    relevant = _ancestors(graph, names)
    stored = Counter(t.name for t in graph.initializer)
    found = {t.name: "zero" if _is_zero(t) else "constant" for t in graph.initializer if t.name in relevant}
    found |= {name: "computed" for name, count in stored.items() if count > 1}  # engines differ in which one they take
    found |= {t.values.name: "computed" for t in graph.sparse_initializer}
    found |= {value.name: "computed" for value in graph.input}
    for node in graph.node:  # sorted topologically: a loop where recursion would go as deep as the network
        if relevant.intersection(node.output):
            found |= dict.fromkeys(node.output, _node_source(node, [found.get(i, "computed") for i in node.input]))
    return {name: found.get(name, "computed") for name in names}


def _node_source(node: onnx.NodeProto, operands: list[str]) -> str:
    """The source of a node's outputs, from the sources of its inputs."""
    if node.domain not in ("", "ai.onnx") or node.op_type.startswith("Random") or any(True for _ in subgraphs(node)):
        return "computed"
    if node.op_type == "Constant":
        return "zero" if _is_zero(node.attribute[0]) else "constant"
    if node.op_type == "ConstantOfShape":  # whatever the shape is
        filling = [a for a in node.attribute if a.name == "value"]
        return "zero" if not filling or _is_zero(filling[0]) else "constant"
    if node.op_type in _MOVES:
        which = _MOVES[node.op_type]
        operands = [o for k, o in enumerate(operands) if node.input[k] and (which is None or k in which)]
        if set(operands) == {"zero"}:
            return "zero"
    return "constant" if operands and "computed" not in operands else "computed"


def _is_zero(value: onnx.TensorProto | onnx.AttributeProto) -> bool:
    """Whether a constant holds zeros only. A tensor whose data is in another file is taken as a weight: not zero."""
    if isinstance(value, onnx.AttributeProto):
        content = helper.get_attribute_value(value)
        if not isinstance(content, TensorProto):
            return not np.any(np.asarray(content)) if value.name.startswith(("value_float", "value_int")) else False
        value = content
    return value.data_location != TensorProto.EXTERNAL and not np.any(numpy_helper.to_array(value))


def _state_dims(
    graph: onnx.GraphProto, node: onnx.NodeProto, shapes: dict[str, list[int | str | None]], unknown: str
) -> list[int | str]:
    """[S, N, B, H*D] of a node's states; B has the name or size of the batch dimension of ``wx``, else ``unknown``."""
    layout = next(a.i for a in node.attribute if a.name == "layout")
    r = shapes.get(node.input[1])
    states = [s for s in (shapes.get(node.input[4]), shapes.get(node.output[1])) if s is not None and len(s) == 4]
    if r is not None and len(r) == 5 and isinstance(r[0], int) and isinstance(r[2], int) and isinstance(r[3], int):
        dims: list[int | str | None] = [CELL_OF_OP[node.op_type].num_states, r[0], None, r[2] * r[3]]
    else:
        dims = next((list(s) for s in states), [CELL_OF_OP[node.op_type].num_states, None, None, None])
    wx = shapes.get(node.input[0])
    batches = [wx[1 - layout]] if wx is not None and len(wx) == 3 else []
    batches += [s[2] for s in states]
    dims[2] = next((b for b in batches if isinstance(b, str)), next((b for b in batches if b is not None), unknown))
    return [d if d is not None else f"{unknown}.{axis}" for axis, d in enumerate(dims)]


def _made_batches(graph: onnx.GraphProto, nodes: Sequence[onnx.NodeProto], shapes: Shapes) -> dict[str, str]:
    """Nodes whose batch no caller could give a state for, by their first output, with the reason.

    Such a batch is an expression that no input has as a dimension, or a number of steps: it changes between two chunks.
    """
    given = {dim for value in free_inputs(graph) for dim in shape_of(value) or ()}
    steps, batches = set(), {}
    for node in nodes:
        layout = next(a.i for a in node.attribute if a.name == "layout")
        wx = shapes.get(node.input[0]) or []
        if len(wx) == 3:
            steps.add(wx[layout])
            batches[node.output[0]] = wx[1 - layout]
    return {
        output: f"its batch is {dim}, so that its state cannot be an input"
        for output, dim in batches.items()
        if isinstance(dim, str) and (dim in steps or (dim not in given and not re.fullmatch(r"[\w.]+", dim)))
    }


def _walk_fed(graph: onnx.GraphProto, outside: set[str]) -> Iterator[tuple[set[str], onnx.GraphProto]]:
    """Every graph, with the names whose content (a shape is none) is computed from the names ``outside``."""
    fed = set(outside)
    for node in graph.node:
        if node.op_type not in ("Shape", "Size") and not fed.isdisjoint(operands_of(node)):
            fed.update(filter(None, node.output))
    yield fed, graph
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _walk_fed(inner, fed)


def _ancestors(graph: onnx.GraphProto, names: Sequence[str]) -> set[str]:
    """``names`` and every name whose content (a shape is none) they are computed from."""
    producers = producers_of(graph)
    seen: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name and name not in seen:
            seen.add(name)
            node = producers.get(name)
            if node is not None and node.op_type not in ("Shape", "Size"):
                pending += operands_of(node)
    return seen
