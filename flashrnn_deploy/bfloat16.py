"""A copy of a bfloat16 model that ONNX Runtime's CPU can run.

ONNX Runtime's CPU provider has no bfloat16 MatMul, Add, or most others, and no NumPy array crosses its border as
bfloat16. The copy casts each bfloat16 input of a standard operator to float32 and its result back, so that every
operator still rounds to bfloat16 once; graph inputs and outputs of that dtype become float32. The FlashRNN op itself
computes in float32 inside, on its function body or in a library, and stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx
import onnx.inliner
from onnx import TensorProto, helper

from flashrnn_deploy.graph import subgraphs, walk_graphs
from flashrnn_deploy.op import DOMAIN, is_flashrnn
from flashrnn_deploy.shapes import tensors_of

BF16, F32 = TensorProto.BFLOAT16, TensorProto.FLOAT
# Runs on bfloat16 as it is: these have kernels for it, and a Cast around them would change nothing.
_NATIVE = {"Cast", "CastLike", "Identity", "Constant", "Shape", "Size", "If", "Loop", "Scan"}
NOT_ON_CPU = (
    "the file holds bfloat16, for which ONNX Runtime's CPU has no arithmetic: `run`, `verify` and `bench` make a copy "
    "that it runs; a session of your own loads the file on a GPU only"
)


def uses_bfloat16(model: onnx.ModelProto) -> bool:
    """Whether any graph input, output, weight or FlashRNN node of the model is bfloat16."""
    tensors = tensors_of(model)
    return any(tensor.dtype == BF16 for tensor in tensors.values())


def for_cpu(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with Casts around the standard operators that touch bfloat16, and float32 at its border.

    Other model-local functions than the FlashRNN ops are expanded first.
    """
    copy = for_border(model)
    if any(f.domain != DOMAIN for f in copy.functions):
        keep = [(f.domain, f.name) for f in copy.functions if f.domain == DOMAIN]
        copy = onnx.inliner.inline_selected_functions(copy, keep, exclude=True)
    types = {name: tensor.dtype for name, tensor in tensors_of(copy).items()}
    counter = iter(range(10**9))
    for graph in walk_graphs(copy.graph):
        nodes = [new for node in graph.node for new in _with_casts(node, types, counter)]
        del graph.node[:]
        graph.node.extend(nodes)
    return copy


def for_border(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose bfloat16 graph inputs and outputs are float32, cast inside: exact for values that fit bfloat16."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    initialized = {weight.name for weight in graph.initializer}
    before, after = [], []
    for value in graph.input:
        if value.type.tensor_type.elem_type == BF16 and value.name not in initialized:
            inside = _fresh(f"{value.name}_bf16")
            _rename(graph, value.name, inside, inputs=True)
            value.type.tensor_type.elem_type = F32
            before.append(_cast(value.name, inside, BF16))
    for value in graph.output:
        if value.type.tensor_type.elem_type == BF16:
            inside = _fresh(f"{value.name}_bf16")
            # Readers inside the graph follow the renamed tensor as well.
            _rename(graph, value.name, inside, inputs=True, outputs=True)
            value.type.tensor_type.elem_type = F32
            after.append(_cast(inside, value.name, F32))
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    return copy


def _fresh(name: str) -> str:
    return f"flashrnn_deploy.{name}"


def _cast(source: str, target: str, dtype: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [source], [target], name=f"cast/{target}", to=dtype)


def _rename(graph: onnx.GraphProto, old: str, new: str, inputs: bool = False, outputs: bool = False) -> None:
    for node in graph.node:
        if inputs:
            _replace(node.input, old, new)
        if outputs:
            _replace(node.output, old, new)
        for inner in subgraphs(node):
            _rename(inner, old, new, inputs=inputs)
    for part in (graph.value_info, graph.initializer if outputs else ()):
        for entry in part:
            if entry.name == old:
                entry.name = new


def _replace(names: Any, old: str, new: str) -> None:
    for index, name in enumerate(list(names)):
        if name == old:
            names[index] = new


def _with_casts(node: onnx.NodeProto, types: dict[str, int], counter: Iterator[int]) -> list[onnx.NodeProto]:
    """The node between the Casts that it needs."""
    touched = any(types.get(name) == BF16 for name in (*node.input, *node.output))
    if not touched or is_flashrnn(node) or node.domain not in ("", "ai.onnx") or node.op_type in _NATIVE:
        return [node]
    before, after = [], []
    for index, name in enumerate(node.input):
        if types.get(name) == BF16:
            wide = _fresh(f"{name}.f32.{next(counter)}")
            before.append(_cast(name, wide, F32))
            node.input[index] = wide
    for index, name in enumerate(node.output):
        if types.get(name) == BF16:
            wide = _fresh(f"{name}.f32.{next(counter)}")
            after.append(_cast(wide, name, BF16))
            node.output[index] = wide
    for entry in node.attribute:
        if entry.name in ("dtype", "output_dtype", "stash_type") and entry.i == BF16:
            entry.i = F32
        if entry.type == onnx.AttributeProto.TENSOR and entry.t.data_type == BF16:
            entry.t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(entry.t).astype("float32")))
    return [*before, node, *after]


def bfloat16_names(model: onnx.ModelProto) -> tuple[set[str], set[str]]:
    """Names of the bfloat16 graph inputs and outputs."""

    def names(values: Iterable[onnx.ValueInfoProto]) -> set[str]:
        return {v.name for v in values if v.type.tensor_type.elem_type == BF16}

    return names(model.graph.input), names(model.graph.output)
