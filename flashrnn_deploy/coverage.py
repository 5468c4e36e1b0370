"""Which FlashRNN nodes of a model a plugin library holds CUDA kernels for, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from flashrnn_deploy import gpus, kernel_table
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.info import library_info
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.shapes import flashrnn_nodes, node_label, tensors_of

_CURE = "flashrnn-deploy build-plugins MODEL --gpu {} builds what there is for a model"
_CURE_HERE = _CURE.format("local")


def cuda_notes(model: onnx.ModelProto, plugins: Sequence[Path]) -> list[str]:
    """What to tell a user who runs ``model`` on this machine's GPU with ``plugins``; nothing where all is as built for.

    Raises:
        FlashRNNError: a library does not load, or a node breaks the op's contract.
    """
    nodes = {node.name or node_label(node): spec for node, spec in flashrnn_nodes(model, tensors_of(model))}
    try:
        capability = gpus.get("local").compute_capability
    except FlashRNNError:  # the runtime has found a GPU that the driver library does not describe: judge by the layers
        capability = None
    return [text for path in plugins if (text := shortfall(path, library_info(path), nodes, capability))]


def shortfall(path: Path, facts: Mapping[str, Any], nodes: Mapping[str, RNNSpec], capability: int | None) -> str:
    """What a library with these ``facts`` (``info.library_info``) lacks for ``nodes`` on a device, in one sentence."""
    if not nodes:
        return ""
    if not facts.get("cuda_architectures"):
        return f"{path} holds no CUDA kernels: the FlashRNN ops run on the CPU; {_CURE_HERE}"
    slow = _slow(facts, nodes, capability)
    return f"{_runs_slowly(path, slow, 'this GPU')}; {_CURE_HERE}" if slow else ""


def engine_shortfall(
    path: Path, facts: Mapping[str, Any], nodes: Mapping[str, RNNSpec], capabilities: Sequence[str]
) -> str:
    """What a library lacks for ``nodes`` in an engine for ``capabilities`` ("8.6"), in one sentence.

    Nothing is said of a library that does not say which CUDA kernels it holds.
    """
    if not facts.get("cuda_architectures"):
        return ""
    slow = {name: found for name in capabilities if (found := _slow(facts, nodes, int(name.replace(".", ""))))}
    names = dict.fromkeys(name for found in slow.values() for name in found)
    where = f"compute capability {' or '.join(slow)}"
    return f"{_runs_slowly(path, list(names), where)}; {_CURE.format('GPU')}" if slow else ""


def _slow(facts: Mapping[str, Any], nodes: Mapping[str, RNNSpec], capability: int | None) -> list[str]:
    here = [k for k in facts.get("kernels", ()) if capability in (None, k["compute_capability"])]
    return [name for name, spec in nodes.items() if not kernel_table.covering(here, spec)]


def _runs_slowly(path: Path, names: Sequence[str], where: str) -> str:
    return (
        f"{path} holds no kernel of its own for {_listed(names)} on {where}, and the slower alternating kernel runs "
        f"{'it' if len(names) == 1 else 'them'}"
    )


def _listed(names: Iterable[str], most: int = 3) -> str:
    shown = list(names)
    more = f" and {len(shown) - most} more nodes" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
