"""Builds, checks and times lossguard on a machine with a GPU, within ten minutes; prints what it found as a table.

    python -m benchmarks.gpu_session               # writes benchmarks/results/gpu.json and gpu.md
    python -m benchmarks.gpu_session --dry-run     # every step, without a GPU: on tests/cuda_emulator

Every step is a process of its own, with a limit of its own: one that fails, hangs or loses its CUDA context costs the
others nothing, and what it had found by then is kept. A dry run uses CPU tensors of tiny sizes and the host's clock;
it writes build/gpu_session/dry_run.json and .md, and nothing it measures says anything about a GPU.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parent.parent
sys.path.insert(0, str(ROOT))  # where this is run as a file

from benchmarks.gpu_report import as_markdown  # noqa: E402

WORK = ROOT / "build" / "gpu_session"  # logs, and torch.compile's cache
USUAL = Path("/usr/local")  # the folder of CUDA toolkits
TESTS = "tests/test_cuda_kernels.py"
BUDGET = 570.0  # seconds
DRY_RUN_TESTS = 12
DRY_RUN_BATCHES = 100  # of the torture
DRY_RUN_PATIENCE = 5  # the limits of steps are for a machine with a GPU and the cores that go with it
FAILURES = ("failed", "timed out")

_printing = threading.Lock()


def say(line: str) -> None:
    with _printing:
        print(line, flush=True)


class Skip(Exception):
    """Why a step has nothing to do here."""


@dataclass
class Session:
    dry_run: bool
    only: str = ""
    budget: float = BUDGET
    work: Path = WORK
    began: float = field(default_factory=time.perf_counter)

    def left(self) -> float:
        return self.budget - (time.perf_counter() - self.began)

    def environment(self) -> dict[str, str]:
        package = ROOT / ("build/emulated" if self.dry_run else "python")
        path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.work / "inductor"),
            "TORCHINDUCTOR_COMPILE_THREADS": "4",  # in each process
            **({"OMP_NUM_THREADS": "1"} if self.dry_run else {}),
        }


@dataclass(frozen=True)
class Task:
    """A step as it is about to run."""

    session: Session
    seconds: float  # that it has
    records: Path  # for what it finds

    @property
    def dry_run(self) -> bool:
        return self.session.dry_run

    def module(self, name: str, *arguments: str) -> list[str]:
        """The command that runs a module of this package."""
        options = ["--records", str(self.records)]
        options += ["--dry-run"] if self.dry_run else []
        options += ["--only", self.session.only] if self.session.only else []
        return [sys.executable, "-m", f"benchmarks.{name}", *arguments, *options]


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)  # on top of the session's


@dataclass(frozen=True)
class Output:
    status: int
    lines: list[str]
    records: list[dict[str, Any]]


@dataclass(frozen=True)
class Step:
    name: str
    seconds: float  # at most
    least: float  # not worth starting with less
    command: Callable[[Task], Command]  # may raise Skip
    summary: Callable[[Output], dict[str, Any]] = lambda output: {}  # may hold an "error"
    shown: Callable[[list[str]], str | None] = lambda lines: lines[-1]  # of the output so far, for who watches
    needs: tuple[str, ...] = ("machine", "build")


# ---- the build


def toolkit() -> Path | None:
    """The CUDA toolkit: where setup.py looks, then other versions and what pip installed."""
    on_path = shutil.which("nvcc")
    places = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), on_path and Path(on_path).parent.parent]
    homes = [Path(place) for place in places if place]
    homes += [USUAL / "cuda", *sorted(USUAL.glob("cuda-*"), reverse=True)]
    homes += [nvcc.parent.parent for folder in sys.path for nvcc in Path(folder).glob("nvidia/*/bin/nvcc")]
    return next((home for home in homes if (home / "bin/nvcc").exists()), None)


def build(task: Task) -> Command:
    """For the GPU that is here; setup.py asks for its architecture."""
    if task.dry_run:
        return Command([sys.executable, "tests/cuda_emulator/build.py"])
    home = toolkit()
    if home is None:
        built = ROOT / f"python/lossguard/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        if built.exists():
            raise Skip(f"there is no nvcc; going on with {built.name}, which was built before")
        raise FileNotFoundError("no nvcc in CUDA_HOME, PATH, /usr/local or pip's packages")
    choice = {"LOSSGUARD_CUDA": "1", "TORCH_CUDA_ARCH_LIST": ""}
    if shutil.which("nvcc") is None:  # or else setup.py asks nvcc itself where it belongs
        choice["CUDA_HOME"] = str(home)
    return Command([sys.executable, "setup.py", "build_ext", "--inplace"], choice)


# ---- the test suite


def tests(task: Task) -> Command:
    if not (ROOT / TESTS).exists():
        raise FileNotFoundError(TESTS)
    if not importlib.util.find_spec("pytest"):
        raise Skip("pytest is not installed; the steps 'bad labels' and 'torture' do without")
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-v", "-rN", "--tb=short"]
    if task.dry_run:
        return Command([*pytest, "-p", "benchmarks.gpu_session", TESTS])
    workers = min(8, (os.cpu_count() or 2) // 2)  # each has a CUDA context
    return Command([*pytest, *(["-n", str(workers)] if importlib.util.find_spec("xdist") else []), TESTS])


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """This module as a plugin of pytest, in a dry run: a few tests, spread over the suite."""
    items[:] = items[:: -(-len(items) // DRY_RUN_TESTS)]


def outcomes(lines: Sequence[str]) -> collections.Counter[str]:
    said = (re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", line) for line in lines if "::" in line)
    return collections.Counter(match[1].lower() for match in said if match)


def tests_so_far(lines: list[str]) -> str | None:
    if "::" not in lines[-1]:
        return lines[-1] if lines[-1].startswith("E  ") else None
    counts = outcomes(lines)
    return said_of_tests(counts) if counts.total() and counts.total() % 100 == 0 else None


def said_of_tests(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))


def summary_of_tests(output: Output) -> dict[str, Any]:
    counts = outcomes(output.lines)
    failures = [line for line in output.lines if "::" in line and re.search(r"\b(FAILED|ERROR)\b", line)]
    found = {"summary": said_of_tests(counts) or "no tests", "outcomes": dict(counts), "failures": failures}
    return found if counts["passed"] else {**found, "error": "no test passed"}


# ---- compute-sanitizer


def sanitizer() -> str | None:
    home = toolkit()
    places = [os.environ.get("PATH", ""), *(f"{home}/{folder}" for folder in ("bin", "compute-sanitizer") if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def sanitize(tool: str) -> Callable[[Task], Command]:
    def command(task: Task) -> Command:
        if task.dry_run:
            raise Skip("compute-sanitizer needs a GPU; what it would watch is the step 'bad labels'")
        program = sanitizer()
        if program is None:
            raise Skip("compute-sanitizer is not installed")
        options = ["--error-exitcode", "99", "--report-api-errors", "no", "--target-processes", "all"]
        suite = task.module("gpu_checks", "bad-labels", "--quick")
        # Without torch's pool every tensor is an allocation, and what lies behind its last byte is out of bounds.
        return Command([program, "--tool", tool, *options, *suite], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})

    return command


def summary_of_sanitizer(output: Output) -> dict[str, Any]:
    said = [line for line in output.lines if " SUMMARY: " in line]
    if not said:
        return {"error": "it did not come to its summary"}
    return {"summary": said[-1].strip("= ")}


# ---- the other steps: modules of this package


def summary_of_checks(output: Output) -> dict[str, Any]:
    checks = [record for record in output.records if "check" in record]
    failed = [record["check"] for record in checks if record["error"]]
    return {"summary": f"{len(checks) - len(failed)} of {len(checks)} checks passed"}


def summary_of_torture(output: Output) -> dict[str, Any]:
    found = next((record for record in output.records if "bad_batches" in record), None)
    if found is None:
        return {}
    growth = ", ".join(f"{name} {bytes_:+,}" for name, bytes_ in found["memory_growth"].items())
    return {"summary": f"{found['bad_batches']} bad batches, bytes of memory more than before: {growth}"}


def summary_of_timings(output: Output) -> dict[str, Any]:
    rows = sum("results" in record for record in output.records)
    skipped = sum("skipped" in record for record in output.records)
    return {"summary": f"{rows} passes timed" + (f", no time left for {skipped} cases" if skipped else "")}


def module(name: str, *arguments: str) -> Callable[[Task], Command]:
    return lambda task: Command(task.module(name, *arguments))


def torture(task: Task) -> Command:
    batches = ["--batches", str(DRY_RUN_BATCHES)] if task.dry_run else []
    return Command(task.module("gpu_checks", "torture", *batches))


def timings(task: Task) -> Command:
    return Command(task.module("gpu_timings", "--seconds", f"{max(1, task.seconds - 15):.0f}"))


# Those in one line run at the same time. All but the last, which takes what is left, can take 350 s together.
PLAN = (
    (Step("machine", 30, 5, module("gpu_device"), needs=()),),
    (
        Step("build", 170, 5, build, needs=("machine",)),
        # The compilers of C++ and of torch.compile share the cores; the GPU has nothing else to do.
        Step("compile native", 170, 5, module("gpu_timings", "--compile-only"), needs=("machine",)),
    ),
    (
        Step("bad labels", 40, 5, module("gpu_checks", "bad-labels"), summary_of_checks),
        Step("training", 90, 10, module("gpu_training"), summary_of_checks),
        Step("tests", 100, 10, tests, summary_of_tests, tests_so_far),
        Step("memcheck", 100, 20, sanitize("memcheck"), summary_of_sanitizer),
        Step("racecheck", 100, 20, sanitize("racecheck"), summary_of_sanitizer),
    ),
    # Alone: the one looks at the memory of the whole device, the other at the clock.
    (Step("torture", 50, 10, torture, summary_of_torture),),
    (Step("timings", 600, 20, timings, summary_of_timings),),
)
STEPS = [step for together in PLAN for step in together]


# ---- running a step


class Runner:
    """Runs steps and keeps what came of each."""

    def __init__(
        self, session: Session, steps: Sequence[Step], wanted: Sequence[str], changed: Callable[[], None]
    ) -> None:
        self.session = session
        self.results: dict[str, dict[str, Any]] = {
            step.name: {"name": step.name, "status": "skipped", "why": "not reached", "seconds": 0.0, "records": []}
            for step in steps
        }
        self._wanted = wanted
        self._changed = changed
        self._processes: set[subprocess.Popen[str]] = set()

    def run(self, together: Sequence[Step]) -> None:
        with concurrent.futures.ThreadPoolExecutor(len(together)) as pool:
            try:
                list(pool.map(self._run_one, together))
            except BaseException:  # the pool waits for its threads, and these for their processes
                self.stop()
                raise

    def stop(self) -> None:
        for process in list(self._processes):
            _kill(process)

    def _run_one(self, step: Step) -> None:
        began = time.perf_counter()
        result = self.results[step.name]
        try:
            result.update({"why": "", **self._outcome(step)})
        except Skip as skip:
            result.update(status="skipped", why=str(skip))
        except Exception as failure:
            result.update(status="failed", why=f"{type(failure).__name__}: {failure}")
        result["seconds"] = round(time.perf_counter() - began, 1)
        said = result.get("summary") or result["why"]
        say(f"{step.name}: {result['status']} in {result['seconds']:.1f} s{': ' if said else ''}{said}")
        self._changed()

    def _outcome(self, step: Step) -> dict[str, Any]:
        if self._wanted and step.name not in self._wanted:
            raise Skip("not asked for")
        if lacking := [name for name in step.needs if self.results[name]["status"] in FAILURES]:
            raise Skip(f"it needs the step '{lacking[0]}'")
        limit = min(step.seconds * (DRY_RUN_PATIENCE if self.session.dry_run else 1), self.session.left() - 2)
        if limit < step.least:
            raise Skip(f"{max(limit, 0):.0f} s of the budget are left, and it needs {step.least:.0f}")
        say(f"{step.name}: started, has {limit:.0f} s")
        task = Task(self.session, limit, self.session.work / f"{step.name.replace(' ', '_')}.jsonl")
        output, timed_out = self._execute(step, task)
        found = {"records": output.records, **step.summary(output)}
        errors = [record["error"] for record in output.records if record.get("error")]
        if timed_out:
            return {**found, "status": "timed out", "why": f"stopped after {limit:.0f} s", "tail": output.lines[-20:]}
        if output.status or errors or found.get("error"):
            last = next((line for line in reversed(output.lines) if line.strip()), "")
            why = found.get("error") or (errors or [f"exit status {output.status}: {last}"])[0]
            return {**found, "status": "failed", "why": why, "tail": output.lines[-40:]}
        return {**found, "status": "ok"}

    def _execute(self, step: Step, task: Task) -> tuple[Output, bool]:
        """What it said, and whether it was stopped for being late."""
        command = step.command(task)
        task.records.unlink(missing_ok=True)
        process = subprocess.Popen(
            command.arguments, cwd=ROOT, env={**self.session.environment(), **command.environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        self._processes.add(process)
        late = threading.Event()
        timer = threading.Timer(task.seconds, lambda: (late.set(), _kill(process)))
        timer.start()
        lines: list[str] = []
        try:
            assert process.stdout
            with open(task.records.with_suffix(".log"), "w") as file:
                for line in process.stdout:
                    file.write(line)
                    lines.append(line.rstrip("\n"))
                    if lines[-1] and (said := step.shown(lines)):
                        say(f"  {step.name} | {said}")
            status = process.wait()
        finally:
            timer.cancel()
            _kill(process)
            self._processes.discard(process)
        return Output(status, lines, _read_records(task.records)), late.is_set()


def _read_records(file: Path) -> list[dict[str, Any]]:
    found = []
    if file.exists():
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last, if it was stopped while writing
                found.append(json.loads(line))
    return found


def _kill(process: subprocess.Popen[str]) -> None:
    """It and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


# ---- results


def facts(session: Session, runner: Runner) -> dict[str, Any]:
    machine = runner.results["machine"]["records"]
    return {
        "dry_run": session.dry_run,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": _commit(),
        "budget_seconds": session.budget,
        "seconds": round(session.budget - session.left(), 1),
        "machine": machine[0] if machine else {},
        "steps": list(runner.results.values()),
    }


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=20
        ).stdout.strip()
    return None


def write(found: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "dry_run" if found["dry_run"] else "gpu"
    for suffix, text in (("json", json.dumps(found, indent=1)), ("md", as_markdown(found))):
        part = folder / f"{name}.{suffix}.part"
        part.write_text(text)
        part.replace(folder / f"{name}.{suffix}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_session", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="every step, without a GPU")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="S", help="in seconds (default %(default)s)")
    parser.add_argument("--steps", default="", metavar="A,B", help=f"only these of {', '.join(s.name for s in STEPS)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose title contains TEXT")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: benchmarks/results; build/gpu_session for a part, or dry"
    )
    parser.add_argument("--logs", type=Path, default=WORK, metavar="DIR", help="default: build/gpu_session")
    arguments = parser.parse_args()
    wanted = [name.strip() for name in arguments.steps.split(",") if name.strip()]
    if unknown := set(wanted) - {step.name for step in STEPS}:
        parser.error(f"no such step: {', '.join(sorted(unknown))}")
    whole = not (arguments.dry_run or wanted or arguments.only)
    folder = arguments.out or (ROOT / "benchmarks" / "results" if whole else WORK)
    session = Session(arguments.dry_run, arguments.only, arguments.budget, arguments.logs.absolute())
    session.work.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()

    def save() -> dict[str, Any]:
        with lock:
            found = facts(session, runner)
            if runner.results["machine"]["records"]:  # or else it would replace the results of a machine with a GPU
                write(found, folder)
            return found

    runner = Runner(session, STEPS, wanted, save)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for together in PLAN:
            runner.run(together)
    finally:
        runner.stop()
        found = save()
    print("\n" + as_markdown(found))
    return int(any(result["status"] in FAILURES for result in runner.results.values()))


if __name__ == "__main__":
    sys.exit(main())
