"""Whether the inputs of an ONNX LSTM, GRU or RNN node have the types and shapes that its text asks for.

A node whose inputs do not fit stays where it is: no engine runs it, and the engine's own message is the better one. So
does a node whose numbers the op would take otherwise, as weights of another dtype than X's.
"""

from __future__ import annotations

from onnx import NodeProto, TensorProto

from flashrnn_deploy.exporters.onnx_nodes import GATES_OF_ONNX, LeftAlone, OnnxRNN, optional_input
from flashrnn_deploy.exporters.onnx_scope import Dims, Scope, constant, home, type_of
from flashrnn_deploy.op import DTYPES

INPUTS = ("X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P")
NUM_INPUTS = {"LSTM": 8, "GRU": 6, "RNN": 6}
NUM_OUTPUTS = {"LSTM": 3, "GRU": 2, "RNN": 2}
_DTYPE_OF: dict[int, str] = {int(data_type): name for name, data_type in DTYPES.items()}
_LENGTH_TYPES = (TensorProto.INT32, TensorProto.INT64)


def check_inputs(node: NodeProto, onnx_rnn: OnnxRNN, scope: Scope) -> tuple[str, int]:
    """Check what is known of the inputs' types and shapes.

    Returns:
        dtype of X, W and R as the op names it, and the hidden size.

    Raises:
        LeftAlone: an input is missing, undefined, or does not fit; the text names it.
    """
    names = {label: optional_input(node, k) for k, label in enumerate(INPUTS)}
    if len(node.input) > NUM_INPUTS[node.op_type] or len(node.output) > NUM_OUTPUTS[node.op_type]:
        raise LeftAlone(f"it has {len(node.input)} inputs and {len(node.output)} outputs, more than ONNX allows")
    if absent := [label for label in "XWR" if not names[label]]:
        raise LeftAlone(f"the input(s) {', '.join(absent)} are missing")
    for label, name in names.items():
        owner = home(scope, name)
        if name and (owner is None or name in owner.twice):
            raise LeftAlone(f"input {label} reads '{name}', which {'several define' if owner else 'nothing defines'}")
    if doubled := sorted(scope.twice.intersection(node.output)):
        raise LeftAlone(f"others define its output '{doubled[0]}' too")
    dtype = _dtype(names, scope)
    dims = {label: _dims(scope, name) for label, name in names.items() if name}
    r = dims["R"]
    hidden = onnx_rnn.hidden_size or (r[2] if r is not None and len(r) == 3 and isinstance(r[2], int) else 0)
    if not hidden:
        raise LeftAlone("hidden_size is not given and the shape of R is unknown")
    _check_shapes(node.op_type, onnx_rnn, hidden, dims)
    return dtype, hidden


def _dtype(names: dict[str, str], scope: Scope) -> str:
    """The one dtype of all float inputs; at least one has to be known."""
    types = {label: type_of(scope, name)[0] for label, name in names.items() if name}
    lens = types.pop("sequence_lens", 0)
    if lens and lens not in _LENGTH_TYPES:
        raise LeftAlone(f"sequence_lens is {_type_name(lens)}, where ONNX has int32")
    known = {label: data_type for label, data_type in types.items() if data_type}
    if not known:
        raise LeftAlone(f"dtype of X is unknown; the op takes {', '.join(DTYPES)}")
    first, data_type = next(iter(known.items()))
    for label, other in known.items():
        if other not in _DTYPE_OF:
            raise LeftAlone(f"dtype {_type_name(other)} of {label}; the op takes {', '.join(DTYPES)}")
        if other != data_type:
            raise LeftAlone(f"{label} is {_type_name(other)}, but {first} is {_type_name(data_type)}")
    return _DTYPE_OF[data_type]


def _type_name(data_type: int) -> str:
    known = data_type in TensorProto.DataType.values()
    return str(TensorProto.DataType.Name(data_type)).lower() if known else f"of the unknown type {data_type}"


def _dims(scope: Scope, name: str) -> Dims | None:
    found = constant(scope, name)
    return list(found.array.shape) if found is not None else type_of(scope, name)[1]


def _check_shapes(op_type: str, onnx_rnn: OnnxRNN, hidden: int, dims: dict[str, Dims | None]) -> None:
    """Compare every known dimension with ONNX's; ``time``, ``batch`` and ``width`` only have to agree in size."""
    num_gates, N = len(GATES_OF_ONNX[op_type]), onnx_rnn.num_directions
    states: Dims = ["batch", N, hidden] if onnx_rnn.layout else [N, "batch", hidden]
    wanted: dict[str, Dims] = {
        "X": ["batch", "time", "width"] if onnx_rnn.layout else ["time", "batch", "width"],
        "W": [N, num_gates * hidden, "width"],
        "R": [N, num_gates * hidden, hidden],
        "B": [N, 2 * num_gates * hidden],
        "sequence_lens": ["batch"],
        "initial_h": states,
        "initial_c": states,
        "P": [N, 3 * hidden],
    }
    sizes: dict[int | str | None, int] = {}
    for label, found in dims.items():
        if found is None:
            continue
        want = wanted[label]
        fits = len(found) == len(want)
        for size, letter in zip(found, want, strict=False):
            if isinstance(size, int):
                expected = letter if isinstance(letter, int) else sizes.setdefault(letter, size)
                fits &= size == expected
        if not fits:
            known = [sizes.get(letter, letter) for letter in want]
            raise LeftAlone(f"{label} is {found}, but hidden_size={hidden} and {N} direction(s) need {known}")
