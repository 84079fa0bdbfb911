"""What a call of a loss costs the host, where the batch is too small for anything else to matter.

    python -m benchmarks.overhead [--rounds N] [--json FILE]

Microseconds of host time for (32, 10) batches, native and lossguard in turn in one process, on one thread: medians, and
the median of the ratios of neighbouring runs (above 1: lossguard takes longer). On the emulated build
(PYTHONPATH=build/emulated) lossguard's rows are of the CUDA launch path: everything the host does for a launch, its
runtime calls being the emulator's, and no kernel; deferred, with a check after every round. Native is on the CPU there
too.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lossguard
import lossguard.functional as ours
import torch
import torch.nn.functional as native

N, CLASSES, CALLS = 32, 10, 200
LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")
WHICH = ("forward, no gradient", "forward", "forward + backward")
EMULATED = lossguard._C.build_info().get("emulated", False)


def inputs(loss: str) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, CLASSES, generator=g)
    if loss == "cross_entropy":
        return x, torch.randint(CLASSES, (N,), generator=g)
    if loss == "nll_loss":
        return x.log_softmax(1), torch.randint(CLASSES, (N,), generator=g)
    return (x.sigmoid() if loss == "binary_cross_entropy" else x), torch.rand(N, CLASSES, generator=g)


def microseconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(CALLS):
        function()
    found = (time.perf_counter() - start) / CALLS * 1e6
    lossguard.check()
    return found


def compare(loss: str, which: str, rounds: int) -> dict[str, float]:
    x, t = inputs(loss)
    x.requires_grad_(which != "forward, no gradient")
    functions: list[Callable[[], object]] = []
    for library in (native, ours):
        f: Any = getattr(library, loss)
        functions.append((lambda f=f: f(x, t).backward()) if "backward" in which else (lambda f=f: f(x, t)))
    for f in functions:
        microseconds(f)
    pairs = [tuple(microseconds(f) for f in functions) for _ in range(rounds)]
    return {
        "native_us": statistics.median(a for a, _ in pairs),
        "lossguard_us": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(b / a for a, b in pairs),
    }


def pieces(rounds: int) -> dict[str, float]:
    """What a call and a step have besides the loss, in microseconds."""
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    timed = {
        "the call site": lossguard._C.call_site,
        "asking before a step, with nothing pending": lossguard._pending.before_step,
        "a whole SGD step of one parameter without gradient": optimizer.step,
    }
    return {name: statistics.median(microseconds(f) for _ in range(rounds)) for name, f in timed.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if EMULATED:
        lossguard.configure(when="deferred")
        ours._FEW = -1  # on the CPU a few elements of NLL are left to native torch
        ctypes.CDLL(lossguard._C.__file__).lossguard_emulator_skip_kernels(1)
    found: dict[str, Any] = {
        "path": "CUDA launch path, emulated, no kernel" if EMULATED else "CPU",
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rows": [],
    }
    print(f"(32, 10), {found['path']}, microseconds a call\n")
    print("| | native | lossguard | ratio |\n|---|---|---|---|")
    for loss in LOSSES:
        for which in WHICH:
            row = compare(loss, which, arguments.rounds)
            found["rows"].append({"loss": loss, "which": which, **row})
            print(f"| {loss}, {which} | {row['native_us']:.1f} | {row['lossguard_us']:.1f} | {row['ratio']:.2f} |")
    found["pieces"] = pieces(arguments.rounds)
    for name, cost in found["pieces"].items():
        print(f"| {name} | | {cost:.2f} | |")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
