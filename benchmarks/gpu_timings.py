"""Times lossguard on a GPU against native torch, torch.compile of it, and the peers that are installed.

    python -m benchmarks.gpu_timings [--only TEXT]

First the copy bandwidth, then every case of gpu_cases.py: each contender in turn, many rounds, in one process; a
time is the median of CUDA events, with the L2 emptied before each run. GB/s counts the useful bytes of gpu_cases.py
for every contender alike, whatever it moves. "immediately" is lossguard with that `when`: each forward waits for its
kernel's verdict, where the default goes on.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as native
from torch import Tensor

from .gpu_cases import CASES, PASSES, Batch, Case
from .gpu_device import Device, Records, import_lossguard, step_arguments, the_device

COPY_BYTES = 1 << 30
WARM_UP, FEWEST, MOST = 3, 10, 60  # rounds
SECONDS_A_ROW = 0.6
SAME_LOSS = 0.02  # relative: native bfloat16 means are off by 1 %
COMPILING_PROCESSES = 4
OURS = ("lossguard", "immediately")

Loss = Callable[[Tensor, Tensor], Tensor]


# ---- who is timed


@dataclass(frozen=True)
class Contender:
    name: str
    loss: Loss
    own_input: bool = False  # writes the gradient over it


def liger() -> Loss:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


def quack() -> Loss:
    from quack.cross_entropy import cross_entropy

    return lambda input, target: cross_entropy(input, target, reduction="mean")


def flash_attn() -> Loss:
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    return lambda input, target: cross_entropy_loss(input, target)[0].mean()


PEERS = {"Liger": liger, "quack": quack, "flash-attn": flash_attn}


def installed_peers(device: Device, records: Records) -> dict[str, Loss]:
    """Only for cross-entropy of rows and labels, the one loss that all of them have."""
    found = {}
    for name, load in PEERS.items():
        try:
            if device.name != "cuda":
                raise ImportError("needs a GPU")
            found[name], absent = load(), None
        except Exception as failure:  # one built for another CUDA may raise anything
            absent = f"{type(failure).__name__}: {failure}"
        records.add(f"{name}: absent, {absent}" if absent else f"{name}: installed", peer=name, absent=absent)
    return found


def compiled_native(device: Device, batch: Batch) -> Loss:
    torch._dynamo.reset()
    loss, options = getattr(native, batch.case.loss), batch.options()

    def native_loss(input: Tensor, target: Tensor) -> Tensor:
        return loss(input, target, **options)

    return torch.compile(native_loss, dynamic=False, fullgraph=True, backend=device.compiler)


def contenders(lossguard: Any, device: Device, batch: Batch, peers: dict[str, Loss]) -> Iterator[Contender]:
    case, options = batch.case, batch.options()
    theirs, ours = getattr(native, case.loss), getattr(lossguard.functional, case.loss)
    yield Contender("native", lambda input, target: theirs(input, target, **options))
    yield Contender("compiled", compiled_native(device, batch))
    yield Contender("lossguard", lambda input, target: ours(input, target, **options))
    yield Contender("immediately", lambda input, target: ours(input, target, when="immediately", **options))
    if case.loss == "cross_entropy" and case.target == "labels" and len(case.shape) == 2:
        if not case.options and not case.autocast:
            for name, loss in peers.items():
                yield Contender(name, loss, own_input=name == "Liger")


# ---- timing


def runner(contender: Contender, batch: Batch, which: str) -> Callable[[], Tensor]:
    """Runs a pass once; returns the loss."""
    input = batch.input.clone() if contender.own_input else batch.input.detach()
    target, loss_of, device = batch.target, contender.loss, batch.input.device.type
    leaf = input.requires_grad_() if which != "forward" else input

    def run() -> Tensor:
        with torch.autocast(device, torch.bfloat16) if batch.case.autocast else contextlib.nullcontext():
            loss = loss_of(leaf, target)
        if which != "forward":
            loss.backward()
            leaf.grad = None
        return loss

    return run if which != "forward" else torch.no_grad()(run)


def reference_loss(batch: Batch) -> float:
    wide = batch.to(batch.input.device.type, torch.float32)
    with torch.no_grad():
        return float(getattr(native, batch.case.loss)(wide.input, wide.target, **wide.options()))


def rounds(device: Device, runs: dict[str, Callable[[], Tensor]], calls: int) -> dict[str, list[float]]:
    """Milliseconds of every run in every round. Rounds begin with another contender each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, start, most = [*runs], time.perf_counter(), MOST if device.name == "cuda" else 3
    fewest = min(FEWEST, most)
    for number in range(WARM_UP + most):
        if number >= WARM_UP + fewest and time.perf_counter() - start > SECONDS_A_ROW:
            break
        found = device.time_in_turn({name: runs[name] for name in order}, calls)
        order = order[1:] + order[:1]
        if number >= WARM_UP:
            for name, ms in found.items():
                times[name].append(ms)
    return times


def copy_bandwidth(device: Device) -> float:
    """Bytes a second, read and written."""
    source = torch.ones(COPY_BYTES if device.name == "cuda" else 1 << 20, dtype=torch.int8, device=device.name)
    to = torch.empty_like(source)
    times = rounds(device, {"copy": lambda: to.copy_(source)}, calls=1)["copy"]
    return 2 * source.numel() / (statistics.median(times) / 1e3)


def selected(device: Device, only: str) -> list[tuple[Case, torch.dtype]]:
    cases = CASES if device.name == "cuda" else [case.tiny() for case in CASES]
    return [(case, dtype) for case in cases for dtype in case.dtypes if only in case.title(dtype)]


class Timer:
    """Times cases and records what comes of each; what went wrong, and what there was no time for, too."""

    def __init__(self, lossguard: Any, device: Device, records: Records) -> None:
        self.lossguard, self.device, self.records = lossguard, device, records
        self.copy = copy_bandwidth(device)
        if device.name == "cuda":
            gb = self.copy / 1e9
            records.add(f"copy: {gb:.0f} GB/s, read and written", copy_gb_per_s=gb)
        self.peers = installed_peers(device, records)

    def run(self, only: str, first: int, seconds: float) -> int | None:
        """From the `first` case on. Returns where to go on in a new process if one took the CUDA context along."""
        end, longest = time.perf_counter() + seconds, 0.0
        for number, (case, dtype) in list(enumerate(selected(self.device, only)))[first:]:
            title, began = case.title(dtype), time.perf_counter()
            if began + longest > end:
                self.records.add(f"no time left for {title}", title=title, skipped="no time left")
                continue
            try:
                self.time_case(case, dtype)
            except Exception as failure:  # most likely out of memory
                error = f"{title}: {type(failure).__name__}: {failure}"[:500]
                self.records.add(f"FAILED {error}", title=title, error=error)
            if not self.device.alive():
                self.records.add(title=title, error=f"no CUDA context any more after {title}")
                return number + 1
            self.device.forget()
            longest = max(longest, time.perf_counter() - began)
        return None

    def time_case(self, case: Case, dtype: torch.dtype) -> None:
        batch, title = case.batch(dtype, self.device.name), case.title(dtype)
        expected = reference_loss(batch)
        for which in PASSES:
            results, useful = self.time_pass(batch, which, expected), batch.useful_bytes(which)
            for result in results.values():  # GB/s are those of a GPU that has enough to do, or there are none
                if self.device.name == "cuda" and case.back_to_back == 1 and "ms" in result:
                    result["gb_per_s"] = useful / result["ms"] / 1e6
                    result["share_of_copy"] = useful / result["ms"] * 1e3 / self.copy
            errors = [f"{title}, {name}: {results[name]['error']}" for name in OURS if "error" in results[name]]
            self.records.add(
                progress(title, which, results), title=title, loss=case.loss, shape=list(case.shape),
                dtype=str(dtype).removeprefix("torch."), which=which, clock=self.device.clock, useful_bytes=useful,
                bytes_model=case.traffic.forward if which == "forward" else case.traffic.both,
                back_to_back=case.back_to_back, results=results, error=errors[0] if errors else None,
            )  # fmt: skip

    def time_pass(self, batch: Batch, which: str, expected: float) -> dict[str, dict[str, Any]]:
        """By contender: its median time, or why there is none."""
        runs, results = {}, {}
        for contender in contenders(self.lossguard, self.device, batch, self.peers):
            try:
                run = runner(contender, batch, which)
                loss = float(run().detach())
                if not math.isclose(loss, expected, rel_tol=SAME_LOSS):
                    raise ValueError(f"its loss is {loss:.6g} where float32 gives {expected:.6g}")
                runs[contender.name] = run
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"[:500]
                if not self.device.alive():
                    raise RuntimeError(f"{contender.name} took the CUDA context along: {error}") from failure
                results[contender.name] = {"error": error}
        calls = batch.case.back_to_back if self.device.name == "cuda" else 1
        for name, times in rounds(self.device, runs, calls).items():
            results[name] = {"ms": statistics.median(times), "rounds": len(times)}
        return results


def progress(title: str, which: str, results: dict[str, dict[str, Any]]) -> str:
    times = (f"{name} {r['ms']:.3f}" if "ms" in r else f"{name} FAILED" for name, r in results.items())
    return f"{title}, {which}, ms: {', '.join(times)}"


# ---- compiling beforehand: torch.compile's results stay in its cache on disk


def compile_share(dry_run: bool, only: str, part: int, parts: int) -> list[str]:
    """Compiles native for every `parts`-th case; the titles of those that could not."""
    device, failed = the_device(dry_run), []
    for case, dtype in selected(device, only)[part::parts]:
        try:
            batch = case.batch(dtype, device.name)
            contender = Contender("compiled", compiled_native(device, batch))
            for which in PASSES:
                runner(contender, batch, which)()
        except Exception as failure:
            failed.append(f"{case.title(dtype)}: {type(failure).__name__}: {failure}"[:500])
        batch = None
        device.forget()
    return failed


def compile_everything(dry_run: bool, only: str, records: Records) -> None:
    parts = 1 if dry_run else COMPILING_PROCESSES
    with concurrent.futures.ProcessPoolExecutor(parts, multiprocessing.get_context("spawn")) as pool:
        shares = [pool.submit(compile_share, dry_run, only, part, parts) for part in range(parts)]
        failed = [title for share in shares for title in share.result()]
    records.add("\n".join([*failed, "compiled native"]), error="; ".join(failed) or None)


def main() -> None:
    parser = step_arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=600, metavar="S", help="at most (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out the N cases before")
    parser.add_argument("--compile-only", action="store_true", help="fill torch.compile's cache; time nothing")
    arguments = parser.parse_args()
    device, records = the_device(arguments.dry_run), Records(arguments.records)
    if arguments.compile_only:
        compile_everything(arguments.dry_run, arguments.only, records)
        return
    began, lossguard = time.perf_counter(), import_lossguard(device)
    first = Timer(lossguard, device, records).run(arguments.only, arguments.first, arguments.seconds)
    if first is not None:
        left = arguments.seconds - (time.perf_counter() - began)
        again = ["-m", "benchmarks.gpu_timings", *sys.argv[1:], "--first", str(first), "--seconds", str(left)]
        os.execv(sys.executable, [sys.executable, *again])


if __name__ == "__main__":
    main()
