"""What lossguard raises and warns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .report import MAX_TEXT, Report, shorten

__all__ = [
    "LossValidationError",
    "IndexOutOfBoundsError",
    "TargetOutOfBoundsError",
    "ValueOutOfRangeError",
    "NonFiniteError",
    "LossValidationWarning",
    "NotValidatedWarning",
]

_MOST_OTHERS = 5


class LossValidationError(Exception):
    """A loss was given values it is not defined for.

    ``report`` is a :class:`lossguard.Report`: what is wrong, where, and the likely cause. ``reports`` has it and those
    of other calls that came to light at the same moment: on CUDA, where several may be under way.
    """

    report: Report
    reports: list[Report]

    def __init__(self, report: Report | str, others: Sequence[Report] = (), notes: Sequence[str] = ()) -> None:
        # torch rebuilds the exceptions of DataLoader workers and replicas from their text alone.
        self.report = None if isinstance(report, str) else report  # type: ignore[assignment]
        self.reports = [] if isinstance(report, str) else [report, *others]
        self._notes = tuple(notes)
        super().__init__(_text([report, *others], notes))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.report is None:
            return type(self), (str(self),)
        return type(self), (self.report, tuple(self.reports[1:]), self._notes)


def _text(reports: Sequence[Report | str], notes: Sequence[str]) -> str:
    """Of the first as much as there is room for, of the others what fits on two lines."""
    others = [f"and: {report.headline()}" for report in reports[1:] if not isinstance(report, str)]
    if len(others) > _MOST_OTHERS:
        others[_MOST_OTHERS:] = [f"and {len(others) - _MOST_OTHERS} calls more, in the exception's `reports`"]
    tail = "".join(f"\n{shorten(line, 400)}" for line in (*others, *notes))
    return shorten(str(reports[0]), MAX_TEXT - 1 - len(tail)) + tail


class TargetOutOfBoundsError(LossValidationError, IndexError):
    """A class index is neither in ``[0, num_classes)`` nor ``ignore_index``. Native raises IndexError."""


class IndexOutOfBoundsError(LossValidationError, IndexError, RuntimeError):
    """An index of an embedding, a gather, ``x[i]`` or the like is out of bounds; checked where
    ``lossguard.patch(indexing=True)`` is in force. Native raises one of the two, or asserts on the device."""


class ValueOutOfRangeError(LossValidationError, RuntimeError):
    """A probability is not in [0, 1]. Native raises RuntimeError."""


class NonFiniteError(ValueOutOfRangeError):
    """A logit or log-probability is NaN or infinite (``check_finite=True``)."""


class LossValidationWarning(UserWarning):
    """A violation under ``on_violation="warn"``, once per call site. Has the ``report``."""

    def __init__(self, text: str, report: Report | None = None) -> None:
        super().__init__(text)
        self.report = report


class NotValidatedWarning(UserWarning):
    """A call that lossguard has no kernel for went to native torch, unchecked."""


for _class in (
    LossValidationError,
    IndexOutOfBoundsError,
    TargetOutOfBoundsError,
    ValueOutOfRangeError,
    NonFiniteError,
    LossValidationWarning,
    NotValidatedWarning,
):
    _class.__module__ = "lossguard"  # the name a traceback shows, and the one to import
del _class
