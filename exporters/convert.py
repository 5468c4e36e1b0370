"""``convert``: an existing ONNX file in, the same file with ``flashrnn`` nodes out."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx
from onnx import ModelProto, helper

from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.exporters import onnx_files
from flashrnn_deploy.exporters.onnx_damage import check_meaning, checker_message
from flashrnn_deploy.exporters.onnx_edit import all_names, delete_where
from flashrnn_deploy.exporters.onnx_files import Weights
from flashrnn_deploy.exporters.onnx_nodes import LeftAlone, is_batch_first, is_onnx_rnn, located_nodes, why_left
from flashrnn_deploy.exporters.onnx_opset import DEFAULT_OPSET, compare, raise_opset
from flashrnn_deploy.exporters.onnx_rewrite import Row, Shared, rewrite_scope
from flashrnn_deploy.exporters.onnx_scope import check_names, make_scopes
from flashrnn_deploy.exporters.onnx_shapes import correct_shapes
from flashrnn_deploy.exporters.own_states import own_pairs
from flashrnn_deploy.exporters.states import (
    AXES_KEY,
    STATES_KEY,
    expose_states,
    given_states,
    kept_states,
    write_axes,
    write_metadata,
)
from flashrnn_deploy.files import final_path, json_metadata
from flashrnn_deploy.functions import add_functions
from flashrnn_deploy.graph import opset_of, walk_nodes
from flashrnn_deploy.op import is_flashrnn, register_schemas

SLOW_WITHOUT_LIBRARY = (
    "without a plugin library the converted file is slower on a CPU than ONNX Runtime's own kernels, an LSTM up to 5 "
    "times; `flashrnn-deploy build-plugins` makes one"
)


def convert_file(
    source: Path, output: Path, *, expose_states: bool = False, opset: int | None = None
) -> dict[str, Any]:
    """Rewrite the LSTM, GRU and RNN nodes of an ONNX file.

    Args:
        source: an ONNX file, with its data files beside it where it has any. It is never modified.
        output: the file to write; one over 2 GB gets its weights in ``<output>.data``. Nothing is written on failure.
        expose_states: make default initial states graph inputs, and the final states graph outputs.
        opset: the opset of the result; the default is the source's own, and at least 17.

    Returns:
        The report: ``rewritten`` and ``left`` count nodes, ``nodes`` lists them with ``name``, ``path``, ``op``,
        ``action`` and ``reason``; ``opset`` and ``source_opset``; ``states`` pairs the inputs that are states with
        their outputs, and ``states_kept`` says why a node has none; ``notes`` are sentences for the user.

    Raises:
        FlashRNNError: the source is missing, damaged or not an ONNX model, the output is the source or cannot be
            written, or the opset is out of reach.
    """
    source, named = Path(source), Path(output)
    with _user_errors(named):
        output = final_path(named)
        _check_output(output)
    with _user_errors(output), _folder_beside(output) as folder:
        draft = folder / output.name
        with _blame_invalid(source):
            rows, facts = _draft(source, output, draft, opset, expose_states)
        if draft.exists() and (problem := _check(draft, source, raised=facts["opset"] != facts["source_opset"])):
            rows, facts = _all_left(rows, problem), facts | {"opset": facts["source_opset"], "notes": []}
            facts |= {"states": {}, "states_kept": {}}
            for file in folder.iterdir():
                file.unlink()
        copied = not draft.exists()
        if copied:
            _copy(source, draft)
        for file in sorted(folder.iterdir(), reverse=True):  # the data file first: a model never lacks its weights
            os.replace(file, output.with_name(file.name))
    given = facts.pop("states_given", {})
    if expose_states and not facts["states"] and not facts["states_kept"]:
        facts["notes"].append(_nothing_to_expose(given))
    counts = {action: sum(row.action == action for row in rows) for action in ("rewritten", "left")}
    if copied:
        nothing = "no LSTM, GRU or RNN node" if not rows else "nothing was rewritten"
        facts["notes"].append(f"{nothing}: the output is a copy of the input")
    elif rows and not counts["rewritten"] and not facts["states"]:
        facts["notes"].append("nothing was rewritten: the output is the input with layout 1 turned into 0")
    return {"source": str(source), "output": str(named)} | facts | counts | {"nodes": [asdict(row) for row in rows]}


def preview(source: Path) -> list[Row]:
    """What ``convert_file`` would do with each LSTM, GRU and RNN node (errors as there); nothing is written."""
    with _blame_invalid(source):
        return _draft(source, None, None, None, False)[0]


def _draft(
    source: Path, output: Path | None, draft: Path | None, opset: int | None, expose: bool
) -> tuple[list[Row], dict[str, Any]]:
    """Write the converted file, or nothing where no node can be rewritten. Weights are released on return."""
    model, weights, files = onnx_files.load(source)
    if output is not None:
        _check_clash({source.resolve(), *files}, output)
    own = opset_of(model)
    target = _target_opset(source, own, opset)
    facts: dict[str, Any] = {"source_opset": own, "opset": own, "states": {}, "states_kept": {}, "notes": []}
    rows = _survey(model)
    nodes = list(walk_nodes(model))
    batch_first = any(is_onnx_rnn(node) and is_batch_first(node) for node in nodes)
    if not (_any_rewritten(rows) or batch_first or (expose and any(map(is_flashrnn, nodes)))):
        return rows, facts
    check_meaning(model)
    try:
        check_names(model.graph)
        done, rows, new_facts = _convert(source, model, weights, target, expose)
    except LeftAlone as reason:
        return _all_left(rows, str(reason)), facts
    facts |= new_facts
    if done is not None and draft is not None:
        onnx_files.save(done, weights, draft)
    weights.clear()  # before the checker reads the file: reference cycles would keep them until some later collection
    return rows, facts


def _any_rewritten(rows: list[Row]) -> bool:
    return any(row.action == "rewritten" for row in rows)


def _all_left(rows: list[Row], reason: str) -> list[Row]:
    return [replace(row, action="left", reason=row.reason or reason) for row in rows]


def _target_opset(source: Path, own: int, asked: int | None) -> int:
    newest = onnx.defs.onnx_opset_version()
    if own > newest:
        raise FlashRNNError(f"{source}: opset {own}, but the installed onnx knows {newest}; upgrade onnx")
    target = max(DEFAULT_OPSET, own) if asked is None else asked
    if not 15 <= target <= newest:
        raise FlashRNNError(f"opset {target} is not possible: the op needs 15 to {newest} (the newest of this onnx)")
    if target < own:
        raise FlashRNNError(f"{source} has opset {own}, which cannot be lowered to {target}; ask for {own} or newer")
    return target


def _check_output(output: Path) -> None:
    if not output.parent.is_dir():
        raise FlashRNNError(f"{output.parent}: no such directory; create it first")


def _check_clash(inputs: set[Path], output: Path) -> None:
    outputs = {output.resolve(), output.with_name(output.name + ".data").resolve()}
    if clash := outputs & inputs:
        raise FlashRNNError(f"{min(clash)} belongs to the input, which is never modified; choose another output")


def _survey(model: ModelProto) -> list[Row]:
    """What would become of each node, by its attributes alone."""
    rows = []
    for path, node in located_nodes(model.graph.node, "main"):
        reason = why_left(node)
        rows.append(Row(node.name, path, node.op_type, "left" if reason else "rewritten", reason))
    return rows + _rows_in_functions(model)


def _rows_in_functions(model: ModelProto) -> list[Row]:
    """Nodes in model-local functions are always left, those in the bodies of other nodes there too."""
    return [
        Row(node.name, path, node.op_type, "left", "inside a model-local function")
        for f in model.functions
        for path, node in located_nodes(f.node, f"function {f.domain}::{f.name}")
    ]


def _convert(
    source: Path, model: ModelProto, weights: Weights, target: int, expose: bool
) -> tuple[ModelProto | None, list[Row], dict[str, Any]]:
    """The rewritten skeleton (None: nothing changed), one row per node, and the report's lines on opset and states."""
    own = opset_of(model)
    notes: list[str] = []
    raised = raise_opset(model, target)
    if target != own:
        notes.append(f"opset raised from {own} to {target}; {compare(source, raised, weights)}")
    if raised.ir_version < 4:  # these files list every initializer as an input; from IR 4 on that makes it replaceable
        initialized = {t.name for t in raised.graph.initializer}
        delete_where(raised.graph.input, lambda value: value.name in initialized)
        raised.ir_version = 4
    if all(entry.domain for entry in raised.opset_import):  # spelled "ai.onnx", which ONNX's evaluator does not read
        raised.opset_import.add(domain="", version=target)
    shared = Shared(taken=all_names(raised) | {node.name for node in raised.graph.node})
    scopes = make_scopes(raised, weights)
    pairs = own_pairs(scopes[0])
    # Inner graphs first: rewriting one copies its nodes, and with them the graphs inside.
    done = [rewrite_scope(scope, shared) for scope in reversed(scopes)]
    rows = [row for of_scope in reversed(done) for row in of_scope]
    for scope in scopes:  # scopes and their constants point at each other, see _draft
        scope.folded.clear()
    rows += _rows_in_functions(raised)
    add_functions(raised)
    raised.ir_version = max(8, raised.ir_version, helper.find_min_ir_version_for(list(raised.opset_import), True))
    facts: dict[str, Any] = {}
    if expose:
        facts = {"states": expose_states(raised), "states_kept": kept_states(raised)}
        facts["states_given"] = given_states(raised)
    if not shared.changed and not facts.get("states"):
        return None, rows, facts
    if _any_rewritten(rows):
        notes.append(SLOW_WITHOUT_LIBRARY)
    if pairs and _any_rewritten(rows):
        write_metadata(raised, STATES_KEY, pairs | json_metadata(raised, STATES_KEY))
        facts["states"] = pairs | facts.get("states", {})
    if _any_rewritten(rows) or facts.get("states"):
        kept_axes = json_metadata(raised, AXES_KEY)
        write_metadata(raised, AXES_KEY, write_axes(raised) | kept_axes)
        notes += correct_shapes(raised)
    return raised, rows, facts | {"opset": target, "notes": notes + _notes(shared)}


def _nothing_to_expose(given: dict[str, str | None]) -> str:
    """Why ``expose_states`` had nothing to do: states that are inputs already, as ``given_states`` lists them."""
    if not given:
        return "no state to expose: no FlashRNN node starts from zeros of its own"
    known = [f"{source}={target}" for source, target in given.items() if target]
    unknown = [source for source, target in given.items() if not target]
    text = f"no state to expose: FlashRNN nodes start from the input(s) {', '.join(known + unknown)} already"
    if unknown:
        text += f"; to run in chunks, name the output that continues each: --state {unknown[0]}=OUT"
    return text


def _notes(shared: Shared) -> list[str]:
    notes = []
    if shared.ragged:
        notes.append(
            f"a row of length 0 ends in its initial state, as ONNX says, where ONNX Runtime's own LSTM and GRU give 0: "
            f"{', '.join(shared.ragged)}"
        )
    if shared.clipped:
        notes.append(
            "clip bounds the cell state before its tanh, as ONNX says, and ONNX Runtime's own LSTM does not: results "
            f"differ where the state is larger: {', '.join(shared.clipped)}"
        )
    if shared.not_finite:
        notes.append(f"weights with NaN or infinity were kept as they are: {', '.join(shared.not_finite)}")
    return notes


def _copy(source: Path, draft: Path) -> None:
    """The unchanged model: byte for byte, or saved anew where its data files have to move with it."""
    model, weights, files = onnx_files.load(source)
    if files:
        onnx_files.save(model, weights, draft)
    else:
        shutil.copyfile(source, draft)


@contextmanager
def _folder_beside(output: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".flashrnn-", dir=output.parent or ".") as folder:
        yield Path(folder)


@contextmanager
def _user_errors(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FlashRNNError(f"cannot write {output}: {error.strerror}") from None


@contextmanager
def _blame_invalid(source: Path) -> Iterator[None]:
    """Where something unforeseen fails on a file that ONNX's checker refuses, the file is at fault, not the program."""
    try:
        yield
    except (FlashRNNError, OSError):
        raise
    except Exception as error:
        if problem := checker_message(source):
            raise FlashRNNError(f"{source} is not valid ONNX: {problem}") from error
        raise


def _check(draft: Path, source: Path, raised: bool) -> str:
    """Run ONNX's checker on a converted file.

    Returns:
        "" if the file is valid, or was not before either; else, for a raised file, why it has to be left.

    Raises:
        RuntimeError: the rewriting made an invalid file, which is a bug.
    """
    register_schemas()
    problem = checker_message(draft)
    if not problem or checker_message(source):
        return ""
    if raised:
        return f"the checker refuses the raised file: {problem}"
    raise RuntimeError(f"{source} is valid, but not what convert made of it: {problem}")


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON.

    Raises:
        FlashRNNError: the file cannot be written.
    """
    with _user_errors(path):
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
