"""What an audit has found, as data, as text and as a picture."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.utils.data import Subset

from ._audit_count import FIRST, Offender
from .report import _number, _plain, as_printed, shorten

_WIDTH = 100
_ROWS = 20  # classes that are listed one by one
_RAREST = 6
LISTED = 100  # classes never seen that are kept by number


@dataclass(frozen=True)
class Violations:
    """Labels that a loss would refuse. Counts are exact; ``first`` has 16 in reading order."""

    count: int = 0  #: labels; of row sums: rows
    samples: int = 0  #: in which they are
    first_samples: list[int | str] = field(default_factory=list)  #: the first 16 of these
    first: list[Offender] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)  #: "below 0", ">= num_classes", "not whole", "NaN", ...
    values: dict[int | float, int] = field(default_factory=dict)  #: the 16 most frequent, NaN left out


@dataclass(frozen=True)
class Suggestion:
    """What to do about something, where the numbers support it."""

    text: str
    code: str = ""  #: a line or two of Python


@dataclass(frozen=True)
class Audit:
    """What :func:`lossguard.audit` found. ``str()`` is a report for people, :meth:`to_dict` is ready for JSON."""

    source: str  #: what was read
    unit: str  #: what samples are named by: "sample" (dataset index), "row", "file", "position" (in reading order)
    kind: str  #: "classes" (class indices), "probabilities" (of classes) or "binary" (targets in [0, 1], as of BCE)
    num_classes: Optional[int]  #: None for binary targets without a class dimension, or if nothing was read
    inferred: bool  #: whether ``num_classes`` was found in the labels
    ignore_index: Optional[int]
    samples: int
    labels: int  #: numbers in the labels of all samples
    shape: Optional[tuple[int, ...]]  #: of the label of one sample; None where they differ
    dtypes: dict[str, int]  #: labels by dtype
    min: Optional[int | float]  #: smallest label that is neither ignored nor NaN, valid or not
    max: Optional[int | float]
    #: Labels by class, valid and seen ones alone; of probabilities their sum. Of more than a million distinct labels,
    #: without num_classes, those below 256 alone.
    counts: dict[int, int | float]
    distinct: int  #: values, ignored ones left out, as far as they were told apart; of class indices only
    unseen: int  #: classes that never occur
    unseen_classes: list[int]  #: the first 100 of them
    ignored: int  #: labels that are ignore_index
    fully_ignored: int  #: samples with nothing else in them
    fully_ignored_samples: list[int | str]  #: the first 16 of them
    outside: Violations  #: outside [0, num_classes), or [0, 1]
    row_sums: Violations  #: of targets with a class dimension: rows that do not sum to 1
    rows: int  #: so many there are
    batches: Optional[int]  #: of a loader
    batch_size: Optional[int]  #: of its first batch
    last_batch: Optional[int]  #: of its last
    limited: bool  #: whether reading ended at max_samples
    problems: list[str] = field(default_factory=list)  #: what makes the labels unfit for training; one sentence each
    suggestions: list[Suggestion] = field(default_factory=list)

    # Of class indices: every value, ignored ones too, ascending, and how often it occurs.
    _values: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False, compare=False)
    _counts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64), repr=False, compare=False)
    _gave_up: bool = field(default=False, repr=False, compare=False)  # too many values: those of classes only
    _valid: Optional[Tensor] = field(default=None, repr=False, compare=False)  # of binary targets, elements by class
    _dataset: Any = field(default=None, repr=False, compare=False)
    _read: Optional[list[Any]] = field(default=None, repr=False, compare=False)  # dataset indices, in reading order
    _bad: Optional[Tensor] = field(default=None, repr=False, compare=False)  # positions of bad samples in it

    @property
    def ok(self) -> bool:
        """Whether a loss would take every label."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings. NaN and infinite values become strings, as do keys."""
        public = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if not f.name.startswith("_")}
        return {"ok": self.ok, **_jsonable(public)}

    def weights(self) -> Tensor:
        """Weights that make up for imbalance, float32.

        Of class indices and class probabilities, inverse frequencies for ``CrossEntropyLoss(weight=)``, (C,): a class
        with the mean frequency has 1, and one never seen that of the rarest. Of binary targets,
        negatives / positives of each class for ``BCEWithLogitsLoss(pos_weight=)``, (C,) or (1,); 1 where there are no
        positives.

        Raises:
            ValueError: if no valid label was read.
        """
        classes = self.num_classes or 1
        total = sum(self.counts.values())
        if not total or classes > 1 << 24:
            raise ValueError(f"no weights for {self.source}: it has {total} valid labels of {classes} classes")
        counts = torch.zeros(classes, dtype=torch.float64)
        counts[torch.tensor(list(self.counts))] = torch.tensor(list(self.counts.values()), dtype=torch.float64)
        if self.kind == "binary":
            assert self._valid is not None
            return torch.where(counts > 0, (self._valid - counts) / counts, 1).float()
        seen = counts > 0
        weights = total / (int(seen.sum()) * counts)
        weights[~seen] = weights[seen].max()
        return weights.float()

    def weights_code(self) -> str:
        """A line of Python that makes :meth:`weights`, to four digits."""
        name = "pos_weight" if self.kind == "binary" else "weight"
        numbers = ", ".join(f"{w:.4g}" for w in self.weights().tolist())
        return f"{name} = torch.tensor([{numbers}], dtype=torch.float32)"

    def good_subset(self) -> Subset[Any]:
        """The items that were read and have only valid labels, as a :class:`torch.utils.data.Subset`.

        In dataset order; items that a loader's sampler or ``drop_last`` left out are not in it.

        Raises:
            TypeError: if what was audited is not a map-style dataset, or a loader over one.
        """
        if self._dataset is None or self._bad is None:
            raise TypeError(
                f"no subset of {self.source}: that takes a map-style dataset, or a torch DataLoader over one whose "
                "batches have a label for each item sampled"
            )
        bad = set(self._bad.tolist())
        if self._read is None:
            return Subset(self._dataset, [i for i in range(self.samples) if i not in bad])
        dropped = {self._read[position] for position in bad}
        read = dict.fromkeys(index for index in self._read[: self.samples] if index not in dropped)
        try:
            return Subset(self._dataset, sorted(read))
        except TypeError:  # keys with no order
            return Subset(self._dataset, list(read))

    def plot(self, path: Union[str, os.PathLike[str]]) -> None:
        """Draws a histogram of the classes, with what is outside and what is ignored, in the format of the suffix.

        Raises:
            ImportError: without matplotlib.
            ValueError: if there is nothing to draw.
        """
        from ._audit_plot import draw

        draw(self, path)

    # The text.

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        lines = [f"audit of {self.source}: {self._verdict()}"]
        lines += [f"  problem: {problem}" for problem in self.problems[1:]]
        lines += [f"  {name:<9} {text}" for name, text in self._facts()]
        lines += self._violations(self.outside, "outside") + self._violations(self.row_sums, "row sums")
        lines += self._classes()
        for suggestion in self.suggestions:
            lines.append(f"  suggestion: {suggestion.text}")
            lines += [f"      {line}" for line in suggestion.code.splitlines()]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.problems:
            return self.problems[0]
        return f"every label of {plural(self.samples, 'sample')} is valid."

    def _facts(self) -> Iterator[tuple[str, str]]:
        shape = "labels of different shapes" if self.shape is None else f"labels of shape {self.shape}"
        each = "one label each" if self.shape == () else f"{shape}, {self.labels} numbers"
        dtypes = " and ".join(
            name if len(self.dtypes) == 1 else f"{name} ({count})" for name, count in self.dtypes.items()
        )
        limited = "; reading ended there, at max_samples" if self.limited else ""
        if self.samples:
            yield "samples", f"{self.samples}, {each}, {dtypes}{limited}"
        kinds = {
            "classes": "class indices",
            "probabilities": "class probabilities",
            "binary": "targets in [0, 1], as of BCE",
        }
        if self.min is not None:
            yield "kind", f"{kinds[self.kind]}, from {self.number(self.min)} to {self.number(self.max)}"
        if self.num_classes is not None:
            how = ""
            if self.inferred:
                void = self.max is not None and self.max >= self.num_classes
                how = f": the largest label{' but 255,' if void else ''} + 1"
                how = how if self.kind == "classes" else ": the size of dimension 1"
                how += "; pass num_classes to check against your model"
            yield "classes", f"{self.num_classes}{how}"
        if self.kind == "binary" and self.num_classes is None and self.counts:
            yield "positive", f"{_amount(self.counts[0])} of {self.labels} ({percent(self.counts[0], self.labels)})"
        if self.kind == "classes" and (self.ignored or self.ignore_index != -100):
            share = percent(self.ignored, self.labels)
            yield "ignored", f"{self.ignored} of {self.labels} ({share}), ignore_index: {self.ignore_index}"
        if self.fully_ignored and self.shape != ():
            samples = listed(self.fully_ignored_samples, self.fully_ignored)
            yield "empty", f"{plural(self.fully_ignored, 'sample')} with nothing but ignored labels: {samples}"
        if self.unseen:
            yield "unseen", f"{plural(self.unseen, 'class', 'es')}: {ranges(self.unseen_classes, self.unseen)}"
        if self.batches is not None:
            yield "batches", f"{self.batches}, of {self.batch_size}; the last of {self.last_batch}"

    def number(self, value: Optional[int | float]) -> str:
        """The shortest text of a label that tells it from others of its dtype."""
        dtype = next(iter(self.dtypes)) if len(self.dtypes) == 1 else ""
        if isinstance(value, float) and value.is_integer() and self.kind == "classes":
            return str(int(value)) if abs(value) < 1e16 else f"{value:g}"
        return _number(value, dtype)

    def _violations(self, found: Violations, name: str) -> list[str]:
        if not found.count or (found is self.row_sums and self.kind == "binary"):
            return []
        kinds = ", ".join(f"{kind}: {n}" for kind, n in found.kinds.items())
        what = "labels" if found is self.outside else "rows"
        lines = [f"  {name:<9} {found.count} {what} in {plural(found.samples, 'sample')}{'; ' if kinds else ''}{kinds}"]
        header = "value" if found is self.outside else "sum"
        rows = [
            (
                shorten(str(o.sample), 60, keep="end"),
                "" if o.index == () else str(o.index),
                self.number(o.value) if found is self.outside else f"{o.value:.6g}",
            )
            for o in found.first
        ]
        indexed = any(index for _, index, _ in rows)
        first = max(len(self.unit), *(len(sample) for sample, _, _ in rows))
        second = max(5, *(len(index) for _, index, _ in rows)) if indexed else 0
        for sample, index, value in [(self.unit, "index" if indexed else "", header), *rows]:
            lines.append("    " + "  ".join([f"{sample:<{first}}", *([f"{index:<{second}}"] * indexed), value]))
        if found.count > len(rows):
            lines.append(f"    ... and {found.count - len(rows)} more")
        if found.samples > 1 and found.samples > len({o.sample for o in found.first}):
            if found.count > found.samples:
                lines.append(shorten(f"    samples: {listed(found.first_samples, found.samples)}", 4 * _WIDTH))
        if found.count > 1 and max(found.values.values(), default=1) > 1:
            values = ", ".join(f"{self.number(value)}: {n}" for value, n in found.values.items())
            lines.append(shorten(f"    by value: {values}", 4 * _WIDTH))
        return lines

    def _classes(self) -> list[str]:
        total = sum(self.counts.values())
        if not total or (self.kind == "binary" and self.num_classes is None):
            return []
        by_count = sorted(self.counts, key=lambda c: (-self.counts[c], c))
        shown: list[Optional[int]] = [*sorted(self.counts)]
        if len(by_count) > _ROWS:
            shown = [*by_count[: _ROWS - _RAREST], None, *by_count[-_RAREST:]]
        of = self.labels // max(self.num_classes or 1, 1) if self.kind == "binary" else total
        what = {"classes": "labels", "probabilities": "sum", "binary": "positive"}[self.kind]
        lines = [f"    {'class':>8}  {what:>12}  share"]
        most = max(self.counts.values())
        for c in shown:
            if c is None:
                lines.append(f"    {'...':>8}  {plural(len(by_count) - _ROWS, 'class', 'es')} in between")
                continue
            count = self.counts[c]
            bar = "#" * max(1, round(40 * count / most))
            lines.append(f"    {c:>8}  {_amount(count):>12}  {percent(count, of):>6}  {bar}")
        return lines


def plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"


def percent(part: float, whole: float) -> str:
    share = 100 * part / whole if whole else 0.0
    return f"{share:.1f}%" if share >= 0.1 or not part else f"{share:.2g}%"


def listed(some: Iterable[Any], total: int) -> str:
    shown = [str(each) for each in some]
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def ranges(numbers: list[int], total: int) -> str:
    """Ascending numbers, neighbours made one: 3, 5..9."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [f"{a}" if a == b else f"{a}..{b}" for a, b in runs[:FIRST]]
    left = total - sum(b - a + 1 for a, b in runs[:FIRST])
    return ", ".join(texts) + (f" and {left} more" if left else "")


def _amount(count: int | float) -> str:
    return str(count) if isinstance(count, int) else f"{count:.6g}"


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _jsonable({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return _plain(value)
