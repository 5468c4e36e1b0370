"""State that a module keeps in attributes or buffers between calls.

Such state would be frozen into a file. It is found by calling a copy of the module once and looking at what changed,
and either refused or turned into inputs and outputs by a wrapper.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.calls import call, tensors_of, varied
from flashrnn_deploy.nn import MultiHeadRNN

_ABSENT = object()
_LAYERS = (nn.RNNBase, nn.RNNCellBase, MultiHeadRNN)


def _kept_values(module: nn.Module) -> dict[str, Any]:
    """Every buffer, and every attribute that is a tensor, a nest of tensors or None, by its dotted name."""
    kept = {}
    for path, part in module.named_modules():
        attributes = {k: v for k, v in vars(part).items() if k not in ("_parameters", "_modules", "_buffers")}
        if isinstance(part, nn.RNNBase):
            del attributes["_flat_weights"]  # torch's list of its weights, made anew where they are parametrized
        for name, value in {**attributes, **part._buffers}.items():
            leaves = pytree.tree_leaves(value)
            if value is None or (leaves and all(isinstance(leaf, Tensor) for leaf in leaves)):
                kept[f"{path}.{name}" if path else name] = value
    return kept


def _numbers(module: nn.Module) -> dict[str, float]:
    """Every attribute that is a Python number, by its dotted name."""
    every = ((f"{path}.{n}".lstrip("."), v) for path, part in module.named_modules() for n, v in vars(part).items())
    return {name: value for name, value in every if isinstance(value, (int, float))}


def _changed(before: Any, after: Any) -> bool:
    old, new = pytree.tree_leaves(before), pytree.tree_leaves(after)
    if len(old) != len(new):
        return True
    for a, b in zip(old, new, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return True
        if isinstance(a, Tensor) and (a.shape != b.shape or not torch.equal(a, b)):
            return True
    return False


def find_hidden_states(module: nn.Module, args: tuple[Any, ...]) -> tuple[dict[str, Any], list[str]]:
    """Dotted names of the attributes and buffers that a call changes, with their values after it.

    Returns:
        the values after one call (on a copy of the module), and the names of those that did not start at zero or None.
    """
    module = copy.deepcopy(module)
    before = {name: pytree.tree_map(_snapshot, value) for name, value in _kept_values(module).items()}
    counts, shapes = [], []
    for seed in (0, 1):  # twice: a state that is only created by the first call changes again in the second
        call(module, varied(args, seed))
        counts.append(_numbers(module))
        shapes.append({n: [list(t.shape) for t in tensors_of(v)] for n, v in _kept_values(module).items()})
    if changing := [name for name, number in counts[1].items() if counts[0].get(name) != number]:
        raise FlashRNNError(
            f"{changing[0]} is a Python number that changes from call to call, which a file would freeze; keep it in a "
            "buffer, as a tensor"
        )
    if training := [path for path, part in module.named_modules() if part.training]:
        raise FlashRNNError(
            f"forward puts '{training[0]}' into training mode, where results depend on other rows or on chance; leave "
            "it in eval mode"
        )
    if growing := [name for name, shape in shapes[1].items() if shapes[0].get(name, shape) != shape]:
        one, two = shapes[0][growing[0]], shapes[1][growing[0]]
        raise FlashRNNError(
            f"{growing[0]} has another shape after every call ({one}, then {two}), so that its output could not be fed "
            "back as its input; keep a fixed number of steps"
        )
    after = _kept_values(module)
    found = {name: value for name, value in after.items() if _changed(before.get(name), value)}
    nonzero = [
        name
        for name in found
        if any(isinstance(leaf, Tensor) and leaf.any() for leaf in pytree.tree_leaves(before.get(name)))
    ]
    return {name: pytree.tree_map(_snapshot, value) for name, value in found.items()}, nonzero


def _snapshot(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def with_hidden_states(
    module: nn.Module, args: tuple[Any, ...], expose: bool
) -> tuple[nn.Module, tuple[Any, ...], list[str]]:
    """Refuse state kept in attributes, or turn it into further arguments and results of a wrapper.

    Returns:
        the module or its wrapper, its example arguments, and notes for the report.

    Raises:
        FlashRNNError: there is such state and ``expose`` is false.
    """
    hidden, nonzero = find_hidden_states(module, args)
    for name in hidden:
        path, _, attribute = name.rpartition(".")
        if isinstance(module.get_submodule(path), _LAYERS) and attribute.startswith(("weight_", "bias_")):
            raise FlashRNNError(
                f"forward changes the weight {name} of a recurrent layer, which a file holds as a constant; if it is "
                "the same in every call, call the module once before the export"
            )
    notes = []
    if unread := only_written(module, args, hidden):
        module = forgetting(module, unread)
        hidden = {name: value for name, value in hidden.items() if name not in unread}
        notes.append(f"the file does not hold {', '.join(unread)}: forward writes it and never reads it")
    if not hidden:
        return module, args, notes
    if not expose:
        raise FlashRNNError(
            f"{type(module).__name__} keeps state between calls in {', '.join(sorted(hidden))}, which a file cannot; "
            "pass --expose-states to make it an input and an output"
        )
    wrapper = StatesAsInputs(module, hidden).eval()
    notes += [f"state {name} does not start at zero: feed its first value" for name in nonzero if name in hidden]
    return wrapper, (*args, *wrapper.initial), notes


def only_written(module: nn.Module, args: tuple[Any, ...], hidden: dict[str, Any]) -> list[str]:
    """Of the attributes that a call changes, those that no call reads, such as attention weights kept for a plot.

    Each is changed in turn before a call: neither the results nor what the call leaves behind may notice. Buffers do
    not count.
    """

    def outcome(changed: str = "") -> list[Tensor]:
        probe = copy.deepcopy(module)
        for name, value in hidden.items():
            path, _, attribute = name.rpartition(".")
            _set(probe.get_submodule(path), attribute, pytree.tree_map(_other if name == changed else _snapshot, value))
        results = call(probe, varied(args))
        kept = _kept_values(probe)
        return [t.nan_to_num() for t in tensors_of([results, *(kept.get(name) for name in hidden)])]

    buffers = dict(module.named_buffers())
    candidates = [name for name, value in hidden.items() if name not in buffers and tensors_of(value)]
    if not candidates:
        return []
    undisturbed = outcome()
    return [name for name in candidates if not _changed(undisturbed, outcome(name))]


def _other(leaf: Any) -> Any:
    """Another value of the same shape and dtype."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.dtype == torch.bool:
        return ~leaf
    return leaf.detach() * 2 + 1


def forgetting(module: nn.Module, names: list[str]) -> nn.Module:
    """A copy of ``module`` whose attributes ``names`` are after each call what they were before it."""
    module = copy.deepcopy(module)
    places = [(path, attribute) for path, _, attribute in (name.rpartition(".") for name in names)]
    before: list[list[Any]] = []

    def remember(root: nn.Module, _args: Any) -> None:
        before.append([vars(root.get_submodule(path)).get(attribute, _ABSENT) for path, attribute in places])

    def restore(root: nn.Module, _args: Any, _result: Any) -> None:
        for (path, attribute), value in zip(places, before.pop(), strict=True):
            if value is _ABSENT:
                vars(root.get_submodule(path)).pop(attribute, None)
            else:
                vars(root.get_submodule(path))[attribute] = value

    module.register_forward_pre_hook(remember)
    module.register_forward_hook(restore)
    return module


class StatesAsInputs(nn.Module):
    """``inner`` with its hidden states as further arguments, and their new values as a second result.

    ``forward(*args, *state_tensors)`` returns ``(inner(*args), new_state_tensors)``.
    """

    def __init__(self, inner: nn.Module, states: dict[str, Any]) -> None:
        super().__init__()
        self.inner = inner
        self._places: list[tuple[str, str, Any]] = []
        """Path, attribute, and its value with 0 for each tensor. (torch warns when a pytree's own spec is copied.)"""
        self.state_names: list[str] = []
        self.initial: list[Tensor] = []
        self.last_given: list[Tensor] = []
        """The copies that the last call worked on, in the order of ``state_names``."""
        for name, value in states.items():
            path, _, attribute = name.rpartition(".")
            leaves = pytree.tree_leaves(value)
            if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
                raise FlashRNNError(f"{name} changes in forward but holds no tensor; it cannot become an input")
            self._places.append((path, attribute, pytree.tree_map(lambda _: 0, value)))
            self.state_names += [name] if len(leaves) == 1 else [f"{name}_{i}" for i in range(len(leaves))]
            self.initial += leaves

    def forward(self, *args: Any) -> tuple[Any, tuple[Tensor, ...]]:
        count = len(self.state_names)
        states = iter(args[-count:])
        old, given = [], []
        for path, attribute, form in self._places:
            part = self.inner.get_submodule(path)
            old.append(_get(part, attribute))
            value = pytree.tree_map(lambda _: next(states).clone(), form)  # in-place updates stay inside the call
            given += pytree.tree_leaves(value)
            _set(part, attribute, value)
        if not torch.compiler.is_exporting():
            self.last_given = given
        result = self.inner(*args[:-count])
        new: list[Tensor] = []
        for (path, attribute, _), value in zip(self._places, old, strict=True):
            part = self.inner.get_submodule(path)
            new += pytree.tree_leaves(_get(part, attribute))
            _set(part, attribute, value)
        return result, tuple(new)


def _get(part: nn.Module, attribute: str) -> Any:
    return part._buffers[attribute] if attribute in part._buffers else vars(part)[attribute]


def _set(part: nn.Module, attribute: str, value: Any) -> None:
    if attribute in part._buffers:
        part._buffers[attribute] = value
    else:
        vars(part)[attribute] = value
