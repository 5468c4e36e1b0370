"""The op as an ONNX function body in standard operators, so that any ONNX runtime can run an exported file.

A file holds one function per cell that it uses. Where a library registers the op, its kernel wins; everywhere else
the runtime expands the body: a Scan over time, vectorised over directions, heads and batch.

Rules that runtimes impose on a body, and that this file keeps:

* only operators whose meaning is the same from opset 15 to the newest, since runtimes expand a body at the opset of
  the model, and the checker wants both to import the same one;
* attributes are read through ``Constant``, and there are no strings among them that matter; fixed floats are tensors,
  since onnxslim turns a ``value_float`` into a double;
* ``Where`` and ``Gather`` in place of ``If``; masks by ``Where``, never by a product (``inf * 0``).

The body computes in float32 and keeps ``h`` in float32 between steps; ``wx`` and ``r`` are cast on the way in, ``y``
is cast back to the dtype of ``wx``.
"""

from __future__ import annotations

import functools

import onnx
import onnx.parser

from flashrnn_deploy.cells import CELL_OF_OP, CELLS, Cell
from flashrnn_deploy.graph import opset_of, subgraphs, walk_nodes
from flashrnn_deploy.op import (
    DOMAIN,
    INPUTS,
    OPSET_VERSION,
    OUTPUTS,
    PLUGIN_ATTRIBUTES,
    attribute_names,
    is_flashrnn,
)

# Sizes. Names end in _1 where the value is a tensor of shape [1], as Concat wants it; the others are scalars.
_SIZES = """
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    two = Constant <value_int = 2> ()
    three = Constant <value_int = 3> ()
    minus_one_1 = Constant <value_ints = [-1]> ()
    one_1 = Constant <value_ints = [1]> ()
    zero_f = Constant <value = float {{0.0}}> ()
    one_f = Constant <value = float {{1.0}}> ()
    time_axis = Constant <value_int: int = @layout> ()
    batch_axis = Sub (one, time_axis)
    wx_shape = Shape (wx)
    T = Gather (wx_shape, time_axis)
    B = Gather (wx_shape, batch_axis)
    r_shape = Shape (r)
    N = Gather (r_shape, zero)
    H = Gather (r_shape, two)
    D = Gather (r_shape, three)
    G_1 = Constant <value_ints = [{G}]> ()
    S_1 = Constant <value_ints = [{S}]> ()
    T_1 = Reshape (T, minus_one_1)
    B_1 = Reshape (B, minus_one_1)
    N_1 = Reshape (N, minus_one_1)
    H_1 = Reshape (H, minus_one_1)
    D_1 = Reshape (D, minus_one_1)
    GD_1 = Mul (G_1, D_1)
    HD_1 = Mul (H_1, D_1)
    NB = Mul (N, B)
    TB = Mul (T, B)
    gate_sizes = Expand (D_1, G_1)
"""

# A backward direction runs forward over rows that are reversed within their own lengths. Reversing is its own inverse:
# step t of the scan reads and writes time step source[t, n, b] = len - 1 - t where the direction is backward and
# t < len, and t elsewhere. Rows of wx and y are numbered t * time_stride + b * batch_stride, which covers both layouts.
_INDICES = """
    batch_last = Sub (one, time_axis)
    stride_0 = Mul (B, batch_last)
    time_stride = Add (stride_0, time_axis)
    stride_1 = Mul (T, time_axis)
    batch_stride = Add (stride_1, batch_last)
    reverse_attribute = Constant <value_int: int = @reverse> ()
    directions = Range (zero, N, one)
    direction_parity_0 = Add (directions, reverse_attribute)
    direction_parity = Mod (direction_parity_0, two)
    backward = Cast <to = 9> (direction_parity)
    lens_0 = Cast <to = 7> (sequence_lens)
    lens_1 = Max (lens_0, zero)
    lens_2 = Min (lens_1, T)
    lens = Expand (lens_2, B_1)

    steps = Range (zero, T, one)
    rows = Range (zero, B, one)
    column = Constant <value_ints = [-1, 1]> ()
    column_3 = Constant <value_ints = [-1, 1, 1]> ()
    steps_t = Reshape (steps, column)
    valid = Less (steps_t, lens)
    last = Sub (lens, one)
    reversed_0 = Sub (last, steps_t)
    reversed_tb = Where (valid, reversed_0, steps_t)
    middle = Constant <value_ints = [1]> ()
    reversed_tnb = Unsqueeze (reversed_tb, middle)
    backward_n = Reshape (backward, column)
    steps_tnb = Reshape (steps, column_3)
    source = Where (backward_n, reversed_tnb, steps_tnb)

    in_0 = Mul (source, time_stride)
    in_1 = Mul (rows, batch_stride)
    in_2 = Add (in_0, in_1)
    in_3 = Mul (in_2, N)
    directions_n = Reshape (directions, column)
    in_index = Add (in_3, directions_n)

    T_divisor = Max (T, one)
    B_divisor = Max (B, one)
    time_divisor = Max (time_stride, one)
    batch_divisor = Max (batch_stride, one)
    flat = Range (zero, TB, one)
    flat_t0 = Div (flat, time_divisor)
    flat_t = Mod (flat_t0, T_divisor)
    flat_b0 = Div (flat, batch_divisor)
    flat_b = Mod (flat_b0, B_divisor)
    flat_t1 = Reshape (flat_t, column)
    flat_b1 = Reshape (flat_b, column)
    flat_len0 = Gather (lens, flat_b)
    flat_len = Reshape (flat_len0, column)
    flat_valid = Less (flat_t1, flat_len)
    flat_last = Sub (flat_len, one)
    flat_reversed0 = Sub (flat_last, flat_t1)
    flat_reversed = Where (flat_valid, flat_reversed0, flat_t1)
    flat_source = Where (backward, flat_reversed, flat_t1)
    out_0 = Mul (flat_source, NB)
    out_1 = Mul (directions, B)
    out_2 = Add (out_0, out_1)
    out_index = Add (out_2, flat_b1)
"""

# wx -> xs [T, N, H, B, G*D] with the gates outermost in the last axis and the input-side biases added;
# r -> weight [N, H, D in, G*D out]; initial states [S, N, H, B, D].
_ARRANGE = """
    wx_f = Cast <to = 1> (wx)
    r_f = Cast <to = 1> (r)
    wx_rows = Concat <axis = 0> (minus_one_1, H_1, D_1, G_1)
    wx_0 = Reshape (wx_f, wx_rows)
    wx_1 = Gather <axis = 0> (wx_0, in_index)
    wx_2 = Transpose <perm = [0, 1, 3, 2, 5, 4]> (wx_1)
    xs_shape = Concat <axis = 0> (T_1, N_1, H_1, B_1, GD_1)
    wx_3 = Reshape <allowzero = 1> (wx_2, xs_shape)
    bias_shape = Concat <axis = 0> (N_1, minus_one_1, H_1, D_1)
    bias_0 = Reshape (b, bias_shape)
    bias_1 = Transpose <perm = [0, 2, 1, 3]> (bias_0)
    start = Constant <value_ints = [0]> ()
    gate_axis = Constant <value_ints = [2]> ()
    bias_2 = Slice (bias_1, start, G_1, gate_axis)
    bias_row_shape = Concat <axis = 0> (N_1, H_1, one_1, GD_1)
    bias = Reshape (bias_2, bias_row_shape)
    xs = Add (wx_3, bias)
    r_0 = Transpose <perm = [0, 2, 4, 1, 3]> (r_f)
    weight_shape = Concat <axis = 0> (N_1, H_1, D_1, GD_1)
    weight = Reshape (r_0, weight_shape)
    states_shape = Concat <axis = 0> (S_1, N_1, B_1, H_1, D_1)
    states_0 = Reshape <allowzero = 1> (initial_states, states_shape)
    states_1 = Transpose <perm = [0, 1, 3, 2, 4]> (states_0)
    valid_shape = Concat <axis = 0> (T_1, one_1, one_1, B_1, one_1)
    valid_t = Reshape <allowzero = 1> (valid, valid_shape)
    clip_attribute = Constant <value_float: float = @clip> ()
    infinity_0 = Constant <value = float {3.0e38}> ()
    infinity = Add (infinity_0, infinity_0)
    no_clip = Equal (clip_attribute, zero_f)
    clip_high = Where (no_clip, infinity, clip_attribute)
    clip_low = Neg (clip_high)
"""

_RESTORE = """
    ys_0 = Transpose <perm = [0, 1, 3, 2, 4]> (ys)
    ys_rows = Mul (T_1, NB)
    ys_shape = Concat <axis = 0> (ys_rows, HD_1)
    ys_1 = Reshape <allowzero = 1> (ys_0, ys_shape)
    ys_2 = Gather <axis = 0> (ys_1, out_index)
    wx_lead_ends = Constant <value_ints = [2]> ()
    wx_lead = Slice (wx_shape, start, wx_lead_ends)
    y_width = Mul (N_1, HD_1)
    y_shape = Concat <axis = 0> (wx_lead, y_width)
    y_f = Reshape <allowzero = 1> (ys_2, y_shape)
    y = CastLike (y_f, wx)
    state_shape = Concat <axis = 0> (one_1, N_1, B_1, HD_1)
"""

# What a cell adds before the Scan, and its step: {state}_0 -> {state}_1. rh is R h' [N, H, B, G*D], x the input side.
_BEFORE = {
    "lstm": "",
    "gru": """
    q_ends = Constant <value_ints = [4]> ()
    bias_q0 = Slice (bias_1, G_1, q_ends, gate_axis)
    bias_q_shape = Concat <axis = 0> (N_1, H_1, one_1, D_1)
    bias_q = Reshape (bias_q0, bias_q_shape)
    two_1 = Constant <value_ints = [2]> ()
    ru_size = Mul (D_1, two_1)
    ru_n_sizes = Concat <axis = 0> (ru_size, D_1)
    r_u_sizes = Concat <axis = 0> (D_1, D_1)
""",
    "elman": """
    relu_attribute = Constant <value_int: int = @relu> ()
    use_relu = Cast <to = 9> (relu_attribute)
""",
    "slstm": """
    floor = Constant <value_float: float = @normalizer_floor> ()
""",
}
_STEP = {
    "lstm": """
        pre_0 = Add (x, rh)
        pre_1 = Max (pre_0, clip_low)
        pre = Min (pre_1, clip_high)
        i_, f_, z_, o_ = Split <axis = -1> (pre, gate_sizes)
        i = Sigmoid (i_)
        f = Sigmoid (f_)
        z = Tanh (z_)
        o = Sigmoid (o_)
        kept = Mul (f, c_0)
        added = Mul (i, z)
        c_new = Add (kept, added)
        c_low = Max (c_new, clip_low)
        c_clipped = Min (c_low, clip_high)
        c_tanh = Tanh (c_clipped)
        h_new = Mul (o, c_tanh)
""",
    "gru": """
        x_ru, x_n = Split <axis = -1> (x, ru_n_sizes)
        rh_ru, rh_n = Split <axis = -1> (rh, ru_n_sizes)
        ru_0 = Add (x_ru, rh_ru)
        ru_1 = Max (ru_0, clip_low)
        ru_2 = Min (ru_1, clip_high)
        ru = Sigmoid (ru_2)
        reset, u = Split <axis = -1> (ru, r_u_sizes)
        q = Add (rh_n, bias_q)
        gated = Mul (reset, q)
        n_0 = Add (x_n, gated)
        n_1 = Max (n_0, clip_low)
        n_2 = Min (n_1, clip_high)
        n = Tanh (n_2)
        kept = Mul (u, h_0)
        u_inverse = Sub (one_f, u)
        added = Mul (u_inverse, n)
        h_new = Add (kept, added)
""",
    "elman": """
        pre_0 = Add (x, rh)
        pre_1 = Max (pre_0, clip_low)
        pre = Min (pre_1, clip_high)
        relu_h = Relu (pre)
        tanh_h = Tanh (pre)
        h_new = Where (use_relu, relu_h, tanh_h)
""",
    "slstm": """
        pre = Add (x, rh)
        i_, f_, z_, o_ = Split <axis = -1> (pre, gate_sizes)
        f_neg = Neg (f_)
        f_softplus = Softplus (f_neg)
        a = Sub (m_0, f_softplus)
        empty = Equal (n_0, zero_f)
        larger = Max (i_, a)
        m_new = Where (empty, i_, larger)
        i_shift = Sub (i_, m_new)
        i_exp = Exp (i_shift)
        i = Min (i_exp, one_f)
        f_shift = Sub (a, m_new)
        f_exp = Exp (f_shift)
        f = Min (f_exp, one_f)
        z = Tanh (z_)
        o = Sigmoid (o_)
        c_kept = Mul (f, c_0)
        c_added = Mul (i, z)
        c_new = Add (c_kept, c_added)
        n_kept = Mul (f, n_0)
        n_sum = Add (n_kept, i)
        n_new = Max (n_sum, floor)
        numerator = Mul (o, c_new)
        h_new = Div (numerator, n_new)
""",
}


def _scan(cell: Cell) -> str:
    """Scan over time: carried states, one output row per step, rows behind their length left as they are."""
    states = cell.states
    takes = ", ".join([f"float[] {s}_0" for s in states] + ["float[] x", "bool[] ok"])
    gives = ", ".join([f"float[] {s}_1" for s in states] + ["float[] y_t"])
    keep = "".join(f"        {s}_1 = Where (ok, {s}_new, {s}_0)\n" for s in states)
    initial = ""
    for k, s in enumerate(states):
        initial += f"    index_{s} = Constant <value_int = {k}> ()\n"
        initial += f"    {s}_initial = Gather <axis = 0> (states_1, index_{s})\n"
    final = ""
    for s in states:
        final += f"    {s}_rows = Transpose <perm = [0, 2, 1, 3]> ({s}_last)\n"
        final += f"    {s}_final = Reshape <allowzero = 1> ({s}_rows, state_shape)\n"
    return f"""{initial}
    {", ".join(f"{s}_last" for s in states)}, ys = Scan <num_scan_inputs = 2, body = step ({takes}) => ({gives}) {{
        rh = MatMul (h_0, weight)
{_STEP[cell.name]}{keep}        y_t = Where (ok, h_new, zero_f)
    }}> ({", ".join(f"{s}_initial" for s in states)}, xs, valid_t)
{_RESTORE}{final}
    final_states = Concat <axis = 0> ({", ".join(f"{s}_final" for s in states)})
"""


@functools.cache
def _text(cell_name: str, opset: int) -> str:
    cell = CELLS[cell_name]
    attributes = ", ".join([*attribute_names(cell.op_type), *PLUGIN_ATTRIBUTES])
    sizes = _SIZES.format(G=cell.num_gates, S=cell.num_states)
    return f"""<domain: "{DOMAIN}", opset_import: ["" : {opset}]>
{cell.op_type} <{attributes}> ({", ".join(INPUTS)}) => ({", ".join(OUTPUTS)}) {{
{sizes}{_INDICES}{_ARRANGE}{_BEFORE[cell_name]}{_scan(cell)}}}
"""


def function(cell: Cell, opset: int) -> onnx.FunctionProto:
    """The body of one op for a model that imports ``opset`` (15 or newer) of the standard domain."""
    if opset < 15:
        raise ValueError(f"function bodies need opset 15 or newer, not {opset}")
    body = onnx.parser.parse_function(_text(cell.name, opset))
    # ONNX Runtime 1.20 gives fused nodes the same name where a file's unnamed nodes are expanded twice.
    for node in body.node:
        node.name = node.output[0]
        for graph in subgraphs(node):
            for inner in graph.node:
                inner.name = f"step/{inner.output[0]}"
    return body


def add_functions(model: onnx.ModelProto) -> None:
    """Append the bodies of the ops that ``model`` uses, and its import of the op's domain; replaces older bodies."""
    used = sorted({node.op_type for node in walk_nodes(model) if is_flashrnn(node)})
    others = [f for f in model.functions if f.domain != DOMAIN]
    del model.functions[:]
    model.functions.extend(others)
    if used and not opset_of(model, DOMAIN):
        model.opset_import.append(onnx.helper.make_opsetid(DOMAIN, OPSET_VERSION))
    model.functions.extend(function(CELL_OF_OP[op_type], opset_of(model)) for op_type in used)
