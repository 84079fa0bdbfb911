"""The session that a machine with a GPU is given is right before it gets there: it dry-runs from end to end on the
emulator, what goes wrong in a step stays there, its checks can fail, and no figure of a dry run passes for a GPU's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import lossguard
import pytest
import torch

ROOT = Path(__file__).absolute().parent.parent
sys.path.append(str(ROOT))

from benchmarks import gpu_checks, gpu_device, gpu_report, gpu_session, gpu_timings, gpu_training  # noqa: E402
from benchmarks.gpu_cases import CASES  # noqa: E402
from benchmarks.gpu_device import Emulated, Gpu, Records  # noqa: E402
from benchmarks.gpu_session import Command, Output, Runner, Session, Skip, Step, Task  # noqa: E402

ON_GPU_ALONE = ("gb_per_s", "share_of_copy", "copy_gb_per_s")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def build_for_the_emulator() -> None:
    built = run("tests/cuda_emulator/build.py")
    assert built.returncode == 0, built.stdout


def keys(found: object) -> set[str]:
    if isinstance(found, dict):
        return {*found, *(key for value in found.values() for key in keys(value))}
    return {key for value in found for key in keys(value)} if isinstance(found, list) else set()


# ---- from end to end


def test_dry_run(tmp_path):
    """One case goes through every step; the result says what it is."""
    build_for_the_emulator()
    title = "CE, ImageNet, 5 x 1000, float32"
    where = ("--out", str(tmp_path), "--logs", str(tmp_path / "l"))
    # Half a minute on two idle cores; a busy machine is no reason to fail.
    done = run("benchmarks/gpu_session.py", "--dry-run", "--only", title, "--budget", "1500", *where)
    assert done.returncode == 0, done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"dry_run.json", "dry_run.md", "l"}
    found = json.loads((tmp_path / "dry_run.json").read_text())
    steps = {step["name"]: step for step in found["steps"]}

    assert [*steps] == [step.name for step in gpu_session.STEPS]
    not_run = {"memcheck", "racecheck"}
    assert {name for name, step in steps.items() if step["status"] != "ok"} == not_run
    assert all("needs a GPU" in steps[name]["why"] for name in not_run)

    (check, unaligned, end) = steps["bad labels"]["records"]
    assert (check["check"], unaligned["check"]) == (title, f"{title}, not aligned") and end["alive"]
    assert check["kernels"] == ["ce_backward_rows", "ce_forward_in_registers"]
    assert 0 < steps["tests"]["outcomes"]["passed"] <= gpu_session.DRY_RUN_TESTS
    (torture,) = steps["torture"]["records"]
    assert torture["bad_batches"] == gpu_session.DRY_RUN_BATCHES and torture["alive"] and torture["memory_flat"]
    assert len(torture["losses"]) == 4

    *checks, end = steps["training"]["records"]
    assert [check["check"] for check in checks] == [*gpu_training.CHECKS] and end["alive"]
    assert not any(check["error"] for check in checks)
    assert [check["check"] for check in checks if check["outcome"] != "holds"] == ["a graph with its optimizer"]

    rows = [record for record in steps["timings"]["records"] if "results" in record]
    assert [row["which"] for row in rows] == ["forward", "forward+backward"]
    for row in rows:
        assert [*row["results"]] == ["native", "compiled", "lossguard", "immediately"]
        assert all(result["ms"] > 0 for result in row["results"].values())
    assert {record["peer"] for record in steps["timings"]["records"] if "peer" in record} == {*gpu_timings.PEERS}

    text = (tmp_path / "dry_run.md").read_text()
    assert found["dry_run"] and found["machine"]["gpu"] is None and found["machine"]["driver"] is None
    assert not keys(found) & {*ON_GPU_ALONE} and {row["clock"] for row in rows} == {Emulated.clock}
    assert text.startswith("# DRY RUN") and "GB/s" not in text and "of the emulator" in text
    assert text in done.stdout


def test_the_cases_reach_every_kernel(tmp_path):
    build_for_the_emulator()
    found = tmp_path / "records.jsonl"
    options = ("bad-labels", "--dry-run", "--quick", "--only", "float32", "--records", str(found))
    done = run("-m", "benchmarks.gpu_checks", *options, PYTHONPATH=str(ROOT / "build/emulated"))
    assert done.returncode == 0, done.stdout
    reached = {kernel for line in found.read_text().splitlines() for kernel in json.loads(line).get("kernels", [])}
    sources = "".join(path.read_text() for path in (ROOT / "csrc/cuda").glob("*"))
    kernels = re.findall(r"__global__ void .*?(\w+)\(const ", sources, re.DOTALL)  # behind the launch bounds
    assert len(kernels) == sources.count("__global__ ")
    assert len(kernels) > 10
    assert reached == {*kernels}


def test_without_a_gpu_nothing_is_run_and_nothing_overwritten(tmp_path):
    done = run("-m", "benchmarks.gpu_session", "--out", str(tmp_path), "--logs", str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "machine: failed" in done.stdout and "--dry-run" in done.stdout
    assert done.stdout.count("it needs the step 'machine'") >= len(gpu_session.STEPS) - 1
    assert not [*tmp_path.glob("gpu.*")]


# ---- steps


def step(name: str, code: str, **options) -> Step:
    options = {"seconds": 20, "least": 1, "needs": (), **options}
    return Step(name=name, command=lambda task: Command([sys.executable, "-c", code, str(task.records)]), **options)


def outcome(folder: Path, *steps: Step, budget: float = 60) -> dict[str, dict]:
    runner = Runner(Session(dry_run=False, budget=budget, work=folder), steps, (), lambda: None)
    runner.run(steps)
    return runner.results


WRITES = "import sys; open(sys.argv[1], 'a').write('{\"found\": 1}\\n');"


@pytest.mark.parametrize(
    "code, status, why",
    [
        ("print('fine')", "ok", ""),
        ("raise ValueError('oh no')", "failed", "exit status 1: ValueError: oh no"),
        ("import os; os.abort()", "failed", "exit status -6"),
        ("import time; time.sleep(60)", "timed out", "stopped after 1 s"),
        # What it started keeps the pipe open, and is to go too.
        (
            "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)",
            "timed out",
            "stopped after 1 s",
        ),
        ("open(sys.argv[1], 'a').write('{\"error\": \"wrong\"}')", "failed", "wrong"),
        ("open(sys.argv[1], 'a').write('{\"cut o')", "ok", ""),
    ],
)
def test_what_a_step_found_is_kept_however_it_ends(tmp_path, code, status, why):
    limit = 1 if status == "timed out" else 20
    began = time.perf_counter()
    result = outcome(tmp_path, step("it", WRITES + code, seconds=limit, least=0.1))["it"]
    assert (result["status"], result["records"][0]) == (status, {"found": 1})
    assert result["why"].startswith(why)
    assert time.perf_counter() - began < 15


def test_a_failure_costs_only_what_needs_the_step(tmp_path):
    bad, fine, needy = step("bad", "1 / 0"), step("fine", ""), step("needy", "", needs=("bad",))
    runner = Runner(Session(dry_run=False, work=tmp_path), (bad, fine, needy), (), lambda: None)
    for together in ((bad, fine), (needy,)):
        runner.run(together)
    assert [result["status"] for result in runner.results.values()] == ["failed", "ok", "skipped"]
    assert runner.results["needy"]["why"] == "it needs the step 'bad'"


def test_a_command_that_is_not_there_fails_its_step(tmp_path):
    nothing = Step("nothing", 20, 1, lambda task: Command(["no-such-program"]), needs=())
    assert outcome(tmp_path, nothing)["nothing"]["why"].startswith("FileNotFoundError")


def test_what_does_not_fit_the_budget_is_skipped_and_said(tmp_path):
    short, long = step("short", "", least=1), step("long", "", least=30)
    found = outcome(tmp_path, short, long, budget=10)
    assert found["short"]["status"] == "ok"
    assert found["long"]["status"] == "skipped" and "the budget" in found["long"]["why"]


def test_the_plan_leaves_time_for_the_timings():
    before = sum(max(step.seconds for step in together) for together in gpu_session.PLAN[:-1])
    assert before == 350 and gpu_session.BUDGET - before >= 200  # as it says beside the plan
    assert [step.name for step in gpu_session.PLAN[-1]] == ["timings"]


# ---- commands


@pytest.fixture
def on_gpu(tmp_path) -> Task:
    return Task(Session(dry_run=False, work=tmp_path), 100, tmp_path / "records.jsonl")


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare_machine(tmp_path, monkeypatch) -> Path:
    """No CUDA toolkit anywhere; the folder may get one."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(gpu_session, "USUAL", tmp_path / "local")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path


def test_the_build_finds_nvcc_where_it_may_be(bare_machine, on_gpu, monkeypatch):
    monkeypatch.setattr(gpu_session, "ROOT", bare_machine)
    with pytest.raises(FileNotFoundError, match="no nvcc"):
        gpu_session.build(on_gpu)
    for place in ("site/nvidia/cu13", "local/cuda-12.9", "local/cuda-13.1", "local/cuda"):
        program(bare_machine / place / "bin/nvcc")
        command = gpu_session.build(on_gpu)
        assert command.environment["CUDA_HOME"] == str(bare_machine / place)
        assert command.environment["LOSSGUARD_CUDA"] == "1"
    program(bare_machine / "bin/nvcc")
    assert "CUDA_HOME" not in gpu_session.build(on_gpu).environment


def test_without_nvcc_an_extension_that_is_there_will_do(bare_machine, on_gpu, monkeypatch):
    monkeypatch.setattr(gpu_session, "ROOT", bare_machine)
    program(bare_machine / "python/lossguard" / Path(lossguard._C.__file__).name)
    with pytest.raises(Skip, match="was built before"):
        gpu_session.build(on_gpu)


def test_compute_sanitizer(bare_machine, on_gpu):
    command = gpu_session.sanitize("racecheck")
    with pytest.raises(Skip, match="not installed"):
        command(on_gpu)
    program(bare_machine / "local/cuda/bin/nvcc")
    path = program(bare_machine / "local/cuda/bin/compute-sanitizer")
    found = command(on_gpu)
    assert found.arguments[:3] == [str(path), "--tool", "racecheck"]
    assert [sys.executable, "-m", "benchmarks.gpu_checks", "bad-labels"] == found.arguments[-7:-3]
    assert found.environment == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

    said = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
    assert gpu_session.summary_of_sanitizer(Output(0, ["...", said], []))["summary"].startswith("RACECHECK SUMMARY: 0")
    assert "error" in gpu_session.summary_of_sanitizer(Output(0, ["it never started"], []))


def test_outcomes_of_the_test_suite():
    lines = [
        "tests/t.py::test_a[1] ",
        "[gw0] [  1%] PASSED tests/t.py::test_a[1]",
        "tests/t.py::test_b FAILED   [ 2%]",
        "tests/t.py::test_c SKIPPED (no GPU)  [ 3%]",
        "E   assert 1 == 2",
    ]
    found = gpu_session.summary_of_tests(Output(1, lines, []))
    assert found["summary"] == "1 failed, 1 passed, 1 skipped" and found["failures"] == [lines[2]]
    assert "error" in gpu_session.summary_of_tests(Output(0, lines[3:4], []))


# ---- checks that can fail: on the CPU half, which takes the emulator's place


class Lossguard:
    """The package, with one function of its own."""

    LossValidationError, check, _C = lossguard.LossValidationError, staticmethod(lossguard.check), lossguard._C

    def __init__(self, name: str, function) -> None:
        self.functional = SimpleNamespace(**{**vars(lossguard.functional), name: function})


@pytest.fixture
def device(monkeypatch) -> Emulated:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    return Emulated()


def case(name: str):
    (found,) = (case for case in CASES if case.name == name)
    return found.tiny()


@pytest.mark.parametrize(
    "name", ["CE, MNIST", "BCE, 8M", "BCE-with-logits, COCO", "NLL, Cityscapes", "CE, soft labels"]
)
def test_checks_hold_for_the_package(device, name):
    for dtype in case(name).dtypes:
        gpu_checks.check_case(lossguard, device, case(name), dtype, offset=1)


def test_checks_catch_a_wrong_value(device):
    def too_large(*tensors, **options):
        return lossguard.functional.cross_entropy(*tensors, **options) * 1.001

    with pytest.raises(gpu_checks.Wrong, match="loss differs from native by 1.0e-03"):
        gpu_checks.check_case(Lossguard("cross_entropy", too_large), device, case("CE, MNIST"), torch.float32, offset=0)


def test_checks_catch_a_bad_target_that_passes(device):
    silent = torch.nn.functional.binary_cross_entropy_with_logits
    fake = Lossguard("binary_cross_entropy_with_logits", silent)
    with pytest.raises(gpu_checks.Wrong, match="nothing was raised"):
        gpu_checks.check_case(fake, device, case("BCE-with-logits, 8M"), torch.float32, offset=0)


def test_checks_catch_a_wrong_report(device):
    def names_another(input, target, **options):
        return lossguard.functional.cross_entropy(input, target.roll(1), **options)

    fake = Lossguard("cross_entropy", names_another)
    batch = case("CE, MNIST").batch(torch.float32, "cpu")
    batch.target[7] = 10
    gpu_checks.expect_report(lossguard, batch, "target", [7], [10])
    with pytest.raises(gpu_checks.Wrong, match=r"\[\(8,\)\]"):
        gpu_checks.expect_report(fake, batch, "target", [7], [10])


@pytest.mark.parametrize("leak", (0, 4096))
def test_torture_sees_memory_that_grows(device, monkeypatch, tmp_path, leak):
    kept = []
    monkeypatch.setattr(device, "memory", lambda: {"allocated": leak * len(kept), "host": 0})

    def leaking(*tensors, **options):
        kept.append(1)
        return lossguard.functional.cross_entropy(*tensors, **options)

    flat = gpu_checks.torture(Lossguard("cross_entropy", leaking), device, 60, Records(tmp_path / "records"))
    assert flat == (leak == 0)
    assert kept


# ---- timings


def test_bytes_models():
    """By hand: rows of C logits and a label of 8 bytes; saved is one float32 a row; NLL reads a sector a row."""
    rows, classes = 5, 1000
    logits, labels, saved = rows * classes * 4, rows * 8, rows * 4
    of = {name: case(name).batch(torch.float32, "cpu").useful_bytes for name in ("CE, ImageNet", "NLL, ImageNet")}
    assert of["CE, ImageNet"]("forward") == logits + labels
    assert of["CE, ImageNet"]("forward+backward") == 3 * logits + 2 * labels + 2 * saved
    assert of["NLL, ImageNet"]("forward") == 32 * rows + labels
    assert of["NLL, ImageNet"]("forward+backward") == logits + 32 * rows + 2 * labels
    bce = case("BCE, 8M").batch(torch.bfloat16, "cpu").useful_bytes
    assert (bce("forward"), bce("forward+backward")) == (2 * 2 * 5001, 5 * 2 * 5001)
    for each in CASES:  # every term has a size
        batch = each.tiny().batch(each.dtypes[0], "cpu")
        assert 0 < batch.useful_bytes("forward") < batch.useful_bytes("forward+backward")


def test_a_contender_that_is_wrong_or_fails_gets_no_time(device, tmp_path):
    def refuses(input, target):
        raise NotImplementedError("no such size")

    timer = gpu_timings.Timer(lossguard, device, Records(tmp_path / "records"))
    timer.peers = {"wrong": lambda input, target: input.sum() * 0 + 1, "refuses": refuses}
    batch = case("CE, MNIST").batch(torch.float32, "cpu")
    found = timer.time_pass(batch, "forward+backward", gpu_timings.reference_loss(batch))
    timed = {name for name, result in found.items() if "ms" in result}
    assert timed == {"native", "compiled", "lossguard", "immediately"}
    assert found["wrong"]["error"].startswith("ValueError: its loss is 1 where float32 gives")
    assert found["refuses"]["error"] == "NotImplementedError: no such size"


def test_timings_stop_in_time_and_go_on_in_a_new_process(device, monkeypatch, tmp_path):
    timer = gpu_timings.Timer(lossguard, device, Records(tmp_path / "records"))
    timed = []
    monkeypatch.setattr(timer, "time_case", lambda case, dtype: timed.append(case.name) or time.sleep(0.05))
    assert timer.run("", first=0, seconds=0.12) is None
    assert len(timed) == 2
    records = [json.loads(line) for line in (tmp_path / "records").read_text().splitlines()]
    every = len(gpu_timings.selected(device, ""))
    assert sum("skipped" in record for record in records) == every - 2

    monkeypatch.setattr(device, "alive", lambda: False)
    assert timer.run("", first=3, seconds=60) == 4


class Event:
    """A CUDA event that notes its order, and that a millisecond lies between two operations."""

    log: list[str] = []

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.log.append("event")
        self.at = len(Event.log)

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def test_the_l2_is_emptied_before_each_run_on_a_gpu(monkeypatch):
    Event.log = log = []
    gpu = Gpu.__new__(Gpu)
    gpu._flush = SimpleNamespace(zero_=lambda: log.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    runs = {name: lambda name=name: log.append(name) for name in ("a", "b")}
    assert gpu.time_in_turn(runs, calls=1) == {"a": 2, "b": 2}
    assert log == ["flush", "event", "a", "event", "flush", "event", "b", "event", "synchronize"]
    del log[:]
    assert gpu.time_in_turn(runs, calls=10) == {"a": 1.1, "b": 1.1}
    assert "flush" not in log


@pytest.mark.parametrize("with_copy", (True, False))
def test_report(with_copy):
    """Of a GPU's results: made-up ones."""
    result = {"ms": 2.0, **({"gb_per_s": 1500.4, "share_of_copy": 0.751} if with_copy else {})}
    row = {
        "title": "CE, ImageNet", "loss": "cross_entropy", "which": "forward", "useful_bytes": 65_667_072,
        "bytes_model": "input + target",
        "results": {
            "native": {"ms": 5.0}, "compiled": {"error": "Boom: a\nb"}, "lossguard": result, "immediately": result,
        },
    }  # fmt: skip
    records = [row, {"peer": "quack", "absent": "not there"}, {"title": "CE, BERT", "skipped": "no time left"}]
    records += [{"copy_gb_per_s": 1998.0}] if with_copy else []
    text = gpu_report.as_markdown(
        {
            "dry_run": False, "date": "today", "commit": "abc", "seconds": 1.0,
            "machine": {"gpu": "NVIDIA X", "driver": "580"},
            "steps": [{"name": "timings", "status": "ok", "seconds": 1.0, "why": "a | b", "records": records}],
        }
    )  # fmt: skip
    assert text.startswith("# lossguard on NVIDIA X\n") and "driver 580" in text and r"a \| b" in text
    cells = "| CE, ImageNet | fwd | 65.7 | 5.000 | failed | 2.000 | 2.000 |"
    assert cells + (" 2.50x |  | 1500 | 75% | 1500 | 75% |" if with_copy else "\n") in text
    assert ("GB/s" in text) == with_copy
    for said in ("- quack: not there", "- CE, BERT", "- CE, ImageNet, fwd, compiled: Boom: a\n", ": input + target"):
        assert said in text


# ---- the kernels must be there


def test_a_package_without_the_kernels_is_refused(device):
    """This one, of the CPU half, is not the emulator's; nor could it be a GPU's if it had no CUDA half."""
    assert not device.has_kernels(lossguard._C.build_info())
    with pytest.raises(SystemExit, match="no kernels for this"):
        gpu_device.import_lossguard(device)
    assert not Gpu.__new__(Gpu).has_kernels({"cuda": False})


def test_a_call_that_native_torch_would_take_is_an_error(device, monkeypatch):
    """Or else native torch would be timed in lossguard's place."""
    monkeypatch.setattr(device, "has_kernels", lambda build_info: True)
    x, y = torch.rand(2, 5)
    with warnings.catch_warnings():
        gpu_device.import_lossguard(device)
        with pytest.raises(lossguard.NotValidatedWarning):
            torch.func.jvp(lambda x: lossguard.functional.binary_cross_entropy(x, y), (x,), (y,))
