"""The audit against plain Python's counting, from every source; what it advises; the command; the plot."""

from __future__ import annotations

import argparse
import collections
import csv
import io
import itertools
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import references as ref
import torch
from items import Items
from lossguard import _audit_command, _audit_count, _audit_read
from lossguard._audit_report import ranges
from lossguard.audit import Audit, audit
from lossguard.datasets import remap_labels
from lossguard.testing import assert_labels_valid
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Subset, TensorDataset

nan, inf = math.nan, math.inf
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.bool]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def flat(nested: Any) -> list:
    return [v for each in nested for v in flat(each)] if isinstance(nested, list) else [nested]


def indices_of(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(np.ndindex(*shape))


def check_classes(found: Audit, labels: torch.Tensor, classes: int | None, ignore: int | None, ids=None) -> None:
    """Everything that is counted, from lists of Python numbers."""
    samples = [flat(sample) for sample in (labels.int() if labels.dtype == torch.bool else labels).tolist()]
    shape = tuple(labels.shape[1:])
    places = indices_of(shape)
    ids = list(range(len(samples))) if ids is None else ids
    every = [v for sample in samples for v in sample]
    counted = [v for v in every if v != ignore]
    assert found.kind == "classes" and found.samples == len(samples) and found.labels == len(every)
    assert found.ignored == len(every) - len(counted)
    assert found.dtypes == ({str(labels.dtype).removeprefix("torch."): len(every)} if len(samples) else {})
    numbers = [v for v in counted if v == v]
    assert (found.min, found.max) == ((min(numbers), max(numbers)) if numbers else (None, None))
    whole = [v for v in numbers if abs(v) != inf and v == int(v)]
    valid_below = classes
    if classes is None:
        positive = sorted({v for v in whole if v >= 0})
        valid_below = int(positive[-1]) + 1 if positive else None
        if len(positive) > 1 and positive[-1] == 255 and positive[-2] < 200:
            valid_below = int(positive[-2]) + 1
    assert found.num_classes == valid_below

    def is_valid(v: float) -> bool:
        return v == v and abs(v) != inf and v == int(v) and 0 <= v < (valid_below or 0)

    counts = collections.Counter(int(v) for v in counted if is_valid(v))
    assert found.counts == dict(sorted(counts.items())) and list(found.counts) == sorted(counts)
    unseen = (c for c in range(valid_below or 0) if c not in counts and c != ignore)
    assert found.unseen_classes == list(itertools.islice(unseen, 100))
    assert found.unseen == (valid_below or 0) - len(counts) - (ignore is not None and 0 <= ignore < (valid_below or 0))
    bad = [
        (ids[i], place, v)
        for i, sample in enumerate(samples)
        for place, v in zip(places, sample)
        if v != ignore and not is_valid(v)
    ]
    assert found.outside.count == len(bad)
    bad_samples = list(dict.fromkeys(sample for sample, _, _ in bad))
    assert found.outside.samples == len(bad_samples) and found.outside.first_samples == bad_samples[:16]
    assert repr([(o.sample, o.index, o.value) for o in found.outside.first]) == repr(bad[:16])
    kinds = collections.Counter(
        "NaN" if v != v
        else "+inf" if v == inf
        else "-inf" if v == -inf
        else "not whole" if v != int(v)
        else "below 0" if v < 0
        else ">= num_classes"
        for _, _, v in bad
    )  # fmt: skip
    assert found.outside.kinds == dict(kinds)
    by_value = collections.Counter(v for _, _, v in bad if v == v and abs(v) != inf)
    assert found.outside.values == dict(sorted(by_value.items(), key=lambda pair: (-pair[1], pair[0]))[:16])
    nothing = [i for i, sample in zip(ids, samples) if all(v == ignore for v in sample)]
    assert found.fully_ignored == len(nothing) and found.fully_ignored_samples == nothing[:16]
    assert found.shape == (shape if samples else None)
    assert found.ok == (bool(counted) and not bad and not labels.is_floating_point())
    json.dumps(found.to_dict(), allow_nan=False)
    assert str(found).isascii() and str(pickle.loads(pickle.dumps(found))) == str(found)


def some_labels(dtype: torch.dtype, shape: tuple[int, ...], classes: int, g: torch.Generator) -> torch.Tensor:
    """Valid ones, and a few of everything that the dtype has room for."""
    labels = torch.randint(classes, shape, generator=g).double()
    strange = [-1, -100, -128, 255, classes, classes + 1, 127, 300, 40000, 2**31, 2**40, -(2**50)]
    if dtype.is_floating_point:
        strange = [*strange[:8], 0.5, 2.5, nan, inf, -inf]
        if dtype == torch.bfloat16:  # 300 and 40000 are not among its numbers
            strange.remove(300)
    else:
        low, high = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        labels.clamp_(max=high)
        strange = [v for v in strange if low <= v <= high] or [0]
    chosen = torch.tensor(strange, dtype=torch.float64)[torch.randint(len(strange), shape, generator=g)]
    return torch.where(torch.rand(shape, generator=g) < 0.1, chosen, labels).to(dtype)


@pytest.mark.parametrize("ignore", [-100, 255, -1, 2, None])
@pytest.mark.parametrize("classes", [None, 1, 5, 256, 1000])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_counts(dtype, classes, ignore):
    g = generator(hash((str(dtype), classes, ignore)) % 1000)
    for shape in ((0,), (1,), (300,), (40, 5), (7, 3, 4), (3, 0)):
        labels = some_labels(dtype, shape, classes or 7, g)
        check_classes(audit(labels, classes, ignore, kind="classes"), labels, classes, ignore)


@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 14])
def test_pieces_and_layouts(monkeypatch, piece, layout):
    """Samples smaller and larger than what is looked at at once."""
    monkeypatch.setattr(_audit_count, "PIECE", piece)
    monkeypatch.setattr(_audit_read, "PIECE", piece)
    for dtype in (torch.int64, torch.uint8, torch.float32):
        labels = some_labels(dtype, (6, 5, 4), 5, generator(piece))
        labels[2] = labels[4] = -100 if dtype != torch.uint8 else 200
        ignore = int(labels[2, 0, 0])
        labels = ref.lay_out(labels, layout)
        check_classes(audit(labels, 5, ignore, kind="classes"), labels, 5, ignore)
        check_classes(audit(labels, None, ignore, kind="classes"), labels, None, ignore)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32], ids=str)
def test_large_tensors(dtype):
    g = generator()
    labels = torch.randint(100, (3_000_001,), generator=g).to(dtype)
    places = torch.randperm(len(labels), generator=g)[:1000].sort().values
    labels[places] = 100 + (torch.arange(1000) % 150).to(dtype)
    found = audit(labels, 100, kind="classes")
    good = np.delete(labels.numpy().astype(np.int64), places.numpy())
    assert list(found.counts.values()) == np.bincount(good, minlength=100).tolist()
    assert found.outside.count == found.outside.samples == 1000
    assert [o.sample for o in found.outside.first] == places[:16].tolist()
    one = audit(labels[None], 100, kind="classes")  # one sample
    assert one.counts == found.counts and (one.outside.count, one.outside.samples) == (1000, 1)
    assert [o.index for o in one.outside.first] == [(p,) for p in places[:16].tolist()]


@pytest.mark.parametrize("classes", [10, None])
def test_wild_labels(monkeypatch, classes):
    """As in memory that nobody wrote to: counts stay exact, and what is kept stays bounded."""
    monkeypatch.setattr(_audit_count, "_MOST_IDS", 5000)
    monkeypatch.setattr(_audit_count, "_MOST_STRAYS", 5000)
    g = generator()
    labels = torch.randint(-(2**63), 2**63 - 1, (200_000,), generator=g)
    labels[1::4] = torch.randint(10, (50_000,), generator=g)
    labels[2::8] = -100
    labels[0], labels[100_001] = 2**63 - 1, -(2**63)
    found = audit(labels, classes)
    array = labels.numpy()
    counted = array[array != -100]
    valid = (counted >= 0) & (counted < 10)
    assert {c: found.counts[c] for c in range(10)} == dict(enumerate(np.bincount(counted[valid]).tolist()))
    assert (found.min, found.max, found.ignored) == (-(2**63), 2**63 - 1, int((array == -100).sum()))
    below, above = int((counted < 0).sum()), int((counted >= 10).sum())
    assert found.outside.kinds == ({"below 0": below, ">= num_classes": above} if classes else {"below 0": below})
    assert found.outside.count == sum(found.outside.kinds.values()) and not found.ok
    assert len(found._values) <= 5000 + 256 and found.outside.values == {}
    if classes is None:
        assert found.num_classes == 2**63 and found.unseen == 0
        with pytest.raises(ValueError, match="too many distinct labels"):
            remap_labels(found)
    else:
        assert "uninitialised memory" in str(found)
    assert "they look like hashes, keys of a database" in str(audit(torch.arange(10_000) * 2**13))


def test_many_classes():
    labels = torch.randint(200_000, (300_000,), generator=generator())
    found = audit(labels, 200_000)
    assert found.counts == dict(sorted(collections.Counter(labels.tolist()).items()))
    assert found.unseen == 200_000 - len(found.counts) and len(found.unseen_classes) == 100
    assert len(str(found)) < 4000


def test_distinct_values_are_merged_again_and_again(monkeypatch):
    monkeypatch.setattr(_audit_count, "_PENDING", 3)
    labels = torch.randint(0, 3000, (100_000,), generator=generator()) * 7919
    found = audit(labels)
    assert found.counts == dict(sorted(collections.Counter(labels.tolist()).items()))


def test_nothing_to_read():
    for nothing in ([], torch.empty(0, dtype=torch.int64), np.zeros((0, 3)), TensorDataset(torch.empty(0))):
        found = audit(nothing, 10)
        assert not found.ok and found.problems[0].startswith("there are no ") and found.samples == 0
        json.dumps(found.to_dict())
    assert audit(torch.full((5,), -100), 10).problems == ["every label is ignored: all 5 are -100."]


@pytest.mark.parametrize("one", [3, [3], torch.tensor(3), np.int64(3), np.array([3])], ids=repr)
def test_one_label(one):
    if isinstance(one, int):
        with pytest.raises(TypeError, match="no labels in 3"):
            audit(one)
        return
    found = audit(one, 4)
    assert found.ok and (found.samples, found.labels, found.counts, found.unseen) == (1, 1, {3: 1}, 3)


def test_labels_that_do_not_fit():
    with pytest.raises(ValueError, match="the uint64 label 18446744073709551615 does not fit int64"):
        audit(torch.tensor([2**64 - 1], dtype=torch.uint64))
    assert audit(np.array([5, 2**40], dtype=np.uint64)).max == 2**40
    with pytest.raises(ValueError, match="item 1: the label 9223372036854775808 does not fit int64"):
        audit([1, 2**63, None])


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (dict(num_classes=0), ValueError, "num_classes must be at least 1, not 0"),
        (dict(num_classes=2.0), TypeError, "num_classes must be an int or None, not float 2.0"),
        (dict(num_classes=2**63), ValueError, "num_classes must fit int64"),
        (dict(ignore_index="none"), TypeError, "ignore_index must be an int or None, not str 'none'"),
        (dict(max_samples=0), ValueError, "max_samples must be at least 1"),
        (dict(kind="soft"), ValueError, 'kind must be "classes", "probabilities", "binary" or None, not \'soft\''),
    ],
)
def test_arguments(arguments, error, message):
    with pytest.raises(error) as caught:
        audit(torch.zeros(3).long(), **arguments)
    assert message in str(caught.value)


# ---- probabilities


def check_units(found: Audit, target: torch.Tensor, kind: str) -> None:
    slack = max(4 * torch.finfo(target.dtype).eps, 1e-6) if target.is_floating_point() else 0
    bad = [
        (i, place, v)
        for i, sample in enumerate(target.tolist())
        for place, v in zip(indices_of(tuple(target.shape[1:])), flat(sample))
        if not -slack <= v <= 1 + slack
    ]
    assert found.kind == kind and found.outside.count == len(bad)
    assert repr([(o.sample, o.index, o.value) for o in found.outside.first]) == repr(bad[:16])
    assert found.outside.samples == len({i for i, _, _ in bad})
    kinds = collections.Counter(
        "NaN" if v != v else "+inf" if v == inf else "-inf" if v == -inf else "below 0" if v < 0 else "above 1"
        for _, _, v in bad
    )
    assert found.outside.kinds == dict(kinds)
    numbers = [v for v in flat(target.tolist()) if v == v]
    assert (found.min, found.max) == (min(numbers), max(numbers))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_binary_targets(dtype):
    g = generator()
    for shape in ((200,), (50, 4), (6, 5, 3), (10, 1)):
        target = torch.rand(shape, generator=g).to(dtype)
        found = audit(target)
        assert found.ok
        check_units(found, target, "binary")
        strange = torch.tensor([nan, inf, -inf, -0.5, 1.5, 1 + 1e-7, 255], dtype=dtype)
        where = torch.rand(shape, generator=g) < 0.2
        target[where] = strange[torch.randint(7, shape, generator=g)][where]
        found = audit(target, kind="binary")
        check_units(found, target, "binary")
        assert not found.ok and "outside [0, 1]" in found.problems[0]


def test_class_probabilities():
    g = generator()
    for shape in ((100, 5), (20, 5, 3, 2)):
        target = torch.randn(shape, generator=g, dtype=torch.float64).softmax(1)
        found = audit(target, 5)
        check_units(found, target, "probabilities")
        assert found.ok and found.num_classes == 5 and not found.inferred
        sums = target.transpose(0, 1).reshape(5, -1).sum(1).tolist()
        assert list(found.counts.values()) == pytest.approx(sums, rel=1e-12)
        target[7] *= 1.02
        target[11] = 0
        found = audit(target, 5)
        rows = 2 * math.prod(shape[2:])
        assert found.row_sums.count == rows and found.row_sums.samples == 2 and found.rows == target[:, 0].numel()
        assert found.problems == [f"{rows} of {found.rows} rows do not sum to 1."]
        first = [(o.sample, o.index) for o in found.row_sums.first]
        assert first == [(s, i) for s in (7, 11) for i in indices_of(shape[2:])][:16]
        assert found.row_sums.first[0].value == pytest.approx(1.02) and found.row_sums.kinds == {"all 0": rows // 2}
        assert "row sums" in str(found)


def test_which_kind_it_is():
    one_hot = torch.nn.functional.one_hot(torch.arange(20) % 4, 4).float()
    several = one_hot.clone()
    several[3] = 1
    assert audit(one_hot).kind == "probabilities" and audit(several).kind == "binary" and audit(several).ok
    assert audit(several, kind="probabilities").problems == ["1 of 20 rows does not sum to 1."]
    for dtype in (torch.int64, torch.uint8, torch.bool):
        assert audit(several.to(dtype), kind="binary").ok
    assert audit(torch.tensor([0.0, 1.0, 1.0])).kind == "binary"
    assert audit(torch.tensor([0.0, 1.0, 1.0]), 1).kind == "binary"
    assert audit(torch.tensor([0.0, 1.0, 1.0]), 2).kind == "classes"
    assert audit(torch.tensor([0.0, 1.0, 7.0])).kind == "classes"
    assert audit(torch.tensor([0.0, 1.0, 7.5])).kind == "binary"
    assert audit(torch.tensor([[0.0], [9.0], [nan]])).kind == "classes"
    assert audit(torch.randn(30, 4, generator=generator())).kind == "binary"  # logits: of no kind, and refused as such


def test_probabilities_need_a_class_dimension():
    problem = "the targets have no class dimension, which class probabilities have at position 1."
    assert audit(torch.rand(5), kind="probabilities").problems == [problem]
    problem = "the class dimension is 3, and num_classes 4."
    assert audit(torch.full((5, 3), 1 / 3), 4, kind="probabilities").problems == [problem]
    ragged = [torch.full((n,), 1 / n) for n in (3, 4, 3)]
    problem = "the class dimension is not the same in all samples: 3, 4."
    assert audit(ragged, kind="probabilities").problems == [problem]


# ---- datasets and loaders


class Stream(IterableDataset):
    def __init__(self, items: list) -> None:
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Pair(NamedTuple):
    cls: int
    image: torch.Tensor


LABELS = torch.tensor([0, 3, 1, 9, 2, -1, 4, 4, -100, 3])
IMAGE = torch.zeros(2)
WAYS = {
    "ints": lambda y: y,
    "tensors": torch.tensor,
    "one-element tensors": lambda y: torch.tensor([y]),
    "arrays": lambda y: np.array(y),
    "tuples": lambda y: (IMAGE, y),
    "lists": lambda y: [IMAGE, IMAGE, torch.tensor(y)],
    "detections": lambda y: (IMAGE, {"boxes": IMAGE, "labels": torch.tensor(y)}),
    **{
        key: lambda y, key=key: {"image": IMAGE, key: y}
        for key in ("labels", "label", "target", "targets", "y", "mask")
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [0, 2])
def test_where_the_label_is(way, workers):
    dataset = Items([WAYS[way](y) for y in LABELS.tolist()])
    found = audit(dataset, 5, num_workers=workers)
    expected = LABELS[:, None] if way == "one-element tensors" else LABELS
    check_classes(found, expected, 5, -100)
    assert found.good_subset().indices == [0, 1, 2, 4, 6, 7, 8, 9]
    if not workers:
        check_classes(audit(Stream(dataset.items), 5), expected, 5, -100)
        check_classes(audit(iter(dataset.items), 5), expected, 5, -100)
        if way != "ints":
            check_classes(audit(dataset.items, 5), expected, 5, -100)


@pytest.mark.parametrize(
    "label, item",
    [
        ("category", lambda y: {"label": 77, "category": y}),
        (0, lambda y: (y, IMAGE)),
        (-2, lambda y: [y, IMAGE]),
        ("cls", lambda y: Pair(y, IMAGE)),
        ("ids", lambda y: (IMAGE, {"labels": 77, "ids": y})),
        (1, lambda y: (IMAGE, {"labels": y}, 77)),
        (lambda item: item.image[0].long() + item.cls, lambda y: Pair(y, IMAGE)),
    ],
)
def test_label_argument(label, item):
    dataset = Items([item(y) for y in LABELS.tolist()])
    check_classes(audit(dataset, 5, label=label), LABELS, 5, -100)


@pytest.mark.parametrize(
    "items, label, error, message",
    [
        ([(IMAGE, 1), (IMAGE, "cat")], None, TypeError, "item 1: the label is a str, 'cat': wanted a number"),
        ([{"x": 1}], None, LookupError, "item 0: no label among the keys 'x': pass label="),
        ([{"x": 1}], "z", LookupError, "item 0: no label 'z': the keys are 'x'"),
        ([(1, 2)], 2, LookupError, "item 0: no label 2: it is a tuple"),
        ([(IMAGE, None)], None, TypeError, "item 0: the label is a NoneType, None"),
        ([(1, [IMAGE, 3])], None, TypeError, "item 0: the label is a list of Tensor, int: pass label="),
        ([()], None, LookupError, "item 0: no label in an empty tuple"),
        ([torch.zeros(2, dtype=torch.complex64)], None, TypeError, "labels cannot be torch.complex64"),
        ([np.array(["a"])], None, TypeError, "number the names first"),
    ],
)
def test_what_is_no_label(items, label, error, message):
    with pytest.raises(error) as caught:
        audit(Items(items), label=label)
    assert message in str(caught.value)


def test_an_item_that_raises():
    class Broken(Items):
        def __getitem__(self, index: int) -> int:
            if index == 3:
                raise OSError("truncated file")
            return index

    with pytest.raises(RuntimeError, match="item 3 could not be read: OSError: truncated file") as caught:
        audit(Broken([0] * 5))
    assert isinstance(caught.value.__cause__, OSError)
    for wrong in (object(), 5, None):
        with pytest.raises(TypeError, match="no labels in"):
            audit(wrong)


def test_sequences():
    for sequence in (LABELS.tolist(), tuple(LABELS.tolist()), LABELS.numpy(), LABELS.tolist().__iter__()):
        check_classes(audit(sequence, 5), LABELS, 5, -100)
    check_classes(audit(range(-50, 1000), 500), torch.arange(-50, 1000), 500, -100)
    assert audit(range(200_000), 200_000).counts == dict.fromkeys(range(200_000), 1)
    found = audit([1, 2.5, nan, True, np.int8(4)], 5)
    assert found.outside.kinds == {"not whole": 1, "NaN": 1} and found.dtypes == {
        "int64": 1,
        "float64": 2,
        "bool": 1,
        "int8": 1,
    }
    mapping = {"input": torch.rand(10, 3), "labels": LABELS}
    check_classes(audit(mapping, 5), LABELS, 5, -100)
    check_classes(audit((torch.rand(10, 3), LABELS), 5), LABELS, 5, -100)
    check_classes(audit(LABELS.numpy()[::-1], 5), LABELS.flip(0), 5, -100)
    check_classes(audit(LABELS.numpy().astype(">i4"), 5), LABELS.int(), 5, -100)


def test_samples_of_different_shapes():
    items = [torch.tensor(v) for v in ([1, 2], [3], [], [9, 9, 9], [-100])]
    found = audit(Items(items), 4)
    assert (found.samples, found.labels, found.shape, found.ignored) == (5, 7, None, 1)
    assert [(o.sample, o.index) for o in found.outside.first] == [(3, (0,)), (3, (1,)), (3, (2,))]
    assert found.fully_ignored_samples == [2, 4] and found.counts == {1: 1, 2: 1, 3: 1}


def test_tensor_datasets_are_not_read_item_by_item():
    dataset = TensorDataset(torch.rand(10, 2), LABELS)
    check_classes(audit(dataset, 5), LABELS, 5, -100)
    chosen = [7, 3, 3, 5]
    subset = Subset(dataset, chosen)
    check_classes(audit(subset, 5), LABELS[chosen], 5, -100)
    check_classes(audit(Subset(subset, [1, 0]), 5), LABELS[[3, 7]], 5, -100)
    assert audit(subset, 5).good_subset().indices == [0]
    assert audit(dataset, label=0).kind == "binary"
    with pytest.raises(LookupError):
        audit(dataset, label=2)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", ["tuples", "detections", "label"])
def test_loaders(way, workers):
    labels = torch.randint(5, (101,), generator=generator())
    labels[50], labels[77], labels[3] = 5, -7, -100
    dataset = Items([WAYS[way](y) for y in labels.tolist()])
    check_classes(audit(DataLoader(dataset, 7, num_workers=workers), 5), labels, 5, -100)
    g = generator(1)
    state = g.get_state()
    loader = DataLoader(dataset, 10, shuffle=True, num_workers=workers, generator=g)
    found = audit(loader, 5)
    assert torch.equal(g.get_state(), state)  # training shuffles as it would have
    order = [index for batch in BatchSampler(loader.sampler, 10, False) for index in batch]
    assert order != sorted(order)
    check_classes(found, labels[order], 5, -100, order)
    assert (found.batches, found.batch_size, found.last_batch) == (11, 10, 1)
    assert found.good_subset().indices == [i for i in range(101) if i not in (50, 77)]
    assert any("drop_last=True" in s.code for s in found.suggestions)
    dropped = audit(DataLoader(dataset, 10, drop_last=True), 5)
    assert (dropped.samples, dropped.last_batch) == (100, 10) and 100 not in dropped.good_subset().indices
    assert not any("drop_last" in s.code for s in dropped.suggestions)


def test_random_numbers_are_left_alone():
    dataset = TensorDataset(LABELS)
    state = torch.get_rng_state()
    audit(DataLoader(dataset, 2, shuffle=True))
    audit(Items(LABELS.tolist()), num_workers=1)
    assert torch.equal(torch.get_rng_state(), state)


def lists(items):
    return [item[0] for item in items], [item[1] for item in items]


def without_bad(items):
    return torch.utils.data.default_collate([item for item in items if item[1] >= 0])


def test_loaders_with_a_collate_fn():
    masks = [torch.full((n, 2), n) for n in (1, 2, 3, 4, 5)]
    found = audit(DataLoader(Items([(IMAGE, mask) for mask in masks]), 2, collate_fn=lists), 5)
    assert found.counts == {1: 2, 2: 4, 3: 6, 4: 8} and found.outside.first_samples == [4]
    assert (found.samples, found.batches, found.last_batch) == (5, 3, 1)
    detections = [(IMAGE, {"labels": torch.arange(n)}) for n in (2, 0, 7)]
    found = audit(DataLoader(Items(detections), 3, collate_fn=lists), 5)
    assert [(o.sample, o.index) for o in found.outside.first] == [(2, (5,)), (2, (6,))]
    assert found.samples == 3 and found.fully_ignored_samples == [1]
    # Samples that are left out cannot be traced back to the dataset.
    found = audit(DataLoader(Items([(IMAGE, y) for y in LABELS.tolist()]), 4, collate_fn=without_bad), 5)
    assert found.unit == "position" and found.samples == 8
    with pytest.raises(TypeError, match="no subset of"):
        found.good_subset()


def test_loaders_of_other_kinds():
    batches = [(torch.rand(4, 2), LABELS[:4]), (torch.rand(4, 2), LABELS[4:8]), (torch.rand(2, 2), LABELS[8:])]
    for loader in (DataLoader(Stream(batches), batch_size=None), DataLoader(Items(batches), batch_size=None)):
        found = audit(loader, 5)
        check_classes(found, LABELS, 5, -100)
        assert (found.batches, found.batch_size, found.last_batch, found.unit) == (3, 4, 2, "position")
    check_classes(audit(batches, 5, batched=True), LABELS, 5, -100)
    check_classes(audit(DataLoader(Stream([(IMAGE, y) for y in LABELS.tolist()]), 3), 5), LABELS, 5, -100)

    class Own(DataLoader):
        pass

    found = audit(Own(Items([(IMAGE, y) for y in LABELS.tolist()]), 3), 5)
    check_classes(found, LABELS, 5, -100)
    tasks = Items([(IMAGE, (y, 0)) for y in LABELS.tolist()])
    for loader in (DataLoader(tasks, 5), Own(tasks, 5)):
        with pytest.raises(LookupError, match="batch 0: the label is a list of 2 tensors"):
            audit(loader)
        check_classes(audit(loader, 5, label=lambda batch: batch[1][0]), LABELS, 5, -100)


def test_max_samples():
    found = audit(DataLoader(Items([(IMAGE, y) for y in LABELS.tolist()]), 3), 5, max_samples=5)
    check_classes(found, LABELS[:5], 5, -100)
    assert found.limited and found.last_batch is None and found.good_subset().indices == [0, 1, 2, 4]
    assert audit(LABELS, max_samples=5).samples == 5 and not audit(LABELS, max_samples=10).limited

    def endless():
        while True:
            yield 1

    assert audit(endless(), max_samples=100_000).counts == {1: 100_000}


def test_workers_are_for_datasets_only():
    with pytest.raises(ValueError, match="num_workers is for map-style datasets"):
        audit(Stream([1, 2]), num_workers=2)


@pytest.mark.parametrize("installed", [True, False])
def test_progress(monkeypatch, installed):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys, "stderr", Terminal())
    audit(LABELS)
    assert ("10.0/10.0" in sys.stderr.getvalue()) == installed
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    audit(LABELS)
    assert sys.stderr.getvalue() == ""
    if installed:
        audit(LABELS, progress=True)
        assert "10.0/10.0" in sys.stderr.getvalue()
    else:
        with pytest.raises(ImportError, match="progress=True needs tqdm: pip install tqdm"):
            audit(LABELS, progress=True)


# ---- files


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int64", ">i4", "float32", "bool"])
def test_npy(folder, dtype):
    labels = np.random.default_rng(0).integers(0, 9, (50, 7)).astype(dtype)
    np.save("labels.npy", labels)
    np.save("transposed.npy", np.asfortranarray(labels))
    expected = torch.from_numpy(labels.astype(np.dtype(dtype).newbyteorder("=")))
    for file in ("labels.npy", Path("transposed.npy")):
        check_classes(audit(file, 5, kind="classes"), expected, 5, -100)


def test_no_more_of_a_file_than_a_piece(folder, monkeypatch):
    labels = np.random.default_rng(0).integers(0, 9, (300_000,)).astype(np.uint8)
    np.save("labels.npy", labels)
    torch.save(torch.from_numpy(labels), "labels.pt")
    sizes = []
    convert = _audit_read.to_tensor
    with monkeypatch.context() as patch:
        patch.setattr(_audit_read, "to_tensor", lambda label: sizes.append(label.size) or convert(label))
        found = audit("labels.npy", 9)
    assert list(found.counts.values()) == np.bincount(labels).tolist()
    assert sum(sizes) == 300_000 and max(sizes) <= _audit_count.PIECE
    assert audit("labels.pt", 9).counts == found.counts


def test_npz_and_structured_arrays(folder):
    np.savez("both.npz", images=np.zeros((10, 2)), labels=LABELS.numpy(), other=LABELS.numpy() + 1)
    check_classes(audit("both.npz", 5), LABELS, 5, -100)
    check_classes(audit("both.npz", 5, label="other"), LABELS + 1, 5, -100)
    np.savez_compressed("one.npz", a=LABELS.numpy())
    check_classes(audit("one.npz", 5), LABELS, 5, -100)
    np.savez("none.npz", a=LABELS.numpy(), b=LABELS.numpy())
    with pytest.raises(LookupError, match="which column of none.npz holds the labels.*'a', 'b': pass label="):
        audit("none.npz")
    np.save("rows.npy", np.array([(1.0, int(y)) for y in LABELS], dtype=[("x", "f4"), ("y", "i8")]))
    check_classes(audit("rows.npy", 5), LABELS, 5, -100)


@pytest.mark.parametrize(
    "saved",
    [
        LABELS,
        {"input": torch.rand(10, 3), "labels": LABELS},
        (torch.rand(10, 3), LABELS),
        LABELS.tolist(),
        [(torch.rand(3), y) for y in LABELS],
    ],
    ids=["tensor", "dict", "tuple", "numbers", "items"],
)
def test_pt(folder, saved):
    torch.save(saved, "labels.pt")
    torch.save(saved, "old.pt", _use_new_zipfile_serialization=False)
    for file in ("labels.pt", "old.pt"):
        check_classes(audit(file, 5), LABELS, 5, -100)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv(folder, delimiter):
    with open("train.csv", "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(["file", "label", "other"])
        writer.writerows([f"a {i}, b.png", y, y + 1] for i, y in enumerate(LABELS.tolist()))
    found = audit("train.csv", 5)
    check_classes(found, LABELS, 5, -100)
    assert found.unit == "row" and "row" in str(found)
    check_classes(audit("train.csv", 5, label="other"), LABELS + 1, 5, -100)
    check_classes(audit("train.csv", 5, label=2), LABELS + 1, 5, -100)
    with pytest.raises(LookupError, match="no column 'z' in train.csv: it has 'file', 'label', 'other'"):
        audit("train.csv", label="z")
    with pytest.raises(TypeError, match="train.csv: row 0: the label is a str, 'a 0, b.png'"):
        audit("train.csv", label="file")


def test_csv_of_many_rows(folder):
    labels = torch.randint(-1, 6, (150_000,), generator=generator())
    Path("labels.txt").write_text("\n".join(map(str, labels.tolist())))
    check_classes(audit("labels.txt", 5), labels, 5, -100)


def test_csv_with_missing_labels(folder):
    Path("train.csv").write_text("x,y\n1,3\n2,\n3,7\n4,2.5\n5,NA\n6,2.0\n\n7,1\n")
    found = audit("train.csv", 5)
    assert found.samples == 7 and found.dtypes == {"int64": 3, "float64": 4}
    first = [(o.sample, o.value) for o in found.outside.first]
    assert repr(first) == repr([(1, nan), (2, 7), (3, 2.5), (4, nan)])
    assert found.outside.kinds == {"NaN": 2, "not whole": 1, ">= num_classes": 1}
    Path("short.csv").write_text("x,y\n1,2\n3\n")
    with pytest.raises(ValueError, match="short.csv: row 1 ends before column 1"):
        audit("short.csv")
    Path("empty.csv").write_text("")
    assert audit("empty.csv").problems == ["there are no labels."]
    Path("header.tsv").write_text("x\tlabel\n")
    assert audit("header.tsv").problems == ["there are no labels."]


def test_parquet(folder):
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    labels = torch.randint(-1, 6, (70_000,), generator=generator())
    columns = {"x": np.zeros(70_000), "label": labels.numpy().astype(np.int16)}
    parquet.write_table(pa.table(columns), "train.parquet", row_group_size=20_000)
    check_classes(audit("train.parquet", 5), labels.short(), 5, -100)

    cells = labels[:4000].tolist()
    ragged = {
        "missing": [None if y == 5 else y for y in cells],
        "tokens": [[y] * (i % 3) for i, y in enumerate(cells)],
    }
    parquet.write_table(pa.table(ragged), "ragged.parquet", row_group_size=1500)
    found = audit("ragged.parquet", 5, label="missing")
    fives = cells.count(5)
    assert found.outside.kinds == {"NaN": fives, "below 0": cells.count(-1)}
    assert found.dtypes == {"int64": 4000 - fives, "float64": fives}
    bad = [(i, y) for i, y in enumerate(cells) if y in (-1, 5)][:16]
    assert [(o.sample, o.value if o.value == -1 else 5) for o in found.outside.first] == bad
    found = audit("ragged.parquet", 6, label="tokens")
    assert found.samples == 4000 and found.labels == sum(i % 3 for i in range(4000))
    assert found.outside.kinds == {"below 0": sum(i % 3 for i, y in enumerate(cells) if y == -1)}


def test_data_frames(folder):
    """By what they have, for pandas and polars alike."""

    class Column:
        def to_numpy(self):
            return LABELS.numpy()

    class Frame:
        columns = ["x", "label"]

        def __getitem__(self, name):
            return {"label": Column()}[name]

        def to_numpy(self):
            raise AssertionError("all of it")

    check_classes(audit(Frame(), 5), LABELS, 5, -100)
    check_classes(audit(Column(), 5), LABELS, 5, -100)
    with pytest.raises(LookupError, match="no column 'z' in the data frame"):
        audit(Frame(), label="z")


def test_masks(folder):
    image = pytest.importorskip("PIL.Image")
    g = generator()
    masks = torch.randint(5, (6, 8, 9), generator=g, dtype=torch.uint8)
    masks[2] = 255
    masks[4, 3, 2] = 9
    names = []
    for i, mask in enumerate(masks.numpy()):
        names.append(f"{'ab'[i % 2]}/{i}.png")
        Path(names[-1]).parent.mkdir(exist_ok=True)
        picture = image.fromarray(mask)
        if i == 3:  # with a palette: its numbers are the labels
            picture.putpalette([0] * 768)
        picture.save(names[-1])
    Path("a/readme.txt").write_text("not a mask")
    order = sorted(range(6), key=lambda i: names[i])
    found = audit(".", 5, 255)
    check_classes(found, masks[order], 5, 255, [names[i] for i in order])
    assert found.unit == "file" and "a/4.png  (3, 2)  9" in str(found)
    check_classes(audit("a/4.png", 5), masks[4:5], 5, -100, ["4.png"])
    image.fromarray(masks[0].numpy().astype(np.uint16) * 100).save("b/deep.png")
    assert audit("b/deep.png").max == 400
    image.fromarray(masks[0].numpy() > 2).save("b/bits.png")
    assert audit("b/bits.png").dtypes == {"bool": 72}
    image.new("RGB", (3, 3)).save("b/colour.png")
    with pytest.raises(ValueError, match=r"b/colour.png is a colour image \(RGB\)"):
        audit("b", 5)
    Path("b/colour.png").write_bytes(b"\x89PNG truncated")
    with pytest.raises(ValueError, match="b/colour.png could not be read"):
        audit("b", 5)


@pytest.mark.parametrize(
    "name, content, error, message",
    [
        ("missing.npy", None, FileNotFoundError, "no such file or folder: missing.npy"),
        ("labels.npy", b"not an array", ValueError, "labels.npy could not be read"),
        ("labels.npz", b"PK not", ValueError, "labels.npz could not be read"),
        ("labels.pt", b"not a tensor", ValueError, "labels.pt could not be read as tensors alone"),
        ("labels.xml", b"", ValueError, "labels.xml: a file of this kind is not read. Wanted .npy"),
        ("labels.parquet", b"", ValueError, "labels.parquet could not be read"),
    ],
)
def test_files_that_cannot_be_read(folder, name, content, error, message):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(error) as caught:
        audit(name)
    assert message in str(caught.value)


def test_objects_are_not_unpickled(folder):
    torch.save(Items([1]), "dataset.pt")
    with pytest.raises(ValueError, match="load it yourself and give lossguard.audit what is in it"):
        audit("dataset.pt")
    np.save("objects.npy", np.array([None, 1], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="objects.npy could not be read"):
        audit("objects.npy")
    Path("masks").mkdir()
    with pytest.raises(ValueError, match="no masks in masks: wanted files of .bmp"):
        audit("masks")


@pytest.mark.parametrize(
    "name, package, install", [("a.parquet", "pyarrow.parquet", "pyarrow"), ("a.png", "PIL.Image", "pillow")]
)
def test_missing_packages(folder, monkeypatch, name, package, install):
    Path(name).write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"needs {install}: pip install {install}"):
        audit(name)


# ---- what is advised


def advice(found: Audit) -> str:
    return "\n".join(f"{s.text} | {s.code}" for s in found.suggestions)


def uniform(low: int, high: int, n: int = 2000) -> torch.Tensor:
    return torch.randint(low, high, (n,), generator=generator())


def test_labels_from_1():
    found = audit(uniform(1, 11), 10)
    assert advice(found) == "labels run from 1 to 10 and none is 0: subtract 1. | target = target - 1"
    labels = uniform(1, 11)
    for ignore in (-100, 255):
        labels[:5] = ignore
        (suggestion,) = audit(labels, 10, ignore).suggestions
        scope = {"target": labels, "torch": torch}
        exec(suggestion.code, scope)
        assert audit(scope["target"], 10, ignore).ok and (scope["target"][:5] == ignore).all()
    assert "unless class 0 merely does not occur here" in advice(audit(uniform(1, 11)))
    assert "subtract 1" not in advice(audit(uniform(0, 11), 10)) + advice(audit(uniform(0, 10), 10))


def test_void_labels():
    labels = uniform(0, 19)
    labels[:40] = 255
    for found in (audit(labels, 19), audit(labels)):
        assert found.num_classes == 19 and found.outside.values == {255: 40} and not found.ok
        assert "every invalid target is 255" in advice(found) and "criterion.ignore_index = 255" in advice(found)
    assert audit(labels, 19, 255).ok and audit(labels, ignore_index=255).num_classes == 19
    assert "the largest label but 255, + 1" in str(audit(labels))
    labels[50:60] = -1
    assert "ignore_index" in advice(audit(labels, 19, 255))
    labels[60:70] = -100  # in use: -1 and 255 are to become -100
    text = advice(audit(labels, 19))
    assert "target[target == 255] = -100" in text and "target[target == -1] = -100" in text
    assert audit(uniform(0, 256), 256).ok and audit(uniform(0, 256)).num_classes == 256


def test_void_labels_beside_labels_from_1():
    labels = uniform(1, 11)
    labels[:40] = 255
    text = advice(audit(labels, 10))
    assert (
        "subtract 1" in text
        and "torch.where((target > 0) & (target <= 10), target - 1, target)" in text
        and "255" in text
    )
    assert "too few" not in text and "every" not in text
    assert "40 labels are 255, often used for void elements: ignore them, to leave them out." in text
    assert "criterion.ignore_index = 255" in text
    labels[40:43] = -1
    assert "3 labels are -1, often used for unlabelled elements: make them 255" in advice(audit(labels, 10))


def test_ids_with_gaps():
    ids = torch.tensor([1, 5, 7, 33, 90])[uniform(0, 5)]
    for found in (audit(ids), audit(ids, 5), audit(ids, 80)):
        assert "5 distinct labels between 1 and 90: number them from 0 to 4" in advice(found)
        assert "lossguard.remap_labels(audit)" in advice(found)
    strays = uniform(0, 10)
    strays[3] = 97  # a mistake, and no other numbering
    assert "remap" not in advice(audit(strays, 10))
    assert "remap" not in advice(audit(uniform(0, 10)))


def test_minus_one_and_one():
    labels = uniform(0, 2) * 2 - 1
    assert advice(audit(labels, 2)) == "labels are -1 and 1: make them 0 and 1. | target = (target + 1) // 2"


def test_dtypes():
    labels = uniform(0, 5)
    assert advice(audit(labels.float(), 5)).endswith("convert them. | target = target.long()")
    assert audit(labels.float(), 5).problems == ["the labels are float32: class indices have an integer dtype."]
    for dtype in (torch.int32, torch.int16, torch.bool):
        assert (
            "target.long()" in advice(audit(labels.clamp(max=1).to(dtype), 2))
            and audit(labels.clamp(max=1).to(dtype), 2).ok
        )
    for dtype in (torch.int64, torch.uint8):
        assert advice(audit(labels.to(dtype), 5)) == ""
    assert "2 labels are NaN" in advice(audit(torch.tensor([1.0, nan, nan, 3]), 5))
    assert 'kind="binary"' in advice(audit(torch.tensor([1.0, 0.5, 3]), 5))


def test_too_few_outputs():
    assert "one output too few (give it 11)" in advice(audit(uniform(0, 11), 10))
    assert "give it 20" in advice(audit(uniform(0, 20), 10))


def test_weights():
    counts = [1000, 10, 100]
    labels = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
    found = audit(labels, 4)
    expected = [sum(counts) / (3 * n) for n in counts]
    torch.testing.assert_close(found.weights(), torch.tensor([*expected, expected[1]]))
    assert found.weights_code() == "weight = torch.tensor([0.37, 37, 3.7, 37], dtype=torch.float32)"
    assert found.weights_code() in advice(found) and "class 0 has 90.1% of the labels and class 1 0.9%" in advice(found)
    mean = found.weights()[labels].mean().item()
    assert mean == pytest.approx(1)
    assert "weight" not in advice(audit(uniform(0, 5), 5))
    positives = torch.zeros(100, 3)
    positives[:5, 0] = positives[:50, 1] = 1
    found = audit(positives)
    torch.testing.assert_close(found.weights(), torch.tensor([19.0, 1, 1]))
    assert "pos_weight = torch.tensor([19, 1, 1]" in advice(found) and found.counts == {0: 5, 1: 50}
    assert audit((uniform(0, 100) < 5).float()).weights().shape == (1,)
    many = torch.cat([torch.arange(100), torch.zeros(2000).long()])
    assert "weight = audit.weights()" in advice(audit(many, 100))
    with pytest.raises(ValueError, match="no weights for"):
        audit([]).weights()


def test_soft_advice():
    grey = torch.rand(20, 3, 3, generator=generator()) * 255
    assert "divide it by 255" in advice(audit(grey, kind="binary"))
    rows = torch.full((30, 4), 0.25)
    rows[3] = 0.5
    assert "target / target.sum(1, keepdim=True)" in advice(audit(rows))
    rows[3] = 0
    assert "1 row of zeros only" in advice(audit(rows))


def test_samples_with_nothing_but_ignored_labels():
    masks = torch.zeros(4, 2, 2).long()
    masks[1:3] = -100
    found = audit(masks, 1)
    assert found.ok and "2 samples have nothing but ignored labels" in advice(found)
    assert "empty     2 samples with nothing but ignored labels: 1, 2" in str(found)


# ---- the text, JSON and the plot


def test_text():
    labels = torch.arange(1000) % 10
    labels[[13, 44]], labels[500], labels[600:650] = 10, -7, -100
    assert str(audit(labels, 10)).splitlines()[:14] == [
        "audit of a Tensor of 1000: 3 of 950 labels are outside [0, 10).",
        "  samples   1000, one label each, int64",
        "  kind      class indices, from -7 to 10",
        "  classes   10",
        "  ignored   50 of 1000 (5.0%), ignore_index: -100",
        "  outside   3 labels in 3 samples; below 0: 1, >= num_classes: 2",
        "    sample  value",
        "    13      10",
        "    44      10",
        "    500     -7",
        "    by value: 10: 2, -7: 1",
        "       class        labels  share",
        "           0            94    9.9%  ######################################## ".rstrip(),
        "           1            95   10.0%  ########################################",
    ]
    assert str(audit(labels.clamp(0, 9), 10)).startswith(
        "audit of a Tensor of 1000: every label of 1000 samples is valid."
    )
    assert str(audit([1], 2)).startswith("audit of list of 1: every label of 1 sample is valid.")
    masks = torch.zeros(100, 4, 4).long()
    masks[::3, 1] = 9
    text = str(audit(masks, 2))
    assert "136 labels in 34 samples" in text and "... and 120 more" in text
    assert "samples: 0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 45 and 18 more" in text
    assert "(1, 0)" in text and "16 numbers" not in text and "1600 numbers" in text


def test_ranges():
    assert ranges([3, 5, 6, 7, 9], 5) == "3, 5..7, 9"
    assert ranges(list(range(0, 100, 2)), 90) == ", ".join(map(str, range(0, 32, 2))) + " and 74 more"


def test_json():
    found = audit([1, nan, 2, -5], 2).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["ok"] is False and found["counts"] == {"1": 1}
    assert found["outside"]["first"][0] == {"sample": 1, "index": [], "value": "nan"}
    assert found["outside"]["values"] == {"-5": 1, "2": 1}
    assert not any(name.startswith("_") for name in found)


@pytest.mark.parametrize("case", ["classes", "many", "probabilities", "binary", "wild"])
def test_plot(folder, case):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    labels = (torch.randn(5000, generator=generator()).abs() * 4).long()
    labels[:30], labels[30:90] = 255, -100
    data = {
        "classes": (labels, 12),
        "many": (torch.randint(9000, (20000,), generator=generator()), 10_000),
        "probabilities": (torch.rand(100, 70, generator=generator()).softmax(1), 70),
        "binary": ((torch.rand(100, 6, generator=generator()) < 0.2).float(), None),
        "wild": (torch.randint(-(2**62), 2**62, (300_000,), generator=generator()), 10),
    }[case]
    audit(*data).plot("classes.png")
    with image.open("classes.png") as picture:
        assert picture.format == "PNG" and picture.size == (1200, 540)
        colours = len(set(picture.convert("RGB").get_flattened_data()))
    assert Path("classes.png").stat().st_size > 5000 and colours > 20
    audit(*data).plot(Path("classes.svg"))
    assert "<svg" in Path("classes.svg").read_text()


def test_plot_of_nothing(folder, monkeypatch):
    with pytest.raises(ValueError, match="nothing to draw"):
        audit([]).plot("a.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="plotting an audit needs matplotlib: pip install matplotlib"):
        audit([1]).plot("a.png")


# ---- the command


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser(prog="lossguard")
    _audit_command.add_parser(parser.add_subparsers(required=True))
    found = parser.parse_args(["audit", *arguments])
    return found.run(found)


@pytest.fixture
def labels_file(folder):
    np.save("labels.npy", LABELS.numpy())
    return "labels.npy"


def test_command(labels_file, capsys):
    assert run(labels_file, "--num-classes", "5") == 1
    out, err = capsys.readouterr()
    assert out == f"{audit(labels_file, 5)}\n" and err == "" and out.isascii()
    assert run(labels_file, "--num-classes", "10", "--ignore-index", "-1") == 1
    np.save("good.npy", np.arange(10))
    assert run("good.npy") == 0 and run("good.npy", "--ignore-index", "none") == 0
    assert run("good.npy", "--max-samples", "5", "--num-classes", "5") == 0


def test_command_as_json(labels_file, capsys):
    assert run(labels_file, "--num-classes", "5", "--json", "-") == 1
    assert json.loads(capsys.readouterr().out) == audit(labels_file, 5).to_dict()
    assert run(labels_file, "--num-classes", "5", "--json", "a.json", "--weights") == 1
    found = json.loads(Path("a.json").read_text())
    assert found.pop("weights") == pytest.approx(audit(labels_file, 5).weights().tolist())
    assert found == audit(labels_file, 5).to_dict()
    assert capsys.readouterr().out.splitlines()[-1] == audit(labels_file, 5).weights_code()


def test_command_plots(labels_file):
    pytest.importorskip("matplotlib")
    assert run(labels_file, "--plot", "classes.png") == 1
    assert Path("classes.png").read_bytes().startswith(b"\x89PNG") and Path("classes.png").stat().st_size > 5000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing.npy"], "no such file or folder: missing.npy"),
        (["labels.npy", "--json", "missing/a.json"], "No such file or directory: 'missing/a.json'"),
        (["train.csv"], "which column of train.csv holds the labels? It has 'a', 'b': pass label="),
        (["train.csv", "--label", "b"], "row 0: the label is a str, 'cat'"),
        (["missing.py:data"], "no such file: missing.py"),
        (["no_such_module:data"], "no_such_module could not be imported: ModuleNotFoundError"),
        (["broken.py:data"], "broken.py could not be imported: ZeroDivisionError: division by zero"),
        (["given.py:nothing"], "given.py has no nothing"),
        (["given.py:raises"], "given.py:raises raised OSError: no data here"),
        (["given.py:number"], "no labels in 5"),
        (["empty.npy", "--weights"], "no weights for empty.npy"),
    ],
)
def test_command_says_what_is_unreadable(labels_file, capsys, arguments, message):
    Path("train.csv").write_text("a,b\n1,cat\n")
    Path("broken.py").write_text("1 / 0")
    Path("given.py").write_text("number = 5\ndef raises():\n    raise OSError('no data here')\n")
    np.save("empty.npy", np.zeros(0, dtype=np.int64))
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("lossguard audit: ") and message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "arguments are required"),
        (["a", "--num-classes", "0"], "--num-classes: '0' is not a whole number of 1 or more"),
        (["a", "--num-classes", "ten"], "--num-classes: 'ten' is not a whole number of 1 or more"),
        (["a", "--workers", "-1"], "--workers: '-1' is not a whole number of 0 or more"),
        (["a", "--ignore-index", "x"], "--ignore-index: 'x' is neither a whole number nor none"),
        (["a", "--kind", "x"], "invalid choice"),
        (["a", "--max-samples", "x"], "--max-samples: 'x' is not a whole number of 1 or more"),
    ],
)
def test_command_used_wrongly(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2 and "usage: lossguard audit" in err and said in err


def test_command_help(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--help")
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "exit status:" in out and "--ignore-index" in out and out.isascii()


@pytest.mark.parametrize("attribute", ["dataset", "make", "Numbers", "loader", "inside.labels"])
@pytest.mark.parametrize("way", ["{}.py", "{}"])
def test_command_on_a_dataset(folder, capsys, monkeypatch, attribute, way):
    name = f"data_{attribute.replace('.', '_')}_{len(way)}"
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path(f"{name}.py").write_text(
        "import types, helper\n"
        "from torch.utils.data import DataLoader, Dataset\n"
        "class Numbers(Dataset):\n"
        "    def __len__(self): return 20\n"
        "    def __getitem__(self, i):\n"
        "        if i >= 20: raise IndexError\n"
        "        return 'image', i % 4\n"
        "dataset, make = Numbers(), lambda: Numbers()\n"
        "loader = DataLoader(dataset, 3, shuffle=True, num_workers=2)\n"
        "inside = types.SimpleNamespace(labels=[i % 4 for i in range(20)])\n"
    )
    Path("helper.py").write_text("")
    path = f"{way.format(name)}:{attribute}"
    assert run(path, "--num-classes", "4", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"0": 5, "1": 5, "2": 5, "3": 5}
    workers = ["--workers", "1"] if attribute in ("dataset", "make") else []
    assert run(path, "--num-classes", "3", *workers) == 1
    sys.modules.pop(name)


# ---- for tests of others


def test_assert_labels_valid():
    assert_labels_valid(uniform(0, 5), 5)
    assert_labels_valid(TensorDataset(torch.rand(2000, 2), uniform(0, 5)), 5)
    with pytest.raises(AssertionError) as caught:
        assert_labels_valid(LABELS, 5)
    assert str(caught.value) == str(audit(LABELS, 5))
    assert_labels_valid(torch.rand(5), None)
    for bad in ([], torch.tensor([0.5, 1.5])):
        with pytest.raises(AssertionError):
            assert_labels_valid(bad, None)
    assert_labels_valid({"y": [1, 2], "x": 0}, 3)
    assert_labels_valid(Items([{"z": 1}]), 2, label="z")
