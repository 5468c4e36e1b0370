"""``convert`` on random nests of branches and loops: what a name means in each of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_graphs import BOOL, FLOAT, HD, INT64, B, T, info, model_of, same_results
from onnx_rnn import convert, flash_nodes


def nested_model(seed: int, hide: bool) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Branches and loops that read outer weights and their own, which ``hide`` outer ones or do not.

    Some of the outer weights are inputs with a default, which a caller may replace.
    """
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    shapes = {"W": (1, 4 * HD, HD), "R": (1, 4 * HD, HD), "B": (1, 8 * HD), "h": (1, B, HD)}
    counter = iter(range(1000))

    def store(name: str, label: str) -> TensorProto:
        return numpy_helper.from_array(numbers.standard_normal(shapes[label]).astype(np.float32) / 2, name)

    def layer(x: str, depth: int) -> tuple[list[Any], list[Any], str]:
        k = next(counter)
        nodes, stored, names = [], [], {}
        for label in shapes:
            how = rng.choice(["outer", "own", "chain", *["hidden"] * (hide and k > 0)])
            names[label] = {"outer": label, "hidden": label}.get(how, f"{label}{k}")
            if how == "chain":
                nodes.append(helper.make_node("Neg", [label], [names[label]]))
            elif how != "outer":
                stored.append(store(names[label], label))
        nodes.append(
            helper.make_node("LSTM", [x, *(names[n] for n in "WRB"), "", names["h"]], [f"y{k}"], hidden_size=HD)
        )
        stored.append(numpy_helper.from_array(np.array([1]), f"one{k}"))
        nodes.append(helper.make_node("Squeeze", [f"y{k}", f"one{k}"], [f"q{k}"]))
        out = f"q{k}"
        if depth and rng.random() < 0.7:
            inner = [layer(out, depth - 1) for _ in range(2)]
            graphs = [helper.make_graph(n, "branch", [], [info(o)], s) for n, s, o in inner]
            nodes.append(helper.make_node("If", ["c"], [f"z{k}"], then_branch=graphs[0], else_branch=graphs[1]))
            out = f"z{k}"
        if depth and rng.random() < 0.3:
            n, s, o = layer(f"in{k}", 0)
            n.append(helper.make_node("Identity", [f"go{k}"], [f"on{k}"]))
            values = [info(f"i{k}", INT64, []), info(f"go{k}", BOOL, []), info(f"in{k}", FLOAT, [None, B, HD])]
            body = helper.make_graph(n, "body", values, [info(f"on{k}", BOOL, []), info(o, FLOAT, [None, B, HD])], s)
            stored.append(numpy_helper.from_array(np.array(2), f"trips{k}"))
            nodes.append(helper.make_node("Loop", [f"trips{k}", "", out], [f"l{k}"], body=body))
            out = f"l{k}"
        return nodes, stored, out

    nodes, stored, out = layer("X", 2)
    given: dict[str, Any] = {"X": numbers.standard_normal((T, B, HD)).astype(np.float32)}
    given["c"] = np.array(rng.random() < 0.5)
    inputs = [info("X", FLOAT, ["t", B, HD]), info("c", BOOL, [])]
    for label, shape in shapes.items():
        stored.append(store(label, label))
        if rng.random() < 0.3:
            inputs.append(info(label, FLOAT, shape))
            given[label] = (
                numpy_helper.to_array(store("", label)) if rng.random() < 0.5 else numpy_helper.to_array(stored[-1])
            )
    return model_of(helper.make_graph(nodes, "g", inputs, [info(out, shape=None)], stored)), given


@pytest.mark.parametrize("seed", range(25))
def test_nested_graphs_and_replaced_defaults(seed: int, tmp_path: Path) -> None:
    source, given = nested_model(seed, hide=False)
    model, report = convert(source, tmp_path)
    assert report["left"] == 0
    assert len(flash_nodes(model)) == report["rewritten"] >= 1
    same_results(source, model, given)


def test_a_file_with_hidden_names_is_left(tmp_path: Path) -> None:
    """ONNX Runtime takes an outer initializer for an inner one of the same name here and there."""
    hiding = 0
    for seed in range(12):
        source, _ = nested_model(seed, hide=True)
        model, report = convert(source, tmp_path)
        if report["rewritten"]:
            continue  # the dice hid nothing
        assert model == source
        assert all("hides the name" in row["reason"] for row in report["nodes"])
        hiding += 1
    assert hiding > 3
