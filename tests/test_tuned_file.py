"""The file of timings: what is written is read again, and each value that is not of its kind is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flashrnn_deploy import tuned_file
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.kernel_config import KernelConfig
from flashrnn_deploy.op import RNNSpec
from flashrnn_deploy.tuned_file import Entry, Timing

CONFIG = KernelConfig("cluster", 256, 4, 64, 8, 1, 4, 1, 16, 1, 4, 1, 0)
ENTRY = Entry(
    "NVIDIA GeForce RTX 4090 (48 GB)", 90, 132, "580.65.06", "13.0", "0a" * 32, "2026-11-30",
    RNNSpec("lstm", 1, 256, dtype="bfloat16", clip=2.5), 16,
    (Timing(CONFIG, 0.5), Timing(CONFIG, None, 'does not launch: "x" \\ \u00e9')),
)  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    slstm = RNNSpec("slstm", 12, 64, num_directions=2, dtype="float16", layout=1, normalizer_floor=1.0)
    other = Entry("T4", 75, 40, "unknown", "11.4", "f" * 64, "2024-02-29", slstm, 2**31 - 1, ENTRY.timings[:1])
    tuned_file.save(tmp_path / "t.json", [ENTRY, other])
    assert tuned_file.load(tmp_path / "t.json") == [ENTRY, other]


def refusal(folder: Path, change: Callable[[dict[str, Any]], object]) -> str:
    """What is said of the file of ``ENTRY`` after a change, behind the words that all such messages begin with."""
    path = folder / "t.json"
    tuned_file.save(path, [ENTRY])
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))
    with pytest.raises(FlashRNNError) as caught:
        tuned_file.load(path)
    said = str(caught.value)
    assert said.isprintable()
    begin = f"{path} is damaged, or no file of build-plugins --autotune: "
    assert said.startswith(begin)
    return said.removeprefix(begin)


def place(facts: dict[str, Any], where: str, value: object) -> None:
    """Puts a value where "spec.cell" or "timings[0].step_us" of the entry says."""
    *path, last = [int(name) if name.isdigit() else name for name in re.findall(r"\w+", where)]
    item: Any = facts["entries"][0]
    for name in path:
        item = item[name]
    item[last] = value


NAME = "not 1 to 100 printable characters without quotes and backslashes"
INT = "not a whole number from {} to 2147483647"
TIME = "not null or microseconds from 0.001 to 1e9"


@pytest.mark.parametrize(
    ("where", "values", "wanted"),
    [
        ("product", ['H200", INJECT, "', "H'", "a\\", "a\nb", "\x1b[2J", "a\x7f", "\u202e", "", "x" * 101, 5], NAME),
        ("driver", ['"', "\t", True, ["580"]], NAME),
        ("nvcc", ["`", "\ud800", 13.0], NAME),
        ("date", ['", INJECT, "', "2026-11-30\n", "2026-02-30", "20261130", "\u0662026-11-30", 20261130, "", None],
         "not a date such as 2026-11-30"),
        ("source_hash", ["", "0" * 63, "g" * 64, "0" * 64 + "\n", 0], "not 64 hexadecimal digits"),
        ("compute_capability", [True, "90", 90.0, 0, -90, None], INT.format(1)),
        ("sms", [True, "132", 1e9], INT.format(1)),
        ("batch", [True, "16", 16.0, 0, 2**31, 10**300], INT.format(1)),
        ("spec.cell", ["foo", 5, ["lstm"], None], "not one of lstm, gru, elman, slstm"),
        ("spec.dtype", ["float64", True], "not one of float32, float16, bfloat16"),
        ("spec.num_heads", ["1", 0, True], INT.format(1)),
        ("spec.head_dim", [256.0, -1], INT.format(1)),
        ("spec.num_directions", ["2", 3, True, 2.0], "not a whole number from 1 to 2"),
        ("spec.layout", [False, 2], "not a whole number from 0 to 1"),
        ("spec.clip", [True, "1", -1, float("nan"), float("inf"), 10**300, None], "not a number from 0 to 3e38"),
        ("spec", [5, [], "lstm", None], "not an object"),
        ("timings", [5, {}, "", None], "not a list"),
        ("timings[1]", [5, [], None], "not an object"),
        ("timings[0].config", [5, [], None], "not an object"),
        ("timings[0].config.mode", ["foo", 2], "not one of local, cluster, grid, alternating"),
        ("timings[0].config.row_warps", [-1, True, "4", 4.0, 2**31, 10**300, None], INT.format(0)),
        ("timings[1].config.spare_warp", [False, -1], INT.format(0)),
        ("timings[0].step_us", [True, 1e-300, 0, -1.0, 1e10, float("nan"), float("inf"), "0.2", 10**300, []], TIME),
        ("timings[1].excluded", [5, ["x"], True, None, "a\nb", "\x1b[2J", "x" * 401],
         "not a printable text of at most 400 characters"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(tmp_path: Path, where: str, values: list[object], wanted: str) -> None:
    for value in values:
        said = refusal(tmp_path, lambda facts, value=value: place(facts, where, value))
        assert re.fullmatch(rf"entries\[0\]\.{re.escape(where)} is .{{1,50}}, {re.escape(wanted)}", said), said


def test_every_field_has_to_be_there_and_no_other(tmp_path: Path) -> None:
    def objects(facts: dict[str, Any]) -> dict[str, dict[str, Any]]:
        entry = facts["entries"][0]
        timing = entry["timings"][0]
        places = {"entries[0]": entry, "entries[0].spec": entry["spec"], "entries[0].timings[0]": timing}
        return {"the whole": facts, **places, "entries[0].timings[0].config": timing["config"]}

    tuned_file.save(tmp_path / "t.json", [ENTRY])
    for name, values in objects(json.loads((tmp_path / "t.json").read_text())).items():
        for field in values:
            said = refusal(tmp_path, lambda facts, n=name, f=field: objects(facts)[n].pop(f))
            assert said == f"{name} has no {field}"
        said = refusal(tmp_path, lambda facts, n=name: objects(facts)[n].update({"\x1b": 1}))
        assert said == f'{name} has the unknown field "\\u001b"'


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec.relu": 1}, "entries[0].spec: lstm op: relu belongs to the elman cell"),
        (
            {"spec.reverse": 1, "spec.num_directions": 2},
            "entries[0].spec: lstm op: reverse must be 0 with two directions",
        ),
        ({"timings": []}, "entries[0].timings is empty"),
        ({"timings[0].step_us": None}, "entries[0].timings[0] needs either step_us or excluded"),
        ({"timings[0].excluded": "wrong"}, "entries[0].timings[0] needs either step_us or excluded"),
    ],
)
def test_values_that_do_not_go_together(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    assert refusal(tmp_path, lambda facts: [place(facts, *change) for change in changes.items()]) == message


def test_a_format_that_is_no_number(tmp_path: Path) -> None:
    for value in (True, "1", 1.0, None, []):
        assert refusal(tmp_path, lambda facts, v=value: facts.update(format=v)).startswith("format is ")
