"""Losses and gradients against float64 references, over dtypes, layouts, sizes, weights, ignored and bad elements.

Each property runs with every kernel set the processor has, so that all of them are held to one reference.
Rounding errors are bounded in units of eps, the unit of the arithmetic (float32, or float64 for float64
input), relative to the sizes that the references give beside each value.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator

import lossguard
import lossguard.functional as F
import pytest
import references as ref
import torch
import torch.nn.functional as native
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from lossguard import _C
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCTIONS = ("none", "mean", "sum")
# Around vector widths (4, 8), the lane-wise limit (48), rows and elements worked on at a time (256, 1024).
SIZES = (0, 1, 2, 7, 8, 9, 31, 33, 47, 48, 49, 255, 256, 257, 1023, 1024, 1025)
CLASSES = (0, 1, 2, 3, 7, 8, 9, 31, 33, 47, 48, 49, 255, 256, 257, 1025)
MAX_LOGITS = 20_000

# The same examples on every run.
deterministic = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=250,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For speed: test_determinism.py proves that the number of threads changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextlib.contextmanager
def kernels(name: str) -> Iterator[None]:
    before = _C.cpu_kernels_in_use()
    assert _C.choose_cpu_kernels(name) and _C.cpu_kernels_in_use() == name
    try:
        yield
    finally:
        _C.choose_cpu_kernels(before)


def assert_accurate(got: Tensor, want: Tensor, size: Tensor, units: float, dtype: torch.dtype) -> None:
    """|got - want| <= units * eps * size, beside the one rounding to got's own dtype."""
    assert got.dtype == dtype and got.shape == want.shape
    own = torch.finfo(dtype)
    arithmetic = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)
    got, rounded = got.double(), want.to(dtype).double()
    special = ~rounded.isfinite()  # overflows of float16 included
    torch.testing.assert_close(got[special], rounded[special], rtol=0, atol=0, equal_nan=True)
    bound = units * arithmetic.eps * size
    if own.eps > arithmetic.eps:
        bound = bound + own.eps / 2 * want.abs()
    # Results below the normal numbers: exp gives 0 there, and rounding has a fixed step.
    bound = bound + 4096 * arithmetic.tiny + own.tiny * own.eps
    excess = ((got - want).abs() / bound)[~special]
    assert not (excess > 1).any(), f"{excess.max().item() * units:.1f} eps, {units:.1f} allowed"
    assert not got[~special].isnan().any()


def check(function, expected, input, *args, units_loss: float, units_grad: float, grad_output, **options) -> None:
    """`function` with every kernel set against what `expected` says it must give."""
    reduction = options["reduction"]
    for name in _C.cpu_kernels():
        with kernels(name):
            x = input.detach().requires_grad_()
            loss = function(x, *args, **options)
            (grad,) = torch.autograd.grad(loss, x, grad_output.to(loss.dtype))
            no_grad = function(input, *args, **options)
        assert torch.equal(loss.detach().nan_to_num(7.0), no_grad.nan_to_num(7.0))
        assert_accurate(loss.detach(), expected.loss, expected.loss_size, units_loss, input.dtype)
        assert_accurate(grad, expected.grad, expected.grad_size, units_grad, input.dtype)
        assert strides(grad) == strides(torch.empty_like(input))
        left_out = ~expected.good
        if reduction == "none":
            assert (loss[left_out] == 0).all()
        rows = grad if grad.shape == left_out.shape else grad.movedim(0 if grad.dim() == 1 else 1, -1)
        assert (rows[left_out] == 0).all()  # literally


def strides(t: Tensor) -> list[int]:
    """Of the dimensions where a stride means something."""
    return [stride for size, stride in zip(t.shape, t.stride()) if size > 1 and t.numel()]


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grad_outputs(kind: str, reduction: str, shape: torch.Size, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """One number, or one for each element or row: itself laid out in several ways."""
    if reduction != "none":
        return torch.randn((), generator=g, dtype=torch.float64).to(dtype)
    if kind == "expanded":
        return torch.randn((), generator=g, dtype=torch.float64).to(dtype).expand(shape)
    values = torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    return ref.lay_out(values, kind)


seeds = st.integers(0, 2**31)
layouts = st.sampled_from(ref.LAYOUTS)
common = dict(
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    layout=layouts,
    target_layout=layouts,
    weight_layout=layouts,
    grad_kind=layouts,
    reduction=st.sampled_from(REDUCTIONS),
    bad=st.booleans(),
)

# ---- BCE and BCE-with-logits

element_shapes = st.sampled_from(
    [()]
    + [shape for n in SIZES for shape in ((n,), (2, n), (3, n), (n, 1), (n, 3))]
    + [(n, c, h, w) for n in (1, 2) for c in (1, 3, 8) for h in (0, 1, 5) for w in (1, 7, 33)]
    + [(32767,), (32769,), (3, 11000)]  # a block of the reduction has 32768
)
weight_kinds = st.sampled_from(("none", "full", "full, with zeros", "last dimension", "one"))


def broadcastable(kind: str, layout: str, shape, g: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    own = {"last dimension": shape[-1:], "one": ()}.get(kind, shape)
    w = torch.rand(own, generator=g, dtype=torch.float64) * 3
    if kind == "full, with zeros":
        w = w * (torch.rand(own, generator=g) < 0.7)
    return ref.lay_out(w.to(dtype), layout)


def sprinkle(t: Tensor, values, g: torch.Generator, share: float = 0.1) -> Tensor:
    """Some elements replaced by values drawn from `values`."""
    chosen = torch.tensor(values, dtype=torch.float64).to(t.dtype)[torch.randint(len(values), t.shape, generator=g)]
    return torch.where(torch.rand(t.shape, generator=g) < share, chosen, t)


@deterministic
@given(shape=element_shapes, weight_kind=weight_kinds, **common)
def test_binary_cross_entropy(
    seed, dtype, layout, target_layout, weight_layout, grad_kind, reduction, bad, shape, weight_kind
):
    g = draws(seed)
    p, y = (torch.rand(shape, generator=g, dtype=torch.float64).to(dtype) for _ in "py")
    p = sprinkle(p, (0.0, 1.0, 1e-30, 1e-6, 1 - 2**-7), g)
    y = sprinkle(y, (0.0, 1.0), g, 0.5)
    if bad:
        p = sprinkle(p, (-1e-3, 1.125, math.nan, math.inf, -math.inf, 255), g)
        y = sprinkle(y, (-1.0, 1.125, math.nan, math.inf, 255), g)
    p, y = ref.lay_out(p, layout), ref.lay_out(y, target_layout)
    w = broadcastable(weight_kind, weight_layout, shape, g, dtype)
    grad_output = grad_outputs(grad_kind, reduction, p.shape, g, dtype)
    check(
        F.binary_cross_entropy,
        ref.binary_cross_entropy(p, y, w, reduction=reduction, grad_output=grad_output),
        p, y, w,
        reduction=reduction,
        on_violation="skip" if bad else None,
        grad_output=grad_output,
        **bce_units(shape, dtype, reduction, "expanded" in (layout, target_layout)),
    )  # fmt: skip


def sum_units(added: float, repeated: bool) -> float:
    """Of a sum of n numbers: rounding errors grow like sqrt(n) (Higham and Mary, 2019; with a factor of 2 above
    half an eps), but up to n halves where numbers (such as class weights) repeat, and with them their errors."""
    return added / 2 if repeated else math.sqrt(added)


def bce_units(shape, dtype: torch.dtype, reduction: str, repeated: bool) -> dict[str, float]:
    """An element: at most 2 eps from a logarithm and half an eps from each of 8 other operations. A sum of 1024
    at a time, in 4 lanes (2 in float64) or more, goes on in float64."""
    n, wide = math.prod(shape), dtype == torch.float64
    added = 0 if reduction == "none" else min(n, 1024) / 2 + n / 1024 if wide else min(n, 1024) / 4
    return dict(units_loss=6 + sum_units(added, repeated), units_grad=6)


@deterministic
@given(
    shape=element_shapes,
    weight_kind=weight_kinds,
    pos_weight_kind=weight_kinds,
    scale=st.sampled_from((1.0, 20.0, 300.0)),
    strict=st.booleans(),
    check_finite=st.booleans(),
    **common,
)
def test_binary_cross_entropy_with_logits(
    seed, dtype, layout, target_layout, weight_layout, grad_kind, reduction, bad,
    shape, weight_kind, pos_weight_kind, scale, strict, check_finite,
):  # fmt: skip
    g = draws(seed)
    x = (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)
    y = sprinkle(torch.rand(shape, generator=g, dtype=torch.float64).to(dtype), (0.0, 1.0), g, 0.5)
    w = broadcastable(weight_kind, weight_layout, shape, g, dtype)
    if bad and strict:
        y = sprinkle(y, (-1.0, 1.125, math.nan, math.inf, 255), g)
        if w is not None:  # exempt, but 0 times NaN or infinity is NaN, here as natively
            y = torch.where((w == 0) & ~y.isfinite(), torch.full_like(y, -1.0), y)
    if bad and check_finite:
        x = sprinkle(x, (math.nan, math.inf, -math.inf), g)
    x, y = ref.lay_out(x, layout), ref.lay_out(y, target_layout)
    assume(w is None or not ((w == 0) & ~y.isfinite()).any())  # after "expanded" has copied elements
    pos_weight = broadcastable(pos_weight_kind, layout, shape, g, dtype)
    grad_output = grad_outputs(grad_kind, reduction, x.shape, g, dtype)
    check(
        F.binary_cross_entropy_with_logits,
        ref.binary_cross_entropy_with_logits(
            x, y, w, pos_weight, reduction=reduction, strict=strict, check_finite=check_finite, grad_output=grad_output
        ),
        x, y, w,
        pos_weight=pos_weight,
        reduction=reduction,
        strict=strict,
        check_finite=check_finite,
        on_violation="skip" if bad else None,
        grad_output=grad_output,
        **bce_units(shape, dtype, reduction, "expanded" in (layout, target_layout)),
    )  # fmt: skip


# ---- NLL and cross-entropy


@st.composite
def row_shapes(draw, classes=CLASSES):
    """(N, C), (N, C, D1), .. (N, C, D1, D2, D3) or (C)."""
    c = draw(st.sampled_from(classes))
    k = draw(st.sampled_from((-1, 0, 0, 1, 2, 3)))
    if k < 0:
        return (c,)
    fitting = [n for n in SIZES if n * c <= MAX_LOGITS]
    if k == 0:
        return (draw(st.sampled_from(fitting)), c)
    n = draw(st.sampled_from((0, 1, 2, 3)))
    fitting = [d for d in SIZES if n * c * d * 3 ** (k - 1) <= MAX_LOGITS]
    extra = [draw(st.sampled_from(fitting))] + [draw(st.sampled_from((1, 2, 3))) for _ in range(k - 1)]
    return (n, c, *draw(st.permutations(extra)))


def class_weight(kind: str, classes: int, g: torch.Generator, dtype: torch.dtype) -> Tensor | None:
    if kind == "none":
        return None
    w = torch.rand(classes, generator=g, dtype=torch.float64) * 3
    if kind == "with zeros":
        w = w * (torch.rand(classes, generator=g) < 0.8)
    return ref.lay_out(w.to(dtype), "strided" if kind == "strided" else "contiguous")


def class_count(shape) -> int:
    return shape[0 if len(shape) == 1 else 1]


def rows_shape(shape) -> tuple[int, ...]:
    return tuple(shape[:1] + shape[2:]) if len(shape) > 1 else ()


def class_indices(shape, label_dtype, ignore_index: int, bad: bool, g: torch.Generator) -> Tensor:
    classes, rows = class_count(shape), rows_shape(shape)
    top = min(classes, 256) if label_dtype == torch.uint8 else classes
    t = torch.randint(max(top, 1), rows, generator=g)
    wild = [ignore_index] if not 0 <= ignore_index < max(top, 1) else []
    if bad:  # also labels that a narrowing to 32 or 8 bits would make valid
        wild += [-1, -100, classes, classes + 1, 255, 256, 2**31, 2**32, 2**32 + 1, -(2**63), 2**63 - 1]
    if label_dtype == torch.uint8:
        wild = [v for v in wild if 0 <= v < 256]
    if wild:
        chosen = torch.tensor(wild)[torch.randint(len(wild), rows, generator=g)]
        t = torch.where(torch.rand(rows, generator=g) < 0.2, chosen, t)
    if not classes and not bad:  # without classes nothing but ignored labels is good
        t = torch.full(rows, ignore_index)
    return t.to(label_dtype)


def with_class_dim(rows: Tensor, x: Tensor) -> Tensor:
    return rows.reshape(1) if x.dim() == 1 else rows.unsqueeze(1)


def spoil_rows(x: Tensor, rows: Tensor, g: torch.Generator, values=(math.nan, math.inf, -math.inf)) -> Tensor:
    """NaN and infinities in the chosen rows of x."""
    return torch.where(with_class_dim(rows, x), sprinkle(x, values, g, 0.5), x)


def mask_classes(x: Tensor, label: Tensor, g: torch.Generator) -> Tensor:
    """-inf for some classes, but not for the label's own."""
    class_dim = 0 if x.dim() == 1 else 1
    label = with_class_dim(label, x)
    return sprinkle(x, (-math.inf,), g, 0.2).scatter(class_dim, label, x.gather(class_dim, label))


row_options = dict(
    weight_kind=st.sampled_from(("none", "random", "with zeros", "strided")),
    label_dtype=st.sampled_from((torch.int64, torch.int64, torch.uint8)),
    ignore_index=st.sampled_from((-100, -1, 0, 3, 255)),
    check_finite=st.booleans(),
    scale=st.sampled_from((1.0, 10.0, 100.0)),
)


def row_case(seed, dtype, layout, target_layout, bad, shape, weight_kind, label_dtype, ignore_index, scale):
    """Logits, class indices, class weights, and which rows are ignored or have a bad label."""
    g = draws(seed)
    classes = class_count(shape)
    x = (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)
    t = class_indices(shape, label_dtype, ignore_index, bad, g)
    assume(not (classes == 0 and not bad and (t.long() != ignore_index).any()))  # a uint8 cannot be every ignore_index
    w = class_weight(weight_kind, classes, g, dtype)
    t = ref.lay_out(t, target_layout)
    dead = (t.long() == ignore_index) | (t.long() < 0) | (t.long() >= classes)
    return g, x, t, w, dead


def nll_units(shape, dtype: torch.dtype, reduction: str, repeated: bool = False) -> dict[str, float]:
    """A product, a division and a mean's denominator, rounded. Rows are added up in float64."""
    units = 2.0
    if dtype == torch.float64 and reduction != "none":
        units += sum_units(math.prod(rows_shape(shape)), repeated)
    return dict(units_loss=units, units_grad=units)


@deterministic
@given(shape=row_shapes(), **common, **row_options)
def test_nll_loss(
    seed, dtype, layout, target_layout, weight_layout, grad_kind, reduction, bad,
    shape, weight_kind, label_dtype, ignore_index, check_finite, scale,
):  # fmt: skip
    g, x, t, w, dead = row_case(
        seed, dtype, layout, target_layout, bad, shape, weight_kind, label_dtype, ignore_index, scale
    )
    if layout != "expanded":
        x = spoil_rows(x, dead, g)
        if bad and check_finite:
            x = spoil_rows(x, torch.rand(t.shape, generator=g) < 0.1, g)
    x = ref.lay_out(x, layout)
    grad_output = grad_outputs(grad_kind, reduction, t.shape, g, dtype)
    options = dict(ignore_index=ignore_index, reduction=reduction, check_finite=check_finite)
    expected = ref.nll_loss(x, t, w, grad_output=grad_output, **options)
    assume(reduction != "mean" or expected.loss.isfinite() or not expected.good.any())  # weights of 0: see below
    check(
        F.nll_loss, expected, x, t, w, **options,
        on_violation="skip" if bad else None,
        grad_output=grad_output,
        **nll_units(shape, dtype, reduction, "expanded" in (layout, target_layout) or weight_kind != "none"),
    )  # fmt: skip


def cross_entropy_units(shape, dtype: torch.dtype, reduction: str, repeated: bool = False) -> dict[str, float]:
    """6 operations on a row, or on an element of it, each half an eps to one eps off, and the sum of the
    exponentials. Rows, and a mean's denominator, are added up in float64."""
    units = 6 + sum_units(class_count(shape), False)
    if dtype == torch.float64 and reduction != "none":
        units += sum_units(math.prod(rows_shape(shape)), repeated)
    return dict(units_loss=units, units_grad=units)


@deterministic
@given(shape=row_shapes(), smoothing=st.sampled_from((0.0, 0.0, 0.1, 1.0)), **common, **row_options)
def test_cross_entropy_of_class_indices(
    seed, dtype, layout, target_layout, weight_layout, grad_kind, reduction, bad,
    shape, weight_kind, label_dtype, ignore_index, check_finite, scale, smoothing,
):  # fmt: skip
    g, x, t, w, dead = row_case(
        seed, dtype, layout, target_layout, bad, shape, weight_kind, label_dtype, ignore_index, scale
    )
    classes = class_count(shape)
    if layout != "expanded":
        if smoothing == 0 and classes:
            x = mask_classes(x, torch.where(dead, 0, t.long()), g)
        x = spoil_rows(x, dead, g)
        if bad and check_finite:
            # Not -inf: it may leave a sound row, where it is 0 times infinity if the label's weight is 0.
            x = spoil_rows(x, torch.rand(t.shape, generator=g) < 0.1, g, (math.nan, math.inf))
    x = ref.lay_out(x, layout)
    grad_output = grad_outputs(grad_kind, reduction, t.shape, g, dtype)
    options = dict(ignore_index=ignore_index, reduction=reduction, check_finite=check_finite, label_smoothing=smoothing)
    expected = ref.cross_entropy(x, t, w, grad_output=grad_output, **options)
    assume(reduction != "mean" or expected.loss.isfinite() or not expected.good.any())  # weights of 0: see below
    check(
        F.cross_entropy, expected, x, t, w, **options,
        on_violation="skip" if bad else None,
        grad_output=grad_output,
        **cross_entropy_units(shape, dtype, reduction, "expanded" in (layout, target_layout) or weight_kind != "none"),
    )  # fmt: skip


@deterministic
@given(
    shape=row_shapes(CLASSES[1:]),  # without classes: see below
    smoothing=st.sampled_from((0.0, 0.0, 0.1, 1.0)),
    target_kind=st.sampled_from(("softmax", "one-hot", "unnormalised")),
    strict=st.booleans(),
    **common,
    **{name: row_options[name] for name in ("weight_kind", "check_finite", "scale")},
)
def test_cross_entropy_of_class_probabilities(
    seed, dtype, layout, target_layout, weight_layout, grad_kind, reduction, bad,
    shape, smoothing, target_kind, strict, weight_kind, check_finite, scale,
):  # fmt: skip
    g = draws(seed)
    class_dim, classes = 0 if len(shape) == 1 else 1, class_count(shape)
    x = (scale * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)
    q = torch.rand(shape, generator=g, dtype=torch.float64)
    if target_kind == "softmax":
        q = (4 * q).softmax(class_dim)
    elif target_kind == "one-hot":
        q = (q == q.amax(class_dim, keepdim=True)).double() if q.numel() else q
    q = q.to(dtype)
    w = class_weight(weight_kind, classes, g, dtype)
    if bad and strict:
        wild = (-1.0, 1.125, math.nan, math.inf, 255) if weight_kind != "with zeros" else (-1.0, 1.125, 255)
        q = sprinkle(q, wild, g, 0.2 / classes)
    if layout != "expanded" and bad and check_finite:
        x = spoil_rows(x, torch.rand(rows_shape(shape), generator=g) < 0.1, g)
    if layout != "expanded" and target_layout != "expanded" and smoothing == 0:
        x = torch.where((q == 0) & (torch.rand(shape, generator=g) < 0.5), -math.inf, x)  # 0 * -inf = 0
    x, q = ref.lay_out(x, layout), ref.lay_out(q, target_layout)
    grad_output = grad_outputs(grad_kind, reduction, torch.Size(rows_shape(shape)), g, dtype)
    options = dict(reduction=reduction, label_smoothing=smoothing, strict=strict, check_finite=check_finite)
    check(
        F.cross_entropy,
        ref.cross_entropy(x, q, w, grad_output=grad_output, **options),
        x, q, w, **options,
        on_violation="skip" if bad else None,
        grad_output=grad_output,
        **cross_entropy_units(shape, dtype, reduction, "expanded" in (layout, target_layout)),
    )  # fmt: skip


# ---- what the properties do not reach


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_references_are_native_in_float64(reduction):
    """On valid arguments the references give what native torch and its autograd give in float64."""
    g = draws(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    def agree(function, expected, x: Tensor, *args, **options) -> None:
        x = x.requires_grad_()
        loss = function(x, *args, **options, reduction=reduction)
        grad_output = torch.randn(loss.shape, generator=g, dtype=torch.float64)
        (grad,) = torch.autograd.grad(loss, x, grad_output)
        want = expected(x.detach(), *args, **options, reduction=reduction, grad_output=grad_output)
        torch.testing.assert_close(loss.detach(), want.loss, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(grad, want.grad, rtol=1e-13, atol=1e-13)

    p, y, w = rand(4, 7), rand(4, 7), rand(4, 7)
    agree(native.binary_cross_entropy, ref.binary_cross_entropy, p, y, w)
    x = 20 * rand(4, 7) - 10
    agree(native.binary_cross_entropy_with_logits, ref.binary_cross_entropy_with_logits, x, y, w, pos_weight=rand(7))
    for shape in ((6,), (5, 6), (5, 6, 3), (2, 6, 3, 4)):
        x, w = 20 * rand(*shape) - 10, rand(6)
        t = torch.randint(6, rows_shape(shape), generator=g)
        agree(native.nll_loss, ref.nll_loss, x, t, w, ignore_index=2)
        for smoothing in (0.0, 0.3):
            agree(native.cross_entropy, ref.cross_entropy, x.detach(), t, w, ignore_index=2, label_smoothing=smoothing)
            q = rand(*shape).softmax(0 if len(shape) == 1 else 1)
            agree(native.cross_entropy, ref.cross_entropy, x.detach(), q, w, label_smoothing=smoothing)


@pytest.mark.parametrize("target_kind", ("indices", "smoothed indices", "probabilities"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "shape, layout",
    [
        ((3, 8193), "contiguous"),  # beyond the classes that are held at a time: 8192 of one row
        ((2, 20011), "offset"),
        ((3, 8193), "permuted"),  # classes apart in memory: 512 of each of 16 rows
        ((33, 600), "strided"),
        ((2, 600, 7, 5), "contiguous"),
        ((2, 600, 7, 5), "channels_last"),
    ],
)
def test_more_classes_than_are_held_at_a_time(shape, layout, dtype, target_kind):
    g = draws(1)
    # Rising and falling along the classes, so that the running maximum changes between the chunks.
    x = torch.randn(shape, generator=g) + torch.linspace(-30, 30, shape[1]).reshape(-1, *[1] * (len(shape) - 2))
    x[1::2] = x[1::2].flip(1)
    x = ref.lay_out(x.to(dtype), layout)
    w = (torch.rand(shape[1], generator=g) * 2).to(dtype)
    t = torch.randint(shape[1], rows_shape(shape), generator=g)
    if target_kind == "probabilities":
        t = ref.lay_out((30 * torch.rand(shape, generator=g)).softmax(1).to(dtype), layout)
    options = dict(reduction="none", label_smoothing=0.2 * (target_kind == "smoothed indices"))
    grad_output = torch.randn(rows_shape(shape), generator=g).to(dtype)
    check(
        F.cross_entropy,
        ref.cross_entropy(x, t, w, grad_output=grad_output, **options),
        x, t, w, **options,
        grad_output=grad_output,
        **cross_entropy_units(shape, dtype, "none"),
    )  # fmt: skip
    if target_kind == "indices":
        check(
            F.nll_loss,
            ref.nll_loss(x, t, w, grad_output=grad_output, reduction="none"),
            x, t, w,
            reduction="none",
            grad_output=grad_output,
            **nll_units(shape, dtype, "none"),
        )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "function, shape, soft",
    [
        (f, shape, False)
        for f in ("nll_loss", "cross_entropy")
        for shape in ((3, 0), (0, 0), (0, 5), (0, 5, 4), (2, 5, 0))
    ]
    + [("cross_entropy", shape, True) for shape in ((3, 0), (0, 0), (0, 5), (2, 0, 4), (0, 5, 4), (2, 5, 0))],
)
def test_no_classes_or_no_rows_as_native(function, shape, soft, reduction):
    target = torch.zeros(shape) if soft else torch.full(rows_shape(shape), -100)
    for name in _C.cpu_kernels():
        results = []
        for module in (F, native):
            x = torch.zeros(shape, requires_grad=True)
            with kernels(name):
                loss = getattr(module, function)(x, target, reduction=reduction)
                loss.sum().backward()
            results.append((loss.detach(), x.grad))
        torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "function, options", [("nll_loss", {}), ("cross_entropy", {}), ("cross_entropy", dict(label_smoothing=0.1))]
)
def test_counted_weights_that_sum_to_zero_as_native(function, options):
    """A division by 0: NaN where native has it, and zeros where a row is ignored."""
    weight, t = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0, 2, -100, 0])
    results = []
    for module in (F, native):
        x = torch.randn(4, 3, generator=draws(2), requires_grad=True)
        loss = getattr(module, function)(x, t, weight, **options)
        loss.backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(300, 10), (40, 100), (3, 5, 17, 9)])
@pytest.mark.parametrize("function", (F.nll_loss, F.cross_entropy))
def test_skipped_labels_are_exactly_ignored_labels(function, shape, reduction):
    """Bit for bit, with "skip" and with "warn"."""
    g = draws(3)
    t = class_indices(shape, torch.int64, -100, True, g)
    bad = (t < 0) | (t >= shape[1])
    ignored = torch.where(bad, -100, t)
    assert (bad & (t != -100)).any()
    data = torch.randn(shape, generator=g)

    def run(target: Tensor, **policy) -> tuple[Tensor, Tensor]:
        x = data.clone().requires_grad_()
        loss = function(x, target, reduction=reduction, **policy)
        loss.sum().backward()
        return loss.detach(), x.grad

    want = run(ignored)
    for action in ("skip", "warn"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lossguard.LossValidationWarning)
            got = run(t, on_violation=action)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("name", ("binary_cross_entropy", "binary_cross_entropy_with_logits"))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_skipped_elements_are_exactly_absent_elements(name, reduction):
    g = draws(4)
    p, y = torch.rand(1000, generator=g), torch.rand(1000, generator=g)
    wrong = torch.rand(1000, generator=g) < 0.2
    function = getattr(F, name)

    def run(p: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        p = p.clone().requires_grad_()
        loss = function(p, y, reduction=reduction, on_violation="skip")
        loss.backward()
        return loss.detach(), p.grad

    loss, grad = run(p, torch.where(wrong, 2.0, y))
    want, want_grad = run(p[~wrong], y[~wrong])
    # The lanes they are added up in differ: 1000 numbers, sqrt(250) in each.
    assert_accurate(loss, want.double(), want.double(), sum_units(250, False), torch.float32)
    assert torch.equal(grad[~wrong], want_grad) and (grad[wrong] == 0).all()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "name", ("binary_cross_entropy", "binary_cross_entropy_with_logits", "nll_loss", "cross_entropy")
)
def test_nothing_but_bad_elements(name, reduction):
    """As when everything is ignored: a mean is NaN, and every gradient 0."""
    x = torch.rand(50, 4, generator=draws(5), requires_grad=True)
    target = torch.full((50,), 9) if name in ("nll_loss", "cross_entropy") else torch.full((50, 4), 9.0)
    loss = getattr(F, name)(x, target, reduction=reduction, on_violation="skip")
    assert loss.isnan() if reduction == "mean" else (loss == 0).all()
    loss.sum().backward()
    assert torch.equal(x.grad, torch.zeros(50, 4))


def test_choosing_kernels():
    assert "baseline" in _C.cpu_kernels() and _C.cpu_kernels_in_use() in _C.cpu_kernels()
    before = _C.cpu_kernels_in_use()
    assert not _C.choose_cpu_kernels("no such kernels") and _C.cpu_kernels_in_use() == before
