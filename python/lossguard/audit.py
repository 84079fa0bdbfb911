"""Looking at every label before training: :func:`audit`."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from typing import Any, Optional

import torch

from ._audit_conclude import Kind, conclude
from ._audit_count import Chunk, Tally
from ._audit_read import Label, Source, open_source, optional
from ._audit_report import Audit, Suggestion, Violations

__all__ = ["Audit", "Kind", "Label", "Suggestion", "Violations", "audit"]


def audit(
    data: Any,
    num_classes: Optional[int] = None,
    ignore_index: Optional[int] = -100,
    *,
    label: Label = None,
    kind: Optional[Kind] = None,
    batched: Optional[bool] = None,
    num_workers: int = 0,
    max_samples: Optional[int] = None,
    progress: Optional[bool] = None,
) -> Audit:
    """Reads every label once and says what a loss would refuse, where, and what to do about it.

    ::

        audit = lossguard.audit(train_set, num_classes=10)
        print(audit)
        assert audit.ok

    To avoid decoding images, audit the labels alone where a dataset has them: ``lossguard.audit(dataset.targets)``.
    The torch generators are left as they were. Labels are read in pieces, so that memory stays bounded.

    Args:
        data: a Dataset, map-style or iterable; a DataLoader, whose samples are named by their index in its dataset;
            a tensor or array of labels, (samples, ...); a sequence or iterable of labels or of items; a mapping or
            tuple of tensors with a row for each sample; a pandas Series or DataFrame; or the path of a .npy, .npz, .pt,
            .csv, .tsv or .parquet file, or of a folder of masks (.png and other lossless images).
        num_classes: outputs of the model, at least 1. By default the largest label + 1, or the size of the class
            dimension.
        ignore_index: the class index that marks ignored elements. None if there is none.
        label: where the label is in an item or batch: a key, a position, or a function of the item (of a loader: of the
            batch); of files: the name or number of a column or array. By default the last element of a tuple or list,
            and "labels", "label", "target", "targets", "y" or "mask" of a mapping.
        kind: "classes", whole numbers in [0, num_classes); "probabilities", floats (samples, C, ...) that sum to 1
            along C; or "binary", numbers in [0, 1] of any shape, for BCE. By default integers are classes, and floats
            what their values and shape look like.
        batched: whether an iterable yields batches. By default a DataLoader does, and nothing else.
        num_workers: processes that read a map-style dataset.
        max_samples: end after so many.
        progress: whether to show a progress bar, with tqdm. By default if that is installed and stderr is a terminal.

    Raises:
        TypeError, LookupError: for what holds no labels, or none where ``label`` says; the message names the item.
        ValueError: for arguments out of range, and files that cannot be read.
        FileNotFoundError: for a path that does not exist.
        ImportError: if a package is missing that a file needs; the message says which.
        RuntimeError: if an item of the dataset raises something itself.
    """
    check_arguments(num_classes, ignore_index, kind, max_samples)
    limited = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        source = open_source(data, label, batched, num_workers)
        tally = Tally(num_classes, ignore_index, kind, keep_samples=source.dataset is not None)
        for chunk in _watched(source, progress):
            room = len(chunk.labels) if max_samples is None else max_samples - tally.samples
            if room < len(chunk.labels):
                chunk, limited = Chunk(chunk.labels[:room], chunk.ids[:room]), True
            tally.add(chunk)
            if limited:
                break
    return conclude(source, tally, num_classes, ignore_index, kind, limited)


def check_arguments(
    num_classes: Optional[int],
    ignore_index: Optional[int],
    kind: Optional[str] = None,
    max_samples: Optional[int] = None,
) -> None:
    for name, value in (("num_classes", num_classes), ("ignore_index", ignore_index), ("max_samples", max_samples)):
        if value is None:
            continue
        try:
            number = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an int or None, not {type(value).__name__} {value!r}") from None
        if not -(2**63) <= number < 2**63:
            raise ValueError(f"{name} must fit int64, the dtype of class indices, not {value}")
        if name != "ignore_index" and number < 1:
            raise ValueError(f"{name} must be at least 1, not {value}")
    if kind not in (None, "classes", "probabilities", "binary"):
        raise ValueError(f'kind must be "classes", "probabilities", "binary" or None, not {kind!r}')


def _watched(source: Source, progress: Optional[bool]) -> Iterator[Chunk]:
    """The chunks of a source, with a progress bar if there is to be one."""
    if progress is None:
        try:
            tqdm = optional("tqdm", "") if sys.stderr is not None and sys.stderr.isatty() else None
        except ImportError:
            tqdm = None
    else:
        tqdm = optional("tqdm", "progress=True") if progress else None
    if tqdm is None:
        yield from source.chunks
        return
    with tqdm.tqdm(total=source.total, unit=f" {source.unit}s", unit_scale=True, desc=source.name[-40:]) as bar:
        for chunk in source.chunks:
            yield chunk
            bar.update(len(chunk.labels))
