"""A callback for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import importlib
from typing import Any, Optional

from .._policy import OnViolation
from . import Watch

__all__ = ["LossguardCallback"]

try:
    _Callback: Any = importlib.import_module("transformers").TrainerCallback
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "lossguard.integrations.transformers needs transformers: pip install transformers accelerate"
    ) from None


class LossguardCallback(_Callback):  # type: ignore[misc]
    """Validates the losses of the models during ``train``, adds the counts to the logs, and tells at the end.

    ::

        with LossguardCallback(on_violation="skip") as callback:
            trainer = Trainer(model, args, train_dataset=data)
            callback.attach(trainer)
            trainer.train()

    With every log the counts of :func:`lossguard.monitor.scalars` go into ``state.log_history``, and to the callbacks
    that come after this one. Those that report to wandb or TensorBoard come before it if it is given as
    ``Trainer(callbacks=[...])``; :meth:`attach` puts it in front of them. In a process group the counts are those of
    the rank that logs.

    A violation under "raise" ends ``train`` with its exception, before the step: no callback can catch it, nor is told
    of it. What was set for the training is put back when it ends, or with an exception at the end of the ``with`` block
    (or by :meth:`close`). "skip" and "warn" go on without the bad labels, and learn from the rest of the batch.

    Args:
        patch: have torch's own losses validated, which the models of transformers use; False counts those alone that
            are lossguard's by name.
        on_violation: "raise", "warn" or "skip"; None leaves the process's policy as it is.
        prefix: of the names of the counts.
        summary: print a summary when the training ends.
    """

    def __init__(
        self,
        *,
        patch: bool = True,
        on_violation: Optional[OnViolation] = None,
        prefix: str = "lossguard/",
        summary: bool = True,
    ) -> None:
        self._watch = Watch(patch, on_violation, prefix, summary)

    def attach(self, trainer: Any) -> LossguardCallback:
        """Add it to a Trainer, in front of all other callbacks. Returns itself."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        return self

    def close(self) -> None:
        """End the watch, if an exception has ended the training. Otherwise without effect."""
        self._watch.end()

    def __enter__(self) -> LossguardCallback:
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], trace: Any) -> None:
        self._watch.end(error=error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.begin()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is not None and self._watch.active:
            counts = self._watch.scalars()
            logs.update(counts)
            if state.log_history:  # a copy of the logs, made before
                state.log_history[-1].update(counts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch.end(tell=state.is_world_process_zero)
