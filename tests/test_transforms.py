"""Derivatives are native's: functorch transforms, double backward, and the plain autograd contract.

Every comparison is with torch.nn.functional on the same tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lossguard
import lossguard.functional as L
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, jacrev, vjp, vmap

N, C = 4, 5


def tensors(
    kind: str, *batch: int, dtype: torch.dtype = torch.float32, n: int = N, c: int = C
) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, target) of shapes (*batch, n, c) and (*batch, n[, c]); the second label is ignored."""
    g = torch.Generator().manual_seed(len(kind) + len(batch))
    logits = torch.randn(*batch, n, c, generator=g, dtype=dtype)
    if kind in ("bce", "bce_with_logits"):
        soft = torch.rand(*batch, n, c, generator=g, dtype=dtype) * 0.9 + 0.05
        return (torch.sigmoid(logits) if kind == "bce" else logits), soft
    if kind == "probabilities":
        return logits, torch.softmax(torch.randn(*batch, n, c, generator=g, dtype=dtype), -1)
    labels = torch.randint(0, c, (*batch, n), generator=g)
    labels[..., 1] = -100
    return (torch.log_softmax(logits, -1) if kind == "nll" else logits), labels


def weights(*batch: int, dtype: torch.dtype = torch.float32, c: int = C) -> torch.Tensor:
    return torch.rand(*batch, c, generator=torch.Generator().manual_seed(7), dtype=dtype) + 0.5


class Case(NamedTuple):
    kind: str
    function: str
    kwargs: dict[str, Any] = {}

    def __call__(self, module: Any, **more: Any) -> Callable[..., torch.Tensor]:
        return partial(getattr(module, self.function), **self.kwargs, **more)


PLAIN = {
    "bce": Case("bce", "binary_cross_entropy"),
    "bce_with_logits": Case("bce_with_logits", "binary_cross_entropy_with_logits"),
    "nll": Case("nll", "nll_loss"),
    "cross_entropy": Case("labels", "cross_entropy"),
    "probabilities": Case("probabilities", "cross_entropy"),
}
VARIED = PLAIN | {
    "bce-weight": Case("bce", "binary_cross_entropy", {"weight": weights()}),
    "bce_with_logits-weights": Case(
        "bce_with_logits", "binary_cross_entropy_with_logits", {"weight": weights(), "pos_weight": weights() * 2}
    ),
    "nll-weight": Case("nll", "nll_loss", {"weight": weights()}),
    "cross_entropy-weight-smoothing": Case("labels", "cross_entropy", {"weight": weights(), "label_smoothing": 0.2}),
    "probabilities-weight-smoothing": Case(
        "probabilities", "cross_entropy", {"weight": weights(), "label_smoothing": 0.2}
    ),
}


def over(cases: dict[str, Case]) -> Any:
    return pytest.mark.parametrize("case", cases.values(), ids=cases.keys())


reductions = pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)


# ---- functorch


@over(VARIED)
@reductions
def test_vmap(case: Case, reduction: str) -> None:
    args = tensors(case.kind, 3)
    # One by one: with weights and smoothing native's mean cannot be vmapped.
    expected = torch.stack([case(F, reduction=reduction)(*sample) for sample in zip(*args)])
    close(vmap(case(L, reduction=reduction))(*args), expected)


@over(VARIED)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_grad_and_vmap_of_grad(case: Case, reduction: str) -> None:
    ours, native = case(L, reduction=reduction), case(F, reduction=reduction)
    close(grad(ours)(*tensors(case.kind)), grad(native)(*tensors(case.kind)))
    close(vmap(grad(ours))(*tensors(case.kind, 3)), vmap(grad(native))(*tensors(case.kind, 3)))


@over(VARIED)
@reductions
def test_vjp(case: Case, reduction: str) -> None:
    input, target = tensors(case.kind)
    results = []
    for module in (L, F):
        out, pull = vjp(partial(case(module, reduction=reduction), target=target), input)
        results.append((out, *pull(torch.linspace(-1, 2, max(1, out.numel())).reshape(out.shape))))
    close(*results)


@over(VARIED)
def test_jacrev(case: Case) -> None:
    args = tensors(case.kind)
    close(jacrev(case(L, reduction="none"))(*args), jacrev(case(F, reduction="none"))(*args))


@over(VARIED)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_vmap_of_grad_of_grad(case: Case, reduction: str) -> None:
    def squared(module: Any) -> Callable[..., torch.Tensor]:
        first = grad(case(module, reduction=reduction))
        return vmap(grad(lambda x, t: first(x, t).pow(2).sum()))

    args = tensors(case.kind, 3)
    expected = squared(F)(*args)
    assert case.kind == "nll" or expected.abs().sum() > 0.01
    close(squared(L)(*args), expected)


@over({name: PLAIN[name] for name in ("bce", "bce_with_logits", "probabilities")})
def test_grad_for_the_target(case: Case) -> None:
    args = tensors(case.kind, 3)
    close(vmap(grad(case(L), argnums=(0, 1)))(*args), vmap(grad(case(F), argnums=(0, 1)))(*args))


def test_grad_for_the_class_weights_of_probabilities() -> None:
    args = (*tensors("probabilities"), weights())
    close(grad(L.cross_entropy, argnums=(0, 1, 2))(*args), grad(F.cross_entropy, argnums=(0, 1, 2))(*args))
    w = weights(3)
    per_weight = [vmap(grad(m.cross_entropy, argnums=2), in_dims=(None, None, 0))(*args[:2], w) for m in (L, F)]
    close(*per_weight)


@over(PLAIN)
@pytest.mark.parametrize("in_dims", [(0, None), (None, 0), (1, 0), (0, 1), (-1, 1)], ids=str)
def test_vmap_in_dims(case: Case, in_dims: tuple[Any, Any]) -> None:
    args = []
    for t, single, dim in zip(tensors(case.kind, 3), tensors(case.kind), in_dims):
        args.append(single if dim is None else t.movedim(0, dim))
    for transform in (vmap, lambda f, in_dims: vmap(grad(f), in_dims=in_dims)):
        close(transform(case(L), in_dims=in_dims)(*args), transform(case(F), in_dims=in_dims)(*args))


@over(PLAIN)
def test_vmap_over_weights_and_out_dims(case: Case) -> None:
    args = (*tensors(case.kind), weights(3).t())
    for out_dims in (0, 1):
        results = [vmap(case(m, reduction="none"), in_dims=(None, None, 1), out_dims=out_dims)(*args) for m in (L, F)]
        close(*results)


def test_vmap_over_pos_weight() -> None:
    def loss(module: Any) -> Callable[..., torch.Tensor]:
        return vmap(lambda x, t, p: module.binary_cross_entropy_with_logits(x, t, pos_weight=p), in_dims=(0, None, 0))

    x, (_, t) = tensors("bce_with_logits", 3)[0], tensors("bce_with_logits")
    close(loss(L)(x, t, weights(3)), loss(F)(x, t, weights(3)))


@over(PLAIN)
def test_nested_and_chunked_vmap(case: Case) -> None:
    args = tensors(case.kind, 2, 3)
    expected = vmap(vmap(grad(case(F))))(*args)
    close(vmap(vmap(grad(case(L))))(*args), expected)
    close(vmap(vmap(grad(case(L)), chunk_size=2), chunk_size=1)(*args), expected)


@over(PLAIN)
@pytest.mark.parametrize("transform", [vmap, lambda f: vmap(grad(f))], ids=["vmap", "vmap-grad"])
def test_vmap_over_nothing(case: Case, transform: Any) -> None:
    args = [t[:0] for t in tensors(case.kind, 3)]
    close(transform(case(L))(*args), transform(case(F))(*args))


@over(PLAIN)
def test_per_sample_gradients(case: Case) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, C))
    squash = {"bce": torch.sigmoid, "nll": lambda x: torch.log_softmax(x, -1)}.get(case.kind, lambda x: x)
    parameters = dict(net.named_parameters())
    samples, (_, targets) = torch.randn(N, 3), tensors(case.kind)

    def loss(parameters: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return case(L)(squash(functional_call(net, parameters, (x[None],))), t[None])

    per_sample = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, samples, targets)
    for i in range(N):
        net.zero_grad()
        case(F)(squash(net(samples[i : i + 1])), targets[i : i + 1]).backward()
        native = {name: p.grad for name, p in net.named_parameters()}
        if case.kind in ("labels", "nll") and targets[i] == -100:  # natively 0 / 0; ours is a literal zero
            native = {name: torch.zeros_like(g) for name, g in native.items()}
        close({name: g[i] for name, g in per_sample.items()}, native)


@over(VARIED)
@pytest.mark.parametrize("twice", [False, True], ids=["once", "create_graph"])
def test_is_grads_batched(case: Case, twice: bool) -> None:
    results = []
    for module in (L, F):
        input, target = tensors(case.kind)
        out = case(module, reduction="none")(input.requires_grad_(), target)
        rows = torch.eye(out.numel()).reshape(-1, *out.shape)
        results.append(torch.autograd.grad(out, input, rows, is_grads_batched=True, create_graph=twice)[0])
    close(*results)


@pytest.mark.parametrize("vectorize", [False, True])
def test_autograd_functional_hessian(vectorize: bool) -> None:
    input, target = tensors("labels")
    hessians = [
        torch.autograd.functional.hessian(partial(m.cross_entropy, target=target), input, vectorize=vectorize)
        for m in (L, F)
    ]
    assert hessians[1].abs().sum() > 0.1
    close(*hessians)


def test_bad_values_raise_inside_transforms_which_then_still_work() -> None:
    input, target = tensors("labels", 3)
    bad = target.clone()
    bad[2, 3] = C
    for transform in (vmap, lambda f: vmap(grad(f)), lambda f: grad(lambda x, t: vmap(f)(x, t).sum())):
        with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
            transform(L.cross_entropy)(input, bad)
        assert caught.value.report.indices == [(3,)]
        assert caught.value.report.call_site.file == __file__
        close(transform(L.cross_entropy)(input, target), transform(F.cross_entropy)(input, target))
        with lossguard.guard(on_violation="skip"):
            skipped = transform(L.cross_entropy)(input, bad)
        close(skipped, transform(L.cross_entropy)(input, torch.where(bad == C, -100, bad)))


# ---- double backward

SMALL = {"n": 2, "c": 3, "dtype": torch.float64}
GRADGRAD = {
    "bce": Case("bce", "binary_cross_entropy"),
    "bce-weight": Case("bce", "binary_cross_entropy", {"weight": "weight"}),
    "bce_with_logits": Case("bce_with_logits", "binary_cross_entropy_with_logits"),
    "bce_with_logits-weights": Case(
        "bce_with_logits", "binary_cross_entropy_with_logits", {"weight": "weight", "pos_weight": "weight"}
    ),
    "nll": Case("nll", "nll_loss"),
    "nll-weight": Case("nll", "nll_loss", {"weight": "weight"}),
    "cross_entropy": Case("labels", "cross_entropy"),
    "cross_entropy-weight": Case("labels", "cross_entropy", {"weight": "weight"}),
    "cross_entropy-smoothing": Case("labels", "cross_entropy", {"label_smoothing": 0.3}),
    "cross_entropy-both": Case("labels", "cross_entropy", {"weight": "weight", "label_smoothing": 0.3}),
    "probabilities": Case("probabilities", "cross_entropy"),
    "probabilities-both": Case("probabilities", "cross_entropy", {"weight": "weight", "label_smoothing": 0.3}),
}


@pytest.mark.parametrize(
    "case, target_grad",
    [
        pytest.param(case, target_grad, id=f"{name}-{'input+target' if target_grad else 'input'}")
        for name, case in GRADGRAD.items()
        for target_grad in (False, True)
        if not target_grad or case.kind not in ("labels", "nll")  # labels have no gradient
    ],
)
@reductions
def test_gradcheck_and_gradgradcheck(case: Case, target_grad: bool, reduction: str) -> None:
    input, target = tensors(case.kind, **SMALL)
    input.requires_grad_()
    target.requires_grad_(target_grad)
    kwargs = {k: weights(dtype=torch.float64, c=3) if v == "weight" else v for k, v in case.kwargs.items()}

    def loss(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return getattr(L, case.function)(x, t, reduction=reduction, **kwargs)

    batched = reduction == "mean"
    assert torch.autograd.gradcheck(loss, (input, target), check_batched_grad=batched)
    assert torch.autograd.gradgradcheck(loss, (input, target), check_batched_grad=batched)


@reductions
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradgradcheck_for_the_class_weights_of_probabilities(reduction: str, smoothing: float) -> None:
    args = (*tensors("probabilities", **SMALL), weights(dtype=torch.float64, c=3))
    for t in args:
        t.requires_grad_()

    def loss(*args: torch.Tensor) -> torch.Tensor:
        return L.cross_entropy(*args, reduction=reduction, label_smoothing=smoothing)

    assert torch.autograd.gradcheck(loss, args)
    assert torch.autograd.gradgradcheck(loss, args)


@over(VARIED)
@reductions
def test_double_backward_through_the_incoming_gradient(case: Case, reduction: str) -> None:
    """The derivative for grad_output too, as a loss scaled by a learnt factor needs it."""
    results = []
    for module in (L, F):
        input, target = tensors(case.kind)
        input.requires_grad_()
        scale = torch.tensor(1.5, requires_grad=True)
        out = (case(module, reduction=reduction)(input, target) * scale).sum()
        (g,) = torch.autograd.grad(out, input, create_graph=True)
        again = (g * torch.linspace(-1, 1, g.numel()).reshape(g.shape)).sum()
        results.append(
            (g.detach(), *torch.autograd.grad(again, (input, scale), allow_unused=True, materialize_grads=True))
        )
    close(*results)


@pytest.mark.parametrize("shape", [(3,), (2, 3, 2), (1, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["labels", "probabilities", "nll"])
def test_gradgradcheck_over_shapes(shape: tuple[int, ...], kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    class_dim = min(1, len(shape) - 1)
    input = torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, 3, shape[:class_dim] + shape[class_dim + 1 :], generator=g)
    if kind == "probabilities":
        target = torch.rand(shape, generator=g, dtype=torch.float64)
    function = L.nll_loss if kind == "nll" else partial(L.cross_entropy, label_smoothing=0.1)
    weight = weights(dtype=torch.float64, c=3)
    for reduction in ("none", "mean"):
        loss = partial(function, target=target, weight=weight, reduction=reduction)
        assert torch.autograd.gradgradcheck(loss, (input,))


# ---- compiled transforms


@over(PLAIN)
def test_compiled_grad_is_not_silently_zero(case: Case) -> None:
    torch._dynamo.reset()
    args = tensors(case.kind)
    expected = grad(case(F))(*args)
    assert expected.abs().sum() > 0.1
    close(torch.compile(grad(case(L)), backend="aot_eager", fullgraph=True)(*args), expected)
    batch = tensors(case.kind, 2)
    close(torch.compile(vmap(grad(case(L))), backend="aot_eager", fullgraph=True)(*batch), vmap(grad(case(F)))(*batch))


def test_grad_compiled_by_inductor_is_not_silently_zero() -> None:
    torch._dynamo.reset()
    args = tensors("labels")
    close(torch.compile(grad(L.cross_entropy), fullgraph=True)(*args), grad(F.cross_entropy)(*args))


# ---- the autograd contract


def leaf(t: torch.Tensor) -> torch.Tensor:
    return t.clone().requires_grad_()


SAVED = [
    (name, tensor)
    for name, names in {
        "bce": ("input", "target", "weight"),
        "bce_with_logits": ("input", "target", "weight", "pos_weight"),
        "nll": ("target", "weight"),
        "cross_entropy": ("input", "target", "weight"),
        "probabilities": ("input", "target", "weight"),
    }.items()
    for tensor in names
]


@pytest.mark.parametrize("name, changed", SAVED)
@reductions
def test_in_place_changes_before_backward_are_an_error(name: str, changed: str, reduction: str) -> None:
    case = PLAIN[name]
    input, target = tensors(case.kind)
    args = {"input": leaf(input) * 1, "target": target.clone(), "weight": weights()}
    if name == "bce_with_logits":
        args["pos_weight"] = weights()
    loss = case(L, reduction=reduction)(**args).sum()
    args[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


WEIGHTS = [
    ("bce", "weight"),
    ("bce_with_logits", "weight"),
    ("bce_with_logits", "pos_weight"),
    ("nll", "weight"),
    ("cross_entropy", "weight"),
]


@pytest.mark.parametrize("name, weight", WEIGHTS)
@pytest.mark.parametrize("input_grad", [False, True])
def test_weights_that_require_grad_raise_as_native(name: str, weight: str, input_grad: bool) -> None:
    case = PLAIN[name]
    input, target = tensors(case.kind)
    input.requires_grad_(input_grad)
    kwargs = {weight: weights().requires_grad_()}
    errors = []
    for module in (F, L):
        with pytest.raises(Exception) as caught:
            case(module)(input, target, **kwargs)
        errors.append(caught.value)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[1]).startswith(str(errors[0]))
    with torch.no_grad():
        close(case(L)(input, target, **kwargs), case(F)(input, target, **kwargs))


@pytest.mark.parametrize("name, weight", WEIGHTS)
@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f), in_dims=0)], ids=["grad", "vmap-grad"])
def test_weight_gradients_under_functorch_are_native(name: str, weight: str, transform: Any) -> None:
    """Native refuses them or, where its functorch decomposition can, computes them."""
    case = PLAIN[name]
    batch = () if transform is grad else (2,)
    input, target = tensors(case.kind, *batch)

    def gradient(module: Any) -> Any:
        try:
            loss = transform(lambda w, x, t: case(module)(x, t, **{weight: w}))
            return loss(weights(*batch), input, target)
        except RuntimeError as error:
            return type(error)

    results = [gradient(F), gradient(L)]
    if isinstance(results[0], type):
        assert results[0] is results[1]
    else:
        close(*results)


@over(VARIED)
@reductions
def test_backward_twice(case: Case, reduction: str) -> None:
    input, target = tensors(case.kind)
    x = leaf(input)
    loss = case(L, reduction=reduction)(x, target).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@over(PLAIN)
def test_zero_grad_set_to_none_and_accumulation(case: Case) -> None:
    input, target = tensors(case.kind)
    x = torch.nn.Parameter(input.clone())
    optimizer = torch.optim.SGD([x], lr=0.1)
    case(L)(x, target).backward()
    once = x.grad
    optimizer.zero_grad(set_to_none=True)
    assert x.grad is None
    case(L)(x, target).backward()
    assert torch.equal(x.grad, once) and x.grad.data_ptr() != once.data_ptr()
    case(L)(x, target).backward()
    assert torch.equal(x.grad, 2 * once)
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(x.grad, torch.zeros_like(x))


MODULES = {
    "bce": ("BCELoss", "bce"),
    "bce_with_logits": ("BCEWithLogitsLoss", "bce_with_logits"),
    "nll": ("NLLLoss", "nll"),
    "cross_entropy": ("CrossEntropyLoss", "labels"),
    "probabilities": ("CrossEntropyLoss", "probabilities"),
}


@pytest.mark.parametrize("module, kind", MODULES.values(), ids=MODULES.keys())
def test_hooks_see_what_native_shows_them(module: str, kind: str) -> None:
    def events(package: Any) -> list[Any]:
        log: list[Any] = []
        input, target = tensors(kind)
        x = leaf(input)
        middle = x * 1
        criterion = getattr(package, module)()
        x.register_hook(lambda g: log.append(("leaf", g)))
        x.register_post_accumulate_grad_hook(lambda p: log.append(("accumulated", p.grad.clone())))
        middle.register_hook(lambda g: log.append(("middle", g)) or 3 * g)
        criterion.register_forward_hook(lambda m, args, out: log.append(("forward", out.detach())))
        criterion.register_full_backward_hook(lambda m, gin, gout: log.append(("module", gin[0], gout[0])))
        loss = criterion(middle, target)
        loss.grad_fn.register_hook(lambda gin, gout: log.append(("node", gout[0])))
        loss.retain_grad()
        loss.backward()
        log.append(("loss.grad", loss.grad))
        return log

    ours, native = events(lossguard), events(torch.nn)
    assert [event[0] for event in ours] == [event[0] for event in native]
    assert len(ours) == 7
    for a, b in zip(ours, native):
        close(a[1:], b[1:])


def test_saved_tensor_hooks_pack_the_inputs() -> None:
    input, target = tensors("labels")
    packed: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> int:
        packed.append(t)
        return len(packed) - 1

    x = leaf(input)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        L.cross_entropy(x, target).backward()
    native = leaf(input)
    F.cross_entropy(native, target).backward()
    close(x.grad, native.grad)
    assert any(t is x or t.data_ptr() == x.data_ptr() for t in packed)


def test_backward_frees_what_forward_saved() -> None:
    x = leaf(tensors("labels")[0])
    middle = x * 1
    alive = weakref.ref(middle)
    loss = L.cross_entropy(middle, tensors("labels")[1])
    del middle
    loss.backward()
    assert alive() is None
