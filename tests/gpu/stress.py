"""What one launch at a time does not show: repetition, streams, graphs, chunks, load, values that spread, refusals."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from judge import Case, judge, references, tensors
from library import ALTERNATING, Library, poisoned, stale

from flashrnn_deploy.op import RNNSpec

Report = Callable[[str, bool], None]

LOAD = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    for _ in range(20): a @ a
    torch.cuda.synchronize()
"""


def samples(lib: Library) -> Iterator[tuple[int, Case]]:
    """One case for every row of the library, and the alternating mode."""
    for index, row in enumerate(lib.rows):
        D, cell = row["padded_head_dim"], row["cell"]
        clip, floor = (0.8 if row["clips"] else 0.0), float(cell == "slstm")
        heads, T = (1, 24) if row["mode"] == "grid" else (2, 64)  # as many blocks as fit at once, or several times that
        spec = RNNSpec(cell, heads, D - index % 2, 2, row["dtype"], clip=clip, normalizer_floor=floor)
        yield index, Case(spec, T, 9, "ragged", seed=index)
    yield ALTERNATING, Case(RNNSpec("gru", 2, 37, 2, "float32"), 16, 9, "ragged")
    # R all on chip, streamed in part, one block per head, several launches.
    for cell, dtype, heads, D, B in (
        ("lstm", "bfloat16", 1, 1024, 9),
        ("gru", "float16", 1, 2048, 20),
        ("elman", "bfloat16", 150, 256, 7),
        ("slstm", "float32", 1, 1536, 9),
        ("lstm", "bfloat16", 1, 1024, 40),  # from here on tiles of 64, 64, 32 and 16 rows that all warps share
        ("gru", "float16", 2, 520, 65),
        ("lstm", "float16", 1, 2400, 30),
        ("slstm", "bfloat16", 16, 1024, 12),
    ):
        spec = RNNSpec(cell, heads, D, 1, dtype, normalizer_floor=float(cell == "slstm"))
        yield ALTERNATING, Case(spec, 16, B, "ragged")


def outputs(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return call.y.clone(), call.final_states.clone()


def same(a: tuple[torch.Tensor, torch.Tensor], call: Any) -> bool:
    """Bitwise."""
    pairs = zip(a, (call.y, call.final_states), strict=True)
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)


def once(lib: Library, case: Case, row: int) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    call = lib.call(case.spec, tensors(case))
    lib.launch(call, row)
    torch.cuda.synchronize()
    return call, outputs(call)


def repeated(lib: Library, report: Report, launches: int = 1000) -> None:
    """Alone, then on two streams at once, then beside a second process that keeps the device busy."""
    cases = [(row, case, *once(lib, case, row)) for row, case in samples(lib)]

    def rounds(text: str, count: int, streams: int) -> None:
        queues = [torch.cuda.Stream() for _ in range(streams)]
        good = True
        for row, case, call, expected in cases:
            calls = [call] + [lib.call(case.spec, call.tensors) for _ in queues[1:]]
            for done in range(0, count, 50):
                for one in calls:
                    poisoned(one.y), poisoned(one.final_states), stale(one.workspace, done // 50)
                torch.cuda.synchronize()
                for _ in range(min(50, count - done)):
                    for queue, one in zip(queues, calls, strict=True):
                        with torch.cuda.stream(queue):
                            lib.launch(one, row)
                torch.cuda.synchronize()
                if not all(same(expected, one) for one in calls):
                    good = False
                    report(f"{text}: other bits in {case}, row {row}", False)
                    break
        report(f"{text}: {count} launches of each of {len(cases)} kernels, {streams} stream(s), bitwise equal", good)

    rounds("repeated", launches, 1)
    rounds("two streams", launches // 2, 2)
    other = subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE)
    assert other.stdout is not None
    try:
        other.stdout.readline()
        rounds("under load", launches // 5, 1)
        running = other.poll() is None
        report("the second process ran all the while", running)
    finally:
        other.kill()
        other.wait()


def graphs(lib: Library, report: Report) -> None:
    """Captured and replayed, with other inputs in the same memory."""
    good = True
    for row, case in samples(lib):
        call, expected = once(lib, case, row)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lib.launch(call, row)
        kept = call.tensors["wx"].clone()
        call.tensors["wx"].neg_()
        graph.replay()
        torch.cuda.synchronize()
        changed = not same(expected, call)
        call.tensors["wx"].copy_(kept)
        poisoned(call.y), poisoned(call.final_states), poisoned(call.workspace)
        graph.replay()
        torch.cuda.synchronize()
        if not (changed and same(expected, call)):
            good = False
            report(f"graph: {case}, row {row}", False)
    report("captured in a CUDA graph and replayed", good)


def chunks(lib: Library, report: Report) -> None:
    """A sequence in pieces has the bits of the whole."""
    good = True
    for row, given in samples(lib):
        case = replace(given, spec=replace(given.spec, num_directions=1), lengths="full")
        call, whole = once(lib, case, row)
        states, pieces, start = call.tensors["initial_states"], [], 0
        for size in (1, 2, case.T - 3):
            piece = call.tensors | {"wx": call.tensors["wx"][start : start + size], "initial_states": states}
            part = lib.call(case.spec, piece)
            lib.launch(part, row)
            pieces.append(part.y)
            states, start = part.final_states, start + size
        torch.cuda.synchronize()
        ours = (torch.cat(pieces), states)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, ours, strict=True)):
            good = False
            report(f"chunks: {case}, row {row}", False)
    report("chunks have the bits of the whole", good)


def spreading(lib: Library, report: Report) -> None:
    """NaN and infinity in one batch row reach its own outputs and no other row's."""
    good = True
    for row, case in samples(lib):
        call, clean = once(lib, replace(case, lengths="full"), row)
        for value in (float("nan"), float("inf")):
            call.tensors["wx"][3, 4].fill_(value)
            call.tensors["initial_states"][0, :, 6].fill_(value)
            poisoned(call.y), poisoned(call.final_states)
            lib.launch(call, row)
            torch.cuda.synchronize()
            rows = [b for b in range(case.B) if b not in (4, 6)]
            untouched = torch.equal(call.y[:, rows], clean[0][:, rows])
            if not untouched or (value != value and not call.y[:, 4].isnan().any()):
                good = False
                report(f"{value} spreads or is lost: {case}, row {row}", False)
    report("NaN and infinity stay in their batch row", good)


def large(lib: Library, report: Report) -> None:
    """ReLU far beyond 1 in every step: the grid mode packs |h| < 2 and sends the rest in another way."""
    good, worst = True, 0.0
    for row, case in samples(lib):
        if case.spec.cell != "elman" or case.spec.clip:
            continue
        relu = replace(case, spec=replace(case.spec, relu=1))
        given = tensors(relu)
        given["wx"].add_(1.5)
        call = lib.call(relu.spec, given)
        lib.launch(call, row)
        torch.cuda.synchronize()
        verdict = judge(relu, *references(relu, given), call.y, call.final_states)
        worst = max(worst, call.y.abs().max().item())
        if not verdict.passed:
            good = False
            report(f"large: {relu}, row {row}: {verdict}", False)
    report(f"ReLU with values up to {worst:.1f}", good)


def misaligned(lib: Library, report: Report) -> None:
    """Tensors that start at any element; wx alone too, since r decides which alternating kernel runs."""
    good = True
    for row, case in samples(lib):
        given = tensors(case)
        exact, own = references(case, given)
        for name in ("wx", "r"):
            room = torch.empty(given[name].numel() + 1, dtype=given[name].dtype, device="cuda")
            given[name] = room[1:].copy_(given[name].flatten()).view(given[name].shape)
            call = lib.call(case.spec, given)
            lib.launch(call, row)
            torch.cuda.synchronize()
            if not judge(case, exact, own, call.y, call.final_states).passed:
                good = False
                report(f"misaligned: {case}, row {row}, up to {name}", False)
    report("misaligned wx and r", good)


def refusals(lib: Library, report: Report) -> None:
    """Rows that do not serve a call and missing workspaces are refused; the device goes on working."""
    case = Case(RNNSpec("lstm", 1, 5000, 1, "bfloat16"), 4, 2)
    call = lib.call(case.spec, tensors(case))

    def refuses(row: int) -> bool:
        try:
            lib.launch(call, row)
        except RuntimeError:
            return True
        return False

    def refuses_no_workspace(row: int) -> bool:
        given = next(case for index, case in samples(lib) if index == row)
        homeless = replace(lib.call(given.spec, tensors(given)), workspace=torch.empty(0, device="cuda"))
        try:
            lib.launch(homeless, row)
        except RuntimeError:
            return True
        return False

    grid = [index for index, row in enumerate(lib.rows) if row["mode"] == "grid"]
    report(f"no workspace is refused ({len(grid)} rows of the grid mode)", all(map(refuses_no_workspace, grid)))
    refused = sum(refuses(row) for row in range(len(lib.rows)))
    report(f"rows of another head_dim are refused ({refused} of {len(lib.rows)})", refused == len(lib.rows))
    began = time.perf_counter()
    lib.launch(call)
    torch.cuda.synchronize()
    report("a layer that fits no kernel runs in the alternating mode", time.perf_counter() - began < 10)


def run(lib: Library, report: Report, launches: int) -> None:
    for check in (misaligned, large, graphs, chunks, spreading, refusals):
        check(lib, report)
    repeated(lib, report, launches)
