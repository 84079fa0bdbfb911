"""Threads with policies and violations of their own do not disturb each other; forked and spawned children work."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lossguard
import lossguard.functional as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

THREADS, ROUNDS = 8, 60
N, C = 64, 10
DEFAULT = lossguard.policy()
# test_deferred.py has what is said there.
not_after_a_fork = pytest.mark.skipif(
    lossguard._C.build_info().get("emulated", False), reason="CUDA, emulated or not, does not survive a fork"
)


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Let the interpreter change threads every few instructions."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """`work` of every thread, started together; what one raises is raised."""
    together = threading.Barrier(count)

    def run(number: int) -> Any:
        together.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


Sample = tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]


def samples(seed: int) -> list[Sample]:
    """(loss, input, good target, the same with one bad value, which is the thread's own)"""
    g = torch.Generator().manual_seed(seed)
    logits, soft = torch.randn(N, C, generator=g), torch.rand(N, C, generator=g)
    labels = torch.randint(0, C, (N,), generator=g)
    bad_labels, bad_soft = labels.clone(), soft.clone()
    bad_labels[seed] = 1000 + seed
    bad_soft[seed, 1] = 2.0 + seed
    return [
        (L.cross_entropy, logits, labels, bad_labels),
        (L.nll_loss, logits.log_softmax(-1), labels, bad_labels),
        (L.cross_entropy, logits, soft, bad_soft),
        (L.binary_cross_entropy, logits.sigmoid(), soft, bad_soft),
        (L.binary_cross_entropy_with_logits, logits, soft, bad_soft),
    ]


def loss_and_gradient(loss: Callable[..., Tensor], input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    x = input.clone().requires_grad_()
    value = loss(x, target)
    value.backward()
    return value.detach(), x.grad


def expect(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.filterwarnings("ignore::lossguard.LossValidationWarning")
def test_good_and_bad_batches_under_different_policies() -> None:
    cases = [samples(seed) for seed in range(THREADS)]
    good = [[loss_and_gradient(loss, x, t) for loss, x, t, _ in case] for case in cases]
    with lossguard.guard(on_violation="skip"):
        skipped = [[loss_and_gradient(loss, x, bad) for loss, x, _, bad in case] for case in cases]

    def work(number: int) -> int:
        action = ("raise", "skip", "warn")[number % 3]
        caught = 0
        with lossguard.guard(on_violation=action, check_finite=number % 2 == 0):
            policy = lossguard.policy()
            for _ in range(ROUNDS):
                for i, (loss, x, t, bad) in enumerate(cases[number]):
                    expect(loss_and_gradient(loss, x, t), good[number][i])
                    if action != "raise":
                        expect(loss_and_gradient(loss, x, bad), skipped[number][i])
                    else:
                        with pytest.raises(lossguard.LossValidationError) as raised:
                            loss(x, bad)
                        report = raised.value.report
                        index = (number,) if bad.dim() == 1 else (number, 1)
                        assert (report.count, report.indices, report.values) == (1, [index], [bad[index].item()])
                        assert report.call_site.function == "work" and report.call_site.file == __file__
                        caught += 1
                assert lossguard.policy() == policy
        assert lossguard.policy() == DEFAULT
        return caught

    assert sum(in_threads(work)) == 3 * ROUNDS * 5  # threads 0, 3 and 6


def test_threads_share_tensors_and_modules() -> None:
    criterion = lossguard.CrossEntropyLoss(label_smoothing=0.1)
    _, x, t, bad = samples(3)[0]
    expected = loss_and_gradient(criterion, x, t)

    def work(number: int) -> None:
        for _ in range(ROUNDS):
            expect(loss_and_gradient(criterion, x, t), expected)
            with pytest.raises(lossguard.TargetOutOfBoundsError) as raised:
                criterion(x, bad)
            assert raised.value.report.values == [1003]

    in_threads(work)


def test_large_batches_in_several_threads_use_the_pool_at_once() -> None:
    """Each call is itself parallel inside; the results do not depend on who else computes."""
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(20_000, C, generator=g), torch.randint(0, C, (20_000,), generator=g)
    bad = t.clone()
    bad[::1000] = -5
    expected = loss_and_gradient(L.cross_entropy, x, t)

    def work(number: int) -> None:
        for _ in range(10):
            expect(loss_and_gradient(L.cross_entropy, x, t), expected)
            with pytest.raises(lossguard.TargetOutOfBoundsError) as raised:
                L.cross_entropy(x, bad)
            assert raised.value.report.count == 20
            assert raised.value.report.indices == [(i,) for i in range(0, 16_000, 1000)]

    in_threads(work, 4)


def test_configure_while_others_compute() -> None:
    """A call follows the policy before or after a change, never a mixture."""
    _, x, t, bad = samples(1)[0]
    done = threading.Event()
    with lossguard.guard(on_violation="skip"):
        skipped = L.cross_entropy(x, bad)

    def toggle() -> None:
        try:
            for i in range(400):
                lossguard.configure(on_violation=("raise", "skip")[i % 2])
        finally:
            lossguard.configure(on_violation="raise")
            done.set()

    def work(number: int) -> None:
        if number == 0:
            return toggle()
        while not done.is_set():
            try:
                assert torch.equal(L.cross_entropy(x, bad), skipped)
            except lossguard.TargetOutOfBoundsError as error:
                assert error.report.values == [1001]

    in_threads(work, 4)
    assert lossguard.policy() == DEFAULT


class Replica(nn.Module):
    """A model that computes its loss in its forward, as DataParallel replicas do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.criterion = nn.Linear(3, C), lossguard.CrossEntropyLoss(reduction="sum")

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.criterion(self.layer(x), t)


def test_replicas_forward_in_threads_and_backward_in_one() -> None:
    torch.manual_seed(0)
    model, x, t = Replica(), torch.randn(N, 3), torch.randint(0, C, (N,))
    chunks = list(zip(x.chunk(THREADS), t.chunk(THREADS)))

    def step(chunks: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        model.zero_grad()
        torch.stack(in_threads(lambda i: model(*chunks[i]))).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    model.zero_grad()
    F.cross_entropy(model.layer(x), t, reduction="sum").backward()
    expected = [p.grad.clone() for p in model.parameters()]
    torch.testing.assert_close(step(chunks), expected, rtol=1e-4, atol=1e-5)

    bad = [(a, b.clone()) for a, b in chunks]
    bad[5][1][2] = C
    with pytest.raises(lossguard.TargetOutOfBoundsError) as raised:
        step(bad)
    assert raised.value.report.indices == [(2,)]
    torch.testing.assert_close(step(chunks), expected, rtol=1e-4, atol=1e-5)


def test_backward_in_threads_of_forwards_under_different_policies() -> None:
    cases = [samples(seed) for seed in range(THREADS)]
    tasks = []
    for number in range(THREADS):
        for loss, x, _, bad in cases[number]:
            leaf = x.clone().requires_grad_()
            with lossguard.guard(on_violation="skip"):
                tasks.append((leaf, loss(leaf, bad), loss_and_gradient(loss, x, bad)[1]))

    def work(number: int) -> None:
        with lossguard.guard(strict=number % 2 == 0):
            for leaf, value, expected in tasks[number::THREADS]:
                value.backward()
                assert torch.equal(leaf.grad, expected)

    in_threads(work)


def test_a_call_site_belongs_to_its_thread() -> None:
    _, x, _, bad = samples(2)[0]

    def even() -> None:
        L.cross_entropy(x, bad)

    def odd() -> None:
        L.cross_entropy(x, bad)

    def work(number: int) -> None:
        function = (even, odd)[number % 2]
        for _ in range(ROUNDS):
            with pytest.raises(lossguard.TargetOutOfBoundsError) as raised:
                function()
            assert raised.value.report.call_site.function == function.__name__
            assert raised.value.report.call_site.line == function.__code__.co_firstlineno + 1

    in_threads(work)


# ---- processes


def child(queue: Any, threads: int) -> None:
    """A good batch, a bad one, the good one again; large enough for the thread pool."""
    try:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        x, t = torch.randn(4000, C), torch.randint(0, C, (4000,))
        before = loss_and_gradient(L.cross_entropy, x, t)
        bad = t.clone()
        bad[7] = C
        try:
            L.cross_entropy(x, bad)
            raise AssertionError("a bad batch passed")
        except lossguard.TargetOutOfBoundsError as error:
            report = error.report
        expect(loss_and_gradient(L.cross_entropy, x, t), before)
        # Exceptions travel between processes with their report.
        queue.put((before[0].item(), lossguard.TargetOutOfBoundsError(report), lossguard.policy()))
    except BaseException as error:
        queue.put((None, repr(error), None))


@pytest.mark.parametrize("method", [pytest.param("fork", marks=not_after_a_fork), "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_children(method: str) -> None:
    context = multiprocessing.get_context(method)
    # The parent has used its losses, its pool and its policy before.
    lossguard.configure(strict=False)
    try:
        torch.manual_seed(0)
        x, t = torch.randn(4000, C), torch.randint(0, C, (4000,))
        expected = L.cross_entropy(x, t).item()
        queue = context.Queue()
        # An OpenMP pool does not survive a fork, natively either: data-loader workers compute in one thread.
        process = context.Process(target=child, args=(queue, 1 if method == "fork" else 2))
        process.start()
        value, error, policy = queue.get(timeout=120)
        process.join(60)
    finally:
        lossguard.configure(strict=True)
    assert process.exitcode == 0
    assert value == expected, error
    assert isinstance(error, lossguard.TargetOutOfBoundsError) and error.report.indices == [(7,)]
    assert policy == (DEFAULT | {"strict": False} if method == "fork" else DEFAULT)


@not_after_a_fork
@pytest.mark.filterwarnings("ignore")
def test_a_child_forked_while_threads_compute_and_warn() -> None:
    """Nothing that a thread of the parent held is left held in the child."""
    _, x, t, bad = samples(1)[0]
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            L.cross_entropy(x, t)
            with pytest.raises(lossguard.TargetOutOfBoundsError):
                L.cross_entropy(x, bad)
            lossguard._violations._warned.clear()
            L.cross_entropy(x, bad, on_violation="warn")
            lossguard._native._warned.clear()
            lossguard._native.not_validated("cross_entropy", "a reason")

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(busy) for _ in range(3)]
        try:
            for _ in range(8):
                process = multiprocessing.get_context("fork").Process(target=use_and_warn, args=(x, t, bad))
                process.start()
                process.join(20)
                code = process.exitcode
                process.kill()
                assert code == 0
        finally:
            stop.set()
        for future in running:
            future.result()


def use_and_warn(x: Tensor, t: Tensor, bad: Tensor) -> None:
    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork, natively either
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        L.cross_entropy(x, bad, on_violation="warn")
    assert [w.category for w in caught] == [lossguard.LossValidationWarning]
    assert L.cross_entropy(x, t).isfinite()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lossguard._native.not_validated("cross_entropy", "a reason no other test gives")
    assert [w.category for w in caught] == [lossguard.NotValidatedWarning]


def load_and_check(index: int) -> float:
    return L.cross_entropy(torch.zeros(2, C), torch.tensor([0, 1])).item()


class Checked(torch.utils.data.Dataset[float]):
    """Losses inside data-loader workers."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> float:
        if index == 3:
            L.cross_entropy(torch.zeros(2, C), torch.tensor([0, C]))
        return load_and_check(index)


@not_after_a_fork
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_data_loader_workers() -> None:
    loader = torch.utils.data.DataLoader(Checked(), batch_size=1, num_workers=1)
    batches = iter(loader)
    assert [next(batches).item() for _ in range(3)] == pytest.approx([load_and_check(0)] * 3)
    with pytest.raises(lossguard.TargetOutOfBoundsError, match="Target 10 is out of bounds"):
        next(batches)
