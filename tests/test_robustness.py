"""What expert users broke once: pinned, so that it stays whole."""

import dataclasses
import pickle

import lossguard
import lossguard.functional as F
import pytest
import torch
import torch.nn.functional as native
from torch.utils.checkpoint import checkpoint

inf = float("inf")


def logits_and_labels(n=8, classes=5):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, classes, generator=generator), torch.arange(n) % classes


def test_a_loss_that_ends_a_checkpointed_block():
    x, t = logits_and_labels()
    x.requires_grad_()
    checkpoint(lambda a: F.cross_entropy(a, t), x, use_reentrant=False).backward()
    y = x.detach().clone().requires_grad_()
    native.cross_entropy(y, t).backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyError])
def test_an_error_of_a_users_hook_is_the_users(error):
    x, t = logits_and_labels()

    def pack(tensor):
        raise error("mine")

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), pytest.raises(error, match="mine"):
        F.cross_entropy(x.requires_grad_(), t)


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss", "binary_cross_entropy"])
def test_saved_tensors_that_come_back_strided(name):
    x, t = logits_and_labels()
    x, t = (x.sigmoid(), x.sigmoid().round()) if name == "binary_cross_entropy" else (x, t)
    grads = []
    for module in (F, native):
        leaf = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda z: z, lambda z: torch.stack([z, z + 9], -1)[..., 0]):
            loss = getattr(module, name)(leaf, t)
        grads += torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(*grads)


def test_more_dimensions_than_the_kernels_take():
    x, t = torch.rand([1] * 80), torch.zeros([1] * 79, dtype=torch.int64)
    with pytest.warns(lossguard.NotValidatedWarning, match="more than 64 dimensions"):
        assert F.cross_entropy(x, t) == native.cross_entropy(x, t)
    p = torch.rand([1] * 70, requires_grad=True)
    F.binary_cross_entropy(p, p.detach()).backward()
    assert p.grad.shape == p.shape


@pytest.mark.parametrize("where", ["input", "target", "weight"])
def test_cpu_and_meta_tensors_together_are_refused_as_natively(where):
    x, t = logits_and_labels()
    arguments = {"input": x, "target": t, "weight": torch.ones(5)}
    arguments[where] = arguments[where].to("meta")
    with pytest.raises(RuntimeError) as expected:
        native.cross_entropy(**arguments)
    with pytest.raises(type(expected.value)):
        F.cross_entropy(**arguments)


def test_a_tensor_whose_storage_was_freed():
    x, t = logits_and_labels()
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        F.cross_entropy(x, t)


@pytest.mark.parametrize("shift", [-100.0, -1000.0])
@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.t().contiguous().t()], ids=["rows", "lanes"])
def test_a_masked_prefix_longer_than_a_chunk(shift, layout):
    x = torch.randn(3, 20000, generator=torch.Generator().manual_seed(1)) + shift
    x[:, :16500] = -inf
    t = torch.tensor([16500, 19999, 18000])
    a, b = layout(x).clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = F.cross_entropy(a, t, check_finite=True), native.cross_entropy(b, t)
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize(
    "call",
    [
        lambda ops, x, t: ops.bce_backward(torch.ones(()), x, x, None, torch.zeros(3, 1), 0),
        lambda ops, x, t: ops.bce_backward(torch.ones(()), x, x, None, torch.zeros(2), 0),
        lambda ops, x, t: ops.nll_backward(torch.ones(()), x, x, None, torch.zeros(3), -100, 0),
        lambda ops, x, t: ops.nll_forward(x, x, None, -100, 0, 0),
        lambda ops, x, t: ops.cross_entropy_backward(torch.ones(()), x, t, None, torch.zeros(3), -100, 0.0, 1),
        lambda ops, x, t: ops.cross_entropy_backward(torch.ones(3), x, t, None, torch.zeros(11), -100, 0.0, 0),
        lambda ops, x, t: ops.cross_entropy_forward(x, t[:3], None, -100, 0.0, 1, 0),
        lambda ops, x, t: ops.cross_entropy_forward(x, t, torch.ones(4), -100, 0.0, 1, 0),
        lambda ops, x, t: ops.check_index(t, x, 2, 0, 0, 0),
        lambda ops, x, t: ops.check_index(t, x, 0, 99, 0, 0),
        lambda ops, x, t: ops.check_index(x, x, 0, 0, 0, 0),
    ],
)
def test_ops_called_directly_check_their_arguments(call):
    with pytest.raises(lossguard._ops.Unsupported):
        call(torch.ops.lossguard, *logits_and_labels())


def test_a_call_site_of_another_process():
    x, t = logits_and_labels()
    with pytest.raises(IndexError) as caught:
        torch.ops.lossguard.cross_entropy_forward(x, t + 7, None, -100, 0.0, 1, 123456)
    assert caught.value.report.call_site.file == __file__


def test_an_exception_rebuilt_from_its_text():
    """As torch does for errors of DataLoader workers."""
    again = lossguard.TargetOutOfBoundsError("some text")
    assert str(again) == "some text" and again.report is None
    assert str(pickle.loads(pickle.dumps(again))) == "some text"


def test_functionalize_goes_to_native():
    x, t = logits_and_labels()
    torch.testing.assert_close(torch.func.functionalize(F.cross_entropy)(x, t), native.cross_entropy(x, t))


def test_the_deprecated_name_of_mean():
    x, t = logits_and_labels()
    with pytest.warns(UserWarning, match="elementwise_mean"):
        assert F.cross_entropy(x, t, reduction="elementwise_mean") == F.cross_entropy(x, t)


def test_the_sample_of_a_vmap_is_named():
    x, _ = logits_and_labels(6, 3)
    t = torch.tensor([0, 1, 2, 0, 9, 1])
    with pytest.raises(IndexError) as caught:
        torch.func.vmap(lambda a, b: F.cross_entropy(a[None], b[None]))(x, t)
    assert caught.value.report.vmap == (4,) and "inside vmap, in its sample 4" in str(caught.value)
    with pytest.raises(IndexError) as caught:
        torch.func.vmap(torch.func.vmap(F.cross_entropy))(x.expand(2, 6, 3), torch.stack([t.clamp(max=2), t]))
    assert caught.value.report.vmap == (1, 4)


def test_a_warning_has_the_report():
    x, t = logits_and_labels()
    with pytest.warns(lossguard.LossValidationWarning) as caught:
        F.cross_entropy(x, t + 1, on_violation="warn")
    assert caught[0].message.report.values == [5]


def test_the_report_as_a_dict_has_what_its_properties_have():
    x, t = logits_and_labels()
    with pytest.raises(IndexError) as caught:
        F.cross_entropy(x, t + 1)
    report = caught.value.report
    as_dict = report.to_dict()
    assert as_dict["indices"] == [[4]] and as_dict["values"] == [5] and as_dict["counts"] == report.counts
    assert set(as_dict) >= {field.name for field in dataclasses.fields(report)}


@pytest.mark.parametrize("tensors", [(None, torch.tensor([0])), (torch.zeros(1, 3), None), (None, None)])
def test_none_for_a_tensor_is_a_type_error(tensors):
    for function in (F.cross_entropy, F.nll_loss):
        with pytest.raises(TypeError, match="Tensor"):
            function(*tensors)
