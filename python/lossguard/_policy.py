"""What a call checks and does about a violation: per call, per thread (`guard`), per process (`configure`).

The state lives in C++ (csrc/policy.h), where the ops read it: so it is in force under torch.compile
too, whatever it was when the graph was traced.
"""

from __future__ import annotations

import functools
import threading
from types import TracebackType
from typing import Literal

from torch.nn._reduction import get_enum

from . import _C

OnViolation = Literal["raise", "warn", "skip"]

_ACTIONS = ("raise", "warn", "skip")  # csrc/policy.h, OnViolation
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

FLOAT_LOSS = 1 << 2  # a float32 loss for half inputs, as under autocast
SKIP = 3 << 7  # on_violation, spelled out


def _check(strict: bool | None, check_finite: bool | None, on_violation: str | None) -> None:
    for name, value in (("strict", strict), ("check_finite", check_finite)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False or None, got {value!r}")
    if on_violation is not None and on_violation not in _ACTIONS:
        raise ValueError(f'on_violation must be "raise", "warn" or "skip", got {on_violation!r}')


def explicit_flags(strict: bool | None, check_finite: bool | None, on_violation: str | None) -> int:
    """The bits of `flags` for what the caller spelled out; 0 where nothing was."""
    _check(strict, check_finite, on_violation)
    flags = 0
    if strict is not None:
        flags |= (2 if strict else 1) << 3
    if check_finite is not None:
        flags |= (2 if check_finite else 1) << 5
    if on_violation is not None:
        flags |= (_ACTIONS.index(on_violation) + 1) << 7
    return flags


def reduction_flags(reduction: str) -> int:
    try:
        return get_enum(reduction)  # the same codes; knows torch's deprecated names as well
    except ValueError as error:
        raise ValueError(f"{error}: want 'none', 'mean' or 'sum'") from None


def _merged(code: int, strict: bool | None, check_finite: bool | None, on_violation: str | None) -> int:
    if strict is not None:
        code = (code & ~1) | int(strict)
    if check_finite is not None:
        code = (code & ~2) | int(check_finite) << 1
    if on_violation is not None:
        code = (code & ~12) | _ACTIONS.index(on_violation) << 2
    return code


def _unpacked(code: int) -> dict[str, bool | str]:
    return {"strict": bool(code & 1), "check_finite": bool(code & 2), "on_violation": _ACTIONS[code >> 2]}


def configure(
    *,
    strict: bool | None = None,
    check_finite: bool | None = None,
    on_violation: OnViolation | None = None,
) -> None:
    """Set the policy of the process, for every thread that is not inside a :class:`guard`.

    Args:
        strict: check, besides what native torch checks on the CPU, targets of BCE-with-logits and
            class probabilities against [0, 1]. Initially True.
        check_finite: check that logits and log-probabilities of the elements that count are finite
            (in cross-entropy -inf is allowed as a mask). Initially False.
        on_violation: "raise" an exception; "warn" once per call site and go on, or "skip" silently:
            in both, bad elements are treated exactly like ignored ones. Initially "raise".

    What is left None stays as it is.
    """
    _check(strict, check_finite, on_violation)
    _C.set_default_policy(_merged(_C.default_policy(), strict, check_finite, on_violation))


class guard:
    """``with lossguard.guard(on_violation="skip"):`` changes the policy of this thread inside the block.

    Arguments as in :func:`configure`. Guards nest; what an inner one leaves None it takes from the
    outer one. The policy is read when a forward runs and stays with it: its backward may run
    elsewhere. Threads started inside the block begin with :func:`configure`'s policy. Also a decorator.
    """

    def __init__(
        self,
        *,
        strict: bool | None = None,
        check_finite: bool | None = None,
        on_violation: OnViolation | None = None,
    ) -> None:
        _check(strict, check_finite, on_violation)
        self._changes = (strict, check_finite, on_violation)
        self._outer = threading.local()  # one guard object may be entered by several threads, and again

    def __enter__(self) -> guard:
        outer = _C.thread_policy()
        self._outer.__dict__.setdefault("stack", []).append(outer)
        _C.set_thread_policy(_merged(outer if outer >= 0 else _C.default_policy(), *self._changes))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _C.set_thread_policy(self._outer.stack.pop())

    def __call__(self, function):  # type: ignore[no-untyped-def]
        @functools.wraps(function)
        def guarded(*args, **kwargs):  # type: ignore[no-untyped-def]
            with guard(strict=self._changes[0], check_finite=self._changes[1], on_violation=self._changes[2]):
                return function(*args, **kwargs)

        return guarded


def policy() -> dict[str, bool | str]:
    """The policy in force on this thread: ``strict``, ``check_finite`` and ``on_violation``."""
    return _unpacked(_C.effective_policy(0))
