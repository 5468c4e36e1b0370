"""Engines for the fake TensorRT, with sidecars, and small plugin libraries."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
from cases import NUMPY_DTYPES
from onnx import TensorProto, helper

from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.engine import sidecar
from flashrnn_deploy.engine.build import _facts
from flashrnn_deploy.engine.profiles import make_profiles
from flashrnn_deploy.graph import free_inputs
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.shapes import dtype_name, value_tensor

LSTM = RNNSpec("lstm", 2, 4)
RNG = np.random.default_rng(0)
ENTRY = 'extern "C" __attribute__((visibility("default"))) '
INFO = ENTRY + 'const char* flashrnn_info() {{ return "{{\\"tensorrt\\": \\"{0}\\"}}"; }}\n'
CREATORS = ENTRY + "void* getCreators(int& n) { n = 0; return nullptr; }\n"


def library(path: Path, code: str = INFO.format("10.14") + CREATORS) -> Path:
    """A shared object of a few lines."""
    source = path.with_suffix(".cc")
    source.write_text(code)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return path


def write(
    model: onnx.ModelProto, path: Path, shapes: tuple[str, ...] = (), plugin: Path | None = None, **changed: Any
) -> Path:
    """An engine of the fake, and the sidecar that `build-engine` would write on this GPU."""
    from fake_tensorrt import make_engine

    profiles = {name: p.to_json() for name, p in make_profiles(model, shapes).items()}
    data = make_engine(model, profiles)
    source = models.save(model, path.with_suffix(".onnx"))
    values = (*free_inputs(model.graph), *model.graph.output)
    facts = {
        "tensorrt": "10.14.1",
        "rtx": False,
        "compute_capability": "9.0",
        "shapes": profiles,
        "dtypes": {v.name: dtype_name(value_tensor(v).dtype) for v in values},
        **_facts(model),
    }
    path.write_bytes(data)
    report = sidecar.describe(data, source, plugin, **facts) | changed
    sidecar.path_of(path).write_text(json.dumps(report))
    return path


def check(engine: Path, report: dict[str, Any], here: sidecar.Running, *libraries: Path) -> None:
    """All that is checked of an engine, as its runner does."""
    sidecar.check_files(engine, engine.read_bytes(), report, libraries)
    sidecar.check_place(engine, report, here)


def info(name: str, *dims: Any, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    """An input or output of a graph."""
    return helper.make_tensor_value_info(name, dtype, list(dims))


def feeds(T: int, B: int, spec: RNNSpec = LSTM, lens: Any = None) -> dict[str, np.ndarray]:
    """Inputs of ``models.network``."""
    lead = (B, T) if spec.layout else (T, B)
    states = RNG.standard_normal(spec.shapes(T, B)["initial_states"]).astype(np.float32)
    result = {"x": RNG.standard_normal((*lead, models.IN)).astype(NUMPY_DTYPES[spec.dtype]), "state0": states}
    return result if lens is None else result | {"lens": np.asarray(lens)}


def expect(model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What ONNX Runtime gives, which the fake's engines run on: equal to the bit."""
    return make_runner("onnxruntime", model).infer(arrays)


def same(actual: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """The same tensors, dtypes and bits."""
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert np.asarray(actual[name]).dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(actual[name]), array, err_msg=name)
