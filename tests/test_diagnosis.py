"""Causes: found in realistic batches, not found in their neighbours', with evidence that holds and a fix that works."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, NamedTuple

import lossguard
import pytest
import torch
from lossguard import LossValidationError, diagnosis
from lossguard.diagnosis import Cause, diagnose
from torch import Tensor

CE, NLL, BCE, LOGITS = "CrossEntropyLoss", "NLLLoss", "BCELoss", "BCEWithLogitsLoss"
COCO = [i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)]


class Call(NamedTuple):
    loss: str
    input: Tensor
    target: Tensor
    options: dict[str, Any]

    def error(self) -> LossValidationError:
        with pytest.raises(LossValidationError) as caught:
            self.criterion()(self.input, self.target)
        return caught.value

    def criterion(self) -> torch.nn.Module:
        return getattr(lossguard, self.loss)(**self.options, **({} if self.loss == BCE else {"check_finite": True}))

    def batch(self) -> dict[str, Tensor]:
        weight = self.options.get("weight")
        return {"input": self.input, "target": self.target} | ({} if weight is None else {"weight": weight})


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=rng(seed))


def drawn(values, *shape: int, seed: int = 1) -> Tensor:
    """From these values, each as likely as the others."""
    values = torch.tensor(list(values))
    return values[torch.randint(len(values), shape, generator=rng(seed))]


def ce(target: Tensor, classes: int, loss: str = CE, **options) -> Call:
    shape = (target.shape[0], classes, *target.shape[1:])
    x = normal(*shape)
    return Call(loss, x.log_softmax(1) if loss == NLL else x, target, options)


def with_some(target: Tensor, *values: int) -> Tensor:
    """The target with these values scattered in it, each three times."""
    target = target.clone()
    at = torch.randperm(target.numel(), generator=rng(2))[: 3 * len(values)]
    target.view(-1)[at] = torch.tensor(values).repeat(3)
    return target


def bce(target: Tensor, loss: str = LOGITS, **options) -> Call:
    x = normal(*target.shape)
    return Call(loss, x if loss == LOGITS else x.sigmoid(), target, options)


def discs(size: int = 96) -> Tensor:
    """A mask (1, size, size) of class 0 with discs of the classes 1 to 3, each in a ring of void, 255."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    mask = torch.zeros(1, size, size, dtype=torch.int64)
    for label, (cy, cx) in enumerate([(0.3, 0.3), (0.3, 0.75), (0.7, 0.5)], start=1):
        distance = ((y - cy * size) ** 2 + (x - cx * size) ** 2).sqrt() / size
        mask[0, distance < 0.2] = 255
        mask[0, distance < 0.17] = label
    return mask


def resized(mask: Tensor, size: int, mode: str) -> Tensor:
    return torch.nn.functional.interpolate(mask[:, None].float(), size, mode=mode)[:, 0].long()


def grey_bands(*levels: int) -> Tensor:
    """A mask (1, 32, 80) of upright bands."""
    return torch.tensor(levels).repeat_interleave(80 // len(levels)).expand(1, 32, -1).contiguous()


def standardised(x: Tensor) -> Tensor:
    centred = x - x.mean(0)
    return centred / (centred.square().sum(0) / (len(x) - 1)).sqrt()  # as x.std(0), without its warning


def blank_sample() -> Tensor:
    x = normal(16, 10)
    x[3] = 2.5
    return (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)


def probabilities(loss: str, target: Tensor) -> Call:
    return Call(loss, normal(len(target), 10).softmax(1), target, {})


TENS = drawn(range(10), 64)
NAN_AS_INTEGER = torch.iinfo(torch.int64).min  # which torch.tensor(nan).long() is on x86 and on GPUs

# The causes of each call, in order: by its report, and with the batch (None: the same).
CALLS: dict[str, tuple[Call, list[str], list[str] | None]] = {
    # labels counted from 1, and outputs that are missing
    "1 to 10": (ce(drawn(range(1, 11), 64), 10), ["one-based-labels"], None),
    "1 to 10, NLL": (ce(drawn(range(1, 11), 64), 10, NLL), ["one-based-labels"], None),
    "0 to 10": (ce(drawn(range(11), 64), 10), ["one-output-too-few"], None),
    "few labels": (ce(torch.tensor([97, 5, 62, 97]), 97), ["one-based-labels-or-one-output-too-few"], None),
    "0 to 14": (ce(drawn(range(15), 64), 10), ["too-few-outputs"], None),
    "one output": (ce(drawn([0, 1], 16), 1), ["one-output"], None),
    "no outputs": (Call(CE, torch.zeros(4, 0), torch.tensor([0, 1, 2, 0]), {}), ["no-outputs"], None),
    "a mask with 22 classes": (ce(drawn(range(22), 2, 16, 16), 20), ["too-few-outputs"], None),
    # sparse ids
    "COCO": (ce(drawn(COCO, 128), 80), ["sparse-ids"], None),
    "0 to 90": (ce(drawn(range(91), 256), 80), ["too-few-outputs"], None),
    "COCO's, for 79": (ce(drawn(COCO, 128), 79), ["too-few-outputs"], None),
    "Cityscapes": (ce(drawn(range(34), 1, 32, 32), 19), ["sparse-ids"], None),
    "33 of 19, no image": (ce(drawn(range(34), 256), 19), ["too-few-outputs"], None),
    "four ids": (ce(drawn([3, 17, 44, 59], 64), 8), ["too-few-outputs"], ["sparse-ids"]),
    "four ids, seen once": (ce(torch.tensor([3, 17, 44, 59]), 8), ["too-few-outputs"], None),
    "ids from a database": (ce(drawn([101, 4711, 30521], 32), 10), ["sparse-ids"], None),
    # markers that nobody has named
    "-1": (ce(with_some(TENS, -1), 10), ["ignore-index-not-set"], None),
    "-100": (ce(with_some(TENS, -100), 10, ignore_index=-1), ["ignore-index-not-set"], None),
    "255": (ce(with_some(drawn(range(19), 1, 32, 32), 255), 19), ["ignore-index-not-set"], None),
    "255 and -1": (
        ce(with_some(drawn(range(19), 1, 32, 32), 255, -1), 19),
        ["ignore-index-not-set", "ignore-index-not-set"],
        None,
    ),
    "-1 where 255 is ignored": (
        ce(with_some(drawn(range(19), 1, 32, 32), 255, -1), 19, ignore_index=255),
        ["ignore-index-not-set"],
        None,
    ),
    "-1 and -100 where 255 is ignored": (
        ce(with_some(TENS, 255, -1, -100), 10, ignore_index=255),
        ["ignore-index-not-set", "ignore-index-not-set"],
        None,
    ),
    "255 where -1 is ignored": (ce(with_some(TENS, 255, -1), 10, ignore_index=-1), ["ignore-index-not-set"], None),
    "255 and -100 where -1 is ignored": (
        ce(with_some(TENS, 255, -1, -100), 10, ignore_index=-1),
        ["ignore-index-not-set", "ignore-index-not-set"],
        None,
    ),
    "-7": (ce(with_some(TENS, -7), 10), ["negative-labels"], None),
    "-1 and -7": (ce(with_some(TENS, -1, -7), 10), ["ignore-index-not-set", "negative-labels"], None),
    "mostly 255": (ce(with_some(TENS, 255, 255, 12), 10), ["ignore-index-not-set", "too-few-outputs"], None),
    "mostly 12": (ce(with_some(TENS, 255, 12, 12), 10), ["too-few-outputs", "ignore-index-not-set"], None),
    "1 subtracted once too often": (
        ce(TENS - 1, 10),
        ["labels-start-at-minus-one", "ignore-index-not-set"],
        None,
    ),
    "-1 and 1": (ce(drawn([-1, 1], 32), 2), ["minus-one-and-one", "ignore-index-not-set"], None),
    "-1, 0 and 1": (ce(drawn([-1, 0, 1], 32), 2), ["ignore-index-not-set"], None),
    # images
    "0 and 255": (
        ce(drawn([0, 255], 2, 16, 16), 2),
        ["black-and-white-mask", "ignore-index-not-set"],
        None,
    ),
    "0, 1 and 255": (ce(drawn([0, 1, 255], 2, 16, 16), 2), ["ignore-index-not-set"], None),
    "grey levels": (ce(drawn([0, 64, 128, 192], 1, 16, 16), 4), ["grey-levels"], None),
    "16 grey levels": (ce(grey_bands(*range(0, 256, 16)), 16), ["grey-levels"], None),
    "made smaller": (ce(resized(discs(), 40, "bilinear"), 4, ignore_index=255), ["interpolated-labels"], None),
    "made larger": (
        ce(resized(discs(), 131, "bilinear"), 4, ignore_index=255),
        ["interpolated-labels", "grey-levels"],
        ["interpolated-labels"],
    ),
    "made larger, bicubic": (
        ce(resized(discs(), 131, "bicubic"), 4, ignore_index=255),
        ["interpolated-labels", "ignore-index-not-set"],  # with a few -1
        None,
    ),
    "grey levels where 255 is ignored": (
        ce(grey_bands(0, 64, 128, 192), 4, ignore_index=255),
        ["interpolated-labels", "grey-levels"],
        ["grey-levels"],
    ),
    "made larger by NEAREST": (ce(resized(discs(), 131, "nearest"), 4), ["ignore-index-not-set"], None),
    "bicubic, of two classes": (
        bce(torch.nn.functional.interpolate((discs() == 1).float()[:, None], 131, mode="bicubic")),
        ["interpolated-labels"],
        None,
    ),
    "20 beside 255": (
        ce(with_some(drawn(range(19), 1, 32, 32), 20, 255), 19),
        ["ignore-index-not-set", "too-few-outputs"],
        None,
    ),
    # other heads, other vocabularies, other memory
    "from 10 on": (ce(drawn(range(10, 15), 64), 5), ["labels-with-an-offset"], None),
    "of another head": (ce(drawn(range(10, 40), 64), 5), ["labels-of-another-head"], None),
    "two labels from 10 on": (ce(torch.tensor([10, 12]), 5), ["too-few-outputs"], None),
    "tokens": (ce(with_some(drawn(range(1200), 2, 64), 1200, 1207), 1200), ["tokenizer-out-of-step"], None),
    "tokens, flat": (ce(with_some(drawn(range(1, 6000), 64), 6003), 6000), ["tokenizer-out-of-step"], None),
    "a token of padding": (
        ce(with_some(drawn(range(1200), 2, 64), 1200), 1200),
        ["padding-token-in-labels", "tokenizer-out-of-step"],
        None,
    ),
    "classes, flat": (ce(with_some(drawn(range(1200), 64), 1207), 1200), ["too-few-outputs"], None),
    "tokens of another tokenizer": (ce(drawn(range(1600), 2, 64), 1200), ["too-few-outputs"], None),
    "uninitialised": (
        ce(torch.randint(-(2**63), 2**63 - 1, (64,), generator=rng()), 10),
        ["uninitialised-labels"],
        None,
    ),
    "NaN cast to int64": (ce(with_some(TENS, NAN_AS_INTEGER), 10), ["labels-cast-from-nan"], None),
    "NaN cast to int32": (
        ce(with_some(TENS, -(2**31), -1), 10),
        ["labels-cast-from-nan", "ignore-index-not-set"],
        None,
    ),
    "int32 as int64": (ce(drawn(range(10), 64).int().view(torch.int64), 10), ["int32-read-as-int64"], None),
    "a single pair": (ce(with_some(TENS, 0)[:1] + 2**32, 10), ["uninitialised-labels"], None),
    # targets between 0 and 1
    "ids for BCE": (bce(drawn(range(5), 64).float()), ["class-ids-as-probabilities"], None),
    "ids for BCE, of which some have weight 0": (
        bce(torch.tensor([0.0, 0.5, 3.0, 2.0]), weight=torch.tensor([1.0, 0.0, 1.0, 1.0])),
        ["class-ids-as-probabilities"],
        None,
    ),
    "ids as class probabilities": (
        Call(CE, normal(2, 1, 8, 8), drawn(range(5), 2, 1, 8, 8).float(), {}),
        ["class-ids-as-probabilities"],
        None,
    ),
    "ratings": (bce(drawn([0.0, 0.5, 2.0], 64)), ["class-ids-as-probabilities"], []),
    "1 and 2": (bce(drawn([1.0, 2.0], 64), BCE), ["one-based-labels"], None),
    "-1.0 and 1.0": (bce(drawn([-1.0, 1.0], 64)), ["minus-one-and-one"], None),
    "0 to 255": (bce(drawn(range(256), 1, 1, 16, 16).float()), ["scale-255"], None),
    "normalised": (bce(normal(64, seed=3)), ["targets-are-not-probabilities"], None),
    "swapped": (
        Call(LOGITS, drawn([0.0, 1.0], 64), normal(64), {}),
        ["targets-are-not-probabilities"],
        ["swapped-arguments"],
    ),
    "NaN in the target": (bce(torch.tensor([0.0, 1.0, math.nan, 1.0])), ["nan-in-target"], None),
    "an infinite target": (bce(torch.tensor([0.0, 1.0, math.inf])), [], None),
    # probabilities
    "logits": (Call(BCE, normal(64), drawn([0.0, 1.0], 64), {}), ["logits-to-bce"], None),
    "rounded": (
        Call(BCE, torch.full((8,), 0.1, dtype=torch.float64).cumsum(0).float() * 1.2500001, torch.zeros(8), {}),
        ["rounded-probabilities"],
        None,
    ),
    "an untrainable model": (
        Call(BCE, (normal(16, 4) * math.nan).sigmoid(), drawn([0.0, 1.0], 16, 4), {}),
        ["nan-upstream"],
        None,
    ),
    "a blank sample": (Call(BCE, blank_sample().sigmoid(), drawn([0.0, 1.0], 16, 10), {}), ["nan-in-samples"], None),
    "the last batch": (
        Call(BCE, standardised(normal(1, 4)).sigmoid(), torch.ones(1, 4), {}),
        ["batch-of-one", "nan-upstream"],
        None,
    ),
    # finite logits
    "an overflow": (
        Call(CE, torch.full((8, 10), 300.0).half() * torch.full((8, 10), 300.0).half(), drawn(range(10), 8), {}),
        ["float16-overflow", "nan-upstream"],
        None,
    ),
    "an overflow of float32": (Call(CE, (100 * normal(8, 10)).exp(), drawn(range(10), 8), {}), ["nan-upstream"], None),
    "NaN logits": (Call(CE, normal(16, 10) * math.nan, drawn(range(10), 16), {}), ["nan-upstream"], None),
    "NaN logits of a sample": (
        Call(CE, blank_sample(), drawn(range(10), 16), {}),
        ["nan-upstream"],
        ["nan-in-samples"],
    ),
    "NaN logits of a single sample": (
        Call(CE, standardised(normal(1, 10)), torch.tensor([3]), {}),
        ["batch-of-one", "nan-upstream"],
        None,
    ),
    "log of 0": (
        Call(NLL, torch.nn.functional.one_hot(TENS, 10).float().log(), (TENS + 1) % 10, {}),
        ["log-of-zero"],
        None,
    ),
    "all masked": (
        Call(CE, normal(64, 10).masked_fill((TENS == 4)[:, None], -math.inf), TENS, {}),
        ["all-classes-masked"],
        None,
    ),
    # what the losses do not check, beside what they do
    "softmax twice": (
        probabilities(CE, with_some(TENS, -1)),
        ["ignore-index-not-set"],
        ["ignore-index-not-set", "softmax-twice"],
    ),
    "probabilities to NLL": (
        probabilities(NLL, with_some(TENS, -1)),
        ["ignore-index-not-set"],
        ["ignore-index-not-set", "probabilities-to-nll"],
    ),
    "logits to NLL": (
        Call(NLL, normal(64, 10), with_some(TENS, -1), {}),
        ["ignore-index-not-set"],
        ["ignore-index-not-set", "logits-to-nll"],
    ),
    "log-probabilities to NLL": (ce(with_some(TENS, -1), 10, NLL), ["ignore-index-not-set"], None),
    "sigmoid twice": (
        Call(LOGITS, normal(64).sigmoid(), drawn([-1.0, 1.0], 64), {}),
        ["minus-one-and-one"],
        ["minus-one-and-one", "sigmoid-twice"],
    ),
}


def names(causes: list[Cause]) -> list[str]:
    return [cause.name for cause in causes]


@pytest.mark.parametrize("name", CALLS)
def test_causes_of_a_report(name):
    call, expected, _ = CALLS[name]
    error = call.error()
    causes = diagnose(error.report)
    assert names(causes) == expected
    assert error.report.hints == [cause.what for cause in causes][:3]
    for cause in causes[:3]:
        assert f": {cause.what}\n" in f"{error}\n"


@pytest.mark.parametrize("name", CALLS)
def test_causes_with_the_batch(name):
    call, without, expected = CALLS[name]
    assert names(diagnose(call.error(), call.batch())) == (without if expected is None else expected)


def every_cause() -> list[Cause]:
    """All that the calls above give, with the batch and without, and what takes several reports."""
    causes = diagnose(rotated_heads())
    for call, *_ in CALLS.values():
        error = call.error()
        causes += diagnose(error) + diagnose(error, call.batch())
    return causes


def test_every_rule_has_a_case():
    """And not only every name: a rule whose sentence nobody has seen is not tested."""
    found = [(cause.name, cause.what) for cause in every_cause()]
    rules = [*diagnosis._LABELS, *diagnosis._SOFT_TARGETS, *diagnosis._PROBABILITIES, *diagnosis._NOT_FINITE]
    for rule in [*rules, *diagnosis._BESIDES]:
        sentence = ".*".join(map(re.escape, re.split(r"\{[^{}]*\}", rule.what.replace("{{", "<").replace("}}", ">"))))
        sentence = sentence.replace("<", r"\{").replace(">", r"\}")
        assert any(name == rule.name and re.fullmatch(sentence, what) for name, what in found), rule.what


def test_every_text_is_whole():
    for cause in every_cause():
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", cause.name)
        assert len(cause.what) < 250 and cause.what.endswith(".") and cause.evidence.endswith(".")
        assert "{f" not in str(cause) and "{s" not in str(cause) and re.search(r"\d", cause.evidence)
        assert len(cause.fix.splitlines()) <= 2 and max(map(len, cause.fix.splitlines())) <= 120
        compile(cause.fix, cause.name, "exec")


# ---- evidence


def test_likeliest_first_is_what_explains_the_most():
    few, many = CALLS["mostly 12"][0], CALLS["mostly 255"][0]
    for call in (few, many):
        shares = [int(re.match(r"(\d+) of", cause.evidence)[1]) for cause in diagnose(call.error())]
        assert shares == sorted(shares, reverse=True) and sum(shares) == call.error().report.count


def test_evidence_counts():
    target = torch.tensor([1, 10, 3, 10, 4, 5, 6, 7, 8, 9, 2, 2])
    call = ce(target, 10)
    [cause] = diagnose(call.error())
    assert cause.evidence == "2 of 12 targets are 10; the valid ones run from 1 to 9."
    [cause] = diagnose(call.error(), {"target": target})
    assert cause.evidence.endswith(" Different labels in the batch: 10, of which 1 invalid: 10 (2 times).")
    labels = torch.tensor([0, 1, 20, 21, 22, 23, 24, 25, 20])
    [cause] = diagnose(ce(labels, 10).error(), {"target": labels})
    assert (
        "8, of which 6 invalid: 20 (2 times), 21 (once), 22 (once), 23 (once), 24 (once) and 1 more." in cause.evidence
    )


def test_evidence_leaves_ignored_labels_out():
    call = CALLS["made smaller"][0]
    [cause] = diagnose(call.error(), call.batch())
    values = {v for v in call.target.unique().tolist() if v >= 4} - {255}
    assert f"hold {len(values)} different values" in cause.evidence and len(values) >= 8


def test_a_cause_as_text():
    cause = Cause("a-name", "What.", "evidence.", "one\ntwo")
    assert str(cause) == "a-name: What.\n  evidence: evidence.\n  fix: one\n       two"
    with pytest.raises(dataclasses.FrozenInstanceError):
        cause.name = "another"


# ---- fixes


class Model(torch.nn.Module):
    """As of a library of language models, or of vision."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def resize_token_embeddings(self, size: int) -> None:
        self.head = torch.nn.Conv1d(3, size, kernel_size=1)


LINEAR = {"model": Model(torch.nn.Linear(7, 10)), "x": normal(64, 7)}

# What a fix needs besides the names of the loss's arguments, for the calls that the fixes of all causes together cure.
FIXED: dict[str, dict[str, Any]] = {
    "1 to 10": {},
    "1 to 10, NLL": {},
    "0 to 10": LINEAR,
    "0 to 14": LINEAR,
    "no outputs": {"model": Model(torch.nn.Linear(7, 1)), "x": normal(4, 7)},
    "a mask with 22 classes": {"model": Model(torch.nn.Conv2d(3, 20, 1)), "x": normal(2, 3, 16, 16)},
    "one output": {},
    "-1": {},
    "-100": {},
    "255": {},
    "-1 where 255 is ignored": {},
    "-1 and -100 where 255 is ignored": {},
    "-7": {},
    "1 subtracted once too often": {},
    "-1 and 1": {},
    "0 and 255": {},
    "made smaller": {"mask": discs(), "size": 40},
    "bicubic, of two classes": {},
    "from 10 on": {},
    "a token of padding": {
        "model": Model(torch.nn.Conv1d(3, 1200, 1)),
        "tokenizer": range(1201),
        "x": normal(2, 3, 64),
    },
    "tokens": {"model": Model(torch.nn.Conv1d(3, 1200, 1)), "tokenizer": range(1208), "x": normal(2, 3, 64)},
    "COCO": {"labels": torch.tensor(COCO)},
    "grey levels": {"labels": torch.tensor([0, 64, 128, 192])},
    "grey levels where 255 is ignored": {"labels": torch.tensor([0, 64, 128, 192, 255])},
    "uninitialised": {},
    "NaN cast to int64": {"labels": torch.where(with_some(TENS, -1) < 0, math.nan, TENS.double())},
    "ids for BCE": {"logits": normal(64, 5)},
    "ids as class probabilities": {"input": normal(2, 5, 8, 8)},
    "1 and 2": {},
    "-1.0 and 1.0": {},
    "0 to 255": {},
    "normalised": {},
    "swapped": {},
    "NaN in the target": {"target": torch.tensor([0.0, 1.0, 1.0, 1.0])},  # says where; the rest is the data's affair
    "logits": {},
    "rounded": {},
    "an overflow": {"model": Model(torch.nn.Linear(7, 10)), "x": normal(8, 7)},
    "log of 0": {"logits": normal(64, 10)},
    "all masked": {},
    "softmax twice": {"logits": normal(64, 10)},
    "probabilities to NLL": {"logits": normal(64, 10)},
    "logits to NLL": {},
    "sigmoid twice": {"logits": normal(64)},
}


@pytest.mark.parametrize("name", FIXED)
def test_a_fix_works(name):
    call, _, _ = CALLS[name]
    causes = diagnose(call.error(), call.batch())
    scope = {"torch": torch, "lossguard": lossguard, "criterion": call.criterion(), **FIXED[name]}
    scope = {"input": call.input, "target": call.target.clone()} | scope
    for cause in causes:
        if "find_nonfinite" not in cause.fix:
            exec(cause.fix, scope)
    if "model" in scope:
        scope["input"] = scope["model"](scope["x"])
    loss = scope["loss"] if "loss" in scope else scope["criterion"](scope["input"], scope["target"])
    assert loss.isfinite() or name == "uninitialised"  # where nothing is left


def test_the_fix_for_int32_labels_reads_them(tmp_path):
    numpy = pytest.importorskip("numpy")
    labels = drawn(range(10), 64)
    labels.int().numpy().tofile(tmp_path / "labels")
    misread = torch.from_numpy(numpy.fromfile(tmp_path / "labels", numpy.int64))
    [cause] = diagnose(ce(misread, 10).error())
    scope = {"numpy": numpy, "path": tmp_path / "labels"}
    exec(cause.fix, scope)
    assert torch.equal(torch.from_numpy(scope["labels"]), labels)


# ---- what it takes


def rotated_heads() -> list[lossguard.Report]:
    """Three heads, of which each has the labels of the next."""
    return [ce(drawn(range(10), 64), 5).error().report, ce(drawn(range(20), 64), 10).error().report]


def test_several_reports():
    reports = rotated_heads()
    causes = diagnose(reports)
    assert names(causes) == ["labels-of-another-head", "too-few-outputs"]
    assert "with 10 outputs" in causes[0].what
    for cause, report in zip(causes, reports):
        assert cause.evidence.startswith(f"{report.call_site.short()}: ")
    assert names(diagnose(reports[:1])) == ["too-few-outputs"] and ": " not in diagnose(reports[:1])[0].evidence
    assert diagnose([reports[0]] * 2) == diagnose([reports[0]] * 3)  # said once
    assert diagnose([]) == []


def test_an_exception_with_several_reports():
    reports = [CALLS["1 to 10"][0].error().report, CALLS["logits"][0].error().report]
    error = lossguard.TargetOutOfBoundsError(reports[0], reports[1:])
    assert names(diagnose(error)) == ["one-based-labels", "logits-to-bce"]
    assert diagnose(error) == diagnose(reports)


def test_the_batch_goes_with_its_report():
    first, second = CALLS["four ids"][0], CALLS["swapped"][0]
    reports = [first.error().report, second.error().report]
    assert names(diagnose(reports)) == ["too-few-outputs", "targets-are-not-probabilities"]
    assert names(diagnose(reports, second.batch())) == ["too-few-outputs", "swapped-arguments"]
    assert names(diagnose(reports, first.batch())) == ["sparse-ids", "targets-are-not-probabilities"]


def test_an_index_among_reports_of_losses():
    with lossguard.patched(indexing=True, when="immediately"), pytest.raises(LossValidationError) as caught:
        torch.gather(normal(3, 5), 1, torch.tensor([[5]]))
    causes = diagnose([caught.value.report, CALLS["1 to 10"][0].error().report], CALLS["1 to 10"][0].batch())
    assert names(causes) == ["index-of-another-tensor", "one-based-labels"]


@pytest.mark.parametrize("name", CALLS)
def test_a_report_without_an_input(name):
    """As of the labels of a dataset, where there is no model yet."""
    report = CALLS[name][0].error().report
    if report.tensor == "target":
        of_data = dataclasses.replace(report, shapes={"target": report.shapes["target"]}, dtypes={"target": "int64"})
        assert names(diagnose(of_data)) == CALLS[name][1]
        nothing = dataclasses.replace(report.sections[0], values=[], indices=[])
        diagnose(dataclasses.replace(of_data, sections=[nothing]))  # and does not fail


def test_an_exception_that_came_as_text():
    assert diagnose(LossValidationError("Target 97 is out of bounds.")) == []
    assert diagnose(LossValidationError("Target 97 is out of bounds."), CALLS["1 to 10"][0].batch()) == []


def test_half_a_batch():
    call = CALLS["softmax twice"][0]
    error = call.error()
    assert names(diagnose(error, {"target": call.target})) == ["ignore-index-not-set"]
    assert names(diagnose(error, {"input": call.input, "target": None})) == ["ignore-index-not-set", "softmax-twice"]
    more = {**call.batch(), "pos_weight": "not looked at"}
    assert diagnose(error, more) == diagnose(error, call.batch())


def test_the_batch_is_left_alone():
    call = CALLS["softmax twice"][0]
    input = call.input.clone().requires_grad_()
    before = call.target.clone()
    diagnose(call.error(), {"input": input, "target": call.target})
    assert torch.equal(call.target, before) and input.grad is None and torch.equal(input, call.input)


def test_under_vmap_the_batch_is_that_of_the_sample():
    target = torch.stack([TENS, drawn(range(1, 11), 64), TENS])
    with pytest.raises(LossValidationError) as caught:
        torch.func.vmap(lossguard.functional.cross_entropy)(normal(3, 64, 10), target)
    [sample] = caught.value.report.vmap
    assert names(diagnose(caught.value, {"target": target[sample]})) == ["one-based-labels"]
    with pytest.raises(ValueError, match=r"its target has shape \(3, 64\), that of the report \(64,\)"):
        diagnose(caught.value, {"target": target})


@pytest.mark.parametrize(
    "report, error, match",
    [
        ("Target 97", TypeError, "wants a Report, a LossValidationError or a list of Reports, got str"),
        (ValueError("x"), TypeError, "got ValueError"),
        (None, TypeError, "got NoneType"),
        (["report"], TypeError, "got list"),
    ],
)
def test_what_is_no_report(report, error, match):
    with pytest.raises(error, match=match):
        diagnose(report)


@pytest.mark.parametrize(
    "batch, error, match",
    [
        ((TENS, TENS), TypeError, "wants a mapping with .* got tuple"),
        ({"inputs": TENS, "labels": TENS}, ValueError, "neither \"input\" nor \"target\" but 'inputs', 'labels'"),
        ({}, ValueError, "but nothing"),
        ({"target": [1, 2]}, TypeError, r'batch\["target"\] is to be a tensor, got list'),
        ({"target": TENS[:9]}, ValueError, r"not the one of the report: its target has shape \(9,\)"),
        ({"target": TENS.float()}, ValueError, "its target is float32, that of the report int64"),
        ({"target": TENS}, ValueError, r"its target is \d at \(\d+,\), that of the report 10"),
        ({"input": normal(64, 9)}, ValueError, r"its input has shape \(64, 9\), that of the report \(64, 10\)"),
    ],
)
def test_what_is_not_the_batch(batch, error, match):
    with pytest.raises(error, match=match):
        diagnose(CALLS["1 to 10"][0].error(), batch)


# ---- any numbers


EXTREMES = [-(2**63), -(2**31), -100, -2, -1, 0, 1, 2, 4, 5, 7, 19, 80, 90, 200, 255, 256, 300, 999, 2**31, 2**63 - 1]
FLOATS = [
    -math.inf,
    -1e30,
    -3.0,
    -1.0,
    -0.2,
    0.0,
    0.5,
    1.0,
    1.0000002,
    1.2,
    2.0,
    7.0,
    128.0,
    255.0,
    1e30,
    math.inf,
    math.nan,
]


@pytest.mark.parametrize("seed", range(150))
def test_it_has_something_to_say_about_any_numbers(seed):
    """An exception here would take the place of the violation's."""
    g = rng(seed)

    def pick(values):
        return values[int(torch.randint(len(values), (), generator=g))]

    def some(values, *shape: int) -> Tensor:
        few = [pick(values) for _ in range(pick([1, 2, 5, 20]))]
        return drawn(few, *shape, seed=seed)

    classes, shape = (
        pick([0, 1, 2, 5, 19, 80, 133, 256, 1000]),
        pick([(1,), (12,), (2, 9), (1, 4, 5), (2, 3, 1, 4), ()]),
    )
    loss = pick([CE, NLL, BCE, LOGITS, "probabilities"])
    options = {"ignore_index": pick([-100, -1, 255])} if loss in (CE, NLL) else {}
    if loss in (CE, NLL):
        size = (shape[0], classes, *shape[1:]) if shape else (classes,)
        call = Call(loss, some(FLOATS, *size), some(EXTREMES, *shape), options)
    elif loss == "probabilities":
        call = Call(CE, some(FLOATS, 4, 3), some(FLOATS, 4, 3), {"weight": torch.tensor([1.0, 0.0, 2.0])})
    else:
        call = Call(loss, some(FLOATS, *shape), some(FLOATS, *shape), {"weight": torch.ones(shape[-1:])})
    try:
        call.criterion()(call.input, call.target)
    except LossValidationError as error:
        parts = [{"input": call.input}, {"target": call.target}, call.batch()]
        for causes in (diagnose(error), *(diagnose(error, part) for part in parts)):
            assert len({(cause.name, cause.what) for cause in causes}) == len(causes) < 10


EMBEDDING = torch.zeros(1000, 2)
INDICES = {
    "labels-as-tokens": lambda: torch.nn.functional.embedding(torch.tensor([5, -100, 7, -100]), EMBEDDING),
    "vocabulary-out-of-step": lambda: torch.nn.functional.embedding(torch.tensor([5, 1000, 1003]), EMBEDDING),
    "embedding-too-small": lambda: torch.nn.functional.embedding(torch.tensor([5, 1200]), EMBEDDING),
    "one-based-indices": lambda: torch.zeros(2, 3).gather(1, torch.tensor([[1, 2, 3], [3, 1, 2]])),
    "index-of-another-tensor": lambda: torch.zeros(3, 3)[torch.tensor([0, 7])],
    "negative-index": lambda: torch.zeros(3, 3).index_select(0, torch.tensor([0, -1])),
}


@pytest.mark.parametrize("name", INDICES)
def test_causes_of_indices(name: str) -> None:
    with lossguard.patched(indexing=True, when="immediately"), pytest.raises(lossguard.IndexOutOfBoundsError) as caught:
        INDICES[name]()
    (cause,) = diagnose(caught.value)
    assert cause.name == name and cause.evidence and cause.fix
    assert f"likely cause: {cause.what}" in str(caught.value)
    assert "{" not in cause.what + cause.evidence
