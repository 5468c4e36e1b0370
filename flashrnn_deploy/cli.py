"""The command line's entry point: what becomes of a command's errors, and which commands there are."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import click

from flashrnn_deploy import __version__
from flashrnn_deploy.commands import bench, engines, kernels, models
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.signals import ENDS

_CURES = dict.fromkeys(("torch", "onnxscript", "onnxruntime", "matplotlib"), '"flashrnn-deploy[export]"')
_CURES |= {"tensorrt": '"flashrnn-deploy[tensorrt]"'}  # TensorRT-RTX needs no TensorRT
_CURES |= {"pycuda": "pycuda; where that does not compile: flashrnn-deploy doctor"}


class _Group(click.Group):
    """Prints a user's mistake as one line and exits 1; every other exception keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _clean_termination():
                return super().invoke(ctx)
        except FlashRNNError as error:
            message = str(error)
        except MemoryError as error:
            message = f"this needs more memory than there is: {error}"
        except ModuleNotFoundError as error:
            package = (error.name or "").split(".")[0]
            if package not in _CURES:
                raise
            message = f"this needs {package}, which is not installed: pip install {_CURES[package]}"
        click.echo(f"error: {' '.join(message.split())}", err=True)
        ctx.exit(1)


@contextlib.contextmanager
def _clean_termination() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the program as Ctrl-C does, so that temporary files and compilers go; its exit status
    stays 128 + the signal."""

    def stop(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop) for number in ENDS if signal.getsignal(number) == signal.SIG_DFL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="flashrnn-deploy")
def main() -> None:
    """Export PyTorch recurrent networks to ONNX with the FlashRNN op, and run them anywhere."""


for _command in (*models.COMMANDS, *bench.COMMANDS, *kernels.COMMANDS, *engines.COMMANDS):
    main.add_command(_command)
