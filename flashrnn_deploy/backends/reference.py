"""onnx.reference with the NumPy op: the judge, in float64 or with the op's own rounding points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx

from flashrnn_deploy import bfloat16, reference
from flashrnn_deploy.cells import CELLS, Array, Cell
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import DOMAIN, RNNSpec, attribute_names, is_flashrnn
from flashrnn_deploy.shapes import attribute, is_standard_rnn, node_label, numpy_dtype
from flashrnn_deploy.upcast import to_float64

_DEFAULT_ACTIVATIONS = {
    "LSTM": ["sigmoid", "tanh", "tanh"],
    "GRU": ["sigmoid", "tanh"],
    "RNN": ["tanh"],
}


class ReferenceRunner:
    """Evaluate a model node by node in NumPy (see ``Runner``).

    Args:
        model: the model; it is not changed.
        precision: numpy.float64 (everything upcast) or numpy.float32 (each operator in the dtype of the file, the
            FlashRNN op with its rounding points, bfloat16 operators in float32 and rounded).
        declared_dtypes: outputs are rounded to the dtype that the file declares; False returns float64 as it is.
        in_order: matrix products are summed term by term, as GEMM kernels do, and not in the order of NumPy's BLAS,
            whose error for few rows is half of theirs.

    Raises:
        FlashRNNError: onnx.reference cannot do a node, which is named.
    """

    name = "reference"

    def __init__(
        self,
        model: onnx.ModelProto,
        precision: Any = np.float64,
        declared_dtypes: bool = True,
        in_order: bool = False,
    ) -> None:
        from onnx.reference import ReferenceEvaluator

        self.notes: list[str] = []
        for node in walk_nodes(model):
            if why := _ignored(node):
                raise FlashRNNError(f"onnx.reference is no judge of the {node_label(node)}: it ignores {why}")
        self._exact = precision == np.float64
        self._declared = declared_dtypes
        self._bfloat16_inputs, _ = bfloat16.bfloat16_names(model)
        self._dtypes = {v.name: v.type.tensor_type.elem_type for v in model.graph.output}
        if self._exact:
            prepared = to_float64(model)
        else:
            prepared = bfloat16.for_cpu(model) if bfloat16.uses_bfloat16(model) else model
        ops = [_make_op(cell, precision, in_order) for cell in CELLS.values()]
        ops += _products_in_order() if in_order else []
        try:
            self._evaluator = ReferenceEvaluator(prepared, new_ops=ops)
        except Exception as error:  # an operator that it does not know; the classes differ by onnx version
            raise FlashRNNError(f"onnx.reference cannot do the {_unknown(model, error)}: {_text(error)}") from error
        for step in self._evaluator.rt_nodes_:
            step.run = _named(step.onnx_node, step.run)

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; see ``Runner``."""
        ready = {name: self._feed(name, array) for name, array in feeds.items()}
        with np.errstate(all="ignore"):
            results: list[Any] = list(self._evaluator.run(None, ready))
        outputs = dict(zip(self._evaluator.output_names, map(np.asarray, results), strict=True))
        if self._declared:
            with np.errstate(over="ignore"):
                outputs = {n: a.astype(numpy_dtype(self._dtypes[n])) for n, a in outputs.items()}
        return outputs

    def _feed(self, name: str, array: Array) -> Array:
        if self._exact:
            return array.astype(np.float64) if str(array.dtype) in ("float32", "float16", "bfloat16") else array
        return array.astype(np.float32) if name in self._bfloat16_inputs else array

    def close(self) -> None:
        """Nothing to free."""


class _InOrder(np.ndarray[Any, Any]):
    """An array whose products with it, from the left, are summed over the inner dimension term by term."""

    def __rmatmul__(self, left: Any) -> Array:
        return product_in_order(np.asarray(left), np.asarray(self))


def product_in_order(left: Array, right: Array) -> Array:
    """``left @ right`` for operands of rank 2 or more, in their dtype, one term after the other."""
    total = np.zeros((), left.dtype)
    for k in range(right.shape[-2]):
        total = total + left[..., :, k, None] * right[..., None, k, :]
    return total


def _products_in_order() -> list[type]:
    """MatMul, Gemm and Conv of float32 by ``product_in_order``, as onnx.reference wants them."""
    from onnx.reference.op_run import OpRun
    from onnx.reference.ops.op_conv import Conv

    def product(a: Array, b: Array) -> Array:
        plain = min(a.ndim, b.ndim) < 2 or a.shape[-1] == 0 or a.dtype != np.float32
        return np.asarray(np.matmul(a, b)) if plain else product_in_order(a, b)

    def matmul(self: Any, a: Array, b: Array) -> Any:
        del self
        return (product(a, b),)

    def gemm(self: Any, a: Array, b: Array, c: Any = None, **attributes: Any) -> Any:
        del self
        result = product(a.T if attributes["transA"] else a, b.T if attributes["transB"] else b)
        result = result * np.asarray(attributes["alpha"], a.dtype)
        return (result if c is None else result + c * np.asarray(attributes["beta"], a.dtype),)

    plain_conv: Any = Conv._run

    def conv(self: Any, x: Array, w: Array, b: Any = None, **attributes: Any) -> Any:
        if x.dtype != np.float32 or attributes.get("auto_pad") not in (None, "NOTSET"):
            return plain_conv(self, x, w, b, **attributes)
        result = conv_in_order(
            x, w, **{name: attributes.get(name) for name in ("dilations", "group", "pads", "strides")}
        )
        return (result if b is None else result + b.reshape(1, -1, *[1] * (x.ndim - 2)),)

    steps = {"MatMul": matmul, "Gemm": gemm, "Conv": conv}
    return [type(name, (OpRun,), {"op_domain": "", "_run": run}) for name, run in steps.items()]


def conv_in_order(x: Array, w: Array, dilations: Any, group: Any, pads: Any, strides: Any) -> Array:
    """ONNX's Conv without bias, x [N, C, ...], w [M, C/group, ...], each output summed term by term."""
    rank = x.ndim - 2
    dilations, strides, pads = dilations or [1] * rank, strides or [1] * rank, pads or [0] * 2 * rank
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    reach = tuple((k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True))
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=tuple(range(2, x.ndim)))
    steps = (slice(None, None, n) for n in (*strides, *dilations))
    windows = np.moveaxis(windows[(slice(None), slice(None), *steps)], 1, 1 + rank)  # [N, out..., C, kernel...]
    places, parts = windows.shape[: 1 + rank], []
    for inputs, kernels in zip(np.split(windows, group or 1, 1 + rank), np.split(w, group or 1), strict=True):
        parts.append(product_in_order(inputs.reshape(int(np.prod(places)), -1), kernels.reshape(len(kernels), -1).T))
    return np.moveaxis(np.concatenate(parts, -1).reshape(*places, len(w)), -1, 1)


def _make_op(cell: Cell, precision: Any, in_order: bool) -> type:
    """The FlashRNN op of one cell as onnx.reference wants it."""
    from onnx.reference.op_run import OpRun

    names = attribute_names(cell.op_type)

    def run(self: Any, wx: Array, r: Array, b: Array, lens: Array, states: Array, **attributes: Any) -> Any:
        del self
        N, _, H, D, _ = r.shape
        spec = RNNSpec(cell.name, H, D, N, **{name: attributes[name] for name in names})
        return reference.run(spec, wx, r.view(_InOrder) if in_order else r, b, lens, states, precision=precision)

    return type(cell.op_type, (OpRun,), {"op_domain": DOMAIN, "_run": run})


def _ignored(node: onnx.NodeProto) -> str:
    """What onnx.reference leaves out of a standard recurrent node without saying so."""
    if not is_standard_rnn(node):
        return ""
    if len(node.input) > 4 and node.input[4]:
        return "sequence_lens"
    for name in ("clip", "input_forget", "activation_alpha", "activation_beta"):
        if attribute(node, name):
            return name
    given: Any = attribute(node, "activations", [])
    names = [(a.decode() if isinstance(a, bytes) else a).lower() for a in given]
    defaults = _DEFAULT_ACTIVATIONS[node.op_type]
    return "activations" if names and names != defaults * (len(names) // len(defaults)) else ""


def _unknown(model: onnx.ModelProto, error: Exception) -> str:
    """The node whose operator an error of loading names."""
    nodes = [node for node in walk_nodes(model) if f"'{node.op_type}'" in str(error)]
    return node_label(nodes[0]) if nodes else "model"


def _named(node: onnx.NodeProto, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` of one node of the evaluator, whose errors name the node."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if is_flashrnn(node) and not isinstance(error, ValueError):
                raise  # a bug of ours
            raise FlashRNNError(f"onnx.reference cannot do the {node_label(node)}: {_text(error)}") from error

    return call


def _text(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:300] + " ..."
