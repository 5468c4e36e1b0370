"""Builds and runs engines of TensorRT on a GPU, through the C++ library of samples/cpp_edge (docs/tensorrt.md).

    python tests/gpu/tensorrt_engines.py BUILD LIB CASES [cases|time|damage ...]

BUILD is the folder of tests/tensorrt_host with FLASHRNN_HOST_EDGE=ON, LIB the plugin library, CASES what
tests/gpu/tensorrt_cases.py wrote. "cases" builds an engine of each folder, three at a time, and runs edge_check on it;
"time" prints the median of a call with IProfiler, without and by a CUDA graph; "damage" runs engines and sidecars that
do not fit. All three, in this order, where none is named; the engines stay in CASES. Exit status 1 if anything fails.
"""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

EIGHT = ("lstm-float32", "slstm-float16")  # run by eight sessions at once
TIME_STEPS = 1024
DAMAGED = "slstm-float32"


class Rig:
    """The programs, and where the engines are."""

    def __init__(self, build: Path, library: Path, cases: Path) -> None:
        self.edge, self.edge_check = build / "edge" / "flashrnn_edge", build / "edge_check"
        self.library, self.cases = library, cases

    def call(self, *command: object, limit: int = 300) -> tuple[int, list[str]]:
        """The exit status and the lines of both streams, those of the dynamic linker left out."""
        run = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=limit)
        lines = (run.stdout + run.stderr).splitlines()
        return run.returncode, [line for line in lines if "no version information available" not in line]

    def engine(self, name: str) -> Path:
        return self.cases / f"{name}.engine"


def one_case(rig: Rig, name: str) -> tuple[bool, list[str]]:
    """Builds the engine of a folder if it is not there, and checks it."""
    folder, engine = rig.cases / name, rig.engine(name)
    if not engine.exists():
        shapes = [word for line in (folder / "shapes").read_text().split() for word in ("--shape", line)]
        options = ["--plugin", rig.library, "-o", engine, "--sessions", 8 if name in EIGHT else 1, "-v"]
        status, lines = rig.call(rig.edge, "build", folder / "model.onnx", *options, *shapes)
        told = sorted({line for line in lines if "configured for" in line or "clamp" in line.lower()})
        if status != 0:
            return False, [*told, *lines[-3:]]
    else:
        told = []
    status, lines = rig.call(rig.edge_check, engine, rig.library, folder)
    return status == 0, [*told, *lines]


def check_cases(rig: Rig) -> bool:
    names = sorted(path.parent.name for path in rig.cases.glob("*/shapes"))
    good = bool(names)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        for name, (passed, lines) in zip(names, pool.map(lambda n: one_case(rig, n), names), strict=True):
            print(f"{'ok' if passed else 'FAILED'} {name}", *lines, sep="\n    ", flush=True)
            good = good and passed
    return good


def time_layers(rig: Rig) -> bool:
    good = True
    for name, size in (("time-256", 256), ("time-768", 768)):
        for batch in (1, 16):
            with tempfile.TemporaryDirectory() as folder:
                x = np.random.default_rng(0).uniform(-1, 1, (TIME_STEPS, batch, size)).astype(np.float16)
                np.save(Path(folder) / "x.npy", x)
                run = (rig.edge, "run", rig.engine(name), "--plugin", rig.library, "--input", f"x={folder}/x.npy")
                for option in ("--profile", "--graph", None):
                    how = () if option is None else (option,)
                    status, lines = rig.call(*run, "-o", f"{folder}/out", "--repeat", 50, *how)
                    kept = "; ".join(line.strip() for line in lines if " ms " in line and "0.0000 ms" not in line)
                    print(f"{name} B{batch} {option or 'plain'}: {kept if status == 0 else lines[-1]}", flush=True)
                    good = good and status == 0
    return good


def damage(rig: Rig) -> bool:
    """Each ends with one line and exit status 1, but for the engine as it is."""
    data = rig.engine(DAMAGED).read_bytes()
    sidecar = Path(f"{rig.engine(DAMAGED)}.json").read_text()
    facts = json.loads(sidecar)
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 16]) + data[middle + 1 :]
    table: list[tuple[str, bytes, str | None, list[str], int]] = [
        ("as it is", data, sidecar, [], 0),
        ("no sidecar", data, None, [], 1),
        ("no sidecar, trusted", data, None, ["--trust-engine"], 0),
        ("a flipped byte", flipped, sidecar, [], 1),
        ("half of it", data[:middle], sidecar, [], 1),
        ("half of it, trusted", data[:middle], None, ["--trust-engine"], 1),
        ("empty", b"", sidecar, [], 1),
        ("another TensorRT", data, json.dumps(facts | {"tensorrt": "10.3.0"}), [], 1),
        ("another GPU", data, json.dumps(facts | {"compute_capability": "8.7"}), [], 1),
        ("half a sidecar", data, sidecar[:40], [], 1),
    ]
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine, other = folder / "x.engine", folder / "other.so"
        inputs = [w for p in (rig.cases / DAMAGED / "cases/4/in").glob("*.npy") for w in ("--input", f"{p.stem}={p}")]
        other.write_bytes(rig.library.read_bytes() + b"\0")

        def attempt(what: str, plugin: list[object], options: list[str], expected: int) -> bool:
            status, lines = rig.call(rig.edge, "run", engine, *plugin, "-o", folder / "out", *inputs, *options)
            passed = status == expected and (status == 0 or sum(line.startswith("error: ") for line in lines) == 1)
            print(f"{'ok' if passed else 'FAILED'} {what}: exit {status}; {lines[-1][:300]}", flush=True)
            return passed

        for what, content, beside, options, expected in table:
            engine.write_bytes(content)
            Path(f"{engine}.json").unlink(missing_ok=True)
            if beside is not None:
                Path(f"{engine}.json").write_text(beside)
            good = attempt(what, ["--plugin", rig.library], options, expected) and good
        engine.write_bytes(data)
        Path(f"{engine}.json").write_text(sidecar)
        for what, plugin in (("no plugin", []), ("another library", [other]), ("no such library", [folder / "no.so"])):
            good = attempt(what, [word for p in plugin for word in ("--plugin", p)], [], 1) and good
    return good


PARTS = {"cases": check_cases, "time": time_layers, "damage": damage}

if __name__ == "__main__":
    rig = Rig(*(Path(word).absolute() for word in sys.argv[1:4]))
    results = [PARTS[part](rig) for part in sys.argv[4:] or PARTS]
    sys.exit(0 if all(results) else 1)
