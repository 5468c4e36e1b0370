"""The FlashRNN op family: names, tensors, attributes and shape rules (docs/op.md is the text form).

Letters: ``T`` steps, ``B`` batch, ``N`` directions (1 or 2), ``H`` heads, ``D`` head_dim, ``G`` gates, ``Gb`` biases,
``S`` states. ``plugins/kernels/op.h`` mirrors the names and defaults of this file; a test keeps the two equal.
"""

from __future__ import annotations

import atexit
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import onnx
from onnx import TensorProto, helper

from flashrnn_deploy.cells import CELL_OF_OP, CELLS, Cell
from flashrnn_deploy.errors import FlashRNNError

DOMAIN = "flashrnn"
OPSET_VERSION = 1
INPUTS = ("wx", "r", "b", "sequence_lens", "initial_states")
OUTPUTS = ("y", "final_states")
FULL_LENGTH = 2**31 - 1
"""The value of a constant ``sequence_lens`` of shape [1] that means "every row is full": lengths are clamped to T."""
LARGEST_SIZE = 2**31 - 1
"""Of heads, units and rows of the batch."""

DTYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
"""dtypes of ``wx``, ``r`` and ``y``; ``b`` and the states are always float32."""

PLUGIN_ATTRIBUTES = {"plugin_version": "1", "plugin_namespace": ""}
"""Read by TensorRT's parser alone, which prefers the function body to the plugin without them."""


@dataclass(frozen=True)
class RNNSpec:
    """Everything about one ``flashrnn`` node that does not depend on T, B or the weights' values.

    Args:
        cell: a key of ``cells.CELLS``.
        num_heads: ``H``.
        head_dim: ``D``, units per head.
        num_directions: ``N``; 2 runs direction 0 forward and direction 1 backward.
        dtype: a key of ``DTYPES``, the dtype of ``wx``, ``r`` and ``y``.
        layout: 0 for ``wx`` and ``y`` as [T, B, ...], 1 for [B, T, ...].
        reverse: 1 runs a single direction backward.
        clip: bound of every activation's input, 0 = none. Not available for the sLSTM.
        relu: 1 replaces tanh by ReLU in the Elman cell.
        normalizer_floor: smallest sLSTM normalizer: 1.0 as in FlashRNN, 0.0 as in xLSTM.

    Raises:
        FlashRNNError: a value is outside the contract of docs/op.md.
    """

    cell: str
    num_heads: int
    head_dim: int
    num_directions: int = 1
    dtype: str = "float32"
    layout: int = 0
    reverse: int = 0
    clip: float = 0.0
    relu: int = 0
    normalizer_floor: float = 0.0

    def __post_init__(self) -> None:
        def need(ok: bool, what: str) -> None:
            if not ok:
                raise FlashRNNError(f"{self.cell} op: {what}")

        need(self.cell in CELLS, f"unknown cell; the cells are {', '.join(CELLS)}")
        need(self.dtype in DTYPES, f"dtype {self.dtype} is not one of {', '.join(DTYPES)}")
        for name in ("num_heads", "head_dim"):
            value = getattr(self, name)
            need(hasattr(value, "__index__"), f"{name} must be a whole number, not {value!r}")
        need(self.num_heads >= 1, f"num_heads must be at least 1, not {self.num_heads}")
        need(self.head_dim >= 1, f"head_dim must be at least 1, not {self.head_dim}")
        for name in ("num_heads", "head_dim", "hidden_size"):
            need(getattr(self, name) <= LARGEST_SIZE, f"{name} must be at most {LARGEST_SIZE}")
        need(self.num_directions in (1, 2), f"1 or 2 directions, not {self.num_directions}")
        for name in ("layout", "reverse", "relu"):
            need(getattr(self, name) in (0, 1), f"{name} must be 0 or 1, not {getattr(self, name)}")
        need(not (self.reverse and self.num_directions == 2), "reverse must be 0 with two directions")
        need(math.isfinite(self.clip) and self.clip >= 0, f"clip must be finite and not negative, not {self.clip}")
        floor_ok = math.isfinite(self.normalizer_floor) and self.normalizer_floor >= 0
        need(floor_ok, f"normalizer_floor must be finite and not negative, not {self.normalizer_floor}")
        need(self.cell != "slstm" or self.clip == 0, f"clip={self.clip}, but the sLSTM has no clip")
        need(self.cell == "elman" or self.relu == 0, "relu belongs to the elman cell")
        need(self.cell == "slstm" or self.normalizer_floor == 0, "normalizer_floor belongs to the slstm cell")

    @property
    def definition(self) -> Cell:
        return CELLS[self.cell]

    @property
    def op_type(self) -> str:
        return self.definition.op_type

    @property
    def hidden_size(self) -> int:
        """``H * D``, units of one direction."""
        return self.num_heads * self.head_dim

    @property
    def attributes(self) -> dict[str, int | float | str]:
        """All attributes of the node, in the order of the schema. They are always written, defaults too."""
        written = {name: attribute_type(name)(getattr(self, name)) for name in attribute_names(self.op_type)}
        return written | PLUGIN_ATTRIBUTES

    def shapes(self, T: int, B: int) -> dict[str, tuple[int, ...]]:
        """Shape of each input and output for ``T`` steps and a batch of ``B`` (``sequence_lens`` may also be [1])."""
        cell, N, H, D = self.definition, self.num_directions, self.num_heads, self.head_dim
        lead = (B, T) if self.layout else (T, B)
        states = (cell.num_states, N, B, H * D)
        return {
            "wx": (*lead, N * H * D * cell.num_gates),
            "r": (N, cell.num_gates, H, D, D),
            "b": (N, cell.num_biases, H, D),
            "sequence_lens": (B,),
            "initial_states": states,
            "y": (*lead, N * H * D),
            "final_states": states,
        }

    @property
    def macs_per_step(self) -> int:
        """Multiply-accumulates of the recurrent product, per time step and batch row."""
        return self.num_directions * self.definition.num_gates * self.num_heads * self.head_dim**2

    @classmethod
    def from_node(cls, node: onnx.NodeProto, r_shape: Sequence[int], dtype: str = "float32") -> RNNSpec:
        """Read a node; ``r_shape`` is the shape [N, G, H, D, D] of its recurrent weight.

        Raises:
            FlashRNNError: not a FlashRNN node, an attribute is missing, unknown or out of range, or the shape of
                ``r`` does not fit.
        """
        label = f"{node.op_type} node '{node.name}'"
        if node.domain != DOMAIN or node.op_type not in CELL_OF_OP:
            raise FlashRNNError(f"{label} of domain '{node.domain}' is not a FlashRNN op")
        cell = CELL_OF_OP[node.op_type]
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        names = attribute_names(node.op_type)
        if missing := [n for n in (*names, *PLUGIN_ATTRIBUTES) if n not in given]:
            raise FlashRNNError(f"{label} lacks the attribute(s) {', '.join(missing)}; all of them are always written")
        if unknown := sorted(set(given) - set(names) - set(PLUGIN_ATTRIBUTES)):
            raise FlashRNNError(f"{label} has the unknown attribute(s) {', '.join(unknown)}")
        shape = tuple(r_shape)
        if len(shape) != 5 or shape[1] != cell.num_gates or shape[3] != shape[4]:
            raise FlashRNNError(f"{label}: r must be [N, {cell.num_gates}, H, D, D], not {list(shape)}")
        return cls(
            cell=cell.name,
            num_directions=shape[0],
            num_heads=shape[2],
            head_dim=shape[3],
            dtype=dtype,
            **{n: given[n] for n in names},
        )


_ATTRIBUTE_TYPES = {f.name: float if "float" in str(f.type) else int for f in fields(RNNSpec)}


def attribute_names(op_type: str) -> tuple[str, ...]:
    """Names of an op's numeric attributes, in schema order."""
    extra = {"FlashElman": ("relu",), "FlashSLSTM": ("normalizer_floor",)}
    return ("layout", "reverse", "clip", *extra.get(op_type, ()))


def attribute_type(name: str) -> type:
    """``int`` or ``float``: the type of a numeric attribute."""
    return _ATTRIBUTE_TYPES[name]


def make_node(spec: RNNSpec, inputs: Sequence[str], outputs: Sequence[str], name: str = "") -> onnx.NodeProto:
    """A ``flashrnn`` node with every input, output and attribute written."""
    if len(inputs) != len(INPUTS) or len(outputs) != len(OUTPUTS) or not all((*inputs, *outputs)):
        raise ValueError(f"{spec.op_type} takes the inputs {INPUTS} and gives {OUTPUTS}; none may be left out")
    node = helper.make_node(spec.op_type, list(inputs), list(outputs), name=name, domain=DOMAIN)
    for key, value in spec.attributes.items():
        node.attribute.append(helper.make_attribute(key, value))
    return node


def is_flashrnn(node: Any) -> bool:
    """Whether ``node`` (an ONNX NodeProto, or anything with its ``domain`` and ``op_type``) is one of the four ops."""
    return node.domain == DOMAIN and node.op_type in CELL_OF_OP


def make_schema(cell: Cell) -> onnx.defs.OpSchema:
    """The ONNX schema of one op, with its shape function."""
    tensor = onnx.defs.OpSchema.FormalParameter
    types = {"T": [f"tensor({d.replace('float32', 'float')})" for d in DTYPES]}
    types |= {"F": ["tensor(float)"], "L": ["tensor(int32)"]}
    attributes = [
        onnx.defs.OpSchema.Attribute(
            name,
            onnx.defs.OpSchema.AttrType.FLOAT if attribute_type(name) is float else onnx.defs.OpSchema.AttrType.INT,
            required=True,
        )
        for name in attribute_names(cell.op_type)
    ]
    attributes += [
        onnx.defs.OpSchema.Attribute(name, helper.make_attribute(name, value))
        for name, value in PLUGIN_ATTRIBUTES.items()
    ]
    schema = onnx.defs.OpSchema(
        cell.op_type,
        DOMAIN,
        OPSET_VERSION,
        inputs=[tensor(n, t) for n, t in zip(INPUTS, "TTFLF", strict=True)],
        outputs=[tensor(n, t) for n, t in zip(OUTPUTS, "TF", strict=True)],
        type_constraints=[(k, v, "") for k, v in types.items()],
        attributes=attributes,
    )
    schema.set_type_and_shape_inference_function(_infer_shapes)
    return schema


def register_schemas() -> None:
    """Make the four ops known to this process's onnx checker and shape inference. Safe to call again."""
    for cell in CELLS.values():
        if not onnx.defs.has(cell.op_type, DOMAIN):
            onnx.defs.register_schema(make_schema(cell))
            # onnx up to 1.22 crashes at exit, when a Python shape function outlives the interpreter
            atexit.register(onnx.defs.deregister_schema, cell.op_type, OPSET_VERSION, DOMAIN)


def _infer_shapes(context: Any) -> None:
    """y [T, B, N*H*D] from the leading dimensions of wx; final_states from initial_states, else from wx and r."""
    wx, r, states = (context.get_input_type(i) for i in (0, 1, 4))
    dims = {}
    for name, rank, value in (("wx", 3, wx), ("r", 5, r), ("initial_states", 4, states)):
        if value is not None and value.tensor_type.HasField("shape"):
            dims[name] = value.tensor_type.shape.dim
            if len(dims[name]) != rank:
                raise onnx.shape_inference.InferenceError(f"{name} must have rank {rank}, not {len(dims[name])}")
    sizes = [d.dim_value for d in dims.get("r", ())]  # 0 = unknown
    y = helper.make_tensor_type_proto(wx.tensor_type.elem_type if wx else TensorProto.UNDEFINED, None)
    if "wx" in dims:
        for d in dims["wx"][:2]:
            y.tensor_type.shape.dim.add().CopyFrom(d)
        last = y.tensor_type.shape.dim.add()
        if sizes and (width := sizes[0] * sizes[2] * sizes[3]):
            last.dim_value = width
    context.set_output_type(0, y)
    final = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    if "initial_states" in dims:
        for d in dims["initial_states"]:
            final.tensor_type.shape.dim.add().CopyFrom(d)
    context.set_output_type(1, final)
