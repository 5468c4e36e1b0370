"""The CUDA part of the ONNX Runtime binding, on a GPU: python tests/gpu/binding.py --plugins build/libflashrnn.so

Checks, against float64: plain runs, IO binding, a stream of the user's, several runs at once, enable_cuda_graph,
refused shapes, and `flashrnn-deploy run --device cuda`. Needs onnxruntime-gpu; fails without it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import onnxruntime as ort  # noqa: E402
import torch  # noqa: E402
from cases import model  # noqa: E402
from judge import Case, judge, references, tensors  # noqa: E402

from flashrnn_deploy.op import DTYPES, INPUTS, RNNSpec  # noqa: E402

CASES = (
    Case(RNNSpec("lstm", 1, 64, 1, "bfloat16"), 50, 4),
    Case(RNNSpec("gru", 2, 256, 2, "bfloat16"), 50, 4, "ragged"),
    Case(RNNSpec("lstm", 3, 250, 1, "float16", layout=1), 50, 16, "ragged"),
    Case(RNNSpec("slstm", 2, 37, 2, "float32", normalizer_floor=1.0), 20, 3, "ragged"),
    Case(RNNSpec("elman", 1, 5, 1, "float16", reverse=1), 20, 1),
)


def session(case: Case, library: Path, **provider: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library))
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    proto = model(case.spec, body=False).SerializeToString()
    return ort.InferenceSession(proto, options, providers=[("CUDAExecutionProvider", provider)])


class Bound:
    """Device tensors bound to a session; outputs belong to torch."""

    def __init__(self, case: Case, runner: ort.InferenceSession) -> None:
        self.case, self.runner, self.given = case, runner, tensors(case)
        wx = DTYPES[case.spec.dtype]
        types = dict.fromkeys(INPUTS, onnx.TensorProto.FLOAT)
        types |= {"wx": wx, "r": wx, "sequence_lens": onnx.TensorProto.INT32}
        shapes = case.spec.shapes(case.T, case.B)
        self.y = torch.full(shapes["y"], torch.nan, dtype=self.given["wx"].dtype, device="cuda")
        self.final = torch.full(shapes["final_states"], torch.nan, device="cuda")
        self.binding = runner.io_binding()
        for name in INPUTS:
            t = self.given[name]
            self.binding.bind_input(name, "cuda", 0, types[name], list(t.shape), t.data_ptr())
        self.binding.bind_output("y", "cuda", 0, wx, list(self.y.shape), self.y.data_ptr())
        self.binding.bind_output(
            "final_states", "cuda", 0, onnx.TensorProto.FLOAT, list(self.final.shape), self.final.data_ptr()
        )
        torch.cuda.synchronize()

    def run(self) -> Bound:
        self.runner.run_with_iobinding(self.binding)
        return self

    def good(self) -> bool:
        torch.cuda.synchronize()
        return judge(self.case, *references(self.case, self.given), self.y, self.final).passed


def plain(case: Case, library: Path) -> bool:
    """NumPy in and out; ONNX Runtime copies."""
    given = tensors(case)
    feeds = {name: t.cpu().numpy() for name, t in given.items()}
    y, final = session(case, library).run(None, feeds)
    return judge(case, *references(case, given), torch.from_numpy(y).cuda(), torch.from_numpy(final).cuda()).passed


def user_stream(case: Case, library: Path) -> bool:
    stream = torch.cuda.Stream()
    bound = Bound(case, session(case, library, user_compute_stream=str(stream.cuda_stream)))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        bound.run()
        copies = bound.y.clone(), bound.final.clone()  # in the order of the stream
    stream.synchronize()
    return judge(case, *references(case, bound.given), *copies).passed


def at_once(case: Case, library: Path) -> bool:
    """Several runs of one session on threads of their own."""
    runner = session(case, library)
    bound = [Bound(case, runner) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            list(pool.map(Bound.run, bound))
    return all(b.good() for b in bound)


def cuda_graph(case: Case, library: Path) -> bool:
    """Captured at the first run and replayed; new values in the same memory give new results."""
    bound = Bound(case, session(case, library, enable_cuda_graph="1"))
    for _ in range(3):
        bound.run()
    good = bound.good()
    bound.given["wx"].neg_()
    bound.y.fill_(torch.nan)
    torch.cuda.synchronize()
    return good and bound.run().good()


def refuses(library: Path) -> bool:
    case = CASES[0]
    feeds = {name: t.float().cpu().numpy() for name, t in tensors(case).items()}
    wrong = Case(RNNSpec("lstm", 1, 64, 1, "float32"), case.T, case.B)
    feeds |= {"sequence_lens": np.array([3, 3], np.int32)}
    try:
        session(wrong, library).run(None, feeds)
    except Exception as error:
        return "sequence_lens" in str(error)
    return False


def command(case: Case, library: Path) -> bool:
    """`flashrnn-deploy run --device cuda` on files."""
    case = replace(case, lengths="ragged" if case.lengths == "ragged" else "per row")  # files hold real lengths
    given = tensors(case)
    given["sequence_lens"].clamp_(0, case.T)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        onnx.save(model(case.spec), folder / "model.onnx")
        inputs = []
        for key, t in given.items():
            np.save(folder / f"{key}.npy", (t.float() if t.dtype == torch.bfloat16 else t).cpu().numpy())
            inputs += ["--input", f"{key}={folder / f'{key}.npy'}"]
        arguments = ["run", folder / "model.onnx", *inputs, "-o", folder / "out", "--device", "cuda"]
        done = subprocess.run(
            [sys.executable, "-m", "flashrnn_deploy", *map(str, arguments), "--plugins", str(library)],
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            print(done.stdout + done.stderr)
            return False
        ours = [torch.from_numpy(np.load(folder / "out" / f"{key}.npy")).cuda() for key in ("y", "final_states")]
    return judge(case, *references(case, given), *ours).passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugins", type=Path, required=True)
    library = parser.parse_args().plugins.resolve()
    torch.backends.cuda.matmul.allow_tf32 = False
    failed = 0

    def report(text: str, good: Any) -> None:
        nonlocal failed
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)

    print(f"ONNX Runtime {ort.__version__}, {torch.cuda.get_device_name()}")
    for case in CASES:
        if case.spec.dtype != "bfloat16":
            report(f"plain: {case}", plain(case, library))
        report(f"IO binding: {case}", Bound(case, session(case, library)).run().good())
        report(f"user stream: {case}", user_stream(case, library))
        report(f"runs at once: {case}", at_once(case, library))
        report(f"enable_cuda_graph: {case}", cuda_graph(case, library))
        report(f"flashrnn-deploy run --device cuda: {case}", command(case, library))
    report("a wrong shape is refused by name", refuses(library))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
