"""Engines for the fake TensorRT, with sidecars, and small plugin libraries."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import models
import onnx

from flashrnn_deploy.engine import sidecar
from flashrnn_deploy.engine.build import _facts
from flashrnn_deploy.engine.profiles import make_profiles
from flashrnn_deploy.graph import free_inputs
from flashrnn_deploy.shapes import dtype_name, value_tensor

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
