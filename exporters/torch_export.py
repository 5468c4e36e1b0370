"""A PyTorch module with FlashRNN layers, as one ONNX file."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper
from torch import nn
from torch.utils import _pytree as pytree

from flashrnn_deploy import op
from flashrnn_deploy.bfloat16 import NOT_ON_CPU, uses_bfloat16
from flashrnn_deploy.cells import CELL_OF_OP
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import axes as axes_
from flashrnn_deploy.exporters import registry, swap
from flashrnn_deploy.exporters.calls import flat_call
from flashrnn_deploy.exporters.dynamic_shapes import given_axes, largest_sizes
from flashrnn_deploy.exporters.factory import Example, load_factory, unwrapped
from flashrnn_deploy.exporters.half_states import keep_states_float
from flashrnn_deploy.exporters.hidden import StatesAsInputs, with_hidden_states
from flashrnn_deploy.exporters.observe import Observation, observe
from flashrnn_deploy.exporters.states import expose_states as expose_default_states
from flashrnn_deploy.exporters.states import kept_states
from flashrnn_deploy.exporters.torch_checks import check_repeatable, notes_on_weights, private_copy
from flashrnn_deploy.exporters.torch_graph import (
    DEFAULT_OPSET,
    NEWEST_OPSET,
    finish,
    name_nodes,
    notes_on_time,
    to_onnx,
)
from flashrnn_deploy.exporters.tracing import check_ranges, trace, traced_sizes
from flashrnn_deploy.exporters.validate import validate
from flashrnn_deploy.files import new_file
from flashrnn_deploy.graph import opset_of, shape_of, walk_nodes


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
    with swap.runnable_calls(), torch.compiler.set_stance("force_eager"):  # compiled parts run as they are written
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
    original, args = private_copy(unwrapped(module), args)
    notes = notes_on_weights(original)
    original, args, state_notes = with_hidden_states(original, args, expose_states)
    notes += state_notes
    module, swapped = _swapped(original, args)
    with swap.stand_ins():
        seen = observe(module, args)
    check_repeatable(original, args)
    if not seen.layers:
        raise FlashRNNError(
            f"{type(module).__name__} ran no recurrent layer: there is nothing to export (torch.onnx writes such a "
            f"module; the layers that are known are {', '.join(registry.registered())} and MultiHeadRNN)"
        )
    axes = axes_.default_axes(seen)
    if dynamic_shapes is not None:
        axes = given_axes(seen, module, args, dynamic_shapes, axes)
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
    smallest = check_ranges(program, axes, seen)
    model = to_onnx(program, seen, axes, opset, notes)
    name_nodes(model, isinstance(module, StatesAsInputs))
    keep_states_float(model, [v.name for v in seen.outputs if v.is_state])
    states, kept = dict(seen.state_pairs), dict[str, str]()
    if expose_states:
        states |= expose_default_states(model)
        kept = kept_states(model)
    finish(model, states)
    notes += notes_on_time(model, seen, axes)
    if uses_bfloat16(model):
        notes.append(NOT_ON_CPU)
    example = Example(original, args)
    notes += validate(model, judge, args, axes, sizes, smallest, largest_sizes(dynamic_shapes), seen, upcast)
    return Export(model, example, _report(model, states, kept, notes))


def _swapped(original: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, bool]:
    """A copy of the module whose recurrent layers call the op, and whether any layer was replaced."""
    flat_call(original, args)  # weights that are made by a call are up to date then
    module = copy.deepcopy(original)
    return module, bool(swap.swap(module))


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


def _report(model: onnx.ModelProto, states: dict[str, str], kept: dict[str, str], notes: list[str]) -> dict[str, Any]:
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
        "states_kept": kept,
        "warnings": notes,
    }
