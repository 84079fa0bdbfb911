"""A few rows of NLL are computed by native torch, which checks labels itself: nobody can tell but by the clock."""

import pickle

import lossguard
import lossguard.functional as F
import pytest
import torch

FEW = 4096


@pytest.fixture(params=[-1, FEW], ids=["kernel", "native"])
def few(request, monkeypatch):
    monkeypatch.setattr(F, "_FEW", request.param)


def batch(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    log_p = torch.randn(32, 10, generator=generator).log_softmax(1).to(dtype)
    return log_p, torch.randint(0, 10, (32,), generator=generator)


def taken(log_p, target, **options):
    """The node of the graph tells which way the call went."""
    return type(F.nll_loss(log_p.requires_grad_(), target, **options).grad_fn).__name__


def test_native_takes_what_it_is_right_about(monkeypatch):
    monkeypatch.setattr(F, "_FEW", FEW)
    log_p, target = batch()
    assert taken(log_p, target) == "NllLossBackward0"
    assert taken(log_p, target, strict=False) == "NllLossBackward0"
    for options in ({"on_violation": "skip"}, {"on_violation": "warn"}, {"check_finite": True}):
        assert taken(log_p.detach(), target, **options) == "_NLLBackward"
    assert taken(batch(torch.bfloat16)[0], target) == "_NLLBackward"
    assert taken(log_p.detach().repeat(100, 1), target.repeat(100)) == "_NLLBackward"
    with lossguard.guard(on_violation="skip"):
        assert taken(log_p.detach(), target) == "_NLLBackward"


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_and_gradients(few, reduction, weighted):
    log_p, target = batch(torch.float64)
    target[[3, 17]] = -100
    weight = torch.linspace(0.5, 2, 10, dtype=torch.float64) if weighted else None
    log_p.requires_grad_()
    loss = F.nll_loss(log_p, target, weight=weight, reduction=reduction)
    loss.sum().backward()
    picked = torch.ones(10, dtype=torch.float64) if weight is None else weight
    keep = target != -100
    w = torch.where(keep, picked[target.clamp(min=0)], 0.0)
    each = -w * log_p.detach().gather(1, target.clamp(min=0)[:, None])[:, 0]
    scale = 1 / w.sum() if reduction == "mean" else 1.0
    expected = {"none": each, "sum": each.sum(), "mean": each.sum() * scale}[reduction]
    torch.testing.assert_close(loss.detach(), expected)
    gradient = torch.zeros(32, 10, dtype=torch.float64)
    gradient[torch.arange(32), target.clamp(min=0)] = -w * scale
    torch.testing.assert_close(log_p.grad, gradient)


def test_the_report(few):
    log_p, target = batch()
    target[[5, 30]] = torch.tensor([10, -7])
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
        F.nll_loss(log_p, target)
    report = pickle.loads(pickle.dumps(caught.value)).report
    assert report.indices == [(5,), (30,)] and report.values == [10, -7] and report.count == 2
    assert report.call_site.source == "F.nll_loss(log_p, target)"


def test_each_call_counts_once_and_the_same_violation_is_raised_every_time(few):
    log_p, target = batch()
    lossguard.check()
    lossguard.reset_stats()
    bad = target.clone()
    bad[3] = 10
    for labels in (target, bad, bad, target):
        if labels is bad:
            with pytest.raises(lossguard.TargetOutOfBoundsError):
                F.nll_loss(log_p, labels)
                lossguard.check()
        else:
            F.nll_loss(log_p, labels)
    stats = lossguard.stats().values()
    assert [sum(getattr(s, name) for s in stats) for name in ("calls", "elements", "bad_calls")] == [4, 128, 2]


def test_arguments_that_do_not_fit(few):
    log_p, target = batch()
    with pytest.raises(ValueError, match="batch_size"):
        F.nll_loss(log_p, target[:5])
    with pytest.raises(RuntimeError, match="weight tensor should be defined"):
        F.nll_loss(log_p, target, weight=torch.ones(3))
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
        F.nll_loss(log_p, target, weight=torch.ones(10, requires_grad=True))
