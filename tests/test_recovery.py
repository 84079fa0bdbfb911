"""After a caught violation everything goes on as if it had not happened: exact results, and no memory kept."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import hashlib
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator

import lossguard
import lossguard.functional as F
import psutil
import pytest
import torch
from lossguard import LossValidationError
from torch import Tensor

NAMES = (
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "nll_loss",
    "cross_entropy",
    "cross_entropy, probabilities",
)


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def good_batch(name: str) -> tuple[Tensor, Tensor]:
    """The same bits each time."""
    if name in ("nll_loss", "cross_entropy"):
        return rand(257, 7), torch.arange(257) % 7
    target = rand(257, 7, seed=1)
    return rand(257, 7), target / target.sum(1, keepdim=True) if "probabilities" in name else target


def bad_batch(name: str) -> tuple[Tensor, Tensor]:
    input, target = good_batch(name)
    target[100], target[-1] = (7, -5) if target.dtype == torch.int64 else (1.5, float("nan"))
    return input, target


def loss_and_grad(name: str, input: Tensor, target: Tensor, **policy) -> tuple[Tensor, Tensor]:
    x = input.clone().requires_grad_()
    loss = getattr(F, name.split(",")[0])(x, target, **policy)
    loss.backward()
    return loss.detach(), x.grad


def digests(name: str) -> list[str]:
    """Of a good batch's loss and gradient."""
    return [hashlib.sha256(t.numpy().tobytes()).hexdigest() for t in loss_and_grad(name, *good_batch(name))]


def fail(name: str) -> None:
    try:
        loss_and_grad(name, *bad_batch(name))
    except LossValidationError:
        return
    pytest.fail("no exception")


def go_on(rounds: int, want: list[str]) -> None:
    for _ in range(rounds):
        for number, name in enumerate(NAMES):
            fail(name)
            assert digests(name) == want[2 * number : 2 * number + 2]


def growth(want: list[str]) -> tuple[int, int]:
    """Bytes of memory and objects that there are more after a thousand caught violations than before."""

    def state() -> tuple[int, int]:
        gc.collect()
        return psutil.Process().memory_info().rss, len(gc.get_objects())

    F._FEW = -1  # as conftest.py does
    go_on(300, want)  # caches and arenas fill
    memory, objects = state()
    go_on(200, want)
    memory_after, objects_after = state()
    return memory_after - memory, objects_after - objects


def in_a_fresh_process(expression: str) -> list[str]:
    script = f"import test_recovery as t; print(*{expression})"
    here = os.path.dirname(__file__)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=here)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_thousand_caught_violations():
    """200 of each loss: every next good batch gives the bits of a process that saw no bad one, and neither
    memory nor the number of objects grows."""
    want = in_a_fresh_process("[d for name in t.NAMES for d in t.digests(name)]")
    assert len(want) == 2 * len(NAMES)
    go_on(200, want)
    # In a process of its own, too: what thousands of other tests left free comes and goes by megabytes.
    memory, objects = map(int, in_a_fresh_process(f"t.growth({want})"))
    # A thousand batches would be 14 MiB, a thousand reports alone 4 MiB and thousands of objects.
    assert memory < 3 * 2**20
    assert objects < 100


@contextlib.contextmanager
def no_garbage_collector() -> Iterator[None]:
    """What dies inside does so by its reference count: it was in no cycle, and nobody's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Local:
    """Something that a frame's local variable holds."""


@pytest.mark.parametrize("name", NAMES)
def test_a_caught_batch_dies(name):
    def step(keep: list) -> list[weakref.ref]:
        local = Local()
        input, target = bad_batch(name)
        hidden = (input.requires_grad_() * 2).clamp(max=1)  # an activation with its graph
        refs = [weakref.ref(o) for o in (local, input, target, hidden)]
        try:
            getattr(F, name.split(",")[0])(hidden, target)
        except LossValidationError as error:
            keep.append(error.report)  # a report may be kept: it holds no tensor and no frame
        return refs

    kept: list[lossguard.Report] = []
    with no_garbage_collector():
        refs = step(kept)
        assert [r() for r in refs] == [None] * len(refs)
    assert kept[0].count == (2 if name in ("nll_loss", "cross_entropy") else 14)


def test_a_kept_exception_without_its_traceback_keeps_nothing():
    def step(keep: list) -> list[weakref.ref]:
        local = Local()
        input, target = bad_batch("cross_entropy")
        try:
            F.cross_entropy(input.requires_grad_(), target)
        except LossValidationError as error:
            keep.append(error.with_traceback(None))
        return [weakref.ref(o) for o in (local, input, target)]

    kept: list[LossValidationError] = []
    with no_garbage_collector():
        assert [r() for r in step(kept)] == [None] * 3
    (error,) = kept
    assert error.__context__ is None and error.__cause__ is None


@pytest.mark.parametrize("action", ("warn", "skip"))
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_that_was_let_pass_dies(name, action):
    def step() -> list[weakref.ref]:
        local = Local()
        input, target = bad_batch(name)
        loss, grad = loss_and_grad(name, input, target, on_violation=action)
        return [weakref.ref(o) for o in (local, input, target, loss, grad)]

    with no_garbage_collector(), warnings.catch_warnings():
        warnings.simplefilter("ignore", lossguard.LossValidationWarning)
        assert [r() for r in step()] == [None] * 5


# ---- a training loop


def train(optimizer_type, options, batches, *, scaler: bool = False, accumulate: int = 1) -> list[Tensor]:
    """The weights after training; batches whose loss raises are left out, as a user would."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 5))
    optimizer = optimizer_type(model.parameters(), **options)
    criterion = lossguard.CrossEntropyLoss(label_smoothing=0.1)
    scaling = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=1024.0, growth_interval=2)
    done = 0
    for x, t in batches:
        try:
            loss = criterion(model(x), t)
        except LossValidationError:
            continue
        scaling.scale(loss / accumulate).backward()
        done += 1
        if done % accumulate == 0:
            scaling.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()
    return [*model.parameters()]


@pytest.mark.parametrize("mode", (dict(), dict(scaler=True), dict(accumulate=2), dict(scaler=True, accumulate=2)))
@pytest.mark.parametrize(
    "optimizer, options",
    [(torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)), (torch.optim.AdamW, dict(lr=0.01))],
)
def test_weights_after_bad_batches_are_those_without_them(optimizer, options, mode):
    good = [(rand(32, 8, seed=i), torch.arange(32).roll(i) % 5) for i in range(8)]
    bad = rand(32, 8, seed=99), torch.arange(32) % 6
    without = train(optimizer, options, good, **mode)
    among = train(optimizer, options, [bad, good[0], good[1], good[2], bad, bad, *good[3:], bad], **mode)
    initial = train(optimizer, options, [], **mode)
    assert all(torch.equal(a, b) for a, b in zip(without, among))
    assert not any(torch.equal(a, b) for a, b in zip(without, initial))


def test_threads_get_their_own_exception():
    def work(number: int) -> list[int | float]:
        target = torch.zeros(1000, dtype=torch.int64)
        target[number] = 1000 + number
        try:
            F.cross_entropy(rand(1000, 3), target)
        except LossValidationError as error:
            return [*error.report.indices[0], *error.report.values]
        return []

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(200))) == [[i, 1000 + i] for i in range(200)]
