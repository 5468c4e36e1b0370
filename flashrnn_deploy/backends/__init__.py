"""One runner per engine behind one small protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import onnx

from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError

BACKENDS = ("onnxruntime", "reference")


class Runner(Protocol):
    """A model that is loaded and ready.

    ``infer`` takes one array per graph input by name (optional inputs may be left out) and returns one per graph
    output. A bfloat16 tensor is an array of ``ml_dtypes.bfloat16`` on both sides. ``close`` frees what the engine
    holds.     ``notes`` says, one sentence each, what the user should know about how the model runs.
    """

    name: str
    notes: list[str]

    def infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...

    def close(self) -> None: ...


class Bound(Protocol):
    """One call made ready: its inputs lie where the engine wants them, its outputs stay there.

    ``run`` returns when the device has finished. ``outputs`` copies what the last ``run`` gave.
    """

    def run(self) -> None: ...

    def outputs(self) -> dict[str, Array]: ...


def make_runner(
    backend: str, model: onnx.ModelProto, plugins: Sequence[Path] = (), device: str = "cpu", path: Path | None = None
) -> Runner:
    """Load ``model`` into the engine ``backend``, a member of ``BACKENDS``.

    Args:
        backend: the engine.
        model: the model; it is not changed.
        plugins: FlashRNN plugin libraries to load (onnxruntime only).
        device: "cpu" or "cuda" (onnxruntime only).
        path: the model's file, from which the engine may load instead of from memory.

    Raises:
        FlashRNNError: the engine refuses the model, or cannot do what is asked.
    """
    if backend == "onnxruntime":
        from flashrnn_deploy.backends.ort import OrtRunner

        return OrtRunner(model, plugins=plugins, device=device, path=path)
    if backend == "reference":
        from flashrnn_deploy.backends.reference import ReferenceRunner

        if plugins or device != "cpu":
            raise FlashRNNError("the reference backend is NumPy: leave out --plugins and --device")
        return ReferenceRunner(model)
    raise FlashRNNError(f"unknown backend '{backend}'; the backends are {', '.join(BACKENDS)}")
