"""The four losses with the signatures of :mod:`torch.nn.functional`, checked while they are computed.

Every function takes four keyword-only arguments more. Left None, they follow ``lossguard.guard`` and
``lossguard.configure``:

* ``strict``: also check what native torch does not check on the CPU;
* ``check_finite``: also check that logits and log-probabilities are finite;
* ``on_violation``: ``"raise"``, ``"warn"`` or ``"skip"``;
* ``when``: ``"auto"``, ``"immediately"`` or ``"deferred"``.

They raise :class:`lossguard.TargetOutOfBoundsError` (an IndexError) for a class index outside
``[0, C)``, :class:`lossguard.ValueOutOfRangeError` (a RuntimeError) for a probability outside [0, 1],
:class:`lossguard.NonFiniteError` for a logit that is not finite; and for arguments that do not fit
together the exception native torch raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import is_grad_enabled as _is_grad_enabled
from torch._C import _are_functorch_transforms_active as _functorch_active
from torch._C import _current_graph_task_id as _backward_running
from torch._C import _is_any_autocast_enabled as _autocast_active
from torch._C._nn import nll_loss_nd as _native_nll
from torch.autograd import forward_ad as _forward_ad
from torch.compiler import is_compiling as _is_compiling
from torch.nn._reduction import legacy_get_string
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _autograd, _callsite, _native
from ._C import build_info as _build_info
from ._C import call_site as _call_site
from ._C import count_call as _count_call
from ._C import is_plain as _is_plain
from ._ops import Unsupported
from ._policy import _REDUCTIONS, FLOAT_LOSS, RECOMPUTED, OnViolation, When, explicit_flags, reduction_flags
from .errors import LossValidationError

__all__ = ["binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss"]

# What an op or its arguments raise where no kernel takes them. Not every Exception: checkpointing stops a
# forward that it computes anew with one of its own.
_REFUSED = (Unsupported, NotImplementedError, RuntimeError, TypeError, ValueError, AttributeError, OverflowError)
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_HALVES = (torch.float16, torch.bfloat16)
_WIDE = (torch.float32, torch.float64)
_FEW = 4096  # elements: up to here native NLL, one C++ node, beats any Function written in Python
_PLAIN = (Tensor, torch.nn.Parameter)
DEVICES = ("cpu", "cuda", "meta") if _build_info()["cuda"] else ("cpu", "meta")
_NO_WEIGHT_GRADIENT = "weights have no gradient"
_BOOL = "ignore_index is a bool"


def binary_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    size_average: Optional[bool] = None,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    *,
    strict: Optional[bool] = None,
    check_finite: Optional[bool] = None,
    on_violation: Optional[OnViolation] = None,
    when: Optional[When] = None,
) -> Tensor:
    """Binary cross-entropy of probabilities, as :func:`torch.nn.functional.binary_cross_entropy`.

    ``-w (y log p + (1 - y) log(1 - p))`` with both logarithms held at -100.

    Args:
        input: (*) probabilities p in [0, 1]; float16, bfloat16, float32 or float64.
        target: (*) probabilities y in [0, 1], of input's shape and dtype.
        weight: broadcasts to (*).
        reduction: "none", "mean" or "sum".

    Returns: (*) for "none", else (). Of input's dtype.

    Raises:
        ValueOutOfRangeError: an element of input or target is outside [0, 1], or NaN.
    """
    if has_torch_function_variadic(input, target, weight):
        return _overridden(
            binary_cross_entropy,
            F.binary_cross_entropy,
            dict(input=input, target=target, weight=weight),
            dict(size_average=size_average, reduce=reduce, reduction=reduction),
            dict(strict=strict, check_finite=check_finite, on_violation=on_violation, when=when),
        )
    flags = _REDUCTIONS.get(reduction)
    if (
        flags is None
        or size_average is not None
        or reduce is not None
        or strict is not None
        or check_finite is not None
        or on_violation is not None
        or when is not None
    ):
        flags = _flags(size_average, reduce, reduction, strict, check_finite, on_violation, when)
    if _is_compiling() or _functorch_active() or _autocast_active() or _forward_ad._current_level >= 0:
        return _special(_BCE, (input, target, weight), (), flags)
    try:
        site = _call_site()
        if _backward_running() != -1:
            flags = _in_backward(flags)
        if _is_grad_enabled() and (input.requires_grad or target.requires_grad or weight is not None):
            if weight is not None and weight.requires_grad:
                raise Unsupported(_NO_WEIGHT_GRADIENT)
            return _autograd.bce.eager(input, target, weight, (flags, site))
        return _autograd.bce.forward(input, target, weight, flags, site)[0]
    except LossValidationError:
        raise
    except _REFUSED as refusal:
        return _refused(_BCE, (input, target, weight), (), flags, refusal)


def binary_cross_entropy_with_logits(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    size_average: Optional[bool] = None,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    pos_weight: Optional[Tensor] = None,
    *,
    strict: Optional[bool] = None,
    check_finite: Optional[bool] = None,
    on_violation: Optional[OnViolation] = None,
    when: Optional[When] = None,
) -> Tensor:
    """Binary cross-entropy of logits, as :func:`torch.nn.functional.binary_cross_entropy_with_logits`.

    ``w ((1 - y) x + (1 + (pos_weight - 1) y) log(1 + exp(-x)))``, computed without overflow; a
    factor of 0 makes an infinite logit cost 0.

    Args:
        input: (*) logits x; float16, bfloat16, float32 or float64.
        target: (*) probabilities y in [0, 1], of input's shape. Checked under ``strict`` (the default),
            with room for rounding: 4 ulp at 1 in target's dtype, and 1e-6 at least. Elements with a
            weight of 0 are exempt.
        weight: broadcasts to (*).
        pos_weight: broadcasts to (*); the weight of the positive answers.
        reduction: "none", "mean" or "sum".

    Returns: (*) for "none", else (). Of input's dtype.

    Raises:
        ValueOutOfRangeError: an element of target is outside [0, 1], or NaN.
        NonFiniteError: an element of input is not finite, under ``check_finite``.
    """
    if has_torch_function_variadic(input, target, weight, pos_weight):
        return _overridden(
            binary_cross_entropy_with_logits,
            F.binary_cross_entropy_with_logits,
            dict(input=input, target=target, weight=weight, pos_weight=pos_weight),
            dict(size_average=size_average, reduce=reduce, reduction=reduction),
            dict(strict=strict, check_finite=check_finite, on_violation=on_violation, when=when),
        )
    flags = _REDUCTIONS.get(reduction)
    if (
        flags is None
        or size_average is not None
        or reduce is not None
        or strict is not None
        or check_finite is not None
        or on_violation is not None
        or when is not None
    ):
        flags = _flags(size_average, reduce, reduction, strict, check_finite, on_violation, when)
    if _is_compiling() or _functorch_active() or _autocast_active() or _forward_ad._current_level >= 0:
        return _special(_BCE_WITH_LOGITS, (input, target, weight, pos_weight), (), flags)
    try:
        site = _call_site()
        if _backward_running() != -1:
            flags = _in_backward(flags)
        if _is_grad_enabled() and (
            input.requires_grad or target.requires_grad or weight is not None or pos_weight is not None
        ):
            if (weight is not None and weight.requires_grad) or (pos_weight is not None and pos_weight.requires_grad):
                raise Unsupported(_NO_WEIGHT_GRADIENT)
            return _autograd.bce_with_logits.eager(input, target, weight, pos_weight, (flags, site))
        return _autograd.bce_with_logits.forward(input, target, weight, pos_weight, flags, site)[0]
    except LossValidationError:
        raise
    except _REFUSED as refusal:
        return _refused(_BCE_WITH_LOGITS, (input, target, weight, pos_weight), (), flags, refusal)


def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    size_average: Optional[bool] = None,
    ignore_index: int = -100,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    *,
    strict: Optional[bool] = None,
    check_finite: Optional[bool] = None,
    on_violation: Optional[OnViolation] = None,
    when: Optional[When] = None,
) -> Tensor:
    """Negative log-likelihood, as :func:`torch.nn.functional.nll_loss`.

    ``-w[t] x[t]``; the mean divides by the sum of the weights ``w[t]`` of the targets that count.

    Args:
        input: (N, C), (N, C, D1..DK) or (C) log-probabilities x; float16, bfloat16, float32 or float64.
        target: (N), (N, D1..DK) or (): class indices t, int64 or uint8.
        weight: (C) of input's dtype.
        ignore_index: elements with this target count for nothing, in loss, mean and gradient.
        reduction: "none", "mean" or "sum".

    Returns: target's shape for "none", else (). Of input's dtype.

    Raises:
        TargetOutOfBoundsError: a target is neither in [0, C) nor ``ignore_index``.
        NonFiniteError: the log-probability of a target is not finite, under ``check_finite``.
    """
    if has_torch_function_variadic(input, target, weight):
        return _overridden(
            nll_loss,
            F.nll_loss,
            dict(input=input, target=target, weight=weight),
            dict(size_average=size_average, ignore_index=ignore_index, reduce=reduce, reduction=reduction),
            dict(strict=strict, check_finite=check_finite, on_violation=on_violation, when=when),
        )
    flags = _REDUCTIONS.get(reduction)
    if (
        flags is None
        or size_average is not None
        or reduce is not None
        or strict is not None
        or check_finite is not None
        or on_violation is not None
        or when is not None
    ):
        flags = _flags(size_average, reduce, reduction, strict, check_finite, on_violation, when)
    if ignore_index is True or ignore_index is False:
        return _native_call(_NLL, (input, target, weight), (ignore_index,), flags, _BOOL)
    if _is_compiling() or _functorch_active() or _autocast_active() or _forward_ad._current_level >= 0:
        return _special(_NLL, (input, target, weight), (ignore_index,), flags)
    try:
        site = _call_site()
        if _backward_running() != -1:
            flags = _in_backward(flags)
        # Native NLL checks labels in its own pass; its error becomes our report. Left to it are dtypes wide
        # enough to sum in, where the policy is to raise and takes no interest in infinities.
        if (
            input.numel() <= _FEW
            and input.dim() == 2
            and input.dtype in _WIDE
            and input.is_cpu
            and _is_plain(flags)
        ):
            try:
                loss = _native_nll(input, target, weight, flags & 3, ignore_index)  # type: ignore[arg-type]
                if not flags & RECOMPUTED:
                    _count_call(site, target.numel())
                return loss
            except (IndexError, RuntimeError, ValueError):
                pass  # to be reported, or refused, below
        if _is_grad_enabled() and (input.requires_grad or target.requires_grad or weight is not None):
            if weight is not None and weight.requires_grad:
                raise Unsupported(_NO_WEIGHT_GRADIENT)
            return _autograd.nll.eager(input, target, weight, (ignore_index, flags, site))
        return _autograd.nll.forward(input, target, weight, ignore_index, flags, site)[0]
    except LossValidationError:
        raise
    except _REFUSED as refusal:
        return _refused(_NLL, (input, target, weight), (ignore_index,), flags, refusal)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Optional[Tensor] = None,
    size_average: Optional[bool] = None,
    ignore_index: int = -100,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    strict: Optional[bool] = None,
    check_finite: Optional[bool] = None,
    on_violation: Optional[OnViolation] = None,
    when: Optional[When] = None,
) -> Tensor:
    """Cross-entropy of logits, as :func:`torch.nn.functional.cross_entropy`.

    With ``lse = log sum_c exp(x[c])`` and smoothing ``e``, a class index t costs
    ``(1 - e) w[t] (lse - x[t]) + e/C sum_c w[c] (lse - x[c])``, class probabilities q cost
    ``sum_c w[c] ((1 - e) q[c] + e/C) (lse - x[c])`` (Szegedy et al., arXiv 1512.00567, for smoothing).

    Args:
        input: (N, C), (N, C, D1..DK) or (C) logits x; float16, bfloat16, float32 or float64.
        target: (N), (N, D1..DK) or (): class indices, int64 or uint8. Or of input's shape and dtype:
            class probabilities, checked against [0, 1] under ``strict`` (the default) with room for
            rounding: 4 ulp at 1, and 1e-6 at least. Classes with a weight of 0 are exempt.
        weight: (C) of input's dtype.
        ignore_index: elements with this class index count for nothing, in loss, mean and gradient.
        reduction: "none", "mean" (for class indices weighted by ``w[t]``) or "sum".
        label_smoothing: e in [0, 1].

    Returns: the shape of input without C for "none", else (). Of input's dtype.

    Raises:
        TargetOutOfBoundsError: a class index is neither in [0, C) nor ``ignore_index``.
        ValueOutOfRangeError: a class probability is outside [0, 1], or NaN.
        NonFiniteError: a logit of an element that counts is NaN or infinite, or every class is
            masked with -inf; under ``check_finite``.
    """
    if has_torch_function_variadic(input, target, weight):
        return _overridden(
            cross_entropy,
            F.cross_entropy,
            dict(input=input, target=target, weight=weight),
            dict(
                size_average=size_average,
                ignore_index=ignore_index,
                reduce=reduce,
                reduction=reduction,
                label_smoothing=label_smoothing,
            ),
            dict(strict=strict, check_finite=check_finite, on_violation=on_violation, when=when),
        )
    flags = _REDUCTIONS.get(reduction)
    if (
        flags is None
        or size_average is not None
        or reduce is not None
        or strict is not None
        or check_finite is not None
        or on_violation is not None
        or when is not None
    ):
        flags = _flags(size_average, reduce, reduction, strict, check_finite, on_violation, when)
    try:
        if not 0.0 <= label_smoothing <= 1.0:
            raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    except TypeError:
        why = "label_smoothing is not a number"
        return _native_call(_CROSS_ENTROPY, (input, target, weight), (ignore_index, label_smoothing), flags, why)
    if ignore_index is True or ignore_index is False:
        return _native_call(_CROSS_ENTROPY, (input, target, weight), (ignore_index, label_smoothing), flags, _BOOL)
    if _is_compiling() or _functorch_active() or _autocast_active() or _forward_ad._current_level >= 0:
        return _special(_CROSS_ENTROPY, (input, target, weight), (ignore_index, label_smoothing), flags)
    try:
        site = _call_site()
        if _backward_running() != -1:
            flags = _in_backward(flags)
        if _is_grad_enabled() and (input.requires_grad or target.requires_grad or weight is not None):
            if weight is not None and weight.requires_grad and not target.is_floating_point():
                raise Unsupported(_NO_WEIGHT_GRADIENT)
            return _autograd.cross_entropy.eager(input, target, weight, (ignore_index, label_smoothing, flags, site))
        return _autograd.cross_entropy.forward(input, target, weight, ignore_index, label_smoothing, flags, site)[0]
    except LossValidationError:
        raise
    except _REFUSED as refusal:
        return _refused(_CROSS_ENTROPY, (input, target, weight), (ignore_index, label_smoothing), flags, refusal)


# ---- what the four have in common


class _Loss:
    """What a loss's unusual calls need to know of it."""

    def __init__(
        self,
        loss: _autograd.Loss,
        native: Callable[..., Tensor],
        tensors: tuple[str, ...],
        constants: tuple[str, ...] = (),
    ) -> None:
        self.loss, self.native, self.tensors, self.constants = loss, native, tensors, constants
        self.has_classes = "ignore_index" in constants


_BCE = _Loss(_autograd.bce, _native.copy_of(F.binary_cross_entropy), ("input", "target", "weight"))
_BCE_WITH_LOGITS = _Loss(
    _autograd.bce_with_logits,
    _native.copy_of(F.binary_cross_entropy_with_logits),
    ("input", "target", "weight", "pos_weight"),
)
_NLL = _Loss(_autograd.nll, _native.copy_of(F.nll_loss), ("input", "target", "weight"), ("ignore_index",))
_CROSS_ENTROPY = _Loss(
    _autograd.cross_entropy,
    _native.copy_of(F.cross_entropy),
    ("input", "target", "weight"),
    ("ignore_index", "label_smoothing"),
)
#: torch's own four, by name, also while `lossguard.patch` is in force.
NATIVE = {loss.native.__name__: loss.native for loss in (_BCE, _BCE_WITH_LOGITS, _NLL, _CROSS_ENTROPY)}


def _flags(
    size_average: Optional[bool],
    reduce: Optional[bool],
    reduction: str,
    strict: Optional[bool],
    check_finite: Optional[bool],
    on_violation: Optional[str],
    when: Optional[str],
) -> int:
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)  # with torch's deprecation warning
    return reduction_flags(reduction) | explicit_flags(strict, check_finite, on_violation, when)


@torch._dynamo.assume_constant_result
def _beyond_functions() -> bool:
    """Whether a functorch transform on the stack is jvp (also in jacfwd and hessian) or functionalize."""
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or []
    beyond = (functorch.TransformType.Jvp, functorch.TransformType.Functionalize)
    return any(level.key() in beyond for level in stack)


def _has_tangent(tensors: tuple[Any, ...]) -> bool:
    return any(t is not None and _forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def _special(loss: _Loss, tensors: tuple[Any, ...], constants: tuple[Any, ...], flags: int) -> Tensor:
    """A call under torch.compile, a functorch transform, autocast or forward-mode AD."""
    if not all(t is None or isinstance(t, Tensor) for t in tensors):
        return _native_call(loss, tensors, constants, flags, "not a tensor")
    input, target = tensors[:2]
    compiling = _is_compiling()
    if torch.is_autocast_enabled(input.device.type):
        if loss is _BCE and input.is_cuda:  # refused, natively: a half cannot tell 1 - p from 1
            return _native_call(loss, tensors, constants, flags, "BCELoss under CUDA autocast")
        tensors, flags = _autocast(loss, tensors, flags)
        input, target = tensors[:2]
    transformed = compiling or _functorch_active()
    if transformed and _beyond_functions():
        return _native_call(loss, tensors, constants, flags, "forward-mode differentiation, or functionalize")
    if not compiling and _forward_ad._current_level >= 0 and not _functorch_active() and _has_tangent(tensors):
        return _native_call(loss, tensors, constants, flags, "forward-mode differentiation")
    if not transformed:
        try:
            if _has_gradless_weight(loss, tensors):
                raise Unsupported(_NO_WEIGHT_GRADIENT)
            return _eager(loss, tensors, constants, flags)
        except LossValidationError:
            raise
        except _REFUSED as refusal:
            return _refused(loss, tensors, constants, flags, refusal)
    why = _refusal(loss, tensors, constants, flags)
    if why is not None:
        promoted = _promoted(loss, tensors, constants)
        if promoted is None:
            return _native_call(loss, tensors, constants, flags, why)
        return _like_native(loss, target, loss.loss.traced(*promoted, *constants, flags, site()))
    return loss.loss.traced(*tensors, *constants, flags, site())


def site() -> int:
    """The line that calls, or is traced; 0 in what may run in another process, where ids of this one mean nothing."""
    if torch.compiler.is_exporting():
        return 0
    return _callsite.traced_site() if _is_compiling() else _call_site()


def _in_backward(flags: int) -> int:
    """There, checkpointing computes a forward anew: not to be counted, nor reported, twice."""
    return flags | RECOMPUTED if _callsite.is_recomputed() else flags


def _autocast(loss: _Loss, tensors: tuple[Any, ...], flags: int) -> tuple[tuple[Any, ...], int]:
    """As native's rule for these losses: halves count as float32. The kernels widen as they read."""
    floats = {t.dtype for t in tensors if t is not None and t.is_floating_point()}
    if not floats & set(_HALVES):
        return tensors, flags
    if torch.float64 in floats or tensors[0].dtype not in _HALVES:  # rare: widened here, doubles left alone
        return tuple(t.float() if t is not None and t.dtype in _HALVES else t for t in tensors), flags
    return tensors, flags | FLOAT_LOSS


def _refusal(loss: _Loss, tensors: tuple[Any, ...], constants: tuple[Any, ...], flags: int) -> Optional[str]:
    """Why no kernel takes these: the rules of csrc/ops.cpp, for calls that are traced first."""
    input, target, *weights = tensors
    for name, t in zip(loss.tensors, tensors):
        if t is None:
            continue
        if t.dim() > 64:
            return "more than 64 dimensions"
        if t.layout != torch.strided or t.device != input.device or t.device.type not in DEVICES:
            return f"{name} is {t.layout} on {t.device}"
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(t):
            return f"{name} is a {type(t).__name__}"
    if input.dtype not in _FLOATS:
        return f"input has the dtype {input.dtype}"
    wide = flags & FLOAT_LOSS != 0
    soft = target.is_floating_point()
    if soft or not loss.has_classes:
        if target.shape != input.shape:
            return "target must have the shape of input"
        if target.dtype != input.dtype and not (wide and target.dtype in _FLOATS):
            return "target must have the dtype of input"
    elif target.dtype not in (torch.int64, torch.uint8):
        return f"target has the dtype {target.dtype}"
    elif input.dim() == 0:
        return "input must have a class dimension"
    elif input.dim() == 1:
        if target.dim() > 1 or (target.dim() == 1 and target.shape[0] != 1):
            return "target must be one class index"
    elif target.shape != input.shape[:1] + input.shape[2:]:
        return "target must have the shape of input without classes"
    if soft and loss is _CROSS_ENTROPY and constants[0] >= 0:
        return "ignore_index is not defined for class probabilities"
    if soft and loss is _NLL:
        return "target must hold class indices"
    if _has_gradless_weight(loss, tensors):
        return _NO_WEIGHT_GRADIENT
    for weight in weights:
        if weight is None:
            continue
        if weight.dtype not in _FLOATS:
            return f"weight has the dtype {weight.dtype}"
        if loss.has_classes:
            if weight.dim() != 1 or weight.shape[0] != input.shape[0 if input.dim() == 1 else 1]:
                return "weight must have one element a class"
            if weight.dtype != input.dtype and not wide:
                return "weight must have the dtype of input"
        elif not _broadcasts(weight, input):
            return "weight must broadcast to the shape of input"
    return None


def _broadcasts(weight: Tensor, input: Tensor) -> bool:
    if weight.dim() > input.dim():
        return False
    pairs = zip(reversed(weight.shape), reversed(input.shape))
    return all(w == 1 or w == size for w, size in pairs)


def _promoted(loss: _Loss, tensors: tuple[Any, ...], constants: tuple[Any, ...]) -> Optional[tuple[Any, ...]]:
    """Floating-point dtypes that differ, where native takes them, made one; else None."""
    input, target = tensors[:2]
    if not (loss is _BCE_WITH_LOGITS or (loss is _CROSS_ENTROPY and target.is_floating_point())):
        return None
    floats = [t.dtype for t in tensors if t is not None]
    if len(set(floats)) < 2 or not all(dtype in _FLOATS for dtype in floats):
        return None
    common = input.dtype
    for dtype in floats if loss is _CROSS_ENTROPY else floats[1:2]:
        common = torch.promote_types(common, dtype)
    promoted = tuple(t if t is None else t.to(common) for t in tensors)
    return promoted if _refusal(loss, promoted, constants, 0) is None else None


def _like_native(loss: _Loss, target: Tensor, result: Tensor) -> Tensor:
    """BCE-with-logits has the dtype of its target, natively."""
    return result.to(target.dtype) if loss is _BCE_WITH_LOGITS else result


def _eager(loss: _Loss, tensors: tuple[Any, ...], constants: tuple[Any, ...], flags: int) -> Tensor:
    if _backward_running() != -1:
        flags = _in_backward(flags)
    if _is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return loss.loss.eager(*tensors, (*constants, flags, _call_site()))
    return loss.loss.forward(*tensors, *constants, flags, _call_site())[0]


def _has_gradless_weight(loss: _Loss, tensors: tuple[Any, ...]) -> bool:
    """Whether a gradient is wanted for weights that have none, natively: all but those of class probabilities."""
    if not _is_grad_enabled() or (loss is _CROSS_ENTROPY and tensors[1].is_floating_point()):
        return False
    return any(weight is not None and weight.requires_grad for weight in tensors[2:])


def _refused(
    loss: _Loss, tensors: tuple[Any, ...], constants: tuple[Any, ...], flags: int, refusal: Exception
) -> Tensor:
    """Not a violation but a call that no kernel takes: native computes it, or raises its own error."""
    if isinstance(refusal, Unsupported):
        why = str(refusal)
    elif isinstance(refusal, NotImplementedError) or any(type(t) not in _PLAIN for t in tensors if t is not None):
        why = f"no kernel for {_kind_of(tensors)}"
    elif any(t is None for t in tensors[:2]):
        why = "not a tensor"
    elif not constants or (type(constants[0]) is int and -(2**63) <= constants[0] < 2**63):
        try:
            raise refusal  # not about the arguments: somebody's hook
        finally:
            del refusal  # it must not hold the frame that holds it
    else:
        why = str(refusal).partition("\n")[0]
    promoted = _promoted(loss, tensors, constants) if isinstance(refusal, Unsupported) else None
    if promoted is None:
        return _native_call(loss, tensors, constants, flags, why)
    return _like_native(loss, tensors[1], _eager(loss, promoted, constants, flags))


def _kind_of(tensors: tuple[Any, ...]) -> str:
    kinds = {
        type(t).__name__ if type(t) not in _PLAIN else f"{t.device.type} tensors" for t in tensors if t is not None
    }
    return " and ".join(sorted(kinds))


def _native_call(loss: _Loss, tensors: tuple[Any, ...], constants: tuple[Any, ...], flags: int, why: str) -> Tensor:
    reduction = next(name for name, code in _REDUCTIONS.items() if code == flags & 3)
    options = dict(zip(loss.constants, constants), reduction=reduction)
    return _native.fall_back(loss.native, dict(zip(loss.tensors, tensors)), options, why)


def _overridden(
    function: Callable[..., Tensor],
    native: Callable[..., Tensor],
    tensors: dict[str, Any],
    options: dict[str, Any],
    policy: dict[str, Any],
) -> Tensor:
    """A subclass with __torch_function__, or a mode, is in charge: it may call back, or know native only."""
    relevant = tuple(t for t in tensors.values() if t is not None)
    try:
        return handle_torch_function(function, relevant, **tensors, **options, **policy)
    except TypeError as error:
        if "__torch_function__" not in str(error) and "Multiple dispatch failed" not in str(error):
            raise
    kinds = " and ".join(sorted({type(t).__name__ for t in relevant}))
    return _native.fall_back(native, tensors, options, f"{kinds} handles native torch functions only")
