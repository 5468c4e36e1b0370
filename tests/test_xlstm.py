"""sLSTM cells, layers and blocks of the xlstm package, with its own vanilla code as the judge."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import real_models
import torch
from exported import check, ops, rare, rows
from torch import Tensor, nn

from flashrnn_deploy import streaming
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.chunks import run_chunks
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export
from flashrnn_deploy.shapes import axes_of
from flashrnn_deploy.shapes import tensors_of as graph_tensors

HEADS, WIDTH = 2, 8


@pytest.fixture(scope="module")
def cells() -> Any:
    """``xlstm.blocks.slstm.cell`` of the package on PyPI, read from its wheel."""
    pytest.importorskip("packaging", reason="the xlstm package imports packaging")
    with real_models.importable("xlstm"):
        import xlstm  # noqa: F401
        from xlstm.blocks.slstm import cell
    return cell


def random_cell(cells: Any, seed: int = 0, **options: Any) -> Any:
    config = cells.sLSTMCellConfig(hidden_size=WIDTH, num_heads=HEADS, backend="vanilla", **options)
    return randomised(cells.sLSTMCell(config), seed)


def randomised(module: nn.Module, seed: int = 0, scale: float = 0.5) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
    return module.eval()


def states(B: int, function: str = "slstm") -> Tensor:
    """Non-zero at start; the normalizer positive, and below 1 in places: the floor of FlashRNN would change it."""
    given = rows(B, 4 if function == "slstm" else 2, B, WIDTH)
    if function == "slstm":
        given[2] = given[2].abs() + 0.05
    return given


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("function", ["slstm", "lstm"])
def test_cell(cells: Any, function: str, given: bool) -> None:
    cell = random_cell(cells, function=function)

    def args(T: int, B: int) -> tuple[Any, ...]:
        x = rows(T, B, T, 4 * WIDTH)
        return (x, states(B, function)) if given else (x,)

    result = check(cell, args(7, 3), [args(1, 1), args(11, 2)])
    assert ops(result) == ["FlashSLSTM" if function == "slstm" else "FlashLSTM"]
    assert result.report["states"] == ({"state": "state_out"} if given else {})


@pytest.mark.parametrize(
    ("input_shape", "output_shape"), [rare("SBGNH", "SBH"), ("BSGNH", "BSH"), rare("BSGNH", "SBNH"), ("SBGNH", "BNSH")]
)
def test_shapes(cells: Any, input_shape: str, output_shape: str) -> None:
    cell = random_cell(cells, input_shape=input_shape, output_shape=output_shape)
    batch_first = input_shape == "BSGNH"

    def args(T: int, B: int) -> tuple[Tensor]:
        return (rows(T, B, T, 4 * WIDTH) if batch_first else rows(T, T, B, 4 * WIDTH),)

    check(cell, args(7, 3), [args(4, 2)])


def test_cuda_cell_is_read_through_its_own_functions(cells: Any) -> None:
    """A cell of the CUDA backend holds the same weights in another order; the vanilla cell computes what it does."""
    config = cells.sLSTMCellConfig(hidden_size=WIDTH, num_heads=HEADS, backend="cuda")
    cuda = randomised(cells.sLSTMCell(config, skip_backend_init=True))
    vanilla = random_cell(cells, seed=1)
    vanilla._recurrent_kernel_.data = vanilla._recurrent_kernel_ext2int(
        cuda._recurrent_kernel_int2ext(cuda._recurrent_kernel.detach())
    )
    vanilla._bias_.data = vanilla._bias_ext2int(cuda._bias_int2ext(cuda._bias.detach()))
    args = (rows(1, 3, 7, 4 * WIDTH),)
    model = export(cuda, args).model
    runner = make_runner("onnxruntime", model)
    with torch.no_grad():
        expected = vanilla(*args)[0].numpy()
    np.testing.assert_allclose(runner.infer({"input": args[0].numpy()})["output"], expected, atol=1e-5)


def test_clipped_cell_is_refused(cells: Any) -> None:
    cell = random_cell(cells)
    cell.config.forward_clipval = 1.0
    with pytest.raises(FlashRNNError, match=r"forward_clipval=1\.0 is not supported"):
        export(cell, (rows(1, 3, 7, 4 * WIDTH),))


def make_block(kernel: int = 4) -> Any:
    from xlstm import FeedForwardConfig, sLSTMBlock, sLSTMBlockConfig, sLSTMLayerConfig

    layer = sLSTMLayerConfig(embedding_dim=WIDTH, num_heads=HEADS, backend="vanilla", conv1d_kernel_size=kernel)
    config = sLSTMBlockConfig(
        slstm=layer, feedforward=FeedForwardConfig(embedding_dim=WIDTH, proj_factor=1.5), _num_blocks=1, _block_idx=0
    )
    return randomised(sLSTMBlock(config), scale=0.3)


def test_block(cells: Any) -> None:
    check(make_block(), (rows(1, 3, 7, WIDTH),), [(rows(2, 2, 11, WIDTH),)])


@pytest.mark.full
def test_stack_of_blocks(cells: Any) -> None:
    from xlstm import sLSTMBlockConfig, sLSTMLayerConfig, xLSTMBlockStack, xLSTMBlockStackConfig

    config = xLSTMBlockStackConfig(
        slstm_block=sLSTMBlockConfig(slstm=sLSTMLayerConfig(num_heads=HEADS, backend="vanilla")),
        num_blocks=2,
        embedding_dim=WIDTH,
        slstm_at="all",
        context_length=16,
    )
    result = check(randomised(xLSTMBlockStack(config), scale=0.3), (rows(1, 3, 7, WIDTH),), [(rows(2, 2, 11, WIDTH),)])
    assert [n["name"] for n in result.report["nodes"]] == [f"blocks.{k}.xlstm.slstm_cell.l0" for k in (0, 1)]


class Streamed(nn.Module):
    """A block with the states of its cell and of its causal convolution as arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.block = make_block()

    def forward(self, x: Tensor, conv_state: Tensor, slstm_state: Tensor) -> Any:
        block = self.block
        y, after = block.xlstm(
            block.xlstm_norm(x), conv_state=conv_state, slstm_state=slstm_state, return_last_state=True
        )
        x = x + y
        return x + block.ffn(block.ffn_norm(x)), after["conv_state"], after["slstm_state"]


def test_block_in_chunks(cells: Any) -> None:
    """T = 64 whole = 8 x 8 = 64 x 1, from non-zero states, and equal to the vanilla recurrence."""
    net = Streamed().eval()
    args = (rows(1, 2, 64, WIDTH), rows(2, 2, 3, WIDTH), states(2))
    result = export(net, (rows(1, 3, 7, WIDTH), rows(2, 3, 3, WIDTH), states(3)), static=["conv_state:1"])
    assert result.report["states"] == {"slstm_state": "slstm_state_out"}
    model = result.model
    feeds = dict(zip(("x", "conv_state", "slstm_state"), (a.numpy() for a in args), strict=True))
    runner = make_runner("onnxruntime", model)
    outputs = [v.name for v in model.graph.output]
    with pytest.raises(FlashRNNError, match="has no time axis"):  # the convolution's state is not carried by itself
        streaming.check_chunkable(model, graph_tensors(model), axes_of(model, graph_tensors(model)), {})
    pairs = streaming.state_pairs(model, [f"conv_state={outputs[1]}"])
    with torch.no_grad():
        expected = [t.numpy() for t in net(*args)]
    for chunk in (64, 8, 1):
        parts = run_chunks(runner, feeds, chunk, axes_of(model, graph_tensors(model)), pairs, {})
        for name, want in zip(outputs, expected, strict=True):
            np.testing.assert_allclose(parts[name], want, atol=1e-5, err_msg=f"{name}, chunks of {chunk}")
