"""float32 on a GPU beside cuDNN's, TF32 off: us per step, with the kernel that `solve` chooses for each layer.

python benchmarks/gpu/float32.py                  builds the kernels (needs nvcc, CMake, ninja), checks and times
python benchmarks/gpu/float32.py --build FOLDER   builds there, or takes the library that is there
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import kernels  # noqa: E402
import peers  # noqa: E402
import torch  # noqa: E402
from library import ALTERNATING, Library, build  # noqa: E402

from flashrnn_deploy import gpus, kernel_config  # noqa: E402
from flashrnn_deploy.cells import CELLS  # noqa: E402
from flashrnn_deploy.op import RNNSpec  # noqa: E402

SHAPES = ((1, 64), (12, 64), (1, 128), (6, 128), (1, 256), (3, 256), (1, 384), (1, 512), (1, 768), (1, 1024))
BATCHES = (1, 16)


def kernel(spec: RNNSpec, batch: int, gpu: gpus.GPU) -> dict[str, Any] | None:
    """The line of kernel_configs.inc for a layer and batch, None for the alternating mode."""
    config = kernel_config.solve(spec, batch, gpu).config
    if config.mode == "alternating":
        return None
    keys = {"cell": spec.cell, "dtype": spec.dtype, "compute_capability": gpu.compute_capability}
    return keys | {"min_batch": 1, "max_batch": 2**31 - 1, "clips": 0} | asdict(config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu-float32", help="build folder")
    parser.add_argument("--gpu", default="h200", help="the device, as `solve` names it")
    parser.add_argument("--cells", nargs="*", default=list(CELLS), help="only these")
    parser.add_argument("--only-build", action="store_true")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--head-dims", nargs="*", type=int, help="only these")
    options = parser.parse_args()
    layers = []
    for cell in options.cells:
        for heads, head_dim in SHAPES:
            if options.head_dims and head_dim not in options.head_dims:
                continue
            spec = RNNSpec(cell, heads, head_dim, dtype="float32", normalizer_floor=float(cell == "slstm"))
            layers += [(spec, batch, kernel(spec, batch, gpus.get(options.gpu))) for batch in BATCHES]
    rows: list[dict[str, Any]] = []
    for _, _, row in layers:
        if row is not None and row not in rows:
            rows.append(row)
    path = options.build / "libflashrnn_cuda_driver.so"
    if not path.is_file():
        build(options.build, rows)
    if options.only_build:
        return 0
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lib = Library(path, rows)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {peers.versions()}; T = {kernels.STEPS}")
    print(
        "| cell | heads x D, batch | mode | ours | predicted | ours with GEMM | cuDNN float32 | error |\n"
        + "|---" * 8
        + "|"
    )
    wrong = 0
    for spec, batch, row in layers:
        index = ALTERNATING if row is None else rows.index(row)
        line = kernels.measure(lib, spec, batch, index, not options.no_peers)
        predicted = kernel_config.solve(spec, batch, gpus.get(options.gpu)).predicted_step_us
        peer, text = line.get("cudnn_same"), "-"
        if peer is not None:
            ratio = peer / line["with_gemm_us"]
            text = f"{peer:.2f} ({ratio:.1f}x)" if ratio >= 1 else f"**{peer:.2f} ({ratio:.2f}x, a loss)**"
        size = f" {row['cluster_size']}" if row is not None and row["mode"] == "cluster" else ""
        print(
            f"| {spec.cell} | {line['shape']} B{batch} | {line['mode']}{size} | {line['us']:.3f} | {predicted:.3f} "
            f"| {line['with_gemm_us']:.3f} | {text} | {line['error']:.2f} |",
            flush=True,
        )
        wrong += not line["error"] <= 1
    print(f"{len(layers)} lines, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
