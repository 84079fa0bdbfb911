"""Times lossguard against native eager torch on the CPU and prints the ratios.

Every case runs both in turn, many times, in one process; a row shows the median of the ratios
native / lossguard of neighbouring runs (above 1: lossguard is faster), so that a slow moment of the
machine falls on both. Absolute times are shown for orientation only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

# Let glibc keep big buffers: else every fresh gradient is paid for in page faults, by both.
if os.environ.get("MALLOC_TRIM_THRESHOLD_") is None:
    os.environ.update(
        MALLOC_MMAP_THRESHOLD_="4294967296", MALLOC_TRIM_THRESHOLD_="17179869184", MALLOC_TOP_PAD_="268435456"
    )
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])

import lossguard.functional as ours
import torch
import torch.nn.functional as native
from torch import Tensor

Case = tuple[str, str, dict, tuple[Tensor, Tensor]]  # name, function, options, (input, target)


def cases() -> Iterator[Callable[[], Case]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def labels(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    n = 1 << 23
    for dtype in (torch.float32, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        for kind in ("hard", "soft"):
            for name, function in (
                ("BCE", "binary_cross_entropy"),
                ("BCE-with-logits", "binary_cross_entropy_with_logits"),
            ):

                def bce(name=name, function=function, kind=kind, dtype=dtype, short=short) -> Case:
                    input = uniform(n) if name == "BCE" else normal(n)
                    target = uniform(n).round() if kind == "hard" else uniform(n)
                    return f"{name} 8M {kind} {short}", function, {}, (input.to(dtype), target.to(dtype))

                yield bce
    for rows, classes in ((64 * 1024, 10), (16 * 1024, 1000), (512, 32000)):
        for dtype in (torch.float32, torch.bfloat16):
            for smoothing in (0.0, 0.1):
                # bfloat16 and smoothing are promised for the large vocabulary; measured for all
                def ce(rows=rows, classes=classes, dtype=dtype, smoothing=smoothing) -> Case:
                    name = f"CE {rows} x {classes} {str(dtype).removeprefix('torch.')}" + (
                        " smoothing" if smoothing else ""
                    )
                    return (
                        name,
                        "cross_entropy",
                        {"label_smoothing": smoothing},
                        (normal(rows, classes).to(dtype), labels(classes, rows)),
                    )

                yield ce

    def image(classes: int = 19) -> tuple[Tensor, Tensor]:
        target = labels(classes, 4, 512, 512)
        target[:, :32] = 255
        return normal(4, classes, 512, 512), target

    yield lambda: ("CE 4 x 19 x 512 x 512", "cross_entropy", {"ignore_index": 255}, image())
    yield lambda: (
        "CE 16384 x 1000 probabilities",
        "cross_entropy",
        {},
        (normal(16384, 1000), normal(16384, 1000).softmax(1)),
    )
    yield lambda: ("NLL 16384 x 1000", "nll_loss", {}, (normal(16384, 1000).log_softmax(1), labels(1000, 16384)))
    yield lambda: ("NLL 4 x 19 x 512 x 512", "nll_loss", {"ignore_index": 255}, image())
    yield lambda: ("CE 32 x 10", "cross_entropy", {}, (normal(32, 10), labels(10, 32)))
    yield lambda: ("NLL 32 x 10", "nll_loss", {}, (normal(32, 10), labels(10, 32)))
    yield lambda: ("BCE 32 x 10", "binary_cross_entropy", {}, (uniform(32, 10), uniform(32, 10)))
    yield lambda: ("BCE-with-logits 32 x 10", "binary_cross_entropy_with_logits", {}, (normal(32, 10), uniform(32, 10)))


def runner(
    library: object, function: str, options: dict, input: Tensor, target: Tensor, backward: bool
) -> Callable[[], None]:
    loss_of = getattr(library, function)
    if not backward:

        def forward() -> None:
            with torch.no_grad():
                loss_of(input, target, **options)

        return forward
    leaf = input.clone().requires_grad_()

    def both() -> None:
        leaf.grad = None
        loss_of(leaf, target, **options).backward()

    return both


def seconds(run: Callable[[], None], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def measure(case: Case, backward: bool, budget: float) -> dict:
    name, function, options, (input, target) = case
    pair = [runner(library, function, options, input, target, backward) for library in (native, ours)]
    once = max(seconds(run, 1) for run in pair for _ in range(2))
    repeats = max(1, int(0.01 / max(once, 1e-7)))
    rounds = max(5, min(200, int(budget / (2 * max(once, 1e-7) * repeats))))
    times = [(seconds(pair[0], repeats), seconds(pair[1], repeats)) for _ in range(rounds)]
    return {
        "case": name,
        "pass": "forward+backward" if backward else "forward",
        "ratio": statistics.median(a / b for a, b in times),
        "native_us": statistics.median(a for a, _ in times) * 1e6,
        "lossguard_us": statistics.median(b for _, b in times) * 1e6,
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument(
        "--seconds", type=float, default=1.5, metavar="S", help="to spend on each row (default %(default)s)"
    )
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of torch's pool (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, {arguments.threads} threads; native / lossguard, median of interleaved pairs")
    print(f"{'':34}{'forward':>9}{'fwd+bwd':>9}   fwd+bwd in ms: native, lossguard")
    rows = []
    for make in cases():
        case = make()
        if arguments.only not in case[0]:
            continue
        forward, both = (measure(case, backward, arguments.seconds) for backward in (False, True))
        rows += [forward, both]
        print(
            f"{case[0]:34}{forward['ratio']:8.2f}x{both['ratio']:8.2f}x"
            f"   {both['native_us'] / 1e3:8.3f} {both['lossguard_us'] / 1e3:8.3f}",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": arguments.threads, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
