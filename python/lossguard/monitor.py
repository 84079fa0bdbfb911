"""What :func:`lossguard.stats` counts, for dashboards and callbacks.

TensorBoard, with ``torch.utils.tensorboard``::

    writer = SummaryWriter()
    for name, value in lossguard.monitor.scalars().items():
        writer.add_scalar(name, value, step)

Whatever takes a dict, as wandb does::

    wandb.log(lossguard.monitor.scalars(), step=step)

Only lossguard's losses are counted: those that are imported from it, and, under :func:`lossguard.patch`, torch's.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Optional, cast

from . import _C, _patch, _pending, _policy
from ._policy import OnViolation
from ._stats import SiteStats, stats

__all__ = ["scalars", "summary", "watching"]

_COUNTS = ("calls", "elements", "bad_calls", "violations")
_last: dict[str, dict[str, int]] = {}  # by prefix: what `scalars` with delta was told last


def scalars(prefix: str = "lossguard/", *, delta: bool = False) -> dict[str, int]:
    """The counts of every call site, and their totals, as a flat dict of numbers.

    Names are ``lossguard/violations`` for the total and ``lossguard/train.py_42_CrossEntropyLoss/violations`` for a
    line; likewise for ``calls``, ``elements`` and ``bad_calls`` (see :class:`lossguard.SiteStats`). They have letters,
    digits and ``_-./`` only, which TensorBoard keeps as they are. The totals are there from the start, the lines from
    their first call.

    What losses on CUDA have not said yet is not in it. In a process group the counts are those of this rank.

    Args:
        prefix: what all names begin with.
        delta: what was added since the last call with ``delta`` and this prefix, instead of all since the program
            began, or since :func:`lossguard.reset_stats`.
    """
    counts = dict.fromkeys((f"{prefix}{count}" for count in _COUNTS), 0)
    for name, site in stats().items():
        line = re.sub(r"[^-\w./]", "_", name.lstrip("/"), flags=re.ASCII)
        for count in _COUNTS:
            n = getattr(site, count)
            counts[f"{prefix}{count}"] += n
            counts[f"{prefix}{line}/{count}"] = counts.get(f"{prefix}{line}/{count}", 0) + n
    if not delta:
        return counts
    before = _last.get(prefix, {})
    if any(n < before.get(name, 0) for name, n in counts.items()) or before.keys() - counts.keys():
        before = {}  # reset_stats() was called in between
    _last[prefix] = counts
    return {name: n - before.get(name, 0) for name, n in counts.items()}


def summary(since: Optional[Mapping[str, SiteStats]] = None) -> str:
    """In words, the calls that were counted and the lines that were wrong.

    Args:
        since: an earlier result of :func:`lossguard.stats`, whose counts are taken off.
    """
    rows = []
    for name, now in stats().items():
        before = (since or {}).get(name)
        counts = {count: getattr(now, count) - (getattr(before, count) if before else 0) for count in _COUNTS}
        if counts["calls"] or counts["bad_calls"]:
            rows.append((name, counts, now.last_bad))
    if not rows:
        return "lossguard: no loss was counted: use lossguard's losses, or lossguard.patch()"
    calls, elements, bad_calls, violations = (sum(counts[count] for _, counts, _ in rows) for count in _COUNTS)
    of_all = f"lossguard: {_many(calls, 'call')} of losses with {_many(elements, 'element')}"
    if not bad_calls:
        return f"{of_all}, all valid"
    lines = [f"{of_all}; {_many(bad_calls, 'call')} had {_many(violations, 'violation')}"]
    for name, counts, last_bad in sorted(rows, key=lambda row: -row[1]["violations"]):
        if counts["bad_calls"]:
            when = time.strftime(", the last at %H:%M:%S", time.localtime(last_bad)) if last_bad else ""
            found = f"{_many(counts['violations'], 'violation')} in {counts['bad_calls']} of {counts['calls']} calls"
            lines.append(f"  {name}: {found}{when}")
    return "\n".join(lines)


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


@contextlib.contextmanager
def watching(patch: bool = True, on_violation: Optional[OnViolation] = None) -> Iterator[Mapping[str, SiteStats]]:
    """For the time of a ``with`` block, as the callbacks of :mod:`lossguard.integrations` do for that of a training.

    Gives the counts at its beginning, for :func:`summary`. At its end, unless an exception is on its way, it waits for
    the losses that this thread has computed on CUDA, and raises what they had to say, as a :class:`lossguard.guard`.

    Args:
        patch: have torch's own losses validated (:func:`lossguard.patch`), unless they are already.
        on_violation: the process's, as in :func:`lossguard.configure`; None leaves it as it is.
    """
    before = cast(OnViolation, _policy._unpacked(_C.default_policy())["on_violation"])  # also within a guard
    with contextlib.ExitStack() as undo:
        if on_violation is not None:
            _policy.configure(on_violation=on_violation)
            undo.callback(_policy.configure, on_violation=before)
        if patch and not _patch.is_patched():
            undo.enter_context(_patch.patched())
        yield stats()
        _pending.wait_for_own()
