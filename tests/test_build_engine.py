"""`build-engine`, with real TensorRT: TensorRT-RTX from the package index builds engines on a machine without a GPU.

The plugin library is the plugin's own code over the CPU's kernels, which no build of an engine runs.
"""

from __future__ import annotations

import functools
import json
import shlex
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import fake_tensorrt
import models
import numpy as np
import onnx
import pytest
import tensorrt_packages
import torch
from click.testing import CliRunner, Result
from cpu_library import CACHE, ROOT, library, tool_environment
from engines import info
from exported import rare
from onnx import TensorProto, helper

from flashrnn_deploy import gpus
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.cli import main
from flashrnn_deploy.engine import api, network, sidecar, targets
from flashrnn_deploy.engine import build as build_module
from flashrnn_deploy.engine.build import build_engine
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import convert_file, export
from flashrnn_deploy.nn import MultiHeadRNN
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.shapes import flashrnn_nodes, tensors_of

LSTM = RNNSpec("lstm", 2, 8)
PROGRAM = "import sys; from flashrnn_deploy.cli import main; sys.path.insert(0, sys.argv.pop(1)); main()"


@functools.cache
def plugin() -> Path:
    """The TensorRT plugin over the CPU's kernels, brought up to date once per session."""
    folder = CACHE / "build-tensorrt-plugin"
    options = [f"-DFLASHRNN_TENSORRT_INCLUDES={tensorrt_packages.headers_folder()}", "-G", "Ninja"]
    source = ROOT / "tests" / "tensorrt_host"
    for command in (
        ["cmake", "-S", source, "-B", folder, *options],
        ["cmake", "--build", folder, "--target", "plugin_tensorrt"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, env=tool_environment())
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "libplugin_tensorrt.so"


@pytest.fixture
def rtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tensorrt_packages.rtx_folder()))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["build-engine", *map(str, arguments)], catch_exceptions=False)


def in_process(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: plugins are registered once per process."""
    command = [sys.executable, "-c", PROGRAM, str(tensorrt_packages.rtx_folder()), "build-engine", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def refused(result: Any, message: str, code: int | None = None) -> None:
    """One error line, at the end; exit 1."""
    code = result.exit_code if hasattr(result, "exit_code") else result.returncode
    lines = [line for line in result.stderr.splitlines() if not line.startswith("[")]  # progress
    assert code == 1, result.stderr
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert message in lines[0]


# Engines.


def exported(spec: RNNSpec, **options: Any) -> Callable[[Path], Path]:
    return lambda folder: models.save(models.network(spec, **options), folder / "m.onnx")


def layers(cell: str, lens: bool, dtype: str, **options: Any) -> Callable[[Path], Path]:
    """A network of PyTorch, exported with states and lengths as inputs."""

    def make(folder: Path) -> Path:
        torch.manual_seed(0)
        net = MultiHeadRNN(4, 6, 2, cell, **options).eval()
        N, L = net.spec.num_directions, net.num_layers
        states = tuple(torch.rand(L * N, 3, 6) + 1 for _ in net.spec.definition.states)
        args = (torch.randn(3, 3, 4), states[0] if len(states) == 1 else states)
        result = export(net, (*args, torch.tensor([3, 1, 2])) if lens else args, dtype=dtype)
        return models.save(result.model, folder / "m.onnx")

    return make


def converted(folder: Path) -> Path:
    """A file of torch's own exporter, with ONNX's LSTM."""
    net = torch.nn.LSTM(4, 6, num_layers=2, bidirectional=True).eval()
    axes = {"x": {0: "time", 1: "batch"}}
    torch.onnx.export(
        net, (torch.randn(5, 3, 4),), str(folder / "old.onnx"), dynamo=False, input_names=["x"], dynamic_axes=axes
    )
    convert_file(folder / "old.onnx", folder / "m.onnx")
    return folder / "m.onnx"


BF16 = "bfloat16"
GRID = [
    rare(exported(RNNSpec(cell, 2, 8, N, dtype, layout, reverse), lens=lens), f"{cell}-{dtype}-N{N}-{layout}-{lens}")
    for cell in CELLS
    for dtype in ("float32", "float16", BF16)
    for N, reverse in ((1, 0), (1, 1), (2, 0))
    for layout in (0, 1)
    for lens in (False, True)
]


@pytest.mark.parametrize(
    ("make", "_name"),
    [
        (exported(LSTM, lens=True), "lengths"),
        (exported(RNNSpec("gru", 1, 8, 2, "float16", layout=1)), "two directions, batch first"),
        (exported(RNNSpec("slstm", 4, 8, dtype=BF16)), "heads"),
        (exported(RNNSpec("elman", 2, 8, relu=1, clip=2.0, reverse=1)), "backward"),
        (layers("lstm", True, "float16", num_layers=2, bidirectional=True, batch_first=True), "exported"),
        rare(converted, "converted"),
        *(
            rare(layers(c, n, d, num_layers=2), f"{c} {n} {d}")
            for c in CELLS
            for n in (0, 1)
            for d in ("float32", BF16)
        ),
        *GRID,
    ],
)
@pytest.mark.usefixtures("rtx")
def test_engines(tmp_path: Path, make: Callable[[Path], Path], _name: str) -> None:
    """The engine holds the plugin and not the function body, and nothing of ours is narrowed (case D15)."""
    path = make(tmp_path)
    model = onnx.load(path)
    said: list[str] = []
    report = build_engine(path, tmp_path / "m.engine", [plugin()], rtx=True, log=said.append)
    data = (tmp_path / "m.engine").read_bytes()
    for node, spec in flashrnn_nodes(model, tensors_of(model)):
        assert spec.op_type.encode() in data, node.name
    assert not [line for line in said if "clamp" in line.lower() or "narrow" in line.lower()]
    assert report == json.loads((tmp_path / "m.engine.json").read_text())
    assert sidecar.read(tmp_path / "m.engine") == report
    assert report["rtx"] is True
    assert report["tensorrt"] == "1.7.1"
    assert report["compute_capability"] is None
    assert report["targets"] == ["8.0", "8.6", "8.9", "12.0", "12.1"]
    assert report["library"]["file"] == "libplugin_tensorrt.so"
    wanted = {v.name for v in (*model.graph.input, *model.graph.output)}
    assert report["dtypes"].keys() == wanted
    assert report["shapes"].keys() == {v.name for v in model.graph.input}
    engines.check(tmp_path / "m.engine", report, sidecar.Running("1.7.1", True, "8.6"), plugin())
    with pytest.raises(FlashRNNError, match=r"this is TensorRT-RTX 1\.7\.1 on compute capability 9\.0"):
        engines.check(tmp_path / "m.engine", report, sidecar.Running("1.7.1", True, "9.0"), plugin())


@pytest.mark.usefixtures("rtx")
def test_command(tmp_path: Path) -> None:
    """For one GPU, at given shapes; nothing else is left in the folder."""
    path = models.save(models.network(LSTM, lens=True), tmp_path / "m.onnx")
    out = tmp_path / "out"
    options = ["--plugins", plugin(), "--rtx", "--gpu", "l4", "--shapes", "time=1:8:32", "--workspace", 256]
    result = run(path, "-o", out / "m.engine", *options)
    assert result.exit_code == 0, result.output
    assert "for compute capability 8.9" in result.stdout
    assert "building engine" in result.stderr
    assert sorted(p.name for p in out.iterdir()) == ["m.engine", "m.engine.json"]
    report = json.loads((out / "m.engine.json").read_text())
    assert report["targets"] == ["8.9"]
    assert report["shapes"]["x"] == {"min": [1, 1, 5], "opt": [8, 4, 5], "max": [32, 16, 5]}
    assert report["shapes"]["lens"]["max"] == [16]
    assert report["states"] == [["state0", "state1"]]
    assert report["axes"]["x"] == {"time": 0, "batch": 1}
    assert report["lengths"] == ["lens"]
    assert report["no_chunks"] is None
    words = ["build-engine", path, "--plugins", plugin(), "--shapes", "time=1:8:32", "--gpu", "l4", "--workspace", 256]
    assert report["command"] == [*map(str, words), "--rtx"]
    again = run(path, "-o", out / "m.engine", *options, "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["model"]["file"] == "m.onnx"


@pytest.mark.usefixtures("rtx")
@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tf32: bool) -> None:
    """Two layers of one file agree about float32: the op has no TF32, and TensorRT's own layers have it by default."""
    trt = api.load(rtx=True)
    kept: list[bool] = []
    constrain = network.constrain

    def note_flag(module: Any, net: Any, config: Any, nodes: Any) -> None:
        kept.append(config.get_flag(trt.BuilderFlag.TF32))
        constrain(module, net, config, nodes)

    monkeypatch.setattr(network, "constrain", note_flag)
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    build_engine(path, tmp_path / "m.engine", [plugin()], gpu="l4", rtx=True, tf32=tf32)
    assert kept == [tf32]


@pytest.mark.usefixtures("rtx")
def test_external_data(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(models.network(RNNSpec("lstm", 2, 32)), path, save_as_external_data=True, size_threshold=64, location="w")
    assert run(path, "-o", tmp_path / "m.engine", "--plugins", plugin(), "--rtx").exit_code == 0


@pytest.mark.usefixtures("rtx")
def test_model_without_the_op_needs_no_library(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    w = onnx.numpy_helper.from_array(np.ones((4, 3), np.float32), "w")
    graph = helper.make_graph([node], "g", [info("x", "batch", 4)], [info("y", "batch", 3)], [w])
    opsets = [helper.make_opsetid("", 17)]
    path = models.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    report = build_engine(path, tmp_path / "m.engine", rtx=True)
    assert (report["plugin"], report["library"]) == (None, None)


def bad_models() -> dict[str, tuple[onnx.ModelProto, str]]:
    unknown = models.network(LSTM)
    unknown.graph.node[0].op_type, unknown.graph.node[0].domain = "Unknown", "elsewhere"
    unknown.opset_import.append(helper.make_opsetid("elsewhere", 1))
    shape = helper.make_model(
        helper.make_graph(
            [helper.make_node("Reshape", ["x", "s"], ["y"])],
            "g",
            [info("x", "batch", 4), info("s", 2, dtype=TensorProto.INT64)],
            [info("y", None, None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return {
        "unknown": (unknown, "TensorRT-RTX 1.7.1 cannot read {path}: Unknown node 'project': "),
        "shape": (shape, "the input 's' decides the size of a tensor by its values"),
    }


@pytest.mark.parametrize("name", bad_models())
@pytest.mark.usefixtures("rtx")
def test_models_that_are_refused(tmp_path: Path, name: str) -> None:
    """One line with the node's or tensor's name; an older engine stays, and nothing is left."""
    model, message = bad_models()[name]
    path = models.save(model, tmp_path / "m.onnx")
    (tmp_path / "m.engine").write_text("older")
    refused(run(path, "-o", tmp_path / "m.engine", "--plugins", plugin(), "--rtx"), message.format(path=path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.engine", "m.onnx"]
    assert (tmp_path / "m.engine").read_text() == "older"


def test_plugin_that_is_not_loaded(tmp_path: Path) -> None:
    """Case D2."""
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    result = in_process(path, "-o", tmp_path / "m.engine", "--rtx")
    refused(
        result, "the FlashLSTM node 'rnn' needs the plugin FlashLSTM, version 1, namespace '', and no loaded library"
    )
    assert "--plugins LIB" in result.stderr
    assert "flashrnn-deploy build-plugins" in result.stderr
    loaded = in_process(path, "-o", tmp_path / "m.engine", "--rtx", "--plugins", plugin())
    assert loaded.returncode == 0, loaded.stderr


@pytest.mark.usefixtures("rtx")
def test_libraries_that_are_refused(tmp_path: Path) -> None:
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    command = [path, "-o", tmp_path / "m.engine", "--rtx", "--plugins"]
    without = (
        "was built without TensorRT support; build one that has it: flashrnn-deploy build-plugins MODEL.onnx --gpu GPU"
    )
    refused(run(*command, library()), f"{library()} {without} --tensorrt-include DIR")
    eight = engines.library(tmp_path / "libeight.so", engines.INFO.format("8.5"))
    refused(run(*command, eight), "was built for TensorRT 8.5, and this is TensorRT-RTX 1.7.1")
    refused(run(*command, tmp_path / "none.so"), "there is no plugin library")
    assert not (tmp_path / "m.engine").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "H200"], "has no target for h200 (compute capability 9.0); it has 7.5, 8.0, 8.6"),
        (["--gpu", "t4"], "has no float32 products for compute capability 7.5, and "),
        (["--gpu", "voodoo"], "voodoo"),
        (["--gpu", ""], "unknown GPU ''"),
        (["--workspace", "0"], "--workspace 0: give 1 to 8796093022207 MiB"),
        (["--workspace", str(2**43)], f"--workspace {2**43}: give 1 to 8796093022207 MiB"),
        (
            ["--workspace", "1", "--shapes", "time=1:8:100000"],
            "; --workspace 1 may be too little: raise it, or leave it out",
        ),
        (["--timing-cache", "times"], "--timing-cache: TensorRT-RTX measures nothing"),
        (["--shapes", "z=1"], "--shapes z=1: the model has no such input or axis"),
    ],
)
@pytest.mark.usefixtures("rtx")
def test_options_that_are_refused(tmp_path: Path, options: list[str], message: str) -> None:
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    refused(run(path, "-o", tmp_path / "new" / "m.engine", "--plugins", plugin(), "--rtx", *options), message)
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.usefixtures("rtx")
def test_the_largest_workspace(tmp_path: Path) -> None:
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    assert (
        run(path, "-o", tmp_path / "m.engine", "--plugins", plugin(), "--rtx", "--workspace", 2**43 - 1).exit_code == 0
    )


@pytest.mark.usefixtures("rtx")
def test_outputs_that_are_refused(tmp_path: Path) -> None:
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    before = path.read_bytes()
    refused(run(path, "-o", path, "--rtx"), f"-o {path} would replace {path}")
    refused(run(path, "-o", tmp_path, "--rtx"), "is a directory")
    assert path.read_bytes() == before
    assert not (tmp_path / "m.engine").exists()
    (tmp_path / "m.engine.json").write_text('{"mine": 1}')
    refused(run(path, "-o", tmp_path / "m.engine", "--rtx"), f"would replace {tmp_path / 'm.engine.json'}, which is no")
    assert (tmp_path / "m.engine.json").read_text() == '{"mine": 1}'


@pytest.mark.usefixtures("rtx")
def test_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that the library does not hold, once; and what a model without a time axis is, for a step of it."""
    model = models.network(LSTM)
    models.set_metadata(
        model, "flashrnn.axes", {n: {"time": None, "batch": None} for n in ("x", "state0", "out", "state1")}
    )
    path = models.save(model, tmp_path / "m.onnx")
    monkeypatch.setattr(api, "is_ours", lambda handle: True)
    for module in (build_module, targets):
        monkeypatch.setattr(module, "library_info", lambda path: {"cuda_architectures": ["86"], "kernels": []})
    result = run(path, "-o", tmp_path / "m.engine", "--plugins", plugin(), "--rtx")
    assert result.exit_code == 0, result.output
    slow, step = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert (
        "holds no kernel of its own for rnn on compute capability 8.6 or 8.9, and the slower alternating kernel" in slow
    )
    assert step.startswith("note: it has no known time axis: each run takes whole inputs, such as one step, ")


@pytest.mark.usefixtures("rtx")
def test_commands_for_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed and stored can be pasted, whatever the names."""
    monkeypatch.chdir(tmp_path)
    models.save(models.network(LSTM), tmp_path / "-m 1.onnx")
    result = run("--rtx", "--plugins", plugin(), "-o", "-b c.engine", "--", "-m 1.onnx")
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout.partition("run it with: ")[2])
    assert words[:4] == ["flashrnn-deploy", "run", "./-b c.engine", "--backend"]
    assert sidecar.read(tmp_path / "-b c.engine")["command"][:2] == ["build-engine", "./-m 1.onnx"]


@pytest.mark.usefixtures("rtx")
def test_interrupted_build(tmp_path: Path) -> None:
    """Ctrl-C inside TensorRT stops the build there, and leaves nothing."""
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    told = []

    def stop(done: int, total: int, what: str) -> None:
        told.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engine(path, tmp_path / "m.engine", [plugin()], rtx=True, progress=stop)
    assert told == [0]
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes TensorRT about 0.4 s: 16 MB of weights."""
    return models.save(models.network(RNNSpec("lstm", 1, 1024)), tmp_path_factory.mktemp("large") / "m.onnx")


@pytest.mark.parametrize("step", ["[0/", "[2/", "[4/"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_while_tensorrt_works(tmp_path: Path, large: Path, step: str, number: int, code: int) -> None:
    """Python raises at the entry of TensorRT's next callback, which forgets what is raised there."""
    options = ["build-engine", large, "-o", tmp_path / "m.engine", "--rtx", "--plugins", plugin()]
    command = [sys.executable, "-c", PROGRAM, str(tensorrt_packages.rtx_folder()), *map(str, options)]

    def listen() -> None:
        signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP, a shell's background jobs SIGINT

    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True, preexec_fn=listen) as process:
        assert process.stderr is not None
        assert any(line.startswith(step) for line in process.stderr)
        process.send_signal(number)
        said = process.stderr.read()
    assert process.returncode == code, said
    rest = [line for line in said.splitlines() if line and not line.startswith("[")]
    assert rest == (["Aborted!"] if code == 1 else [])
    assert list(tmp_path.iterdir()) == []


def test_interrupts_hold_the_handlers() -> None:
    """A signal raises when the block ends, whatever else is raised there; the handlers are those of before again."""
    before = signal.getsignal(signal.SIGINT)
    log = types.SimpleNamespace(interrupt=None)
    told = []

    def work() -> None:
        with api.interrupts(log), api.interrupts(log):
            signal.raise_signal(signal.SIGINT)
            told.append("goes on")
            raise FlashRNNError("build canceled")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert told == ["goes on"]
    assert log.interrupt is None
    assert signal.getsignal(signal.SIGINT) is before


def test_not_installed(tmp_path: Path) -> None:
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    program = PROGRAM.replace("import sys;", "import sys; sys.modules['tensorrt'] = None;")
    program = program.replace("import sys;", "import sys; sys.modules['tensorrt_rtx_bindings'] = None;", 1)
    for options, message in (
        ([], 'this needs tensorrt, which is not installed: pip install "flashrnn-deploy[tensorrt]"'),
        (["--rtx"], f"--rtx needs TensorRT-RTX, which is not installed: pip install {api.RTX_PACKAGES}"),
    ):
        command = [sys.executable, "-c", program, "", "build-engine", path, "-o", tmp_path / "m.engine", *options]
        refused(subprocess.run([*map(str, command)], capture_output=True, text=True), message)


TOOL = """#!{python}
import json, sys
arguments = sys.argv[1:]
output = arguments[arguments.index("-o") + 1]
print("a line", flush=True)
if "--workspace" in arguments:
    print("error: the tool's reason", file=sys.stderr)
    raise SystemExit(1)
open(output, "w").write("engine")
json.dump({{"arguments": arguments}}, open(output + ".json", "w"))
"""


def test_through_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TensorRT's Python module flashrnn_edge builds, at the shapes that the module would build for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flashrnn_edge").write_text(TOOL.format(python=sys.executable))
    (tmp_path / "bin" / "flashrnn_edge").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr(gpus, "get", lambda name: gpus.GPUS["h200"])
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    said: list[str] = []
    options = {"shapes": ["time=1:2:3"], "tf32": True, "log": said.append}
    report = build_engine(path, tmp_path / "m.engine", [Path("lib.so")], **options)
    assert said == ["a line"]
    assert report["arguments"][:3] == ["build", str(path), "-o"]
    assert report["arguments"][4:] == [
        *("-v", "--plugin", "lib.so"),
        *("--shape", "x=1x1x5:2x4x5:3x16x5", "--shape", "state0=2x1x1x16:2x1x4x16:2x1x16x16"),
        "--tf32",
    ]
    assert (tmp_path / "m.engine").read_text() == "engine"
    assert json.loads((tmp_path / "m.engine.json").read_text()) == report
    words = ["build-engine", str(path), "--plugins", "lib.so", "--shapes", "time=1:2:3", "--tf32"]
    assert report["command"] == words
    low = ["--workspace", 1]
    refused(run(path, "-o", tmp_path / "x.engine", *low), "the tool's reason; --workspace 1 may be too little")
    refused(run(path, "-o", tmp_path / "x.engine", "--timing-cache", tmp_path / "t"), "--timing-cache needs TensorRT's")
    two = ["--plugins", "a.so", "--plugins", "b.so"]
    refused(run(path, "-o", tmp_path / "x.engine", *two), "takes one --plugins LIB")
    assert not (tmp_path / "x.engine").exists()


def test_interrupted_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with the command; SIGTERM does not reach it."""
    (tmp_path / "flashrnn_edge").write_text(
        f"#!{sys.executable}\nprint('a line', flush=True)\n__import__('time').sleep(90)"
    )
    (tmp_path / "flashrnn_edge").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setattr(gpus, "get", lambda name: gpus.GPUS["h200"])
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")

    def stop(line: str) -> None:
        raise SystemExit(143)

    begin = time.monotonic()
    with pytest.raises(SystemExit):
        build_engine(path, tmp_path / "out" / "m.engine", log=stop)
    assert time.monotonic() - begin < 60
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("tool", [False, True])
def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: bool) -> None:
    """No name of a GPU helps."""
    if tool:
        monkeypatch.setitem(sys.modules, "tensorrt", None)
        (tmp_path / "flashrnn_edge").write_text("#!/bin/false\n")
        (tmp_path / "flashrnn_edge").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        fake_tensorrt.install(monkeypatch)
    plain = gpus.get

    def get(name: str) -> gpus.GPU:
        if name == "local":
            raise FlashRNNError("--gpu local needs an NVIDIA driver; name a GPU instead: l4")
        return plain(name)

    monkeypatch.setattr(gpus, "get", get)
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    result = run(path, "-o", tmp_path / "m.engine", "--gpu", "l4")
    refused(result, "and there is none here: build it on that machine, or with --rtx")
    assert "name a GPU" not in result.stderr


def test_another_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT, unlike TensorRT-RTX, builds for the GPU in the machine."""
    plain = gpus.get
    monkeypatch.setattr(gpus, "get", lambda name: gpus.GPUS["h200"] if name == "local" else plain(name))
    fake_tensorrt.install(monkeypatch)
    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    message = (
        "--gpu l4: TensorRT builds for the GPU that it runs on, H200 SXM of compute capability 9.0, and l4 has 8.9"
    )
    refused(run(path, "-o", tmp_path / "m.engine", "--gpu", "l4"), message)


@pytest.mark.usefixtures("rtx")
def test_engine_without_a_gpu_is_one_line(tmp_path: Path) -> None:
    """Loading needs a GPU: TensorRT's own refusal, in one line."""
    import tensorrt_rtx_bindings as trt

    path = models.save(models.network(LSTM), tmp_path / "m.onnx")
    build_engine(path, tmp_path / "m.engine", [plugin()], rtx=True)
    data = (tmp_path / "m.engine").read_bytes()
    log = api.make_log(trt)
    if trt.Runtime(log).deserialize_cuda_engine(data) is None:  # it loads where a GPU is
        assert "Cuda Runtime" in log.take()
    assert trt.Runtime(log).deserialize_cuda_engine(data[:100]) is None
    assert log.take() != "it does not say why"
