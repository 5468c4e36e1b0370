"""Export a torch.nn.LSTM that packs its sequences: the lengths become an input of the file, in any order."""

import numpy as np
import onnxruntime
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from flashrnn_deploy.exporters import export


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(8, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, 5)

    def forward(self, x, lengths):
        y, _ = self.rnn(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.out(pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0])


torch.manual_seed(0)
tagger = Tagger().eval()
result = export(tagger, (torch.zeros(3, 7, 8), torch.tensor([7, 5, 5])))
session = onnxruntime.InferenceSession(result.model.SerializeToString(), providers=["CPUExecutionProvider"])
x, lengths = torch.randn(4, 20, 8), torch.tensor([3, 20, 11, 1])
y = session.run(None, {"x": x.numpy(), "lengths": lengths.numpy()})[0]
with torch.no_grad():
    difference = np.abs(y - tagger(x, lengths).numpy()).max()
print(f"{len(result.report['nodes'])} ops, lengths {lengths.tolist()}: largest difference {difference:.1e}")
assert difference < 1e-5
