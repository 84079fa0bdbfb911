"""Every CUDA kernel, at the edges of every regime: losses, gradients and reports against float64 references.

The tests run on a GPU where there is one, and on the CPU in the emulated build (tests/cuda_emulator), where they also
hold each call to the kernels that the tables of cuda_support.py name for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import cuda_support as support
import lossguard.functional as F
import pytest
import references as ref
import torch
import torch.nn.functional as native
from cuda_support import (
    DTYPES,
    ELEMENTS,
    HALVES,
    LABELS,
    REDUCTIONS,
    ROWS,
    Elements,
    Rows,
    bce_kernels,
    ce_kernels,
    class_count,
    draws,
    emulator,
    f32,
    lay_out,
    nll_kernels,
    rows_shape,
)
from lossguard import _C, LossValidationError
from test_properties import (
    assert_accurate,
    bce_units,
    cross_entropy_units,
    mask_classes,
    nll_units,
    spoil_rows,
    strides,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CSRC = Path(__file__).parent.parent / "csrc/cuda"
nan, inf = math.nan, math.inf
only_emulated = pytest.mark.skipif(not support.EMULATED, reason="of the emulated build: `make test-emulated`")


@pytest.fixture
def device() -> Iterator[str]:
    if support.DEVICE is None:
        pytest.skip(support.WHY_NO_DEVICE)
    if emulator():
        emulator().launches()
    yield support.DEVICE
    if emulator():
        emulator().set_schedule("ascending")


def by_name(regimes) -> dict:
    return dict(argvalues=regimes, ids=[regime.name for regime in regimes])


# ---- values

IGNORED = 255  # the ignore_index of these tests
GRADS = ("contiguous", "one for all", "strided", "permuted")  # how gradients of the elements of a loss are laid out


class Want:
    """What the references say of a call, held to native torch in float64 where that takes the arguments too."""

    def __init__(self, function: str, input: Tensor, *tensors: Tensor | None, grad_output: Tensor, **options) -> None:
        good = "on_violation" not in options
        options.pop("on_violation", None)
        self.input, self.grad_output = input, grad_output
        cpu = [_on_cpu(t) for t in (input, *tensors)]
        options = {name: _on_cpu(value) for name, value in options.items()}
        self.expected = getattr(ref, function)(*cpu, **options, grad_output=grad_output.cpu())
        if good and self.expected.good.any():
            x, *others = map(_in_float64, cpu)
            x = x.clone(memory_format=torch.contiguous_format).requires_grad_()
            loss = getattr(native, function)(x, *others, **{k: _in_float64(v) for k, v in options.items()})
            loss.backward(grad_output.cpu().double())
            torch.testing.assert_close(self.expected.loss, loss.detach(), rtol=1e-12, atol=1e-12)
            # The floor of native's BCE gradient is 1e-12 in float32: 4e-9 off.
            torch.testing.assert_close(self.expected.grad, x.grad, rtol=5e-9, atol=1e-12)

    def check(self, loss: Tensor, grad: Tensor, units_loss: float, units_grad: float) -> None:
        assert loss.dtype == self.grad_output.dtype and loss.device == grad.device == self.input.device
        assert strides(grad) == strides(torch.empty_like(self.input))
        loss, grad, (want_loss, loss_size, want_grad, grad_size, good) = loss.cpu(), grad.cpu(), self.expected
        assert_accurate(loss, want_loss, loss_size, units_loss, loss.dtype)
        assert_accurate(grad, want_grad, grad_size, units_grad, self.input.dtype)
        rows = grad if grad.shape == good.shape else grad.movedim(0 if grad.dim() == 1 else 1, -1)
        assert (rows[~good] == 0).all()  # literally
        if loss.shape == good.shape:
            assert (loss[~good] == 0).all()


def _on_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, Tensor) else value


def _in_float64(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def run(function: str, input: Tensor, *tensors: Tensor | None, grad_output: Tensor, **options) -> tuple[Tensor, Tensor]:
    """Loss and gradient."""
    x = input.detach().requires_grad_()
    loss = getattr(F, function)(x, *tensors, **options)
    (grad,) = torch.autograd.grad(loss, x, grad_output)
    return loss.detach(), grad


def grad_of(shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: str) -> Tensor:
    if kind == "one for all":
        return lay_out(torch.tensor(-1.7, dtype=dtype), "contiguous", device).expand(shape)
    return lay_out(torch.randn(shape, generator=draws(5), dtype=torch.float64).to(dtype), kind, device)


def loss_shape(function: str, shape: tuple[int, ...], reduction: str) -> tuple[int, ...]:
    if reduction != "none":
        return ()
    return rows_shape(shape) if function in ("nll_loss", "cross_entropy") else shape


def expect_launches(kernels: tuple[str | None, ...], blocks: int | None = None) -> None:
    """Of the emulator, since the last call; None is any kernel."""
    if emulator():
        launches = emulator().launches()
        assert len(launches) == len(kernels)
        assert [launch.kernel for launch, kernel in zip(launches, kernels) if kernel] == list(filter(None, kernels))
        assert blocks is None or launches[0].blocks == blocks


# ---- values of cross-entropy and NLL


def logits(regime: Rows, dtype: torch.dtype) -> Tensor:
    return (5 * torch.randn(regime.shape(dtype), generator=draws(1), dtype=torch.float64)).to(dtype)


def labels(regime: Rows, dtype: torch.dtype, label_dtype: torch.dtype, bad: bool = False) -> Tensor:
    """Some of them ignored, and if `bad` some out of bounds."""
    g, shape = draws(2), regime.shape(dtype)
    rows, classes = rows_shape(shape), class_count(shape)
    t = torch.randint(min(classes, 200), rows, generator=g)
    wild = [IGNORED] * 4
    if bad:  # also labels that a narrowing to 32 or 8 bits would make valid
        wild += [classes, 254, -1, -100, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1]
        wild = [v for v in wild if v == IGNORED or not 0 <= v < classes]
    if label_dtype == torch.uint8:
        wild = [v for v in wild if 0 <= v < 256]
    if math.prod(rows) > 1:
        chosen = torch.tensor(wild)[torch.randint(len(wild), rows, generator=g)]
        t = torch.where(torch.rand(rows, generator=g) < 0.3, chosen, t)
    return t.to(label_dtype)


def probabilities(regime: Rows, dtype: torch.dtype, bad: bool = False) -> Tensor:
    g, shape = draws(3), regime.shape(dtype)
    q = torch.rand(shape, generator=g, dtype=torch.float64).softmax(0 if len(shape) == 1 else 1)
    if bad:
        wild = torch.tensor([-1.0, 1.125, nan, inf, -inf], dtype=torch.float64)
        chosen = wild[torch.randint(len(wild), shape, generator=g)]
        q = torch.where(torch.rand(shape, generator=g) < 0.4 / class_count(shape), chosen, q)
    return q.to(dtype)


def class_weights(regime: Rows, dtype: torch.dtype, device: str, own: torch.dtype | None = None) -> Tensor:
    """For logits of `dtype`; themselves of `own`, if that is another."""
    w = torch.rand(class_count(regime.shape(dtype)), generator=draws(4)) * 2 + 0.1
    return lay_out(w.to(own or dtype), regime.weight_layout, device)


# The references go row by row, slowly.
FEW_ROWS = [regime for regime in ROWS if math.prod(rows_shape(regime.shape(f32))) < 1000]


def row_options(regime: Rows, dtype: torch.dtype, more: tuple = (None,)) -> Iterator[tuple]:
    """(weights, reduction, how gradients are laid out, one of `more`): one half of all to every other dtype."""
    grads = itertools.cycle(GRADS)
    for i, (option, reduction) in enumerate(itertools.product(more, REDUCTIONS)):
        weighted = (i + DTYPES.index(dtype)) % 2 == 1 or regime.weight_layout != "contiguous"
        if regime in FEW_ROWS or reduction == "mean":
            yield weighted, reduction, next(grads), option


def row_kernels(kernels: tuple[str, str], shape: tuple[int, ...], grad_kind: str) -> tuple[str | None, ...]:
    """Those of `kernels` that are launched. None where gradients lie so that rows are not one run in every operand."""
    forward, backward = kernels
    if math.prod(shape) == 0:
        return (forward,)
    return (forward, backward if len(shape) <= 2 or grad_kind in ("contiguous", "one for all") else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", **by_name(ROWS))
def test_cross_entropy_of_labels(device, regime, dtype):
    x = lay_out(logits(regime, dtype), regime.layout, device)
    for weighted, reduction, kind, smoothing in row_options(regime, dtype, (0.0, 0.3)):
        w = class_weights(regime, dtype, device) if weighted else None
        grad = grad_of(loss_shape("cross_entropy", x.shape, reduction), kind, dtype, device)
        options = dict(ignore_index=IGNORED, label_smoothing=smoothing, reduction=reduction, grad_output=grad)
        want = Want("cross_entropy", x, labels(regime, dtype, torch.int64), w, **options)
        for label_dtype in LABELS:
            t = lay_out(labels(regime, dtype, label_dtype), regime.label_layout, device)
            want.check(
                *run("cross_entropy", x, t, w, **options), **cross_entropy_units(x.shape, dtype, reduction, True)
            )
            kernels = regime.kernels(dtype, "labels" if smoothing else "none")
            expect_launches(row_kernels(kernels, x.shape, kind), regime.blocks(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", **by_name(ROWS))
def test_cross_entropy_of_probabilities(device, regime, dtype):
    x = lay_out(logits(regime, dtype), regime.layout, device)
    q = lay_out(probabilities(regime, dtype), regime.soft_layout or regime.layout, device)
    for weighted, reduction, kind, smoothing in row_options(regime, dtype, (0.0, 0.3)):
        w = class_weights(regime, dtype, device) if weighted else None
        grad = grad_of(loss_shape("cross_entropy", x.shape, reduction), kind, dtype, device)
        options = dict(label_smoothing=smoothing, reduction=reduction, grad_output=grad)
        want = Want("cross_entropy", x, q, w, **options)
        want.check(*run("cross_entropy", x, q, w, **options), **cross_entropy_units(x.shape, dtype, reduction, True))
        expect_launches(row_kernels(regime.kernels(dtype, "probabilities"), x.shape, kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", **by_name(ROWS))
def test_nll(device, regime, dtype):
    x = lay_out(logits(regime, dtype), regime.layout, device)
    for weighted, reduction, kind, _ in row_options(regime, dtype):
        w = class_weights(regime, dtype, device) if weighted else None
        grad = grad_of(loss_shape("nll_loss", x.shape, reduction), kind, dtype, device)
        options = dict(ignore_index=IGNORED, reduction=reduction, grad_output=grad)
        want = Want("nll_loss", x, labels(regime, dtype, torch.int64), w, **options)
        for label_dtype in LABELS:
            t = lay_out(labels(regime, dtype, label_dtype), regime.label_layout, device)
            want.check(*run("nll_loss", x, t, w, **options), **nll_units(x.shape, dtype, reduction, True))
            expect_launches(row_kernels(nll_kernels(regime.nll, dtype), x.shape, kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", **by_name(FEW_ROWS))
def test_rows_that_are_ignored_or_bad_are_left_out(device, regime, dtype):
    """Whatever their logits are, whether by their label, a probability, or a logit under check_finite."""
    shape, g = regime.shape(dtype), draws(6)
    w = class_weights(regime, dtype, device)
    t = labels(regime, dtype, torch.int64, bad=True)
    dead = (t < 0) | (t >= class_count(shape)) | (t == IGNORED)
    q = lay_out(probabilities(regime, dtype, bad=True), regime.soft_layout or regime.layout, device)
    for check_finite in (False, True):
        x, masked = logits(regime, dtype), logits(regime, dtype)
        if regime.layout not in ("expanded", "one class"):
            if class_count(shape) > 1:
                masked = mask_classes(x, torch.where(dead, 0, t), g)
            if check_finite:
                some = torch.rand(dead.shape, generator=g) < 0.1
                x, masked = (spoil_rows(y, some, g, (nan, inf)) for y in (x, masked))
            masked = spoil_rows(masked, dead, g)
        x, masked = (lay_out(y, regime.layout, device) for y in (x, masked))
        hard = lay_out(t, regime.label_layout, device)
        for reduction in ("none", "mean"):
            grad = grad_of(loss_shape("cross_entropy", shape, reduction), "contiguous", dtype, device)
            common = dict(reduction=reduction, check_finite=check_finite, on_violation="skip", grad_output=grad)
            for function, args, options, kernels in (
                ("cross_entropy", (masked, hard, w), dict(ignore_index=IGNORED), regime.kernels(dtype, "none")),
                ("cross_entropy", (x, q, w), dict(label_smoothing=0.3), regime.kernels(dtype, "probabilities")),
                ("nll_loss", (masked, hard, w), dict(ignore_index=IGNORED), nll_kernels(regime.nll, dtype)),
            ):
                units = (nll_units if function == "nll_loss" else cross_entropy_units)(shape, dtype, reduction, True)
                Want(function, *args, **common, **options).check(*run(function, *args, **common, **options), **units)
                if check_finite:  # the forward over pixels looks at one at a time then
                    kernels = (re.sub(r"(ce_forward_strided<.*), \d>", r"\1, 1>", kernels[0]), kernels[1])
                expect_launches(row_kernels(kernels, shape, "contiguous"))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("regime", **by_name(FEW_ROWS))
def test_rows_under_autocast(device, regime, dtype):
    """The loss, class weights and class probabilities are float32, and the logits are widened as they are read."""
    x, w = lay_out(logits(regime, dtype), regime.layout, device), class_weights(regime, dtype, device, f32)
    q = lay_out(probabilities(regime, dtype).float(), regime.soft_layout or regime.layout, device)
    t = lay_out(labels(regime, dtype, torch.int64), regime.label_layout, device)
    # Probabilities that are not of the logits' dtype do not go with these.
    soft = {"flat": "registers", "pixels": "strided"}.get(regime.soft, regime.soft)
    for reduction in ("none", "mean"):
        grad = grad_of(loss_shape("cross_entropy", x.shape, reduction), "contiguous", f32, device)
        for target, function, options, kernels in (
            (t, "cross_entropy", dict(ignore_index=IGNORED), regime.kernels(dtype, "none")),
            (t, "cross_entropy", dict(label_smoothing=0.3), regime.kernels(dtype, "labels")),
            (q, "cross_entropy", dict(label_smoothing=0.3), ce_kernels(soft, dtype, "probabilities")),
            (t, "nll_loss", dict(ignore_index=IGNORED), nll_kernels(regime.nll, dtype)),
        ):
            if target is t:
                options["ignore_index"] = IGNORED
            units = (nll_units if function == "nll_loss" else cross_entropy_units)(x.shape, dtype, reduction, True)
            options |= dict(reduction=reduction, grad_output=grad)
            with torch.autocast(device, dtype=dtype):
                got = run(function, x, target, w, **options)
            Want(function, x, target, w, **options).check(*got, **units)
            expect_launches(row_kernels(kernels, x.shape, "contiguous"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", ("nll_loss", "cross_entropy"))
@pytest.mark.parametrize("shape", ((3, 0), (0, 0), (0, 5, 4), (2, 5, 0)), ids=str)
def test_nothing_in_a_dimension_is_as_natively(device, function, shape, dtype):
    targets = [torch.full(rows_shape(shape), IGNORED)]
    if function == "cross_entropy":
        targets += [torch.zeros(shape, dtype=dtype)]
    for target, reduction in itertools.product(targets, REDUCTIONS):
        results = []
        for module, place in ((F, device), (native, "cpu")):
            x = torch.zeros(shape, dtype=dtype, device=place, requires_grad=True)
            options = {} if target.is_floating_point() else dict(ignore_index=IGNORED)
            loss = getattr(module, function)(x, target.to(place), reduction=reduction, **options)
            loss.sum().backward()
            results.append((loss.detach().cpu(), x.grad.cpu()))
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


# ---- values of BCE and BCE-with-logits


def elements(
    regime: Elements, dtype: torch.dtype, device: str, logit: bool, bad: bool = False
) -> tuple[Tensor, Tensor]:
    """Input and target."""
    g, shape = draws(7), regime.shape(dtype)

    def sprinkled(t: Tensor, values: tuple[float, ...], share: float) -> Tensor:
        chosen = torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), shape, generator=g)]
        return torch.where(torch.rand(shape, generator=g) < share, chosen, t)

    x = torch.rand(shape, generator=g, dtype=torch.float64)
    x = 40 * x - 20 if logit else sprinkled(x, (0.0, 1.0, 1e-6, 1 - 2**-7), 0.1)
    y = sprinkled(torch.rand(shape, generator=g, dtype=torch.float64), (0.0, 1.0), 0.5)
    if bad:
        x = sprinkled(x, (nan, inf, -inf) if logit else (-1e-3, 1.125, nan, inf, -inf), 0.2)
        y = sprinkled(y, (-1.0, 1.125, nan, inf, -inf), 0.2)
    return lay_out(x.to(dtype), regime.layout, device), lay_out(y.to(dtype), regime.target_layout, device)


BCE = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("regime", **by_name(ELEMENTS))
@pytest.mark.parametrize("function", BCE)
def test_bce(device, function, regime, dtype):
    logit = function == BCE[1]
    for bad in (False, True):
        x, y = elements(regime, dtype, device, logit, bad)
        options = dict(on_violation="skip") if bad else {}
        if bad and logit:
            options["check_finite"] = True
        for reduction in REDUCTIONS:
            kernel = regime.forward_each or regime.forward if reduction == "none" else regime.forward
            for kind in ("contiguous", "like the input", "one for all", "strided")[: 4 if reduction == "none" else 1]:
                layout = regime.layout if kind == "like the input" else kind
                grad = grad_of(loss_shape(function, x.shape, reduction), layout, dtype, device)
                given = dict(options, reduction=reduction, grad_output=grad)
                repeated = "expanded" in (regime.layout, regime.target_layout)
                Want(function, x, y, **given).check(
                    *run(function, x, y, **given), **bce_units(x.shape, dtype, reduction, repeated)
                )
                # Gradients that lie in another order than the input, or apart, are not read as one stream.
                apart = reduction == "none" and (
                    kind == "strided" and x.dim() > 0 or kind == "contiguous" and regime.layout != "contiguous"
                )
                backward = "strided" if apart else regime.backward
                forward, backward = bce_kernels(kernel, dtype, logit)[0], bce_kernels(backward, dtype, logit)[1]
                expect_launches((forward, backward)[: 2 if x.numel() else 1])


WEIGHTS = ("full", "a row", "a column", "one", "strided", "some zero")


def element_weight(kind: str, dtype: torch.dtype, device: str) -> Tensor:
    shape = {"a row": (37,), "a column": (40, 1), "one": ()}.get(kind, (40, 37))
    w = 2 * torch.rand(shape, generator=draws(8)) + 0.1
    if kind == "some zero":
        w = w * (torch.rand(shape, generator=draws(9)) < 0.5)
    return lay_out(w.to(dtype), kind if kind == "strided" else "contiguous", device)


WEIGHTED = Elements("weighted", lambda dtype: (40, 37), "strided", "strided")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("function", BCE)
def test_bce_with_weights(device, function, kind, dtype):
    logit = function == BCE[1]
    x, y = elements(WEIGHTED, dtype, device, logit)
    w = element_weight(kind, dtype, device)
    weightings = [dict(weight=w)]
    if logit:
        weightings += [dict(pos_weight=w), dict(weight=w, pos_weight=element_weight("a row", dtype, device))]
    for weighting, reduction in itertools.product(weightings, REDUCTIONS):
        grad = grad_of(loss_shape(function, x.shape, reduction), "contiguous", dtype, device)
        given = dict(weighting, reduction=reduction, grad_output=grad)
        want = Want(function, x, y, **given)
        want.check(*run(function, x, y, **given), **bce_units(x.shape, dtype, reduction, True))
        expect_launches(bce_kernels("strided", dtype, logit))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("function", BCE)
def test_bce_under_autocast(device, function, dtype):
    if function == BCE[0] and device == "cuda":
        pytest.skip("refused under CUDA autocast: see test_cuda_autocast_of_bce_is_refused_as_natively")
    x, y = elements(WEIGHTED, dtype, device, function == BCE[1])
    for target, kernel in ((y, "flat"), (y.float(), "strided")):
        for reduction in REDUCTIONS:
            grad = grad_of(loss_shape(function, x.shape, reduction), "contiguous", f32, device)
            with torch.autocast(device, dtype=dtype):
                got = run(function, x, target, reduction=reduction, grad_output=grad)
            want = Want(function, x, target, reduction=reduction, grad_output=grad)
            want.check(*got, **bce_units(x.shape, dtype, reduction, False))
            # Beside a half input, a float32 target, loss or gradient is not one of the same stream.
            each = "strided" if reduction == "none" else kernel
            forward = bce_kernels(each, dtype, function == BCE[1])[0]
            expect_launches((forward, bce_kernels(each, dtype, function == BCE[1])[1]))


# ---- reports

LOSSES = dict(
    binary_cross_entropy="BCELoss",
    binary_cross_entropy_with_logits="BCEWithLogitsLoss",
    nll_loss="NLLLoss",
    cross_entropy="CrossEntropyLoss",
)


def report_of(function: str, *args: Tensor | None, **options) -> list[dict]:
    """The sections of what the call raises."""
    with pytest.raises(LossValidationError) as caught:
        getattr(F, function)(*args, **options)
    return [dataclasses.asdict(section) for section in caught.value.report.sections]


def check_report(function: str, *args: Tensor | None, label_smoothing: float = 0.0, **options) -> None:
    """Against the reference, twice; or that there is none."""
    want = ref.sections(LOSSES[function], *map(_on_cpu, args), **options)
    if function == "cross_entropy":
        options["label_smoothing"] = label_smoothing
    if not want:
        getattr(F, function)(*args, **options)
    for _ in range(2 if want else 0):
        assert repr(report_of(function, *args, **options)) == repr(want)  # NaN included


def spoiled(t: Tensor, share: str, values: tuple[float, ...], g: torch.Generator) -> Tensor:
    """Some 40 elements, the last among them, or all replaced by some of `values`."""
    chosen = torch.tensor(values, dtype=t.dtype)[torch.randint(len(values), t.shape, generator=g)]
    where = torch.rand(t.shape, generator=g) < (40 / max(t.numel(), 1) if share == "few" else 1.0)
    where.reshape(-1)[-1:] = True
    return torch.where(where, chosen, t)


def descending(shape: tuple[int, ...], last: int) -> Tensor:
    """The first in index order are the largest, so that no minimum finds them."""
    return torch.arange(last + math.prod(shape) - 1, last - 1, -1).reshape(shape)


def own_dtype(regime: Rows | Elements, regimes: tuple) -> torch.dtype:
    """Each regime has another."""
    return DTYPES[regimes.index(regime) % len(DTYPES)]


OUTSIDE = (-1.0, 1.125, nan, inf, -inf, 255.0)
MANY = 10_000  # logits: the references are slow
shares = pytest.mark.parametrize("share", ("few", "all"))


@shares
@pytest.mark.parametrize("regime", **by_name(ROWS))
def test_reports_of_labels(device, regime, share):
    dtype, g = own_dtype(regime, ROWS), draws(10)
    shape = regime.shape(dtype)
    classes = class_count(shape)
    wild = [v for v in (-1, -100, 255, classes, 2**40, -(2**63), 2**63 - 1) if not 0 <= v < classes]
    small = [v for v in (255, 254, classes) if classes <= v < 256] or [1]
    good = labels(regime, dtype, torch.int64)
    x, w = lay_out(logits(regime, dtype), regime.layout, device), class_weights(regime, dtype, device)
    for t, ignore_index in (
        (spoiled(good, share, wild, g), -100),
        (spoiled(good, share, wild, g), IGNORED),
        (spoiled(good, share, small, g).to(torch.uint8), -7),
        (descending(good.shape, classes - (good.numel() // 2 if share == "few" else 0)), -7),
    ):
        t = lay_out(t, regime.label_layout, device)
        check_report("cross_entropy", x, t, w, ignore_index=ignore_index)
        check_report("nll_loss", x, t, w, ignore_index=ignore_index)
    check_report("cross_entropy", x, t, w, ignore_index=ignore_index, label_smoothing=0.1)


@shares
@pytest.mark.parametrize("regime", **by_name(ROWS))
def test_reports_of_probabilities(device, regime, share):
    dtype, g = own_dtype(regime, ROWS), draws(11)
    x, w = lay_out(logits(regime, dtype), regime.layout, device), class_weights(regime, dtype, device)
    # Classes without weight may have any probability.
    some_zero = w.cpu() * (torch.rand(w.shape, generator=g) < 0.7)
    some_zero[-1] = 1
    some_zero = lay_out(some_zero.to(dtype), regime.weight_layout, device)
    good = probabilities(regime, dtype)
    for q in (spoiled(good, share, OUTSIDE, g), (descending(good.shape, 2) % 60000).to(dtype) / 2):
        q = lay_out(q, regime.soft_layout or regime.layout, device)
        weights = (None, w, some_zero)[0 if regime.weight_layout == "contiguous" else 1 :]
        for weight in weights[-1:] if x.numel() > MANY else weights:
            check_report("cross_entropy", x, q, weight)


@shares
@pytest.mark.parametrize("regime", **by_name([regime for regime in ROWS if regime.layout != "one class"]))
def test_reports_of_logits(device, regime, share):
    """Under check_finite: -inf masks a class, but not every one."""
    dtype, g = own_dtype(regime, ROWS), draws(12)
    shape = regime.shape(dtype)
    classes, class_dim = class_count(shape), 0 if len(shape) == 1 else 1
    x = spoiled(logits(regime, dtype), share, (nan, inf), g)
    masked = torch.rand(shape, generator=g) < 20 / max(x.numel(), 1)  # few: the reference looks at each one's row
    x = torch.where(masked, torch.full_like(x, -inf), x)
    if class_dim == 1 and len(x) > 1 and classes < 300:
        x[1] = -inf
    x, w = lay_out(x, regime.layout, device), class_weights(regime, dtype, device)
    good = labels(regime, dtype, torch.int64)
    bad = spoiled(good, share, (-1, classes), g)
    for t in (bad,) if x.numel() > MANY else (good, bad):
        t = lay_out(t, regime.label_layout, device)
        check_report("cross_entropy", x, t, w, ignore_index=IGNORED, check_finite=True)
        check_report("nll_loss", x, t, w, ignore_index=IGNORED, check_finite=True)
    good = probabilities(regime, dtype)
    bad = spoiled(good, share, OUTSIDE, g)
    for q in (bad,) if x.numel() > MANY else (good, bad):
        q = lay_out(q, regime.soft_layout or regime.layout, device)
        check_report("cross_entropy", x, q, w, check_finite=True)


@shares
@pytest.mark.parametrize("regime", **by_name(ELEMENTS))
def test_reports_of_elements(device, regime, share):
    dtype, g = own_dtype(regime, ELEMENTS), draws(13)
    shape = regime.shape(dtype)
    p, y = (t.cpu() for t in elements(regime, dtype, device, logit=False))
    x = elements(regime, dtype, device, logit=True)[0].cpu()
    bad_p, bad_y, bad_x = (spoiled(t, share, v, g) for t, v in ((p, OUTSIDE), (y, OUTSIDE), (x, (nan, inf, -inf))))
    p, bad_p, x, bad_x = (lay_out(t, regime.layout, device) for t in (p, bad_p, x, bad_x))
    y, bad_y = (lay_out(t, regime.target_layout, device) for t in (y, bad_y))
    for input, target in ((bad_p, y), (p, bad_y), (bad_p, bad_y)):
        check_report("binary_cross_entropy", input, target)
    for input, target in ((x, bad_y), (bad_x, y), (bad_x, bad_y)):
        check_report("binary_cross_entropy_with_logits", input, target, check_finite=True)
    w = (torch.rand(shape, generator=g) * (torch.rand(shape, generator=g) < 0.5)).to(dtype).to(device)
    check_report("binary_cross_entropy_with_logits", x, bad_y, w)  # where that is 0, targets may be anything
    falling = lay_out(((descending(shape, 2) % 60000).to(dtype) / 2), regime.layout, device)
    check_report("binary_cross_entropy", falling, y)


# ---- the same on every run


def bits(t: Tensor) -> Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize]
    return t.cpu().contiguous().view(integer)


def check_runs_are_alike(outcome: Callable[[], list]) -> None:
    """In every order in which an emulated GPU may run its threads; on a real one, again and again."""
    schedules = [("ascending", 1), ("descending", 1), *(("random", seed) for seed in (1, 2, 3))]
    first = None
    for schedule, seed in schedules:
        if emulator():
            emulator().set_schedule(schedule, seed)
        found = [bits(item) if isinstance(item, Tensor) else repr(item) for item in outcome()]
        first = first or found
        for got, want in zip(found, first, strict=True):
            assert got == want if isinstance(got, str) else torch.equal(got, want), (schedule, seed)


def loss_grad_and_report(function: str, x: Tensor, *tensors: Tensor | None, **options) -> list:
    found = []
    for reduction in ("none", "mean"):
        grad = grad_of(loss_shape(function, x.shape, reduction), "contiguous", x.dtype, x.device.type)
        found += run(function, x, *tensors, reduction=reduction, on_violation="skip", grad_output=grad, **options)
    try:
        getattr(F, function)(x, *tensors, **options)
    except LossValidationError as error:
        found.append(error.report.sections)
    return found


@pytest.mark.parametrize("regime", **by_name(ROWS))
def test_every_schedule_gives_the_same_bits_for_rows(device, regime):
    dtype = own_dtype(regime, ROWS)
    x, w = lay_out(logits(regime, dtype), regime.layout, device), class_weights(regime, dtype, device)
    t = lay_out(labels(regime, dtype, torch.int64, bad=True), regime.label_layout, device)
    q = lay_out(probabilities(regime, dtype, bad=True), regime.soft_layout or regime.layout, device)
    check_runs_are_alike(
        lambda: [
            *loss_grad_and_report("cross_entropy", x, t, w, ignore_index=IGNORED),
            *loss_grad_and_report("cross_entropy", x, t, w, ignore_index=IGNORED, label_smoothing=0.3),
            *loss_grad_and_report("cross_entropy", x, q, w),
            *loss_grad_and_report("nll_loss", x, t, w, ignore_index=IGNORED),
        ]
    )


@pytest.mark.parametrize("regime", **by_name(ELEMENTS))
def test_every_schedule_gives_the_same_bits_for_elements(device, regime):
    dtype = own_dtype(regime, ELEMENTS)
    p, y = elements(regime, dtype, device, logit=False, bad=True)
    x, _ = elements(regime, dtype, device, logit=True, bad=True)
    check_runs_are_alike(
        lambda: [
            *loss_grad_and_report(BCE[0], p, y),
            *loss_grad_and_report(BCE[1], x, y, check_finite=True),
        ]
    )


def test_a_hundred_bad_batches_leave_no_trace(device):
    """More than there are pieces of mailbox: each gives its own back."""
    g = draws(14)
    x, t = torch.randn(700, 5, generator=g).to(device), torch.randint(5, (700,), generator=g).to(device)
    p, y = (torch.rand(2000, generator=g).to(device) for _ in "py")

    def good_batch() -> list[Tensor]:
        one = torch.ones((), device=device)
        return [*run("cross_entropy", x, t, grad_output=one), *run(BCE[0], p, y, grad_output=one)]

    before = good_batch()
    for i in range(100):
        (section,) = report_of("cross_entropy", x, torch.where(torch.arange(700, device=device) == 7 * i, 5 + i, t))
        assert (section["count"], section["indices"], section["values"]) == (1, [(7 * i,)], [5 + i])
        assert [section["count"] for section in report_of(BCE[0], p + 2 + i, y - 2)] == [2000, 2000]
    for got, want in zip(good_batch(), before):
        assert torch.equal(bits(got), bits(want))


# ---- every kernel


@only_emulated
def test_the_tables_name_every_kernel():
    """Each of the tests above holds its calls to the kernels that its table names."""
    named = set()
    for dtype, regime in itertools.product(DTYPES, ROWS):
        kernels = [regime.kernels(dtype, spread) for spread in support.SPREADS] + [nll_kernels(regime.nll, dtype)]
        named.update(*(pair if math.prod(regime.shape(dtype)) else pair[:1] for pair in kernels))
    for dtype, regime, logit in itertools.product(DTYPES, ELEMENTS, (False, True)):
        named.add(bce_kernels(regime.forward, dtype, logit)[0])
        if math.prod(regime.shape(dtype)):
            named.add(bce_kernels(regime.backward, dtype, logit)[1])

    declared, bounds = set(), r"__launch_bounds__\((?:[^()]|\([^()]*\))*\)"
    for source in CSRC.iterdir():
        declared |= set(re.findall(rf"__global__ void\s+(?:{bounds}\s+)?(\w+)\(", source.read_text()))
    names = subprocess.run(["nm", "-C", _C.__file__], stdout=subprocess.PIPE, text=True, check=True).stdout
    functions = map(support.short, re.findall(r" void (lossguard::cuda::\w+<.*)", names))
    built = {re.match(r"\w+<(?:\(Spread\)|[^(])*>", f)[0] for f in functions if f.split("<")[0] in declared}
    assert declared == {kernel.split("<")[0] for kernel in built}
    assert built == named


# ---- when CUDA fails


@only_emulated
def test_a_driver_that_is_too_old_is_named_with_both_versions(device):
    x = torch.randn(8, 5, requires_grad=True)
    t, wrong = torch.randint(5, (8,), generator=draws(15)), torch.full((8,), 9)
    want = F.cross_entropy(x, t)
    words = (
        r"lossguard on CUDA: the NVIDIA driver is too old: it supports CUDA 12\.0, and lossguard was built with "
        r"CUDA 13\.0"
    )
    try:
        emulator().set_driver_version(12000)
        for call in (
            lambda: F.cross_entropy(x, t),
            lambda: F.cross_entropy(x, wrong),
            lambda: F.nll_loss(x, t),
            lambda: F.binary_cross_entropy_with_logits(x, torch.zeros(8, 5)),
            lambda: F.binary_cross_entropy(x, torch.zeros(8, 5)),
            lambda: torch.autograd.grad(want, x, retain_graph=True),
        ):
            with pytest.raises(RuntimeError, match=words) as caught:
                call()
            assert not isinstance(caught.value, LossValidationError)
        assert _C.cuda_status()["driver"] == 12000
    finally:
        emulator().set_driver_version(13000)
    torch.autograd.grad(want, x)
    assert torch.equal(F.cross_entropy(x, t), want)


# ---- CUDA autocast. Fake tensors lie on any device, in any build.


@contextlib.contextmanager
def fake_cuda_autocast(dtype: torch.dtype) -> Iterator[None]:
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode():
        try:
            torch.set_autocast_enabled("cuda", True)
            torch.set_autocast_dtype("cuda", dtype)
            yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])
            torch.clear_autocast_cache()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_autocast_of_bce_is_refused_as_natively(dtype, reduction):
    with fake_cuda_autocast(torch.float16):
        p, y = (torch.rand(4, 3, device="cuda", dtype=dtype) for _ in "py")
        errors = []
        for function in (native.binary_cross_entropy, F.binary_cross_entropy):
            with pytest.raises(Exception) as caught:  # noqa: B017
                function(p, y, reduction=reduction)
            errors.append(caught.value)
    theirs, ours = errors
    assert type(ours) is type(theirs) is RuntimeError
    assert str(ours).startswith(str(theirs)) and "unsafe to autocast" in str(ours)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beside", ("as the input", "float32"))
@pytest.mark.parametrize("autocast_dtype", HALVES, ids=str)
def test_dtypes_under_cuda_autocast_are_natives(autocast_dtype, beside, dtype, reduction):
    with fake_cuda_autocast(autocast_dtype):
        other = torch.float32 if beside == "float32" and dtype in HALVES else dtype
        x, y = torch.rand(4, 3, 5, device="cuda", dtype=dtype), torch.rand(4, 3, 5, device="cuda", dtype=other)
        t, w = torch.zeros(4, 5, device="cuda", dtype=torch.int64), torch.rand(3, device="cuda", dtype=other)
        for function, args in (
            ("binary_cross_entropy_with_logits", (x, y)),
            ("binary_cross_entropy_with_logits", (x, y, y)),
            ("nll_loss", (x, t, w)),
            ("cross_entropy", (x, t, w)),
            ("cross_entropy", (x, y, w)),
        ):
            ours, theirs = (getattr(module, function)(*args, reduction=reduction) for module in (F, native))
            assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device)
            assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
