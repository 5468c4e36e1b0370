"""The model of the quickstart: is the number of ones so far even or odd?

A task of pure state tracking: one bit of memory, flipped by every 1, over any number of steps. ``model`` is a factory
for ``flashrnn-deploy export parity.py:model -o parity.onnx``.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from flashrnn_deploy.nn import MultiHeadRNN


class Parity(nn.Module):
    """Bits [B, T, 1] -> scores of (even, odd) after every step [B, T, 2], and the final states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = MultiHeadRNN(1, 32, num_heads=4, cell="slstm", batch_first=True)
        self.scores = nn.Linear(32, 2)

    def forward(self, bits: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, states = self.rnn(bits, states)
        return self.scores(y), states


def model() -> tuple[nn.Module, tuple[Tensor, tuple[Tensor, ...]]]:
    """The module, with the weights of parity.pt where that file lies beside this one, and example arguments."""
    module = Parity()
    weights = Path(__file__).with_name("parity.pt")
    if weights.exists():
        module.load_state_dict(torch.load(weights, weights_only=True))
    return module, (torch.zeros(2, 16, 1), tuple(torch.zeros(1, 2, 32) for _ in range(4)))
