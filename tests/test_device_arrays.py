"""Arrays of other libraries as inputs of the TensorRT runner: DLPack and ``__cuda_array_interface__``, both ways."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import engines
import fake_tensorrt
import models
import numpy as np
import pytest
import torch
from engines import LSTM, expect, feeds, same

from flashrnn_deploy.backends import dlpack
from flashrnn_deploy.backends.device import DeviceArray
from flashrnn_deploy.backends.trt import TrtRunner
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> fake_tensorrt.Cuda:
    return fake_tensorrt.install(monkeypatch)


class Tensor:
    """A device array of another library: an address in the fake's memory, under one of the two protocols."""

    def __init__(self, array: DeviceArray, protocol: str, offset: int = 0, strides: Any = None) -> None:
        self.array = array
        address = array.address + offset
        if protocol == "dlpack":
            self.__dlpack_device__ = lambda: (2, 0)
            self.__dlpack__ = lambda stream=None: dlpack.write(array, address, array.shape, array.dtype, (2, 0))
        else:
            facts = {"shape": array.shape, "typestr": array.dtype.str, "data": (address, True), "version": 3}
            self.__cuda_array_interface__ = facts | {"strides": strides, "stream": 1}


@pytest.mark.parametrize("protocol", ["dlpack", "interface", "ours"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_device_arrays(cuda: fake_tensorrt.Cuda, tmp_path: Path, protocol: str, dtype: str) -> None:
    """Arrays on the GPU are read where they lie: nothing of them is copied to the host or back."""
    spec = RNNSpec("lstm", 2, 4, dtype=dtype)
    model = models.network(spec)
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine"))
    arrays = feeds(4, 2, spec)
    device = runner._device
    with device.current():
        there = {name: device.upload(array) for name, array in arrays.items()}
        device.stream.synchronize()
    cuda.copies.clear()
    given = there if protocol == "ours" else {name: Tensor(a, protocol) for name, a in there.items()}
    same(runner.infer(given), expect(model, arrays))
    assert {kind for kind, _ in cuda.copies} == {"dtoh"}


def test_device_arrays_that_do_not_fit(cuda: fake_tensorrt.Cuda, tmp_path: Path) -> None:
    """Off the alignment that TensorRT wants: copied on the GPU. Strided: refused."""
    model = models.network(LSTM)
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine"))
    arrays, device = feeds(4, 2), runner._device
    with device.current():
        padded = device.upload(np.concatenate([np.zeros(4, np.float32), arrays["x"].reshape(-1)]))
        device.stream.synchronize()
    x = DeviceArray(device, padded, padded.address, arrays["x"].shape, np.dtype(np.float32))
    for protocol in ("dlpack", "interface"):
        cuda.copies.clear()
        same(runner.infer(arrays | {"x": Tensor(x, protocol, offset=16)}), expect(model, arrays))
        assert ("dtod", x.nbytes) in cuda.copies
    with pytest.raises(FlashRNNError, match=r"shape \[4, 2, 5\] do not lie in C order"):
        runner.infer(arrays | {"x": Tensor(x, "interface", strides=(4, 16, 32))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_host_dlpack(cuda: fake_tensorrt.Cuda, tmp_path: Path, dtype: torch.dtype) -> None:
    """A torch tensor on the CPU, a NumPy one, and what torch makes of ours: the structures are those of DLPack."""
    spec = RNNSpec("lstm", 2, 4, dtype=str(dtype).removeprefix("torch."))
    model = models.network(spec)
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine"))
    arrays = feeds(4, 2, spec)
    x = torch.from_numpy(arrays["x"].astype(np.float32)).to(dtype)
    same(runner.infer(arrays | {"x": x}), expect(model, arrays))
    with pytest.raises(FlashRNNError, match="do not lie in C order"):
        runner.infer(arrays | {"x": x.expand(4, 2, 5).transpose(0, 1)})
    with pytest.raises(FlashRNNError, match=r"an array of shape \[4, 2, 5\] cannot be fed: .*grad"):
        runner.infer(arrays | {"x": x.clone().requires_grad_()})
    array = arrays["x"]
    capsule = dlpack.write(array, array.ctypes.data, array.shape, array.dtype, (dlpack.CPU, 0))
    back = torch.utils.dlpack.from_dlpack(capsule)
    assert back.dtype == dtype
    torch.testing.assert_close(back, x)


def test_dlpack_keeps_memory_as_long_as_needed() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    before = len(dlpack._alive)
    capsule = dlpack.write(array, array.ctypes.data, array.shape, array.dtype, (dlpack.CPU, 0))
    assert len(dlpack._alive) == before + 1
    del capsule  # nobody took it
    assert len(dlpack._alive) == before
    tensor = torch.utils.dlpack.from_dlpack(
        dlpack.write(array, array.ctypes.data, array.shape, array.dtype, (dlpack.CPU, 0))
    )
    assert len(dlpack._alive) == before + 1
    assert tensor.sum() == 15
    del tensor
    gc.collect()
    assert len(dlpack._alive) == before
