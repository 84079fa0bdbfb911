"""A callback for Lightning, under either name of the package, ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Optional

from .._policy import OnViolation
from . import Watch

__all__ = ["LossguardCallback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[Any, ...]:
    """Of the packages that are imported already, which are two of their own; else of the first that is there."""
    imported = [name for name in _PACKAGES if name in sys.modules]
    for names in [imported] if imported else [[name] for name in _PACKAGES]:
        try:
            return tuple(importlib.import_module(name).Callback for name in names)
        except ModuleNotFoundError as error:
            if error.name not in ("lightning", *_PACKAGES):
                raise
    raise ImportError("lossguard.integrations.lightning needs Lightning: pip install lightning")


_Callback: Any = type("_Callback", _callback_classes(), {})


class LossguardCallback(_Callback):  # type: ignore[misc]
    """Validates the losses during ``fit``, logs the counts, and tells at the end what was wrong.

    ::

        trainer = lightning.Trainer(callbacks=[LossguardCallback(on_violation="skip")])

    The counts of :func:`lossguard.monitor.scalars` go to every logger of the trainer, each ``log_every_n_steps``
    steps and at the end. In a process group they are those of rank 0. What is set is set for the time of ``fit``, its
    validation included, and put back afterwards, also when an exception ends it.

    A violation under "raise" ends ``fit`` with its exception, before the step: a callback can neither catch it nor
    drop the batch. "skip" and "warn" go on without the bad labels, and learn from the rest of the batch. To drop the
    batch, which Lightning does on one device if ``training_step`` returns None, catch it there::

        def training_step(self, batch, _):
            try:
                return self.criterion(self(batch[0]), batch[1])   # on CUDA with when="immediately"
            except lossguard.LossValidationError:
                return None

    Args:
        patch: have torch's own losses validated; False counts those alone that are lossguard's by name.
        on_violation: "raise", "warn" or "skip"; None leaves the process's policy as it is.
        prefix: of the names of the counts.
        summary: print a summary when ``fit`` ends.
    """

    def __init__(
        self,
        *,
        patch: bool = True,
        on_violation: Optional[OnViolation] = None,
        prefix: str = "lossguard/",
        summary: bool = True,
    ) -> None:
        super().__init__()
        self._watch = Watch(patch, on_violation, prefix, summary)
        self._logged_at = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._logged_at = 0
            self._watch.begin()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        if step != self._logged_at and trainer.log_every_n_steps and step % trainer.log_every_n_steps == 0:
            self._log(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step != self._logged_at:
            self._log(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._watch.end(tell=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._watch.end(tell=trainer.is_global_zero, error=exception)

    def _log(self, trainer: Any) -> None:
        self._logged_at = trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics(self._watch.scalars(), step=trainer.global_step)
