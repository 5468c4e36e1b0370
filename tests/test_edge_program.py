"""The program flashrnn_edge, built by its own CMakeLists.txt against libraries that stand for TensorRT's.

They say which release they are and do nothing else, and no device is shown to CUDA: this is what the program says and
refuses before an engine is built or run.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import engines
import models
import pytest
from cpu_library import CACHE, ROOT, tool_environment
from onnx import helper
from test_tensorrt_plugin import include

ENTRIES = ("getPluginRegistry", "createInferBuilder_INTERNAL", "createInferRuntime_INTERNAL")
PARSER = "createNvOnnxParser_INTERNAL"
SOURCE = ROOT / "samples" / "cpp_edge"
needs_cuda = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs the CUDA toolkit")


def need_parser() -> None:
    """No package of Python holds NvOnnxParser.h, without which the program builds no engines."""
    if not (include("10.14") / "NvOnnxParser.h").is_file():
        pytest.skip("NvOnnxParser.h is not in .cache/tensorrt/10.14")


def stand_in(folder: Path, version: int, major: int) -> Path:
    """libnvinfer and libnvonnxparser of a release (101401 is 10.14.1)."""
    nothing = "".join(engines.ENTRY + f"void* {name}() {{ return nullptr; }}\n" for name in ENTRIES)
    sources = {
        "nvinfer": engines.ENTRY + f"int getInferLibVersion() {{ return {version}; }}\n" + nothing,
        "nvonnxparser": engines.ENTRY + f"void* {PARSER}() {{ return nullptr; }}\n",
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, code in sources.items():
        file = f"lib{name}.so.{major}"
        (folder / f"{name}.cc").write_text(code)
        command = ["g++", "-shared", "-fPIC", f"-Wl,-soname,{file}", "-o", folder / file, folder / f"{name}.cc"]
        subprocess.run(command, check=True, env=tool_environment())
    return folder


def root(release: str, version: int) -> Path:
    """A folder with include/ and lib/ of a release."""
    folder = CACHE / "edge-roots" / release
    stand_in(folder / "lib", version, version // (1000 if version < 10000 else 10000))
    if not (folder / "include").exists():
        (folder / "include").symlink_to(include(release).resolve())
    return folder


def configure(folder: Path, *options: str) -> None:
    command = ["cmake", "-S", SOURCE, "-B", folder, "-G", "Ninja", "-DCMAKE_CXX_FLAGS_RELEASE=-O0", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=tool_environment())
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def program(release: str = "10.14", version: int = 101401) -> Path:
    folder = CACHE / f"build-edge-{release}"
    configure(folder, f"-DTENSORRT_ROOT={root(release, version)}")
    done = subprocess.run(["cmake", "--build", folder, "-j2"], capture_output=True, text=True, env=tool_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "flashrnn_edge"


def call(*arguments: object, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**tool_environment(), "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run([path or program(), *map(str, arguments)], capture_output=True, text=True, env=environment)


def refusal(*arguments: object, status: int = 1, **options: Any) -> str:
    done = call(*arguments, **options)
    assert (done.returncode, done.stdout) == (status, ""), done
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("error: ").strip()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One without FlashRNN ops, in the current folder."""
    monkeypatch.chdir(tmp_path)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "g", [engines.info("x", "time", 6)], [engines.info("y")]
    )
    models.save(helper.make_model(graph), tmp_path / "m.onnx")
    return "m.onnx"


@needs_cuda
def test_help_and_version() -> None:
    for words in (["--help"], ["-h"], *([c, "--help"] for c in ("build", "run", "info")), ["run", "e", "-v", "-h"]):
        done = call(*words)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert done.stdout.startswith("usage: flashrnn_edge " + (words[0] if len(words) > 1 else "COMMAND"))
    assert "--shape NAME=MIN:OPT:MAX" in call("build", "--help").stdout
    assert "--shape" not in call("run", "--help").stdout
    for words in (["--version"], ["build", "--version"]):
        assert call(*words).stdout == "flashrnn_edge 0.1.0 for TensorRT 10.14, with the library of TensorRT 10.14.1\n"


@needs_cuda
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give a command: build, run or info; see flashrnn_edge --help"),
        ("foo", "unknown command foo: there are build, run and info; see flashrnn_edge --help"),
        ("build m.onnx", "build needs -o ENGINE; see flashrnn_edge build --help"),
        ("run e", "run needs -o DIR"),
        ("build -o e", "build takes one MODEL.onnx, and 0 are given"),
        ("info a b", "info takes one ENGINE, and 2 are given"),
        ("build m.onnx -o e --chunk 3", "build takes no --chunk, which is an option of run"),
        ("build m.onnx -o e --trust-engine", "build takes no --trust-engine, which is an option of run and info"),
        ("run e -o d --shape time=1", "run takes no --shape, which is an option of build"),
        ("info e -o d", "info takes no -o, which is an option of"),
        ("info e --bar", "info has no option --bar; see flashrnn_edge info --help"),
        ("build m.onnx -o", "-o needs a value, ENGINE"),
        ("build m.onnx -o a -o b", "-o is given twice"),
        ("build m.onnx -o a --sessions 0", "--sessions '0': give a whole number from 1 on"),
        ("run e -o d --chunk 99999999999", "--chunk '99999999999': give a whole number from 1 on"),
    ],
)
def test_a_mistake_in_the_command_line_has_status_2(tmp_path: Path, words: str, message: str) -> None:
    if "--sessions" in words:
        need_parser()
    assert message in refusal(*words.split(), status=2)


@needs_cuda
def test_files_are_checked_before_a_device_is_asked_for(model: str) -> None:
    assert refusal("run", ".", "-o", "d") == "cannot read .: Is a directory"
    assert refusal("info", "none") == "cannot read none: No such file or directory"
    assert refusal("run", "e", "-o", "d", "--input", "x=.") == "cannot read .: Is a directory"
    assert "-o m.onnx is no folder" in refusal("run", "e", "-o", model)
    assert sorted(os.listdir()) == ["m.onnx"]


@needs_cuda
def test_shapes_and_outputs_are_checked_before_a_device_is_asked_for(model: str) -> None:
    need_parser()
    build = ["build", model, "-o", "m.engine", "--shape"]
    assert refusal(*build, "time=1:2:3").startswith("no CUDA device: ")
    assert "5:1:3 is not MIN:OPT:MAX in rising order" in refusal(*build, "time=5:1:3")
    assert "give --shape time=1:100:512" in refusal("build", model, "-o", "m.engine")
    assert "there is no folder" in refusal("build", model, "-o", "no/m.engine")
    assert "-o m.onnx would replace m.onnx" in refusal("build", model, "-o", model)
    Path("m.engine.json").write_text("{}")
    assert "would replace m.engine.json, which is not the sidecar" in refusal(*build, "time=1:2:3")
    assert refusal("build", ".", "-o", "e") == "cannot read .: Is a directory"
    assert sorted(os.listdir()) == ["m.engine.json", "m.onnx"]


@needs_cuda
@pytest.mark.parametrize(("version", "fits"), [(101400, True), (101601, True), (100301, False), (110100, False)])
@pytest.mark.parametrize("words", ["build m.onnx -o e --shape time=3", "run m.onnx -o d", "info m.onnx"])
def test_the_library_has_to_be_of_the_headers(
    model: str, tmp_path_factory: pytest.TempPathFactory, words: str, version: int, fits: bool
) -> None:
    """A newer minor version keeps the interfaces of the older ones; no other does."""
    if words.startswith("build"):
        need_parser()
    libraries = stand_in(tmp_path_factory.mktemp("lib"), version, 10)
    said = refusal(*words.split(), LD_LIBRARY_PATH=str(libraries))
    assert ("with the headers of TensorRT 10.14 and runs with the library of TensorRT 1" in said) == (not fits), said


@needs_cuda
def test_the_library_of_another_tensorrt(model: str, tmp_path: Path) -> None:
    options = [model, "-o", "e", "--shape", "time=3", "--plugin"]
    new = engines.library(tmp_path / "libflashrnn.so")
    said = refusal("build", *options, "libflashrnn.so", path=program("8.5", 8503))
    assert said.startswith("./libflashrnn.so is the library for TensorRT 10 and newer, and this is TensorRT 8: pass")
    assert "libflashrnn_trt8.so, which `flashrnn-deploy build-plugins MODEL.onnx --gpu GPU --tensorrt 8" in said
    engines.library(tmp_path / "old.so", engines.INFO.format("8.5"))
    assert "holds no plugins for TensorRT 10 and newer" in refusal("build", *options, "old.so")
    assert "cannot load the plugin library" in refusal("build", *options, ".")
    assert "would replace" in refusal("build", model, "-o", new, "--shape", "time=3", "--plugin", new)


@needs_cuda
def test_another_root_is_looked_into_anew(tmp_path: Path) -> None:
    first, second = root("10.14", 101401), root("8.5", 8503)
    configure(tmp_path / "b", f"-DTENSORRT_ROOT={first}")
    configure(tmp_path / "b", f"-DTENSORRT_ROOT={second}")
    cache = (tmp_path / "b" / "CMakeCache.txt").read_text()
    found = [line for line in cache.splitlines() if line.startswith(("TENSORRT_INCLUDE:", "TENSORRT_NV", "TENSORRT_P"))]
    assert len(found) == 4
    assert all(f"={second}/" in line for line in found), found
