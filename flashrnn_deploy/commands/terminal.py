"""What the commands share: tables, notes, JSON and progress on a terminal."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import printable


class _Path(click.Path):
    """A path that is not empty: ``Path("")`` is the current folder, and an unset variable of the shell is ""."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


PATH = _Path(path_type=Path)


class Whole(click.IntRange):
    """A whole number in ASCII digits: Python's ``int`` reads those of every script, spaces and underscores too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and not re.fullmatch("[+-]?[0-9]{1,18}", value):
            self.fail(f"'{printable(value[:40])}' is no whole number of up to 18 digits", param, ctx)
        return super().convert(value, param, ctx)


@contextlib.contextmanager
def report_file(path: Path | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function that writes the report; where that cannot work, nothing else is done either."""
    from flashrnn_deploy.files import new_file

    if path is None:
        yield lambda facts: None
        return
    if path.suffix != ".json":
        raise FlashRNNError(
            f"--report {path}: the report is JSON; name it with .json, so that it replaces no other file"
        )
    with new_file(path) as file:

        def write(facts: Mapping[str, Any]) -> None:
            file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

        yield write


def print_json(facts: Any) -> None:
    click.echo(json.dumps(facts, indent=2))


def note(text: str) -> None:
    click.echo(f"note: {' '.join(text.split())}", err=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows without interpreting markup or control characters in them: names in a file are not to be trusted."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    heading = Text(title) if title else None
    table = Table(title=heading, title_justify="left", box=box.SIMPLE, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(_cell(value))) for value in row))
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    console.width = 240  # a pipe has no width of its own, and folded columns cannot be searched
    with console.capture() as written:
        console.print(table)
    for line in written.get().split("\n")[:-1]:
        click.echo(line.rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_cell(v)}" for k, v in value.items()) or "(none)"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_cell, value))}]"
    return "-" if value is None else str(value)


@contextlib.contextmanager
def progress(verbose: bool) -> Iterator[tuple[Callable[[int, int, str], None], Callable[[str], None]]]:
    """What is told of a build: a bar on a terminal, a line per step in a log, or the programs' own output."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if verbose:
        yield lambda done, total, what: None, lambda line: click.echo(line, err=True)
    elif not console.is_terminal:
        yield (
            lambda done, total, what: click.echo(f"[{done}/{total}] {what}" if total else what, err=True),
            lambda line: None,
        )
    else:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task("configuring", total=None)
            yield (
                lambda done, total, what: bar.update(task, completed=done, total=total or None, description=what),
                lambda line: None,
            )
