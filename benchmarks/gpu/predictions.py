"""The solver's predictions beside measured times on this machine's GPU: us per step of the kernel that `solve` chooses.

python benchmarks/gpu/predictions.py                         builds the kernels (needs nvcc, CMake, ninja) and times
python benchmarks/gpu/predictions.py --only-build --gpu h200 builds them where there is no GPU

Neither needs torch: the timing program of `build-plugins --autotune` compares each kernel with the alternating one on
the same inputs, then takes the median of 15 launches between CUDA events. A row whose prediction is off by more than a
quarter is marked with "!". --alternating times the alternating kernel too, which takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import asdict
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from flashrnn_deploy import autotune, gpus, kernel_config, machine  # noqa: E402
from flashrnn_deploy.cells import CELLS  # noqa: E402
from flashrnn_deploy.cmake import Builder  # noqa: E402
from flashrnn_deploy.gpus import GPU  # noqa: E402
from flashrnn_deploy.kernel_timer import Job, Timer  # noqa: E402
from flashrnn_deploy.op import RNNSpec  # noqa: E402
from flashrnn_deploy.toolchain import find_tools  # noqa: E402

SHAPES = ((1, 64), (12, 64), (1, 128), (6, 128), (1, 256), (3, 256), (1, 512), (1, 768), (1, 1024), (1, 2048))
BATCHES = (1, 16, 64)
ALTERNATING = ((1, 64), (1, 256), (1, 768), (1, 2048))
"""Shapes to time the alternating kernel for."""


def work(cells: list[str], dtypes: list[str], count: int, alternating: bool, gpu: GPU) -> list[Job]:
    """The best ``count`` configurations of each layer and batch, and for some the alternating mode."""
    jobs = []
    for cell, dtype, (heads, head_dim), batch in product(cells, dtypes, SHAPES, BATCHES):
        spec = RNNSpec(cell, heads, head_dim, dtype=dtype, normalizer_floor=float(cell == "slstm"))
        configs = [s.config for s in kernel_config.candidates(spec, batch, gpu, count)]
        if alternating and (heads, head_dim) in ALTERNATING:
            configs.append(kernel_config.alternating(spec, batch, gpu).config)
        jobs.append(Job(spec, batch, tuple(dict.fromkeys(configs))))
    return jobs


def build(folder: Path, lines: list[str], gpu: GPU) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)

    def show(done: int, total: int, what: str) -> None:
        print(f"[{done}/{total}] {what}", file=sys.stderr, flush=True)

    with (folder / "build.log").open("w") as log:
        builder = Builder(
            find_tools([gpu]), None, len(os.sched_getaffinity(0)), False, folder / "tmp", folder / "build.log", log,
            show, lambda line: None,
        )  # fmt: skip
        return autotune.build_timer(builder, ROOT / "plugins", folder, lines, gpu)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu-predictions", help="build folder")
    parser.add_argument("--gpu", default="local", help="the device, as `solve` names it")
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16", "float16"])
    parser.add_argument("--count", type=int, default=1, help="configurations of each layer: 1 is the solver's choice")
    parser.add_argument("--alternating", action="store_true")
    parser.add_argument("--only-build", action="store_true")
    parser.add_argument("--timer", type=Path, help="a timing program that was built with the same options")
    parser.add_argument("--json", type=Path, help="also write the lines here")
    options = parser.parse_args()
    gpu = gpus.get(options.gpu)
    jobs = work(options.cells, options.dtypes, options.count, options.alternating, gpu)
    lines = autotune.table(jobs, gpu)
    timer = options.timer or build(options.build.absolute(), lines, gpu)
    if options.only_build:
        print(f"{timer}: {len(lines)} kernels, {timer.stat().st_size / 1e6:.1f} MB")
        return 0
    if shutil.which(timer) is None:
        parser.error(f"{timer} is no program")
    print(f"{gpu.product}, driver {machine.nvidia_driver()}; us per step")
    print("| cell | dtype | heads x D, batch | kernel | measured | predicted | ratio |\n" + "|---" * 7 + "|")
    facts, missed, failed = [], 0, 0
    with Timer(timer, gpu, lines) as clock:
        for job in jobs:
            for timing in clock.time(job):
                s, predicted = job.spec, kernel_config.predict(job.spec, job.batch, gpu, timing.config)
                name = f"| {s.cell} | {s.dtype} | {s.num_heads}x{s.head_dim} B{job.batch} "
                name += f"| {autotune.short(timing.config)} |"
                facts.append({**asdict(s), "batch": job.batch, **asdict(timing), "us": predicted.predicted_step_us})
                if timing.step_us is None:
                    failed += 1
                    print(f"{name} {timing.excluded} |", flush=True)
                    continue
                ratio = predicted.predicted_step_us / timing.step_us
                off = not 0.75 <= ratio <= 1.25
                missed += off
                times = f"{timing.step_us:.3f} | {predicted.predicted_step_us:.3f} | {ratio:.2f}"
                print(f"{name} {times}{' !' * off} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(facts))
    print(f"{len(facts)} kernels, {missed} predictions off by more than a quarter, {failed} kernels failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
