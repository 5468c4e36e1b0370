"""``convert_file`` on whole files: names, imports, external data, errors, the report."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import onnx
import onnx_rnn
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import FLOAT, HD, INT64, B, feeds, if_model, info, lstm, model_of, plain_model, same_results
from onnx_rnn import convert

from flashrnn_deploy import FlashRNNError
from flashrnn_deploy.exporters import convert as convert_module
from flashrnn_deploy.exporters import onnx_files
from flashrnn_deploy.exporters.convert import convert_file
from flashrnn_deploy.op import is_flashrnn


def test_lookalikes_are_never_touched(tmp_path: Path) -> None:
    """Quantised LSTMs of other domains, an own domain's LSTM, and an RNN written as a Scan."""
    quantised = helper.make_node("DynamicQuantizeLSTM", ["X", "a"], ["Y1"], domain="com.microsoft", name="q")
    foreign = helper.make_node("LSTM", ["X", "W", "R"], ["Y2"], domain="my.ops", name="f")
    body = helper.make_graph(
        [helper.make_node("MatMul", ["h", "R"], ["rh"]), helper.make_node("Add", ["x", "rh"], ["h1"])],
        "b",
        [info("h", shape=[B, HD]), info("x", shape=[B, HD])],
        [info("h1", shape=[B, HD])],
    )
    scan = helper.make_node("Scan", ["h0", "X"], ["Y3"], body=body, num_scan_inputs=1, name="s")
    graph = helper.make_graph([quantised, foreign, scan], "g", [info(n) for n in ("X", "a", "W", "R", "h0")], [])
    graph.output.extend(info(n) for n in ("Y1", "Y2", "Y3"))
    source = model_of(graph)
    source.opset_import.extend([helper.make_opsetid("com.microsoft", 1), helper.make_opsetid("my.ops", 1)])
    model, report = convert(source, tmp_path)
    assert (report["rewritten"], report["left"], report["nodes"]) == (0, 0, [])
    assert "no LSTM, GRU or RNN node" in report["notes"][0]
    assert model == source


def test_a_mixed_file_keeps_what_it_does_not_convert(tmp_path: Path) -> None:
    """Foreign and duplicate imports, metadata, doc strings and other nodes are unchanged around the new node."""
    source = plain_model()
    foreign = helper.make_node("Strange", ["X"], ["S"], name="strange", domain="my.ops", doc_string="kept", level=3)
    source.graph.node.append(foreign)
    source.graph.output.append(info("S"))
    for domain, version in (("my.ops", 2), ("", 17), ("ai.onnx.ml", 3), ("my.ops", 2)):
        source.opset_import.append(helper.make_opsetid(domain, version))
    source.metadata_props.add(key="author", value="Zoë")
    source.graph.node[0].metadata_props.add(key="k", value="v")
    source.doc_string = source.graph.doc_string = "words"
    source.producer_name = "someone"
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == 1
    assert [n for n in model.graph.node if n.name == "strange"] == [foreign]
    imports = [(e.domain, e.version) for e in model.opset_import]
    assert imports == [*((e.domain, e.version) for e in source.opset_import), ("flashrnn", 1)]
    assert {p.key: p.value for p in model.metadata_props}["author"] == "Zoë"
    assert (model.doc_string, model.graph.doc_string, model.producer_name) == ("words", "words", "someone")


def test_duplicate_imports_survive_a_raise(tmp_path: Path) -> None:
    source = plain_model(13)
    source.opset_import.extend([helper.make_opsetid("ai.onnx", 13), helper.make_opsetid("ai.onnx.ml", 2)])
    source.metadata_props.add(key="author", value="me")
    source.graph.node[0].doc_string = "gone with its node"
    source.graph.node.append(helper.make_node("Relu", ["Y"], ["Z"], name="last", doc_string="kept"))
    source.graph.output.append(info("Z", shape=("t", 1, "b", HD)))
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == 1
    imports = [(e.domain, e.version) for e in model.opset_import]
    assert imports == [("", 17), ("ai.onnx", 17), ("ai.onnx.ml", 2), ("flashrnn", 1)]
    assert [n.doc_string for n in model.graph.node if n.name == "last"] == ["kept"]
    assert {p.key for p in model.metadata_props} >= {"author"}
    same_results(source, model, {"X": feeds()["X"]})


NAMES = ["F2::If_0/rnn", "/a/b", "ニューラル", "a b=c,d", "", "rnn.wx", "X"]


@pytest.mark.parametrize("name", NAMES)
def test_odd_node_names_survive(name: str, tmp_path: Path) -> None:
    source = plain_model()
    source.graph.node[0].name = name
    model, report = convert(source, tmp_path, expose_states=True)
    (row,) = report["nodes"]
    assert row["name"] == name
    (node,) = [n for n in model.graph.node if is_flashrnn(n)]
    assert node.name == name or not name
    assert node.name
    (pair,) = report["states"].items()
    assert not set("/:=, ") & set("".join(pair))
    states = np.zeros((2, 1, B, HD), np.float32)
    found = onnx_rnn.run_file(model, {"X": feeds()["X"], pair[0]: states})
    assert onnx_rnn.max_error(found[:1], onnx_rnn.run_file(source, {"X": feeds()["X"]})) < 2e-5


def test_unicode_and_taken_value_names(tmp_path: Path) -> None:
    """Values that already have the names that the rewriting would give."""
    source = plain_model()
    relu = [helper.make_node("Relu", ["X"], [n]) for n in ("rnn.wx", "rnn.y", "rnn.final_states", "rnn.W")]
    source.graph.node.extend(relu)
    source.graph.output.extend(info(n.output[0]) for n in relu)
    for node in source.graph.node:
        for names in (node.input, node.output):
            for k, n in enumerate(names):
                names[k] = n.replace("X", "入力::x/0").replace("Y", "出力")
    source.graph.input[0].name = "入力::x/0"
    source.graph.output[0].name = "出力"
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == 1
    same_results(source, model, {"入力::x/0": feeds()["X"]})


def external_model(folder: Path) -> tuple[Path, onnx.ModelProto]:
    path = folder / "in.onnx"
    onnx.save(plain_model(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    return path, plain_model()


def test_external_data_in(tmp_path: Path) -> None:
    path, source = external_model(tmp_path)
    before = {p: hashlib.sha256(p.read_bytes()).digest() for p in tmp_path.iterdir()}
    output = tmp_path / "sub" / "out.onnx"
    output.parent.mkdir()
    assert convert_file(path, output)["rewritten"] == 1
    assert [p.name for p in output.parent.iterdir()] == ["out.onnx"]  # small enough for one file
    same_results(source, onnx.load(output), {"X": feeds()["X"]})
    assert {p: hashlib.sha256(p.read_bytes()).digest() for p in tmp_path.iterdir() if p.is_file()} == before


def test_a_copy_takes_its_external_data_along(tmp_path: Path) -> None:
    path, source = external_model(tmp_path)
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].attribute.append(helper.make_attribute("input_forget", 1))
    path.write_bytes(model.SerializeToString())
    (tmp_path / "elsewhere").mkdir()
    output = tmp_path / "elsewhere" / "out.onnx"
    report = convert_file(path, output)
    assert (report["rewritten"], report["left"]) == (0, 1)
    assert onnx.load(output).graph.initializer == source.graph.initializer


def test_large_results_get_a_data_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 2 GB rule with a limit of 1 KB: the path that a real large file takes."""
    monkeypatch.setattr(onnx_files, "INLINE_LIMIT", 1000)
    monkeypatch.setattr(onnx_files, "LARGE_BYTES", 64)
    source = plain_model()
    (tmp_path / "in.onnx").write_bytes(source.SerializeToString())
    convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert {p.name for p in tmp_path.iterdir()} == {"in.onnx", "out.onnx", "out.onnx.data"}
    raw = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    stored = [t for t in raw.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    assert {e.value for t in stored for e in t.external_data if e.key == "location"} == {"out.onnx.data"}
    given = {"X": feeds()["X"]}
    found = onnx_rnn.run_file(tmp_path / "out.onnx", given)
    assert onnx_rnn.max_error(found, onnx_rnn.run_file(source, given)) < 2e-5


@pytest.mark.full
def test_a_file_over_two_gigabytes(tmp_path: Path) -> None:
    """A sparse 2.2 GB weight beside an LSTM, by way of external data."""
    path, _ = external_model(tmp_path)
    model = onnx.load(path, load_external_data=False)
    rows = 1100
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(rows * 500_000 * 4)
    huge = TensorProto(name="huge", data_type=FLOAT, dims=[rows, 500_000], data_location=TensorProto.EXTERNAL)
    huge.external_data.add(key="location", value="huge.bin")
    model.graph.initializer.append(huge)
    model.graph.node.append(helper.make_node("Shape", ["huge"], ["size"]))
    model.graph.output.append(info("size", INT64, [2]))
    path.write_bytes(model.SerializeToString())
    report = convert_file(path, tmp_path / "out.onnx")
    assert report["rewritten"] == 1
    assert (tmp_path / "out.onnx").stat().st_size < 1 << 20
    assert (tmp_path / "out.onnx.data").stat().st_size > 1 << 31
    found = onnx_rnn.run_file(tmp_path / "out.onnx", {"X": feeds()["X"]})
    assert found[1].tolist() == [rows, 500_000]


def test_writing_by_parts_is_what_protobuf_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The streamed file parses to the same message as the plain one, sub-graphs and constants included."""
    monkeypatch.setattr(onnx_files, "LARGE_BYTES", 64)
    source = if_model()
    big = numpy_helper.from_array(np.arange(100, dtype=np.float32))
    source.graph.node.append(helper.make_node("Constant", [], ["big"], value=big))
    (tmp_path / "in.onnx").write_bytes(source.SerializeToString())
    model, weights, _ = onnx_files.load(tmp_path / "in.onnx")
    assert len(weights) >= 6
    onnx_files.save(model, weights, tmp_path / "out.onnx")
    assert onnx.load(tmp_path / "out.onnx") == source
    assert onnx.ModelProto.FromString(onnx_files.to_bytes(model, weights)) == source


def test_converting_twice_changes_nothing(tmp_path: Path) -> None:
    convert(plain_model(), tmp_path)
    report = convert_file(tmp_path / "out.onnx", tmp_path / "twice.onnx")
    assert (report["rewritten"], report["left"]) == (0, 0)
    assert (tmp_path / "twice.onnx").read_bytes() == (tmp_path / "out.onnx").read_bytes()


def test_functions_of_the_model_are_kept_and_their_nodes_left(tmp_path: Path) -> None:
    source = plain_model()
    inner = helper.make_node("LSTM", ["x", "w", "r"], ["y"], name="inner", hidden_size=HD)
    opsets = [helper.make_opsetid("", 17)]
    source.functions.append(helper.make_function("mine", "F", ["x", "w", "r"], ["y"], [inner], opsets))
    source.opset_import.append(helper.make_opsetid("mine", 1))
    source.graph.node.append(helper.make_node("F", ["X", "W", "R"], ["Y2"], domain="mine"))
    source.graph.output.append(info("Y2", shape=("t", 1, "b", HD)))
    model, report = convert(source, tmp_path)
    assert (report["rewritten"], report["left"]) == (1, 1)
    assert report["nodes"][1]["path"] == "function mine::F"
    assert [f.name for f in model.functions] == ["F", "FlashLSTM"]
    same_results(source, model, {"X": feeds()["X"]})


def test_a_float16_file_that_crashes_an_optimiser_of_onnxruntime_is_compared(tmp_path: Path) -> None:
    """A product between two transpositions: ONNX Runtime 1.32 dies of it as its sessions are made by default."""
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(8, 8)), "W": rng.normal(size=(1, 24, 8)), "R": rng.normal(size=(1, 24, 8))}
    nodes = [
        helper.make_node("Transpose", ["X"], ["x"], perm=[1, 0, 2]),
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Transpose", ["m"], ["t"], perm=[1, 0, 2]),
        helper.make_node("GRU", ["t", "W", "R"], ["Y"], name="gru", hidden_size=8, linear_before_reset=1),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT16, ["t", "b", 8])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT16, None)],
        [numpy_helper.from_array(value.astype(np.float16), name) for name, value in weights.items()],
    )
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    _, report = convert(source, tmp_path)
    assert report["rewritten"] == 1
    assert any("gives the same results" in note for note in report["notes"])


def test_a_file_that_cannot_be_raised_is_copied_with_a_reason(tmp_path: Path) -> None:
    source = plain_model(15)
    opsets = [helper.make_opsetid("", 15)]
    source.functions.append(
        helper.make_function("mine", "F", ["x"], ["y"], [helper.make_node("Relu", ["x"], ["y"])], opsets)
    )
    source.opset_import.append(helper.make_opsetid("mine", 1))
    source.graph.node.append(helper.make_node("F", ["X"], ["Z"], domain="mine"))
    source.graph.output.append(info("Z"))
    model, report = convert(source, tmp_path)
    assert (report["rewritten"], report["left"], report["opset"]) == (0, 1, 15)
    assert "mine::F" in report["nodes"][0]["reason"]
    assert model == source


def test_a_raise_that_changes_results_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: onnx.ModelProto, target: int) -> onnx.ModelProto:
        raised = onnx.version_converter.convert_version(model, target)
        raised.graph.node.append(helper.make_node("Neg", ["Y"], ["minus"]))
        raised.graph.output[0].name = "minus"
        return raised

    monkeypatch.setattr(convert_module, "raise_opset", wrong)
    model, report = convert(plain_model(13), tmp_path)
    assert (report["rewritten"], report["left"]) == (0, 1)
    assert "results differ" in report["nodes"][0]["reason"]
    assert model == plain_model(13)


def test_the_input_is_never_modified(tmp_path: Path) -> None:
    convert(plain_model(11), tmp_path, expose_states=True)
    assert onnx.load(tmp_path / "in.onnx") == plain_model(11)
    assert {p.name for p in tmp_path.iterdir()} == {"in.onnx", "out.onnx"}


def test_the_report_names_every_node(tmp_path: Path) -> None:
    source = plain_model()
    source.graph.node.append(lstm(y="Y2", name="coupled"))
    source.graph.node[1].attribute.append(helper.make_attribute("input_forget", 1))
    source.graph.output.append(info("Y2", shape=("t", 1, "b", HD)))
    _, report = convert(source, tmp_path)
    assert (report["rewritten"], report["left"]) == (1, 1)
    assert report["nodes"][0] == {"name": "rnn", "path": "main", "op": "LSTM", "action": "rewritten", "reason": ""}
    assert report["nodes"][1]["reason"].startswith("input_forget=1")
    assert any("slower on a CPU" in note for note in report["notes"])
    convert_module.write_report(report, tmp_path / "r.json")
    assert '"rewritten": 1' in (tmp_path / "r.json").read_text()


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "no such file"), (b"", "not an ONNX"), (b"hello world, not protobuf", "not an ONNX"), (b"\x08\x08", "not")],
    ids=["missing", "empty", "text", "truncated"],
)
def test_bad_inputs_are_one_line(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "in.onnx").write_bytes(content)
    with pytest.raises(FlashRNNError, match=says) as error:
        convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.onnx").exists()


def test_bad_outputs_are_one_line(tmp_path: Path) -> None:
    source = tmp_path / "in.onnx"
    source.write_bytes(plain_model().SerializeToString())
    os.mkfifo(tmp_path / "pipe.onnx")
    for output, says in (
        (source, "never modified"),
        (tmp_path / ".." / tmp_path.name / "in.onnx", "never modified"),
        (tmp_path / "none" / "out.onnx", "no such directory"),
        (tmp_path, "is a directory"),
        (tmp_path / "pipe.onnx", "is not a regular file"),
    ):
        with pytest.raises(FlashRNNError, match=says):
            convert_file(source, output)
    path, _ = external_model(tmp_path)
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"o.onnx.data"))
    (tmp_path / "weights.bin").rename(tmp_path / "o.onnx.data")
    for name in ("o.onnx.data", "o.onnx"):  # the second would write its own o.onnx.data, were it large
        with pytest.raises(FlashRNNError, match="never modified"):
            convert_file(path, tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    source = tmp_path / "in.onnx"
    source.write_bytes(plain_model().SerializeToString())
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(FlashRNNError, match="cannot write"):
        convert_file(source, tmp_path / "locked" / "out.onnx")


def test_missing_and_escaping_data_files_are_refused(tmp_path: Path) -> None:
    path, _ = external_model(tmp_path)
    (tmp_path / "weights.bin").rename(tmp_path / "moved.bin")
    with pytest.raises(FlashRNNError, match=r"weights\.bin.*does not exist"):
        convert_file(path, tmp_path / "out.onnx")
    (tmp_path / "weights.bin").write_bytes(b"short")
    with pytest.raises(FlashRNNError, match="needs"):
        convert_file(path, tmp_path / "out.onnx")
    path.write_bytes(path.read_bytes().replace(b"weights.bin", b"../ghts.bin"))
    with pytest.raises(FlashRNNError, match="outside"):
        convert_file(path, tmp_path / "out.onnx")


@pytest.mark.parametrize(("opset", "says"), [(14, "needs 15"), (99, "not possible"), (16, "cannot be lowered")])
def test_impossible_opsets_are_one_line(opset: int, says: str, tmp_path: Path) -> None:
    with pytest.raises(FlashRNNError, match=says):
        convert(plain_model(17), tmp_path, opset=opset)


def test_a_model_without_the_standard_domain(tmp_path: Path) -> None:
    node = helper.make_node("Scaler", ["x"], ["y"], domain="ai.onnx.ml", offset=[0.0], scale=[2.0])
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 3)], ir_version=8)
    onnx.save(model, tmp_path / "in.onnx")
    report = convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert (report["rewritten"], report["left"]) == (0, 0)
    assert (tmp_path / "out.onnx").is_file()
