"""Callbacks for trainers: :mod:`.lightning` for Lightning, :mod:`.transformers` for Hugging Face's Trainer.

Each is imported by name, so that neither library is needed for the other::

    from lossguard.integrations.lightning import LossguardCallback
    from lossguard.integrations.transformers import LossguardCallback
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Optional

from .. import monitor
from .._policy import OnViolation, _check

__all__ = ["Watch"]


class Watch:
    """What the callbacks have in common: from :meth:`begin` to :meth:`end` losses are watched as the options say."""

    def __init__(self, patch: bool, on_violation: Optional[OnViolation], prefix: str, summary: bool) -> None:
        _check(None, None, on_violation, None)
        for name, value in (("patch", patch), ("summary", summary)):
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        self.patch, self.on_violation, self.prefix, self.summary = patch, on_violation, prefix, summary
        self._watching: Optional[AbstractContextManager[Any]] = None
        self._before: Any = None

    @property
    def active(self) -> bool:
        return self._watching is not None

    def begin(self) -> None:
        self.end(tell=False, error=RuntimeError("an earlier training ended without a word"))
        watching = monitor.watching(self.patch, self.on_violation)
        self._before, self._watching = watching.__enter__(), watching

    def scalars(self) -> dict[str, int]:
        return monitor.scalars(self.prefix)

    def end(self, tell: bool = True, error: Optional[BaseException] = None) -> None:
        """Put everything back, and print the summary. Without effect when it is not active.

        Raises what losses on CUDA have left to say, unless the training has ended with an error.
        """
        if self._watching is None:
            return
        watching, self._watching = self._watching, None
        try:
            watching.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        finally:
            if tell and self.summary:
                print(monitor.summary(self._before), flush=True)
