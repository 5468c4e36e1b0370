"""Editing an ONNX graph in place: who reads what, removing what nobody reads, new names.

Every function here is one pass over the graph, however many values it is given: files have thousands of nodes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import onnx

from flashrnn_deploy.graph import subgraphs, walk_graphs


def reads(graph: onnx.GraphProto) -> set[str]:
    """Every name that the graph's nodes and outputs read, in the graphs inside it too."""
    return set(_all_reads(graph))


def _all_reads(graph: onnx.GraphProto) -> Iterator[str]:
    """One name per reader."""
    for inner in walk_graphs(graph):
        for node in inner.node:
            yield from filter(None, node.input)
        yield from (value.name for value in inner.output)


def operands_of(node: onnx.NodeProto) -> list[str]:
    """What a node reads, the graphs inside it included."""
    return [i for i in node.input if i] + [i for inner in subgraphs(node) for i in _all_reads(inner)]


def producers_of(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Value -> the node of ``graph`` that makes it."""
    return {output: node for node in graph.node for output in node.output if output}


def all_names(model: onnx.ModelProto) -> set[str]:
    """Every name of a value in the main graph and the graphs inside it."""
    names = set()
    for graph in walk_graphs(model.graph):
        names |= {v.name for v in (*graph.input, *graph.output, *graph.value_info, *graph.initializer)}
        names |= {t.values.name for t in graph.sparse_initializer}
        names |= {name for node in graph.node for name in (*node.input, *node.output)}
    return names


def unique(name: str, taken: Collection[str]) -> str:
    """``name``, or with the first number from 2 on that makes it new."""
    return next(c for c in itertools.chain([name], (f"{name}.{k}" for k in itertools.count(2))) if c not in taken)


def delete_where(items: Any, wanted: Callable[[Any], bool]) -> None:
    """Delete from a repeated field; its own ``remove`` compares whole messages."""
    for k in reversed(range(len(items))):
        if wanted(items[k]):
            del items[k]


def remove_dead(graph: onnx.GraphProto, values: Iterable[str]) -> set[str]:
    """Remove what made ``values`` where nothing reads them any more, and so on upwards. Graph inputs stay.

    Returns:
        Every name that lost a reader: an inner graph's caller goes on with them in the outer graph.
    """
    pending = list(values)
    seen = set(pending)
    readers = Counter(_all_reads(graph))
    makers = {output: k for k, node in enumerate(graph.node) for output in node.output if output}
    dead: set[int] = set()
    unread: set[str] = set()
    while pending:
        name = pending.pop()
        if readers[name]:
            continue
        unread.add(name)
        k = makers.get(name)
        if k is None or k in dead or any(readers[output] for output in graph.node[k].output if output):
            continue
        dead.add(k)
        operands = operands_of(graph.node[k])
        readers.subtract(operands)
        pending += operands
        seen.update(operands)
    stale = {output for k in dead for output in graph.node[k].output}
    unread -= {value.name for value in graph.input}
    for k in sorted(dead, reverse=True):
        del graph.node[k]
    delete_where(graph.value_info, lambda value: value.name in stale)
    delete_where(graph.initializer, lambda tensor: tensor.name in unread)
    return seen


def rename(graph: onnx.GraphProto, new_names: Mapping[str, str]) -> None:
    """Rename values of ``graph`` where they are made, declared and read; an inner graph's own value stays.

    (ONNX forbids such shadowing; files with it exist and run.)
    """
    for node in graph.node:
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                if name in new_names:
                    names[k] = new_names[name]
        for inner in subgraphs(node):
            own = {v.name for v in (*inner.input, *inner.initializer)} | {o for n in inner.node for o in n.output}
            if outer := {old: new for old, new in new_names.items() if old not in own}:
                rename(inner, outer)
    for value in (*graph.value_info, *graph.output):
        value.name = new_names.get(value.name, value.name)
