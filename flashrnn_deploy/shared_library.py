"""Opening a plugin library. The loader maps a file that was cut off and dies of it later, without a word."""

from __future__ import annotations

import ctypes
import platform
import struct
from pathlib import Path

from flashrnn_deploy.errors import FlashRNNError

_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine; System V ABI supplements of both
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")  # Elf64_Ehdr
_SEGMENT = struct.Struct("<IIQQQQQQ")  # Elf64_Phdr


def load(path: Path) -> ctypes.CDLL:
    """The library, opened.

    Raises:
        FlashRNNError: ``check`` refuses the file.
        OSError: the loader does.
    """
    check(path)
    return ctypes.CDLL(str(path.resolve()))


def check(path: Path) -> None:
    """Refuse a file that is cut off, or is for another processor. What is no 64-bit ELF file is left to the loader.

    Raises:
        FlashRNNError: the file cannot be read, or is one of these.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_HEADER.size)
            size = file.seek(0, 2)
            if data[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
                return
            if len(data) < _HEADER.size:
                raise _cut_off(path, size)
            _, machine, _, _, segments, sections, _, _, segment_bytes, count, section_bytes, num_sections, _ = (
                _HEADER.unpack(data)
            )
            file.seek(segments)
            table = file.read(count * segment_bytes)
    except OSError as error:
        raise FlashRNNError(f"cannot read {path}: {error.strerror}") from error
    here = platform.machine()
    if machine in _MACHINES and here in _MACHINES.values() and _MACHINES[machine] != here:
        raise FlashRNNError(f"{path} is for {_MACHINES[machine]}, and this machine is {here}")
    end = sections + num_sections * section_bytes
    for at in range(0, len(table) - _SEGMENT.size + 1, max(segment_bytes, 1)):
        _, _, offset, _, _, stored, _, _ = _SEGMENT.unpack_from(table, at)
        end = max(end, offset + stored)
    if size < end or len(table) < count * segment_bytes:
        raise _cut_off(path, size, end)


def _cut_off(path: Path, size: int, whole: int = 0) -> FlashRNNError:
    of = f" of {whole}" if whole else ""
    return FlashRNNError(f"{path} is cut off: {size}{of} bytes are there; copy or build it again")
