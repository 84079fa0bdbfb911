"""The histogram of an audit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Union

from ._audit_read import optional
from .report import shorten

if TYPE_CHECKING:
    from ._audit_report import Audit

_BARS = 60  # classes that get a bar and a name each
_POINTS = 4000  # more classes than this are drawn as sums of neighbours
_STRAYS = 8  # values outside that get one
_VALID, _OUTSIDE, _IGNORED = "#3b6ea5", "#c0392b", "#9aa0a6"


def draw(audit: Audit, path: Union[str, os.PathLike[str]]) -> None:
    """See :meth:`lossguard.Audit.plot`."""
    figure_module = optional("matplotlib.figure", "plotting an audit")
    if not audit.counts and not audit.outside.count:
        raise ValueError(f"nothing to draw: no labels in {audit.source}")
    figure = figure_module.Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    classes = audit.num_classes or 1
    if classes <= _BARS:
        _bars(axes, audit, classes)
    else:
        _steps(axes, audit, classes)
    heights = [count for count in audit.counts.values() if count > 0]
    if heights and max(heights) > 50 * min(heights):
        axes.set_yscale("log")
    axes.set_ylabel({"classes": "labels", "probabilities": "sum of probabilities", "binary": "positive"}[audit.kind])
    title = "no problem" if audit.ok else shorten(audit.problems[0], 90)
    axes.set_title(f"{shorten(audit.source, 80, keep='end')}: {title}", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, audit: Audit, classes: int) -> None:
    heights = [audit.counts.get(c, 0) for c in range(classes)]
    names = [str(c) for c in range(classes)]
    axes.bar(range(classes), heights, color=_VALID, label="valid")
    at = classes + 0.5
    strays = list(audit.outside.values.items()) if audit.kind == "classes" else []
    unnamed = audit.outside.count - sum(n for _, n in strays)
    extra = [(audit.number(value), n, _OUTSIDE) for value, n in sorted(strays[:_STRAYS])]
    rest = unnamed + sum(n for _, n in strays[_STRAYS:])
    if rest:
        extra.append(("other" if extra else "outside", rest, _OUTSIDE))
    if audit.ignored:
        extra.append((f"{audit.ignore_index}", audit.ignored, _IGNORED))
    drawn: set[str] = set()
    for name, count, colour in extra:
        label = "outside" if colour == _OUTSIDE else "ignored"
        axes.bar([at], [count], color=colour, label=label if label not in drawn else None)
        drawn.add(label)
        names.append(shorten(name, 12))
        at += 1
    axes.set_xticks([*range(classes), *(classes + 0.5 + i for i in range(len(extra)))], names)
    crowded = len(names) > 25 or any(len(name) > 8 for name in names)
    axes.tick_params(axis="x", labelrotation=90 if crowded else 0, labelsize=8 if crowded else 10)
    axes.set_xlabel("class")


def _steps(axes: Any, audit: Audit, classes: int) -> None:
    width = -(-classes // _POINTS)
    sums: dict[int, float] = {}
    for c, count in audit.counts.items():
        sums[c // width] = sums.get(c // width, 0) + count
    edges = [i * width for i in range(-(-classes // width) + 1)]
    axes.stairs([sums.get(i, 0) for i in range(len(edges) - 1)], edges, fill=True, color=_VALID, label="valid")
    for count, name, colour in ((audit.outside.count, "outside", _OUTSIDE), (audit.ignored, "ignored", _IGNORED)):
        if count:
            axes.plot([], [], "s", color=colour, label=f"{name}: {count} (not drawn)")
    axes.set_xlabel("class" if width == 1 else f"class, {width} in each step")
