"""The losses as autograd Functions, and which of them a call takes.

Plain eager takes an old-style Function (`forward(ctx, ...)`): Function.apply inspects the signature
of the other kind on every call, some 45 us. Under torch.compile and functorch transforms it is one
with `setup_context` and a vmap rule, behind `allow_in_graph`: without that helper
`torch.compile(torch.func.grad(f))` gives zeros (pytorch issue 193279). Where no gradient is wanted
the op is called as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active as functorch_active
from torch.autograd import Function, forward_ad

from . import _C, _derivatives
from ._ops import ops
from ._pending import pending
from ._policy import NEEDS_GRAD, SKIP


class Loss(NamedTuple):
    """A loss as the functional layer sees it."""

    forward: Callable[..., tuple[Tensor, Tensor]]  # (*tensors, *constants, flags, site) -> (loss, saved)
    eager: Callable[..., Tensor]  # (*tensors, (*constants, flags, site))
    traced: Callable[..., Tensor]  # (*tensors, *constants, flags, site)


# ---- plain eager. Written out for each loss: packing tensors generically costs 7 us a step. Constants come in one
# tuple: each argument of a Function costs on the way there and back.

# OpOverload.__call__ does nothing but call this.
_bce_forward = ops.bce_forward.default._op
_bce_backward = ops.bce_backward.default._op
_bce_with_logits_forward = ops.bce_with_logits_forward.default._op
_bce_with_logits_backward = ops.bce_with_logits_backward.default._op
_nll_forward = ops.nll_forward.default._op
_nll_backward = ops.nll_backward.default._op
_cross_entropy_forward = ops.cross_entropy_forward.default._op
_cross_entropy_backward = ops.cross_entropy_backward.default._op


def _begin_backward(saved: Tensor) -> None:
    """The backward ops do it themselves."""
    if pending():
        _C.begin_backward(0 if functorch_active() else saved.data_ptr())


def _beyond_kernels(needs: Any) -> bool:
    """Whether a backward is to be differentiated or batched, or wants more than the gradient of input."""
    return torch.is_grad_enabled() or needs[1] or needs[2] or functorch_active() or forward_ad._current_level >= 0


class _BCE(Function):
    @staticmethod
    def forward(ctx: Any, input: Any, target: Any, weight: Any, constants: tuple[int, int]) -> Any:
        flags, site = constants
        loss, saved = _bce_forward(input, target, weight, flags | NEEDS_GRAD, site)
        ctx.save_for_backward(input, target, weight, saved)
        ctx.flags = flags
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, target, weight, saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if _beyond_kernels(needs):
            _begin_backward(saved)
            grads = _derivatives.bce(grad, needs, input, target, weight, saved, ctx.flags)
            return (*grads, None)
        return _bce_backward(grad, input, target, weight, saved, ctx.flags), None, None, None


class _BCEWithLogits(Function):
    @staticmethod
    def forward(ctx: Any, input: Any, target: Any, weight: Any, pos_weight: Any, constants: tuple[int, int]) -> Any:
        flags, site = constants
        loss, saved = _bce_with_logits_forward(input, target, weight, pos_weight, flags | NEEDS_GRAD, site)
        ctx.save_for_backward(input, target, weight, pos_weight, saved)
        ctx.flags = flags
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, target, weight, pos_weight, saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if _beyond_kernels(needs):
            _begin_backward(saved)
            grads = _derivatives.bce_with_logits(grad, needs, input, target, weight, pos_weight, saved, ctx.flags)
            return (*grads, None)
        d = _bce_with_logits_backward(grad, input, target, weight, pos_weight, saved, ctx.flags)
        return d, None, None, None, None


class _NLL(Function):
    @staticmethod
    def forward(ctx: Any, input: Any, target: Any, weight: Any, constants: tuple[int, int, int]) -> Any:
        ignore_index, flags, site = constants
        loss, saved = _nll_forward(input, target, weight, ignore_index, flags | NEEDS_GRAD, site)
        ctx.save_for_backward(input, target, weight, saved)
        ctx.constants = constants
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, target, weight, saved = ctx.saved_tensors
        ignore_index, flags, _ = ctx.constants
        needs = ctx.needs_input_grad
        if _beyond_kernels(needs):
            _begin_backward(saved)
            grads = _derivatives.nll(grad, needs, input, target, weight, saved, ignore_index, flags)
            return (*grads, None)
        d = _nll_backward(grad, input, target, weight, saved, ignore_index, flags)
        return d, None, None, None


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, input: Any, target: Any, weight: Any, constants: tuple[int, float, int, int]) -> Any:
        ignore_index, smoothing, flags, site = constants
        loss, saved = _cross_entropy_forward(input, target, weight, ignore_index, smoothing, flags | NEEDS_GRAD, site)
        ctx.save_for_backward(input, target, weight, saved)
        ctx.constants = constants
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        input, target, weight, saved = ctx.saved_tensors
        ignore_index, smoothing, flags, _ = ctx.constants
        needs = ctx.needs_input_grad
        if _beyond_kernels(needs):
            _begin_backward(saved)
            grads = _derivatives.cross_entropy(
                grad, needs, input, target, weight, saved, ignore_index, smoothing, flags
            )
            return (*grads, None)
        d = _cross_entropy_backward(grad, input, target, weight, saved, ignore_index, smoothing, flags)
        return d, None, None, None


for _function in (_BCE, _BCEWithLogits, _NLL, _CrossEntropy):
    # The engine calls `apply` of the node, by default two Python frames around `backward`.
    _function._backward_cls.apply = _function.backward  # type: ignore[attr-defined]


# ---- compile and functorch


def _move_to_front(t: Optional[Tensor], dim: Optional[int], size: int) -> Optional[Tensor]:
    if t is None:
        return None
    return t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0)


def _traceable(
    forward_op: Callable[..., Any],
    backward_op: Callable[..., Tensor],
    derivatives: Callable[..., _derivatives.Grads],
    tensors: int,
) -> Callable[..., Tensor]:
    class Traced(Function):
        @staticmethod
        def forward(*args: Any) -> Any:
            return forward_op(*args[:-2], args[-2] | NEEDS_GRAD, args[-1])

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(*inputs[:tensors], output[1])
            ctx.constants = inputs[tensors:-1]  # the backward reports nothing: no call site

        @staticmethod
        def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
            *inputs, saved = ctx.saved_tensors
            needs = ctx.needs_input_grad
            no_grads = (None,) * (len(ctx.constants) + 1)
            if _beyond_kernels(needs):
                return (*derivatives(grad, needs, *inputs, saved, *ctx.constants), *no_grads)
            d_input = backward_op(grad, *inputs, saved, *ctx.constants)
            return (d_input, *((None,) * (tensors - 1)), *no_grads)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            size = info.batch_size
            batched = [_move_to_front(t, d, size) for t, d in zip(args[:tensors], in_dims)]
            if size == 0:  # no sample to learn the shapes from: ask one of zeros
                zeros = [t if t is None else t.new_zeros(t.shape[1:]) for t in batched]
                outputs = Traced.apply(*zeros, *args[tensors:-2], args[-2] | SKIP, args[-1])
                return tuple(t.new_empty((0, *t.shape)) for t in outputs), (0, 0)
            outputs = []
            for i in range(size):
                sample = [t if t is None else t[i] for t in batched]
                _C.enter_sample(i)
                try:
                    outputs.append(Traced.apply(*sample, *args[tensors:]))
                finally:
                    _C.leave_sample()
            return tuple(torch.stack(column) for column in zip(*outputs)), (0, 0)

    @torch.compiler.allow_in_graph
    def traced(*args: Any) -> Tensor:
        return Traced.apply(*args)[0]

    return traced


# Function.apply's Python wrapper does nothing for an old-style Function outside functorch.
bce: Loss = Loss(
    _bce_forward,
    super(Function, _BCE).apply,
    _traceable(ops.bce_forward.default, ops.bce_backward.default, _derivatives.bce, 3),
)
bce_with_logits: Loss = Loss(
    _bce_with_logits_forward,
    super(Function, _BCEWithLogits).apply,
    _traceable(
        ops.bce_with_logits_forward.default, ops.bce_with_logits_backward.default, _derivatives.bce_with_logits, 4
    ),
)
nll: Loss = Loss(
    _nll_forward,
    super(Function, _NLL).apply,
    _traceable(ops.nll_forward.default, ops.nll_backward.default, _derivatives.nll, 3),
)
cross_entropy: Loss = Loss(
    _cross_entropy_forward,
    super(Function, _CrossEntropy).apply,
    _traceable(ops.cross_entropy_forward.default, ops.cross_entropy_backward.default, _derivatives.cross_entropy, 3),
)
