"""A PyTorch module with FlashRNN layers, as one ONNX file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from onnx import helper
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from flashrnn_deploy import functions, op
from flashrnn_deploy.cells import CELL_OF_OP, CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import axes as axes_
from flashrnn_deploy.exporters import registry, swap, xlstm_modules
from flashrnn_deploy.exporters.calls import flat_call, tensors_of, varied
from flashrnn_deploy.exporters.factory import Example, load_factory
from flashrnn_deploy.exporters.half_states import keep_states_float
from flashrnn_deploy.exporters.hidden import StatesAsInputs, with_hidden_states
from flashrnn_deploy.exporters.observe import Observation, observe
from flashrnn_deploy.exporters.opset17 import lower_to_17
from flashrnn_deploy.exporters.states import AXES_KEY, STATES_KEY
from flashrnn_deploy.exporters.states import expose_states as expose_default_states
from flashrnn_deploy.exporters.tracing import check_ranges, first_line, quiet, symbol_names, trace, traced_sizes
from flashrnn_deploy.exporters.validate import like, validate
from flashrnn_deploy.files import new_file
from flashrnn_deploy.graph import opset_of, shape_of, walk_nodes

DEFAULT_OPSET = 17
TORCH_LOWEST_OPSET = 18
NEWEST_OPSET = 23


@dataclass(frozen=True)
class Export:
    """An exported model: the file's content, the example it came from, and a report for people and scripts."""

    model: onnx.ModelProto
    example: Example
    report: dict[str, Any]


def export_file(
    source: str,
    output: Path,
    *,
    weights: Path | None = None,
    dtype: str | None = None,
    opset: int | None = None,
    dynamic: Sequence[str] = (),
    static: Sequence[str] = (),
    expose_states: bool = False,
) -> dict[str, Any]:
    """``export`` for a FILE.py:FACTORY, written to ``output``; returns the report.

    Raises:
        FlashRNNError: as ``load_factory`` and ``export``, or the file cannot be written.
    """
    example = load_factory(source, weights)
    result = export(
        example.module,
        example.args,
        dynamic_shapes=example.dynamic_shapes,
        dtype=dtype,
        opset=opset,
        dynamic=dynamic,
        static=static,
        expose_states=expose_states,
    )
    with new_file(output) as path:
        onnx.save(result.model, path)
    return result.report


def export(
    module: nn.Module,
    args: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    dtype: str | None = None,
    opset: int | None = None,
    dynamic: Sequence[str] = (),
    static: Sequence[str] = (),
    expose_states: bool = False,
) -> Export:
    """Trace ``module(*args)`` and write it as ONNX with one ``flashrnn`` node per recurrent layer.

    The result is checked: by the ONNX checker, and, where ONNX Runtime is installed, by running it at other sizes of
    the dynamic axes and comparing with the module.

    Args:
        module: holds ``MultiHeadRNN``, torch.nn or registered layers; it is not changed, and exported in eval mode.
        args: example arguments of ``forward``; sizes of dynamic axes do not matter.
        dynamic_shapes: which axes may vary, in the form that ``torch.export.export`` takes; default: axes 0 and 1 of
            every float input of rank 3 or more (``axes.default_axes``).
        dtype: "float32", "float16" or "bfloat16" for weights and inputs, while states stay float32; default: as the
            module is.
        opset: ONNX opset, 17 to 23; default 17, or 18 where an operator needs it (the report says which).
        dynamic: further dynamic axes, "NAME:AXIS=DIM".
        static: axes to keep at the example's size, "NAME:AXIS".
        expose_states: make named inputs and outputs of states that start at zero or are kept in attributes.

    Raises:
        FlashRNNError: the module cannot be exported faithfully; the message names the axis, layer or attribute.
    """
    if dtype is not None and dtype not in op.DTYPES:
        raise FlashRNNError(f"dtype {dtype} is not one of {', '.join(op.DTYPES)}")
    if opset is not None and not DEFAULT_OPSET <= opset <= NEWEST_OPSET:
        raise FlashRNNError(f"opset {opset} is not one of {DEFAULT_OPSET} to {NEWEST_OPSET}")
    op.register_schemas()
    with swap.runnable_calls():
        return _export(module, args, dynamic_shapes, dtype, opset, dynamic, static, expose_states)


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    dynamic_shapes: Any,
    dtype: str | None,
    opset: int | None,
    dynamic: Sequence[str],
    static: Sequence[str],
    expose_states: bool,
) -> Export:
    original, args = _private_copy(module, args)
    original, args, notes = with_hidden_states(original, args, expose_states)
    module, swapped = _swapped(original, args)
    with swap.stand_ins():
        seen = observe(module, args)
    _check_repeatable(original, args)
    if not seen.layers:
        raise FlashRNNError(
            f"{type(module).__name__} ran no recurrent layer: there is nothing to export (torch.onnx writes such a "
            f"module; the layers that are known are {', '.join(registry.registered())} and MultiHeadRNN)"
        )
    axes = axes_.default_axes(seen) if dynamic_shapes is None else axes_.given_axes(seen, module, args, dynamic_shapes)
    axes = axes_.apply_options(seen, axes, dynamic, static)
    if dtype is not None:
        original, args = _cast(original, args, seen, dtype)
        module = module.to(getattr(torch, dtype))
    sizes = axes_.sizes_of(seen, axes)
    args = axes_.resize(args, axes, traced_sizes(sizes))
    with swap.stand_ins():
        program = trace(module, args, axes, seen)
    upcast = swapped and dtype not in (None, "float32")
    judge = copy.deepcopy(original).float() if upcast else original  # torch.nn's layers keep half states in half
    check_ranges(program, judge, like(judge, args) if upcast else args, axes, seen)
    model = _to_onnx(program, seen, axes, opset, notes)
    _name_nodes(model, isinstance(module, StatesAsInputs))
    keep_states_float(model, [v.name for v in seen.outputs if v.is_state])
    states = dict(seen.state_pairs)
    if expose_states:
        states |= expose_default_states(model)
    _finish(model, seen, axes, states)
    example = Example(original, args)
    notes += validate(model, judge, args, axes, sizes, seen, upcast)
    return Export(model, example, _report(model, states, notes))


def _private_copy(module: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of the module in eval mode, and of the arguments, in which no two share memory.

    Raises:
        FlashRNNError: the module holds float64 weights, or cannot be copied, or an argument is empty or packed.
    """
    if any(t.dtype == torch.float64 for t in (*module.parameters(), *tensors_of(args))):
        raise FlashRNNError("the module or its example is float64, which the op does not have: use .float()")
    if any(isinstance(a, PackedSequence) for a in pytree.tree_leaves(args, lambda a: isinstance(a, PackedSequence))):
        raise FlashRNNError(
            "an example argument is a PackedSequence; give forward a padded tensor and its lengths, and pack them there"
        )
    for tensor in tensors_of(args):
        if tensor.numel() == 0:
            raise FlashRNNError(f"an example argument is empty ({list(tensor.shape)}): give at least one step and row")
    try:
        module = xlstm_modules.runnable(copy.deepcopy(module).eval())
    except Exception as error:  # whatever a module's own attributes raise
        raise FlashRNNError(f"{type(module).__name__} cannot be copied: {first_line(error)}") from error
    own: tuple[Any, ...] = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, args)
    return module, own


def _swapped(original: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, bool]:
    """A copy of the module whose recurrent layers call the op, and whether any layer was replaced."""
    flat_call(original, args)  # weights that are made by a call, as torch's older weight_norm does, are up to date then
    module = copy.deepcopy(original)
    return module, bool(swap.swap(module))


def _check_repeatable(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse a module whose result is not a function of its arguments."""
    args = varied(args)
    for a, b in zip(flat_call(module, args), flat_call(module, args), strict=True):
        if not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            raise FlashRNNError(
                f"{type(module).__name__} gives two results for one input (dropout outside of eval mode, random "
                "numbers, or state kept outside of its attributes)"
            )


def _cast(module: nn.Module, args: tuple[Any, ...], seen: Observation, dtype: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of the module in ``dtype``, and the arguments likewise; states stay float32."""
    torch_dtype = getattr(torch, dtype)
    values = iter(seen.inputs)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        keep = next(values).feeds_state or not leaf.is_floating_point()
        return leaf if keep else leaf.to(torch_dtype)

    args = pytree.tree_map(one, args)
    return copy.deepcopy(module).to(torch_dtype), args


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


def _to_onnx(
    program: torch.export.ExportedProgram, seen: Observation, axes: axes_.Axes, opset: int | None, notes: list[str]
) -> onnx.ModelProto:
    symbols = symbol_names(program, seen, axes)
    with torch.no_grad(), quiet():
        try:
            converted = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=max(opset or DEFAULT_OPSET, TORCH_LOWEST_OPSET),
                custom_translation_table={torch.ops.flashrnn.rnn.default: _translate},
                input_names=[v.name for v in seen.inputs],
                output_names=[v.name for v in seen.outputs],
                verbose=False,
            )
        except Exception as error:
            raise FlashRNNError(f"torch.onnx cannot write the model: {first_line(error)}") from error
    assert converted is not None
    model = converted.model_proto
    _rename_dims(model, symbols)
    if (opset or DEFAULT_OPSET) == 17 and (reason := lower_to_17(model)):
        if opset is not None:
            raise FlashRNNError(f"--opset 17: {reason}; leave --opset out or give a newer one")
        notes.append(f"written at opset 18: {reason}")
    return model


def _rename_dims(model: onnx.ModelProto, symbols: dict[str, str]) -> None:
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda m: symbols.get(m[0], m[0]), dim.dim_param)


def _finish(model: onnx.ModelProto, seen: Observation, axes: axes_.Axes, states: dict[str, str]) -> None:
    """Shapes behind each node, function bodies, metadata; then the checker."""
    _write_shapes(model)
    functions.add_functions(model)
    model.ir_version = max(8, onnx.helper.find_min_ir_version_for(list(model.opset_import), ignore_unknown=True))
    model.producer_name, model.producer_version = "flashrnn_deploy", ""
    model.doc_string = ""
    _write_metadata(model, axes, states)
    for item in (*model.graph.node, *model.graph.value_info, *model.graph.input, *model.graph.output, model.graph):
        del item.metadata_props[:]  # the exporter's notes: stack traces with paths of this machine
        item.doc_string = ""
    onnx.checker.check_model(model, full_check=True)


def _name_nodes(model: onnx.ModelProto, wrapped: bool) -> None:
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


def _write_metadata(model: onnx.ModelProto, axes: axes_.Axes, states: dict[str, str]) -> None:
    places = {}
    for value in (*model.graph.input, *model.graph.output):
        shape = shape_of(value) or []
        places[value.name] = {
            key: shape.index(name) if name in shape else None
            for key, name in (("time", axes_.TIME), ("batch", axes_.BATCH))
        }
    helper.set_model_props(model, {AXES_KEY: json.dumps(places), STATES_KEY: json.dumps(states)})


def _report(model: onnx.ModelProto, states: dict[str, str], notes: list[str]) -> dict[str, Any]:
    def describe(values: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": v.name,
                "dtype": helper.tensor_dtype_to_string(v.type.tensor_type.elem_type).removeprefix("TensorProto."),
                "shape": shape_of(v),
            }
            for v in values
        ]

    return {
        "opset": opset_of(model),
        "ir_version": model.ir_version,
        "inputs": describe(model.graph.input),
        "outputs": describe(model.graph.output),
        "nodes": [
            {"name": n.name, "op": n.op_type, "cell": CELL_OF_OP[n.op_type].name}
            for n in walk_nodes(model)
            if op.is_flashrnn(n)
        ],
        "states": states,
        "warnings": notes,
    }
