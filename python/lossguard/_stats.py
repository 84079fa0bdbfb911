"""What each call site has called, how much of it was wrong, and when last."""

from __future__ import annotations

from dataclasses import dataclass

from . import _C, _callsite
from .report import CallSite

__all__ = ["SiteStats", "reset_stats", "stats"]


@dataclass(frozen=True)
class SiteStats:
    """Of one loss at one call site. Counted where the loss is called: replays of a CUDA graph are not."""

    loss: str  #: "CrossEntropyLoss", ...
    call_site: CallSite | None  #: None for calls of an exported program
    calls: int
    elements: int  #: labels, or elements of the target, in those calls; ignored ones among them
    bad_calls: int  #: of those that are known by now
    violations: int  #: elements that failed a check
    last_bad: float | None  #: when the last became known: seconds as of ``time.time()``


def stats() -> dict[str, SiteStats]:
    """Counts for every call site that called a loss, by names such as ``"train.py:42 CrossEntropyLoss"``.

    What launches on CUDA have not said yet is not in it; :func:`lossguard.check` asks for it. To log them::

        wandb.log({f"lossguard/{name}": s.violations for name, s in lossguard.stats().items()})
    """
    found: dict[str, SiteStats] = {}
    for (number, loss), (calls, elements, bad_calls, violations, last_bad) in _C.call_counts().items():
        site = _callsite.lookup(number)
        name = f"{site.short()} {loss}" if site else loss
        before = found.get(name)  # a line that calls a loss twice, or was compiled again
        if before is not None:
            calls, elements = calls + before.calls, elements + before.elements
            bad_calls, violations = bad_calls + before.bad_calls, violations + before.violations
            last_bad = max(last_bad, before.last_bad or 0.0)
        found[name] = SiteStats(loss, site, calls, elements, bad_calls, violations, last_bad or None)
    return found


def reset_stats() -> None:
    """Begin to count anew."""
    _C.reset_call_counts()
