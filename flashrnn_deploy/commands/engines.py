"""Commands on TensorRT engines and on what this machine can do: build-engine and doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flashrnn_deploy.commands.terminal import PATH, Whole, note, print_json, progress, table


@click.command("build-engine")
@click.argument("model", type=PATH, metavar="MODEL.onnx")
@click.option("-o", "--output", type=PATH, required=True, help="Engine to write; OUTPUT.json is its sidecar.")
@click.option("--plugins", multiple=True, type=PATH, metavar="LIB", help="FlashRNN plugin library to load.")
@click.option(
    "--shapes",
    multiple=True,
    metavar="NAME=MIN:OPT:MAX",
    help="Shapes of an input (x=1x1x64:100x4x64:512x16x64) or sizes of an axis (time=1:100:512).",
)
@click.option("--gpu", type=str.lower, metavar="NAME", help="GPU to build for; this machine's by default.")
@click.option("--workspace", type=Whole(), metavar="MIB", help="Memory that TensorRT may use for one layer.")
@click.option(
    "--timing-cache", type=PATH, metavar="FILE", help="Kernel times to read, where there are some, and write."
)
@click.option("--tf32", is_flag=True, help="Let TensorRT's float32 layers round to 10 bits of mantissa.")
@click.option("--rtx", is_flag=True, help="Build with TensorRT-RTX, which needs no GPU.")
@click.option("-v", "--verbose", is_flag=True, help="Show what TensorRT says.")
@click.option("--json", "as_json", is_flag=True, help="Print the sidecar alone on stdout, as JSON.")
def build_engine(model: Path, output: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Build a TensorRT engine of a model, with the FlashRNN plugins of a library inside.

    Axes of one name have one size. An axis that no --shapes names covers 1 to 512 steps, a batch of 1 to 16.
    """
    from flashrnn_deploy import shell
    from flashrnn_deploy.engine.build import build_engine as build

    notes: list[str] = []
    with progress(verbose) as (show, log):
        report = build(model, output, progress=show, log=log, note=notes.append, **options)
    for text in notes:
        note(text)
    if as_json:
        print_json(report)
        return
    rows = [(name, report["dtypes"][name], s["min"], s["opt"], s["max"]) for name, s in report["shapes"].items()]
    table(str(output), ("input", "dtype", "smallest", "usual", "largest"), rows)
    target = report["compute_capability"] or " or ".join(report["targets"])
    size = f"{report['engine']['bytes'] / 1e6:.1f} MB"
    libraries = [word for path in options["plugins"] for word in ("--plugins", path)]
    line = shell.command("run", output, "--backend", "tensorrt", *libraries, "--input", "NAME=FILE.npy", "-o", "DIR")
    click.echo(f"{size}, for compute capability {target}; run it with: {line}")
    if all(axes["time"] is None for axes in report["axes"].values()):
        note("it has no known time axis: each run takes whole inputs, such as one step, and run --chunk does not apply")
    elif report["no_chunks"]:
        note(f"it runs whole sequences only: {report['no_chunks']}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the facts alone on stdout, as JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and what to install for the rest."""
    from flashrnn_deploy.doctor import examine

    facts = examine()
    if as_json:
        print_json([fact.to_json() for fact in facts])
        return
    rows = [(f.part, "yes" if f.found else "no", f.what, f.cure) for f in facts]
    table("this machine", ("", "found", "what", "what to do"), rows)


COMMANDS = (build_engine, doctor)
