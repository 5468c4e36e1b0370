"""TensorRT engines: built from ONNX files with the FlashRNN plugin inside, and described by a sidecar."""
