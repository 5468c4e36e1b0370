"""plugins/kernels/op.h mirrors op.py and cells.py."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from flashrnn_deploy import cells, op

KERNELS = Path(__file__).parents[1] / "plugins" / "kernels"
HEADER = (KERNELS / "op.h").read_text(encoding="utf-8")
CELL_SOURCE = (KERNELS / "cells.cuh").read_text(encoding="utf-8")
STRUCTS = {"lstm": "Lstm", "gru": "Gru", "elman": "Elman", "slstm": "Slstm"}


def strings_of(array: str) -> tuple[str, ...]:
    body = re.search(rf"{array}\[\] = {{(.*?)}};", HEADER, re.S)
    assert body, f"op.h has no {array}"
    return tuple(re.findall(r'"(\w+)"', body[1]))


def test_names() -> None:
    assert f'kDomain = "{op.DOMAIN}"' in HEADER
    assert f"kOpsetVersion = {op.OPSET_VERSION};" in HEADER
    assert strings_of("kInputs") == op.INPUTS
    assert strings_of("kOutputs") == op.OUTPUTS


def test_cells_gates_biases_and_states() -> None:
    rows = re.findall(r'{Cell::k(\w+), "(\w+)", "(\w+)", "(\w+)", "(\w+)"}', HEADER)
    mirror = [(name.lower(), op_type, tuple(g), tuple(b), tuple(s)) for name, op_type, g, b, s in rows]
    assert mirror == [(c.name, c.op_type, c.gates, c.biases, c.states) for c in cells.CELLS.values()]
    enum = re.search(r"enum class Cell : int {(.*?)}", HEADER)
    assert enum
    assert re.findall(r"k(\w+)", enum[1]) == [row[0] for row in rows], "kOps is indexed by Cell"


@pytest.mark.parametrize("cell", cells.CELLS.values(), ids=lambda c: c.name)
def test_cell_struct_sizes(cell: cells.Cell) -> None:
    sizes = f"G = {cell.num_gates}, Gb = {cell.num_biases}, S = {cell.num_states};"
    assert re.search(rf"struct {STRUCTS[cell.name]} {{\s*static constexpr int {sizes}", CELL_SOURCE)


def test_dtypes() -> None:
    enum = re.search(r"enum class DType : int {(.*?)}", HEADER)
    assert enum
    assert [name.lower() for name in re.findall(r"k(\w+)", enum[1])] == list(op.DTYPES)


def test_attributes_and_defaults() -> None:
    body = re.search(r"struct Attributes {(.*?)};", HEADER, re.S)
    assert body
    mirror = {
        name: (kind, float(value)) for kind, name, value in re.findall(r"(int|float) (\w+) = ([\d.]+)f?;", body[1])
    }
    names = dict.fromkeys(n for c in cells.CELLS.values() for n in op.attribute_names(c.op_type))
    defaults = {f.name: f.default for f in fields(op.RNNSpec)}
    assert mirror == {n: (op.attribute_type(n).__name__, float(defaults[n])) for n in names}


@pytest.mark.parametrize(("name", "function"), [("relu", "has_relu"), ("normalizer_floor", "has_normalizer_floor")])
def test_attributes_of_one_op(name: str, function: str) -> None:
    owners = [c.name for c in cells.CELLS.values() if name in op.attribute_names(c.op_type)]
    test = re.search(rf"{function}\(Cell cell\) {{ return cell == Cell::k(\w+); }}", HEADER)
    assert test
    assert [test[1].lower()] == owners
