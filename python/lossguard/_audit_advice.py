"""What to do about what an audit found. Only what the numbers support is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Optional

import torch
from torch import Tensor

from ._audit_report import Audit, Suggestion, percent, plural
from .diagnosis import diagnose
from .report import Report, Section

_VOID_LABELS = {-1: "unlabelled", -100: "padding", 255: "void"}
_WEIGHTS = 32  # as many as are written out
_MOST = 3  # causes
_IMBALANCE = 10  # the most frequent class to the rarest
_LOSS_DTYPES = ("int64", "uint8")
_LONG = "target = target.long()"


def suggestions(audit: Audit, as_is: bool, section: Optional[Section]) -> list[Suggestion]:
    """What to do, in the code with torch's names: input, target, criterion, model.

    Args:
        audit: all but the suggestions.
        as_is: whether the dtypes are those that a loss would be given.
        section: what is outside, as the losses would report it.
    """
    found = list(_about_classes(audit, as_is, section) if audit.kind == "classes" else _about_units(audit, section))
    found += _about_samples(audit)
    return list(dict.fromkeys(found))


def _about_classes(audit: Audit, as_is: bool, section: Optional[Section]) -> Iterator[Suggestion]:
    """Of a whole data set more is known than of a batch; what it does not tell is left to the losses' diagnosis."""
    yield from _about_dtype(audit, as_is)
    values = audit._values if audit.ignore_index is None else audit._values[audit._values != audit.ignore_index]
    if len(values) == 2 and values.tolist() == [-1, 1]:
        yield Suggestion("labels are -1 and 1: make them 0 and 1.", "target = (target + 1) // 2")
        return
    outside = values[(values < 0) | (values > (audit.num_classes or 0) - 1)]
    voids = [v for v in _VOID_LABELS if v != audit.num_classes and bool((outside == v).any())]
    kept = values[~torch.isin(values, torch.tensor(voids, dtype=torch.int64))]
    renumbering = _renumbering(audit, kept, voids)
    if renumbering is not None:
        yield renumbering
    if section is not None:
        in_use = audit.ignored > 0 and audit.ignore_index == -100  # no other number can take its place
        if renumbering is not None or in_use:
            known = {v: _times(audit, v) for v in voids}
            yield from _about_voids(audit, known)
            section = _without_voids(section, known, kept)
        if renumbering is None and section.count:
            yield from _diagnosed(audit, section, "CrossEntropyLoss")
    elif _is_wild(audit, len(kept)):
        yield Suggestion(
            "nearly every label is another one: they look like hashes, keys of a database, or memory that nobody wrote "
            "to."
        )
    yield from _weights(audit)


def _renumbering(audit: Audit, kept: Tensor, voids: list[int]) -> Optional[Suggestion]:
    """Where the labels are class indices that begin at 1, or ids with gaps. `kept`: distinct labels, ascending."""
    if not len(kept):
        return None
    low, high, count = int(kept[0]), int(kept[-1]), len(kept)
    classes = audit.num_classes or 0
    if audit.ignore_index is not None and low <= audit.ignore_index <= high:
        return None  # an ignored class in between: it would move, or another would take its place
    if low == 1 and high > 1 and count >= 0.8 * high and high == (classes - 1 if audit.inferred else classes):
        whether = ", unless class 0 merely does not occur here" if audit.inferred else ""
        shifted = "target - 1"
        if audit.ignored or voids:  # these stay
            shifted = f"torch.where((target > 0) & (target <= {high}), target - 1, target)"
        return Suggestion(f"labels run from 1 to {high} and none is 0: subtract 1{whether}.", f"target = {shifted}")
    if _is_sparse(audit, low, high, count, audit.outside.count - sum(_times(audit, v) for v in voids)):
        return Suggestion(
            f"{plural(count, 'distinct label')} between {low} and {high}: number them from 0 to {count - 1}, "
            f"and give the model {plural(count, 'output')}.",
            f"to_class = lossguard.remap_labels(audit{f', ignore_index={voids[0]}' if voids else ''})\n"
            "target = to_class(target)",
        )
    return None


def _is_sparse(audit: Audit, low: int, high: int, count: int, rest: int) -> bool:
    """Whether these are ids of another numbering, and not class indices with a few strays."""
    if _is_wild(audit, count) or low < 0 or count < 2:
        return False
    if audit.inferred:
        return count < 0.9 * (high + 1)
    classes = audit.num_classes or 0
    return high >= classes and count < 0.9 * (high + 1) and rest >= 0.01 * audit.labels


def _times(audit: Audit, value: int) -> int:
    return int(audit._counts[audit._values == value].sum())


def _is_wild(audit: Audit, count: int) -> bool:
    return audit._gave_up or count > max(audit.labels // 2, 1000)


def _about_dtype(audit: Audit, as_is: bool) -> Iterator[Suggestion]:
    kinds = audit.outside.kinds
    floats = [name for name in audit.dtypes if "float" in name]
    if nan := kinds.get("NaN", 0):
        verb = "is" if nan == 1 else "are"
        yield Suggestion(f"{plural(nan, 'label')} {verb} NaN: fill in what is missing, or leave these samples out.")
    if n := kinds.get("not whole", 0):
        yield Suggestion(
            f"{plural(n, 'label')} {'is' if n == 1 else 'are'} not whole: class indices are whole numbers. "
            'For targets in [0, 1] audit with kind="binary", for class probabilities with kind="probabilities".'
        )
    elif floats and not kinds.keys() & {"NaN", "+inf", "-inf"}:
        yield Suggestion("the labels are whole numbers of a floating-point dtype: convert them.", _LONG)
    other = [name for name in audit.dtypes if name not in _LOSS_DTYPES and name not in floats]
    if as_is and other and not floats:
        yield Suggestion(f"the labels are {' and '.join(other)}, and the losses take int64: convert them.", _LONG)


def _about_voids(audit: Audit, voids: dict[int, int]) -> Iterator[Suggestion]:
    """Where there is more to say than that every invalid label is one of these: only one number can be ignored."""
    chosen = audit.ignore_index if audit.ignored or audit.ignore_index not in (None, -100) else None
    for value, n in sorted(voids.items(), key=lambda pair: (-pair[1], pair[0])):
        they_are, them = ("is", "it") if n == 1 else ("are", "them")
        text = f"{plural(n, 'label')} {they_are} {value}, often used for {_VOID_LABELS[value]} elements"
        if chosen is None:
            yield Suggestion(f"{text}: ignore {them}, to leave {them} out.", f"criterion.ignore_index = {value}")
            chosen = value
        else:
            yield Suggestion(
                f"{text}: make {them} {chosen}, as others are, to leave {them} out.",
                f"target[target == {value}] = {chosen}",
            )


def _without_voids(section: Section, voids: dict[int, int], kept: Tensor) -> Section:
    counts = {
        "below 0": sum(n for v, n in voids.items() if v < 0),
        ">= num_classes": sum(n for v, n in voids.items() if v >= 0),
    }
    return dataclasses.replace(
        section,
        count=section.count - sum(voids.values()),
        counts={kind: n - counts[kind] for kind, n in section.counts.items()},
        labels={name: n for name, n in section.labels.items() if name == "num_classes"},
        values=[v for v in section.values if v not in voids],
        seen_min=int(kept[0]) if len(kept) else None,
        seen_max=int(kept[-1]) if len(kept) else None,
    )


def _diagnosed(audit: Audit, section: Section, loss: str) -> Iterator[Suggestion]:
    """What the losses would say of all labels at once."""
    dtype = next(iter(audit.dtypes))
    report = Report(
        loss=loss,
        sections=[section],
        shapes={"input": (), "target": (audit.samples, *(audit.shape or ()))},
        dtypes={"input": "float32", "target": dtype},
        device="cpu",
        num_classes=audit.num_classes,
        ignore_index=audit.ignore_index if audit.kind == "classes" else None,
    )
    for cause in diagnose(report)[:_MOST]:
        yield Suggestion(cause.what, cause.fix)


def _about_units(audit: Audit, section: Optional[Section]) -> Iterator[Suggestion]:
    if section is not None and section.count:
        loss = "CrossEntropyLoss" if audit.kind == "probabilities" else "BCEWithLogitsLoss"
        yield from _diagnosed(audit, section, loss)
    rows = audit.row_sums
    if audit.kind == "probabilities" and rows.count and not audit.outside.count:
        if rows.kinds.get("all 0") == rows.count:
            yield Suggestion(f"{plural(rows.count, 'row')} of zeros only: samples of no class at all; leave them out.")
        else:
            yield Suggestion(
                "divide each row by its sum, if its elements are shares of something.",
                "target = target / target.sum(1, keepdim=True)",
            )
    yield from _weights(audit)


def _weights(audit: Audit) -> Iterator[Suggestion]:
    if audit.kind == "binary":
        weights = audit.weights() if sum(audit.counts.values()) else torch.ones(1)
        if float(weights.max()) < _IMBALANCE:
            return
        text, name, loss = "positives are rare", "pos_weight", "BCEWithLogitsLoss"
    else:
        # A class outside counts is a stray or void, and what is inferred from strays alone is no number of classes.
        if audit.unseen > 4 * len(audit.counts) or len(audit.counts) < 2:
            return
        most, least = max(audit.counts.values()), min(audit.counts.values())
        if most < _IMBALANCE * least:
            return
        most_frequent = next(c for c, n in audit.counts.items() if n == most)
        rarest = next(c for c, n in audit.counts.items() if n == least)
        total = sum(audit.counts.values())
        text = (
            f"class {most_frequent} has {percent(most, total)} of the labels and class {rarest} {percent(least, total)}"
        )
        name, loss = "weight", "CrossEntropyLoss"
    wide = (audit.num_classes or 1) > _WEIGHTS
    code = f"{name} = audit.weights()" if wide else audit.weights_code()
    yield Suggestion(
        f"{text}: if that is not how it is to be learnt, weight them.",
        f"{code}\ncriterion = lossguard.{loss}({name}={name})",
    )


def _about_samples(audit: Audit) -> Iterator[Suggestion]:
    if audit.last_batch == 1 and (audit.batch_size or 0) > 1:
        yield Suggestion(
            "the last batch has one sample, of which BatchNorm has no variance: leave it out in training.",
            "DataLoader(..., drop_last=True)",
        )
    if audit.fully_ignored and audit.shape != () and audit.fully_ignored < audit.samples:
        yield Suggestion(
            f"{plural(audit.fully_ignored, 'sample')} {'has' if audit.fully_ignored == 1 else 'have'} nothing but "
            "ignored labels: a batch of such alone has a loss of NaN; leave them out."
        )
