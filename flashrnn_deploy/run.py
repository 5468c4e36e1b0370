"""One model, arrays from files in, arrays to files out: the `run` command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrnn_deploy import feeds, shell, streaming
from flashrnn_deploy.backends import Runner, make_runner
from flashrnn_deploy.chunks import run_chunks
from flashrnn_deploy.coverage import cuda_notes
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import load_model, new_files, write_outputs
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import is_flashrnn
from flashrnn_deploy.shapes import axes_of, tensors_of

if TYPE_CHECKING:
    from flashrnn_deploy.backends.trt import TrtRunner

BODY_NOTE = (
    "the FlashRNN op runs on the function body in the file, several times slower than a plugin library: build one with "
    "`flashrnn-deploy build-plugins` and pass it with --plugins"
)


def run(
    path: Path,
    inputs: Sequence[str],
    output: Path,
    *,
    backend: str = "onnxruntime",
    chunk: int | None = None,
    states: Sequence[str] = (),
    plugins: Sequence[Path] = (),
    device: str = "cpu",
    trust_engine: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Run a model on ``.npy`` files; write one ``.npy`` per output, and ``outputs.json``, into a directory.

    Args:
        path: the model; for "tensorrt" an engine of `build-engine`.
        inputs: ``NAME=FILE.npy`` each; state inputs may be left out and are zero then.
        output: the directory. It is written only when everything has worked.
        backend: "tensorrt", or a member of ``backends.BACKENDS``.
        chunk: steps per call; None runs the whole sequence in one call.
        states: ``IN=OUT`` pairs beyond those in the file's metadata.
        plugins: FlashRNN plugin libraries.
        device: "cpu" or "cuda"; "tensorrt" has the GPU alone.
        trust_engine: run an engine whose sidecar is missing or does not match ("tensorrt" only).
        note: called with each sentence that the user should read.

    Returns:
        What outputs.json says.

    Raises:
        FlashRNNError: a file, an input, the model or the directory is not fit; nothing is written then.
    """
    for entry in inputs:
        file = Path(entry.partition("=")[2])
        if file.resolve().parent == output.resolve():
            raise FlashRNNError(f"the input {file} lies in the output directory {output}: choose another -o DIR")
    with contextlib.ExitStack() as stack:  # closes the runner, also where a later check refuses
        engine = _open_engine(path, backend, plugins, trust_engine)
        if engine:
            stack.callback(engine.close)
        model = engine.signature() if engine else load_model(path)
        tensors = tensors_of(model)
        axes, pairs = axes_of(model, tensors), streaming.state_pairs(model, states)
        arrays = feeds.check_feeds(model, tensors, axes, feeds.read_feeds(inputs), pairs)
        if chunk is not None:
            if chunk < 1:
                raise FlashRNNError(f"--chunk {chunk}: a chunk has at least one step")
            if engine is None or states or not engine.checked_for_chunks():
                streaming.check_chunkable(model, tensors, axes, pairs)
        folder = stack.enter_context(new_files(output))
        runner: Runner | None = engine
        if runner is None:
            runner = stack.enter_context(contextlib.closing(make_runner(backend, model, plugins, device, path)))
        if backend == "onnxruntime" and not plugins and any(is_flashrnn(node) for node in walk_nodes(model)):
            note(BODY_NOTE)
        if device == "cuda" and plugins:
            runner.notes.extend(cuda_notes(model, plugins))
        for text in runner.notes:
            note(text)
        if chunk is None:
            results = runner.infer(arrays)
        else:
            span = engine.carry(pairs) if engine else (0, None)
            results = run_chunks(runner, arrays, chunk, axes, pairs, streaming.length_inputs(model), span)
        return write_outputs(folder, results, {"model": str(path), "backend": backend, "chunk": chunk})


def _open_engine(path: Path, backend: str, plugins: Sequence[Path], trust: bool) -> TrtRunner | None:
    from flashrnn_deploy.engine import sidecar

    if backend == "tensorrt":
        if path.suffix == ".onnx":
            engine = Path(path.with_suffix(".engine").name)
            line = shell.command("build-engine", path, "--plugins", "LIB", "-o", engine)
            raise FlashRNNError(f"{path} is a model and --backend tensorrt runs engines: build one with: {line}")
        from flashrnn_deploy.backends.trt import TrtRunner

        return TrtRunner(path, plugins, trust=trust)
    if trust or path.suffix in sidecar.SUFFIXES:
        raise FlashRNNError(f"{path if not trust else '--trust-engine'} belongs to --backend tensorrt")
    return None
