"""Before a module is traced: a private copy of it that can be called, and refusals where there can be none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import _pytree as pytree

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import xlstm_modules
from flashrnn_deploy.exporters.calls import flat_call, tensors_of, varied
from flashrnn_deploy.exporters.tracing import first_line

_WEIGHT_HOOKS = (WeightNorm, SpectralNorm, prune.BasePruningMethod)
"""torch's older re-parametrizations: a hook makes the weight before every call."""


def private_copy(module: nn.Module, args: tuple[Any, ...]) -> tuple[nn.Module, tuple[Any, ...]]:
    """A copy of the module in eval mode, and of the arguments, in which no two share memory.

    Weights that torch's older hooks make before every call (weight_norm, spectral_norm, pruning) are plain in it.

    Raises:
        FlashRNNError: the module is TorchScript or quantised in part, holds weights that do not exist yet or in
            float64, or cannot be copied, or an argument is empty or packed.
    """
    _check_weights(module)
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
        copied = copy.deepcopy(module, _copies_of_made_weights(module)).eval()
        _make_weights_plain(copied)
        copied = xlstm_modules.runnable(copied)
    except Exception as error:  # whatever a module's own attributes raise
        raise FlashRNNError(f"{type(module).__name__} cannot be copied: {first_line(error)}") from error
    own: tuple[Any, ...] = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, args)
    return copied, own


def _check_weights(module: nn.Module) -> None:
    for path, part in module.named_modules():
        where = f"'{path}' in {type(module).__name__}" if path else "the module"
        if isinstance(part, torch.jit.ScriptModule):
            raise FlashRNNError(
                f"{where} is TorchScript (torch.jit.script, trace or load), whose layers cannot be seen: export the "
                "Python module that it was made from"
            )
        if "quantized" in type(part).__module__.split("."):  # torch.ao.nn.quantized and others below torch.ao.nn
            raise FlashRNNError(
                f"{where} is quantised ({type(part).__module__}.{type(part).__name__}), which torch.export cannot "
                "trace: export the module as it was before its quantisation"
            )
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if nn.parameter.is_lazy(tensor):
                raise FlashRNNError(f"{where} has no weight '{name}' before its first call: call the module once")
            if tensor is not None and tensor.is_meta:
                raise FlashRNNError(f"{where} has no numbers in '{name}' (device meta): load its weights first")


def _copies_of_made_weights(module: nn.Module) -> dict[int, Any]:
    """A memo for ``deepcopy``, which refuses tensors that were computed from others."""
    kept = [value for part in module.modules() for value in vars(part).values()]
    leaves = [leaf for leaf in pytree.tree_leaves(kept) if isinstance(leaf, Tensor) and not leaf.is_leaf]
    return {id(leaf): leaf.detach().clone() for leaf in leaves}


def _make_weights_plain(module: nn.Module) -> None:
    with torch.no_grad():
        for part in module.modules():
            for key, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, _WEIGHT_HOOKS):
                    hook.remove(part)
                    del part._forward_pre_hooks[key]
                    if isinstance(part, nn.RNNBase):
                        part._flat_weights = [getattr(part, name) for name in part._flat_weights_names]


def check_repeatable(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse a module whose result is not a function of its arguments."""
    args = varied(args)
    for a, b in zip(flat_call(module, args), flat_call(module, args), strict=True):
        if not torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)):
            raise FlashRNNError(
                f"{type(module).__name__} gives two results for one input (dropout outside of eval mode, random "
                "numbers, or state kept outside of its attributes)"
            )


def notes_on_weights(module: nn.Module) -> list[str]:
    """One note for each parameter or buffer that holds NaN or infinity: the file then gives NaN as the module does."""
    notes = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_floating_point() and (count := int((~torch.isfinite(tensor)).sum())):
            notes.append(f"{name} holds {count} number(s) that are NaN or infinite, and so does the file")
    return notes
