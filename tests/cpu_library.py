"""Builds libflashrnn.so for the tests, and runs one op of it through ONNX Runtime.

Builds live in .cache/, one folder per configuration, and are brought up to date once per test session.
FLASHRNN_TEST_SANITIZE=address or undefined makes all tests use a sanitized build; the process then needs the matching
runtime in LD_PRELOAD (test_under_sanitizer sets both).
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from cases import NUMPY_DTYPES, model

from flashrnn_deploy.op import DTYPES, INPUTS, OUTPUTS, RNNSpec

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"
SANITIZE = os.environ.get("FLASHRNN_TEST_SANITIZE", "")


def tool_environment() -> dict[str, str]:
    """For compilers and other tools: they do not stand a sanitizer's runtime in LD_PRELOAD."""
    return {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}


@functools.cache
def build_folder(sanitize: str = SANITIZE, source: Path = ROOT, name: str = "plugins") -> Path:
    """Configure and build; returns the folder with the libraries of all instruction sets."""
    folder = CACHE / f"build-{name}{'-' + sanitize if sanitize else ''}"
    options = ["-DFLASHRNN_CPU_VARIANTS=ON", f"-DFLASHRNN_SANITIZE={sanitize}", "-G", "Ninja"]
    for command in (["cmake", "-S", source, "-B", folder, *options], ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True, env=tool_environment())
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def library(isa: str = "") -> Path:
    """libflashrnn.so, or its variant whose dispatch goes no further than ``isa``."""
    return build_folder() / f"libflashrnn{'_' + isa if isa else ''}.so"


def make_session(proto: onnx.ModelProto, path: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(path or library()))
    return ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])


@functools.cache
def op_session(spec: RNNSpec, path: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    """A session of the one op, every tensor an input."""
    return make_session(model(spec, body=False), path, threads)


def run_op(
    spec: RNNSpec, inputs: dict[str, np.ndarray], path: Path | None = None, threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """y in the op's dtype, final_states in float32."""
    session = op_session(spec, path, threads)
    if spec.dtype != "bfloat16":
        return tuple(session.run(list(OUTPUTS), {n: inputs[n] for n in INPUTS}))
    return run_bfloat16(session, spec, inputs)


def run_bfloat16(
    session: ort.InferenceSession, spec: RNNSpec, inputs: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """ONNX Runtime takes no NumPy array of bfloat16: its bits are bound, and read back, as uint16."""
    binding = session.io_binding()
    lead = inputs["wx"].shape[:2] if not spec.layout else inputs["wx"].shape[1::-1]
    outputs = {
        "y": np.full(spec.shapes(*lead)["y"], 0x7FC0, np.uint16),
        "final_states": np.full_like(inputs["initial_states"], np.nan),
    }
    bits = {n: a.view(np.uint16) if a.dtype == NUMPY_DTYPES["bfloat16"] else a for n, a in inputs.items()}
    values = {n: as_ort_value(a) for n, a in (bits | outputs).items()}
    for name in INPUTS:
        binding.bind_ortvalue_input(name, values[name])
    for name in OUTPUTS:
        binding.bind_ortvalue_output(name, values[name])
    session.run_with_iobinding(binding)
    return outputs["y"].view(NUMPY_DTYPES["bfloat16"]), outputs["final_states"]


def as_ort_value(array: np.ndarray) -> ort.OrtValue:
    if array.dtype == np.uint16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, DTYPES["bfloat16"])
    return ort.OrtValue.ortvalue_from_numpy(array)


def has_program(name: str) -> bool:
    return shutil.which(name) is not None
