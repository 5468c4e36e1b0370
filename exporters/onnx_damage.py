"""What makes an ONNX file unusable, said in one line: damaged tensors, names that are no text, clashing imports."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx import ModelProto, NodeProto, TensorProto, helper

from flashrnn_deploy.cells import CELL_OF_OP
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.onnx_nodes import first_line
from flashrnn_deploy.files import json_metadata
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import DOMAIN, INPUTS, OPSET_VERSION, OUTPUTS, attribute_names, attribute_type, is_flashrnn

_KINDS = {int: onnx.AttributeProto.INT, float: onnx.AttributeProto.FLOAT}


def num_bytes(tensor: TensorProto) -> int:
    """How many bytes the raw data of a tensor must have.

    Raises:
        FlashRNNError: the dtype or a dimension makes no sense.
    """
    label = f"tensor '{tensor.name}'"
    try:
        data_type = ir.DataType(tensor.data_type)
    except ValueError:
        raise FlashRNNError(f"{label} has the unknown data type {tensor.data_type}") from None
    if data_type in (ir.DataType.UNDEFINED, ir.DataType.STRING):
        raise FlashRNNError(f"{label} has raw data, but the type {data_type.name}")
    if min(tensor.dims, default=0) < 0:
        raise FlashRNNError(f"{label} has the shape {list(tensor.dims)}")
    bits: int = math.prod(tensor.dims) * data_type.bitwidth
    return (bits + 7) // 8


def check_tensor(tensor: TensorProto) -> None:
    """Refuse a tensor whose data, held in the message itself, is not what its type and shape ask for.

    Raises:
        FlashRNNError: an unknown type, a negative dimension, or too few or too many elements.
    """
    label = f"tensor '{tensor.name}' of shape {list(tensor.dims)}"
    if tensor.HasField("raw_data"):
        found, needed, unit = len(tensor.raw_data), num_bytes(tensor), "bytes"
    elif tensor.data_type == TensorProto.STRING:
        found, needed, unit = len(tensor.string_data), math.prod(tensor.dims), "strings"
    else:
        needed, unit = num_bytes(tensor), "elements"
        data_type = ir.DataType(tensor.data_type)
        if data_type.bitwidth >= 8:  # smaller ones are packed, a byte per element of the field
            needed = math.prod(tensor.dims) * (2 if data_type.name.startswith("COMPLEX") else 1)
        found = len(getattr(tensor, helper.tensor_dtype_to_field(tensor.data_type)))
    if found != needed:
        raise FlashRNNError(f"{label} holds {found} {unit}, but needs {needed}")


def checker_message(path: Path) -> str:
    """Why ONNX's checker refuses a file, in one line; "" if it does not."""
    try:
        onnx.checker.check_model(str(path))
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, RuntimeError) as error:
        return first_line(error)
    return ""


def check_meaning(model: ModelProto) -> None:
    """Refuse a model whose imports leave open what its nodes mean, or would once the op's domain is imported too.

    Raises:
        FlashRNNError: no opset or two opsets of the standard operators, or another use of the op's domain.
    """
    versions = sorted({e.version for e in model.opset_import if e.domain in ("", "ai.onnx")})
    if len(versions) != 1 or versions[0] < 1:  # of two, readers differ in which one counts
        raise FlashRNNError(f"the model imports the opsets {versions} of the standard operators, not a single one")
    foreign = {entry.version for entry in model.opset_import if entry.domain == DOMAIN} - {OPSET_VERSION}
    states, _ = json_metadata(model, "flashrnn.states"), json_metadata(model, "flashrnn.axes")
    if not all(isinstance(output, str) for output in states.values()):
        raise FlashRNNError(f"the model's metadata 'flashrnn.states' is not one output per input: {states}")
    strange = [f"imports version {version} of it" for version in foreign]
    strange += [
        f"has the {n.op_type} node '{n.name}'" for n in walk_nodes(model) if n.domain == DOMAIN and not _is_ours(n)
    ]
    strange += [
        f"has the function {f.name}" for f in model.functions if f.domain == DOMAIN and f.name not in CELL_OF_OP
    ]
    if strange:
        raise FlashRNNError(
            f"the model uses the domain '{DOMAIN}' for something else than version {OPSET_VERSION} of the FlashRNN op: "
            f"it {strange[0]}; rename that domain first"
        )


def _is_ours(node: NodeProto) -> bool:
    """Whether a node has all inputs, outputs and attributes of one of the four ops."""
    if not is_flashrnn(node) or len(node.input) != len(INPUTS) or len(node.output) != len(OUTPUTS):
        return False
    kinds = {a.name: a.type for a in node.attribute}
    return all((*node.input, *node.output)) and all(
        kinds.get(name) == _KINDS[attribute_type(name)] for name in attribute_names(node.op_type)
    )
