"""From the report of a kernel to the exception, or warning, of a person."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from . import _C, _callsite, errors
from .diagnosis import likely_causes
from .report import MAX_TEXT, CallSite, Report, Section, shorten

_CHECKS = ("class_index", "unit_interval", "finite")  # csrc/report.h, Check
_LABELS = ("-1", "-100", "255", "num_classes")  # csrc/report.h, WellKnown
_DEVICES = {0: "cpu", 1: "cuda"}  # c10::DeviceType
_RAISE, _WARN = 0, 1  # csrc/policy.h, OnViolation
_IMMEDIATELY, _DEFERRED = 1, 2  # csrc/policy.h, When

# Shared by threads without a lock, which a fork could leave held: single dict, list and deque operations are atomic.
_warned: dict[tuple[str, int, str], object] = {}
_recent: deque[tuple[Any, ...]] = deque(maxlen=256)  # what forwards were reported lately
_held: list[_Held] = []  # found, and not raised where that was
_told: deque[_Held] = deque(maxlen=64)  # raised at a step of another thread than the one that called the loss
_callbacks: list[Callable[[Report], Any]] = []
_logger = logging.getLogger("lossguard")


class _Held(NamedTuple):
    report: Report
    thread: threading.Thread
    optimizers: set[int]  # whose step it was raised at


class _OfThread(threading.local):
    collecting: list[Report] | None = None  # where what would be raised goes
    only_warning = False  # of what native torch does not check, and computes


_of_thread = _OfThread()


def handle(findings: list[dict[str, Any]], moment: str) -> errors.LossValidationError | None:
    """Called by the ops (csrc/module.cpp) when checks have failed: the exception to throw, or None to go on.

    Args:
        findings: one for each call that was wrong; or, of calls whose reports were lost, their number.
        moment: csrc/raise.h, Moment: "the call" that was wrong, or where it came to light: "a call" of a loss,
            "backward", "step", "check", "leave" a guard, "exit".
    """
    reports: list[Report] = []
    lost = 0
    for found in findings:
        if found["on_violation"] == _RAISE:
            lost += found["lost"]
        if not found["sections"]:
            continue
        report = _report(found, moment)
        if found["again"]:  # counted, and told to callbacks
            if found["on_violation"] == _RAISE:
                reports.append(report)
            continue
        # Of traced code the site as well; checkpointing may call a criterion from elsewhere the second time.
        content = (min(found["site"], 0), *_content(report))
        recomputed = found["recomputed"] or (moment == "the call" and _in_recomputation(found["site"]))
        if not recomputed:
            _recent.append(content)
        elif content in _recent:
            continue  # what is computed anew for a backward has been told of
        _C.count_bad(found["site"], report.loss, sum(section.count for section in report.sections))
        for callback in tuple(_callbacks):
            try:
                callback(report)
            except Exception:  # it must not take the place of the violation
                _logger.exception("a function given to lossguard.on_report failed")
        # An index cannot be left out, as a label can: what takes its place is never without a word.
        if found["on_violation"] == _WARN or (report.kind == "index" and found["on_violation"] != _RAISE):
            _warn(report)
        elif found["on_violation"] == _RAISE:
            if _of_thread.collecting is not None:
                _of_thread.collecting.append(report)
            elif _is_to_be_held(found["when"], moment):
                _held.append(_Held(report, threading.current_thread(), set()))
            else:
                reports.append(report)
    return _exception(_take_held(moment) + reports, moment, lost) if reports or lost else None


def _in_recomputation(site: int) -> bool:
    """Traced code (a site below 0) may have checkpointing in it, which leaves no trace on the stack."""
    return torch._C._current_graph_task_id() != -1 and (site < 0 or _callsite.is_recomputed())


def _is_to_be_held(when: int, moment: str) -> bool:
    if when == _IMMEDIATELY or moment in ("step", "check", "exit"):
        return False
    # Between forward and step nothing is raised on one rank alone: the others would wait for it in a collective.
    return when == _DEFERRED and moment == "the call" or _world_size() > 1


def _take_held(moment: str, optimizer: int = 0) -> list[Report]:
    taken = []
    us = threading.current_thread()
    while _held:
        try:
            held = _held.pop(0)
        except IndexError:  # another thread was faster
            break
        taken.append(held.report)
        if moment == "step" and held.thread is not us:
            held.optimizers.add(optimizer)
            _told.append(held)
    return taken


def holds() -> bool:
    return bool(_held or _told)


def raise_held(moment: str, optimizer: int = 0) -> None:
    """Before a step, of the optimizer with this number, also what another thread was told that called no loss.

    That one's optimizer may not have been the one with the gradients.
    """
    if _of_thread.collecting is not None or (moment == "leave" and _world_size() > 1):
        return
    reports = _take_held(moment, optimizer)
    if moment == "step" and _told:
        us = threading.current_thread()
        for held in [h for h in tuple(_told) if h.thread is us or not h.thread.is_alive()]:
            with contextlib.suppress(ValueError):
                _told.remove(held)
                if held.thread is us and optimizer not in held.optimizers:
                    reports.append(held.report)
    if reports:
        throw(_exception(reports, moment))


def throw(error: BaseException | None) -> None:
    """Raise it, if it is one, and do not hold it: its traceback has this frame, and so all that its callers' hold."""
    try:
        if error is not None:
            raise error
    finally:
        del error


def forget_held() -> None:
    _held.clear()
    _told.clear()


@contextlib.contextmanager
def collect() -> Iterator[list[Report]]:
    """Inside, what would be raised on this thread goes to a list, with what was held."""
    outer, _of_thread.collecting = _of_thread.collecting, []
    try:
        yield _of_thread.collecting
        _of_thread.collecting[:0] = _take_held("check")
    finally:
        _of_thread.collecting = outer


@contextlib.contextmanager
def only_warning() -> Iterator[None]:
    """Inside, a warning on this thread does not say that what is bad is ignored, for it is not."""
    _of_thread.only_warning = True
    try:
        yield
    finally:
        _of_thread.only_warning = False


def on_report(function: Callable[[Report], Any]) -> Callable[[Report], Any]:
    """Call ``function`` with the :class:`lossguard.Report` of every violation, whatever is done about it.

    It is called once a report, when that comes to light, on the thread where it does, and before an exception
    or warning; what it raises itself is logged, by ``logging``. Returns ``function``, so it serves as a decorator;
    :func:`off_report` takes it back. Raises TypeError for what cannot be called.
    """
    if not callable(function):
        raise TypeError(f"on_report wants a function of one report, got {function!r}")
    _callbacks.append(function)
    return function


def off_report(function: Callable[[Report], Any]) -> None:
    """Undo :func:`on_report`. Raises ValueError if there is nothing to undo."""
    try:
        _callbacks.remove(function)
    except ValueError:
        raise ValueError(f"{function!r} was not given to on_report, or was taken back already") from None


def exception_for(
    reports: list[Report], lost: int = 0, notes: tuple[str, ...] = ()
) -> errors.LossValidationError | None:
    """One exception for all that is wrong, of the type of the first."""
    if not reports:
        return errors.LossValidationError(_LOST.format(lost)) if lost else None
    if lost:
        notes = (*notes, _LOST.format(lost))
    kind = reports[0].kind
    error: type[errors.LossValidationError] = errors.ValueOutOfRangeError
    if kind == "class_index":
        error = errors.TargetOutOfBoundsError
    elif kind == "index":
        error = errors.IndexOutOfBoundsError
    elif kind == "finite":
        error = errors.NonFiniteError
    return error(reports[0], reports[1:], notes)


_LOST = "{} calls failed their checks whose reports were lost: too many were in flight at once."
_ALONE = (
    "raised on this rank alone, which cannot go on: the others wait for it. Call lossguard.distributed.check() before "
    "the step, on every rank, to have all of them raise."
)


def _exception(reports: list[Report], moment: str, lost: int = 0) -> errors.LossValidationError | None:
    alone = moment != "the call" and moment != "exit" and _world_size() > 1
    error = exception_for(reports, lost, (_ALONE,) if alone else ())
    if error is not None and moment != "the call":
        error.__cause__ = _callsite.cause(reports[0].call_site) if reports else None
    return error


def _content(report: Report) -> tuple[Any, ...]:
    return (report.loss, *((s.tensor, s.count, *s.indices, *map(str, s.values)) for s in report.sections))


def _warn(report: Report) -> None:
    site = report.call_site or CallSite("<unknown>", 0, "?")
    key = (site.file, site.line, report.loss)
    token = object()
    if _warned.setdefault(key, token) is not token:
        return
    done = 'on_violation="warn": treated as ignored'
    if report.kind == "index":
        done = "the nearest valid index took its place"
    elif _of_thread.only_warning:
        done = "native torch does not check this, and computes with it"
    text = f"{shorten(str(report), MAX_TEXT - 80)}\n  {done}; said once for this line"
    try:
        warnings.warn_explicit(errors.LossValidationWarning(text, report), None, site.file, site.line)
    except errors.LossValidationWarning:  # warnings are errors: the next one is to be raised as well
        _warned.pop(key, None)
        raise


def _report(found: dict[str, Any], moment: str) -> Report:
    of_loss = found["loss"].endswith("Loss")
    names = {"input": "input", "target": "target" if of_loss else "index"}
    shapes = {name: tuple(found[subject][0]) for subject, name in names.items()}
    sections = [_section(s, shapes[names[s["subject"]]], found.get("num_classes")) for s in found["sections"]]
    if not of_loss:
        sections = [_of_index(section, found["num_classes"], found["wraps"]) for section in sections]
    kind, index = found["device"]
    device = _DEVICES.get(kind, f"device type {kind}")
    report = Report(
        loss=found["loss"],
        sections=sections,
        shapes=shapes,
        dtypes={name: found[subject][1] for subject, name in names.items()},
        device=device if kind == 0 else f"{device}:{index}",
        num_classes=found.get("num_classes"),
        ignore_index=found["ignore_index"] if of_loss and found["target"][1] in ("int64", "uint8") else None,
        wraps=found["wraps"],
        rank=_rank(),
        # An exported program does not know who calls it, but while it is being called the stack does.
        call_site=_callsite.lookup(found["site"]) or (_callsite.here() if moment == "the call" else None),
        vmap=tuple(reversed(found["samples"])),  # functorch takes the innermost first
        captured=found["captured"],
    )
    return dataclasses.replace(report, hints=likely_causes(report))


def _section(s: dict[str, Any], shape: tuple[int, ...], num_classes: int | None) -> Section:
    check = _CHECKS[s["check"]]
    above = ">= num_classes" if check == "class_index" else "above 1"
    kinds = dict(zip(("below 0", above, "NaN", "+inf", "-inf"), s["kinds"]))
    labels = {name: n for name, n in zip(_LABELS, s["well_known"]) if n}
    if num_classes == 255:  # one name for one value
        labels.pop("255", None)
    low, high = s.get("offender_range", (None, None))
    valid_low, valid_high = s.get("valid_range", (None, None))
    known = [v for v in (low, high, valid_low, valid_high) if v is not None]
    return Section(
        tensor=s["subject"],
        kind=check,
        count=s["count"],
        seen=s["seen"],
        indices=[_unravel(i, shape) for i in s["indices"]],
        values=s["values"],
        counts={name: n for name, n in kinds.items() if n},
        labels=labels,
        min=low,
        max=high,
        seen_min=min(known, default=None),
        seen_max=max(known, default=None),
        valid_min=valid_low,
        valid_max=valid_high,
    )


def _of_index(section: Section, size: int, wraps: bool) -> Section:
    """Of an operation's index: the values as they were given, where negative ones had the size added."""

    def given(value: int | float | None) -> Any:
        return value - size if wraps and value is not None and value < 0 else value

    low = -size if wraps else 0
    counts = {"below 0" if not wraps else f"below {low}": section.counts.get("below 0", 0)}
    counts[">= size"] = section.counts.get(">= num_classes", 0)
    return dataclasses.replace(
        section,
        tensor="index",
        kind="index",
        values=[given(value) for value in section.values],
        counts={name: n for name, n in counts.items() if n},
        labels={} if wraps else {k: n for k, n in section.labels.items() if k != "num_classes"},
        min=given(section.min),
        max=given(section.max),
        seen_min=given(section.seen_min),
        seen_max=given(section.seen_max),
    )


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        out.append(rest)
    return tuple(reversed(out))


def _in_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int | None:
    return torch.distributed.get_rank() if _in_group() else None


def _world_size() -> int:
    return torch.distributed.get_world_size() if _in_group() else 1
