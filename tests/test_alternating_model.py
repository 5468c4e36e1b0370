"""The alternating mode's predictions beside times that were measured on an H200, us per step."""

from __future__ import annotations

import itertools
import random
import subprocess
from pathlib import Path

import pytest

from flashrnn_deploy import alternating_model, gpus, kernel_config
from flashrnn_deploy.op import RNNSpec

KERNELS = Path(__file__).parents[1] / "plugins" / "kernels" / "cuda"

H200 = gpus.GPUS["h200"]
MEASURED = {
    ("lstm", "bfloat16", 1, 256, 64): 3.1,
    ("lstm", "bfloat16", 1, 1024, 1): 2.6,
    ("lstm", "bfloat16", 1, 1024, 64): 7.0,
    ("lstm", "bfloat16", 1, 2048, 16): 7.2,
    ("lstm", "bfloat16", 1, 2048, 32): 9.3,
    ("lstm", "bfloat16", 1, 2048, 64): 12.0,
    ("lstm", "bfloat16", 1, 3072, 4): 11.5,
    ("lstm", "bfloat16", 1, 3072, 32): 22.1,
    ("lstm", "bfloat16", 1, 3072, 64): 24.2,
    ("lstm", "bfloat16", 1, 4096, 16): 33.0,
    ("lstm", "bfloat16", 16, 1024, 1): 28.4,
    ("lstm", "bfloat16", 16, 1024, 16): 35.5,
    ("lstm", "bfloat16", 4, 2048, 64): 40.4,
    ("lstm", "bfloat16", 64, 64, 64): 6.3,
    ("lstm", "bfloat16", 200, 64, 64): 21.2,
    ("gru", "bfloat16", 4, 2048, 64): 37.7,
    ("lstm", "float32", 1, 768, 1): 2.9,
    ("lstm", "float32", 1, 768, 16): 7.6,
    ("lstm", "float32", 1, 1024, 4): 4.1,
    ("lstm", "float32", 1, 1024, 64): 32.3,
    ("lstm", "float32", 1, 2048, 1): 10.1,
    ("lstm", "float32", 1, 2048, 16): 29.3,
    ("lstm", "float32", 8, 512, 64): 70.7,
}


@pytest.mark.parametrize(("layer", "measured"), MEASURED.items(), ids=["-".join(map(str, key)) for key in MEASURED])
def test_measured_layers(layer: tuple[str, str, int, int, int], measured: float) -> None:
    cell, dtype, heads, head_dim, batch = layer
    solution = kernel_config.alternating(RNNSpec(cell, heads, head_dim, dtype=dtype), batch, H200)
    assert solution.predicted_step_us == pytest.approx(measured, rel=0.25)
    assert solution.estimate


def test_other_head_dims_and_older_devices_run_a_kernel_per_step() -> None:
    def step(head_dim: int, gpu: str) -> dict[str, float]:
        spec = RNNSpec("lstm", 1, head_dim, dtype="bfloat16")
        return kernel_config.alternating(spec, 64, gpus.GPUS[gpu]).breakdown_us

    assert "waiting for each other" in step(3072, "a100")
    assert "launching kernels" in step(3071, "a100")
    assert "launching kernels" in step(3072, "t4")


STAGE = 8 * 2048  # of a block: what its eight warps multiply at a time


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "batch", "kernel", "kept"),
    [
        ("bfloat16", 1, 3072, 1, "streaming", 128 * 15 * STAGE),  # 10 stages in shared memory, 5 in registers
        ("bfloat16", 1, 3072, 8, "streaming", 128 * 14 * STAGE),  # the sums of more rows take one's place
        ("bfloat16", 1, 3072, 16, "streaming", 128 * 8 * STAGE),  # and those of 16 two, and the registers
        ("bfloat16", 1, 3072, 64, "tiled", 0),
        ("bfloat16", 1, 3071, 1, "one kernel per step", 0),
        ("bfloat16", 1, 1024, 1, "streaming", 4 * 1024 * 1024 * 2),  # all of R
        ("float32", 1, 2048, 1, "streaming", 128 * 13 * STAGE),  # 4 stages are all that the registers hold of a slice
        ("bfloat16", 16, 1024, 1, "streaming", 16 * 8 * 14 * STAGE),  # biases of 128 units, and their tiles
    ],
)
def test_what_stays_on_chip(dtype: str, heads: int, head_dim: int, batch: int, kernel: str, kept: int) -> None:
    solution = kernel_config.alternating(RNNSpec("lstm", heads, head_dim, dtype=dtype), batch, H200)
    facts = solution.to_dict()
    assert (facts["kernel"], facts["on_chip_bytes"], solution.on_chip_bytes) == (kernel, kept, kept)


@pytest.mark.parametrize("gpu", [gpu for gpu in gpus.GPUS.values() if gpu.compute_capability >= 80])
def test_no_more_stays_on_chip_than_there_is(gpu: gpus.GPU) -> None:
    kernels = set()
    for dtype, heads, head_dim, batch in itertools.product(
        ("bfloat16", "float32"), (1, 7, 40, 300), (64, 520, 4096), (1, 3, 16, 200)
    ):
        spec = RNNSpec("gru", heads, head_dim, dtype=dtype)
        found = alternating_model.describe(spec, batch, gpu)
        kernels.add(found.kernel)
        assert 0 <= found.on_chip_bytes <= gpu.sms * (gpu.smem_per_block + 4 * gpu.registers_per_sm)
        assert found.kernel == "streaming" or found.on_chip_bytes == 0
    assert kernels == {"streaming", "tiled", "one kernel per step"}


def test_the_choice_is_the_librarys(tmp_path: Path) -> None:
    """Both sides of the comparison that decides, as alternating_choice.h has them."""
    draw = random.Random(0)
    layers, lines = [], []
    for _ in range(300):
        cell, dtype = draw.choice(("lstm", "gru", "elman", "slstm")), draw.choice(("bfloat16", "float32"))
        heads, head_dim, batch = (
            draw.choice((1, 3, 16, 150)),
            8 * draw.randint(1, 500),
            draw.choice((1, 3, 9, 30, 65, 300)),
        )
        spec = RNNSpec(cell, heads, head_dim, draw.choice((1, 2)), dtype, normalizer_floor=float(cell == "slstm"))
        gpu = gpus.GPUS[draw.choice(("h200", "a100", "orin-nx", "rtx3090"))]
        layers += [(spec, batch, gpu, kernel) for kernel in alternating_model._kernels(spec, batch, gpu)]
    for spec, batch, gpu, k in layers:
        G, size = spec.definition.num_gates, 4 if spec.dtype == "float32" else 2
        parts = spec.num_directions * spec.num_heads
        lines.append(
            f"show({parts}, {spec.head_dim}, {batch}, {G}, {size}, {gpu.sms}, {k.rows}, {8 * k.pass_groups}, "
            f"{'kTiledCost' if k.tiled else 'kStreamingCost'}, {k.slices(spec)});"
        )
    source, program = tmp_path / "choice.cc", tmp_path / "choice"
    source.write_text(
        """#include <cstdio>
#include "alternating_choice.h"
using namespace flashrnn::cuda;
static void show(int heads, int D, int B, int gates, int bytes, int processors, int rows, int units, TurnCost cost,
                 int slices) {
  const Division d = divide(heads, D, B, rows, processors);
  std::printf("%.9g %.9g\\n", all_steps_us(heads, d, turns(d, units, rows), cost, slices, processors),
              per_step_us(heads, D, B, gates, bytes, processors));
}
int main() {
"""
        + "\n".join(lines)
        + "\n}\n"
    )
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS}", source, "-o", program]
    subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    chosen = set()
    for (spec, batch, gpu, kernel), line in zip(layers, printed, strict=False):
        ours = (
            alternating_model._all_steps_us(spec, batch, gpu, kernel),
            alternating_model._per_step_us(spec, batch, gpu.sms),
        )
        assert ours == pytest.approx([float(text) for text in line.split()], rel=1e-6), (spec, batch, gpu.name)
        chosen.add((kernel.tiled, ours[0] < ours[1]))
    assert len(chosen) == 4  # of each kind some that pay and some that do not


@pytest.mark.parametrize(
    ("gpu", "cell", "heads", "head_dim", "batch"),
    [
        ("orin-agx", "lstm", 6, 256, 4),
        ("orin-nx", "lstm", 4, 256, 4),
        ("a100", "gru", 64, 256, 4),
        ("rtx3090", "lstm", 16, 768, 64),
    ],
)
def test_on_small_devices_a_step_takes_its_turns(gpu: str, cell: str, heads: int, head_dim: int, batch: int) -> None:
    """What stays on chip is that of the blocks there are, and each pass of many units costs time."""
    spec = RNNSpec(cell, heads, head_dim, dtype="bfloat16")
    assert kernel_config.solve(spec, batch, gpus.GPUS[gpu]).config.mode == "grid"
