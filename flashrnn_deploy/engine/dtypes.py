"""TensorRT's data types by NumPy's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashrnn_deploy.errors import FlashRNNError

_NAMES = {
    "FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16", "INT32": "int32", "INT64": "int64", "INT8": "int8",
    "UINT8": "uint8", "BOOL": "bool",
}  # fmt: skip


def dtype_name(dtype: Any) -> str:
    """NumPy's name of a ``trt.DataType`` ("float32", "bfloat16", ...).

    Raises:
        FlashRNNError: NumPy has no such type.
    """
    if dtype.name not in _NAMES:
        raise FlashRNNError(f"an input or output of the engine is {dtype.name}, which no array here can hold")
    return _NAMES[dtype.name]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of such a name; bfloat16 is that of ``ml_dtypes``."""
    if name == "bfloat16":
        import ml_dtypes

        name = ml_dtypes.bfloat16
    result: np.dtype[Any] = np.dtype(name)
    return result
