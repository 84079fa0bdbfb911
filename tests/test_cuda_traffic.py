"""Every CUDA kernel moves the bytes of its budget, requested and in 32-byte sectors, and checking adds none.

One unit is one pass over the logits. Cross-entropy: 1 forward, 3 with its backward, 1 more each way for class
probabilities. BCE: 2 forward, 5 with its backward. NLL: what lies at the labels forward, 1 backward. Beside that there
is only what each case's budget names.

A worker process has the kernels compiled to count (tests/cuda_emulator, `traffic`): the budgets are computed here, from
shapes and layouts.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cuda_support as support
import lossguard
import lossguard.functional as F
import pytest
import torch
from cuda_support import (
    MAX_BLOCKS,
    THREADS,
    Elements,
    Rows,
    bce_kernels,
    bf16,
    class_count,
    draws,
    f16,
    f32,
    f64,
    held,
    lay_out,
    nll_kernels,
    pack,
    pixels,
    rows_shape,
)
from lossguard import _C, LossValidationError
from test_cuda_emulator import build
from torch import Tensor

pytestmark = pytest.mark.skipif(support.EMULATED, reason="builds its own kernels: run with the suite as installed")

CSRC = Path(__file__).parent.parent / "csrc/cuda"
SECTOR = 32
# csrc/cuda/finish.h and violations.h: what a block leaves for the last one, always and with offenders.
PARTIAL, RECORD, TICKET = 72, 344, 4
ENDS = 4 * 8  # of the ranges in it, which the last block may load twice: to compare and to keep
SPLIT_VALUES = 5 * 8  # of a part of a row, csrc/cuda/cross_entropy_rows.h
REPORT = 800  # csrc/report.h, Violations: written, read, and written to the host
TAIL = 3  # csrc/losses.h, SavedTail


# ---- calls


@dataclasses.dataclass(frozen=True)
class Call:
    function: str
    regime: Rows | Elements
    dtype: torch.dtype = f32
    target: str = "int64"  # or "uint8", "probabilities"
    weight: bool = False
    pos_weight: bool = False
    smoothing: float = 0.0
    reduction: str = "mean"
    autocast: bool = False
    # What else may happen to it.
    policy: tuple[tuple[str, object], ...] = ()
    values: str = "good"  # or "one bad", "all bad", "all bad, descending", "no logit finite"

    @property
    def of_rows(self) -> bool:
        return isinstance(self.regime, Rows)

    def __str__(self) -> str:
        words = [self.function, self.regime.name, str(self.dtype).removeprefix("torch.")]
        words += [self.target] if self.of_rows else []
        words += [name for name in ("weight", "pos_weight", "smoothing", "autocast") if getattr(self, name)]
        words += [self.reduction, *(f"{name}={value}" for name, value in self.policy)]
        return ", ".join(words + [self.values] * (self.values != "good"))

    def but(self, **changes) -> Call:
        return dataclasses.replace(self, **changes)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Its arguments. The same in every process, down to where they lie in their sectors."""
        return {name: t for name, t in (self._rows() if self.of_rows else self._elements()).items() if t is not None}

    def _rows(self) -> dict[str, Tensor | None]:
        r, shape = self.regime, self.regime.shape(self.dtype)
        beside, classes = f32 if self.autocast else self.dtype, class_count(shape)
        x = torch.randn(shape, generator=draws(1)).to(self.dtype)
        if self.values == "no logit finite":
            x.fill_(math.nan)
        elif self.values == "one row not finite":
            x.movedim(1, -1)[(0,) * (x.dim() - 1)] = math.nan
        w = torch.rand(classes, generator=draws(2)).to(beside) + 0.5 if self.weight else None
        if self.target == "probabilities":
            bad = torch.arange(math.prod(shape)).view(shape) % 99 + 2.0
            q = self._spoil(torch.rand(shape, generator=draws(3)), bad)
            target = lay_out(q.to(beside), r.soft_layout or r.layout, "cpu")
        else:
            rows = rows_shape(shape)
            t = torch.randint(min(classes, 256), rows, generator=draws(3))
            t = self._spoil(t, torch.arange(math.prod(rows)).view(rows) + classes)
            target = lay_out(t.to(getattr(torch, self.target)), r.label_layout, "cpu")
        return dict(input=lay_out(x, r.layout, "cpu"), target=target, weight=w)

    def _elements(self) -> dict[str, Tensor | None]:
        r, shape = self.regime, self.regime.shape(self.dtype)
        x, y = (torch.rand(shape, generator=draws(seed)) for seed in (1, 2))
        bad = torch.arange(math.prod(shape)).view(shape) % 999 + 2.0
        if self.values == "no logit finite":
            x.fill_(math.nan)
        elif self.values == "one row not finite":
            x.view(-1)[7] = math.nan
        elif self.function == "binary_cross_entropy":
            x = self._spoil(x, bad)
        w, p = (torch.rand(shape[-1:], generator=draws(seed)).to(self.dtype) + 0.5 for seed in (3, 4))
        return dict(
            input=lay_out(x.to(self.dtype), r.layout, "cpu"),
            target=lay_out(self._spoil(y, bad).to(self.dtype), r.target_layout, "cpu"),
            weight=w if self.weight else None,
            pos_weight=p if self.pos_weight else None,
        )

    def _spoil(self, good: Tensor, bad: Tensor) -> Tensor:
        if self.values == "one bad":
            good.view(-1)[good.numel() // 2] = bad.view(-1)[0]
        elif self.values == "all bad":
            return bad.clone()
        elif self.values == "all bad, descending":
            return bad.flatten().sort(descending=True).values.view(bad.shape)
        return good

    def forward(self) -> Tensor:
        options = dict(self.policy, reduction=self.reduction)
        if self.smoothing:
            options["label_smoothing"] = self.smoothing
        with torch.autocast("cpu", self.dtype) if self.autocast else contextlib.nullcontext():
            return getattr(F, self.function)(**self.tensors, **options)

    # ---- the shape of it

    @property
    def n(self) -> int:
        """Rows, or elements."""
        shape = self.regime.shape(self.dtype)
        return math.prod(rows_shape(shape) if self.of_rows else shape)

    @property
    def classes(self) -> int:
        return class_count(self.regime.shape(self.dtype))

    @property
    def loss_size(self) -> int:
        """Bytes of a loss or its gradient."""
        return 4 if self.autocast else self.dtype.itemsize

    @property
    def saved_size(self) -> int:
        return max(4, self.dtype.itemsize)

    @property
    def soft(self) -> bool:
        return self.target == "probabilities"

    @property
    def saves_mass(self) -> bool:
        return self.function == "cross_entropy" and (self.soft or bool(self.smoothing and self.weight))

    @property
    def kernels(self) -> tuple[str, str]:
        if self.function == "nll_loss":
            return nll_kernels(self.regime.nll, self.dtype)
        if self.of_rows:
            spread = "probabilities" if self.soft else "labels" if self.smoothing else "none"
            return self.regime.kernels(self.dtype, spread)
        r, logits = self.regime, self.function == "binary_cross_entropy_with_logits"
        forward = r.forward_each or r.forward if self.reduction == "none" else r.forward
        return bce_kernels(forward, self.dtype, logits)[0], bce_kernels(r.backward, self.dtype, logits)[1]


# ---- the worker


class Moved(NamedTuple):
    """Bytes of one buffer, in one direction."""

    requested: int
    touched: int  # in whole sectors, each once

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(self, other)))

    def times(self, readers: int | float) -> Moved:
        """Read again by others, while it is in a cache."""
        return Moved(round(self.requested * readers), self.touched)


class Launch(NamedTuple):
    kernel: str
    blocks: int
    moved: dict[str, Moved]  # "load input", ..; what has no name is the call's own: "load rest"

    def total(self) -> Moved:
        return sum(self.moved.values(), Moved(0, 0))


def measure(call: Call, backward: bool) -> list[Launch]:
    library = ctypes.CDLL(_C.__file__)
    library.lossguard_emulator_traffic.restype = ctypes.c_char_p
    library.lossguard_emulator_register_buffer.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t)

    def register(name: str, t: Tensor) -> None:
        extent = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride())) + 1
        library.lossguard_emulator_register_buffer(name.encode(), t.data_ptr(), extent * t.element_size())

    library.lossguard_emulator_clear_traffic()
    for name, t in call.tensors.items():
        register(name, t)
    support.emulator().launches()
    if backward:
        call.tensors["input"].requires_grad_()
    try:
        loss = call.forward()
    except LossValidationError:
        assert call.values != "good"
    else:
        assert call.values == "good"
    if backward:
        grad = torch.ones_like(loss)
        register("saved", loss.grad_fn.saved_tensors[-1])
        register("grad", grad)
        torch.autograd.grad(loss, call.tensors["input"], grad)
    library.lossguard_emulator_clear_buffers()

    launches = [Launch(*launch, {}) for launch in support.emulator().launches()]
    for line in library.lossguard_emulator_traffic().decode().splitlines():
        number, kernel, buffer, *counts = line.split("\t")
        bytes_loaded, bytes_stored, sectors_loaded, sectors_stored = map(int, counts)
        launch = launches[int(number)]
        assert launch.kernel == support.short(kernel)
        for direction, moved in (
            ("load", Moved(bytes_loaded, sectors_loaded * SECTOR)),
            ("store", Moved(bytes_stored, sectors_stored * SECTOR)),
        ):
            if moved.requested:
                launch.moved[f"{direction} {buffer or 'rest'}"] = moved
    return launches


def serve() -> None:
    """Measures the calls whose names come in."""
    lossguard.configure(when="immediately")
    for line in sys.stdin:
        name, backward = json.loads(line)
        call = CALLS[name]
        try:
            answer = measure(call, backward)
        except Exception:
            answer = traceback.format_exc()
        print(json.dumps(answer), flush=True)
        call.__dict__.pop("tensors", None)


@pytest.fixture(scope="module")
def counted() -> Iterator:
    """(call, backward) -> its launches."""
    environment = {**os.environ, "PYTHONPATH": str(build().extension("traffic"))}
    worker = subprocess.Popen(
        [sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    @functools.cache
    def ask(call: Call, backward: bool = False) -> list[Launch]:
        print(json.dumps([str(call), backward]), file=worker.stdin, flush=True)
        line = worker.stdout.readline()
        answer = json.loads(line) if line else "the worker has ended"
        assert not isinstance(answer, str), answer
        return [
            Launch(kernel, blocks, {name: Moved(*moved) for name, moved in buffers.items()})
            for kernel, blocks, buffers in answer
        ]

    with worker:
        yield ask
        worker.stdin.close()
        assert worker.wait() == 0


# ---- budgets


def touched(t: Tensor) -> int:
    """Bytes of the sectors in which its elements lie."""
    if t.is_contiguous():
        first, end = t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()
        return (-(-end // SECTOR) - first // SECTOR) * SECTOR
    at = torch.tensor(t.data_ptr() % SECTOR)
    for size, stride in zip(t.shape, t.stride()):
        if size > 1 and stride:
            at = at.unsqueeze(-1) + torch.arange(size) * stride * t.element_size()
    return torch.unique(at // SECTOR).numel() * SECTOR


def all_of(t: Tensor) -> Moved:
    """Each element once."""
    return Moved(t.numel() * t.element_size(), touched(t))


def new(n: int, size: int) -> Moved:
    """A tensor that the op allocates."""
    return Moved(n * size, -(-n * size // SECTOR) * SECTOR)


def at_labels(t: Tensor, labels: Tensor) -> Moved:
    """t[label], of class weights or of rows."""
    labels = labels.long()
    if t.dim() == 1:
        return Moved(labels.numel() * t.element_size(), touched_at(t, labels * t.stride(0)))
    rows = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(rows_shape(t.shape), rows_shape(t.stride())):
        rows = rows.unsqueeze(-1) + torch.arange(size) * stride
    return Moved(labels.numel() * t.element_size(), touched_at(t, rows + labels * t.stride(1)))


def touched_at(t: Tensor, offsets: Tensor) -> int:
    return torch.unique((t.data_ptr() % SECTOR + offsets * t.element_size()) // SECTOR).numel() * SECTOR


def bookkeeping(blocks: int, splits: int = 0) -> tuple[Moved, Moved]:
    """What blocks leave for the last one, and it loads: sums, in a ticketed order; and the sums of parts of rows."""
    sums, ticket = new(blocks + bool(splits), PARTIAL), Moved(blocks * TICKET, SECTOR)
    parts = new(splits, SPLIT_VALUES)
    return sums + ticket + parts, sums + ticket + parts


def forward_budget(call: Call, blocks: int) -> dict[str, Moved]:
    kernel, t = call.kernels[0], call.tensors
    splits = blocks if "by_block" in kernel and call.n < support.MULTIPROCESSORS else 0
    loaded, stored = bookkeeping(blocks, splits)
    saved = TAIL + (call.n * (1 + call.saves_mass) if call.function == "cross_entropy" else 0)
    loss = new(call.n if call.reduction == "none" else 1, call.loss_size)
    budget = {"load rest": loaded, "store rest": stored + new(saved, call.saved_size) + loss}
    budget["load target"] = all_of(t["target"])
    if call.function == "nll_loss":
        budget["load input"] = at_labels(t["input"], t["target"])
    else:
        budget["load input"] = all_of(t["input"])  # one unit
    if call.function == "cross_entropy" and not call.soft and ("in_registers" in kernel or "by_block" in kernel):
        # The label's own logit, again: a lane may have it, but not the one that wants it.
        budget["load input"] += Moved(call.n * call.dtype.itemsize, 0)
    return budget | weights_budget(call, kernel, 1)


def backward_budget(call: Call, blocks: int) -> dict[str, Moved]:
    kernel, t = call.kernels[1], call.tensors
    readers = readers_of_a_row(call, kernel)
    threads = blocks * THREADS
    budget = {"store rest": new(t["input"].numel(), call.dtype.itemsize)}  # one unit: the gradient
    if call.function != "nll_loss":
        budget["load input"] = all_of(t["input"])  # one unit
    budget["load target"] = all_of(t["target"]).times(1 if call.soft or not call.of_rows else readers)
    # By each thread: what was checked, where that is a choice, and the denominator.
    tail = (1 if call.of_rows else 2 if call.function == BCE[1] else 0) + (call.reduction == "mean")
    budget["load saved"] = Moved(threads * tail * call.saved_size, SECTOR if tail else 0)
    if call.function == "cross_entropy":
        budget["load saved"] += new(call.n * (1 + call.saves_mass), call.saved_size).times(readers)
    one_grad = call.reduction != "none"
    by_thread = one_grad and "bce_backward_flat" in kernel
    gradients = new(1 if one_grad else call.n, call.loss_size)
    budget["load grad"] = Moved((threads if by_thread else call.n * readers) * call.loss_size, gradients.touched)
    return budget | weights_budget(call, kernel, readers)


def readers_of_a_row(call: Call, kernel: str) -> int:
    """How often its label and what was saved of it are read: by each warp of a block, for each stretch."""
    if "nll_backward_flat" in kernel:
        return -(-call.classes // 8192)
    if "ce_backward_rows" in kernel and call.classes > held(call.dtype):
        warps = THREADS // 32
        return warps * -(-(call.classes + pack(call.dtype) - 1) // (warps * held(call.dtype)))
    return 1


def weights_budget(call: Call, kernel: str, readers: int) -> dict[str, Moved]:
    """Elements' weights lie beside them. Classes' fit the caches: each row asks for w[t], or for all."""
    weights = {name: call.tensors[name] for name in ("weight", "pos_weight") if name in call.tensors}
    if not call.of_rows:
        return {f"load {name}": Moved(call.n * w.element_size(), touched(w)) for name, w in weights.items()}
    if not weights:
        return {}
    w = weights["weight"]
    at_label = Moved(0, 0) if call.soft else at_labels(w, call.tensors["target"]).times(readers)
    if not (call.soft or call.smoothing):
        return {"load weight": at_label}
    rows_at_once = pixels(call.dtype) if kernel.endswith(f", {pixels(call.dtype)}>") else 1
    every_class = Moved(w.numel() * w.element_size() * call.n // rows_at_once, touched(w))
    return {"load weight": Moved(at_label.requested, 0) + every_class}


def check_budget(launch: Launch, kernel: str, budget: dict[str, Moved]) -> None:
    assert launch.kernel == kernel
    assert launch.blocks <= MAX_BLOCKS
    over = []
    for name in sorted({*budget, *launch.moved}):
        expected, moved = budget.get(name, Moved(0, 0)), launch.moved.get(name, Moved(0, 0))
        for what, want, got in zip(("bytes", "bytes of sectors"), expected, moved):
            twice = ENDS * launch.blocks if name == "load rest" else 0
            if abs(got - want) > want / 50 + 2 * SECTOR + twice:
                over.append(f"{name}: {want} {what} in the budget, {got} counted")
    assert not over, f"{kernel}, {launch.blocks} blocks:\n" + "\n".join(over)


# ---- every regime


def large(name: str, shape: tuple[int, ...], *kinds: str, **options) -> Rows:
    return Rows(name, lambda dtype: shape, *kinds, **options)


# As cuda_support.ROWS, but large: what blocks and threads read for themselves is little.
ROWS = (
    large("flat", (9000, 10), "flat", "flat", "flat"),
    large("flat, offset", (9000, 7), "flat", "flat", "flat", layout="offset", label_layout="offset"),
    Rows("flat, channels_last", lambda d: (3, 84 // d.itemsize, 40, 48), "flat", "registers", "flat", "channels_last"),
    large("2 lanes", (5000, 16), "registers", "registers", "flat"),
    large("4 lanes, unaligned", (1000, 83), "registers", "registers", "flat"),
    large("8 lanes, padded by one", (600, 128), "registers", "registers", "flat", layout="padded by one"),
    large("32 lanes", (80, 1000), "registers", "registers", "flat", in_float64="block"),
    large("a block a row", (10, 9000), "block", "block", "flat"),
    large("a block a row, unaligned", (36, 3001), "block", "block", "flat", layout="offset"),
    large("several blocks a row", (2, 40001), "block", "block", "flat"),
    large("pixels", (2, 19, 48, 48), "pixels", "pixels", "pixels"),
    large("pixels, transposed", (9000, 10), "pixels", "pixels", "pixels", layout="permuted"),
    large("strided, H W odd", (2, 19, 49, 47), "strided", "strided", "strided"),
    large("strided, pixels offset", (2, 19, 48, 48), "strided", "strided", "pixels", layout="offset"),
    large("strided, every second", (3000, 15), "strided", "strided", "flat", layout="strided"),
)  # fmt: skip
ELEMENTS = (
    Elements("flat", lambda dtype: (400, 200), "flat", "flat"),
    Elements("flat, with a tail", lambda dtype: (80_003,), "flat", "flat"),
    Elements("flat, permuted", lambda dtype: (400, 200), "flat", "flat", "flat", "permuted", "permuted"),
    Elements("flat, offset", lambda dtype: (80_003,), "flat", "strided", "strided", "offset", "offset"),
    Elements("strided, target offset", lambda dtype: (400, 200), "strided", "strided", "", "contiguous", "offset"),
    Elements("strided, padded", lambda dtype: (400, 200), "strided", "strided", "", "padded", "padded"),
    Elements("strided, permuted", lambda dtype: (400, 200), "strided", "strided", "", "permuted"),
)
WEIGHED = Elements("with weights", lambda dtype: (400, 200), "strided", "strided")
BCE = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


def calls_of_rows() -> Iterator[Call]:
    soft = dict(target="probabilities")
    for regime in ROWS:
        ce, nll = Call("cross_entropy", regime), Call("nll_loss", regime)
        yield ce
        yield ce.but(target="uint8", weight=True, reduction="none")
        yield ce.but(weight=True, smoothing=0.1)
        yield ce.but(**soft)
        yield ce.but(**soft, weight=True, reduction="none")
        yield ce.but(dtype=f16)
        yield ce.but(dtype=f16, **soft, smoothing=0.1)
        yield nll
        yield nll.but(target="uint8", weight=True, reduction="none", dtype=f16)
        if regime.hard not in ("flat", "pixels"):  # float64 is not for these
            yield ce.but(dtype=f64, weight=True)
            yield ce.but(dtype=f64, **soft)
    for regime in (ROWS[0], ROWS[5], ROWS[10]):
        yield Call("cross_entropy", regime, bf16, weight=True, smoothing=0.1, autocast=True)


def calls_of_elements() -> Iterator[Call]:
    for function in BCE:
        for regime in ELEMENTS:
            bce = Call(function, regime)
            yield bce
            yield bce.but(reduction="none")
            yield bce.but(dtype=f16)
            yield bce.but(dtype=f64, reduction="none")
        yield Call(function, WEIGHED, weight=True)
        yield Call(function, WEIGHED, bf16, weight=True, reduction="none")
    yield Call(BCE[1], WEIGHED, weight=True, pos_weight=True)
    yield Call(BCE[1], WEIGHED, pos_weight=True, reduction="none")


# ---- tests

GOOD = [*calls_of_rows(), *calls_of_elements()]


@pytest.mark.parametrize("call", GOOD, ids=str)
def test_forward_and_backward_keep_to_the_budget(counted, call):
    forward, backward = counted(call, backward=True)
    check_budget(forward, call.kernels[0], forward_budget(call, forward.blocks))
    check_budget(backward, call.kernels[1], backward_budget(call, backward.blocks))


HEADLINES = {  # forward, and with the backward
    Call("cross_entropy", ROWS[7]): (1, 3),
    Call("cross_entropy", ROWS[7], target="probabilities"): (2, 5),
    Call("nll_loss", ROWS[7]): (0, 1),
    Call(BCE[0], ELEMENTS[0]): (2, 5),
    Call(BCE[1], ELEMENTS[0]): (2, 5),
}


@pytest.mark.parametrize("call", HEADLINES, ids=str)
def test_units(counted, call):
    """All that is moved, where there are few rows and no weights."""
    forward, backward = (launch.total().touched for launch in counted(call, backward=True))
    unit = call.tensors["input"].numel() * call.dtype.itemsize
    assert [forward / unit, (forward + backward) / unit] == pytest.approx(HEADLINES[call], rel=0.02, abs=0.02)


# ---- checking

# Of every regime one call whose policy matters.
WATCHED = [Call("cross_entropy", regime, target=target) for regime in ROWS for target in ("int64", "probabilities")]
WATCHED += [Call("nll_loss", regime) for regime in ROWS]
WATCHED += [Call(function, regime) for regime in ELEMENTS for function in BCE]
REST = {"load rest", "store rest"}
NOTHING = dict(strict=False, check_finite=False, on_violation="skip")
DEFAULT = dict(strict=True, check_finite=False, on_violation="raise")
EVERYTHING = dict(strict=True, check_finite=True, on_violation="raise")


def under(call: Call, policy: dict[str, object]) -> Call:
    return call.but(policy=tuple(policy.items()))


@pytest.mark.parametrize("call", WATCHED, ids=str)
def test_checking_adds_no_byte_to_a_good_pass(counted, call):
    bare = counted(under(call, NOTHING), backward=True)
    for policy in (DEFAULT, EVERYTHING):
        watched = counted(under(call, policy), backward=True)
        # Under check_finite, pixels have another kernel, which has more blocks, each with its sums.
        check_budget(watched[0], watched[0].kernel, forward_budget(call, watched[0].blocks))
        for name in bare[0].moved.keys() - REST:
            assert watched[0].moved[name] == bare[0].moved[name], f"{watched[0].kernel}, {policy}: {name}"

        want = dict(bare[1].moved)
        if policy["check_finite"] and call.function == "nll_loss":
            # The gradient of a row depends on whether its one log-probability is finite.
            gathered = at_labels(call.tensors["input"], call.tensors["target"])
            want["load input"] = gathered.times(readers_of_a_row(call, bare[1].kernel))
        assert watched[1].moved == want, f"{watched[1].kernel}, {policy}"


# ---- offenders


def rest(launch: Launch) -> int:
    return sum(launch.moved[name].requested for name in REST)


def offenders_budget(call: Call, blocks: int, with_offenders: int) -> int:
    """Bytes of the blocks' records, of asking every block whether it has one, and of the report."""
    sections = 2 if call.function == BCE[0] else 1  # of input and target
    return sections * (with_offenders * 2 * RECORD + blocks * 32 * 4) + 3 * REPORT + blocks * ENDS


def with_offenders(values: str, policy: dict[str, object]) -> list[Call]:
    return [under(call, policy).but(values=values) for call in WATCHED if policy is DEFAULT or call.function != BCE[0]]


ONE = [*with_offenders("one bad", DEFAULT), *with_offenders("one row not finite", EVERYTHING)]


@pytest.mark.parametrize("call", ONE, ids=str)
def test_one_offender_costs_its_report(counted, call):
    (good,), (bad,) = counted(call.but(values="good")), counted(call)
    assert (bad.kernel, bad.blocks) == (good.kernel, good.blocks)
    assert 0 < rest(bad) - rest(good) <= offenders_budget(call, bad.blocks, 1)
    again = call.dtype.itemsize
    if call.values == "one row not finite" and call.function == "cross_entropy":
        again *= call.classes
    for name in good.moved.keys() - REST:
        more = again if name == "load input" else call.tensors["target"].element_size()
        assert bad.moved[name].requested <= good.moved[name].requested + more, name
        assert bad.moved[name].touched <= good.moved[name].touched, name


STORM = [
    *with_offenders("all bad", DEFAULT),
    *with_offenders("all bad, descending", DEFAULT),
    *with_offenders("no logit finite", EVERYTHING),
]


@pytest.mark.parametrize("call", STORM, ids=str)
def test_a_tensor_that_is_wrong_everywhere_costs_at_most_three_passes(counted, call):
    (good,), (bad,) = counted(call.but(values="good")), counted(call)
    assert (bad.kernel, bad.blocks) == (good.kernel, good.blocks)
    # Whatever the number of offenders and the order in which they are found: one record a block.
    assert 0 < rest(bad) - rest(good) <= offenders_budget(call, bad.blocks, bad.blocks)
    for name in good.moved.keys() - REST:
        most = good.moved[name]
        moved = bad.moved.get(name, Moved(0, 0))  # with no good label, NLL reads no log-probability
        assert moved.requested <= 3 * most.requested and moved.touched <= most.touched, name
    if call.function != "nll_loss" or call.n >= 1000:  # a few labels are less than a report
        assert all(moved <= 3 * one_pass for moved, one_pass in zip(bad.total(), good.total()))


def test_the_only_atomic_operation_is_the_ticket_that_a_block_draws():
    lines = [line.strip() for path in CSRC.iterdir() for line in path.read_text().splitlines()]
    atomics = [line for line in lines if re.search(r"\batomic\w+\(|\bcuda::atomic|\bred\.|\batom\.", line)]
    assert atomics == ["s.last = atomicAdd(s.finish.scratch.ticket, 1u) == gridDim.x - 1;"]


# What the worker may be asked for, by name.
POLICIES = [under(call, policy) for call in WATCHED for policy in (NOTHING, DEFAULT, EVERYTHING)]
CALLS = {str(call): call for call in (*GOOD, *POLICIES, *ONE, *STORM)}


if __name__ == "__main__":
    serve()
