"""Tracing a module with ``torch.export``, and refusing what a trace would freeze."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import textwrap
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import is_concrete_int
from torch.utils import _pytree as pytree

import flashrnn_deploy
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.axes import Axes, resize
from flashrnn_deploy.exporters.calls import flat_call
from flashrnn_deploy.exporters.observe import Observation


def trace(module: nn.Module, args: tuple[Any, ...], axes: Axes, seen: Observation) -> torch.export.ExportedProgram:
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
    with torch.no_grad(), quiet():
        try:
            program = torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
        except FlashRNNError:
            raise
        except Exception as error:
            hint = _sizes_that_fail(module, args, axes, seen)
            raise FlashRNNError(
                f"torch.export cannot trace {type(module).__name__}: {first_line(error)}{hint}"
            ) from error
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


def _sizes_that_fail(module: nn.Module, args: tuple[Any, ...], axes: Axes, seen: Observation) -> str:
    """A hint at the dimension whose sizes the module itself does not take, "" where that is not why a trace failed.

    Args:
        args: of the sizes that were traced, not the example's.
    """
    if _runs(module, args):
        return ""
    for value, entry in zip(seen.inputs, axes, strict=True):
        for axis, name in entry.items():
            size = value.tensor.shape[axis]
            if _runs(module, resize(args, axes, {name: size})):
                place = f"{value.name}:{axis}"
                return (
                    f"; it runs where {place}, the axis '{name}', has {size} as in the example: fix it with --static "
                    f"{place}, and name the axis that does vary with --dynamic {value.name}:AXIS={name}"
                )
    return ""


def _runs(module: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        flat_call(module, args)
    except FlashRNNError:
        return False
    return True


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


def check_ranges(program: torch.export.ExportedProgram, axes: Axes, seen: Observation) -> dict[str, int]:
    """Refuse an axis whose sizes the module's code cuts off above; torch keeps the range for which its trace holds.

    Returns:
        the smallest size of each dimension for which the trace is known to hold. Below, the module may fail, or
        compute the same all the same: torch sets a bound wherever a derived size would be 1, as behind a pooling.
    """
    smallest: dict[str, int] = {}
    for value, entry, node in zip(seen.inputs, axes, _user_inputs(program), strict=True):
        for axis, name in entry.items():
            bounds = program.range_constraints.get(node.meta["val"].shape[axis].node.expr)
            if bounds is None:
                continue
            if bounds.upper.is_finite and bounds.upper < 2**31:
                raise FlashRNNError(divides(value.name, axis, name, f"up to {bounds.upper}"))
            smallest[name] = max(int(bounds.lower), smallest.get(name, 0))
    return smallest


def divides(name: str, axis: int, dim: str, sizes: str) -> str:
    """The refusal of an axis whose sizes the module's code divides into cases, of which a file would hold one."""
    return (
        f"input '{name}' axis {axis} ({dim}) would hold for sizes {sizes} only, since the module's code branches or "
        f"cuts at that size; rewrite it, or accept it with --static {name}:{axis}"
    )


def traced_sizes(sizes: dict[str, int]) -> dict[str, int]:
    """Sizes to trace at: torch takes a size of 1 for a constant, and may take equal sizes for the same dimension."""
    traced: dict[str, int] = {}
    for name, size in sizes.items():
        size = max(size, 2)
        while size in traced.values():
            size += 1
        traced[name] = size
    return traced


def symbol_names(program: torch.export.ExportedProgram, seen: Observation, axes: Axes) -> dict[str, str]:
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


def first_line(error: BaseException) -> str:
    """The deepest cause in one line, with the last line of the user's code that it passed."""
    while error.__cause__ is not None:
        error = error.__cause__
    libraries = (Path(torch.__file__).parent, Path(flashrnn_deploy.__file__).parent, Path(__file__).parent)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file() and not any(Path(frame.filename).is_relative_to(lib) for lib in libraries)
    ]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 300, placeholder=' ...')}{where}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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
