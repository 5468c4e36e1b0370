"""Raising a file to an opset at which the op's function body can live, and comparing the two files' results."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from flashrnn_deploy.backends.ort import CRASHING_OPTIMIZERS
from flashrnn_deploy.exporters.onnx_files import Weights, to_bytes
from flashrnn_deploy.exporters.onnx_nodes import LeftAlone, first_line
from flashrnn_deploy.graph import free_inputs, opset_of, shape_of, walk_graphs
from flashrnn_deploy.op import DOMAIN

DEFAULT_OPSET = 17
COMPARE_BYTES = 16 << 20
"""Larger files are not compared after a raise: it would cost several times their size in memory."""

_STANDARD = ("", "ai.onnx")
# An unnamed or symbolic dimension of a comparison's inputs; the first size with which the original runs is taken.
_TRY_SIZES = (2, 1, 64)
_TOLERANCE = 1e-5
_FEEDABLE = {TensorProto.DataType.Value(n) for n in ("FLOAT", "FLOAT16", "DOUBLE", "INT8", "INT16", "INT32", "INT64")}
_FEEDABLE |= {TensorProto.DataType.Value(n) for n in ("BOOL", "UINT8", "UINT16", "UINT32", "UINT64")}


def raise_opset(model: ModelProto, target: int) -> ModelProto:
    """A skeleton at opset ``target``, by ONNX's version converter, with everything restored that it drops.

    Raises:
        LeftAlone: the converter cannot do it, or would lose something; the text says why.
    """
    own = opset_of(model)
    result = ModelProto()
    result.CopyFrom(model)
    if own == target:
        return result
    if foreign := sorted({f"{f.domain}::{f.name}" for f in model.functions if f.domain != DOMAIN}):
        raise LeftAlone(f"opset {own} cannot be raised to {target}: functions of the model, {', '.join(foreign)}")
    if any(graph.sparse_initializer for graph in walk_graphs(model.graph)):
        raise LeftAlone(f"opset {own} cannot be raised to {target}: the converter drops sparse initializers")
    bare = ModelProto(ir_version=model.ir_version, graph=model.graph)
    bare.opset_import.extend(entry for entry in model.opset_import if entry.domain not in _STANDARD)
    bare.opset_import.add(domain="", version=own)  # exactly one: the converter reads the first, a runtime the last
    try:
        raised: ModelProto = onnx.version_converter.convert_version(bare, target)
    except (RuntimeError, onnx.version_converter.ConvertError, onnx.shape_inference.InferenceError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1][:160]
        raise LeftAlone(f"opset {own} cannot be raised to {target}: {reason}") from None
    _restore(model.graph, raised.graph)
    result.graph.CopyFrom(raised.graph)
    for entry in result.opset_import:
        if entry.domain in _STANDARD:
            entry.version = target
    return result


def _restore(source: GraphProto, raised: GraphProto) -> None:
    """Put back what the converter's own representation has no room for."""
    for name in ("input", "output", "quantization_annotation", "metadata_props"):
        del getattr(raised, name)[:]
        getattr(raised, name).extend(getattr(source, name))
    raised.name, raised.doc_string = source.name, source.doc_string
    known = {_identity(node): node for graph in walk_graphs(source) for node in graph.node}
    for graph in walk_graphs(raised):
        for node in graph.node:
            if old := known.get(_identity(node)):
                node.doc_string = old.doc_string
                del node.metadata_props[:]
                node.metadata_props.extend(old.metadata_props)


def _identity(node: NodeProto) -> tuple[Any, ...]:
    return node.op_type, node.name, *node.output


def compare(source: Path, model: ModelProto, weights: Weights) -> str:
    """Run the source and the raised skeleton on the same random inputs with ONNX Runtime on the CPU.

    Returns:
        A sentence for the report: the largest difference, or why nothing was compared.

    Raises:
        LeftAlone: the results differ.
    """
    try:
        import onnxruntime  # type: ignore[import-untyped]
    except ImportError:
        return "the raised opset was not compared: onnxruntime is not installed"
    if source.stat().st_size + sum(w.nbytes for w in weights.values()) > 2 * COMPARE_BYTES:
        return f"the raised opset was not compared: the file is larger than {COMPARE_BYTES >> 20} MiB"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = partial(
        onnxruntime.InferenceSession,
        sess_options=options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=CRASHING_OPTIMIZERS,
    )
    # ONNX Runtime's failures share no base class but Exception; here any of them means "this file cannot judge".
    try:
        before = session(str(source))
    except Exception as error:
        return f"the raised opset was not compared: ONNX Runtime refuses the source ({first_line(error)})"
    for size in _TRY_SIZES:
        feeds = _random_inputs(model, size)
        if feeds is None:
            return "the raised opset was not compared: an input is not a numeric tensor, or is too large"
        try:
            expected = before.run(None, feeds)
        except Exception as error:
            refused = first_line(error)
            continue
        try:
            after = session(to_bytes(model, weights))
            found = after.run(None, feeds)
        except Exception as error:
            raise LeftAlone(f"ONNX Runtime refuses the file after raising the opset: {first_line(error)}") from None
        difference = _largest_difference(expected, found)
        if not difference <= _TOLERANCE:
            raise LeftAlone(f"results differ by {difference:.2g} after raising the opset")
        return f"the raised opset gives the same results (largest difference {difference:.1e})"
    return f"the raised opset was not compared: the source does not run on random inputs ({refused})"


def _random_inputs(model: ModelProto, size: int) -> dict[str, Any] | None:
    """Seeded inputs; integers are 1, since they are indices, lengths and rates more often than data."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for value in free_inputs(model.graph):
        shape = shape_of(value)
        elem_type = value.type.tensor_type.elem_type
        if shape is None or elem_type not in _FEEDABLE:
            return None
        sizes = [d if isinstance(d, int) else size for d in shape]
        if math.prod(sizes) > COMPARE_BYTES or min(sizes, default=0) < 0:
            return None
        dtype = onnx.helper.tensor_dtype_to_np_dtype(elem_type)
        floating = np.issubdtype(dtype, np.floating)
        feeds[value.name] = (rng.standard_normal(sizes) if floating else np.ones(sizes)).astype(dtype)
    return feeds


def _largest_difference(expected: list[Any], found: list[Any]) -> float:
    """Relative to 1 or the largest expected value. Equal NaN and infinities are no difference."""
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        if a.shape != b.shape:
            return np.inf
        if a.dtype.kind != "f":
            worst = max(worst, 0.0 if np.array_equal(a, b) else np.inf)
        elif a.size and not np.array_equal(a, b, equal_nan=True):
            a, b = a.astype(np.float64), b.astype(np.float64)
            worst = max(worst, float(np.max(np.abs(a - b)) / max(1.0, float(np.max(np.abs(a))))))
    return worst
