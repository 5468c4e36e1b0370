"""One file for every runtime: exported models on the oldest supported ONNX Runtime and one in the middle."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from runtimes import OLD_RUNTIMES, environment

from flashrnn_deploy.cells import CELLS
from flashrnn_deploy.exporters import export
from flashrnn_deploy.exporters.calls import tensors_of
from flashrnn_deploy.exporters.validate import to_numpy
from flashrnn_deploy.nn import MultiHeadRNN

PROGRAM = """
import pickle, sys
import numpy as np, onnxruntime as ort
print(ort.__version__)
results = []
for model, feeds in pickle.load(open(sys.argv[1], "rb")):
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    results.append([r.tolist() for r in session.run(None, feeds)])
pickle.dump(results, open(sys.argv[2], "wb"), protocol=2)
"""


@pytest.mark.parametrize("version", OLD_RUNTIMES)
def test_exported_files_run(version: str, tmp_path: Path) -> None:
    jobs, expected = [], []
    for cell in CELLS:
        for options in ({"num_layers": 2}, {"bidirectional": True, "batch_first": True}):
            for dtype in ("float32", "float16"):
                torch.manual_seed(0)
                net = MultiHeadRNN(4, 6, 2, cell, **options).eval()
                N, L = net.spec.num_directions, net.num_layers
                states = [torch.rand(L * N, 3, 6) + 1 for _ in net.spec.definition.states]
                x, lens = torch.randn(3, 3, 4), torch.tensor([3, 1, 2])
                args = (x, states[0] if len(states) == 1 else tuple(states), lens)
                result = export(net, args, dtype=dtype)
                leaves = [t.to(torch.float16) if t is x and dtype == "float16" else t for t in tensors_of(args)]
                names = [v.name for v in result.model.graph.input]
                feeds = dict(zip(names, map(to_numpy, leaves), strict=True))
                jobs.append((result.model.SerializeToString(), feeds))
                with torch.no_grad():
                    expected.append([to_numpy(t) for t in tensors_of(net(*args))])
    (tmp_path / "jobs").write_bytes(pickle.dumps(jobs, protocol=2).replace(b"numpy._core", b"numpy.core"))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "jobs"), str(tmp_path / "results")]
    done = subprocess.run(command, env=environment(version), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [version]
    results = pickle.loads((tmp_path / "results").read_bytes())
    for i, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
        for a, e in zip(actual, wanted, strict=True):
            np.testing.assert_allclose(np.array(a), e, rtol=0, atol=5e-3 if i % 2 else 1e-5)
