"""TensorRT's runtime API and pycuda, played by ONNX Runtime and host memory, for machines without a GPU.

They hold to what the documentation says of TensorRT 10 and 8.5 and of pycuda 2025, and are strict where a GPU is
forgiving: work waits in the stream until somebody synchronises, memory starts as garbage and is poisoned when freed,
and every call needs a current context. An engine is an ONNX file with profiles: ``make_engine``.
"""

from __future__ import annotations

import ctypes
import enum
import json
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.engine.dtypes import _NAMES, numpy_dtype
from flashrnn_deploy.shapes import dtype_name, value_tensor

if TYPE_CHECKING:
    import pytest

_MAGIC = b"fake engine\n"


class Cuda:
    """One GPU: its memory and streams, and what was asked of it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability
        self.depth = 0  # contexts pushed
        self.memory: dict[int, np.ndarray] = {}
        self.streams: dict[int, list[Callable[[], None]]] = {}
        self.copies: list[tuple[str, int]] = []  # direction and bytes
        self.fail_enqueue = False
        self.allocations = 0
        self.limit = 1 << 30  # bytes

    def need_context(self) -> None:
        if not self.depth:
            raise LogicError("invalid device context - no currently active context?")

    def allocate(self, size: int) -> Allocation:
        self.need_context()
        assert size > 0, "cuMemAlloc refuses 0 bytes"
        self.allocations += 1
        if sum(buffer.size for buffer in self.memory.values()) + size > self.limit:
            raise OutOfMemory("cuMemAlloc failed: out of memory")
        buffer = np.full(size + 512, 0xA5, np.uint8)
        address = -(-buffer.ctypes.data // 256) * 256
        self.memory[address] = buffer
        return Allocation(self, address)

    def check(self, address: int, size: int) -> None:
        for start, buffer in self.memory.items():
            if start <= address and address + size <= buffer.ctypes.data + buffer.size:
                return
        raise LogicError(f"an illegal memory access: {address:#x}, {size} bytes")

    def array(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """A view of device memory."""
        size = int(np.prod(shape)) * dtype.itemsize
        self.check(address, size)
        return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).view(dtype).reshape(shape)


class Allocation:
    def __init__(self, cuda: Cuda, address: int) -> None:
        self._cuda, self._address = cuda, address

    def __int__(self) -> int:
        return self._address

    def __del__(self) -> None:
        self._cuda.memory.pop(self._address).fill(0xEE)


class Error(Exception):
    """``pycuda.driver.Error``."""


class LogicError(Error):
    pass


class OutOfMemory(Error):
    """``pycuda.driver.MemoryError``."""


def _pycuda(cuda: Cuda) -> dict[str, types.ModuleType]:
    driver = types.ModuleType("pycuda.driver")

    class Context:
        def push(self) -> None:
            cuda.depth += 1

        @staticmethod
        def pop() -> None:
            cuda.need_context()
            cuda.depth -= 1

        @staticmethod
        def synchronize() -> None:
            for stream in cuda.streams.values():
                _drain(stream)

    class Device:
        def __init__(self, ordinal: int) -> None:
            assert ordinal == 0

        def compute_capability(self) -> tuple[int, int]:
            return cuda.capability

        def retain_primary_context(self) -> Context:
            return Context()

    class Stream:
        def __init__(self) -> None:
            cuda.need_context()
            self.handle = 1000 + len(cuda.streams)
            cuda.streams[self.handle] = []

        def synchronize(self) -> None:
            cuda.need_context()
            _drain(cuda.streams[self.handle])

    class Event:
        def record(self, stream: Stream) -> None:
            cuda.need_context()

        def time_since(self, other: Event) -> float:
            return 0.25

    def memcpy_htod_async(dest: int, src: Any, stream: Stream) -> None:
        view = memoryview(src)  # the buffer protocol, as pycuda wants it: refuses bfloat16
        cuda.copies.append(("htod", view.nbytes))
        cuda.need_context()
        cuda.streams[stream.handle].append(lambda: _write(cuda, int(dest), view.cast("B")))

    def memcpy_dtoh_async(dest: Any, src: int, stream: Stream) -> None:
        view = memoryview(dest).cast("B")
        assert not view.readonly
        cuda.copies.append(("dtoh", view.nbytes))
        cuda.need_context()

        def copy() -> None:
            view[:] = cuda.array(int(src), (view.nbytes,), np.dtype(np.uint8)).data

        cuda.streams[stream.handle].append(copy)

    def memcpy_dtod_async(dest: int, src: int, size: int, stream: Stream) -> None:
        cuda.copies.append(("dtod", size))
        bytes_of = np.dtype(np.uint8)
        cuda.streams[stream.handle].append(
            lambda: _write(cuda, int(dest), cuda.array(int(src), (size,), bytes_of).data)
        )

    driver.init = lambda: None  # type: ignore[attr-defined]
    driver.mem_alloc = cuda.allocate  # type: ignore[attr-defined]
    driver.MemoryError = OutOfMemory  # type: ignore[attr-defined]
    for part in (Context, Device, Stream, Event, memcpy_htod_async, memcpy_dtoh_async, memcpy_dtod_async, Error):
        setattr(driver, part.__name__, part)
    package = types.ModuleType("pycuda")
    package.driver = driver  # type: ignore[attr-defined]
    return {"pycuda": package, "pycuda.driver": driver}


def _write(cuda: Cuda, address: int, data: Any) -> None:
    cuda.array(address, (len(data),), np.dtype(np.uint8))[:] = np.frombuffer(data, np.uint8)


def _drain(stream: list[Callable[[], None]]) -> None:
    work, stream[:] = list(stream), []
    for step in work:
        step()


class Severity(enum.IntEnum):
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class TensorIOMode(enum.Enum):
    NONE, INPUT, OUTPUT = range(3)


class ILogger:
    Severity = Severity


def _data_types(version: str) -> type[enum.Enum]:
    known = ["FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8"]
    return enum.Enum("DataType", known + ([] if version.startswith("8.") else ["INT64", "BF16"]))  # type: ignore[return-value]


class Engine:
    """``ICudaEngine``: tensors in an order of its own, outputs first."""

    def __init__(self, cuda: Cuda, log: Any, data: bytes, data_types: Any) -> None:
        head, body = data.removeprefix(_MAGIC).split(b"\n", 1)
        self.cuda, self.log, self.profiles = cuda, log, json.loads(head)
        self.model = onnx.ModelProto.FromString(body)
        self.runner = make_runner("onnxruntime", self.model)
        graph = self.model.graph
        self.tensors = {v.name: value_tensor(v) for v in (*reversed(graph.output), *reversed(graph.input))}
        self.input_names = {v.name for v in graph.input}
        self.data_types = {name: data_types for name, data_types in ((n, t) for n, t in _NAMES_REVERSED.items())}
        self.types = data_types

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.input_names else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        return self.types[_NAMES_REVERSED[dtype_name(self.tensors[name].dtype)]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else -1 for d in self.tensors[name].shape or ())

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        assert name in self.input_names
        assert index == 0
        assert -1 in self.get_tensor_shape(name), "the documentation says nothing of a static input"
        return [tuple(self.profiles[name][key]) for key in ("min", "opt", "max")]

    def create_execution_context(self) -> Context:
        self.cuda.need_context()
        return Context(self)


_NAMES_REVERSED = {name: key for key, name in _NAMES.items()}


class Context:
    """``IExecutionContext``, of which 8.5 has the same calls."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}

    def _error(self, text: str) -> bool:
        self.engine.log.log(Severity.ERROR, f"IExecutionContext: Error Code 3: API Usage Error ({text})")
        return False

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, high = (tuple(self.engine.profiles[name][key]) for key in ("min", "max"))
        if len(shape) != len(low) or not all(a <= d <= b for a, d, b in zip(low, shape, high, strict=True)):
            return self._error(f"Set dimension {shape} for tensor {name} does not satisfy any optimization profiles")
        self.shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self.engine.tensors or not memory or memory % 256:
            return self._error(f"the address {memory:#x} of {name} is not usable")
        self.addresses[name] = memory
        return True

    def _sizes(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            for dim, size in zip(self.engine.tensors[name].shape or (), shape, strict=True):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    raise RuntimeError(f"dimensions not equal: {dim} = {sizes[dim]} and {size}")
        return sizes

    def infer_shapes(self) -> list[str]:
        self._sizes()
        return [name for name in self.engine.input_names if name not in self.shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        sizes = self._sizes()
        return tuple(d if isinstance(d, int) else sizes.get(str(d), -1) for d in self.engine.tensors[name].shape or ())

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, cuda = self.engine, self.engine.cuda
        cuda.need_context()
        if missing := [n for n in engine.tensors if n not in self.addresses]:
            return self._error(f"no address for {missing}")
        if cuda.fail_enqueue:
            return self._error("the plugin's enqueue returned 1")
        views = {}
        for name, tensor in engine.tensors.items():
            dtype, address = numpy_dtype(dtype_name(tensor.dtype)), self.addresses[name]
            views[name] = cuda.array(address, self.get_tensor_shape(name), dtype)

        def work() -> None:
            results = engine.runner.infer({name: views[name].copy() for name in engine.input_names})
            for name, array in results.items():
                views[name][...] = array

        cuda.streams[stream_handle].append(work)
        return True


def _tensorrt(version: str, cuda: Cuda) -> types.ModuleType:
    trt = types.ModuleType("tensorrt")
    data_types = _data_types(version)

    class Runtime:
        def __init__(self, log: Any) -> None:
            cuda.need_context()
            self.log = log

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            if not data.startswith(_MAGIC):
                self.log.log(Severity.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (magic tag)")
                return None
            return Engine(cuda, self.log, data, data_types)

    class Registry:
        def __init__(self) -> None:
            creators: list[Any] = []
            setattr(self, "plugin_creator_list" if version.startswith("8.") else "all_creators", creators)
            self.loaded: list[str] = []
            if not version.startswith("8.5"):
                self.load_library = self._load_library

        def _load_library(self, path: str) -> object | None:
            if path in self.loaded:
                return None
            self.loaded.append(path)
            return object()

    registry = Registry()
    trt.__version__ = version  # type: ignore[attr-defined]
    for part in (ILogger, TensorIOMode, Runtime):
        setattr(trt, part.__name__, part)
    trt.DataType = data_types  # type: ignore[attr-defined]
    trt.get_plugin_registry = lambda: registry  # type: ignore[attr-defined]
    return trt


def install(monkeypatch: pytest.MonkeyPatch, version: str = "10.14.1.48", capability: tuple[int, int] = (9, 0)) -> Cuda:
    """Put both in the place of the real ones, for one test."""
    cuda = Cuda(capability)
    for name, module in {"tensorrt": _tensorrt(version, cuda), **_pycuda(cuda)}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return cuda


def make_engine(model: onnx.ModelProto, profiles: dict[str, dict[str, list[int]]]) -> bytes:
    """A serialized engine."""
    return _MAGIC + json.dumps(profiles).encode() + b"\n" + model.SerializeToString()
