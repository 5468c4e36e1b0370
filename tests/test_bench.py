"""`bench`: nothing is timed before the outputs agree, every engine gets its turn, and a loss reads as a loss."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import cpu_library
import models
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy import bench, machine
from flashrnn_deploy.backends.ort import OrtRunner
from flashrnn_deploy.cli import main
from flashrnn_deploy.compare import Comparison
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import convert_file, export_file
from flashrnn_deploy.op import DTYPES, RNNSpec
from flashrnn_deploy.shapes import axes_of, tensors_of

GRU = RNNSpec("gru", 2, 8)
FACTORY = """
import torch
from torch import nn


def make():
    torch.manual_seed(3)
    return nn.LSTM(4, 6, num_layers=2, batch_first=True), (torch.zeros(2, 5, 4),)


def other():
    torch.manual_seed(4)
    return nn.LSTM(4, 6, num_layers=2, batch_first=True), (torch.zeros(2, 5, 4),)
"""


def command(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)], catch_exceptions=False)


def report(*arguments: Any) -> dict[str, Any]:
    result = command(*arguments, "--json", "--repeat", 2)
    assert result.exit_code == 0, result.stderr
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def refused(result: Result) -> str:
    """The one line of a refusal, before which no time was printed."""
    assert result.exit_code == 1
    assert not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def old_file(path: Path, seed: int = 0) -> Path:
    """An LSTM node, as converters read it."""
    rng = np.random.default_rng(seed)
    shapes = {"W": (1, 4 * 6, 3), "R": (1, 4 * 6, 6), "B": (1, 8 * 6)}
    graph = helper.make_graph(
        [helper.make_node("LSTM", ["x", *shapes], ["y", "h"], name="lstm", hidden_size=6)],
        "old",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["time", "batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["time", 1, "batch", 6])],
        [numpy_helper.from_array(rng.standard_normal(s).astype(np.float32), n) for n, s in shapes.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return models.save(model, path)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """An old file and what it was converted to, with its states exposed."""
    source = old_file(tmp_path / "old.onnx")
    convert_file(source, tmp_path / "new.onnx", expose_states=True)
    return source, tmp_path / "new.onnx"


def test_library_body_and_original_agree_and_are_timed(pair: tuple[Path, Path]) -> None:
    old, new = pair
    facts = report(
        new, "--original", old, "--plugins", cpu_library.library(), "--steps", 12, "--batch", 3, "--threads", 1
    )
    assert [e["engine"] for e in facts["engines"]] == [bench.LIBRARY, bench.BODY, bench.STOCK]
    assert facts["inputs"]["x"] == [12, 3, 3]
    assert (facts["steps"], facts["repeat"], facts["threads"], facts["dtype"]) == (12, 2, 1, "float32")
    first = facts["engines"][0]["median_us"]
    for engine in facts["engines"]:
        assert 0 < engine["median_us"] <= engine["p90_us"]
        assert engine["median_us_per_step"] == pytest.approx(engine["median_us"] / 12)
        assert engine["ratio"] == pytest.approx(engine["median_us"] / first)
        assert engine["max_abs_error"] <= engine["tolerance"]
    assert facts["engines"][0]["max_abs_error"] > 0, "the library rounds otherwise than the body"
    assert facts["machine"]["onnxruntime"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with m.py and, of its factory ``make``, one file per dtype."""
    folder = tmp_path_factory.mktemp("exported")
    (folder / "m.py").write_text(FACTORY)
    for dtype in DTYPES:
        export_file(f"{folder / 'm.py'}:make", folder / f"{dtype}.onnx", dtype=dtype, expose_states=True)
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorch_is_an_engine(exported: Path, dtype: str) -> None:
    factory, library = f"{exported / 'm.py'}:make", cpu_library.library()
    facts = report(exported / f"{dtype}.onnx", "--factory", factory, "--plugins", library, "--steps", 9)
    assert [e["engine"] for e in facts["engines"]] == [bench.LIBRARY, bench.BODY, bench.EAGER]
    assert all(e["max_abs_error"] <= e["tolerance"] for e in facts["engines"])
    assert facts["machine"]["torch"]
    assert any("Casts" in note for note in facts["notes"]) == (dtype == "bfloat16")


def test_other_weights_are_not_timed(exported: Path, tmp_path: Path) -> None:
    import torch

    path, make, other = exported / "float32.onnx", f"{exported / 'm.py'}:make", f"{exported / 'm.py'}:other"
    before = torch.get_num_threads(), torch.backends.cudnn.allow_tf32
    line = refused(command(path, "--factory", other, "--threads", 1))
    assert f"nothing was timed: on {bench.EAGER}, the output" in line
    assert (torch.get_num_threads(), torch.backends.cudnn.allow_tf32) == before
    torch.save(torch.nn.LSTM(4, 6, num_layers=2, batch_first=True).state_dict(), tmp_path / "w.pt")
    assert "nothing was timed" in refused(command(path, "--factory", make, "--weights", tmp_path / "w.pt"))


def test_another_original_is_not_timed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = old_file(tmp_path / "wrong.onnx", seed=1)
    assert f"on {bench.STOCK}, the output 'y' differs" in refused(command(pair[1], "--original", wrong))


def test_the_table_says_who_lost(pair: tuple[Path, Path]) -> None:
    result = command(pair[1], "--original", pair[0], "--repeat", 3)
    assert result.exit_code == 0
    assert "note: no plugin library was measured" in result.stderr
    lines = [line for line in result.stdout.splitlines() if bench.STOCK in line]
    assert len(lines) == 1
    assert "faster" in lines[0] or "slower" in lines[0]
    assert f"{bench.BODY} is" in result.stdout


class Fake:
    """An engine whose every call takes ``seconds``, and what it did in a common log."""

    def __init__(self, name: str, seconds: float, log: list[str]) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    def run(self) -> None:
        self.log.append(self.name)
        time.sleep(self.seconds)

    def outputs(self) -> dict[str, Any]:
        return {}


def test_engines_take_turns_and_ratios_are_to_the_first() -> None:
    log: list[str] = []
    engines = {"a": Fake("a", 0.004, log), "b": Fake("b", 0.001, log)}
    times = bench.interleave(engines, 3, 0.0)
    assert log[2 * bench.WARM_UP :] == ["a", "a", "b", "b"] * 3
    same = dict.fromkeys("ab", Comparison("y", 1e-7, 1e-4, "judge"))
    a, b = bench.summary(times, same, 2)
    assert 4000 <= a.median_us < 40000
    assert a.median_us_per_step == pytest.approx(a.median_us / 2)
    assert a.ratio == 1
    assert b.ratio == pytest.approx(b.median_us / a.median_us)
    assert "slower" in bench.beside(b.ratio)
    assert bench.summary(times, same, None)[0].median_us_per_step is None


def test_ratios_in_words() -> None:
    assert [bench.beside(r) for r in (2.5, 1.0, 0.8, 0.99)] == [
        "2.50x faster", "1.00x faster", "1.25x slower", "1.01x slower",
    ]  # fmt: skip


def test_given_inputs_are_used_and_set_the_sizes(tmp_path: Path) -> None:
    path = models.save(models.network(GRU, lens=True), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.ones((7, 4, models.IN), np.float32))
    facts = report(path, "--input", f"x={tmp_path / 'x.npy'}")
    assert facts["inputs"] == {"x": [7, 4, models.IN], "lens": [4], "state0": [1, 1, 4, 16]}
    assert facts["steps"] == 7
    model = onnx.load(path)
    tensors = tensors_of(model)
    feeds = bench.make_feeds(model, tensors, axes_of(model, tensors), steps=6, batch=2)
    assert feeds["lens"].tolist() == [6, 6]
    assert np.abs(feeds["state0"]).max() > 0


def test_sizes_of_other_dimensions(tmp_path: Path) -> None:
    model = models.network(GRU)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "width"
    models.set_metadata(model, "flashrnn.axes", {})
    path = models.save(model, tmp_path / "m.onnx")
    assert report(path, "--size", "width=8")["inputs"]["x"][0] == 8
    assert "--size height=8: no input has the dimension 'height'" in refused(command(path, "--size", "height=8"))
    for wrong in ("width", "width=", "width=0", "width=x", "width=\N{ARABIC-INDIC DIGIT THREE}", f"width={'9' * 5000}"):
        assert "write it as DIM=SIZE" in refused(command(path, "--size", wrong))


def test_a_wrongly_declared_output_runs_again_and_again(tmp_path: Path) -> None:
    """ONNX Runtime lets a call give another shape than the file declares, but refuses that buffer in the next one."""
    model = models.network(GRU)
    dims = model.graph.output[0].type.tensor_type.shape.dim
    del dims[2]
    runner = OrtRunner(model, [cpu_library.library()])
    feeds = {"x": np.ones((4, 2, models.IN), np.float32), "state0": np.zeros((1, 1, 2, 16), np.float32)}
    bound = runner.bind(feeds)
    bound.run()
    bound.run()
    np.testing.assert_array_equal(bound.outputs()["out"], runner.infer(feeds)["out"])


def test_a_factory_of_other_sizes_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FACTORY.replace("nn.LSTM(4", "nn.LSTM(9").replace("5, 4)", "5, 9)"))
    (tmp_path / "m.py").write_text(FACTORY)
    export_file(f"{tmp_path / 'm.py'}:make", tmp_path / "m.onnx")
    text = refused(command(tmp_path / "m.onnx", "--factory", f"{tmp_path / 'mine.py'}:make"))
    assert text.startswith("error: the module's forward raised RuntimeError: ")


def test_what_cannot_be_timed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = pair
    assert "holds no FlashRNN op" in refused(command(old))
    assert "cannot read the model" in refused(command(tmp_path / "absent.onnx"))
    assert "--weights belongs to --factory" in refused(command(new, "--weights", old))
    assert "CUDAExecutionProvider" in refused(command(new, "--device", "cuda"))
    stranger = models.save(models.network(GRU, x="signal"), tmp_path / "stranger.onnx")
    assert "has the input(s) signal, state0, which" in refused(command(new, "--original", stranger))
    np.save(tmp_path / "x.npy", np.ones((7, 4, 2), np.float32))
    assert "the model wants 3" in refused(command(new, "--input", f"x={tmp_path / 'x.npy'}"))


def test_a_cuda_provider_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime would go on, on the CPU, and its times would be called those of a GPU."""
    import onnxruntime as ort

    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    with pytest.raises(FlashRNNError, match="cannot start its CUDAExecutionProvider"):
        OrtRunner(models.network(GRU), device="cuda")


def test_names_of_the_machine(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Some CPU @ 2 GHz\n"
    )
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Mar  1\n")
    assert machine.processor(tmp_path / "cpuinfo").startswith("Some CPU @ 2 GHz, ")
    assert machine.nvidia_driver(tmp_path / "version") == "580.159.04"
    assert machine.nvidia_driver(tmp_path / "absent") == "unknown"
    with pytest.raises(FlashRNNError, match="libcuda"):
        machine.describe_machine("cuda")
