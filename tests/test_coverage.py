"""What a user is told of a library that was not built for the model or the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
from cpu_library import library

from flashrnn_deploy import coverage, gpus, kernel_table
from flashrnn_deploy.kernel_table import Layer
from flashrnn_deploy.op import RNNSpec

LIB = Path("lib.so")
BUILT = RNNSpec("lstm", 1, 128, dtype="float16")


def facts(*specs: RNNSpec, gpu: str = "h200") -> dict[str, Any]:
    """What `info` says of a library that was built for ``specs``."""
    choices = kernel_table.plan([Layer("m", "n", spec) for spec in specs], [gpus.get(gpu)])
    return {"cuda_architectures": [90], "kernels": [c.row for c in choices if c.line]}


def test_nothing_is_said_of_what_was_built() -> None:
    assert coverage.shortfall(LIB, facts(BUILT), {"rnn": BUILT}, 90) == ""
    assert coverage.shortfall(LIB, facts(BUILT), {"rnn": RNNSpec("lstm", 1, 100, dtype="float16")}, None) == ""
    assert coverage.shortfall(LIB, {}, {}, 90) == "", "a model without the op needs no kernel"


@pytest.mark.parametrize(
    ("spec", "capability"),
    [
        (BUILT, 86),
        (RNNSpec("gru", 1, 128, dtype="float16"), 90),
        (RNNSpec("lstm", 1, 128, dtype="bfloat16"), 90),
        (RNNSpec("lstm", 1, 300, dtype="float16"), 90),
        (RNNSpec("lstm", 1, 128, dtype="float16", clip=1.0), 90),
    ],
)
def test_what_was_not_built_for_is_named_once(spec: RNNSpec, capability: int) -> None:
    text = coverage.shortfall(LIB, facts(BUILT), {"encoder": spec}, capability)
    assert text.startswith("lib.so holds no kernel of its own for encoder on this GPU")
    assert "build-plugins MODEL --gpu local" in text


def test_long_lists_are_cut() -> None:
    text = coverage.shortfall(LIB, facts(BUILT), {f"n{i}": BUILT for i in range(5)}, 75)
    assert "n0, n1, n2 and 2 more nodes" in text


def test_a_library_without_cuda_is_named() -> None:
    model = models.network(RNNSpec("gru", 1, 4))
    (text,) = coverage.cuda_notes(model, [library()])
    assert text.startswith(f"{library()} holds no CUDA kernels: the FlashRNN ops run on the CPU")


def test_an_engine_is_told_of_each_target() -> None:
    """Kernels are compiled for one compute capability; other targets run the alternating kernel, or none is named."""
    both = {"encoder": BUILT, "other": RNNSpec("gru", 1, 128, dtype="float16")}
    assert coverage.engine_shortfall(LIB, facts(BUILT), {"encoder": BUILT}, ["9.0"]) == ""
    assert coverage.engine_shortfall(LIB, {}, both, ["9.0"]) == ""
    text = coverage.engine_shortfall(LIB, facts(BUILT), both, ["8.6", "9.0", "12.0"])
    assert text.startswith(
        "lib.so holds no kernel of its own for encoder, other on compute capability 8.6 or 9.0 or 12.0,"
    )
    text = coverage.engine_shortfall(LIB, facts(BUILT), {"encoder": BUILT}, ["8.6", "9.0"])
    assert text.startswith("lib.so holds no kernel of its own for encoder on compute capability 8.6, and the slower ")
    assert text.endswith("; flashrnn-deploy build-plugins MODEL --gpu GPU builds what there is for a model")
