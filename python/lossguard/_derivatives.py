"""Gradients of the losses in torch operations, for where the kernels cannot go.

A backward that is differentiated again, or batched by functorch, needs operations that torch itself
can differentiate and batch; so do the rarely wanted gradients for targets and class weights. Each
function takes (grad, needs, *tensors, saved, *constants) and returns one gradient or None per tensor.
The formulas are those of csrc/math, the checks those of csrc/math/check.h.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

Grads = tuple[Optional[Tensor], ...]

# Positions in `saved` from its end: csrc/losses.h, SavedTail.
_DENOMINATOR, _STRICT, _CHECK_FINITE = -3, -2, -1
_MEAN = 1  # csrc/policy.h, Reduction


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _scale(grad: Tensor, saved: Tensor, flags: int) -> Tensor:
    scale = grad.to(saved.dtype)
    return scale / saved[_DENOMINATOR] if flags & 3 == _MEAN else scale


def _in_unit_interval(t: Tensor, tolerant: bool) -> Tensor:
    slack = max(4 * torch.finfo(t.dtype).eps, 1e-6) if tolerant else 0.0
    wide = _wide(t)
    return (wide >= -slack) & (wide <= 1 + slack)


def _masked(keep: Tensor, t: Tensor, fill: float = 0.0) -> Tensor:
    """`t` where `keep`. Applied before and after a formula: what is left out may be NaN."""
    return torch.where(keep, t, torch.full_like(t, fill))


def _log_or_floor(p: Tensor) -> Tensor:
    positive = p > 0
    log = torch.log(torch.where(positive, p, torch.ones_like(p)))
    return torch.where(positive, log, torch.full_like(p, -100.0)).clamp(min=-100.0)


def bce(
    grad: Tensor,
    needs: Any,
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    saved: Tensor,
    flags: int,
) -> Grads:
    keep = _in_unit_interval(input, False) & _in_unit_interval(target, False)
    p, y = _masked(keep, _wide(input), 0.5), _masked(keep, _wide(target), 0.5)
    scale = _scale(grad, saved, flags)
    scale = scale.expand_as(p)
    scale = _masked(keep, scale if weight is None else scale * weight.to(scale.dtype))
    d_input = d_target = None
    if needs[0]:
        d_input = (scale * ((p - y) / ((1 - p) * p).clamp(min=1e-12))).to(input.dtype)
    if needs[1]:
        d_target = (scale * (_log_or_floor(1 - p) - _log_or_floor(p))).to(target.dtype)
    return d_input, d_target, None


def bce_with_logits(
    grad: Tensor,
    needs: Any,
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    pos_weight: Optional[Tensor],
    saved: Tensor,
    flags: int,
) -> Grads:
    scale = _scale(grad, saved, flags).expand_as(input)
    keep = torch.logical_or(_in_unit_interval(target, True), saved[_STRICT] == 0)
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
        keep = keep | (weight == 0)
    keep = keep & torch.logical_or(torch.isfinite(input), saved[_CHECK_FINITE] == 0)
    x, y = _masked(keep, _wide(input)), _masked(keep, _wide(target))
    scale = _masked(keep, scale)
    positive = 1.0 if pos_weight is None else pos_weight.to(x.dtype)
    slope = 1 + (positive - 1) * y
    d_input = d_target = None
    if needs[0]:
        d = torch.where(x >= 0, (1 - y) - slope * torch.sigmoid(-x), slope * torch.sigmoid(x) - positive * y)
        d_input = (scale * d).to(input.dtype)
    if needs[1]:
        # softplus(-x) = -log sigmoid(x)
        d_target = (scale * (-x - (positive - 1) * torch.nn.functional.logsigmoid(x))).to(target.dtype)
    return d_input, d_target, None, None


def _labels(input: Tensor, target: Tensor, ignore_index: int, class_dim: int) -> tuple[Tensor, Tensor]:
    """Which rows have a label that counts, and the labels with 0 for the others, both with a class dimension."""
    target = target.reshape(()) if input.dim() == 1 else target
    target = target.unsqueeze(class_dim).long()
    keep = (target != ignore_index) & (target >= 0) & (target < input.size(class_dim))
    return keep, torch.where(keep, target, torch.zeros_like(target))


def _rows(t: Tensor, input: Tensor, class_dim: int) -> Tensor:
    """A value per row, or one for all, with a class dimension."""
    if t.dim() == 0:
        return t
    return t.reshape(1) if input.dim() == 1 else t.unsqueeze(class_dim)


def _per_class(weight: Optional[Tensor], like: Tensor, class_dim: int) -> Tensor:
    if weight is None:
        return like.new_ones([1] * like.dim())
    return weight.to(like.dtype).reshape([-1 if d == class_dim else 1 for d in range(like.dim())])


def cross_entropy(
    grad: Tensor,
    needs: Any,
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    saved: Tensor,
    ignore_index: int,
    smoothing: float,
    flags: int,
) -> Grads:
    class_dim = 0 if input.dim() == 1 else 1
    classes = input.size(class_dim)
    x = _wide(input)
    w = _per_class(weight, x, class_dim)
    scale = _rows(_scale(grad, saved, flags), input, class_dim)
    finite = torch.isfinite(x) | (x == -torch.inf)
    some = (x != -torch.inf).any(class_dim, keepdim=True)  # a row masked throughout has no distribution
    sound = torch.logical_or(finite.all(class_dim, keepdim=True) & some, saved[_CHECK_FINITE] == 0)

    if not target.is_floating_point():
        keep, label = _labels(input, target, ignore_index, class_dim)
        keep = keep & sound
        x = _masked(keep.expand_as(x), x)
        scale = _masked(keep, scale.expand_as(keep))
        p = torch.softmax(x, class_dim)
        w_label = 1.0 if weight is None else weight.to(x.dtype)[label]
        hit = torch.zeros_like(p).scatter(class_dim, label, 1.0)
        own = (1 - smoothing) * w_label
        spread = smoothing / classes * w
        total = smoothing * (1.0 if weight is None else weight.to(x.dtype).sum() / classes)
        d = scale * ((own + total) * p - own * hit - spread)
        return _masked(keep.expand_as(d), d).to(input.dtype), None, None

    passes = _in_unit_interval(target, True) | (w == 0)
    keep = torch.logical_or(passes.all(class_dim, keepdim=True), saved[_STRICT] == 0) & sound
    x = _masked(keep.expand_as(x), x)
    q = _masked(keep.expand_as(x), _wide(target))
    scale = _masked(keep, scale.expand_as(keep))
    smoothed = q * (1 - smoothing) + smoothing / classes
    d_input = d_target = d_weight = None
    if needs[0]:
        v = w * smoothed
        d = scale * (v.sum(class_dim, keepdim=True) * torch.softmax(x, class_dim) - v)
        d_input = _masked(keep.expand_as(d), d).to(input.dtype)
    if needs[1] or needs[2]:
        cost = -torch.log_softmax(x, class_dim)
        if needs[1]:
            d = scale * (1 - smoothing) * w * cost
            d_target = _masked(keep.expand_as(d), d).to(target.dtype)
        if needs[2] and weight is not None:
            costs = torch.where(smoothed == 0, torch.zeros_like(cost), smoothed * cost)
            others = [d for d in range(input.dim()) if d != class_dim]
            total = scale * costs
            d_weight = (total.sum(others) if others else total).to(weight.dtype)
    return d_input, d_target, d_weight


def nll(
    grad: Tensor,
    needs: Any,
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    saved: Tensor,
    ignore_index: int,
    flags: int,
) -> Grads:
    class_dim = 0 if input.dim() == 1 else 1
    if input.size(class_dim) == 0:
        return torch.zeros_like(input), None, None
    keep, label = _labels(input, target, ignore_index, class_dim)
    keep = keep & torch.logical_or(torch.isfinite(input.gather(class_dim, label)), saved[_CHECK_FINITE] == 0)
    scale = _rows(_scale(grad, saved, flags), input, class_dim)
    w_label = 1.0 if weight is None else weight.to(scale.dtype)[label]
    scale = _masked(keep, scale.expand_as(keep) * w_label)
    zeros = torch.zeros_like(input, dtype=scale.dtype)
    return zeros.scatter(class_dim, label, -scale).to(input.dtype), None, None
