"""For tests of your own: labels as they have to be."""

from __future__ import annotations

from typing import Any, Optional

from ._audit_conclude import Kind
from ._audit_read import Label
from .audit import audit

__all__ = ["assert_labels_valid"]


def assert_labels_valid(
    data: Any,
    num_classes: Optional[int],
    ignore_index: Optional[int] = -100,
    *,
    label: Label = None,
    kind: Optional[Kind] = None,
    num_workers: int = 0,
    max_samples: Optional[int] = None,
) -> None:
    """Fails a test if a loss would refuse a label, or if there are none.

    ::

        def test_labels():
            lossguard.testing.assert_labels_valid(make_train_set(), num_classes=10)

    Arguments are those of :func:`lossguard.audit`; with ``num_classes`` None, labels are held to be at least 0, and
    targets of a floating-point dtype to be in [0, 1].

    Raises:
        AssertionError: with the report of the audit.
        TypeError, LookupError, ValueError, RuntimeError: as :func:`lossguard.audit`, for what cannot be read.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    found = audit(
        data,
        num_classes,
        ignore_index,
        label=label,
        kind=kind,
        num_workers=num_workers,
        max_samples=max_samples,
        progress=False,
    )
    if not found.ok:
        raise AssertionError(str(found))
