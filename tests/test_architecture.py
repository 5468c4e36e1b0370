"""Imports point one way, and nothing heavy is imported before it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashrnn_deploy

CORE = Path(flashrnn_deploy.__file__).parent
HEAVY = ("torch", "onnxruntime", "tensorrt", "pycuda", "onnxscript", "matplotlib")
MAY_CALL_EXPORTERS = {"commands/models.py", "bench.py", "verify.py", "quickstart.py", "unconverted.py"}
"""Inside function bodies."""
NEEDS_TORCH = {"nn.py", "recurrence.py", "dropin.py", "parity.py"}  # nothing else imports them at its top
FILES = sorted(p for p in CORE.rglob("*.py") if not {"exporters", "plugins"} & set(p.relative_to(CORE).parts))


def imports(tree: ast.AST, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """(module, whether the import stands inside a function); type-checking blocks are left out."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", inside) for alias in node.names)
        yield from imports(node, inside or isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(CORE)))
def test_imports_point_one_way(path: Path) -> None:
    name = str(path.relative_to(CORE))
    for module, inside in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if module.startswith("flashrnn_deploy.exporters"):
            assert inside, f"{name} imports {module} outside of a function"
            assert name in MAY_CALL_EXPORTERS, f"{name} must not know {module}"
        if not inside and name not in NEEDS_TORCH:
            assert module.split(".")[0] not in HEAVY, f"{name} imports {module} at its top"
            assert module.split(".")[1:2] not in ([n.removesuffix(".py")] for n in NEEDS_TORCH), f"{name}: {module}"


@pytest.mark.parametrize(
    "code",
    [
        "import flashrnn_deploy",
        *(f"main({[*command, '--help']}, standalone_mode=False)" for command in ([], ["run"], ["export"], ["verify"])),
    ],
)
def test_nothing_heavy_is_needed(code: str) -> None:
    program = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None
from flashrnn_deploy.cli import main
{code}
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout or "main" not in code


def test_running_the_reference_needs_nothing_heavy(tmp_path: Path) -> None:
    import models
    import numpy as np

    from flashrnn_deploy.op import RNNSpec

    path = models.save(models.network(RNNSpec("gru", 1, 4)), tmp_path / "m.onnx")
    np.save(tmp_path / "x.npy", np.zeros((3, 2, models.IN), np.float32))
    program = f"""
import sys
for name in {HEAVY}:
    sys.modules[name] = None
from flashrnn_deploy.cli import main
main(sys.argv[1:])
"""
    arguments = ["run", path, "--input", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "out"]

    def call(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *map(str, arguments), *more]
        return subprocess.run(command, capture_output=True, text=True)

    assert call("--backend", "reference").returncode == 0
    refused = call()
    assert refused.returncode == 1
    assert refused.stderr == (
        'error: this needs onnxruntime, which is not installed: pip install "flashrnn-deploy[export]"\n'
    )


def test_no_file_is_overgrown() -> None:
    for path in (
        p
        for p in FILES
        if p.parent.name == "commands" or p.name in ("verify.py", "streaming.py", "shapes.py", "info.py")
    ):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 350, path
