"""What a call checks and does about a violation: per call, per thread (`guard`), per process (`configure`).

The state lives in C++ (csrc/policy.h), where the ops read it: so it is in force under torch.compile
too, whatever it was when the graph was traced.
"""

from __future__ import annotations

import functools
import os
import threading
from types import TracebackType
from typing import Literal

from torch.nn._reduction import get_enum

from . import _C, _pending

OnViolation = Literal["raise", "warn", "skip"]
When = Literal["auto", "immediately", "deferred"]

_ACTIONS = ("raise", "warn", "skip")  # csrc/policy.h, OnViolation
_MOMENTS = ("auto", "immediately", "deferred")  # csrc/policy.h, When
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

FLOAT_LOSS = 1 << 2  # a float32 loss for half inputs, as under autocast
SKIP = 3 << 7  # on_violation, spelled out
NEEDS_GRAD = 1 << 11
RECOMPUTED = 1 << 12  # a forward that a backward computes anew
WRAPS = 1 << 13  # a negative index counts from the end


def _check(strict: bool | None, check_finite: bool | None, on_violation: str | None, when: str | None) -> None:
    for name, value in (("strict", strict), ("check_finite", check_finite)):
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"{name} must be True, False or None, got {value!r}")
    if on_violation is not None and on_violation not in _ACTIONS:
        raise ValueError(f'on_violation must be "raise", "warn" or "skip", got {on_violation!r}')
    if when is not None and when not in _MOMENTS:
        raise ValueError(f'when must be "auto", "immediately" or "deferred", got {when!r}')


def explicit_flags(
    strict: bool | None, check_finite: bool | None, on_violation: str | None, when: str | None = None
) -> int:
    """The bits of `flags` for what the caller spelled out; 0 where nothing was."""
    _check(strict, check_finite, on_violation, when)
    flags = 0
    if strict is not None:
        flags |= (2 if strict else 1) << 3
    if check_finite is not None:
        flags |= (2 if check_finite else 1) << 5
    if on_violation is not None:
        flags |= (_ACTIONS.index(on_violation) + 1) << 7
    if when is not None:
        flags |= (_MOMENTS.index(when) or 3) << 9
    return flags


def reduction_flags(reduction: str) -> int:
    try:
        return get_enum(reduction)  # the same codes; knows torch's deprecated names as well
    except ValueError as error:
        raise ValueError(f"{error}: want 'none', 'mean' or 'sum'") from None


def _merged(
    code: int, strict: bool | None, check_finite: bool | None, on_violation: str | None, when: str | None
) -> int:
    if strict is not None:
        code = (code & ~1) | int(strict)
    if check_finite is not None:
        code = (code & ~2) | int(check_finite) << 1
    if on_violation is not None:
        code = (code & ~12) | _ACTIONS.index(on_violation) << 2
    if when is not None:
        code = (code & ~48) | _MOMENTS.index(when) << 4
    return code


def _unpacked(code: int) -> dict[str, bool | str]:
    return {
        "strict": bool(code & 1),
        "check_finite": bool(code & 2),
        "on_violation": _ACTIONS[code >> 2 & 3],
        "when": _MOMENTS[code >> 4],
    }


def configure(
    *,
    strict: bool | None = None,
    check_finite: bool | None = None,
    on_violation: OnViolation | None = None,
    when: When | None = None,
) -> None:
    """Set the policy of the process, for every thread that is not inside a :class:`guard`.

    Args:
        strict: check, besides what native torch checks on the CPU, targets of BCE-with-logits and
            class probabilities against [0, 1]. Initially True.
        check_finite: check that logits and log-probabilities of the elements that count are finite
            (in cross-entropy -inf is allowed as a mask). Initially False.
        on_violation: "raise" an exception; "warn" once per call site and go on, or "skip" silently:
            in both, bad elements are treated exactly like ignored ones. Initially "raise".
        when: "immediately", at the call, for which a call on CUDA waits until its kernel has run; or
            "deferred", without waiting: at the next call of a loss, in a backward, and at the latest before
            an optimizer steps; "auto", immediately on the CPU and deferred on CUDA. Initially what the environment
            variable LOSSGUARD_WHEN says, or "auto". What is skipped is never waited for.

    What is left None stays as it is.
    """
    _check(strict, check_finite, on_violation, when)
    _C.set_default_policy(_merged(_C.default_policy(), strict, check_finite, on_violation, when))


def _configure_from_environment() -> None:
    when = os.environ.get("LOSSGUARD_WHEN")
    if when:
        configure(when=when)  # type: ignore[arg-type]


class guard:
    """``with lossguard.guard(on_violation="skip"):`` changes the policy of this thread inside the block.

    Arguments as in :func:`configure`. Guards nest; what an inner one leaves None it takes from the
    outer one. The policy is read when a forward runs and stays with it: its backward may run
    elsewhere. Threads started inside the block begin with :func:`configure`'s policy. Also a decorator.

    At its end, unless an exception is on its way, it waits for the losses that this thread has computed on CUDA,
    and raises what they had to say.
    """

    def __init__(
        self,
        *,
        strict: bool | None = None,
        check_finite: bool | None = None,
        on_violation: OnViolation | None = None,
        when: When | None = None,
    ) -> None:
        _check(strict, check_finite, on_violation, when)
        self._changes = (strict, check_finite, on_violation, when)
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
        if kind is None:
            _pending.wait_for_own()

    def __call__(self, function):  # type: ignore[no-untyped-def]
        @functools.wraps(function)
        def guarded(*args, **kwargs):  # type: ignore[no-untyped-def]
            strict, check_finite, on_violation, when = self._changes
            with guard(strict=strict, check_finite=check_finite, on_violation=on_violation, when=when):
                return function(*args, **kwargs)

        return guarded


def policy() -> dict[str, bool | str]:
    """The policy in force on this thread: ``strict``, ``check_finite``, ``on_violation`` and ``when``."""
    return _unpacked(_C.effective_policy(0))


_configure_from_environment()
