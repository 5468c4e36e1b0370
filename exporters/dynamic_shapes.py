"""A factory's ``dynamic_shapes``, in the form that ``torch.export.export`` takes, as named axes."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.axes import Axes
from flashrnn_deploy.exporters.calls import bind
from flashrnn_deploy.exporters.observe import Observation, Value


def given_axes(seen: Observation, module: nn.Module, args: tuple[Any, ...], shapes: Any, default: Axes) -> Axes:
    """The axes that ``shapes`` says may vary.

    A dimension is a ``Dim``, a name, ``Dim.AUTO`` or ``Dim.DYNAMIC`` (named as ``default`` names the axis), or fixed:
    None, ``Dim.STATIC`` or the example's size.

    Raises:
        FlashRNNError: ``shapes`` has another structure than the arguments, or names an axis that is not there.
    """
    bound = bind(module, args)
    if not isinstance(shapes, (dict, tuple, list)):
        raise FlashRNNError(f"dynamic_shapes must be a dict or a tuple with an entry per argument, not {_text(shapes)}")
    if isinstance(shapes, dict):
        if unknown := [name for name in shapes if name not in bound]:
            raise FlashRNNError(f"dynamic_shapes names {unknown[0]!r}; forward was called with {', '.join(bound)}")
    elif len(shapes) != len(bound):
        raise FlashRNNError(
            f"dynamic_shapes has {len(shapes)} entries; forward was called with {len(bound)}: {', '.join(bound)}"
        )
    per_parameter = shapes if isinstance(shapes, dict) else dict(zip(bound, shapes, strict=True))
    axes: Axes = []
    values = iter(zip(seen.inputs, default, strict=True))
    for parameter, argument in bound.items():
        _read(parameter, argument, per_parameter.get(parameter), values, axes)
    return axes


def largest_sizes(shapes: Any) -> dict[str, int]:
    """The upper bound of each ``Dim`` that has one, by its name."""
    dims = [dim for dim in pytree.tree_leaves(shapes) if isinstance(dim, Dim)]
    return {dim.__name__: int(dim.max) for dim in dims if dim.max < 2**31}


def _read(where: str, tree: Any, shapes: Any, values: Any, axes: Axes) -> None:
    """Append the axes of every tensor in ``tree``, one argument or a part of it."""
    if isinstance(tree, Tensor):
        value, default = next(values)
        axes.append(_of_tensor(value, shapes, default))
    elif isinstance(tree, dict):
        if shapes is not None and (not isinstance(shapes, dict) or set(shapes) - set(tree)):
            raise FlashRNNError(f"dynamic_shapes: '{where}' has the keys {', '.join(map(str, tree))}, {_not(shapes)}")
        for key, item in tree.items():
            _read(f"{where}_{key}", item, (shapes or {}).get(key), values, axes)
    elif isinstance(tree, (tuple, list)):
        if shapes is not None and (not isinstance(shapes, (tuple, list)) or len(shapes) != len(tree)):
            raise FlashRNNError(f"dynamic_shapes: '{where}' has {len(tree)} parts, {_not(shapes)}")
        for i, item in enumerate(tree):
            _read(f"{where}_{i}", item, None if shapes is None else shapes[i], values, axes)


def _of_tensor(value: Value, shapes: Any, default: dict[int, str]) -> dict[int, str]:
    rank = value.tensor.dim()
    if shapes is None:
        return {}
    if not isinstance(shapes, (dict, tuple, list)):
        raise FlashRNNError(f"dynamic_shapes: '{value.name}' is a tensor with {rank} axes, {_not(shapes)}")
    if not isinstance(shapes, dict) and len(shapes) != rank:
        raise FlashRNNError(f"dynamic_shapes: '{value.name}' has {rank} axes, but {len(shapes)} entries")
    axes = {}
    for axis, dim in shapes.items() if isinstance(shapes, dict) else enumerate(shapes):
        if type(axis) is not int or not -rank <= axis < rank:
            raise FlashRNNError(f"dynamic_shapes: '{value.name}' has {rank} axes and no axis {axis!r}")
        name = _name(value, axis % rank, dim, default)
        if name is not None:
            axes[axis % rank] = name
    return axes


def _name(value: Value, axis: int, dim: Any, default: dict[int, str]) -> str | None:
    """The name of a dimension that may vary, None for a fixed one."""
    size, where = value.tensor.shape[axis], f"dynamic_shapes: '{value.name}' axis {axis}"
    if dim is None or (type(dim) is int and dim == size):
        return None
    if type(dim) is int:
        raise FlashRNNError(f"{where} is {dim}, but the example has {size} there")
    if isinstance(dim, type(Dim.AUTO)):
        return None if dim.type == Dim.STATIC.type else default.get(axis, f"{value.name}_dim{axis}")
    name = dim if isinstance(dim, str) else getattr(dim, "__name__", None) if isinstance(dim, Dim) else None
    if name is None:
        raise FlashRNNError(f"{where} must be a Dim, a name or None, {_not(dim)}")
    if not name.isidentifier():  # a derived dimension, as 2*t, is one too
        raise FlashRNNError(f"{where}: the dimension '{name}' must be a plain name, as in Dim('time')")
    return name


def _not(shapes: Any) -> str:
    return f"not {_text(shapes)}"


def _text(shapes: Any) -> str:
    return f"{type(shapes).__name__} {shapes!r}"[:80]
