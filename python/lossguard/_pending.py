"""What CUDA losses have yet to say, and the moments at which it is asked for: before a step above all.

Launches whose kernels may still run are kept in csrc/pending.h. What was found but must not be raised where it was,
because other ranks would wait for this one, is held back by `_violations`.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _C, _violations

__all__ = ["before_step", "check", "pending"]

_CUDA = hasattr(_C, "pending")
pending: Callable[[], int] = _C.pending if _CUDA else lambda: 0  # how much may come to light yet
_any_at_step: Callable[[], bool] = _C.any_at_step if _CUDA else lambda: False


def check(wait: bool = True) -> None:
    """Raise what the losses of any thread, stream and device have found and not said yet.

    Args:
        wait: until every loss computed so far is known to be right or wrong. Otherwise only what is known now.

    Raises:
        LossValidationError: as at the call, see :mod:`lossguard.functional`.
    """
    if pending():
        _C.wait_for_all(False) if wait else _C.look()
    _violations.raise_held("check")


def wait_for_own() -> None:
    """At the end of a `guard`."""
    if pending():
        _C.wait_for_own()
    _violations.raise_held("leave")


def before_step(optimizer: Any = None) -> None:
    """Before anything changes that cannot be changed back: weights, momentum, a scaler's state."""
    if _any_at_step():
        _C.wait_before_step(_number_of(optimizer))
    if _violations.holds():
        _violations.raise_held("step", _number_of(optimizer))


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count(1)


def _number_of(optimizer: Any) -> int:
    """What tells it from others, also from those that are gone."""
    try:
        return _numbers.setdefault(optimizer, next(_next_number))
    except TypeError:  # None, or something that wraps an optimizer and has no hash
        return 0


# ---- optimizers and scalers


@torch.compiler.disable
def _before_optimizer_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    before_step(optimizer)
    # The loss of a closure is computed, and its gradients used, within the step.
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _checked(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _checked(args[1], optimizer), *args[2:]), kwargs
    return None


def _checked(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    @functools.wraps(closure, updated=())
    def checked() -> Any:
        loss = closure()
        before_step(optimizer)
        return loss

    return checked


def _check_scalers_of(kind: type) -> None:
    """Before a scaler's `unscale_` and `step`, also where a subclass has its own, like FSDP's.

    A scaler notes what it has unscaled: an error after that would have the next step use gradients still scaled.
    """
    for base in kind.__mro__:
        for name in ("unscale_", "step"):
            method = base.__dict__.get(name)
            if method is not None and not hasattr(method, "_checked_by_lossguard"):
                setattr(base, name, _checked_method(method))


def _checked_method(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        before_step(args[0] if args else kwargs.get("optimizer"))
        return method(self, *args, **kwargs)

    checked._checked_by_lossguard = True  # type: ignore[attr-defined]
    return checked


# ---- threads: whose backward it is


def _thread_of_backward() -> Any:
    """The thread that called for the backward which runs here, as csrc/pending.h knows it; None if it is not known."""
    return torch._C._get_obj_in_tls(_THREAD) if torch._C._is_key_in_tls(_THREAD) else None


def _watch_backwards() -> None:
    """From now on: torch runs the backward of a CUDA loss on a thread of its own, with what its caller stashed."""
    run = torch.autograd.graph._engine_run_backward
    if hasattr(run, "_watched_by_lossguard"):
        return

    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        if torch._C._is_key_in_tls(_THREAD):  # a backward within a backward
            return run(*args, **kwargs)
        torch._C._stash_obj_in_tls(_THREAD, _C.this_thread())
        try:
            return run(*args, **kwargs)
        finally:
            _forget(_THREAD)  # what is left when a thread ends would need the GIL to go

    watched._watched_by_lossguard = True  # type: ignore[attr-defined]
    torch.autograd.graph._engine_run_backward = watched
    torch.autograd._engine_run_backward = watched  # type: ignore[attr-defined]


_THREAD = "lossguard thread"
_forget: Callable[[str], None] = getattr(torch._C, "_remove_obj_from_tls", lambda key: None)  # torch 2.13


def _install() -> None:
    if _CUDA:
        _C.install_threads(_thread_of_backward, _watch_backwards)
    register_optimizer_step_pre_hook(_before_optimizer_step)
    scaler = torch.amp.GradScaler
    _check_scalers_of(scaler)
    initialize = scaler.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        _check_scalers_of(type(self))
        initialize(self, *args, **kwargs)

    scaler.__init__ = __init__  # type: ignore[method-assign]
    atexit.register(_at_exit)
    os.register_at_fork(after_in_child=_violations.forget_held)


def _at_exit() -> None:
    """Nobody is left to catch it: say it, and leave the exit status alone."""
    found: list[Exception] = []
    for ask in ((lambda: _C.wait_for_all(True)) if pending() else None, lambda: _violations.raise_held("exit")):
        try:
            if ask is not None:
                ask()
        except Exception as error:  # or the device is gone
            found.append(error)
    for late in found:
        print(f"lossguard: found as the program ended, after its last step or check:\n{late}", file=sys.stderr)


_install()
