"""The copy of a bfloat16 model for a CPU: every operator still rounds, and only where it should."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from ml_dtypes import bfloat16
from models import network
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.bfloat16 import NOT_ON_CPU, for_border, for_cpu, uses_bfloat16
from flashrnn_deploy.op import RNNSpec

BF16 = TensorProto.BFLOAT16


def model(nodes: list[onnx.NodeProto], shape: list[int], functions: list[onnx.FunctionProto] = ()) -> onnx.ModelProto:  # type: ignore[assignment]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", BF16, shape)],
        [helper.make_tensor_value_info("y", BF16, None)],
        [numpy_helper.from_array(np.array([256], bfloat16), "big")],
    )
    opsets = [helper.make_opsetid("", 17), *(helper.make_opsetid(f.domain, 1) for f in functions)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8, functions=functions)


ROUNDING = [helper.make_node("Add", ["x", "big"], ["s"]), helper.make_node("Sub", ["s", "big"], ["y"])]
X = np.array([0.5, 1.5, 3.0], bfloat16)
# 256 has neighbours 254 .. 258: 256.5 -> 256, 257.5 -> 258, 259 -> 260 (ties to even)
ROUNDED = [0.0, 2.0, 4.0]


def test_each_operator_rounds() -> None:
    runner = make_runner("onnxruntime", model(ROUNDING, [3]))
    result = runner.infer({"x": X})["y"]
    assert result.dtype == bfloat16
    assert result.astype(float).tolist() == ROUNDED
    assert "no bfloat16 arithmetic" in runner.notes[0]


def test_inside_functions_of_the_file() -> None:
    body = [helper.make_node("Add", ["a", "b"], ["s"]), helper.make_node("Sub", ["s", "b"], ["c"])]
    function = helper.make_function("local", "AddSub", ["a", "b"], ["c"], body, [helper.make_opsetid("", 17)])
    call = helper.make_node("AddSub", ["x", "big"], ["y"], domain="local")
    result = make_runner("onnxruntime", model([call], [3], [function])).infer({"x": X})["y"]
    assert result.astype(float).tolist() == ROUNDED


def test_inside_branches() -> None:
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "big"], ["s"]), helper.make_node("Sub", ["s", "big"], ["t"])],
        "branch",
        [],
        [helper.make_tensor_value_info("t", BF16, [3])],
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["u"])], "other", [], [helper.make_tensor_value_info("u", BF16, [3])]
    )
    condition = helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True)))
    choose = helper.make_node("If", ["yes"], ["y"], then_branch=branch, else_branch=other)
    result = make_runner("onnxruntime", model([condition, choose], [3])).infer({"x": X})["y"]
    assert result.astype(float).tolist() == ROUNDED


def test_operators_that_make_bfloat16() -> None:
    one = numpy_helper.from_array(np.array([1.0], bfloat16))
    nodes = [
        helper.make_node("Shape", ["x"], ["n"]),
        helper.make_node("ConstantOfShape", ["n"], ["ones"], value=one),
        helper.make_node("Add", ["x", "ones"], ["y"]),
    ]
    result = make_runner("onnxruntime", model(nodes, [3])).infer({"x": X})["y"]
    assert result.astype(float).tolist() == [1.5, 2.5, 4.0]


def test_an_output_that_is_read_inside() -> None:
    nodes = [helper.make_node("Add", ["x", "big"], ["y"]), helper.make_node("Sub", ["y", "big"], ["z"])]
    both = model(nodes, [3])
    both.graph.output.add().CopyFrom(helper.make_tensor_value_info("z", BF16, [3]))
    result = make_runner("onnxruntime", both).infer({"x": X})
    assert result["y"].astype(float).tolist() == [256.0, 258.0, 260.0]
    assert result["z"].astype(float).tolist() == ROUNDED


def test_the_op_stays_and_the_border_is_float32() -> None:
    source = network(RNNSpec("lstm", 1, 4, dtype="bfloat16"))
    before = source.SerializeToString()
    for change in (for_cpu, for_border):
        copy = change(source)
        assert [v.type.tensor_type.elem_type for v in copy.graph.input] == [TensorProto.FLOAT] * 2
        op = next(n for n in copy.graph.node if n.op_type == "FlashLSTM")
        made = {name: n for n in copy.graph.node for name in n.output}
        # What the op reads is bfloat16: after for_cpu a Cast makes it so.
        assert made[op.input[0]].op_type == ("Cast" if change is for_cpu else "MatMul")
        assert op.input[1] == "r"
    assert source.SerializeToString() == before


@pytest.mark.parametrize(("dtype", "used"), [("float32", False), ("float16", False), ("bfloat16", True)])
def test_uses_bfloat16(dtype: str, used: bool) -> None:
    assert uses_bfloat16(network(RNNSpec("gru", 1, 4, dtype=dtype))) is used


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_says_that_a_cpu_has_none(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    from flashrnn_deploy.exporters import export

    torch.manual_seed(0)
    report = export(torch.nn.GRU(3, 4), (torch.randn(5, 2, 3),), dtype=dtype).report
    assert (NOT_ON_CPU in report["warnings"]) == (dtype == "bfloat16")
