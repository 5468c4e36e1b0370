"""The CUDA part compiles, without a GPU: warnings are errors, kernels do not spill, the library exports two symbols.

Device tests are commands of their own (docs/cuda.md).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KERNELS = ROOT / "plugins" / "kernels" / "cuda"
sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import configs  # noqa: E402
import grid_configs  # noqa: E402
import library  # noqa: E402
from tensorrt_packages import headers_folder  # noqa: E402

from flashrnn_deploy import fma_model, gpus, kernel_config, kernel_model, modes  # noqa: E402
from flashrnn_deploy.cells import CELLS  # noqa: E402
from flashrnn_deploy.kernel_config import KernelConfig  # noqa: E402
from flashrnn_deploy.op import RNNSpec  # noqa: E402

ARCHITECTURES = ("75", "80", "86", "89", "90a", "100a", "120")

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def nvcc(source: Path, folder: Path, architecture: str) -> str:
    """Compile one file as cuda.cmake does; returns the compiler's log with each kernel's resources."""
    (folder / "kernel_configs.inc").touch()
    target = f"-gencode=arch=compute_{architecture},code=sm_{architecture}"
    warnings = ["--compiler-options=-Wall,-Wextra,-Wshadow,-Werror", "-Werror=all-warnings"]
    options = ["-std=c++17", "-O3", "-prec-div=false", "-Xptxas=-v", f"-I{KERNELS}", f"-I{folder}"]
    return run("nvcc", target, *warnings, *options, "-c", source, "-o", folder / "out.o")


def instances(folder: Path, rows: list[dict[str, Any]]) -> Path:
    lines = [library.render(**row).replace("FLASHRNN_KERNEL(", "FLASHRNN_INSTANTIATE(") for row in rows]
    path = folder / "instances.cu"
    path.write_text("\n".join(['#include "kernel.cuh"', *lines, ""]))
    return path


def assert_no_spills(log: str, kernels: int) -> None:
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) >= kernels
    assert set(spills) == {("0", "0")}, log


def test_line_fields_are_those_of_kernel_config() -> None:
    own = ("cell", "dtype", "compute_capability", "min_batch", "max_batch", "clips")
    assert (*own, *KernelConfig.__dataclass_fields__) == library.FIELDS


def test_the_solver_counts_lanes_as_config_h_does(tmp_path: Path) -> None:
    cases = [(groups, rows) for groups in range(1, 17) for rows in (1, 2, 4, 8)]
    asserts = [f"static_assert(packed_groups({g}, {b}) == {kernel_model.packed_groups(g, b)});" for g, b in cases]
    for cell in CELLS.values():
        units = fma_model.units_per_lane(cell.num_gates, modes.CLUSTER, 32, 4)
        asserts.append(f"static_assert(fma_units({cell.num_gates}) == {units});")
    source = tmp_path / "counts.cc"
    source.write_text("\n".join(['#include "config.h"', "using namespace flashrnn::cuda;", *asserts, ""]))
    run("c++", "-std=c++17", f"-I{KERNELS}", "-fsyntax-only", source)


def test_every_cell_and_mode_has_a_tested_kernel() -> None:
    found = {(row["cell"], row["dtype"], row["mode"]) for row in configs.ROWS}
    dtypes = ("bfloat16", "float16", "float32")
    assert found == {(c, d, m) for c in CELLS for d in dtypes for m in ("local", "cluster")}
    assert {(row["cell"], row["dtype"]) for row in grid_configs.ROWS} == set(product(CELLS, dtypes))


def test_no_framework_header_under_the_kernels() -> None:
    standard = "atomic|climits|cmath|cstddef|cstdint|type_traits"
    allowed = re.compile(rf'<(cuda\w*\.h|cuda_(bf16|fp16)\.h|{standard})>|"[\w./]+"')
    for path in KERNELS.iterdir():
        for name in re.findall(r"^#include (.+)$", path.read_text(), re.M):
            assert allowed.fullmatch(name), f"{path.name} includes {name}"


@needs_nvcc
def test_one_kernel_of_each_cell_and_mode_compiles_without_spills(tmp_path: Path) -> None:
    of_type = [r for r in configs.ROWS if r["dtype"] == "bfloat16"]
    large = [r for r in of_type if r["mode"] == "local" and r["padded_head_dim"] > 64]
    picked = {(r["cell"], r["mode"], r["clips"]): r for r in of_type if r not in large}
    rows = [r for r in picked.values() if not r["clips"] or r["cell"] == "gru"]
    floats = [r for r in configs.ROWS if (r["cell"], r["dtype"], r["clips"]) == ("lstm", "float32", 0)]
    rows += [next(r for r in floats if r["mode"] == mode) for mode in ("local", "cluster")]
    assert_no_spills(nvcc(instances(tmp_path, rows), tmp_path, "90a"), len(rows))


@needs_nvcc
@pytest.mark.full
def test_a_block_of_128_units_spills_a_few_words(tmp_path: Path) -> None:
    """A k-step less in registers costs a quarter of the time; nine warps have 168 registers each."""
    rows = [r for r in configs.ROWS if (r["mode"], r["dtype"], r["padded_head_dim"]) == ("local", "float16", 128)]
    rows = [next(r for r in rows if r["cell"] == cell and r["batch_tile"] == 4) for cell in CELLS]
    log = nvcc(instances(tmp_path, rows), tmp_path, "90a")
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert len(spills) >= len(rows)
    assert max(int(stores) for stores, _ in spills) <= 16


@needs_nvcc
@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_solve_chooses_compiles_without_spills(tmp_path: Path, dtype: str) -> None:
    gpu, rows = gpus.GPUS["h200"], []
    for cell, (heads, head_dim), batch in product(CELLS, ((1, 64), (12, 64), (2, 100), (1, 300), (1, 512)), (1, 16)):
        config = kernel_config.solve(RNNSpec(cell, heads, head_dim, dtype=dtype), batch, gpu).config
        if config.mode not in ("local", "cluster"):
            continue
        ends = {"min_batch": 1, "max_batch": 2**31 - 1, "clips": 0}
        row = {"cell": cell, "dtype": dtype, "compute_capability": 90} | ends | asdict(config)
        rows += [row] * (row not in rows)
    assert_no_spills(nvcc(instances(tmp_path, rows), tmp_path, "90a"), len(rows))


def small_grid_kernels() -> list[dict[str, Any]]:
    """Of each cell the smallest bfloat16 kernel for several rows of the batch."""
    several = [r for r in grid_configs.ROWS if r["batch_tile"] > 1 and r["dtype"] == "bfloat16" and not r["clips"]]
    return [next(r for r in several if r["cell"] == cell) for cell in CELLS]


@needs_nvcc
def test_a_grid_kernel_of_each_cell_compiles_without_spills(tmp_path: Path) -> None:
    floats = [
        r for r in grid_configs.ROWS if (r["cell"], r["dtype"], r["padded_head_dim"]) == ("lstm", "float32", 1024)
    ]
    rows = small_grid_kernels() + floats
    assert_no_spills(nvcc(instances(tmp_path, rows), tmp_path, "90a"), len(rows))


@needs_nvcc
def test_kernels_for_older_devices_become_ptx(tmp_path: Path) -> None:
    """tests/gpu/run.py --ptx 80: no machine code, so the driver of the device at hand compiles the PTX."""
    rows = [r for r in configs.ROWS if (r["cell"], r["mode"], r["min_batch"]) == ("elman", "local", 1)][:1]
    library.configure(tmp_path, rows, ptx="80")
    commands = run("ninja", "-C", tmp_path, "-t", "commands").splitlines()
    compiled = [c for c in commands if re.search(r"-c \S+\.cu\b", c) and "driver.cu" not in c]
    targets = [re.findall(r",code=\[?(\w+)", command) for command in compiled]
    assert len(targets) >= 3  # alternating, launch, the row
    assert all(found == ["compute_80"] for found in targets), targets


@needs_nvcc
@pytest.mark.full
def test_library_with_tensorrt_exports_its_two_symbols_more(tmp_path: Path) -> None:
    options = ["-DFLASHRNN_CUDA_ARCHITECTURES=90a", f"-DFLASHRNN_TENSORRT_INCLUDE={headers_folder()}"]
    run("cmake", "-S", ROOT / "plugins", "-B", tmp_path / "build", "-G", "Ninja", *options)
    run("cmake", "--build", tmp_path / "build")
    symbols = run("nm", "-D", "--defined-only", tmp_path / "build" / "libflashrnn.so").splitlines()
    assert sorted(line.split()[-1] for line in symbols) == [
        "RegisterCustomOps", "flashrnn_info", "getCreators", "setLoggerFinder",
    ]  # fmt: skip


@needs_nvcc
@pytest.mark.full
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_compiles(tmp_path: Path, architecture: str) -> None:
    for path in sorted(KERNELS.glob("*.cu")):
        nvcc(path, tmp_path, architecture)
    if int(re.sub(r"\D", "", architecture)) >= 80:
        local = [r for r in configs.ROWS if r["mode"] == "local" and r["min_batch"] == 1 and not r["clips"]]
        rows = local + small_grid_kernels()[:1]
        assert_no_spills(nvcc(instances(tmp_path, rows), tmp_path, architecture), len(rows))


@needs_nvcc
@pytest.mark.full
def test_no_tested_kernel_spills(tmp_path: Path) -> None:
    for start in range(0, len(configs.ROWS), 16):
        rows = configs.ROWS[start : start + 16]
        assert_no_spills(nvcc(instances(tmp_path, rows), tmp_path, "90a"), len(rows))
