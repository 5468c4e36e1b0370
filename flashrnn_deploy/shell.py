"""Command lines for messages, to be pasted into a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

from flashrnn_deploy.files import printable


def word(path: Path) -> str:
    """A path that no program takes for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def command(*words: str | Path) -> str:
    """A line of flashrnn-deploy, each word quoted where a shell needs it."""
    return printable(shlex.join(["flashrnn-deploy", *(word(w) if isinstance(w, Path) else w for w in words)]))
