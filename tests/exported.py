"""An exported module beside itself: the file in ONNX Runtime at several sizes, and PyTorch as the judge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.calls import tensors_of
from flashrnn_deploy.exporters.torch_export import Export
from flashrnn_deploy.exporters.validate import to_numpy

torch.set_num_threads(1)


def outputs_of(result: Export, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """The file's outputs for the module's arguments."""
    names = [i["name"] for i in result.report["inputs"]]
    runner = make_runner("onnxruntime", result.model)
    return runner.infer(dict(zip(names, map(to_numpy, tensors_of(args)), strict=True)))


def check(
    module: nn.Module, traced: tuple[Any, ...], others: Sequence[tuple[Any, ...]], atol: float = 1e-5, **options: Any
) -> Export:
    """Export with one set of arguments, compare with the module at others; every output has the module's shape."""
    module = module.eval()
    result = export(module, traced, **options)
    for args in others:
        actual = outputs_of(result, args)
        with torch.no_grad():
            expected = tensors_of(module(*args))
        assert len(actual) == len(expected)
        for (name, array), tensor in zip(actual.items(), expected, strict=True):
            assert array.shape == tuple(tensor.shape), name
            np.testing.assert_allclose(array, to_numpy(tensor), atol=atol, rtol=0, err_msg=name)
    return result


def rows(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on the seed and the shape only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(module: nn.Module, seed: int = 0, scale: float = 0.7) -> nn.Module:
    """Weights larger than at the start of training, so that gates, biases and their order matter."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale / max(1, parameter.dim()) ** 0.5
    return module.eval()


def rare(*values: Any) -> Any:
    """A row of parameters for the full run only."""
    return pytest.param(*values, marks=pytest.mark.full)


def ops(result: Export) -> list[str]:
    return [node["op"] for node in result.report["nodes"]]
