"""`patch(indexing=True)`: other operations' indices are checked, and torch's kernels never see one that is outside."""

from __future__ import annotations

import ctypes
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lossguard
import pytest
import torch
import torch.nn.functional as F
from lossguard import IndexOutOfBoundsError
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def unpatched_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lossguard._violations, "_warned", {})
    before = lossguard.policy()["when"]
    lossguard.configure(when="immediately")
    yield
    lossguard.configure(when=before)
    assert not lossguard._patch.is_patched() and "gather" not in vars(Tensor)


X = torch.arange(15.0).reshape(3, 5)
OF_ROWS = torch.tensor([[0, 4], [1, 2], [3, 0]])


def index(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def with_value(t: Tensor, place: tuple[int, ...], value: int) -> Tensor:
    t = t.clone()
    t[place] = value
    return t


# name: (call of an index, a good one, the bad value and where it is, the least valid value, how many there are)
Call = tuple[Callable[[Any], Any], Tensor, int, tuple[int, ...], int, int]
CALLS: dict[str, Call] = {
    "embedding": (lambda i: F.embedding(i, X), index(0, 2, 1), 3, (1,), 0, 3),
    "embedding module": (nn.Embedding.from_pretrained(X), OF_ROWS.clamp(max=2), -1, (2, 1), 0, 3),
    "embedding, int32": (lambda i: F.embedding(i, X), index(0, 2, dtype=torch.int32), 9, (1,), 0, 3),
    "embedding_bag": (lambda i: F.embedding_bag(i, X), OF_ROWS.clamp(max=2), 3, (0, 0), 0, 3),
    "gather": (lambda i: torch.gather(X, 1, i), OF_ROWS, 5, (1, 0), 0, 5),
    "gather method": (lambda i: X.gather(dim=-1, index=i), OF_ROWS, -1, (1, 0), 0, 5),
    "scatter": (lambda i: X.scatter(1, i, 7.0), OF_ROWS, 5, (2, 1), 0, 5),
    "scatter_": (lambda i: X.clone().scatter_(0, i, X), OF_ROWS.clamp(max=2), 3, (2, 1), 0, 3),
    "scatter_add": (lambda i: torch.scatter_add(X, 1, i, X), OF_ROWS, 5, (0, 0), 0, 5),
    "scatter_reduce": (lambda i: X.scatter_reduce(1, i, X, "amax"), OF_ROWS, 6, (0, 0), 0, 5),
    "index_select": (lambda i: torch.index_select(X, 0, i), index(2, 0), 3, (1,), 0, 3),
    "index_add": (lambda i: X.clone().index_add_(0, i, X[:2]), index(2, 0), 3, (0,), 0, 3),
    "index_copy": (lambda i: X.index_copy(0, i, X[:2]), index(2, 0), 3, (0,), 0, 3),
    "index_fill": (lambda i: X.index_fill(1, i, 1.0), index(-5, 4), 5, (1,), -5, 5),
    "take": (lambda i: torch.take(X, i), index(14, -15), -16, (1,), -15, 15),
    "one_hot": (lambda i: F.one_hot(i, 5), index(0, 4, 2), 5, (2,), 0, 5),
    "x[i]": (lambda i: X[i], index(0, -3, 2), 3, (0,), -3, 3),
    "x[:, i]": (lambda i: X[:, i], index(0, -5, 4), -6, (2,), -5, 5),
    "x[..., None, i]": (lambda i: X[..., None, i], index(0, 4), 5, (0,), -5, 5),
    "x[0, i]": (lambda i: X[0, i], index(0, 4), 7, (1,), -5, 5),
    "x[mask, i]": (lambda i: X[torch.tensor([True, False, True]), i], index(0, 4), 5, (1,), -5, 5),
    "x[i] = v": (lambda i: X.clone().__setitem__(i, 1.0), index(0, 2), 3, (1,), -3, 3),
    "index_put": (lambda i: torch.index_put(X, (i,), X[0]), index(0, 2), 3, (1,), -3, 3),
    "index_put_, second": (lambda i: X.clone().index_put_((index(0, 1), i), X[0, 0]), index(0, 2), 5, (1,), -5, 5),
}


@pytest.mark.parametrize("name", CALLS)
def test_indices_are_checked(name: str) -> None:
    call, good, value, place, least, size = CALLS[name]
    native = call(good)
    bad = with_value(good, place, value)
    with lossguard.patched(indexing=True):
        ours = call(good)
        assert ours is native is None or torch.equal(ours, native)
        with pytest.raises(IndexOutOfBoundsError) as caught:
            call(bad)
        report = caught.value.report
        assert (report.indices, report.values, report.count) == ([place], [value], 1)
        assert report.sections[0].seen == good.numel() and report.num_classes == size
        assert report.shapes["index"] == tuple(good.shape) and report.call_site.file == __file__
        text = str(caught.value)
        assert f"index {value} is out of bounds. {report.loss}: 1 of {good.numel()} indices is outside " in text
        assert f"outside [{least}, {size})." in text and f"valid: {least}..{size - 1}" in text
    with pytest.raises((IndexError, RuntimeError)) as natively:  # CPU torch checks as well
        call(bad)
    assert not isinstance(natively.value, lossguard.LossValidationError)


@pytest.mark.parametrize("name", ["embedding", "gather", "index_select", "take", "x[i]"])
@pytest.mark.parametrize("action", ["skip", "warn"])
def test_going_on_takes_the_nearest_valid_index(name: str, action: str) -> None:
    call, good, value, place, least, size = CALLS[name]
    nearest = size - 1 if value >= size else 0 if least == 0 or value < least else value
    expected = call(with_value(good, place, nearest))
    with lossguard.patched(indexing=True, on_violation=action), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(call(with_value(good, place, value)), expected)
        lossguard.check()  # what is to be skipped is not waited for at the call
    (warning,) = caught  # also when skipping: nobody asked for the nearest
    assert "the nearest valid index took its place" in str(warning.message)


def test_take_along_dim_needs_no_check() -> None:
    wild = with_value(OF_ROWS, (0, 1), 105)
    assert torch.equal(torch.take_along_dim(X, wild, 1), torch.take_along_dim(X, wild % 5, 1))


def test_gradients_are_torchs() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    i = index(0, 3, 3)

    def loss() -> Tensor:
        return (F.embedding(i, weight)[index(0, 2)].gather(1, index(1, 2)[:, None]) ** 2).sum()

    (native,) = torch.autograd.grad(loss(), weight)
    with lossguard.patched(indexing=True):
        assert torch.equal(torch.autograd.grad(loss(), weight)[0], native)


@pytest.mark.parametrize(
    "key",
    [0, slice(1, 3), None, ..., (0, 1), (slice(None), 2), [0, 2], torch.tensor(1), X > 3, (X > 3)[:, 0], (..., 0)]
    + [(None, index(1, 2)), (index(0, 1), index(2, 3)), (slice(None, 2), index(0, 4)), index(), ([0, 1], index(1, 2))],
    ids=repr,
)
def test_every_kind_of_key_means_what_it_did(key: Any) -> None:
    native, value = X[key], torch.randn_like(X[key])
    written = X.clone()
    written[key] = value
    with lossguard.patched(indexing=True):
        assert torch.equal(X[key], native)
        ours = X.clone()
        ours[key] = value
        assert torch.equal(ours, written)


def test_what_takes_more_than_one_dimension_is_left_to_torch() -> None:
    """A list or an array in the key may be a mask of several."""
    numpy = pytest.importorskip("numpy")
    x, mask, i = torch.randn(2, 3, 4), numpy.ones((2, 3), bool), torch.full((6,), 3)
    native = x[mask, i]
    with lossguard.patched(indexing=True):
        assert torch.equal(x[mask, i], native) and torch.equal(x[mask.tolist(), i], native)
        ours = x.clone()
        ours[mask, i] = 1.0
        assert torch.equal(ours[..., 3], torch.ones(2, 3)) and torch.equal(ours[..., :3], x[..., :3])


def test_names_taken_while_patched_are_torchs_afterwards() -> None:
    with lossguard.patched(indexing=True):
        gather, select, one_hot = torch.gather, torch.Tensor.index_select, F.one_hot
        assert F.one_hot(input=index(1), num_classes=3).tolist() == [[0, 1, 0]]
        assert torch.index_put(input=X, indices=(index(0),), values=X[1])[0, 0] == 5
    for call in (lambda: gather(X, 1, OF_ROWS + 9), lambda: select(X, 0, index(9)), lambda: one_hot(index(9), 3)):
        with pytest.raises((RuntimeError, IndexError)) as natively:
            call()
        assert not isinstance(natively.value, lossguard.LossValidationError)
    with lossguard.patched(indexing=True):
        replaced = lambda *arguments: "another tool's"  # noqa: E731
        original, torch.gather = torch.gather, replaced
    assert torch.gather is replaced
    torch.gather = original.__wrapped__


def test_tensors_of_other_kinds_are_left_alone() -> None:
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    calls = (
        lambda: torch.index_select(X.to_sparse(), 1, index(2)).to_dense(),
        lambda: quantized[index(1)].dequantize(),
        lambda: torch.empty(3, 0)[index(1)],
        lambda: X.to("meta")[index(1)].shape,
    )
    native = [call() for call in calls]
    with lossguard.patched(indexing=True):
        for call, expected in zip(calls, native):
            ours = call()
            assert torch.equal(ours, expected) if isinstance(ours, Tensor) else ours == expected


FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.gather": lambda x, i: torch.gather(x, 0, i[None]),
    "x.gather": lambda x, i: x.gather(0, i[None]),
    "torch.index_select": lambda x, i: torch.index_select(x, 0, i),
    "torch.scatter": lambda x, i: torch.scatter(x, 0, i[None], 1.0),
    "torch.index_put": lambda x, i: torch.index_put(x, (i,), x[0]),
    "F.one_hot": lambda x, i: F.one_hot(i, 3),
    "x[i]": lambda x, i: x[i],
}


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_under_compile(form: str, fullgraph: bool) -> None:
    compiled = torch.compile(FORMS[form], backend="aot_eager", fullgraph=fullgraph)
    native = compiled(X, index(0, 2))
    with lossguard.patched(indexing=True):
        assert torch.equal(compiled(X, index(0, 2)), native)
        with pytest.raises(IndexOutOfBoundsError, match="index 3 is out of bounds"):
            compiled(X, index(0, 3))
    assert torch.equal(compiled(X, index(0, 2)), native)


class Plain(Tensor):
    pass


class WithItsOwn(Tensor):
    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key)


def test_tensors_do_not_become_sequences() -> None:
    """As Python would have a class with a `__getitem__`: C code then asks a tensor of no dimension for its length."""
    is_sequence = ctypes.pythonapi.PySequence_Check
    is_sequence.argtypes = [ctypes.py_object]
    one = torch.tensor(1.0)
    of_kinds = [one, nn.Parameter(one), one.as_subclass(Plain), one.as_subclass(WithItsOwn)]
    natural = [is_sequence(t) for t in of_kinds]
    assert natural == [0, 0, 0, 1]
    for _ in range(2):
        with lossguard.patched(indexing=True):
            assert [is_sequence(t) for t in of_kinds] == natural

            class MadeMeanwhile(Tensor):
                pass

        assert [is_sequence(t) for t in of_kinds] == natural
        assert not is_sequence(one.as_subclass(MadeMeanwhile))
        assert X[1, 2] == 7 and WithItsOwn(X)[2, 0] == 10


def test_only_what_was_asked_for() -> None:
    names = ("gather", "__getitem__", "index_select", "scatter_")
    before = [getattr(Tensor, name) for name in names], torch.gather, F.one_hot
    with lossguard.patched():
        assert ([getattr(Tensor, name) for name in names], torch.gather, F.one_hot) == before
        with pytest.raises(IndexError) as natively:
            F.embedding(index(3), X)
        assert not isinstance(natively.value, lossguard.LossValidationError)
        with lossguard.patched(indexing=True):
            assert torch.gather is not before[1] and torch.gather.__name__ == "gather"
        assert torch.gather is before[1]
    assert ([getattr(Tensor, name) for name in names], torch.gather, F.one_hot) == before
    assert not any(name in vars(Tensor) for name in names)


def test_what_is_torchs_own_error_stays_so() -> None:
    with lossguard.patched(indexing=True):
        for call in (
            lambda: torch.gather(X, 7, OF_ROWS),
            lambda: X.gather(1, X),
            lambda: X[index(0), index(0), index(0)],
            lambda: torch.empty(0, 4)[index(0)],
            lambda: F.embedding(X, X),
            lambda: torch.gather(X),
        ):
            with pytest.raises((IndexError, RuntimeError, TypeError)):
                call()
        assert F.embedding(index(), X).shape == (0, 5)
        assert torch.vmap(lambda i: X[i])(OF_ROWS.clamp(max=2)).shape == (3, 2, 5)


def ids_and_rows(ids: Tensor) -> Tensor:
    return F.embedding(ids, X).sum() + X[ids].sum() + X.gather(0, ids[None]).sum()


def test_under_compile() -> None:
    compiled = torch.compile(ids_and_rows)
    native = compiled(index(0, 2))
    lines, first = inspect.getsourcelines(ids_and_rows)
    with lossguard.patched(indexing=True):
        torch.testing.assert_close(compiled(index(0, 2)), native)
        with pytest.raises(IndexOutOfBoundsError, match="index 3 is out of bounds. embedding: 1 of 2") as caught:
            compiled(index(0, 3))
        site = caught.value.report.call_site
        assert site is not None and (site.file, site.line) == (__file__, first + 1)
        rows = torch.compile(lambda i: X[i] * 2, fullgraph=True)
        assert torch.equal(rows(index(0, -1)), X[[0, -1]] * 2)
        with pytest.raises(IndexOutOfBoundsError, match="indexing: 1 of 2"):
            rows(index(0, -4))


def test_an_embedding_in_training_is_caught_before_the_weights_change() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    with lossguard.patched(indexing=True, when="deferred"):
        F.cross_entropy(net(torch.randint(10, (4, 2))), torch.randint(3, (4,))).backward()
        optimizer.step()
        before = [p.detach().clone() for p in net.parameters()]
        with pytest.raises(IndexOutOfBoundsError, match="index 10 is out of bounds. embedding: 1 of 8"):
            F.cross_entropy(net(torch.tensor([[1, 2], [3, 10], [4, 5], [6, 7]])), torch.randint(3, (4,))).backward()
            optimizer.step()
        assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before))


def test_the_exception_is_what_torch_raises() -> None:
    error = IndexOutOfBoundsError("text")
    assert isinstance(error, IndexError) and isinstance(error, RuntimeError)
    assert isinstance(error, lossguard.LossValidationError)
