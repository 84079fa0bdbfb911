"""From the counts of a tally to an Audit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal, Optional

import torch
from torch import Tensor

from . import _audit_advice
from ._audit_count import FIRST, VOID, Classes, Places, Tally, Units
from ._audit_read import Source
from ._audit_report import LISTED, Audit, Violations, plural
from .report import Section

Kind = Literal["classes", "probabilities", "binary"]

_VOID_FROM = 200  # 255 is no class where the next largest label is below this
_SUMMING = 0.9  # share of rows that sum to 1 from which on they are taken for class probabilities


def conclude(
    source: Source,
    tally: Tally,
    num_classes: Optional[int],
    ignore_index: Optional[int],
    kind: Optional[Kind],
    limited: bool,
) -> Audit:
    kind = kind or _kind_of(tally, num_classes)
    if kind == "classes":
        found, section = conclude_classes(tally, num_classes)
    else:
        found, section = conclude_units(tally, kind, num_classes)
    batches = source.batches
    result = Audit(
        source=source.name,
        unit=source.unit,
        kind=kind,
        ignore_index=ignore_index,
        samples=tally.samples,
        labels=tally.labels,
        shape=next(iter(tally.shapes)) if len(tally.shapes) == 1 else None,
        dtypes=tally.dtypes,
        fully_ignored=tally.fully_ignored,
        fully_ignored_samples=tally.fully_ignored_samples,
        batches=batches.count if batches else None,
        batch_size=batches.first if batches else None,
        last_batch=batches.last if batches and not limited else None,
        limited=limited,
        _dataset=source.dataset,
        _read=source.ids,
        **found,
    )
    return dataclasses.replace(result, suggestions=_audit_advice.suggestions(result, source.as_is, section))


def _kind_of(tally: Tally, num_classes: Optional[int]) -> Kind:
    classes, units = tally.classes, tally.units
    assert classes is not None and units is not None
    if not units.elements or units.elements < tally.labels:  # some are integers
        return "classes"
    size = _class_size(units)
    if size is None or size != num_classes:
        if num_classes not in (None, 1):
            return "classes"
        slack = 1e-6
        low, high = units.seen.low, units.seen.high
        beyond = low is not None and high is not None and (low < -slack or high > 1 + slack)
        if beyond and not (+classes.kinds).keys() & {"not whole", "+inf", "-inf"}:
            return "classes"
    if size is None or not units.rows:
        return "binary"
    summing = 1 - units.row_sums.count / units.rows
    # Rows of zeros and ones that do not all sum to 1 have several labels each, or none.
    return "probabilities" if summing >= (1 if units.hard == units.elements else _SUMMING) else "binary"


def _class_size(units: Units) -> Optional[int]:
    return next(iter(units.class_sizes)) if len(units.class_sizes) == 1 else None


def conclude_classes(tally: Tally, told: Optional[int]) -> tuple[dict[str, Any], Optional[Section]]:
    """What an Audit says of class indices, and what a loss would report of all of them at once, if something.

    ``told`` is num_classes, if it was given.
    """
    c = tally.classes
    assert c is not None
    values, counts = c.values.table
    fractions = c.fractions.table
    counted = torch.ones_like(values, dtype=torch.bool) if c.ignore_index is None else values != c.ignore_index
    num_classes, void = (told, False) if told is not None else _infer(values[counted])
    if told is None and c.values.gave_up and c.whole.high is not None and c.whole.high >= 0:
        num_classes, void = int(c.whole.high) + 1, False
    places = c.outside_or_void if void and c.outside_or_void is not None else c.outside
    # num_classes may be 2^63, if the largest label is the largest int64.
    valid = counted & (values >= 0) & (values <= num_classes - 1) if num_classes else torch.zeros_like(counted)
    kinds = +c.kinds
    if void:
        kinds[">= num_classes"] = int(counts[values == VOID].sum())
    outside = Violations(
        places.count,
        places.samples,
        places.first_samples,
        places.first,
        dict(kinds),
        _most_frequent((values[counted & ~valid], counts[counted & ~valid]), fractions),
    )
    seen = dict(zip(values[valid].tolist(), counts[valid].tolist()))
    unseen = 0
    if num_classes and not c.values.gave_up:
        ignorable = c.ignore_index is not None and 0 <= c.ignore_index < num_classes
        unseen = num_classes - len(seen) - ignorable
    absent = (i for i in itertools.count() if i not in seen and i != c.ignore_index)
    found = {
        "num_classes": num_classes,
        "inferred": told is None and num_classes is not None,
        "min": c.seen.low,
        "max": c.seen.high,
        "counts": seen,
        "distinct": int(counted.sum()) + len(fractions[0]),
        "unseen": unseen,
        "unseen_classes": list(itertools.islice(absent, min(unseen, LISTED))),
        "ignored": c.ignored,
        "outside": outside,
        "row_sums": Violations(),
        "rows": 0,
        "problems": list(_problems_of_classes(tally, c, outside, num_classes)),
        "_values": values,
        "_counts": counts,
        "_gave_up": c.values.gave_up,
        "_bad": _positions(places),
    }
    section = _section_of_classes(tally, c, found, values[counted & ~valid], counts[counted & ~valid])
    return found, section


def _infer(values: Tensor) -> tuple[Optional[int], bool]:
    """The number of classes, and whether 255 is not one of them: it is far from all the others."""
    values = values[values >= 0]
    if not len(values):
        return None, False
    if len(values) > 1 and int(values[-1]) == VOID and int(values[-2]) < _VOID_FROM:
        return int(values[-2]) + 1, True
    return int(values[-1]) + 1, False


def _problems_of_classes(tally: Tally, c: Classes, outside: Violations, num_classes: Optional[int]) -> Iterator[str]:
    if not tally.labels:
        yield "there are no labels."
    elif c.ignored == tally.labels:
        yield f"every label is ignored: all {tally.labels} are {c.ignore_index}."
    if outside.count:
        kinds = outside.kinds.keys() - {"below 0", ">= num_classes"}
        bounds = f"[0, {num_classes})" if num_classes else "[0, num_classes)"
        verb = "is" if outside.count == 1 else "are"
        no = "no class index" if outside.count == 1 else "no class indices"
        where = f"{no} in {bounds}" if kinds else f"outside {bounds}"
        yield f"{outside.count} of {plural(tally.labels - c.ignored, 'label')} {verb} {where}."
    if c.floats:
        floats = " and ".join(name for name in tally.dtypes if "float" in name)
        share = "the labels are" if c.floats == tally.labels else f"{c.floats} of {tally.labels} labels are"
        yield f"{share} {floats}: class indices have an integer dtype."


def _section_of_classes(
    tally: Tally, c: Classes, found: dict[str, Any], values: Tensor, counts: Tensor
) -> Optional[Section]:
    """Of the whole numbers that are outside, as a loss would report them."""
    kinds = {kind: n for kind, n in found["outside"].kinds.items() if kind in ("below 0", ">= num_classes")}
    if not kinds:
        return None
    of = dict(zip(values.tolist(), counts.tolist()))
    known = {"-1": of.get(-1), "-100": of.get(-100), "255": of.get(255), "num_classes": of.get(found["num_classes"])}
    first = [o for o in found["outside"].first if float(o.value).is_integer()]
    return Section(
        tensor="target",
        kind="class_index",
        count=sum(kinds.values()),
        seen=tally.labels - c.ignored,
        indices=[o.index for o in first],
        values=[int(o.value) for o in first],
        counts=kinds,
        labels={name: n for name, n in known.items() if n},
        min=int(values[0]) if len(values) else c.strays.low,  # too many to keep
        max=int(values[-1]) if len(values) else c.strays.high,
        seen_min=c.whole.low,
        seen_max=c.whole.high,
        valid_min=min(found["counts"], default=None),
        valid_max=max(found["counts"], default=None),
    )


def conclude_units(tally: Tally, kind: Kind, told: Optional[int]) -> tuple[dict[str, Any], Optional[Section]]:
    """The same of targets in [0, 1]."""
    u = tally.units
    assert u is not None
    size = _class_size(u)
    num_classes = size if size is not None else told
    kinds = +u.kinds
    outside = Violations(
        u.outside.count,
        u.outside.samples,
        u.outside.first_samples,
        u.outside.first,
        dict(kinds),
        _most_frequent(u.values.table),
    )
    rows = u.row_sums
    zeros = {"all 0": u.rows_of_zeros} if u.rows_of_zeros else {}
    mass = u.mass.tolist() if u.mass is not None else []
    if u.hard == u.elements:
        mass = [int(m) for m in mass]
    seen = {i: m for i, m in enumerate(mass) if m > 0}
    unseen = [i for i in range(num_classes or 0) if i not in seen] if len(mass) == num_classes else []
    found = {
        "num_classes": num_classes,
        "inferred": told is None and num_classes is not None,
        "min": u.seen.low,
        "max": u.seen.high,
        "counts": seen,
        "distinct": 0,
        "unseen": len(unseen),
        "unseen_classes": unseen[:LISTED],
        "ignored": 0,
        "outside": outside,
        "row_sums": Violations(rows.count, rows.samples, rows.first_samples, rows.first, zeros),
        "rows": u.rows,
        "problems": list(_problems_of_units(tally, u, kind, told)),
        "_bad": _positions(u.outside, *([rows] if kind == "probabilities" else [])),
        "_valid": u.valid_of_class,
    }
    section = Section(
        tensor="target",
        kind="unit_interval",
        count=outside.count,
        seen=u.elements,
        indices=[o.index for o in outside.first],
        values=[o.value for o in outside.first],
        counts=dict(kinds),
        labels={},
        min=u.beyond.low,
        max=u.beyond.high,
        seen_min=u.seen.low,
        seen_max=u.seen.high,
        valid_min=u.valid.low,
        valid_max=u.valid.high,
    )
    return found, section if outside.count else None


def _problems_of_units(tally: Tally, u: Units, kind: Kind, told: Optional[int]) -> Iterator[str]:
    if not tally.labels:
        yield "there are no targets."
    if u.outside.count:
        verb = "is" if u.outside.count == 1 else "are"
        yield f"{u.outside.count} of {plural(u.elements, 'target')} {verb} outside [0, 1]."
    if kind == "binary" or not tally.labels:
        return
    if u.row_sums.count:
        verb = "does" if u.row_sums.count == 1 else "do"
        yield f"{u.row_sums.count} of {plural(u.rows, 'row')} {verb} not sum to 1."
    if u.class_sizes == {None}:
        yield "the targets have no class dimension, which class probabilities have at position 1."
    elif len(u.class_sizes) > 1:
        sizes = ", ".join(sorted(str(size) for size in u.class_sizes))
        yield f"the class dimension is not the same in all samples: {sizes}."
    elif told is not None and u.class_sizes != {told}:
        yield f"the class dimension is {_class_size(u)}, and num_classes {told}."


def _most_frequent(*tables: tuple[Tensor, Tensor]) -> dict[int | float, int]:
    pairs: list[tuple[int | float, int]] = []
    for values, counts in tables:
        best = counts.argsort(descending=True, stable=True)[:FIRST]
        pairs += zip(values[best].tolist(), counts[best].tolist())
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:FIRST])


def _positions(*places: Places) -> Optional[Tensor]:
    """Of bad samples, in reading order."""
    kept = [position for each in places if each.positions is not None for position in each.positions]
    if any(each.positions is None for each in places):
        return None
    return torch.cat(kept).unique() if kept else torch.empty(0, dtype=torch.int64)
