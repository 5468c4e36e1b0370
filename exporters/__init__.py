"""From PyTorch modules and ONNX graphs to the FlashRNN op. Installed as ``flashrnn_deploy.exporters``."""

from __future__ import annotations

from typing import Any

__all__ = ["EagerRunner", "convert_file", "export", "export_file", "factory_judge", "load_factory"]

_HOME = {
    "EagerRunner": "eager",
    "convert_file": "convert",
    "export": "torch_export",
    "export_file": "torch_export",
    "factory_judge": "validate",
    "load_factory": "factory",
}


def __getattr__(name: str) -> Any:
    """Import on first use: the exporters of PyTorch need torch, the one of ONNX files does not."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
