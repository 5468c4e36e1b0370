"""Loading FILE.py:FACTORY: what users write in such a file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import export_file, load_factory
from flashrnn_deploy.verify import verify

WITH_CONFIG = """
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Config:
    hidden: int = 8


def make():
    import json

    return nn.GRU(len(json.loads("[1, 2]")), Config().hidden), (torch.zeros(4, 1, 2),)
"""


@pytest.mark.parametrize("name", ["model", "json"])
def test_a_file_with_a_dataclass_and_the_name_of_a_package(tmp_path: Path, name: str) -> None:
    """Dataclasses with postponed annotations look their module up by name; that name must not hide a package."""
    (tmp_path / f"{name}.py").write_text(WITH_CONFIG)
    example = load_factory(f"{tmp_path / name}.py:make")
    assert example.module.hidden_size == 8


def test_a_file_that_fails_leaves_no_module_behind(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no')\n")
    before = set(sys.modules)
    with pytest.raises(FlashRNNError, match=r"ValueError: no \(broken.py:1\)"):
        load_factory(f"{tmp_path / 'broken.py'}:make")
    assert not [m for m in set(sys.modules) - before if "broken" in m]


RANDOM = """
import torch
from torch import nn


def random():
    return nn.GRU(4, 6).eval(), (torch.zeros(5, 2, 4),)


def seeded():
    torch.manual_seed(0)
    return random()


def other():
    torch.manual_seed(1)
    return random()
"""


@pytest.mark.parametrize(("judge", "notes"), [("random", 1), ("seeded", 0), ("other", 0)])
def test_a_factory_without_a_seed_is_told_where_it_disagrees(tmp_path: Path, judge: str, notes: int) -> None:
    (tmp_path / "model.py").write_text(RANDOM)
    export_file(f"{tmp_path / 'model.py'}:seeded", tmp_path / "m.onnx")
    report = verify(tmp_path / "m.onnx", f"{tmp_path / 'model.py'}:{judge}")
    assert bool(report.failures) == (judge != "seeded")
    assert report.notes == ["the factory makes other weights each time: seed it, or pass --weights"] * notes
