"""Optimization profiles: --shapes by input and by axis, defaults, and axes that share a size."""

from __future__ import annotations

import models
import onnx
import pytest
from engines import info
from onnx import helper

from flashrnn_deploy.engine.profiles import make_profiles
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import RNNSpec


def inputs_only(*values: onnx.ValueInfoProto) -> onnx.ModelProto:
    node = helper.make_node("Identity", [values[0].name], ["out"])
    return helper.make_model(helper.make_graph([node], "g", list(values), [info("out")]))


TWO = inputs_only(info("x", "time", "batch", 64), info("h", 1, 1, "batch", 8), info("n", "beams", 3))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"x": [(1, 1, 64), (100, 4, 64), (512, 16, 64)], "h": [(1, 1, 1, 8), (1, 1, 4, 8), (1, 1, 16, 8)]}),
        ([], {"n": [(1, 3), (16, 3), (256, 3)]}),
        (
            ["x=1x2x64:3x4x64:5x6x64"],
            {"x": [(1, 2, 64), (3, 4, 64), (5, 6, 64)], "h": [(1, 1, n, 8) for n in (2, 4, 6)]},
        ),
        (["x=7X1X64"], {"x": [(7, 1, 64)] * 3, "h": [(1, 1, 1, 8)] * 3}),
        (["time=2:3:4"], {"x": [(2, 1, 64), (3, 4, 64), (4, 16, 64)]}),
        (["batch=8", "n=1x3:2x3:3x3"], {"h": [(1, 1, 8, 8)] * 3, "n": [(1, 3), (2, 3), (3, 3)]}),
        (["h=1x1x1x8:1x1x2x8:1x1x3x8", "x=1x1x64:9x2x64:9x3x64"], {"x": [(1, 1, 64), (9, 2, 64), (9, 3, 64)]}),
    ],
)
def test_profiles(options: list[str], expected: dict[str, list[tuple[int, ...]]]) -> None:
    profiles = make_profiles(TWO, options)
    assert {n: [profiles[n].min, profiles[n].opt, profiles[n].max] for n in expected} == expected


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("x", "write it as NAME=MIN:OPT:MAX, for example x=1x1x64:100x4x64:512x16x64"),  # its own axes, in their order
        ("x=1x1x64:2x2x64", "write it as"),
        ("x=1x-1x64", "write it as"),
        ("y=1", "has no such input or axis; its inputs are x float32[time, batch, 64]; h "),
        ("x=1x1:2x2:3x3", "[1, 1] does not fit the model's x float32[time, batch, 64]"),
        ("x=1x1x63", "[1, 1, 63] does not fit the model's x"),
        ("time=3:2:4", "3:2:4 is not MIN:OPT:MAX in rising order"),
        ("batch=1x2:2x2:3x2", "batch is an axis and takes sizes, for example batch=1:4:16"),
        ("time=1x2", "time is an axis and takes sizes, for example time=1:100:512"),
        ("time=\N{ARABIC-INDIC DIGIT THREE}", "write it as NAME=MIN:OPT:MAX"),
        (f"time={'9' * 5000}", "write it as NAME=MIN:OPT:MAX"),
    ],
)
def test_shapes_that_cannot_be(option: str, message: str) -> None:
    with pytest.raises(FlashRNNError) as error:
        make_profiles(TWO, [option])
    assert message in str(error.value)
    assert str(error.value).startswith(f"--shapes {option}: ")


def test_shapes_that_contradict() -> None:
    with pytest.raises(
        FlashRNNError, match="batch=1:2:4 and --shapes x=1x1x64:2x2x64:3x3x64 give one axis the sizes 1:2:4"
    ):
        make_profiles(TWO, ["x=1x1x64:2x2x64:3x3x64", "batch=1:2:4"])


def test_axes_without_names_follow_their_role() -> None:
    """A file may leave dimensions unnamed; flashrnn.axes then says which is the batch."""
    model = inputs_only(info("x", "time", "batch", 64), info("h", 1, None, 8))
    assert make_profiles(model, ["batch=2"])["h"].max == (1, 256, 8)
    models.set_metadata(model, "flashrnn.axes", {"h": {"time": None, "batch": 1}})
    assert make_profiles(model, ["batch=2"])["h"].max == (1, 2, 8)


def test_no_tensor_is_larger_than_those_of_tensorrt() -> None:
    """2^31 - 1 elements."""
    assert make_profiles(TWO, ["time=1:1:33554431", "batch=1"])["x"].max == (33554431, 1, 64)
    with pytest.raises(FlashRNNError, match=r"\[33554432, 1, 64\] of the input 'x' has 2147483648 elements"):
        make_profiles(TWO, ["time=1:1:33554432", "batch=1"])


def test_nor_is_the_projection_of_an_input() -> None:
    """wx has N * G * H * D numbers a step and row, more than x."""
    model = models.network(RNNSpec("lstm", 2, 8))  # 64 of them
    assert make_profiles(model, ["time=1:1:33554431", "batch=1"])["x"].max == (33554431, 1, models.IN)
    with pytest.raises(
        FlashRNNError, match=r"input wx of the FlashLSTM node 'rnn', \[33554432, 1, 64\], has 2147483648"
    ):
        make_profiles(model, ["time=1:1:33554432", "batch=1"])
