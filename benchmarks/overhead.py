"""What a call of a loss costs the host, where the batch is too small for anything else to matter.

    python -m benchmarks.overhead [--rounds N] [--json FILE]

Microseconds of host time for (32, 10) batches, native and lossguard in turn in one process: medians, and the median of
the ratios of neighbouring runs (above 1: lossguard takes longer). On the emulated build (PYTHONPATH=build/emulated) the
rows are of the CUDA launch path, and say what it adds to an emulated kernel by leaving that out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import lossguard
import lossguard.functional as ours
import torch
import torch.nn.functional as native

N, CLASSES, CALLS = 32, 10, 200
LOSSES = ("cross_entropy", "nll_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits")


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
    return (time.perf_counter() - start) / CALLS * 1e6


def compare(loss: str, backward: bool, rounds: int) -> dict[str, float]:
    x, t = inputs(loss)
    x.requires_grad_(backward)
    functions = []
    for library in (native, ours):
        f = getattr(library, loss)
        functions.append((lambda f=f: f(x, t).backward()) if backward else (lambda f=f: f(x, t)))
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
    found: dict[str, object] = {"torch": torch.__version__, "python": sys.version.split()[0], "rows": []}
    emulated = lossguard._C.build_info().get("emulated", False)
    print(f"(32, 10), {'CUDA launch path, emulated kernel included' if emulated else 'CPU'}, us a call")
    print(f"{'':48} {'native':>8} {'lossguard':>10} {'ratio':>7}")
    for loss in LOSSES:
        for backward in (False, True):
            row = compare(loss, backward, arguments.rounds)
            name = f"{loss}{', with backward' if backward else ''}"
            print(f"{name:48} {row['native_us']:8.1f} {row['lossguard_us']:10.1f} {row['ratio']:7.2f}")
            found["rows"].append({"loss": loss, "backward": backward, **row})  # type: ignore[attr-defined]
    for name, cost in pieces(arguments.rounds).items():
        print(f"{name:48} {'':8} {cost:10.2f}")
        found.setdefault("pieces", {})[name] = cost  # type: ignore[attr-defined]
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
