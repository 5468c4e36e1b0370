"""The module beside the exported file: the same inputs through PyTorch, and a comparison at sizes never traced."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.utils import _pytree as pytree

from flashrnn_deploy import compare
from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.axes import BATCH, TIME, Axes, resize
from flashrnn_deploy.exporters.calls import flat_call, tensors_of, varied
from flashrnn_deploy.exporters.factory import load_factory
from flashrnn_deploy.exporters.hidden import with_hidden_states
from flashrnn_deploy.exporters.observe import Observation
from flashrnn_deploy.graph import free_inputs, shape_of
from flashrnn_deploy.nn import MultiHeadRNN
from flashrnn_deploy.shapes import numpy_dtype
from flashrnn_deploy.shapes import tensors_of as graph_tensors
from flashrnn_deploy.verify import model_dtype

Judge = Callable[[Mapping[str, Array]], dict[str, Array]]
"""Feeds by input name -> arrays by output name."""


def to_numpy(tensor: torch.Tensor) -> Array:
    """A NumPy copy; bfloat16 becomes ml_dtypes.bfloat16."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(numpy_dtype(onnx.TensorProto.BFLOAT16)).copy()
    return np.array(tensor.numpy())


def to_torch(array: Array) -> torch.Tensor:
    """The inverse of ``to_numpy``."""
    if str(array.dtype) == "bfloat16":
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def factory_judge(source: str, model: onnx.ModelProto, dtype: str, weights: Path | None = None) -> tuple[Judge, Judge]:
    """The module of ``FILE.py:FACTORY`` as a judge of the file that was exported from it.

    The factory is called once: one that makes random weights gives the same module to both results.

    Args:
        source: "FILE.py:FACTORY".
        model: the exported file: it gives the names and order of inputs and outputs.
        dtype: the float dtype of the file.
        weights: as for ``load_factory``.

    Returns:
        two functions from feeds (one array per input of ``model``) to arrays by the output names of ``model``: the
        module in float64 with its weights rounded to ``dtype``, and the module in ``dtype``.

    Raises:
        FlashRNNError: as ``load_factory``, or the module does not take these inputs.
    """
    example = load_factory(source, weights)
    inputs = [value.name for value in free_inputs(model.graph)]
    module, args = example.module, example.args
    if len(inputs) > len(tensors_of(args)):  # states kept in attributes come after the arguments, default states last
        module, args, _ = with_hidden_states(module, args, expose=True)
    count = len(tensors_of(args))
    if len(inputs) < count:
        raise FlashRNNError(f"{source} takes {count} tensors, the model has {len(inputs)} inputs: {', '.join(inputs)}")
    own = copy.deepcopy(module).to(getattr(torch, dtype))
    exact = copy.deepcopy(own).double()

    def judge(module: nn.Module, upcast: bool) -> Judge:
        def evaluate(feeds: Mapping[str, Array]) -> dict[str, Array]:
            tensors = {name: to_torch(feeds[name]) for name in inputs}
            if upcast:
                tensors = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
            return _call_by_name(module, args, tensors, model)

        return evaluate

    return judge(exact, True), judge(own, False)


def _call_by_name(
    module: nn.Module, args: tuple[Any, ...], tensors: dict[str, torch.Tensor], model: onnx.ModelProto
) -> dict[str, Array]:
    """Call ``module`` with ``tensors`` in place of those in ``args``, further ones as default states of its layers."""
    leaves, spec = pytree.tree_flatten(args)
    names = iter(tensors)
    leaves = [tensors[next(names)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    final: dict[str, torch.Tensor] = {}
    handles = [h for name in names for h in _feed_default_state(module, name, tensors[name], final)]
    try:
        results = flat_call(module, pytree.tree_unflatten(leaves, spec)) + list(final.values())
    finally:
        for handle in handles:
            handle.remove()
    outputs = [value.name for value in model.graph.output]
    if len(results) != len(outputs):
        raise FlashRNNError(f"the module gives {len(results)} tensors, the model {len(outputs)}: {', '.join(outputs)}")
    return {name: to_numpy(tensor) for name, tensor in zip(outputs, results, strict=True)}


def _feed_default_state(
    module: nn.Module, input_name: str, packed: torch.Tensor, final: dict[str, torch.Tensor]
) -> list[Any]:
    """Hooks that feed ``<layer>.l<k>.states`` [S, N, B, H*D] to a layer and read its final states back."""
    path, _, layer_index = input_name.removesuffix(".states").rpartition(".l")
    layer = dict(module.named_modules()).get(path, module)
    if not isinstance(layer, (MultiHeadRNN, nn.RNNBase)) or not layer_index.isdigit():
        raise FlashRNNError(f"input '{input_name}' of the model belongs to no argument and no layer of the module")
    if isinstance(layer, nn.RNNBase) and layer.proj_size:
        raise FlashRNNError(
            f"input '{input_name}' of the model is the state of a projected LSTM before its projection, which the "
            "module does not have; verify a file that was exported without --expose-states"
        )
    if isinstance(layer, MultiHeadRNN):
        keyword, N, S = "states", layer.spec.num_directions, layer.spec.definition.num_states
    else:
        keyword, N, S = "hx", 2 if layer.bidirectional else 1, 2 if layer.mode == "LSTM" else 1
    rows = slice(int(layer_index) * N, (int(layer_index) + 1) * N)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        states = kwargs.get(keyword, args[1] if len(args) > 1 else None)
        if states is None:
            shape = (S, layer.num_layers * N, packed.shape[2], layer.hidden_size)
            states = packed.new_zeros(shape).unbind(0)
        states = [s.clone() for s in ((states,) if isinstance(states, torch.Tensor) else states)]
        for state, given in zip(states, packed, strict=True):
            state[rows] = given
        return (args[0], states[0] if S == 1 else tuple(states), *args[2:]), {
            n: v for n, v in kwargs.items() if n != keyword
        }

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        final[input_name] = torch.stack([s[rows] for s in tensors_of(result[1])])

    return [
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(after, with_kwargs=True),
    ]


def validate(
    model: onnx.ModelProto,
    module: nn.Module,
    args: tuple[Any, ...],
    axes: Axes,
    sizes: dict[str, int],
    seen: Observation,
    upcast: bool = False,
) -> list[str]:
    """Run ``model`` in ONNX Runtime beside ``module`` at two sizes of the dynamic axes that were not traced.

    With ``upcast``, the module is float32 and gets the arguments in float32, whatever the dtype of the file.

    Returns:
        notes for the report: what was compared, or that ONNX Runtime is not installed.

    Raises:
        FlashRNNError: a result differs by more than two implementations of one dtype may (``compare.against_peer``).
    """
    if importlib.util.find_spec("onnxruntime") is None:
        return ["not compared with the module: ONNX Runtime is not installed"]
    from flashrnn_deploy.backends import make_runner

    runner = make_runner("onnxruntime", model)
    inputs = free_inputs(model.graph)
    dtype = model_dtype(model, graph_tensors(model))
    largest_error, compared = 0.0, False
    for other in (
        {name: size + 4 for name, size in sizes.items()},
        {name: size + 5 if name == BATCH else 24 for name, size in sizes.items()},
        {name: 1 for name in sizes},
    ):
        some_args = valid_lengths(varied(resize(args, axes, other)), seen, other)
        try:
            expected = flat_call(module, like(module, some_args) if upcast else some_args)
        except FlashRNNError:
            if compared:  # the module itself needs more than one step, as a convolution over time does
                continue
            raise
        feeds = dict(zip((v.name for v in inputs), map(to_numpy, tensors_of(some_args)), strict=False))
        for value in inputs[len(feeds) :]:
            shape = [other.get(d, 1) if isinstance(d, str) else d for d in shape_of(value) or []]
            feeds[value.name] = np.zeros(shape, np.float32)  # type: ignore[arg-type]
        try:
            actual = runner.infer(feeds)
        except FlashRNNError as error:
            raise FlashRNNError(f"the exported file does not run at {other}: {error}") from error
        for value, tensor in zip(model.graph.output, expected, strict=False):
            result = _without_pads(actual[value.name], value, tensor, seen)
            check = compare.against_peer(value.name, result, to_numpy(tensor), dtype, "the module")
            if not check.passed:
                raise FlashRNNError(
                    f"the exported file does not compute what the module does: output '{value.name}' differs by "
                    f"{check.max_abs_error:.3g} (allowed {check.tolerance:.3g}) at {other} {check.note}".rstrip()
                )
            largest_error = max(largest_error, check.max_abs_error)
        compared = True
    runner.close()
    return [f"compared with the module: largest error {largest_error:.1e}"]


def like(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with every float tensor in the dtype of the module's weights."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    result: tuple[Any, ...] = pytree.tree_map(
        lambda a: a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a, args
    )
    return result


def valid_lengths(args: tuple[Any, ...], seen: Observation, sizes: dict[str, int]) -> tuple[Any, ...]:
    """Lengths as torch wants them when it packs a sequence: sorted, and at most the number of steps in ``sizes``."""
    values = iter(seen.inputs)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not next(values).is_lens:
            return leaf
        leaf = leaf.sort(descending=True).values if leaf.dim() == 1 else leaf
        return leaf.clamp(max=sizes[TIME]) if TIME in sizes else leaf

    result: tuple[Any, ...] = pytree.tree_map(one, args)
    return result


def _without_pads(actual: Array, value: onnx.ValueInfoProto, expected: torch.Tensor, seen: Observation) -> Array:
    """``actual`` up to the longest row: pad_packed_sequence cuts time there, a file does not (torch_packed.py)."""
    names = shape_of(value) or []
    if TIME not in names or not any(v.is_lens for v in seen.inputs) or actual.ndim != expected.dim():
        return actual
    axis = names.index(TIME)
    result: Array = np.take(actual, range(min(actual.shape[axis], expected.shape[axis])), axis)
    return result
