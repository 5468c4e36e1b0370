"""Deploy PyTorch multi-head recurrent networks as ONNX files and TensorRT engines with the FlashRNN op."""

from flashrnn_deploy.errors import FlashRNNError

__version__ = "0.1.0"
__all__ = ["FlashRNNError", "__version__"]
