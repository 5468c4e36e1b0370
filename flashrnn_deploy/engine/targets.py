"""Which GPUs an engine is for: that of the machine, or the targets of TensorRT-RTX, as far as the library has code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flashrnn_deploy import gpus, shared_library
from flashrnn_deploy.engine import api
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import printable
from flashrnn_deploy.info import library_info


def find_device(rtx: bool, gpu: str | None) -> gpus.GPU | None:
    """The GPU of this machine; None where there is none and none is needed."""
    wanted = gpus.get(gpu) if gpu is not None else None
    try:
        local = gpus.get("local")
    except FlashRNNError as error:
        if rtx:
            return None
        raise FlashRNNError(
            "TensorRT builds an engine on the GPU that is to run it, and there is none here: build it on that machine, "
            "or with --rtx"
        ) from error
    if wanted and not rtx and wanted.compute_capability != local.compute_capability:
        raise FlashRNNError(
            f"--gpu {gpu}: TensorRT builds for the GPU that it runs on, {local.product} of compute capability "
            f"{local.capability}, and {gpu} has {wanted.capability}: build it on that machine"
        )
    return local


def set_targets(
    trt: Any, config: Any, device: gpus.GPU | None, gpu: str | None, library: Path | None
) -> dict[str, Any]:
    """Tell TensorRT-RTX what to build for; what the sidecar says of it.

    Args:
        trt: the module.
        config: the builder's.
        device: what ``find_device`` gave.
        gpu: the name that the user gave.
        library: the FlashRNN library that the engine needs, None for none.

    Raises:
        FlashRNNError: there is no such target, or the library holds no code for it.
    """
    code = code_of(library) if library else None
    if not api.is_rtx(trt):
        assert device is not None
        _check_code(library, code, [device.capability])
        return {"compute_capability": device.capability}
    known = {n[2:-1] + "." + n[-1]: v for n, v in trt.ComputeCapability.__members__.items() if n.startswith("SM")}
    wanted = gpus.get(gpu) if gpu is not None else device
    targets = [wanted.capability] if wanted else [name for name in known if name != "7.5"]
    if wanted and targets[0] not in known:
        raise FlashRNNError(
            f"{api.name(trt)} has no target for {wanted.name} (compute capability {targets[0]}); it has "
            f"{', '.join(known)}: use TensorRT itself on that GPU, without --rtx"
        )
    if wanted is None and code:
        targets = [name for name in targets if runs_on(code, name)] or targets
    _check_code(library, code, targets)
    config.num_compute_capabilities = len(targets)
    for index, name in enumerate(targets):
        if not config.set_compute_capability(known[name], index):
            raise FlashRNNError(f"{api.name(trt)} refuses the target {name}")
    here = device is not None and wanted is not None and device.compute_capability == wanted.compute_capability
    return {"compute_capability": targets[0] if here else None, "targets": targets}


def check_products(trt: Any, network: Any, targets: Sequence[str]) -> None:
    """TensorRT-RTX has no float32 products for Turing ("FP32 GEMM is not supported", 1.7.1).

    Raises:
        FlashRNNError: the network has one, and 7.5 is among the targets; the layer is named.
    """
    kinds = (trt.LayerType.MATRIX_MULTIPLY, trt.LayerType.CONVOLUTION, trt.LayerType.EINSUM)
    if not api.is_rtx(trt) or "7.5" not in targets:
        return
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type in kinds and layer.get_output(0).dtype == trt.float32:
            raise FlashRNNError(
                f"{api.name(trt)} has no float32 products for compute capability 7.5, and {printable(layer.name)} is "
                "one: export the model with --dtype float16"
            )


def code_of(library: Path) -> list[str]:
    """The architectures that a plugin library has machine code for ("86", "90a"); empty where it does not say."""
    if not api.is_ours(shared_library.load(library)):
        return []
    return list(map(str, library_info(library).get("cuda_architectures") or []))


def runs_on(code: Sequence[str], capability: str) -> bool:
    """Whether machine code runs on a device of ``capability`` ("8.9"): that for its own or an older minor version.

    Code for an architecture with a letter ("90a") runs on that one alone. Source: CUDA C++ Programming Guide, "Binary
    Compatibility".
    """
    major, _, minor = capability.partition(".")
    for architecture in code:
        match = re.fullmatch(r"(\d+)(\d)([a-z]?)", architecture)
        if match and match[1] == major and (match[2] == minor if match[3] else match[2] <= minor):
            return True
    return False


def _check_code(library: Path | None, code: Sequence[str] | None, targets: Sequence[str]) -> None:
    missing = [name for name in targets if not runs_on(code, name)] if code else []
    if missing:
        there = ", ".join(f"{a[:-1]}.{a[-1]}" if a.isdigit() else a for a in code or ())
        raise FlashRNNError(
            f"the engine is for compute capability {' or '.join(missing)}, and the library {library} holds code for "
            f"{there} only: build another with: {api.BUILD_LIBRARY}"
        )
