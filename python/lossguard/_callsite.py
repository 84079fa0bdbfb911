"""Which line of the caller's code called the loss. No frame is ever kept."""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections.abc import Iterator
from types import FunctionType, TracebackType

import torch

from . import _C
from .report import CallSite

# Frames from here are not the caller's: this package, torch, and code that torch generates.
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INTERNAL = (_HERE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_GENERATED = ("<eval_with_key>", "<string>", "<torch_package", "<frozen ", "<__array_function__")
_DEMO = _HERE + "demo.py"  # a user of this package, although it lives in it

# By function: what the name of its file tells. Libraries with a checkpointing of their own name theirs the same way.
_RECOMPUTING = {"recompute_fn": "checkpoint", "backward": "checkpoint"}

_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)

#: Sites seen while a graph was traced; the negative of their index, less 1, is baked into the graph as a constant.
_traced: list[CallSite] = []


def is_internal(file: str) -> bool:
    return file.startswith((*_INTERNAL, *_GENERATED)) and file != _DEMO or "torchinductor" in file


def _site(file: str, line: int, function: str) -> CallSite:
    return CallSite(file, line, function, linecache.getline(file, line).strip())


def here() -> CallSite | None:
    """The innermost frame of this thread's stack that is the caller's own."""
    frame = sys._getframe(1)
    outermost = None
    while frame is not None:
        code = frame.f_code
        if not is_internal(code.co_filename):
            return _site(code.co_filename, frame.f_lineno, code.co_name)
        outermost = (code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return _site(*outermost) if outermost else None


def lookup(site: int) -> CallSite | None:
    """The call site an op was given: above 0 of eager code (csrc/callsite.h), below 0 of traced code.

    None for 0, and for ids of the process that exported a program.
    """
    if site > 0:
        try:
            return _site(*_C.describe_site(site))
        except IndexError:
            return None
    return _traced[-site - 1] if -len(_traced) <= site < 0 else None


def is_recomputed() -> bool:
    """Whether the backward running on this thread has the caller compute a forward anew, as checkpointing does.

    Unlike a loss that a hook or a Function's backward computes for the first time.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in _RECOMPUTING and _RECOMPUTING[code.co_name] in os.path.basename(code.co_filename):
            return True
        if code.co_name == "_engine_run_backward":  # further out is who called for the backward
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


class LossCall(Exception):
    """Not an error of its own: shows, as the cause of one that came to light elsewhere, where its loss was called."""


LossCall.__module__ = "lossguard"


def cause(site: CallSite | None) -> LossCall | None:
    """With a traceback of one entry, as if it had been raised at the call site, whose frame is long gone."""
    if site is None:
        return None
    called = LossCall("the loss was called here; further down is where it came to light that it was wrong")
    # A frame that has not run has no frame behind it, which would keep the caller's alive.
    code = _never_run.__code__.replace(co_filename=site.file, co_name=site.function, co_firstlineno=site.line)
    if hasattr(code, "co_qualname"):
        code = code.replace(co_qualname=site.function)
    frame = FunctionType(code, {})().gi_frame
    return called.with_traceback(TracebackType(None, frame, -1, site.line))


def _never_run() -> Iterator[None]:
    yield


@torch._dynamo.assume_constant_result
def traced_site() -> int:
    """While a graph is traced: the id of the line being traced, to be baked into the graph."""
    context = torch._guards.TracingContext.try_get()
    stack = [(f.filename, f.lineno or 0, f.name) for f in (context.extract_stack() if context is not None else [])]
    if not torch.compiler.is_dynamo_compiling():  # a graph of Dynamo's is being run to trace what is under its nodes
        noted = torch.fx.traceback.get_current_meta().get("stack_trace") or ""
        stack += [(file, int(line), function) for file, line, function in _FRAME.findall(noted)]
    for file, line, function in reversed(stack):
        if not is_internal(file):
            found: CallSite | None = _site(file, line, function)
            break
    else:
        found = here()
    if found is None:
        return 0
    if found not in _traced:
        _traced.append(found)
    return -1 - _traced.index(found)


_C.set_internal(is_internal)
