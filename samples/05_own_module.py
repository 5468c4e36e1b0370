"""Teach the exporter your own recurrent layer: one function from it to a module that computes the same with the op."""

import numpy as np
import onnxruntime
import torch
from torch import nn

from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.registry import register
from flashrnn_deploy.nn import MultiHeadRNN


class Loop(nn.Module):
    """h = tanh(W x + R h + b), as a loop that torch.export would freeze at the number of steps of the example."""

    def __init__(self, inputs, units):
        super().__init__()
        self.w, self.r = nn.Linear(inputs, units), nn.Linear(units, units, bias=False)

    def forward(self, x):
        h, rows = x.new_zeros(x.shape[0], self.r.in_features), []
        for step in x.unbind(1):
            h = torch.tanh(self.w(step) + self.r(h))
            rows.append(h)
        return torch.stack(rows, 1)


class LoopByOp(nn.Module):
    def __init__(self, layer):
        super().__init__()
        units = layer.r.in_features
        self.rnn = MultiHeadRNN(layer.w.in_features, units, cell="elman", batch_first=True)
        with torch.no_grad():
            self.rnn.weight_ih_l0.copy_(layer.w.weight)
            self.rnn.weight_hh_l0.copy_(layer.r.weight.view(1, 1, 1, units, units))
            self.rnn.bias_l0.copy_(layer.w.bias.view(1, 1, 1, units))

    def forward(self, x):
        return self.rnn(x)[0]


register(Loop)(LoopByOp)  # or as a decorator of a function from the layer to its stand-in

torch.manual_seed(0)
network = nn.Sequential(Loop(3, 16), nn.Linear(16, 2)).eval()
result = export(network, (torch.zeros(2, 5, 3),))
session = onnxruntime.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])
x = torch.randn(4, 50, 3)
y = session.run(None, {"input": x.numpy()})[0]
with torch.no_grad():
    difference = np.abs(y - network(x).numpy()).max()
print(f"{result.report['nodes'][0]['op']} at 50 steps, exported at 5: largest difference {difference:.1e}")
assert difference < 1e-5
