"""The traced program as a finished ONNX graph: one node per layer, names, shapes, function bodies, metadata."""

from __future__ import annotations

import re
from typing import Any

import onnx
import onnxscript
import torch

from flashrnn_deploy import functions, op
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import swap
from flashrnn_deploy.exporters.axes import Axes
from flashrnn_deploy.exporters.observe import Observation
from flashrnn_deploy.exporters.onnx_edit import all_names, rename, unique
from flashrnn_deploy.exporters.opset17 import lower_to_17
from flashrnn_deploy.exporters.states import STATES_KEY, write_axes, write_metadata
from flashrnn_deploy.exporters.tracing import first_line, quiet, symbol_names
from flashrnn_deploy.graph import shape_of, walk_nodes

DEFAULT_OPSET = 17
TORCH_LOWEST_OPSET = 18
NEWEST_OPSET = 23

_OWN = "flashrnn.own."
"""Put before names while torch writes the graph: it does not keep its own names of values apart from ours."""


def _translate(
    wx: Any,
    r: Any,
    b: Any,
    sequence_lens: Any,
    initial_states: Any,
    cell: str,
    layout: int,
    reverse: int,
    clip: float,
    relu: int,
    normalizer_floor: float,
) -> Any:
    """torch.ops.flashrnn.rnn -> the ONNX op of the cell, with every attribute written."""
    values = {"layout": layout, "reverse": reverse, "clip": clip, "relu": relu, "normalizer_floor": normalizer_floor}
    op_type = CELLS[cell].op_type
    kept = {name: op.attribute_type(name)(values[name]) for name in op.attribute_names(op_type)}
    domain = onnxscript.values.Opset(op.DOMAIN, op.OPSET_VERSION)
    return getattr(domain, op_type)(wx, r, b, sequence_lens, initial_states, **kept, **op.PLUGIN_ATTRIBUTES)


def to_onnx(
    program: torch.export.ExportedProgram, seen: Observation, axes: Axes, opset: int | None, notes: list[str]
) -> onnx.ModelProto:
    """The program as ONNX, without function bodies; a note says where the default opset was not enough.

    Raises:
        FlashRNNError: torch has no translation for an operator, or the opset that was asked for is too old.
    """
    symbols = symbol_names(program, seen, axes)
    with torch.no_grad(), quiet():
        try:
            converted = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=max(opset or DEFAULT_OPSET, TORCH_LOWEST_OPSET),
                custom_translation_table={torch.ops.flashrnn.rnn.default: _translate},
                input_names=[f"{_OWN}{v.name}" for v in seen.inputs],
                output_names=[f"{_OWN}{v.name}" for v in seen.outputs],
                verbose=False,
            )
        except Exception as error:
            raise FlashRNNError(f"torch.onnx cannot write the model: {first_line(error)}") from error
    assert converted is not None
    model = converted.model_proto
    _rename_dims(model, symbols)
    _rename_ends(model)
    if (opset or DEFAULT_OPSET) == 17 and (reason := lower_to_17(model)):
        if opset is not None:
            raise FlashRNNError(f"--opset 17: {reason}; leave --opset out or give a newer one")
        notes.append(f"written at opset 18: {reason}")
    return model


def _rename_ends(model: onnx.ModelProto) -> None:
    """Give inputs and outputs their names, which torch may have given to other values: an argument called mean."""
    graph, taken = model.graph, all_names(model)
    ends = [v.name for v in (*graph.input, *graph.output) if v.name.startswith(_OWN)]
    new_names = {name: name.removeprefix(_OWN) for name in ends}
    new_names |= {name: unique(f"{name}.inner", taken) for name in taken.intersection(new_names.values())}
    rename(graph, new_names)
    for value in (*graph.input, *graph.initializer):
        value.name = new_names.get(value.name, value.name)


def _rename_dims(model: onnx.ModelProto, symbols: dict[str, str]) -> None:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda m: symbols.get(m[0], m[0]), dim.dim_param)


def finish(model: onnx.ModelProto, states: dict[str, str]) -> None:
    """Shapes behind each node, function bodies, metadata; then the checker.

    Args:
        model: changed in place.
        states: state input -> state output.
    """
    _write_shapes(model)
    functions.add_functions(model)
    model.ir_version = max(8, onnx.helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True))
    model.producer_name, model.producer_version = "flashrnn_deploy", ""
    model.doc_string = ""
    del model.metadata_props[:]
    write_metadata(model, STATES_KEY, states)
    write_axes(model)
    for item in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output, model.graph):
        del item.metadata_props[:]  # the exporter's notes: stack traces with paths of this machine
        item.doc_string = ""
    onnx.checker.check_model(model, full_check=True)


def name_nodes(model: onnx.ModelProto, wrapped: bool) -> None:
    """Name each flashrnn node after its layer's place in the module, or in the one inside: rnn.l0, rnn.l1, ..."""
    count: dict[str, int] = {}
    for node in walk_nodes(model):
        if op.is_flashrnn(node):
            scopes = next((p.value for p in node.metadata_props if p.key == "pkg.torch.onnx.name_scopes"), "")
            found = [s for s in re.findall(r"'([^']*)'", scopes) if s]
            inner = next((s for s in found if swap.CHILD in s.split(".")), found[-2] if len(found) > 1 else "")
            path = swap.visible_path(inner.removeprefix("inner.") if wrapped else inner) or "rnn"
            node.name = f"{path}.l{count.setdefault(path, 0)}"
            count[path] += 1


def notes_on_time(model: onnx.ModelProto, seen: Observation, axes: Axes) -> list[str]:
    """One note for each layer whose number of steps is fixed: an axis that was not named is kept at its size.

    A waveform [B, samples] is such an input, for the default rules take two axes for a batch of features.
    """
    where = "no dynamic axis is its time (--dynamic NAME:AXIS=DIM)"
    floats = [
        (value, entry)
        for value, entry in zip(seen.inputs, axes, strict=True)
        if value.tensor.is_floating_point() and not value.feeds_state and not value.carried
    ]
    fixed = [(v, axis) for v, entry in floats for axis in range(v.tensor.dim()) if axis not in entry]
    if fixed and all(value.tensor.dim() == 2 for value, _ in floats):
        (value, axis), place = fixed[-1], f"{fixed[-1][0].name}:{fixed[-1][1]}"
        where = f"{place} keeps the example's size, {value.tensor.shape[axis]} (--dynamic {place}=time)"
    shapes = {v.name: shape_of(v) for v in (*model.graph.value_info, *model.graph.output)}
    notes = []
    for node in filter(op.is_flashrnn, model.graph.node):
        layout = next(a.i for a in node.attribute if a.name == "layout")
        steps = (shapes.get(node.output[0]) or [None, None])[layout]
        if isinstance(steps, int) and steps > 1:
            notes.append(f"{node.name} runs {steps} steps whatever is fed: {where}")
    return notes


def _write_shapes(model: onnx.ModelProto) -> None:
    """value_info of y and final_states of every flashrnn node: shape inference through a body loses them."""
    inferred = onnx.shape_inference.infer_shapes(model)
    known = {v.name: v for v in (*inferred.graph.value_info, *inferred.graph.output)}
    present = {v.name for v in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        if op.is_flashrnn(node):
            for name in node.output:
                if name not in present and name in known:
                    model.graph.value_info.append(known[name])
