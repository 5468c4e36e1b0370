"""The TensorRT plugin without TensorRT and without a GPU: both interfaces compile against the headers of their
releases, and a host (tests/tensorrt_host) drives each through its whole life, on the CPU's kernels.

Headers of TensorRT 10.14 come from the package index; those of other releases are looked for in .cache/tensorrt/RELEASE
(docs/tensorrt.md says where they are from).
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
from cpu_library import CACHE, ROOT, tool_environment
from tensorrt_packages import headers_folder

from flashrnn_deploy import tensorrt_headers
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.op import attribute_names

RELEASES = ("8.5", "8.6", "10.0", "10.3", "10.6", "10.14", "11.1")


@functools.cache
def include(release: str) -> Path:
    """The headers of a release, in a folder of its name."""
    folder = CACHE / "tensorrt" / release
    if not (folder / "NvInferRuntime.h").is_file():
        if release != "10.14":
            pytest.skip(f"the headers of TensorRT {release} are not in {folder.relative_to(ROOT)} (docs/tensorrt.md)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(headers_folder())
    return folder


@functools.cache
def build(release: str, sanitize: str = "") -> Path:
    """The folder with host_RELEASE and libplugin_RELEASE.so."""
    name = f"build-tensorrt-{release}{'-' + sanitize if sanitize else ''}"
    options = [f"-DFLASHRNN_TENSORRT_INCLUDES={include(release)}", f"-DFLASHRNN_SANITIZE={sanitize}", "-G", "Ninja"]
    configure = ["cmake", "-S", ROOT / "tests" / "tensorrt_host", "-B", CACHE / name, *options]
    for command in (configure, ["cmake", "--build", CACHE / name]):
        done = subprocess.run(command, capture_output=True, text=True, env=tool_environment())
        assert done.returncode == 0, done.stdout + done.stderr
    return CACHE / name


@functools.cache
def life(release: str) -> subprocess.CompletedProcess[str]:
    """What the host says of the plugin of a release."""
    folder = build(release)
    command = [folder / f"host_{release}", folder / f"libplugin_{release}.so"]
    return subprocess.run(command, capture_output=True, text=True, env=tool_environment(), timeout=300)


@pytest.mark.parametrize("release", RELEASES)
def test_life_of_a_plugin(release: str) -> None:
    done = life(release)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if line.startswith("FAILED"))
    interface, checks = ("IPluginV2DynamicExt", 300) if release.startswith("8.") else ("IPluginV3", 350)
    last = re.fullmatch(rf"{interface}: (\d+) checks, 0 failed", done.stdout.splitlines()[-1])
    assert last
    assert int(last[1]) >= checks


def test_attributes_are_those_of_the_op() -> None:
    fields = dict(re.findall(r"^fields (\w+) (.*)$", life("10.14").stdout, re.M))
    assert fields == {cell.op_type: " ".join(attribute_names(cell.op_type)) for cell in CELLS.values()}


@pytest.mark.parametrize("release", ["8.5", "10.14"])
@pytest.mark.parametrize(
    ("tried", "message"),
    [
        ("FlashLSTM layout 2.000000", "FlashLSTM: attribute layout is 2, expected 0 or 1"),
        ("FlashGRU reverse -1.000000", "FlashGRU: attribute reverse is -1, expected 0 or 1"),
        ("FlashElman no relu", "FlashElman: attribute relu is missing"),
        ("FlashElman two values of clip", "FlashElman: attribute clip has 2 values"),
        ("FlashLSTM another type of clip", "FlashLSTM: attribute clip is no FLOAT"),
        ("FlashSLSTM normalizer_floor -1.000000", "attribute normalizer_floor is -1, expected a finite number"),
        ("FlashSLSTM a clip", "FlashSLSTM: attribute clip is 1, expected 0 for this op"),
        ("FlashGRU an unknown attribute", "FlashGRU: there is no attribute hidden_size"),
    ],
)
def test_refusals_say_why(release: str, tried: str, message: str) -> None:
    lines = life(release).stderr.splitlines()
    said = lines[lines.index(f"trying: {tried}") + 1]
    assert said.startswith("flashrnn: ")
    assert message in said


def test_exported_symbols() -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", build("10.14") / "libplugin_10.14.so"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(line.split()[-1] for line in listed.stdout.splitlines()) == ["getCreators", "setLoggerFinder"]


@pytest.mark.full
@pytest.mark.parametrize("release", ["8.5", "10.14"])
@pytest.mark.parametrize("sanitize", ["address", "undefined", "thread"])
def test_sanitizers(release: str, sanitize: str) -> None:
    folder = build(release, sanitize)
    command = [folder / f"host_{release}", folder / f"libplugin_{release}.so"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


# Headers ----------------------------------------------------------------------------------------------------------


def write_headers(folder: Path, text: str) -> Path:
    (folder / "NvInferRuntime.h").touch()
    (folder / "NvInferVersion.h").write_text(text)
    return folder


def numbers(major: int, minor: int, prefix: str = "NV_TENSORRT", suffix: str = "") -> str:
    return f"#define {prefix}_MAJOR{suffix} {major} //!< major\n#define {prefix}_MINOR{suffix} {minor}\n"


@pytest.mark.parametrize(
    ("text", "version", "is_version_8", "rtx"),
    [
        (numbers(8, 5), "8.5", True, False),
        (numbers(8, 6), "8.6", True, False),
        (numbers(10, 0), "10.0", False, False),
        (
            numbers(11, 1, "TRT", "_ENTERPRISE") + "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n",
            "11.1",
            False,
            False,
        ),
        (numbers(1, 3, "TRT", "_RTX"), "1.3", False, True),
    ],
)
def test_releases_of_headers(tmp_path: Path, text: str, version: str, is_version_8: bool, rtx: bool) -> None:
    headers = tensorrt_headers.read_headers(write_headers(tmp_path, text))
    assert (headers.version, headers.is_version_8, headers.rtx) == (version, is_version_8, rtx)


@pytest.mark.parametrize(
    ("text", "wanted", "message"),
    [
        ("", None, "there are no TensorRT headers in it; it takes libnvinfer-headers-dev"),
        (numbers(8, 4), None, "these are headers of TensorRT 8.4; the plugin is for 8.5, 8.6 and 10 or newer"),
        (numbers(9, 3), None, "these are headers of TensorRT 9.3"),
        (numbers(10, 3), "8", "--tensorrt 8: the headers in .* are of TensorRT 10.3"),
        (numbers(8, 6), "10", "--tensorrt 10: the headers in .* are of TensorRT 8.6"),
    ],
)
def test_wrong_headers(tmp_path: Path, text: str, wanted: str | None, message: str) -> None:
    with pytest.raises(FlashRNNError, match=message):
        tensorrt_headers.read_headers(write_headers(tmp_path, text), wanted)
