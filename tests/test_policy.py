"""What is checked and what a violation does: arguments, `guard`, `configure`, and the exact effect of each."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import lossguard
import lossguard.functional as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

nan, inf = float("nan"), float("inf")
DEFAULT = {"strict": True, "check_finite": False, "on_violation": "raise", "when": lossguard.policy()["when"]}
ACTIONS = ("raise", "warn", "skip")
N, C = 6, 5


@pytest.fixture(autouse=True)
def fresh_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lossguard._violations, "_warned", {})
    assert lossguard.policy() == DEFAULT
    yield
    lossguard.configure(**DEFAULT)
    assert lossguard.policy() == DEFAULT


KINDS = {
    "bce": ("binary_cross_entropy", "BCELoss"),
    "bce_with_logits": ("binary_cross_entropy_with_logits", "BCEWithLogitsLoss"),
    "nll": ("nll_loss", "NLLLoss"),
    "cross_entropy": ("cross_entropy", "CrossEntropyLoss"),
    "probabilities": ("cross_entropy", "CrossEntropyLoss"),
}
BAD = {"bce": -0.25, "bce_with_logits": 1.5, "nll": C, "cross_entropy": -7, "probabilities": 3.0}
over_kinds = pytest.mark.parametrize("kind", KINDS)


def sample(kind: str, n: int = N, c: int = C, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(n)
    logits = torch.randn(n, c, generator=g).to(dtype)
    soft = torch.rand(n, c, generator=g).to(dtype)
    labels = torch.randint(0, c, (n,), generator=g)
    return {
        "bce": (torch.sigmoid(logits), soft),
        "bce_with_logits": (logits, soft),
        "nll": (torch.log_softmax(logits, -1), labels),
        "cross_entropy": (logits, labels),
        "probabilities": (logits, soft),
    }[kind]


def bad_sample(kind: str, every: int = 2, **size: Any) -> tuple[Tensor, Tensor, Tensor]:
    """With a bad value in every `every`-th row; and which elements are good (rows, where there are classes)."""
    input, target = sample(kind, **size)
    if kind in ("nll", "cross_entropy"):
        target[::every] = BAD[kind]
        good = torch.ones(len(target), dtype=torch.bool)
        good[::every] = False
        return input, target, good
    target[::every, 1] = BAD[kind]
    good = torch.ones_like(target, dtype=torch.bool)
    good[::every, 1] = False
    return input, target, good.all(1) if kind == "probabilities" else good


def loss_and_gradient(f: Callable[..., Tensor], input: Tensor, target: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    x = input.clone().requires_grad_()
    loss = f(x, target, **kwargs)
    loss.sum().backward()
    return loss.detach(), x.grad


def identical(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def same_rows(a: Any, b: Any) -> None:
    """Bit by bit on the CPU. A CUDA kernel sums a row in an order that depends on how it lies across 16-byte
    boundaries, so a row that moved may differ in its last digit."""
    if lossguard._C.build_info().get("emulated"):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    else:
        identical(a, b)


# ---- the three ways to set it


@over_kinds
def test_an_argument_beats_a_guard_beats_configure(kind: str) -> None:
    function, module = KINDS[kind]
    input, target, _ = bad_sample(kind)

    def raises(f: Callable[..., Tensor]) -> bool:
        try:
            f(input, target)
        except lossguard.LossValidationError:
            return True
        return False

    for process, thread, argument in itertools.product(
        ("raise", "skip"), ("raise", "skip", None), ("raise", "skip", None)
    ):
        expected = (argument or thread or process) == "raise"
        lossguard.configure(on_violation=process)
        with lossguard.guard(on_violation=thread):
            assert lossguard.policy()["on_violation"] == (thread or process)
            assert raises(partial(getattr(L, function), on_violation=argument)) is expected
            assert raises(getattr(lossguard, module)(on_violation=argument)) is expected


@pytest.mark.parametrize("kind", ["bce_with_logits", "probabilities"])
def test_strict(kind: str) -> None:
    function, module = KINDS[kind]
    input, target, _ = bad_sample(kind)
    native = loss_and_gradient(getattr(F, function), input, target)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)
    close(loss_and_gradient(getattr(L, function), input, target, strict=False), native)
    close(loss_and_gradient(getattr(lossguard, module)(strict=False), input, target), native)
    with lossguard.guard(strict=False):
        close(loss_and_gradient(getattr(L, function), input, target), native)
        with pytest.raises(lossguard.ValueOutOfRangeError):
            getattr(L, function)(input, target, strict=True)
    lossguard.configure(strict=False)
    close(loss_and_gradient(getattr(lossguard, module)(), input, target), native)
    with lossguard.guard(strict=True), pytest.raises(lossguard.ValueOutOfRangeError):
        getattr(L, function)(input, target)


@pytest.mark.parametrize("kind", ["bce", "nll", "cross_entropy"])
def test_what_native_checks_is_checked_without_strict(kind: str) -> None:
    function, _ = KINDS[kind]
    input, target, _ = bad_sample(kind)
    with pytest.raises(lossguard.LossValidationError):
        getattr(L, function)(input, target, strict=False)
    if kind == "bce":
        input[0, 0] = 1.5
        with pytest.raises(lossguard.ValueOutOfRangeError):
            L.binary_cross_entropy(input, sample("bce")[1], strict=False)


@pytest.mark.parametrize("kind", ["bce_with_logits", "nll", "cross_entropy", "probabilities"])
def test_check_finite(kind: str) -> None:
    function, module = KINDS[kind]
    input, target = sample(kind)
    input[2] = nan
    assert getattr(L, function)(input, target).isnan()
    column = int(target[2]) if target.dim() == 1 and kind == "nll" else 0
    calls: list[Callable[[], Tensor]] = [
        lambda: getattr(L, function)(input, target, check_finite=True),
        lambda: getattr(lossguard, module)(check_finite=True)(input, target),
        lambda: lossguard.guard(check_finite=True)(getattr(L, function))(input, target),
    ]
    for call in calls:
        with pytest.raises(lossguard.NonFiniteError) as caught:
            call()
        assert caught.value.report.kind == "finite" and caught.value.report.tensor == "input"
        assert caught.value.report.indices[0] == (2, column)
    lossguard.configure(check_finite=True)
    with pytest.raises(lossguard.NonFiniteError):
        getattr(L, function)(input, target)
    assert getattr(L, function)(input, target, check_finite=False).isnan()


def test_module_attributes_and_copies_keep_the_policy() -> None:
    input, target, _ = bad_sample("cross_entropy")
    criterion = lossguard.CrossEntropyLoss(on_violation="skip", check_finite=True)
    for copied in (copy.deepcopy(criterion), pickle.loads(pickle.dumps(criterion))):
        assert (copied.on_violation, copied.check_finite, copied.strict) == ("skip", True, None)
        assert copied(input, target).isfinite()
    criterion.on_violation = "raise"
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        criterion(input, target)
    criterion.on_violation = "nonsense"
    with pytest.raises(ValueError, match="on_violation"):
        criterion(input, target)


INVALID: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"on_violation": "ignore"}, ValueError),
    ({"on_violation": "Raise"}, ValueError),
    ({"on_violation": True}, ValueError),
    ({"on_violation": 1}, ValueError),
    ({"strict": "yes"}, TypeError),
    ({"strict": 1}, TypeError),
    ({"check_finite": 0}, TypeError),
    ({"check_finite": torch.tensor(True)}, TypeError),
    ({"when": "sometimes"}, (TypeError, ValueError)),
]


@pytest.mark.parametrize("changes, error", INVALID, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_invalid_values_raise_where_they_are_given(changes: dict[str, Any], error: Any) -> None:
    valid = {"strict": False, "check_finite": True, "on_violation": "skip"}
    with pytest.raises(error):
        lossguard.configure(**(valid | changes))
    assert lossguard.policy() == DEFAULT
    with pytest.raises(error):
        lossguard.guard(**changes)
    for kind, (function, module) in KINDS.items():
        with pytest.raises(error):
            getattr(lossguard, module)(**changes)
        with pytest.raises(error):
            getattr(L, function)(*sample(kind), **changes)


def test_the_policy_is_keyword_only() -> None:
    for call in (lossguard.configure, lossguard.guard):
        with pytest.raises(TypeError):
            call(True)
    with pytest.raises(TypeError):
        L.binary_cross_entropy(*sample("bce"), None, None, None, "mean", True)


# ---- guard


def test_guards_nest_and_leave_open_what_they_do_not_name() -> None:
    policy = lossguard.policy
    with lossguard.guard(on_violation="skip") as outer:
        assert policy() == DEFAULT | {"on_violation": "skip"}
        with lossguard.guard(strict=False):
            assert policy() == DEFAULT | {"strict": False, "check_finite": False, "on_violation": "skip"}
            with lossguard.guard(on_violation="warn", check_finite=True, strict=True):
                assert policy() == DEFAULT | {"strict": True, "check_finite": True, "on_violation": "warn"}
            assert policy() == DEFAULT | {"strict": False, "check_finite": False, "on_violation": "skip"}
            with outer:
                assert policy() == DEFAULT | {"strict": False, "check_finite": False, "on_violation": "skip"}
        assert policy() == DEFAULT | {"on_violation": "skip"}
    assert policy() == DEFAULT


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, lossguard.LossValidationError])
def test_an_exception_inside_restores(error: type[BaseException]) -> None:
    with pytest.raises(error):
        with lossguard.guard(on_violation="skip"), lossguard.guard(check_finite=True):
            if error is lossguard.LossValidationError:
                with lossguard.guard(on_violation="raise"):
                    L.cross_entropy(*bad_sample("cross_entropy")[:2])
            raise error
    assert lossguard.policy() == DEFAULT


def test_decorator() -> None:
    @lossguard.guard(on_violation="skip", check_finite=True)
    def step(depth: int, *, fail: bool = False) -> list[dict[str, Any]]:
        """Takes a step."""
        if fail:
            raise ValueError
        return [lossguard.policy(), *(step(depth - 1) if depth else [])]

    assert (step.__name__, step.__doc__) == ("step", "Takes a step.")
    assert step(2) == [DEFAULT | {"strict": True, "check_finite": True, "on_violation": "skip"}] * 3
    with pytest.raises(ValueError):
        step(0, fail=True)
    assert lossguard.policy() == DEFAULT


def test_configure_does_not_reach_into_a_guard() -> None:
    with lossguard.guard(on_violation="skip"):
        lossguard.configure(on_violation="warn")
        assert lossguard.policy()["on_violation"] == "skip"
    assert lossguard.policy()["on_violation"] == "warn"


def test_new_threads_start_from_configure_not_from_a_guard() -> None:
    lossguard.configure(strict=False)
    with lossguard.guard(on_violation="skip", check_finite=True), ThreadPoolExecutor(1) as pool:
        assert pool.submit(lossguard.policy).result() == DEFAULT | {"strict": False}
        lossguard.configure(on_violation="warn")
        assert pool.submit(lossguard.policy).result() == DEFAULT | {"strict": False, "on_violation": "warn"}

        def inside() -> dict[str, Any]:
            with lossguard.guard(on_violation="raise"):
                return lossguard.policy()

        assert pool.submit(inside).result() == DEFAULT | {"strict": False}
        assert lossguard.policy() == DEFAULT | {"strict": False, "check_finite": True, "on_violation": "skip"}


def test_one_guard_object_may_serve_several_threads() -> None:
    shared = lossguard.guard(check_finite=True)
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with shared:
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=other)
    with lossguard.guard(on_violation="skip"):
        with shared:
            thread.start()
            assert entered.wait(10)
        after = lossguard.policy()
        left.set()
        thread.join()
        assert after == DEFAULT | {"on_violation": "skip"}


# ---- read at the forward, carried along


def backward_here(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x)[0]


def backward_on_another_thread(loss: Tensor, x: Tensor) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(backward_here, loss, x).result()


def backward_under_another_guard(loss: Tensor, x: Tensor) -> Tensor:
    with lossguard.guard(strict=True, check_finite=True, on_violation="raise"):
        return backward_here(loss, x)


def backward_after_configure(loss: Tensor, x: Tensor) -> Tensor:
    lossguard.configure(strict=False, check_finite=False, on_violation="raise")
    return backward_here(loss, x)


def double_backward(loss: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss, x, create_graph=True)[0].detach()


BACKWARDS = (
    backward_here,
    backward_on_another_thread,
    backward_under_another_guard,
    backward_after_configure,
    double_backward,
)


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["bce_with_logits", "probabilities"])
def test_the_backward_follows_the_forwards_strict(kind: str, backward: Callable[..., Tensor]) -> None:
    function, _ = KINDS[kind]
    input, target, good = bad_sample(kind)
    native = loss_and_gradient(getattr(F, function), input, target)[1]
    x = input.clone().requires_grad_()
    with lossguard.guard(strict=False):
        lenient = getattr(L, function)(x, target)
    with lossguard.guard(on_violation="skip"):
        skipping = getattr(L, function)(x, target)
    torch.testing.assert_close(backward(lenient, x), native, rtol=1e-5, atol=1e-6)
    gradient = backward(skipping, x)
    assert (gradient[~good] == 0).all() and (gradient[good] != 0).all()


@pytest.mark.parametrize("backward", BACKWARDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", ["bce_with_logits", "nll", "cross_entropy", "probabilities"])
def test_the_backward_follows_the_forwards_check_finite(kind: str, backward: Callable[..., Tensor]) -> None:
    function, _ = KINDS[kind]
    input, target = sample(kind)
    input[2] = nan
    x = input.clone().requires_grad_()
    with lossguard.guard(check_finite=True, on_violation="skip"):
        skipping = getattr(L, function)(x, target)
    unchecked = getattr(L, function)(x, target)
    assert skipping.isfinite() and unchecked.isnan()
    gradient = backward(skipping, x)
    others = torch.arange(N) != 2
    assert (gradient[2] == 0).all() and gradient[others].isfinite().all() and gradient[others].any(1).all()
    if kind != "nll":  # whose gradient does not depend on its input
        assert backward(unchecked, x)[2].isnan().any()


# ---- skip


@pytest.mark.parametrize("action", ["skip", "warn"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("size", [{"n": 6, "c": 5}, {"n": 700, "c": 37}], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["nll", "cross_entropy"])
@pytest.mark.filterwarnings("ignore::lossguard.LossValidationWarning")
def test_skipped_labels_are_ignored_labels(
    kind: str, dtype: torch.dtype, size: dict[str, int], reduction: str, action: str
) -> None:
    function, _ = KINDS[kind]
    input, target, good = bad_sample(kind, dtype=dtype, **size)
    target[1::6] = -100
    bad = ~good & (target != -100)
    if kind == "nll":
        target[bad] = size["c"]
    options: list[dict[str, Any]] = [{}, {"weight": torch.linspace(0.5, 2, size["c"]).to(dtype)}]
    if kind == "cross_entropy":
        options += [{"label_smoothing": 0.1}, {"label_smoothing": 0.1, **options[1]}]
    for kwargs in options:
        loss = partial(getattr(L, function), reduction=reduction, **kwargs)
        skipped = loss_and_gradient(loss, input, target, on_violation=action)
        identical(skipped, loss_and_gradient(loss, input, torch.where(bad, -100, target)))
        assert skipped[0].isfinite().all() and (skipped[1][bad] == 0).all()


@pytest.mark.parametrize("kind", ["bce", "bce_with_logits", "probabilities"])
@pytest.mark.parametrize("action", ["skip", "warn"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("size", [{"n": 6, "c": 5}, {"n": 700, "c": 37}], ids=["small", "large"])
@pytest.mark.filterwarnings("ignore::lossguard.LossValidationWarning")
def test_skipped_elements_are_as_if_removed(kind: str, size: dict[str, int], weighted: bool, action: str) -> None:
    function, _ = KINDS[kind]
    input, target, good = bad_sample(kind, **size)
    kept = input[good], target[good]
    whole, part = {}, {}
    if weighted:
        per_class = torch.linspace(0.5, 2, size["c"])
        whole["weight"] = part["weight"] = per_class
        if kind != "probabilities":
            part["weight"] = per_class.expand_as(input)[good]
    for reduction in ("none", "mean", "sum"):
        loss = partial(getattr(L, function), reduction=reduction)
        ours = loss_and_gradient(loss, input, target, on_violation=action, **whole)
        removed = loss_and_gradient(loss, *kept, **part)
        assert (ours[1][~good] == 0).all()
        same_rows(ours[1][good], removed[1])
        if reduction == "none":
            assert (ours[0][~good] == 0).all()
            same_rows(ours[0][good], removed[0])
        else:  # the order of a sum shifts with what is left out
            torch.testing.assert_close(ours[0], removed[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["bce", "bce_with_logits"])
def test_a_skipped_sum_is_that_of_weight_0(kind: str) -> None:
    function, _ = KINDS[kind]
    input, target, good = bad_sample(kind, n=700, c=37)
    loss = partial(getattr(L, function), reduction="sum")
    zeroed = loss_and_gradient(loss, input, torch.where(good, target, 0.5), weight=good.float())
    identical(loss_and_gradient(loss, input, target, on_violation="skip"), zeroed)


@over_kinds
def test_nothing_left(kind: str) -> None:
    function, _ = KINDS[kind]
    input, target = sample(kind)
    target = torch.full_like(target, BAD[kind])
    for reduction in ("none", "mean", "sum"):
        loss, gradient = loss_and_gradient(
            getattr(L, function), input, target, reduction=reduction, on_violation="skip"
        )
        identical(gradient, torch.zeros_like(input))
        # As all-ignored: the mean of nothing is NaN.
        identical(loss, torch.full_like(loss, nan if reduction == "mean" else 0.0))


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_skipped_bce_inputs(value: float) -> None:
    input, target = sample("bce")
    input[1, 2] = value
    good = torch.ones_like(input, dtype=torch.bool)
    good[1, 2] = False
    ours = loss_and_gradient(L.binary_cross_entropy, input, target, on_violation="skip")
    removed = loss_and_gradient(L.binary_cross_entropy, input[good], target[good])
    torch.testing.assert_close(ours[0], removed[0], rtol=1e-6, atol=0)
    identical(ours[1][good], removed[1])
    assert ours[1][1, 2] == 0


@pytest.mark.parametrize("kind", ["bce_with_logits", "nll", "cross_entropy", "probabilities"])
@pytest.mark.parametrize("value", [nan, inf])
def test_skipped_nonfinite_inputs(kind: str, value: float) -> None:
    function, _ = KINDS[kind]
    input, target = sample(kind)
    input[2] = value
    kept = torch.arange(N) != 2
    loss = partial(getattr(L, function), check_finite=True, on_violation="skip")
    ours, removed = loss_and_gradient(loss, input, target), loss_and_gradient(loss, input[kept], target[kept])
    torch.testing.assert_close(ours[0], removed[0], rtol=1e-6, atol=0)
    same_rows(ours[1][kept], removed[1])
    assert (ours[1][2] == 0).all()


def test_skip_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    for kind, (function, _) in KINDS.items():
        getattr(L, function)(*bad_sample(kind)[:2], on_violation="skip")
    assert not recwarn.list


def test_good_batches_do_not_depend_on_the_policy() -> None:
    for kind, (function, _) in KINDS.items():
        args = sample(kind, n=100)
        expected = loss_and_gradient(getattr(L, function), *args)
        for strict, finite, action in itertools.product((True, False), (True, False), ACTIONS):
            with lossguard.guard(strict=strict, check_finite=finite, on_violation=action):
                identical(loss_and_gradient(getattr(L, function), *args), expected)


# ---- warn


def ours_among(caught: Any) -> list[Any]:
    return [w for w in caught if issubclass(w.category, lossguard.LossValidationWarning)]


def line_here() -> int:
    return sys._getframe(1).f_lineno


@over_kinds
def test_warns_once_per_call_site(kind: str) -> None:
    function, module = KINDS[kind]
    loss, criterion = getattr(L, function), getattr(lossguard, module)(on_violation="warn")
    input, target, _ = bad_sample(kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            loss(input, target, on_violation="warn"), (first := line_here())
            criterion(input, target), (second := line_here())
        loss(input.clone().requires_grad_(), target, on_violation="warn").sum().backward(), (third := line_here())
    said = ours_among(caught)
    assert [(w.filename, w.lineno) for w in said] == [(__file__, first), (__file__, second), (__file__, third)]
    text = str(said[0].message)
    assert module in text and f"test_policy.py:{first}" in text and len(text) < 4300


def test_two_losses_on_one_line_warn_each() -> None:
    with lossguard.guard(on_violation="warn"), pytest.warns(lossguard.LossValidationWarning) as caught:
        for _ in range(2):
            L.nll_loss(*bad_sample("nll")[:2]), L.binary_cross_entropy(*bad_sample("bce")[:2])
    assert sorted(str(w.message).split(". ")[1].split(":")[0] for w in ours_among(caught)) == ["BCELoss", "NLLLoss"]


def test_warned_once_by_many_threads() -> None:
    input, target, _ = bad_sample("cross_entropy")
    together = threading.Barrier(4)

    def work(_: int) -> None:
        together.wait()
        for _ in range(5):
            L.cross_entropy(input, target, on_violation="warn")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
    assert len(ours_among(caught)) == 1


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("wrapped", [False, True], ids=["criterion", "function"])
def test_a_forward_recomputed_by_checkpointing_warns_once(reentrant: bool, wrapped: bool) -> None:
    criterion = lossguard.CrossEntropyLoss(on_violation="warn")
    forwards = []

    def step(x: Tensor, t: Tensor) -> Tensor:
        return criterion(x * 2, t)

    input, target, _ = bad_sample("cross_entropy")
    criterion.register_forward_pre_hook(lambda *_: forwards.append(1))
    x = input.clone().requires_grad_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = checkpoint(step if wrapped else criterion, x, target, use_reentrant=reentrant)
        loss.backward()
    assert len(forwards) == 2  # it was recomputed
    assert len(ours_among(caught)) == 1
    again = loss_and_gradient(
        lambda y, t: L.cross_entropy(y * 2 if wrapped else y, t, on_violation="skip"), input, target
    )
    identical((loss.detach(), x.grad), again)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpointing_raises_once_and_the_next_batch_works(reentrant: bool) -> None:
    input, target, _ = bad_sample("cross_entropy")
    x = input.clone().requires_grad_()
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        checkpoint(L.cross_entropy, x, target, use_reentrant=reentrant)
    good = sample("cross_entropy")[1]
    checkpoint(L.cross_entropy, x, good, use_reentrant=reentrant).backward()
    identical(x.grad, loss_and_gradient(L.cross_entropy, input, good)[1])


@contextlib.contextmanager
def counted() -> Iterator[list[lossguard.Report]]:
    """What is reported; at the end, all of it is known."""
    reports: list[lossguard.Report] = []
    lossguard.check()
    lossguard.reset_stats()
    lossguard.on_report(reports.append)
    try:
        yield reports
        lossguard.check()
    finally:
        lossguard.off_report(reports.append)


def calls() -> list[tuple[int, int]]:
    return [(site.calls, site.bad_calls) for site in lossguard.stats().values()]


def quietly(x: Tensor, t: Tensor) -> Tensor:
    return L.cross_entropy(x, t, on_violation="skip")


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("within", [1, 2], ids=["checkpoint", "checkpoint in checkpoint"])
def test_a_recomputed_forward_counts_once(reentrant: bool, within: int) -> None:
    input, target, _ = bad_sample("cross_entropy")
    with counted() as reports:
        for batch in range(1, 4):
            function: Callable[..., Tensor] = quietly
            for _ in range(within):
                function = partial(checkpoint, function, use_reentrant=reentrant)
            function(input.clone().requires_grad_(), target).backward()
            lossguard.check()
            assert len(reports) == batch
    assert calls() == [(3, 3)]


class LossInBackward(torch.autograd.Function):
    """As an adversarial or meta-learning step: a loss of its own in the backward, computed for the first time there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], Tensor]) -> Tensor:
        ctx.function = function
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.function()
        return grad.expand(3), None


def in_a_function(function: Callable[[], Tensor]) -> None:
    LossInBackward.apply(torch.ones(3, requires_grad=True), function).backward()


def in_a_hook(function: Callable[[], Tensor]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: function() and None)
    y.sum().backward()


def in_checkpoint_in_a_hook(function: Callable[[], Tensor]) -> None:
    in_a_hook(lambda: checkpoint(function, use_reentrant=False))


@pytest.mark.parametrize("where", [in_a_function, in_a_hook, in_checkpoint_in_a_hook])
def test_a_loss_in_a_backward_is_not_taken_for_a_recomputed_one(where: Callable[[Any], None]) -> None:
    """The same wrong labels every time, at a line that also ran outside of a backward."""
    input, target, _ = bad_sample("cross_entropy")
    with counted() as reports:
        quietly(input, target)
        for _ in range(3):
            where(lambda: quietly(input, target))
    assert len(reports) == 4 and calls() == [(4, 4)]
    for _ in range(2):
        with pytest.raises(lossguard.TargetOutOfBoundsError):
            where(lambda: L.cross_entropy(input, target))
            lossguard.check()


class Kept:
    """Something of the caller's, like the activations of its batch."""


def at_the_call(optimizer: torch.optim.Optimizer, function: Callable[[], Tensor]) -> None:
    with lossguard.guard(when="immediately"):
        function()


def at_the_step(optimizer: torch.optim.Optimizer, function: Callable[[], Tensor]) -> None:
    lossguard.configure(when="deferred")
    function()
    optimizer.step()


def in_a_closure(optimizer: torch.optim.Optimizer, function: Callable[[], Tensor]) -> None:
    lossguard.configure(when="deferred")
    optimizer.step(function)


def at_unscale(optimizer: torch.optim.Optimizer, function: Callable[[], Tensor]) -> None:
    lossguard.configure(when="deferred")
    function()
    torch.amp.GradScaler("cpu").unscale_(optimizer)


def at_a_check(optimizer: torch.optim.Optimizer, function: Callable[[], Tensor]) -> None:
    lossguard.configure(when="deferred")
    function()
    lossguard.check()


def at_a_check_of_all_ranks(optimizer: torch.optim.Optimizer, function: Callable[[], Tensor]) -> None:
    lossguard.configure(when="deferred")
    function()
    lossguard.distributed.check()


@pytest.mark.parametrize(
    "where", [at_the_call, at_the_step, in_a_closure, at_unscale, at_a_check, at_a_check_of_all_ranks]
)
@over_kinds
def test_a_caught_exception_keeps_nothing_alive(kind: str, where: Callable[..., None]) -> None:
    """No cycle of exception, traceback and frame, which would hold the memory of the batch until it is collected."""
    function, _ = KINDS[kind]
    input, target, _ = bad_sample(kind)
    input.requires_grad_()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    kept = []

    def step() -> None:
        of_this_batch = Kept()
        kept.append(weakref.ref(of_this_batch))
        where(optimizer, lambda: getattr(L, function)(input, target))

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(lossguard.LossValidationError):
            step()
            pytest.fail("nothing was raised")
        assert kept[0]() is None
    finally:
        gc.enable()


def test_another_thread_does_not_step_on_what_is_held() -> None:
    """Raising deferred: at the next step, and at the caller's own unless that was the same optimizer's."""
    input, target, _ = bad_sample("cross_entropy")
    input.requires_grad_()

    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])

    def step(which: torch.optim.Optimizer, bad: bool) -> None:
        if not bad:
            return which.step()
        with pytest.raises(lossguard.TargetOutOfBoundsError):
            which.step()

    with ThreadPoolExecutor(1) as pool:

        def there(function: Callable[..., Any], *args: Any) -> Any:
            return pool.submit(function, *args).result(60)

        shared, own = optimizer(), optimizer()
        for bad_for_own in (False, True):
            there(lambda: L.cross_entropy(input, target, when="deferred"))
            step(shared, True)
            if bad_for_own:
                there(step, own, True)
            step(shared, False)
            there(step, shared, False)
            there(step, own, False)


@over_kinds
def test_warnings_made_errors_raise_every_time(kind: str) -> None:
    """As Python's own: an "error" filter is not used up by the first."""
    function, _ = KINDS[kind]
    input, target, _ = bad_sample(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", lossguard.LossValidationWarning)
        for _ in range(2):
            with pytest.raises(lossguard.LossValidationWarning):
                getattr(L, function)(input, target, on_violation="warn")
    good = sample(kind)[1]
    torch.testing.assert_close(getattr(L, function)(input, good), getattr(F, function)(input, good))


def test_ignored_warnings_still_skip() -> None:
    input, target, good = bad_sample("cross_entropy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = L.cross_entropy(input, target, on_violation="warn")
    torch.testing.assert_close(loss, F.cross_entropy(input[good], target[good]))


# ---- the checks native does not make


def tolerated() -> list[Any]:
    values = []
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        ulp = torch.finfo(dtype).eps
        slack = max(4 * ulp, 1e-6)
        inside = [0.0, 1.0, 1 + 4 * ulp, -4 * ulp, 1 + 0.9 * slack, -0.9 * slack]
        outside = [
            1 + 1.2 * slack,
            -1.2 * slack,
            1 + 16 * max(ulp, 1e-6),
            -16 * max(ulp, 1e-6),
            nan,
            inf,
            -inf,
            -1.0,
            255,
        ]
        values += [pytest.param(dtype, v, True, id=f"{dtype}-{v:.9g}") for v in inside]
        values += [pytest.param(dtype, v, False, id=f"{dtype}-{v:.9g}") for v in outside]
    named = [(1 + 8e-7, True), (1.00001, False), (1.0000001, True), (-1e-7, True), (-1e-5, False)]
    values += [pytest.param(torch.float32, v, ok, id=f"named-{v:.9g}") for v, ok in named]
    return values


@pytest.mark.parametrize("dtype, value, passes", tolerated())
@pytest.mark.parametrize("kind", ["bce_with_logits", "probabilities"])
def test_tolerance_of_the_extra_checks(kind: str, dtype: torch.dtype, value: float, passes: bool) -> None:
    function, _ = KINDS[kind]
    input, target = sample(kind, dtype=dtype)
    target[3, 2] = value
    loss = getattr(L, function)
    if not passes:
        with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
            loss(input, target)
        assert caught.value.report.indices == [(3, 2)]
        assert caught.value.report.values == [pytest.approx(target[3, 2].item(), rel=0, abs=0, nan_ok=True)]
        return
    lenient = loss_and_gradient(loss, input, target, strict=False)
    identical(loss_and_gradient(loss, input, target), lenient)
    identical(loss_and_gradient(loss, input, target, on_violation="skip"), lenient)
    x = input.clone().requires_grad_()  # the gradient in torch operations has bounds of its own
    (gradient,) = torch.autograd.grad(loss(x, target, on_violation="skip"), x, create_graph=True)
    torch.testing.assert_close(gradient.detach(), lenient[1])


@pytest.mark.parametrize("value", [1 + 2**-23, -(2.0**-30), 1.0000001, nan])
def test_the_checks_native_makes_are_exact(value: float) -> None:
    for which in (0, 1):
        args = [t.clone() for t in sample("bce")]
        args[which][2, 2] = value
        with pytest.raises(RuntimeError):
            F.binary_cross_entropy(*args)
        with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
            L.binary_cross_entropy(*args)
        assert caught.value.report.tensor == ("input", "target")[which]


def test_tolerance_is_that_of_the_targets_dtype() -> None:
    """A target rounded to bfloat16 and widened by autocast or promotion is judged as the values it holds."""
    input, target = sample("bce_with_logits")
    target = target.bfloat16()
    target[0, 0] = 1 + 4 * torch.finfo(torch.bfloat16).eps
    with torch.autocast("cpu", dtype=torch.bfloat16):
        L.binary_cross_entropy_with_logits(input.bfloat16(), target)
        target[0, 0] = 1 + 8 * torch.finfo(torch.bfloat16).eps
        with pytest.raises(lossguard.ValueOutOfRangeError):
            L.binary_cross_entropy_with_logits(input.bfloat16(), target)


@pytest.mark.parametrize("shape", [(N, C), (C,), (N, 1), (1, C)], ids=str)
@pytest.mark.parametrize("value", [-1.0, 255.0])
def test_targets_of_weight_0_are_exempt(shape: tuple[int, ...], value: float) -> None:
    input, target = sample("bce_with_logits")
    weight = torch.ones(shape)
    weight.view(-1)[1] = 0
    exempt = (weight == 0).expand(N, C)
    target[exempt] = value
    torch.testing.assert_close(
        loss_and_gradient(L.binary_cross_entropy_with_logits, input, target, weight=weight),
        loss_and_gradient(F.binary_cross_entropy_with_logits, input, target, weight=weight),
    )
    row, column = (~exempt).nonzero()[0].tolist()
    target[row, column] = value
    with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
        L.binary_cross_entropy_with_logits(input, target, weight=weight)
    assert caught.value.report.indices == [(row, column)]
    target[row, column] = 0.5
    with pytest.raises(lossguard.ValueOutOfRangeError):
        L.binary_cross_entropy_with_logits(input, target, pos_weight=weight)  # no exemption: the term of y = 0 counts


def test_probabilities_of_classes_with_weight_0_are_exempt() -> None:
    input, target = sample("probabilities")
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    target[:, 1] = -1
    torch.testing.assert_close(
        loss_and_gradient(L.cross_entropy, input, target, weight=weight),
        loss_and_gradient(F.cross_entropy, input, target, weight=weight),
    )
    target[4, 3] = -1
    with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
        L.cross_entropy(input, target, weight=weight)
    assert caught.value.report.indices == [(4, 3)]


def test_weight_0_exempts_from_no_check_of_native() -> None:
    input, target = sample("bce")
    target[0, 0] = -1
    weight = torch.ones(N, C)
    weight[0, 0] = 0
    for module in (F, L):
        with pytest.raises(RuntimeError, match="all elements of target should be between 0 and 1"):
            module.binary_cross_entropy(input, target, weight)
    labels = sample("cross_entropy")[1]
    labels[1] = C
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        L.cross_entropy(input, labels, torch.zeros(C))


# ---- ignored elements, and finiteness


@pytest.mark.parametrize("kind", ["nll", "cross_entropy"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("ignore_index", [-100, 255, 2, -1])
def test_ignored_rows_may_hold_anything(kind: str, value: float, ignore_index: int) -> None:
    function, _ = KINDS[kind]
    input, target = sample(kind, n=40)
    target[target == 2] = 3
    ignored = torch.arange(40) % 3 == 0
    target[ignored], input[ignored] = ignore_index, value
    for reduction in ("none", "mean", "sum"):
        loss = partial(getattr(L, function), ignore_index=ignore_index, reduction=reduction, check_finite=True)
        value_, gradient = loss_and_gradient(loss, input, target)
        expected = loss_and_gradient(loss, input[~ignored], target[~ignored])
        assert (gradient[ignored] == 0).all()
        same_rows(gradient[~ignored], expected[1])
        torch.testing.assert_close(value_[~ignored] if reduction == "none" else value_, expected[0])


def test_minus_inf_masks_classes_in_cross_entropy() -> None:
    input, target = sample("cross_entropy")
    input[torch.arange(N), (target + 1) % C] = -inf
    for t in (target, F.one_hot(target, C).float()):
        ours = loss_and_gradient(L.cross_entropy, input, t, check_finite=True)
        torch.testing.assert_close(ours, loss_and_gradient(F.cross_entropy, input, target))
    input[3, target[3]] = -inf  # the mask hides the label: an infinite loss, but no violation
    assert L.cross_entropy(input, target, check_finite=True) == F.cross_entropy(input, target) == inf


@pytest.mark.parametrize("kind", ["cross_entropy", "probabilities"])
def test_a_row_masked_throughout_is_reported(kind: str) -> None:
    input, target = sample(kind)
    input[4] = -inf
    with pytest.raises(lossguard.NonFiniteError) as caught:
        L.cross_entropy(input, target, check_finite=True)
    assert caught.value.report.indices == [(4, c) for c in range(C)]
    assert caught.value.report.counts == {"-inf": C}
    if kind == "cross_entropy":
        target[4] = -100
        assert L.cross_entropy(input, target, check_finite=True).isfinite()


@pytest.mark.parametrize("kind", ["bce_with_logits", "cross_entropy", "probabilities"])
def test_nonfinite_logits_are_counted_by_kind(kind: str) -> None:
    function, _ = KINDS[kind]
    input, target = sample(kind)
    input[1, 1], input[2, 4], input[5, 0] = nan, inf, -inf
    with pytest.raises(lossguard.NonFiniteError) as caught:
        getattr(L, function)(input, target, check_finite=True)
    masked = kind != "bce_with_logits"
    assert caught.value.report.indices == [(1, 1), (2, 4)] + [(5, 0)] * (not masked)
    assert caught.value.report.counts == {"NaN": 1, "+inf": 1} | ({} if masked else {"-inf": 1})


def test_nll_checks_the_log_probability_of_the_target() -> None:
    input, target = sample("nll")
    input[1, (target[1] + 1) % C] = nan  # read by nobody
    assert L.nll_loss(input, target, check_finite=True).isfinite()
    for value, name in ((nan, "NaN"), (-inf, "-inf"), (inf, "+inf")):
        input[3, target[3]] = value
        with pytest.raises(lossguard.NonFiniteError) as caught:
            L.nll_loss(input, target, check_finite=True)
        assert caught.value.report.indices == [(3, int(target[3]))] and caught.value.report.counts == {name: 1}


def test_bce_needs_no_check_finite() -> None:
    for value in (nan, inf, -inf):
        input, target = sample("bce")
        input[2, 3] = value
        with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
            L.binary_cross_entropy(input, target, check_finite=False)
        assert not isinstance(caught.value, lossguard.NonFiniteError)
        assert caught.value.report.indices == [(2, 3)]


def test_precedence_target_then_input_then_finiteness() -> None:
    input, target = sample("bce")
    input[0, 0], target[1, 1] = 2.0, 2.0
    with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
        L.binary_cross_entropy(input, target)
    assert [s.tensor for s in caught.value.report.sections] == ["target", "input"]
    logits, labels = sample("cross_entropy")
    logits[0, 0], labels[1] = nan, C
    logits[1, 1] = nan  # beside a bad label: not an element that counts
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
        L.cross_entropy(logits, labels, check_finite=True)
    assert [(s.kind, s.indices) for s in caught.value.report.sections] == [
        ("class_index", [(1,)]),
        ("finite", [(0, 0)]),
    ]
