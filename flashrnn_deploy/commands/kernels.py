"""Commands on kernels: solve and build-plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flashrnn_deploy.commands.terminal import PATH, Whole, note, print_json, progress, table


@click.command()
@click.option("--cell", type=str.lower, metavar="NAME", required=True, help="lstm, gru, elman or slstm.")
@click.option("--heads", "num_heads", type=Whole(), default=1, show_default=True)
@click.option("--head-dim", type=Whole(), required=True)
@click.option("--directions", "num_directions", type=Whole(), default=1, show_default=True)
@click.option("--batch", type=Whole(), default=1, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--gpu", type=str.lower, metavar="NAME", required=True, help="Name of a GPU, for example h200.")
@click.option("--explain", is_flag=True, help="List how many candidates each constraint removed.")
@click.option("--json", "as_json", is_flag=True, help="Print the solution alone on stdout, as JSON.")
def solve(batch: int, gpu: str, explain: bool, as_json: bool, **spec: Any) -> None:
    """Choose the kernel configuration of one layer on one GPU. Needs no GPU."""
    from flashrnn_deploy import gpus, kernel_config
    from flashrnn_deploy.errors import FlashRNNError
    from flashrnn_deploy.op import RNNSpec

    if gpu == "cpu":
        raise FlashRNNError(
            "solve chooses kernels for GPUs; the CPU has one kernel for any layer and batch: name a GPU"
        )
    facts = kernel_config.solve(RNNSpec(**spec), batch, gpus.get(gpu)).to_dict()
    if as_json:
        print_json(facts)
        return
    reasons = facts.pop("explain")
    table("solution", ("", ""), _told(facts).items())
    if explain:
        removed = [(r["constraint"], r["removed"]) for r in reasons]
        table("explain", ("constraint", "candidates removed"), removed)
        examined = facts["candidates"] - facts["cut"] - sum(count for _, count in removed)
        click.echo(f"{facts['cut']} could not be better than what was known, {examined} were examined")


@click.command("build-plugins")
@click.argument("models", nargs=-1, required=True, type=PATH, metavar="MODEL...")
@click.option(
    "--gpu",
    "gpu_names",
    type=str.lower,
    multiple=True,
    required=True,
    metavar="cpu|GPU",
    help="Repeat it; local: this one.",
)
@click.option("-o", "--output", type=PATH, required=True, help="Directory for libflashrnn.so and the build.")
@click.option("--batch", "batches", multiple=True, type=Whole(), help="Batch to choose kernels for (1, 4, 16 and 64).")
@click.option("--nvcc", type=PATH, help="CUDA compiler, 11.4 or newer; that on PATH by default.")
@click.option("--toolchain", type=PATH, help="CMake toolchain file, to build for another host architecture.")
@click.option("--tensorrt-include", type=PATH, help="Folder of TensorRT's headers, to build its plugin too.")
@click.option("--tensorrt", type=click.Choice(["8", "10"]), help="What these headers are of: 8.5 or 8.6, or newer.")
@click.option("--autotune", is_flag=True, help="Time the best few kernels on this machine's GPU, keep the fastest.")
@click.option("--tuned", type=PATH, help="Take the timings that --autotune wrote elsewhere, libflashrnn.tuned.json.")
@click.option("--jobs", type=Whole(), help="Compilers at once; one per processor by default.")
@click.option("--allow-warnings", is_flag=True, help="Do not stop at a compiler's warnings.")
@click.option("-v", "--verbose", is_flag=True, help="Show the output of CMake and the compilers.")
@click.option("--json", "as_json", is_flag=True, help="Print the report alone on stdout, as JSON.")
def build_plugins(models: tuple[Path, ...], output: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Compile libflashrnn.so for the FlashRNN ops of the models.

    --gpu cpu needs g++, CMake and Ninja; a GPU needs nvcc too, but no GPU, unless kernels are to be timed.
    """
    from flashrnn_deploy import build

    with progress(verbose) as (show, log):
        report = build.build_plugins(models, output=output, progress=show, log=log, **options)
    for text in report.pop("notes"):
        note(text)
    for timed in report["tuned"]:
        for text in timed["excluded"]:
            note(f"{timed['node']}, batch {timed['batch']}: {text}; excluded")
    if as_json:
        print_json(report)
        return
    several = len(report["models"]) > 1
    columns = ["node", "gpu", "batches", "chosen for", "kernel", "predicted us per step", "estimate", "measured"]
    rows = [
        [k["node"], k["gpu"], _batches(k), k["predicted_for_batch"], k["mode"], k["predicted_step_us"],
         _mark(k["estimate"]), k["measured_step_us"]]
        for k in report["kernels"]
    ]  # fmt: skip
    if rows:
        table("kernels", *_by_model(columns, rows, report["kernels"], several))
    columns = ["node", "gpu", "batch", "solver's choice", "us per step", "fastest", "us per step", "gain"]
    rows = [
        [t["node"], t["gpu"], t["batch"], t["solver"], t["solver_step_us"], t["winner"], t["winner_step_us"], _gain(t)]
        for t in report["tuned"]
    ]
    if rows:
        table("timed", *_by_model(columns, rows, report["tuned"], several))
    click.echo(f"{output / report['library']} ({report['architecture']}); pass it with --plugins")
    for name in report["libraries"][1:]:
        click.echo(f"{output / name}: for programs with TensorRT {report['tensorrt']}, which load it")


def _told(facts: dict[str, Any]) -> dict[str, Any]:
    """Of a solution what says something: the alternating mode has no tiles to choose, the others one kernel each."""
    if facts["config"]["mode"] != "alternating":
        return {name: value for name, value in facts.items() if name != "kernel"}
    config = {name: facts["config"][name] for name in ("mode", "padded_head_dim")}
    return {name: value for name, value in facts.items() if name != "sizes"} | {"config": config}


def _by_model(
    columns: list[str], rows: list[list[Any]], facts: list[dict[str, Any]], several: bool
) -> tuple[list[str], list[list[Any]]]:
    """With a column for the model, where there are several."""
    if not several:
        return columns, rows
    return ["model", *columns], [[fact["model"], *row] for fact, row in zip(facts, rows, strict=True)]


def _batches(kernel: dict[str, Any]) -> str:
    """Those that a kernel serves: "1", "2-16", "17+"."""
    from flashrnn_deploy.kernel_table import LARGEST_BATCH

    first, last = kernel["min_batch"], kernel["max_batch"]
    if first == last:
        return str(first)
    return f"{first}+" if last == LARGEST_BATCH else f"{first}-{last}"


def _gain(timed: dict[str, Any]) -> str:
    before, after = timed["solver_step_us"], timed["winner_step_us"]
    return f"{before / after - 1:.0%}" if before and after else "-"


def _mark(flag: bool) -> str:
    return "yes" if flag else ""


COMMANDS = (solve, build_plugins)
