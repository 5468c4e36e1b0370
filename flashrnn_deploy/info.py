"""What a model or a plugin library is: the `info` command."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from flashrnn_deploy import shared_library
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import load_model
from flashrnn_deploy.graph import free_inputs, opset_of, walk_graphs, walk_nodes
from flashrnn_deploy.op import DOMAIN, RNNSpec, is_flashrnn
from flashrnn_deploy.shapes import axes_of, dtype_name, flashrnn_nodes, is_standard_rnn, tensors_of, value_tensor
from flashrnn_deploy.streaming import state_pairs


def describe_file(path: Path) -> dict[str, Any]:
    """Facts about an ONNX file (``model_info``), a plugin library (``library_info``), or an engine: its sidecar.

    Raises:
        FlashRNNError: the file is missing, or none of the three.
    """
    from flashrnn_deploy.engine import sidecar

    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise FlashRNNError(f"cannot read {path}: {error.strerror}") from error
    if magic == b"\x7fELF" or path.suffix in (".so", ".dll", ".dylib"):
        return library_info(path)
    if path.suffix in sidecar.SUFFIXES or (path.suffix != ".onnx" and sidecar.path_of(path).is_file()):
        facts = {"kind": "TensorRT engine", "file": str(path), **sidecar.read(path)}
        try:
            sidecar.check_bytes(path, path.read_bytes(), facts)
        except FlashRNNError as error:
            facts["warnings"] = [str(error)]
        return facts
    return model_info(path)


def library_info(path: Path) -> dict[str, Any]:
    """What the C function ``const char* flashrnn_info(void)`` of a plugin library says, a JSON object.

    Raises:
        FlashRNNError: the library does not load, has no such function, or says no JSON.
    """
    try:
        library = shared_library.load(path)
    except OSError as error:
        raise FlashRNNError(f"cannot load the library {path}: {error}") from error
    try:
        function = library.flashrnn_info
    except AttributeError as error:
        raise FlashRNNError(f"{path} is not a FlashRNN plugin library: it has no function flashrnn_info") from error
    function.argtypes, function.restype = [], ctypes.c_char_p
    text = function()
    try:
        facts = json.loads(text or b"")
    except (ValueError, RecursionError) as error:
        raise FlashRNNError(f"flashrnn_info of {path} gives no JSON: {(text or b'')[:200]!r}") from error
    if not isinstance(facts, dict):
        raise FlashRNNError(f"flashrnn_info of {path} gives no JSON object: {text!r}")
    return {"kind": "plugin library", "file": str(path), **facts}


def model_info(path: Path) -> dict[str, Any]:
    """Nodes, FlashRNN nodes, tensors, states, versions and engines of a model.

    ``macs_per_step`` counts the recurrent products of one time step and one batch row; ``parameters`` every number
    in the file's weights.

    Raises:
        FlashRNNError: the file is no model, or a FlashRNN node breaks the op's contract.
    """
    model = load_model(path)
    tensors = tensors_of(model)
    axes = axes_of(model, tensors)
    nodes = [{"name": node.name, **node_facts(spec)} for node, spec in flashrnn_nodes(model, tensors)]

    def values(infos: Any) -> list[dict[str, Any]]:
        return [
            {
                "name": v.name,
                "dtype": dtype_name(value_tensor(v).dtype),
                "shape": None if (shape := value_tensor(v).shape) is None else list(shape),
                "time_axis": axes[v.name].time,
                "batch_axis": axes[v.name].batch,
            }
            for v in infos
        ]

    return {
        "kind": "onnx model",
        "file": str(path),
        "producer": " ".join(filter(None, (model.producer_name, model.producer_version))),
        "ir_version": model.ir_version,
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "nodes": dict(Counter(f"{n.domain}::{n.op_type}" if n.domain else n.op_type for n in walk_nodes(model))),
        "flashrnn": nodes,
        "standard_recurrent": [{"name": n.name, "op": n.op_type} for n in walk_nodes(model) if is_standard_rnn(n)],
        "functions": [f"{f.domain}::{f.name}" for f in model.functions],
        "parameters": parameters(model),
        "macs_per_step": sum(node["macs_per_step"] for node in nodes),
        "inputs": values(free_inputs(model.graph)),
        "outputs": values(model.graph.output),
        "states": state_pairs(model),
        "engines": engines(model),
        "warnings": [warning] if (warning := double_install()) else [],
    }


def node_facts(spec: RNNSpec) -> dict[str, Any]:
    """The fields of a spec under their own names, and its multiply-accumulates per step and row."""
    return {"op": spec.op_type, **{f.name: getattr(spec, f.name) for f in fields(spec)}} | {
        "macs_per_step": spec.macs_per_step
    }


def parameters(model: onnx.ModelProto) -> int:
    """Elements of all float weights: initializers and Constant nodes."""
    weights = [w for graph in walk_graphs(model.graph) for w in graph.initializer]
    weights += [a.t for n in walk_nodes(model) if n.op_type == "Constant" for a in n.attribute if a.name == "value"]
    floats = ("float64", "float32", "float16", "bfloat16")
    return sum(int(np.prod(w.dims, dtype=np.int64)) for w in weights if dtype_name(w.data_type) in floats)


def engines(model: onnx.ModelProto) -> dict[str, str]:
    """Which engines can run the model, and with what."""
    used = {node.op_type for node in walk_nodes(model) if is_flashrnn(node)}
    if not used:
        return {"onnxruntime": "yes, no FlashRNN op inside", "tensorrt": "as far as its parser knows the operators"}
    bodies = {f.name for f in model.functions if f.domain == DOMAIN}
    opset = opset_of(model)
    without = "yes, on the function body" if used <= bodies else "only with a plugin library: the file has no body"
    return {
        "onnxruntime": f"{without} (opset {opset}, IR {model.ir_version}); fast with a plugin library (--plugins)",
        "tensorrt": "with a plugin library, loaded before the model is parsed",
    }


def double_install() -> str:
    """A warning where both ONNX Runtime packages are installed: they overwrite each other's files."""
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    found = [
        f"{package} {installed[package]}" for package in ("onnxruntime", "onnxruntime-gpu") if package in installed
    ]
    if len(found) < 2:
        return ""
    return f"{' and '.join(found)} are both installed and overwrite each other: pip uninstall both, then install one"
