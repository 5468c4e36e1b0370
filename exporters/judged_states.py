"""Default states that a file exposes, fed to the module that judges the file and read back from it.

``<layer>.l<k>.states`` [S, N, B, H*D] belongs to call ``k // num_layers`` of the layer, and to layer ``k % num_layers``
in its stack. torch's own layers take ``hx`` for it. The state of a projected LSTM is ``u = o tanh(c)`` before its
projection: torch takes ``h = W_hr u``, and for what it gives, the layer is run once more without its projection.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.calls import tensors_of
from flashrnn_deploy.exporters.weights import projected
from flashrnn_deploy.nn import MultiHeadRNN


def feed_default_state(
    module: nn.Module, input_name: str, packed: Tensor, final: dict[str, Tensor]
) -> list[RemovableHandle]:
    """Hooks that give ``packed`` to the layer of ``input_name``, and put its final states into ``final``.

    Raises:
        FlashRNNError: the module has no such layer.
    """
    path, _, number = input_name.removesuffix(".states").rpartition(".l")
    layer = dict(module.named_modules()).get(path, module)
    if not isinstance(layer, (MultiHeadRNN, nn.RNNBase, nn.RNNCellBase)) or not number.isdigit():
        raise FlashRNNError(f"input '{input_name}' of the model belongs to no argument and no layer of the module")
    keyword = "states" if isinstance(layer, MultiHeadRNN) else "hx"
    call, k = divmod(int(number), getattr(layer, "num_layers", 1))
    rows = slice(k * packed.shape[1], (k + 1) * packed.shape[1])
    before_calls, after_calls = itertools.count(), itertools.count()

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if next(before_calls) != call:
            return None
        given = kwargs.get(keyword, args[1] if len(args) > 1 else None)
        states = _zeros(layer, packed) if given is None else [s.clone() for s in tensors_of(given)]
        for state, part in zip(states, _as_torch_has_it(layer, k, packed), strict=True):
            state[rows if state.dim() == 3 else slice(None)] = part
        others = {n: v for n, v in kwargs.items() if n != keyword}
        return (args[0], states[0] if len(states) == 1 else tuple(states), *args[2:]), others

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if next(after_calls) != call:
            return
        if isinstance(layer, nn.RNNCellBase):
            final[input_name] = torch.stack([s[None] for s in tensors_of(result)])
        elif getattr(layer, "proj_size", 0):
            final[input_name] = _before_projection(layer, k, args[0], args[1], packed)
        else:
            final[input_name] = torch.stack([s[rows] for s in tensors_of(result[1])])

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    ]


def _zeros(layer: Any, packed: Tensor) -> list[Tensor]:
    """The default states of the whole stack, in torch's shapes."""
    S, N, B, D = packed.shape
    if isinstance(layer, nn.RNNCellBase):
        return list(packed.new_zeros(S, B, D).unbind(0))
    states = list(packed.new_zeros(S, layer.num_layers * N, B, D).unbind(0))
    if width := getattr(layer, "proj_size", 0):
        states[0] = packed.new_zeros(layer.num_layers * N, B, width)
    return states


def _as_torch_has_it(layer: Any, k: int, packed: Tensor) -> list[Tensor]:
    if isinstance(layer, nn.RNNCellBase):
        return list(packed.squeeze(1).unbind(0))
    if not getattr(layer, "proj_size", 0):
        return list(packed.unbind(0))
    w_hr = torch.stack([getattr(layer, f"weight_hr{s}") for s in _suffixes(layer, k)])
    return [packed[0] @ w_hr.transpose(1, 2), packed[1]]


def _before_projection(layer: Any, k: int, x: Any, given: tuple[Tensor, Tensor], packed: Tensor) -> Tensor:
    """(u, c) of layer ``k`` [2, N, B, D] after a call with the input ``x`` and the states ``given`` of all layers."""
    N = packed.shape[1]
    for j in range(k):
        states = [s[j * N : (j + 1) * N].contiguous() for s in given]
        x = _one_layer(layer, j, layer.proj_size)(x, tuple(states))[0]
    return torch.stack(_one_layer(layer, k, 0)(x, (packed[0], packed[1]))[1])


def _one_layer(layer: Any, k: int, proj_size: int) -> nn.LSTM:
    """Layer ``k`` of a projected LSTM alone, with its projection or (0) as an LSTM on ``u``."""
    inputs = getattr(layer, f"weight_ih_l{k}").shape[1]
    options = {"bias": layer.bias, "batch_first": layer.batch_first, "bidirectional": layer.bidirectional}
    one = nn.LSTM(inputs, layer.hidden_size, proj_size=proj_size, **options).to(layer.weight_ih_l0)
    with torch.no_grad():
        for ours, theirs in zip(_suffixes(one, 0), _suffixes(layer, k), strict=True):
            for kind in ("weight_ih", "weight_hh", "weight_hr", "bias_ih", "bias_hh"):
                if not hasattr(one, kind + ours):
                    continue  # without a bias, or without the projection
                tensor: Tensor = getattr(layer, kind + theirs)
                if kind == "weight_hh" and not proj_size:
                    tensor = projected(tensor, getattr(layer, f"weight_hr{theirs}"))
                getattr(one, kind + ours).copy_(tensor)
    return one.eval()


def _suffixes(layer: nn.RNNBase, k: int) -> list[str]:
    return [f"_l{k}", f"_l{k}_reverse"][: 2 if layer.bidirectional else 1]
