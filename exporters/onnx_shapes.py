"""Shape inference on a graph that holds ``flashrnn`` nodes, without copying its weights."""

from __future__ import annotations

import math

import onnx
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy.exporters.onnx_scope import constant, make_scopes
from flashrnn_deploy.graph import dim_of, shape_of, walk_graphs
from flashrnn_deploy.op import register_schemas

Dims = list[int | str | None]
Shapes = dict[str, Dims]

_SMALL = 256


def probe(model: onnx.ModelProto) -> tuple[Shapes, dict[int | str | None, str]]:
    """Shapes with a prime in place of each dynamic input dimension, and the dimension's name of each prime."""
    light = _without_weights(model)
    graph = light.graph
    primes: dict[str, int] = {}
    fresh = (n for n in range(10007, 1 << 30) if all(n % k for k in range(2, int(n**0.5) + 1)))
    for value in graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                name = dim.dim_param or f"{value.name}:{axis}"
                if name not in primes:
                    primes[name] = next(fresh)
                dim.dim_value = primes[name]
    del graph.value_info[:]
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    _fold_integers(light)
    return _inferred(light), {prime: name for name, prime in primes.items()}


def _fold_integers(model: onnx.ModelProto) -> None:
    """Compute small constant integers, pads above all: ONNX's inference follows data through too few operators."""
    scope = make_scopes(model, {})[0]
    kept = []
    for node in model.graph.node:
        found = {}
        for output in node.output:
            data_type, dims = scope.types.get(output, (0, None))
            sizes = [d for d in dims or () if isinstance(d, int)]
            small = dims is not None and len(sizes) == len(dims) and math.prod(sizes) <= _SMALL
            if small and data_type in (TensorProto.INT64, TensorProto.INT32):
                found[output] = constant(scope, output)
        if found and all(found.values()) and len(found) == len(node.output):
            for name, value in found.items():
                if value is not None:
                    model.graph.initializer.append(numpy_helper.from_array(value.array, name))
        else:
            kept.append(onnx.NodeProto.FromString(node.SerializeToString()))
    del model.graph.node[:]
    model.graph.node.extend(kept)


def known_shapes(model: onnx.ModelProto) -> Shapes:
    """Shapes of the main graph's values, inferred; dimensions are sizes, names or None. Weights are not copied."""
    return _inferred(_without_weights(model))


def _inferred(light: onnx.ModelProto) -> Shapes:
    register_schemas()
    # Not strict: a file may declare a wrong shape and still run; inference then keeps what it knows.
    graph = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    shapes = {value.name: shape_of(value) for value in (*graph.value_info, *graph.input, *graph.output)}
    shapes |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    return {name: shape for name, shape in shapes.items() if shape is not None}


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose float initializers are inputs of their shape. Integer ones stay: inference reads shapes in them."""
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4))
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    source, graph = model.graph, light.graph
    graph.name = source.name
    for field in ("node", "input", "output", "value_info"):
        getattr(graph, field).extend(getattr(source, field))
    inputs = {value.name for value in source.input}
    for tensor in source.initializer:
        if tensor.data_type in (TensorProto.INT64, TensorProto.INT32) and tensor.data_location != TensorProto.EXTERNAL:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    return light


def correct_shapes(model: onnx.ModelProto) -> list[str]:
    """Correct, in place, declared shapes that contradict what inference finds; strict readers refuse such files.

    Returns:
        A sentence per graph output corrected, for the report. (A corrected value inside is nobody's contract.)
    """
    light = _without_weights(model)
    for graph in walk_graphs(light.graph):
        del graph.value_info[:]
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
    register_schemas()
    inferred = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    outputs = {value.name for value in model.graph.output}
    notes = []
    for declared, found in zip(walk_graphs(model.graph), walk_graphs(inferred), strict=True):
        known = {value.name: value.type.tensor_type.shape for value in (*found.value_info, *found.output)}
        for value in (*declared.output, *declared.value_info):
            old, new = shape_of(value), known.get(value.name)
            if old is None or new is None or not (dims := _corrected(old, [dim_of(d) for d in new.dim])):
                continue
            value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, dims))
            if declared is model.graph and value.name in outputs:
                notes.append(f"output '{value.name}' was declared as {old}, but is {dims}: corrected")
    return notes


def _corrected(old: Dims, new: Dims) -> Dims | None:
    """The right dimensions where ``old`` is wrong, None where it is not."""
    if len(old) != len(new):  # inference numbers what it does not know: unk__0
        return [None if isinstance(dim, str) and dim.startswith("unk__") else dim for dim in new]
    dims = [n if isinstance(n, int) and isinstance(o, int) else o for o, n in zip(old, new, strict=True)]
    return None if dims == old else dims
