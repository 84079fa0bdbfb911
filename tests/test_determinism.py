"""Losses and gradients are the same bits on every run, for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import lossguard.functional as F
import pytest
import references as ref
import torch
from lossguard import _C
from torch import Tensor

THREADS = (1, 2, 3, 5)


@pytest.fixture(params=_C.cpu_kernels())
def kernels(request) -> Iterator[str]:
    before = _C.cpu_kernels_in_use()
    assert _C.choose_cpu_kernels(request.param)
    yield request.param
    _C.choose_cpu_kernels(before)


@pytest.fixture
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def cases():
    """(name, function, input, args, options): sizes of many blocks (32768 elements, 65536 logits or 4096 rows),
    of different magnitudes, so that another order of summation would show."""
    g = torch.Generator().manual_seed(0)

    def spread(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * 10 ** torch.empty(shape).uniform_(-3, 2, generator=g)

    n = 10 * 32768 + 77
    p, y, x = torch.rand(n, generator=g), torch.rand(n, generator=g), spread(n)
    bad = torch.where(torch.rand(n, generator=g) < 1e-3, 7.0, y)
    yield "bce", F.binary_cross_entropy, p, (y,), {}
    yield "bce, bad elements", F.binary_cross_entropy, p, (bad,), dict(on_violation="skip")
    yield "bce with logits", F.binary_cross_entropy_with_logits, x, (y, p), dict(pos_weight=torch.tensor(3.0))
    image = ref.lay_out(spread(4, 9, 120, 121), "channels_last")
    yield "bce with logits, channels_last", F.binary_cross_entropy_with_logits, image, (torch.rand_like(image),), {}

    for name, shape, layout in (
        ("lanes", (60_001, 10), "contiguous"),
        ("rows", (4_001, 100), "contiguous"),
        ("long rows", (40, 9_000), "contiguous"),
        ("image", (4, 19, 96, 97), "contiguous"),
        ("image, channels_last", (4, 64, 50, 51), "channels_last"),
    ):
        x = ref.lay_out(spread(*shape), layout)
        t = torch.randint(shape[1], shape[:1] + shape[2:], generator=g)
        t[torch.rand(t.shape, generator=g) < 0.1] = -100
        w = torch.rand(shape[1], generator=g)
        bad = torch.where(torch.rand(t.shape, generator=g) < 1e-3, 2**40, t)
        q = torch.rand(shape, generator=g).softmax(1)
        yield f"nll, {name}", F.nll_loss, x, (t, w), {}
        yield f"cross-entropy, {name}", F.cross_entropy, x, (t, w), {}
        yield (
            f"cross-entropy, {name}, smoothing, bad labels",
            F.cross_entropy,
            x,
            (bad,),
            dict(label_smoothing=0.1, on_violation="skip"),
        )
        yield f"cross-entropy, {name}, probabilities", F.cross_entropy, x, (q, w), {}


CASES = list(cases())


def run(function, input: Tensor, args, options, reduction: str) -> tuple[Tensor, Tensor]:
    x = input.detach().requires_grad_()
    loss = function(x, *args, **options, reduction=reduction)
    grad_output = torch.linspace(-1, 3, loss.numel()).reshape(loss.shape) if loss.dim() else None
    (grad,) = torch.autograd.grad(loss, x, grad_output)
    return loss.detach(), grad


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_same_bits_for_any_number_of_threads_and_again(case, kernels, restore_threads):
    _, function, x, args, options = case
    for dtype, reduction in ((torch.float32, "mean"), (torch.float32, "none"), (torch.bfloat16, "sum")):
        converted = [a.to(dtype) if a.is_floating_point() else a for a in (x, *args)]
        extra = {k: v.to(dtype) if isinstance(v, Tensor) else v for k, v in options.items()}
        want = None
        for threads in (*THREADS, THREADS[-1]):
            torch.set_num_threads(threads)
            assert torch.get_num_threads() == threads
            got = run(function, converted[0], converted[1:], extra, reduction)
            want = want or got
            assert same_bits(got[0], want[0]) and same_bits(got[1], want[1]), (dtype, reduction, threads)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_deterministic_algorithms(case):
    """Nothing raises or warns; and every output is written, for torch fills new memory with NaN in this mode."""
    _, function, x, args, options = case
    for reduction in ("mean", "none"):
        want = run(function, x, args, options, reduction)
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.utils.deterministic.fill_uninitialized_memory
            got = run(function, x, args, options, reduction)
        finally:
            torch.use_deterministic_algorithms(False)
        assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])


def test_concurrent_calls_do_not_disturb_each_other():
    """The same call from several Python threads at once, each with torch's pool behind it."""
    import concurrent.futures

    _, function, x, args, options = next(case for case in CASES if case[0] == "cross-entropy, rows")
    want = run(function, x, args, options, "mean")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: run(function, x, args, options, "mean"), range(12)):
            assert same_bits(got[0], want[0]) and same_bits(got[1], want[1])
