"""The four losses as modules: subclasses of :mod:`torch.nn`'s, so `isinstance`, `state_dict`, `repr` and
pickles are as ever. The keyword-only arguments are those of :mod:`lossguard.functional`.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from . import functional
from ._policy import OnViolation, When, _check

__all__ = ["BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "NLLLoss"]


class _Policy(torch.nn.Module):
    """What is checked, what a violation does and when; None follows `guard` and `configure`."""

    # Class attributes, so that modules pickled by torch.nn or an earlier version have them too.
    strict: Optional[bool] = None
    check_finite: Optional[bool] = None
    on_violation: Optional[OnViolation] = None
    when: Optional[When] = None

    def _set_policy(
        self,
        strict: Optional[bool],
        check_finite: Optional[bool],
        on_violation: Optional[OnViolation],
        when: Optional[When],
    ) -> None:
        _check(strict, check_finite, on_violation, when)
        if strict is not None:
            self.strict = strict
        if check_finite is not None:
            self.check_finite = check_finite
        if on_violation is not None:
            self.on_violation = on_violation
        if when is not None:
            self.when = when


class BCELoss(_Policy, torch.nn.BCELoss):
    """:class:`torch.nn.BCELoss`, checked. See :func:`lossguard.functional.binary_cross_entropy`."""

    def __init__(
        self,
        weight: Optional[Tensor] = None,
        size_average: Optional[bool] = None,
        reduce: Optional[bool] = None,
        reduction: str = "mean",
        *,
        strict: Optional[bool] = None,
        check_finite: Optional[bool] = None,
        on_violation: Optional[OnViolation] = None,
        when: Optional[When] = None,
    ) -> None:
        torch.nn.BCELoss.__init__(self, weight, size_average, reduce, reduction)
        self._set_policy(strict, check_finite, on_violation, when)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy(
            input,
            target,
            self.weight,
            reduction=self.reduction,
            strict=self.strict,
            check_finite=self.check_finite,
            on_violation=self.on_violation,
            when=self.when,
        )


class BCEWithLogitsLoss(_Policy, torch.nn.BCEWithLogitsLoss):
    """:class:`torch.nn.BCEWithLogitsLoss`, checked. See
    :func:`lossguard.functional.binary_cross_entropy_with_logits`."""

    def __init__(
        self,
        weight: Optional[Tensor] = None,
        size_average: Optional[bool] = None,
        reduce: Optional[bool] = None,
        reduction: str = "mean",
        pos_weight: Optional[Tensor] = None,
        *,
        strict: Optional[bool] = None,
        check_finite: Optional[bool] = None,
        on_violation: Optional[OnViolation] = None,
        when: Optional[When] = None,
    ) -> None:
        torch.nn.BCEWithLogitsLoss.__init__(self, weight, size_average, reduce, reduction, pos_weight)
        self._set_policy(strict, check_finite, on_violation, when)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(
            input,
            target,
            self.weight,
            pos_weight=self.pos_weight,
            reduction=self.reduction,
            strict=self.strict,
            check_finite=self.check_finite,
            on_violation=self.on_violation,
            when=self.when,
        )


class NLLLoss(_Policy, torch.nn.NLLLoss):
    """:class:`torch.nn.NLLLoss`, checked. See :func:`lossguard.functional.nll_loss`."""

    def __init__(
        self,
        weight: Optional[Tensor] = None,
        size_average: Optional[bool] = None,
        ignore_index: int = -100,
        reduce: Optional[bool] = None,
        reduction: str = "mean",
        *,
        strict: Optional[bool] = None,
        check_finite: Optional[bool] = None,
        on_violation: Optional[OnViolation] = None,
        when: Optional[When] = None,
    ) -> None:
        torch.nn.NLLLoss.__init__(self, weight, size_average, ignore_index, reduce, reduction)
        self._set_policy(strict, check_finite, on_violation, when)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.nll_loss(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            strict=self.strict,
            check_finite=self.check_finite,
            on_violation=self.on_violation,
            when=self.when,
        )


class CrossEntropyLoss(_Policy, torch.nn.CrossEntropyLoss):
    """:class:`torch.nn.CrossEntropyLoss`, checked. See :func:`lossguard.functional.cross_entropy`."""

    def __init__(
        self,
        weight: Optional[Tensor] = None,
        size_average: Optional[bool] = None,
        ignore_index: int = -100,
        reduce: Optional[bool] = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        strict: Optional[bool] = None,
        check_finite: Optional[bool] = None,
        on_violation: Optional[OnViolation] = None,
        when: Optional[When] = None,
    ) -> None:
        torch.nn.CrossEntropyLoss.__init__(self, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self._set_policy(strict, check_finite, on_violation, when)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            strict=self.strict,
            check_finite=self.check_finite,
            on_violation=self.on_violation,
            when=self.when,
        )
