"""The CPU kernel, through ONNX Runtime, against the float64 recurrence."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import tensors
from cpu_library import CACHE, ROOT, SANITIZE, build_folder, has_program, library, op_session, run_op, tool_environment

from flashrnn_deploy import cells, compare, reference
from flashrnn_deploy.op import DTYPES, FULL_LENGTH, RNNSpec

BASE = RNNSpec("lstm", num_heads=2, head_dim=20)
CELL_NAMES = tuple(cells.CELLS)
FLOORS = (0.0, 1.0)


def assert_agrees(spec: RNNSpec, inputs: dict[str, np.ndarray], path: Path | None = None, threads: int = 1) -> None:
    """Both outputs within the project's tolerance of the float64 recurrence.

    NumPy's own float32 error is the largest of two runs and both outputs: over few numbers it can be small by luck. The
    second run starts from biases one unit in the last place away, so that all its roundings are others.
    """
    arguments = [inputs[n] for n in ("wx", "r", "b", "sequence_lens", "initial_states")]
    exact = reference.run(spec, *arguments)
    own = 0.0
    for b in (inputs["b"], np.nextafter(inputs["b"], np.float32(np.inf))):
        rounded = reference.run(spec, *arguments[:2], b, *arguments[3:], precision=np.float32)
        own = max(own, *(compare.own_error(o, e) for o, e in zip(rounded, exact, strict=True)))
    for name, actual, e in zip(("y", "final_states"), run_op(spec, inputs, path, threads), exact, strict=True):
        result = compare.against_float64(name, actual, e, own, spec.dtype, "float64 recurrence")
        assert result.passed, f"{spec} {result}"


def changed(cell: str, **changes: Any) -> RNNSpec:
    return replace(BASE, cell=cell, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_base_case(cell: str, dtype: str) -> None:
    spec = changed(cell, dtype=dtype)
    assert_agrees(spec, tensors(spec, 23, 3, lens=[23, 11, 1]))


ONE_CHANGE = {
    "two directions": {"num_directions": 2},
    "reverse": {"reverse": 1},
    "batch first": {"layout": 1},
    "batch first, two directions": {"layout": 1, "num_directions": 2},
    "one head": {"num_heads": 1},
    "five heads": {"num_heads": 5},
    **{f"D={D}": {"head_dim": D} for D in (1, 5, 37, 64, 100)},
}


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("change", ONE_CHANGE)
def test_one_change(cell: str, change: str) -> None:
    spec = changed(cell, **ONE_CHANGE[change])
    assert_agrees(spec, tensors(spec, 9, 3, lens=[9, 4, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [0, 1, 2, 3, 7, 16, 17, 35])
def test_batch_sizes(B: int, dtype: str) -> None:
    spec = changed("gru", dtype=dtype)
    assert_agrees(spec, tensors(spec, 5, B))


@pytest.mark.parametrize("cell", CELL_NAMES)
@pytest.mark.parametrize("T", [0, 1, 7, 257])
def test_sequence_sizes(cell: str, T: int) -> None:
    spec = changed(cell, head_dim=37)
    assert_agrees(spec, tensors(spec, T, 2))


@pytest.mark.parametrize("cell", CELL_NAMES)
def test_no_step_returns_the_initial_states(cell: str) -> None:
    spec = changed(cell, num_directions=2)
    inputs = tensors(spec, 0, 3)
    y, states = run_op(spec, inputs)
    assert y.shape == (0, 3, 2 * spec.hidden_size)
    np.testing.assert_array_equal(states, inputs["initial_states"])


@pytest.mark.parametrize("change", ["forward", "reverse", "two directions"])
@pytest.mark.parametrize("lens", [[7, 1, 4], [3], [0, 7, 0], [0], [9, FULL_LENGTH, -5], [FULL_LENGTH]], ids=str)
def test_lengths(lens: list[int], change: str) -> None:
    spec = changed("lstm", reverse=int(change == "reverse"), num_directions=1 + (change == "two directions"))
    inputs = tensors(spec, 7, 3, lens=lens)
    assert_agrees(spec, inputs)
    y, states = run_op(spec, inputs)
    rows = np.broadcast_to(np.clip(lens, 0, 7), 3)
    for row, length in enumerate(rows):
        assert not y[length:, row].any(), "y is 0 behind a row's end"
        if length == 0:
            np.testing.assert_array_equal(states[:, :, row], inputs["initial_states"][:, :, row])


@pytest.mark.parametrize("clip", [0.25, 3.0])
@pytest.mark.parametrize("cell", ["lstm", "gru", "elman"])
def test_clip(cell: str, clip: float) -> None:
    spec = changed(cell, clip=clip)
    inputs = tensors(spec, 9, 3)
    inputs["wx"] *= 3
    if cell == "lstm":
        inputs["initial_states"][1] *= 8  # the cell state passes the bound, the input of its tanh does not
    assert_agrees(spec, inputs)


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_relu(clip: float) -> None:
    spec = changed("elman", relu=1, clip=clip)
    inputs = tensors(spec, 9, 3)
    inputs["r"] *= 0.5
    assert_agrees(spec, inputs)


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("start", ["states", "empty", "c over n"])
def test_slstm_starts(floor: float, start: str) -> None:
    spec = changed("slstm", normalizer_floor=floor)
    inputs = tensors(spec, 9, 3)
    if start == "empty":
        inputs["initial_states"][:] = 0
    if start == "c over n":
        inputs["initial_states"][1] += 6
        inputs["initial_states"][2] *= 0.25
    assert_agrees(spec, inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_large_hidden_state(cell: str, dtype: str) -> None:
    spec = changed(cell, dtype=dtype)
    inputs = tensors(spec, 5, 2)
    inputs["initial_states"][0] = 3
    assert_agrees(spec, inputs)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["wx", "r", "b", "initial_states"])
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_nan_and_infinity_are_not_swallowed(cell: str, place: str, value: float) -> None:
    for changes in ({}, {"clip": 1.5}, {"relu": 1}):
        if ("clip" in changes and cell == "slstm") or ("relu" in changes and cell != "elman"):
            continue
        spec = changed(cell, num_heads=1, **changes)
        inputs = tensors(spec, 4, 2)
        inputs[place].reshape(-1)[3] = value
        exact = reference.run(spec, *(inputs[n] for n in ("wx", "r", "b", "sequence_lens", "initial_states")))
        for actual, expected in zip(run_op(spec, inputs), exact, strict=True):
            np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
            np.testing.assert_array_equal(np.isposinf(actual), np.isposinf(expected))
            np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_chunks_equal_the_whole_bitwise(cell: str, B: int, dtype: str) -> None:
    spec = changed(cell, dtype=dtype)
    whole = tensors(spec, 24, B)
    y, states = run_op(spec, whole)
    parts, state, start = [], whole["initial_states"], 0
    for steps in (1, 7, 16):
        chunk = whole | {
            "wx": np.ascontiguousarray(whole["wx"][start : start + steps]),
            "sequence_lens": np.full(B, steps, np.int32),
            "initial_states": state,
        }
        part, state = run_op(spec, chunk)
        parts.append(part)
        start += steps
    assert np.concatenate(parts).tobytes() == y.tobytes()
    assert state.tobytes() == states.tobytes()


@pytest.mark.parametrize(("D", "B"), [(20, 3), (192, 1), (256, 5), (256, 33)])
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_threads_and_rows_change_no_bit(cell: str, D: int, B: int) -> None:
    spec = changed(cell, num_heads=1, head_dim=D, num_directions=2)
    inputs = tensors(spec, 12, B, lens=[12 - i % 5 for i in range(B)])
    y, states = run_op(spec, inputs)
    for threads in (2, 4):
        again, again_states = run_op(spec, inputs, threads=threads)
        assert again.tobytes() == y.tobytes()
        assert again_states.tobytes() == states.tobytes()
    row = B // 2
    alone = {n: inputs[n][:, :, row : row + 1] if n == "initial_states" else inputs[n] for n in inputs}
    alone["wx"] = np.ascontiguousarray(inputs["wx"][:, row : row + 1])
    alone["initial_states"] = np.ascontiguousarray(alone["initial_states"])
    alone["sequence_lens"] = inputs["sequence_lens"][row : row + 1]
    y_alone, states_alone = run_op(spec, alone, threads=2)
    assert y_alone.tobytes() == np.ascontiguousarray(y[:, row : row + 1]).tobytes()
    assert states_alone.tobytes() == np.ascontiguousarray(states[:, :, row : row + 1]).tobytes()


@pytest.mark.parametrize("cell", ["lstm", "slstm"])
def test_eight_threads_share_one_session(cell: str) -> None:
    spec = changed(cell, num_heads=1, head_dim=96)
    session = op_session(spec, None, 2)
    cases = [tensors(spec, 20 + i, 1 + i % 3, seed=i) for i in range(8)]
    expected = [[a.tobytes() for a in session.run(None, case)] for case in cases]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(15):
            got = [a.tobytes() for a in session.run(None, cases[i])]
            wrong.extend([i] * (got != expected[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(bool(SANITIZE), reason="a sanitizer keeps freed memory for a while")
@pytest.mark.parametrize("threads", [1, 2])
def test_memory_stays_flat(threads: int) -> None:
    spec = changed("gru", num_heads=1, head_dim=192)  # two chunks: the thread pool takes part
    session, inputs = op_session(spec, None, threads), tensors(spec, 2, 2)

    def resident_kib(calls: int) -> int:
        for _ in range(calls):
            session.run(None, inputs)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024

    sizes = [resident_kib(1000), *(resident_kib(2500) for _ in range(4))]
    # A leak grows in every part of the 10,000 calls; the system moves pages in and out once in a while.
    assert min(np.diff(sizes)) < 64, sizes


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_other_instruction_sets(cell: str, dtype: str, isa: str) -> None:
    if not library(isa).exists():
        pytest.skip(f"this processor's build has no {isa} variant")
    for D, B in ((37, 1), (37, 16), (64, 5)):
        spec = changed(cell, dtype=dtype, num_heads=1, head_dim=D)
        assert_agrees(spec, tensors(spec, 7, B), library(isa))


# Half-precision rounding, widening and subnormals of every instruction set, all 65,536 bit patterns: a ReLU with R = 0
# copies wx to y.
@pytest.mark.parametrize("isa", ["", "baseline", "avx2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_survives(dtype: str, isa: str) -> None:
    if not library(isa).exists():
        pytest.skip(f"this processor's build has no {isa} variant")
    spec = RNNSpec("elman", num_heads=1, head_dim=256, dtype=dtype, relu=1)
    inputs = tensors(spec, 256, 1)
    inputs["r"][:] = 0
    inputs["b"][:] = 0
    inputs["initial_states"][:] = 0
    inputs["wx"] = np.arange(2**16, dtype=np.uint16).view(inputs["wx"].dtype).reshape(inputs["wx"].shape)
    # NaN would spread through 0 * NaN: each step starts anew, as a row of its own.
    inputs["wx"] = np.ascontiguousarray(inputs["wx"].reshape(1, 256, 256))
    inputs["sequence_lens"] = np.ones(256, np.int32)
    inputs["initial_states"] = np.zeros((1, 1, 256, 256), np.float32)
    y, states = run_op(spec, inputs, library(isa))
    wide = inputs["wx"].astype(np.float32)
    expected = np.where(np.isnan(wide), wide, np.maximum(wide, 0))
    np.testing.assert_array_equal(states.reshape(wide.shape), expected)
    np.testing.assert_array_equal(y.astype(np.float32), expected)


@pytest.mark.parametrize("isa", ["", "baseline", "avx2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_to_nearest_even(dtype: str, isa: str) -> None:
    if not library(isa).exists():
        pytest.skip(f"this processor's build has no {isa} variant")
    spec = RNNSpec("elman", num_heads=1, head_dim=256, dtype=dtype, relu=1)
    inputs = tensors(spec, 1, 64)
    inputs["wx"][:] = 0
    inputs["r"][:] = 0
    rng = np.random.default_rng(0)
    values = np.abs(rng.integers(0, 2**32, 256, dtype=np.uint32).view(np.float32))
    halves = np.arange(0, 0x7B00, 0x7B, dtype=np.uint16)[:256].astype(np.uint32)
    ties = (halves.astype(np.uint16).view(np.float16).astype(np.float32) * np.float32(1 + 2**-11)).astype(np.float32)
    for biases in (values, ties, np.linspace(0, 1e-6, 256, dtype=np.float32)):
        inputs["b"] = biases.reshape(inputs["b"].shape)
        y, states = run_op(spec, inputs, library(isa))
        np.testing.assert_array_equal(states[0, 0, 0], biases)
        with np.errstate(over="ignore"):
            expected = biases.astype(y.dtype).astype(np.float32)
        np.testing.assert_array_equal(y[0, 0].astype(np.float32), expected)


def ulp_error(actual: np.ndarray, exact: np.ndarray) -> float:
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(actual.astype(np.float64) - exact) / spacing))


def activation_inputs(spec: RNNSpec, gates: dict[int, np.ndarray], states: dict[int, float]) -> dict[str, np.ndarray]:
    """One step of D units with R = b = 0: gate g sees gates[g], state s starts at states[s]."""
    inputs = tensors(spec, 1, 1)
    for name in ("wx", "r", "b", "initial_states"):
        inputs[name][:] = 0
    by_gate = inputs["wx"].reshape(spec.head_dim, -1)
    for g, x in gates.items():
        by_gate[:, g] = x
    for s, value in states.items():
        inputs["initial_states"][s] = value
    return inputs


# Limits in units in the last place; math.h states them.
@pytest.mark.parametrize("isa", ["", "baseline", "avx2"])
def test_activations_are_accurate(isa: str) -> None:
    if not library(isa).exists():
        pytest.skip(f"this processor's build has no {isa} variant")
    D = 4096
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(D) * np.exp(rng.uniform(-9, 3.5, D))).astype(np.float32)
    wide, far = x.astype(np.float64), np.full(D, -1e30, np.float32)

    def step(cell: str, gates: dict[int, np.ndarray], states: dict[int, float]) -> np.ndarray:
        outputs = []
        for part in range(0, D, 128):  # R is D x D
            spec = RNNSpec(cell, num_heads=1, head_dim=128)
            piece = {g: v[part : part + 128] for g, v in gates.items()}
            outputs.append(run_op(spec, activation_inputs(spec, piece, states), library(isa))[1].reshape(-1, 128))
        return np.concatenate(outputs, axis=1)

    assert ulp_error(step("elman", {0: x}, {})[0], np.tanh(wide)) <= 2.5
    sigmoid = np.where(wide > 0, 1, np.exp(np.minimum(wide, 0))) / (1 + np.exp(-np.abs(wide)))
    assert ulp_error(step("gru", {1: x}, {0: 1.0})[0], sigmoid) <= 2.5
    logsigmoid = np.minimum(wide, 0) - np.log1p(np.exp(-np.abs(wide)))
    assert ulp_error(step("slstm", {0: far, 1: x}, {2: 1.0})[3], logsigmoid) <= 2.5
    negative = -np.abs(x)
    exp = step("slstm", {0: negative, 1: np.full(D, 200, np.float32)}, {2: 1e-38})[2]
    normal = negative > -60
    assert ulp_error(exp[normal], np.exp(negative[normal].astype(np.float64))) <= 2


SCALAR_HARNESS = """
#include "cells.cuh"
using namespace flashrnn;
template <class Cell>
static void step(const float* x, const float* rh, const float* b, float* s, const float* options) {
  float X[Cell::G], R[Cell::G], B[Cell::Gb], S[Cell::S];
  for (int i = 0; i < Cell::G; ++i) { X[i] = x[i]; R[i] = rh[i]; }
  for (int i = 0; i < Cell::Gb; ++i) B[i] = b[i];
  for (int i = 0; i < Cell::S; ++i) S[i] = s[i];
  Cell::template step<ScalarMath>(X, R, B, S, CellOptions{options[0], int(options[1]), options[2]});
  for (int i = 0; i < Cell::S; ++i) s[i] = S[i];
}
extern "C" {
void lstm(const float* x, const float* r, const float* b, float* s, const float* o) { step<Lstm>(x, r, b, s, o); }
void gru(const float* x, const float* r, const float* b, float* s, const float* o) { step<Gru>(x, r, b, s, o); }
void elman(const float* x, const float* r, const float* b, float* s, const float* o) { step<Elman>(x, r, b, s, o); }
void slstm(const float* x, const float* r, const float* b, float* s, const float* o) { step<Slstm>(x, r, b, s, o); }
}
"""

DEVICE_SOURCE = """
#include "cells.cuh"
using namespace flashrnn;
template <class Cell>
__global__ void step(const float* m, float* out, CellOptions options) {
  float x[Cell::G], rh[Cell::G], b[Cell::Gb], s[Cell::S];
  for (int i = 0; i < Cell::G; ++i) { x[i] = m[i]; rh[i] = m[i + 4]; }
  for (int i = 0; i < Cell::Gb; ++i) b[i] = m[i + 8];
  for (int i = 0; i < Cell::S; ++i) s[i] = m[i + 12];
  Cell::template step<ScalarMath>(x, rh, b, s, options);
  for (int i = 0; i < Cell::S; ++i) out[i] = s[i];
}
template __global__ void step<Lstm>(const float*, float*, CellOptions);
template __global__ void step<Gru>(const float*, float*, CellOptions);
template __global__ void step<Elman>(const float*, float*, CellOptions);
template __global__ void step<Slstm>(const float*, float*, CellOptions);
"""


@pytest.fixture(scope="module")
def scalar_cells(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The scalar form of cells.cuh, compiled for the host."""
    folder = tmp_path_factory.mktemp("cells")
    source = folder / "cells.cc"
    source.write_text(SCALAR_HARNESS)
    command = ["g++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-static-libstdc++"]
    subprocess.run(
        [*command, "-I", ROOT / "plugins/kernels", source, "-o", folder / "cells.so"],
        check=True,
        env=tool_environment(),
    )
    return ctypes.CDLL(str(folder / "cells.so"))


@pytest.mark.parametrize("options", [(0.0, 0, 0.0), (0.7, 1, 1.0)], ids=["defaults", "clip, relu, floor"])
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_scalar_cells_equal_numpy(scalar_cells: ctypes.CDLL, cell: str, options: tuple[float, int, float]) -> None:
    definition, rng = cells.CELLS[cell], np.random.default_rng(0)
    clip, relu, floor = options
    spec = RNNSpec(
        cell,
        num_heads=1,
        head_dim=1,
        clip=clip if cell != "slstm" else 0.0,
        relu=relu if cell == "elman" else 0,
        normalizer_floor=floor if cell == "slstm" else 0.0,
    )
    function = getattr(scalar_cells, cell)
    for _ in range(300):
        x, rh = (rng.standard_normal(definition.num_gates).astype(np.float32) * 3 for _ in range(2))
        b = rng.standard_normal(definition.num_biases).astype(np.float32)
        state = rng.standard_normal(definition.num_states).astype(np.float32)
        if cell == "slstm":
            state[2] = rng.choice([0.0, 0.3, 2.0])
        wide = [a.astype(np.float64).reshape(-1, 1, 1, 1) for a in (x, rh, b)]
        expected = definition.step(spec, *wide, tuple(state.astype(np.float64).reshape(-1, 1, 1, 1)))
        numbers = np.array([spec.clip, spec.relu, spec.normalizer_floor], np.float32)
        function(*(a.ctypes.data_as(ctypes.c_void_p) for a in (x, rh, b, state, numbers)))
        np.testing.assert_allclose(state, np.reshape(expected, -1), rtol=3e-6, atol=3e-6)


@pytest.mark.skipif(not has_program("nvcc"), reason="nvcc is not on PATH")
def test_cells_compile_for_the_device(tmp_path: Path) -> None:
    source = tmp_path / "cells.cu"
    source.write_text(DEVICE_SOURCE)
    command = ["nvcc", "-std=c++17", "-c", "-Werror", "all-warnings", "-I", ROOT / "plugins/kernels", source]
    done = subprocess.run(
        [*command, "-o", tmp_path / "cells.o"], capture_output=True, text=True, env=tool_environment()
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [1, 2])
@pytest.mark.parametrize("cell", CELL_NAMES)
def test_grid(cell: str, N: int, dtype: str) -> None:
    for D in (1, 5, 37, 64, 100):
        for B in (0, 1, 3, 16):
            for T in (0, 1, 7, 257):
                for layout in (0, 1):
                    spec = changed(cell, dtype=dtype, num_directions=N, head_dim=D, layout=layout)
                    lens = np.random.default_rng(T).integers(0, T + 1, B)
                    assert_agrees(spec, tensors(spec, T, B, lens=lens), threads=1 + B % 2)


@pytest.mark.full
@pytest.mark.skipif(bool(SANITIZE), reason="this is a sanitized run")
@pytest.mark.parametrize("sanitize", ["address", "undefined"])
def test_under_sanitizer(sanitize: str) -> None:
    build_folder(sanitize)
    runtime = {"address": "libasan.so", "undefined": "libubsan.so"}[sanitize]
    # AddressSanitizer stands before __cxa_throw, which it has to find when the program starts: Python has none
    preload = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in (runtime, "libstdc++.so")
    ]
    tests = ["tests/test_cpu_library.py", "tests/test_onnxruntime_binding.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not full", "-p", "no:cacheprovider", *tests],
        env=os.environ
        | {"FLASHRNN_TEST_SANITIZE": sanitize, "LD_PRELOAD": " ".join(preload), "ASAN_OPTIONS": "detect_leaks=0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.full
@pytest.mark.skipif(
    not has_program("aarch64-linux-gnu-g++"), reason="no aarch64 cross compiler (g++-aarch64-linux-gnu)"
)
def test_compiles_for_aarch64() -> None:
    folder = CACHE / "build-aarch64"
    target = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64"]
    configure = [
        "cmake",
        "-S",
        ROOT,
        "-B",
        folder,
        "-G",
        "Ninja",
        "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
        *target,
    ]
    for command in (configure, ["cmake", "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    assert b"aarch64" in (folder / "libflashrnn.so").read_bytes()
