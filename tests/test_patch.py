"""`lossguard.patch`: torch's own losses, whoever calls them, are validated, and given back as they were."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import lossguard
import pytest
import torch
import torch.nn.functional as F
from lossguard import TargetOutOfBoundsError, ValueOutOfRangeError
from torch import Tensor, nn
from torch.nn.functional import cross_entropy as imported_before

N, C = 8, 5
LOSSES = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.nll_loss, F.cross_entropy)
CODE = [function.__code__ for function in LOSSES]


@pytest.fixture(autouse=True)
def unpatched_before_and_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lossguard._violations, "_warned", {})
    before = lossguard.policy()["when"]
    lossguard.configure(when="immediately")
    yield
    lossguard.configure(when=before)
    assert [function.__code__ for function in LOSSES] == CODE


def batch(bad: bool = False) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(N, C, generator=g, requires_grad=True), torch.randint(C, (N,), generator=g)
    t[3] = C + 2 if bad else 1
    return x, t


class Subclass(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input * 2, target)


class Bound:
    loss = staticmethod(imported_before)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "attribute": lambda x, t: F.cross_entropy(x, t),
    "name imported before": lambda x, t: imported_before(x, t),
    "partial": functools.partial(imported_before, reduction="sum"),
    "class attribute": lambda x, t: Bound.loss(x, t),
    "default argument": lambda x, t, f=F.cross_entropy: f(x, t),
    "module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "subclass": Subclass(),
    "nll module": lambda x, t: nn.NLLLoss()(x.log_softmax(1), t),
    "nll": lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="none"),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_is_validated(use: str) -> None:
    function = USES[use]
    native, good = function(*batch()), batch()
    with lossguard.patched():
        ours = function(*good)
        torch.testing.assert_close(ours, native)
        ours.sum().backward()
        with pytest.raises(TargetOutOfBoundsError, match="Target 7 is out of bounds") as caught:
            function(*batch(bad=True))
        site = caught.value.report.call_site
        assert site is not None and site.file == __file__ and "CrossEntropy" not in type(caught.value).__name__
    x, _ = batch()
    function(x, good[1]).sum().backward()
    torch.testing.assert_close(good[0].grad, x.grad)
    with pytest.raises(IndexError) as natively:
        function(*batch(bad=True))
    assert not isinstance(natively.value, lossguard.LossValidationError)


def test_bce_is_validated() -> None:
    p, y = torch.rand(N, C), torch.rand(N, C)
    with lossguard.patched():
        torch.testing.assert_close(nn.BCELoss()(p, y), lossguard.functional.NATIVE["binary_cross_entropy"](p, y))
        with pytest.raises(ValueOutOfRangeError, match="2 of 40 elements of input"):
            nn.BCELoss()(p.index_put((torch.tensor([0, 1]),) * 2, p.new_tensor(2)), y)


EXTRA: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "BCE-with-logits": (lambda x, t: F.binary_cross_entropy_with_logits(x, t), "BCEWithLogitsLoss"),
    "probabilities": (lambda x, t: F.cross_entropy(x, t), "CrossEntropyLoss"),
}


@pytest.mark.parametrize("kind", EXTRA)
def test_what_native_does_not_check_is_computed_as_ever_and_warned_of(kind: str) -> None:
    function, loss = EXTRA[kind]
    x, t = batch()[0], torch.full((N, C), 1.5)
    native = function(x, t)
    lossguard.reset_stats()
    with lossguard.patched(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert torch.equal(function(x, t), native)
    (warning,) = caught
    assert f"{loss}: 40 of 40 elements of target" in str(warning.message)
    assert "native torch does not check this, and computes with it" in str(warning.message)
    assert "ignored" not in str(warning.message).splitlines()[-1]
    assert [(s.loss, s.calls, s.bad_calls) for s in lossguard.stats().values()] == [(loss, 2, 2)]
    with lossguard.patched(strict=True), pytest.raises(ValueOutOfRangeError):
        function(x, t)
    with lossguard.patched(on_violation="skip"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(function(x, t), native)


def test_the_policy_is_followed() -> None:
    x, t = batch(bad=True)
    kept = torch.arange(N) != 3
    with lossguard.patched(on_violation="skip"):
        torch.testing.assert_close(F.cross_entropy(x, t), F.cross_entropy(x[kept], t[kept]))
    with lossguard.patched(), lossguard.guard(on_violation="skip"):
        assert F.cross_entropy(x, t).isfinite()
    with lossguard.patched(check_finite=True), pytest.raises(lossguard.NonFiniteError):
        F.cross_entropy(torch.full((N, C), float("nan")), batch()[1])


def test_undoing_restores_what_was() -> None:
    codes = {name: f.__code__ for name, f in inspect.getmembers(F, inspect.isfunction)}
    before = dict(vars(F))
    cache = torch._functorch.config.enable_autograd_cache
    lossguard.patch()
    assert {name for name, f in inspect.getmembers(F, inspect.isfunction) if f.__code__ is not codes.get(name)} >= {
        f.__name__ for f in LOSSES
    }
    assert all(getattr(F, name) is value for name, value in before.items())  # the same objects
    lossguard.patch(strict=True)  # changes the options
    with pytest.raises(ValueOutOfRangeError):
        F.binary_cross_entropy_with_logits(torch.zeros(2), torch.full((2,), 2.0))
    lossguard.unpatch()
    lossguard.unpatch()
    assert dict(vars(F)) == before
    assert {name: f.__code__ for name, f in inspect.getmembers(F, inspect.isfunction)} == codes
    assert torch._functorch.config.enable_autograd_cache == cache


def test_blocks_nest() -> None:
    x, t = torch.zeros(2), torch.full((2,), 2.0)
    with lossguard.patched(strict=True):
        with lossguard.patched(on_violation="skip"):
            F.binary_cross_entropy_with_logits(x, t)
        with pytest.raises(ValueOutOfRangeError):
            F.binary_cross_entropy_with_logits(x, t)


def test_signature_and_source_are_torchs() -> None:
    before = [(inspect.signature(f), inspect.getsource(f), f.__doc__) for f in LOSSES]
    x, t = batch()
    with lossguard.patched():
        assert [(inspect.signature(f), inspect.getsource(f), f.__doc__) for f in LOSSES] == before
        with pytest.raises(TypeError, match="cross_entropy"):
            F.cross_entropy(x, t, nonsense=1)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="batch_size"):
            F.cross_entropy(x, t[:3])
        with pytest.warns(UserWarning, match="size_average"):
            F.cross_entropy(x, t, size_average=False)
        scripted = torch.jit.script(nn.CrossEntropyLoss())  # stays native
        torch.testing.assert_close(scripted(x, t), lossguard.functional.cross_entropy(x, t))


class Logged(Tensor):
    seen: list[Any] = []

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_sees_torchs_function() -> None:
    x, t = batch(bad=True)
    with lossguard.patched(), pytest.raises(TargetOutOfBoundsError):
        F.cross_entropy(x.detach().as_subclass(Logged), t)
    assert F.cross_entropy in Logged.seen


def test_a_subclass_sees_the_arguments_as_torch_hands_them_on() -> None:
    seen = []

    class Arguments(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is F.cross_entropy:
                seen.append((len(args), sorted(kwargs)))
            return super().__torch_function__(function, types, args, kwargs or {})

    x, t = batch()
    F.cross_entropy(x.detach().as_subclass(Arguments), t)
    with lossguard.patched():
        F.cross_entropy(x.detach().as_subclass(Arguments), t)
    assert seen[0] == seen[1]


def test_calls_that_have_no_kernel_stay_native() -> None:
    x, t = batch()
    with lossguard.patched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, tangent = torch.func.jvp(lambda x: F.cross_entropy(x, t), (x.detach(),), (torch.ones(N, C),))
        assert tangent.abs() < 1e-6
        torch.testing.assert_close(F.cross_entropy(x.to_sparse().to_dense(), t), F.cross_entropy(x, t))
    per_sample = torch.func.vmap(lambda x, t: F.cross_entropy(x, t))
    with lossguard.patched():
        with pytest.raises(TargetOutOfBoundsError):
            per_sample(x.detach(), batch(bad=True)[1])


def step(x: Tensor, t: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(x * 2, t)


def test_under_compile() -> None:
    """What was compiled natively is compiled anew, and back; the line is the one that calls the loss."""
    compiled = torch.compile(step)
    x, t = batch()
    native = compiled(x, t)
    lines, first = inspect.getsourcelines(step)
    with lossguard.patched():
        torch.testing.assert_close(compiled(x, t), native)
        with pytest.raises(TargetOutOfBoundsError) as caught:
            compiled(*batch(bad=True))
        site = caught.value.report.call_site
        assert site is not None and (site.file, site.function) == (__file__, "step")
        assert first < site.line < first + len(lines)
        compiled(x, t).backward()
        module = torch.compile(nn.CrossEntropyLoss())
        with pytest.raises(TargetOutOfBoundsError):
            module(*batch(bad=True))
        with lossguard.patched(on_violation="skip"):
            assert compiled(*batch(bad=True)).isfinite()
    with pytest.raises(Exception) as natively:
        compiled(*batch(bad=True))
    assert not isinstance(natively.value, lossguard.LossValidationError)


def test_in_threads() -> None:
    """Patched by one, in force in all; undone while others call."""
    x, t = batch(bad=True)
    stop, outcomes = threading.Event(), set()

    def work() -> None:
        while not stop.is_set():
            try:
                F.cross_entropy(x, t)
            except IndexError as error:
                outcomes.add(isinstance(error, lossguard.LossValidationError))
            except BaseException as error:
                outcomes.add(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        with lossguard.patched():
            pass
    stop.set()
    for thread in threads:
        thread.join()
    assert outcomes <= {True, False}


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="on_violation"):
        lossguard.patch(on_violation="explode")  # type: ignore[arg-type]
    assert not lossguard._patch.is_patched()


def test_in_a_notebook() -> None:
    """A cell that ends in a result shows it as print does, by IPython's protocol."""
    with pytest.raises(TargetOutOfBoundsError) as caught:
        lossguard.functional.cross_entropy(*batch(bad=True))
    report = caught.value.report
    broken = lossguard.find_nonfinite(nn.Linear(3, 2), torch.full((2, 3), torch.inf))
    found = lossguard.audit([1, 2, 7], 5), lossguard.preflight(nn.Linear(3, 2), torch.zeros(2, 3)), broken, report
    for each in (*found, *lossguard.diagnose(report)):
        printer = Mock()
        vars(type(each))["_repr_pretty_"](each, printer, False)  # inherited, it would be second to the repr
        printer.text.assert_called_once_with(str(each))
