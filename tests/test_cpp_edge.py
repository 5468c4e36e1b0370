"""samples/cpp_edge where there is neither TensorRT nor CUDA: its sidecar, model reader and arrays beside Python's.

Sessions and engines run on a GPU (docs/tensorrt.md).
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import engines
import ml_dtypes
import models
import numpy as np
import onnx
import pytest
from cases import model
from cpu_library import CACHE, ROOT, tool_environment
from onnx import TensorProto, helper
from test_tensorrt_plugin import include

from flashrnn_deploy.engine import sidecar
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import DOMAIN, RNNSpec

SAMPLE = ROOT / "samples" / "cpp_edge"
SOURCES = [SAMPLE / f"{name}.cc" for name in ("array", "files", "json", "onnx_file", "rebuild", "shapes", "sidecar")]
HERE = ("8.5.3", "8.7")
PYTHON_HERE = sidecar.Running(HERE[0], False, HERE[1])


@pytest.mark.parametrize("release", ["8.5", "8.6", "10.0", "10.14", "11.1"])
def test_the_rest_compiles_against_each_release(release: str) -> None:
    """Engines, sessions and, where NvOnnxParser.h is beside the headers, the builder."""
    places = [Path(p).resolve().parents[1] for p in [shutil.which("nvcc")] if p] + [Path("/usr/local/cuda")]
    cuda = next((p / "include" for p in places if (p / "include" / "cuda_runtime_api.h").is_file()), None)
    if cuda is None:
        pytest.skip("there are no CUDA headers here")
    headers = include(release)
    options = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    options += ["-Wno-deprecated-declarations", "-isystem", headers, "-isystem", cuda]
    names = ["arguments", "engine", "session", "runtime", "main"] + ["builder"] * (headers / "NvOnnxParser.h").is_file()
    done = subprocess.run(["g++", *options, *(SAMPLE / f"{n}.cc" for n in names)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@functools.cache
def program() -> Path:
    CACHE.mkdir(exist_ok=True)
    out = CACHE / "edge_tool"
    warnings = ["-std=c++17", "-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror"]
    source = ROOT / "tests" / "tensorrt_host" / "edge_tool.cc"
    command = ["g++", *warnings, f"-I{SAMPLE}", source, *SOURCES, "-o", out]
    done = subprocess.run(command, capture_output=True, text=True, env=tool_environment())
    assert done.returncode == 0, done.stderr
    return out


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program(), *map(str, arguments)], capture_output=True, text=True)


def refusal(*arguments: object) -> str:
    done = call(*arguments)
    assert done.returncode == 1, done
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.removeprefix("error: ").strip()


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine with a sidecar of Python's, its model and its library."""
    path = tmp_path / "m.engine"
    path.write_bytes(bytes(range(256)) * 20)
    (tmp_path / "m.onnx").write_bytes(b"model")
    (tmp_path / "libflashrnn.so").write_bytes(b"library")
    facts: dict[str, Any] = {
        "tensorrt": HERE[0], "rtx": False, "compute_capability": HERE[1],
        "shapes": {"x": {"min": [1, 1], "opt": [2, 1], "max": [3, 1]}}, "states": [["h0", "hn é\"\\"]],
        "axes": {"x": {"time": 0, "batch": None}}, "dtypes": {"x": "float32"},
    }  # fmt: skip
    report = sidecar.describe(path.read_bytes(), tmp_path / "m.onnx", tmp_path / "libflashrnn.so", **facts)
    sidecar.path_of(path).write_text(json.dumps(report, indent=2))
    return path


def python_refusal(engine: Path, *libraries: Path) -> str:
    with pytest.raises(FlashRNNError) as caught:
        engines.check(engine, sidecar.read(engine), PYTHON_HERE, *libraries)
    return str(caught.value)


def same_until_cure(cpp: str, python: str) -> bool:
    """Both programs say the same; what to do differs in the names of flags."""
    return re.split(";|: pass|, and this", cpp)[0] == re.split(";|: pass|, and this", python)[0]


def test_a_sidecar_of_python_is_taken(engine: Path) -> None:
    assert call("sidecar", engine, *HERE, engine.parent / "libflashrnn.so").returncode == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tensorrt", "10.14.1"), ("compute_capability", "9.0"), ("rtx", True), ("format", 2),
        ("engine", {"bytes": 5120, "sha256": "0" * 64}), ("engine", {"bytes": 1, "sha256": "0" * 64}),
        ("states", [["h0"]]), ("shapes", None), ("plugin", {"version": "2", "namespace": ""}),
        ("library", {"file": "libflashrnn.so", "sha256": "0" * 64, "bytes": 7}),
    ],
)  # fmt: skip
def test_an_edited_sidecar_is_refused_as_python_refuses_it(engine: Path, key: str, value: Any) -> None:
    path = sidecar.path_of(engine)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    library = engine.parent / "libflashrnn.so"
    said = refusal("sidecar", engine, *HERE, library)
    assert same_until_cure(said, python_refusal(engine, library))
    assert "rebuild it with: flashrnn_edge build m.onnx --plugin libflashrnn.so" in said
    assert f" -o {engine}" in said


def edit(engine: Path, **changed: Any) -> None:
    path = sidecar.path_of(engine)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def test_the_command_that_builds_an_engine_again(engine: Path) -> None:
    """It can be pasted into a shell, and says what the sidecar says."""
    words = ["build-engine", "a model.onnx", "--plugins", "./it's/lib.so", "--shapes", "time=1:2:3", "--gpu", "h200",
             "--workspace", "64", "--tf32"]  # fmt: skip
    shapes = {"x y": {"min": [1, 1], "opt": [2, 1], "max": [3, 1]}, "s": {"min": [], "opt": [], "max": []}}
    edit(engine, tensorrt="10.0.1", command=words, shapes=shapes, sessions=4, cublas=True)
    said = refusal("sidecar", engine, *HERE, engine.parent / "libflashrnn.so")
    assert shlex.split(said.split("rebuild it with: ")[1]) == [
        "flashrnn_edge", "build", "a model.onnx", "--plugin", "./it's/lib.so", "--workspace", "64", "--tf32",
        "--shape", "x y=1x1:2x1:3x1", "--sessions", "4", "--cublas", "-o", str(engine),
    ]  # fmt: skip


def test_an_engine_without_plugins_is_built_again_without(engine: Path) -> None:
    edit(engine, tensorrt="10.0.1", plugin=None, library=None)
    assert "build m.onnx --shape x=1x1:2x1:3x1 -o" in refusal("sidecar", engine, *HERE)


def test_an_engine_of_tensorrt_rtx(engine: Path) -> None:
    edit(engine, rtx=True, tensorrt="1.7.1", compute_capability=None, targets=["8.0", "8.6"])
    said = refusal("sidecar", engine, *HERE, engine.parent / "libflashrnn.so")
    assert f"{engine} was built with TensorRT-RTX 1.7.1 for compute capability 8.0 or 8.6; this is TensorRT 8.5" in said
    assert (
        "an engine of TensorRT-RTX, which this program does not run (flashrnn-deploy build-engine m.onnx --plugins "
        f"libflashrnn.so --rtx -o {engine} makes it); for this program, rebuild it with: flashrnn_edge build" in said
    )


def test_what_is_missing(engine: Path) -> None:
    assert "holds the FlashRNN plugins, version 1" in refusal("sidecar", engine, *HERE)
    sidecar.path_of(engine).write_text('{"format": 1, ')
    said = refusal("sidecar", engine, *HERE)
    assert "m.engine.json is not JSON: " in said
    assert (
        f"; rebuild it with: flashrnn_edge build MODEL.onnx --plugin LIB --shape NAME=MIN:OPT:MAX -o {engine}" in said
    )
    sidecar.path_of(engine).unlink()
    sidecar.path_of(engine).mkdir()
    assert refusal("sidecar", engine, *HERE) == f"cannot read {engine}.json: Is a directory"
    sidecar.path_of(engine).rmdir()
    assert "has no sidecar m.engine.json" in refusal("sidecar", engine, *HERE)


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b[:700] + b"\0" + b[701:], lambda b: b""])
def test_damaged_engines(engine: Path, change: Any) -> None:
    engine.write_bytes(change(engine.read_bytes()))
    said = refusal("sidecar", engine, *HERE, engine.parent / "libflashrnn.so")
    assert same_until_cure(said, python_refusal(engine))


def test_a_sidecar_of_the_program_is_read_by_python(engine: Path) -> None:
    library = engine.parent / "libflashrnn.so"
    sidecar.path_of(engine).unlink()
    model_path = engine.parent / "m.onnx"
    assert call("describe", engine, model_path, library, *HERE, "time=1:2:3").returncode == 0
    report = sidecar.read(engine)
    engines.check(engine, report, PYTHON_HERE, library)
    assert report["states"] == [['h"0é', "hn"]]
    again = ["build-engine", str(model_path), "--plugins", str(library), "--shapes", "time=1:2:3", "--workspace", "64"]
    assert report["command"] == [*again, "--tf32"]
    said = refusal("sidecar", engine, "8.6.1", HERE[1], library)
    options = f"build {model_path} --plugin {library} --workspace 64 --tf32 --sessions 2 --cublas -o {engine}"
    assert said.endswith(f"rebuild it with: flashrnn_edge {options}")


# Where an engine is written, and its shapes -----------------------------------------------------------------------


def test_what_an_engine_would_replace(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(engine.parent)
    assert call("output", engine).returncode == 0  # one with a sidecar
    assert call("output", "new.engine", "m.onnx", "").returncode == 0
    assert "there is no folder" in refusal("output", "no/m.engine")
    assert "would replace m.onnx: choose another" in refusal("output", "./m.onnx", "m.onnx")
    Path("m.onnx.json").symlink_to("libflashrnn.so")
    assert "would replace libflashrnn.so" in refusal("output", "m.onnx", "libflashrnn.so")
    assert "/dev/null is no file that could be replaced" in refusal("output", "/dev/null")
    Path("a.json").write_text('{"format": 1}')
    assert "would replace a.json, which is not the sidecar of an engine" in refusal("output", "a")


def test_files_keep_their_kind(tmp_path: Path) -> None:
    """A link stays one; a folder is named, not written into or read."""
    np.save(tmp_path / "x.npy", np.ones(3, np.float32))
    (tmp_path / "there.npy").touch()
    (tmp_path / "link.npy").symlink_to(tmp_path / "there.npy")
    assert call("npy", tmp_path / "x.npy", "float32", tmp_path / "link.npy").returncode == 0
    assert (tmp_path / "link.npy").is_symlink()
    np.testing.assert_array_equal(np.load(tmp_path / "there.npy"), np.ones(3))
    assert refusal("npy", tmp_path, "float32", tmp_path / "y.npy") == f"cannot read {tmp_path}: Is a directory"
    assert f"cannot write {tmp_path}" in refusal("npy", tmp_path / "x.npy", "float32", tmp_path)


SHAPES = [("x", "time", "batch", 6), ("h", 1, "batch", None), ("s",)]


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = [engines.info(name, *dims) for name, *dims in SHAPES]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", values, [engines.info("y")])
    return models.save(helper.make_model(graph), tmp_path_factory.mktemp("dynamic") / "m.onnx")


def test_shapes_of_inputs_and_axes(dynamic: Path) -> None:
    done = call("shapes", dynamic, "time=1:5:9", "batch=2", "h=1x2x3:1x2x4:1x2x7")
    assert done.stdout.splitlines() == [
        "h [1, 2, 3] [1, 2, 4] [1, 2, 7]", "s [] [] []", "x [1, 2, 6] [5, 2, 6] [9, 2, 6]"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "axis 1 of the input h [1, -1, -1] has no size: give --shape batch=1:100:512"),
        (["batch=2", "time=1"], "axis 2 of the input h [1, -1, -1] has no size: give --shape h=MIN:OPT:MAX"),
        (["time=5:1:3"], "--shape time=5:1:3: 5:1:3 is not MIN:OPT:MAX in rising order"),
        (["x=1x2x6:2x1x6:3x3x6"], "2:1:3 is not MIN:OPT:MAX in rising order"),
        (["time=a:b:c"], "--shape time=a:b:c: write it as NAME=MIN:OPT:MAX"),
        (["time=1:2"], "--shape time=1:2: give one shape, or MIN:OPT:MAX"),
        (["time=1x2"], "--shape time=1x2: time is an axis and has one size"),
        (["time"], "--shape time: write it as"),
        (["=3"], "--shape =3: write it as"),
        (["tim=3"], "--shape tim=3: the model has no input or axis of this name; its inputs are h, s, x"),
        (["h=1x2x3", "batch=4"], "--shape batch=4: another --shape gives the axis 1 of h the size 2"),
        (["x=1x1x7", "h=1x1x1"], "--shape x=1x1x7: [1, 1, 7] does not fit the model's x [-1, -1, 6]"),
        (["x=100000x100000x6", "h=1x1x1"], "has more than 2147483647 elements"),
    ],
)
def test_shapes_that_cannot_be(dynamic: Path, options: list[str], message: str) -> None:
    assert message in refusal("shapes", dynamic, *options)


# Models -----------------------------------------------------------------------------------------------------------


def read_model(proto: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, dict[str, Any]]:
    done = call("model", models.save(proto, folder / "m.onnx"), folder / "out.onnx")
    assert done.returncode == 0, done.stderr
    return onnx.load(folder / "out.onnx"), json.loads(done.stdout)


def test_our_functions_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    proto = model(RNNSpec("gru", 2, 4))
    other = helper.make_function("own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [])
    proto.functions.append(other)
    got, facts = read_model(proto, tmp_path)
    assert [f.domain for f in got.functions] == ["own"]
    assert got.graph == proto.graph
    assert facts["lengths"] == ["sequence_lens"]
    assert all(node.domain == DOMAIN for node in got.graph.node)


def test_shape_with_a_range_becomes_a_slice(tmp_path: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    nodes = [
        helper.make_node("Shape", ["x"], ["a"], start=1, end=-1),
        helper.make_node("Shape", ["x"], ["b"], start=-2),
        helper.make_node("Shape", ["x"], ["c"]),
    ]
    ints = [helper.make_tensor_value_info(n, TensorProto.INT64, [None]) for n in "abc"]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * 4)
    proto = helper.make_model(helper.make_graph(nodes, "g", [x], ints), opset_imports=[helper.make_opsetid("", 17)])
    got, _ = read_model(proto, tmp_path)
    onnx.checker.check_model(got)
    assert [n.op_type for n in got.graph.node] == ["Shape", "Slice", "Shape", "Slice", "Shape"]
    results = ReferenceEvaluator(got).run(None, {"x": np.zeros((2, 3, 4, 5), np.float32)})
    assert [r.tolist() for r in results] == [[3, 4], [4, 5], [2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("spec", "why"),
    [(RNNSpec("lstm", 1, 4, reverse=1), "runs backward"), (RNNSpec("lstm", 1, 4), "has no state inputs and outputs")],
)
def test_models_without_chunks(tmp_path: Path, spec: RNNSpec, why: str) -> None:
    assert why in read_model(model(spec), tmp_path)[1]["no_chunks"]


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"\xff" + b, lambda b: b""])
def test_damaged_models(tmp_path: Path, damage: Any) -> None:
    (tmp_path / "m.onnx").write_bytes(damage(model(RNNSpec("gru", 2, 4)).SerializeToString()))
    assert "is not an ONNX file" in refusal("model", tmp_path / "m.onnx", tmp_path / "out.onnx")


# Arrays -----------------------------------------------------------------------------------------------------------


def test_conversions_are_numpys(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 20000, np.uint32).view(np.float32)
    edges = np.float32([0, -0.0, 65504, 65519.9, 65520, 1e-8, 2**-24, 2**-25, 2**-14, 6.1e-5, np.inf, -np.inf])
    values = np.concatenate([bits[np.isfinite(bits)], random.normal(size=20000).astype(np.float32), edges])
    np.save(tmp_path / "x.npy", values)
    for name, dtype in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
        assert call("npy", tmp_path / "x.npy", name, tmp_path / "y.npy").returncode == 0
        with np.errstate(over="ignore"):
            expected = values.astype(dtype)
        got = np.load(tmp_path / "y.npy")
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


def test_npy_files(tmp_path: Path) -> None:
    for array in (np.arange(6, dtype=np.int64).reshape(1, 2, 3), np.float32(3.5), np.zeros((0, 4), np.float32)):
        np.save(tmp_path / "x.npy", array)
        name = str(np.asarray(array).dtype)
        assert call("npy", tmp_path / "x.npy", name, tmp_path / "y.npy").returncode == 0
        np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), array)
    np.save(tmp_path / "x.npy", np.int64([2**40]))
    assert "holds 1099511627776, which is no int32" in refusal("npy", tmp_path / "x.npy", "int32", tmp_path / "y.npy")
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert "holds elements of type '<f8'" in refusal("npy", tmp_path / "x.npy", "float32", tmp_path / "y.npy")
    (tmp_path / "x.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4'")
    assert "is not a whole .npy file" in refusal("npy", tmp_path / "x.npy", "float32", tmp_path / "y.npy")
