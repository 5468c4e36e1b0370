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

_CURE = "flashrnn-deploy build-plugins MODEL --gpu local builds what there is for a model"


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
        return f"{path} holds no CUDA kernels: the FlashRNN ops run on the CPU; {_CURE}"
    here = [k for k in facts.get("kernels", ()) if capability in (None, k["compute_capability"])]
    slow = [name for name, spec in nodes.items() if not kernel_table.covering(here, spec)]
    if not slow:
        return ""
    return (
        f"{path} holds no kernel of its own for {_listed(slow)} on this GPU, and the slower alternating kernel runs "
        f"{'it' if len(slow) == 1 else 'them'}; {_CURE}"
    )


def _listed(names: Iterable[str], most: int = 3) -> str:
    shown = list(names)
    more = f" and {len(shown) - most} more nodes" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more
