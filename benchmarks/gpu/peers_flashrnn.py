"""FlashRNN 1.0.8, its fused CUDA kernel in bfloat16, at shapes of docs/benchmarks.md.

    pip download --no-deps flashrnn==1.0.8
    python benchmarks/gpu/peers_flashrnn.py flashrnn-1.0.8-py3-none-any.whl

Needs nvcc, ninja, einops and PyTorch. The wheel is unpacked into a scratch folder; there, the device properties that
CUDA 13 no longer has become 0 (the package only lists them). It compiles for a minute per shape. Its hidden states are
compared with float64 and the error is printed beside the time; it keeps c in bfloat16, so that it errs more than ours.

"call" is the public function; "kernel" leaves out its copies of the inputs into the kernel's own order.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import click
import torch
from timing import STEPS, median_us

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from flashrnn_deploy.op import RNNSpec  # noqa: E402
from flashrnn_deploy.recurrence import recurrence  # noqa: E402

REMOVED = (
    "clockRate", "deviceOverlap", "computeMode", "kernelExecTimeoutEnabled", "maxTexture1DLinear", "memoryClockRate",
    "singleToDoublePrecisionPerfRatio", "cooperativeMultiDeviceLaunch",
)  # fmt: skip


def unpack(wheel: Path, folder: Path) -> None:
    """The wheel's files, without the properties that CUDA 13 has removed."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    source = folder / "flashrnn" / "flashrnn" / "gpu_info" / "gpu_info.cc"
    text, count = re.subn(
        rf"= *prop\.({'|'.join(REMOVED)});", "= 0;", re.sub(r"=\s+prop\.", "= prop.", source.read_text())
    )
    if count != len(REMOVED):
        raise click.ClickException(f"{wheel.name}: {count} of {len(REMOVED)} properties found in gpu_info.cc")
    source.write_text(text)


@torch.inference_mode()
def measure(cell: str, heads: int, D: int, B: int) -> str:
    """One line: microseconds per step, and the largest error of h against float64."""
    package = importlib.import_module("flashrnn.flashrnn.flashrnn")  # by attribute, it is the function of that name
    spec = RNNSpec(cell, heads, D, dtype="bfloat16", layout=1)
    G = spec.definition.num_gates
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        drawn = torch.randn(shape, generator=generator, device="cuda") * scale
        return drawn.to(torch.bfloat16)

    wx, r, b = normal(B, STEPS, G, heads, D), normal(G, heads, D, D, scale=D**-0.5), normal(G, heads, D, scale=0.5)
    start = time.perf_counter()
    h = package.flashrnn(wx, r, b, function=cell, backend="cuda_fused", dtype="bfloat16")[0][0]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    ours = wx.double().permute(0, 1, 3, 4, 2).reshape(B, STEPS, -1)
    states = torch.zeros(spec.definition.num_states, 1, B, heads * D, device="cuda", dtype=torch.float64)
    exact = recurrence(spec, ours, r.double()[None], b.double()[None], None, states)[0].reshape(h.shape)
    error = (h.double() - exact).abs().max().item()

    config = package._get_config(wx, r, b, cell, "cuda_fused", dtype="bfloat16")
    kernel = package._get_kernel(config)
    ready = (
        package._permute_input(config, wx),
        package._permute_output_backward(config, package._zero_state(config, wx)),
        package._permute_recurrent_weight(config, r),
        package._permute_bias(config, b),
    )
    call = median_us(lambda: package.flashrnn(wx, r, b, function=cell, backend="cuda_fused", dtype="bfloat16"))
    alone = median_us(lambda: kernel(*ready))
    return f"{cell:5} {heads:3}x{D:<5} {B:3} {call:8.2f} {alone:8.2f} {error:9.2g} {seconds:8.0f}"


@click.command(help=__doc__)
@click.argument("wheel", type=click.Path(exists=True, path_type=Path))
@click.option("--shape", "shapes", multiple=True, default=("12x64x16", "1x768x16"), help="HEADSxDxBATCH; repeat it.")
@click.option("--cell", default="lstm", show_default=True)
def main(wheel: Path, shapes: tuple[str, ...], cell: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        unpack(wheel, Path(name))
        sys.path.insert(0, name)
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {wheel.stem}; us per step, T = {STEPS}")
        print("cell  heads x D  B     call   kernel     error  compile, s", flush=True)
        for shape in shapes:
            print(measure(cell, *map(int, shape.split("x"))), flush=True)


if __name__ == "__main__":
    main()
