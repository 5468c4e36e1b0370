"""The whole path in one command: train, export, run whole and streamed, verify, report.

A multi-head sLSTM learns the running parity of a bit sequence from sequences of at most 32 steps, and is tested on
256. Transformers of fixed depth cannot track state over unbounded length; a recurrent network can.
"""

from __future__ import annotations

import importlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flashrnn_deploy import __version__, compare, shell, streaming
from flashrnn_deploy.backends import make_runner
from flashrnn_deploy.cells import Array
from flashrnn_deploy.chunks import run_chunks
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.files import load_model, new_files
from flashrnn_deploy.shapes import axes_of, tensors_of

SEED = 0
SCHEDULE = ((100, 2, 8), (150, 8, 32))
"""(optimizer steps, shortest, longest sequence): short sequences first."""
TEST_STEPS, TEST_ROWS, TRAIN_ROWS, CHUNK = 256, 256, 128, 16
REPEATS = 5


def run(output: Path) -> dict[str, Any]:
    """Do it, showing progress and a table on the terminal.

    Args:
        output: the directory for parity.onnx, parity.py and parity.pt (the model and its weights), report.json and
            parity.png. It is written when everything has worked.

    Returns:
        What report.json says.

    Raises:
        FlashRNNError: PyTorch or another package of ``flashrnn-deploy[export]`` is missing, the directory cannot be
            written, or the results of the exported file disagree with PyTorch.
    """
    try:
        for package in ("torch", "onnxscript", "onnxruntime", "matplotlib"):
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise FlashRNNError(
            f'quickstart needs {error.name}, which is not installed: pip install "flashrnn-deploy[export]"'
        ) from error
    import torch

    from flashrnn_deploy import parity
    from flashrnn_deploy.exporters import export_file

    start, console = time.monotonic(), Console()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # steps this small are slower on two threads
    try:
        with new_files(output) as folder:
            shutil.copyfile(parity.__file__, folder / "parity.py")
            losses, module = _train(parity, console)
            torch.save(module.state_dict(), folder / "parity.pt")
            export_file(f"{folder / 'parity.py'}:model", folder / "parity.onnx")
            report = {"version": __version__, **_judge(folder / "parity.onnx", module), "losses": losses}
            _plot(report, folder / "parity.png")
            del report["accuracy_by_step"], report["losses"]
            report["seconds"] = round(time.monotonic() - start, 1)
            (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    finally:
        torch.set_num_threads(threads)
    _print(report, output, console)
    return report


def _data(rows: int, steps: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Bits [rows, steps, 1] and the parity after every step [rows, steps]."""
    bits = rng.integers(0, 2, (rows, steps, 1))
    return bits.astype(np.float32), bits[:, :, 0].cumsum(1) % 2


def _train(parity: Any, console: Console) -> tuple[list[float], Any]:
    """The loss of every optimizer step, and the trained module in eval mode."""
    import torch

    torch.manual_seed(SEED)
    rng = np.random.default_rng(SEED)
    module = parity.Parity().train()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    losses: list[float] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("training", total=sum(steps for steps, *_ in SCHEDULE))
        for steps, shortest, longest in SCHEDULE:
            for _ in range(steps):
                bits, target = map(torch.from_numpy, _data(TRAIN_ROWS, int(rng.integers(shortest, longest + 1)), rng))
                states = tuple(torch.zeros(1, TRAIN_ROWS, 32) for _ in range(4))
                scores, _ = module(bits, states)
                loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
                progress.update(task, advance=1, description=f"training, loss {losses[-1]:.4f}")
    return losses, module.eval()


def _judge(path: Path, module: Any) -> dict[str, Any]:
    """Accuracy, errors against PyTorch and times of the exported file, whole and streamed."""
    import torch

    model = load_model(path)
    axes, pairs = axes_of(model, tensors_of(model)), streaming.state_pairs(model)
    runner = make_runner("onnxruntime", model)
    bits, target = _data(TEST_ROWS, TEST_STEPS, np.random.default_rng(SEED + 1))

    def feeds(rows: int) -> dict[str, Array]:
        zeros = np.zeros((1, rows, 32), np.float32)
        return {"bits": bits[:rows], **dict.fromkeys(pairs, zeros)}

    def streamed(rows: int, chunk: int) -> dict[str, Array]:
        return run_chunks(runner, feeds(rows), chunk, axes, pairs, {})

    def expected(dtype: Any) -> Array:
        with torch.no_grad():
            states = tuple(torch.zeros(1, TEST_ROWS, 32, dtype=dtype) for _ in range(4))
            scores, _ = module.to(dtype)(torch.from_numpy(bits).to(dtype), states)
        return np.asarray(scores.numpy())

    whole, chunked = runner.infer(feeds(TEST_ROWS))["output"], streamed(TEST_ROWS, CHUNK)["output"]
    in_float32, exact = expected(torch.float32), expected(torch.float64)
    check = compare.against_peer("output", whole, in_float32, "float32", "PyTorch")
    if not check.passed:
        raise FlashRNNError(
            f"the exported file differs from PyTorch by {check.max_abs_error:.3g}, more than {check.tolerance:.3g}"
        )
    correct = whole.argmax(-1) == target
    result = {
        "accuracy": float(correct.mean()),
        "steps_trained": max(longest for *_, longest in SCHEDULE),
        "steps_tested": TEST_STEPS,
        "max_error_against_torch": check.max_abs_error,
        "tolerance": check.tolerance,
        "max_error_against_float64": compare.max_abs_error(whole, exact),
        "max_error_of_torch_against_float64": compare.max_abs_error(in_float32, exact),
        "max_difference_streamed_and_whole": compare.max_abs_error(chunked, whole),
        "chunk": CHUNK,
        "file_bytes": path.stat().st_size,
        "whole_us_per_step": _median_us(lambda: runner.infer(feeds(1))) / TEST_STEPS,
        "streamed_us_per_step": _median_us(lambda: streamed(1, 1)) / TEST_STEPS,
        "accuracy_by_step": correct.mean(0).tolist(),
    }
    runner.close()
    return result


def _median_us(call: Callable[[], object]) -> float:
    """Median time of a call in microseconds, after one call to warm up."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return float(np.median(times))


def _plot(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.semilogy(report["losses"], color="tab:blue")
    left.set(xlabel="optimizer step", ylabel="cross-entropy", title="training")
    right.axvspan(1, report["steps_trained"], color="tab:blue", alpha=0.15, label="lengths seen in training")
    right.plot(range(1, TEST_STEPS + 1), report["accuracy_by_step"], color="tab:green", label="ONNX Runtime")
    right.axhline(0.5, color="grey", linestyle=":", label="guessing")
    right.set(xlabel="time step", ylabel="accuracy", ylim=(0.45, 1.03), title="parity of the bits so far")
    right.legend(loc="lower right")
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def _print(report: dict[str, Any], output: Path, console: Console) -> None:
    table = Table(title="parity with a multi-head sLSTM, in ONNX Runtime on this CPU", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    lengths = f"{report['steps_tested']} steps (trained on {report['steps_trained']})"
    rows = {
        f"accuracy at {lengths}": f"{report['accuracy']:.2%}",
        "max error against PyTorch": f"{report['max_error_against_torch']:.1e}",
        "   allowed": f"{report['tolerance']:.1e}",
        "max error against float64": f"{report['max_error_against_float64']:.1e}",
        "   PyTorch's own": f"{report['max_error_of_torch_against_float64']:.1e}",
        f"max difference, chunks of {report['chunk']} and whole": f"{report['max_difference_streamed_and_whole']:.1e}",
        "file size": f"{report['file_bytes'] / 1024:.1f} KiB",
        "whole sequence, batch 1": f"{report['whole_us_per_step']:.1f} us per step",
        "one step per call, batch 1": f"{report['streamed_us_per_step']:.1f} us per step",
        "time for everything": f"{report['seconds']} s",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"wrote parity.onnx, parity.py, parity.pt, parity.png and report.json into {output}", soft_wrap=True)
    line = shell.command("verify", output / "parity.onnx", "--against", Path(f"{output / 'parity.py'}:model"))
    console.print(f"next: {line}", soft_wrap=True)
