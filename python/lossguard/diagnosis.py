"""Likely causes of a violation. Only what the numbers in the report, or in the batch, support is said.

First `diagnose`; then the facts that are known of a tensor; then the rules, in tables to be read from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Optional, TypeVar, Union

import torch
from torch import Tensor

from .errors import LossValidationError
from .report import Report, Section, as_printed

__all__ = ["Cause", "diagnose", "likely_causes"]

_MOST_HINTS = 3


@dataclass(frozen=True)
class Cause:
    """What may be behind a violation. ``str()`` of it is all four, on lines of their own."""

    name: str  #: the same for every violation with this cause, such as "one-based-labels"
    what: str  #: a sentence, with what to do
    evidence: str  #: the numbers that speak for it
    fix: str  #: a line of Python, or two; with torch's names: input, target, criterion, model

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        fix = self.fix.replace("\n", "\n       ")
        return f"{self.name}: {self.what}\n  evidence: {self.evidence}\n  fix: {fix}"


def diagnose(
    report: Union[Report, LossValidationError, Sequence[Report]], batch: Optional[Mapping[str, Tensor]] = None
) -> list[Cause]:
    """The likely causes of a violation, the likeliest first: those that account for the most of the offenders.

    Empty if the numbers point nowhere, or if the exception has come without its report, as from a DataLoader worker.

    Args:
        report: of one call; or an exception, whose ``reports`` are taken; or a list of reports.
        batch: what the loss was given, if it is still at hand, for causes that a report alone does not tell:
            "input", "target" and "weight", as they were passed; not both of the first two may be missing, and others
            are not looked at. Of several reports it goes with those whose tensors they are; under `vmap` they are
            those of the sample ``report.vmap``.

    Raises:
        TypeError: ``report`` is none of these, or the batch has something else than tensors.
        ValueError: the batch has neither "input" nor "target", or is not the one that was reported.
    """
    reports = _reports(report)
    tensors = _tensors(batch)
    strangers = [_stranger(r, tensors) for r in reports]
    if reports and all(strangers):
        raise ValueError(f"the batch is not the one of the report: {strangers[0]}")
    ranked: list[tuple[float, Cause]] = []
    for r, stranger in zip(reports, strangers):
        where = f"{r.call_site.short()}: " if len(reports) > 1 and r.call_site is not None else ""
        heads = {other.num_classes for other in reports if other.num_classes}
        for share, cause in _of_report(r, {} if stranger else tensors, heads):
            ranked.append((share, Cause(cause.name, cause.what, where + cause.evidence, cause.fix)))
    ranked.sort(key=lambda pair: -pair[0])  # stable: of equals the first in the tables
    once: dict[tuple[str, str], Cause] = {}
    for _, cause in ranked:
        once.setdefault((cause.name, cause.what), cause)
    return list(once.values())


def likely_causes(report: Report) -> list[str]:
    """For :attr:`Report.hints`: one sentence per cause, the likeliest first, each with what to do."""
    return [cause.what for cause in diagnose(report)][:_MOST_HINTS]


def _reports(given: Union[Report, LossValidationError, Sequence[Report]]) -> list[Report]:
    if isinstance(given, Report):
        return [given]
    if isinstance(given, LossValidationError):
        return given.reports
    if isinstance(given, (list, tuple)) and all(isinstance(r, Report) for r in given):
        return list(given)
    raise TypeError(f"diagnose wants a Report, a LossValidationError or a list of Reports, got {type(given).__name__}")


def _tensors(batch: Optional[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    if batch is None:
        return {}
    if not isinstance(batch, Mapping):
        raise TypeError(f'batch wants a mapping with "input" and "target", got {type(batch).__name__}')
    if "input" not in batch and "target" not in batch:
        raise ValueError(f'the batch has neither "input" nor "target" but {", ".join(map(repr, batch)) or "nothing"}')
    found = {name: batch[name] for name in ("input", "target", "weight") if batch.get(name) is not None}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f'batch["{name}"] is to be a tensor, got {type(tensor).__name__}')
    return {name: tensor.detach() for name, tensor in found.items()}


def _stranger(report: Report, batch: Mapping[str, Tensor]) -> str:
    """What tells that these tensors are not the ones of the report; "" if nothing does."""
    for name in ("input", "target"):
        if name not in batch or name not in report.shapes:
            continue
        given, told = tuple(batch[name].shape), report.shapes[name]
        if given != told:
            return f"its {name} has shape {given}, that of the report {told}"
    for s in report.sections:
        if s.tensor not in batch:
            continue
        tensor = batch[s.tensor]
        if not s.indices or len(s.indices[0]) != tensor.dim():  # of a whole dataset, or of an item of one
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != report.dtypes[s.tensor]:
            if s.kind != "class_index":  # autocast: the values that were checked are rounded
                continue
            return f"its {s.tensor} is {dtype}, that of the report {report.dtypes[s.tensor]}"
        value = tensor[s.indices[0]].item()
        if repr(value) != repr(s.values[0]):
            return f"its {s.tensor} is {value} at {s.indices[0]}, that of the report {s.values[0]}"
    return ""


def _of_report(report: Report, batch: Mapping[str, Tensor], heads: set[int]) -> Iterator[tuple[float, Cause]]:
    """Each cause with the share of its tensor's offenders that it accounts for."""
    for s in report.sections:
        if s.kind == "class_index":
            yield from _judge(_LABELS, _Labels(report, s, batch, heads))
        elif s.kind == "index":
            yield from _judge(_INDICES, _Indices(report, s, batch, heads))
        elif s.kind == "finite":
            yield from _judge(_NOT_FINITE, _Infinities(report, s, batch, heads))
        elif s.kind == "unit_interval":
            yield from _judge(_PROBABILITIES if s.tensor == "input" else _SOFT_TARGETS, _Facts(report, s, batch, heads))
    yield from _judge(_BESIDES, _Facts(report, report.sections[0], batch, heads))


# ---- what is known


_Value = TypeVar("_Value")


class _once(Generic[_Value]):
    """As `functools.cached_property`, but without its lock (before Python 3.12), which a fork could leave held."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self.compute = compute

    def __get__(self, facts: Any, kind: Any) -> _Value:
        value = facts.__dict__[self.compute.__name__] = self.compute(facts)
        return value


class _Facts:
    """Of one tensor that is wrong. The offenders are divided into disjoint `parts`, with the number in each."""

    def __init__(self, report: Report, section: Section, batch: Mapping[str, Tensor], heads: set[int]) -> None:
        self.report, self.s, self.heads = report, section, heads
        self.input, self.target, self.weight = (batch.get(name) for name in ("input", "target", "weight"))
        self.classes = report.num_classes or 0
        self.parts = self._parts()

    def _parts(self) -> dict[str, int]:
        nan = self.s.counts.get("NaN", 0)
        return {"NaN": nan, "beyond": self.s.count - nan}

    @property
    def besides(self) -> str:
        """What the batch adds to the evidence of each cause."""
        return ""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.report.shapes.get("input", ())  # of an item of a dataset there is none

    @property
    def is_image(self) -> bool:
        return len(self.report.shapes["target"]) >= 3

    # Of values in [0, 1], and of logits.

    @property
    def low(self) -> float:
        return self.s.seen_min if self.s.seen_min is not None else 0.0

    @property
    def high(self) -> float:
        return self.s.seen_max if self.s.seen_max is not None else 0.0

    @property
    def is_bounded(self) -> bool:
        return max(abs(self.low), abs(self.high)) < float("inf")

    @_once
    def is_whole(self) -> bool:
        """Of the listed offenders; with the batch, of all elements that count."""
        if self.target is None or self.s.tensor != "target":
            return all(float(v).is_integer() for v in self.s.values if v == v)
        values = self.target
        if self.weight is not None:  # what has a weight of 0 is exempt
            weight = self.weight
            if self.classes and values.dim() > 1:
                weight = weight.reshape(-1, *[1] * (values.dim() - 2))
            values = values[torch.broadcast_to(weight, values.shape) != 0]
        return bool((values.frac() == 0)[~values.isnan()].all())

    @property
    def every_nan(self) -> bool:
        return self.parts["NaN"] == self.s.seen

    @property
    def is_batch_of_one(self) -> bool:
        enough = self.s.seen > 1 or not self.classes  # NLL looks at one log-probability of each sample
        return self.input_shape[:1] == (1,) and self.every_nan and enough and not self.report.vmap

    @_once
    def nan_samples(self) -> int:
        """With the batch: samples that are NaN throughout, if NaN is nowhere else and not in every sample; else 0."""
        if self.input is None or self.input.dim() < 2 or len(self.input) < 2:
            return 0
        nan = self.input.isnan().flatten(1)
        samples = int(nan.all(1).sum())
        return samples if samples == int(nan.any(1).sum()) < len(nan) else 0

    @_once
    def are_arguments_swapped(self) -> bool:
        """With the batch: the input is labels, 0 and 1."""
        return self.input is not None and self.input.unique().tolist() == [0, 1] and not self.is_whole

    # Of the input of cross-entropy and NLL, with the batch.

    @_once
    def are_probabilities(self) -> bool:
        """Every row is in [0, 1], and sums to 1."""
        if self.input is None or self.classes < 2:
            return False
        rounding = 1e-2 if self.input.dtype in (torch.float16, torch.bfloat16) else 1e-3
        x = self.input if self.input.dtype == torch.float64 else self.input.float()
        sums = x.sum(1 if x.dim() > 1 else 0)
        return bool(((x >= 0) & (x <= 1 + rounding)).all() and ((sums - 1).abs() <= rounding).all())

    @_once
    def are_in_unit_interval(self) -> bool:
        return self.input is not None and self.elements >= 16 and bool(((self.input >= 0) & (self.input <= 1)).all())

    @_once
    def positive(self) -> int:
        """Elements of the input above 0, beyond the rounding of a log-probability near 0."""
        return 0 if self.input is None else int((self.input > 1e-2).sum())

    @property
    def elements(self) -> int:
        return 0 if self.input is None else self.input.numel()


class _Infinities(_Facts):
    def _parts(self) -> dict[str, int]:
        return {kind: self.s.counts.get(kind, 0) for kind in ("NaN", "+inf", "-inf")}


class _Indices(_Facts):
    """Of an operation such as embedding, not of a loss."""

    def _parts(self) -> dict[str, int]:
        return {"above": self.s.counts.get(">= size", 0), "below": self.s.count - self.s.counts.get(">= size", 0)}

    @property
    def embeds(self) -> bool:
        return self.report.loss.startswith("embedding")

    @property
    def size(self) -> int:
        return self.report.num_classes or 0

    @property
    def operation(self) -> str:
        return self.report.loss

    @property
    def rows(self) -> int:
        """That an embedding would have to have."""
        return int(self.high) + 1


class _Labels(_Facts):
    def _parts(self) -> dict[str, int]:
        named = {label: self.s.labels.get(label, 0) for label in ("-1", "-100", "255")}
        above = self.s.counts.get(">= num_classes", 0) - named["255"]
        below = self.s.counts.get("below 0", 0) - named["-1"] - named["-100"]
        return {"above": above, "below": below, **named}

    @_once
    def found(self) -> dict[int, int]:
        """With the batch: each label that counts, in order, and how often it occurs."""
        if self.target is None:
            return {}
        labels, times = self.target.unique(return_counts=True)
        return {v: n for v, n in zip(labels.tolist(), times.tolist()) if v != self.report.ignore_index}

    @property
    def besides(self) -> str:
        if not self.found:
            return ""
        bad = sorted((-n, v) for v, n in self.found.items() if not 0 <= v < self.classes)
        more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
        said = ", ".join(f"{v} ({-n} times)" if n < -1 else f"{v} (once)" for n, v in bad[:5])
        return f" Different labels in the batch: {len(self.found)}, of which {len(bad)} invalid: {said}{more}."

    @_once
    def listed(self) -> list[int]:
        """Offenders of the part "above": all different ones with the batch, else of the first 16."""
        values = self.found or dict.fromkeys(int(v) for v in self.s.values)
        return [v for v in values if v >= self.classes and (v != 255 or self.classes == 255)]

    @property
    def highest(self) -> int:
        """The largest label, but for a 255 among the offenders, which tells nothing of the others."""
        largest = int(self.high)
        return max(self.listed) if largest == 255 and self.parts["255"] and self.listed else largest

    @property
    def outputs(self) -> int:
        return self.highest + 1

    @property
    def levels(self) -> str:
        """How many values the offenders have, but for 255."""
        if self.found:
            return f"{len({v for v in self.found if not 0 <= v < self.classes} - {255})} different values"
        return f"at least {len({*self.s.values} - {255})} different values"

    @property
    def times(self) -> float:
        return self.highest / self.classes

    @property
    def wider(self) -> str:
        """Code for an output layer that is wide enough."""
        if self.is_image:
            return f"model.head = torch.nn.Conv2d(model.head.in_channels, {self.outputs}, kernel_size=1)"
        return f"model.head = torch.nn.Linear(model.head.in_features, {self.outputs})"

    @property
    def only_classes(self) -> bool:
        """Of the offenders above, each is num_classes."""
        return self.s.labels.get("num_classes", 0) == self.parts["above"] > 0

    @property
    def ignore(self) -> int:
        return -100 if self.report.ignore_index is None else self.report.ignore_index

    @property
    def span(self) -> str:
        valid = self.s.valid_min is not None
        return f"the valid ones run from {self.s.valid_min} to {self.s.valid_max}" if valid else "none is valid"

    @property
    def is_wild(self) -> bool:
        return self.s.min is not None and self.s.max is not None and max(-self.s.min, self.s.max) >= 2**31

    @property
    def are_pairs(self) -> bool:
        """Each offender is two valid labels of 32 bits side by side."""
        halves = [half for v in self.s.values for half in divmod(int(v), 2**32)]
        return len(halves) > 2 and all(0 <= half < self.classes for half in halves)

    @property
    def are_tokens(self) -> bool:
        """Sequences, or flat labels of more classes than images have."""
        dimensions = len(self.report.shapes["target"])
        return self.classes >= (1000 if dimensions == 2 else 5000) and dimensions <= 2

    @property
    def head(self) -> int:
        """Outputs of another call among the reports that these labels would fit, else 0."""
        return min((c for c in self.heads if self.highest < c <= 1.25 * self.outputs), default=0)

    @property
    def numbering(self) -> str:
        """Whose ids these look like."""
        name, first, last, images = _NUMBERINGS.get(self.classes, ("", 0, 0, False))
        # In the upper half of what is beyond the classes: a few labels too many are anybody's.
        fits = (self.classes + last) / 2 <= self.highest <= last and (self.s.valid_min or 0) >= first
        return name if fits and (self.is_image or not images) else ""

    @property
    def have_gaps(self) -> bool:
        """With the batch: few different labels, far apart, and each so often that few are missing by chance."""
        ids = [v for v in self.found if 0 <= v <= self.highest]
        sparse = 0 < len(ids) <= min(self.classes, (self.highest - ids[0] + 1) // 2)
        return sparse and not self.is_image and self.s.seen >= 4 * len(ids)

    @property
    def may_be_interpolated(self) -> bool:
        """An image, of values that interpolation between 0 and 255 may give, bicubic with its overshoot included."""
        return self.is_image and self.s.min is not None and self.s.min >= -64 and self.highest <= 255 + 64

    @_once
    def is_interpolated(self) -> bool:
        """With the batch: most of the offenders are strictly between two neighbours. Without: many of the listed
        differ, or there are some on both sides of [0, 255]."""
        if not self.may_be_interpolated:
            return False
        if self.target is None:
            overshoot = self.ignore == 255 and self.parts["below"] > 0 and self.parts["above"] > 0
            return overshoot or len(self.listed) >= 8
        t = self.target.long()
        bad = (t >= self.classes) & (t < 255)
        between = torch.zeros_like(bad)
        for d in range(1, t.dim()):
            size = t.shape[d] - 2
            if size > 0:
                before, here, after = (t.narrow(d, start, size) for start in (0, 1, 2))
                between.narrow(d, 1, size).logical_or_((here - before) * (after - here) > 0)
        return len(self.listed) > 1 and int((between & bad).sum()) * 2 > int(bad.sum())


#: Well-known data sets whose ids are not 0, 1, 2...: by the number of classes, the name, the least and the largest id,
#: and whether labels are images.
_NUMBERINGS = {
    19: ("Cityscapes' `labelIds` (use `labelTrainIds`)", 0, 33, True),
    80: ("COCO's category ids", 1, 90, False),
    133: ("the ids of COCO's panoptic categories", 0, 200, True),
}


# ---- the rules

_F = TypeVar("_F", bound=_Facts)


@dataclass(frozen=True)
class _Rule(Generic[_F]):
    """A cause, and when it is one.

    The texts are templates of `f`, the facts; `s`, their section; `n`, the offenders that the cause accounts for;
    `targets`, these in words, and `are`, their verb.
    """

    name: str
    of: tuple[str, ...]  # the parts of the offenders that it accounts for; () for none
    when: Callable[[_F], bool]
    what: str
    evidence: str
    fix: str
    alone: bool = True  # where it holds, no rule below is asked about these parts


def _judge(rules: Iterable[_Rule[_F]], facts: _F) -> Iterator[tuple[float, Cause]]:
    left = dict(facts.parts)
    for rule in rules:
        n = sum(left.get(part, 0) for part in rule.of)
        if (rule.of and not n) or not rule.when(facts):
            continue
        if rule.alone:
            left.update(dict.fromkeys(rule.of, 0))
        words = {"f": facts, "s": facts.s, "n": n, "are": "is" if n == 1 else "are", "targets": _targets(n)}
        what, evidence, fix = (text.format(**words) for text in (rule.what, rule.evidence, rule.fix))
        yield n / facts.s.count, Cause(rule.name, what, evidence + facts.besides, fix)


def _targets(n: int) -> str:
    return "1 target" if n == 1 else f"{n} targets"


def _marker(label: int, meaning: str, every: bool, default: bool) -> _Rule[_Labels]:
    """A label that often marks elements to leave out: of every offender or some, with nobody's ignore_index or one."""
    part = str(label)

    def when(f: _Labels) -> bool:
        return (f.parts[part] == f.s.count) == every and (f.ignore == -100) == default

    act = f"pass ignore_index={label}" if default else f"map {label} to {{f.ignore}}, the ignore_index of this call,"
    if every:
        what = f"every invalid target is {label}, often used for {meaning} elements: {act} if they are to be left out."
    else:
        what = f"{{targets}} {{are}} {label}: {act} if that marks ignored elements."
    evidence = f"{{n}} of {{s.count}} invalid targets {{are}} {label}, where ignore_index is {{f.ignore}}."
    fix = f"criterion.ignore_index = {label}" if default else f"target[target == {label}] = {{f.ignore}}"
    return _Rule("ignore-index-not-set", (part,), when, what, evidence, fix)


_MARKERS = ((-1, "unlabelled"), (-100, "padding"), (255, "void"))

_REMAP = (
    "to_class = lossguard.remap_labels(labels, ignore_index={f.ignore})  # labels: of the whole data set, once\n"
    "target = to_class(target)"
)
_NEAREST = 'target = torch.nn.functional.interpolate(mask[:, None].float(), size, mode="nearest")[:, 0].long()'

_LABELS: tuple[_Rule[_Labels], ...] = (
    _Rule(
        "no-outputs",
        ("above", "below", "-1", "-100", "255"),
        lambda f: f.classes == 0,
        "the model has 0 outputs along the class dimension (dimension 1 of the input).",
        "the input is {f.input_shape}.",
        "{f.wider}",
    ),
    _Rule(
        "labels-cast-from-nan",
        ("below",),
        lambda f: f.s.min in (-(2**63), -(2**31)) and all(v == f.s.min for v in f.s.values if v < -100),
        "labels of {s.min} are what NaN or infinity becomes when it is cast to an integer: look for missing labels.",
        "{n} of {s.seen} targets {are} below 0 and no marker; the large ones that are listed are all {s.min}.",
        "target = labels.nan_to_num(nan={f.ignore}).long()  # labels: before the cast",
    ),
    _Rule(
        "int32-read-as-int64",
        ("above", "below"),
        lambda f: f.are_pairs,
        "each invalid label is two valid ones side by side, as in int32 labels that were read as int64: read them as "
        "int32.",
        "{s.values[0]} is {s.values[0]:#018x}; both halves are in [0, {f.classes}), as are those of all listed.",
        "labels = numpy.fromfile(path, numpy.int32).astype(numpy.int64)",
    ),
    _Rule(
        "uninitialised-labels",
        ("above", "below"),
        lambda f: f.is_wild,
        "labels beyond 32 bits are no class ids: they look like uninitialised memory (a torch.empty that was not "
        "filled), or like hashes or the keys of a database.",
        "the invalid targets run from {s.min} to {s.max}.",
        "target = torch.full_like(target, -100)  # in place of torch.empty, before labels are filled in",
    ),
    _Rule(
        "black-and-white-mask",
        ("255",),
        lambda f: f.is_image and f.classes <= 2 and f.s.valid_max == 0 and f.parts["255"] == f.s.count,
        "the mask holds 0 and 255 only, as black-and-white image files do: 255 is the foreground, class 1.",
        "of {s.seen} targets {n} {are} 255 and the others 0.",
        "target = (target > 127).long()",
        alone=False,
    ),
    _Rule(
        "minus-one-and-one",
        ("-1",),
        lambda f: f.classes == 2 and f.s.valid_min == f.s.valid_max == 1 and f.s.min == f.s.max and f.s.seen >= 8,
        "the labels are -1 and 1, and never 0: map them to 0 and 1.",
        "of {s.seen} targets {n} {are} -1 and the others 1.",
        "target = (target + 1) // 2",
        alone=False,
    ),
    _Rule(
        "labels-start-at-minus-one",
        ("-1",),
        lambda f: f.s.min == f.s.max and f.s.valid_max == f.classes - 2 > 0 and f.s.seen >= 5 * f.classes,
        "the labels run from -1 to num_classes - 2, as where 1 was subtracted from ids that start at 0: add 1.",
        "of {s.seen} targets {n} {are} -1; the largest is {s.valid_max}.",
        "target = target + 1",
        alone=False,
    ),
    *(
        _marker(label, meaning, every, default)
        for label, meaning in _MARKERS
        for every in (True, False)
        for default in (True, False)
        if not (default and label == -100)  # which is ignored then
    ),
    _Rule(
        "one-output",
        ("above",),
        lambda f: f.only_classes and f.classes == 1,
        "the model has one output, and labels are 0 and 1: give it two, or use BCEWithLogitsLoss with this one.",
        "{n} of {s.seen} targets {are} 1; the input is {f.input_shape}.",
        "loss = lossguard.BCEWithLogitsLoss()(input.squeeze(1), target.to(input.dtype))",
    ),
    _Rule(
        "padding-token-in-labels",
        ("above",),
        lambda f: f.are_tokens and f.only_classes and f.parts["above"] > 1,
        "the one invalid label is {f.classes}, the first id past the vocabulary: it looks like a padding token that "
        "was added to the tokenizer: leave it out of the labels.",
        "{n} of {s.seen} targets {are} {f.classes}.",
        "target[target == {f.classes}] = {f.ignore}",
        alone=False,
    ),
    _Rule(
        "tokenizer-out-of-step",
        ("above",),
        lambda f: f.are_tokens and f.highest < 1.05 * f.classes,
        "labels end just past num_classes, as token ids do when tokens were added to the tokenizer and not to the "
        "model: resize its embeddings to {f.outputs} or more.",
        "{n} of {s.seen} targets {are} {f.classes} or more, the largest is {f.highest}.",
        "model.resize_token_embeddings(len(tokenizer))",
    ),
    _Rule(
        "one-output-too-few",
        ("above",),
        lambda f: f.only_classes and f.s.valid_min == 0,
        "the largest label is num_classes, and 0 occurs too: "
        "the model has one output too few (give it {f.outputs}), or these labels are wrong.",
        "{n} of {s.seen} targets {are} {f.classes}; {f.span}.",
        "{f.wider}",
    ),
    _Rule(
        "one-based-labels",
        ("above",),
        lambda f: f.only_classes and f.s.valid_min is not None and f.s.seen >= f.classes,
        "labels look 1-based (they run from {s.valid_min} to {f.classes}, none is 0): "
        "subtract 1, or give the model {f.outputs} outputs.",
        "{n} of {s.seen} targets {are} {f.classes}; {f.span}.",
        "target = target - 1",
    ),
    _Rule(
        "one-based-labels-or-one-output-too-few",
        ("above",),
        lambda f: f.only_classes,
        "labels look 1-based or the model has one output too few (the largest label is num_classes): "
        "subtract 1, or give the model {f.outputs} outputs.",
        "{n} of only {s.seen} targets {are} {f.classes}; {f.span}.",
        "target = target - 1  # if the least label of the whole data set is 1",
    ),
    _Rule(
        "labels-of-another-head",
        ("above",),
        lambda f: f.head > 0,
        "labels reach {f.highest}: they would fit the other call here, with {f.head} outputs; heads and labels may be "
        "swapped.",
        "{n} of {s.seen} targets {are} {f.classes} or more, and none is above {f.head} - 1.",
        "loss = sum(criterion(logits[task], labels[task]) for task in tasks)  # one name for head and labels",
    ),
    _Rule(
        "sparse-ids",
        ("above",),
        lambda f: f.numbering != "",
        "labels reach {f.highest} where the model has {f.classes} outputs, as {f.numbering} do: remap them to "
        "[0, {f.classes}).",
        "{n} of {s.seen} targets {are} {f.classes} or more; {f.span}.",
        _REMAP,
    ),
    _Rule(
        "interpolated-labels",
        ("above", "below"),
        lambda f: f.is_interpolated,
        "many different values between labels, as interpolation leaves at edges when a mask is resized or rotated: "
        "use NEAREST for masks (and no JPEG to store them).",
        "the invalid targets run from {s.min} to {s.max} and hold {f.levels}.",
        _NEAREST,
    ),
    _Rule(
        "interpolated-labels",
        ("above", "below"),
        lambda f: f.may_be_interpolated and f.target is None and f.ignore == 255 and f.highest > 2 * max(f.classes, 25),
        "values between the labels and 255, the ignore_index, as interpolation leaves at edges when a mask is resized "
        "or rotated: use NEAREST for masks.",
        "{n} of {s.seen} targets, which run from {s.seen_min} to {s.seen_max}, {are} invalid.",
        _NEAREST,
        alone=False,
    ),
    _Rule(
        "grey-levels",
        ("above",),
        lambda f: f.is_image and 2 * max(f.classes, 25) < f.highest <= 255,
        "the target looks like an image mask of grey levels up to {f.highest}, not of class ids: "
        "map each grey level to an id in [0, {f.classes}).",
        "{n} of {s.seen} targets {are} {f.classes} or more; the invalid ones hold {f.levels}.",
        _REMAP,
    ),
    _Rule(
        "labels-with-an-offset",
        ("above",),
        lambda f: f.s.count == f.s.seen >= 8 and f.highest < f.low + f.classes,
        "all labels are in {s.min}..{s.max}, none in [0, {f.classes}): they look like those of another head, or start "
        "at {s.min} and not at 0.",
        "{n} of {s.seen} targets {are} invalid, and no two are {f.classes} or more apart.",
        "target = target - {s.min}  # if they belong to this head",
    ),
    _Rule(
        "sparse-ids",
        ("above",),
        lambda f: f.highest > 10 * max(f.classes, 25),
        "labels reach {f.highest} where the model has {f.classes} outputs: they look like ids of another task, "
        "vocabulary or annotation file: remap them to [0, {f.classes}), or resize the output layer.",
        "{n} of {s.seen} targets {are} {f.classes} or more; the largest is {f.times:.0f} times num_classes.",
        _REMAP,
    ),
    _Rule(
        "sparse-ids",
        ("above",),
        lambda f: f.have_gaps,
        "labels reach {f.highest}, but with large gaps, and there are not more different ones than the model's "
        "{f.classes} outputs: remap them to [0, {f.classes}).",
        "the {s.seen} targets that count are few different ids, far apart.",
        _REMAP,
    ),
    _Rule(
        "labels-of-another-head",
        ("above",),
        lambda f: f.s.count == f.s.seen >= 8 and f.low >= f.classes,
        "all labels are in {s.min}..{s.max}, none in [0, {f.classes}): they look like those of another head.",
        "{n} of {s.seen} targets {are} {f.classes} or more.",
        "loss = sum(criterion(logits[task], labels[task]) for task in tasks)  # one name for head and labels",
    ),
    _Rule(
        "too-few-outputs",
        ("above",),
        lambda f: True,
        "the model has {f.classes} outputs but labels reach {f.highest}: give it {f.outputs}, "
        "or check that these labels belong to this head.",
        "{n} of {s.seen} targets {are} {f.classes} or more; {f.span}.",
        "{f.wider}",
    ),
    _Rule(
        "negative-labels",
        ("below",),
        lambda f: True,
        "negative labels: uninitialised memory, an overflow, or a marker that ignore_index should name.",
        "{n} of {s.seen} targets {are} below 0 and none of -1 and -100; the least is {s.min}.",
        "target[target < 0] = {f.ignore}  # if they mark elements to leave out",
    ),
)

_SOFT_TARGETS: tuple[_Rule[_Facts], ...] = (
    _Rule(
        "nan-in-target",
        ("NaN",),
        lambda f: True,
        "NaN in the target: look for a division by zero or a missing value in the data.",
        "{n} of {s.seen} elements of the target {are} NaN.",
        "print(target.isnan().nonzero())  # which samples",
    ),
    _Rule(
        "swapped-arguments",
        ("beyond",),
        lambda f: not f.classes and f.are_arguments_swapped,
        "input and target look swapped: the prediction comes first.",
        "the input holds 0 and 1 only, and the target runs from {f.low:g} to {f.high:g}.",
        "loss = criterion(target, input)  # by the names they have now",
    ),
    _Rule(
        "scale-255",
        ("beyond",),
        lambda f: f.low >= 0 and 100 < f.high <= 255,
        "the target reaches {f.high:g}, as images of scale 255 do: divide it by 255.",
        "the target runs from {f.low:g} to {f.high:g}.",
        "target = target / 255",
    ),
    _Rule(
        "one-based-labels",
        ("beyond",),
        lambda f: f.low == 1 and f.high == 2 and f.is_whole and f.s.seen >= 8,
        "the labels are 1 and 2, and never 0: subtract 1.",
        "{n} of {s.seen} targets {are} 2, and the others 1.",
        "target = target - 1",
    ),
    _Rule(
        "class-ids-as-probabilities",
        ("beyond",),
        lambda f: f.low >= 0 and f.is_bounded and f.is_whole and f.report.loss == "CrossEntropyLoss",
        "the target holds class ids up to {f.high:g}, not probabilities: use an int64 target, or one-hot encode it.",
        "the target is {f.report.dtypes[target]}, of the input's shape, and its invalid elements are whole numbers.",
        "target = target.select(1, 0).long()  # (N, ...), where the input is (N, C, ...)",
    ),
    _Rule(
        "class-ids-as-probabilities",
        ("beyond",),
        lambda f: f.low >= 0 and f.is_bounded and f.is_whole,
        "the target holds class ids up to {f.high:g}, not probabilities: use CrossEntropyLoss with int64 targets, "
        "or one-hot encode it.",
        "the target is {f.report.dtypes[target]}, and its invalid elements are whole numbers.",
        "loss = lossguard.CrossEntropyLoss()(logits, target.long())  # logits: (N, C, ...), C of {f.high:g} + 1",
    ),
    _Rule(
        "minus-one-and-one",
        ("beyond",),
        lambda f: f.low == -1 and f.high <= 1 and f.is_whole,
        "-1 in the target: labels in {{-1, 1}} become (target + 1) / 2; ignored elements get weight 0.",
        "{n} of {s.seen} elements of the target {are} -1, and none is below.",
        "target = (target + 1) / 2",
    ),
    _Rule(
        "interpolated-labels",
        ("beyond",),
        lambda f: f.is_image and f.low >= -0.25 and f.high <= 1.25,
        "the target is a little outside [0, 1], as bicubic interpolation leaves masks: clamp it, or use bilinear or "
        "NEAREST.",
        "the target is {f.report.shapes[target]}, from {f.low:g} to {f.high:g}.",
        "target = target.clamp(0, 1)",
    ),
    _Rule(
        "targets-are-not-probabilities",
        ("beyond",),
        lambda f: f.low < 0 and f.is_bounded,
        "negative targets: they look like logits, log-probabilities or normalised values, not probabilities.",
        "the target runs from {f.low:g} to {f.high:g}.",
        "target = torch.sigmoid(target)  # if they are logits",
    ),
)

_FIND_NAN = "print(lossguard.find_nonfinite(model, batch))  # where it begins\ntorch.autograd.set_detect_anomaly(True)"
_DIVERGED = (
    "the model diverged upstream of the loss "
    "(lower the learning rate, clip gradients; torch.autograd.set_detect_anomaly(True) finds the operation)."
)
_BATCH_OF_ONE: _Rule[Any] = _Rule(
    "batch-of-one",
    ("NaN",),
    lambda f: f.is_batch_of_one,
    "a batch of one sample, NaN throughout: a standard deviation over one sample is NaN. Leave out the last, "
    "incomplete batch, or use correction=0.",
    "the input is {f.input_shape}, and all of its {n} elements are NaN.",
    "loader = torch.utils.data.DataLoader(dataset, batch_size, shuffle=True, drop_last=True)",
    alone=False,
)

_PROBABILITIES: tuple[_Rule[_Facts], ...] = (
    _Rule(
        "logits-to-bce",
        ("beyond",),
        lambda f: f.s.min is not None and f.s.max is not None and (f.s.min < -0.01 or f.s.max > 1.01),
        "the input looks like logits, not probabilities: use BCEWithLogitsLoss, or apply torch.sigmoid first.",
        "{n} of {s.seen} elements of the input {are} outside [0, 1], from {s.min:g} to {s.max:g}.",
        "criterion = lossguard.BCEWithLogitsLoss()",
    ),
    _Rule(
        "rounded-probabilities",
        ("beyond",),
        lambda f: True,
        "probabilities just outside [0, 1], from rounding: clamp them with input.clamp(0, 1), "
        "or use BCEWithLogitsLoss on the logits.",
        "{n} of {s.seen} elements of the input {are} outside [0, 1], from {s.min:.9g} to {s.max:.9g}.",
        "input = input.clamp(0, 1)",
    ),
    _BATCH_OF_ONE,
    _Rule(
        "nan-upstream",
        ("NaN",),
        lambda f: f.every_nan,
        f"NaN in the input (every element): {_DIVERGED}",
        "all {n} elements of the input are NaN.",
        _FIND_NAN,
    ),
    _Rule(
        "nan-in-samples",
        ("NaN",),
        lambda f: True,
        "NaN in the input ({n} of {s.seen} elements): missing values or a division by zero in these samples, "
        "or " + _DIVERGED,
        "{n} of {s.seen} elements of the input {are} NaN, the first at {s.indices[0]}.",
        _FIND_NAN,
    ),
)

_NOT_FINITE: tuple[_Rule[_Infinities], ...] = (
    _Rule(
        "log-of-zero",
        ("-inf",),
        lambda f: f.report.loss == "NLLLoss" and f.parts["-inf"] == f.s.count,
        "log-probabilities of -inf: log of a probability of 0; use log_softmax, or CrossEntropyLoss on the logits.",
        "{n} of {s.seen} log-probabilities {are} -inf.",
        "input = torch.log_softmax(logits, 1)",
    ),
    _Rule(
        "float16-overflow",
        ("+inf",),
        lambda f: f.report.dtypes.get("input") == "float16",
        "float16 overflows above 65504: compute the logits in bfloat16 or float32.",
        "{n} of {s.seen} elements of the input, which is float16, {are} +inf.",
        "with torch.autocast(input.device.type, torch.bfloat16):\n    input = model(x)",
        alone=False,
    ),
    _Rule(
        "nan-in-samples",
        ("NaN",),
        lambda f: f.nan_samples > 0,
        "some samples are NaN throughout, and the others are not: look for missing values or a division by zero in "
        "their data.",
        "samples that are NaN in all elements: {f.nan_samples} of {f.input_shape[0]}; in some: none.",
        "print(input.isnan().flatten(1).all(1).nonzero())  # which samples",
    ),
    _BATCH_OF_ONE,
    _Rule(
        "nan-upstream",
        ("NaN", "+inf"),
        lambda f: True,
        _DIVERGED,
        "{n} of {s.seen} elements of the input {are} NaN or +inf, the first at {s.indices[0]}.",
        _FIND_NAN,
    ),
    _Rule(
        "all-classes-masked",
        ("-inf",),
        lambda f: f.report.loss == "CrossEntropyLoss" and f.parts["-inf"] == f.s.count,
        "every class of a row is masked with -inf: leave one, or set the row's target to ignore_index.",
        "{n} of {s.seen} logits {are} -inf in rows without another value.",
        "target[input.isneginf().all(1)] = criterion.ignore_index",
    ),
)

_INDICES: tuple[_Rule[_Indices], ...] = (
    _Rule(
        "labels-as-tokens",
        ("below",),
        lambda f: f.embeds and f.s.min in (-1, -100),
        "{s.min} among the ids: it marks labels that the loss ignores, and is no token: the model wants the tokens.",
        "{n} of {s.seen} ids {are} negative, the least is {s.min}.",
        "tokens = tokens.masked_fill(tokens < 0, pad_token_id)",
    ),
    _Rule(
        "vocabulary-out-of-step",
        ("above",),
        lambda f: f.embeds and f.size >= 1000 and f.high < 1.05 * f.size,
        "ids reach {s.max} where the embedding has {f.size} rows: the tokenizer has tokens that the model lacks, as "
        "after adding a special one: resize the embedding.",
        "{n} of {s.seen} ids {are} {f.size} or more, all within 5 % above the last row.",
        "model.resize_token_embeddings(len(tokenizer))",
    ),
    _Rule(
        "one-based-indices",
        ("above",),
        lambda f: f.s.min == f.s.max == f.size and f.s.valid_min == 1 and f.s.seen >= f.size,
        "indices look 1-based (they run from 1 to {f.size}, none is 0): subtract 1.",
        "{n} of {s.seen} indices {are} {f.size}, the rest run from {s.valid_min} to {s.valid_max}.",
        "index = index - 1",
    ),
    _Rule(
        "embedding-too-small",
        ("above",),
        lambda f: f.embeds,
        "ids reach {s.max} where the embedding has {f.size} rows: give it {f.rows}, or check that these ids are of "
        "this vocabulary.",
        "{n} of {s.seen} ids {are} {f.size} or more.",
        "embedding = torch.nn.Embedding({f.rows}, embedding.embedding_dim)",
    ),
    _Rule(
        "index-of-another-tensor",
        ("above",),
        lambda f: True,
        "indices reach {s.max} where there are {f.size}: they were made for another tensor, or for another dimension "
        "of it.",
        "{n} of {s.seen} indices {are} {f.size} or more.",
        "assert index.max() < {f.size}, index.max()  # where the indices are made",
    ),
    _Rule(
        "negative-index",
        ("below",),
        lambda f: not f.report.wraps,
        "negative indices count from the end in x[i], not in {f.operation}: add the size, or leave them out if they "
        "mark something.",
        "{n} of {s.seen} indices {are} negative, the least is {s.min}.",
        "index = torch.where(index < 0, index + {f.size}, index)",
    ),
)

# Of the input, whatever else was wrong: these losses do not check it, so that only the batch tells.
_BESIDES: tuple[_Rule[_Facts], ...] = (
    _Rule(
        "softmax-twice",
        (),
        lambda f: f.report.loss == "CrossEntropyLoss" and f.are_probabilities,
        "besides, the input looks like probabilities: CrossEntropyLoss wants logits and applies softmax itself; leave "
        "the model's out.",
        "every row of the input is in [0, 1] and sums to 1.",
        "loss = criterion(logits, target)  # logits: before the softmax",
    ),
    _Rule(
        "probabilities-to-nll",
        (),
        lambda f: f.report.loss == "NLLLoss" and f.are_probabilities,
        "besides, the input looks like probabilities: NLLLoss wants their logarithms, from log_softmax.",
        "every row of the input is in [0, 1] and sums to 1.",
        "input = torch.log_softmax(logits, 1)  # logits: before the softmax",
    ),
    _Rule(
        "logits-to-nll",
        (),
        lambda f: f.report.loss == "NLLLoss" and f.positive > 0 and not f.are_probabilities,
        "besides, the input looks like logits: NLLLoss wants log-probabilities, which are never above 0; use "
        "log_softmax, or CrossEntropyLoss.",
        "{f.positive} of {f.elements} elements of the input are above 0.",
        "input = torch.log_softmax(input, 1)",
    ),
    _Rule(
        "sigmoid-twice",
        (),
        lambda f: f.report.loss == "BCEWithLogitsLoss" and f.are_in_unit_interval and not f.are_arguments_swapped,
        "besides, the input looks like probabilities: BCEWithLogitsLoss wants logits and applies sigmoid itself; leave "
        "the model's out.",
        "all {f.elements} elements of the input are in [0, 1].",
        "loss = criterion(logits, target)  # logits: before the sigmoid",
    ),
)
