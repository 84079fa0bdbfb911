"""Where lossguard departs from native torch on purpose. README.md has a row for each of these tests."""

import lossguard
import lossguard.functional as F
import pytest
import torch
import torch.nn.functional as native

inf, nan = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_of_halves_are_summed_in_float32(dtype):
    rows = 100_000  # as float16 a count or sum of these overflows, as bfloat16 it stalls at 256
    log_p = torch.full((rows, 2), -1.0, dtype=dtype)
    target = torch.zeros(rows, dtype=torch.int64)
    assert F.nll_loss(log_p, target) == 1.0
    weight = torch.tensor([3.0, 1.0], dtype=dtype)
    assert F.nll_loss(log_p, target, weight=weight) == 1.0
    p = torch.full((rows,), 0.5, dtype=dtype)
    expected = torch.tensor(0.6931471805599453, dtype=dtype)
    assert F.binary_cross_entropy(p, p) == expected
    assert F.binary_cross_entropy_with_logits(p * 0, p) == expected
    x = torch.randn(rows, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    reference = native.cross_entropy(x.double(), target)
    assert F.cross_entropy(x, target) == reference.to(dtype)  # the right value, rounded once


def test_bce_gradient_of_a_perfect_float16_prediction_is_finite():
    p = torch.tensor([0.25, 1.0, 0.0], dtype=torch.float16, requires_grad=True)
    F.binary_cross_entropy(p, torch.tensor([0.0, 1.0, 0.0], dtype=torch.float16), reduction="sum").backward()
    torch.testing.assert_close(p.grad, torch.tensor([4 / 3, 0.0, 0.0], dtype=torch.float16))


@pytest.mark.parametrize(
    "layout",
    [
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: t.permute(0, 2, 3, 1).contiguous().movedim(-1, 1),
        lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
        lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    ],
    ids=["channels_last", "movedim", "transposed", "reversed"],
)
def test_nll_backward_takes_any_layout(layout):
    generator = torch.Generator().manual_seed(1)
    log_p = torch.randn(2, 5, 3, 4, generator=generator).log_softmax(1)
    target = torch.randint(0, 5, (2, 3, 4), generator=generator)
    plain = log_p.clone().requires_grad_()
    native.nll_loss(plain, target).backward()
    x = layout(log_p).requires_grad_()
    F.nll_loss(x, target).backward()
    torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.parametrize("poison", [nan, inf, -inf])
@pytest.mark.parametrize("shape", [(4, 3), (4, 200), (4, 3, 2, 2)], ids=str)
def test_ignored_rows_have_zero_gradient_whatever_they_hold(poison, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    x[1] = poison
    x.requires_grad_()
    target = torch.zeros(shape[:1] + shape[2:], dtype=torch.int64)
    target[1] = -100
    loss = F.cross_entropy(x, target, label_smoothing=0.1)
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all()
    assert (x.grad[1] == 0).all() and (x.grad[0] != 0).any()


def test_bce_with_logits_at_infinite_logits():
    x = torch.tensor([-inf, inf, -inf, inf], requires_grad=True)
    y = torch.tensor([0.0, 1.0, 1.0, 0.0])
    loss = F.binary_cross_entropy_with_logits(x, y, reduction="none")
    assert loss.tolist() == [0.0, 0.0, inf, inf]
    loss.sum().backward()
    assert x.grad.tolist() == [0.0, 0.0, -1.0, 1.0]
    weighted = F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.tensor(3.0), reduction="none")
    assert weighted.tolist() == [0.0, 0.0, inf, inf]


def test_bce_target_gradient_is_that_of_the_clamped_logarithm():
    p = torch.tensor([0.0, 1.0, 0.25])
    y = torch.tensor([0.5, 0.5, 0.5], requires_grad=True)
    F.binary_cross_entropy(p, y, reduction="sum").backward()
    # the loss is linear in y: its slope is the difference of the loss between y = 1 and y = 0
    zero, one = torch.zeros(3), torch.ones(3)
    slope = F.binary_cross_entropy(p, one, reduction="none") - F.binary_cross_entropy(p, zero, reduction="none")
    torch.testing.assert_close(y.grad, slope)
    assert y.grad[:2].tolist() == [100.0, -100.0]


@pytest.mark.parametrize("classes", [4, 100])
def test_a_probability_of_zero_costs_nothing_at_a_masked_class(classes):
    x = torch.randn(2, classes, generator=torch.Generator().manual_seed(3))
    x[:, 1] = -inf
    x.requires_grad_()
    q = torch.full((2, classes), 1 / (classes - 1))
    q[:, 1] = 0
    loss = F.cross_entropy(x, q)
    kept = [c for c in range(classes) if c != 1]
    plain = x.detach()[:, kept].requires_grad_()
    expected = native.cross_entropy(plain, q[:, kept])
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(x.grad[:, kept], plain.grad)
    assert (x.grad[:, 1] == 0).all()


def test_more_than_two_to_the_31_elements():
    n = 2**31 + 9
    target = torch.zeros(n, dtype=torch.uint8)
    target[-1] = 7
    log_p = torch.tensor([-1.0, -2.0]).expand(n, 2)  # no memory: every row is the same one
    with pytest.warns(lossguard.LossValidationWarning, match=rf"(?s)1 of {n} targets.*\({n - 1},\) +7\n") as caught:
        loss = F.nll_loss(log_p, target, on_violation="warn")
    assert len(caught) == 1 and loss == 1.0


def test_uint8_targets_work_for_images_too():
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(4))
    target = torch.randint(0, 3, (2, 4, 4), generator=torch.Generator().manual_seed(5))
    assert F.cross_entropy(x, target.byte()) == F.cross_entropy(x, target)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1])
def test_label_smoothing_outside_its_range_is_refused(smoothing):
    with pytest.raises(RuntimeError, match="label_smoothing must be between 0.0 and 1.0"):
        F.cross_entropy(torch.randn(2, 3), torch.tensor([0, 1]), label_smoothing=smoothing)
