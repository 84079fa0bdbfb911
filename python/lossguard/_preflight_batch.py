"""What of a batch goes to a model, and a model put back as it was; see preflight.py."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ._native import _describe

LABELS = ("labels", "label", "label_ids", "targets", "target", "y")


# ---- a batch


def split_batch(batch: Any) -> tuple[Any, Any]:
    """What the model is given, and the labels or None: the rule at the top of preflight.py."""
    if isinstance(batch, Mapping):
        label = next((name for name in LABELS if name in batch), None)
        rest = {name: value for name, value in batch.items() if name not in LABELS}
        return rest, None if label is None else batch[label]
    if isinstance(batch, (tuple, list)) and not isinstance(batch, nn.utils.rnn.PackedSequence):
        return (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
    return (batch,), None


def call_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, nn.utils.rnn.PackedSequence):
        return tuple(inputs), {}
    return (inputs,), {}


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings, sequences and dataclasses, each with what leads to it, such as "[0]['x']"."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from tensors_in(getattr(value, part.name), f"{path}.{part.name}")


def tensors_given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a call's arguments, by names such as "input" or "input 'mask'"."""
    for number, value in enumerate(args):
        yield from tensors_in(value, "input" if len(args) + len(kwargs) == 1 else f"input {number}")
    for name, value in kwargs.items():
        yield from tensors_in(value, f"input {name!r}")


def described(tensors: Iterable[tuple[str, Tensor]]) -> str:
    return ", ".join(_describe(name, t) for name, t in tensors)


# ---- what is put back


def _bare(model: nn.Module) -> nn.Module:
    """Behind wrappers, whose hooks and graphs one forward more would disturb."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ValueError(f"parameter {lazy[0]!r} is lazy and has no shape yet: run one batch through the model first")
    return _bare(model)


@contextlib.contextmanager
def restored(modules: Sequence[nn.Module], loader: Any = None) -> Iterator[None]:
    """Inside, `modules` and the random generators may change; afterwards they are as they were, to the bit.

    Gradients are on, whatever the caller wants, and compiled parts run uncompiled, with the hooks of their modules.
    """
    everyone = [m for module in modules for m in module.modules()]
    training = [(m, m.training) for m in everyone]
    registries: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (names, dict(names)) for m in everyone for names in (m._parameters, m._buffers)
    ]
    tensors: dict[int, Tensor] = {id(t): t for _, was in registries for t in was.values() if t is not None}
    leaves = [(t, t.grad, t.requires_grad) for t in tensors.values() if t.is_leaf]
    tensors.update({id(g): g for _, g, _ in leaves if g is not None})
    copies = [(t, t.detach().clone()) for t in tensors.values()]
    numpy, generators = sys.modules.get("numpy"), _generators(loader)
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    cuda = sorted({t.device.index for t in tensors.values() if t.is_cuda})
    try:
        with torch.random.fork_rng(devices=cuda), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
        for generator, state in generators:
            generator.set_state(state)
        for module, mode in training:
            module.training = mode
        for names, was in registries:
            if [(name, id(t)) for name, t in names.items()] != [(name, id(t)) for name, t in was.items()]:
                names.clear()
                names.update(was)
        with torch.no_grad():
            for t, before in copies:
                if t.shape != before.shape:
                    t.data = before
                elif not _same_bits(t, before):
                    t.copy_(before)
        for t, gradient, requires_grad in leaves:
            if t.grad is not gradient:
                t.grad = gradient
            if t.requires_grad is not requires_grad:
                t.requires_grad_(requires_grad)


def _generators(loader: Any) -> list[tuple[torch.Generator, Tensor]]:
    samplers = [loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    samplers.append(getattr(samplers[-1], "sampler", None))
    found = {id(g): g for g in (getattr(s, "generator", None) for s in samplers) if isinstance(g, torch.Generator)}
    return [(g, g.get_state()) for g in found.values()]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Unlike torch.equal: NaN is itself, and -0.0 is not 0.0."""
    if a.is_meta or a.layout is not torch.strided:
        return a.is_meta
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
