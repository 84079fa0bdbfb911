"""BCE, BCE-with-logits, NLL and cross-entropy that name the bad label instead of killing the process.

Change one import and keep the rest::

    from lossguard import CrossEntropyLoss      # was: from torch.nn import CrossEntropyLoss
    import lossguard.functional as LF           # LF.cross_entropy(...) was: F.cross_entropy(...)

A target or probability outside its range raises an exception that says where it is, what it is,
what is valid and what the likely cause is; the process, the model and the device live on.
"""

from __future__ import annotations

import torch as _torch  # before _C, which needs its libraries  # noqa: F401

from . import distributed, functional, monitor, testing
from ._patch import patch, patched, unpatch
from ._pending import check
from ._policy import configure, guard, policy
from ._stats import SiteStats, reset_stats, stats
from ._violations import off_report, on_report
from .audit import Audit, audit
from .datasets import CheckedDataset, remap_labels, valid_subset
from .diagnosis import Cause, diagnose
from .errors import (
    IndexOutOfBoundsError,
    LossValidationError,
    LossValidationWarning,
    NonFiniteError,
    NotValidatedWarning,
    TargetOutOfBoundsError,
    ValueOutOfRangeError,
)
from .modules import BCELoss, BCEWithLogitsLoss, CrossEntropyLoss, NLLLoss
from .preflight import Finding, NonFinite, Preflight, find_nonfinite, preflight
from .report import CallSite, Report, Section

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "BCELoss",
    "BCEWithLogitsLoss",
    "CallSite",
    "Cause",
    "CheckedDataset",
    "CrossEntropyLoss",
    "Finding",
    "IndexOutOfBoundsError",
    "LossValidationError",
    "LossValidationWarning",
    "NLLLoss",
    "NonFinite",
    "NonFiniteError",
    "NotValidatedWarning",
    "Preflight",
    "Report",
    "Section",
    "SiteStats",
    "TargetOutOfBoundsError",
    "ValueOutOfRangeError",
    "audit",
    "check",
    "configure",
    "diagnose",
    "distributed",
    "find_nonfinite",
    "functional",
    "guard",
    "monitor",
    "off_report",
    "on_report",
    "patch",
    "patched",
    "policy",
    "preflight",
    "remap_labels",
    "reset_stats",
    "stats",
    "testing",
    "unpatch",
    "valid_subset",
]
