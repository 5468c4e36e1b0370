"""Scopes of an ONNX graph: what a name means inside If, Loop and Scan bodies, and which values are constant."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

from flashrnn_deploy.cells import Array
from flashrnn_deploy.exporters.onnx_files import Weights, is_readable, read_tensor
from flashrnn_deploy.exporters.onnx_nodes import LeftAlone, first_line, named_subgraphs
from flashrnn_deploy.graph import dim_of, opset_of, walk_graphs

Dims = list[int | str | None]

# Deterministic operators that exporters put between a stored weight and an RNN.
_MOVING = {"Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze"}
_MOVING |= {"Tile", "Transpose", "Unsqueeze", "Where"}
_FOLDABLE = _MOVING | {"Add", "Constant", "ConstantOfShape", "Div", "Mul", "Neg", "Shape", "Sub"}
_MAX_DEPTH = 100
_MAX_FOLDED = 1 << 28


@dataclass(frozen=True, eq=False)
class Scope:
    """One graph with the names it defines. ``path`` tells a reader where it is, "main" for the main graph.

    ``inputs`` are names whose value no graph fixes, sparse initializers among them; ``twice`` those that the graph
    defines more than once, which ONNX forbids.
    """

    graph: GraphProto
    parent: Scope | None
    path: str
    opset: int
    weights: Weights
    producers: dict[str, NodeProto]
    tensors: dict[str, TensorProto]
    inputs: frozenset[str]
    twice: frozenset[str]
    types: dict[str, tuple[int, Dims | None]]
    folded: dict[str, Constant | None] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        return 0 if self.parent is None else self.parent.depth + 1


@dataclass(frozen=True, eq=False)
class Constant:
    """A constant and the scope where it is kept if the graph needs it."""

    array: Array
    scope: Scope


def make_scopes(model: ModelProto, weights: Weights) -> list[Scope]:
    """The scope of every graph of a skeleton, outer before inner; types and shapes come from ONNX's inference.

    Raises:
        LeftAlone: inference refuses the model.
    """
    opset = opset_of(model)
    try:
        inferred = walk_graphs(onnx.shape_inference.infer_shapes(model, data_prop=True).graph)
    except onnx.shape_inference.InferenceError as error:
        raise LeftAlone(f"ONNX's shape inference refuses the model: {first_line(error)}") from None
    # Files before IR 4 had to list every initializer as an input; since then the list means "a caller may replace it".
    replaceable = model.ir_version >= 4

    def visit(graph: GraphProto, parent: Scope | None, path: str) -> Iterator[Scope]:
        types: dict[str, tuple[int, Dims | None]] = {t.name: (t.data_type, list(t.dims)) for t in graph.initializer}
        known = next(inferred)
        for value in (*known.value_info, *known.input, *known.output):
            tensor_type = value.type.tensor_type
            shape = [dim_of(d) for d in tensor_type.shape.dim] if tensor_type.HasField("shape") else None
            if value.name not in types:
                types[value.name] = (tensor_type.elem_type, shape)
        tensors = {t.name: t for t in graph.initializer}
        sparse = {t.values.name for t in graph.sparse_initializer}  # never folded, but they hide outer names
        listed = {v.name for v in graph.input}
        stored = [t.name for t in graph.initializer] + [t.values.name for t in graph.sparse_initializer]
        made = Counter([*(o for node in graph.node for o in node.output if o), *stored, *(listed - set(stored))])
        scope = Scope(
            graph=graph,
            parent=parent,
            path=path,
            opset=opset,
            weights=weights,
            producers={output: node for node in graph.node for output in node.output if output},
            tensors={n: t for n, t in tensors.items() if n not in sparse and not (replaceable and n in listed)},
            inputs=frozenset((listed if replaceable else listed - set(tensors)) | sparse),
            twice=frozenset(name for name, count in made.items() if count > 1),
            types=types,
        )
        yield scope
        for node in graph.node:
            for name, inner in named_subgraphs(node):
                yield from visit(inner, scope, f"{path} > {name}")

    return list(visit(model.graph, None, "main"))


def check_names(graph: GraphProto, outside: frozenset[str] = frozenset()) -> None:
    """Look for names that an inner graph defines although a graph around it has them too.

    ONNX forbids that, and ONNX Runtime (1.32) runs some of these files with the outer value in place of the inner one:
    whatever is made of such a file, some engine would compute other numbers than before.

    Raises:
        LeftAlone: there is one.
    """
    own = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    own |= {t.values.name for t in graph.sparse_initializer} | {o for n in graph.node for o in n.output if o}
    if hidden := sorted(own & outside):
        raise LeftAlone(f"graph '{graph.name}' hides the name '{hidden[0]}' of a graph around it, which ONNX forbids")
    names = outside | own
    for node in graph.node:
        for _, inner in named_subgraphs(node):
            check_names(inner, names)


def home(scope: Scope | None, name: str) -> Scope | None:
    """The scope that defines a name, looking outwards."""
    while scope is not None and not (name in scope.inputs or name in scope.tensors or name in scope.producers):
        scope = scope.parent
    return scope


def type_of(scope: Scope, name: str) -> tuple[int, Dims | None]:
    """Element type (0 = unknown) and shape (None = unknown rank) of a name seen from a scope."""
    owner = home(scope, name)
    return owner.types.get(name, (0, None)) if owner is not None else (0, None)


def constant(scope: Scope, name: str, depth: int = 0) -> Constant | None:
    """The value of a name, if it is the same in every run: initializers, Constant nodes, and what is made of them."""
    owner = home(scope, name)
    if owner is None or name in owner.inputs or name in owner.twice or depth > _MAX_DEPTH:
        return None
    if name not in owner.folded:
        owner.folded[name] = None  # what a cycle finds
        owner.folded[name] = _evaluate(owner, name, depth)
    return owner.folded[name]


def _evaluate(scope: Scope, name: str, depth: int) -> Constant | None:
    if name in scope.tensors:
        return _stored(scope.tensors[name], scope)
    node = scope.producers[name]
    if node.domain not in ("", "ai.onnx") or node.op_type not in _FOLDABLE or not _is_small(scope, name):
        return None
    if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].type == AttributeProto.TENSOR:
        return _stored(node.attribute[0].t, scope)
    operands = [constant(scope, i, depth + 1) if i else None for i in node.input]
    if any(i and o is None for i, o in zip(node.input, operands, strict=True)):
        return None
    arrays = {i: o.array for i, o in zip(node.input, operands, strict=True) if o is not None}
    # Where the largest ingredient lives: branches that reshape one outer weight then share one arranged weight.
    place = max((o for o in operands if o is not None), key=lambda o: o.array.nbytes, default=None)
    graph = helper.make_graph(
        [node], "fold", [onnx.ValueInfoProto(name=i) for i in arrays], [onnx.ValueInfoProto(name=o) for o in [name]]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", scope.opset)], ir_version=8)
    # A node that no runtime could run either, as a Gather behind the end, fails here in ways without a common base
    # class. It is no constant then, and stays in the graph for the runtime to judge.
    try:
        (result,) = ReferenceEvaluator(model).run(None, arrays)
    except Exception:
        return None
    if not isinstance(result, np.ndarray | np.generic):
        return None
    return Constant(np.asarray(result), scope if place is None else place.scope)


def _stored(tensor: TensorProto, scope: Scope) -> Constant | None:
    return Constant(read_tensor(tensor, scope.weights), scope) if is_readable(tensor, scope.weights) else None


def _is_small(scope: Scope, name: str) -> bool:
    """Whether a value may be computed here: a few bytes of file can ask for a terabyte of zeros."""
    sizes = [d for d in scope.types.get(name, (0, None))[1] or () if isinstance(d, int)]
    return math.prod(sizes) <= _MAX_FOLDED
