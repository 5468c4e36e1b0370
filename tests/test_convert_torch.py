"""``convert`` on files that torch's TorchScript exporter writes: stacked, bidirectional, states in and out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_rnn
import pytest
from onnx import helper

from flashrnn_deploy.exporters.convert import convert_file
from flashrnn_deploy.files import json_metadata
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.op import is_flashrnn
from flashrnn_deploy.run import run

torch = pytest.importorskip("torch", reason="torch is the judge here")


class WithStates(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A torch RNN whose initial and final states are inputs and outputs."""

    def __init__(self, rnn: Any) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Any, *states: Any) -> Any:
        y, final = self.rnn(x, states[0] if len(states) == 1 else states)
        return (y, *(final if isinstance(final, tuple) else (final,)))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_two_layers_with_random_states(kind: str, bidirectional: bool, batch_first: bool, tmp_path: Path) -> None:
    """D12: both halves equal, final states ordered l0 forward, l0 backward, l1 forward, l1 backward; other T and B."""
    torch.manual_seed(0)
    rnn = getattr(torch.nn, kind)(4, 5, num_layers=2, bidirectional=bidirectional, batch_first=batch_first)
    module = WithStates(rnn).eval()
    states = 2 if kind == "LSTM" else 1
    names = ["x", *(f"s{k}" for k in range(states))]

    def inputs(T: int, B: int) -> tuple[Any, ...]:
        lead = (B, T) if batch_first else (T, B)
        layers = 4 if bidirectional else 2
        return torch.randn(*lead, 4), *(torch.randn(layers, B, 5) for _ in range(states))

    axes = {"x": {0: "d0", 1: "d1"}} | {n: {1: "batch"} for n in names[1:]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter is deprecated, and warns of a batch that it keeps dynamic here
        torch.onnx.export(
            module,
            inputs(7, 3),
            tmp_path / "in.onnx",
            input_names=names,
            dynamic_axes=axes,
            opset_version=14,
            dynamo=False,
        )
    report = convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx")
    assert (report["rewritten"], report["left"]) == (2, 0)
    assert sum(map(is_flashrnn, walk_nodes(onnx.load(tmp_path / "out.onnx")))) == 2
    for T, B in ((7, 3), (1, 1), (4, 6)):
        given = inputs(T, B)
        expected = [t.detach().numpy() for t in module(*given)]
        found = onnx_rnn.run_file(tmp_path / "out.onnx", dict(zip(names, map(np.asarray, given), strict=True)))
        assert onnx_rnn.max_error(found, expected) < 1e-6


def stacked(kind: str, dynamo: bool, path: Path) -> tuple[Any, dict[str, Any]]:
    """A file of two layers whose h0 (and c0) and hn (and cn) are inputs and outputs; its module and some inputs."""
    torch.manual_seed(1)
    module = WithStates(getattr(torch.nn, kind)(4, 5, num_layers=2)).eval()
    given = {"x": torch.randn(7, 3, 4)} | {name: torch.randn(2, 3, 5) for name in ("hc" if kind == "LSTM" else "h")}
    names, dims = list(given), [{0: "time", 1: "batch"}, *[{1: "batch"}] * (len(given) - 1)]
    sizes: dict[str, Any] = {"dynamic_axes": dict(zip(names, dims, strict=True)), "opset_version": 17}
    if dynamo:
        sizes = {"dynamic_shapes": (dims[0], tuple(dims[1:]))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, tuple(given.values()), path, input_names=names, output_names=["y", *(f"{n}_n" for n in names[1:])],
            dynamo=dynamo, verbose=False, **sizes,
        )  # fmt: skip
    return module, given


@pytest.mark.parametrize(("kind", "dynamo"), [("LSTM", False), ("LSTM", True), ("GRU", False)])
def test_states_of_stacked_layers_are_paired(kind: str, dynamo: bool, tmp_path: Path) -> None:
    """h0 is cut into layers and hn put together again: fed back, two calls are one of twice the length."""
    module, given = stacked(kind, dynamo, tmp_path / "in.onnx")
    report = convert_file(tmp_path / "in.onnx", tmp_path / "out.onnx", expose_states=True)
    pairs = {name: f"{name}_n" for name in given if name != "x"}
    assert report["states"] == json_metadata(onnx.load(tmp_path / "out.onnx"), "flashrnn.states") == pairs
    assert not any("no state to expose" in text for text in report["notes"])
    expected = [t.detach().numpy() for t in module(torch.cat([given["x"]] * 2), *list(given.values())[1:])]
    feeds = {name: tensor.numpy() for name, tensor in given.items()}
    first = dict(zip(("y", *pairs.values()), onnx_rnn.run_file(tmp_path / "out.onnx", feeds), strict=True))
    feeds |= {source: first[target] for source, target in pairs.items()}
    y, *final = onnx_rnn.run_file(tmp_path / "out.onnx", feeds)
    assert onnx_rnn.max_error([np.concatenate([first["y"], y]), *final], expected) < 1e-6
    if not dynamo:  # that exporter fixes the steps
        for name, array in feeds.items():
            np.save(tmp_path / f"{name}.npy", array)
        run(tmp_path / "out.onnx", [f"{n}={tmp_path / n}.npy" for n in feeds], tmp_path / "o", chunk=3)
        assert onnx_rnn.max_error([np.load(tmp_path / "o" / "y.npy")], [expected[0][7:]]) < 1e-6
    again = convert_file(tmp_path / "out.onnx", tmp_path / "again.onnx", expose_states=True)
    assert "start from the input(s) h=h_n" in again["notes"][0]


def test_states_of_stacked_layers_in_another_order_are_no_pair(tmp_path: Path) -> None:
    """A Split is a cut too; layers that come out in another order, or not all of them, do not continue the input."""
    stacked("GRU", False, tmp_path / "in.onnx")
    model = onnx.load(tmp_path / "in.onnx")
    graph = model.graph
    cuts = [node for node in graph.node if node.op_type == "Slice"]
    split = helper.make_node("Split", ["h"], [node.output[0] for node in cuts], axis=0)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node if node.op_type != "Slice"]
    del graph.node[:]
    graph.node.extend([split, *kept])
    joined = next(node for node in graph.node if node.op_type == "Concat" and node.output[0] == "h_n")
    first, second = joined.input
    for finals, pairs in (([first, second], {"h": "h_n"}), ([second, first], {}), ([first], {}), ([first, first], {})):
        joined.input[:] = finals
        onnx.save(model, tmp_path / "changed.onnx")
        report = convert_file(tmp_path / "changed.onnx", tmp_path / "out.onnx", expose_states=True)
        assert report["states"] == pairs
        told = "start from the input(s) h already; to run in chunks, name the output that continues each: --state h=OUT"
        assert any(told in text for text in report["notes"]) == (not pairs)
