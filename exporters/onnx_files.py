"""Reading and writing ONNX files with the weights held apart from the graph.

A file is read into a *skeleton*, a ModelProto whose large tensors say "my data is elsewhere" (ONNX's own EXTERNAL
location, with a key in place of a file name), and a dictionary of their bytes. Every step then works on a small
protobuf: the version converter, shape inference and the rewriting copy kilobytes, not the weights. ``save`` writes one
tensor after the other, so the peak stays near the two copies that parsing needs (protobuf's own ``SerializeToString``
would add a third and a fourth).

Protobuf, not onnx-ir, holds the graph: onnx-ir drops sparse initializers and training information and refuses map
types, and a converted file has to keep what was not converted. Tensor data is read through onnx-ir.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from onnx import GraphProto, ModelProto, TensorProto

from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.onnx_damage import check_tensor, num_bytes
from flashrnn_deploy.files import decode_strings
from flashrnn_deploy.graph import subgraphs, walk_graphs

Weights = dict[str, Array]
"""Key in a skeleton's tensor -> its raw little-endian bytes, a flat uint8 array (memory-mapped for external data)."""

LARGE_BYTES = 1 << 16
"""Tensors from this size on are held apart. Smaller ones may be shapes, which inference reads."""

INLINE_LIMIT = (1 << 31) - (1 << 20)
"""Largest file written as one piece; protobuf readers refuse 2 GiB."""

_ALIGNMENT = 4096


def load(path: Path) -> tuple[ModelProto, Weights, set[Path]]:
    """Read an ONNX file; the input and its data files are opened for reading only.

    Returns:
        The skeleton, its weights, and the data files that the file names.

    Raises:
        FlashRNNError: missing, a directory, not an ONNX model, or a data file that is missing, short or outside the
            model's folder, or a tensor whose data does not fit its type and shape.
    """
    try:
        if not path.is_file():
            raise FlashRNNError(f"{path}: {'a directory, not a file' if path.is_dir() else 'no such file'}")
        model = ModelProto.FromString(path.read_bytes())
        decode_strings(model)
    except (DecodeError, UnicodeDecodeError):
        raise FlashRNNError(f"{path}: not an ONNX file (protobuf cannot read it)") from None
    except OSError as error:
        raise FlashRNNError(f"{path}: {error.strerror}") from None
    if not model.ir_version or not model.opset_import or not model.HasField("graph"):
        raise FlashRNNError(f"{path}: not an ONNX model (it has no IR version, no opset import or no graph)")
    weights: Weights = {}
    files: set[Path] = set()
    try:
        for tensor in walk_tensors(model):
            _take_out(path, tensor, weights, files)
    except FlashRNNError as error:
        raise FlashRNNError(f"{path}: {error}") from None
    except OSError as error:
        raise FlashRNNError(f"{path}: cannot read its external data: {error.strerror}") from None
    # A cleared field stays in protobuf's arena until the whole message dies, hence the copy.
    return ModelProto.FromString(model.SerializeToString()), weights, files


def save(model: ModelProto, weights: Weights, path: Path) -> list[Path]:
    """Write a skeleton with its weights to ``path``, with ``<path>.data`` beside it where both exceed the limit of one.

    Returns:
        The files written.
    """
    elsewhere = [t for t in walk_tensors(model) if is_elsewhere(t)]
    total = model.ByteSize() + sum(weights[_entries(t)["location"]].nbytes for t in elsewhere)
    if total < INLINE_LIMIT:
        with path.open("wb") as file:
            _write_inline(model, weights, file)
        return [path]
    result = ModelProto.FromString(model.SerializeToString())
    data_path = path.with_name(path.name + ".data")
    with data_path.open("wb") as file:
        for tensor in walk_tensors(result):
            if is_elsewhere(tensor):
                payload = weights[_entries(tensor)["location"]]
                file.write(bytes(-file.tell() % _ALIGNMENT))
                facts = {"location": data_path.name, "offset": str(file.tell()), "length": str(payload.nbytes)}
                del tensor.external_data[:]
                for key, value in facts.items():
                    tensor.external_data.add(key=key, value=value)
                file.write(payload.data)
    path.write_bytes(result.SerializeToString())
    return [path, data_path]


def to_bytes(model: ModelProto, weights: Weights) -> bytes:
    """A skeleton with its weights as the bytes of one ONNX file."""
    result = ModelProto.FromString(model.SerializeToString())
    for tensor in walk_tensors(result):
        _fill(tensor, weights)
    return bytes(result.SerializeToString())


def is_elsewhere(tensor: TensorProto) -> bool:
    """Whether a skeleton's tensor has its bytes in the dictionary."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def is_readable(tensor: TensorProto, weights: Weights) -> bool:
    """Whether the bytes of a tensor are at hand."""
    return not is_elsewhere(tensor) or _entries(tensor).get("location") in weights


def read_tensor(tensor: TensorProto, weights: Weights) -> Array:
    """A tensor of a skeleton as an array; not a copy where its bytes are held apart."""
    if not is_elsewhere(tensor):
        return np.asarray(ir.serde.deserialize_tensor(tensor).numpy())
    dtype = ir.DataType(tensor.data_type).numpy()
    return weights[_entries(tensor)["location"]].view(dtype).reshape(tuple(tensor.dims))


def make_tensor(name: str, array: Array, weights: Weights) -> TensorProto:
    """A skeleton's tensor with the content of ``array``, whose bytes go to ``weights`` where they are many."""
    array = np.asarray(array, order="C")
    if array.nbytes < LARGE_BYTES:
        return ir.serde.serialize_tensor(ir.Tensor(array, name=name))
    tensor = TensorProto(name=name, data_type=ir.DataType.from_numpy(array.dtype), dims=array.shape)
    _set_elsewhere(tensor, weights, array.reshape(-1).view(np.uint8))
    return tensor


def walk_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of the model: initializers, sparse ones, and those in node attributes, of function bodies too."""
    bodies = [inner for function in model.functions for node in function.node for inner in subgraphs(node)]
    for graph in (inner for outer in (model.graph, *bodies) for inner in walk_graphs(outer)):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        yield from _attribute_tensors(graph.node)
    for function in model.functions:
        yield from _attribute_tensors(function.node)


def _attribute_tensors(nodes: Any) -> Iterator[TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else attribute.sparse_tensors
            for tensor in sparse:
                yield from (tensor.values, tensor.indices)


def _take_out(path: Path, tensor: TensorProto, weights: Weights, files: set[Path]) -> None:
    """Check a tensor of the model at ``path``, and hold its bytes apart where they are many or in another file."""
    if isinstance(tensor.name, bytes):
        raise FlashRNNError(f"a tensor's name {tensor.name!r} is not UTF-8")
    if tensor.data_location == TensorProto.EXTERNAL:
        data = _map_external(path, tensor)
        files.add((path.parent / _entries(tensor)["location"]).resolve())
        _set_elsewhere(tensor, weights, data)
        return
    check_tensor(tensor)
    if len(raw := tensor.raw_data) >= LARGE_BYTES:
        tensor.ClearField("raw_data")
        _set_elsewhere(tensor, weights, np.frombuffer(raw, np.uint8))


def _entries(tensor: TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _set_elsewhere(tensor: TensorProto, weights: Weights, data: Array) -> None:
    key = f"weight {len(weights)}"
    weights[key] = data
    del tensor.external_data[:]
    tensor.external_data.add(key="location", value=key)
    tensor.data_location = TensorProto.EXTERNAL


def _map_external(model_path: Path, tensor: TensorProto) -> Array:
    """Map a tensor's part of its data file."""
    entries = _entries(tensor)
    location = entries.get("location", "")
    folder = model_path.parent.resolve()
    what = f"tensor '{tensor.name}' has its data in '{location}'"
    if not isinstance(location, str) or not location or "\0" in location:
        raise FlashRNNError(f"tensor '{tensor.name}' names no file for its external data")
    path = (folder / location).resolve()
    if not path.is_relative_to(folder):
        raise FlashRNNError(f"{what}, outside the model's folder; such files are not read")
    if not path.is_file():
        raise FlashRNNError(f"{what}, which does not exist; put the data file beside the model")
    needed = num_bytes(tensor)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", needed))
    except ValueError:
        raise FlashRNNError(f"{what}, but its offset or length is not a number") from None
    if length != needed or offset < 0 or offset + length > path.stat().st_size:
        raise FlashRNNError(f"{what}, bytes {offset} to {offset + length}; it needs {needed} within the file")
    if not length:
        return np.zeros(0, np.uint8)
    return np.memmap(path, np.uint8, "r", offset, (length,))


def _fill(tensor: TensorProto, weights: Weights) -> None:
    if is_elsewhere(tensor):
        tensor.raw_data = weights[_entries(tensor)["location"]].tobytes()
        _clear_location(tensor)


def _clear_location(tensor: TensorProto) -> None:
    del tensor.external_data[:]
    tensor.ClearField("data_location")


def _write_inline(model: ModelProto, weights: Weights, file: BinaryIO) -> None:
    """One ordinary protobuf message, written by parts: the initializers of the main graph come last in the graph."""
    head = ModelProto.FromString(model.SerializeToString())
    body = GraphProto()
    body.CopyFrom(head.graph)
    head.ClearField("graph")
    tensors = list(body.initializer)
    initializers = []
    for tensor in tensors:
        copy = TensorProto.FromString(tensor.SerializeToString())
        payload = weights[_entries(copy)["location"]] if is_elsewhere(copy) else None
        _clear_location(copy)
        text = copy.SerializeToString()
        if payload is not None:
            text += _key(TensorProto, "raw_data") + _varint(payload.nbytes)
        initializers.append((text, payload))
    del body.initializer[:]
    wrapper = ModelProto(graph=body)
    for tensor in walk_tensors(wrapper):
        _fill(tensor, weights)
    body_text = wrapper.graph.SerializeToString()
    sizes = [len(text) + (0 if payload is None else payload.nbytes) for text, payload in initializers]
    keys = [_key(GraphProto, "initializer") + _varint(size) for size in sizes]
    file.write(head.SerializeToString())
    file.write(_key(ModelProto, "graph") + _varint(len(body_text) + sum(map(len, keys)) + sum(sizes)))
    file.write(body_text)
    for key, (text, payload) in zip(keys, initializers, strict=True):
        file.write(key + text)
        if payload is not None:
            file.write(payload.data)


def _key(message: type[Message], field: str) -> bytes:
    """Protobuf's key of a length-delimited field (wire type 2)."""
    return _varint(message.DESCRIPTOR.fields_by_name[field].number << 3 | 2)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
