"""Counting labels in pieces of bounded size: how often each value occurs, and where the bad ones are."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from ._violations import _unravel

PIECE = 1 << 14  # elements looked at at once: so few that torch's threads, which loaders need more, have no part in it
_MOST_IDS = 1 << 20  # distinct values that are counted one by one, apart from classes: where labels may be ids,
_MOST_STRAYS = 1 << 16  # where num_classes is known,
_MOST_FRACTIONS = 1 << 12  # and of numbers that are not whole
_PENDING = 1 << 14
_MOST_CLASSES = 1 << 24
FIRST = 16  # offenders that are kept
VOID = 255


class Chunk(NamedTuple):
    """Labels of some samples, (samples, ...), and the name of each sample."""

    labels: Tensor
    ids: Sequence[Any]


@dataclass(frozen=True)
class Offender:
    """One bad label."""

    sample: int | str  #: dataset index, row number or file name
    index: tuple[int, ...]  #: within the label of its sample; () where that is one number
    value: int | float  #: of rows that do not sum to 1, their sum


class Values:
    """How often each value occurs.

    Memory is bounded: values in [0, classes) are always counted; all others too, unless there are more than `most`
    distinct ones, and then none of them.
    """

    def __init__(self, dtype: torch.dtype, most: int, classes: int = 0) -> None:
        self._values = torch.empty(0, dtype=dtype)  # ascending
        self._counts = torch.empty(0, dtype=torch.int64)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._pending_values = 0
        self.most, self.classes = most, classes
        self.gave_up = False

    def add(self, values: Tensor, counts: Tensor) -> None:
        if self.gave_up:
            wanted = self.are_classes(values)
            values, counts = values.masked_select(wanted), counts.masked_select(wanted)
        if len(values):
            self._pending.append((values, counts))
            self._pending_values += len(values)
            if self._pending_values > max(_PENDING, len(self._values)):
                self._merge()

    def are_classes(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values < self.classes)

    @property
    def table(self) -> tuple[Tensor, Tensor]:
        """The values, ascending, and the count of each."""
        self._merge()
        return self._values, self._counts

    def _merge(self) -> None:
        if not self._pending:
            return
        values = torch.cat([self._values, *(v for v, _ in self._pending)])
        counts = torch.cat([self._counts, *(c for _, c in self._pending)])
        self._pending, self._pending_values = [], 0
        self._values, place = values.unique(return_inverse=True)
        self._counts = torch.zeros_like(self._values, dtype=torch.int64).index_add_(0, place, counts)
        wanted = self.are_classes(self._values)
        if len(self._values) - int(wanted.sum()) > self.most:
            self.gave_up = True
            self._values, self._counts = self._values[wanted], self._counts[wanted]


class Places:
    """The first offenders, how many there are, and in how many samples."""

    def __init__(self, keep_samples: bool = False) -> None:
        self.count = self.samples = 0
        self.first: list[Offender] = []
        self.first_samples: list[int | str] = []
        self.positions: Optional[list[Tensor]] = [] if keep_samples else None  # of their samples, in reading order
        self._last = -1

    def add(self, at: Tensor, values: Tensor, chunk: Chunk, shape: Sequence[int], before: int) -> None:
        """
        Args:
            at: flat positions in the chunk, ascending.
            values: what is there.
            shape: of one sample.
            before: the number of samples before the chunk.
        """
        if not len(at):
            return
        per_sample = math.prod(shape)
        self.count += len(at)
        room = FIRST - len(self.first)
        for position, value in zip(at[:room].tolist(), values[:room].tolist()):
            sample, within = divmod(position, per_sample)
            self.first.append(Offender(plain_id(chunk.ids[sample]), _unravel(within, tuple(shape)), value))
        positions = (at // per_sample + before).unique_consecutive()
        if int(positions[0]) == self._last:  # a large sample that comes in several pieces
            positions = positions[1:]
        self.samples += len(positions)
        if len(positions):
            self._last = int(positions[-1])
            room = FIRST - len(self.first_samples)
            self.first_samples += [plain_id(chunk.ids[p - before]) for p in positions[:room].tolist()]
            if self.positions is not None:
                self.positions.append(positions)


class Piece(NamedTuple):
    flat: Tensor
    start: int  # its flat position in the chunk
    chunk: Chunk
    before: int  # samples before the chunk

    def offenders(self, mask: Tensor, to: Places) -> None:
        at = mask.nonzero().squeeze(1)
        to.add(at + self.start, self.flat.index_select(0, at), self.chunk, self.chunk.labels.shape[1:], self.before)


class Range:
    """The smallest and the largest of what it was shown."""

    low: Optional[int | float] = None
    high: Optional[int | float] = None

    def add(self, values: Tensor) -> None:
        if values.numel():
            low, high = (v.item() for v in values.aminmax())
            self.low = low if self.low is None else min(self.low, low)
            self.high = high if self.high is None else max(self.high, high)


class Classes:
    """What labels are as class indices."""

    def __init__(self, num_classes: Optional[int], ignore_index: Optional[int], keep_samples: bool) -> None:
        self.num_classes, self.ignore_index = num_classes, ignore_index
        classes, most = (num_classes, _MOST_STRAYS) if num_classes else (VOID + 1, _MOST_IDS)
        self.values = Values(torch.int64, most, min(classes, _MOST_CLASSES))
        self.fractions = Values(torch.float64, _MOST_FRACTIONS)
        self.kinds: collections.Counter[str] = collections.Counter()
        # All that count, the whole numbers among them, and those of these that are outside.
        self.seen, self.whole, self.strays = Range(), Range(), Range()
        self.ignored = 0
        self.floats = 0
        # Without num_classes, 255 may turn out to mark void elements once all has been read: both are kept.
        self.outside = Places(keep_samples)
        self.outside_or_void = Places(keep_samples) if num_classes is None else None

    def add(self, piece: Piece) -> int:
        """Returns how many are ignored."""
        flat = piece.flat
        if flat.is_floating_point():
            self.floats += len(flat)
            whole_numbers = flat.to(torch.int64)
            whole = (whole_numbers == flat) & (flat.abs() < 2.0**63)  # which NaN and infinity are not
            labels = whole_numbers.masked_select(whole)
            if not bool(whole.all()):
                self._add_fractions(flat.masked_select(~whole))
        else:
            whole, labels = None, as_int64(flat)
            piece = piece._replace(flat=labels)
        values, counts = self._coarse_histogram(labels) if self.values.gave_up else histogram(labels)
        self.values.add(values, counts)
        counted = self._counted(values)
        self.seen.add(values.masked_select(counted))
        self.whole.add(values.masked_select(counted))
        self.strays.add(values.masked_select(self._is_outside(values)))
        self.kinds["below 0"] += int(counts.masked_select(counted & (values < 0)).sum())
        if self.num_classes is not None:
            self.kinds[">= num_classes"] += int(counts.masked_select(counted & (values >= self.num_classes)).sum())
        for is_outside, places in ((self._is_outside, self.outside), (self._is_outside_or_void, self.outside_or_void)):
            if places is not None and (whole is not None or bool(is_outside(values).any())):
                mask = is_outside(piece.flat)
                piece.offenders(mask if whole is None else mask | ~whole, places)
        ignored = int(counts.masked_select(~counted).sum())
        self.ignored += ignored
        return ignored

    def _add_fractions(self, values: Tensor) -> None:
        finite = count_not_finite(values, self.kinds)
        self.kinds["not whole"] += len(finite)
        self.seen.add(values.masked_select(~values.isnan()))
        if not self.fractions.gave_up:
            self.fractions.add(*finite.unique(return_counts=True))

    def _coarse_histogram(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """With all other values than classes and ignored ones as two: the smallest and the largest, on either side."""
        fine = self.values.are_classes(labels) | ~self._counted(labels)
        parts = [histogram(labels.masked_select(fine))]
        for side in (labels.masked_select(~fine & (labels < 0)), labels.masked_select(~fine & (labels >= 0))):
            if len(side):
                parts.append((torch.stack(side.aminmax()), torch.tensor([1, len(side) - 1])))
        return torch.cat([values for values, _ in parts]), torch.cat([counts for _, counts in parts])

    def _counted(self, values: Tensor) -> Tensor:
        return torch.ones_like(values, dtype=torch.bool) if self.ignore_index is None else values != self.ignore_index

    def _is_outside(self, values: Tensor) -> Tensor:
        outside = values < 0
        if self.num_classes is not None:
            outside |= values >= self.num_classes
        return outside & self._counted(values)

    def _is_outside_or_void(self, values: Tensor) -> Tensor:
        return ((values < 0) | (values == VOID)) & self._counted(values)


class Units:
    """What targets are as probabilities: of classes, whose dimension is 1, or of being positive."""

    def __init__(self, num_classes: Optional[int], has_classes: bool, keep_samples: bool) -> None:
        self.num_classes, self.has_classes = num_classes, has_classes  # as told
        self.elements = self.hard = self.rows = 0
        self.outside = Places(keep_samples)
        self.row_sums = Places(keep_samples)
        self.kinds: collections.Counter[str] = collections.Counter()
        self.values = Values(torch.float64, _MOST_FRACTIONS)
        self.seen, self.valid, self.beyond = Range(), Range(), Range()
        self.rows_of_zeros = 0
        self.mass: Optional[Tensor] = None  # of each class, or of the one there is
        self.valid_of_class: Optional[Tensor] = None  # elements
        self.class_sizes: set[Optional[int]] = set()  # of dimension 1; None where that is not of classes

    def add(self, piece: Piece, slack: float) -> None:
        flat = piece.flat
        inside = (flat >= -slack) & (flat <= 1 + slack)
        self.elements += len(flat)
        self.hard += int(((flat == 0) | (flat == 1)).sum())
        self.valid.add(flat.masked_select(inside))
        if bool(inside.all()):
            self.seen.add(flat)
            return
        bad = flat.masked_select(~inside)
        self.seen.add(flat.masked_select(~flat.isnan()))
        finite = count_not_finite(bad, self.kinds)
        self.kinds["below 0"] += int((finite < 0).sum())
        self.kinds["above 1"] += int((finite > 1).sum())
        bad = bad.masked_select(~bad.isnan())
        self.beyond.add(bad)
        if not self.values.gave_up:
            self.values.add(*bad.unique(return_counts=True))
        piece.offenders(~inside, self.outside)

    def add_rows(self, block: Tensor, row: int, chunk: Chunk, before: int, tolerance: float) -> None:
        """`block` begins with sample `row` of the chunk."""
        size = block.shape[1] if block.dim() > 1 else None
        told = self.has_classes or (size is not None and size == self.num_classes)
        if not told and (block.dim() != 2 or self.num_classes is not None):
            size = None
        self.class_sizes.add(size)
        if len(self.class_sizes) > 1:
            return
        valid = (block >= 0) & (block <= 1)
        mass, count = (
            t.sum().view(1) if size is None else t.transpose(0, 1).reshape(size, -1).sum(1)
            for t in (block.where(valid, 0), valid)
        )
        self.mass = mass if self.mass is None else self.mass + mass
        self.valid_of_class = count if self.valid_of_class is None else self.valid_of_class + count
        if size is None or size < 2:
            return
        sums = block.sum(1)
        shape = sums.shape[1:]
        flat = sums.reshape(-1)
        self.rows += len(flat)
        self.rows_of_zeros += int((flat == 0).sum())
        at = (~((flat - 1).abs() <= tolerance)).nonzero().squeeze(1)
        self.row_sums.add(at + row * math.prod(shape), flat.index_select(0, at), chunk, shape, before)


class Tally:
    """Counts what a source yields, as class indices and, where it is floating-point, as probabilities too.

    Which of the two it is may show only when all has been read.
    """

    def __init__(
        self, num_classes: Optional[int], ignore_index: Optional[int], kind: Optional[str], keep_samples: bool
    ) -> None:
        self.classes = Classes(num_classes, ignore_index, keep_samples) if kind in (None, "classes") else None
        self.units = Units(num_classes, kind == "probabilities", keep_samples) if kind != "classes" else None
        self.samples = self.labels = 0
        self.dtypes: dict[str, int] = {}
        self.shapes: set[tuple[int, ...]] = set()  # of one sample; two are enough to know that they differ
        self.fully_ignored = 0
        self.fully_ignored_samples: list[int | str] = []

    def add(self, chunk: Chunk) -> None:
        labels = chunk.labels
        count, shape = labels.shape[0], tuple(labels.shape[1:])
        per_sample = math.prod(shape)
        if len(self.shapes) < 2:
            self.shapes.add(shape)
        name = str(labels.dtype).removeprefix("torch.")
        self.dtypes[name] = self.dtypes.get(name, 0) + labels.numel()
        step = max(1, PIECE // max(per_sample, 1))
        for row in range(0, count, step):
            block = labels[row : row + step].detach().cpu()
            as_units = self.units is not None and (self.classes is None or block.is_floating_point())
            if as_units or block.is_floating_point():
                dtype, block = block.dtype, block.double()
            flat = block.reshape(-1)
            ignored = 0
            for begin in range(0, len(flat), PIECE):
                piece = Piece(flat[begin : begin + PIECE], row * per_sample + begin, chunk, self.samples)
                if self.classes is not None:
                    ignored += self.classes.add(piece)
                if as_units and self.units is not None:
                    self.units.add(piece, slack_of(dtype))
            if as_units and self.units is not None:
                self.units.add_rows(block, row, chunk, self.samples, _sum_tolerance(dtype))
            if ignored or not per_sample:
                self._note_fully_ignored(flat.view(block.shape[0], per_sample), ignored, chunk.ids, row)
        self.samples += count
        self.labels += labels.numel()

    def _note_fully_ignored(self, rows: Tensor, ignored: int, ids: Sequence[Any], row: int) -> None:
        if ignored == rows.numel():
            full = list(range(len(rows)))
        elif len(rows) == 1:  # a large sample: nothing more to compute
            return
        else:
            assert self.classes is not None
            full = rows.eq(self.classes.ignore_index or 0).all(1).nonzero().squeeze(1).tolist()
        self.fully_ignored += len(full)
        room = FIRST - len(self.fully_ignored_samples)
        self.fully_ignored_samples += [plain_id(ids[row + i]) for i in full[:room]]


def histogram(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct values of a flat int64 tensor, ascending, and how often each occurs."""
    if not len(labels):
        return labels, labels
    low, high = (int(v) for v in labels.aminmax())
    if high - low < max(len(labels), 1 << 16):
        counts = (labels if low == 0 else labels - low).bincount()
        values = counts.nonzero().squeeze(1)
        return values + low, counts.index_select(0, values)
    return labels.unique(return_counts=True)


def as_int64(labels: Tensor) -> Tensor:
    """Raises ValueError for what does not fit."""
    wide = labels.to(torch.int64)
    if labels.dtype == torch.uint64 and bool((wide < 0).any()):
        value = int(wide[wide < 0][0]) + 2**64
        raise ValueError(f"the uint64 label {value} does not fit int64, the dtype of class indices")
    return wide


def count_not_finite(values: Tensor, kinds: collections.Counter[str]) -> Tensor:
    """Counts NaN and infinities by kind, and returns the rest."""
    kinds["NaN"] += int(values.isnan().sum())
    kinds["+inf"] += int((values == math.inf).sum())
    kinds["-inf"] += int((values == -math.inf).sum())
    return values.masked_select(values.isfinite())


def slack_of(dtype: torch.dtype) -> float:
    """As much beyond [0, 1] as the losses allow for rounding (see lossguard.functional)."""
    return max(4 * torch.finfo(dtype).eps, 1e-6) if dtype.is_floating_point else 0.0


def _sum_tolerance(dtype: torch.dtype) -> float:
    """For the sum of a row: generous, for the errors of many rounded elements add up."""
    return 1e-2 if dtype in (torch.float16, torch.bfloat16) else 1e-4


def plain_id(sample: Any) -> int | str:
    try:
        return operator.index(sample)
    except TypeError:
        return str(sample)
