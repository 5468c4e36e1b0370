"""What to say of a model without a FlashRNN op, where one is needed."""

from __future__ import annotations

from pathlib import Path

import onnx

from flashrnn_deploy import shell
from flashrnn_deploy.files import printable
from flashrnn_deploy.graph import walk_nodes
from flashrnn_deploy.shapes import is_standard_rnn


def why_no_op(path: Path, model: onnx.ModelProto) -> str:
    """That ``path`` holds no FlashRNN op, and the cure: `convert`, unless it would leave every node, or did.

    Raises:
        FlashRNNError: the file is damaged, as `convert` says it.
    """
    told = f"{path} holds no FlashRNN op"
    if not any(is_standard_rnn(node) for node in walk_nodes(model)):
        return f"{told}, and no LSTM, GRU or RNN to make one of"
    from flashrnn_deploy.exporters.convert import preview

    left = preview(path)
    if any(row.action == "rewritten" for row in left):
        return f"{told}; convert it first: {shell.command('convert', path, '-o', 'converted.onnx')}"
    first = left[0]
    name = f" '{printable(first.name)}'" if first.name else ""
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    return f"{told}: convert leaves its {first.op} node{name}{more}: {printable(first.reason)}"
