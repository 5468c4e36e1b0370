"""The alternating mode's predictions beside times that were measured on an H200, LSTM, us per step."""

from __future__ import annotations

import pytest

from flashrnn_deploy import gpus, kernel_config
from flashrnn_deploy.op import RNNSpec

H200 = gpus.GPUS["h200"]
MEASURED = {
    ("bfloat16", 1, 256, 16): 4.34,
    ("bfloat16", 1, 1024, 1): 3.52,
    ("bfloat16", 1, 3072, 4): 12.62,
    ("bfloat16", 1, 3072, 64): 61.5,
    ("bfloat16", 1, 4096, 16): 36.0,
    ("bfloat16", 16, 1024, 1): 30.4,
    ("bfloat16", 4, 2048, 64): 98.5,
    ("float32", 1, 768, 16): 8.07,
    ("float32", 1, 1024, 4): 4.67,
    ("float32", 1, 1024, 64): 33.4,
    ("float32", 1, 2048, 1): 11.2,
    ("float32", 1, 2048, 16): 30.6,
}


@pytest.mark.parametrize(("layer", "measured"), MEASURED.items(), ids=["-".join(map(str, key)) for key in MEASURED])
def test_measured_layers(layer: tuple[str, int, int, int], measured: float) -> None:
    dtype, heads, head_dim, batch = layer
    solution = kernel_config.alternating(RNNSpec("lstm", heads, head_dim, dtype=dtype), batch, H200)
    assert solution.predicted_step_us == pytest.approx(measured, rel=0.25)
    assert solution.estimate


def test_other_head_dims_and_older_devices_run_a_kernel_per_step() -> None:
    def step(head_dim: int, gpu: str) -> dict[str, float]:
        spec = RNNSpec("lstm", 1, head_dim, dtype="bfloat16")
        return kernel_config.alternating(spec, 64, gpus.GPUS[gpu]).breakdown_us

    assert "waiting for each other" in step(3072, "a100")
    assert "launching kernels" in step(3071, "a100")
    assert "launching kernels" in step(3072, "t4")
