"""`run`: every input is checked before the model runs, and a failure writes nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from models import network
from onnx import TensorProto, helper

from flashrnn_deploy import feeds
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.backends.ort import OrtRunner
from flashrnn_deploy.cli import main
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.run import run

SPEC = RNNSpec("lstm", 2, 4)
RNG = np.random.default_rng(0)
GOOD: dict[str, np.ndarray] = {
    "x": RNG.standard_normal((9, 2, models.IN)).astype(np.float32),
    "lens": np.array([9, 4]),
    "state0": RNG.standard_normal((2, 1, 2, 8)).astype(np.float32),
}


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., Result]:
    """Run `run` on a model and arrays; the result's ``files`` are what lies in the output directory."""

    def call(model: onnx.ModelProto, arrays: dict[str, Any], *options: str, output: str = "out") -> Result:
        path = models.save(model, tmp_path / "model.onnx")
        arguments = []
        for index, (name, array) in enumerate(arrays.items()):
            np.save(tmp_path / f"{index}.npy", array)
            arguments += ["--input", f"{name}={tmp_path / f'{index}.npy'}"]
        return CliRunner().invoke(main, ["run", str(path), *arguments, "-o", str(tmp_path / output), *options])

    return call


def refused(result: Result, message: str, folder: Path) -> None:
    """One line on stderr that says so, exit 1, and nothing in the folder but the test's own files."""
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert [line for line in result.stderr.splitlines() if not line.startswith("note: ")] == [
        result.stderr.splitlines()[-1]
    ]
    assert not result.stdout
    assert all(p.suffix in (".npy", ".onnx") and p.parent == folder for p in folder.iterdir()), list(folder.iterdir())


def test_outputs_are_written(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(SPEC, lens=True)
    result = command(model, GOOD)
    assert result.exit_code == 0, result.stderr
    assert "state1.npy" in result.stdout
    assert "function body" in result.stderr
    assert "--plugins" in result.stderr
    expected = make_runner("onnxruntime", model).infer(GOOD)
    report = json.loads((tmp_path / "out" / "outputs.json").read_text())
    assert report["backend"] == "onnxruntime"
    assert [o["name"] for o in report["outputs"]] == ["out", "state1"]
    for entry in report["outputs"]:
        written = np.load(tmp_path / "out" / entry["file"])
        np.testing.assert_array_equal(written, expected[entry["name"]])
        assert entry["shape"] == list(written.shape)
        assert entry["dtype"] == "float32"
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_json_alone_on_stdout(command: Callable[..., Result], tmp_path: Path) -> None:
    result = command(network(SPEC, lens=True), GOOD, "--json", "--chunk", "4")
    assert json.loads(result.stdout) == json.loads((tmp_path / "out" / "outputs.json").read_text())
    assert json.loads(result.stdout)["chunk"] == 4


def test_the_reference_agrees(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(SPEC, lens=True)
    results = []
    for backend in ("onnxruntime", "reference"):
        assert command(model, GOOD, "--backend", backend, output=backend).exit_code == 0
        results.append(np.load(tmp_path / backend / "out.npy"))
    assert results[1].dtype == np.float32
    np.testing.assert_allclose(*results, atol=1e-6)
    assert "function body" not in command(model, GOOD, "--backend", "reference").stderr


def test_states_left_out_are_zero(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(SPEC, lens=True)
    zeros = np.zeros((2, 1, 2, 8), np.float32)
    results = []
    for arrays in ({**GOOD, "state0": zeros}, {n: GOOD[n] for n in ("x", "lens")}):
        assert command(model, arrays).exit_code == 0
        results.append(np.load(tmp_path / "out" / "out.npy"))
    np.testing.assert_array_equal(*results)


def test_bfloat16_travels_as_float32(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(RNNSpec("lstm", 2, 4, dtype="bfloat16"), lens=True)
    result = command(model, GOOD)
    assert result.exit_code == 0, result.stderr
    assert "bfloat16" in result.stderr
    written = np.load(tmp_path / "out" / "out.npy")
    assert written.dtype == np.float32
    assert not (written.view(np.uint32) & 0xFFFF).any()  # rounded
    single = make_runner("onnxruntime", network(SPEC, lens=True)).infer(GOOD)["out"]
    np.testing.assert_allclose(written, single, atol=0.05)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown name": ({"xx": GOOD["x"]}, "the model has no input xx; its inputs are x float32[time, batch, 5]; lens"),
    "missing": ({"x": None}, "--input is missing for x"),
    "rank": ({"x": GOOD["x"][0]}, "input 'x' has rank 2 (shape [2, 5])"),
    "fixed dimension": ({"x": GOOD["x"][..., :4]}, "input 'x' has size 4 on axis 2, and the model wants 5"),
    "shared dimension": ({"lens": np.array([9])}, "input 'lens' has batch = 1 on axis 0, but input 'x' has batch = 2"),
    "float64": ({"x": GOOD["x"].astype(np.float64)}, "must be float32, not float64: save array.astype('float32')"),
    "int32": ({"lens": GOOD["lens"].astype(np.int32)}, "must be int64, not int32: save array.astype('int64')"),
    "too long": ({"lens": np.array([9, 10])}, "holds the length 10, outside 0..9"),
    "negative": ({"lens": np.array([-1, 9])}, "holds the length -1, outside 0..9"),
    "objects": ({"x": np.array([None, 1])}, "Python objects"),
    "empty sequence": (
        {"x": GOOD["x"][:0], "lens": np.array([0, 0])},
        "the function body cannot run an empty sequence (T = 0; B = 0 it can)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_inputs(command: Callable[..., Result], tmp_path: Path, case: str) -> None:
    changes, message = BAD[case]
    arrays = {name: array for name, array in (GOOD | changes).items() if array is not None}
    refused(command(network(SPEC, lens=True), arrays), message, tmp_path)


def test_big_endian_arrays_are_read(command: Callable[..., Result]) -> None:
    assert command(network(SPEC, lens=True), GOOD | {"x": GOOD["x"].astype(">f4")}).exit_code == 0


def test_empty_batch_and_empty_sequence_by_the_reference(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(SPEC)
    result = command(model, {"x": GOOD["x"][:, :0], "state0": GOOD["state0"][:, :, :0]})
    assert result.exit_code == 0, result.stderr
    assert np.load(tmp_path / "out" / "out.npy").shape == (9, 0, 3)
    result = command(model, {"x": GOOD["x"][:0], "state0": GOOD["state0"]}, "--backend", "reference")
    assert result.exit_code == 0, result.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "state1.npy"), GOOD["state0"])


def test_an_empty_sequence_without_known_axes() -> None:
    model = network(SPEC, metadata=False)
    for value in (*model.graph.input, *model.graph.output):
        for dim, name in zip(value.type.tensor_type.shape.dim, "pqrs", strict=False):
            if dim.dim_param:
                dim.dim_param = f"{name}_{value.name}"
    with pytest.raises(FlashRNNError, match="cannot run an empty sequence"):
        make_runner("onnxruntime", model).infer({"x": GOOD["x"][:0], "state0": GOOD["state0"]})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "x"], "write it as NAME=FILE.npy"),
        (["--input", "x=a.npy", "--input", "x=b.npy"], "cannot read the array a.npy"),
        (["--backend", "reference", "--plugins", "lib.so"], "--input is missing"),
        (["--state", "nope=out"], "state pair nope=out"),
    ],
)
def test_bad_options(command: Callable[..., Result], tmp_path: Path, options: list[str], message: str) -> None:
    refused(command(network(SPEC), {}, *options), message, tmp_path)


def test_an_input_given_twice(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", GOOD["x"])
    with pytest.raises(FlashRNNError, match="x is given twice"):
        feeds.read_feeds([f"x={tmp_path / 'x.npy'}"] * 2)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..\\x", "..", "x\x1b[2J"])
def test_hostile_output_names(command: Callable[..., Result], tmp_path: Path, name: str) -> None:
    result = command(network(SPEC, out=name), {"x": GOOD["x"]})
    assert result.exit_code == 0, result.stderr
    assert "\x1b[2J" not in result.stdout
    entry = json.loads((tmp_path / "out" / "outputs.json").read_text())["outputs"][0]
    assert entry["name"] == name
    assert (tmp_path / "out" / entry["file"]).resolve().parent == tmp_path / "out"
    assert {p.name for p in tmp_path.iterdir()} == {"model.onnx", "0.npy", "out"}


def test_a_directory_that_cannot_be_written(command: Callable[..., Result], tmp_path: Path) -> None:
    refused(command(network(SPEC), {"x": GOOD["x"]}, output="model.onnx"), "cannot write into", tmp_path)
    refused(command(network(SPEC), {"x": GOOD["x"]}, output="model.onnx/out"), "cannot write into", tmp_path)


def test_a_failing_engine_keeps_older_results(command: Callable[..., Result], tmp_path: Path) -> None:
    assert command(network(SPEC), {"x": GOOD["x"]}).exit_code == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    model = network(SPEC)
    model.graph.node[1].input[1] = "w_in"  # not a recurrent weight
    assert command(model, {"x": GOOD["x"]}).exit_code == 1
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_chunk_zero_is_a_usage_error(command: Callable[..., Result]) -> None:
    assert command(network(SPEC), {"x": GOOD["x"]}, "--chunk", "0").exit_code == 2


def test_chunk_below_one(tmp_path: Path) -> None:
    path = models.save(network(SPEC), tmp_path / "model.onnx")
    np.save(tmp_path / "x.npy", GOOD["x"])
    with pytest.raises(FlashRNNError, match="at least one step"):
        run(path, [f"x={tmp_path / 'x.npy'}"], tmp_path / "out", chunk=0)


def test_a_file_without_a_body(command: Callable[..., Result], tmp_path: Path) -> None:
    refused(command(network(SPEC, body=False), {"x": GOOD["x"]}), "no function body for FlashLSTM", tmp_path)


def test_plugin_libraries_that_do_not_load(command: Callable[..., Result], tmp_path: Path) -> None:
    library = tmp_path / "lib.npy"
    refused(command(network(SPEC), {"x": GOOD["x"]}, "--plugins", str(library)), "no plugin library", tmp_path)
    library.write_text("not a library")
    refused(command(network(SPEC), {"x": GOOD["x"]}, "--plugins", str(library)), "cannot load the plugin", tmp_path)
    with pytest.raises(FlashRNNError, match="the reference backend is NumPy"):
        make_runner("reference", network(SPEC), [library])
    with pytest.raises(FlashRNNError, match="unknown backend 'cudnn'"):
        make_runner("cudnn", network(SPEC))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc to build a library")
def test_a_plugin_library_is_registered_once(tmp_path: Path) -> None:
    source = tmp_path / "stub.c"
    source.write_text("void *RegisterCustomOps(void *options, const void *api) { return 0; }\n")
    library = tmp_path / "libstub.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    runner = make_runner("onnxruntime", network(SPEC), [library, tmp_path / "." / "libstub.so"])
    assert isinstance(runner, OrtRunner)
    assert runner._plugins == [library]
    assert runner.infer({"x": GOOD["x"], "state0": GOOD["state0"]})["out"].shape == (9, 2, 3)


def test_cuda_without_its_provider(command: Callable[..., Result], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has CUDA")
    result = command(network(SPEC), {"x": GOOD["x"]}, "--device", "cuda")
    refused(result, 'has AzureExecutionProvider, CPUExecutionProvider: pip install "flashrnn-deploy[cuda]"', tmp_path)


def test_a_state_whose_batch_is_unknown(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(SPEC)
    model.graph.input[1].type.tensor_type.shape.dim[2].dim_param = "rows"
    models.set_metadata(model, "flashrnn.axes", {"state0": {"time": None, "batch": None}})
    refused(command(model, {"x": GOOD["x"]}), "axis 2 of state0 float32[2, 1, rows, 8] cannot be told", tmp_path)
    models.set_metadata(model, "flashrnn.axes", {"state0": {"time": None, "batch": 2}, "x": {"time": 0, "batch": 1}})
    assert command(model, {"x": GOOD["x"]}).exit_code == 0


def test_an_input_that_is_no_tensor(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(SPEC)
    sequence = helper.make_tensor_sequence_value_info("list", TensorProto.FLOAT, None)
    model.graph.input.append(sequence)
    refused(command(model, {"x": GOOD["x"], "list": GOOD["x"]}), "input 'list' is not a tensor", tmp_path)


def test_a_model_that_the_engine_refuses(command: Callable[..., Result], tmp_path: Path) -> None:
    model = network(SPEC)
    model.opset_import[0].version = 999
    refused(command(model, {"x": GOOD["x"]}), "refuses the model: ", tmp_path)
    model = network(SPEC)
    model.graph.node[0].op_type = "Nonsense"
    refused(command(model, {"x": GOOD["x"]}), "refuses the model: ", tmp_path)
