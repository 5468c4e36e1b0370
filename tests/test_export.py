"""Exported files against PyTorch in float64, over a base case and rows that change one thing."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from flashrnn_deploy import compare, streaming
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.chunks import run_chunks
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.calls import tensors_of
from flashrnn_deploy.exporters.validate import to_numpy
from flashrnn_deploy.graph import opset_of, shape_of, walk_nodes
from flashrnn_deploy.nn import MultiHeadRNN
from flashrnn_deploy.op import is_flashrnn
from flashrnn_deploy.shapes import axes_of
from flashrnn_deploy.shapes import tensors_of as graph_tensors

IN, HIDDEN = 6, 8
TRACED = (7, 3)
SIZES = ((1, 1), (2, 11), (5, 4))


class Net(nn.Module):
    """Linear -> MultiHeadRNN -> Linear; states and lengths as the call gives them."""

    def __init__(self, cell: str, **options: Any) -> None:
        super().__init__()
        self.before = nn.Linear(IN, IN)
        self.rnn = MultiHeadRNN(IN, HIDDEN, cell=cell, **options)
        self.after = nn.Linear(HIDDEN * self.rnn.spec.num_directions, 3)

    def forward(self, x: torch.Tensor, states: Any = None, lens: torch.Tensor | None = None) -> Any:
        y, states = self.rnn(self.before(x), states, lens)
        return self.after(y), states


def make(cell: str, seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    net = Net(cell, **options).eval()
    for name, parameter in net.named_parameters():
        if "weight_ih" in name or "bias" in name:  # larger gates than at the start of training
            parameter.data.mul_(2)
    return net


def arguments(net: Net, T: int, B: int, states: bool, lens: bool, seed: int = 1) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    spec, N = net.rnn.spec, net.rnn.spec.num_directions
    x = torch.randn((B, T, IN) if net.rnn.batch_first else (T, B, IN), generator=generator)
    shape = (net.rnn.num_layers * N, B, HIDDEN)
    given = [torch.randn(shape, generator=generator) * 0.5 for _ in spec.definition.states]
    if spec.cell == "slstm":
        given[2] = given[2].abs() + 1
    packed = given[0] if len(given) == 1 else tuple(given)
    lengths = torch.randint(0, T + 1, (B,), generator=generator)
    lengths[B // 2] = T
    if lens:
        return x, packed if states else None, lengths
    return (x, packed) if states else (x,)


def run_both(
    net: Net, runner: Any, dtype: str, T: int, B: int, states: bool, lens: bool
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Each output at one size: ONNX Runtime, the module in the dtype of the file, and the module in float64."""
    args = arguments(net, T, B, states, lens)
    inputs = [args[0].to(getattr(torch, dtype)), *tensors_of(args[1:])]
    names = ["x", *(n for n in runner.inputs if n != "x")]
    actual = runner.infer(dict(zip(names, map(to_numpy, inputs), strict=True)))
    both = []
    for module in (net.to(getattr(torch, dtype)), copy.deepcopy(net).double()):
        upcast = next(module.parameters()).dtype == torch.double
        items = iter([t.double() if upcast and t.is_floating_point() else t for t in inputs])
        leaves, spec = pytree.tree_flatten(args)
        given = pytree.tree_unflatten([next(items) if isinstance(a, torch.Tensor) else a for a in leaves], spec)
        with torch.no_grad():
            both.append([to_numpy(t) for t in tensors_of(module(*given))])
    return list(zip(actual.values(), *both, strict=True))


def check_export(
    cell: str,
    dtype: str = "float32",
    states: bool = True,
    lens: bool = False,
    sizes: tuple[tuple[int, int], ...] = SIZES,
    engine: float = 0.0,
    **options: Any,
) -> onnx.ModelProto:
    net = make(cell, **options)
    model = export(net, arguments(net, *TRACED, states, lens), dtype=dtype).model
    onnx.checker.check_model(model, full_check=True)
    runner = make_runner("onnxruntime", model)
    runner.inputs = [v.name for v in model.graph.input]  # type: ignore[attr-defined]
    results = {size: run_both(net, runner, dtype, *size, states, lens) for size in sizes}
    for k, value in enumerate(model.graph.output):
        own = max(engine, *(compare.own_error(rows[k][1], rows[k][2]) for rows in results.values()))
        for size, rows in results.items():
            check = compare.against_float64(value.name, rows[k][0], rows[k][2], own, dtype, "torch")
            assert check.passed, f"(T, B) = {size}: {check}"
    return model


CELLS = ("lstm", "gru", "elman", "slstm")
BASE: dict[str, Any] = {"num_heads": 4}
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "heads1": {"num_heads": 1},
    "layers3": {"num_layers": 3},
    "bidirectional": {"bidirectional": True},
    "batch_first": {"batch_first": True},
    "default_states": {"states": False},
    "lengths": {"lens": True},
    "bidirectional_lengths_layers": {"bidirectional": True, "lens": True, "num_layers": 2, "batch_first": True},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("cell", CELLS)
def test_rows(cell: str, row: str) -> None:
    check_export(cell, **{**BASE, **ROWS[row]})


@pytest.mark.parametrize(
    ("cell", "options"),
    [
        ("elman", {"nonlinearity": "relu"}),
        ("lstm", {"clip": 0.3}),
        ("gru", {"clip": 0.3}),
        ("slstm", {"normalizer_floor": 0.0}),
        ("lstm", {"bias": False}),
    ],
)
def test_attributes(cell: str, options: dict[str, Any]) -> None:
    check_export(cell, **BASE, **options)


@pytest.mark.parametrize("cell", CELLS)
def test_long_and_short_sequences(cell: str) -> None:
    check_export(cell, **BASE, sizes=((1, 3), (3, 1), (257, 3)))


ENGINE_OWN_ERROR = 6.6e-7
"""What the two activations that an LSTM step passes cost in ONNX Runtime, whose float32 Tanh is within 3.3e-7 of the
truth (PyTorch's within 3.2e-8; docs/numerics.md). Over 257 steps of a cell that hardly forgets it adds up."""

GRID = {
    "num_layers": (1, 3),
    "bidirectional": (False, True),
    "num_heads": (1, 4),
    "batch_first": (False, True),
    "dtype": ("float32", "float16", "bfloat16"),
    "lens": (False, True),
}


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("row", list(itertools.product(*GRID.values())), ids=str)
def test_full_grid(cell: str, row: tuple[Any, ...]) -> None:
    options = dict(zip(GRID, row, strict=True))
    check_export(cell, sizes=tuple(itertools.product((1, 3, 257), (1, 3))), engine=ENGINE_OWN_ERROR, **options)


def test_file_says_what_it_is() -> None:
    net = make("lstm", num_heads=4, num_layers=2)
    result = export(net, arguments(net, *TRACED, states=True, lens=True))
    model = result.model
    assert (opset_of(model), model.ir_version) == (17, 8)
    assert [(v.name, shape_of(v)) for v in model.graph.input] == [
        ("x", ["time", "batch", IN]),
        ("states_h", [2, "batch", HIDDEN]),
        ("states_c", [2, "batch", HIDDEN]),
        ("lens", ["batch"]),
    ]
    assert [(v.name, shape_of(v)) for v in model.graph.output] == [
        ("output", ["time", "batch", 3]),
        ("states_h_out", [2, "batch", HIDDEN]),
        ("states_c_out", [2, "batch", HIDDEN]),
    ]
    assert result.report["states"] == {"states_h": "states_h_out", "states_c": "states_c_out"}
    nodes = [node for node in walk_nodes(model) if is_flashrnn(node)]
    assert [node.name for node in nodes] == ["rnn.l0", "rnn.l1"]
    known = {v.name: shape_of(v) for v in model.graph.value_info}
    for node in nodes:
        assert known[node.output[0]] == ["time", "batch", HIDDEN]
        assert known[node.output[1]] == [2, 1, "batch", HIDDEN]
    assert not any(node.metadata_props or node.doc_string for node in walk_nodes(model))
    assert str(__file__) not in str(model)


@pytest.mark.parametrize("cell", CELLS)
def test_chunks_equal_whole(cell: str) -> None:
    net = make(cell, num_heads=2, num_layers=2)
    model = export(net, arguments(net, *TRACED, states=True, lens=True)).model
    axes, pairs = axes_of(model, graph_tensors(model)), streaming.state_pairs(model)
    feeds = {
        v.name: to_numpy(t)
        for v, t in zip(model.graph.input, tensors_of(arguments(net, 50, 3, True, True)), strict=True)
    }
    runner = make_runner("onnxruntime", model)
    whole = runner.infer(feeds)
    for chunk in (1, 7, 50):
        parts = run_chunks(runner, feeds, chunk, axes, pairs, streaming.length_inputs(model))
        for name, expected in whole.items():
            assert compare.max_abs_error(parts[name], expected) <= 1e-6, (chunk, name)


@pytest.mark.parametrize("tool", ["onnxslim", "onnxsim"])
def test_optimizers_keep_node_and_result(tool: str) -> None:
    net = make("slstm", num_heads=2, bidirectional=True)
    args = arguments(net, *TRACED, states=True, lens=False)
    model = export(net, args).model
    if tool == "onnxslim":
        import onnxslim

        slim = onnxslim.slim(model)
    else:
        import onnxsim

        slim, ok = onnxsim.simplify(model)
        assert ok
    assert [n.op_type for n in walk_nodes(slim) if is_flashrnn(n)] == ["FlashSLSTM"]
    assert [(f.domain, f.name) for f in slim.functions] == [("flashrnn", "FlashSLSTM")]
    feeds = {v.name: to_numpy(t) for v, t in zip(model.graph.input, tensors_of(args), strict=True)}
    before, after = (make_runner("onnxruntime", m).infer(feeds) for m in (model, slim))
    for name, expected in before.items():
        np.testing.assert_allclose(after[name], expected, atol=1e-6)
