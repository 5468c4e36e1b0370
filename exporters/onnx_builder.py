"""Small tensor algebra that runs now on constants and writes ONNX nodes for everything else.

An operand is a ``Constant`` or the name of a value. Each function of ``Builder`` computes in NumPy where all operands
are constants, and appends a node otherwise; so one description of a weight's arrangement serves stored weights and
weights that arrive at run time. Only operators whose meaning is the same from opset 15 to the newest are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx import NodeProto, TensorProto, helper

from flashrnn_deploy.cells import Array
from flashrnn_deploy.exporters.onnx_files import make_tensor
from flashrnn_deploy.exporters.onnx_scope import Constant, Scope

Operand = Constant | str


@dataclass(eq=False)
class Builder:
    """Nodes that will replace one node of ``scope``. ``taken`` holds every name of the model, and grows."""

    scope: Scope
    prefix: str
    taken: set[str]
    nodes: list[NodeProto] = field(default_factory=list)

    def unique(self, part: str) -> str:
        """A new name for a value or node of this replacement."""
        name, k = f"{self.prefix}.{part}", 2
        while name in self.taken:
            name, k = f"{self.prefix}.{part}.{k}", k + 1
        self.taken.add(name)
        return name

    def name(self, operand: Operand, part: str) -> str:
        """The operand's name; a constant becomes an initializer where its ingredients live."""
        if isinstance(operand, str):
            return operand
        name, owner = self.unique(part), operand.scope
        tensor = make_tensor(name, operand.array, owner.weights)
        owner.graph.initializer.append(tensor)
        owner.tensors[name] = owner.graph.initializer[-1]
        owner.types[name] = (tensor.data_type, list(tensor.dims))
        return name

    def node(self, op_type: str, inputs: Sequence[Operand], part: str, output: str = "", **attributes: Any) -> str:
        """Append a node and return its output."""
        names = [self.name(operand, f"{part}.{k}") for k, operand in enumerate(inputs)]
        output = output or self.unique(part)
        self.nodes.append(helper.make_node(op_type, names, [output], name=self.unique(f"{part}.node"), **attributes))
        return output

    def integers(self, values: Sequence[int]) -> Constant:
        return Constant(np.asarray(values, np.int64), self.scope)

    def reshape(self, x: Operand, shape: Sequence[int], part: str, output: str = "") -> Operand:
        """A 0 in ``shape`` copies the dimension of ``x``; only names may have zeros."""
        if isinstance(x, Constant):
            return Constant(x.array.reshape(tuple(shape)), x.scope)
        return self.node("Reshape", [x, self.integers(shape)], part, output)

    def transpose(self, x: Operand, perm: Sequence[int], part: str, output: str = "") -> Operand:
        if isinstance(x, Constant):
            return Constant(x.array.transpose(tuple(perm)), x.scope)
        return self.node("Transpose", [x], part, output, perm=list(perm))

    def take(self, x: Operand, indices: Sequence[int], axis: int, part: str) -> Operand:
        """Slices ``indices`` of an axis, which stays."""
        if isinstance(x, Constant):
            return Constant(np.take(x.array, list(indices), axis), x.scope)
        return self.node("Gather", [x, self.integers(indices)], part, axis=axis)

    def add(self, a: Operand, b: Operand, part: str) -> Operand:
        if isinstance(a, Constant) and isinstance(b, Constant):
            return Constant(a.array + b.array, _inner(a, b))
        return self.node("Add", [a, b], part)

    def concat(self, parts: Sequence[Operand], axis: int, part: str) -> Operand:
        if len(parts) == 1:
            return parts[0]
        constants = [p for p in parts if isinstance(p, Constant)]
        if len(constants) == len(parts):
            return Constant(np.concatenate([c.array for c in constants], axis), _inner(*constants))
        return self.node("Concat", parts, part, axis=axis)

    def cast(self, x: Operand, data_type: int, part: str, output: str = "") -> Operand:
        if isinstance(x, Constant):
            return Constant(x.array.astype(ir.DataType(data_type).numpy(), copy=False), x.scope)
        return self.node("Cast", [x], part, output, to=data_type)

    def unsqueeze(self, x: Operand, axis: int, part: str, output: str = "") -> Operand:
        if isinstance(x, Constant):
            return Constant(np.expand_dims(x.array, axis), x.scope)
        return self.node("Unsqueeze", [x, self.integers([axis])], part, output)

    def zeros(self, shape: Operand, part: str) -> Operand:
        """float32 zeros of a shape that is an operand."""
        if isinstance(shape, Constant):
            return Constant(np.zeros(tuple(shape.array), np.float32), shape.scope)
        zero = helper.make_tensor("", TensorProto.FLOAT, [1], [0.0])
        return self.node("ConstantOfShape", [shape], part, value=zero)

    def zeros_like(self, x: Operand, part: str) -> Operand:
        if isinstance(x, Constant):
            return Constant(np.zeros(x.array.shape, np.float32), x.scope)
        return self.zeros(self.node("Shape", [x], f"{part}.shape"), part)

    def dimension(self, x: Operand, axis: int, part: str) -> Operand:
        """One dimension as an int64 tensor of shape [1]."""
        if isinstance(x, Constant):
            return Constant(np.asarray(x.array.shape[axis : axis + 1], np.int64), x.scope)
        return self.node("Shape", [x], part, start=axis, end=axis + 1)

    def finish(self, x: Operand, output: str) -> None:
        """Give a value the name that the graph already uses."""
        if x != output:
            self.node("Identity", [x], "identity", output)


def array_of(operand: Operand) -> Array | None:
    """The content of a constant, None for a value known at run time only."""
    return operand.array if isinstance(operand, Constant) else None


def _inner(*constants: Constant) -> Scope:
    return max((c.scope for c in constants), key=lambda scope: scope.depth)
