"""The command line. Each command is a thin layer over one function; whatever is heavy is imported inside it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from flashrnn_deploy import __version__
from flashrnn_deploy.errors import FlashRNNError

_PATH = click.Path(path_type=Path)
_EXTRAS = {"torch": "export", "onnxscript": "export", "onnxruntime": "export", "matplotlib": "export"}
_EXTRAS |= {"tensorrt": "tensorrt", "pycuda": "tensorrt"}


class _Group(click.Group):
    """Prints a user's mistake as one line and exits 1; every other exception keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except FlashRNNError as error:
            message = str(error)
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package not in _EXTRAS:
                raise
            message = f'this needs {package}, which is not installed: pip install "flashrnn-deploy[{_EXTRAS[package]}]"'
        click.echo(f"error: {' '.join(message.split())}", err=True)
        ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashrnn-deploy")
def main() -> None:
    """Export PyTorch recurrent networks to ONNX with the FlashRNN op, and run them anywhere."""


@main.command()
@click.option("-o", "--output", type=_PATH, default=Path("quickstart"), show_default=True, help="Directory to fill.")
def quickstart(output: Path) -> None:
    """Export a small model, run it, check it: the whole path in one command."""
    from flashrnn_deploy.quickstart import run

    run(output)


@main.command()
@click.argument("source", metavar="FILE.py:FACTORY")
@click.option("-o", "--output", type=_PATH, required=True, help="ONNX file to write.")
@click.option("--weights", type=_PATH, help="State dict to load into the module.")
@click.option("--dtype", help="float32, float16 or bfloat16; the module's own by default.")
@click.option("--opset", type=int, help="Opset of the standard operators (default 17).")
@click.option("--dynamic", multiple=True, metavar="NAME:AXIS=DIM", help="Make an axis dynamic under a name.")
@click.option("--static", multiple=True, metavar="NAME:AXIS", help="Keep an axis at the example's size.")
@click.option("--expose-states", is_flag=True, help="Turn default initial states into inputs and outputs.")
@click.option("--report", type=_PATH, help="Also write the report as JSON.")
def export(source: str, output: Path, report: Path | None, **options: Any) -> None:
    """Export a PyTorch module.

    FACTORY is a function in FILE.py without arguments that returns a module, (module, args) or
    (module, args, dynamic_shapes).
    """
    from flashrnn_deploy.exporters import export_file

    with _report_file(report) as write:
        facts = export_file(source, output, **options)
        write(facts)
    _print_export(output, facts)


@main.command()
@click.argument("source", metavar="IN.onnx", type=_PATH)
@click.option("-o", "--output", type=_PATH, required=True, help="ONNX file to write.")
@click.option("--expose-states", is_flag=True, help="Turn default initial states into inputs and outputs.")
@click.option("--opset", type=int, help="Opset to raise the standard operators to.")
@click.option("--report", type=_PATH, help="Also write the report as JSON.")
def convert(source: Path, output: Path, expose_states: bool, opset: int | None, report: Path | None) -> None:
    """Replace the LSTM, GRU and RNN nodes of an ONNX file by the FlashRNN op."""
    from flashrnn_deploy.exporters import convert_file

    with _report_file(report) as write:
        facts = convert_file(source, output, expose_states=expose_states, opset=opset)
        write(facts)
    _print_export(output, facts)


@main.command()
@click.argument("model", type=_PATH)
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="One input; repeat it.")
@click.option("-o", "--output", type=_PATH, required=True, help="Directory for one .npy per output and outputs.json.")
@click.option("--backend", type=click.Choice(["onnxruntime", "reference"]), default="onnxruntime", show_default=True)
@click.option("--chunk", type=click.IntRange(min=1), help="Cut time into chunks of this many steps, carrying states.")
@click.option("--state", "states", multiple=True, metavar="IN=OUT", help="The output that continues a state input.")
@click.option("--plugins", multiple=True, type=_PATH, metavar="LIB", help="FlashRNN plugin library to load.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print outputs.json alone on stdout.")
def run(model: Path, inputs: tuple[str, ...], output: Path, as_json: bool, **options: Any) -> None:
    """Run a model on .npy files.

    State inputs may be left out and are zero then. A bfloat16 tensor travels as a float32 .npy.
    """
    from flashrnn_deploy.run import run as run_model

    report = run_model(model, inputs, output, note=_note, **options)
    if as_json:
        _print_json(report)
    else:
        rows = [(o["name"], o["dtype"], o["shape"], str(output / o["file"])) for o in report["outputs"]]
        _table("", ("output", "dtype", "shape", "file"), rows)


@main.command()
@click.argument("model", type=_PATH)
@click.option(
    "--against",
    default="reference",
    show_default=True,
    metavar="reference|OTHER.onnx|FILE.py:FACTORY",
    help="The judge: onnx.reference in float64, another file, or the PyTorch module in float64.",
)
@click.option("--weights", type=_PATH, help="State dict to load into the module of FILE.py:FACTORY.")
@click.option("--plugins", multiple=True, type=_PATH, metavar="LIB", help="FlashRNN plugin library to load.")
@click.option("--json", "as_json", is_flag=True, help="Print the report alone on stdout, as JSON.")
def verify(model: Path, against: str, weights: Path | None, plugins: tuple[Path, ...], as_json: bool) -> None:
    """Check a model's structure, and its results in ONNX Runtime on random inputs of several sizes."""
    from flashrnn_deploy.verify import verify as verify_model

    report = verify_model(model, against, plugins, weights=weights)
    if as_json:
        _print_json(report.to_json())
    else:
        for text in report.notes:
            _note(text)
        rows = [
            (
                c.name,
                f"{c.max_abs_error:.3g}",
                f"{c.tolerance:.3g}",
                f"T={T} B={B}",
                "yes" if c.passed else "NO",
                c.note,
            )
            for c, (T, B) in report.outputs
        ]
        title = f"against {report.outputs[0][0].judge}"
        _table(title, ("output", "max abs error", "tolerance", "at", "passed", ""), rows)
        if report.not_compared:
            _note(f"not compared, since the judge has no such output: {', '.join(report.not_compared)}")
    if failures := report.failures:
        each = (
            f"{c.name} (error {c.max_abs_error:.3g} > {c.tolerance:.3g}{', ' * bool(c.note)}{c.note})" for c in failures
        )
        raise FlashRNNError(
            f"{len(failures)} of {len(report.outputs)} outputs differ from {failures[0].judge}: {', '.join(each)}"
        )


@main.command()
@click.argument("file", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print the facts alone on stdout, as JSON.")
def info(file: Path, as_json: bool) -> None:
    """Describe an ONNX model or a plugin library."""
    from flashrnn_deploy.info import describe_file

    facts = describe_file(file)
    if as_json:
        _print_json(facts)
        return
    tables = {k: v for k, v in facts.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    engines = {f"runs in {engine}": how for engine, how in facts.get("engines", {}).items()}
    plain = {k: v for k, v in facts.items() if k not in (*tables, "kind", "warnings", "engines")} | engines
    _table(facts["kind"], ("", ""), plain.items())
    for title, rows in tables.items():
        absent = (None, "", 0) if title == "flashrnn" else (None, "")  # an attribute of 0 is not set, an axis of 0 is
        columns = [c for c in rows[0] if any(row[c] not in absent for row in rows)]
        _table(title, columns, [[row[c] for c in columns] for row in rows])
    for text in facts.get("warnings", ()):
        _note(text)


@main.command()
@click.option("--cell", required=True, help="lstm, gru, elman or slstm.")
@click.option("--heads", "num_heads", type=int, default=1, show_default=True)
@click.option("--head-dim", type=int, required=True)
@click.option("--directions", "num_directions", type=int, default=1, show_default=True)
@click.option("--batch", type=int, default=1, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--gpu", required=True, help="Name of a GPU, for example h200.")
@click.option("--explain", is_flag=True, help="List how many candidates each constraint removed.")
@click.option("--json", "as_json", is_flag=True, help="Print the solution alone on stdout, as JSON.")
def solve(batch: int, gpu: str, explain: bool, as_json: bool, **spec: Any) -> None:
    """Choose the kernel configuration of one layer on one GPU. Needs no GPU."""
    from flashrnn_deploy import gpus, kernel_config
    from flashrnn_deploy.op import RNNSpec

    facts = kernel_config.solve(RNNSpec(**spec), batch, gpus.get(gpu)).to_dict()
    if as_json:
        _print_json(facts)
        return
    reasons = facts.pop("explain")
    _table("solution", ("", ""), facts.items())
    if explain:
        _table("explain", ("constraint", "candidates removed"), [(r["constraint"], r["removed"]) for r in reasons])


@main.command("build-plugins")
@click.argument("models", nargs=-1, required=True, type=_PATH, metavar="MODEL...")
@click.option("--gpu", "gpu_names", multiple=True, required=True, metavar="cpu|GPU", help="Repeat it; local: this one.")
@click.option("-o", "--output", type=_PATH, required=True, help="Directory for libflashrnn.so and the build.")
@click.option("--batch", "batches", multiple=True, type=int, help="Batch to choose kernels for (1, 4, 16 and 64).")
@click.option("--nvcc", type=_PATH, help="CUDA compiler, 11.4 or newer; that on PATH by default.")
@click.option("--toolchain", type=_PATH, help="CMake toolchain file, to build for another host architecture.")
@click.option("--tensorrt-include", type=_PATH, help="TensorRT headers; not available yet.")
@click.option("--jobs", type=int, help="Compilers at once; one per processor by default.")
@click.option("--allow-warnings", is_flag=True, help="Do not stop at a compiler's warnings.")
@click.option("-v", "--verbose", is_flag=True, help="Show the output of CMake and the compilers.")
@click.option("--json", "as_json", is_flag=True, help="Print the report alone on stdout, as JSON.")
def build_plugins(models: tuple[Path, ...], output: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Compile libflashrnn.so for the FlashRNN ops of the models.

    --gpu cpu needs g++, CMake and Ninja; a GPU needs nvcc too, but no GPU.
    """
    from flashrnn_deploy import build

    with _progress(verbose) as (progress, log):
        report = build.build_plugins(models, output=output, progress=progress, log=log, **options)
    if as_json:
        _print_json(report)
        return
    rows = [
        (k["node"], k["gpu"], f"{k['min_batch']}+", k["mode"], k["predicted_step_us"], "yes" if k["estimate"] else "")
        for k in report["kernels"]
    ]
    if rows:
        _table("kernels", ("node", "gpu", "batch", "kernel", "predicted us per step", "estimate"), rows)
    click.echo(f"{output / report['library']} ({report['architecture']}); pass it with --plugins")


@contextlib.contextmanager
def _progress(verbose: bool) -> Iterator[tuple[Callable[[int, int, str], None], Callable[[str], None]]]:
    """What is told of a build: a bar on a terminal, a line per step in a log, or the programs' own output."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if verbose:
        yield lambda done, total, what: None, lambda line: click.echo(line, err=True)
    elif not console.is_terminal:
        yield (
            lambda done, total, what: click.echo(f"[{done}/{total}] {what}" if total else what, err=True),
            lambda line: None,
        )
    else:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("configuring", total=None)
            yield (
                lambda done, total, what: bar.update(task, completed=done, total=total or None, description=what),
                lambda line: None,
            )


def _print_export(output: Path, facts: Mapping[str, Any]) -> None:
    rows = [
        (kind, t["name"], t["dtype"], t["shape"]) for kind in ("input", "output") for t in facts.get(f"{kind}s", ())
    ]
    _table(str(output), ("", "name", "dtype", "shape"), rows)
    columns = ("name", "op", "action", "reason") if "rewritten" in facts else ("name", "op", "cell")
    nodes = [[n.get(column) for column in columns] for n in facts.get("nodes", ())]
    _table(f"opset {facts.get('opset')}", columns, nodes)
    if states := facts.get("states"):
        _table("states", ("input", "output"), states.items())
    for name, reason in facts.get("states_kept", {}).items():
        _note(f"{name} got no state input: {reason}")
    for text in (*facts.get("warnings", ()), *facts.get("notes", ())):
        _note(text)


@contextlib.contextmanager
def _report_file(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes the report; where that cannot work, nothing else is done either."""
    from flashrnn_deploy.files import new_file

    if path is None:
        yield lambda facts: None
        return
    if path.suffix != ".json":
        raise FlashRNNError(
            f"--report {path}: the report is JSON; name it with .json, so that it replaces no other file"
        )
    with new_file(path) as file:

        def write(facts: Mapping[str, Any]) -> None:
            file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

        yield write


def _print_json(facts: Any) -> None:
    click.echo(json.dumps(facts, indent=2))


def _note(text: str) -> None:
    click.echo(f"note: {' '.join(text.split())}", err=True)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows without interpreting markup or control characters in them: names in a file are not to be trusted."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from flashrnn_deploy.files import printable

    heading = Text(title) if title else None
    table = Table(title=heading, title_justify="left", box=box.SIMPLE, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(_cell(value))) for value in row))
    console = Console()
    if not console.is_terminal:
        console.width = 240  # a pipe has no width of its own, and folded columns cannot be searched
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_cell(v)}" for k, v in value.items()) or "(none)"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_cell, value))}]"
    return "-" if value is None else str(value)
