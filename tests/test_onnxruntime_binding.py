"""The binding: exports, registration, statuses, shapes, runtimes from 1.17 on, and the declaration of the C API."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from cases import model, tensors
from cpu_library import (
    CACHE,
    ROOT,
    SANITIZE,
    build_folder,
    has_program,
    library,
    make_session,
    op_session,
    run_op,
    tool_environment,
)
from onnx import helper, numpy_helper
from runtimes import OLD_RUNTIMES, environment

from flashrnn_deploy import __version__
from flashrnn_deploy.op import INPUTS, OUTPUTS, RNNSpec

SPEC = RNNSpec("lstm", num_heads=2, head_dim=5)
HEADER_PACKAGE = "com.github.asus4.onnxruntime@0.4.9"  # its API version is 29; no wheel on PyPI ships the header


def output_of(*command: object) -> str:
    return subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=True, env=tool_environment()
    ).stdout


# The library ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(bool(SANITIZE), reason="a sanitizer exports symbols of its own")
def test_exports_two_symbols_only() -> None:
    symbols = [line.split()[-1] for line in output_of("nm", "-D", "--defined-only", library()).splitlines()]
    assert sorted(symbols) == ["RegisterCustomOps", "flashrnn_info"]


@pytest.mark.skipif(bool(SANITIZE), reason="a sanitizer links its runtime")
def test_links_the_c_library_only() -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", output_of("readelf", "-d", library()))
    assert any(name.startswith("libc.so") for name in needed), needed
    assert all(name.startswith(("libc.so", "libm.so", "libpthread.so", "ld-linux")) for name in needed), needed


@pytest.mark.skipif(bool(SANITIZE), reason="a sanitizer adds symbols of its own")
def test_vector_code_shares_no_symbol() -> None:
    """A function compiled for AVX-512 that another object could pick up would end the process on older processors."""
    objects = list(build_folder().glob("**/flashrnn_step_*/**/step.cc.o"))
    assert objects
    for path in objects:
        defined = [s.split() for s in output_of("nm", "--defined-only", path).splitlines()]
        shared = [name for _, kind, name in defined if kind.isupper()]
        assert all(re.search(r"k(Baseline|Avx2|Avx512)$|k(Baseline|Avx2|Avx512)E$", name) for name in shared), shared


def info_of(path: Path) -> dict[str, Any]:
    handle = ctypes.CDLL(str(path))
    handle.flashrnn_info.restype = ctypes.c_char_p
    return json.loads(handle.flashrnn_info())


def test_info() -> None:
    info = info_of(library())
    assert info["version"] == __version__
    assert re.fullmatch("[0-9a-f]{64}", info["source_hash"])
    assert info["architecture"] == os.uname().machine
    assert info["cpu_selected"] in info["cpu_kernels"]
    assert info["sanitize"] == SANITIZE
    assert info["cuda_architectures"] == []


@pytest.mark.full
def test_builds_from_the_shipped_folder(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "plugins", tmp_path / "package" / "plugins")
    (tmp_path / "package" / "__init__.py").write_text('__version__ = "7.8.9"\n')
    folder = tmp_path / "build"
    for command in (["-S", tmp_path / "package/plugins", "-B", folder, "-G", "Ninja"], ["--build", folder]):
        output_of("cmake", *command)
    assert info_of(folder / "libflashrnn.so")["version"] == "7.8.9"


# Registration -----------------------------------------------------------------------------------------------------


def test_registering_twice_is_registering_once() -> None:
    options = ort.SessionOptions()
    for _ in range(3):
        options.register_custom_ops_library(str(library()))
    proto = model(SPEC, body=False).SerializeToString()
    inputs = tensors(SPEC, 3, 2)
    for _ in range(2):
        session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
        assert session.run(None, inputs)[0].tobytes() == run_op(SPEC, inputs)[0].tobytes()


def test_a_copy_of_the_same_build_is_the_same_library(tmp_path: Path) -> None:
    copy = shutil.copy(library(), tmp_path / "copy.so")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library()))
    options.register_custom_ops_library(str(copy))
    ort.InferenceSession(model(SPEC, body=False).SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_another_build_is_refused_by_name() -> None:
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library()))
    options.add_session_config_entry("flashrnn.library", "0.0.1 other")
    with pytest.raises(Exception, match=r"another build \(0\.0\.1 other\).*register one library only"):
        options.register_custom_ops_library(str(library()))


def test_many_sessions() -> None:
    proto, inputs = model(SPEC, body=False), tensors(SPEC, 3, 2)
    expected = run_op(SPEC, inputs)[0].tobytes()
    for _ in range(50):
        assert make_session(proto).run(None, inputs)[0].tobytes() == expected


def test_the_kernel_wins_over_the_body() -> None:
    inputs = tensors(SPEC, 3, 2)
    y = make_session(model(SPEC, body=True)).run(None, inputs)[0]
    assert y.tobytes() == run_op(SPEC, inputs)[0].tobytes()


def test_too_old_a_runtime_gets_a_status() -> None:
    message: list[bytes] = []
    create_status_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
    create_status = create_status_type(lambda code, text: message.append(text) or 4242)
    old_api = (ctypes.c_void_p * 200)(ctypes.cast(create_status, ctypes.c_void_p))
    get_api_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
    get_api = get_api_type(lambda version: ctypes.addressof(old_api) if version <= 16 else None)
    version_type = ctypes.CFUNCTYPE(ctypes.c_void_p)
    name = ctypes.create_string_buffer(b"1.16.3")
    version = version_type(lambda: ctypes.addressof(name))
    base = (ctypes.c_void_p * 2)(ctypes.cast(get_api, ctypes.c_void_p), ctypes.cast(version, ctypes.c_void_p))
    register = ctypes.CDLL(str(library())).RegisterCustomOps
    register.restype = ctypes.c_void_p
    assert register(None, base) == 4242
    assert message == [b"flashrnn: needs ONNX Runtime 1.17 or newer, this is 1.16.3"]


# Statuses ---------------------------------------------------------------------------------------------------------


def shapeless(spec: RNNSpec) -> onnx.ModelProto:
    """The op with nothing known about any shape: every check is the kernel's own."""
    proto = model(spec, body=False)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.ClearField("shape")
    return proto


BAD_INPUTS = {
    "wx rank": ("wx", (3, 40), r"wx has shape \[3, 40\], expected rank 3"),
    "wx last dim": ("wx", (3, 2, 39), r"wx has shape \[3, 2, 39\], expected \[3, 2, 40\]"),
    "r rank": ("r", (4, 2, 5, 5), r"r has shape \[4, 2, 5, 5\], expected rank 5 \[N, G, H, D, D\]"),
    "r gates": ("r", (1, 3, 2, 5, 5), r"r has shape \[1, 3, 2, 5, 5\], expected \[1, 4, 2, 5, 5\]"),
    "r not square": ("r", (1, 4, 2, 5, 6), r"r has shape .*, expected \[1, 4, 2, 5, 5\]"),
    "r directions": ("r", (3, 4, 2, 5, 5), r"expected 1 or 2 directions"),
    "r no units": ("r", (1, 4, 2, 0, 0), r"expected at least one head and one unit"),
    "b": ("b", (1, 4, 2, 6), r"b has shape \[1, 4, 2, 6\], expected \[1, 4, 2, 5\]"),
    "b rank": ("b", (40,), r"b has shape \[40\], expected \[1, 4, 2, 5\]"),
    "sequence_lens": ("sequence_lens", (3,), r"sequence_lens has shape \[3\], expected \[1\] or \[B\] = \[2\]"),
    "sequence_lens rank": ("sequence_lens", (2, 1), r"sequence_lens has shape \[2, 1\]"),
    "initial_states batch": ("initial_states", (2, 1, 1, 10), r"expected \[2, 1, 2, 10\] \[S, N, B, H\*D\]"),
    "initial_states count": ("initial_states", (1, 1, 2, 10), r"initial_states has shape \[1, 1, 2, 10\]"),
    "initial_states rank": ("initial_states", (2, 2, 10), r"initial_states has shape \[2, 2, 10\]"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_shapes_are_statuses(case: str) -> None:
    name, shape, message = BAD_INPUTS[case]
    session = make_session(shapeless(SPEC))
    good = tensors(SPEC, 3, 2)
    with pytest.raises(Exception, match=message) as caught:
        session.run(None, good | {name: np.ones(shape, good[name].dtype)})
    assert "FlashLSTM" in str(caught.value)
    assert session.run(None, good)[0].tobytes() == run_op(SPEC, good)[0].tobytes(), "the session works on"


def test_two_directions_cannot_be_reversed() -> None:
    spec = replace(SPEC, num_directions=2)
    proto = shapeless(spec)
    attribute(proto, "reverse").i = 1
    with pytest.raises(Exception, match=r"reverse is 1, expected 0 with the two directions"):
        make_session(proto).run(None, tensors(spec, 3, 2))


def attribute(proto: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    return next(a for a in proto.graph.node[0].attribute if a.name == name)


BAD_ATTRIBUTES = {
    "layout": ("lstm", "layout", 2, "attribute layout is 2, expected 0 or 1"),
    "reverse": ("gru", "reverse", -1, "attribute reverse is -1, expected 0 or 1"),
    "relu": ("elman", "relu", 3, "attribute relu is 3, expected 0 or 1"),
    "negative clip": ("lstm", "clip", -1.0, "attribute clip is -1, expected a finite number that is not negative"),
    "infinite clip": ("lstm", "clip", np.inf, "attribute clip is inf"),
    "floor": ("slstm", "normalizer_floor", np.nan, "attribute normalizer_floor is nan"),
    "clip of the sLSTM": ("slstm", "clip", 2.0, "FlashSLSTM: attribute clip is 2, expected 0 for this op"),
}


@pytest.mark.parametrize("case", BAD_ATTRIBUTES)
def test_bad_attributes_are_statuses(case: str) -> None:
    cell, name, value, message = BAD_ATTRIBUTES[case]
    proto = model(replace(SPEC, cell=cell), body=False)
    found = attribute(proto, name)
    if found.type == onnx.AttributeProto.FLOAT:
        found.f = value
    else:
        found.i = value
    with pytest.raises(Exception, match=message):
        make_session(proto)


@pytest.mark.parametrize("name", ["layout", "clip"])
def test_a_missing_attribute_is_a_status(name: str) -> None:
    proto = model(SPEC, body=False)
    proto.graph.node[0].attribute.remove(attribute(proto, name))
    with pytest.raises(Exception, match=name):
        make_session(proto)


def test_mixed_dtypes_are_refused() -> None:
    proto = model(SPEC, body=False)
    proto.graph.input[1].type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    with pytest.raises(Exception, match="FlashLSTM"):
        make_session(proto)


# Shapes and weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", [0, 1])
def test_output_shapes_are_inferred(layout: int, dtype: str) -> None:
    """The outputs' own declaration is removed, so what the session reports was inferred."""
    spec = replace(SPEC, layout=layout, num_directions=2, dtype=dtype)
    proto = model(spec, body=False)
    for value in proto.graph.output:
        value.type.tensor_type.ClearField("shape")
    y, states = make_session(proto).get_outputs()
    assert y.shape == [*(["batch", "time"] if layout else ["time", "batch"]), 20]
    assert states.shape == [2, 2, "batch", 10]
    assert y.type == f"tensor({dtype.replace('float32', 'float')})"


def test_a_dimension_without_a_name_stays_unknown() -> None:
    """ONNX Runtime takes -1 for a size and works it into a Reshape behind the op, which then has two of them."""
    proto = model(SPEC, body=False)
    for value in (*proto.graph.input, *proto.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")
    units = numpy_helper.from_array(np.array([2, 5]), "units")
    steps = helper.make_node("Shape", ["y"], ["steps"], end=2)
    shape = helper.make_node("Concat", ["steps", "units"], ["shape"], axis=0)
    proto.graph.node.extend([steps, shape, helper.make_node("Reshape", ["y", "shape"], ["heads"])])
    proto.graph.initializer.append(units)
    proto.graph.output.append(helper.make_tensor_value_info("heads", onnx.TensorProto.FLOAT, [None] * 4))
    inputs = tensors(SPEC, 3, 2)
    y, heads = make_session(proto).run(["y", "heads"], {n: inputs[n] for n in INPUTS})
    assert heads.shape == (3, 2, 2, 5)
    np.testing.assert_array_equal(heads.reshape(y.shape), y)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_constant_weight_gives_the_same_bits(dtype: str) -> None:
    spec = RNNSpec("gru", num_heads=2, head_dim=37, num_directions=2, dtype=dtype)
    inputs = tensors(spec, 5, 3)
    expected = [a.tobytes() for a in run_op(spec, inputs)]
    proto = model(spec, body=False)
    for name in ("r", "b"):
        proto.graph.initializer.append(numpy_helper.from_array(inputs[name], name))
        proto.graph.input.remove(next(i for i in proto.graph.input if i.name == name))
    feed = {n: a for n, a in inputs.items() if n not in ("r", "b")}
    assert [a.tobytes() for a in make_session(proto).run(None, feed)] == expected


def test_a_bad_constant_weight_is_a_status_of_the_session() -> None:
    proto = shapeless(SPEC)
    proto.graph.input.remove(next(i for i in proto.graph.input if i.name == "r"))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((1, 3, 2, 5, 5), np.float32), "r"))
    with pytest.raises(Exception, match=r"r has shape \[1, 3, 2, 5, 5\], expected \[1, 4, 2, 5, 5\]"):
        make_session(proto)


def test_inside_a_branch() -> None:
    """A weight of the outer graph, used within If."""
    spec, inputs = SPEC, tensors(SPEC, 3, 2)
    inner = model(spec, body=False).graph
    branches = []
    for value in (True, False):
        branch = helper.make_graph(inner.node, f"branch_{value}", [], inner.output)
        branches.append(branch)
    outer = helper.make_graph(
        [helper.make_node("If", ["choose"], list(OUTPUTS), then_branch=branches[0], else_branch=branches[1])],
        "outer",
        [
            helper.make_tensor_value_info("choose", onnx.TensorProto.BOOL, []),
            *(i for i in inner.input if i.name != "r"),
        ],
        inner.output,
        [numpy_helper.from_array(inputs["r"], "r")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("flashrnn", 1)]
    session = make_session(helper.make_model(outer, opset_imports=opsets, ir_version=8))
    feed = {n: a for n, a in inputs.items() if n != "r"}
    for choice in (True, False):
        y = session.run(["y"], feed | {"choose": np.array(choice)})[0]
        assert y.tobytes() == run_op(spec, inputs)[0].tobytes()


# Other runtimes ---------------------------------------------------------------------------------------------------

CHILD = """
import sys
import numpy as np
import onnxruntime as ort
folder, library, version = sys.argv[1:]
assert ort.__version__ == version, ort.__version__
for name in ("float32", "float16", "bad"):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    for _ in range(2):
        options.register_custom_ops_library(library)
    try:
        session = ort.InferenceSession(f"{folder}/{name}.onnx", options, providers=["CPUExecutionProvider"])
    except Exception as error:
        assert name == "bad" and "attribute layout is 2, expected 0 or 1" in str(error), error
        continue
    data = np.load(f"{folder}/{name}.npz")
    inputs = {n: data[n] for n in ("wx", "r", "b", "sequence_lens", "initial_states")}
    for n, value in zip(("y", "final_states"), session.run(None, inputs)):
        assert value.tobytes() == data[n].tobytes(), (name, n)
    try:
        session.run(None, inputs | {"sequence_lens": np.ones(7, np.int32)})
    except Exception as error:
        assert "sequence_lens has shape [7], expected [1] or [B] = [3]" in str(error), error
    else:
        raise AssertionError("no status")
print("passed")
"""


@pytest.mark.skipif(bool(SANITIZE), reason="an older runtime's interpreter start is not ours to sanitize")
@pytest.mark.parametrize("version", [*OLD_RUNTIMES, ort.__version__])
def test_runtime_version(version: str, tmp_path: Path) -> None:
    for dtype in ("float32", "float16"):
        spec = RNNSpec("slstm", num_heads=1, head_dim=192, dtype=dtype)
        inputs = tensors(spec, 5, 3)
        y, states = run_op(spec, inputs)
        np.savez(tmp_path / f"{dtype}.npz", **inputs, y=y, final_states=states)
        onnx.save(model(spec, body=False), tmp_path / f"{dtype}.onnx")
    bad = model(SPEC, body=False)
    attribute(bad, "layout").i = 2
    onnx.save(bad, tmp_path / "bad.onnx")
    variables = environment(version) if version in OLD_RUNTIMES else dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path, library(), version], env=variables, capture_output=True, text=True
    )
    assert done.stdout == "passed\n", done.stderr


# The C API --------------------------------------------------------------------------------------------------------

API_TEST = """
#include "onnxruntime_c_api.h"
#include "ort_api.h"
#include <type_traits>
namespace ours = flashrnn::ort;

// The same place, number of arguments and, argument by argument, the same opaque type, or two types of one size.
template <class A, class B>
constexpr bool alike = std::is_same_v<A, B> || (sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>);
template <>
inline constexpr bool alike<void, void> = true;
template <class A, class B>
struct Compare;
template <class A, class B, class... P, class... Q>
struct Compare<A (*)(P...), B (*)(Q...)> {
  static constexpr bool value = alike<A, B> && sizeof...(P) == sizeof...(Q) && (alike<P, Q> && ...);
};
template <class F>
struct Plain;
template <class A, class... P>
struct Plain<A (*)(P...)> { using type = A (*)(P...); };
template <class A, class... P>
struct Plain<A (*)(P...) noexcept> { using type = A (*)(P...); };
#define SAME(Struct, member)                                                                        \\
  static_assert(offsetof(ours::Struct, member) == offsetof(::Struct, member), #member);             \\
  static_assert(Compare<decltype(ours::Struct::member), Plain<decltype(::Struct::member)>::type>::value, #member);
"""
API_VALUES = """
static_assert(ours::kFail == int{ORT_FAIL} && ours::kInvalidArgument == int{ORT_INVALID_ARGUMENT});
static_assert(ours::kUndefined == int{ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED});
static_assert(ours::kFloat == int{ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT});
static_assert(ours::kInt32 == int{ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32});
static_assert(ours::kFloat16 == int{ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16});
static_assert(ours::kBfloat16 == int{ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16});
static_assert(ours::kWarning == int{ORT_LOGGING_LEVEL_WARNING});
static_assert(ours::kRequired == int{INPUT_OUTPUT_REQUIRED} && ours::kDefaultMemory == int{OrtMemTypeDefault});
static_assert(offsetof(ours::OrtCustomOp, version) == offsetof(::OrtCustomOp, version));
static_assert(sizeof(ours::OrtCustomOp) == offsetof(::OrtCustomOp, GetMayInplace));
int main() {}
"""


def official_header() -> Path:
    """Folder of onnxruntime_c_api.h, fetched once into .cache/ and never committed."""
    folder = CACHE / "onnxruntime-header"
    if (folder / "onnxruntime_c_api.h").exists():
        return folder
    if not has_program("npm"):
        pytest.skip(f"{folder} has no onnxruntime_c_api.h, and there is no npm to fetch {HEADER_PACKAGE}")
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["npm", "pack", HEADER_PACKAGE], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"npm cannot fetch {HEADER_PACKAGE}: {done.stderr.strip()[-200:]}")
    (archive,) = folder.glob("*.tgz")
    headers = "*/ios-arm64/onnxruntime.framework/Headers/*.h"
    output_of("tar", "xzf", archive, "-C", folder, "--wildcards", headers, "--transform", "s|.*/||")
    archive.unlink()
    return folder


def members(struct: str) -> list[str]:
    text = (ROOT / "plugins/onnxruntime/ort_api.h").read_text(encoding="utf-8")
    body = re.search(rf"struct {struct} {{(.*?)\n}};", text, re.S)
    assert body
    return re.findall(r"\(\*(\w+)\)\((?!void\*, std)", body[1])


def test_api_declaration_equals_the_official_header(tmp_path: Path) -> None:
    header = official_header()
    structs = ("OrtApi", "OrtApiBase", "OrtCustomOp")
    checks = [f"SAME({struct}, {member})" for struct in structs for member in members(struct)]
    assert len(checks) > 40
    source = tmp_path / "api.cc"
    source.write_text(API_TEST + "\n".join(checks) + API_VALUES)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-isystem", header]
    done = subprocess.run(
        [*command, "-I", ROOT / "plugins/onnxruntime", source], capture_output=True, text=True, env=tool_environment()
    )
    assert done.returncode == 0, done.stderr


def test_slot_comments_are_right() -> None:
    """`_N` members of ort_api.h name the slot they start at."""
    text = (ROOT / "plugins/onnxruntime/ort_api.h").read_text(encoding="utf-8")
    body = re.search(r"struct OrtApi {(.*?)\n};", text, re.S)
    assert body
    slot = 0
    for line in re.findall(r"(Unused _\d+\[\d+\]|\(\*(?!task)\w+\)\()", body[1]):
        if unused := re.match(r"Unused _(\d+)\[(\d+)\]", line):
            assert int(unused[1]) == slot
            slot += int(unused[2])
        else:
            slot += 1
    assert slot == 275, "KernelContext_ParallelFor is slot 274"


def test_every_op_exists_for_every_dtype() -> None:
    for cell in ("lstm", "gru", "elman", "slstm"):
        for dtype in ("float32", "float16", "bfloat16"):
            names = [i.name for i in op_session(replace(SPEC, cell=cell, dtype=dtype)).get_inputs()]
            assert names == list(INPUTS)
