"""The Python runner with pycuda itself on a GPU: TensorRT's part is played, the plugin's enqueue is real.

    python tests/gpu/pycuda_runner.py CALL LIB

CALL is libcall_RELEASE.so of tests/tensorrt_host (FLASHRNN_HOST_CUDA=ON), LIB a plugin library of that release. Feeds
NumPy arrays, and arrays of torch on the GPU by DLPack and ``__cuda_array_interface__``; carries states on the GPU;
compares with the op in float64, bitwise in chunks; goes beyond the profile; counts memory. Needs torch and pycuda.
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from onnx import TensorProto, helper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fake_tensorrt  # noqa: E402

from flashrnn_deploy import compare, reference  # noqa: E402
from flashrnn_deploy.backends.trt import TrtRunner  # noqa: E402
from flashrnn_deploy.cells import Array  # noqa: E402
from flashrnn_deploy.errors import FlashRNNError  # noqa: E402
from flashrnn_deploy.op import DOMAIN, RNNSpec, make_node  # noqa: E402

CELLS = ("lstm", "gru", "elman", "slstm")  # in the order of flashrnn::Cell
DTYPES = ("float32", "float16", "bfloat16")  # of flashrnn::DType
NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
ONNX = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
INPUTS, OUTPUTS = ("wx", "r", "b", "lens", "states"), ("y", "final_states")
H, D, LONGEST, WIDEST = 2, 64, 64, 8

failures = 0


def check(good: bool, what: str) -> None:
    global failures
    failures += not good
    print(f"{'ok' if good else 'FAILED'} {what}", flush=True)


class Gpu:
    """In place of the fake's CUDA: nothing is recorded, everything is real."""

    def need_context(self) -> None: ...


class Context(fake_tensorrt.Context):
    """The fake's shapes and addresses, and the plugin in place of its arithmetic."""

    call: Any = None
    library = b""

    def execute_async_v3(self, stream_handle: int) -> bool:
        op = self.engine.model.graph.node[0].op_type.removeprefix("Flash").lower()
        cell, dtype = (
            CELLS.index(op),
            list(ONNX.values()).index(self.engine.model.graph.input[0].type.tensor_type.elem_type),
        )
        T, B, _ = self.get_tensor_shape("wx")
        sizes = (ctypes.c_int64 * 5)(T, B, 1, H, D)
        ins = (ctypes.c_void_p * 5)(*(self.addresses[n] for n in INPUTS))
        outs = (ctypes.c_void_p * 2)(*(self.addresses[n] for n in OUTPUTS))
        return self.call(self.library, cell, dtype, sizes, ins, outs, ctypes.c_void_p(stream_handle)) == 0


def spec_of(cell: str, dtype: str) -> RNNSpec:
    return RNNSpec(cell=cell, num_directions=1, num_heads=H, head_dim=D, dtype=dtype)


def engine_of(spec: RNNSpec) -> bytes:
    """An engine of one op whose operands are all inputs."""
    shapes = {
        "wx": ["T", "B", H * D * spec.definition.num_gates],
        "r": [1, spec.definition.num_gates, H, D, D],
        "b": [1, spec.definition.num_biases, H, D],
        "lens": [1],
        "states": [spec.definition.num_states, 1, "B", H * D],
        "y": ["T", "B", H * D],
        "final_states": [spec.definition.num_states, 1, "B", H * D],
    }
    types = dict.fromkeys(("wx", "r", "y"), ONNX[spec.dtype]) | {"lens": TensorProto.INT32}
    values = {n: helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), s) for n, s in shapes.items()}
    node = make_node(spec, INPUTS, OUTPUTS, "rnn")
    graph = helper.make_graph([node], "g", [values[n] for n in INPUTS], [values[n] for n in OUTPUTS])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, 1)])

    def at(T: int, B: int) -> dict[str, list[int]]:
        return {n: [{"T": T, "B": B}.get(d, d) for d in shapes[n]] for n in INPUTS}  # type: ignore[call-overload]

    small, large = at(1, 1), at(LONGEST, WIDEST)
    return fake_tensorrt.make_engine(model, {n: {"min": small[n], "opt": large[n], "max": large[n]} for n in INPUTS})


def feeds_of(spec: RNNSpec, T: int, B: int) -> dict[str, Array]:
    random, G = np.random.default_rng(5), spec.definition.num_gates
    states = random.uniform(-0.7, 0.7, (spec.definition.num_states, 1, B, H * D))
    if spec.cell == "slstm":
        states[2] = np.abs(states[2]) + 1  # a normalizer
    half = NUMPY[spec.dtype]
    return {
        "wx": random.uniform(-1.5, 1.5, (T, B, H * D * G)).astype(half),
        "r": (random.uniform(-1, 1, (1, G, H, D, D)) / np.sqrt(D)).astype(half),
        "b": random.uniform(-0.5, 0.5, (1, spec.definition.num_biases, H, D)).astype(np.float32),
        "lens": np.array([2**31 - 1], np.int32),
        "states": states.astype(np.float32),
    }


def on_gpu(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).cuda().view(torch.bfloat16)
    return torch.from_numpy(array).cuda()


class Interface:
    """An array of torch by ``__cuda_array_interface__`` alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(np.asarray(a[n]).tobytes() == np.asarray(b[n]).tobytes() for n in OUTPUTS)


def one(folder: Path, cell: str, dtype: str) -> None:
    spec, what = spec_of(cell, dtype), f"{cell} {dtype}"
    path = folder / f"{cell}-{dtype}.engine"
    path.write_bytes(engine_of(spec))
    runner = TrtRunner(path, trust=True)
    for T, B in ((1, 1), (33, 3), (LONGEST, WIDEST)):
        feeds = feeds_of(spec, T, B)
        got = runner.infer(feeds)
        operands = [feeds[n] for n in INPUTS]
        exact, own = reference.run(spec, *operands), reference.run(spec, *operands, precision=np.float32)
        for name, kind, e, o in zip(OUTPUTS, (dtype, dtype), exact, own, strict=True):
            result = compare.against_float64(name, got[name], e, compare.own_error(o, e), kind, "float64")
            check(result.passed, f"{what} T{T} B{B} {name}: {result.max_abs_error:.1e}, allowed {result.tolerance:.1e}")
        tensors = {n: on_gpu(a) for n, a in feeds.items()}
        check(same(runner.infer(tensors), got), f"{what} T{T} B{B}: torch's memory by DLPack, bitwise")
        if dtype != "bfloat16":
            by_interface = {n: Interface(t) for n, t in tensors.items()}
            check(same(runner.infer(by_interface), got), f"{what} T{T} B{B}: __cuda_array_interface__, bitwise")
    runner.carried = {"final_states"}
    state, parts = feeds["states"], []
    for start in range(0, LONGEST, 7):
        out = runner.infer(feeds | {"wx": feeds["wx"][start : start + 7], "states": state})
        state, _ = out["final_states"], parts.append(out["y"])
    check(np.concatenate(parts).tobytes() == got["y"].tobytes(), f"{what}: chunks, states carried on the GPU, bitwise")
    carried = torch.from_dlpack(state).cpu().numpy()
    check(carried.tobytes() == got["final_states"].tobytes(), f"{what}: a carried state read by torch, bitwise")
    runner.carried = set()
    try:
        runner.infer(feeds | {"wx": np.zeros((LONGEST + 1, *feeds["wx"].shape[1:]), feeds["wx"].dtype)})
        check(False, f"{what}: T beyond the profile")
    except FlashRNNError as error:
        check("and the engine was built for" in str(error), f"{what}: T beyond the profile: {error}")
    check(same(runner.infer(feeds), got), f"{what}: and works on, bitwise")
    free = None
    for i in range(300):
        runner.infer(feeds)
        if i == 50:
            free = torch.cuda.mem_get_info()[0]
    check(torch.cuda.mem_get_info()[0] == free, f"{what}: no memory in 250 calls; the last took {runner.gpu_ms:.3f} ms")
    runner.close()


def main(call: Path, library: Path) -> None:
    torch.zeros(1).cuda()
    Context.call, Context.library = ctypes.CDLL(str(call)).flashrnn_host_enqueue, str(library).encode()
    fake_tensorrt.Context = Context  # type: ignore[misc]
    fake_tensorrt.make_runner = lambda *_: None  # type: ignore[assignment]
    sys.modules["tensorrt"] = fake_tensorrt._tensorrt("10.14.1.48", Gpu())  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        for cell in CELLS:
            for dtype in DTYPES:
                one(Path(folder), cell, dtype)
    import pycuda

    print(f"pycuda {pycuda.VERSION_TEXT}, torch {torch.__version__}, {torch.cuda.get_device_name()}; {failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main(*(Path(word).absolute() for word in sys.argv[1:3]))
