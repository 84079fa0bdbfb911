"""Datasets whose labels are known to be right: :class:`CheckedDataset`, :func:`valid_subset`, :func:`remap_labels`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from . import _callsite, _violations
from ._audit_conclude import Kind, conclude_classes, conclude_units
from ._audit_count import Chunk, Tally, as_int64, plain_id, slack_of
from ._audit_read import Label, find_label, located, optional, to_tensor
from ._audit_report import Audit
from .audit import audit, check_arguments
from .diagnosis import likely_causes
from .report import Report, Section, _index

__all__ = ["CheckedDataset", "ItemReport", "LabelMap", "remap_labels", "valid_subset"]


# ---- checking items as they are read


@dataclass(frozen=True)
class ItemReport(Report):
    """What is wrong with the label of one item. Indices begin with the item's, if that is a number."""

    dataset: str = ""
    item: int | str = 0

    def _tensors(self) -> str:
        shape = _index(self.shapes["target"])
        return f"item {self.item} of {self.dataset}, label {shape} {self.dtypes['target']}"


class CheckedDataset(Dataset[Any]):
    """A map-style dataset, whose items are checked as they are read: a bad label raises where it comes from.

    Items go through unchanged. It pickles if ``dataset`` does, and works in the workers of a DataLoader, which raises
    the same exception with the same text and ``report`` None.

    Args:
        dataset: map-style.
        num_classes: outputs of the model, for labels of whole numbers, which are class indices in [0, num_classes), and
            for class probabilities (num_classes, ...) in [0, 1]. None for targets of any dtype in [0, 1], as for BCE.
        ignore_index: a class index that is valid too; None for none.
        label: where the label is in an item: a key, a position, or a function of the item. By default as in
            :func:`lossguard.audit`.

    Raises:
        TargetOutOfBoundsError: at the item, for a class index that is neither in [0, num_classes) nor ignore_index.
        ValueOutOfRangeError: at the item, for a target or probability outside [0, 1], or NaN.
        TypeError, LookupError: at the item, if there is no label in it, or one of floats that are no probabilities; and
            at once, for an iterable dataset.
    """

    def __init__(
        self, dataset: Dataset[Any], num_classes: Optional[int], ignore_index: Optional[int] = -100, label: Label = None
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"CheckedDataset wants a map-style dataset, not {type(dataset).__name__}")
        check_arguments(num_classes, ignore_index)
        self.dataset, self.num_classes, self.ignore_index, self.label = dataset, num_classes, ignore_index, label

    def __repr__(self) -> str:
        label = "" if self.label is None else f", label={self.label!r}"
        checks = f"num_classes={self.num_classes}, ignore_index={self.ignore_index}{label}"
        size = f" of {len(self)}" if hasattr(self.dataset, "__len__") else ""
        return f"CheckedDataset({type(self.dataset).__name__}{size}, {checks})"

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        item = self.dataset[index]
        self._check(index, item)
        return item

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """What a DataLoader calls for a batch."""
        read_batch = getattr(self.dataset, "__getitems__", None)
        items = [self.dataset[index] for index in indices] if read_batch is None else read_batch(indices)
        for index, item in zip(indices, items):
            self._check(index, item)
        return list(items)

    def _check(self, index: Any, item: Any) -> None:
        try:
            label = find_label(item, self.label)
            if type(label) is int and self.num_classes is not None:  # the common case, without a tensor
                if 0 <= label < self.num_classes or label == self.ignore_index:
                    return
            target = to_tensor(label).cpu()
            kind = self._kind(target)
            good = self._are_classes(target) if kind == "classes" else _are_units(target)
        except Exception as error:
            raise located(error, f"item {index}") from error
        if not good:
            _violations.throw(_violations.exception_for([self._report(index, target, kind)]))

    def _kind(self, target: Tensor) -> Kind:
        if self.num_classes is None:
            return "binary"
        if not target.is_floating_point():
            return "classes"
        if target.dim() and target.shape[0] == self.num_classes:
            return "probabilities"
        raise TypeError(
            f"the label is {target.dtype} of shape {tuple(target.shape)}: class indices have an integer dtype, and "
            f"class probabilities the shape ({self.num_classes}, ...)"
        )

    def _are_classes(self, target: Tensor) -> bool:
        assert self.num_classes is not None
        if not target.numel():
            return True
        labels = as_int64(target)
        low, high = labels.aminmax()
        if low >= 0 and high <= self.num_classes - 1:
            return True
        good = (labels >= 0) & (labels <= self.num_classes - 1)
        return bool((good if self.ignore_index is None else good | (labels == self.ignore_index)).all())

    def _report(self, index: Any, target: Tensor, kind: Kind) -> ItemReport:
        item = plain_id(index)
        # One sample of one: what an audit finds of it is what there is to say.
        tally = Tally(self.num_classes, self.ignore_index, kind, keep_samples=False)
        tally.add(Chunk(target.unsqueeze(0), [item]))
        if kind == "classes":
            _, section = conclude_classes(tally, self.num_classes)
        else:
            _, section = conclude_units(tally, kind, self.num_classes)
        assert section is not None
        dtype = str(target.dtype).removeprefix("torch.")
        as_loss = Report(
            loss="BCEWithLogitsLoss" if kind == "binary" else "CrossEntropyLoss",
            sections=[section],
            shapes={"input": (), "target": (1, *target.shape)},
            dtypes={"input": "", "target": dtype},
            device="cpu",
            num_classes=self.num_classes,
            ignore_index=self.ignore_index if kind == "classes" else None,
        )
        return ItemReport(
            loss="CheckedDataset",
            sections=[_of_item(section, item)],
            shapes={"target": tuple(target.shape)},
            dtypes={"target": dtype},
            device="cpu",
            num_classes=self.num_classes,
            ignore_index=as_loss.ignore_index,
            rank=_violations._rank(),
            call_site=_callsite.here() if get_worker_info() is None else None,  # a worker has no line of the caller's
            hints=likely_causes(as_loss),
            dataset=type(self.dataset).__name__,
            item=item,
        )


def _are_units(target: Tensor) -> bool:
    slack = slack_of(target.dtype)
    values = target.double()
    return bool(((values >= -slack) & (values <= 1 + slack)).all())


def _of_item(section: Section, item: int | str) -> Section:
    if isinstance(item, str):
        return section
    return dataclasses.replace(section, indices=[(item, *index) for index in section.indices])


# ---- the good items


def valid_subset(
    dataset: Dataset[Any],
    num_classes: Optional[int],
    ignore_index: Optional[int] = -100,
    *,
    label: Label = None,
    kind: Optional[Kind] = None,
    num_workers: int = 0,
    progress: Optional[bool] = None,
) -> Subset[Any]:
    """The items whose labels are all valid, as a :class:`torch.utils.data.Subset`. Reads every item once.

    Arguments and errors are those of :func:`lossguard.audit`, whose :meth:`~lossguard.Audit.good_subset` this is:
    TypeError also for what is no map-style dataset.
    """
    found = audit(
        dataset, num_classes, ignore_index, label=label, kind=kind, num_workers=num_workers, progress=progress
    )
    return found.good_subset()


# ---- numbering labels from 0


class LabelMap(Mapping[int, int]):
    """From labels as they are to class indices, or back. A mapping; and a function of tensors, arrays and ints.

    :func:`remap_labels` makes one; ``inverse`` is the way back, for predictions. ``ignore_index`` stays as it is in
    both directions, and is no key.
    """

    def __init__(self, old: Tensor, new: Tensor, ignore_index: Optional[int]) -> None:
        """`old` and `new` are int64 (K,), ascending."""
        self._old, self._new, self.ignore_index = old, new, ignore_index

    @property
    def num_classes(self) -> int:
        """What comes out is in [0, num_classes), if it is class indices."""
        return int(self._new[-1]) + 1 if len(self._new) else 0

    @property
    def inverse(self) -> LabelMap:
        """From class indices to labels."""
        return LabelMap(self._new, self._old, self.ignore_index)

    def __call__(self, labels: Any) -> Any:
        """
        Args:
            labels: a tensor or array of an integer dtype and any shape, or an int.

        Returns:
            The same as int64, on the same device; of an int an int.

        Raises:
            ValueError: for labels that are not in the map; the message has the first of them.
            TypeError: for anything else than integers.
        """
        if isinstance(labels, Tensor):
            return self._of_tensor(labels)
        if hasattr(labels, "__array__") and getattr(labels, "shape", ()) != ():
            optional("numpy", "mapping arrays")
            return self._of_tensor(to_tensor(labels)).numpy()
        try:
            label = operator.index(labels)
        except TypeError:
            raise TypeError(f"LabelMap wants a tensor, array or int, not {type(labels).__name__}") from None
        return label if label == self.ignore_index else int(self._of_tensor(torch.tensor(label)))

    def _of_tensor(self, labels: Tensor) -> Tensor:
        if labels.is_floating_point() or labels.is_complex():
            raise TypeError(f"LabelMap wants labels of an integer dtype, not {labels.dtype}")
        labels = as_int64(labels)
        old, new = self._old.to(labels.device), self._new.to(labels.device)
        ignored = torch.zeros_like(labels, dtype=torch.bool)
        if self.ignore_index is not None:
            ignored = labels == self.ignore_index
        if not len(old):
            known, mapped = torch.zeros_like(ignored), labels
        else:
            at = torch.searchsorted(old, labels.contiguous()).clamp_(max=len(old) - 1)
            known, mapped = old[at] == labels, new[at]
        unknown = ~(known | ignored)
        if bool(unknown.any()):
            where = unknown.nonzero()[:5].tolist()
            first = ", ".join(f"{int(labels[tuple(i)])} at {tuple(i)}" if i else f"{int(labels)}" for i in where)
            raise ValueError(f"{int(unknown.sum())} of {labels.numel()} labels are not among the {len(self)}: {first}")
        return torch.where(ignored, labels, mapped)

    def __getitem__(self, label: int) -> int:
        if not isinstance(label, int) or not -(2**63) <= label < 2**63:
            raise KeyError(label)
        at = int(torch.searchsorted(self._old, label))
        if at == len(self) or self._old[at] != label:
            raise KeyError(label)
        return int(self._new[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self._old.tolist())

    def __len__(self) -> int:
        return len(self._old)

    def __repr__(self) -> str:
        pairs = [f"{old}: {new}" for old, new in zip(self._old[:8].tolist(), self._new[:8].tolist())]
        more = f", ... {len(self) - len(pairs)} more" if len(self) > len(pairs) else ""
        return f"LabelMap({{{', '.join(pairs)}{more}}}, ignore_index={self.ignore_index})"


def remap_labels(labels: Any, ignore_index: Optional[int] = None, *, label: Label = None) -> LabelMap:
    """Numbers the distinct labels from 0 on, in ascending order.

    ::

        to_class = lossguard.remap_labels(train_labels)         # {1: 0, 5: 1, 90: 2}
        target = to_class(target)
        shown = to_class.inverse(logits.argmax(1))              # the labels again

    Args:
        labels: the labels that there are: an :class:`lossguard.Audit` of class indices, or anything that
            :func:`lossguard.audit` reads; of a whole dataset, for labels that come later are refused.
        ignore_index: stays as it is, and is not given to a class. By default that of the audit, or -100.
        label: where labels are in what is read, as in :func:`lossguard.audit`.

    Raises:
        ValueError: for labels that are not whole numbers; or more than a million, which are no classes.
    """
    if isinstance(labels, Audit):
        found = labels
        ignore_index = found.ignore_index if ignore_index is None else ignore_index
    else:
        ignore_index = -100 if ignore_index is None else ignore_index
        check_arguments(None, ignore_index)
        found = audit(labels, None, ignore_index, label=label, kind="classes")
    strange = found.outside.kinds.keys() & {"NaN", "+inf", "-inf", "not whole"}
    if found.kind != "classes" or strange:
        raise ValueError(f"{found.source} has no class indices but {', '.join(sorted(strange)) or found.kind}")
    if found._gave_up:
        raise ValueError(f"{found.source} has too many distinct labels to be classes")
    old = found._values
    if ignore_index is not None:
        old = old[old != ignore_index]
    new = torch.arange(len(old))
    if ignore_index is not None and 0 <= ignore_index < len(old):  # it stays, so no class may have its number
        new[ignore_index:] += 1
    return LabelMap(old, new, ignore_index)
