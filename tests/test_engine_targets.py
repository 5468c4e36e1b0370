"""What an engine is built for: GPUs that the plugin library holds code for."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import engines
import pytest

from flashrnn_deploy import gpus
from flashrnn_deploy.engine.targets import code_of, runs_on, set_targets
from flashrnn_deploy.errors import FlashRNNError


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [
        (["86"], "8.6", True),
        (["80"], "8.9", True),
        (["89"], "8.6", False),
        (["75", "120"], "12.1", True),
        (["75"], "8.0", False),
        (["90a"], "9.0", True),
        (["100a"], "10.3", False),
        ([], "9.0", False),
    ],
)
def test_machine_code_runs_on_newer_minor_versions(code: list[str], capability: str, runs: bool) -> None:
    assert runs_on(code, capability) == runs


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = engines.ENTRY + 'const char* flashrnn_info() { return "{\\"cuda_architectures\\": [\\"86\\"]}"; }\n'
    return engines.library(tmp_path_factory.mktemp("library") / "lib.so", code)


RTX = types.SimpleNamespace(
    __name__="tensorrt_rtx",
    __version__="1.7.1",
    ComputeCapability=types.SimpleNamespace(__members__={"SM75": 0, "SM80": 1, "SM86": 2, "SM89": 3, "SM120": 4}),
)


class Config:
    num_compute_capabilities = 0

    def __init__(self) -> None:
        self.set: list[int] = []

    def set_compute_capability(self, target: int, index: int) -> bool:
        self.set.append(target)
        return index == len(self.set) - 1


def targets(library: Path | None, gpu: str | None = None, device: Any = None) -> tuple[dict[str, Any], list[int]]:
    config = Config()
    return set_targets(RTX, config, device, gpu, library), config.set


def test_targets_follow_the_library(library: Path) -> None:
    assert code_of(library) == ["86"]
    assert targets(library) == ({"compute_capability": None, "targets": ["8.6", "8.9"]}, [2, 3])
    assert targets(None)[0]["targets"] == ["8.0", "8.6", "8.9", "12.0"]


def test_a_gpu_without_code_is_refused(library: Path) -> None:
    with pytest.raises(
        FlashRNNError, match=r"for compute capability 12\.0, and the library .*lib\.so holds code for 8\.6"
    ):
        targets(library, "rtx5090")
    trt = types.SimpleNamespace(__name__="tensorrt", __version__="10.14.1")
    with pytest.raises(FlashRNNError, match=r"for compute capability 9\.0, and the library"):
        set_targets(trt, Config(), gpus.get("h200"), None, library)


def test_a_library_that_does_not_say(tmp_path: Path) -> None:
    """It may be another's, with plugins of other names."""
    other = engines.library(tmp_path / "other.so", "int nothing;\n")
    assert targets(other)[0]["targets"] == ["8.0", "8.6", "8.9", "12.0"]
