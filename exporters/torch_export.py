"""A PyTorch module with FlashRNN layers, as one ONNX file."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnxscript
import torch
from onnx import helper
from torch import nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
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
from flashrnn_deploy.exporters.validate import like, valid_lengths, validate
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
    args = axes_.resize(args, axes, _traced_sizes(sizes))
    with swap.stand_ins():
        program = _trace(module, args, axes, seen)
    upcast = swapped and dtype not in (None, "float32")
    judge = copy.deepcopy(original).float() if upcast else original  # torch.nn's layers keep half states in half
    _check_ranges(program, judge, like(judge, args) if upcast else args, axes, seen)
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
        raise FlashRNNError(f"{type(module).__name__} cannot be copied: {_first_line(error)}") from error
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


def _check_ranges(
    program: torch.export.ExportedProgram, module: nn.Module, args: tuple[Any, ...], axes: axes_.Axes, seen: Observation
) -> None:
    """Refuse an axis whose sizes the module's code divides into cases, of which a file would hold one.

    torch keeps the range of sizes for which its trace holds. A smallest size is fine where the module fails below it.
    """
    for value, entry, node in zip(seen.inputs, axes, _user_inputs(program), strict=True):
        for axis, name in entry.items():
            symbol = node.meta["val"].shape[axis].node.expr
            bounds = program.range_constraints.get(symbol)
            if bounds is None:
                continue
            lower, upper = bounds.lower, bounds.upper
            split = f"up to {upper}" if upper.is_finite and upper < 2**31 else ""
            if not split and lower > 2 and _runs_at(module, args, axes, seen, name, int(lower) - 1):
                split = f"from {lower}"
            if split:
                raise FlashRNNError(
                    f"input '{value.name}' axis {axis} ({name}) would hold for sizes {split} only, since the module's "
                    f"code branches or cuts at that size; rewrite it, or accept it with --static {value.name}:{axis}"
                )


def _runs_at(
    module: nn.Module, args: tuple[Any, ...], axes: axes_.Axes, seen: Observation, name: str, size: int
) -> bool:
    try:
        flat_call(module, valid_lengths(axes_.resize(args, axes, {name: size}), seen, {name: size}))
    except FlashRNNError:
        return False
    return True


def _traced_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes to trace at: torch takes a size of 1 for a constant, and may take equal sizes for the same dimension."""
    traced: dict[str, int] = {}
    for name, size in sizes.items():
        size = max(size, 2)
        while size in traced.values():
            size += 1
        traced[name] = size
    return traced


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


def _trace(
    module: nn.Module, args: tuple[Any, ...], axes: axes_.Axes, seen: Observation
) -> torch.export.ExportedProgram:
    """``torch.export`` with automatic axes, and a refusal that names the line which fixed an axis."""
    entries = iter(axes)
    leaves, spec = pytree.tree_flatten(args)
    auto = [
        {axis: torch.export.Dim.AUTO for axis in next(entries)} if isinstance(leaf, torch.Tensor) else None
        for leaf in leaves
    ]
    shapes = pytree.tree_unflatten(auto, spec)
    fixed = _positional_before_args(module)
    if fixed is not None:  # what goes to *args is one parameter to torch
        shapes = (*shapes[:fixed], shapes[fixed:])
    with torch.no_grad(), _quiet():
        try:
            program = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
        except FlashRNNError:
            raise
        except Exception as error:
            raise FlashRNNError(f"torch.export cannot trace {type(module).__name__}: {_first_line(error)}") from error
    inputs = _user_inputs(program)
    for value, entry, node in zip(seen.inputs, axes, inputs, strict=True):
        for axis, name in entry.items():
            size = node.meta["val"].shape[axis]
            if is_concrete_int(size):
                where = _line_that_fixed(program, node, int(size))
                raise FlashRNNError(
                    f"input '{value.name}' axis {axis} ({name}) would be frozen at {size}{where}; rewrite that line "
                    f"without a loop or Python number over the axis, or accept it with --static {value.name}:{axis}"
                )
    return program


def _positional_before_args(module: nn.Module) -> int | None:
    """Number of parameters of forward before ``*args``, None without one."""
    kinds = [p.kind for p in inspect.signature(module.forward).parameters.values()]
    return kinds.index(inspect.Parameter.VAR_POSITIONAL) if inspect.Parameter.VAR_POSITIONAL in kinds else None


def _user_inputs(program: torch.export.ExportedProgram) -> list[torch.fx.Node]:
    names = set(program.graph_signature.user_inputs)
    return [
        node
        for node in program.graph.nodes
        if node.op == "placeholder" and node.name in names and isinstance(node.meta.get("val"), torch.Tensor)
    ]


def _line_that_fixed(program: torch.export.ExportedProgram, node: torch.fx.Node, size: int) -> str:
    """The words "by FILE:LINE in FUNCTION", from torch's record of why a symbol became a number."""
    shape_env = node.meta["val"].fake_mode.shape_env
    for symbol, value in shape_env.replacements.items():
        sloc = getattr(shape_env, "replacements_slocs", {}).get(symbol)
        if value == size and sloc is not None:
            frame = sloc.maybe_user_loc or sloc.framework_loc
            if not hasattr(frame, "lineno"):
                match = re.search(r"([^/\s(]+\.py:\d+ in \w+)", str(frame))
                return f" by {match[1]}" if match else ""
            if Path(frame.filename).is_relative_to(Path(torch.__file__).parent):
                return _line_that_cuts(program)
            return f" by {Path(frame.filename).name}:{frame.lineno} in {frame.name}"
    return ""


def _line_that_cuts(program: torch.export.ExportedProgram) -> str:
    """The same for an operator that takes a tensor apart, as split and unbind do: torch's record names itself there."""
    for node in program.graph.nodes:
        if node.op == "call_function" and re.match(r"aten\.(select|slice|split|unbind|chunk)", str(node.target)):
            lines = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', node.meta.get("stack_trace") or "")
            own = [line for line in lines if not Path(line[0]).is_relative_to(Path(torch.__file__).parent)]
            if own:
                return f" by {Path(own[-1][0]).name}:{own[-1][1]} in {own[-1][2]}"
    return ""


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
    symbols = _symbol_names(program, seen, axes)
    with torch.no_grad(), _quiet():
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
            raise FlashRNNError(f"torch.onnx cannot write the model: {_first_line(error)}") from error
    assert converted is not None
    model = converted.model_proto
    _rename_dims(model, symbols)
    if (opset or DEFAULT_OPSET) == 17 and (reason := lower_to_17(model)):
        if opset is not None:
            raise FlashRNNError(f"--opset 17: {reason}; leave --opset out or give a newer one")
        notes.append(f"written at opset 18: {reason}")
    return model


def _symbol_names(program: torch.export.ExportedProgram, seen: Observation, axes: axes_.Axes) -> dict[str, str]:
    """torch's symbol (s27) -> the dimension's name; one symbol with two names is refused."""
    names: dict[str, str] = {}
    where: dict[str, str] = {}
    for value, entry, node in zip(seen.inputs, axes, _user_inputs(program), strict=True):
        for axis, name in entry.items():
            symbol, place = str(node.meta["val"].shape[axis]), f"{value.name}:{axis}"
            if names.setdefault(symbol, name) != name:
                raise FlashRNNError(
                    f"{where[symbol]} ({names[symbol]}) and {place} ({name}) are always equal in this model; "
                    f"give them one name with --dynamic {place}={names[symbol]}, or fix one with --static {place}"
                )
            where.setdefault(symbol, place)
    return names


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


def _first_line(error: BaseException) -> str:
    """The deepest cause in one line, with the last line of the user's code that it passed."""
    while error.__cause__ is not None:
        error = error.__cause__
    libraries = (Path(torch.__file__).parent, Path(op.__file__).parent, Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file() and not any(Path(frame.filename).is_relative_to(lib) for lib in libraries)
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's progress prints and deprecation notes; errors still propagate."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        sink = io.StringIO()  # torch prints progress, and whole graphs when it fails
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
