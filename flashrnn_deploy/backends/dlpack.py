"""DLPack in both directions, by ctypes: arrays of any library in, ours out, nothing copied and no library imported.

The structures are those of DLPack's unversioned ABI (dlpack.h), which every producer still hands out by default.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from flashrnn_deploy.engine.dtypes import numpy_dtype
from flashrnn_deploy.errors import FlashRNNError

CPU, CUDA, CUDA_HOST = 1, 2, 3
_KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4
_NAME = b"dltensor"


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _DELETER))


_get = ctypes.pythonapi.PyCapsule_GetPointer
_get.restype, _get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def read(capsule: Any) -> tuple[int, int, tuple[int, ...], np.dtype[Any], bool]:
    """Device type, address, shape, dtype and whether the elements lie in C order, of a capsule that is not consumed.

    The memory is valid as long as the capsule is.

    Raises:
        FlashRNNError: it holds a type that NumPy has not.
    """
    tensor = _Managed.from_address(_get(capsule, _NAME)).tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    packed, size = True, 1
    for axis in reversed(range(tensor.ndim)):
        if tensor.strides and shape[axis] != 1 and tensor.strides[axis] != size:
            packed = 0 in shape
        size *= shape[axis]
    code, bits, lanes = tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes
    kinds = {code: kind for kind, code in _KINDS.items()}
    if lanes != 1 or not (code in kinds or (code, bits) == (_BFLOAT, 16)):
        raise FlashRNNError(f"a DLPack array of type code {code} with {bits} bits and {lanes} lanes cannot be fed")
    dtype = numpy_dtype("bfloat16") if code == _BFLOAT else np.dtype(f"{kinds[code]}{bits // 8}")
    return tensor.device.type, (tensor.data or 0) + tensor.byte_offset, shape, dtype, packed


_alive: dict[int, tuple[Any, ...]] = {}
"""What consumers still hold, by the address of its structure."""


def _delete(address: int | None) -> None:
    _alive.pop(address or 0, None)


def _drop(capsule: int) -> None:
    if _is_valid(capsule, _NAME):  # nobody took it
        _delete(_pointer(capsule, _NAME))


_c_delete = _DELETER(_delete)
_c_drop = _DELETER(_drop)


def write(owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype[Any], device: tuple[int, int]) -> Any:
    """A capsule of an array in C order; ``owner`` lives until its consumer is done."""
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    code = _BFLOAT if dtype.name == "bfloat16" else _KINDS[dtype.kind]
    managed = _Managed(
        _Tensor(address, _Device(*device), len(shape), _DataType(code, dtype.itemsize * 8, 1), sizes, None, 0),
        None,
        _c_delete,
    )
    place = ctypes.addressof(managed)
    _alive[place] = (managed, sizes, owner)
    return _new(place, _NAME, ctypes.cast(_c_drop, ctypes.c_void_p))
