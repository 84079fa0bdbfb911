"""torch.compile and torch.export: eager's numbers, no graph break, and bad values still reported.

Natively a compiled loss says nothing about a bad value. Ours must raise its own exception, with the
line of the caller's code that was traced, and follow the policy of the time it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lossguard
import lossguard.functional as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

C = 5
ops = torch.ops.lossguard
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


class Case(NamedTuple):
    kind: str
    function: str
    module: str
    options: dict[str, Any]
    bad: float

    def sample(self, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        g = torch.Generator().manual_seed(seed)
        logits, soft = torch.randn(n, C, generator=g), torch.rand(n, C, generator=g)
        labels = torch.randint(0, C, (n,), generator=g)
        return {
            "bce": (torch.sigmoid(logits), soft),
            "bce_with_logits": (logits, soft),
            "nll": (torch.log_softmax(logits, -1), labels),
            "labels": (logits, labels),
            "probabilities": (logits, torch.softmax(soft, -1)),
        }[self.kind]

    def spoilt(self, target: torch.Tensor) -> torch.Tensor:
        target = target.clone()
        target.view(-1)[1] = self.bad
        return target

    def loss(self, module: Any = L) -> Callable[..., torch.Tensor]:
        return partial(getattr(module, self.function), **self.options)


WEIGHT = torch.linspace(0.5, 1.5, C)
CASES = {
    "bce": Case("bce", "binary_cross_entropy", "BCELoss", {"weight": WEIGHT}, 1.5),
    "bce_with_logits": Case(
        "bce_with_logits", "binary_cross_entropy_with_logits", "BCEWithLogitsLoss", {"pos_weight": WEIGHT}, -0.5
    ),
    "nll": Case("nll", "nll_loss", "NLLLoss", {"weight": WEIGHT}, C),
    "cross_entropy": Case("labels", "cross_entropy", "CrossEntropyLoss", {"label_smoothing": 0.1}, -1),
    "probabilities": Case("probabilities", "cross_entropy", "CrossEntropyLoss", {"weight": WEIGHT}, 2.0),
}
over_cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
# Inductor takes seconds for each graph and adds code generation alone: two losses there, one of each family.
over_cases_and_backends = pytest.mark.parametrize(
    "case, backend",
    [
        pytest.param(case, backend, id=f"{backend}-{name}")
        for backend in ("eager", "aot_eager", "inductor")
        for name, case in CASES.items()
        if backend != "inductor" or name in ("bce_with_logits", "cross_entropy")
    ],
)


def value_and_gradient(f: Callable[..., torch.Tensor], input: torch.Tensor, target: torch.Tensor) -> Any:
    x = input.clone().requires_grad_()
    out = f(x, target)
    out.sum().backward()
    return out.detach(), x.grad


# ---- numbers


@pytest.mark.parametrize(
    "case, backend, dynamic",
    [
        pytest.param(case, backend, dynamic, id=f"{backend}-{'dynamic' if dynamic else 'static'}-{name}")
        for backend in ("eager", "aot_eager", "inductor")
        for dynamic in (True, False)
        for name, case in CASES.items()
        if dynamic or backend == "aot_eager" or (backend, name) == ("inductor", "cross_entropy")
    ],
)
def test_values_and_gradients_are_those_of_eager(case: Case, backend: str, dynamic: bool) -> None:
    loss = case.loss()

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return loss(x * 1, t)

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    args = case.sample(6)
    compiled_result, eager, native = (value_and_gradient(f, *args) for f in (compiled, step, case.loss(F)))
    assert torch.equal(compiled_result[0], eager[0])
    assert torch.equal(compiled_result[1], eager[1])
    close(compiled_result, native)
    with torch.no_grad():
        assert torch.equal(compiled(*args), eager[0])


@over_cases
def test_other_reductions(case: Case) -> None:
    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        loss = case.loss()
        return torch.cat([loss(x, t, reduction="none").flatten() * 3, loss(x, t, reduction="sum")[None]])

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    args = case.sample(6)
    for ours, eager in zip(value_and_gradient(compiled, *args), value_and_gradient(step, *args)):
        assert torch.equal(ours, eager)


SHAPES = {
    "unbatched": ((C,), ()),
    "one-label": ((C,), (1,)),
    "spatial": ((2, C, 3, 2), (2, 3, 2)),
    "empty": ((0, C), (0,)),
    "channels_last": ((2, C, 3, 2), (2, 3, 2)),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("function", ["cross_entropy", "nll_loss"])
def test_shapes(name: str, function: str) -> None:
    shape, labels = SHAPES[name]
    x = torch.log_softmax(torch.randn(shape), min(1, len(shape) - 1))
    if name == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    t = torch.randint(0, C, labels, dtype=torch.uint8 if name == "spatial" else torch.int64)

    def step(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = getattr(L, function)
        return loss(x, t, reduction="none"), loss(x, t, reduction="mean")

    results = []
    for f in (torch.compile(step, backend="aot_eager", fullgraph=True), step):
        y = x.clone().requires_grad_()
        each, mean = f(y, t)
        results.append((each, mean, *torch.autograd.grad((each.sum(), mean), y)))
    for compiled, eager in zip(*results):
        assert compiled.shape == eager.shape and compiled.stride() == eager.stride()
        torch.testing.assert_close(compiled, eager, rtol=0, atol=0, equal_nan=name == "empty")


@over_cases
def test_module(case: Case) -> None:
    criterion = getattr(lossguard, case.module)(**case.options)
    compiled = torch.compile(criterion, backend="aot_eager", fullgraph=True)
    args = case.sample(6)
    for ours, eager in zip(value_and_gradient(compiled, *args), value_and_gradient(criterion, *args)):
        assert torch.equal(ours, eager)
    with pytest.raises(lossguard.LossValidationError):
        compiled(args[0], case.spoilt(args[1]))


@over_cases
def test_autocast_inside(case: Case) -> None:
    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss()(x, t)

    x, t = case.sample(6)
    args = x.bfloat16(), t.bfloat16() if t.is_floating_point() else t
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    ours, eager = value_and_gradient(compiled, *args), value_and_gradient(step, *args)
    for a, b in zip(ours, eager):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert ours[0].dtype == torch.float32 and ours[1].dtype == torch.bfloat16


# ---- graphs


@over_cases
def test_no_graph_break(case: Case) -> None:
    loss = case.loss()

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return loss(torch.sigmoid(x), t).sin()

    explained = torch._dynamo.explain(step)(*case.sample(6))
    assert explained.graph_count == 1 and explained.graph_break_count == 0, explained.break_reasons


@over_cases
def test_changing_shapes_do_not_recompile_again_and_again(case: Case) -> None:
    loss, counter = case.loss(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(loss, backend=counter, fullgraph=True, dynamic=True)
    for n in (6, 7, 9, 16, 33, 50):
        args = case.sample(n)
        for a, b in zip(value_and_gradient(compiled, *args), value_and_gradient(loss, *args)):
            assert torch.equal(a, b)
        if n == 6:  # label_smoothing takes two: Dynamo starts over where it finds a Python float in a graph
            compilations = counter.frame_count
    assert counter.frame_count == compilations
    with pytest.raises(lossguard.LossValidationError) as caught:
        compiled(args[0].clone().requires_grad_(), case.spoilt(args[1]))
    assert caught.value.report.shapes["input"] == (50, C)
    assert counter.frame_count == compilations


def test_automatic_dynamic_shapes_recompile_once() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(L.cross_entropy, backend=counter, fullgraph=True)
    for n in (6, 7, 9, 16, 33):
        x, t = CASES["cross_entropy"].sample(n)
        assert torch.equal(compiled(x, t), L.cross_entropy(x, t))
    assert counter.frame_count == 2


def test_policy_changes_and_violations_do_not_recompile() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(L.cross_entropy, backend=counter, fullgraph=True)
    case = CASES["cross_entropy"]
    x, t = case.sample(6)
    for _ in range(3):
        with pytest.raises(lossguard.TargetOutOfBoundsError):
            compiled(x, case.spoilt(t))
        with lossguard.guard(on_violation="skip"):
            compiled(x, case.spoilt(t))
        compiled(x, t)
    assert counter.frame_count == 1


# ---- violations


def line_of(f: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(f)
    return first + next(i for i, line in enumerate(lines) if text in line)


@over_cases_and_backends
def test_bad_values_raise_our_exception_at_the_users_line(case: Case, backend: str) -> None:
    loss = case.loss()

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = x * 1
        z = loss(y, t)  # here
        return z * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    input, target = case.sample(6)
    with pytest.raises(lossguard.LossValidationError) as eager:
        step(input, case.spoilt(target))
    expected = value_and_gradient(step, input, target)
    for x in (input, input.clone().requires_grad_()):
        with pytest.raises(lossguard.LossValidationError) as caught:
            compiled(x, case.spoilt(target))
        assert type(caught.value) is type(eager.value)
        report = caught.value.report
        assert report == eager.value.report
        site = report.call_site
        assert (site.file, site.line, site.function) == (__file__, line_of(step, "# here"), "step")
        assert site.source == "z = loss(y, t)  # here"
        result = value_and_gradient(compiled, input, target)
        assert all(torch.equal(a, b) for a, b in zip(result, expected))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_each_of_two_calls_reports_its_own_line(backend: str) -> None:
    def step(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = L.cross_entropy(x, a)  # first
        second = L.cross_entropy(
            x + 1,
            b,
        )
        return first + second

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    x, t = CASES["cross_entropy"].sample(6)
    bad = CASES["cross_entropy"].spoilt(t)
    compiled(x, t, t)
    for args, text in (((x, bad, t), "# first"), ((x, t, bad), "second = ")):
        with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
            compiled(*args)
        assert caught.value.report.call_site.line == line_of(step, text)


class Net(nn.Module):
    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        self.layer, self.criterion = nn.Linear(3, C), criterion

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        logits = self.layer(x)
        return self.criterion(logits, t)  # in forward


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_line_in_a_modules_forward(backend: str) -> None:
    torch.manual_seed(0)
    net = Net(lossguard.CrossEntropyLoss())
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    x, t = torch.randn(6, 3), torch.randint(0, C, (6,))
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
        compiled(x, t + 1 - t.min() + C)
    site = caught.value.report.call_site
    assert (site.file, site.line, site.function) == (__file__, line_of(Net.forward, "# in forward"), "forward")
    compiled(x, t).backward()
    ours = net.layer.weight.grad
    net.zero_grad()
    F.cross_entropy(net.layer(x), t).backward()
    close(ours, net.layer.weight.grad)


def test_the_line_in_a_nested_helper() -> None:
    def helper(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return L.cross_entropy(x, t)  # helper

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return helper(x, t) + 1

    x, t = CASES["cross_entropy"].sample(6)
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
        torch.compile(step, backend="aot_eager", fullgraph=True)(x, t - 10)
    assert caught.value.report.call_site.line == line_of(helper, "# helper")
    assert caught.value.report.call_site.function == "helper"


def test_a_bare_function_compiled_reports_the_line_that_calls_it() -> None:
    compiled = torch.compile(L.cross_entropy, backend="aot_eager", fullgraph=True)
    x, t = CASES["cross_entropy"].sample(6)
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
        compiled(x, t - 10)  # bare
    site = caught.value.report.call_site
    line = line_of(test_a_bare_function_compiled_reports_the_line_that_calls_it, "# bare")
    assert (site.file, site.line) == (__file__, line)


def test_graph_breaks_elsewhere_do_not_hide_the_line() -> None:
    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return L.cross_entropy(y, t)  # after the break

    x, t = CASES["cross_entropy"].sample(6)
    compiled = torch.compile(step, backend="aot_eager")
    close(compiled(x, t), F.cross_entropy(x * 2, t))
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
        compiled(x, t - 10)
    assert caught.value.report.call_site.line == line_of(step, "# after the break")


def test_activation_checkpointing_compiled() -> None:
    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(L.cross_entropy, x, t, use_reentrant=False)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x, t = CASES["cross_entropy"].sample(6)
    close(value_and_gradient(compiled, x, t), value_and_gradient(F.cross_entropy, x, t))
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        compiled(x.clone().requires_grad_(), t - 10)


# ---- policy


@pytest.mark.parametrize(
    "case, backend",
    [
        pytest.param(case, backend, id=f"{backend}-{name}")
        for name, case in CASES.items()
        for backend in ("aot_eager", "inductor")
        if backend == "aot_eager" or name == "cross_entropy"
    ],
)
def test_guard_around_a_compiled_call_has_effect(case: Case, backend: str) -> None:
    loss = case.loss()
    compiled = torch.compile(lambda x, t: loss(x * 1, t), backend=backend, fullgraph=True)
    input, target = case.sample(6)
    bad = case.spoilt(target)
    compiled(input, target)
    with lossguard.guard(on_violation="skip"):
        ours, eager = value_and_gradient(compiled, input, bad), value_and_gradient(loss, input, bad)
    assert torch.isfinite(ours[0]) and all(torch.equal(a, b) for a, b in zip(ours, eager))
    with pytest.raises(lossguard.LossValidationError):
        compiled(input, bad)
    lossguard.configure(on_violation="skip")
    try:
        assert torch.equal(compiled(input, bad), ours[0])
    finally:
        lossguard.configure(on_violation="raise")


def test_a_guard_that_was_active_while_tracing_is_not_baked_in() -> None:
    case = CASES["cross_entropy"]
    x, t = case.sample(6)
    compiled = torch.compile(L.cross_entropy, backend="aot_eager", fullgraph=True)
    with lossguard.guard(on_violation="skip"):
        compiled(x, case.spoilt(t))
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        compiled(x, case.spoilt(t))


def test_strict_and_check_finite_at_run_time() -> None:
    compiled = torch.compile(L.binary_cross_entropy_with_logits, backend="aot_eager", fullgraph=True)
    x, t = CASES["bce_with_logits"].sample(6)
    with lossguard.guard(strict=False):
        close(compiled(x, t - 1), F.binary_cross_entropy_with_logits(x, t - 1))
    x[2, 3] = torch.nan
    compiled(x, t)
    with lossguard.guard(check_finite=True), pytest.raises(lossguard.NonFiniteError) as caught:
        compiled(x, t)
    assert caught.value.report.indices == [(2, 3)]


@over_cases
def test_explicit_arguments_have_effect(case: Case) -> None:
    loss = case.loss()
    input, target = case.sample(6)
    bad = case.spoilt(target)
    skip = torch.compile(lambda x, t: loss(x, t, on_violation="skip"), backend="aot_eager", fullgraph=True)
    raises = torch.compile(lambda x, t: loss(x, t, on_violation="raise"), backend="aot_eager", fullgraph=True)
    with lossguard.guard(on_violation="skip"):
        expected = value_and_gradient(loss, input, bad)
        with pytest.raises(lossguard.LossValidationError):
            raises(input, bad)
    assert all(torch.equal(a, b) for a, b in zip(value_and_gradient(skip, input, bad), expected))


def test_policy_of_a_compiled_module() -> None:
    x, t = CASES["cross_entropy"].sample(6)
    skip = torch.compile(lossguard.CrossEntropyLoss(on_violation="skip"), backend="aot_eager", fullgraph=True)
    close(skip(x, CASES["cross_entropy"].spoilt(t)), F.cross_entropy(x[[0, 2, 3, 4, 5]], t[[0, 2, 3, 4, 5]]))
    finite = torch.compile(lossguard.CrossEntropyLoss(check_finite=True), backend="aot_eager", fullgraph=True)
    with pytest.raises(lossguard.NonFiniteError):
        finite(torch.full_like(x, torch.inf), t)


def test_warn_under_compile_names_the_line_once() -> None:
    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return L.cross_entropy(x, t)  # warned

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    x, t = CASES["cross_entropy"].sample(6)
    with lossguard.guard(on_violation="warn"), pytest.warns(lossguard.LossValidationWarning) as caught:
        for _ in range(3):
            compiled(x, CASES["cross_entropy"].spoilt(t))
    ours = [w for w in caught if issubclass(w.category, lossguard.LossValidationWarning)]
    assert [(w.filename, w.lineno) for w in ours] == [(__file__, line_of(step, "# warned"))]


# ---- export


@pytest.mark.parametrize(
    "case, dynamic",
    [
        pytest.param(case, dynamic, id=f"{'dynamic' if dynamic else 'static'}-{name}")
        for name, case in CASES.items()
        for dynamic in (True, False)
        if dynamic or name == "cross_entropy"
    ],
)
def test_export(case: Case, dynamic: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.criterion = getattr(lossguard, case.module)(**case.options)

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return self.criterion(x * self.scale, t)

    model, n = Model(), torch.export.Dim("n", min=2)
    args = case.sample(6)
    shapes = {"x": {0: n}, "t": {0: n}} if dynamic else None
    exported = torch.export.export(model, args, dynamic_shapes=shapes)
    for program in (exported.module(), exported.run_decompositions().module()):
        for batch in (args, case.sample(9, seed=1)) if dynamic else (args,):
            assert torch.equal(program(*batch), model(*batch))
            with pytest.raises(lossguard.LossValidationError) as caught:
                program(batch[0], case.spoilt(batch[1]))
            assert caught.value.report.shapes["input"] == tuple(batch[0].shape)
            with lossguard.guard(on_violation="skip"):
                assert torch.equal(program(batch[0], case.spoilt(batch[1])), model(batch[0], case.spoilt(batch[1])))


def test_exported_programs_survive_saving(tmp_path: Any) -> None:
    case = CASES["cross_entropy"]
    args = case.sample(6)
    net = Net(lossguard.CrossEntropyLoss())
    x = torch.randn(6, 3)
    torch.export.save(torch.export.export(net, (x, args[1])), tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.equal(loaded(x, args[1]), net(x, args[1]))
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        loaded(x, case.spoilt(args[1]))


# ---- the ops themselves


def op_samples() -> list[Any]:
    """(id, op, arguments) for every op: dtypes, reductions, weights, layouts, label types."""
    g = torch.Generator().manual_seed(0)
    mean, none, total, autocast = 1, 0, 2, 1 | lossguard._policy.FLOAT_LOSS
    weight, samples = torch.rand(C, generator=g), []

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=g).to(dtype)

    def labels(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(0, C, shape, generator=g).to(dtype)

    def add(name: str, op: str, tensors: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
        forward, backward = getattr(ops, f"{op}_forward").default, getattr(ops, f"{op}_backward").default
        loss, saved = forward(*tensors, *constants, 0)
        samples.append(pytest.param(forward, (*tensors, *constants, 0), id=f"{op}_forward-{name}"))
        grad = torch.ones_like(loss)
        samples.append(pytest.param(backward, (grad, *tensors, saved, *constants), id=f"{op}_backward-{name}"))

    leaf = rand(4, C).requires_grad_()
    spatial = rand(2, C, 3, 4)
    elementwise = [
        ("mean", rand(4, C), rand(4, C), None, mean),
        ("none-weight", rand(4, C), rand(4, C), weight, none),
        ("sum-grad", leaf, rand(4, C), weight, total),
        ("bf16-autocast", rand(4, C, dtype=torch.bfloat16), rand(4, C, dtype=torch.bfloat16), None, autocast),
        ("f16-none", rand(4, C, dtype=torch.float16), rand(4, C, dtype=torch.float16), None, none),
        ("f64", rand(4, C, dtype=torch.float64), rand(4, C, dtype=torch.float64), None, none),
        ("0d", rand(), rand(), None, none),
        ("empty", rand(0, C), rand(0, C), weight, total),
        ("channels_last", spatial.to(memory_format=torch.channels_last), spatial, None, none),
        ("permuted", rand(C, 4).t(), rand(4, C), None, none),
        ("expanded", rand(1, C).expand(4, C), rand(4, C), None, none),
    ]
    for name, x, t, w, flags in elementwise:
        add(name, "bce", (x, t, w), (flags,))
        add(name, "bce_with_logits", (x, t, w, None), (flags,))
    add("pos_weight", "bce_with_logits", (rand(4, C), rand(4, C), None, weight), (none,))
    rows = [
        ("mean", rand(4, C), labels(4), None, mean),
        ("none-weight", rand(4, C), labels(4), weight, none),
        ("sum-grad", leaf, labels(4), weight, total),
        ("uint8", rand(4, C), labels(4, dtype=torch.uint8), None, none),
        ("unbatched", rand(C), labels(), None, mean),
        ("unbatched-one-label", rand(C), labels(1), None, none),
        ("bf16-autocast", rand(4, C, dtype=torch.bfloat16), labels(4), None, autocast),
        ("f64", rand(4, C, dtype=torch.float64), labels(4), None, none),
        ("empty", rand(0, C), labels(0), weight, total),
        ("spatial", spatial, labels(2, 3, 4), weight, none),
        ("channels_last", spatial.to(memory_format=torch.channels_last), labels(2, 3, 4), None, none),
        ("permuted", rand(C, 4).t(), labels(4), None, mean),
        ("ignored", rand(4, C), torch.tensor([0, -100, 1, -100]), None, mean),
    ]
    for name, x, t, w, flags in rows:
        add(name, "nll", (x, t, w), (-100, flags))
        add(name, "cross_entropy", (x, t, w), (-100, 0.1, flags))
    for name, x, w, flags in (("mean", leaf, weight, mean), ("none", spatial, None, none), ("1d", rand(C), None, mean)):
        add(f"probabilities-{name}", "cross_entropy", (x, rand(*x.shape), w), (-100, 0.0, flags))
    indices = [("1d", labels(6), 1), ("0d", labels(), 0), ("empty", labels(0, 3), 1), ("permuted", labels(3, 2).t(), 1)]
    for name, index, dim in indices:
        args = (index, rand(C, C), dim, 2, 0, 0)
        samples.append(pytest.param(ops.check_index.default, args, id=f"check_index-{name}"))
    return samples


@pytest.mark.parametrize("op, args", op_samples())
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    if any(isinstance(a, torch.Tensor) and a.requires_grad for a in args):
        tests = tests[:3]  # the gradient is defined above the op, by an autograd.Function: the op alone has none
    torch.library.opcheck(op, args, test_utils=tests)


def test_opcheck_covers_every_op() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("lossguard::")}
    assert {param.values[0].name() for param in op_samples()} == registered and len(registered) == 9


@over_cases
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_meta_tensors(case: Case, reduction: str) -> None:
    results = []
    for module in (L, F):
        input, target = (t.to("meta") for t in case.sample(6))
        options = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
        input.requires_grad_()
        out = getattr(module, case.function)(input, target, reduction=reduction, **options)
        (grad,) = torch.autograd.grad(out.sum(), input)
        results.append([(t.shape, t.dtype, t.device, t.stride()) for t in (out, grad)])
    assert results[0] == results[1]


@over_cases
def test_fake_tensors(case: Case) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        input, target = case.sample(6)
        input.requires_grad_()
        out = case.loss()(input, target)
        (grad,) = torch.autograd.grad(out, input)
    assert out.shape == () and grad.shape == input.shape and type(grad).__name__ == "FakeTensor"
