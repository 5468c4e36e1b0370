"""What grid.py measured as the tables of docs/benchmarks.md: python benchmarks/gpu/tables.py FILE [--csv CSV]

--csv writes the kernels and their times as tests/measured_h200.csv has them, which the solver's model is tested on.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from itertools import groupby
from pathlib import Path
from typing import Any

NAMES = {"lstm": "LSTM", "gru": "GRU", "elman": "Elman", "slstm": "sLSTM"}
IDENTITY = ("cell", "dtype", "heads", "head_dim", "batch")
CONFIG = (
    "mode", "padded_head_dim", "cluster_size", "units_per_block", "batch_tile", "tiles_per_block", "row_warps",
    "k_warps", "register_k_steps", "accumulator_sets", "ring_depth", "replicas", "spare_warp",
)  # fmt: skip


def entry(line: dict[str, Any]) -> str:
    """Measured / predicted, and how many times cuDNN takes longer, a loss in bold."""
    text = f"{line['us']:.3f} / {line['predicted']:.3f}"
    peer = line["cudnn_fp16"] or line["cudnn_same"]
    if peer is None:
        return text
    ratio = peer / line["with_gemm_us"]
    return f"{text}, {ratio:.1f}x" if ratio >= 1 else f"{text}, **{ratio:.2f}x, a loss**"


def table(lines: list[dict[str, Any]]) -> str:
    """A line per layer, a column per batch."""
    batches = sorted({line["B"] for line in lines})
    found = [" | ".join(["| cell", "heads x D", *(f"B{b}" for b in batches)]) + " |", "|---" * (2 + len(batches)) + "|"]
    for (cell, shape), layer in groupby(lines, lambda line: (line["cell"], line["shape"])):
        of = {line["B"]: entry(line) for line in layer}
        found.append(" | ".join([f"| {NAMES[cell]}", shape, *(of.get(b, "-") for b in batches)]) + " |")
    return "\n".join(found)


def summary(lines: list[dict[str, Any]]) -> str:
    """The worst of everything."""

    def name(line: dict[str, Any]) -> str:
        return f"{line['cell']} {line['shape']} B{line['B']}"

    off = [abs(line["predicted"] / line["us"] - 1) for line in lines]
    worst = lines[off.index(max(off))]
    found = [f"{len(lines)} kernels, errors up to {max(line['error'] for line in lines):.2f} of what is allowed"]
    found += [f"predictions off by {statistics.mean(off):.1%} in the mean, at most {max(off):.1%} ({name(worst)})"]
    for peer in ("cudnn_fp16", "cudnn_same"):
        beside = [(line[peer] / line["with_gemm_us"], name(line), line) for line in lines if line[peer]]
        one = [x for x in beside if x[2]["B"] == 1 and x[2]["spec"]["head_dim"] >= 256]
        for text, some in (("all", beside), ("one row of D from 256 on", one)):
            if some:
                least, most = min(some, key=lambda x: x[0]), max(some, key=lambda x: x[0])
                found.append(f"{peer}, {text}: {least[0]:.2f}x ({least[1]}) to {most[0]:.1f}x ({most[1]})")
    return "\n".join(found)


def write_csv(lines: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*IDENTITY, *CONFIG, "us"))
        for line in lines:
            if line["row"]:
                s = line["spec"]
                identity = (s["cell"], s["dtype"], s["num_heads"], s["head_dim"], line["B"])
                writer.writerow((*identity, *(line["row"][name] for name in CONFIG), f"{line['us']:.3f}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    given = json.loads(options.file.read_text())
    print(given["about"])
    for dtype, group in groupby(given["lines"], lambda line: line["dtype"]):
        lines = list(group)
        print(f"\n{dtype}\n\n{table(lines)}\n\n{summary(lines)}")
    if options.csv:
        write_csv(given["lines"], options.csv)


if __name__ == "__main__":
    main()
