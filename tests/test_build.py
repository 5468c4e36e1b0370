"""`build-plugins`: what it refuses, what it builds, and that what it builds computes the right thing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import models
import numpy as np
import onnx_rnn
import onnxruntime as ort
import pytest
from cases import model, tensors
from click.testing import CliRunner
from cpu_library import run_op
from onnx import helper

import flashrnn_deploy
from flashrnn_deploy import build, compare, gpus, info, kernel_table, toolchain
from flashrnn_deploy.cli import main
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import convert_file
from flashrnn_deploy.kernel_table import Layer
from flashrnn_deploy.op import RNNSpec

SPEC = RNNSpec("lstm", 2, 8)
AARCH64 = build.plugin_sources() / "toolchains" / "aarch64-linux-gnu.cmake"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.save(models.network(SPEC), tmp_path_factory.mktemp("models") / "m.onnx")


@pytest.fixture(scope="module")
def built(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that `build-plugins --gpu cpu` has filled."""
    output = tmp_path_factory.mktemp("built") / "out"
    result = CliRunner().invoke(main, ["build-plugins", str(exported), "--gpu", "cpu", "-o", str(output)])
    assert result.exit_code == 0, result.output
    assert re.search(r"\[\d+/\d+\] Linking", result.stderr)  # progress
    assert "libflashrnn.so" in result.stdout
    return output


def refusal(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["build-plugins", *map(str, arguments)])
    assert result.exit_code == 1, result.output
    *progress, line = result.stderr.splitlines()
    assert not any(text.startswith("error") for text in progress)
    return line


# What a build leaves ----------------------------------------------------------------------------------------------


def test_a_build_fills_its_directory(built: Path, exported: Path) -> None:
    assert sorted(p.name for p in built.iterdir()) == ["build", "build.log", "libflashrnn.json", "libflashrnn.so"]
    report = json.loads((built / "libflashrnn.json").read_text())
    facts = info.library_info(built / "libflashrnn.so")
    assert facts["version"] == report["version"] == flashrnn_deploy.__version__
    assert facts["source_hash"] == report["source_hash"]
    assert len(facts["source_hash"]) == 64
    assert facts["architecture"] == report["architecture"] == os.uname().machine
    assert facts["kernels"] == facts["gpus"] == report["kernels"] == report["gpus"] == []
    assert report["models"][0]["file"] == str(exported)
    assert report["models"][0]["flashrnn"][0]["head_dim"] == 8
    assert list((built / "build" / "tmp").iterdir()) == []


def test_a_second_build_compiles_nothing(built: Path, exported: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in (*built.glob("lib*"), *(built / "build").rglob("*.o"))}
    steps: list[str] = []
    build.build_plugins([exported], ["cpu"], built, progress=lambda done, total, what: steps.append(what))
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert not any(".cc" in step or "Linking" in step for step in steps)


def test_a_foreign_build_folder_is_left_alone(tmp_path: Path, exported: Path) -> None:
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "mine").write_text("x")
    assert "is not of build-plugins: choose another" in refusal(exported, "--gpu", "cpu", "-o", tmp_path)
    assert [p.name for p in tmp_path.rglob("*")] == ["build", "mine"]


def test_a_library_of_an_earlier_build_is_told(built: Path, exported: Path) -> None:
    """The models of another build may differ: it does not stay there in silence."""
    older = built / build.TENSORRT_8_LIBRARY
    older.touch()
    try:
        notes = build.build_plugins([exported], ["cpu"], built)["notes"]
    finally:
        older.unlink()
    assert notes == [f"{older} is of an earlier build, for the models of that one: delete it, or build it anew "
                     "(--tensorrt 8)"]  # fmt: skip
    assert build.build_plugins([exported], ["cpu"], built)["notes"] == []


def test_a_build_folder_that_was_moved_or_copied_is_made_anew(tmp_path: Path) -> None:
    """CMake refuses a tree of another place, by a message that does not say what to do."""
    for moved in (False, True):
        with build._locked(tmp_path / "a" / "build", {"version": "1"}) as folder:
            (folder / "CMakeCache.txt").touch()
        with build._locked(tmp_path / "a" / "build", {"version": "1"}) as folder:
            assert (folder / "CMakeCache.txt").exists()
        if moved:
            (tmp_path / "a").rename(tmp_path / "moved")
        else:
            shutil.copytree(tmp_path / "a", tmp_path / "copied")
        with build._locked(tmp_path / ("moved" if moved else "copied") / "build", {"version": "1"}) as folder:
            assert not (folder / "CMakeCache.txt").exists()


def test_one_build_at_a_time(built: Path, exported: Path) -> None:
    import fcntl

    with (built / "build" / "flashrnn-build.json").open() as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "another build-plugins is running" in refusal(exported, "--gpu", "cpu", "-o", built)


def test_a_failure_keeps_the_library_and_names_the_log(
    built: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(build.plugin_sources(), tmp_path / "plugins")
    (copy / "info.cc").write_text("#error broken on purpose\n")
    monkeypatch.setattr(build, "plugin_sources", lambda: copy)
    output = tmp_path / "out"
    output.mkdir()
    shutil.copy(built / "libflashrnn.so", output)
    message = refusal(exported, "--gpu", "cpu", "-o", output)
    assert "broken on purpose" in message
    assert "--allow-warnings" not in message
    assert str(output / "build.log") in message
    assert "broken on purpose" in (output / "build.log").read_text()
    assert (output / "libflashrnn.so").read_bytes() == (built / "libflashrnn.so").read_bytes()


# Refusals ---------------------------------------------------------------------------------------------------------


def test_models_that_need_no_library(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [1])],
        [helper.make_tensor_value_info("y", 1, [1])],
    )
    path = models.save(helper.make_model(graph), tmp_path / "m.onnx")
    arguments = (path, "--gpu", "cpu", "-o", tmp_path / "o")
    assert "holds no FlashRNN op, and no LSTM, GRU or RNN to make one of" in refusal(*arguments)
    attributes = {"hidden_size": 4, "linear_before_reset": 1}
    feeds = onnx_rnn.random_feeds("GRU", attributes, T=3, B=2, width=3, HD=4)
    models.save(onnx_rnn.node_model("GRU", attributes, feeds), path)
    assert f"convert it first: flashrnn-deploy convert {path}" in refusal(*arguments)
    models.save(onnx_rnn.node_model("GRU", {"hidden_size": 4}, feeds), path)
    assert "convert leaves its GRU node 'rnn': linear_before_reset=0 applies the reset gate" in refusal(*arguments)
    before = set(tmp_path.iterdir())
    convert_file(path, tmp_path / "converted.onnx")
    assert "convert leaves its GRU node 'rnn': " in refusal(tmp_path / "converted.onnx", *arguments[1:])
    assert set(tmp_path.iterdir()) == {*before, tmp_path / "converted.onnx"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h300"], "unknown GPU 'h300'"),
        (["--gpu", "CPUs"], "thor, or local for the installed one, or cpu for none"),
        (["--gpu", "CPU", "--batch", "0"], "--batch must be from 1"),
        (["--gpu", "cpu", "--tensorrt-include", "."], "--tensorrt-include needs --gpu with a GPU"),
        (["--gpu", "h200", "--tensorrt-include", "docs"], "there are no TensorRT headers in it"),
        (["--gpu", "h200", "--tensorrt", "8"], "--tensorrt 8 needs --tensorrt-include DIR"),
        (["--gpu", "cpu", "--batch", "0"], "--batch must be from 1"),
        (["--gpu", "cpu", "--jobs", "0"], "--jobs must be at least 1"),
        (["--gpu", "cpu", "--toolchain", "none.cmake"], "there is no such file"),
        (["--gpu", "t4", "--nvcc", "/none/nvcc"], "--nvcc /none/nvcc: there is no such program"),
    ],
)
def test_options(tmp_path: Path, exported: Path, options: list[str], message: str) -> None:
    assert message in refusal(exported, *options, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_compiler_that_the_environment_names(
    built: Path, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was configured for another compiler is made anew, and keeps its library where that fails."""
    library = (built / "libflashrnn.so").read_bytes()
    output = shutil.copytree(built, tmp_path / "out")
    monkeypatch.setenv("CXX", "/bin/false")
    assert "the build fails" in refusal(exported, "--gpu", "cpu", "-o", output)
    assert "/bin/false" in (output / "build.log").read_text()
    assert (output / "libflashrnn.so").read_bytes() == library
    monkeypatch.setenv("CXX", "none -m64")
    assert "CXX=none -m64 of the environment is no program" in refusal(exported, "--gpu", "cpu", "-o", tmp_path / "o")
    tools = toolchain.Tools("cmake", "ninja", None, "nvcc", "13.0")
    identity = build._identity(tools, None)
    for name in ("CUDAHOSTCXX", "CXXFLAGS"):
        monkeypatch.setenv(name, "x")
        before, identity = identity, build._identity(tools, None)
        assert before != identity


# Runs the command as a program that ends with 77 when it starts another one.
ALONE = """
import os, runpy, sys
started = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.fork", "os.forkpty", "os.system"}
sys.addaudithook(lambda event, values: event in started and (print(event, values, file=sys.stderr), os._exit(77)))
sys.argv[0] = "flashrnn-deploy"
runpy.run_module("flashrnn_deploy", run_name="__main__")
"""
TORCH_MODEL = """
import torch
def make():
    return torch.nn.LSTM(3, 4, batch_first=True), (torch.zeros(2, 5, 3),)
"""


def test_without_any_program(tmp_path: Path, exported: Path) -> None:
    """D5: no compiler on PATH: exporting and running work, building names what is needed, and nothing is started."""
    np.save(tmp_path / "x.npy", np.ones((3, 2, models.IN), np.float32))
    (tmp_path / "model.py").write_text(TORCH_MODEL)

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", ALONE, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)})

    made = call("export", f"{tmp_path / 'model.py'}:make", "-o", tmp_path / "lstm.onnx")
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "lstm.onnx").is_file()
    ran = call("run", exported, "--input", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "result")
    assert ran.returncode == 0, ran.stderr
    for gpu, needed in (("cpu", "cmake, ninja, g++"), ("h200", "cmake, ninja, g++, nvcc")):
        done = call("build-plugins", exported, "--gpu", gpu, "-o", tmp_path / "out")
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done.stderr
        assert f"needs {needed}; found none of them; missing {needed}: apt install cmake" in done.stderr
    assert not (tmp_path / "out").exists()


def fake_program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nvcc(release: str, *known: int) -> Path:
        archs = "".join(f"compute_{k}\\n" for k in known)
        return fake_program(
            tmp_path, "nvcc", f'[ "$1" = --version ] && echo "release {release}, V" || printf "{archs}"'
        )

    h200 = gpus.get("h200")
    for name, text in (("cmake", "echo cmake version 3.18.4"), ("ninja", "echo 1.10"), ("g++", "")):
        fake_program(tmp_path, name, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert toolchain.find_tools([h200], nvcc("12.1", 75, 80, 90)).nvcc_version == "12.1"
    with pytest.raises(FlashRNNError, match=r"nvcc 11\.8 .* lacks instructions .* h200 need: install CUDA 12\.1"):
        toolchain.find_tools([h200], nvcc("11.8", 75, 80, 90))
    with pytest.raises(FlashRNNError, match=r"nvcc 11\.3 .* too old: install CUDA 11\.4"):
        toolchain.find_tools([h200], nvcc("11.3", 75))
    with pytest.raises(FlashRNNError, match=r"11\.4 .* not know sm_90 \(h200\).*sm_75, sm_80: install CUDA 12\.1"):
        toolchain.find_tools([h200], nvcc("11.4", 75, 80))
    with pytest.raises(FlashRNNError, match=r"14\.0 .* not know sm_90.*not so new"):
        toolchain.find_tools([h200], nvcc("14.0", 100))
    fake_program(tmp_path, "cmake", "echo cmake version 3.16.3")
    with pytest.raises(FlashRNNError, match=r"CMake 3\.16 .* too old"):
        toolchain.find_tools([])


# The data file ----------------------------------------------------------------------------------------------------


def layers(*specs: RNNSpec) -> list[Layer]:
    return [Layer("m.onnx", f"rnn{i}", spec) for i, spec in enumerate(specs)]


def test_lines_cover_every_batch_once() -> None:
    spec = RNNSpec("gru", 1, 256, dtype="float16")
    devices = [gpus.get(name) for name in ("h200", "h100", "a100", "t4")]
    choices = kernel_table.plan(layers(spec, dataclasses.replace(spec, num_heads=3)), devices)
    text = kernel_table.data_file(choices)
    lines = re.findall(r"FLASHRNN_KERNEL\((.*)\)", text)
    values = [dict(zip(kernel_table.FIELDS, line.split(", "), strict=True)) for line in lines]
    assert {v["compute_capability"] for v in values} == {"80", "90"}  # a T4 runs it on the alternating kernel
    for capability in ("80", "90"):
        batches = sorted(
            (int(v["min_batch"]), int(v["max_batch"])) for v in values if v["compute_capability"] == capability
        )
        assert batches[0][0] == 1
        assert batches[-1][1] == kernel_table.LARGEST_BATCH
        assert all(b[0] == a[1] + 1 for a, b in itertools.pairwise(batches))
    assert text == kernel_table.data_file(reversed(choices))
    modes = {c.gpu.name: c.solution.config.mode for c in choices}
    assert modes == {"h200": "cluster", "h100": "cluster", "a100": "grid", "t4": "alternating"}


def test_a_device_without_tensor_cores_for_bfloat16_has_no_line() -> None:
    choices = kernel_table.plan(layers(RNNSpec("lstm", 1, 64, dtype="bfloat16")), [gpus.get("t4")])
    assert kernel_table.data_file(choices) == kernel_table.HEADER


def test_fields_are_those_of_the_kernels() -> None:
    text = (build.plugin_sources() / "kernels" / "cuda" / "config.h").read_text()
    comment = re.search(r"FLASHRNN_KERNEL\(([^)]*)\)", text)[1].replace("//", "")  # type: ignore[index]
    assert tuple(re.split(r",\s*", comment.strip())) == kernel_table.FIELDS


PRINT = """
#include <cstdio>
#include "build_info.h"
int main() { std::puts("{" FLASHRNN_BUILD_INFO "}"); }
"""


def test_texts_of_a_build_stay_texts(tmp_path: Path) -> None:
    """A GPU's name in a file from elsewhere is no code."""
    text = 'a"b\\; c\\", INJECT, \\"$x @CMAKE_BUILD_TYPE@ ${CMAKE_BUILD_TYPE} [d;e] \u00e9 end\\'

    def call(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*map(str, command)], capture_output=True, text=True)

    names = [f"-DFLASHRNN_TUNED={text}", '-DFLASHRNN_GPUS=h200;x"y\\z']
    configure = ("cmake", "-S", build.plugin_sources(), "-B", tmp_path / "b", "-G", "Ninja")
    assert call(*configure, *names).returncode == 0
    (tmp_path / "m.cc").write_text(PRINT)
    done = call("g++", "-std=c++17", "-Werror", f"-I{tmp_path / 'b'}", tmp_path / "m.cc", "-o", tmp_path / "m")
    assert done.returncode == 0, done.stderr
    facts = json.loads(call(tmp_path / "m").stdout)
    assert (facts["tuned"], facts["gpus"], facts["version"]) == (text, ["h200", 'x"y\\z'], flashrnn_deploy.__version__)
    done = call(*configure, "-DFLASHRNN_TUNED=a\tb")
    assert done.returncode == 1
    assert "a text for build_info.h has a control character" in done.stderr


# What it computes -------------------------------------------------------------------------------------------------


def run_model(path: Path, x: np.ndarray, folder: Path, *options: object) -> tuple[dict[str, np.ndarray], str]:
    np.save(folder / "x.npy", x)
    command = ["run", path, "--input", f"x={folder / 'x.npy'}", "-o", folder / "out", *options]
    result = CliRunner().invoke(main, [str(c) for c in command])
    assert result.exit_code == 0, result.output
    report = json.loads((folder / "out" / "outputs.json").read_text())
    return {o["name"]: np.load(folder / "out" / o["file"]) for o in report["outputs"]}, result.stderr


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("cell", ["lstm", "gru", "elman", "slstm"])
def test_exported_modules(built: Path, tmp_path: Path, cell: str, dtype: str) -> None:
    import torch

    from flashrnn_deploy.exporters import export
    from flashrnn_deploy.nn import MultiHeadRNN

    torch.manual_seed(1)
    module = MultiHeadRNN(6, 16, num_heads=2, cell=cell, batch_first=True).to(getattr(torch, dtype))
    path, library = tmp_path / "m.onnx", built / "libflashrnn.so"
    example = torch.zeros(2, 5, 6, dtype=getattr(torch, dtype))
    models.save(export(module, (example,), expose_states=True).model, path)
    x = np.random.default_rng(2).standard_normal((3, 12, 6)).astype(np.float16 if dtype == "float16" else np.float32)
    body, note = run_model(path, x, tmp_path)
    assert "function body" in note
    ours, note = run_model(path, x, tmp_path, "--plugins", library)
    assert "function body" not in note
    assert ours.keys() == body.keys()
    for name, array in ours.items():
        comparison = compare.against_peer(name, array, body[name], dtype, "the function body")
        assert comparison.passed, comparison
    result = CliRunner().invoke(main, ["verify", str(path), "--plugins", str(library)])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_chunks_are_the_whole_bitwise(built: Path, dtype: str) -> None:
    spec, library = RNNSpec("lstm", 2, 8, dtype=dtype), built / "libflashrnn.so"
    inputs = tensors(spec, 9, 3)
    y, final = run_op(spec, inputs, library)
    parts, states = [], inputs["initial_states"]
    for at in range(0, 9, 4):
        wx = inputs["wx"][at : at + 4]
        lens = np.full(3, len(wx), np.int32)
        part, states = run_op(spec, inputs | {"wx": wx, "sequence_lens": lens, "initial_states": states}, library)
        parts.append(part)
    assert np.concatenate(parts).tobytes() == y.tobytes()
    assert states.tobytes() == final.tobytes()


def test_register(built: Path, tmp_path: Path) -> None:
    options = ort.SessionOptions()
    for _ in range(2):
        flashrnn_deploy.register(options, built / "libflashrnn.so")
    session = ort.InferenceSession(model(SPEC, body=False).SerializeToString(), options)
    assert session.run(None, tensors(SPEC, 3, 2))[0].shape == (3, 2, 16)
    with pytest.raises(FlashRNNError, match="there is no plugin library"):
        flashrnn_deploy.register(options, tmp_path / "none.so")
    (tmp_path / "bad.so").write_text("x")
    with pytest.raises(FlashRNNError, match="cannot load the plugin library"):
        flashrnn_deploy.register(options, tmp_path / "bad.so")


# Other compilers --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="needs g++-aarch64-linux-gnu")
def test_aarch64(exported: Path, tmp_path: Path) -> None:
    report = build.build_plugins([exported], ["cpu"], tmp_path / "a b", toolchain=AARCH64)
    assert report["architecture"] == "aarch64"
    header = (tmp_path / "a b" / "libflashrnn.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64
