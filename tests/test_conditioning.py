"""A module that turns roundings into decisions is exported with a note; a wrong file of any other is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from flashrnn_deploy.backends.ort import OrtRunner
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.conditioning import sensitivity
from flashrnn_deploy.nn import MultiHeadRNN


class Wave(nn.Module):
    """Sines of the hidden states: where they are steep, a rounding decides."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.rnn = MultiHeadRNN(3, 8, num_heads=2, cell="gru")
        self.gain = gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rnn(x)[0]
        return torch.sin(self.gain * y)


def make(gain: float) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Wave(gain).half().eval(), (torch.randn(5, 2, 3).half(),)


def test_sensitivity_tells_the_two_apart() -> None:
    calm, steep = (max(sensitivity(*make(gain))) for gain in (1.0, 1e3))
    assert calm < 0.05
    assert steep > 0.5


def test_steep_module_is_exported_with_a_note() -> None:
    notes = export(*make(1e3)).report["warnings"]
    assert sum("compare the file on inputs of your own" in text for text in notes) >= 1
    assert not any("inputs of your own" in text for text in export(*make(1.0)).report["warnings"])


@pytest.mark.parametrize("gain", [1.0, 1e3])
def test_wrong_file_is_refused(monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    """Not even a steep module excuses what no rounding can explain."""
    infer = OrtRunner.infer
    monkeypatch.setattr(OrtRunner, "infer", lambda self, feeds: {n: a + 5 for n, a in infer(self, feeds).items()})
    with pytest.raises(FlashRNNError, match="does not compute what the module does"):
        export(*make(gain))


def test_integers_and_nan_do_not_count() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x * float("nan"), (x > 0).long()

    assert sensitivity(Two(), (torch.from_numpy(np.ones((2, 3), np.float32)),)) == [0.0, 0.0]
