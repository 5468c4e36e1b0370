"""Arrays in GPU memory, by pycuda: taken from any library, handed to any library, copied only where asked."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from flashrnn_deploy.backends import dlpack
from flashrnn_deploy.cells import Array
from flashrnn_deploy.engine.dtypes import numpy_dtype
from flashrnn_deploy.errors import FlashRNNError

_ALIGNMENT = 256  # bytes; what TensorRT's tensor addresses must be multiples of


class Device:
    """GPU 0 through its primary context, which TensorRT's CUDA runtime uses too: a stream, and memory for reuse.

    Raises:
        FlashRNNError: pycuda does not load, or there is no GPU.
    """

    def __init__(self) -> None:
        try:
            import pycuda.driver as driver  # type: ignore[import-not-found]
        except ModuleNotFoundError:
            raise
        except ImportError as error:
            raise FlashRNNError(
                f"pycuda is installed but does not load: {error}; it needs the NVIDIA driver (libcuda.so.1)"
            ) from error
        self._driver = driver
        try:
            driver.init()
            self.compute_capability = "{}.{}".format(*driver.Device(0).compute_capability())
            self._context = _primary_context(driver)
        except driver.Error as error:
            raise FlashRNNError(f"there is no GPU to run on: {error}") from error
        self._free: dict[int, list[Any]] = {}
        with self.current():
            self.stream = driver.Stream()
            self._start, self._stop = driver.Event(), driver.Event()

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """This GPU's context on top of the thread's stack; what the driver refuses inside becomes one line."""
        self._context.push()
        try:
            yield
        except self._driver.Error as error:
            raise FlashRNNError(f"CUDA fails: {error}") from error
        finally:
            self._driver.Context.pop()

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> DeviceArray:
        """An array whose elements are not set."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        block = self._block(1 << max(9, (size - 1).bit_length()))
        return DeviceArray(self, block, int(block.memory), shape, dtype)

    def _block(self, size: int) -> _Block:
        """Memory that was used before, or new."""
        free = self._free.setdefault(size, [])
        if free:
            return _Block(free, free.pop())
        try:
            return _Block(free, self._driver.mem_alloc(size))
        except self._driver.MemoryError:
            for unused in self._free.values():
                unused.clear()
            return _Block(free, self._driver.mem_alloc(size))

    def upload(self, array: Array) -> DeviceArray:
        """A copy of a host array, in stream order; the array must live until the stream has been waited for."""
        result = self.empty(array.shape, array.dtype)
        if array.size:
            # bytes, since NumPy lends no buffer of bfloat16
            self._driver.memcpy_htod_async(result.address, array.reshape(-1).view(np.uint8), self.stream)
        return result

    def download(self, array: DeviceArray) -> Array:
        """A copy in host memory, complete when the stream has been waited for."""
        host = np.empty(array.shape, array.dtype)
        if host.size:
            self._driver.memcpy_dtoh_async(host.reshape(-1).view(np.uint8), array.address, self.stream)
        return host

    def take(self, given: Any) -> DeviceArray | Array:
        """``given`` as it lies: a device array (DLPack or ``__cuda_array_interface__``) or a host array.

        Raises:
            FlashRNNError: it is neither, or its elements do not lie in C order.
        """
        if isinstance(given, (DeviceArray, np.ndarray)):
            return given
        if hasattr(given, "__dlpack_device__"):
            kind = int(given.__dlpack_device__()[0])
            if kind not in (dlpack.CPU, dlpack.CUDA, dlpack.CUDA_HOST):
                raise FlashRNNError(f"an array on a device of DLPack type {kind} cannot be fed")
            try:
                capsule = given.__dlpack__(stream=self.stream.handle) if kind == dlpack.CUDA else given.__dlpack__()
            except BufferError as error:  # torch's word for a tensor that requires a gradient
                raise FlashRNNError(f"an array of shape {list(given.shape)} cannot be fed: {error}") from error
            _, address, shape, dtype, packed = dlpack.read(capsule)
            _need_packed(packed, shape)
            if kind == dlpack.CUDA:
                return self._aligned(DeviceArray(self, (given, capsule), address, shape, dtype))
            return _host_copy(address, shape, dtype)
        if hasattr(given, "__cuda_array_interface__"):
            facts = given.__cuda_array_interface__
            shape, dtype = tuple(facts["shape"]), _dtype(facts["typestr"])
            _need_packed(_is_packed(shape, facts.get("strides"), dtype.itemsize), shape)
            if facts.get("stream") is not None:
                self._driver.Context.synchronize()  # the producer may still be writing
            return self._aligned(DeviceArray(self, given, facts["data"][0] or 0, shape, dtype))
        return np.asarray(given)

    def _aligned(self, array: DeviceArray) -> DeviceArray:
        if array.address % _ALIGNMENT == 0 and array.address:
            return array
        copy = self.empty(array.shape, array.dtype)
        if array.nbytes:
            self._driver.memcpy_dtod_async(copy.address, array.address, array.nbytes, self.stream)
        return copy

    def start(self) -> None:
        """Begin to take time, in stream order."""
        self._start.record(self.stream)

    def stop(self) -> None:
        """End to take time, in stream order."""
        self._stop.record(self.stream)

    def elapsed_ms(self) -> float:
        """Between ``start`` and ``stop``, after the stream has been waited for."""
        return float(self._stop.time_since(self._start))

    def close(self) -> None:
        """Give the memory back."""
        with self.current():
            del self.stream, self._start, self._stop
            self._free.clear()


@functools.cache
def _primary_context(driver: Any) -> Any:
    """Held until the process ends: where pycuda lets go of a primary context, it leaves it current on the thread."""
    return driver.Device(0).retain_primary_context()


class _Block:
    """Memory that goes back to its free list with the last array that holds it.

    pycuda's own pool wants a current context where memory is given back, and ends the process where there is none.
    """

    def __init__(self, free: list[Any], memory: Any) -> None:
        self._free, self.memory = free, memory

    def __del__(self) -> None:
        self._free.append(self.memory)


class DeviceArray:
    """An array in GPU memory, in C order. NumPy, DLPack and ``__cuda_array_interface__`` can all read it.

    Args:
        device: whose memory it is.
        owner: kept as long as the array is.
        address: of the first element.
        shape: its shape.
        dtype: its dtype; ``ml_dtypes.bfloat16`` too.
    """

    def __init__(self, device: Device, owner: Any, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._device, self._owner = device, owner
        self.address, self.shape, self.dtype = address, shape, dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3; no stream, since a runner has waited before it gives an array out."""
        return {"shape": self.shape, "typestr": self.dtype.str, "data": (self.address, False), "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, 0

    def __dlpack__(self, *, stream: Any = None, **_newer: Any) -> Any:
        return dlpack.write(self, self.address, self.shape, self.dtype, self.__dlpack_device__())

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        """A copy in host memory."""
        with self._device.current():
            host = self._device.download(self)
            self._device.stream.synchronize()
        return host if dtype is None else host.astype(dtype)


def _dtype(typestr: str) -> np.dtype[Any]:
    """That of an array interface, which has no word for bfloat16: two opaque bytes are taken as one."""
    return numpy_dtype("bfloat16") if typestr in ("<V2", "|V2") else np.dtype(typestr)


def _is_packed(shape: tuple[int, ...], strides: Any, itemsize: int) -> bool:
    if strides is None or 0 in shape:
        return True
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _need_packed(packed: bool, shape: tuple[int, ...]) -> None:
    if not packed:
        raise FlashRNNError(f"the elements of an array of shape {list(shape)} do not lie in C order: copy it first")


def _host_copy(address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(address, size) if size else b"", np.uint8).view(dtype).reshape(shape)
