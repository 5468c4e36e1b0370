"""Export a multi-head recurrent network and run the file in ONNX Runtime at sizes that were never traced."""

import numpy as np
import onnx
import onnxruntime
import torch

from flashrnn_deploy.exporters import export
from flashrnn_deploy.nn import MultiHeadRNN

torch.manual_seed(0)
network = MultiHeadRNN(16, 64, num_heads=4, cell="slstm", num_layers=2, batch_first=True).eval()
result = export(network, (torch.zeros(1, 10, 16),))
onnx.save(result.model, "network.onnx")

session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
x = torch.randn(3, 25, 16)
y = session.run(["output"], {"x": x.numpy()})[0]
with torch.no_grad():
    difference = np.abs(y - network(x)[0].numpy()).max()
print(f"y {y.shape}, largest difference from PyTorch {difference:.1e}")
assert difference < 1e-5
