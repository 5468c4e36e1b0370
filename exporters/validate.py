"""The module beside the exported file: the same inputs through PyTorch, and a comparison at sizes never traced."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.utils import _pytree as pytree

from flashrnn_deploy import compare
from flashrnn_deploy.cells import Array
from flashrnn_deploy.compare import Comparison
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.axes import BATCH, Axes, resize, time_name
from flashrnn_deploy.exporters.calls import flat_call, tensors_of, varied
from flashrnn_deploy.exporters.conditioning import FACTOR, sensitivity
from flashrnn_deploy.exporters.factory import load_factory
from flashrnn_deploy.exporters.hidden import with_hidden_states
from flashrnn_deploy.exporters.judged_states import feed_default_state
from flashrnn_deploy.exporters.observe import Observation
from flashrnn_deploy.exporters.row_lengths import common_steps, cure, with_lengths
from flashrnn_deploy.exporters.tracing import divides
from flashrnn_deploy.graph import free_inputs, shape_of
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
    handles = [h for name in names for h in feed_default_state(module, name, tensors[name], final)]
    try:
        results = flat_call(module, pytree.tree_unflatten(leaves, spec)) + list(final.values())
    finally:
        for handle in handles:
            handle.remove()
    outputs = [value.name for value in model.graph.output]
    if len(results) != len(outputs):
        raise FlashRNNError(f"the module gives {len(results)} tensors, the model {len(outputs)}: {', '.join(outputs)}")
    return {name: to_numpy(tensor) for name, tensor in zip(outputs, results, strict=True)}


def validate(
    model: onnx.ModelProto,
    module: nn.Module,
    args: tuple[Any, ...],
    axes: Axes,
    sizes: dict[str, int],
    smallest: dict[str, int],
    largest: dict[str, int],
    seen: Observation,
    upcast: bool = False,
) -> list[str]:
    """Run ``model`` in ONNX Runtime beside ``module`` at sizes of the dynamic axes that were not traced.

    Below the ``smallest`` sizes that the trace is known to hold for, the file must agree where the module runs at all.
    Above the ``largest`` sizes, by the user's word, nothing is asked of it.
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
    time = time_name(seen, axes)

    errors: dict[str, float] = {}
    excuses: list[str] = []
    longer: dict[str, None] = {}

    def compare_at(other: dict[str, int], required: bool = False) -> None:
        """Compare at these sizes, unless the module itself fails there: a convolution may need several steps."""
        for some_args in with_lengths(varied(resize(args, axes, other)), seen, other.get(time), shorter=required):
            own_args = like(module, some_args) if upcast else some_args
            try:
                expected = flat_call(module, own_args)
                break
            except FlashRNNError as error:
                failure = error
        else:
            if required:
                raise failure
            return
        checks = _compare(model, runner, some_args, expected, seen, other, longer)
        if not all(check.passed for check in checks):
            changes = dict(zip((v.name for v in model.graph.output), sensitivity(module, own_args), strict=False))
            excuses.append(_excuse(checks, changes, other, cure(seen)))
        for check in checks:
            errors[check.name] = max(check.max_abs_error, errors.get(check.name, 0.0))

    larger = {name: min(size + 4, largest.get(name, size + 4)) for name, size in sizes.items()}
    compare_at(larger, required=True)
    others = {name: size + 5 if name == BATCH else 24 for name, size in sizes.items()}
    compare_at({name: min(size, largest.get(name, size)) for name, size in others.items()})
    for name, below in smallest.items():
        if name in sizes and below > 2:
            with _as_refusal(axes, seen, name, below):
                for size in sorted(set(np.linspace(1, below - 1, 8, dtype=int).tolist())):
                    compare_at({**larger, name: size})
    compare_at(dict.fromkeys(sizes, 1))
    runner.close()
    notes = [f"compared with the module: largest error {max(errors.values(), default=0.0):.1e}", *excuses]
    if longer:
        notes.append(
            f"the file keeps all steps of {', '.join(longer)}, which pad_packed_sequence{seen.cuts[0]} cuts to the "
            "longest row: equal up to there"
        )
    if blank := [value.name for value in model.graph.output[: len(seen.outputs)] if value.name not in errors]:
        notes.append(f"not compared, since the module gives nothing but NaN: {', '.join(blank)}")
    return notes


@contextlib.contextmanager
def _as_refusal(axes: Axes, seen: Observation, dim: str, below: int) -> Iterator[None]:
    """What differs below the size ``below`` of ``dim`` says that the module's code divides there."""
    try:
        yield
    except FlashRNNError as error:
        places = [(v.name, axis) for v, e in zip(seen.inputs, axes, strict=True) for axis, n in e.items() if n == dim]
        raise FlashRNNError(divides(*places[0], dim, f"from {below}")) from error


def _compare(
    model: onnx.ModelProto,
    runner: Any,
    args: tuple[Any, ...],
    expected: list[torch.Tensor],
    seen: Observation,
    sizes: dict[str, int],
    longer: dict[str, None],
) -> list[Comparison]:
    """Each output of the file beside the module's; one that is NaN everywhere is left out.

    Names of outputs that have more steps than the module's get into ``longer``.
    """
    inputs = free_inputs(model.graph)
    dtype = model_dtype(model, graph_tensors(model))
    feeds = dict(zip((v.name for v in inputs), map(to_numpy, tensors_of(args)), strict=False))
    for value in inputs[len(feeds) :]:
        shape = [sizes.get(d, 1) if isinstance(d, str) else d for d in shape_of(value) or []]
        feeds[value.name] = np.zeros(shape, np.float32)  # type: ignore[arg-type]
    try:
        actual = runner.infer(feeds)
    except FlashRNNError as error:
        raise FlashRNNError(f"the exported file does not run at {sizes}: {error}") from error
    checks = []
    for value, tensor in zip(model.graph.output, expected, strict=False):
        result = common_steps(actual[value.name], tensor.shape, seen)
        if result.shape != actual[value.name].shape:
            longer[value.name] = None
        checks.append(compare.against_peer(value.name, result, to_numpy(tensor), dtype, "the module"))
    return [check for check in checks if check.note != compare.ONLY_NAN]


def _excuse(checks: list[Comparison], changes: Mapping[str, float], sizes: dict[str, int], hint: str) -> str:
    """A note on the outputs that differ by more than they may, where the module's own sensitivity explains it.

    ``hint`` ends the refusal.

    Raises:
        FlashRNNError: it does not.
    """
    failed = [check for check in checks if not check.passed]
    for check in failed:
        if check.note or not check.max_abs_error <= FACTOR * changes[check.name]:
            raise FlashRNNError(
                f"the exported file does not compute what the module does: output '{check.name}' differs by "
                f"{check.max_abs_error:.3g} (allowed {check.tolerance:.3g}) at {sizes} {check.note}".rstrip()
                + hint
            )
    differences = ", ".join(f"'{c.name}' by {c.max_abs_error:.2g} ({changes[c.name]:.2g})" for c in failed)
    return (
        f"at {sizes} this differs on random inputs: {differences}. In parentheses, what the module's own result "
        "changes by when its weights and inputs change by one rounding: compare the file on inputs of your own"
    )


def like(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with every float tensor in the dtype of the module's weights."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    result: tuple[Any, ...] = pytree.tree_map(
        lambda a: a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a, args
    )
    return result
