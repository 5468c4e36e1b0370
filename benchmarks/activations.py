"""How accurate are an engine's float32 Sigmoid and Tanh? Prints the largest absolute errors against float64."""

from __future__ import annotations

import numpy as np
import onnxruntime
import torch
from onnx import parser

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[n] x) => (float[n] s, float[n] t) { s = Sigmoid (x)  t = Tanh (x) }"""


def main() -> None:
    x = np.linspace(-12, 12, 400_001).astype(np.float32)
    exact = 1 / (1 + np.exp(-x.astype(np.float64))), np.tanh(x.astype(np.float64))
    session = onnxruntime.InferenceSession(
        parser.parse_model(MODEL).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    both = {
        f"ONNX Runtime {onnxruntime.__version__}": session.run(None, {"x": x}),
        f"PyTorch {torch.__version__}": [f(torch.from_numpy(x)).numpy() for f in (torch.sigmoid, torch.tanh)],
    }
    for engine, results in both.items():
        errors = [np.abs(a - e).max() for a, e in zip(results, exact, strict=True)]
        print(f"{engine}: Sigmoid {errors[0]:.2g}, Tanh {errors[1]:.2g}")


if __name__ == "__main__":
    main()
