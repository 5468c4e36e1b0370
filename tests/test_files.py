"""Files in, files out: what is refused, and that a failure leaves nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import models
import numpy as np
import onnx
import pytest
from ml_dtypes import bfloat16

from flashrnn_deploy import files
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec

MODEL = models.network(RNNSpec("gru", 1, 4))


NOT_UTF8 = MODEL.SerializeToString().replace(b"project", b"proj\xff\xfft")


def test_a_model_comes_back(tmp_path: Path) -> None:
    assert files.load_model(models.save(MODEL, tmp_path / "m.onnx")) == MODEL


@pytest.mark.parametrize("content", [b"", b"hello, this is text", b"\x93NUMPY" + b"\0" * 100, b"\x08\x08", NOT_UTF8])
def test_what_is_not_a_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    with pytest.raises(FlashRNNError, match="is not an ONNX file"):
        files.load_model(path)


def test_a_truncated_model(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(MODEL.SerializeToString()[:-400])
    with pytest.raises(FlashRNNError, match="not an ONNX file"):
        files.load_model(path)


def test_unreadable_models(tmp_path: Path) -> None:
    with pytest.raises(FlashRNNError, match="No such file"):
        files.load_model(tmp_path / "none.onnx")
    with pytest.raises(FlashRNNError, match="directory"):
        files.load_model(tmp_path)


def test_external_data(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    copy = onnx.ModelProto()
    copy.CopyFrom(MODEL)
    onnx.save(copy, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    loaded = files.load_model(path)
    assert loaded.graph.initializer[0].raw_data == MODEL.graph.initializer[0].raw_data
    data = (tmp_path / "weights.bin").read_bytes()
    (tmp_path / "weights.bin").write_bytes(data[:-4])
    with pytest.raises(FlashRNNError, match=r"needs \d+ bytes and has \d+: .* cut off|exceeds available data"):
        files.load_model(path)  # the second by newer versions of onnx
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(FlashRNNError, match="external data"):
        files.load_model(path)


def test_weights_that_are_cut_off(tmp_path: Path) -> None:
    copy = onnx.ModelProto()
    copy.CopyFrom(MODEL)
    copy.graph.initializer[0].raw_data = copy.graph.initializer[0].raw_data[:-4]
    with pytest.raises(FlashRNNError, match=r"the weight '\w+' needs \d+ bytes and has \d+: .* cut off"):
        files.load_model(models.save(copy, tmp_path / "m.onnx"))


def test_metadata() -> None:
    assert files.json_metadata(MODEL, "flashrnn.states") == {"state0": "state1"}
    assert files.json_metadata(MODEL, "other") == {}
    for value, message in (("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[1]", "not a JSON object")):
        copy = onnx.ModelProto()
        copy.metadata_props.add(key="flashrnn.states", value=value)
        with pytest.raises(FlashRNNError, match=message):
            files.json_metadata(copy, "flashrnn.states")


def test_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.arange(3))
    assert files.load_array(path).tolist() == [0, 1, 2]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(FlashRNNError, match=r"is not a .npy file"):
        files.load_array(path)
    path.write_text("1, 2, 3")
    with pytest.raises(FlashRNNError, match=r"is not a .npy file"):
        files.load_array(path)
    np.save(path, np.array([{}, None]), allow_pickle=True)
    with pytest.raises(FlashRNNError, match="Python objects"):
        files.load_array(path)
    with pytest.raises(FlashRNNError, match="No such file"):
        files.load_array(tmp_path / "none.npy")
    with pytest.raises(FlashRNNError, match="directory"):
        files.load_array(tmp_path)


def test_safe_names() -> None:
    hostile = ["y", "Y", "../x", "/etc/passwd", "a\\b", "..", ".hidden", "nul", "x_2", "ü", "", "y" * 300, "onnx::Y_1"]
    names = files.safe_names(hostile)
    assert names[0] == "y"
    assert len({n.lower() for n in names}) == len(hostile)
    for name in names:
        assert files._PLAIN_NAME.fullmatch(name)
        assert name.lower() not in files._RESERVED
    assert files.safe_names(["a/b", "a_b", "a_b_0", "A_B_0"]) == ["a_b_0", "a_b", "a_b_0_2", "A_B_0_3"]


def test_printable() -> None:
    assert files.printable("a\x1b[31mb\nü") == "a\\x1b[31mb\\nü"


def test_new_files_makes_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b"
    for text in ("one", "two"):
        with files.new_files(target) as folder:
            (folder / "file").write_text(text)
        assert (target / "file").read_text() == text
    (target / "other").write_text("stays")
    with files.new_files(target) as folder:
        (folder / "file").write_text("three")
    assert sorted(p.name for p in target.iterdir()) == ["file", "other"]


def stop_half_way(target: Path) -> None:
    with files.new_files(target) as folder:
        (folder / "file").write_text("half")
        raise RuntimeError("stop")


@pytest.mark.parametrize("existing", [False, True])
def test_new_files_leaves_nothing_after_a_failure(tmp_path: Path, existing: bool) -> None:
    target = tmp_path / "a" / "b"
    if existing:
        target.mkdir(parents=True)
        (target / "file").write_text("old")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RuntimeError, match="stop"):
        stop_half_way(target)
    assert sorted(tmp_path.rglob("*")) == before
    if existing:
        assert (target / "file").read_text() == "old"


def test_directories_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FlashRNNError, match="cannot write into"), files.new_files(target):
            pytest.fail("the block must not run")
    (tmp_path / "full" / "y.npy").mkdir(parents=True)
    (tmp_path / "full" / "y.npy" / "inside").write_text("")
    with pytest.raises(FlashRNNError, match="cannot write into"), files.new_files(tmp_path / "full") as folder:
        (folder / "y.npy").write_text("")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["y.npy"]


def test_new_file(tmp_path: Path) -> None:
    target = tmp_path / "sub" / "m.onnx"
    with files.new_file(target) as path:
        path.write_text("model")
        assert not target.exists()
    assert target.read_text() == "model"
    with pytest.raises(FlashRNNError, match="it is a directory"), files.new_file(tmp_path / "sub"):
        pytest.fail("the block must not run")


def test_new_file_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    link = tmp_path / "m.onnx"
    link.symlink_to(tmp_path / "store" / "real.onnx")
    for text in ("first", "second"):  # the link dangles before the first
        with files.new_file(link) as path:
            path.write_text(text)
        assert link.is_symlink()
        assert (tmp_path / "store" / "real.onnx").read_text() == text


def test_a_device_is_never_replaced(tmp_path: Path) -> None:
    """A pipe stands for /dev/null, which root could rename over."""
    os.mkfifo(tmp_path / "pipe.onnx")
    with pytest.raises(FlashRNNError, match="it is not a regular file"), files.new_file(tmp_path / "pipe.onnx"):
        pytest.fail("the block must not run")
    with pytest.raises(FlashRNNError, match="is not a regular file there"), files.new_files(tmp_path) as folder:
        (folder / "pipe.onnx").write_text("model")
    assert (tmp_path / "pipe.onnx").is_fifo()


def test_write_outputs(tmp_path: Path) -> None:
    outputs = {"../y": np.arange(3, dtype=np.int64), "z": np.array([[1.5]], bfloat16)}
    report = files.write_outputs(tmp_path, outputs, {"backend": "b"})
    assert report == json.loads((tmp_path / "outputs.json").read_text())
    assert report["backend"] == "b"
    first, second = report["outputs"]
    assert first == {"name": "../y", "file": "y_0.npy", "dtype": "int64", "shape": [3]}
    assert second == {"name": "z", "file": "z.npy", "dtype": "bfloat16", "shape": [1, 1]}
    assert np.load(tmp_path / "y_0.npy").tolist() == [0, 1, 2]
    assert np.load(tmp_path / "z.npy").dtype == np.float32
