"""TensorRT's own Python modules, of three releases, over empty libraries: what this package calls is there.

It keeps the fake of the runner's tests honest. The modules are 1 MB each and come from the package index; they link
TensorRT's libraries, which are gigabytes, and get empty ones with the same symbols: enough to import, not to run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fake_tensorrt
import pytest
import tensorrt_packages

RELEASES = {
    "8.6.1": ("tensorrt_bindings==8.6.1", "tensorrt_bindings"),
    "10.0.1": ("tensorrt-cu12-bindings==10.0.1", "tensorrt_bindings"),
    "11.4.0": ("tensorrt-cu13-bindings==11.4.0.106", "tensorrt_bindings"),
}
CALLED = {
    "Builder": "create_network create_builder_config create_optimization_profile build_serialized_network",
    "IBuilderConfig": "set_memory_pool_limit create_timing_cache set_timing_cache add_optimization_profile set_flag "
    "clear_flag",
    "IOptimizationProfile": "set_shape",
    "INetworkDefinition": "num_inputs num_outputs num_layers get_input get_output get_layer",
    "ITensor": "name shape dtype is_shape_tensor",
    "ITimingCache": "serialize",
    "OnnxParser": "parse num_errors get_error",
    "ParserError": "node desc",
    "IPluginRegistry": "load_library",
    "Runtime": "deserialize_cuda_engine",
    "ILogger.Severity": "INTERNAL_ERROR ERROR WARNING INFO VERBOSE",
    "MemoryPoolType": "WORKSPACE",
    "DataType": "FLOAT HALF INT32 INT8 BOOL",
    "TensorIOMode": "INPUT OUTPUT",
    "BuilderFlag": "TF32",
}
ONLY_8 = {
    "BuilderFlag": "FP16 OBEY_PRECISION_CONSTRAINTS",
    "LayerType": "PLUGIN_V2",
    "ILayer": "name type precision set_output_type",
    "IPluginRegistry": "plugin_creator_list",
    "NetworkDefinitionCreationFlag": "EXPLICIT_BATCH",
}
FROM_10 = {
    "IPluginRegistry": "all_creators",
    "IProgressMonitor": "phase_start phase_finish step_complete",
    "IBuilderConfig": "progress_monitor",
    "NetworkDefinitionCreationFlag": "STRONGLY_TYPED",
    "DataType": "BF16 INT64",
}
PROGRAM = """
import functools, importlib, json, sys
trt = importlib.import_module(sys.argv[1])
from flashrnn_deploy.engine import api, network, progress
log = api.make_log(trt)
log.log(trt.ILogger.Severity.ERROR, "one\\ntwo")
assert log.errors == ["one two"]
monitor = progress.make_monitor(trt, log, lambda *step: None)
missing = [
    f"{part}.{name}"
    for part, names in json.loads(sys.argv[2])
    for name in names
    if not hasattr(functools.reduce(getattr, part.split("."), trt), name)
]
print(json.dumps([api.version(trt), network._flags(trt), monitor is not None, missing]))
"""


def public(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def empty_libraries(module: Path, folder: Path) -> None:
    """Shared objects under the names that a module links; the first one has every symbol that it wants of them."""
    dynamic = subprocess.run(["readelf", "-dW", module], capture_output=True, text=True, check=True).stdout
    undefined = subprocess.run(["nm", "-Du", module], capture_output=True, text=True, check=True).stdout
    wanted = r"\b(?:create|get|init|_ZN\d+nv)\w*$"
    symbols = {line.split()[-1] for line in undefined.splitlines() if re.search(wanted, line.split()[-1])}
    code = "".join(f"void* {symbol}() {{ return 0; }}\n" for symbol in sorted(symbols - {"getenv", "getpid"}))
    for library in re.findall(r"\[(libnv\S+)\]", dynamic):
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            "-x",
            "c",
            "-",
            f"-Wl,-soname,{library}",
            "-o",
            str(folder / library),
        ]
        subprocess.run(command, input=code, text=True, check=True)
        code = ""


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_called_is_there(tmp_path: Path, release: str) -> None:
    requirement, name = RELEASES[release]
    folder = tensorrt_packages.installed(f"tensorrt-bindings-{release}", name, requirement)
    empty_libraries(folder / name / "tensorrt.so", tmp_path)
    old = release.startswith("8.")
    parts = [(part, names.split()) for called in (CALLED, ONLY_8 if old else FROM_10) for part, names in called.items()]
    parts += [("ICudaEngine", [n for n in public(fake_tensorrt.Engine)])]
    parts += [("IExecutionContext", public(fake_tensorrt.Context))]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", PROGRAM, name, json.dumps(parts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    version, flags, monitor, missing = json.loads(done.stdout)
    assert not missing
    assert version == release
    assert flags == {"8.6.1": 1 << 0, "10.0.1": 1 << 1, "11.4.0": 1 << 0}[release]
    assert monitor != old
