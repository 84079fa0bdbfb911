"""What the losses, their gradients and the report must be: slow, plain, in float64 and pure Python.

The formulas are those of the documentation, over whole tensors in logical order; nothing of the package
takes part. An element or row that fails a check is treated as ``on_violation="skip"`` promises, exactly
like an ignored one: loss 0, gradient 0, and left out of the denominator of a mean.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

# ---- the layouts a tensor may have in memory

LAYOUTS = ("contiguous", "permuted", "channels_last", "strided", "offset", "expanded")


def lay_out(values: Tensor, layout: str) -> Tensor:
    """``values`` in memory laid out as named. "expanded" repeats the first slice along a dimension."""
    rank = values.dim()
    if layout == "permuted":  # dimensions in reverse order in memory
        reverse = tuple(range(rank))[::-1]
        return values.permute(reverse).contiguous().permute(reverse)
    if layout == "channels_last":  # dimension 1 innermost
        return values if rank < 2 else values.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "strided":  # every second element of a larger tensor, whose others must not matter
        junk = float("nan") if values.is_floating_point() else 77
        larger = torch.full([2 * n + 1 for n in values.shape], junk, dtype=values.dtype)
        view = larger[tuple(slice(1, None, 2) for _ in values.shape)]
        view.copy_(values)
        return view
    if layout == "offset":  # aligned to one element only
        flat = torch.empty(values.numel() + 1, dtype=values.dtype)[1:]
        flat.copy_(values.reshape(-1))
        return flat.view(values.shape)
    if layout == "expanded" and rank and values.numel():
        dim = 0 if rank < 3 else rank - 1
        return values.narrow(dim, 0, 1).expand(values.shape)
    return values.contiguous()


# ---- the losses


class Expected(NamedTuple):
    """A loss and the gradient of its input. The sizes are the sums of the absolute values of the terms that
    each is made of: what rounding errors are relative to."""

    loss: Tensor
    loss_size: Tensor
    grad: Tensor
    grad_size: Tensor
    good: Tensor  # the elements or rows that count


ZERO = torch.zeros((), dtype=torch.float64)


def tolerance(dtype: torch.dtype) -> float:
    """How far beyond [0, 1] the checks reach that native torch does not have."""
    return max(4 * torch.finfo(dtype).eps, 1e-6)


def in_unit_interval(t: Tensor, slack: float = 0.0) -> Tensor:
    return (t.double() >= -slack) & (t.double() <= 1 + slack)  # False for NaN


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, where a factor a = 0 makes an infinite b count for 0."""
    return torch.where(a == 0, ZERO, a * b)


def _combine(
    good: Tensor,
    denominator: Tensor,
    losses: tuple[Tensor, Tensor],
    slopes: tuple[Tensor, Tensor],
    reduction: str,
    grad_output: Tensor | float,
) -> Expected:
    """Leave out what does not count, scale and reduce. `losses` and `slopes` come with their sizes."""
    scale, divisor = torch.as_tensor(grad_output).double(), ZERO + 1
    if reduction == "mean":
        divisor = denominator.double()
    loss, loss_size = (torch.where(good, t, ZERO) for t in losses)
    keep, scale = good, (scale / divisor).expand(good.shape)
    if slopes[0].dim() > good.dim():  # one for each class of a row
        keep, scale = good.unsqueeze(-1), scale.unsqueeze(-1)
    grad, grad_size = (torch.where(keep, scale * t, ZERO) for t in slopes)
    if reduction != "none":
        loss, loss_size = loss.sum() / divisor, loss_size.sum() / divisor
    return Expected(loss, loss_size, grad, grad_size.abs(), good)


def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    grad_output: Tensor | float = 1.0,
) -> Expected:
    good = in_unit_interval(input) & in_unit_interval(target)
    p, y = (torch.where(good, t.double(), 0.5) for t in (input, target))
    w = torch.ones_like(p) if weight is None else weight.double()
    loss = -w * (y * p.log().clamp(min=-100) + (1 - y) * (-p).log1p().clamp(min=-100))
    slope = w * (p - y) / (p * (1 - p)).clamp(min=1e-12)
    return _combine(good, good.sum(), (loss, loss.abs()), (slope, slope.abs()), reduction, grad_output)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    strict: bool = True,
    check_finite: bool = False,
    grad_output: Tensor | float = 1.0,
) -> Expected:
    w = torch.ones(input.shape, dtype=torch.float64) if weight is None else weight.double().expand_as(input)
    pw = ZERO + 1 if pos_weight is None else pos_weight.double()
    good = torch.ones(input.shape, dtype=torch.bool)
    if strict:
        good = good & (in_unit_interval(target, tolerance(target.dtype)) | (w == 0))
    if check_finite:
        good = good & input.isfinite()
    x, y = (torch.where(good, t.double(), 0.5) for t in (input, target))

    log_part = (-x.abs()).exp().log1p()  # softplus(x) = max(x, 0) + log_part
    positive, negative = pw * y, 1 - y  # the weights of the two answers
    linear = product(torch.where(x >= 0, negative, positive), x.abs())
    loss = w * (linear + (positive + negative) * log_part)
    slope = w * (negative * torch.sigmoid(x) - positive * torch.sigmoid(-x))
    # positive + negative is documented as 1 + (pos_weight - 1) y: of these terms.
    both = 1 + (pw - 1).abs() * y.abs()
    loss_size = w * (linear.abs() + both * log_part)
    slope_size = w * (torch.where(x >= 0, negative, positive).abs() + both * torch.sigmoid(-x.abs()))
    return _combine(good, good.sum(), (loss, loss_size), (slope, slope_size), reduction, grad_output)


def _class_dim(input: Tensor) -> int:
    return 0 if input.dim() == 1 else 1


def _rows(t: Tensor, class_dim: int) -> Tensor:
    """(rows, C), rows in logical order."""
    last = t.double().movedim(class_dim, -1)
    return last.reshape(math.prod(last.shape[:-1]), last.shape[-1])


def _unrowed(rows: Expected, input: Tensor, class_dim: int, reduction: str) -> Expected:
    """From (rows) and (rows, C) to the shapes of target and input."""
    shape = input.movedim(class_dim, -1).shape
    loss, loss_size, grad, grad_size, good = rows
    if reduction == "none":
        loss, loss_size = loss.reshape(shape[:-1]), loss_size.reshape(shape[:-1])
    grad, grad_size = (t.reshape(shape).movedim(-1, class_dim) for t in (grad, grad_size))
    return Expected(loss, loss_size, grad, grad_size, good.reshape(shape[:-1]))


def _of_rows(grad_output: Tensor | float) -> Tensor:
    g = torch.as_tensor(grad_output)
    return g.reshape(-1) if g.dim() else g


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    check_finite: bool = False,
    grad_output: Tensor | float = 1.0,
) -> Expected:
    class_dim = _class_dim(input)
    x, label = _rows(input, class_dim), target.reshape(-1).tolist()
    rows, classes = x.shape
    w = torch.ones(classes) if weight is None else weight
    good = torch.zeros(rows, dtype=torch.bool)
    loss, slope, denominator = torch.zeros(rows, dtype=torch.float64), torch.zeros_like(x), 0.0
    for r, t in enumerate(label):
        if t == ignore_index or not 0 <= t < classes or (check_finite and not math.isfinite(x[r, t])):
            continue
        good[r] = True
        loss[r] = -w[t].item() * x[r, t].item()
        slope[r, t] = -w[t].item()
        denominator += w[t].item()
    expected = _combine(
        good, ZERO + denominator, (loss, loss.abs()), (slope, slope.abs()), reduction, _of_rows(grad_output)
    )
    return _unrowed(expected, input, class_dim, reduction)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    strict: bool = True,
    check_finite: bool = False,
    grad_output: Tensor | float = 1.0,
) -> Expected:
    class_dim = _class_dim(input)
    x = _rows(input, class_dim)
    rows, classes = x.shape
    w = torch.ones(classes, dtype=torch.float64) if weight is None else weight.double()
    # The weight of each class's cost in a row, v, and how much the row counts in a mean.
    v = w.expand(rows, classes) * label_smoothing / max(classes, 1)
    good, share = torch.ones(rows, dtype=torch.bool), torch.ones(rows, dtype=torch.float64)
    if target.is_floating_point():
        q = _rows(target, class_dim)
        v = v + (1 - label_smoothing) * w * q
        if strict:
            good = (in_unit_interval(q, tolerance(target.dtype)) | (w == 0)).all(1)
    else:
        for r, t in enumerate(target.reshape(-1).tolist()):
            good[r] = t != ignore_index and 0 <= t < classes
            if good[r]:
                v[r, t] += (1 - label_smoothing) * w[t]
                share[r] = w[t]
    if check_finite:  # -inf masks a class, but not every one
        good = good & (x.isfinite() | (x == -math.inf)).all(1) & (x != -math.inf).any(1)
    denominator = share[good].sum()

    x = torch.where(good.unsqueeze(1), x, ZERO)
    v = torch.where(good.unsqueeze(1), v, ZERO)
    lse = x.logsumexp(1, keepdim=True)
    p, mass = (x - lse).exp(), v.sum(1, keepdim=True)
    loss = product(v, lse - x).sum(1)
    slope = mass * p - v
    # lse and x are rounded before they are subtracted; the sum of exponentials has an error relative to 1.
    loss_size = product(v.abs(), 1 + lse.abs() + x.abs()).sum(1)
    slope_size = product(mass * p, 1 + lse.abs() + x.abs()) + v.abs()
    expected = _combine(good, denominator, (loss, loss_size), (slope, slope_size), reduction, _of_rows(grad_output))
    return _unrowed(expected, input, class_dim, reduction)


# ---- the report

LISTED = 16  # offenders that are listed


def sections(
    loss: str,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    strict: bool = True,
    check_finite: bool = False,
) -> list[dict[str, Any]]:
    """``report.sections`` of a call as dicts, in order of precedence; empty where nothing is wrong."""
    found = []
    if loss == "BCELoss":
        found.append(_section("target", "unit_interval", _elements(target), 0.0))
        found.append(_section("input", "unit_interval", _elements(input), 0.0))
    elif loss == "BCEWithLogitsLoss":
        if strict:
            found.append(_section("target", "unit_interval", _weighted(target, weight), tolerance(target.dtype)))
        if check_finite:
            found.append(_section("input", "finite", _elements(input)))
    else:
        class_dim = _class_dim(input)
        classes = input.shape[class_dim]
        if not target.is_floating_point():
            labels = [(index, t) for index, t in _elements(target) if t != ignore_index]
            found.append(_section("target", "class_index", labels, classes))
        elif strict:
            shape = [classes if d == class_dim else 1 for d in range(target.dim())]
            per_class = None if weight is None else weight.reshape(shape)
            found.append(_section("target", "unit_interval", _weighted(target, per_class), tolerance(target.dtype)))
        if check_finite:
            found.append(_section("input", "finite", _finite_candidates(loss, input, target, ignore_index, class_dim)))
    return [section for section in found if section["count"]]


def _elements(t: Tensor) -> list[tuple[tuple[int, ...], int | float]]:
    """Every (index, value) in logical order; a float holds any value of the narrower types."""
    return list(zip(itertools.product(*map(range, t.shape)), t.reshape(-1).tolist()))


def _weighted(t: Tensor, weight: Tensor | None) -> list[tuple[tuple[int, ...], int | float]]:
    if weight is None:
        return _elements(t)
    return [e for e, (_, w) in zip(_elements(t), _elements(weight.expand(t.shape))) if w != 0]


def _finite_candidates(loss: str, input: Tensor, target: Tensor, ignore_index: int, class_dim: int):
    """The elements of input that count. -inf stands as a mask unless it is all that a row has."""
    values = dict(_elements(input))
    labels = None if target.is_floating_point() else dict(_elements(target))
    chosen = []
    for index, x in values.items():
        c, row = index[class_dim], index[:class_dim] + index[class_dim + 1 :]
        if labels is not None:
            t = labels[row] if row in labels else labels[(0,)]  # input (C), target (1)
            if t == ignore_index or not 0 <= t < input.shape[class_dim]:
                continue
            if loss == "NLLLoss" and c != t:
                continue
        if loss == "CrossEntropyLoss" and x == -math.inf:
            others = [values[index[:class_dim] + (k,) + index[class_dim + 1 :]] for k in range(input.shape[class_dim])]
            if any(v != -math.inf for v in others):
                x = "mask"
        chosen.append((index, x))
    if loss == "NLLLoss":  # a row each, in the order of the targets
        chosen.sort(key=lambda e: e[0][:class_dim] + e[0][class_dim + 1 :])
    return chosen


def _fault(kind: str, v: Any, bound: float) -> str | None:
    if v == "mask":
        return None
    if kind == "class_index":
        return "below 0" if v < 0 else ">= num_classes" if v >= bound else None
    if math.isnan(v):
        return "NaN"
    if math.isinf(v):
        return "+inf" if v > 0 else "-inf"
    if kind == "finite":
        return None
    return "below 0" if v < -bound else "above 1" if v > 1 + bound else None


def _section(tensor: str, kind: str, elements: list, bound: float = 0.0) -> dict[str, Any]:
    """`bound`: the number of classes, or the tolerance."""
    bad = [(index, v, _fault(kind, v, bound)) for index, v in elements]
    bad = [(index, v, fault) for index, v, fault in bad if fault]
    numbers = [-math.inf if v == "mask" else v for _, v in elements]
    numbers = [v for v in numbers if v == v]
    wrong = [v for _, v, _ in bad if v == v]
    valid = [-math.inf if v == "mask" else v for _, v in elements if not _fault(kind, v, bound)]
    faults = ("below 0", ">= num_classes" if kind == "class_index" else "above 1", "NaN", "+inf", "-inf")
    known = {"-1": -1, "-100": -100, "255": 255, "num_classes": bound} if kind == "class_index" else {}
    if bound == 255:
        known.pop("255", None)
    counts = {fault: sum(f == fault for _, _, f in bad) for fault in faults}
    labels = {name: sum(v == label for _, v, _ in bad) for name, label in known.items()}
    return dict(
        tensor=tensor,
        kind=kind,
        count=len(bad),
        seen=len(elements),
        indices=[index for index, _, _ in bad[:LISTED]],
        values=[v for _, v, _ in bad[:LISTED]],
        counts={fault: n for fault, n in counts.items() if n},
        labels={name: n for name, n in labels.items() if n},
        min=min(wrong, default=None),
        max=max(wrong, default=None),
        seen_min=min(numbers, default=None),
        seen_max=max(numbers, default=None),
        valid_min=min(valid, default=None),
        valid_max=max(valid, default=None),
    )
