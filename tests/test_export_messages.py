"""What an export says where torch's own words would not help: the axis, submodule or option, in one line."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.tracing import first_line


def test_a_quantised_layer_is_named() -> None:
    net = nn.Sequential(nn.Identity(), torch.ao.nn.quantized.dynamic.Linear(4, 3))
    with pytest.raises(
        FlashRNNError, match=r"'1' in Sequential is quantised \(torch.ao.nn.quantized.dynamic.*before its"
    ):
        export(net, (torch.zeros(7, 3, 4),))


def test_a_long_message_is_cut_between_words() -> None:
    text = first_line(ValueError("several words " * 100))
    assert text.startswith("ValueError: several words")
    assert text.endswith(("several ...", "words ..."))
    assert len(text) < 320


class Spectrogram(nn.Module):
    """[B, 1, F, T] -> [B, T, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv2d(1, 3, 3, padding=1), nn.GRU(18, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(self.conv(x).permute(0, 3, 1, 2).flatten(2))[0]
        return y


def test_an_axis_that_the_default_rule_takes_for_time() -> None:
    args = (torch.randn(2, 1, 6, 9),)
    with pytest.raises(
        FlashRNNError, match=r"'time', has 1 as in the example: .*--static x:1, .*--dynamic x:AXIS=time"
    ):
        export(Spectrogram(), args)
    report = export(Spectrogram(), args, static=["x:1"], dynamic=["x:3=time"]).report
    assert report["outputs"][0]["shape"] == ["batch", "time", 5]


class Waveform(nn.Module):
    """[B, samples] -> [B, frames, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rnn = nn.Conv1d(1, 4, 8, 4), nn.GRU(4, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(self.conv(x[:, None]).transpose(1, 2))[0]
        return y


def test_a_waveform_of_fixed_length_is_noted() -> None:
    args = (torch.randn(2, 160),)
    (note,) = [n for n in export(Waveform(), args).report["warnings"] if "39 steps" in n]
    assert note == "rnn.l0 runs 39 steps whatever is fed: x:1 keeps the example's size, 160 (--dynamic x:1=time)"
    report = export(Waveform(), args, dynamic=["x:1=time"]).report
    assert report["inputs"][0]["shape"] == ["batch", "time"]
    assert not [n for n in report["warnings"] if "steps" in n]
