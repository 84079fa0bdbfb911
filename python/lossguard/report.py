"""What is wrong with a call, as data and as text."""

from __future__ import annotations

import dataclasses
import os
import struct
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallSite", "Report", "Section"]

MAX_TEXT = 4000  # characters, exclusive
_MAX_SOURCE = 160
_MAX_PATH = 200


def as_printed(self: Any, printer: Any, cycle: bool) -> None:
    """IPython's `_repr_pretty_`: a notebook shows it as ``print`` does. In the class itself, or its repr is shown."""
    printer.text(str(self))


@dataclass(frozen=True)
class CallSite:
    """The line of the caller's code that called the loss."""

    file: str
    line: int
    function: str
    source: str = ""

    def short(self) -> str:
        return f"{shorten(_relative(self.file), _MAX_PATH, keep='end')}:{self.line}"

    def __str__(self) -> str:
        where = f"{self.short()} in {self.function}"
        return f"{where}: {shorten(self.source, _MAX_SOURCE)}" if self.source else where


@dataclass(frozen=True)
class Section:
    """What is wrong with one tensor.

    ``indices`` and ``values`` hold the first 16 offenders in index order; the counts are exact.
    """

    tensor: str  #: "target", or "input"
    kind: str  #: "class_index", "unit_interval" or "finite": the check that failed
    count: int  #: offenders
    seen: int  #: elements that count (ignored ones do not)
    indices: list[tuple[int, ...]]
    values: list[int | float]
    counts: dict[str, int]  #: offenders by kind: "below 0", ">= num_classes", "above 1", "NaN", "+inf", "-inf"
    labels: dict[str, int]  #: offenders that are well-known labels: "-1", "-100", "255", "num_classes"
    min: int | float | None  #: smallest offender that is not NaN
    max: int | float | None  #: largest
    seen_min: int | float | None  #: smallest element that counts, valid or not, NaN left out
    seen_max: int | float | None
    valid_min: int | float | None  #: smallest element that counts and is valid
    valid_max: int | float | None


@dataclass(frozen=True)
class Report:
    """What is wrong with one call of a loss. Picklable; :meth:`to_dict` is ready for JSON."""

    loss: str  #: "CrossEntropyLoss", "NLLLoss", "BCELoss" or "BCEWithLogitsLoss"; or an operation: "embedding", ...
    sections: list[Section]  #: one per faulty tensor, the one that decides the exception's type first
    shapes: dict[str, tuple[int, ...]]  #: of "input" and "target"; of an operation "input" and "index"
    dtypes: dict[str, str]
    device: str
    num_classes: int | None = None  #: or how many an index chooses from
    ignore_index: int | None = None
    rank: int | None = None  #: in torch.distributed, if initialised
    call_site: CallSite | None = None
    vmap: tuple[int, ...] = ()  #: the sample of each `torch.func.vmap` around the call; the rest is of that sample
    hints: list[str] = field(default_factory=list)  #: likely causes, the likeliest first
    wraps: bool = False  #: of an operation in which a negative index counts from the end
    captured: bool = False  #: of a replay of a CUDA graph: the call site is where it was captured

    # The leading section, which most callers want.

    @property
    def kind(self) -> str:
        return self.sections[0].kind

    @property
    def tensor(self) -> str:
        return self.sections[0].tensor

    @property
    def count(self) -> int:
        return self.sections[0].count

    @property
    def indices(self) -> list[tuple[int, ...]]:
        return self.sections[0].indices

    @property
    def values(self) -> list[int | float]:
        return self.sections[0].values

    @property
    def counts(self) -> dict[str, int]:
        return self.sections[0].counts

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings. NaN and infinite values become strings."""
        whole = _plain(dataclasses.asdict(self))
        leading = {
            name: whole["sections"][0][name] for name in ("kind", "tensor", "count", "indices", "values", "counts")
        }
        return {**leading, **whole}

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        lines: list[str] = []
        for number, section in enumerate(self.sections):
            lines += self._section_lines(section, leading=number == 0)
        lines.append("  " + self._tensors())
        if self.vmap:
            lines.append(f"  inside vmap, in its sample {', '.join(map(str, self.vmap))}")
        if self.call_site is not None:
            lines.append(f"  {self._called()}")
        lines += [f"  {'likely cause' if number == 0 else 'or'}: {hint}" for number, hint in enumerate(self.hints)]
        return shorten("\n".join(lines), MAX_TEXT - 1)

    def _called(self) -> str:
        return f"{'captured' if self.captured else 'called'} at {self.call_site}"

    def headline(self) -> str:
        """The first line, the first offender and the call site, on two lines."""
        section = self.sections[0]
        first = f"the first at {_index(section.indices[0])}"
        where = f"{first}; rank {self.rank}" if self.rank is not None else first
        line = f"{self._section_lines(section, leading=True)[0]} {where}"
        return line if self.call_site is None else f"{line}\n  {self._called()}"

    def _section_lines(self, section: Section, leading: bool) -> list[str]:
        dtype = self.dtypes[section.tensor]
        first = _number(section.values[0], dtype)
        many = f"{section.count} of {section.seen}"
        verb = "is" if section.count == 1 else "are"
        if section.kind == "class_index":
            native = f"Target {first} is out of bounds."
            bounds = f"[0, {self.num_classes})"
            said = f"{many} targets {verb} outside {bounds}."
        elif section.kind == "index":
            native = f"index {first} is out of bounds."
            said = f"{many} indices {verb} outside [{self._least_index()}, {self.num_classes})."
        elif section.kind == "unit_interval":
            native = f"all elements of {section.tensor} should be between 0 and 1."
            said = f"{many} elements of {section.tensor} {verb} outside [0, 1]."
        else:
            name = "log-probabilities" if self.loss == "NLLLoss" else "logits"
            native = f"{name} should be finite."
            said = f"{many} elements of {section.tensor} {verb} not finite."
        lines = [f"{native} {self.loss}: {said}" if leading else f"  also: {said}"]
        rows = [(_index(index), _number(value, dtype)) for index, value in zip(section.indices, section.values)]
        width = max(8, *(len(index) for index, _ in rows))
        lines.append(f"    {'index':<{width}} value")
        lines += [f"    {index:<{width}} {value}" for index, value in rows]
        if section.count > len(rows):
            lines.append(f"    ... and {section.count - len(rows)} more")
        counts = ", ".join(f"{kind}: {n}" for kind, n in _counts(section))
        lines.append(f"  counts: {counts}     valid: {self._valid(section)}")
        if section.min != section.max:
            lines.append(
                f"  smallest {_number(section.min, dtype)}, largest {_number(section.max, dtype)} of the invalid values"
            )
        return lines

    def _least_index(self) -> int:
        return -(self.num_classes or 0) if self.wraps else 0

    def _valid(self, section: Section) -> str:
        if section.kind == "finite":
            return "finite, or -inf as a mask" if self.loss == "CrossEntropyLoss" else "finite"
        if section.kind == "unit_interval":
            return "0..1"
        if section.kind == "index":
            return f"{self._least_index()}..{(self.num_classes or 0) - 1}"
        span = f"0..{self.num_classes - 1}" if self.num_classes else "none, there are 0 classes"
        return f"{span}, ignore_index: {self.ignore_index}"

    def _tensors(self) -> str:
        name = {"CrossEntropyLoss": "logits", "BCEWithLogitsLoss": "logits", "NLLLoss": "log-probabilities"}.get(
            self.loss, "input"
        )
        shapes, dtypes = self.shapes, self.dtypes
        if "index" in shapes:
            text = f"input {_index(shapes['input'])}, index {_index(shapes['index'])} {self.device}"
            return text if self.rank is None else f"{text}, rank {self.rank}"
        text = f"{name} {_index(shapes['input'])} {dtypes['input']} {self.device}"
        text += f", target {_index(shapes['target'])} {dtypes['target']}"
        return text if self.rank is None else f"{text}, rank {self.rank}"


def _counts(section: Section) -> list[tuple[str, int]]:
    """Counts by kind, and by well-known label; these alone where they account for every offender."""
    labels = [(f"== {label}", n) for label, n in section.labels.items()]
    if sum(section.labels.values()) == section.count:
        return labels
    return [*section.counts.items(), *labels]


def _index(index: tuple[int, ...]) -> str:
    return shorten(str(tuple(index)), 60)


def _number(value: int | float | None, dtype: str) -> str:
    """The shortest text that names this value and no other of its dtype."""
    if isinstance(value, float) and value == value and abs(value) != float("inf"):
        code = {"float32": "f", "float16": "e"}.get(dtype)
        if code is not None:
            exact = struct.pack(code, value)
            for digits in range(1, 10):
                rounded = float(f"{value:.{digits}g}")
                try:
                    if struct.pack(code, rounded) == exact:
                        return repr(rounded)
                except OverflowError:  # rounded up beyond the dtype's largest number
                    pass
    return {"nan": "nan", "inf": "inf", "-inf": "-inf"}.get(str(value), str(value))


def _relative(path: str) -> str:
    try:
        relative = os.path.relpath(path)
    except (ValueError, OSError):  # another drive; the working directory is gone
        return path
    return path if path.startswith("<") or relative.startswith("..") else relative


def shorten(text: str, limit: int, keep: str = "start") -> str:
    if len(text) <= limit:
        return text
    return "..." + text[3 - limit :] if keep == "end" else text[: limit - 3] + "..."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value
