"""The losses as autograd Functions, and which of them a call takes.

Plain eager takes an old-style Function (`forward(ctx, ...)`): Function.apply inspects the signature
of the other kind on every call, some 45 us. Under torch.compile and functorch transforms it is one
with `setup_context` and a vmap rule, behind `allow_in_graph`: without that helper
`torch.compile(torch.func.grad(f))` gives zeros (pytorch issue 193279). Where no gradient is wanted
the op is called as it is.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as functorch_active
from torch.autograd import Function

from . import _derivatives
from ._ops import ops


class Loss(NamedTuple):
    """A loss as the functional layer sees it. All three take (*tensors, *constants, flags, site)."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # (loss, saved)
    eager: Callable[..., Tensor]
    traced: Callable[..., Tensor]


def _move_to_front(t: Optional[Tensor], dim: Optional[int], size: int) -> Optional[Tensor]:
    if t is None:
        return None
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _build(
    forward_op: Callable[..., Any],
    backward_op: Callable[..., Tensor],
    derivatives: Callable[..., _derivatives.Grads],
    tensors: int,
) -> Loss:
    no_others = (None,) * (tensors - 1)

    def gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        *inputs, saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if torch.is_grad_enabled() or functorch_active() or any(needs[1:tensors]):
            return (*derivatives(grad, needs, *inputs, saved, *ctx.constants), *ctx.no_grads)
        d_input = backward_op(grad, *inputs, saved, *ctx.constants) if needs[0] else None
        return (d_input, *no_others, *ctx.no_grads)

    def remember(ctx: Any, args: tuple[Any, ...], saved: Tensor) -> None:
        ctx.save_for_backward(*args[:tensors], saved)
        ctx.constants = args[tensors:-1]  # the backward reports nothing: no call site
        ctx.no_grads = (None,) * (len(args) - tensors)

    class Eager(Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            loss, saved = forward_op(*args)
            remember(ctx, args, saved)
            return loss

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
            return gradients(ctx, grad)

    class Traced(Function):
        @staticmethod
        def forward(*args: Any) -> Any:  # type: ignore[override]
            return forward_op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.mark_non_differentiable(output[1])
            remember(ctx, inputs, output[1])

        @staticmethod
        def backward(ctx: Any, grad: Tensor, _: Any) -> Any:  # type: ignore[override]
            return gradients(ctx, grad)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:  # type: ignore[override]
            size = info.batch_size
            batched = [_move_to_front(t, d, size) for t, d in zip(args[:tensors], in_dims)]
            outputs = [
                Traced.apply(*(t if t is None else t[i] for t in batched), *args[tensors:]) for i in range(size)
            ]
            return tuple(torch.stack(column) for column in zip(*outputs)), (0, 0)

    @torch.compiler.allow_in_graph
    def traced(*args: Any) -> Tensor:
        return Traced.apply(*args)[0]

    # Function.apply's Python wrapper does nothing for an old-style Function outside functorch.
    eager = super(Function, Eager).apply
    return Loss(forward_op, eager, traced)


bce = _build(ops.bce_forward.default, ops.bce_backward.default, _derivatives.bce, 3)
bce_with_logits = _build(
    ops.bce_with_logits_forward.default, ops.bce_with_logits_backward.default, _derivatives.bce_with_logits, 4
)
cross_entropy = _build(
    ops.cross_entropy_forward.default, ops.cross_entropy_backward.default, _derivatives.cross_entropy, 3
)
nll = _build(ops.nll_forward.default, ops.nll_backward.default, _derivatives.nll, 3)
