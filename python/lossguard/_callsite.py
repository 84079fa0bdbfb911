"""Which line of the caller's code called the loss. No frame is ever kept."""

from __future__ import annotations

import linecache
import os
import sys

import torch

from .report import CallSite

# Frames from here are not the caller's: this package, torch, and code that torch generates.
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INTERNAL = (_HERE, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)
_GENERATED = ("<eval_with_key>", "<string>", "<torch_package", "<frozen ", "<__array_function__")
_DEMO = _HERE + "demo.py"  # a user of this package, although it lives in it

#: Sites seen while a graph was traced; their index + 1 is baked into the graph as a constant.
_traced: list[CallSite] = []


def _is_internal(file: str) -> bool:
    return file.startswith((*_INTERNAL, *_GENERATED)) and file != _DEMO or "torchinductor" in file


def _site(file: str, line: int, function: str) -> CallSite:
    return CallSite(file, line, function, linecache.getline(file, line).strip())


def here() -> CallSite | None:
    """The innermost frame of this thread's stack that is the caller's own."""
    frame = sys._getframe(1)
    outermost = None
    while frame is not None:
        code = frame.f_code
        if not _is_internal(code.co_filename):
            return _site(code.co_filename, frame.f_lineno, code.co_name)
        outermost = (code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back  # type: ignore[assignment]
    return _site(*outermost) if outermost else None


def lookup(site: int) -> CallSite | None:
    """The call site an op was given; 0 stands for the stack as it is now."""
    return _traced[site - 1] if 0 < site <= len(_traced) else here()


@torch._dynamo.assume_constant_result
def traced_site() -> int:
    """While a graph is traced: the id of the line being traced, to be baked into the graph."""
    context = torch._guards.TracingContext.try_get()
    stack = context.extract_stack() if context is not None else []
    for frame in reversed(stack):
        if not _is_internal(frame.filename):
            found: CallSite | None = _site(frame.filename, frame.lineno or 0, frame.name)
            break
    else:
        found = here()
    if found is None:
        return 0
    if found not in _traced:
        _traced.append(found)
    return _traced.index(found) + 1
