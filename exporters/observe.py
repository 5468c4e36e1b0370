"""What a module's example call tells: names of inputs and outputs, which tensors are states or lengths.

The module runs once in eager mode, and every call of a recurrent layer is recorded. A tensor that a layer takes as
state, and that shares its memory with an argument, makes that argument a state input; outputs are matched in the same
way. An argument that reaches a layer's state element by element, unchanged or set to zero, is a state input too: rows
are reset by a mask like that.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.calls import bind, call, tensors_of, varied
from flashrnn_deploy.exporters.hidden import StatesAsInputs
from flashrnn_deploy.exporters.layer_calls import LayerCall, Recording, record, recording
from flashrnn_deploy.exporters.swap import visible_path
from flashrnn_deploy.nn import MultiHeadRNN


@dataclass
class Value:
    """One tensor that goes in or comes out of the module, in flattened order."""

    name: str
    tensor: Tensor
    state: tuple[str, int, str] | None = None
    """(path of the recurrent layer, number of its call, state name) where the tensor is a whole state of one layer."""
    is_state: bool = False
    """A whole state, possibly of several layers."""
    state_batch_axis: int | None = 1
    is_lens: bool = False
    carried: bool = False
    """Kept by the module in an attribute or buffer: an input and an output of every call."""
    feeds_state: bool = False
    """Part of a layer's state, whole or not: kept in float32 whatever the dtype of the file."""


@dataclass
class Observation:
    inputs: list[Value]
    outputs: list[Value]
    batch_first: bool
    batch: int | None
    """Size of the batch in the example, None without a batch or without a recurrent layer."""
    has_time: bool
    """Layers run over a sequence; False where all of them are cells that take one step."""
    unrolled: int
    """Largest number of steps that the user's own code makes with one layer: more than 1 in a loop over time."""
    layers: list[str] = field(default_factory=list)
    cuts: list[str] = field(default_factory=list)
    """Where torch cuts a padded result to its longest row, as " (FILE:LINE in FUNCTION)": a file keeps all steps."""

    @property
    def state_pairs(self) -> dict[str, str]:
        """State input name -> name of the output that holds the same state after the call."""
        after = {v.state: v.name for v in self.outputs if v.state}
        pairs = {v.name: after[v.state] for v in self.inputs if v.state and v.state in after and not v.carried}
        carried = zip(*([v.name for v in values if v.carried] for values in (self.inputs, self.outputs)), strict=True)
        return pairs | dict(carried)


def observe(module: nn.Module, args: tuple[Any, ...]) -> Observation:
    """Call ``module(*args)`` once and describe its inputs and outputs.

    Raises:
        FlashRNNError: the call fails, or returns something that holds no tensor.
    """
    inputs = _name_inputs(module, args)
    with _recorded_layers(module) as recorded:
        result = call(module, args)
    calls = recorded.calls
    if isinstance(module, StatesAsInputs):
        for value, worked_on in zip(inputs[-len(module.state_names) :], module.last_given, strict=True):
            value.tensor = worked_on
        outputs = _name_outputs(result[0])
        outputs += [Value(f"{n}_out", t, carried=True) for n, t in zip(module.state_names, result[1], strict=True)]
    else:
        outputs = _name_outputs(result)
    if not outputs:
        raise FlashRNNError(f"the module returned {type(result).__name__}, which holds no tensor")
    for number, made in enumerate(calls):
        for name, tensor in zip(made.states, made.before, strict=False):
            _mark(inputs, tensor, (made.path, number, name), made.state_batch_axis)
        for name, tensor in zip(made.states, made.after, strict=False):
            _mark(outputs, tensor, (made.path, number, name), made.state_batch_axis)
    for value in inputs:
        value.is_lens = any(_same_lengths(value.tensor, lens) for lens in recorded.lens)
    shapes = {_shape_of_state(t) for c in calls for t in c.before}
    if any(not v.is_state and _shape_of_state(v.tensor) in shapes for v in inputs):
        _mark_reset_states(module, args, inputs, shapes)
    _name_states(inputs, outputs)
    first = next((c for c in calls if c.time_axis is not None), calls[0] if calls else None)
    times: dict[str, int] = {}
    for made in calls:
        if made.steps == 1:
            times[made.path] = times.get(made.path, 0) + 1
    return Observation(
        inputs,
        outputs,
        batch_first=first is None or first.batch_axis == 0,
        batch=first.batch if first else None,
        has_time=any(c.time_axis is not None for c in calls),
        unrolled=max(times.values(), default=0),
        layers=[made.path for made in calls],
        cuts=recorded.cuts,
    )


@contextlib.contextmanager
def _recorded_layers(module: nn.Module) -> Iterator[Recording]:
    """The calls of layers while open: MultiHeadRNN by hooks, stand-ins of others record themselves."""

    def hook(path: str) -> Any:
        def after(layer: MultiHeadRNN, args: Any, kwargs: Any, result: Any) -> None:
            given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
            batch_axis = 0 if layer.batch_first else 1
            record(
                LayerCall(
                    path,
                    layer.spec.definition.states,
                    tensors_of(given.get("states")),
                    tensors_of(result[1]) if isinstance(result, tuple) else [],  # a subclass may give y alone
                    given["x"],
                    batch_axis,
                    1 - batch_axis,
                    1,
                    given.get("sequence_lens"),
                )
            )

        return after

    parts = dict(module.named_modules())
    silent = [f"{path}." for path, part in parts.items() if getattr(part, "records_calls", False)]
    handles = [
        part.register_forward_hook(hook(visible_path(path)), with_kwargs=True)
        for path, part in parts.items()
        if isinstance(part, MultiHeadRNN) and not any(path.startswith(outer) for outer in silent)
    ]
    try:
        with recording() as recorded:
            yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _mark_reset_states(module: nn.Module, args: tuple[Any, ...], inputs: list[Value], shapes: set[Any]) -> None:
    """Find inputs that become a layer's state element by element, by the gradient of that state: it is 0 or 1.

    Inputs shaped as a state are drawn at random, for a function such as tanh has a gradient of 1 at zero. All others
    are 0, then 1: a mask keeps the state at one of them. Where the module has no gradients, nothing is found.
    """
    for fill in (0.0, 1.0):
        leaves, spec = pytree.tree_flatten(varied(args))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.requires_grad_(_shape_of_state(tensor) in shapes)
                if not tensor.requires_grad:
                    tensor.fill_(fill)
        given = iter([t.clone() for t in tensors])  # in-place updates of a leaf would be refused
        own = pytree.tree_unflatten([next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
        with _recorded_layers(module) as recorded, torch.enable_grad():
            try:
                module(*own)
            except RuntimeError:  # some code runs without gradients only, and then nothing can be found this way
                return
        candidates = [(v, t) for v, t in zip(inputs, tensors, strict=True) if t.requires_grad and not v.is_state]
        for number, made in enumerate(recorded.calls):
            for name, state in zip(made.states, made.before, strict=False):
                if not state.requires_grad or not candidates:
                    continue
                wanted = [t for _, t in candidates]
                gradients = torch.autograd.grad(state.sum(), wanted, retain_graph=True, allow_unused=True)
                for (value, tensor), gradient in zip(candidates, gradients, strict=True):
                    if gradient is None or value.is_state or _shape_of_state(tensor) != _shape_of_state(state):
                        continue
                    if gradient.any() and ((gradient == 0) | (gradient == 1)).all():
                        value.feeds_state = value.is_state = True
                        value.state = (made.path, number, name)
                        value.state_batch_axis = _axis_like(value.tensor, state, made.state_batch_axis)


def _shape_of_state(tensor: Tensor) -> tuple[int, ...]:
    return tuple(n for n in tensor.shape if n != 1)


def _axis_like(tensor: Tensor, state: Tensor, axis: int | None) -> int | None:
    """The axis of ``tensor`` that is ``axis`` of ``state``, one of them a view of the other."""
    if axis is None or tensor.dim() == state.dim():
        return axis
    before = math.prod(state.shape[:axis])
    fits = [a for a, n in enumerate(tensor.shape) if n == state.shape[axis] and math.prod(tensor.shape[:a]) == before]
    return fits[0] if fits else None


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_lengths(a: Tensor, b: Tensor) -> bool:
    """Whether ``b`` is ``a``, or a copy of it in another integer type or, as rows are sorted, in another order."""
    if _same_memory(a, b):
        return True
    return a.shape == b.shape and not a.is_floating_point() and torch.equal(a.long().msort(), b.long().msort())


def _mark(values: list[Value], tensor: Tensor, state: tuple[str, int, str], batch_axis: int | None) -> None:
    for value in values:
        if _same_memory(value.tensor, tensor):
            value.feeds_state = True
            if value.tensor.numel() == tensor.numel() and value.tensor.data_ptr() == tensor.data_ptr():
                value.state = None if value.is_state else state  # of two layers: neither one's
                value.is_state = True
                value.state_batch_axis = _axis_like(value.tensor, tensor, batch_axis)


def _name_inputs(module: nn.Module, args: tuple[Any, ...]) -> list[Value]:
    bound = bind(module, args)
    if isinstance(module, StatesAsInputs):
        own = args[: -len(module.state_names)]
        states = [Value(n, t, carried=True) for n, t in zip(module.state_names, args[len(own) :], strict=True)]
        return _name_inputs(module.inner, own) + states
    values = []
    for parameter, argument in bound.items():
        for path, leaf in pytree.tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, Tensor):
                values.append(Value(f"{parameter}{_suffix(path)}", leaf))
    return values


def _name_outputs(result: Any) -> list[Value]:
    """The tensors of a dict or named tuple by their keys, others by their place.

    Raises:
        FlashRNNError: the result holds something else than tensors and None.
    """
    keyed = isinstance(result, dict) or hasattr(result, "_fields")
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(result)[0] if leaf is not None]
    values = []
    for i, (path, leaf) in enumerate(leaves):
        name = _suffix(path)[1:] if keyed else f"output_{i}" if len(leaves) > 1 else "output"
        if not isinstance(leaf, Tensor):
            raise FlashRNNError(
                f"forward returns a {type(leaf).__name__} as '{name}'; a file gives tensors only: return tensors, in "
                "tuples, lists or dicts"
            )
        values.append(Value(name or "output", leaf))
    return values


def _suffix(path: Any) -> str:
    """Keys and places in a nest, each after a _, as text that can be typed."""
    fields = ("key", "idx", "name")  # of pytree's three kinds of keys
    text = "".join(f"_{next(getattr(key, f) for f in fields if hasattr(key, f))}" for key in path)
    return "".join(c if c.isprintable() and not c.isspace() else "_" for c in text)


def _name_states(inputs: list[Value], outputs: list[Value]) -> None:
    """Name a tuple's states after the cell's (states_0 -> states_h), and each final state after its initial one."""
    for value in inputs:
        head, _, index = value.name.rpartition("_")
        if value.state and head and index.isdigit():
            value.name = f"{head}_{value.state[2]}"
    before = {v.state: v.name for v in inputs if v.state}
    paths = {v.state[0] for v in outputs if v.state}
    for value in outputs:
        if value.state:
            path, _, state = value.state
            default = f"{path}.{state}_n" if len(paths) > 1 and path else f"{state}_n"
            value.name = f"{before[value.state]}_out" if value.state in before else default
    rest = [v for v in outputs if not v.state and v.name.startswith("output")]
    if len(rest) == 1:
        rest[0].name = "output"
    taken: set[str] = set()
    for value in (*inputs, *outputs):
        name, n = value.name, 1
        while value.name in taken:
            n += 1
            value.name = f"{name}_{n}"
        taken.add(value.name)
