"""Loads the extension and tells torch the shapes its ops return (their fake implementations)."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from torch import Tensor

from . import _C, _violations
from ._policy import FLOAT_LOSS

__all__ = ["Unsupported", "ops"]


class Unsupported(Exception):
    """No kernel takes these arguments: ask native torch, which computes or raises its own error."""


_C.install(_violations.handle, Unsupported)
ops = torch.ops.lossguard

_SAVED_TAIL = 3  # csrc/losses.h, SavedTail


def _fake(name: str) -> Any:
    """Registers a fake implementation, which also serves meta tensors: all of them, or none."""

    def register(function: Any) -> Any:
        @functools.wraps(function)
        def fake(*args: Any) -> Any:
            if len({arg.device for arg in args if isinstance(arg, Tensor)}) > 1:
                raise Unsupported("tensors on different devices")
            return function(*args)

        return torch.library.register_fake(f"lossguard::{name}", fake)

    return register


def _loss_dtype(input: Tensor, flags: int) -> torch.dtype:
    return torch.float32 if flags & FLOAT_LOSS and input.dtype != torch.float64 else input.dtype


def _saved(input: Tensor, size: Any) -> Tensor:
    return input.new_empty((size,), dtype=torch.float64 if input.dtype == torch.float64 else torch.float32)


def _elementwise_forward(input: Tensor, flags: int) -> tuple[Tensor, Tensor]:
    dtype = _loss_dtype(input, flags)
    if flags & 3:
        loss = input.new_empty((), dtype=dtype)
    elif dtype == input.dtype:
        loss = torch.empty_like(input)
    else:
        loss = input.new_empty(input.shape, dtype=dtype)
    return loss, _saved(input, _SAVED_TAIL)


def _row_forward(input: Tensor, flags: int, saved_per_row: int) -> tuple[Tensor, Tensor]:
    rows: Any = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    count: Any = 1
    for size in rows:
        count = count * size
    loss = input.new_empty(() if flags & 3 else rows, dtype=_loss_dtype(input, flags))
    return loss, _saved(input, count * saved_per_row + _SAVED_TAIL)


@_fake("bce_forward")
def _(input: Tensor, target: Tensor, weight: Optional[Tensor], flags: int, site: int) -> Any:
    return _elementwise_forward(input, flags)


@_fake("bce_with_logits_forward")
def _(
    input: Tensor, target: Tensor, weight: Optional[Tensor], pos_weight: Optional[Tensor], flags: int, site: int
) -> Any:
    return _elementwise_forward(input, flags)


@_fake("cross_entropy_forward")
def _(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor],
    ignore_index: int,
    label_smoothing: float,
    flags: int,
    site: int,
) -> Any:
    mass = target.is_floating_point() or (label_smoothing != 0 and weight is not None)
    return _row_forward(input, flags, saved_per_row=1 + int(mass))


@_fake("nll_forward")
def _(input: Tensor, target: Tensor, weight: Optional[Tensor], ignore_index: int, flags: int, site: int) -> Any:
    return _row_forward(input, flags, saved_per_row=0)


@_fake("check_index")
def _(index: Tensor, source: Tensor, dim: int, operation: int, flags: int, site: int) -> Tensor:
    return torch.empty_like(index)


def _backward(grad: Tensor, input: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(input)


for _name in ("bce_backward", "bce_with_logits_backward", "cross_entropy_backward", "nll_backward"):
    _fake(_name)(_backward)
