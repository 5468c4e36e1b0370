"""The command that times a model: bench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flashrnn_deploy.commands.terminal import PATH, Whole, note, print_json, table


@click.command()
@click.argument("model", type=PATH)
@click.option("--original", type=PATH, metavar="ORIG.onnx", help="The file it was converted from, timed too.")
@click.option("--factory", metavar="FILE.py:FACTORY", help="The PyTorch module it was exported from, timed too.")
@click.option("--weights", type=PATH, help="State dict to load into the module of FILE.py:FACTORY.")
@click.option("--plugins", multiple=True, type=PATH, metavar="LIB", help="FlashRNN plugin library to load.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="One input; the others are random.")
@click.option("--steps", type=Whole(min=1), default=100, show_default=True, help="Size of the time axis.")
@click.option("--batch", type=Whole(min=1), default=1, show_default=True, help="Size of the batch axis.")
@click.option("--size", "sizes", multiple=True, metavar="DIM=SIZE", help="Size of another named dimension; repeat it.")
@click.option("--threads", type=Whole(1, 1024), help="CPU threads of each engine; its own choice by default.")
@click.option("--repeat", type=Whole(min=1), default=31, show_default=True, help="Timed calls of each engine.")
@click.option("--json", "as_json", is_flag=True, help="Print the report alone on stdout, as JSON.")
def bench(model: Path, threads: int | None, as_json: bool, **options: Any) -> None:
    """Time a model on the engines at hand, side by side, after a check of their outputs.

    The engines: the plugin library (--plugins), the function body on stock ONNX Runtime, ONNX Runtime's own LSTM, GRU
    and RNN (--original), and eager PyTorch (--factory). A time is that of one call, wall clock, inputs and outputs
    lying on the device.
    """
    from flashrnn_deploy import bench as benchmark

    report = benchmark.bench(model, threads=threads or 0, **options)
    if as_json:
        print_json(report.to_json())
        return
    for text in report.notes:
        note(text)
    shapes = ", ".join(f"{name} {shape}" for name, shape in report.inputs.items())
    facts = {"inputs": shapes, "dtype": report.dtype, "threads": threads or "each engine's own choice"}
    table(report.model, ("", ""), (facts | report.machine).items())
    first = report.engines[0].engine
    columns = ["engine", "median us", "90 % us"]
    rows: list[list[Any]] = [[e.engine, f"{e.median_us:.1f}", f"{e.p90_us:.1f}"] for e in report.engines]
    if report.steps:
        columns += ["median us a step", "90 % us a step"]
        for row, e in zip(rows, report.engines, strict=True):
            row += [f"{e.median_us_per_step:.3f}", f"{e.p90_us_per_step:.3f}"]
    columns += [f"{first} is", "max abs error", "allowed"]
    for row, e in zip(rows, report.engines, strict=True):
        row += ["" if e.engine == first else benchmark.beside(e.ratio), f"{e.max_abs_error:.2g}", f"{e.tolerance:.2g}"]
    table(f"{report.repeat} calls of each, in turn; errors against {benchmark.JUDGE}", columns, rows)


COMMANDS = (bench,)
