"""Deploy PyTorch multi-head recurrent networks as ONNX files and TensorRT engines with the FlashRNN op."""

from os import PathLike, fspath

from flashrnn_deploy.errors import FlashRNNError

__version__ = "0.1.0"
__all__ = ["FlashRNNError", "__version__", "register"]


def register(session_options: object, library: str | PathLike[str]) -> None:
    """Make the ops of ``libflashrnn.so`` known to ``onnxruntime.SessionOptions``; see ``backends.ort.register``."""
    from flashrnn_deploy.backends import ort

    ort.register(session_options, fspath(library))
