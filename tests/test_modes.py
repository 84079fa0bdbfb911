"""Autocast, mixed dtypes, grad modes, torch_function, and calls for which there is no kernel: as native.

What has no kernel must give native's result, with one NotValidatedWarning, or native's error.
"""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lossguard
import lossguard.functional as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import hessian, jacfwd, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

N, C = 4, 5
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def sample(kind: str) -> tuple[str, Tensor, Tensor]:
    """The function's name, input and target."""
    g = torch.Generator().manual_seed(len(kind))
    logits, soft = torch.randn(N, C, generator=g), torch.rand(N, C, generator=g) * 0.9 + 0.05
    labels = torch.tensor([0, 4, 2, 2])
    return {
        "bce": ("binary_cross_entropy", torch.sigmoid(logits), soft),
        "bce_with_logits": ("binary_cross_entropy_with_logits", logits, soft),
        "nll": ("nll_loss", torch.log_softmax(logits, -1), labels),
        "cross_entropy": ("cross_entropy", logits, labels),
        "probabilities": ("cross_entropy", logits, torch.softmax(soft, -1)),
    }[kind]


KINDS = ("bce", "bce_with_logits", "nll", "cross_entropy", "probabilities")
over_kinds = pytest.mark.parametrize("kind", KINDS)


def weight() -> Tensor:
    return torch.linspace(0.5, 1.5, C)


def outcome(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `f` returns, or the type of what it raises."""
    try:
        return f(*args, **kwargs)
    except Exception as error:
        return type(error)


# ---- dtypes


def dtype_combinations(kind: str) -> Iterator[tuple[Any, ...]]:
    """(input's dtype, target's or None, name of a weight or None, its dtype)"""
    soft = kind in ("bce", "bce_with_logits", "probabilities")
    names = {"bce_with_logits": ("weight", "pos_weight")}.get(kind, ("weight",))
    weights = [(None, None), *itertools.product(names, FLOATS)]
    for input, target in itertools.product(FLOATS, FLOATS if soft else (None,)):
        for name, dtype in weights:
            yield input, target, name, dtype


# A half-precision result is rounded, and native's is computed in half precision outside autocast.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def loss_and_gradient(f: Callable[..., Tensor], context: Any, input: Tensor, target: Tensor, **options: Any) -> Any:
    leaf = input.clone().requires_grad_()
    with context():
        loss = f(leaf, target, **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]


def summary(result: Any) -> str:
    if isinstance(result, type):
        return result.__name__
    return ", ".join(f"{name} {t.dtype} {t.double().sum():.6g}" for name, t in zip(("loss", "gradient"), result))


def check_dtypes(kind: str, context: Callable[[], Any], widened: bool) -> None:
    """`widened`: native computes in float32, so that only the results are rounded."""
    function, x, t = sample(kind)
    wrong, computed = [], 0
    for number, combination in enumerate(dtype_combinations(kind)):
        input_dtype, target_dtype, name, weight_dtype = combination
        target = t if target_dtype is None else t.to(target_dtype)
        options: dict[str, Any] = {} if name is None else {name: weight().to(weight_dtype)}
        options["reduction"] = ("none", "mean")[number % 2]
        arguments = (context, x.to(input_dtype), target)
        ours, native = (outcome(loss_and_gradient, getattr(m, function), *arguments, **options) for m in (L, F))
        if isinstance(native, type) or isinstance(ours, type):
            same = ours is native
        else:
            computed += 1
            coarsest = max(TOLERANCE[d] for d in combination if isinstance(d, torch.dtype))
            same = all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(ours, native))
            for a, b in zip(ours, native):
                tolerance = TOLERANCE[b.dtype] if widened else coarsest
                same = same and torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance / 4)
        if not same:
            wrong.append((*combination, options["reduction"], summary(ours), summary(native)))
    assert computed >= 8
    assert not wrong, "\n".join(map(str, wrong))


@over_kinds
def test_mixed_dtypes_outside_autocast(kind: str) -> None:
    check_dtypes(kind, partial(torch.autocast, "cpu", enabled=False), widened=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@over_kinds
def test_autocast(kind: str, dtype: torch.dtype) -> None:
    check_dtypes(kind, partial(torch.autocast, "cpu", dtype=dtype), widened=True)


@over_kinds
def test_autocast_of_a_network(kind: str) -> None:
    torch.manual_seed(0)
    function, _, t = sample(kind)
    layer, x = torch.nn.Linear(3, C), torch.randn(N, 3)
    squash = {"bce": torch.sigmoid, "nll": lambda y: torch.log_softmax(y, -1)}.get(kind, lambda y: y)
    gradients = []
    for module in (L, F):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = squash(layer(x))
            loss = getattr(module, function)(y if kind != "bce" else y.float(), t)
            assert loss.dtype == torch.float32
        loss.backward()
        gradients.append([loss.detach(), layer.weight.grad, layer.bias.grad])
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-3)


def test_autocast_reports_the_values_given() -> None:
    _, x, t = sample("bce_with_logits")
    t = t.bfloat16()
    t[1, 2] = 1.5
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(lossguard.ValueOutOfRangeError) as caught:
        L.binary_cross_entropy_with_logits(x.bfloat16(), t)
    report = caught.value.report
    assert (report.indices, report.values, report.dtypes["target"]) == ([(1, 2)], [1.5], "bfloat16")


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_promoted_calls_are_checked(reduction: str) -> None:
    for kind in ("bce_with_logits", "probabilities"):
        function, x, t = sample(kind)
        t[2, 1] = -3
        for dtypes in ((torch.float32, torch.float64), (torch.bfloat16, torch.float32)):
            with pytest.raises(lossguard.ValueOutOfRangeError) as caught:
                getattr(L, function)(x.to(dtypes[0]), t.to(dtypes[1]), reduction=reduction)
            assert caught.value.report.indices == [(2, 1)]
            assert caught.value.report.call_site.file == __file__


OTHER_DTYPES = (
    torch.float32, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
)  # fmt: skip


@over_kinds
def test_dtypes_that_are_no_losses_raise_natives_types(kind: str) -> None:
    function, x, t = sample(kind)
    if kind in ("bce", "probabilities"):
        x, t = x.round(), t.round()
    wrong, refused = [], 0
    for input_dtype, target_dtype in itertools.product(OTHER_DTYPES, OTHER_DTYPES):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours, native = (outcome(getattr(m, function), x.to(input_dtype), t.to(target_dtype)) for m in (L, F))
        refused += isinstance(native, type)
        if isinstance(native, type) or isinstance(ours, type):
            same = ours is native
        else:
            same = ours.dtype == native.dtype and torch.allclose(ours, native, equal_nan=True)
        if not same:
            wrong.append((input_dtype, target_dtype, ours, native))
    assert refused > 50
    assert not wrong, "\n".join(map(str, wrong))


@over_kinds
def test_weight_dtypes_that_fit_nothing_raise_natives_types(kind: str) -> None:
    function, x, t = sample(kind)
    for name in ("weight", "pos_weight") if kind == "bce_with_logits" else ("weight",):
        for dtype in OTHER_DTYPES:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ours, native = (outcome(getattr(m, function), x, t, **{name: (weight() * 2).to(dtype)}) for m in (L, F))
            if isinstance(native, type):
                assert ours is native, dtype
            else:
                assert ours.dtype == native.dtype, dtype
                torch.testing.assert_close(ours, native)


@pytest.mark.parametrize("kind", ["cross_entropy", "nll"])
@pytest.mark.parametrize("argument", ["input", "target", "weight"])
@pytest.mark.parametrize("value", [[0.0, 1.0], 1.0, "text"], ids=str)
def test_arguments_that_are_no_tensors_raise_natives_types(kind: str, argument: str, value: Any) -> None:
    function, x, t = sample(kind)
    arguments = {"input": x, "target": t, argument: value}
    ours, native = (outcome(getattr(m, function), **arguments) for m in (L, F))
    assert ours is native is TypeError


@pytest.mark.parametrize("kind", ["cross_entropy", "nll"])
@pytest.mark.parametrize("ignore_index", [1.0, "1", 2**70, torch.tensor(1), True, False], ids=repr)
def test_ignore_index_of_another_type_raises_natives_type(kind: str, ignore_index: Any) -> None:
    function, x, t = sample(kind)
    ours, native = (outcome(getattr(m, function), x, t, ignore_index=ignore_index) for m in (L, F))
    assert ours is native if isinstance(native, type) else torch.equal(ours, native)


@over_kinds
@pytest.mark.parametrize("reduction", ["Mean", "batchmean", None, 1], ids=str)
def test_unknown_reductions_raise_natives_type(kind: str, reduction: Any) -> None:
    function, x, t = sample(kind)
    ours, native = (outcome(getattr(m, function), x, t, reduction=reduction) for m in (L, F))
    assert ours is native is ValueError


@pytest.mark.parametrize("smoothing", ["0.1", None, [0.1], torch.tensor(0.1), True, 1], ids=repr)
def test_label_smoothing_of_another_type_is_natives(smoothing: Any) -> None:
    function, x, t = sample("cross_entropy")
    ours, native = (outcome(getattr(m, function), x, t, label_smoothing=smoothing) for m in (L, F))
    if isinstance(native, type):
        assert ours is native
    else:
        torch.testing.assert_close(ours, native)


@pytest.mark.parametrize("smoothing", [-0.1, -3.0, 1.0001, math.nan, math.inf])
@pytest.mark.parametrize("kind", ["cross_entropy", "probabilities"])
def test_label_smoothing_outside_its_range(kind: str, smoothing: float) -> None:
    """Natively a negative one is taken for 0, silently."""
    _, x, t = sample(kind)
    for call in (
        partial(L.cross_entropy, label_smoothing=smoothing),
        lossguard.CrossEntropyLoss(label_smoothing=smoothing),
    ):
        with pytest.raises(RuntimeError, match="label_smoothing must be between 0.0 and 1.0"):
            call(x, t)


MISFITS = {
    "bce-shape": ("binary_cross_entropy", (3, 5), (3,), torch.float32, ["3, 5"]),
    "bce-dtype": ("binary_cross_entropy", (3, 5), (3, 5), torch.float64, ["(3, 5)", "float32", "float64"]),
    "bce_with_logits-shape": ("binary_cross_entropy_with_logits", (3, 5), (5, 3), torch.float32, ["(3, 5)", "(5, 3)"]),
    "nll-batch": ("nll_loss", (3, 5), (4,), torch.int64, ["(3, 5)", "(4,)", "int64"]),
    "nll-dtype": ("nll_loss", (3, 5), (3,), torch.int32, ["(3, 5)", "float32", "(3,)", "int32"]),
    "cross_entropy-batch": ("cross_entropy", (3, 5), (4,), torch.int64, ["(3, 5)", "(4,)", "int64"]),
    "cross_entropy-dtype": ("cross_entropy", (3, 5), (3,), torch.int32, ["(3, 5)", "float32", "(3,)", "int32"]),
    "cross_entropy-one-column": ("cross_entropy", (3, 5), (3, 1), torch.int64, ["(3, 5)", "(3, 1)", "int64"]),
    "cross_entropy-spatial": ("cross_entropy", (2, 5, 4, 4), (2, 4, 3), torch.int64, ["(2, 5, 4, 4)", "(2, 4, 3)"]),
}


@pytest.mark.parametrize("function, input, target, dtype, named", MISFITS.values(), ids=MISFITS.keys())
def test_errors_name_what_was_given(function: str, input: Any, target: Any, dtype: Any, named: list[str]) -> None:
    x, t = torch.full(input, 0.5), torch.ones(target, dtype=dtype)
    native = outcome(getattr(F, function), x, t)
    assert isinstance(native, type)
    for tensors in ((x, t), (x.clone().requires_grad_(), t)):
        with pytest.raises(Exception) as caught:
            getattr(L, function)(*tensors)
        assert type(caught.value) is native
        assert all(text in str(caught.value) for text in named), str(caught.value)


# ---- grad modes


@over_kinds
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_and_inference_mode(kind: str, mode: Any) -> None:
    function, x, t = sample(kind)
    bad = t.clone()
    bad.view(-1)[3] = 77
    with mode():
        ours, native = (getattr(m, function)(x.clone().requires_grad_(), t) for m in (L, F))
        with pytest.raises(lossguard.LossValidationError):
            getattr(L, function)(x, bad)
    torch.testing.assert_close(ours, native)
    assert not ours.requires_grad and ours.grad_fn is None
    assert ours.is_inference() == native.is_inference()


@over_kinds
def test_inference_tensors_outside_their_mode(kind: str) -> None:
    function, x, t = sample(kind)
    with torch.inference_mode():
        target, input = t.clone(), x.clone()
    torch.testing.assert_close(getattr(L, function)(input, target), getattr(F, function)(input, target))
    ours, native = (outcome(getattr(m, function), x.clone().requires_grad_(), target) for m in (L, F))
    assert ours is native is RuntimeError


# ---- torch_function and torch_dispatch


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@over_kinds
def test_function_modes(kind: str, no_warnings: None) -> None:
    function, x, t = sample(kind)
    bad = t.clone()
    bad.view(-1)[3] = 77
    expected = getattr(F, function)(x, t)
    with Recorder() as mode:
        torch.testing.assert_close(getattr(L, function)(x.clone().requires_grad_(), t), expected)
        with pytest.raises(lossguard.LossValidationError) as caught:
            getattr(L, function)(x, bad)
        getattr(L, function)(x, bad, on_violation="skip")
    assert mode.seen.count(getattr(L, function)) == 3
    assert caught.value.report.call_site.file == __file__


@over_kinds
def test_default_device(kind: str, no_warnings: None) -> None:
    function, x, t = sample(kind)
    bad = t.clone()
    bad.view(-1)[3] = 77
    expected = getattr(F, function)(x, t)

    def check() -> None:
        torch.testing.assert_close(getattr(L, function)(x.clone().requires_grad_(), t), expected)
        with pytest.raises(lossguard.LossValidationError):
            getattr(L, function)(x, bad)

    with torch.device("cpu"):
        check()
    torch.set_default_device("cpu")
    try:
        check()
    finally:
        torch.set_default_device(None)


class Plain(Tensor):
    pass


@over_kinds
def test_a_plain_subclass_is_checked_and_kept(kind: str, no_warnings: None) -> None:
    function, x, t = sample(kind)
    results = []
    for module in (L, F):
        leaf = x.clone().as_subclass(Plain).requires_grad_()
        loss = getattr(module, function)(leaf, t, reduction="none")
        loss.sum().backward()
        results.append((type(loss), type(leaf.grad), loss.as_subclass(Tensor), leaf.grad.as_subclass(Tensor)))
    assert results[0][:2] == results[1][:2]
    torch.testing.assert_close(results[0][2:], results[1][2:])
    bad = t.clone()
    bad.view(-1)[3] = 77
    with pytest.raises(lossguard.LossValidationError):
        getattr(L, function)(x.as_subclass(Plain), bad)
    with pytest.raises(lossguard.LossValidationError):
        getattr(L, function)(x, bad.as_subclass(Plain))


@over_kinds
def test_parameters_and_buffers_are_tensors(kind: str, no_warnings: None) -> None:
    function, x, t = sample(kind)
    ours, native = (getattr(m, function)(torch.nn.Parameter(x), torch.nn.Buffer(t)) for m in (L, F))
    assert type(ours) is type(native) is Tensor
    torch.testing.assert_close(ours, native)


NATIVE_FUNCTIONS = {F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.nll_loss, F.cross_entropy}


class KnowsNative(Tensor):
    """As in torch's "extending" guide: what the class was not written for is NotImplemented."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in NATIVE_FUNCTIONS:
            if getattr(func, "__module__", "").startswith("lossguard"):
                return NotImplemented
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {})) + 1000


class Wrapped:
    """No tensor at all, but with __torch_function__ for native functions."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in NATIVE_FUNCTIONS:
            return NotImplemented
        unwrap = lambda a: a.value if isinstance(a, cls) else a  # noqa: E731
        return func(*map(unwrap, args), **{k: unwrap(v) for k, v in (kwargs or {}).items()})


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[warnings.WarningMessage]]:
    """Every NotValidatedWarning, as in a process that has given none yet."""
    monkeypatch.setattr(lossguard._native, "_warned", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", lossguard.NotValidatedWarning)
        yield caught


@over_kinds
def test_subclasses_that_know_native_functions_only(kind: str, said: list[Any]) -> None:
    function, x, t = sample(kind)
    for wrap in (lambda v: v.as_subclass(KnowsNative), Wrapped):
        said.clear()
        for _ in range(2):
            ours = getattr(L, function)(wrap(x), t)
        torch.testing.assert_close(ours, getattr(F, function)(wrap(x), t))
        assert len(said) == 1
    assert ours < 1000 < getattr(L, function)(x.as_subclass(KnowsNative), t)


class OnlyAten(Tensor):
    """A wrapper whose __torch_dispatch__ knows aten, as those that are written for native torch do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnlyAten:
        wrapper = Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad
        )
        wrapper.inner = inner
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in ("aten", "prim"):
            return NotImplemented
        unwrap = lambda a: a.inner if isinstance(a, OnlyAten) else a  # noqa: E731
        wrap = lambda a: OnlyAten(a) if isinstance(a, Tensor) else a  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return torch.utils._pytree.tree_map(wrap, func(*args, **kwargs))


@over_kinds
@pytest.mark.parametrize("needs_grad", [False, True])
def test_wrappers_that_know_aten_only(kind: str, needs_grad: bool, said: list[Any]) -> None:
    function, x, t = sample(kind)
    results = []
    for module in (F, L, L):
        wrapper = OnlyAten(x.clone().requires_grad_(needs_grad))
        loss = getattr(module, function)(wrapper, OnlyAten(t))
        results.append([loss.inner.detach()])
        if needs_grad:
            loss.backward()
            results[-1].append(wrapper.grad.inner)
    torch.testing.assert_close(results[0], results[2])
    torch.testing.assert_close(results[1], results[2])
    assert len(said) == 1


class Through(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@over_kinds
def test_dispatch_modes_see_one_op_each_way(kind: str, no_warnings: None) -> None:
    function, x, t = sample(kind)
    leaf = x.clone().requires_grad_()
    with Through() as mode:
        loss = getattr(L, function)(leaf, t)
        loss.backward()
        bad = t.clone()
        bad.view(-1)[3] = 77
        with pytest.raises(lossguard.LossValidationError):
            getattr(L, function)(leaf, bad)
    torch.testing.assert_close(loss, getattr(F, function)(x, t))
    forward, backward, again = [name for name in mode.seen if name.startswith("lossguard")]
    assert forward == again and backward == forward.replace("forward", "backward")


# ---- forward-mode differentiation

FORWARD_MODE: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x, t: jvp(lambda y: f(y, t), (x,), (torch.arange(20.0).view(N, C),)),
    "jacfwd": lambda f, x, t: jacfwd(lambda y: f(y, t))(x),
    "hessian": lambda f, x, t: hessian(lambda y: f(y, t))(x),
    "jvp-of-vmap": lambda f, x, t: jvp(lambda y: vmap(f)(y, t), (x,), (torch.arange(20.0).view(N, C),)),
    "vmap-of-jvp": lambda f, x, t: vmap(lambda y, s: jvp(lambda z: f(z, s), (y,), (torch.arange(float(C)),)))(x, t),
    "jacobian": lambda f, x, t: torch.autograd.functional.jacobian(
        lambda y: f(y, t), x, strategy="forward-mode", vectorize=True
    ),
}


@over_kinds
@pytest.mark.parametrize("transform", FORWARD_MODE)
def test_forward_mode_is_native_with_one_warning(kind: str, transform: str, said: list[Any]) -> None:
    function, x, t = sample(kind)
    run = FORWARD_MODE[transform]
    expected = run(getattr(F, function), x, t)
    for _ in range(2):
        ours = run(getattr(L, function), x, t)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    assert [(w.category, w.filename) for w in said] == [(lossguard.NotValidatedWarning, __file__)]
    assert function in str(said[0].message)


@over_kinds
def test_dual_tensors(kind: str, said: list[Any]) -> None:
    function, x, t = sample(kind)

    def tangent(module: Any, input: Tensor, target: Tensor) -> Any:
        with forward_ad.dual_level():
            primal, tangent = forward_ad.unpack_dual(
                getattr(module, function)(
                    forward_ad.make_dual(input, torch.arange(20.0).view(N, C)),
                    forward_ad.make_dual(target, torch.ones_like(target)) if target.is_floating_point() else target,
                )
            )
            return primal.detach(), tangent.detach()

    expected = tangent(F, x, t)
    torch.testing.assert_close(tangent(L, x, t), expected)
    torch.testing.assert_close(tangent(L, x.clone().requires_grad_(), t), expected)
    assert len(said) == 1


@over_kinds
def test_no_tangent_no_warning(kind: str, no_warnings: None) -> None:
    function, x, t = sample(kind)
    bad = t.clone()
    bad.view(-1)[3] = 77
    with forward_ad.dual_level():
        torch.testing.assert_close(getattr(L, function)(x, t), getattr(F, function)(x, t))
        with pytest.raises(lossguard.LossValidationError):
            getattr(L, function)(x, bad)


@over_kinds
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_tangent_of_the_incoming_gradient(kind: str, create_graph: bool) -> None:
    function, x, t = sample(kind)
    tangents = []
    for module in (L, F):
        leaf = x.clone().requires_grad_()
        loss = getattr(module, function)(leaf, t, reduction="none")
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.ones_like(loss), torch.arange(float(loss.numel())).view_as(loss))
            (d,) = torch.autograd.grad(loss, leaf, grad, create_graph=create_graph)
            tangents.append(forward_ad.unpack_dual(d).tangent)
    assert tangents[0] is not None
    torch.testing.assert_close(*tangents)


def test_compiled_forward_mode_is_native_with_one_warning(said: list[Any]) -> None:
    _, x, t = sample("cross_entropy")

    def derivative(loss: Any, x: Tensor, v: Tensor) -> Any:
        return jvp(lambda y: loss(y, t), (x,), (v,))

    torch._dynamo.reset()
    compiled = torch.compile(partial(derivative, L.cross_entropy), backend="aot_eager")
    v = torch.arange(20.0).view(N, C)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, v), derivative(F.cross_entropy, x, v))
    assert len(said) == 1


def test_warned_once_for_all_threads(said: list[Any]) -> None:
    together = threading.Barrier(4)

    def warn() -> None:
        together.wait()
        lossguard._native.not_validated("cross_entropy", "a reason")

    threads = [threading.Thread(target=warn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 1


def test_the_warning_can_be_made_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossguard._native, "_warned", {})
    _, x, t = sample("cross_entropy")
    with warnings.catch_warnings():
        warnings.simplefilter("error", lossguard.NotValidatedWarning)
        with pytest.raises(lossguard.NotValidatedWarning):
            jvp(lambda y: L.cross_entropy(y, t), (x,), (x,))


# ---- layouts and wrappers without a kernel


@over_kinds
def test_nested_tensors(kind: str, said: list[Any]) -> None:
    function, x, t = sample(kind)
    offsets = torch.tensor([0, 1, 4])
    results = []
    for module in (L, F):
        input, target = (torch.nested.nested_tensor_from_jagged(v, offsets) for v in (x, t))
        results.append(outcome(getattr(module, function), input, target, reduction="none"))
    if isinstance(results[1], type):  # torch 2.10 to 2.13 refuse them all
        assert results[0] is results[1] and not said
    else:
        torch.testing.assert_close(results[0].values(), results[1].values())
        assert len(said) == 1


@pytest.mark.parametrize(
    "kind, which, convert",
    [
        (kind, which, convert)
        for kind in KINDS
        for which in ("input", "target")
        for convert in ("to_sparse", "to_sparse_csr", "to_mkldnn")
        if which == "input" or convert == "to_sparse" or kind not in ("nll", "cross_entropy")  # labels are 1-d integers
    ],
)
def test_layouts_that_native_refuses(kind: str, which: str, convert: str, said: list[Any]) -> None:
    function, x, t = sample(kind)
    if which == "input":
        x = getattr(x, convert)()
    else:
        t = getattr(t, convert)()
    ours, native = (outcome(getattr(m, function), x, t) for m in (L, F))
    if isinstance(native, type):
        assert ours is native and not said
    else:
        torch.testing.assert_close(ours, native)


def distributed_worker(rank: int, folder: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    g = torch.Generator().manual_seed(0)
    x, t = torch.randn(4, 16, generator=g), torch.randint(0, 16, (4,), generator=g)
    leaf = x.clone().requires_grad_()
    full = F.cross_entropy(leaf, t)
    full.backward()

    problems = []
    for name, target in (("plain", t), ("replicated", distribute_tensor(t, mesh, [Replicate()]))):
        for needs_grad in (True, False):
            lossguard._native._warned.clear()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                try:
                    logits = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_(needs_grad)
                    with loss_parallel():
                        losses = [L.cross_entropy(logits, target) for _ in range(2)]
                        if needs_grad:
                            losses[1].backward()
                    for loss in losses:
                        torch.testing.assert_close(loss.full_tensor(), full)
                    if needs_grad:
                        torch.testing.assert_close(logits.grad.full_tensor(), leaf.grad)
                    count = sum(w.category is lossguard.NotValidatedWarning for w in said)
                    assert count == 1, f"{count} warnings"
                except Exception as error:
                    problems.append(f"loss_parallel, {name} target, grad {needs_grad}: {type(error).__name__}: {error}")

    for function in ("binary_cross_entropy", "binary_cross_entropy_with_logits"):
        p = torch.sigmoid(x)
        rows = [distribute_tensor(p, mesh, [Shard(0)]) for _ in range(2)]
        try:
            torch.testing.assert_close(getattr(L, function)(*rows).full_tensor(), getattr(F, function)(p, p))
        except Exception as error:
            problems.append(f"{function}: {type(error).__name__}: {error}")

    try:
        L.cross_entropy(x, t + 16 * rank)  # raises nothing on one rank alone: see test_distributed.py
        lossguard.check()
        if rank:
            problems.append("a plain bad batch passed")
    except lossguard.LossValidationError as error:
        if error.report.rank != 1 or "rank 1" not in str(error):
            problems.append(f"the report names rank {error.report.rank}")
    Path(folder, f"rank{rank}").write_text("\n".join(problems) or "fine")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")
def test_dtensor_and_loss_parallel(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(distributed_worker, args=(str(tmp_path),), nprocs=2)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["fine", "fine"]
