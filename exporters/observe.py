"""What a module's example call tells: names of inputs and outputs, which tensors are states or lengths.

The module runs once in eager mode with hooks on its recurrent layers. A tensor that a layer takes as state, and that
shares its memory with an argument, makes that argument a state input; outputs are matched in the same way.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.calls import bind, call, tensors_of
from flashrnn_deploy.exporters.hidden import StatesAsInputs
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
    is_lens: bool = False
    feeds_state: bool = False
    """Part of a layer's state, whole or not: kept in float32 whatever the dtype of the file."""


@dataclass
class Observation:
    inputs: list[Value]
    outputs: list[Value]
    batch_first: bool
    batch: int
    """Size of the batch in the example."""
    layers: list[str] = field(default_factory=list)

    @property
    def state_pairs(self) -> dict[str, str]:
        """State input name -> name of the output that holds the same state after the call."""
        after = {v.state: v.name for v in self.outputs if v.state}
        return {v.name: after[v.state] for v in self.inputs if v.state and v.state in after}


def observe(module: nn.Module, args: tuple[Any, ...]) -> Observation:
    """Call ``module(*args)`` once and describe its inputs and outputs.

    Raises:
        FlashRNNError: the call fails, or returns something that holds no tensor.
    """
    inputs = _name_inputs(module, args)
    calls: list[tuple[str, MultiHeadRNN, dict[str, Any], Any]] = []

    def hook(path: str) -> Any:
        def record(layer: MultiHeadRNN, args: Any, kwargs: Any, result: Any) -> None:
            calls.append((path, layer, inspect.signature(layer.forward).bind(*args, **kwargs).arguments, result))

        return record

    handles = [
        layer.register_forward_hook(hook(path), with_kwargs=True)
        for path, layer in module.named_modules()
        if isinstance(layer, MultiHeadRNN)
    ]
    try:
        result = call(module, args)
    finally:
        for handle in handles:
            handle.remove()
    if isinstance(module, StatesAsInputs):
        for value, worked_on in zip(inputs[-len(module.state_names) :], module.last_given, strict=True):
            value.tensor = worked_on
        outputs = _name_outputs(result[0])
        outputs += [Value(f"{n}_out", t) for n, t in zip(module.state_names, result[1], strict=True)]
    else:
        outputs = _name_outputs(result)
    if not outputs:
        raise FlashRNNError(f"the module returned {type(result).__name__}, which holds no tensor")
    for number, (path, layer, arguments, returned) in enumerate(calls):
        names = layer.spec.definition.states
        for name, tensor in zip(names, tensors_of(arguments.get("states")), strict=False):
            _mark(inputs, tensor, (path, number, name))
        for name, tensor in zip(names, tensors_of(returned[1]), strict=True):
            _mark(outputs, tensor, (path, number, name))
        lens = arguments.get("sequence_lens")
        for value in inputs:
            if lens is not None and _same_memory(value.tensor, lens):
                value.is_lens = True
    _name_states(inputs, outputs)
    first = calls[0][1] if calls else None
    batch_first = first is None or first.batch_first
    batch = calls[0][2]["x"].shape[0 if batch_first else 1] if calls else 0
    return Observation(inputs, outputs, batch_first, batch, [path for path, *_ in calls])


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _mark(values: list[Value], tensor: Tensor, state: tuple[str, int, str]) -> None:
    for value in values:
        if _same_memory(value.tensor, tensor):
            value.feeds_state = True
            if value.tensor.shape == tensor.shape and value.tensor.data_ptr() == tensor.data_ptr():
                value.state = None if value.is_state else state  # of two layers: neither one's
                value.is_state = True


def _name_inputs(module: nn.Module, args: tuple[Any, ...]) -> list[Value]:
    bound = bind(module, args)
    if isinstance(module, StatesAsInputs):
        own = args[: -len(module.state_names)]
        states = [Value(n, t) for n, t in zip(module.state_names, args[len(own) :], strict=True)]
        return _name_inputs(module.inner, own) + states
    values = []
    for parameter, argument in bound.items():
        for path, leaf in pytree.tree_flatten_with_path(argument)[0]:
            if isinstance(leaf, Tensor):
                suffix = "".join(f"_{getattr(k, 'idx', getattr(k, 'key', ''))}" for k in path)
                values.append(Value(f"{parameter}{suffix}", leaf))
    return values


def _name_outputs(result: Any) -> list[Value]:
    if isinstance(result, dict):
        return [
            Value(key if isinstance(item, Tensor) else f"{key}_{i}", tensor)
            for key, item in result.items()
            for i, tensor in enumerate(tensors_of(item))
        ]
    tensors = tensors_of(result)
    return [Value("output" if len(tensors) == 1 else f"output_{i}", tensor) for i, tensor in enumerate(tensors)]


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
