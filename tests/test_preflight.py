"""find_nonfinite and preflight: every finding where it belongs and nowhere else, and nothing is changed by looking."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import gc
import json
import math
import pickle
import random
import weakref
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import lossguard
import lossguard.functional as L
import numpy
import pytest
import torch
import torch.nn.functional as F
from lossguard.preflight import Preflight, find_nonfinite, preflight
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

nan, inf = math.nan, math.inf
N, D, C = 12, 8, 3


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    default = lossguard.policy()
    yield
    assert lossguard.policy() == default


def bits(t: Tensor | None) -> Any:
    if t is None or t.layout is not torch.strided:
        return id(t)
    return id(t), tuple(t.shape), t.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


def state(model: Any, data: Any = None, criterion: Any = None) -> list[Any]:
    """All that must not change, to the bit; objects by identity."""
    modules = [m for module in (model, criterion) if isinstance(module, nn.Module) for m in module.modules()]
    found: list[Any] = []
    for m in modules:
        found.append((type(m), m.training, list(m._forward_hooks), list(m._forward_pre_hooks), list(m._backward_hooks)))
        for name, t in (*m._parameters.items(), *m._buffers.items()):
            known = t is not None and not t.is_meta and not isinstance(t, nn.parameter.UninitializedParameter)
            found.append((name, bits(t) if known else None))
            if known and t.is_leaf:
                found.append((bits(t.grad), t.requires_grad, len(t._backward_hooks or ())))
    found += [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]
    found += [torch.is_grad_enabled(), torch.overrides._get_current_function_mode_stack()]
    samplers = (data, getattr(data, "sampler", None))
    found += [g.get_state().tolist() for g in (getattr(s, "generator", None) for s in samplers) if g is not None]
    if isinstance(data, (tuple, list)):
        found += [bits(t) for t in data if isinstance(t, Tensor) and not t.is_meta]
    return found


def look(model: Any, data: Any, criterion: Any = None, **options: Any) -> Preflight:
    """`preflight`, which must leave everything as it was, give plain data, and fixes that are code."""
    before = state(model, data, criterion)
    result = preflight(model, data, criterion, **options)
    assert state(model, data, criterion) == before
    assert result.ok is all(finding.severity != "error" for finding in result.findings)
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert [f["check"] for f in plain["findings"]] == [f.check for f in result.findings]
    for finding in result.findings:
        assert finding.what in str(result) and finding.what[-1] in ".]?)" or "[" in finding.what
        ast.parse(finding.fix)
    return result


def search(model: nn.Module, batch: Any, **options: Any) -> Any:
    before = state(model, batch, options.get("loss"))
    found = find_nonfinite(model, batch, **options)
    assert state(model, batch, options.get("loss")) == before
    assert bool(found) is not found.ok
    json.dumps(found.to_dict(), allow_nan=False)
    pickle.loads(pickle.dumps(found))
    return found


def features(n: int = N, d: int = D) -> Tensor:
    return torch.randn(n, d)


def labels(n: int = N, classes: int = C) -> Tensor:
    return torch.arange(n) % classes


def net(inputs: int = D, outputs: int = C, *after: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(inplace=True), nn.Linear(16, outputs), *after)


class Apply(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def divide_by_zero(x: Tensor) -> Tensor:
    return x / (x - x)


# ---- find_nonfinite: the forward


@pytest.mark.parametrize("loss", [None, nn.CrossEntropyLoss()])
@pytest.mark.parametrize("depth", [0, 7, 19])
def test_a_division_by_zero_deep_in_a_model(depth: int, loss: Any) -> None:
    blocks = [nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.ReLU(inplace=True)) for _ in range(20)]
    model = nn.Sequential(*blocks, nn.Linear(D, C))
    assert search(model, (features(), labels()), loss=loss).ok
    blocks[depth].insert(1, Apply(divide_by_zero))
    found = search(model, (features(), labels()), loss=loss)
    assert (found.stage, found.module, found.class_name, found.where) == ("forward", f"{depth}.1", "Apply", "")
    assert found.tensors[0].count == N * D and found.tensors[0].name == "output"
    assert f"of '{depth}.1' (Apply): its inputs and parameters are finite." in str(found)
    assert f"given: input ({N}, {D}) float32 cpu, from " in str(found)


class OwnCode(nn.Module):
    def __init__(self, before: Any = None, between: Any = None, after: Any = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, C)
        self.before, self.between, self.after = before, between, after

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x) if self.before else x
        x = self.first(x)  # line of the first
        x = self.between(x) if self.between else x
        x = self.second(x)  # line of the second
        return self.after(x) if self.after else x


@pytest.mark.parametrize(
    "place, where",
    [
        ("before", "before the call of 'body.first' (test_preflight.py:L1)"),
        (
            "between",
            "between the calls of 'body.first' (test_preflight.py:L1) and 'body.second' (test_preflight.py:L2)",
        ),
        ("after", "after the call of 'body.second' (test_preflight.py:L2)"),
    ],
)
def test_a_modules_own_code(place: str, where: str) -> None:
    model = nn.Sequential()
    model.add_module("body", OwnCode(**{place: lambda x: x.abs().neg().sqrt()}))
    source = open(__file__).read().splitlines()
    lines = [
        n
        for text in ("the first", "the second")
        for n, line in enumerate(source, 1)
        if line.endswith(f"# line of {text}")
    ]
    found = search(model, features())
    assert (found.stage, found.module, found.class_name) == ("forward", "body", "OwnCode")
    expected = f"in its own code, {where}".replace("L1", str(lines[0])).replace("L2", str(lines[1]))
    assert found.where.replace("tests/", "") == expected
    assert any("logarithm" in hint for hint in found.hints)


def test_float16_overflow_on_the_cpu() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).half()
    nn.init.constant_(model[1].weight, 100.0)
    x = torch.full((2, 4), 60000.0, dtype=torch.float16)
    nn.init.eye_(model[0].weight)
    found = search(model, x)
    assert (found.module, found.tensors[0].dtype, found.tensors[0].counts) == ("1", "float16", {"+inf": 8})
    assert "float16 overflows above 65504" in found.hints[0]
    assert any(text.startswith("weight (4, 4) float16 cpu, from 100 to 100") for text in found.given)
    assert any("from 60000 to 60000" in text for text in found.given)
    assert search(model.bfloat16(), x.bfloat16()).ok
    with torch.autocast("cpu", dtype=torch.float16):
        assert search(model.float(), x.float()).module == "1"
    assert search(model.float(), x.float()).ok


@dataclasses.dataclass
class Output:
    logits: Tensor
    hidden: Any = None


@pytest.mark.parametrize(
    "wrap, name",
    [
        (lambda good, bad: {"logits": good, "aux": [good, {"x": (good, bad)}]}, "output['aux'][1]['x'][1]"),
        (lambda good, bad: (good, None, 3, "text", bad), "output[4]"),
        (lambda good, bad: Output(good, hidden=[bad]), "output.hidden[0]"),
        (lambda good, bad: namedtuple("Pair", "a b")(good, bad), "output[1]"),
        (lambda good, bad: UserDict(a=good, b=bad), "output['b']"),
    ],
)
def test_nested_outputs(wrap: Callable[[Tensor, Tensor], Any], name: str) -> None:
    def forward(x: Tensor) -> Any:
        bad = x.clone()
        bad[2, 3], bad[1, 0], bad[0, 1] = nan, -inf, inf
        return wrap(x, bad)

    found = search(Apply(forward), features())
    (tensor,) = found.tensors
    assert tensor.name == name and tensor.counts == {"NaN": 1, "+inf": 1, "-inf": 1} and tensor.count == 3
    assert tensor.indices == [(0, 1), (1, 0), (2, 3)] and str(tensor.values) == "[inf, -inf, nan]"
    assert f"{name} (12, 8) float32 cpu: 3 of 96 elements (NaN: 1, +inf: 1, -inf: 1), the first at (0, 1): inf" in str(
        found
    )
    assert search(Apply(lambda x: wrap(x, x)), features()).ok


def test_more_offenders_than_are_kept_are_counted() -> None:
    x = torch.zeros(40, 50)
    x[3:, 1] = nan
    (tensor,) = search(nn.Identity(), x).tensors
    assert tensor.count == 37 and tensor.indices == [(row, 1) for row in range(3, 19)]


def test_inputs_that_are_not_finite_already() -> None:
    def forward(image: Tensor, extra: Any) -> Tensor:
        return image

    x, bad = features(), features()
    bad[5, 1] = inf
    found = search(Apply(forward), {"image": x, "extra": {"boxes": [x, bad]}, "labels": torch.tensor(nan)})
    assert (found.stage, found.module) == ("input", "")
    assert [t.name for t in found.tensors] == ["input 'extra'['boxes'][1]"] and found.tensors[0].indices == [(5, 1)]
    assert str(found).startswith("Not finite before the model runs: an input.")
    found = search(Apply(lambda a, b: a), (x, bad, labels()))
    assert [t.name for t in found.tensors] == ["input 1"]


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_parameters_and_buffers_that_are_not_finite_already(kind: str) -> None:
    model = nn.Sequential(net(D, D), nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)))
    where = model[1][1].weight.data if kind == "parameter" else model[1][1].running_var
    where[2], where[5] = nan, inf
    model[1][1].bias.data[0] = nan if kind == "parameter" else 0
    found = search(model, features())
    assert (found.stage, found.module, found.class_name) == (kind, "1.1", "BatchNorm1d")
    names = ["1.1.weight", "1.1.bias"] if kind == "parameter" else ["1.1.running_var"]
    assert [t.name for t in found.tensors] == names
    assert found.tensors[0].indices == [(2,), (5,)] and found.tensors[0].counts == {"NaN": 1, "+inf": 1}
    assert f"a {kind} of '1.1' (BatchNorm1d)" in str(found)


def test_bad_parameters_of_several_modules_are_all_named() -> None:
    model = net()
    for p in model.parameters():
        p.data[..., 0] = nan
    found = search(model, features())
    assert [t.name for t in found.tensors] == ["0.weight", "0.bias", "2.weight", "2.bias"] and found.module == "0"


class Masked(nn.Module):
    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((4, 4), -inf).triu(0 if whole else 1))
        self.softmax, self.fc = nn.Softmax(-1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.softmax(x + self.mask))


def test_minus_infinity_as_a_mask() -> None:
    x = features(4, 4)
    assert search(Masked(), x).ok
    found = search(Masked(whole=True), x)  # the last column of the first row is masked, as all others
    assert found.module == "softmax" and any("masked whole" in hint for hint in found.hints)
    assert search(Apply(lambda x, mask: (x + mask).softmax(-1)), {"x": x, "mask": Masked().mask}).ok
    model = Apply(lambda x: x.masked_fill(x < 0, -inf))
    assert search(model, x).tensors[0].counts.keys() == {"-inf"}
    assert search(model, x, allow_neg_inf=True).ok
    assert search(Apply(lambda x: x.masked_fill(x < 0, nan)), x, allow_neg_inf=True).stage == "forward"


def test_the_attention_of_torch_with_a_row_that_is_masked_whole() -> None:
    mask = torch.zeros(5, 5)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.attention(x, x, x, attn_mask=mask)[0]

    assert search(Attends(), torch.randn(2, 5, 8)).ok
    mask[3] = -inf
    found = search(Attends(), torch.randn(2, 5, 8))
    assert (found.module, found.class_name) == ("attention", "MultiheadAttention")
    assert any("input 'attn_mask' holds 5 -inf, the first at (3, 0)" in hint for hint in found.hints)


def test_a_module_that_is_called_more_than_once_or_has_two_names() -> None:
    shared = Apply(lambda x: (x - 1).log())  # the second time of a number below 0

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = shared, shared

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    found = search(Twice(), torch.full((3,), 2.5))
    assert (found.module, found.call) == ("a", 2) and "'a' (Apply) in its call 2" in str(found)


def test_what_a_hook_of_the_users_makes_of_an_output_is_seen() -> None:
    model = net()
    model[0].register_forward_hook(lambda module, args, output: output * nan)
    assert search(model, features()).module == "0"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 4, dtype=dtype)
    assert search(nn.Identity(), x).ok
    x[1, 2] = nan
    found = search(nn.Identity(), x)
    assert found.tensors[0].indices == [(1, 2)] and found.tensors[0].dtype == str(dtype).removeprefix("torch.")


def test_tensors_without_infinities_are_let_through() -> None:
    sparse = torch.eye(3).to_sparse()
    given = (torch.arange(3), torch.tensor([True]), torch.zeros(0), torch.zeros(2, device="meta"), sparse, None, "x")
    assert search(Apply(lambda *args: args), (*given, labels())).ok


def test_an_eps_of_zero_is_named() -> None:
    found = search(nn.Sequential(nn.LayerNorm(D, eps=0.0, elementwise_affine=False)), torch.ones(2, D))
    assert found.module == "0" and "eps is 0" in found.hints[0]


# ---- find_nonfinite: loss and backward


def test_the_loss_itself() -> None:
    found = search(
        net(), (features(), labels()), loss=lambda output, target: F.nll_loss(output.softmax(1).mul(0).log(), target)
    )
    assert (found.stage, found.tensors[0].name, found.tensors[0].counts) == ("loss", "loss", {"+inf": 1})
    assert "what the model returned is" in str(found)


class Root(nn.Module):
    """Its slope at 0 is infinite."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).sqrt()


def total(output: Tensor, target: Any = None) -> Tensor:
    return output.sum()


def test_a_backward_through_a_module() -> None:
    blocks = [nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True)) for _ in range(6)]
    assert search(nn.Sequential(*blocks), features(), loss=total).ok
    blocks[3].append(Root())
    found = search(nn.Sequential(*blocks), features(), loss=total)
    assert (found.stage, found.module, found.class_name, found.where) == ("backward", "3.2", "Root", "")
    assert found.tensors[0].name == "gradient of output" or found.tensors[0].name == "gradient of input"
    assert "'3.2' (Root): those of its outputs are finite" in str(found) and "epsilon" in str(found)


def test_a_backward_through_the_first_module_of_a_container() -> None:
    inner = nn.Sequential(Root(), nn.Linear(D, D))
    found = search(nn.Sequential(nn.Linear(D, D), nn.Sequential(inner), nn.Linear(D, C)), features(), loss=total)
    assert (found.stage, found.module, found.where) == ("backward", "1.0.0", "")


def test_a_backward_through_own_code() -> None:
    found = search(OwnCode(between=Root()), features(), loss=total)
    assert found.module == "between"  # a module after all
    found = search(nn.Sequential(OwnCode(between=lambda x: Root()(x))), features(), loss=total)
    assert (found.stage, found.module) == ("backward", "0")
    assert "in the own code of '0' (OwnCode), after the call of '0.first' (" in found.where
    assert "the forward is finite" in str(found)


def test_a_backward_through_the_loss() -> None:
    found = search(net(), features(), loss=lambda output: (output * 0).sqrt().sum())
    assert found.stage == "backward" and found.where == "in the loss, or in what follows the model"


def test_a_backward_where_one_output_goes_to_several() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.good, self.bad = nn.Linear(D, D), nn.Linear(D, D), Root()

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.good(x) + self.bad(x) + x

    found = search(Branches(), features(), loss=total)
    assert found.stage == "backward" and "'bad' (Root)" in found.where and "'good' (Linear)" in found.where


def test_the_gradient_of_a_parameter_alone() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, C)).half()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)
    found = search(model, torch.full((N, D), 100.0).half(), loss=lambda output: (output.float() * 3000).sum())
    assert found.stage == "backward" and "float16 overflows" in found.hints[0]
    assert (found.module, found.tensors[0].name, found.where) == ("1", "gradient of weight", "")


@pytest.mark.parametrize("use_reentrant", [False])
def test_a_backward_through_checkpointing(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, *body: nn.Module) -> None:
            super().__init__()
            self.body = nn.Sequential(*body)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=use_reentrant)

    good = nn.Sequential(nn.Linear(D, D), Checkpointed(nn.Linear(D, D), nn.Dropout()), nn.Linear(D, C))
    assert search(good, features(), loss=total).ok
    bad = nn.Sequential(nn.Linear(D, D), Checkpointed(nn.Linear(D, D), Root()), nn.Linear(D, C))
    found = search(bad, features(), loss=total)
    assert found.stage == "backward" and found.module.startswith("1")


def test_a_loss_is_called_with_labels_where_there_are_some() -> None:
    assert search(net(), (features(), labels()), loss=nn.CrossEntropyLoss()).ok
    assert search(net(), {"input": features(), "y": labels()}, loss=lossguard.CrossEntropyLoss()).ok
    assert search(net(), features(), loss=lambda output: output.mean()).ok


def test_a_model_without_parameters() -> None:
    assert search(Apply(lambda x: x), features(), loss=total).ok


# ---- find_nonfinite: what a batch is


@pytest.mark.parametrize(
    "batch, args, kwargs",
    [
        (("x", "y"), ("x",), {}),
        (["x", "y"], ("x",), {}),
        (("a", "b", "y"), ("a", "b"), {}),
        (("x",), ("x",), {}),
        (((1, 2), "y"), ((1, 2),), {}),
        ({"x": 1, "mask": 2, "labels": 3}, (), {"x": 1, "mask": 2}),
        (UserDict(x=1, target=3), (), {"x": 1}),
        ({"x": 1, "y": 2, "label": 3}, (), {"x": 1}),
        (namedtuple("Batch", "image label")(1, 2), (1,), {}),
        (7, (7,), {}),
    ],
)
def test_what_of_a_batch_the_model_is_given(batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    seen: list[Any] = []
    find_nonfinite(Apply(lambda *args, **kwargs: seen.append((args, kwargs))), batch)
    assert seen == [(args, kwargs)]


@pytest.mark.parametrize(
    "given, args, kwargs", [({"a": 1, "labels": 2}, (), {"a": 1, "labels": 2}), ((1, 2), (1, 2), {}), (3, (3,), {})]
)
def test_inputs_are_passed_whole(given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    seen: list[Any] = []
    model = Apply(lambda *args, **kwargs: seen.append((args, kwargs)))
    find_nonfinite(model, "batch", inputs=lambda batch: given if batch == "batch" else None)
    assert seen == [(args, kwargs)]


def test_a_packed_sequence_is_one_input() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.zeros(3, 4), torch.zeros(2, 4)])
    assert search(nn.LSTM(4, 5), packed).ok
    assert search(nn.LSTM(4, 5), (packed, labels())).ok


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got function"):
        find_nonfinite(lambda x: x, features())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="parameter 'weight' is lazy"):
        find_nonfinite(nn.LazyLinear(3), features())
    with pytest.raises(TypeError, match="criterion must be a module, a function or None, got str"):
        preflight(net(), (features(), labels()), "ce")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="first batch would be lost"):
        preflight(net(), iter([(features(), labels())]), nn.CrossEntropyLoss())


# ---- find_nonfinite: what it does not do


def test_what_a_model_raises_passes_through_and_everything_is_put_back() -> None:
    def forward(x: Tensor) -> Tensor:
        torch.rand(3)
        raise KeyError("mine")

    model = nn.Sequential(nn.BatchNorm1d(D), Apply(forward))
    before = state(model)
    with pytest.raises(KeyError, match="mine"):
        find_nonfinite(model, features(), loss=total)
    after = state(model)
    after_rng = torch.get_rng_state()
    features()
    assert not torch.equal(after_rng, torch.get_rng_state())
    torch.set_rng_state(after_rng)
    assert len(before) == len(after) and before[:-6] == after[:-6]


def test_an_exception_after_something_that_is_not_finite_comes_with_it() -> None:
    def check(x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("expected numbers")
        return x

    found = search(nn.Sequential(Apply(divide_by_zero), Apply(check)), torch.zeros(2))
    assert found.module == "0" and str(found.error) == "expected numbers"
    assert "afterwards the model raised ValueError: expected numbers" in str(found)


def test_an_exception_that_the_model_catches_does_not_confuse_it() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError

    class Catches(nn.Module):
        def __init__(self, after: Any) -> None:
            super().__init__()
            self.fails, self.after = nn.Sequential(Apply(fails)), after

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                self.fails(x)
            return self.after(x)

    assert search(nn.Sequential(Catches(Apply(divide_by_zero))), features()).module == "0.after"
    found = search(nn.Sequential(Catches(divide_by_zero)), features())
    assert (found.module, found.class_name) == ("0", "Catches")


class Hostile(nn.Module):
    """Changes everything that it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))
        self.fc = nn.Linear(D, C)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("zeros", torch.tensor([-0.0, nan, 1.0]))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("narrow", torch.ones(3, 3, dtype=torch.bfloat16).t())
        self.register_buffer("cache", torch.zeros(2, 3))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.cache.data = torch.ones(4)
        self.spectral.bias.requires_grad_(False)
        self.count = self.count + 1  # another object
        self.zeros.data[0] = 0.0  # equal, but for its sign
        self.flag.logical_not_()
        self.narrow.mul_(2)
        self.none = torch.ones(1)
        self.register_buffer("new", torch.ones(1))
        self.fc.weight.data = self.fc.weight.data.clamp(-0.1, 0.1)
        with torch.no_grad():
            self.fc.bias.add_(1.0)
        self.norm.weight.grad = torch.ones(D)
        if self.fc.bias.grad is not None:
            self.fc.bias.grad += 1
        random.random(), numpy.random.rand(), torch.rand(1)
        x = F.dropout(self.fc(self.spectral(self.norm(x))), 0.5)
        self.norm.eval()
        self.fc.training = not self.fc.training
        return x


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_everything_that_a_forward_changes_is_put_back(training: bool, gradients: bool) -> None:
    model = Hostile().train(training)
    model.norm.running_var[1] = 2.0
    model.zeros[1] = 0.5  # finite, for once
    if gradients:
        for p in model.parameters():
            p.grad = torch.full_like(p, 3.0)
    assert search(model, (features(), labels()), loss=nn.CrossEntropyLoss()).ok
    assert look(model, (features(), labels()), nn.CrossEntropyLoss(), target=lambda batch: batch[1]).ok
    assert "new" not in model._buffers and model.none is None and bool(model.zeros[0].signbit())


@pytest.mark.parametrize("function", [search, lambda model, batch, loss: look(model, batch, loss)])
def test_a_training_is_bit_for_bit_the_same_with_it(function: Any) -> None:
    def train(looking: bool) -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(D, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, C))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(4):
            batch = (features(), labels())
            if looking:
                function(model, batch, loss=nn.CrossEntropyLoss())
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
        return model.state_dict(), torch.get_rng_state()

    torch.testing.assert_close(train(False), train(True), rtol=0, atol=0)


def test_hooks_of_accumulated_gradients_are_not_called() -> None:
    model, called = net(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(called.append)
    assert search(model, (features(), labels()), loss=nn.CrossEntropyLoss()).ok
    assert look(model, (features(), labels()), nn.CrossEntropyLoss()).ok
    assert called == []


def test_a_batch_that_wants_a_gradient_keeps_no_hook() -> None:
    x = features().requires_grad_()
    assert search(net(), (x, labels()), loss=nn.CrossEntropyLoss()).ok
    assert x.grad is None and not x._backward_hooks


def test_nothing_of_the_forward_is_kept_alive() -> None:
    alive: list[Any] = []

    def forward(x: Tensor) -> Tensor:
        x = x * 2
        alive.append(weakref.ref(x))
        if len(alive) > 2:
            raise ValueError("third")
        return x / 0

    model = nn.Sequential(net(), Apply(forward))
    kept = [find_nonfinite(model, features(), loss=total), find_nonfinite(model, features())]
    kept.append(preflight(model, (features(), labels()), nn.CrossEntropyLoss()))  # type: ignore[arg-type]
    assert kept[2].findings[0].error is not None
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_under_no_grad_it_looks_all_the_same() -> None:
    with torch.no_grad():
        assert search(nn.Sequential(nn.Linear(D, D), Root()), features(), loss=total).stage == "backward"
        assert look(net(), (features(), labels()), nn.CrossEntropyLoss()).findings == []


@pytest.mark.parametrize("wrap", [nn.DataParallel, functools.partial(torch.compile, backend="eager")])
def test_behind_wrappers(wrap: Any) -> None:
    assert search(wrap(nn.Sequential(net(), Apply(divide_by_zero))), features()).module == "1"
    assert look(wrap(net()), (features(), labels()), nn.CrossEntropyLoss()).findings == []


def test_compiled_parts_run_uncompiled() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(D, D), nn.ReLU()), backend="eager")
    model = nn.Sequential(compiled, nn.Linear(D, C))
    assert search(model, (features(), labels()), loss=nn.CrossEntropyLoss()).ok
    assert look(model, (features(), labels()), nn.CrossEntropyLoss()).findings == []
    compiled.append(Apply(divide_by_zero))
    assert search(model, features()).module == "0._orig_mod.2"
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_parts_count_as_code_of_their_parent() -> None:
    good, bad = torch.jit.script(nn.Linear(D, D)), torch.jit.script(DividesByZero())
    assert search(nn.Sequential(good, nn.Linear(D, C)), features(), loss=total).ok
    found = search(nn.Sequential(nn.Linear(D, D), bad, nn.Linear(D, C)), features())
    assert (found.stage, found.module) == ("forward", "") and "between the calls of '0'" in found.where
    assert search(good, features()).ok
    assert search(bad, features()).tensors[0].count == N * D


class DividesByZero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x - x)


def test_what_is_within_vmap_is_let_through_and_seen_outside() -> None:
    class PerSample(nn.Module):
        def __init__(self, function: nn.Module) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(self.function)(x)

    assert search(nn.Sequential(PerSample(nn.Linear(D, D))), features(), loss=total).ok
    found = search(nn.Sequential(PerSample(nn.Sequential(nn.Linear(D, D), DividesByZero()))), features())
    assert (found.module, found.class_name) == ("0", "PerSample")


# ---- preflight: every finding, and a case without it


@dataclasses.dataclass
class Case:
    check: str
    words: str  #: in what is said
    bad: Callable[[], tuple[Any, ...]]  #: model, data, criterion, and options
    good: Callable[[], tuple[Any, ...]]
    severity: str = "error"
    fix: str | None = None
    evidence: str = ""


CE, BCE, LOGITS, NLL = nn.CrossEntropyLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.NLLLoss


def ordinary() -> tuple[Any, ...]:
    return net(), (features(), labels()), CE()


def binary(n: int = N) -> Tensor:
    return (torch.arange(n) % 2).float()


def images(channels: int = 3, n: int = N, **kind: Any) -> Tensor:
    return torch.randn(n, channels, 6, 6, **kind)


def convolutional(channels: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, C))


def loader(samples: int = 2 * N, size: int = N, x: Any = None, **options: Any) -> DataLoader[Any]:
    x = features(samples) if x is None else x
    return DataLoader(TensorDataset(x, labels(samples)), batch_size=size, **options)


class Broken(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise OSError("no such image")


class WithLoss(nn.Module):
    """As the models of some libraries: it computes its loss itself."""

    def __init__(self, loss: Any = None, classes: int = C) -> None:
        super().__init__()
        self.net = net(D, classes)
        self.loss = loss or (lambda logits, labels: F.cross_entropy(logits, labels))

    def forward(self, x: Tensor, labels: Any = None) -> Any:
        logits = self.net(x)
        return {"logits": logits} if labels is None else {"loss": self.loss(logits, labels), "logits": logits}


def constant(model: nn.Sequential, weight: float, bias: list[float]) -> nn.Sequential:
    with torch.no_grad():
        model[-1].weight.fill_(weight)
        model[-1].bias.copy_(torch.tensor(bias))
    return model


def segmentation(labels: Tensor) -> tuple[Any, ...]:
    return nn.Conv2d(3, 5, 1), (images(), labels), CE()


def scaled(factor: float) -> nn.Sequential:
    model = net()
    model[-1].weight.data *= factor
    return model


def trained() -> nn.Sequential:
    return net(D, C, Apply(lambda x: x + 9 * F.one_hot(labels(), C)))


def no_gradient(x: Tensor) -> Tensor:
    return x.detach()


def raises_out_of_memory(x: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def mine(*args: Any) -> Tensor:
    raise ZeroDivisionError("mine")


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("in the backward")


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare = net(), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Reentrant(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.net, self.use_reentrant = nn.Linear(D, D), net(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, self.stem(x), use_reentrant=self.use_reentrant)


def frozen() -> nn.Sequential:
    return net().requires_grad_(False)


def long_output() -> nn.Sequential:
    return net(D, C, Apply(lambda x: x.argmax(1)))


EMBEDDING = functools.partial(lambda rows: nn.Sequential(nn.Embedding(rows, 4), nn.Flatten(), nn.Linear(8, C)))
IDS = [[0, 1]] * (N - 1) + [[7, 10]]

CASES = {
    # the batch
    "no labels": Case("batch", "no labels for the criterion", lambda: (net(), features(), CE()), ordinary),
    "no labels in a mapping": Case(
        "batch",
        "a dict of 'input', 'classes', in which there are no labels",
        lambda: (net(), {"input": features(), "classes": labels()}, CE()),
        lambda: (net(), {"input": features(), "label": labels()}, CE()),
        evidence="labels, label, label_ids",
    ),
    "no samples": Case("batch", "without elements", lambda: (net(), (features(0), labels(0)), CE()), ordinary),
    "too many inputs": Case(
        "batch",
        "forward of the model takes (input), and is given 2 arguments",
        lambda: (net(), (features(), torch.ones(N), labels()), CE()),
        lambda: (net(), (features(), torch.ones(N), labels()), CE(), {"inputs": lambda batch: batch[0]}),
        fix="model(batch[0])  # preflight(..., inputs=lambda batch: batch[0])",
    ),
    "a name the model does not have": Case(
        "batch",
        "forward of the model takes (input), and is given image=",
        lambda: (net(), {"image": features(), "label": labels()}, CE()),
        lambda: (net(), {"image": features(), "label": labels()}, CE(), {"inputs": lambda batch: batch["image"]}),
        fix="model(batch['image'])  # preflight(..., inputs=lambda batch: batch['image'])",
    ),
    "inputs= that raises": Case(
        "batch",
        "inputs= or target= raised on this batch, which is a tuple of Tensor, Tensor",
        lambda: (*ordinary(), {"inputs": lambda batch: batch["x"]}),
        lambda: (*ordinary(), {"inputs": lambda batch: batch[0]}),
        evidence="TypeError",
    ),
    "keys that are no names": Case(
        "batch",
        "keys are not all names: [0]",
        lambda: (net(), {0: features(), "label": labels()}, CE()),
        lambda: (net(), {0: features(), "label": labels()}, CE(), {"inputs": lambda batch: batch[0]}),
    ),
    # the loader
    "an empty loader": Case(
        "loader",
        "yields no batch",
        lambda: (net(), loader(5, 8, drop_last=True), CE()),
        lambda: (net(), loader(5, 5, drop_last=True), CE()),
        evidence="5 samples make no batch of 8",
        fix="DataLoader(..., batch_size=5)",
    ),
    "an empty dataset": Case(
        "loader",
        "yields no batch",
        lambda: (net(), loader(0), CE()),
        lambda: (net(), loader(), CE()),
        evidence="0 samples",
    ),
    "a dataset that raises": Case(
        "loader",
        "raised as it made its first batch",
        lambda: (net(), DataLoader(Broken()), CE()),
        lambda: (net(), loader(), CE()),
        evidence="OSError: no such image\nraised at ",
    ),
    # dtypes
    "double inputs": Case(
        "dtype",
        "'0' computes in float32, and is given float64",
        lambda: (net(), (features().double(), labels()), CE()),
        lambda: (net().double(), (features().double(), labels()), CE()),
        fix="inputs = inputs.to(torch.float32)",
        evidence="in '0': Linear(in_features=8, out_features=16, bias=True), given input (12, 8) float64 cpu",
    ),
    "images of bytes": Case(
        "dtype",
        "'0' computes in float32, and is given uint8",
        lambda: (convolutional(), (images().to(torch.uint8), labels()), CE()),
        lambda: (convolutional(), (images().to(torch.uint8).to(torch.float32) / 255, labels()), CE()),
        fix="inputs = inputs.to(torch.float32) / 255",
    ),
    "ids that are floats": Case(
        "dtype",
        "'0' looks up ids, and is given float32",
        lambda: (EMBEDDING(11), (torch.tensor(IDS).float(), labels()), CE()),
        lambda: (EMBEDDING(11), (torch.tensor(IDS), labels()), CE()),
        fix="inputs = inputs.long()",
    ),
    "float labels": Case(
        "dtype",
        "CrossEntropyLoss wants integers for class indices, and the target is float32",
        lambda: (net(), (features(), labels().float()), CE()),
        ordinary,
        fix="target = target.long()",
    ),
    "float labels for NLLLoss": Case(
        "dtype",
        "NLLLoss wants integers",
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), labels().float()), NLL()),
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), labels()), NLL()),
        fix="target = target.long()",
    ),
    "fractions as labels": Case(
        "dtype", "is this a regression?", lambda: (net(), (features(), labels() + 0.5), CE()), ordinary
    ),
    "int32 labels": Case(
        "dtype",
        "wants int64 for class indices, and the target is int32",
        lambda: (net(), (features(), labels().int()), CE()),
        lambda: (net(), (features(), labels().to(torch.uint8)), CE()),
        fix="target = target.long()",
    ),
    "bytes for images": Case(
        "dtype",
        "takes uint8 for flat targets only",
        lambda: segmentation(torch.zeros(N, 6, 6, dtype=torch.uint8)),
        lambda: (*segmentation(torch.zeros(N, 6, 6, dtype=torch.uint8))[:2], lossguard.CrossEntropyLoss()),
        fix="target = target.long()",
    ),
    "integers for BCEWithLogitsLoss": Case(
        "dtype",
        "BCEWithLogitsLoss wants a floating-point target, and it is int64",
        lambda: (net(D, 1), (features(), binary().long()[:, None]), LOGITS()),
        lambda: (net(D, 1), (features(), binary()[:, None]), LOGITS()),
        fix="target = target.float()",
    ),
    "integers for BCELoss": Case(
        "dtype",
        "BCELoss wants a floating-point target, and it is int64",
        lambda: (net(D, 1, nn.Sigmoid()), (features(), binary().long()[:, None]), BCE()),
        lambda: (net(D, 1, nn.Sigmoid()), (features(), binary()[:, None]), BCE()),
        fix="target = target.float()",
    ),
    "two floats for BCELoss": Case(
        "dtype",
        "BCELoss: the output is float32, the target float64",
        lambda: (net(D, 1, nn.Sigmoid()), (features(), binary().double()[:, None]), BCE()),
        lambda: (net(D, 1), (features(), binary().double()[:, None]), LOGITS()),  # which takes them
        fix="target = target.to(output.dtype)",
    ),
    "predictions for scores": Case(
        "dtype",
        "the output is int64: predictions, not scores",
        lambda: (long_output(), (features(), labels()), CE()),
        ordinary,
    ),
    # devices
    "a model elsewhere": Case(
        "device",
        "'0' is on meta, and what it is given on cpu",
        lambda: (net().to("meta"), (features(), labels()), CE()),
        ordinary,
        fix="batch = batch.to('meta')  # or model.to(...)",
    ),
    "labels elsewhere": Case(
        "device",
        "the target is on meta, the output on cpu",
        lambda: (net(), (features(), labels().to("meta")), CE()),
        ordinary,
        fix="target = target.to(output.device)",
    ),
    "class weights elsewhere": Case(
        "device",
        "the weight is on meta, the output on cpu",
        lambda: (net(), (features(), labels()), CE(weight=torch.ones(C, device="meta"))),
        lambda: (net(), (features(), labels()), CE(weight=torch.ones(C))),
        fix="criterion = criterion.to('cpu')",
    ),
    # shapes, in the model
    "features": Case(
        "shape",
        "'0' wants 8 features in the last dimension, and is given 5",
        lambda: (net(), (features(N, 5), labels()), CE()),
        ordinary,
        fix="nn.Linear(5, 16)",
    ),
    "images that are not flat": Case(
        "shape",
        "'0' wants 108 features in the last dimension, and is given 6",
        lambda: (net(108), (images(), labels()), CE()),
        lambda: (net(108), (images().flatten(1), labels()), CE()),
        fix="inputs = inputs.flatten(1)",
    ),
    "channels": Case(
        "shape",
        "'0' wants 1 channels in dimension 1, and is given 3",
        lambda: (convolutional(1), (images(), labels()), CE()),
        lambda: (convolutional(3), (images(), labels()), CE()),
        fix="nn.Conv2d(3, 4, ...)",
    ),
    "channels that come last": Case(
        "shape",
        "They come last",
        lambda: (convolutional(), (images().movedim(1, -1), labels()), CE()),
        lambda: (convolutional(), (images(), labels()), CE()),
        fix="inputs = inputs.movedim(-1, 1)",
    ),
    "no channels": Case(
        "shape",
        "the channels are missing",
        lambda: (convolutional(1), (images()[:, 0], labels()), CE()),
        lambda: (convolutional(1), (images()[:, :1], labels()), CE()),
        fix="inputs = inputs.unsqueeze(1)",
    ),
    "channels of a BatchNorm": Case(
        "shape",
        "'3' wants 4 channels in dimension 1, and is given 3",
        lambda: (net(D, C, nn.BatchNorm1d(4)), (features(), labels()), CE()),
        lambda: (net(D, C, nn.BatchNorm1d(3)), (features(), labels()), CE()),
        fix="nn.BatchNorm1d(3)",
    ),
    "a LayerNorm": Case(
        "shape",
        "'3' normalises over (4,), and is given (12, 3)",
        lambda: (net(D, C, nn.LayerNorm(4)), (features(), labels()), CE()),
        lambda: (net(D, C, nn.LayerNorm(3)), (features(), labels()), CE()),
        fix="nn.LayerNorm([3])",
    ),
    "an LSTM": Case(
        "shape",
        "'0' wants 5 features in the last dimension, and is given 8",
        lambda: (nn.Sequential(nn.LSTM(5, C), Apply(lambda o: o[0])), (features(), labels()), CE()),
        lambda: (nn.Sequential(nn.LSTM(8, C), Apply(lambda o: o[0])), (features(), labels()), CE()),
        fix="nn.LSTM(8, 3)",
    ),
    # shapes, output against target
    "a dimension too many": Case(
        "shape",
        "the target is (12, 1), and for this output should be (12,)",
        lambda: (net(), (features(), labels()[:, None]), CE()),
        ordinary,
        fix="target = target.squeeze(1)",
    ),
    "samples": Case("shape", "12 outputs, and 11 targets", lambda: (net(), (features(), labels()[1:]), CE()), ordinary),
    "classes that come last": Case(
        "shape",
        "wants the classes in dimension 1, and the output seems to have them in the last",
        lambda: (net(), (torch.randn(4, 5, D), labels(20).view(4, 5)), CE()),
        lambda: (net(D, C, Apply(lambda x: x.movedim(-1, 1))), (torch.randn(4, 5, D), labels(20).view(4, 5)), CE()),
        fix="output = output.movedim(-1, 1)",
    ),
    "one output a sample": Case(
        "shape",
        "wants one output for each class, and the model has one for each sample",
        lambda: (net(D, 1, nn.Flatten(0)), (features(), binary().long()), CE()),
        lambda: (net(D, 1, nn.Flatten(0)), (features(), binary()), LOGITS()),
    ),
    "samples taken for classes": Case(
        "shape",
        "takes an output of one dimension for one sample of 12 classes",
        lambda: (net(D, 1, nn.Flatten(0)), (features(), binary()), CE()),
        lambda: (net(D, 1, nn.Flatten(0)), (features(), binary()), LOGITS()),
        fix="criterion = lossguard.BCEWithLogitsLoss()",
    ),
    "one class": Case(
        "shape",
        "of one class is 0 whatever the model says",
        lambda: (net(D, 1), (features(), torch.zeros(N).long()), CE()),
        lambda: (net(D, 2), (features(), torch.zeros(N).long()), CE()),
    ),
    "(N, 1) against (N,)": Case(
        "shape",
        "BCEWithLogitsLoss: the target is (12,), and should be like the output, (12, 1)",
        lambda: (net(D, 1), (features(), binary()), LOGITS()),
        lambda: (net(D, 1), (features(), binary().unsqueeze(1)), LOGITS()),
        fix="target = target.unsqueeze(1)  # or output.squeeze(1)",
    ),
    "(N,) against (N, 1)": Case(
        "shape",
        "BCELoss: the target is (12, 1), and should be like the output, (12,)",
        lambda: (net(D, 1, nn.Sigmoid(), nn.Flatten(0)), (features(), binary()[:, None]), BCE()),
        lambda: (net(D, 1, nn.Sigmoid(), nn.Flatten(0)), (features(), binary()), BCE()),
        fix="output = output.unsqueeze(1)  # or target.squeeze(1)",
    ),
    "classes for BCE": Case(
        "shape",
        "this looks like one class of 3 a sample",
        lambda: (net(), (features(), labels()), LOGITS()),
        lambda: (net(), (features(), F.one_hot(labels(), C).float()), LOGITS()),
        fix="criterion = lossguard.CrossEntropyLoss()",
    ),
    # what targets are
    "one-hot": Case(
        "target",
        "wants class indices, and the target is one-hot",
        lambda: (net(), (features(), F.one_hot(labels(), C)), CE()),
        lambda: (net(), (features(), F.one_hot(labels(), C).float()), CE()),
        fix="target = target.argmax(1)",
    ),
    "one-hot for NLLLoss": Case(
        "target",
        "NLLLoss wants class indices, and the target is one-hot",
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), F.one_hot(labels(), C).float()), NLL()),
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), F.one_hot(labels(), C).argmax(1)), NLL()),
        fix="target = target.argmax(1)",
    ),
    "a list": Case(
        "target",
        "the target is a list of int",
        lambda: (net(), (features(), labels().tolist()), CE()),
        ordinary,
        fix="target = torch.as_tensor(target)",
    ),
    "probabilities that do not sum to 1": Case(
        "target",
        "do not sum to 1",
        lambda: (net(), (features(), torch.full((N, C), 0.5)), CE()),
        lambda: (net(), (features(), torch.full((N, C), 1 / C)), CE()),
        severity="warning",
        evidence="they sum to from 1.5 to 1.5",
    ),
    # which labels there are
    "labels from 1": Case(
        "labels",
        "12 targets are outside [0, 3)",
        lambda: (net(), (features(), labels() + 1), CE()),
        ordinary,
        fix="target = target - 1",
        evidence="labels look 1-based",
    ),
    "more labels than outputs": Case(
        "labels",
        "are outside [0, 3)",
        lambda: (net(), (features(), labels(N, 6)), CE()),
        lambda: (net(D, 6), (features(), labels(N, 6)), CE()),
    ),
    "a marker": Case(
        "labels",
        "is outside [0, 3)",
        lambda: (net(), (features(), torch.tensor([-1] + [0, 2] * 5 + [1])), CE()),
        lambda: (net(), (features(), torch.tensor([-1] + [0, 2] * 5 + [1])), CE(ignore_index=-1)),
        evidence="pass ignore_index=-1",
    ),
    "nothing but what is ignored": Case(
        "labels",
        "every label is ignore_index, -100",
        lambda: (net(), (features(), torch.full((N,), -100)), CE()),
        lambda: (net(), (features(), torch.tensor([0] + [-100] * (N - 1))), CE()),
    ),
    "labels of NLLLoss": Case(
        "labels",
        "NLLLoss: 4 of 12 targets are outside",
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), labels(N, 3) * 2), NLL()),
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), labels()), NLL()),
    ),
    "grey levels": Case(
        "labels",
        "BCEWithLogitsLoss: 6 of 12 elements of target are outside [0, 1]",
        lambda: (net(D, 1), (features(), binary()[:, None] * 255), LOGITS()),
        lambda: (net(D, 1), (features(), binary()[:, None] * 255 / 255), LOGITS()),
        fix="target = target / 255",
    ),
    "signs": Case(
        "labels",
        "outside [0, 1]",
        lambda: (net(D, 1), (features(), binary()[:, None] * 2 - 1), LOGITS()),
        lambda: (net(D, 1), (features(), binary()[:, None]), LOGITS()),
        fix="target = (target + 1) / 2",
    ),
    "ids beyond an embedding": Case(
        "labels",
        "'0' has 10 rows, and 1 of 24 ids are outside [0, 10)",
        lambda: (EMBEDDING(10), (torch.tensor(IDS), labels()), CE()),
        lambda: (EMBEDDING(11), (torch.tensor(IDS), labels()), CE()),
        fix="nn.Embedding(11, 4)",
        evidence="the first at (11, 1): 10; they run from 0 to 10",
    ),
    # class weights
    "too few class weights": Case(
        "class weights",
        "(2,) class weights for 3 classes",
        lambda: (net(), (features(), labels()), CE(weight=torch.ones(2))),
        lambda: (net(), (features(), labels()), CE(weight=torch.ones(3))),
        fix="weight = torch.ones(3)",
    ),
    "class weights of doubles": Case(
        "class weights",
        "weight is float64, the output float32",
        lambda: (net(), (features(), labels()), CE(weight=torch.ones(3).double())),
        lambda: (net(), (features(), labels()), CE(weight=torch.ones(3))),
        fix="criterion = criterion.to(torch.float32)",
    ),
    "pos_weight": Case(
        "class weights",
        "pos_weight (2,) does not broadcast to the output, (12, 3)",
        lambda: (net(), (features(), F.one_hot(labels(), C).float()), LOGITS(pos_weight=torch.ones(2))),
        lambda: (net(), (features(), F.one_hot(labels(), C).float()), LOGITS(pos_weight=torch.ones(3))),
        fix="pos_weight = torch.ones(3)",
    ),
    "weights of BCELoss": Case(
        "class weights",
        "weight (2,) does not broadcast",
        lambda: (net(D, C, nn.Sigmoid()), (features(), F.one_hot(labels(), C).float()), BCE(weight=torch.ones(2))),
        lambda: (net(D, C, nn.Sigmoid()), (features(), F.one_hot(labels(), C).float()), BCE(weight=torch.ones(3))),
    ),
    # activations
    "softmax and CrossEntropyLoss": Case(
        "activation",
        "the output comes from a softmax: it is applied twice",
        lambda: (net(D, C, nn.Softmax(1)), (features(), labels()), CE()),
        ordinary,
        fix="return logits  # without the softmax",
    ),
    "a softmax by hand": Case(
        "activation",
        "looks like probabilities: each row sums to 1",
        lambda: (net(D, C, Apply(lambda x: x.exp() / x.exp().sum(1, keepdim=True))), (features(), labels()), CE()),
        lambda: (net(D, C, Apply(lambda x: x.exp())), (features(), labels()), CE()),
    ),
    "sigmoid and CrossEntropyLoss": Case(
        "activation",
        "wants logits, and the output comes from a sigmoid",
        lambda: (net(D, C, nn.Sigmoid()), (features(), labels()), CE()),
        lambda: (net(D, C, nn.Tanh()), (features(), labels()), CE()),
    ),
    "sigmoid and BCEWithLogitsLoss": Case(
        "activation",
        "applies sigmoid itself, and the output comes from a sigmoid: it is applied twice",
        lambda: (net(D, 1, nn.Sigmoid(), nn.Flatten(0)), (features(), binary()), LOGITS()),
        lambda: (net(D, 1, nn.Flatten(0)), (features(), binary()), LOGITS()),
        fix="return logits  # without the sigmoid",
    ),
    "logsigmoid and BCEWithLogitsLoss": Case(
        "activation",
        "comes from a logsigmoid, so these are no logits",
        lambda: (net(D, 1, nn.LogSigmoid(), nn.Flatten(0)), (features(), binary()), LOGITS()),
        lambda: (net(D, 1, nn.Flatten(0)), (features(), binary()), LOGITS()),
    ),
    "all in [0, 1]": Case(
        "activation",
        "all of the output is in [0, 1]",
        lambda: (
            net(D, 1, Apply(lambda x: (20 * (x - x.mean())).tanh() / 2 + 0.5)),
            (features(), binary()[:, None]),
            LOGITS(),
        ),
        lambda: (net(D, 1, Apply(lambda x: x.tanh() / 2 + 0.5)), (features(), binary()[:, None]), LOGITS()),
        severity="warning",
    ),
    "logits for BCELoss": Case(
        "activation",
        "elements of input are outside [0, 1]",
        lambda: (net(D, 1), (features(), binary()[:, None]), BCE()),
        lambda: (net(D, 1, nn.Sigmoid()), (features(), binary()[:, None]), BCE()),
        fix="criterion = lossguard.BCEWithLogitsLoss()",
        evidence="looks like logits",
    ),
    "sigmoid twice": Case(
        "activation",
        "sigmoid is applied twice",
        lambda: (net(D, 1, nn.Sigmoid(), nn.Sigmoid()), (features(), binary()[:, None]), BCE()),
        lambda: (net(D, 1, nn.Sigmoid()), (features(), binary()[:, None]), BCE()),
        fix="return output  # of one sigmoid",
    ),
    "softmax twice": Case(
        "activation",
        "softmax is applied twice",
        lambda: (net(D, C, nn.Softmax(1), nn.Softmax(1), Apply(torch.log)), (features(), labels()), NLL()),
        lambda: (net(D, C, nn.Softmax(1), Apply(torch.log)), (features(), labels()), NLL()),
    ),
    "probabilities for NLLLoss": Case(
        "activation",
        "NLLLoss wants log-probabilities, and the output looks like probabilities",
        lambda: (net(D, C, nn.Softmax(1)), (features(), labels()), NLL()),
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), labels()), NLL()),
        fix="return logits.log_softmax(1)  # instead of softmax",
    ),
    "logits for NLLLoss": Case(
        "activation",
        "which are never above 0: these look like logits",
        lambda: (net(), (features(), labels()), NLL()),
        lambda: (net(D, C, nn.LogSoftmax(1), nn.LogSoftmax(1)), (features(), labels()), NLL()),  # harmless
    ),
    "log-probabilities over the batch": Case(
        "activation",
        "log_softmax was taken over dimension 0, not over that of the classes",
        lambda: (net(D, C, nn.LogSoftmax(0)), (features(), labels()), NLL()),
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), labels()), NLL()),
        fix="output = logits.log_softmax(1)",
    ),
    "log-probabilities that do not sum to 1": Case(
        "activation",
        "the exponentials of these do not sum to 1",
        lambda: (net(D, C, nn.LogSigmoid()), (features(), labels()), NLL()),
        lambda: (net(D, C, nn.LogSoftmax(1)), (features(), labels()), NLL()),
        severity="warning",
    ),
    # the loss
    "a loss for each sample": Case(
        "loss",
        "not one number, so backward() raises",
        lambda: (net(), (features(), labels()), CE(reduction="none")),
        lambda: (net(), (features(), labels()), CE(reduction="sum")),
        fix="criterion.reduction = 'mean'",
    ),
    "a number": Case(
        "loss",
        "a float, not a tensor",
        lambda: (net(), (features(), labels()), lambda output, target: F.cross_entropy(output, target).item()),
        lambda: (net(), (features(), labels()), lambda output, target: F.cross_entropy(output, target)),
    ),
    "an infinite loss": Case(
        "not finite",
        "The loss is not finite; what the model returned is.",
        lambda: (net(), (features(), labels()), lambda output, target: (output * 0).log().mean()),
        lambda: (net(), (features(), labels()), lambda output, target: output.square().mean()),
        evidence="loss () float32 cpu: 1 of 1 elements (-inf: 1)",
    ),
    "NaN in the model": Case(
        "not finite",
        "The first output that is not finite is of '3' (Apply)",
        lambda: (net(D, C, Apply(divide_by_zero), nn.Linear(C, C)), (features(), labels()), CE()),
        lambda: (net(D, C, Apply(lambda x: x / 2), nn.Linear(C, C)), (features(), labels()), CE()),
    ),
    "NaN in the batch": Case(
        "not finite",
        "Not finite before the model runs: an input.",
        lambda: (net(), (torch.full((N, D), nan), labels()), CE()),
        ordinary,
    ),
    "NaN in the backward": Case(
        "not finite",
        "The first gradient that is not finite is of '1' (Root)",
        lambda: (nn.Sequential(nn.Linear(D, C), Root()), (features(), labels()), CE()),
        lambda: (nn.Sequential(nn.Linear(D, C), nn.Tanh()), (features(), labels()), CE()),
    ),
    "far above guessing": Case(
        "initial loss",
        "begins far above guessing",
        lambda: (scaled(100.0), (features(), labels()), CE()),
        lambda: (scaled(1.0), (features(), labels()), CE()),
        severity="note",
        evidence="guessing: log(3) = 1.099; the largest output is",
    ),
    "far below guessing": Case(
        "initial loss",
        "begins far below guessing",
        lambda: (trained(), (features(), labels()), CE()),
        lambda: (scaled(1.0), (features(), labels()), CE()),
        severity="note",
    ),
    "far above guessing, binary": Case(
        "initial loss",
        "BCEWithLogitsLoss begins far above guessing",
        lambda: (constant(net(D, 1), 0.0, [9.0]), (features(), binary()[:, None]), LOGITS()),
        lambda: (constant(net(D, 1), 0.01, [0.3]), (features(), binary()[:, None]), LOGITS()),
        severity="note",
        evidence="log(2) = 0.6931",
    ),
    # gradients
    "a detached output": Case(
        "gradients",
        "no gradient flows from the loss to the model",
        lambda: (net(D, C, Apply(no_gradient)), (features(), labels()), CE()),
        ordinary,
    ),
    "a frozen model": Case(
        "gradients",
        "the model has no parameter to be trained",
        lambda: (frozen(), (features(), labels()), CE()),
        ordinary,
        fix="model.requires_grad_(True)",
    ),
    "a part without a part": Case(
        "gradients",
        "2 of 6 parameters get no gradient",
        lambda: (Unused(), (features(), labels()), CE()),
        lambda: (Unused().net, (features(), labels()), CE()),
        severity="warning",
        fix="model.spare.requires_grad_(False)  # or use it",
        evidence="spare.weight, spare.bias",
    ),
    "gradients of 0": Case(
        "gradients",
        "every gradient is 0",
        lambda: (net(D, C, Apply(lambda x: x.clamp(5, 6))), (features(), labels()), CE()),
        lambda: (net(D, C, Apply(lambda x: x.clamp(-6, 6))), (features(), labels()), CE()),
    ),
    "a backward that raises": Case(
        "gradients",
        "the backward raised ArithmeticError",
        lambda: (net(D, C, Apply(BadBackward.apply)), (features(), labels()), CE()),
        ordinary,
        evidence="in the backward\nraised at ",
    ),
    "reentrant checkpointing": Case(
        "gradients",
        "reentrant checkpointing",
        lambda: (Reentrant(True), (features(), labels()), CE()),
        lambda: (Reentrant(False), (features(), labels()), CE()),
        severity="warning",
    ),
    # BatchNorm
    "a last batch of one": Case(
        "BatchNorm",
        "and '3' is a BatchNorm: it raises",
        lambda: (net(D, C, nn.BatchNorm1d(C)), loader(13, 4), CE()),
        lambda: (net(D, C, nn.BatchNorm1d(C)), loader(13, 4, drop_last=True), CE()),
        evidence="13 samples in batches of 4",
        fix="DataLoader(..., batch_size=4, drop_last=True)",
    ),
    "a last image": Case(
        "BatchNorm",
        "its statistics are of that one",
        lambda: (convolutional(), loader(13, 4, images(n=13)), CE()),
        lambda: (convolutional(), loader(14, 4, images(n=14)), CE()),
        severity="warning",
    ),
    "a batch of one": Case(
        "BatchNorm",
        "'3' normalises over the batch, which has one value per channel",
        lambda: (net(D, C, nn.BatchNorm1d(C)), (features(1), labels(1)), CE()),
        lambda: (net(D, C, nn.BatchNorm1d(C)), (features(2), labels(2)), CE()),
    ),
    # the rest
    "evaluation mode": Case(
        "mode",
        "in evaluation mode",
        lambda: (net().eval(), (features(), labels()), CE()),
        ordinary,
        severity="note",
        fix="model.train()",
    ),
    "several outputs": Case(
        "output",
        "the criterion was given output['logits']",
        lambda: (net(D, C, Apply(lambda x: {"aux": x * 2, "logits": x})), (features(), labels()), CE()),
        lambda: (
            net(D, C, Apply(lambda x: {"aux": x * 2, "logits": x})),
            (features(), labels()),
            CE(),
            {"output": lambda output: output["logits"]},
        ),
        severity="note",
    ),
    "no output": Case(
        "output",
        "returns None, in which there is no tensor",
        lambda: (net(D, C, Apply(lambda x: None)), (features(), labels()), CE()),
        ordinary,
    ),
    "no loss": Case(
        "output",
        "no criterion was given, and the model returns no loss",
        lambda: (net(), features()),
        lambda: (net(D, C, Apply(lambda x: x.square().mean())), features()),
    ),
    "memory": Case(
        "forward",
        "does not fit into the memory",
        lambda: (net(D, C, Apply(raises_out_of_memory)), (features(), labels()), CE()),
        ordinary,
        evidence="OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB.",
    ),
    "anything else in the model": Case(
        "forward",
        "'3' raised ZeroDivisionError",
        lambda: (net(D, C, Apply(mine)), (features(), labels()), CE()),
        ordinary,
        evidence="given input (12, 3) float32 cpu\nZeroDivisionError: mine\nraised at ",
    ),
    "anything else in the criterion": Case(
        "criterion",
        "the criterion raised ZeroDivisionError",
        lambda: (net(), (features(), labels()), mine),
        ordinary,
        evidence="ZeroDivisionError: mine\nraised at ",
    ),
    "output= that raises": Case(
        "criterion",
        "output= raised ZeroDivisionError",
        lambda: (*ordinary(), {"output": mine}),
        lambda: (*ordinary(), {"output": lambda output: output}),
    ),
}


def arguments(case: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (case[:-1], case[-1]) if isinstance(case[-1], dict) and len(case) > 3 else (case, {})


@pytest.mark.parametrize("name", CASES)
def test_a_finding(name: str) -> None:
    case = CASES[name]
    args, options = arguments(case.bad())
    result = look(*args, **options)
    found = [f for f in result.findings if f.check == case.check and case.words in f.what]
    assert len(found) == 1, str(result)
    others = [f for f in result.findings if f is not found[0]]
    assert not others or name in {"nothing but what is ignored", "one class"}, str(result)
    assert found[0].severity == case.severity and result.ok is (case.severity != "error")
    assert case.evidence in found[0].evidence and case.fix in (None, found[0].fix), str(result)
    assert found[0].what in str(result)
    if found[0].report is not None:
        assert found[0].fix and found[0].fix == lossguard.diagnosis.diagnose(found[0].report)[0].fix


@pytest.mark.parametrize("name", CASES)
def test_no_finding(name: str) -> None:
    args, options = arguments(CASES[name].good())
    result = look(*args, **options)
    assert result.ok and result.findings == [], str(result)


# ---- preflight: whoever calls the loss


class OfTheirOwn(nn.Module):
    def __init__(self, package: Any) -> None:
        super().__init__()
        self.inner = package.CrossEntropyLoss()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.inner(output, target) + 0.1 * output.square().mean()


CALLERS = {
    "torch module": nn.CrossEntropyLoss(),
    "lossguard module": lossguard.CrossEntropyLoss(),
    "torch function": F.cross_entropy,
    "lossguard function": L.cross_entropy,
    "partial": functools.partial(F.cross_entropy, label_smoothing=0.1),
    "lambda": lambda output, target: F.cross_entropy(output, target),
    "lossguard lambda": lambda output, target: L.cross_entropy(input=output, target=target),
    "module of their own": OfTheirOwn(nn),
    "module of their own, lossguard": OfTheirOwn(lossguard),
}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("caller", CALLERS)
def test_a_loss_is_known_whoever_calls_it(caller: str, patched: bool) -> None:
    with lossguard.patched() if patched else contextlib.nullcontext():
        criterion = CALLERS[caller]
        assert look(net(), (features(), labels()), criterion).findings == []
        softmaxed = look(net(D, C, nn.Softmax(1)), (features(), labels()), criterion)
        assert [f.check for f in softmaxed.findings] == ["activation"]
        labelled = look(net(), (features(), labels() + 1), criterion)
        (finding,) = labelled.findings
        assert finding.check == "labels" and finding.report is not None and finding.report.count == 4
        assert isinstance(finding.error, lossguard.TargetOutOfBoundsError)
        floats = look(net(), (features(), labels().float()), criterion)
        assert [f.check for f in floats.findings] == ["dtype"] and isinstance(floats.findings[0].error, RuntimeError)


@pytest.mark.parametrize("package", [nn, lossguard])
@pytest.mark.parametrize("loss", ["BCELoss", "BCEWithLogitsLoss", "NLLLoss", "CrossEntropyLoss"])
def test_all_four_losses_of_both_packages(package: Any, loss: str) -> None:
    last = {"BCELoss": [nn.Sigmoid()], "NLLLoss": [nn.LogSoftmax(1)]}.get(loss, [])
    target = F.one_hot(labels(), C).float() if loss.startswith("BCE") else labels()
    criterion = getattr(package, loss)()
    result = look(net(D, C, *last), (features(), target), criterion)
    assert result.findings == [] and result.facts["loss"].endswith(
        "(guessing: log(2) = 0.6931)" if "BCE" in loss else "(guessing: log(3) = 1.099)"
    )
    result = look(net(D, C, *last), (features(), target * 2), criterion)
    assert [f.check for f in result.findings] == ["labels"]


def test_a_model_that_computes_its_loss() -> None:
    batch = {"x": features(), "labels": labels()}
    result = look(WithLoss(), batch)
    assert result.findings == [] and "log(3)" in result.facts["loss"]
    assert result.facts["batch"] == "input 'x' (12, 8) float32 cpu, input 'labels' (12,) int64 cpu"
    result = look(WithLoss(), {**batch, "labels": labels() + 2})
    assert [f.check for f in result.findings] == ["labels"]
    (note,) = look(WithLoss(), batch, nn.CrossEntropyLoss()).findings
    assert note.what.endswith("the criterion was given output['logits'].")
    result = look(Apply(lambda x, labels: (x.square().mean(), x)), (features(), labels()))
    assert [f.check for f in result.findings] == ["gradients"] and "loss" in result.facts


def test_every_call_of_a_criterion_is_looked_at() -> None:
    def both(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + F.binary_cross_entropy_with_logits(
            output.sigmoid(), F.one_hot(target, C).float()
        )

    result = look(net(), (features(), labels()), both)
    assert [(f.check, f.what.partition(" ")[0]) for f in result.findings] == [("activation", "BCEWithLogitsLoss")]


def test_a_criterion_without_any_of_the_losses() -> None:
    result = look(net(), (features(), torch.randn(N, C)), nn.MSELoss())
    assert result.findings == [] and "guessing" not in result.facts["loss"]


@pytest.mark.parametrize("how", ["module", "policy"])
def test_a_violation_that_is_to_be_skipped_is_a_warning(how: str) -> None:
    criterion = lossguard.CrossEntropyLoss(on_violation="skip" if how == "module" else None)
    target = labels()
    target[3] = 17
    with lossguard.guard(on_violation="skip" if how == "policy" else None):
        result = look(net(), (features(), target), criterion)
        assert result.ok and [(f.severity, f.check) for f in result.findings] == [("warning", "labels")]
        assert "loss" in result.facts and "gradients" in result.facts
        result = look(net(), (features(), target), nn.CrossEntropyLoss())  # torch's own knows no policy
        assert [(f.severity, f.check) for f in result.findings] == [("error", "labels")]


def test_all_misfits_of_a_call_are_said() -> None:
    result = look(net(D, 1), (features(), binary().long()), nn.BCEWithLogitsLoss(pos_weight=torch.ones(4)))
    assert [f.check for f in result.findings] == ["shape", "dtype", "class weights"]
    assert len({id(f.error) for f in result.findings}) == 1


def test_what_some_kernels_take_is_looked_at_all_the_same() -> None:
    target = binary().double()[:, None]
    target[2] = 2.0
    result = look(net(D, 1), (features(), target), nn.BCEWithLogitsLoss())  # takes a target of another dtype
    assert [f.check for f in result.findings] == ["labels"] and result.findings[0].report is not None


def test_half_precision_and_autocast() -> None:
    model = net().bfloat16()
    assert look(model, (features().bfloat16(), labels()), nn.CrossEntropyLoss()).findings == []
    softmaxed = net(D, C, Apply(lambda x: x.exp() / x.exp().sum(1, keepdim=True))).bfloat16()
    assert [f.check for f in look(softmaxed, (features().bfloat16(), labels()), nn.CrossEntropyLoss()).findings] == [
        "activation"
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert look(net(), (features(), labels()), nn.CrossEntropyLoss()).findings == []
        assert (
            look(net(D, C, nn.Softmax(1)), (features(), labels()), nn.CrossEntropyLoss()).findings[0].check
            == "activation"
        )


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x.flatten(),
        lambda x: x.squeeze(1).clamp(1e-7, 1 - 1e-7),
        lambda x: x.view(-1).double().float(),
        lambda x: x[:, 0].contiguous().clone(),
        lambda x: x.t()[0],
        lambda x: torch.nan_to_num(x.reshape(-1)),
        lambda x: x.unbind(1)[0],
    ],
)
def test_an_activation_is_seen_through_what_only_moves_values(between: Any) -> None:
    model = net(D, 1, nn.Sigmoid(), Apply(between))
    result = look(model, (features(), binary()), nn.BCEWithLogitsLoss())
    assert [f.what for f in result.findings if "comes from a sigmoid: it is applied twice" in f.what]
    gated = net(D, 1, Apply(lambda x: between(torch.sigmoid(x) * 4 - 2)))
    assert look(gated, (features(), binary()), nn.BCEWithLogitsLoss()).findings == []


def test_segmentation_and_one_hot_probabilities() -> None:
    masks = torch.randint(0, 5, (N, 6, 6))
    assert look(*segmentation(masks)).findings == []
    result = look(*segmentation(masks[:, None]))
    assert [f.fix for f in result.findings] == ["target = target.squeeze(1)"]
    result = look(*segmentation(masks + 250))
    assert [f.check for f in result.findings] == ["labels"]
    smooth = F.one_hot(masks, 5).movedim(-1, 1).float() * 0.9 + 0.02
    assert look(nn.Conv2d(3, 5, 1), (images(), smooth), nn.CrossEntropyLoss()).findings == []


def test_parameters_of_a_criterion_count_too() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return self.scale * F.cross_entropy(output, target)

    (finding,) = look(net(), (features(), labels()), Weighted()).findings
    assert (
        finding.evidence == "criterion.unused" and finding.fix == "criterion.unused.requires_grad_(False)  # or use it"
    )


# ---- preflight: loaders


def test_a_loader_goes_on_as_if_nothing_had_been() -> None:
    def batches(looking: bool, **options: Any) -> list[Any]:
        model = net()
        torch.manual_seed(5)
        generator = torch.Generator().manual_seed(7) if options.pop("own", False) else None
        data = loader(13, 4, shuffle=True, drop_last=True, generator=generator, **options)
        if looking:
            assert look(model, data, nn.CrossEntropyLoss()).findings == []
        return [list(data), list(data)]

    for options in ({}, {"own": True}):
        torch.testing.assert_close(batches(True, **options), batches(False, **options), rtol=0, atol=0)


def test_no_worker_is_started_and_its_loader_stays_fresh() -> None:
    data = loader(8, 4, num_workers=2, persistent_workers=True, timeout=30)
    assert look(net(), data, nn.CrossEntropyLoss()).findings == []
    assert data._iterator is None and data.num_workers == 2 and data.persistent_workers and data.timeout == 30


def test_other_iterables() -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            yield features(), labels()

    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            yield from zip(features(), labels())

    assert look(net(), Batches(), nn.CrossEntropyLoss()).findings == []
    assert look(net(), DataLoader(Stream(), batch_size=4), nn.CrossEntropyLoss()).findings == []
    assert look(net(D, C, nn.BatchNorm1d(C)), DataLoader(Stream(), batch_size=4), nn.CrossEntropyLoss()).findings == []


def test_a_last_batch_of_one_in_evaluation_mode_or_without_batchnorm() -> None:
    assert look(net(), loader(13, 4), nn.CrossEntropyLoss()).findings == []
    model = net(D, C, nn.BatchNorm1d(C)).eval()
    assert [f.check for f in look(model, loader(13, 4), nn.CrossEntropyLoss()).findings] == ["mode"]
    assert look(net(D, C, nn.BatchNorm1d(C)), loader(13, 12), nn.CrossEntropyLoss()).findings[0].check == "BatchNorm"
    subset = torch.utils.data.SubsetRandomSampler(range(12))
    assert look(net(D, C, nn.BatchNorm1d(C)), loader(13, 4, sampler=subset), nn.CrossEntropyLoss()).findings == []


def test_a_batch_of_a_loader_is_moved_to_the_model() -> None:
    moved: list[Any] = []

    class Carrier:
        def to(self, device: Any) -> Tensor:
            moved.append(device)
            return features()

    class Carriers:
        def __iter__(self) -> Iterator[Any]:
            yield {"input": Carrier(), "label": labels()}

    assert look(net(), Carriers(), nn.CrossEntropyLoss()).findings == []
    assert moved == [torch.device("cpu")]


# ---- preflight: the result


def test_the_text_of_a_result() -> None:
    result = look(net(D, C, nn.Softmax(1)), (features(), labels()), nn.CrossEntropyLoss())
    lines = str(result).splitlines()
    assert lines[0] == "preflight of Sequential: 1 error"
    assert lines[1:4] == [
        "  batch     input (12, 8) float32 cpu",
        "  labels    target (12,) int64 cpu",
        "  output    output (12, 3) float32 cpu",
    ]
    assert lines[6].startswith("  error, activation: CrossEntropyLoss applies log_softmax itself")
    assert lines[-1] == "      fix: return logits  # without the softmax"
    assert str(look(*ordinary())).startswith("preflight of Sequential: all fits\n")


def test_the_original_exception() -> None:
    result = look(net(D, C, Apply(mine)), (features(), labels()), nn.CrossEntropyLoss())
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        result.raise_original()
    assert caught.value is result.findings[0].error and caught.traceback[-1].name == "mine"
    look(*ordinary()).raise_original()
    assert copy.deepcopy(result).to_dict() == result.to_dict()
    assert pickle.loads(pickle.dumps(result)).to_dict() == result.to_dict()


def test_what_ends_a_program_is_not_swallowed() -> None:
    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    model = net(D, C, Apply(interrupted))
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        preflight(model, (features(), labels()), nn.CrossEntropyLoss())
    assert len(before) == len(state(model)) and all(not m._forward_hooks for m in model.modules())
