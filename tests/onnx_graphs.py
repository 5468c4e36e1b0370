"""Small graphs around an LSTM that the tests of ``convert`` share."""

from __future__ import annotations

from typing import Any

import onnx
import onnx_rnn
from onnx import TensorProto, helper, numpy_helper

from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import is_flashrnn

TOLERANCE = 2e-5
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
T, B, WIDTH, HD = 5, 2, 3, 4


def info(name: str, elem: int = FLOAT, shape: Any = ("t", "b", None)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def feeds(op: str = "LSTM", seed: int = 0, hidden: int = HD) -> dict[str, Any]:
    return onnx_rnn.random_feeds(op, {}, T, B, WIDTH, hidden, seed)


def tensors(weights: dict[str, Any], prefix: str = "") -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(weights[n], prefix + n) for n in ("W", "R", "B")]


def lstm(prefix: str = "", y: str = "Y", x: str = "X", name: str = "rnn") -> onnx.NodeProto:
    return helper.make_node("LSTM", [x, *(prefix + n for n in "WRB")], [y], name=name, hidden_size=HD)


def model_of(graph: onnx.GraphProto, opset: int = 17, **options: Any) -> onnx.ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, **options)


def plain_model(opset: int = 17) -> onnx.ModelProto:
    graph = helper.make_graph(
        [lstm()], "g", [info("X", shape=("t", "b", WIDTH))], [info("Y", shape=("t", 1, "b", HD))], tensors(feeds())
    )
    return model_of(graph, opset)


def flash_count(model: onnx.ModelProto) -> int:
    return sum(map(is_flashrnn, walk_nodes(model)))


def same_results(before: onnx.ModelProto, after: onnx.ModelProto, given: dict[str, Any]) -> None:
    error = onnx_rnn.max_error(onnx_rnn.run_file(after, given), onnx_rnn.run_file(before, given))
    assert error < TOLERANCE


def if_model(opset: int = 17) -> onnx.ModelProto:
    """Two branches with equal names inside; one has its own weights, the other reads the outer ones."""
    inner = helper.make_graph([lstm("own_", "Y")], "then", [], [info("Y")], tensors(feeds(seed=1), "own_"))
    outer = helper.make_graph([lstm("outer_", "Y")], "else", [], [info("Y")])
    node = helper.make_node("If", ["cond"], ["Z"], name="switch", then_branch=inner, else_branch=outer)
    inputs = [info("X"), info("cond", BOOL, [])]
    graph = helper.make_graph([node], "g", inputs, [info("Z", shape=[None] * 4)], tensors(feeds(), "outer_"))
    return model_of(graph, opset)
