"""Feed a network step by step, as a microphone or a robot does, carrying its states from call to call."""

import numpy as np
import onnxruntime
import torch

from flashrnn_deploy.exporters import export
from flashrnn_deploy.nn import MultiHeadRNN

torch.manual_seed(0)
network = MultiHeadRNN(8, 32, cell="gru").eval()
result = export(network, (torch.zeros(5, 1, 8),), expose_states=True)
pairs = result.report["states"]  # input -> output
session = onnxruntime.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]

x = torch.randn(20, 1, 8).numpy()
states = {name: np.zeros((1, 1, 1, 32), np.float32) for name in pairs}
rows = []
for frame in x:
    outputs = dict(zip(names, session.run(None, {"x": frame[None], **states}), strict=True))
    states = {name: outputs[pairs[name]] for name in pairs}
    rows.append(outputs["output"])
with torch.no_grad():
    difference = np.abs(np.concatenate(rows) - network(torch.from_numpy(x))[0].numpy()).max()
print(f"20 calls of one step, largest difference from one call of 20: {difference:.1e}")
assert difference < 1e-5
