"""The engines that kernels.py compares with. Each is None where it does not apply or is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from flashrnn_deploy.op import RNNSpec

NAMES = ("cudnn_fp16", "cudnn_same", "flashrnn", "ort")
HAS_PROJECTION = {"cudnn_fp16": True, "cudnn_same": True, "flashrnn": False, "ort": True}

Timer = Callable[..., float]


def versions() -> str:
    installed = [name for name in ("onnxruntime", "flashrnn") if importlib.util.find_spec(name)]
    rest = [f"{name} {getattr(importlib.import_module(name), '__version__', '?')}" for name in installed]
    return ", ".join([f"cuDNN {torch.backends.cudnn.version()}", *rest])


def measure(spec: RNNSpec, B: int, T: int, timer: Timer) -> dict[str, float | None]:
    return {
        "cudnn_fp16": cudnn(spec, B, T, torch.float16, timer),
        "cudnn_same": None if spec.dtype == "float16" else cudnn(spec, B, T, getattr(torch, spec.dtype), timer),
        "flashrnn": flashrnn(spec, B, T, timer),
        "ort": onnxruntime(spec, B, T, timer),
    }


def cudnn(spec: RNNSpec, B: int, T: int, dtype: torch.dtype, timer: Timer) -> float | None:
    """torch.nn on packed weights; dense, so only for one head. Input as wide as the output."""
    kinds: dict[str, Any] = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "elman": torch.nn.RNN}
    if spec.cell not in kinds or spec.num_heads > 1:
        return None
    width = spec.num_directions * spec.head_dim
    layer = kinds[spec.cell](width, spec.head_dim, bidirectional=spec.num_directions == 2).to("cuda", dtype)
    layer.flatten_parameters()
    x = torch.randn(T, B, width, device="cuda", dtype=dtype)
    with torch.inference_mode():
        return timer(lambda: layer(x))


def flashrnn(spec: RNNSpec, B: int, T: int, timer: Timer) -> float | None:
    """FlashRNN's fused kernel, bfloat16; it compiles at first use."""
    if importlib.util.find_spec("flashrnn") is None or spec.dtype != "bfloat16" or spec.num_directions > 1:
        return None
    try:
        from flashrnn import flashrnn as op  # type: ignore[import-not-found]

        G, H, D = spec.definition.num_gates, spec.num_heads, spec.head_dim
        cuda = {"device": "cuda", "dtype": torch.bfloat16}
        wx, r = torch.randn(B, T, G, H, D, **cuda), torch.randn(G, H, D, D, **cuda) / D**0.5
        b = torch.randn(G, H, D, **cuda)
        with torch.inference_mode():
            return timer(lambda: op(wx, r, b, function=spec.cell, backend="cuda_fused", dtype="bfloat16"), 5)
    except Exception as error:
        print(
            f"  FlashRNN, {spec.cell} {spec.num_heads}x{spec.head_dim} B{B}: {type(error).__name__}: {str(error)[:150]}"
        )
        return None


def onnxruntime(spec: RNNSpec, B: int, T: int, timer: Timer) -> float | None:
    """ONNX Runtime's own node on its CUDA execution provider, device tensors bound."""
    ops = {"lstm": "LSTM", "gru": "GRU", "elman": "RNN"}
    if spec.cell not in ops or spec.num_heads > 1 or spec.dtype == "bfloat16":
        return None
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return None
    N, D, G = spec.num_directions, spec.head_dim, spec.definition.num_gates
    width, dtype = N * D, np.dtype(spec.dtype)
    element = TensorProto.FLOAT if spec.dtype == "float32" else TensorProto.FLOAT16
    rng = np.random.default_rng(0)
    weights = {
        name: (rng.standard_normal((N, G * D, columns)) / columns**0.5).astype(dtype)
        for name, columns in (("w", width), ("r", D))
    }
    direction = "bidirectional" if N == 2 else "forward"
    extra = {"linear_before_reset": 1} if spec.cell == "gru" else {}
    node = helper.make_node(ops[spec.cell], ["x", "w", "r"], ["y"], hidden_size=D, direction=direction, **extra)
    graph = helper.make_graph(
        [node], "peer", [helper.make_tensor_value_info("x", element, [T, B, width])],
        [helper.make_tensor_value_info("y", element, [T, N, B, D])],
        [numpy_helper.from_array(v, k) for k, v in weights.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CUDAExecutionProvider"])
    x = ort.OrtValue.ortvalue_from_numpy(rng.standard_normal((T, B, width)).astype(dtype), "cuda", 0)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", x)
    binding.bind_output("y", "cuda", 0)

    def run() -> None:
        session.run_with_iobinding(binding)  # waits for the device before it returns

    return timer(run, 5)
