"""ONNX Runtime: the function body with no library, the kernels with one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from flashrnn_deploy import bfloat16
from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import DOMAIN, is_flashrnn
from flashrnn_deploy.shapes import Axes, axes_of, numpy_dtype, tensors_of

FATAL_ONLY = 4  # log severity: errors come back as exceptions, and are printed once
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
BFLOAT16_NOTE = (
    "ONNX Runtime's CPU has no bfloat16 arithmetic: a temporary copy runs with Casts around the standard operators, "
    "each of them rounding to bfloat16"
)
EMPTY_SEQUENCE = (
    "the function body cannot run an empty sequence (T = 0; B = 0 it can): give at least one step, or pass a plugin "
    "library with --plugins"
)


class OrtRunner:
    """A session of ONNX Runtime (see ``Runner``).

    Raises:
        FlashRNNError: a plugin library is missing or does not load, the device is not there, or ONNX Runtime refuses
            the model or the feeds.
    """

    name = "onnxruntime"

    def __init__(
        self, model: onnx.ModelProto, plugins: Sequence[Path] = (), device: str = "cpu", path: Path | None = None
    ) -> None:
        import onnxruntime as ort  # type: ignore[import-untyped]

        self.notes: list[str] = []
        self._plugins = list(dict.fromkeys(p.resolve() for p in plugins))
        self._has_op = any(is_flashrnn(node) for node in walk_nodes(model))
        self._check_bodies(model)
        self._bfloat16_inputs, self._bfloat16_outputs = bfloat16.bfloat16_names(model)
        self._axes: dict[str, Axes] = axes_of(model, tensors_of(model)) if self._has_op else {}
        source = self._prepare(model, device, path)
        options = self._options(ort)
        try:
            # NchwcTransformer of ONNX Runtime 1.32 crashes on a float16 file with Transpose between two ops; it serves
            # convolutions on the CPU
            self._session = ort.InferenceSession(
                source, options, providers=self._providers(ort, device), disabled_optimizers=["NchwcTransformer"]
            )
        except FlashRNNError:
            raise
        except Exception as error:  # ONNX Runtime's own classes share no base but Exception
            raise FlashRNNError(f"ONNX Runtime {ort.__version__} refuses the model: {reason(error)}") from error
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = FATAL_ONLY
        self._inputs = {i.name for i in (*self._session.get_inputs(), *self._session.get_overridable_initializers())}
        self._outputs = [o.name for o in self._session.get_outputs()]

    def _check_bodies(self, model: onnx.ModelProto) -> None:
        bodies = {f.name for f in model.functions if f.domain == DOMAIN}
        used = {node.op_type for node in walk_nodes(model) if is_flashrnn(node)}
        if (missing := sorted(used - bodies)) and not self._plugins:
            raise FlashRNNError(
                f"the file holds no function body for {', '.join(missing)}, and no plugin library is given: pass one "
                "with --plugins, or export the model again"
            )

    def _prepare(self, model: onnx.ModelProto, device: str, path: Path | None) -> str | bytes:
        if bfloat16.uses_bfloat16(model):
            if device == "cpu":
                self.notes.append(BFLOAT16_NOTE)
            model, path = (bfloat16.for_cpu if device == "cpu" else bfloat16.for_border)(model), None
        return str(path) if path is not None else bytes(model.SerializeToString())

    def _options(self, ort: Any) -> Any:
        options = ort.SessionOptions()
        options.log_severity_level = FATAL_ONLY
        for library in self._plugins:
            register(options, library)
        return options

    @staticmethod
    def _providers(ort: Any, device: str) -> list[str]:
        provider = PROVIDERS[device]
        if provider not in ort.get_available_providers():
            raise FlashRNNError(
                f"--device {device} needs ONNX Runtime's {provider}, and version {ort.__version__} here has "
                f'{", ".join(ort.get_available_providers())}: pip install "flashrnn-deploy[cuda]"'
            )
        return list(dict.fromkeys([provider, PROVIDERS["cpu"]]))

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; see ``Runner``."""
        if self._has_op and not self._plugins and any(self._steps(n, a) == 0 for n, a in feeds.items()):
            raise FlashRNNError(EMPTY_SEQUENCE)
        ready = {
            name: np.ascontiguousarray(array.astype(np.float32) if name in self._bfloat16_inputs else array)
            for name, array in feeds.items()
            if name in self._inputs
        }
        try:
            results = self._session.run(None, ready, self._run_options)
        except Exception as error:
            if self._has_op and not self._plugins and any(0 in array.shape for array in feeds.values()):
                raise FlashRNNError(f"{EMPTY_SEQUENCE} ({reason(error)})") from error
            raise FlashRNNError(f"ONNX Runtime fails: {reason(error)}") from error
        outputs = dict(zip(self._outputs, results, strict=True))
        for name in self._bfloat16_outputs:
            outputs[name] = outputs[name].astype(numpy_dtype(bfloat16.BF16))
        return outputs

    def _steps(self, name: str, array: Array) -> int | None:
        axis = axes.time if (axes := self._axes.get(name)) else None
        return array.shape[axis] if axis is not None and axis < array.ndim else None

    def close(self) -> None:
        """Free the session."""
        del self._session


def register(session_options: Any, library: Path | str) -> None:
    """Make the FlashRNN ops of a plugin library known to ``onnxruntime.SessionOptions``. Safe to call again.

    Raises:
        FlashRNNError: there is no such file, ONNX Runtime cannot load it or is too old for it, or the options hold
            another build of the library already.
    """
    import onnxruntime as ort

    path = Path(library).resolve()
    if not path.is_file():
        raise FlashRNNError(f"there is no plugin library {path}; build it with `flashrnn-deploy build-plugins`")
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime's own classes share no base but Exception
        raise FlashRNNError(
            f"ONNX Runtime {ort.__version__} cannot load the plugin library {path}: {reason(error)}"
        ) from error


def reason(error: Exception) -> str:
    """ONNX Runtime's message in one line, without its code prefix, cut to a readable length."""
    text = " ".join(str(error).split())
    text = text.removeprefix("[ONNXRuntimeError] : ").split(" : ", 2)[-1]
    return text if len(text) <= 400 else text[:400] + " ..."
