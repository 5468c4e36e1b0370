"""The alternating mode's predictions beside times that were measured on an H200, us per step."""

from __future__ import annotations

import pytest

from flashrnn_deploy import gpus, kernel_config
from flashrnn_deploy.op import RNNSpec

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
