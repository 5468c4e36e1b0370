"""Every sample runs as it is, and says what it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SAMPLES = sorted((Path(__file__).parents[1] / "samples").glob("*.py"))


def test_there_are_samples() -> None:
    assert [p.name[:3] for p in SAMPLES] == [f"{n:02}_" for n in range(1, len(SAMPLES) + 1)]
    assert SAMPLES


@pytest.mark.parametrize("path", SAMPLES, ids=lambda p: p.name)
def test_sample(path: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == 1, done.stdout
