"""What must hold on a GPU before speed matters; the session runs both.

    python -m benchmarks.gpu_checks bad-labels    # every case, right and wrong, small: also under compute-sanitizer
    python -m benchmarks.gpu_checks torture       # thousands of bad batches in one process
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import sys
import time
from typing import Any

import torch
import torch.nn.functional as native
from torch import Tensor

from .gpu_cases import CASES, Batch, Case
from .gpu_device import Device, EmulatorLog, Records, import_lossguard, step_arguments, the_device

# Of a result that was summed in float32 or wider and then rounded, relative to the largest.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
TINY_CASES = [case.tiny() for case in CASES]
SLOWLY_EMULATED = 8000  # elements: above, a dry run leaves a case out of the torture
MIB = 1 << 20
USED_MAY_GROW = 2 * MIB  # the least that the driver hands out; of 10,000 leaks of one byte each it would need three
HOST_MAY_GROW = 16 * MIB  # 10,000 reports that nobody let go would be 40


class Wrong(Exception):
    """A check did not hold."""


def loss_and_grad(library: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    leaf = batch.input.detach().requires_grad_()
    autocast = torch.autocast(leaf.device.type, torch.bfloat16) if batch.case.autocast else contextlib.nullcontext()
    with autocast:
        loss = getattr(library, batch.case.loss)(leaf, batch.target, **batch.options())
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def same_bits(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b))


# ---- what makes a batch bad


def bad_values(case: Case) -> list[int | float]:
    if case.target != "labels":
        return [1.5, -0.25, math.nan, math.inf, -math.inf]
    labels = [case.classes, -1, 255 + case.classes, case.classes + 1, -(2**63), 2**62]
    return [label for label in labels if label != case.options.get("ignore_index", -100)]


def expect_report(lossguard: Any, batch: Batch, tensor: str, places: list[int], values: list[int | float]) -> None:
    """That the batch raises, and that the exception names just these elements of that tensor."""
    try:
        loss_and_grad(lossguard.functional, batch)
        lossguard.check()
    except lossguard.LossValidationError as error:
        report = error.report
    else:
        raise Wrong("nothing was raised")
    shape = getattr(batch, tensor).shape
    indices = [tuple(int(i) for i in torch.unravel_index(torch.tensor(place), shape)) for place in places]
    found = (report.tensor, report.count, report.indices, [*map(repr, report.values)])
    expected = (tensor, len(places), indices, [*map(repr, values)])
    if found != expected:
        raise Wrong(f"reported {found} instead of {expected}")


# ---- every case, right and wrong


def check_case(lossguard: Any, device: Device, case: Case, dtype: torch.dtype, offset: int) -> None:
    on_cpu = case.batch(dtype, "cpu")
    reference = loss_and_grad(native, on_cpu.to("cpu", None if case.autocast else torch.float64))
    good = on_cpu.to(device.name, offset=offset)
    found = loss_and_grad(lossguard.functional, good)
    for what, ours, theirs in zip(("loss", "gradient"), found, reference):
        difference = float((ours.cpu().double() - theirs).abs().max() / theirs.abs().max())
        if not difference <= TOLERANCE[dtype]:
            raise Wrong(f"{what} differs from native by {difference:.1e}, allowed {TOLERANCE[dtype]:.0e}")

    value = bad_values(case)[0]
    for tensor in ("target", "input") if case.loss == "binary_cross_entropy" else ("target",):
        spoiled = on_cpu.to("cpu")
        place = getattr(spoiled, tensor).numel() * 2 // 3
        getattr(spoiled, tensor).view(-1)[place] = value
        expect_report(lossguard, spoiled.to(device.name, offset=offset), tensor, [place], [value])

    if not same_bits(loss_and_grad(lossguard.functional, good), found):
        raise Wrong("the good batch has other bits after the bad one")


def bad_labels(lossguard: Any, device: Device, only: str, quick: bool, records: Records) -> bool:
    log = EmulatorLog(lossguard) if device.name == "cpu" else None
    failed = 0
    for case in TINY_CASES:
        dtypes = case.dtypes if quick or case.autocast else (*case.dtypes, torch.float16, torch.float64)
        for dtype, offset in itertools.product(dtypes, (0, 1)):
            title = case.title(dtype) + (", not aligned" if offset else "")
            if only not in title:
                continue
            try:
                check_case(lossguard, device, case, dtype, offset)
                error = None
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
                failed += 1
            kernels = {"kernels": sorted(log.take())} if log else {}
            records.add(f"FAILED {title}: {error}" if error else "", check=title, error=error, **kernels)
        print(f"{case.name}: checked", flush=True)
    alive = device.alive()
    records.add(f"{failed} failed; afterwards the context is {'alive' if alive else 'DEAD'}", alive=alive)
    return alive and not failed


# ---- thousands of bad batches


class Victim:
    """A batch on the device that is spoiled, caught and mended again and again."""

    def __init__(self, lossguard: Any, device: Device, case: Case, dtype: torch.dtype) -> None:
        self.lossguard = lossguard
        self.batch = case.batch(dtype, "cpu").to(device.name)
        self.good = case.batch(dtype, "cpu").to(device.name)
        self.expected = loss_and_grad(lossguard.functional, self.batch)
        self.bad_values = bad_values(case)

    def suffer(self, number: int) -> None:
        tensor = "input" if self.batch.case.loss == "binary_cross_entropy" and number % 2 else "target"
        elements, good = (getattr(batch, tensor).view(-1) for batch in (self.batch, self.good))
        places = sorted({(number * 7919 + i * 104729) % elements.numel() for i in range(1 + number % 3)})
        values = [self.bad_values[(number + place) % len(self.bad_values)] for place in places]
        for place, value in zip(places, values):
            elements[place] = value
        expect_report(self.lossguard, self.batch, tensor, places, values)
        for place in places:
            elements[place] = good[place]

    def recovered(self) -> bool:
        return same_bits(loss_and_grad(self.lossguard.functional, self.batch), self.expected)


# Of the CUDA runtime, those that wait for the device.
BLOCKING = ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc")


def waits_of_good_steps(lossguard: Any, device: Device, steps: int) -> dict[str, int]:
    """How often `steps` steps of training call what waits; each may wait for its loss, once."""
    weights = torch.randn(64, 10, device=device.name, requires_grad=True)
    input, target = torch.randn(256, 64, device=device.name), torch.randint(10, (256,), device=device.name)
    optimizer = torch.optim.SGD([weights], lr=0.1)

    def go_on(count: int) -> None:
        for _ in range(count):
            lossguard.functional.cross_entropy(input @ weights, target).backward()
            optimizer.step()
            optimizer.zero_grad()

    go_on(5)
    before = lossguard._C.runtime_calls()
    go_on(steps)
    after = lossguard._C.runtime_calls()
    return {name: after[name] - before[name] for name in BLOCKING}


def torture(lossguard: Any, device: Device, batches: int, records: Records) -> bool:
    cases = [case for case in TINY_CASES if device.name == "cuda" or math.prod(case.shape) <= SLOWLY_EMULATED]
    victims = [Victim(lossguard, device, case, dtype) for case in cases for dtype in case.dtypes]

    def go_on(count: int, since: int) -> None:
        for number in range(since, since + count):
            victim = victims[number % len(victims)]
            victim.suffer(number)
            if number % 25 == 0 and not victim.recovered():
                raise Wrong(f"other bits in a good batch after {number} bad ones")
            if number % max(1, batches // 10) == 0:
                print(f"{number} bad batches", flush=True)

    def memory() -> dict[str, int]:
        gc.collect()
        device.synchronize()
        return device.memory()

    warm_up = max(len(victims), batches // 10)
    go_on(warm_up, since=0)
    before, start = memory(), time.perf_counter()
    go_on(batches, since=warm_up)
    seconds, after = time.perf_counter() - start, memory()
    growth = {name: after[name] - before[name] for name in after}
    allowed = {"allocated": 0, "reserved": 0, "used": USED_MAY_GROW, "host": HOST_MAY_GROW}
    flat = all(growth[name] <= allowed[name] for name in growth)
    alive = all(victim.recovered() for victim in victims)
    steps = 200
    waits = waits_of_good_steps(lossguard, device, steps)
    late = all(count <= (steps if name == "cudaEventSynchronize" else 0) for name, count in waits.items())
    records.add(
        f"{batches} bad batches, each reported as it should be, in {seconds:.1f} s; good ones afterwards "
        f"{'have the same bits' if alive else 'DIFFER'}; memory grew by {growth}: {'flat' if flat else 'NOT FLAT'}; "
        f"{steps} good steps {'wait for their loss alone' if late else 'WAIT'}: {waits}", waits=waits,
        bad_batches=batches, losses=sorted({case.loss for case in cases}), seconds=seconds,
        memory_before=before, memory_after=after, memory_growth=growth, memory_flat=flat, alive=alive,
    )  # fmt: skip
    return flat and alive and late


def main() -> None:
    parser = step_arguments(__doc__)
    parser.add_argument("check", choices=("bad-labels", "torture"))
    parser.add_argument("--batches", type=int, default=10_000, metavar="N", help="of the torture (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="bad-labels: float32 and bfloat16 alone")
    arguments = parser.parse_args()
    device, records = the_device(arguments.dry_run), Records(arguments.records)
    lossguard = import_lossguard(device)
    if arguments.check == "torture":
        good = torture(lossguard, device, arguments.batches, records)
    else:
        good = bad_labels(lossguard, device, arguments.only, arguments.quick, records)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
