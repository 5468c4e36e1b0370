"""`build-plugins` for GPUs: nvcc compiles the kernels, and the library says what it holds. Nothing here needs a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from cases import tensors
from cpu_library import run_op

from flashrnn_deploy import build, gpus, info, kernel_table
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")


def test_bfloat16_is_not_built_for_tensorrt_8(tmp_path: Path) -> None:
    (tmp_path / "NvInferRuntime.h").touch()
    versions = "#define NV_TENSORRT_MAJOR {}\n#define NV_TENSORRT_MINOR 6\n"
    (tmp_path / "NvInferVersion.h").write_text(versions.format(8))
    specs = (RNNSpec("lstm", 2, 8), RNNSpec("slstm", 2, 8, dtype="bfloat16"))
    path = models.save(models.network(specs[1]), tmp_path / "m.onnx")
    with pytest.raises(FlashRNNError, match="TensorRT 8 has no bfloat16, and all layers"):
        build.build_plugins([path], ["l4"], tmp_path / "out", tensorrt_include=tmp_path)
    assert not (tmp_path / "out").exists()
    layers = [kernel_table.Layer("m.onnx", f"rnn{i}", spec) for i, spec in enumerate(specs)]
    [note] = build._check_bfloat16(layers, build.read_headers(tmp_path))
    assert "libflashrnn_trt8.so does not serve rnn1 of m.onnx; export the model with --dtype float16" in note
    assert build._check_bfloat16(layers[:1], build.read_headers(tmp_path)) == []
    (tmp_path / "NvInferVersion.h").write_text(versions.format(10))
    assert build._check_bfloat16(layers, build.read_headers(tmp_path)) == []


def check_gpu_build(output: Path, spec: RNNSpec, *names: str) -> dict[str, Any]:
    path = models.save(models.network(spec), output.parent / "m.onnx")
    report = build.build_plugins([path], names, output)
    facts = info.library_info(output / "libflashrnn.so")
    assert facts["gpus"] == list(names)
    assert facts["cuda_version"].startswith(report["programs"]["nvcc_version"])
    assert facts["least_driver"] in ("450", "525", "580")
    lines = (output / "build" / "kernel_configs.inc").read_text().splitlines()[1:]
    assert [kernel_table.render(k) for k in facts["kernels"]] == lines
    return facts


@needs_nvcc
def test_one_gpu(tmp_path: Path) -> None:
    spec = RNNSpec("lstm", 2, 32, dtype="float16")
    facts = check_gpu_build(tmp_path / "out", spec, "h200")
    assert facts["cuda_architectures"] == ["90"]
    assert kernel_table.covering(facts["kernels"], spec)
    assert not kernel_table.covering(facts["kernels"], RNNSpec("lstm", 2, 128, dtype="float16"))
    inputs = tensors(spec, 5, 3)
    library = tmp_path / "out" / "libflashrnn.so"
    y, _ = run_op(spec, inputs, library)  # it loads and runs where there is no GPU
    assert np.isfinite(y.astype(np.float32)).all()

    def said(*command: str) -> str:
        return subprocess.run([*command, str(library)], check=True, capture_output=True, text=True).stdout

    symbols = [line.split()[-1] for line in said("nm", "-D", "--defined-only").splitlines()]
    assert sorted(symbols) == ["RegisterCustomOps", "flashrnn_info"]
    system = ("libc.so", "libm.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux")
    assert all(n.startswith(system) for n in re.findall(r"NEEDED.*\[(.*)\]", said("readelf", "-d")))


@needs_nvcc
@pytest.mark.parametrize("version", ["", "10.3"])
def test_the_library_says_which_tensorrt_it_is_for(tmp_path: Path, version: str) -> None:
    """Configured only: what `flashrnn_info` returns is a line of the build folder then."""
    include = tmp_path / "include"
    include.mkdir()
    major, _, minor = (version or "0.0").partition(".")
    text = f"#define NV_TENSORRT_MAJOR {major}\n#define NV_TENSORRT_MINOR {minor}\n"
    (include / "NvInferVersion.h").write_text(text)
    options = ["-DFLASHRNN_CUDA_ARCHITECTURES=86", f"-DFLASHRNN_TENSORRT_INCLUDE={include if version else ''}"]
    command = ["cmake", "-S", build.plugin_sources(), "-B", tmp_path / "b", "-G", "Ninja", *options]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f'\\"tensorrt\\": \\"{version}\\"' in (tmp_path / "b" / "build_info.h").read_text()


@needs_nvcc
@pytest.mark.full
@pytest.mark.parametrize("cell", ["lstm", "gru", "elman", "slstm"])
def test_every_gpu(tmp_path: Path, cell: str) -> None:
    facts = check_gpu_build(tmp_path / "out", RNNSpec(cell, 2, 64, dtype="bfloat16"), *gpus.GPUS)
    assert facts["cuda_architectures"] == ["75", "80", "86", "87", "89", "90", "100", "110", "120"]
