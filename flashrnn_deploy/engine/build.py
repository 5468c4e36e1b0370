"""The `build-engine` command: one ONNX file to one engine and its sidecar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from flashrnn_deploy import shared_library, shell, streaming
from flashrnn_deploy.coverage import engine_shortfall
from flashrnn_deploy.engine import api, network, sidecar
from flashrnn_deploy.engine.dtypes import dtype_name
from flashrnn_deploy.engine.profiles import Profile, make_profiles
from flashrnn_deploy.engine.progress import make_monitor
from flashrnn_deploy.engine.targets import check_products, find_device, set_targets
from flashrnn_deploy.engine.tool import build_with_tool, find_tool, workspace_hint
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import final_path, load_model, new_file, new_files, printable
from flashrnn_deploy.info import library_info
from flashrnn_deploy.shapes import axes_of, flashrnn_nodes, node_label, tensors_of

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all and the phase."""

_MIB = 1 << 20
_MOST_WORKSPACE = (2**63 - 1) // _MIB  # TensorRT counts bytes in 64 bits, one of them the sign


def build_engine(
    path: Path,
    output: Path,
    plugins: Sequence[Path] = (),
    *,
    shapes: Sequence[str] = (),
    gpu: str | None = None,
    workspace: int | None = None,
    timing_cache: Path | None = None,
    tf32: bool = False,
    rtx: bool = False,
    progress: Progress = lambda done, total, what: None,
    log: Callable[[str], None] = lambda line: None,
    note: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Build an engine of a model with TensorRT's Python module, or else with the C++ tool; write it and its sidecar.

    Args:
        path: the ONNX file.
        output: the engine; ``output.json`` is its sidecar. Both are written when everything has worked.
        plugins: plugin libraries, that with the FlashRNN plugins among them.
        shapes: ``NAME=MIN:OPT:MAX`` each (``profiles.make_profiles``).
        gpu: a name of ``gpus.GPUS``. TensorRT builds for the GPU of this machine alone; TensorRT-RTX for any of its
            targets, and for all but the oldest (Turing needs an engine of its own) where there is neither name nor GPU.
        workspace: MiB that TensorRT may use.
        timing_cache: a file of measured kernel times to read, where it exists, and to write; not with ``rtx``.
        tf32: let TensorRT's own float32 layers round to TF32, 10 bits of mantissa, which is faster.
        rtx: build with TensorRT-RTX.
        progress: told what is done.
        log: called with each line that TensorRT says.
        note: called with what the user should know of the engine.

    Returns:
        What the sidecar says.

    Raises:
        FlashRNNError: the model, a library, an option or TensorRT itself is not fit; nothing is written then.
    """
    model = load_model(path)
    facts, profiles = _facts(model), make_profiles(model, shapes)
    nodes = flashrnn_nodes(model, tensors_of(model))
    if workspace is not None and not 1 <= workspace <= _MOST_WORKSPACE:
        raise FlashRNNError(f"--workspace {workspace}: give 1 to {_MOST_WORKSPACE} MiB")
    if rtx and timing_cache is not None:
        raise FlashRNNError("--timing-cache: TensorRT-RTX measures nothing when it builds and keeps no such file")
    output = final_path(output)
    final_path(sidecar.path_of(output))
    sidecar.check_replaceable(output)
    _check_output(output, [path, *plugins, *([timing_cache] if timing_cache else [])])
    trt = _load(rtx)
    tool = None if trt else find_tool()
    if tool and timing_cache:
        raise FlashRNNError(f"--timing-cache needs TensorRT's Python module, which is not installed; {tool} keeps none")
    device = find_device(rtx, gpu)
    command = _command(path, plugins, shapes, gpu, workspace, tf32, rtx)
    with new_files(output.parent) as folder:
        if tool:
            report = build_with_tool(tool, path, folder / output.name, plugins, profiles, workspace, tf32, log)
            return _write_sidecar(folder / output.name, {**report, "command": command})
        listener = api.make_log(trt)
        listener.listen = log
        with api.interrupts(listener):
            builder = _builder(trt, listener)
            api.load_plugins(trt, listener, plugins)
            net = network.parse(trt, listener, builder, path, nodes)
            config = builder.create_builder_config()
            library = _flashrnn_library(plugins) if nodes else None
            targets = set_targets(trt, config, device, gpu, library)
            check_products(trt, net, targets.get("targets", ()))
            if workspace is not None:
                config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace * _MIB)
            if not tf32:
                config.clear_flag(trt.BuilderFlag.TF32)  # TensorRT sets it
            cache = _use_cache(config, timing_cache, listener)
            network.constrain(trt, net, config, nodes)
            _add_profile(builder, config, net, profiles)
            data = _serialize(trt, listener, builder, config, net, path, workspace, progress)
            inputs, outputs = network.tensors(net)
            report = sidecar.describe(
                data,
                path,
                library,
                tensorrt=api.version(trt),
                rtx=rtx,
                **targets,
                shapes={name: profile.to_json() for name, profile in profiles.items()},
                dtypes={tensor.name: dtype_name(tensor.dtype) for tensor in (*inputs, *outputs)},
                command=command,
                **facts,
            )
            (folder / output.name).write_bytes(data)
            _write_sidecar(folder / output.name, report)
    if library and api.is_ours(shared_library.load(library)):
        specs = {node.name or node_label(node): spec for node, spec in nodes}
        capabilities = targets.get("targets") or [targets["compute_capability"]]
        if text := engine_shortfall(library, library_info(library), specs, capabilities):
            note(text)
    if timing_cache is not None:
        with new_file(timing_cache) as file:
            file.write_bytes(bytes(cache.serialize()))
    return report


def _write_sidecar(engine: Path, report: dict[str, Any]) -> dict[str, Any]:
    sidecar.path_of(engine).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return report


def _command(
    path: Path,
    plugins: Sequence[Path],
    shapes: Sequence[str],
    gpu: str | None,
    workspace: int | None,
    tf32: bool,
    rtx: bool,
) -> list[str]:
    """What builds the engine again, for the sidecar: paths as given, since the files may go elsewhere together."""
    words = ["build-engine", shell.word(path)]
    for library in plugins:
        words += ["--plugins", shell.word(library)]
    for option in shapes:
        words += ["--shapes", option]
    words += ["--gpu", gpu] if gpu is not None else []
    words += ["--workspace", str(workspace)] if workspace is not None else []
    return words + ["--tf32"] * tf32 + ["--rtx"] * rtx


def _serialize(
    trt: Any,
    listener: Any,
    builder: Any,
    config: Any,
    net: Any,
    path: Path,
    workspace: int | None,
    progress: Progress,
) -> bytes:
    """The engine's bytes."""
    monitor = make_monitor(trt, listener, progress)
    if monitor is not None:
        config.progress_monitor = monitor
    with api.interrupts(listener):
        serialized = builder.build_serialized_network(net, config)
    if serialized is None:
        said = f"{listener.take()}{workspace_hint(workspace)}"
        raise FlashRNNError(f"{api.name(trt)} cannot build an engine of {path}: {said}")
    return bytes(serialized)


def _facts(model: onnx.ModelProto) -> dict[str, Any]:
    """What running needs to know of the model: states, axes, lengths, and why chunks are no whole (None: they are)."""
    tensors = tensors_of(model)
    axes, pairs = axes_of(model, tensors), streaming.state_pairs(model)
    why = None
    try:
        streaming.check_chunkable(model, tensors, axes, pairs)
    except FlashRNNError as error:
        why = str(error)
    return {
        "states": [list(pair) for pair in pairs.items()],
        "axes": {name: {"time": a.time, "batch": a.batch} for name, a in axes.items()},
        "lengths": list(streaming.length_inputs(model)),
        "no_chunks": why,
    }


def _check_output(output: Path, inputs: Sequence[Path]) -> None:
    for path in inputs:
        if path.resolve() in (output.resolve(), sidecar.path_of(output).resolve()):
            raise FlashRNNError(f"-o {output} would replace {path}: choose another name")


def _load(rtx: bool) -> Any:
    """TensorRT's module; None where it is not installed."""
    try:
        return api.load(rtx)
    except ModuleNotFoundError:
        return None


def _builder(trt: Any, listener: Any) -> Any:
    try:
        return trt.Builder(listener)
    except (TypeError, RuntimeError) as error:  # pybind11's way to say that C++ gave nothing
        raise FlashRNNError(f"{api.name(trt)} does not start: {listener.take()} ({api.one_line(error)})") from error


def _use_cache(config: Any, path: Path | None, listener: Any) -> Any:
    if path is None:
        return None
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise FlashRNNError(f"cannot read the timing cache {path}: {error.strerror}") from error
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise FlashRNNError(
            f"{path} is not a timing cache of this TensorRT and GPU: delete it, or name another ({listener.take()})"
        )
    return cache


def _add_profile(builder: Any, config: Any, net: Any, profiles: Mapping[str, Profile]) -> None:
    profile = builder.create_optimization_profile()
    for tensor in network.tensors(net)[0]:
        if tensor.is_shape_tensor:
            raise FlashRNNError(
                f"the input '{printable(tensor.name)}' decides the size of a tensor by its values, which no profile "
                "covers here: make it a constant of the model"
            )
        shapes = profiles[tensor.name]
        if -1 in tuple(tensor.shape):
            profile.set_shape(tensor.name, shapes.min, shapes.opt, shapes.max)
    if config.add_optimization_profile(profile) < 0:
        listed = "; ".join(f"{n} {p.min}:{p.opt}:{p.max}" for n, p in profiles.items())
        raise FlashRNNError(f"TensorRT refuses the shapes {listed}: change them with --shapes")


def _flashrnn_library(plugins: Sequence[Path]) -> Path | None:
    """The library that says it is ours; the only one where none does."""
    ours = [path for path in plugins if api.is_ours(shared_library.load(path))]
    return next(iter(ours or plugins), None)
