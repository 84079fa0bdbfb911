"""From the report of a kernel to the exception, or warning, of a person."""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from typing import Any

import torch

from . import _callsite, errors
from .diagnosis import likely_causes
from .report import MAX_TEXT, CallSite, Report, Section, shorten

_CHECKS = ("class_index", "unit_interval", "finite")  # csrc/report.h, Check
_LABELS = ("-1", "-100", "255", "num_classes")  # csrc/report.h, WellKnown
_DEVICES = {0: "cpu", 1: "cuda"}  # c10::DeviceType
_WARN = 1  # csrc/policy.h, OnViolation

# Shared by threads without a lock, which a fork could leave held: single dict and deque operations are atomic.
_warned: dict[tuple[str, int, str], object] = {}
_recent: deque[tuple[Any, ...]] = deque(maxlen=256)  # what was warned of lately


def handle(found: dict[str, Any]) -> errors.LossValidationError | None:
    """Called by the ops (csrc/module.cpp) when a check fails: the exception to throw, or None to go on."""
    if found["on_violation"] > _WARN:
        return None
    report = _report(found)
    if found["on_violation"] == _WARN:
        _warn(report)
        return None
    return _exception(report)


def _exception(report: Report) -> errors.LossValidationError:
    kinds = [section.kind for section in report.sections]
    if kinds[0] == "class_index":
        return errors.TargetOutOfBoundsError(report)
    return errors.NonFiniteError(report) if kinds[0] == "finite" else errors.ValueOutOfRangeError(report)


def _warn(report: Report) -> None:
    site = report.call_site or CallSite("<unknown>", 0, "?")
    key = (site.file, site.line, report.loss)
    content = (report.loss, *((s.tensor, s.count, *s.indices, *map(str, s.values)) for s in report.sections))
    if torch._C._current_graph_task_id() != -1 and content in _recent:
        return  # a forward that checkpointing computes anew, called from the line of the backward
    token = object()
    if _warned.setdefault(key, token) is not token:
        return
    _recent.append(content)
    text = shorten(str(report), MAX_TEXT - 80) + '\n  on_violation="warn": treated as ignored; said once for this line'
    try:
        warnings.warn_explicit(errors.LossValidationWarning(text, report), None, site.file, site.line)
    except errors.LossValidationWarning:  # warnings are errors: the next one is to be raised as well
        _warned.pop(key, None)
        raise


def _report(found: dict[str, Any]) -> Report:
    shapes = {name: tuple(found[name][0]) for name in ("input", "target")}
    sections = [_section(s, shapes[s["subject"]], found.get("num_classes")) for s in found["sections"]]
    kind, index = found["device"]
    device = _DEVICES.get(kind, f"device type {kind}")
    report = Report(
        loss=found["loss"],
        sections=sections,
        shapes=shapes,
        dtypes={name: found[name][1] for name in ("input", "target")},
        device=device if kind == 0 else f"{device}:{index}",
        num_classes=found.get("num_classes"),
        ignore_index=found["ignore_index"] if found["target"][1] in ("int64", "uint8") else None,
        rank=_rank(),
        call_site=_callsite.lookup(found["site"]),
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


def _unravel(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for size in reversed(shape):
        index, rest = divmod(index, size)
        out.append(rest)
    return tuple(reversed(out))


def _rank() -> int | None:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else None
