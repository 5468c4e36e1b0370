"""Modules with example arguments for end_to_end.py, in the form that ``flashrnn-deploy export`` takes."""

from __future__ import annotations

import torch
from torch import nn

from flashrnn_deploy.nn import MultiHeadRNN


def heads() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A layer of several heads, as the README has it."""
    torch.manual_seed(0)
    return MultiHeadRNN(64, 256, num_heads=4, cell="slstm", batch_first=True), (torch.zeros(1, 10, 64),)


def stack() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The reported case: its "fast" path was slower than PyTorch, and nothing said so."""
    torch.manual_seed(0)
    return Outputs(nn.LSTM(293, 128, num_layers=2, bidirectional=True)), (torch.zeros(60, 32, 293),)


class Outputs(nn.Module):
    """The hidden sequence of a layer, without its final states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)[0]
        return y
