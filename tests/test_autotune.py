"""`build-plugins --autotune`: which kernel wins, what is kept of it, what is excluded and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
from click.testing import CliRunner

from flashrnn_deploy import autotune, build, gpus, kernel_config, kernel_table, tuned_file, tuning
from flashrnn_deploy.cli import main
from flashrnn_deploy.cmake import Builder
from flashrnn_deploy.errors import FlashRNNError
from flashrnn_deploy.gpus import GPU
from flashrnn_deploy.kernel_table import Layer
from flashrnn_deploy.kernel_timer import Job, Timer
from flashrnn_deploy.op import RNNSpec

SPEC = RNNSpec("lstm", 1, 256, dtype="bfloat16")
HERE = replace(gpus.get("h200"), name="local", product="NVIDIA H200")

FAKE = """#!{python}
import json, pathlib, sys, time
here = pathlib.Path(__file__)
plan = json.loads((here.parent / "plan.json").read_text())
for line in sys.stdin:
    with open(here.parent / "requests", "a") as log:
        log.write(line)
    good = []
    for row in line.split()[13:]:
        print("begin", row, flush=True)
        does = plan.get(row, 1.0)
        if does == "hang":
            time.sleep(60)
        elif does == "crash":
            print("failed", row, "an illegal memory access was encountered", flush=True)
            sys.exit("the context is lost")
        elif does == "refuse":
            print("failed", row, "invalid configuration")
        elif does == "vanish":
            sys.exit(1)
        elif isinstance(does, str):
            print("error", row, does)
        else:
            print("error", row, "0.01")
            good.append((row, does))
    for row, us in good:
        print("us", row, us)
    print("done", flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Makes a timing program that says of each row what it is told to: microseconds, an error or a fault."""
    folder = tmp_path / "fake"
    folder.mkdir()

    def make(**plan: float | str) -> Path:
        program = folder / "flashrnn_timer"
        program.write_text(FAKE.format(python=sys.executable))
        program.chmod(0o755)
        (folder / "plan.json").write_text(json.dumps({name.removeprefix("row"): does for name, does in plan.items()}))
        return program

    return make


def requests(program: Path) -> list[list[str]]:
    path = program.parent / "requests"
    return [line.split() for line in path.read_text().splitlines()] if path.is_file() else []


def layers(*specs: RNNSpec) -> list[Layer]:
    return [Layer("m.onnx", f"rnn{i}", spec) for i, spec in enumerate(specs)]


def timed(program: Path, job: Job, limit_s: float = 20) -> list[str]:
    """What is said of each configuration of a job: its time, or why it is excluded."""
    with Timer(program, HERE, autotune.table([job], HERE), limit_s) as clock:
        timings = clock.time(job)
    assert [t.config for t in timings] == list(job.configs)
    assert all((t.step_us is None) == bool(t.excluded) for t in timings)
    return [t.excluded or str(t.step_us) for t in timings]


def job_of(spec: RNNSpec = SPEC, batch: int = 16, count: int = 3) -> Job:
    return Job(spec, batch, tuple(s.config for s in kernel_config.candidates(spec, batch, HERE, count)))


# The timing program ------------------------------------------------------------------------------------------------


def test_a_request_is_what_the_timer_reads(fake: Callable[..., Path]) -> None:
    program, spec = fake(), replace(SPEC, num_directions=2, clip=2.5)
    timed(program, Job(spec, 4, job_of(spec).configs))
    assert requests(program) == [
        ["0", "2", "1024", "4", "2", "1", "256", "0", "0", "2.5", "0", "0.0", "0.04", "0", "1", "2"]
    ]
    text = (build.plugin_sources() / "timer" / "timer.cu").read_text()
    fields = re.search(r"//   (cell dtype .*) row\.\.\.", text)
    assert fields is not None
    assert len(fields[1].split()) == 13


def test_large_inputs_are_cut_in_time() -> None:
    assert Job(RNNSpec("lstm", 12, 64, dtype="bfloat16"), 64, ()).steps == 682
    assert Job(RNNSpec("lstm", 1, 4096), 4096, ()).steps == 16


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("0.3", "wrong output: off by 0.3, 0.04 is allowed"),
        ("nan", "wrong output: off by nan, 0.04 is allowed"),
        ("refuse", "does not launch: invalid configuration"),
        ("crash", "ends the timing program: an illegal memory access was encountered"),
        ("vanish", "ends the timing program: no message"),
    ],
)
def test_a_bad_candidate_costs_only_itself(fake: Callable[..., Path], does: str, said: str) -> None:
    program = fake(row0=0.4, row1=does, row2=0.3)
    assert timed(program, job_of()) == ["0.4", said, "0.3"]


def test_a_kernel_that_hangs_is_ended(fake: Callable[..., Path]) -> None:
    program = fake(row0="hang", row1=0.5, row2="hang")
    assert timed(program, job_of(), limit_s=1.5) == ["does not end within 1.5 s", "0.5", "does not end within 1.5 s"]


def test_a_program_that_times_nothing(tmp_path: Path) -> None:
    program = tmp_path / "timer"
    program.write_text("#!/bin/sh\necho no CUDA-capable device is detected\nexit 1\n")
    program.chmod(0o755)
    assert timed(program, job_of(count=2)) == ["ends the timing program: no CUDA-capable device is detected"] * 2
    with pytest.raises(FlashRNNError, match="does not start: No such file"):
        timed(tmp_path / "none", job_of())


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH")
STUB = """
#include "alternating.h"
namespace flashrnn::cuda {
std::size_t alternating_workspace_bytes(const Params&) { return 0; }
cudaError_t launch_alternating(const Params&, void*, cudaStream_t) { return cudaErrorNotSupported; }
}
"""


def call(*command: object, stdin: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [*map(str, command)], input=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


def check_program(program: Path) -> None:
    assert call(program) == (0, "")
    for request in ("0 2 8\n", f"{' '.join(['1'] * 13)} 9\n"):  # cut off, and a row that there is not
        assert call(program, stdin=request) == (1, f"this is no job: {request}")


@needs_nvcc
def test_the_timer_compiles(tmp_path: Path) -> None:
    """Without kernels, which take most of the time: what it says of requests needs no GPU."""
    plugins, program = build.plugin_sources(), tmp_path / "timer"
    (tmp_path / "kernel_configs.inc").touch()
    (tmp_path / "stub.cu").write_text(STUB)
    sources = (plugins / "timer" / "timer.cu", plugins / "kernels" / "cuda" / "launch.cu", tmp_path / "stub.cu")
    warnings = ("--compiler-options=-Wall,-Wextra,-Wshadow,-Werror", "-Werror=all-warnings", "-std=c++17")
    folders = (f"-I{tmp_path}", f"-I{plugins / 'kernels' / 'cuda'}")
    code, text = call("nvcc", "-gencode=arch=compute_90,code=sm_90", *warnings, *folders, *sources, "-o", program)
    assert code == 0, text
    check_program(program)


@needs_nvcc
@pytest.mark.full
def test_the_timer_builds_with_its_kernels(tmp_path: Path) -> None:
    job = job_of(RNNSpec("elman", 1, 64, dtype="bfloat16"), 1, 1)
    (tmp_path / "kernel_configs.inc").write_text("\n".join(autotune.table([job], HERE)) + "\n")
    values = {"FLASHRNN_CUDA_ARCHITECTURES": "90", "FLASHRNN_KERNEL_CONFIGS": tmp_path / "kernel_configs.inc"}
    flags = [f"-D{name}={value}" for name, value in values.items()]
    source = build.plugin_sources() / "timer"
    for command in (
        ("cmake", "-S", source, "-B", tmp_path / "b", "-G", "Ninja", *flags),
        ("ninja", "-C", tmp_path / "b"),
    ):
        code, text = call(*command)
        assert code == 0, text
    check_program(tmp_path / "b" / "flashrnn_timer")


# Winners -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch, fake: Callable[..., Path]) -> Path:
    """A machine with an H200 where nothing is compiled: the timing program is the fake, the library two bytes."""
    monkeypatch.setattr(gpus, "_load_driver", lambda: None)
    monkeypatch.setattr(gpus, "read_device", lambda driver: HERE)
    program = fake()

    def compiled(self: Builder, source: Path, folder: Path, values: dict[str, str]) -> None:
        if source.name == "timer":
            shutil.copytree(program.parent, folder, dirs_exist_ok=True)
        else:
            text = f'\\"version\\": \\"0\\", \\"tuned\\": \\"{values["FLASHRNN_TUNED"]}\\"'
            (folder / "build_info.h").write_text(text)
            (folder / "libflashrnn.so").write_bytes(b"so")

    monkeypatch.setattr(Builder, "build", compiled)
    monkeypatch.setattr(build, "find_tools", lambda *unused: build.Tools("cmake", "ninja", "g++", "nvcc", "13.0"))
    return program


def run(*arguments: object) -> tuple[int, str, list[str]]:
    result = CliRunner().invoke(main, ["build-plugins", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.stdout, result.stderr.splitlines()


def save(spec: RNNSpec, path: Path) -> Path:
    return models.save(models.network(spec), path)


def test_the_fastest_is_built_kept_and_used_again(stubs: Path, fake: Callable[..., Path], tmp_path: Path) -> None:
    fake(row0=0.5, row1=0.4, row2="0.3", row3=0.6, row4=0.7)
    model, out = save(SPEC, tmp_path / "m.onnx"), tmp_path / "out"
    options = (model, "--gpu", "h200", "--batch", 16, "-o", out)
    code, text, lines = run(*options, "--autotune")
    assert code == 0
    first, second, third, *_ = (s.config for s in kernel_config.candidates(SPEC, 16, HERE, 5))
    row = re.sub(r" +", " ", next(line for line in text.splitlines() if "25%" in line))
    assert f"{autotune.short(first)} 0.5 {autotune.short(second)} 0.4 25%" in row
    assert any("timing lstm 1x256 bfloat16 B16: 5 kernels" in line for line in lines)
    note = f"batch 16: {autotune.short(third)}: wrong output: off by 0.3, 0.04 is allowed; excluded"
    assert sum(note in line for line in lines) == 1
    table = kernel_table.HEADER + kernel_table.render(kernel_table.row(SPEC, HERE, second)) + "\n"
    assert (out / "build" / "kernel_configs.inc").read_text() == table
    (entry,) = tuned_file.load(out / tuned_file.FILE)
    assert (entry.product, entry.spec, entry.batch, entry.nvcc) == ("NVIDIA H200", SPEC, 16, "13.0")
    assert entry.source_hash == tuning.source_hash(build.plugin_sources())
    assert f"1 of 1 choices, on NVIDIA H200, {entry.date}" in (out / "build" / "build_info.h").read_text()
    report = json.loads((out / "libflashrnn.json").read_text())
    assert report["kernels"][0]["measured_step_us"] == report["tuned"][0]["winner_step_us"] == 0.4
    assert "notes" not in report

    assert len(requests(out / "build" / "timer" / "x")) == 1
    code, _, lines = run(*options, "--autotune")
    assert code == 0
    assert len(requests(out / "build" / "timer" / "x")) == 1, "a second run times nothing"
    code, _, lines = run(*options)
    assert not [line for line in lines if "tuned" in line]
    assert (out / "build" / "kernel_configs.inc").read_text() == table

    other = tmp_path / "other"  # on a machine without the GPU
    code, _, _ = run(model, "--gpu", "h200", "--batch", 16, "-o", other, "--tuned", out / tuned_file.FILE)
    assert code == 0
    assert (other / "build" / "kernel_configs.inc").read_text() == table
    assert tuned_file.load(other / tuned_file.FILE) == [entry]
    code, _, _ = run(model, "--gpu", "h200", "--batch", 16, "-o", other)
    assert (other / "build" / "kernel_configs.inc").read_text() == table


def test_another_batch_is_timed_alone(stubs: Path, tmp_path: Path) -> None:
    model, out = save(SPEC, tmp_path / "m.onnx"), tmp_path / "out"
    for batches in ((1,), (1, 16)):
        given = [text for batch in batches for text in ("--batch", batch)]
        assert run(model, "--gpu", "local", "-o", out, "--autotune", *given)[0] == 0
    assert [r[3] for r in requests(out / "build" / "timer" / "x")] == ["1", "16"]
    assert [e.batch for e in tuned_file.load(out / tuned_file.FILE)] == [1, 16]


def test_layers_that_share_a_kernel_are_timed_each_and_the_sum_decides(fake: Callable[..., Path]) -> None:
    one, twelve = RNNSpec("lstm", 1, 64, dtype="bfloat16"), RNNSpec("lstm", 12, 64, dtype="bfloat16")
    both = layers(one, twelve)
    work = autotune.jobs(both, HERE, [16])
    assert [(job.spec, job.batch) for job in work] == [(one, 16), (twelve, 16)]
    assert work[0].configs == work[1].configs
    a, b = work[0].configs[:2]

    def entries(*times: tuple[float, float]) -> list[tuned_file.Entry]:
        about = ("NVIDIA H200", 90, 132, "580", "13.0", "", "2026-11-30")
        return [
            tuned_file.Entry(*about, job.spec, 16, (tuned_file.Timing(a, ours), tuned_file.Timing(b, theirs)))
            for job, (ours, theirs) in zip(work, times, strict=False)
        ]

    def chosen(known: list[tuned_file.Entry]) -> list[tuple[Any, float | None]]:
        choices = kernel_table.plan(both, [HERE], [16], tuning.measurements(known))
        return [(c.solution.config, c.measured_us) for c in choices]

    assert chosen(entries((0.2, 0.3), (0.5, 0.3))) == [(b, 0.3), (b, 0.3)]
    assert chosen(entries((0.2, 0.3), (0.3, 0.3))) == [(a, 0.2), (a, 0.3)]
    assert chosen(entries((0.3, 0.2))) == chosen([]) == [(a, None), (a, None)], "one of the two was not timed"


def test_without_any_candidate_that_works_the_alternating_mode_is_built(
    stubs: Path, fake: Callable[..., Path], tmp_path: Path
) -> None:
    fake(**{f"row{i}": "refuse" for i in range(5)})
    model, out = save(SPEC, tmp_path / "m.onnx"), tmp_path / "out"
    code, _, lines = run(model, "--gpu", "h200", "--batch", 1, "-o", out, "--autotune")
    assert code == 0
    assert sum("does not launch: invalid configuration; excluded" in line for line in lines) == 5
    [kernel] = json.loads((out / "libflashrnn.json").read_text())["kernels"]
    assert (kernel["mode"], kernel["measured_step_us"]) == ("alternating", None)


# What no longer fits -----------------------------------------------------------------------------------------------


def timings_file(path: Path, **changes: Any) -> Path:
    config, other = (s.config for s in kernel_config.candidates(SPEC, 16, HERE, 2))
    entry = tuned_file.Entry(
        "NVIDIA H200", 90, 132, "580", "13.0", tuning.source_hash(build.plugin_sources()), "2026-11-30", SPEC, 16,
        (tuned_file.Timing(config, 0.5), tuned_file.Timing(other, 0.4)),
    )  # fmt: skip
    tuned_file.save(path, [replace(entry, **changes)])
    return path


@pytest.mark.parametrize(
    ("gpu", "changes", "said"),
    [
        ("h200", {"source_hash": "0" * 64}, "not used: the kernels' sources have changed since"),
        ("h100", {}, "not used: this build is not for NVIDIA H200"),
        ("h200", {"product": "NVIDIA H200 MIG 1g.18gb", "sms": 16}, "not used: this build is not for NVIDIA H200 MIG"),
        ("h200", {"batch": 1, "timings": None}, "not used: the solver no longer offers their configurations"),
    ],
)
def test_entries_that_do_not_fit_are_told_and_not_used(
    stubs: Path, tmp_path: Path, gpu: str, changes: dict[str, Any], said: str
) -> None:
    if changes.get("timings", 0) is None:  # a tile of two rows for a batch of one
        odd = replace(kernel_config.solve(SPEC, 16, HERE).config, batch_tile=2)
        changes = changes | {"timings": (tuned_file.Timing(odd, 0.4),)}
    model, file = save(SPEC, tmp_path / "m.onnx"), timings_file(tmp_path / "tuned.json", **changes)
    code, _, lines = run(model, "--gpu", gpu, "--batch", 16, "-o", tmp_path / "out", "--tuned", file)
    assert code == 0
    (line,) = [line for line in lines if str(file) in line]
    assert line.startswith(f"note: {file}: 1 tuned layer (lstm 1x256 bfloat16 B")
    assert said in line
    report = json.loads((tmp_path / "out" / "libflashrnn.json").read_text())
    assert (report["kernels"][0]["measured_step_us"], report["tuned"]) == (None, [])
    assert tuned_file.load(tmp_path / "out" / tuned_file.FILE) == tuned_file.load(file), (
        "it stays for the build that can use it"
    )


def test_what_other_sources_were_timed_with_stays_beside_what_is_timed_anew(stubs: Path, tmp_path: Path) -> None:
    model, out = save(SPEC, tmp_path / "m.onnx"), tmp_path / "out"
    out.mkdir()
    (older,) = tuned_file.load(timings_file(out / tuned_file.FILE, source_hash="0" * 64))
    code, _, lines = run(model, "--gpu", "h200", "--batch", 16, "-o", out, "--autotune")
    assert code == 0
    assert sum("not used: the kernels' sources have changed since" in line for line in lines) == 1
    kept, new = tuned_file.load(out / tuned_file.FILE)
    assert kept == older
    assert (new.key[2:], new.source_hash) == (older.key[2:], tuning.source_hash(build.plugin_sources()))
    report = json.loads((out / "libflashrnn.json").read_text())
    assert report["kernels"][0]["measured_step_us"] == min(t.step_us for t in new.timings if t.step_us)


def test_timings_that_a_given_file_replaces_are_told(stubs: Path, tmp_path: Path) -> None:
    model, out = save(SPEC, tmp_path / "m.onnx"), tmp_path / "out"
    out.mkdir()
    timings_file(out / tuned_file.FILE)
    file = timings_file(tmp_path / "tuned.json", driver="590")
    code, _, lines = run(model, "--gpu", "h200", "--batch", 16, "-o", out, "--tuned", file)
    assert code == 0
    assert (
        f"{out / tuned_file.FILE}: 1 tuned layer (lstm 1x256 bfloat16 B16) replaced by what {file} has of the same"
        in "".join(lines)
    )
    assert tuned_file.load(out / tuned_file.FILE) == tuned_file.load(file)
    _, _, lines = run(model, "--gpu", "h200", "--batch", 16, "-o", out, "--tuned", file)
    assert not [line for line in lines if "replaced" in line]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a file of build-plugins --autotune"),
        ("[" * 100_000, "is not a file of build-plugins --autotune: maximum recursion"),
        ("[]", "is damaged, or no file of build-plugins --autotune"),
        ('{"format": 2}', "has format 2, and this version reads 1"),
        ('{"format": 1, "entries": [{}]}', "is damaged, or no file of build-plugins --autotune"),
    ],
)
def test_files_that_are_no_timings(stubs: Path, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    model = save(SPEC, tmp_path / "m.onnx")
    code, _, lines = run(model, "--gpu", "h200", "-o", tmp_path / "out", "--tuned", tmp_path / "t.json")
    assert (code, len(lines)) == (1, 1)
    assert message in lines[0]
    missing = run(model, "--gpu", "h200", "-o", tmp_path / "out", "--tuned", tmp_path / "none.json")
    assert "cannot read" in missing[2][-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("row_warps", -1, "entries[0].timings[0].config.row_warps is -1, not a whole number from 0 to 2147483647"),
        ("row_warps", 0, None),
        ("units_per_block", 0, None),
        ("k_warps", 2**31 - 1, None),
        ("batch_tile", 3, None),
    ],
)
def test_numbers_that_no_kernel_has_do_not_reach_the_solver(
    stubs: Path, tmp_path: Path, field: str, value: int, message: str | None
) -> None:
    """Some of them divide by 0 there."""
    odd = replace(kernel_config.solve(SPEC, 16, HERE).config, **{field: value})
    file = timings_file(tmp_path / "t.json", timings=(tuned_file.Timing(odd, 0.4),))
    model = save(SPEC, tmp_path / "m.onnx")
    code, _, lines = run(model, "--gpu", "h200", "--batch", 16, "-o", tmp_path / "out", "--tuned", file)
    if message:
        assert (code, len(lines)) == (1, 1)
        assert message in lines[0]
        assert not (tmp_path / "out").exists()
    else:
        assert code == 0
        assert sum("not used: the solver no longer offers their configurations" in line for line in lines) == 1


def test_a_given_file_is_kept_by_a_build_that_succeeds_alone(
    stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a failed build was given does not get into the next one. What it timed itself does."""
    model, out, compiled = save(SPEC, tmp_path / "m.onnx"), tmp_path / "out", Builder.build
    file = timings_file(tmp_path / "t.json", source_hash="0" * 64)
    options = (model, "--gpu", "h200", "--batch", 16, "-o", out, "--tuned", file)

    def fails(self: Builder, source: Path, folder: Path, values: dict[str, str]) -> None:
        if source.name != "timer":
            raise FlashRNNError("the build fails")
        compiled(self, source, folder, values)

    monkeypatch.setattr(Builder, "build", fails)
    assert run(*options)[0] == 1
    assert not (out / tuned_file.FILE).exists()
    assert run(*options, "--autotune")[0] == 1
    (timed,) = tuned_file.load(out / tuned_file.FILE)
    assert timed.source_hash == tuning.source_hash(build.plugin_sources())
    monkeypatch.setattr(Builder, "build", compiled)
    assert run(*options)[0] == 0
    assert tuned_file.load(out / tuned_file.FILE) == [timed, *tuned_file.load(file)]


def test_what_a_program_says_is_kept_in_printable_text(fake: Callable[..., Path]) -> None:
    program = fake(row0="crash")
    program.write_text(program.read_text().replace("an illegal memory access", "\\x1b[2J" + "x" * 1000))
    (said,) = timed(program, job_of(count=1))
    assert said.startswith("ends the timing program: \\x1b[2Jxxx")
    assert len(said) == tuned_file.LONGEST_REASON


def test_a_batch_that_a_build_for_the_cpu_has_no_use_for_is_told(stubs: Path, tmp_path: Path) -> None:
    model, note = save(SPEC, tmp_path / "m.onnx"), "note: --batch has no effect on a build for the CPU alone"
    for options, told in ((["--gpu", "cpu"], False), (["--gpu", "cpu", "--batch", 4], True)):
        code, _, lines = run(model, *options, "-o", tmp_path / "out")
        assert (code, any(note in line for line in lines)) == (0, told)
    assert not any(note in line for line in run(model, "--gpu", "h200", "--batch", 4, "-o", tmp_path / "out")[2])


def test_the_table_has_the_batches_of_a_kernel_and_the_one_it_was_chosen_for(stubs: Path, tmp_path: Path) -> None:
    model = save(SPEC, tmp_path / "m.onnx")

    def batches(*given: int) -> list[tuple[str, str]]:
        options = [text for batch in given for text in ("--batch", batch)]
        code, text, _ = run(model, "--gpu", "h200", *options, "-o", tmp_path / "out")
        assert code == 0
        assert re.search(r"gpu +batches +chosen for +kernel", text)
        return re.findall(r"^.* h200 +(\S+) +(\S+) +\w+ +[\d.]+", text, re.MULTILINE)

    assert batches(1, 16) == [("1", "1"), ("2+", "16")]
    assert batches() == [("1", "1"), ("2-4", "4"), ("5-16", "16"), ("17+", "64")]
    assert batches(8) == [("1+", "8")]


# Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "h100"], "this machine has NVIDIA H200 (compute capability 9.0, 132 SMs), not H100 SXM5 80 GB"),
        (["--gpu", "cpu"], "--autotune needs one --gpu, this machine's, not cpu"),
        (["--gpu", "h200", "--gpu", "a100"], "--autotune needs one --gpu, this machine's, not h200, a100"),
        (["--gpu", "h200", "--toolchain", "x.cmake"], "--toolchain builds for another one"),
    ],
)
def test_a_gpu_that_is_not_this_machines_is_refused(
    stubs: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    code, _, lines = run(save(SPEC, tmp_path / "m.onnx"), *options, "-o", tmp_path / "out", "--autotune")
    assert (code, len(lines)) == (1, 1)
    assert message in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> GPU:
        raise FlashRNNError("libcuda.so.1 does not load")

    monkeypatch.setattr(gpus, "_load_driver", none)
    code, _, lines = run(save(SPEC, tmp_path / "m.onnx"), "--gpu", "h200", "-o", tmp_path / "out", "--autotune")
    assert (code, len(lines)) == (1, 1)
    assert "the driver finds none: build without it, or with --tuned FILE" in lines[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "product", "size", "same"),
    [
        ("h200", "NVIDIA H200", (90, 132), True),
        ("h100", "NVIDIA H100 80GB HBM3", (90, 132), True),
        ("h100", "NVIDIA H200", (90, 132), False),
        ("h200", "NVIDIA GH200 480GB", (90, 132), False),
        ("h100", "NVIDIA H100 PCIe", (90, 114), False),
        ("t4", "Tesla T4", (75, 40), True),
        ("t4", "NVIDIA T4G", (75, 40), False),
        ("rtx3090", "NVIDIA GeForce RTX 3090", (86, 82), True),
        ("l4", "NVIDIA L40S", (89, 142), False),
        ("l40s", "NVIDIA L40S", (89, 142), True),
        ("orin-agx", "Orin", (87, 16), True),
    ],
)
def test_names_of_products(name: str, product: str, size: tuple[int, int], same: bool) -> None:
    assert gpus.same_product(gpus.get(name), product, *size) is same


@pytest.mark.parametrize(
    "change",
    [
        {"product": 7},
        {"batch": "1"},
        {"batch": 2**31},
        {"driver": [1]},
        {"spec": {"head_dim": 1e308}},
        {"config": {"mode": "foo"}},
        {"timing": {"step_us": 10**400}},
    ],
)
def test_an_edited_file_is_one_line(stubs: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    file = timings_file(tmp_path / "t.json")
    facts = json.loads(file.read_text())
    [entry] = facts["entries"]
    parts = {"spec": entry["spec"], "timing": entry["timings"][0], "config": entry["timings"][0]["config"]}
    for key, value in change.items():
        if key in parts:
            parts[key].update(value)
        else:
            entry[key] = value
    file.write_text(json.dumps(facts))
    code, _, lines = run(save(SPEC, tmp_path / "m.onnx"), "--gpu", "h200", "-o", tmp_path / "out", "--tuned", file)
    assert code == 1
    assert f"error: {file} is damaged, or no file of build-plugins --autotune: " in lines[-1]
    assert not (tmp_path / "out").exists()
