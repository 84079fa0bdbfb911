"""Datasets that are known to be right: items checked as they are read, subsets of good ones, labels numbered anew."""

from __future__ import annotations

import json
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from items import Items
from lossguard import TargetOutOfBoundsError, ValueOutOfRangeError
from lossguard.audit import audit
from lossguard.datasets import CheckedDataset, ItemReport, remap_labels, valid_subset
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

nan = math.nan
IMAGE = torch.zeros(2)


class InBatches(Items):
    """What a DataLoader reads many at once from."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list:
        return [self.items[index] for index in indices]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2])


def images(labels) -> list:
    return [(IMAGE, label) for label in labels]


# ---- CheckedDataset


@pytest.mark.parametrize("convert", [int, torch.tensor, np.int64, lambda y: torch.tensor(y, dtype=torch.int32)])
def test_good_items_go_through_unchanged(convert):
    items = images(convert(y) for y in (0, 4, -100, 2))
    checked = CheckedDataset(Items(items), 5)
    assert len(checked) == 4
    assert all(checked[i] is item for i, item in enumerate(items))
    assert all(a is b for a, b in zip(checked.__getitems__([2, 0]), [items[2], items[0]]))
    with pytest.raises(TargetOutOfBoundsError):
        CheckedDataset(Items(items), 5, ignore_index=None)[2]
    assert CheckedDataset(Items(items), 5, ignore_index=-100)[np.int64(1)] is items[1]


def test_a_bad_label_says_which_item():
    checked = CheckedDataset(Items(images([0, 97, 3])), 97)
    with pytest.raises(TargetOutOfBoundsError) as caught:
        checked[1]  # the line
    report = caught.value.report
    assert isinstance(caught.value, IndexError) and isinstance(report, ItemReport)
    assert (report.item, report.dataset, report.loss) == (1, "Items", "CheckedDataset")
    assert (report.indices, report.values, report.count) == ([(1,)], [97], 1)
    assert (report.num_classes, report.ignore_index, report.shapes) == (97, -100, {"target": ()})
    assert report.call_site.source == "checked[1]  # the line" and report.call_site.file == __file__
    text = str(caught.value)
    assert text.startswith("Target 97 is out of bounds. CheckedDataset: 1 of 1 targets is outside [0, 97).")
    assert "item 1 of Items, label () int64" in text and "likely cause: " in text
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == text and again.report == report
    assert json.loads(json.dumps(report.to_dict()))["item"] == 1


def test_a_bad_mask_says_where_in_it():
    masks = torch.zeros(3, 4, 5, dtype=torch.uint8)
    masks[2, 1, 3], masks[2, 3, 0], masks[2, 0, 0] = 255, 19, 7
    checked = CheckedDataset(Items(images(masks)), 19)
    assert checked[1][1] is not None
    with pytest.raises(TargetOutOfBoundsError) as caught:
        checked[2]
    report = caught.value.report
    assert (report.indices, report.values) == ([(2, 1, 3), (2, 3, 0)], [255, 19])
    assert report.counts == {">= num_classes": 2} and report.sections[0].seen == 20
    assert report.sections[0].labels == {"255": 1, "num_classes": 1}
    assert CheckedDataset(Items(images(masks[:2])), 19, 255)[0] is not None


def test_items_of_other_keys():
    class ByName(Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, name: str) -> dict:
            return {"label": torch.tensor([1, 9])}

    with pytest.raises(TargetOutOfBoundsError) as caught:
        CheckedDataset(ByName(), 5)["a.png"]
    assert caught.value.report.item == "a.png" and caught.value.report.indices == [(1,)]
    assert "item a.png of ByName" in str(caught.value)


@pytest.mark.parametrize(
    "value, dtype",
    [
        (2**63 - 1, torch.int64),
        (-(2**63), torch.int64),
        (2**32 - 1, torch.uint32),
        (65535, torch.uint16),
        (-1, torch.int8),
    ],
)
def test_wild_labels(value, dtype):
    label = torch.tensor(value, dtype=dtype)
    for form in (label, label.numpy(), label.item()):
        with pytest.raises(TargetOutOfBoundsError) as caught:
            CheckedDataset(Items(images([form])), 5)[0]
        assert caught.value.report.values == [value]
    assert CheckedDataset(Items(images([torch.tensor(True)])), 2)[0] is not None
    with pytest.raises(ValueError, match="item 0: the uint64 label 18446744073709551615 does not fit int64"):
        CheckedDataset(Items(images([np.uint64(2**64 - 1)])), 2)[0]


@pytest.mark.parametrize(
    "target",
    [0.0, 1, True, torch.tensor([0.0, 1.0]), torch.rand(2, 3), np.float32(1), torch.tensor(1 + 1e-7), torch.empty(0)],
)
def test_targets_of_bce(target):
    checked = CheckedDataset(Items([(IMAGE, target)]), None)
    assert checked[0][1] is target
    for strange in (nan, 1.5, -0.5, 2, math.inf):
        with pytest.raises(ValueOutOfRangeError) as caught:
            CheckedDataset(Items([(IMAGE, torch.tensor([0.5, strange]))]), None)[0]
        assert isinstance(caught.value, RuntimeError)
        assert caught.value.report.indices == [(0, 1)] and repr(caught.value.report.values) == repr([float(strange)])
        assert str(caught.value).startswith("all elements of target should be between 0 and 1. CheckedDataset: 1 of 2")


def test_class_probabilities():
    good = torch.rand(4, 2, 2).softmax(0)
    bad = good.clone()
    bad[1, 0, 1] = -0.5
    checked = CheckedDataset(Items(images([good, bad])), 4)
    assert checked[0][1] is good
    with pytest.raises(ValueOutOfRangeError) as caught:
        checked[1]
    assert caught.value.report.indices == [(1, 1, 0, 1)]
    for label in (3.0, torch.rand(5), torch.tensor(1.0)):
        with pytest.raises(
            TypeError, match=r"item 0: the label is torch.float\d\d of shape .*class indices have an integer"
        ):
            CheckedDataset(Items(images([label])), 4)[0]


def test_where_the_label_is():
    items = [{"image": IMAGE, "category": 3, "label": 77}]
    assert CheckedDataset(Items(items), 5, label="category")[0] is items[0]
    assert CheckedDataset(Items(items), 5, label=lambda item: item["category"])[0] is items[0]
    with pytest.raises(TargetOutOfBoundsError):
        CheckedDataset(Items(items), 5)[0]
    with pytest.raises(LookupError, match="item 0: no label 'z': the keys are 'image', 'category', 'label'"):
        CheckedDataset(Items(items), 5, label="z")[0]
    with pytest.raises(TypeError, match="item 0: the label is a str"):
        CheckedDataset(Items(["cat"]), 5)[0]


def test_repr():
    shown = "CheckedDataset(Items of 2, num_classes=5, ignore_index=-100, label='y')"
    assert repr(CheckedDataset(Items([{"y": 0}, {"y": 1}]), 5, label="y")) == shown


def test_what_is_refused_at_once():
    for wrong in (Stream(), 5):
        with pytest.raises(TypeError, match="CheckedDataset wants a map-style dataset"):
            CheckedDataset(wrong, 5)
    with pytest.raises(ValueError, match="num_classes must be at least 1"):
        CheckedDataset(Items([]), 0)
    with pytest.raises(TypeError, match="ignore_index must be an int or None"):
        CheckedDataset(Items([]), 2, "x")
    with pytest.raises(IndexError):
        CheckedDataset(Items([]), 2)[0]


@pytest.mark.parametrize("kind", [Items, InBatches])
@pytest.mark.parametrize("workers", [0, 2])
def test_in_a_loader(kind, workers):
    labels = torch.arange(40) % 5
    checked = pickle.loads(pickle.dumps(CheckedDataset(kind(images(labels.tolist())), 5)))
    read = torch.cat([y for _, y in DataLoader(checked, 8, num_workers=workers)])
    assert torch.equal(read, labels)
    labels[29] = 5
    checked = CheckedDataset(kind(images(labels.tolist())), 5)
    batches = iter(DataLoader(checked, 8, num_workers=workers))
    for _ in range(3):
        next(batches)
    with pytest.raises(TargetOutOfBoundsError, match=f"item 29 of {kind.__name__}, label \\(\\) int64") as caught:
        next(batches)
    assert (caught.value.report is None) == bool(workers)
    if workers:
        assert "called at" not in str(caught.value)
    else:
        assert caught.value.report.call_site.source == "next(batches)"


def test_ints_cost_little():
    """No tensor is made for labels that are ints."""
    dataset = Items(images([1] * 10))
    checked = CheckedDataset(dataset, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", None)
        assert checked[3] is dataset.items[3]


# ---- subsets


def test_valid_subset():
    labels = [0, 7, 2, -1, -100, 4, 5]
    for dataset in (TensorDataset(torch.rand(7, 2), torch.tensor(labels)), Items(images(labels))):
        subset = valid_subset(dataset, 5)
        assert type(subset) is Subset and subset.dataset is dataset and subset.indices == [0, 2, 4, 5]
        assert audit(subset, 5).ok
        assert valid_subset(dataset, 5, -1).indices == [0, 2, 3, 5]
        assert valid_subset(dataset, None).indices == [0, 1, 2, 4, 5, 6]
        assert len(DataLoader(subset, 2)) == 2
    assert valid_subset(Items(images(labels)), 5, num_workers=2).indices == [0, 2, 4, 5]
    masks = torch.zeros(5, 3, 3).long()
    masks[1, 2, 2], masks[3] = 9, -5
    assert valid_subset(TensorDataset(masks), 5).indices == [0, 2, 4]


def test_valid_subset_of_probabilities():
    targets = torch.full((5, 4), 0.25)
    targets[1, 2], targets[3] = nan, 0.4
    dataset = TensorDataset(targets)
    assert valid_subset(dataset, 4, kind="probabilities").indices == [0, 2, 4]
    assert valid_subset(dataset, 4, kind="binary").indices == [0, 2, 3, 4]


def test_subsets_need_a_dataset():
    for wrong in (torch.arange(3), Stream()):
        with pytest.raises(TypeError, match="no subset of .*: that takes a map-style dataset"):
            valid_subset(wrong, 5)


# ---- LabelMap

IDS = [90, 5, -7, 5, 1, 90]


def test_remap():
    to_class = remap_labels(IDS)
    assert dict(to_class) == {-7: 0, 1: 1, 5: 2, 90: 3} and to_class.num_classes == 4 and len(to_class) == 4
    assert repr(to_class) == "LabelMap({-7: 0, 1: 1, 5: 2, 90: 3}, ignore_index=-100)"
    assert 5 in to_class and 6 not in to_class and to_class.get(6) is None and to_class[90] == 3
    for missing in (6, -100, 2**70, "5", None):
        with pytest.raises(KeyError):
            to_class[missing]
    assert dict(to_class.inverse) == {0: -7, 1: 1, 2: 5, 3: 90}
    assert dict(to_class.inverse.inverse) == dict(to_class)
    assert dict(pickle.loads(pickle.dumps(to_class))) == dict(to_class)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16])
@pytest.mark.parametrize("shape", [(), (0,), (100,), (3, 4, 5)])
def test_maps_tensors_and_arrays(dtype, shape):
    g = torch.Generator().manual_seed(0)
    ids = torch.tensor([1, 5, 90, 100])
    labels = ids[torch.randint(4, shape, generator=g)]
    ignored = torch.rand(shape, generator=g) < 0.2
    labels[ignored] = 77
    labels = labels.to(dtype)
    to_class = remap_labels(ids, 77)
    mapped = to_class(labels)
    plain = {1: 0, 5: 1, 90: 2, 100: 3, 77: 77}
    expected = torch.tensor([plain[v] for v in labels.reshape(-1).tolist()], dtype=torch.int64).view(shape)
    assert mapped.dtype == torch.int64 and torch.equal(mapped, expected)
    assert torch.equal(to_class.inverse(mapped), labels.long())
    strided = labels.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
    assert torch.equal(to_class(strided), expected)
    if shape:
        array = to_class(labels.numpy())
        assert isinstance(array, np.ndarray) and array.dtype == np.int64 and (array == expected.numpy()).all()
        assert torch.equal(torch.from_numpy(to_class.inverse(array)), labels.long())


def test_maps_ints():
    to_class = remap_labels(IDS)
    for five in (5, np.int64(5), np.array(5)):
        assert to_class(five) == 2 and type(to_class(five)) is int
    assert to_class(-100) == -100 and to_class.inverse(2) == 5


def test_unknown_labels_raise():
    to_class = remap_labels(IDS)
    with pytest.raises(ValueError, match=re.escape("2 of 4 labels are not among the 4: 6 at (0, 1), -8 at (1, 0)")):
        to_class(torch.tensor([[5, 6], [-8, -100]]))
    with pytest.raises(ValueError, match="1 of 1 labels are not among the 4: 6"):
        to_class(6)
    for wide in (2**63 - 1, -(2**63)):
        with pytest.raises(ValueError, match=str(wide)):
            to_class(torch.tensor([wide]))
    with pytest.raises(ValueError, match="4 at"):
        to_class.inverse(np.array([4]))
    with pytest.raises(ValueError, match="not among the 0"):
        remap_labels([])(torch.tensor([1]))
    for wrong in (torch.tensor(5.0), np.array([5.0]), 5.0, "5", [5]):
        with pytest.raises(TypeError, match="LabelMap wants"):
            to_class(wrong)


@pytest.mark.parametrize("ignore", [0, 1, 2, 3, 4, 255, -1])
def test_ignore_index_stays_and_is_no_class(ignore):
    ids = [0, 10, 20, 30, 255, -1, 1, 2]
    kept = sorted(v for v in ids if v != ignore)
    to_class = remap_labels(ids, ignore)
    assert list(to_class) == kept and ignore not in to_class.values()
    assert list(to_class.values()) == [c for c in range(len(kept) + 1) if c != ignore][: len(kept)]
    labels = torch.tensor([*ids, ignore])
    assert torch.equal(to_class.inverse(to_class(labels)), labels)
    assert (to_class(labels) == ignore).tolist() == (labels == ignore).tolist()
    assert audit(to_class(labels), to_class.num_classes, ignore).ok


def test_remap_reads_what_an_audit_reads():
    dataset = Items(images(IDS))
    for labels in (dataset, torch.tensor(IDS), np.array(IDS), set(IDS), DataLoader(dataset, 2), audit(dataset, 5)):
        assert dict(remap_labels(labels)) == {-7: 0, 1: 1, 5: 2, 90: 3}
    assert dict(remap_labels(Items([{"z": y} for y in IDS]), label="z")) == dict(remap_labels(IDS))
    found = audit(IDS, ignore_index=-7)
    assert dict(remap_labels(found)) == {1: 0, 5: 1, 90: 2} and remap_labels(found).ignore_index == -7
    assert dict(remap_labels(found, 5)) == {-7: 0, 1: 1, 90: 2}
    assert dict(remap_labels([1.0, 5.0])) == {1: 0, 5: 1}
    for wrong in ([1.0, 2.5], [1.0, nan]):
        with pytest.raises(ValueError, match="has no class indices but (not whole|NaN)"):
            remap_labels(wrong)
    with pytest.raises(ValueError, match="has no class indices but binary"):
        remap_labels(audit(torch.rand(5)))
    with pytest.raises(TypeError, match="ignore_index must be an int"):
        remap_labels(IDS, "x")


def test_remapped_labels_train():
    labels = torch.tensor([1, 5, 7, 33, 90] * 20)
    to_class = remap_labels(audit(labels))
    loss = torch.nn.functional.cross_entropy(torch.zeros(100, to_class.num_classes), to_class(labels))
    assert loss.item() == pytest.approx(math.log(5))
