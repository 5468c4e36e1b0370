"""What the documents say is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from flashrnn_deploy import op
from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_example_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's factory and every command of the block below it."""
    import numpy as np
    import torch

    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n# model.py\n(.*?)```", README, re.DOTALL)
    assert code is not None
    Path("model.py").write_text(code[1])
    namespace: dict[str, object] = {}
    exec(code[1], namespace)
    module, (x,) = namespace["make"]()  # type: ignore[operator]
    torch.save(module.state_dict(), "trained.pt")
    np.save("x.npy", x.numpy())
    block = README.split("```python")[1].split("```")[2]
    commands = re.findall(r"^flashrnn-deploy +([^#\n]*)", block, re.MULTILINE)
    assert [c.split()[0] for c in commands] == ["export", "verify", "info", "run", "run"]
    for command in commands:
        result = CliRunner().invoke(main, command.split(), catch_exceptions=False)
        assert result.exit_code == 0, (command, result.output)
    untrained = CliRunner().invoke(main, ["verify", "model.onnx", "--against", "model.py:make"])
    assert untrained.exit_code == 1, "the factory makes random weights: against them the trained file differs"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_commands_and_links_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for command in re.findall(r"flashrnn-deploy ([a-z][a-z-]+)", text):
        assert command in main.commands, f"{path.name} names the command {command}"
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (path.parent / link).exists(), f"{path.name} links to {link}"


def test_op_document_lists_the_contract() -> None:
    text = (ROOT / "docs" / "op.md").read_text(encoding="utf-8")
    for cell in CELLS.values():
        row = next(line for line in text.splitlines() if line.startswith(f"| {cell.op_type} |"))
        columns = [part.strip() for part in row.split("|")[2:5]]
        assert columns == [" ".join(cell.gates), " ".join(cell.biases), " ".join(cell.states)]
        for name in op.attribute_names(cell.op_type):
            assert f"| `{name}` |" in text
    for name in (*op.INPUTS, *op.OUTPUTS):
        assert f"| `{name}` " in text
