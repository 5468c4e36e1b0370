"""ONNX Runtime: the function body with no library, the kernels with one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from flashrnn_deploy import bfloat16, shared_library
from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import DOMAIN, is_flashrnn
from flashrnn_deploy.shapes import Axes, axes_of, numpy_dtype, tensors_of

FATAL_ONLY = 4  # log severity: errors come back as exceptions, and are printed once
CRASHING_OPTIMIZERS = ["NchwcTransformer"]
"""Of ONNX Runtime 1.32: ends the process on a float16 file with Transpose between two ops. It serves convolutions."""
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
    """A session of ONNX Runtime (see ``Runner``). ``threads`` of the CPU; 0 leaves the choice to ONNX Runtime.

    Raises:
        FlashRNNError: a plugin library is missing or does not load, the device is not there, or ONNX Runtime refuses
            the model or the feeds.
    """

    name = "onnxruntime"

    def __init__(
        self,
        model: onnx.ModelProto,
        plugins: Sequence[Path] = (),
        device: str = "cpu",
        path: Path | None = None,
        threads: int = 0,
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
        options.intra_op_num_threads = threads
        self._device = device
        try:
            self._session = ort.InferenceSession(
                source, options, providers=self._providers(ort, device), disabled_optimizers=CRASHING_OPTIMIZERS
            )
        except FlashRNNError:
            raise
        except Exception as error:  # ONNX Runtime's own classes share no base but Exception
            raise FlashRNNError(f"ONNX Runtime {ort.__version__} refuses the model: {reason(error)}") from error
        if PROVIDERS[device] not in self._session.get_providers():  # ONNX Runtime goes on without it
            raise FlashRNNError(
                f"ONNX Runtime {ort.__version__} cannot start its {PROVIDERS[device]}: no GPU is free, or its CUDA and "
                'cuDNN libraries are not found: pip install "flashrnn-deploy[cuda]"'
            )
        self._run_options = ort.RunOptions()
        self._run_options.log_severity_level = FATAL_ONLY
        self.inputs = [i.name for i in self._session.get_inputs()]
        self._inputs = {*self.inputs, *(i.name for i in self._session.get_overridable_initializers())}
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
    def _providers(ort: Any, device: str) -> list[Any]:
        provider = PROVIDERS[device]
        if provider not in ort.get_available_providers():
            raise FlashRNNError(
                f"--device {device} needs ONNX Runtime's {provider}, and version {ort.__version__} here has "
                f'{", ".join(ort.get_available_providers())}: pip install "flashrnn-deploy[cuda]"'
            )
        # float32 is float32: with TF32, the default, MatMuls and convolutions keep 10 bits of their operands
        return [(provider, {"use_tf32": "0"}), PROVIDERS["cpu"]] if device == "cuda" else [provider]

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run once; see ``Runner``."""
        if self._has_op and not self._plugins and any(self._steps(n, a) == 0 for n, a in feeds.items()):
            raise FlashRNNError(EMPTY_SEQUENCE)
        try:
            results = self._session.run(None, self._ready(feeds), self._run_options)
        except Exception as error:
            if self._has_op and not self._plugins and any(0 in array.shape for array in feeds.values()):
                raise FlashRNNError(f"{EMPTY_SEQUENCE} ({reason(error)})") from error
            raise FlashRNNError(f"ONNX Runtime fails: {reason(error)}") from error
        return self._named(results)

    def bind(self, feeds: Mapping[str, Array]) -> OrtBinding:
        """Put the feeds on the session's device, once, for any number of calls; see ``Bound``."""
        return OrtBinding(self._session, self._device, self._ready(feeds), self._run_options, self._named)

    def _ready(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """What the session takes: its own inputs, bfloat16 as float32."""
        return {
            name: np.asarray(array.astype(np.float32) if name in self._bfloat16_inputs else array, order="C")
            for name, array in feeds.items()
            if name in self._inputs
        }

    def _named(self, results: Sequence[Array]) -> dict[str, Array]:
        """The session's results by name, bfloat16 as the file has it."""
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


class OrtBinding:
    """Inputs that lie on the device of a session, and outputs that stay there (see ``Bound``). Calls once."""

    def __init__(
        self,
        session: Any,
        device: str,
        feeds: Mapping[str, Array],
        run_options: Any,
        named: Callable[[Sequence[Array]], dict[str, Array]],
    ) -> None:
        import onnxruntime as ort

        self._session, self._device, self._run_options, self._named = session, device, run_options, named
        self._binding = session.io_binding()
        self._inputs = {name: ort.OrtValue.ortvalue_from_numpy(array, device, 0) for name, array in feeds.items()}
        for name, value in self._inputs.items():
            self._binding.bind_ortvalue_input(name, value)
        # Where a file declares a wrong shape for an output, ONNX Runtime lets a call give another one, but does not
        # take what that call gave as the place for the next one's.
        self._fresh = True
        self.run()
        declared = [output.shape for output in session.get_outputs()]
        self._fresh = not all(map(_fits, declared, [value.shape() for value in self._binding.get_outputs()]))

    def run(self) -> None:
        """One call; the device has finished when it returns."""
        if self._fresh:
            for output in self._session.get_outputs():
                self._binding.bind_output(output.name, self._device, 0)
        try:
            self._session.run_with_iobinding(self._binding, self._run_options)
        except Exception as error:  # ONNX Runtime's own classes share no base but Exception
            raise FlashRNNError(f"ONNX Runtime fails: {reason(error)}") from error

    def outputs(self) -> dict[str, Array]:
        """Copies of the last call's outputs."""
        return self._named(self._binding.copy_outputs_to_cpu())


def _fits(declared: Sequence[Any], shape: Sequence[int]) -> bool:
    """Whether a tensor has a declared shape; an empty one says nothing."""
    sizes = zip(declared, shape, strict=False)
    return not declared or (len(declared) == len(shape) and all(d == n for d, n in sizes if isinstance(d, int)))


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
    shared_library.check(path)
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
