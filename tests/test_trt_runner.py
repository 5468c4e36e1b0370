"""The TensorRT runner, on the fake of TensorRT 10 and 8 and of pycuda: bindings, profiles, states, dtypes, errors."""

from __future__ import annotations

import gc
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import fake_tensorrt
import models
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from engines import LSTM, expect, feeds, same

from flashrnn_deploy.backends.device import DeviceArray
from flashrnn_deploy.backends.trt import TrtRunner
from flashrnn_deploy.cli import main
from flashrnn_deploy.engine import api, sidecar
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> fake_tensorrt.Cuda:
    return fake_tensorrt.install(monkeypatch)


@pytest.mark.parametrize(
    ("version", "dtype", "layout"),
    [
        ("10.14.1.48", "float32", 0),
        ("8.6.1", "float32", 0),
        ("8.5.3.1", "float16", 0),
        ("10.14.1.48", "float16", 0),
        ("10.14.1.48", "bfloat16", 0),
        ("10.14.1.48", "float32", 1),
    ],
)
def test_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, dtype: str, layout: int) -> None:
    """Every tensor is bound by its name, whatever the engine's order; shapes follow each call's inputs."""
    fake_tensorrt.install(monkeypatch, version)
    spec = RNNSpec("lstm", 2, 4, dtype=dtype, layout=layout)
    model = models.network(spec)
    engine = engines.write(model, tmp_path / "m.engine", tensorrt=".".join(version.split(".")[:3]))
    runner = TrtRunner(engine)
    for T, B in ((5, 3), (1, 1), (9, 2)):
        arrays = feeds(T, B, spec)
        same(runner.infer(arrays), expect(model, arrays))
    assert runner.gpu_ms == 0.25
    runner.close()


def test_profile_corners(cuda: fake_tensorrt.Cuda, tmp_path: Path) -> None:
    """Case D14: every corner on one context in turn; beyond it one line, and the context goes on."""
    model = models.network(LSTM)
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine", ("x=1x1x5:100x4x5:512x16x5",)))
    for T, B in ((1, 1), (512, 1), (1, 16), (512, 16)):
        arrays = feeds(T, B)
        same(runner.infer(arrays), expect(model, arrays))
    x, state = "[1, 1, 5] to [512, 16, 5]", "[2, 1, 1, 8] to [2, 1, 16, 8]"
    for T, B, name, shape, built in (
        (513, 1, "x", [513, 1, 5], x),
        (0, 1, "x", [0, 1, 5], x),
        (1, 17, "state0", [2, 1, 17, 8], state),
    ):
        with pytest.raises(FlashRNNError) as error:
            runner.infer(feeds(T, B))
        assert f"input '{name}' has shape {shape}, and the engine was built for {built}" in str(error.value)
    wrong = feeds(5, 2) | {"state0": feeds(5, 3)["state0"]}
    with pytest.raises(FlashRNNError, match=r"TensorRT 10\.14\.1 fails for .*dimensions not equal: batch"):
        runner.infer(wrong)
    arrays = feeds(3, 2)
    same(runner.infer(arrays), expect(model, arrays))
    assert cuda.depth == 0


def test_errors_leave_the_runner_usable(cuda: fake_tensorrt.Cuda, tmp_path: Path) -> None:
    model = models.network(LSTM)
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine"))
    arrays = feeds(4, 2)
    for wrong, message in (
        ({"x": arrays["x"]}, r"the engine's input\(s\) state0 are not fed"),
        (arrays | {"x": arrays["x"].astype(np.float64)}, "input 'x' must be float32, not float64"),
        (arrays | {"x": arrays["x"][0]}, r"input 'x' has shape \[2, 5\]"),
    ):
        with pytest.raises(FlashRNNError, match=message):
            runner.infer(wrong)
    cuda.fail_enqueue = True
    with pytest.raises(FlashRNNError, match=r"fails for .*x \[4, 2, 5\].*: .*the plugin's enqueue returned 1"):
        runner.infer(arrays)
    cuda.fail_enqueue = False
    same(runner.infer(arrays), expect(model, arrays))
    assert cuda.depth == 0


def test_memory_is_given_back(cuda: fake_tensorrt.Cuda, tmp_path: Path) -> None:
    """It is used again by the next call, freed for a larger one where it is short, and gone when the runner is."""
    model = models.network(LSTM)
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine"))
    runner.infer(feeds(4, 2))
    before = cuda.allocations
    for _ in range(3):
        runner.infer(feeds(4, 2))
    assert cuda.allocations == before
    cuda.limit = 200_000
    runner.infer(feeds(100, 16))  # x and out take 32,768 bytes each
    arrays = feeds(200, 16)  # 65,536 each: there is room for them without those
    same(runner.infer(arrays), expect(model, arrays))
    with pytest.raises(FlashRNNError, match="CUDA fails: cuMemAlloc failed: out of memory"):
        runner.infer(feeds(400, 16))
    same(runner.infer(arrays), expect(model, arrays))
    runner.close()
    gc.collect()
    assert not cuda.memory


def test_static_inputs(cuda: fake_tensorrt.Cuda, tmp_path: Path) -> None:
    model = models.network(LSTM)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = {"time": 4, "batch": 2}[dim.dim_param]
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine"))
    arrays = feeds(4, 2)
    same(runner.infer(arrays), expect(model, arrays))
    with pytest.raises(
        FlashRNNError, match=r"input 'x' has shape \[5, 2, 5\], and the engine was built for \[4, 2, 5\] to"
    ):
        runner.infer({**feeds(5, 2), "state0": arrays["state0"]})


def test_lengths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """int64 as the file has it; an engine of TensorRT 8 has int32, and takes int64 that fits."""
    model = models.network(LSTM, lens=True)
    arrays = feeds(5, 3, lens=[5, 0, 2])
    fake_tensorrt.install(monkeypatch)
    same(TrtRunner(engines.write(model, tmp_path / "m.engine")).infer(arrays), expect(model, arrays))
    old = onnx.ModelProto()
    old.CopyFrom(model)
    next(v for v in old.graph.input if v.name == "lens").type.tensor_type.elem_type = onnx.TensorProto.INT32
    fake_tensorrt.install(monkeypatch, "8.5.3.1")
    runner = TrtRunner(engines.write(old, tmp_path / "old.engine", tensorrt="8.5.3"))
    same(runner.infer(arrays), expect(model, arrays))
    with pytest.raises(FlashRNNError, match="input 'lens' must be int32, not int64"):
        runner.infer(arrays | {"lens": np.array([5, 0, 2**40])})


def test_states_stay_on_the_gpu(cuda: fake_tensorrt.Cuda, tmp_path: Path) -> None:
    model = models.network(LSTM)
    runner = TrtRunner(engines.write(model, tmp_path / "m.engine"), carried=["state1"])
    arrays = feeds(6, 2)
    state = runner.infer({**arrays, "x": arrays["x"][:3]})["state1"]
    assert isinstance(state, DeviceArray)
    cuda.copies.clear()
    outputs = runner.infer({"x": arrays["x"][3:], "state0": state})
    assert cuda.copies == [("htod", arrays["x"][3:].nbytes), ("dtoh", outputs["out"].nbytes)]
    expected = expect(model, arrays)
    np.testing.assert_allclose(outputs["out"], expected["out"][3:], atol=1e-6)
    np.testing.assert_allclose(np.asarray(outputs["state1"]), expected["state1"], atol=1e-6)


# The command.


@pytest.fixture
def command(cuda: fake_tensorrt.Cuda, tmp_path: Path) -> Any:
    def call(engine: Path, arrays: dict[str, np.ndarray], *options: str) -> Any:
        arguments = []
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}.npy", array)
            arguments += ["--input", f"{name}={tmp_path / f'{name}.npy'}"]
        out = str(tmp_path / "out")
        return CliRunner().invoke(
            main, ["run", str(engine), *arguments, "-o", out, "--backend", "tensorrt", *options], catch_exceptions=False
        )

    return call


@pytest.mark.parametrize("chunk", [None, 1, 4, 7, 50])
def test_run_in_chunks(command: Any, cuda: fake_tensorrt.Cuda, tmp_path: Path, chunk: int | None) -> None:
    model = models.network(LSTM, lens=True)
    engine = engines.write(model, tmp_path / "m.engine", ("time=1:8:25",))
    arrays = feeds(25, 2, lens=[25, 9])
    options = [] if chunk is None else ["--chunk", str(chunk)]
    result = command(engine, arrays, *options)
    assert result.exit_code == 0, result.output
    for name, expected in expect(model, arrays).items():
        np.testing.assert_allclose(np.load(tmp_path / "out" / f"{name}.npy"), expected, atol=1e-6, err_msg=name)
    report = json.loads((tmp_path / "out" / "outputs.json").read_text())
    assert (report["backend"], report["chunk"]) == ("tensorrt", chunk)
    state = arrays["state0"].nbytes
    fetched = [size for kind, size in cuda.copies if kind == "dtoh" and size == state]
    assert len(fetched) <= 5, "states cross the bus at the end, and where chunks are compared with the whole"


def test_states_named_by_the_user(command: Any, tmp_path: Path) -> None:
    """A file without flashrnn.states: --state names them, and a wrong pair does not pass for the whole."""
    model = models.network(LSTM, metadata=False)
    engine = engines.write(model, tmp_path / "m.engine")
    arrays = feeds(9, 2)
    unnamed = command(engine, arrays, "--chunk", "4")
    assert unnamed.exit_code == 1
    assert "--chunk" in unnamed.stderr
    named = command(engine, arrays, "--chunk", "4", "--state", "state0=state1")
    assert named.exit_code == 0, named.output
    np.testing.assert_allclose(np.load(tmp_path / "out" / "out.npy"), expect(model, arrays)["out"], atol=1e-6)


def test_longer_than_the_profile(command: Any, tmp_path: Path) -> None:
    """Whole it is refused, with a word on chunks; in chunks of the longest call, and of one step, it runs."""
    model = models.network(LSTM)
    arrays = feeds(30, 2)
    engine = engines.write(model, tmp_path / "m.engine", ("time=1:8:8",))
    whole = command(engine, arrays)
    assert whole.exit_code == 1
    assert whole.stderr.count("\n") == 1
    assert "input 'x' has shape [30, 2, 5], and the engine was built for" in whole.stderr
    assert "--chunk" in whole.stderr
    assert not (tmp_path / "out").exists()
    step = engines.write(model, tmp_path / "step.engine", ("time=1",))
    for path, chunk in ((engine, "8"), (step, "1")):
        result = command(path, arrays, "--chunk", chunk)
        assert result.exit_code == 0, result.output
        np.testing.assert_allclose(np.load(tmp_path / "out" / "out.npy"), expect(model, arrays)["out"], atol=1e-6)


def test_zero_states(command: Any, tmp_path: Path) -> None:
    model = models.network(LSTM)
    engine = engines.write(model, tmp_path / "m.engine")
    arrays = feeds(5, 3)
    assert command(engine, {"x": arrays["x"]}).exit_code == 0
    zero = expect(model, arrays | {"state0": np.zeros_like(arrays["state0"])})
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "out.npy"), zero["out"])


@pytest.mark.parametrize(
    ("model", "arrays", "options", "message"),
    [
        (models.network(RNNSpec("gru", 1, 4, num_directions=2)), {}, ["--chunk", "2"], "runs in both directions"),
        (models.network(LSTM, lens=True), {"lens": np.array([9, 1])}, [], "the length 9, outside 0..5"),
        (
            models.network(LSTM),
            {"x": np.zeros((5, 2, 4), np.float32)},
            [],
            "has size 4 on axis 2, and the model wants 5",
        ),
        (models.network(LSTM), {"y": np.zeros(1)}, [], "the model has no input y; its inputs are "),
    ],
)
def test_refusals(
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: Any,
    arrays: Any,
    options: Any,
    message: str,
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(TrtRunner, "close", lambda self: closed.append(self))
    engine = engines.write(model, tmp_path / "m.engine")
    result = command(engine, {"x": np.zeros((5, 2, 5), np.float32)} | arrays, *options)
    assert result.exit_code == 1
    assert len(closed) == 1, "a program that goes on does not keep the GPU's memory"
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_trusted_engine_that_is_none(command: Any, tmp_path: Path) -> None:
    engine = tmp_path / "m.engine"
    engine.write_bytes(b"not an engine")
    result = command(engine, {"x": np.zeros((5, 2, 5), np.float32)}, "--trust-engine")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: TensorRT 10.14.1 refuses the engine {engine}: IRuntime::deserialize")
    for arguments, what in (([str(engine)], str(engine)), (["m.onnx", "--trust-engine"], "--trust-engine")):
        other = CliRunner().invoke(main, ["run", *arguments, "-o", str(tmp_path / "out")])
        assert other.stderr == f"error: {what} belongs to --backend tensorrt\n"
    missing = command(tmp_path / "none.engine", {})
    assert missing.exit_code == 1
    assert "cannot read the engine" in missing.stderr


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pycuda that does not load, or finds no device, is one line."""
    import builtins
    import sys

    engine = engines.write(models.network(LSTM), tmp_path / "m.engine")
    fake_tensorrt.install(monkeypatch)
    driver = sys.modules["pycuda.driver"]

    def no_device() -> None:
        raise driver.Error("cuInit failed: no CUDA-capable device is detected")

    monkeypatch.setattr(driver, "init", no_device)
    with pytest.raises(FlashRNNError, match="there is no GPU to run on: cuInit failed"):
        TrtRunner(engine)
    plain = builtins.__import__

    def importing(name: str, *arguments: Any) -> Any:
        if name == "pycuda.driver":
            raise ImportError("libcuda.so.1: cannot open shared object file")
        return plain(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(FlashRNNError, match=r"pycuda is installed but does not load: libcuda\.so\.1.*driver"):
        TrtRunner(engine)


# Plugin libraries.


def test_libraries(cuda: fake_tensorrt.Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What a library was built for is known before TensorRT loads it, and it is loaded once per process."""
    engine = engines.write(models.network(LSTM), tmp_path / "m.engine")
    good = engines.library(tmp_path / "libgood.so")
    for _ in range(2):
        TrtRunner(engine, [good, good]).close()
    without = engines.library(tmp_path / "libwithout.so", engines.INFO.format(""))
    with pytest.raises(
        FlashRNNError, match=r"libwithout\.so was built without TensorRT support; .*--tensorrt-include DIR"
    ):
        TrtRunner(engine, [without])
    for eight in (engines.library(tmp_path / "libeight.so", engines.INFO.format("8.5")),):
        with pytest.raises(
            FlashRNNError, match=r"libeight\.so was built for TensorRT 8\.5, and this is TensorRT 10\.14\.1"
        ):
            TrtRunner(engine, [eight])
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"\x7fELF not really")
    with pytest.raises(FlashRNNError, match=r"cannot load the plugin library .*libbroken\.so"):
        TrtRunner(engine, [broken])
    with pytest.raises(
        FlashRNNError, match=r"there is no plugin library .*none\.so; build it with: flashrnn-deploy build"
    ):
        TrtRunner(engine, [tmp_path / "none.so"])
    fake_tensorrt.install(monkeypatch, "8.6.1")
    sidecar.path_of(engine).write_text(sidecar.path_of(engine).read_text().replace("10.14.1", "8.6.1"))
    TrtRunner(engine, [eight]).close()
    with pytest.raises(FlashRNNError, match=r"libgood\.so was built for TensorRT 10\.14.*--tensorrt 8"):
        TrtRunner(engine, [good])


@pytest.fixture
def listens() -> Iterator[None]:
    """SIGINT raises, also where a shell started the tests in the background and had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("call", ["deserialize_cuda_engine", "execute_async_v3"])
def test_signals_wait_for_tensorrt(
    cuda: fake_tensorrt.Cuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, listens: None
) -> None:
    """Ctrl-C would be lost in a callback: it is raised when TensorRT has come back, and the runner goes on."""
    import tensorrt

    path = engines.write(models.network(LSTM), tmp_path / "m.engine")
    owner = tensorrt.Runtime if call == "deserialize_cuda_engine" else fake_tensorrt.Context
    real, done = getattr(owner, call), []

    def interrupted(*arguments: Any) -> Any:
        if not done:
            signal.raise_signal(signal.SIGINT)
        done.append(call)
        return real(*arguments)

    monkeypatch.setattr(owner, call, interrupted)
    if owner is tensorrt.Runtime:
        with pytest.raises(KeyboardInterrupt):
            TrtRunner(path)
    runner = TrtRunner(path)
    if owner is not tensorrt.Runtime:
        with pytest.raises(KeyboardInterrupt):
            runner.infer(feeds(3, 2))
    runner.infer(feeds(3, 2))
    assert done == [call, call]


def test_the_log_keeps_interrupts(cuda: fake_tensorrt.Cuda) -> None:
    """Ctrl-C inside a callback of TensorRT would end the process in C++: it comes after the call."""
    import tensorrt

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    log = api.make_log(tensorrt)
    log.listen = stop
    log.log(fake_tensorrt.Severity.ERROR, "a line\nand another")
    with pytest.raises(KeyboardInterrupt), api.interrupts(log):
        pass
    assert log.errors == ["a line and another"]
    with api.interrupts(log):
        pass
