"""The sLSTM cell of the xlstm package, version 2; its layers and blocks around the cell stay as they are.

A cell is read through its own ``_int2ext`` functions, so that cells of every backend are alike. The package
is not imported here: a cell that exists has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import weights
from flashrnn_deploy.exporters.layer_calls import LayerCall, record
from flashrnn_deploy.exporters.registry import register
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.recurrence import call_op

_MODULE = "xlstm.blocks.slstm.cell"
_INPUTS = {"BSGNH": 1, "SBGNH": 0}
"""Shapes of the input -> layout of the op. ``S`` steps, ``G`` gates, ``N`` heads, ``H`` head_dim in that package."""
_OUTPUTS = ("BNSH", "SBH", "BSH", "SBNH")


@register(f"{_MODULE}.sLSTMCell_vanilla")
@register(f"{_MODULE}.sLSTMCell_cuda")
def slstm_cell(cell: Any) -> nn.Module:
    """``sLSTMCell`` of either backend, with the function "slstm" or "lstm"."""
    config = cell.config
    for name, allowed in (("forward_clipval", (None,)), ("input_shape", _INPUTS), ("output_shape", _OUTPUTS)):
        if (value := getattr(config, name)) not in allowed:
            raise FlashRNNError(f"sLSTMCellConfig.{name}={value!r} is not supported")
    if config.function not in ("slstm", "lstm"):
        raise FlashRNNError(f"sLSTMCellConfig.function={config.function!r} is not supported")
    return SLSTMCell(cell)


class SLSTMCell(nn.Module):
    """``forward(input, state=None, lengths=None)`` of the cell; ``lengths`` is ignored, as it is there."""

    records_calls = True
    flashrnn_path = ""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        config = cell.config
        self.input_layout, self.output_shape = _INPUTS[config.input_shape], config.output_shape
        self.spec = RNNSpec(config.function, config.num_heads, config.head_dim, layout=self.input_layout)
        r, b = weights.of_xlstm_cell(
            cell._recurrent_kernel_int2ext(cell._recurrent_kernel), cell._bias_int2ext(cell._bias)
        )
        self.register_buffer("weight_hh", r.clone())
        self.register_buffer("bias", b.clone())

    def forward(self, input: Tensor, state: Tensor | None = None, lengths: Any = None) -> tuple[Tensor, Tensor]:
        H, D, S = self.spec.num_heads, self.spec.head_dim, self.spec.definition.num_states
        if input.dim() != 3 or input.shape[-1] != self.spec.definition.num_gates * H * D:
            raise FlashRNNError(f"{self.flashrnn_path}: the input must be [., ., {4 * H * D}], not {list(input.shape)}")
        wx = weights.gates_innermost(input, self.spec.definition.num_gates)
        B = input.shape[1 - self.input_layout]
        initial = input.new_zeros(S, 1, B, H * D) if state is None else state.unsqueeze(1)
        y, final = call_op(
            self.spec, wx, self.get_buffer("weight_hh").to(wx.dtype), self.get_buffer("bias"), None, initial
        )
        after = final.squeeze(1).to(input.dtype)
        given = [] if state is None else [state]
        batch_axis = 1 - self.input_layout
        record(LayerCall(self.flashrnn_path, ("state",), given, [after], input, batch_axis, 1 - batch_axis, 1))
        return self._arrange(y), after

    def _arrange(self, y: Tensor) -> Tensor:
        """y in the layout of the input -> ``output_shape``."""
        H, D = self.spec.num_heads, self.spec.head_dim
        if self.output_shape == "BNSH":
            return _heads(y if self.input_layout else y.transpose(0, 1), H, D).transpose(1, 2)
        batch_first = self.output_shape == "BSH"
        y = y if batch_first == bool(self.input_layout) else y.transpose(0, 1)
        return _heads(y, H, D) if self.output_shape == "SBNH" else y


def _heads(y: Tensor, H: int, D: int) -> Tensor:
    return y.reshape(*y.shape[:-1], H, D)


def runnable(module: nn.Module) -> nn.Module:
    """``module`` with CUDA cells replaced by vanilla ones where there is no GPU: it can then be called."""
    package: Any = sys.modules.get(_MODULE)
    if package is None or torch.cuda.is_available():
        return module
    if type(module) is package.sLSTMCell_cuda:
        return _vanilla(package, module)
    for parent in list(module.modules()):
        for name, cell in list(parent.named_children()):
            if type(cell) is package.sLSTMCell_cuda:
                setattr(parent, name, _vanilla(package, cell))
    return module


def _vanilla(package: Any, cell: Any) -> nn.Module:
    import copy

    vanilla: Any = package.sLSTMCell_vanilla(copy.deepcopy(cell.config)).to(cell._bias)
    with torch.no_grad():
        kernel = cell._recurrent_kernel_int2ext(cell._recurrent_kernel.detach())
        vanilla._recurrent_kernel_.copy_(vanilla._recurrent_kernel_ext2int(kernel))
        vanilla._bias_.copy_(vanilla._bias_ext2int(cell._bias_int2ext(cell._bias.detach())))
    result: nn.Module = vanilla.eval()
    return result
