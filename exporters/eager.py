"""The module of ``FILE.py:FACTORY`` as an engine beside the file that was exported from it: eager PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch.utils import _pytree as pytree

from flashrnn_deploy.cells import Array
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters.calls import call, flat_call, tensors_of
from flashrnn_deploy.exporters.factory import load_factory
from flashrnn_deploy.exporters.validate import to_numpy, to_torch
from flashrnn_deploy.files import printable
from flashrnn_deploy.graph import free_inputs
from flashrnn_deploy.streaming import length_inputs


class EagerRunner:
    """A module in eval mode, in the dtype of the file and without TF32.

    Args:
        source: "FILE.py:FACTORY".
        model: the file that was exported from it: names and order of inputs and outputs.
        dtype: the float dtype of the file.
        weights: a state dict to load into the module.
        device: "cpu" or "cuda".
        threads: of the CPU, until ``close``; 0 leaves the choice to PyTorch.

    Raises:
        FlashRNNError: as ``load_factory``; the model has fewer inputs than the factory's arguments have tensors; or
            there is no such device.
    """

    def __init__(
        self,
        source: str,
        model: onnx.ModelProto,
        dtype: str,
        weights: Path | None = None,
        device: str = "cpu",
        threads: int = 0,
    ) -> None:
        example = load_factory(source, weights)
        names = [value.name for value in free_inputs(model.graph)]
        count = len(tensors_of(example.args))
        if len(names) < count:
            listed = ", ".join(map(printable, names))
            raise FlashRNNError(f"{source} takes {count} tensors, the model has {len(names)} inputs: {listed}")
        if device == "cuda" and not torch.cuda.is_available():
            raise FlashRNNError(f"--device cuda: PyTorch {torch.__version__} sees no GPU; leave out --factory")
        self.inputs = names[:count]
        """Inputs of the file that are arguments; what follows are default states, which stay the module's own."""
        self._args, self._outputs = example.args, [value.name for value in model.graph.output]
        self._dtype, self._device = getattr(torch, dtype), device
        self._lengths = set(length_inputs(model))
        self._module = example.module.to(device, self._dtype)
        self._before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        if threads:
            torch.set_num_threads(threads)

    def bind(self, feeds: Mapping[str, Array]) -> EagerBinding:
        """Put the feeds on the device, once, for any number of calls; see ``backends.Bound``.

        Raises:
            FlashRNNError: the module's forward does not take them.
        """
        tensors = iter([self._tensor(name, feeds[name]) for name in self.inputs])
        args = pytree.tree_map(lambda leaf: next(tensors) if isinstance(leaf, torch.Tensor) else leaf, self._args)
        call(self._module, args)  # timed calls are bare: this one tells in a line what the module does not take
        return EagerBinding(self._module, args, self._outputs, self._device)

    def _tensor(self, name: str, array: Array) -> torch.Tensor:
        tensor = to_torch(array)
        if (
            tensor.is_floating_point()
        ):  # states too: in a half-precision file they are float32, torch's layers want half
            tensor = tensor.to(self._dtype)
        return tensor if name in self._lengths else tensor.to(self._device)  # torch packs by lengths on the CPU

    def close(self) -> None:
        """Give torch's settings back."""
        threads, torch.backends.cudnn.allow_tf32 = self._before
        torch.set_num_threads(threads)


class EagerBinding:
    """A module and arguments on its device (see ``backends.Bound``)."""

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], outputs: list[str], device: str) -> None:
        self._module, self._args, self._outputs, self._device = module, args, outputs, device

    def run(self) -> None:
        """One call; the device has finished when it returns."""
        with torch.inference_mode():
            self._module(*self._args)
        if self._device == "cuda":
            torch.cuda.synchronize()

    def outputs(self) -> dict[str, Array]:
        """What a call gives, by the file's names; default states that the file exposes are not among them."""
        results = flat_call(self._module, self._args)
        if len(results) > len(self._outputs):
            raise FlashRNNError(f"the module gives {len(results)} tensors, the model {len(self._outputs)} outputs")
        return {name: to_numpy(tensor) for name, tensor in zip(self._outputs, results, strict=False)}
