"""``convert_file`` inside If, Loop and Scan bodies, and on weights that other nodes make."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_rnn
import pytest
from onnx import helper, numpy_helper
from onnx_graphs import (
    BOOL,
    FLOAT,
    HD,
    INT64,
    WIDTH,
    B,
    T,
    feeds,
    flash_count,
    if_model,
    info,
    lstm,
    model_of,
    same_results,
    tensors,
)
from onnx_rnn import convert

from flashrnn_deploy.graph import walk_graphs


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
def test_if_branches(opset: int, tmp_path: Path) -> None:
    source = if_model(opset)
    if opset < 13:  # a branch's output needs a rank for the version converter
        for graph in walk_graphs(source.graph):
            for value in graph.output:
                value.CopyFrom(info(value.name, shape=[None] * 4))
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == flash_count(model) == 2
    assert {row["path"] for row in report["nodes"]} == {"main > switch.then_branch", "main > switch.else_branch"}
    for cond in (True, False):
        same_results(source, model, {"X": feeds()["X"], "cond": np.array(cond)})


def test_loop_and_scan_bodies(tmp_path: Path) -> None:
    """A Loop whose body feeds an RNN's output back, and a Scan over the batch, with outer and inner weights."""
    rnn = feeds("RNN", hidden=WIDTH)
    step = helper.make_node("RNN", ["x_in", "W", "R", "B"], ["y4"], name="looped", hidden_size=WIDTH)
    squeeze = helper.make_node("Squeeze", ["y4", "one"], ["x_out"])
    more = helper.make_node("Identity", ["go_in"], ["go_out"])
    body = helper.make_graph(
        [step, squeeze, more],
        "body",
        [info("i", INT64, []), info("go_in", BOOL, []), info("x_in", shape=[T, B, WIDTH])],
        [info("go_out", BOOL, []), info("x_out", shape=[T, B, WIDTH])],
        [numpy_helper.from_array(np.array([1]), "one")],
    )
    loop = helper.make_node("Loop", ["trips", "", "X"], ["Z"], name="loop", body=body)
    row = helper.make_node("Unsqueeze", ["x_row", "axis"], ["x_row3"])
    scanned = helper.make_node("RNN", ["x_row3", "W", "R", "B"], ["", "h"], name="scanned", hidden_size=WIDTH)
    scan_body = helper.make_graph(
        [row, scanned],
        "scan",
        [info("x_row", shape=[T, WIDTH])],
        [info("h", shape=[1, 1, WIDTH])],
        [numpy_helper.from_array(np.array([1]), "axis")],
    )
    scan = helper.make_node("Scan", ["X"], ["H"], name="scan", num_scan_inputs=1, body=scan_body, scan_input_axes=[1])
    graph = helper.make_graph(
        [loop, scan],
        "g",
        [info("X", shape=[T, B, WIDTH]), info("trips", INT64, [])],
        [info("Z", shape=[T, B, WIDTH]), info("H", shape=[None] * 4)],
        tensors(rnn),
    )
    source = model_of(graph)
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == flash_count(model) == 2
    for trips in (1, 3):
        same_results(source, model, {"X": rnn["X"], "trips": np.array(trips)})


def test_weights_from_constant_sub_graphs(tmp_path: Path) -> None:
    """Weights that are Concat, Transpose and Cast of stored tensors are folded; what fed them is gone."""
    w = feeds()
    nodes = [
        helper.make_node("Cast", ["w_half"], ["w_float"], to=FLOAT),
        helper.make_node("Transpose", ["w_float"], ["W"], perm=[1, 0, 2]),
        helper.make_node("Concat", ["b_0", "b_1"], ["B"], axis=1),
        lstm(),
    ]
    stored = {"w_half": w["W"].astype(np.float16).swapaxes(0, 1).copy(), "R": w["R"]}
    stored |= dict(zip(("b_0", "b_1"), np.split(w["B"], 2, axis=1), strict=True))
    initializers = [numpy_helper.from_array(v, k) for k, v in stored.items()]
    source = model_of(helper.make_graph(nodes, "g", [info("X")], [info("Y", shape=("t", 1, "b", HD))], initializers))
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == 1
    assert not {n.op_type for n in model.graph.node} & {"Cast", "Transpose", "Concat"} - {"Concat"}
    assert not {t.name for t in model.graph.initializer} & set(stored)
    same_results(source, model, {"X": w["X"]})


def test_branches_share_one_arranged_weight(tmp_path: Path) -> None:
    """Both branches unsqueeze the same outer weight: one arranged copy, not two."""
    big = {n: v for n, v in onnx_rnn.random_feeds("LSTM", {}, T, B, 64, 64).items() if n in ("W", "R", "B")}
    graphs = []
    for branch in ("then", "else"):
        axes = [numpy_helper.from_array(np.array([0]), f"{branch}_axes")]
        nodes = [helper.make_node("Unsqueeze", [n, f"{branch}_axes"], [f"{branch}_{n}"]) for n in big]
        nodes.append(
            helper.make_node("LSTM", ["X", *(f"{branch}_{n}" for n in "WRB")], ["Y"], name=branch, hidden_size=64)
        )
        graphs.append(helper.make_graph(nodes, branch, [], [info("Y", shape=[None] * 4)], axes))
    node = helper.make_node("If", ["cond"], ["Z"], then_branch=graphs[0], else_branch=graphs[1])
    stored = [numpy_helper.from_array(v[0], n) for n, v in big.items()]
    inputs = [info("X", shape=("t", "b", 64)), info("cond", BOOL, [])]
    source = model_of(helper.make_graph([node], "g", inputs, [info("Z", shape=[None] * 4)], stored))
    model, report = convert(source, tmp_path)
    assert report["rewritten"] == 2
    assert model.ByteSize() < source.ByteSize() * 1.2
    x = np.random.default_rng(0).standard_normal((T, B, 64)).astype(np.float32)
    same_results(source, model, {"X": x, "cond": np.array(True)})
