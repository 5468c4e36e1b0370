"""Models, inputs and expected outputs for the TensorRT tests on a GPU (docs/tensorrt.md), made where there is none.

    python tests/gpu/tensorrt_cases.py OUT [NAME=MODEL.onnx[:TWIN.onnx] ...]

writes a folder per model: model.onnx, shapes (a line per --shape option) and cases/K/{in,out}/TENSOR.npy. Expected
outputs are those of ONNX Runtime in float32, on a float32 twin of a float16 model; tolerance.json holds what is allowed
of each output (as compare.py: twice ONNX Runtime's own error in float16, at least 4 eps). A NAME that ends in -float16
is converted to float16 first, where no twin is given. "drift" is a float16 layer over 100 and 1000 steps beside the
float32 layer that it was made of, 5e-3 allowed; "time-D" are layers to time, with the LSTM node that they stand for. A
folder that is there stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import nn

from flashrnn_deploy.exporters import convert_file, export
from flashrnn_deploy.feeds import Array
from flashrnn_deploy.nn import MultiHeadRNN
from flashrnn_deploy.op import DOMAIN

CORNERS = ((1, 1), (512, 1), (1, 16), (512, 16), (37, 5))  # (T, B); the profile ends at 512 and 16
DRIFT = 5e-3  # of h, whose absolute value is at most 1


class Stack(nn.Module):
    """torch's layers with a projection on each side."""

    def __init__(self, rnn: nn.Module, size: int, out: int) -> None:
        super().__init__()
        self.inside, self.rnn, self.outside = nn.Linear(32, size), rnn, nn.Linear(out, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outside(self.rnn(self.inside(x))[0])


def multi_head(cell: str, heads: int, dim: int) -> nn.Module:
    return MultiHeadRNN(32, heads * dim, num_heads=heads, cell=cell)


def modules() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "bilstm": Stack(nn.LSTM(48, 40, num_layers=2, bidirectional=True), 48, 80),
        "lstm": Stack(nn.LSTM(64, 256), 64, 256),
        "gru": Stack(nn.GRU(48, 64), 48, 64),
        "elman": Stack(nn.RNN(48, 64, nonlinearity="relu"), 48, 64),
        "slstm": multi_head("slstm", 4, 64),
    }


def run(model: onnx.ModelProto, feeds: dict[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"]
    )
    names = [o.name for o in session.get_outputs()]
    types = {i.name: np.float16 if "float16" in i.type else np.float32 for i in session.get_inputs()}
    wide = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    types |= {i.name: wide[i.type] for i in session.get_inputs() if i.type in wide}
    got = session.run(names, {name: value.astype(types[name]) for name, value in feeds.items()})
    return {name: np.asarray(value, np.float32) for name, value in zip(names, got, strict=True)}


def sizes_of(model: onnx.ModelProto, T: int, B: int) -> dict[str, list[int]]:
    """The shape of every input at T steps and batch B."""
    axes = json.loads(next(p.value for p in model.metadata_props if p.key == "flashrnn.axes"))
    sizes = {}
    initial = {i.name for i in model.graph.initializer}
    for value in (v for v in model.graph.input if v.name not in initial):
        dims = [d.dim_value or {"time": T, "batch": B}.get(d.dim_param, 0) for d in value.type.tensor_type.shape.dim]
        for role, size in (("time", T), ("batch", B)):
            axis = axes[value.name][role]
            if axis is not None and not value.type.tensor_type.shape.dim[axis].dim_value:
                dims[axis] = size
        assert all(dims), f"{value.name}: {dims}"
        sizes[value.name] = dims
    return sizes


def write(
    folder: Path,
    model: onnx.ModelProto,
    twin: onnx.ModelProto,
    corners: tuple[tuple[int, int], ...] = CORNERS,
    fixed: float | None = None,
    largest: tuple[int, int] = CORNERS[3],
) -> None:
    """The folder of a model.

    ``twin`` says what is right; ``fixed`` is what is allowed in place of the policy; ``largest`` ends the profile.
    """
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    ranges = [sizes_of(model, T, B) for T, B in ((1, 1), (64, min(4, largest[1])), largest)]
    lines = [f"{n}=" + ":".join("x".join(map(str, r[n])) for r in ranges) for n in ranges[0]]
    (folder / "shapes").write_text("\n".join(lines) + "\n")
    random = np.random.default_rng(3)
    allowed: dict[str, float] = {}
    for number, (T, B) in enumerate(corners):
        sizes = sizes_of(model, T, B)
        feeds = {name: random.uniform(-1, 1, dims).astype(np.float32) for name, dims in sizes.items()}
        if "bits" in feeds:  # the quickstart's, which was trained on bits and from zeros
            feeds = {n: np.float32(np.sign(v) / 2 + 0.5) if n == "bits" else 0 * v for n, v in feeds.items()}
        if model is not twin:
            half = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT16}
            feeds = {n: v.astype(np.float16).astype(np.float32) if n in half else v for n, v in feeds.items()}
        expected = run(twin, feeds)
        own = run(model, feeds) if model is not twin else expected
        eps = 2.0**-10 if model is not twin else 2.0**-23 * 100  # TensorRT's products in float32 are not ONNX Runtime's
        for name, value in expected.items():
            floor = 4 * eps * max(1.0, float(np.abs(value).max()))
            policy = max(floor, 2 * float(np.abs(own[name] - value).max()))
            allowed[name] = fixed or max(allowed.get(name, 0.0), policy)
        for kind, arrays in (("in", feeds), ("out", expected)):
            (folder / "cases" / str(number) / kind).mkdir(parents=True)
            for name, value in arrays.items():
                np.save(folder / "cases" / str(number) / kind / f"{name}.npy", value)
    (folder / "tolerance.json").write_text(json.dumps(allowed))
    print(f"{folder.name}: {len(corners)} cases, allowed {max(allowed.values()):.1e}", flush=True)


class Layer(nn.Module):
    """One LSTM layer, its sequence of h alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


def write_layers(out: Path) -> None:
    """ "drift" and the layers to time."""
    torch.manual_seed(1)
    for name, size, corners, largest in (
        ("drift", 256, ((100, 1), (1000, 1)), (1000, 1)),
        ("time-256", 256, ((64, 1), (64, 16)), (1024, 16)),
        ("time-768", 768, ((64, 1), (64, 16)), (1024, 16)),
    ):
        if (out / name).exists():
            continue
        module, x = Layer(size), torch.zeros(*largest, size)
        single = export(module, (x,)).model
        half = export(module, (x,), dtype="float16").model
        write(out / name, half, single, corners, DRIFT, largest)
        if name != "drift":
            path = out / name / "original.onnx"
            torch.onnx.export(module.half(), (x.half(),), path, dynamo=False, opset_version=17, input_names=["x"])


def main(out: Path, extra: list[str]) -> None:
    for name, module in modules().items():
        x = (torch.zeros(5, 2, 32),)
        if not (out / f"{name}-float32").exists():
            single = export(module.eval(), x, expose_states=name != "bilstm").model
            write(out / f"{name}-float32", single, single)
        if not (out / f"{name}-float16").exists() and name in ("bilstm", "lstm", "slstm"):
            half = export(module, x, expose_states=name != "bilstm", dtype="float16").model
            # The twin has the weights of the float16 model, which are what is deployed.
            rounded = module.half().float()
            write(out / f"{name}-float16", half, export(rounded, x, expose_states=name != "bilstm").model)
    write_layers(out)
    for pair in extra:
        name, _, path = pair.partition("=")
        if (out / name).exists():
            continue
        path, _, judge = path.partition(":")
        model = onnx.load(path)
        if judge:
            write(out / name, model, onnx.load(judge))
        elif name.endswith("-float16"):
            twin = converted(rounded(model), out)
            write(out / name, converted(convert_float_to_float16(model), out), twin)
        else:
            single = converted(model, out)
            write(out / name, single, single)


def rounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The float32 twin of the model's float16 form: weights as that has them, in float32."""
    twin = onnx.ModelProto()
    twin.CopyFrom(model)
    for weight in twin.graph.initializer:
        if weight.data_type == onnx.TensorProto.FLOAT:
            value = numpy_helper.to_array(weight).astype(np.float16).astype(np.float32)
            weight.CopyFrom(numpy_helper.from_array(value, weight.name))
    return twin


def converted(model: onnx.ModelProto, out: Path) -> onnx.ModelProto:
    """The model with FlashRNN ops, its states inputs and outputs."""
    if any(node.domain == DOMAIN for node in model.graph.node):
        return model
    source, target = out / "source.onnx", out / "target.onnx"
    onnx.save(model, source)
    convert_file(source, target, expose_states=True)
    model = onnx.load(target)
    source.unlink()
    target.unlink()
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
