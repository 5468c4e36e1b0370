"""The `build-plugins` command: from models and GPU names to one ``libflashrnn.so``, by CMake and Ninja.

Everything is written into one directory: ``libflashrnn.so``, ``libflashrnn.json`` (what it is for), ``build.log``
and ``build/`` (CMake's tree, kept so that the next build only compiles what has changed). TensorRT 8 has a library of
its own beside it, ``libflashrnn_trt8.so``; what was timed of kernels is in ``libflashrnn.tuned.json``.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import IO, Any

from flashrnn_deploy import __version__, gpus, kernel_table, tuned_file, tuning
from flashrnn_deploy.autotune import gains, installed, tune
from flashrnn_deploy.cmake import Builder, Progress
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import load_model, new_files
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.info import node_facts
from flashrnn_deploy.kernel_table import Choice, Layer
from flashrnn_deploy.shapes import flashrnn_nodes, node_label, tensors_of
from flashrnn_deploy.tensorrt_headers import CURE, Headers, read_headers
from flashrnn_deploy.toolchain import Tools, find_tools
from flashrnn_deploy.tuned_file import Entry
from flashrnn_deploy.unconverted import why_no_op

LIBRARY = "libflashrnn.so"
TENSORRT_8_LIBRARY = "libflashrnn_trt8.so"
_STAMP = "flashrnn-build.json"
_VARIABLES = ("CXX", "CXXFLAGS", "CUDAHOSTCXX", "CUDAFLAGS", "LDFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
"""What CMake reads of the environment once for a tree, and nvcc at each call without Ninja seeing it."""


def build_plugins(
    models: Sequence[Path],
    gpu_names: Sequence[str],
    output: Path,
    *,
    batches: Sequence[int] = (),
    nvcc: Path | None = None,
    toolchain: Path | None = None,
    tensorrt_include: Path | None = None,
    tensorrt: str | None = None,
    tuned: Path | None = None,
    autotune: bool = False,
    jobs: int | None = None,
    allow_warnings: bool = False,
    progress: Progress = lambda done, total, what: None,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Build ``output/libflashrnn.so`` for the FlashRNN ops of ``models``.

    Args:
        models: ONNX files.
        gpu_names: "cpu" for no CUDA at all, names of ``gpus.GPUS``, or "local".
        output: the directory; nothing is written outside of it.
        batches: batch sizes to choose kernels for; ``kernel_table.BATCHES`` by default.
        nvcc: the CUDA compiler, that on PATH by default.
        toolchain: a CMake toolchain file, for another host architecture.
        tensorrt_include: folder of TensorRT's headers: the library holds its plugin too.
        tensorrt: "8" or "10": what these headers have to be of.
        tuned: a file of an earlier ``autotune`` whose timings to use beside those in ``output``.
        autotune: time the best configurations on this machine's GPU, where that has not been done yet.
        jobs: compilers to run at once, one per processor by default.
        allow_warnings: compile with a compiler whose warnings are new.
        progress: told what is done.
        log: called with each line of the build's output.

    Returns:
        What libflashrnn.json says, and ``notes``: what to tell the user.

    Raises:
        FlashRNNError: a model, a name or a program is not fit, or the build fails; an older library stays then.
    """
    if jobs is not None and jobs < 1:
        raise FlashRNNError(f"--jobs must be at least 1, not {jobs}")
    layers = read_layers(models)
    others = "local for the installed one, or cpu for none"
    devices = [gpus.get(name, others) for name in dict.fromkeys(gpu_names) if name != "cpu"]
    if not gpu_names:
        raise FlashRNNError(f"name what to build for: --gpu cpu, or --gpu with one of {', '.join(gpus.GPUS)}")
    headers = _headers(tensorrt_include, tensorrt, devices)
    bfloat16 = _check_bfloat16(layers, headers)
    buckets = kernel_table.check_batches(batches or kernel_table.BATCHES)
    if autotune and toolchain:
        raise FlashRNNError("--autotune times kernels on this machine, and --toolchain builds for another one")
    here = installed(gpu_names) if autotune else None
    stored, notes = tuning.gather(output, tuned, devices, plugin_sources())
    if batches and not devices:
        notes.append("--batch has no effect on a build for the CPU alone: its one kernel serves any batch")
    tools = find_tools(devices, nvcc, toolchain)
    with _locked(output.absolute() / "build", _identity(tools, toolchain)) as folder, _log(output) as log_file:
        builder = Builder(
            tools, toolchain, jobs or len(os.sched_getaffinity(0)), allow_warnings, folder / "tmp",
            output / "build.log", log_file, progress, log,
        )  # fmt: skip
        if here:
            stored = tune(layers, here, buckets, stored, builder, plugin_sources(), output / tuned_file.FILE)
        entries = tuning.usable(stored, devices, plugin_sources())
        choices = kernel_table.plan(layers, devices, buckets, tuning.measurements(entries))
        values = _values(devices, headers, tuning.about(choices, entries))
        if tools.nvcc:
            values |= builder.kernel_values(folder / "kernel_configs.inc", kernel_table.data_file(choices))
        builder.build(plugin_sources(), folder, values)
        report = _report(layers, devices, headers, choices, tools, folder)
        report["tuned"] = gains(layers, devices, buckets, entries)
        _publish([folder / name for name in report["libraries"]], output, report, stored if tuned else None)
    return report | {"notes": [*notes, *bfloat16, *_older(output, report["libraries"])]}


def read_layers(models: Sequence[Path]) -> list[Layer]:
    """The FlashRNN nodes of the models.

    Raises:
        FlashRNNError: a file is no model, holds no FlashRNN node, or no model is given.
    """
    if not models:
        raise FlashRNNError("build-plugins needs at least one model")
    layers = []
    for path in dict.fromkeys(models):
        model = load_model(path)
        nodes = flashrnn_nodes(model, tensors_of(model))
        if not nodes:
            raise FlashRNNError(why_no_op(path, model))
        layers += [Layer(str(path), node.name or node_label(node), spec) for node, spec in nodes]
    return layers


def plugin_sources() -> Path:
    """The folder of the C++ and CUDA sources, as it is installed."""
    return Path(str(resources.files("flashrnn_deploy") / "plugins"))


def _headers(folder: Path | None, wanted: str | None, devices: Sequence[GPU]) -> Headers | None:
    if folder is None:
        if wanted is not None:
            raise FlashRNNError(f"--tensorrt {wanted} needs --tensorrt-include DIR: {CURE}")
        return None
    if not devices:
        raise FlashRNNError("--tensorrt-include needs --gpu with a GPU: TensorRT runs on no CPU")
    return read_headers(folder.absolute(), wanted)


def _check_bfloat16(layers: Sequence[Layer], headers: Headers | None) -> list[str]:
    """What to tell of bfloat16 layers in a build for TensorRT 8, which has no such type.

    Raises:
        FlashRNNError: there are no others.
    """
    without = [layer for layer in layers if layer.spec.dtype == "bfloat16"] if headers and headers.is_version_8 else []
    if not without:
        return []
    cure = "export the model with --dtype float16, or build it for TensorRT 10 or newer"
    if len(without) == len(layers):
        raise FlashRNNError(f"TensorRT 8 has no bfloat16, and all layers of these models are of this type: {cure}")
    names = ", ".join(f"{layer.node} of {layer.model}" for layer in without)
    return [f"TensorRT 8 has no bfloat16: {TENSORRT_8_LIBRARY} does not serve {names}; {cure}"]


def _older(output: Path, built: Sequence[str]) -> list[str]:
    """What to tell of a library that an earlier build left in ``output``."""
    path = output / TENSORRT_8_LIBRARY
    if TENSORRT_8_LIBRARY in built or not path.exists():
        return []
    return [f"{path} is of an earlier build, for the models of that one: delete it, or build it anew (--tensorrt 8)"]


def _identity(tools: Tools, toolchain: Path | None) -> dict[str, Any]:
    """What a CMake tree cannot change: where it differs, the tree is made anew."""
    return {
        "version": __version__,
        "sources": str(plugin_sources()),
        "toolchain": str(toolchain.absolute()) if toolchain else None,
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        **asdict(tools),
    }


@contextlib.contextmanager
def _locked(folder: Path, identity: dict[str, Any]) -> Iterator[Path]:
    """``folder`` made, emptied where it is of another build, and this process alone in it."""
    import fcntl

    # A CMake tree is of one place: moved or copied it is made anew.
    stamp, text = folder / _STAMP, json.dumps(identity | {"folder": str(folder.resolve())}, indent=2) + "\n"
    try:
        if folder.is_dir() and any(folder.iterdir()) and not stamp.is_file():
            raise FlashRNNError(f"{folder} exists and is not of build-plugins: choose another -o DIR")
        folder.mkdir(parents=True, exist_ok=True)
        handle = stamp.open("a+", encoding="utf-8")
    except OSError as error:
        raise FlashRNNError(f"cannot write into {folder}: {error.strerror}; choose another -o DIR") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FlashRNNError(f"another build-plugins is running in {folder.parent}: wait for it") from error
        handle.seek(0)
        if handle.read() != text:
            for entry in folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry != stamp:
                    entry.unlink()
            handle.truncate(0)
            handle.write(text)
            handle.flush()
        (folder / "tmp").mkdir(exist_ok=True)
        yield folder


@contextlib.contextmanager
def _log(output: Path) -> Iterator[IO[str]]:
    with (output / "build.log").open("w", encoding="utf-8") as file:
        yield file


def _values(devices: Sequence[GPU], headers: Headers | None, tuned: str) -> dict[str, str]:
    """CMake's variables, those of ``Builder`` left out."""
    return {
        "FLASHRNN_CUDA_ARCHITECTURES": ";".join(str(c) for c in sorted({g.compute_capability for g in devices})),
        "FLASHRNN_GPUS": ";".join(gpu.name for gpu in devices),
        "FLASHRNN_TENSORRT_INCLUDE": str(headers.folder) if headers else "",
        "FLASHRNN_TUNED": tuned,
    }


def _report(
    layers: Sequence[Layer],
    devices: Sequence[GPU],
    headers: Headers | None,
    choices: Sequence[Choice],
    tools: Tools,
    folder: Path,
) -> dict[str, Any]:
    facts = (folder / "build_info.h").read_text(encoding="utf-8")

    def fact(name: str) -> str:
        return match[1] if (match := re.search(rf'\\"{name}\\": \\"(.*?)\\"', facts)) else ""

    models: dict[str, list[dict[str, Any]]] = {}
    for layer in layers:
        models.setdefault(layer.model, []).append({"name": layer.node, **node_facts(layer.spec)})
    return {
        "library": LIBRARY,
        "libraries": [LIBRARY, *([TENSORRT_8_LIBRARY] if headers and headers.is_version_8 else [])],
        "tensorrt": headers.version if headers else None,
        "version": fact("version"),
        "source_hash": fact("source_hash"),
        "architecture": fact("architecture"),
        "compiler": fact("compiler"),
        "cuda_version": fact("cuda_version") or None,
        "least_driver": fact("least_driver") or None,
        "gpus": [{"name": g.name, "product": g.product, "compute_capability": g.compute_capability} for g in devices],
        "programs": asdict(tools),
        "models": [{"file": file, "flashrnn": nodes} for file, nodes in models.items()],
        "kernels": [
            {
                "model": c.layer.model,
                "node": c.layer.node,
                "gpu": c.gpu.name,
                "min_batch": c.min_batch,
                "max_batch": c.max_batch,
                "predicted_for_batch": c.batch,
                "predicted_step_us": c.solution.predicted_step_us,
                "estimate": c.solution.estimate,
                "measured_step_us": c.measured_us,
                **asdict(c.solution.config),
            }
            for c in choices
        ],
    }


def _publish(libraries: Sequence[Path], output: Path, report: dict[str, Any], timings: Sequence[Entry] | None) -> None:
    """Libraries, report and ``timings``, for the next build, into ``output`` by renaming.

    What is the same already keeps its time.
    """
    with new_files(output) as scratch:
        if timings is not None:
            tuned_file.save(scratch / tuned_file.FILE, timings)
        (scratch / "libflashrnn.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        for library in libraries:
            if not library.is_file():
                raise FlashRNNError(
                    f"the build ended without an error and made no {library.name}: see {output / 'build.log'}"
                )
            shutil.copyfile(library, scratch / library.name)
            (scratch / library.name).chmod(0o755)
        for file in list(scratch.iterdir()):
            there = output / file.name
            if there.is_file() and filecmp.cmp(file, there, shallow=False):
                file.unlink()
