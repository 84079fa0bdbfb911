"""What lossguard raises and warns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Report

__all__ = [
    "LossValidationError",
    "TargetOutOfBoundsError",
    "ValueOutOfRangeError",
    "NonFiniteError",
    "LossValidationWarning",
    "NotValidatedWarning",
]


class LossValidationError(Exception):
    """A loss was given values it is not defined for.

    ``report`` is a :class:`lossguard.Report`: what is wrong, where, and the likely cause.
    """

    report: Report

    def __init__(self, report: Report | str) -> None:
        super().__init__(str(report))
        # torch rebuilds the exceptions of DataLoader workers and replicas from their text alone.
        self.report = None if isinstance(report, str) else report  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.report or str(self),)


class TargetOutOfBoundsError(LossValidationError, IndexError):
    """A class index is neither in ``[0, num_classes)`` nor ``ignore_index``. Native raises IndexError."""


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
    TargetOutOfBoundsError,
    ValueOutOfRangeError,
    NonFiniteError,
    LossValidationWarning,
    NotValidatedWarning,
):
    _class.__module__ = "lossguard"  # the name a traceback shows, and the one to import
del _class
