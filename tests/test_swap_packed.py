"""Packed sequences: lengths become an input, pads are zero, and what depends on anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from exported import check, outputs_of, rare, rows, trained
from onnx import TensorProto
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.sampling import samples
from flashrnn_deploy.shapes import axes_of, tensors_of

IN, HIDDEN = 5, 6


class Packing(nn.Module):
    """pack -> layer -> pad, with options of each."""

    def __init__(self, layer: nn.Module, enforce_sorted: bool = False, pad: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.rnn, self.enforce_sorted, self.pad = layer, enforce_sorted, pad

    def forward(self, x: Tensor, lengths: Tensor, hx: Any = None) -> Any:
        batch_first = self.rnn.batch_first
        packed = pack_padded_sequence(x, lengths, batch_first, self.enforce_sorted)
        packed, states = self.rnn(packed, hx)
        options = {"batch_first": batch_first} if self.pad is None else self.pad
        y, lens = pad_packed_sequence(packed, **options)
        return y, states, lens


def arguments(layer: Any, T: int, lens: list[int], states: bool = False) -> tuple[Any, ...]:
    B = len(lens)
    x = rows(T, B, T, IN) if layer.batch_first else rows(T, T, B, IN)
    if not states:
        return x, torch.tensor(lens)
    N = layer.num_layers * (2 if layer.bidirectional else 1)
    h = rows(1, N, B, layer.proj_size or HIDDEN)
    return x, torch.tensor(lens), (h, rows(2, N, B, HIDDEN)) if isinstance(layer, nn.LSTM) else h


LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "lstm both ways": lambda: nn.LSTM(IN, HIDDEN, bidirectional=True, batch_first=True),
    "gru of two layers": lambda: nn.GRU(IN, HIDDEN, 2, bidirectional=True),
    "projected": lambda: nn.LSTM(IN, HIDDEN, 2, bidirectional=True, proj_size=3, batch_first=True),
}


@pytest.mark.parametrize("states", [rare(False), True])
@pytest.mark.parametrize("name", LAYERS)
def test_lengths_are_an_input(name: str, states: bool) -> None:
    """Traced at (7, 5, 5); run at (11, 1), and at unsorted lengths. h_n is the state after each row's own end."""
    layer = trained(LAYERS[name](), scale=0.5)
    net = Packing(layer).eval()
    others = [arguments(layer, T, lens, states) for T, lens in ((11, [11, 1]), (4, [2, 4, 1, 4]))]
    result = check(net, arguments(layer, 7, [7, 5, 5], states), others)
    lengths = result.report["inputs"][1]
    assert (lengths["name"], lengths["dtype"], lengths["shape"]) == ("lengths", "INT64", ["batch"])


def test_sorted_trace_takes_unsorted_lengths() -> None:
    layer = trained(nn.LSTM(IN, HIDDEN, batch_first=True))
    result = export(Packing(layer, enforce_sorted=True), arguments(layer, 7, [7, 5, 5]))
    args = arguments(layer, 4, [1, 4, 2])
    with torch.no_grad():
        expected = Packing(layer)(*args)[0].numpy()
    np.testing.assert_allclose(outputs_of(result, args)["output_0"], expected, atol=1e-5)


def test_more_steps_than_the_longest_row() -> None:
    """The file gives every step of the padded input, where torch cuts; what is common is equal, the rest exactly 0."""
    layer = trained(nn.LSTM(IN, HIDDEN, bidirectional=True, batch_first=True))
    net = Packing(layer)
    result = export(net, arguments(layer, 7, [7, 5, 5]))
    args = arguments(layer, 9, [4, 2, 3])
    with torch.no_grad():
        y, (h, c), _ = net(*args)
    out = list(outputs_of(result, args).values())
    assert y.shape[1] == 4
    assert out[0].shape == (3, 9, 2 * HIDDEN)
    np.testing.assert_allclose(out[0][:, :4], y.numpy(), atol=1e-5)
    for row, length in enumerate((4, 2, 3)):
        assert (out[0][row, length:] == 0).all()
    np.testing.assert_allclose(out[1], h.numpy(), atol=1e-5)
    np.testing.assert_allclose(out[2], c.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    "pad",
    [{}, {"batch_first": True, "padding_value": -2.0}, {"batch_first": True, "total_length": 12}],
    ids=["time first behind batch first", "padding value", "fixed total length"],
)
def test_options_of_padding(pad: dict[str, Any]) -> None:
    layer = trained(nn.GRU(IN, HIDDEN, batch_first=True))
    check(Packing(layer, pad=pad), arguments(layer, 7, [7, 5, 5]), [arguments(layer, 4, [2, 4, 1, 4])])


class Pooled(nn.Module):
    """A mean over time behind pad_packed_sequence: right only if the number of steps is torch's."""

    def __init__(self, total_length: bool) -> None:
        super().__init__()
        self.rnn, self.total_length = nn.GRU(IN, HIDDEN, batch_first=True), total_length

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.rnn(pack_padded_sequence(x, lengths, True, False))
        length = x.shape[1] if self.total_length else None
        return pad_packed_sequence(packed, True, total_length=length)[0].mean(1)


def test_mean_over_missing_steps_is_refused() -> None:
    args = arguments(nn.GRU(IN, HIDDEN, batch_first=True), 7, [7, 5, 5])
    with pytest.raises(FlashRNNError, match="does not compute what the module does"):
        export(trained(Pooled(False)), args)
    longer = (rows(3, 3, 9, IN), torch.tensor([4, 2, 3]))
    check(trained(Pooled(True)), args, [longer])


class Sorting(nn.Module):
    """Rows in descending order of their lengths, packed, unpacked, and in their own order again."""

    def __init__(self, then: Callable[[Tensor], Tensor], stride: int = 1) -> None:
        super().__init__()
        self.rnn, self.then, self.stride = nn.GRU(IN, HIDDEN, batch_first=True), then, stride

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        lengths = lengths if self.stride == 1 else lengths // self.stride
        ordered, index = lengths.sort(descending=True)
        packed, _ = self.rnn(pack_padded_sequence(x[index, :: self.stride], ordered, True))
        return self.then(pad_packed_sequence(packed, True)[0][index.argsort()])


@pytest.mark.parametrize("stride", [1, 2])
def test_rows_that_the_module_sorts(stride: int) -> None:
    """Where time is behind an index, or only determined by an input's, all steps are kept too, and a note says so."""
    net = trained(Sorting(lambda y: torch.sigmoid(y).transpose(1, 2), stride))
    result = export(net, (rows(1, 3, 8, IN), torch.tensor([4, 8, 6])))
    assert [
        n for n in result.report["warnings"] if n.startswith("the file keeps all steps of output, which pad_packed")
    ]
    args = (rows(2, 4, 12, IN), torch.tensor([2, 8, 3, 4]))
    with torch.no_grad():
        expected = net(*args).numpy()
    output = outputs_of(result, args)["output"]
    steps = expected.shape[2]
    assert (steps, output.shape) == (8 // stride, (4, HIDDEN, 12 // stride))
    np.testing.assert_allclose(output[..., :steps], expected, atol=1e-5)
    assert (output[..., steps:] == 0.5).all()


def test_lengths_that_are_sorted_are_drawn_as_lengths() -> None:
    model = export(trained(Sorting(lambda y: y)), (rows(1, 3, 8, IN), torch.tensor([4, 8, 6]))).model
    tensors = tensors_of(model)
    for (T, B), feeds in samples(model, tensors, axes_of(model, tensors)):
        assert feeds["lengths"].shape == (B,)
        assert feeds["lengths"].max() == T
        assert feeds["lengths"].min() >= 1


@pytest.mark.parametrize("static", [[], ["x:1"]])
@pytest.mark.parametrize("then", [lambda y: y.mean(1), lambda y: y.flip(1), lambda y: y.softmax(1), lambda y: y[:, -1]])
def test_what_depends_on_the_number_of_steps_is_refused(then: Any, static: list[str]) -> None:
    args = (rows(1, 3, 7, IN), torch.tensor([7, 5, 5]))
    with pytest.raises(FlashRNNError, match=r"\(test_swap_packed.py:.*pass it total_length=x.shape\[1\]"):
        export(trained(Sorting(then)), args, static=static)


def test_padding_without_a_layer_is_masked() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(IN, HIDDEN, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            x, _ = pad_packed_sequence(pack_padded_sequence(x, lengths, True, False), True)
            return self.rnn(x)[0]

    check(trained(Masks()), (rows(1, 3, 7, IN), torch.tensor([7, 5, 5])), [(rows(2, 2, 4, IN), torch.tensor([1, 4]))])


@pytest.mark.parametrize("dtype", [torch.int64, rare(torch.int32)])
def test_no_cast_of_lengths_is_left_to_the_engine(dtype: torch.dtype) -> None:
    layer = trained(nn.GRU(IN, HIDDEN, batch_first=True))
    x, lens = arguments(layer, 7, [7, 5, 5])
    model = export(Packing(layer), (x, lens.to(dtype))).model
    (node,) = [n for n in model.graph.node if n.domain == "flashrnn"]
    kinds = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.input)}
    cast = [n for n in model.graph.node if n.output[0] == node.input[3]]
    assert kinds.get(node.input[3], cast and cast[0].attribute[0].i) == TensorProto.INT32
    assert not [n for n in model.graph.initializer if n.name in node.input and n.data_type == TensorProto.INT64]


class Refused(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.rnn, self.body = nn.GRU(IN, HIDDEN, batch_first=True), body

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.body(self.rnn, x, lengths)


def _fields(rnn: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, True)
    return rnn(PackedSequence(packed.data * 2, packed.batch_sizes))[1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda rnn, x, lens: rnn(pack_padded_sequence(x, [7, 5, 5], True))[1], "lengths as Python numbers"),
        (lambda rnn, x, lens: rnn(pack_padded_sequence(x, lens.tolist(), True))[1], "lengths as Python numbers"),
        (_fields, "fields and methods of a PackedSequence"),
        (lambda rnn, x, lens: rnn(pack_padded_sequence(x, lens, True))[0], "fields and methods of a PackedSequence"),
        (lambda rnn, x, lens: rnn(pack_sequence(list(x)))[1], "pack_sequence"),
    ],
    ids=["list", "tolist", "fields", "packed result", "pack_sequence"],
)
def test_refused_with_the_line(body: Any, words: str) -> None:
    with pytest.raises(FlashRNNError, match=words) as error:
        export(Refused(body), (rows(1, 3, 7, IN), torch.tensor([7, 5, 5])))
    if "packed result" not in str(error.value) and body is _fields:
        assert "(test_swap_packed.py:" in str(error.value)


def test_packed_argument_is_refused() -> None:
    layer = nn.GRU(IN, HIDDEN, batch_first=True)
    packed = pack_padded_sequence(rows(1, 3, 7, IN), torch.tensor([7, 5, 5]), True)
    with pytest.raises(FlashRNNError, match="an example argument is a PackedSequence"):
        export(layer, (packed,))


def test_torch_packs_again_after_an_export() -> None:
    layer = trained(nn.GRU(IN, HIDDEN, batch_first=True))
    args = arguments(layer, 7, [7, 5, 5])
    before = Packing(layer)(*args)[0]
    export(Packing(layer), args)
    assert type(pack_padded_sequence(*args, True)) is PackedSequence
    assert torch.equal(Packing(layer)(*args)[0], before)
