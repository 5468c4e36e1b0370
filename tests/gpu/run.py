"""Device tests of the CUDA kernels. Needs an NVIDIA GPU, nvcc, CMake, ninja and PyTorch; fails without them.

python tests/gpu/run.py table     a seeded pairwise table of cases against float64 (--rows for more)
python tests/gpu/run.py stress    repetition, streams, load, graphs, chunks, NaN, alignment, refusals
python tests/gpu/run.py sanitize  compute-sanitizer's memcheck, racecheck and synccheck over each mode
python tests/gpu/run.py all       the three

With --ptx 80 (or 75) the kernels are built as PTX of that target, which the driver compiles: the code of older devices.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import configs  # noqa: E402
import grid_configs  # noqa: E402
import pairs  # noqa: E402
import stress  # noqa: E402
import torch  # noqa: E402
from judge import judge, references, tensors  # noqa: E402
from library import ALTERNATING, Library, build  # noqa: E402

from flashrnn_deploy.op import DTYPES  # noqa: E402

TOOLS = ("memcheck", "racecheck", "synccheck")
# Modes whose kernels older devices run.
PTX_MODES = {"75": ("alternating",), "80": ("local", "grid", "alternating")}
# synccheck wants all warps of a block at one place in the code. The spare warp of the local mode meets the others at a
# named barrier from a place of its own, which PTX allows: bar.sync goes by name and count.
NOT_SPARE = "synccheck"
RAN = "kernels ran"


class Log:
    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, text: str, good: bool) -> None:
        self.failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)


def row_for(lib: Library, mode: str, case: pairs.Case) -> int:
    """The row of this mode that the library would choose; rows of other batch sizes take turns."""
    if mode == "alternating":
        return ALTERNATING
    want = {"cell": case.spec.cell, "dtype": case.spec.dtype, "clips": int(case.spec.clip > 0), "mode": mode}
    fits = [i for i, r in enumerate(lib.rows) if all(r[k] == v for k, v in want.items())]
    fits = [i for i in fits if lib.rows[i]["padded_head_dim"] >= case.spec.head_dim]
    smallest = min((lib.rows[i]["padded_head_dim"] for i in fits), default=0)
    fits = [i for i in fits if lib.rows[i]["padded_head_dim"] == smallest]
    if not fits:
        raise RuntimeError(f"configs.py has no {mode} kernel for {case}")
    return fits[case.seed % len(fits)]


def table(lib: Library, log: Log, modes: Sequence[str], rows: int, seed: int) -> None:
    began, worst, count = time.perf_counter(), 0.0, 0
    for mode in modes:
        needed = len(list(pairs.pairwise(mode, seed)))
        for row in pairs.pairwise(mode, seed, max(0, rows // len(modes) - needed)):
            case, index = row.case, row_for(lib, mode, row.case)
            given = tensors(case)
            exact, own = references(case, given)
            call = lib.call(case.spec, given)
            lib.launch(call, index)
            torch.cuda.synchronize()
            verdict = judge(case, exact, own, call.y, call.final_states)
            count += 1
            worst = max(worst, verdict.y, verdict.states)
            if not verdict.passed:
                log(f"{mode}, row {index}, {case}: {verdict}", False)
    took = time.perf_counter() - began
    log(f"table of {count} rows, seed {seed}: largest error {worst:.2f} of what is allowed, {took:.0f} s", worst <= 1)


def sanitize(folder: Path, log: Log, tools: Sequence[str], parts: int, more: Sequence[str]) -> None:
    """Each tool over all kernels of `small`, dealt to so many processes at once: they mostly work on the CPU."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        log("compute-sanitizer is not on the path", False)
        return

    def one(name: str, part: int) -> None:
        command = [program, f"--tool={name}", "--kernel-name", "kns=flashrnn", "--error-exitcode=9", sys.executable]
        command += [__file__, "small", "--build", str(folder), "--part", f"{part}/{parts}", *more]
        command += ["--without-spare"] * (name == NOT_SPARE)
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("=========")]
        ran = [line.split(maxsplit=1)[1] for line in done.stdout.splitlines() if line.endswith(RAN)]
        told = f"{ran[-1] if ran else done.stderr[-300:]}; {lines[-1] if lines else ''}"
        good = done.returncode == 0 and bool(ran)
        log(f"{name}, part {part} of {parts}, {time.perf_counter() - began:.0f} s: {told}", good)
        if not good:
            print("\n".join(done.stdout.splitlines()[-60:]), flush=True)

    for name in tools:
        with ThreadPoolExecutor(min(parts, os.cpu_count() or 1)) as pool:
            list(pool.map(lambda part, name=name: one(name, part), range(parts)))


def shares_weights(row: dict[str, Any]) -> bool:
    """Whether a part of R lies in shared memory."""
    return bool(row) and 16 * row["register_k_steps"] * row["k_warps"] < row["padded_head_dim"]


def small(lib: Library, log: Log, without_spare: bool, part: int, parts: int) -> None:
    """A few short launches for the sanitizers: of each cell and mode both kinds of batch tile, and what clips; R in
    registers alone and in shared memory too.
    """
    seen: set[tuple[object, ...]] = set()
    ran = 0
    for index, case in stress.samples(lib):
        row = lib.rows[index] if index != ALTERNATING else {}
        kind = (*map(row.get, ("cell", "mode", "k_warps", "clips")), row.get("batch_tile", 0) > 4, shares_weights(row))
        kind += (row.get("dtype") == "float32", case.spec if index == ALTERNATING else None)
        if kind in seen or (without_spare and row.get("spare_warp")):
            continue
        seen.add(kind)
        if (len(seen) - 1) % parts != part:
            continue
        ran += 1
        for T in (0, 5):
            short = pairs.Case(case.spec, T, case.B if index == ALTERNATING else 3, "ragged", seed=index)
            lib.launch(lib.call(short.spec, tensors(short)), index)
            torch.cuda.synchronize()
        print(f"row {index}: {case}", flush=True)
    log(f"{ran} of {len(seen)} {RAN}", ran > 0 or part >= len(seen) > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("build", "table", "stress", "sanitize", "small", "all"))
    parser.add_argument("--build", type=Path, help="build folder, by default build/gpu or, with --ptx 80, build/gpu-80")
    parser.add_argument("--rows", type=int, default=300, help="rows of the table, at least the pairwise ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="*", help="build and test these only; by default all that the target has")
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), help="kernels of these only; the table needs all")
    parser.add_argument("--ptx", default="", choices=("", *PTX_MODES), help="build PTX of this target")
    parser.add_argument("--without-spare", action="store_true", help="with small: no kernels with a spare warp")
    parser.add_argument("--tools", nargs="*", default=TOOLS, help="with sanitize: these only")
    parser.add_argument("--parts", type=int, default=12, help="with sanitize: processes of each tool")
    parser.add_argument("--part", default="0/1", help="with small: part/parts of the kernels")
    parser.add_argument("--launches", type=int, default=1000)
    options = parser.parse_args()
    options.modes = options.modes or PTX_MODES.get(options.ptx, pairs.MODES)
    options.build = options.build or ROOT / "build" / "-".join(["gpu", options.ptx] if options.ptx else ["gpu"])
    path = options.build / "libflashrnn_cuda_driver.so"
    rows = configs.ROWS + grid_configs.ROWS
    chosen = [row for row in rows if row["mode"] in options.modes and row["dtype"] in options.dtypes]
    if options.what == "build" or not path.is_file():
        build(options.build, chosen, ptx=options.ptx)
    if options.what == "build":
        return 0
    torch.backends.cuda.matmul.allow_tf32 = False
    lib, log = Library(path, chosen), Log()
    if options.what == "small":
        small(lib, log, options.without_spare, *map(int, options.part.split("/")))
    if options.what in ("table", "all"):
        table(lib, log, options.modes, options.rows, options.seed)
    if options.what in ("stress", "all"):
        stress.run(lib, log, options.launches)
    if options.what in ("sanitize", "all"):
        more = ["--modes", *options.modes, "--dtypes", *options.dtypes]
        sanitize(options.build, log, options.tools, options.parts, more)
    print(f"{torch.cuda.get_device_name()}: {'all good' if not log.failed else f'{log.failed} failed'}")
    return int(log.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
