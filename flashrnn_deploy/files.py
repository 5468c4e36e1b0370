"""Reading models and arrays, and writing results so that a failure leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import helper

from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.graph import walk_graphs

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_BITS = {kind: helper.tensor_dtype_to_np_dtype(kind).itemsize * 8 for kind in (*range(1, 8), *range(9, 17))}
"""Size of an element by data type, strings and the types of less than a byte left out."""
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{i}" for port in ("com", "lpt") for i in range(10))}


def printable(text: str) -> str:
    """``text`` with control and other unprintable characters escaped: names in a file are not to be trusted."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def load_model(path: Path) -> onnx.ModelProto:
    """Read an ONNX file, external data included.

    Raises:
        FlashRNNError: there is no such file, it cannot be read, or it is not an ONNX model.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FlashRNNError(f"cannot read the model {path}: {error.strerror}") from error
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
        decode_strings(model)
    except (DecodeError, UnicodeDecodeError) as error:
        raise FlashRNNError(f"{path} is not an ONNX file (its {len(data)} bytes do not parse)") from error
    if not model.ir_version or not model.HasField("graph") or not model.graph.output:
        raise FlashRNNError(f"{path} is not an ONNX file (its {len(data)} bytes hold no graph with outputs)")
    try:
        onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise FlashRNNError(f"cannot read the external data of {path}: {error}") from error
    _check_sizes(model, path)
    return model


def _check_sizes(model: onnx.ModelProto, path: Path) -> None:
    """Refuse weights with fewer or more bytes than their shape: onnx reads a truncated data file without a word."""
    for graph in walk_graphs(model.graph):
        for tensor in graph.initializer:
            bits = _BITS.get(tensor.data_type)
            if tensor.HasField("raw_data") and bits is not None:
                wanted = (math.prod(tensor.dims) * bits + 7) // 8
                if len(tensor.raw_data) != wanted:
                    raise FlashRNNError(
                        f"{path}: the weight '{printable(tensor.name)}' needs {wanted} bytes and has "
                        f"{len(tensor.raw_data)}: the file or its external data is cut off, or of another model"
                    )


def decode_strings(message: Any) -> None:
    """Refuse names that are no text: protobuf hands them out as bytes where a string is expected, without a word."""
    if isinstance(message, onnx.TensorProto):
        return
    for field, value in message.ListFields():
        for part in value if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else (value,):
            if field.message_type is not None:
                decode_strings(part)
            elif field.type == field.TYPE_STRING and isinstance(part, bytes):
                raise DecodeError(f"{field.name} is not UTF-8")


def json_metadata(model: onnx.ModelProto, key: str) -> dict[str, Any]:
    """The JSON object under ``key`` of the model's metadata, empty where there is none.

    Raises:
        FlashRNNError: the value is not a JSON object.
    """
    text = next((p.value for p in model.metadata_props if p.key == key), "{}")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FlashRNNError(f"the model's metadata '{key}' is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FlashRNNError(f"the model's metadata '{key}' is not a JSON object: {text[:80]}")
    return value


def load_array(path: Path) -> Array:
    """Read one array from a ``.npy`` file.

    Raises:
        FlashRNNError: there is no such file, it is not a .npy file, or it holds Python objects.
    """
    try:
        with path.open("rb") as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))
    except OSError as error:
        raise FlashRNNError(f"cannot read the array {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        reason = "it holds Python objects" if "allow_pickle" in str(error) or "Object arrays" in str(error) else error
        raise FlashRNNError(
            f"{path} is not a .npy file of numbers ({reason}); write it with numpy.save(path, array)"
        ) from error


def safe_names(names: Sequence[str]) -> list[str]:
    """A file name without extension for each tensor name: plain, inside any folder, and unique without regard to case.

    A name of letters, digits, ``_``, ``.`` and ``-`` is kept; in every other one each other character becomes ``_``,
    and its position is appended.
    """
    result: list[str] = []
    taken: set[str] = set()
    for position, name in enumerate(names):
        plain = _PLAIN_NAME.fullmatch(name) and name.split(".")[0].lower() not in _RESERVED
        stem = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:80].strip("_") or "output"
        safe, suffix = (name, position) if plain else (f"{stem}_{position}", position)
        while safe.lower() in taken:
            safe, suffix = f"{stem}_{suffix}", suffix + len(names)
        taken.add(safe.lower())
        result.append(safe)
    return result


@contextlib.contextmanager
def new_files(directory: Path) -> Iterator[Path]:
    """A temporary folder beside ``directory`` whose files move into it when the block ends without an exception.

    ``directory`` is made if needed; files and links of the same names are replaced, others stay; what is neither,
    such as a device, is never replaced. After an exception nothing has changed.

    Raises:
        FlashRNNError: the directory cannot be made or written.
    """
    made: list[Path] = []
    scratch: Path | None = None
    try:
        try:
            if directory.exists() and not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file")
            parent = directory if directory.is_dir() else directory.absolute().parent
            for folder in reversed([parent, *parent.parents]):
                if not folder.exists():
                    folder.mkdir()
                    made.append(folder)
            scratch = Path(tempfile.mkdtemp(prefix=".flashrnn-", dir=parent))
        except OSError as error:
            raise FlashRNNError(f"cannot write into {directory}: {error.strerror}; choose another directory") from error
        yield scratch
        try:
            directory.mkdir(exist_ok=True)
            new = sorted(scratch.iterdir())
            for file in new:  # before the first one moves
                if problem := _irreplaceable(directory / file.name):
                    raise IsADirectoryError(errno.EISDIR, f"{file.name} {problem} there")
            for file in new:
                os.replace(file, directory / file.name)
        except OSError as error:
            raise FlashRNNError(f"cannot write into {directory}: {error.strerror}; choose another directory") from error
        made = []
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        for folder in reversed(made):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _irreplaceable(path: Path) -> str:
    """Why nothing may take the place of ``path``; empty where something may."""
    if path.is_dir():
        return "is a directory"
    return "is not a regular file" if path.exists() and not path.is_file() else ""


def final_path(path: Path) -> Path:
    """Where a file named ``path`` is to be written: a link is followed.

    Raises:
        FlashRNNError: a directory is there, or what is no regular file, such as a device.
    """
    if problem := _irreplaceable(path):
        raise FlashRNNError(f"cannot write {path}: it {problem}")
    return Path(os.path.realpath(path)) if path.is_symlink() else path


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that is renamed to it when the block ends without an exception.

    A link is followed: what it points to is written.

    Raises:
        FlashRNNError: the file cannot be written.
    """
    path = final_path(path)
    with new_files(path.parent) as folder:
        yield folder / path.name


def write_outputs(folder: Path, outputs: dict[str, Array], facts: dict[str, Any]) -> dict[str, Any]:
    """Write one ``.npy`` per output and ``outputs.json``; bfloat16 travels as float32.

    Args:
        folder: where the files go.
        outputs: arrays by output name; any name is safe (see ``safe_names``).
        facts: further keys of outputs.json.

    Returns:
        What outputs.json says: ``facts`` and ``outputs``, a list of name, file, dtype and shape.
    """
    entries = []
    for (name, array), stem in zip(outputs.items(), safe_names(list(outputs)), strict=True):
        dtype = str(array.dtype)
        np.save(folder / f"{stem}.npy", array.astype(np.float32) if dtype == "bfloat16" else array)
        entries.append({"name": name, "file": f"{stem}.npy", "dtype": dtype, "shape": list(array.shape)})
    report = {**facts, "outputs": entries}
    (folder / "outputs.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report
