"""Calls that have no kernel go to native torch, so that a drop-in breaks nothing that worked.

Native then computes, unchecked and with one warning; or it refuses, and its error, of its own type,
says besides what was given.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from . import _callsite, errors
from .report import CallSite

_warned: dict[tuple[str, str], object] = {}  # setdefault is atomic: no lock for a fork to leave held


def _describe(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{name}={value!r}"
    return f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"


def copy_of(function: Any) -> Callable[..., Tensor]:
    """One of torch.nn.functional's that stays native when `lossguard.patch` gives that another code."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def fall_back(function: Callable[..., Tensor], tensors: dict[str, Any], options: dict[str, Any], why: str) -> Tensor:
    """`function(**tensors, **options)` by native torch; `why` says what lossguard has no kernel for."""
    try:
        result = function(**tensors, **options)
    except Exception as error:
        given = ", ".join(_describe(name, t) for name, t in tensors.items() if t is not None)
        raise _explained(error, f"{error} (lossguard: {why}; given: {given})") from None
    if torch.compiler.is_dynamo_compiling():
        _not_validated_while_tracing(function.__name__, why)
    elif not torch.compiler.is_compiling():
        not_validated(function.__name__, why)
    return result


@torch._dynamo.assume_constant_result
def _not_validated_while_tracing(name: str, why: str) -> int:
    not_validated(name, why)
    return 0


def _explained(error: Exception, text: str) -> Exception:
    try:
        return type(error)(text)
    except Exception:  # a constructor of its own
        return error


def not_validated(name: str, why: str) -> None:
    token = object()
    if _warned.setdefault((name, why), token) is not token:
        return
    site = _callsite.here() or CallSite("<unknown>", 0, "?")
    text = f"{name} was computed by native torch and not validated: {why} (said once)"
    try:
        warnings.warn_explicit(text, errors.NotValidatedWarning, site.file, site.line)
    except errors.NotValidatedWarning:  # warnings are errors: the next one is to be raised as well
        _warned.pop((name, why), None)
        raise
