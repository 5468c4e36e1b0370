"""TensorRT and TensorRT-RTX: an engine, run with pycuda's memory, streams and events, and without torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import onnx
from onnx import helper

from flashrnn_deploy.backends.device import Device, DeviceArray
from flashrnn_deploy.cells import Array
from flashrnn_deploy.engine import api, sidecar
from flashrnn_deploy.engine.dtypes import dtype_name, numpy_dtype
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import printable


class TrtRunner:
    """An engine that is loaded and ready (see ``Runner``). Inputs may be NumPy arrays, or anything that speaks DLPack
    or ``__cuda_array_interface__``; outputs are NumPy arrays, but for those named in ``carried``.

    Args:
        path: the engine; its sidecar lies beside it.
        plugins: plugin libraries.
        trust: run an engine whose sidecar is missing or does not match.
        carried: outputs that stay on the GPU, as ``DeviceArray``: states that the next call takes.

    Attributes:
        sidecar: what the sidecar says; empty where there is none.
        gpu_ms: time of the last call on the GPU, without copies.

    Raises:
        FlashRNNError: the engine is missing, damaged, or was built for another place; TensorRT, pycuda or the GPU is;
            or TensorRT refuses the engine. Anything wrong with the feeds of a call leaves the runner usable.
    """

    name = "tensorrt"

    def __init__(
        self, path: Path, plugins: Sequence[Path] = (), *, trust: bool = False, carried: Collection[str] = ()
    ) -> None:
        self.notes: list[str] = []
        self.carried = set(carried)
        self.gpu_ms: float | None = None
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FlashRNNError(f"cannot read the engine {path}: {error.strerror}") from error
        self.sidecar = self._read_sidecar(path, trust)
        if not trust:
            sidecar.check_files(path, data, self.sidecar, tuple(map(Path, plugins)))
        trt = api.load(rtx=bool(self.sidecar.get("rtx")))
        self._device = Device()
        self._log = api.make_log(trt)
        if not trust:
            here = sidecar.Running(api.version(trt), api.is_rtx(trt), self._device.compute_capability)
            sidecar.check_place(path, self.sidecar, here)
        self._label = api.name(trt)
        with self._device.current(), api.interrupts(self._log):
            self._runtime = trt.Runtime(self._log)
            api.load_plugins(trt, self._log, plugins)
            self._engine = self._runtime.deserialize_cuda_engine(data)
            if self._engine is None:
                raise FlashRNNError(f"{self._label} refuses the engine {path}: {self._log.take()}")
            self._context = self._engine.create_execution_context()
            if self._context is None:
                raise FlashRNNError(f"{self._label} cannot run {path}: {self._log.take()}")
        self._read_tensors(trt)

    def _read_sidecar(self, path: Path, trust: bool) -> dict[str, Any]:
        if not trust:
            return sidecar.read(path)
        self.notes.append(f"{path} is run on trust: nothing checks that it was built for this GPU and TensorRT")
        try:
            return sidecar.read(path)
        except FlashRNNError:
            return {}

    def _read_tensors(self, trt: Any) -> None:
        """Names, dtypes, shapes and profiles. Order is the engine's; every tensor is bound by name."""
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        self._inputs = [n for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT]
        self._outputs = [n for n in names if n not in self._inputs]
        self._dtypes = {n: numpy_dtype(dtype_name(engine.get_tensor_dtype(n))) for n in names}
        self._shapes = {n: tuple(engine.get_tensor_shape(n)) for n in names}
        self._profiles: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        for name in self._inputs:
            if -1 in self._shapes[name]:
                smallest, _, largest = engine.get_tensor_profile_shape(name, 0)
                self._profiles[name] = tuple(smallest), tuple(largest)
            else:  # no profile has to name it
                self._profiles[name] = self._shapes[name], self._shapes[name]

    def signature(self) -> onnx.ModelProto:
        """A model without nodes that has the engine's inputs and outputs, and the metadata of the sidecar."""
        axes = self.sidecar.get("axes", {})

        def info(name: str) -> onnx.ValueInfoProto:
            roles = {axis: role for role, axis in (axes.get(name) or {}).items() if axis is not None}
            dims = [roles.get(i, f"{name}.{i}") if d < 0 else d for i, d in enumerate(self._shapes[name])]
            return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(self._dtypes[name]), dims)

        graph = helper.make_graph([], "engine", [*map(info, self._inputs)], [*map(info, self._outputs)])
        model = helper.make_model(graph)
        known = {*self._inputs, *self._outputs}
        metadata = {
            "flashrnn.axes": {n: a for n, a in axes.items() if n in known},
            "flashrnn.states": dict(self.sidecar.get("states", [])),
            "flashrnn.lengths": dict.fromkeys(n for n in self.sidecar.get("lengths", []) if n in known),
        }
        for key, value in metadata.items():
            model.metadata_props.add(key=key, value=json.dumps(value))
        return model

    def checked_for_chunks(self) -> bool:
        """Whether the sidecar says that chunks of time add up to the whole.

        Raises:
            FlashRNNError: it says that they do not, and why.
        """
        if why := self.sidecar.get("no_chunks"):
            raise FlashRNNError(str(why))
        return "no_chunks" in self.sidecar

    def carry(self, pairs: Mapping[str, str]) -> tuple[int, int | None]:
        """Keep the states of ``pairs`` on the GPU between calls; the fewest and most steps of one call."""
        self.carried = set(pairs.values())
        axes = {n: a for n, entry in self.sidecar.get("axes", {}).items() if (a := entry.get("time")) is not None}
        ranges = [(low[axes[n]], high[axes[n]]) for n, (low, high) in self._profiles.items() if n in axes]
        return max((r[0] for r in ranges), default=0), min((r[1] for r in ranges), default=None)

    def infer(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run once, and wait; see ``Runner``."""
        if missing := [n for n in self._inputs if n not in feeds]:
            raise FlashRNNError(f"the engine's input(s) {', '.join(map(printable, missing))} are not fed")
        with api.interrupts(self._log), self._device.current():
            arrays = {name: self._take(name, feeds[name]) for name in self._inputs}
            try:
                inputs = {n: a if isinstance(a, DeviceArray) else self._device.upload(a) for n, a in arrays.items()}
                outputs = self._enqueue(inputs)
                results = {n: a if n in self.carried else self._device.download(a) for n, a in outputs.items()}
            finally:  # a call that fails half-way has copies under way, out of and into memory that is freed next
                self._device.stream.synchronize()
            self.gpu_ms = self._device.elapsed_ms()
        return results

    def _take(self, name: str, given: Any) -> DeviceArray | Array:
        """One feed, of the engine's dtype and within its profile."""
        array, dtype, label = self._device.take(given), self._dtypes[name], f"input '{printable(name)}'"
        if isinstance(array, np.ndarray) and (array.dtype.name, dtype.name) == ("int64", "int32") and _fits(array):
            array = array.astype(np.int32)  # TensorRT 8 has no int64
        if array.dtype != dtype:
            raise FlashRNNError(f"{label} must be {dtype.name}, not {array.dtype.name}")
        smallest, largest = self._profiles[name]
        fits = array.ndim == len(smallest) and all(
            a <= d <= b for a, d, b in zip(smallest, array.shape, largest, strict=True)
        )
        if not fits:
            raise FlashRNNError(
                f"{label} has shape {list(array.shape)}, and the engine was built for {list(smallest)} to "
                f"{list(largest)}: build it again with --shapes, or feed less (`run --chunk` cuts time)"
            )
        return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array

    def _enqueue(self, inputs: Mapping[str, DeviceArray]) -> dict[str, DeviceArray]:
        context, good = self._context, True
        for name, array in inputs.items():
            good = (
                good and context.set_input_shape(name, array.shape) and context.set_tensor_address(name, array.address)
            )
        try:
            unknown = list(context.infer_shapes()) if good else []
        except RuntimeError as error:
            self._fail(inputs, f"{api.one_line(error)}; ")
        shapes = {n: tuple(context.get_tensor_shape(n)) for n in self._outputs} if good and not unknown else {}
        if unknown or not good:
            self._fail(inputs, ", ".join(unknown) and f"shapes missing for {', '.join(unknown)}; ")
        if unsized := [n for n, shape in shapes.items() if any(d < 0 for d in shape)]:
            raise FlashRNNError(
                f"the size of the output '{printable(unsized[0])}' depends on values: it cannot be run here"
            )
        outputs = {n: self._device.empty(shape, self._dtypes[n]) for n, shape in shapes.items()}
        for name, array in outputs.items():
            good = good and context.set_tensor_address(name, array.address)
        self._device.start()
        good = good and context.execute_async_v3(self._device.stream.handle)
        self._device.stop()
        if not good:
            self._fail(inputs)
        self._log.errors.clear()
        return outputs

    def _fail(self, inputs: Mapping[str, DeviceArray], what: str = "") -> NoReturn:
        shapes = ", ".join(f"{printable(n)} {list(a.shape)}" for n, a in inputs.items())
        raise FlashRNNError(f"{self._label} fails for {shapes}: {what}{self._log.take()}")

    def close(self) -> None:
        """Free the engine and the GPU's memory."""
        with self._device.current():
            del self._context, self._engine, self._runtime
        self._device.close()


def _fits(array: Array) -> bool:
    limits = np.iinfo(np.int32)
    return bool(((array >= limits.min) & (array <= limits.max)).all())
