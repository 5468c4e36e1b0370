"""Commands on models: quickstart, export, convert, run, verify and info."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from flashrnn_deploy.commands.terminal import PATH, Whole, note, print_json, report_file, table
from flashrnn_deploy.errors import FlashRNNError

_BACKENDS = ("onnxruntime", "tensorrt", "reference")


@click.command()
@click.option("-o", "--output", type=PATH, default=Path("quickstart"), show_default=True, help="Directory to fill.")
def quickstart(output: Path) -> None:
    """Export a small model, run it, check it: the whole path in one command."""
    from flashrnn_deploy.quickstart import run

    run(output)


@click.command()
@click.argument("source", metavar="FILE.py:FACTORY")
@click.option("-o", "--output", type=PATH, required=True, help="ONNX file to write.")
@click.option("--weights", type=PATH, help="State dict to load into the module.")
@click.option("--dtype", help="float32, float16 or bfloat16; the module's own by default.")
@click.option("--opset", type=Whole(), help="Opset of the standard operators (default 17).")
@click.option("--dynamic", multiple=True, metavar="NAME:AXIS=DIM", help="Make an axis dynamic under a name.")
@click.option("--static", multiple=True, metavar="NAME:AXIS", help="Keep an axis at the example's size.")
@click.option("--expose-states", is_flag=True, help="Turn default initial states into inputs and outputs.")
@click.option("--report", type=PATH, help="Also write the report as JSON.")
def export(source: str, output: Path, report: Path | None, **options: Any) -> None:
    """Export a PyTorch module.

    FACTORY is a function in FILE.py without arguments that returns a module, (module, args) or
    (module, args, dynamic_shapes).
    """
    from flashrnn_deploy.exporters import export_file

    with report_file(report) as write:
        facts = export_file(source, output, **options)
        write(facts)
    _print_export(output, facts)


@click.command()
@click.argument("source", metavar="IN.onnx", type=PATH)
@click.option("-o", "--output", type=PATH, required=True, help="ONNX file to write.")
@click.option("--expose-states", is_flag=True, help="Turn default initial states into inputs and outputs.")
@click.option("--opset", type=Whole(), help="Opset to raise the standard operators to.")
@click.option("--report", type=PATH, help="Also write the report as JSON.")
def convert(source: Path, output: Path, expose_states: bool, opset: int | None, report: Path | None) -> None:
    """Replace the LSTM, GRU and RNN nodes of an ONNX file by the FlashRNN op."""
    from flashrnn_deploy.exporters import convert_file

    with report_file(report) as write:
        facts = convert_file(source, output, expose_states=expose_states, opset=opset)
        write(facts)
    _print_export(output, facts)


@click.command()
@click.argument("model", type=PATH)
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="One input; repeat it.")
@click.option("-o", "--output", type=PATH, required=True, help="Directory for one .npy per output and outputs.json.")
@click.option("--backend", type=click.Choice(_BACKENDS), default="onnxruntime", show_default=True)
@click.option("--chunk", type=Whole(min=1), help="Cut time into chunks of this many steps, carrying states.")
@click.option("--state", "states", multiple=True, metavar="IN=OUT", help="The output that continues a state input.")
@click.option("--plugins", multiple=True, type=PATH, metavar="LIB", help="FlashRNN plugin library to load.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--trust-engine", is_flag=True, help="Run an engine whose sidecar is missing or does not match.")
@click.option("--json", "as_json", is_flag=True, help="Print outputs.json alone on stdout.")
def run(model: Path, inputs: tuple[str, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Run a model on .npy files; with --backend tensorrt an engine of build-engine, on the GPU.

    State inputs may be left out and are zero then. A bfloat16 tensor travels as a float32 .npy.
    """
    from flashrnn_deploy.run import run as run_model

    report = run_model(model, inputs, output, note=note, **options)
    if as_json:
        print_json(report)
    else:
        rows = [(o["name"], o["dtype"], o["shape"], str(output / o["file"])) for o in report["outputs"]]
        table("", ("output", "dtype", "shape", "file"), rows)


@click.command()
@click.argument("model", type=PATH)
@click.option(
    "--against",
    default="reference",
    show_default=True,
    metavar="reference|OTHER.onnx|FILE.py:FACTORY",
    help="The judge: onnx.reference in float64, another file, or the PyTorch module in float64.",
)
@click.option("--weights", type=PATH, help="State dict to load into the module of FILE.py:FACTORY.")
@click.option("--plugins", multiple=True, type=PATH, metavar="LIB", help="FlashRNN plugin library to load.")
@click.option("--json", "as_json", is_flag=True, help="Print the report alone on stdout, as JSON.")
def verify(model: Path, against: str, weights: Path | None, plugins: tuple[Path, ...], as_json: bool) -> None:
    """Check a model's structure, and its results in ONNX Runtime on random inputs of several sizes."""
    from flashrnn_deploy.verify import verify as verify_model

    report = verify_model(model, against, plugins, weights=weights)
    if as_json:
        print_json(report.to_json())
    else:
        for text in report.notes:
            note(text)
        rows = [
            (
                c.name,
                f"{c.max_abs_error:.3g}",
                f"{c.tolerance:.3g}",
                " ".join(f"{axis}={size}" for axis, size in zip("TB", case, strict=True) if size is not None),
                "yes" if c.passed else "NO",
                c.note,
            )
            for c, case in report.outputs
        ]
        title = f"against {report.outputs[0][0].judge}"
        table(title, ("output", "max abs error", "tolerance", "at", "passed", ""), rows)
        if report.not_compared:
            note(f"not compared, since the judge has no such output: {', '.join(report.not_compared)}")
    if failures := report.failures:
        each = (
            f"{c.name} (error {c.max_abs_error:.3g} > {c.tolerance:.3g}{', ' * bool(c.note)}{c.note})" for c in failures
        )
        raise FlashRNNError(
            f"{len(failures)} of {len(report.outputs)} outputs differ from {failures[0].judge}: {', '.join(each)}"
        )


@click.command()
@click.argument("file", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the facts alone on stdout, as JSON.")
def info(file: Path, as_json: bool) -> None:
    """Describe an ONNX model, a plugin library or an engine."""
    from flashrnn_deploy.info import describe_file

    facts = describe_file(file)
    if as_json:
        print_json(facts)
        return
    if facts["kind"] == "TensorRT engine":
        _print_engine(facts)
        return
    tables = {k: v for k, v in facts.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    engines = {f"runs in {engine}": how for engine, how in facts.get("engines", {}).items()}
    plain = {k: v for k, v in facts.items() if k not in (*tables, "kind", "warnings", "engines")} | engines
    table(facts["kind"], ("", ""), plain.items())
    for title, rows in tables.items():
        absent = (None, "", 0) if title == "flashrnn" else (None, "")  # an attribute of 0 is not set, an axis of 0 is
        columns = [c for c in rows[0] if any(row[c] not in absent for row in rows)]
        table(title, columns, [[row[c] for c in columns] for row in rows])
    for text in facts.get("warnings", ()):
        note(text)


def _print_engine(facts: Mapping[str, Any]) -> None:
    """What a sidecar says: what the engine is for, then its tensors, a row each."""
    from flashrnn_deploy import shell

    def file(key: str) -> str | None:
        entry = facts[key]
        return entry and f"{entry.get('file')}, SHA-256 {str(entry.get('sha256'))[:12]}..."

    targets = [facts["compute_capability"]] if facts["compute_capability"] else facts.get("targets", [])
    rows = {
        "file": facts["file"],
        "size": f"{facts['engine'].get('bytes')} bytes",
        "built with": f"{'TensorRT-RTX' if facts['rtx'] else 'TensorRT'} {facts['tensorrt']}",
        "compute capability": " or ".join(targets) or None,
        "model": file("model"),
        "library": file("library"),
        "command": shell.command(*facts["command"]) if "command" in facts else None,
        "lengths": ", ".join(facts.get("lengths", [])) or None,
        "no chunks": facts.get("no_chunks"),
    }
    table(facts["kind"], ("", ""), rows.items())
    columns = ("tensor", "dtype", "smallest", "usual", "largest", "time axis", "batch axis", "next state")
    states, tensors = dict(facts["states"]), []
    for name, dtype in facts["dtypes"].items():
        profile, axes = facts["shapes"].get(name) or {}, facts["axes"].get(name) or {}
        sizes = [profile.get(key) for key in ("min", "opt", "max")]
        tensors.append([name, dtype, *sizes, axes.get("time"), axes.get("batch"), states.get(name)])
    table("", columns, tensors)
    for text in facts.get("warnings", ()):
        note(text)


def _print_export(output: Path, facts: Mapping[str, Any]) -> None:
    rows = [
        (kind, t["name"], t["dtype"], t["shape"]) for kind in ("input", "output") for t in facts.get(f"{kind}s", ())
    ]
    if rows:
        table(str(output), ("", "name", "dtype", "shape"), rows)
    columns = ("name", "op", "action", "reason") if "rewritten" in facts else ("name", "op", "cell")
    nodes = [[n.get(column) for column in columns] for n in facts.get("nodes", ())]
    table(f"{'' if rows else f'{output}, '}opset {facts.get('opset')}", columns, nodes)
    if states := facts.get("states"):
        table("states", ("input", "output"), states.items())
    for name, reason in facts.get("states_kept", {}).items():
        note(f"{name} got no state input: {reason}")
    for text in (*facts.get("warnings", ()), *facts.get("notes", ())):
        note(text)


COMMANDS = (quickstart, export, convert, run, verify, info)
