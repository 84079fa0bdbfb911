"""A model against a batch of its data, before training: where NaN or infinity begins, and what does not fit.

What of a batch goes to the model, and what to the loss:

* of a tuple or list of two or more, the last is the labels and the others are the model's arguments:
  ``(x, y)`` is ``model(x)``, ``(a, b, y)`` is ``model(a, b)``; a tuple of one is ``model(x)``, without labels;
* of a mapping, the first entry named "labels", "label", "label_ids", "targets", "target" or "y" is the labels; all
  entries with other names are the model's keyword arguments;
* anything else is the model's one argument.

``inputs=`` and ``target=``, functions of the batch, say otherwise. What ``inputs`` returns is passed likewise, but
whole: a mapping as keyword arguments, a tuple or list as arguments, anything else as one.

Nothing is changed by :func:`find_nonfinite` and :func:`preflight`. Afterwards parameters, buffers (the statistics of
BatchNorm among them), gradients, training mode and the states of the random generators (torch's, Python's, NumPy's and
the loader's) have the bits they had before. For that they copy the model's tensors, so they need as much memory again.
What a model keeps in plain attributes is its own business. DataParallel, DDP and torch.compile are looked behind.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import math
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from . import _callsite, _policy, functional
from ._native import _describe
from .diagnosis import diagnose
from .errors import LossValidationError
from .report import CallSite, Report, _index, _number, _plain, shorten

__all__ = ["BadTensor", "Finding", "NonFinite", "Preflight", "find_nonfinite", "preflight"]

LABELS = ("labels", "label", "label_ids", "targets", "target", "y")
Severity = Literal["error", "warning", "note"]
_FIRST = 16  # offenders that are kept, as in a Report
_MOST_NAMES = 5


# ---- a batch


def _split(batch: Any) -> tuple[Any, Any]:
    """What the model is given, and the labels or None: the rule at the top of this file."""
    if isinstance(batch, Mapping):
        label = next((name for name in LABELS if name in batch), None)
        rest = {name: value for name, value in batch.items() if name not in LABELS}
        return rest, None if label is None else batch[label]
    if isinstance(batch, (tuple, list)) and not isinstance(batch, nn.utils.rnn.PackedSequence):
        return (tuple(batch[:-1]), batch[-1]) if len(batch) > 1 else (tuple(batch), None)
    return (batch,), None


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)) and not isinstance(inputs, nn.utils.rnn.PackedSequence):
        return tuple(inputs), {}
    return (inputs,), {}


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested mappings, sequences and dataclasses, each with what leads to it, such as "[0]['x']"."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{path}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from _tensors(getattr(value, part.name), f"{path}.{part.name}")


def _given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among a call's arguments, by names such as "input" or "input 'mask'"."""
    for number, value in enumerate(args):
        yield from _tensors(value, "input" if len(args) + len(kwargs) == 1 else f"input {number}")
    for name, value in kwargs.items():
        yield from _tensors(value, f"input {name!r}")


def _described(tensors: Iterable[tuple[str, Tensor]]) -> str:
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


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise ValueError(f"parameter {lazy[0]!r} is lazy and has no shape yet: run one batch through the model first")
    return _bare(model)


@contextlib.contextmanager
def _restored(modules: Sequence[nn.Module], loader: Any = None) -> Iterator[None]:
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


# ---- what is not finite


@dataclass(frozen=True)
class BadTensor:
    """A tensor with NaN or infinity in it. Indices and values are of the first 16; the counts are exact."""

    name: str  #: "output", "output['logits']", "input 'x'", "encoder.weight", "gradient of output", ...
    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int  #: elements that are not finite
    counts: dict[str, int]  #: by kind: "NaN", "+inf", "-inf"
    indices: list[tuple[int, ...]]
    values: list[float]

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind}: {n}" for kind, n in self.counts.items())
        elements = math.prod(self.shape)
        return (
            f"{self.name} {self.shape} {self.dtype} {self.device}: {self.count} of {elements} elements ({kinds}), "
            f"the first at {_index(self.indices[0])}: {_number(self.values[0], self.dtype)}"
        )


def _bad(name: str, tensor: Tensor, masks: bool = False) -> Optional[BadTensor]:
    """What is not finite in it, or None. With `masks`, -inf is in order."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or tensor.is_nested or _is_wrapped(tensor):
        return None
    tensor = tensor.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    values = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    if torch.isfinite(values).all():
        return None
    if tensor.is_complex():
        values = values.abs()  # of the modulus
    bad = ~torch.isfinite(values) & ~torch.isneginf(values) if masks else ~torch.isfinite(values)
    if not bad.any():
        return None
    where = bad.nonzero()[:_FIRST]
    kinds = {"NaN": torch.isnan, "+inf": torch.isposinf, "-inf": torch.isneginf}
    counts = {kind: int((bad & is_kind(values)).sum()) for kind, is_kind in kinds.items()}
    return BadTensor(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype,
        device=str(tensor.device),
        count=int(bad.sum()),
        counts={kind: n for kind, n in counts.items() if n},
        indices=[tuple(index) for index in where.tolist()],
        values=[float(values[tuple(index)]) for index in where],
    )


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # within vmap and its like there are no values to see


def _all_bad(tensors: Iterable[tuple[str, Tensor]], masks: bool = False) -> list[BadTensor]:
    return [bad for name, t in tensors if (bad := _bad(name, t, masks)) is not None]


def _range(name: str, t: Tensor) -> str:
    text = _describe(name, t)
    if t.is_meta or t.layout is not torch.strided or t.is_complex() or not t.numel() or _is_wrapped(t):
        return text
    values = t.detach().double() if t.is_floating_point() else t.detach()
    if t.is_floating_point():
        values = values[torch.isfinite(values)]
    return f"{text}, from {values.min().item():g} to {values.max().item():g}" if values.numel() else text


@dataclass(frozen=True)
class NonFinite:
    """Where NaN or infinity comes from. False where there is none; ``str()`` says it all."""

    #: "input", "parameter" or "buffer": there before the model ran; "forward", "loss" or "backward"; "" if nowhere
    stage: str = ""
    module: str = ""  #: qualified name; "" is the model itself
    class_name: str = ""  #: of the module
    where: str = ""  #: in words, where in the module: "in its own code, between the calls of 'a' and 'b'"
    call: int = 1  #: which call of the module, from 1, where it is called more often
    tensors: list[BadTensor] = field(default_factory=list)
    given: list[str] = field(default_factory=list)  #: what the module worked with, each with its range
    call_site: Optional[CallSite] = None  #: the line of the caller's that called the module
    hints: list[str] = field(default_factory=list)
    error: Optional[Exception] = None  #: what the model raised afterwards

    @property
    def ok(self) -> bool:
        return not self.stage

    def __bool__(self) -> bool:
        return not self.ok

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings; NaN and infinities as strings."""
        parts = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        parts["tensors"] = [dataclasses.asdict(t) for t in self.tensors]
        parts["call_site"] = dataclasses.asdict(self.call_site) if self.call_site else None
        parts["error"] = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        return {"ok": self.ok, **_plain(parts)}

    def __str__(self) -> str:
        if self.ok:
            return "everything is finite"
        lines = [self._headline()]
        lines += [f"  {tensor}" for tensor in self.tensors[:_MOST_NAMES]]
        if len(self.tensors) > _MOST_NAMES:
            lines.append(f"  ... and {len(self.tensors) - _MOST_NAMES} tensors more")
        lines += [f"  given: {text}" for text in self.given]
        if self.call_site is not None:
            lines.append(f"  called at {self.call_site}")
        lines += [f"  {'or' if number else 'likely cause'}: {hint}" for number, hint in enumerate(self.hints)]
        if self.error is not None:
            lines.append(f"  afterwards the model raised {type(self.error).__name__}: {_first_line(self.error)}")
        return "\n".join(lines)

    def _headline(self) -> str:
        if self.stage in ("input", "parameter", "buffer"):
            of = "" if self.stage == "input" else f" of {_called(self.module, self.class_name)}"
            return f"Not finite before the model runs: {'an' if self.stage == 'input' else 'a'} {self.stage}{of}."
        if self.stage == "loss":
            return "The loss is not finite; what the model returned is."
        module = _called(self.module, self.class_name) + (f" in its call {self.call}" if self.call > 1 else "")
        if self.stage == "backward":
            if self.where:
                return f"The first gradient that is not finite arises {self.where}; the forward is finite."
            return f"The first gradient that is not finite is of {module}: those of its outputs are finite."
        if self.where:
            return f"The first value that is not finite arises in {module}, {self.where}."
        return f"The first output that is not finite is of {module}: its inputs and parameters are finite."


def _called(module: str, class_name: str) -> str:
    return f"{module!r} ({class_name})" if module else f"the model ({class_name})"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


# ---- a forward and a backward, watched


@dataclass(eq=False)
class _Call:
    """A call of a module that is under way, or was."""

    module: nn.Module
    parent: Optional[_Call]
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: Optional[CallSite]
    last: Optional[_Call] = None  # of the calls it made, the last that returned

    def is_within(self, other: _Call) -> bool:
        call: Optional[_Call] = self.parent
        while call is not None and call is not other:
            call = call.parent
        return call is not None


@dataclass(eq=False)
class _Node:
    """A tensor through which a gradient flows. It is held so that its id stays its own."""

    tensor: Tensor
    name: str
    producers: list[_Call] = field(default_factory=list)  # the innermost first
    consumers: list[_Call] = field(default_factory=list)


class _Trace:
    """Hooks on every submodule: what is running, and the first that is not finite.

    Children return before their parents, so the first module with a bad output is the innermost. If a module is
    given something bad first, that was made by the code of its parent. In the backward the hooks are on tensors:
    those of modules are views that code may not change in place, as ``ReLU(inplace=True)`` does.
    """

    def __init__(self, model: nn.Module, allow_neg_inf: bool) -> None:
        self.model, self.allow_neg_inf = model, allow_neg_inf
        self.names = {module: name for name, module in model.named_modules()}
        self.running: list[_Call] = []
        self.shapes: dict[nn.Module, torch.Size] = {}  # of the first tensor that each was given
        self.found = NonFinite()
        self._from: Optional[CallSite] = None  # the line that asked for all this
        self._numbers: dict[nn.Module, int] = {}
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> _Trace:
        for module in self.names:
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: it counts as code of its parent
                continue
            self._handles.append(module.register_forward_pre_hook(self._enters, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._returns, with_kwargs=True))
            for name, p in module.named_parameters(recurse=False):
                if p.requires_grad:
                    node = _Node(p, name, consumers=[_Call(module, None, 1, (), {}, None)])
                    self._handles.append(p.register_hook(lambda gradient, node=node: self._flows(node, gradient)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
        self.running.clear()

    def look_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """At what the model has and is given. There -inf may be a mask."""
        bad = _all_bad(_given(args, kwargs), masks=True)
        if bad:
            self.found = NonFinite("input", "", type(self.model).__name__, tensors=bad, hints=[_DATA])
        kinds: tuple[tuple[str, Callable[[nn.Module], Any]], ...] = (
            ("parameter", lambda module: module.named_parameters(recurse=False)),
            ("buffer", lambda module: module.named_buffers(recurse=False)),
        )
        for stage, tensors_of in kinds:
            for module, prefix in self.names.items():
                own = ((f"{prefix}.{name}" if prefix else name, t) for name, t in tensors_of(module))
                bad = _all_bad(own, masks=stage == "buffer")
                if bad and self.found.ok:
                    hint = _DIVERGED if stage == "parameter" else _STATISTICS
                    self.found = NonFinite(stage, prefix, type(module).__name__, tensors=bad, hints=[hint])
                elif bad and self.found.stage == stage:
                    self.found.tensors.extend(bad)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self.model(*args, **kwargs)
        if isinstance(self.model, torch.jit.ScriptModule) and self.found.ok:
            bad = _all_bad(_tensors(output, "output"), masks=self.allow_neg_inf)
            if bad:
                self.found = NonFinite("forward", "", type(self.model).__name__, tensors=bad, hints=_overflow(bad))
        return output

    def look_at_loss(self, loss: Any) -> None:
        if self.found.ok:
            bad = _all_bad(_tensors(loss, "loss"))
            if bad:
                self.found = NonFinite("loss", "", type(self.model).__name__, tensors=bad, hints=_overflow(bad))

    # hooks of the forward

    def _enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._numbers[module] = self._numbers.get(module, 0) + 1
        parent = self.running[-1] if self.running else None
        site = _callsite.here()
        if parent is None and self._from is None:
            self._from = site
        call = _Call(module, parent, self._numbers[module], args, kwargs, None if site == self._from else site)
        if self.found.ok and parent is not None:
            bad = _all_bad(_given(args, kwargs), masks=True)
            if bad:
                after = f"between the calls of {self._placed(parent.last)} and" if parent.last else "before the call of"
                named = [dataclasses.replace(b, name=f"{b.name} of {self._name(call)}") for b in bad]
                self._arose(parent, named, f"in its own code, {after} {self._placed(call)}")
        for name, t in _given(args, kwargs):
            self.shapes.setdefault(module, t.shape)
            self._follow(t, name, consumer=call)
        self.running.append(call)

    def _returns(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        while self.running:  # also what raised, and was caught by the model's own code
            call = self.running.pop()
            if call.module is module:
                break
        else:
            return
        if self.found.ok:
            bad = _all_bad(_tensors(output, "output"), masks=self.allow_neg_inf)
            if bad:
                where = f"in its own code, after the call of {self._placed(call.last)}" if call.last else ""
                self._arose(call, bad, where, output)
        for name, t in _tensors(output, "output"):
            self._follow(t, name, producer=call)
        if call.parent is not None:
            call.parent.last = call
        call.args, call.kwargs = (), {}

    def _name(self, call: _Call) -> str:
        return repr(self.names[call.module]) if self.names[call.module] else "the model"

    def _placed(self, call: _Call) -> str:
        return self._name(call) + (f" ({call.site.short()})" if call.site else "")

    def _arose(self, call: _Call, bad: list[BadTensor], where: str, output: Any = None) -> None:
        module, hints = call.module, _overflow(bad)
        # What was changed in place is not what was given.
        returned = [t for _, t in _tensors(output)]
        given = [(name, t) for name, t in _given(call.args, call.kwargs) if not any(t is other for other in returned)]
        own = [] if where else list(module.named_parameters(recurse=False))
        hints += [
            f"{b.name} holds {b.count} -inf, the first at {_index(b.indices[0])}: if that is not a mask, it is the "
            "cause; if it is one, a row that is masked whole is NaN after a softmax."
            for b in _all_bad(given)
        ]
        if getattr(module, "eps", None) == 0:
            hints.append("eps is 0, so what does not vary is divided by 0: leave eps at its default.")
        if where:
            hints.append("a division by 0, or a logarithm, root or power beyond where it is defined, in these lines.")
        self.found = NonFinite(
            "forward",
            self.names[module],
            type(module).__name__,
            where,
            call.number,
            bad,
            [_range(name, t) for name, t in (*given, *own)],
            call.site,
            hints,
        )

    # the backward

    def _follow(self, t: Tensor, name: str, producer: Optional[_Call] = None, consumer: Optional[_Call] = None) -> None:
        if not t.requires_grad or t.is_leaf and isinstance(t, nn.Parameter) or _is_wrapped(t):
            return
        key = (id(t), t._version)
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = _Node(t, name)
            self._handles.append(t.register_hook(lambda gradient: self._flows(node, gradient)))
        node.producers += [producer] if producer else []
        node.consumers += [consumer] if consumer else []

    def _flows(self, node: _Node, gradient: Tensor) -> None:
        if not self.found.ok:
            return
        bad = _bad(f"gradient of {node.name}", gradient)
        if bad is None:
            return
        innermost = [c for c in node.consumers if not any(other.is_within(c) for other in node.consumers)]
        hints = [*_overflow([bad]), _INFINITE_SLOPE]
        call = (innermost or node.producers)[0]
        where = ""
        if len(innermost) > 1:
            where = "in " + " or ".join(dict.fromkeys(self._called(c) for c in innermost[:_MOST_NAMES]))
        elif not innermost and any(producer.module is self.model for producer in node.producers):
            where = "in the loss, or in what follows the model"
            call = node.producers[-1]
        elif not innermost:
            last = node.producers[-1]
            call = last.parent or last  # checkpointing calls it anew, from the backward
            where = f"in the own code of {self._called(call)}, after the call of {self._placed(last)}"
            bad = dataclasses.replace(bad, name=f"{bad.name} of {self._name(last)}")
        name = self.names[call.module]
        self.found = NonFinite(
            "backward", name, type(call.module).__name__, where, call.number, [bad], [], call.site, hints
        )

    def _called(self, call: _Call) -> str:
        return _called(self.names[call.module], type(call.module).__name__)


_DATA = "a missing value or a division by 0 in the data: look at these samples where they are made."
_DIVERGED = "the model diverged in an earlier step, or its checkpoint or initialisation is bad: reload the weights."
_STATISTICS = (
    "a statistic of an earlier batch that was not finite: reload the model from before it, or "
    "call reset_running_stats() of these modules."
)
_INFINITE_SLOPE = (
    "a root, norm or power at 0, or a division by something tiny, whose slope is infinite: add an epsilon inside, "
    "as in (x + 1e-8).sqrt()."
)


def _overflow(bad: Sequence[BadTensor]) -> list[str]:
    if any(b.dtype == "float16" for b in bad):
        return ["float16 overflows above 65504: compute this in bfloat16 or float32."]
    return []


def _gradients(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Optional[Tensor]]:
    """Of the sum of `loss`; no .grad is touched, and no hook of an accumulated gradient is called."""
    found = torch.autograd.grad(loss.sum(), list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found))


def find_nonfinite(
    model: nn.Module,
    batch: Any,
    *,
    loss: Optional[Callable[..., Any]] = None,
    inputs: Optional[Callable[[Any], Any]] = None,
    allow_neg_inf: bool = False,
) -> NonFinite:
    """The first module, in order of execution, that makes NaN or infinity of what is finite. Runs one forward.

    ::

        found = lossguard.find_nonfinite(model, batch, loss=criterion)
        if found:
            print(found)

    The model runs in the mode it is in, and in the caller's autocast; nothing is changed (see the top of this module,
    which also says what of a batch goes to the model). Inputs, parameters and buffers that are not finite are named
    before anything runs. In inputs and buffers -inf is let through, as a mask.

    Args:
        model: any module; float16 to float64, and complex. Sparse and nested tensors are not looked into.
        batch: as a DataLoader yields it, on the model's device.
        loss: also looks at the loss, and through its backward at all gradients: called as ``loss(output, labels)``,
            or as ``loss(output)`` where the batch has no labels. Returns a tensor; its sum is differentiated.
        inputs: what the model is given of the batch, if not what the rule says.
        allow_neg_inf: take -inf in outputs for a mask, too.

    Returns: what was found; false in a condition, with ``ok``, if everything is finite.

    Raises:
        TypeError: model is not a module.
        ValueError: the model has lazy parameters without a shape.
        Exception: what model and loss raise, unless something was not finite before: then that is returned, with the
            exception as its ``error``.
    """
    model = _checked_model(model)
    rest, labels = _split(batch)
    args, kwargs = _arguments(rest if inputs is None else inputs(batch))
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    with _restored(modules), _Trace(model, allow_neg_inf) as trace:
        trace.look_before(args, kwargs)
        if trace.found.ok:
            try:
                output = trace.run(args, kwargs)
                if loss is not None and trace.found.ok:
                    value = loss(output) if labels is None else loss(output, labels)
                    trace.look_at_loss(value)
                    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
                    if trace.found.ok and parameters:
                        _gradients(value, parameters)
            except Exception as error:
                if trace.found.ok:
                    raise
                _let_go(error)
                return dataclasses.replace(trace.found, error=error)
        return trace.found


def _let_go(error: Optional[BaseException]) -> None:
    """Of the locals of the frames that an exception has passed: they would keep the activations alive."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with contextlib.suppress(RuntimeError):  # it is still running
                frame.clear()
                frame.f_locals  # before Python 3.13 a copy, if somebody has looked: made anew  # noqa: B018
        error = error.__cause__ or error.__context__


# ---- what preflight says


@dataclass(frozen=True)
class Finding:
    """Something that does not fit."""

    #: "error": training raises, or does not compute what it seems to; "warning": likely a mistake; "note": to be known
    severity: Severity
    #: "batch", "loader", "dtype", "device", "forward", "output", "target", "shape", "class weights", "labels",
    #: "activation", "not finite", "criterion", "loss", "initial loss", "gradients", "BatchNorm" or "mode"
    check: str
    what: str  #: a sentence
    evidence: str = ""  #: the shapes, numbers and messages behind it
    fix: str = ""  #: a line of code, or two, if one is known
    error: Optional[Exception] = field(default=None, compare=False)  #: what was raised, if something was
    report: Optional[Report] = None  #: of a loss that refused its labels or probabilities

    def __str__(self) -> str:
        lines = [f"{self.severity}, {self.check}: {self.what}"]
        lines += [f"    {line}" for line in self.evidence.splitlines()]
        lines += [
            f"    {'fix: ' if not number else '     '}{line}" for number, line in enumerate(self.fix.splitlines())
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        parts = {part.name: getattr(self, part.name) for part in dataclasses.fields(self)}
        parts["error"] = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        parts["report"] = None if self.report is None else self.report.to_dict()
        return parts


@dataclass(frozen=True)
class Preflight:
    """What :func:`preflight` found; ``str()`` says it all."""

    model: str  #: the class
    findings: list[Finding]  #: in the order of the checks
    facts: dict[str, str]  #: what was seen on the way: "batch", "labels", "output", "loss", "gradients"

    @property
    def ok(self) -> bool:
        """No finding is an error. There may be warnings and notes."""
        return not any(finding.severity == "error" for finding in self.findings)

    def raise_original(self) -> None:
        """Raise the first exception that the data, the model or the criterion raised, if one did."""
        for finding in self.findings:
            if finding.error is not None:
                raise finding.error

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        findings = [finding.to_dict() for finding in self.findings]
        return {"ok": self.ok, "model": self.model, "facts": dict(self.facts), "findings": findings}

    def __str__(self) -> str:
        counts = [(sum(f.severity == kind for f in self.findings), kind) for kind in ("error", "warning", "note")]
        told = ", ".join(f"{n} {kind}{'s' if n > 1 else ''}" for n, kind in counts if n)
        lines = [f"preflight of {self.model}: {told or 'all fits'}"]
        lines += [f"  {name:<10}{fact}" for name, fact in self.facts.items()]
        lines += [f"  {line}" for finding in self.findings for line in str(finding).splitlines()]
        return "\n".join(lines)


def preflight(
    model: nn.Module,
    data: Any,
    criterion: Optional[Callable[..., Any]] = None,
    *,
    inputs: Optional[Callable[[Any], Any]] = None,
    target: Optional[Callable[[Any], Any]] = None,
    output: Optional[Callable[[Any], Any]] = None,
) -> Preflight:
    """Run one batch forward and backward, without a step, and say in words what does not fit.

    ::

        result = lossguard.preflight(model, loader, torch.nn.CrossEntropyLoss())
        print(result)
        assert result.ok

    In this order: the batch, its dtypes, shapes and devices as the model meets them; the labels against the classes;
    class weights; probabilities where the loss wants logits, and the other way round, and activations applied twice;
    the loss, and how it compares with guessing; the gradients, and parameters that get none; a last batch of 1 under
    BatchNorm. The four losses are known wherever they are called: as modules of torch or lossguard, as functions, in a
    criterion of your own, or inside the model. Their checks count in :func:`lossguard.stats`.

    The model runs in the mode it is in, and in the caller's autocast; nothing is changed (see the top of this module,
    which also says what of a batch goes where).

    Args:
        model: any module.
        data: a DataLoader, or another iterable with batches, of which the first is taken, in this process, and moved
            to the device of the model's parameters; or a batch (a tensor, mapping, tuple or list), which is taken as
            it is. An iterable dataset without a state to restore is advanced by what its first batch takes.
        criterion: called as ``criterion(output, labels)``. None: the model is given the labels, too, and its loss is
            ``output.loss``, ``output["loss"]``, the output itself or the first of it.
        inputs, target: functions of the batch, for what the model and the criterion are given.
        output: a function of what the model returns, for what the criterion is given. Otherwise a criterion that is
            a module or one of the known functions gets the tensor itself, or ``logits``, or the first tensor;
            any other function gets all of it.

    Returns: a :class:`Preflight`. What data, model and criterion raise is a finding with the exception as its
        ``error``; the locals of its frames are let go, so that it keeps no activations alive.

    Raises:
        TypeError: model is not a module, criterion cannot be called, or data is an iterator, whose first batch
            would be lost.
        ValueError: the model has lazy parameters without a shape.
    """
    model = _checked_model(model)
    if criterion is not None and not callable(criterion):
        raise TypeError(f"criterion must be a module, a function or None, got {type(criterion).__name__}")
    if isinstance(data, Iterator):
        raise TypeError("data is an iterator, whose first batch would be lost: give the DataLoader, or one batch")
    inspection = _Inspection(model, criterion, inputs, target, output)
    modules = [model, criterion] if isinstance(criterion, nn.Module) else [model]
    with _restored(modules, data), contextlib.suppress(_Stop):
        inspection.run(data)
    return Preflight(type(model).__name__, inspection.findings, inspection.facts)


class _Stop(Exception):
    """What comes next needs what has just failed."""


class _Found(NamedTuple):
    """A finding to be."""

    check: str
    what: str
    evidence: str = ""
    fix: str = ""


class _Inspection:
    def __init__(
        self,
        model: nn.Module,
        criterion: Optional[Callable[..., Any]],
        inputs: Optional[Callable[[Any], Any]],
        target: Optional[Callable[[Any], Any]],
        output: Optional[Callable[[Any], Any]],
    ) -> None:
        self.model, self.criterion = model, criterion
        self.inputs, self.target, self.output = inputs, target, output
        self.findings: list[Finding] = []
        self.facts: dict[str, str] = {}

    def add(
        self, severity: Severity, found: _Found, error: Optional[Exception] = None, report: Optional[Report] = None
    ) -> None:
        _let_go(error)
        finding = Finding(severity, *found, error, report)
        if finding not in self.findings:
            self.findings.append(finding)

    def fail(self, found: _Found, error: Optional[Exception] = None) -> None:
        self.add("error", found, error)
        raise _Stop

    def run(self, data: Any) -> None:
        is_loader = _is_loader(data)
        batch = self._first_of(data) if is_loader else data
        args, kwargs, labels = self._divide(batch)
        sizes = [t.shape[0] for _, t in _given(args, kwargs) if t.dim() > 1]
        calls = _LossCalls(self, sizes[0] if sizes else None)
        if not self.model.training:
            fix = "model.train()"
            self.add("note", _Found("mode", "the model is in evaluation mode, and was looked at in it.", fix=fix))
        with _Trace(self.model, allow_neg_inf=True) as trace, calls:
            trace.look_before(args, kwargs)
            output = self._attempt("the model", trace, calls, lambda: trace.run(args, kwargs))
            self.facts["output"] = _described(_tensors(output, "output"))
            loss = self._loss_of(output, labels, trace, calls)
            trace.look_at_loss(loss)
            self._look_at_loss(loss, trace, calls)
            self._look_at_gradients(loss, trace)
        if is_loader:
            self._look_at_last_batch(data, trace)

    # what is looked at

    def _first_of(self, loader: Any) -> Any:
        try:
            batch = next(iter(_in_this_process(loader)))
        except StopIteration:
            self.fail(_Found("loader", "the loader yields no batch.", *_empty_loader(loader)))
        except Exception as error:
            self.fail(_Found("loader", "the loader raised as it made its first batch.", _raised(error)), error)
        devices = {t.device for t in self.model.parameters()}
        if len(devices) != 1 or "meta" in str(devices):
            return batch
        return _pytree.tree_map(lambda leaf: leaf.to(*devices) if hasattr(leaf, "to") else leaf, batch)

    def _divide(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        rest, labels = (batch, None) if self.criterion is None else _split(batch)
        try:
            rest = rest if self.inputs is None else self.inputs(batch)
            labels = labels if self.target is None else self.target(batch)
        except Exception as error:
            what = f"inputs= or target= raised on this batch, which is {_kind(batch)}."
            self.fail(_Found("batch", what, _raised(error)), error)
        args, kwargs = _arguments(rest)
        if any(not isinstance(name, str) for name in kwargs):
            what = f"the batch is a mapping whose keys are not all names: {shorten(str(list(kwargs)), 100)}."
            self.fail(_Found("batch", what, fix="preflight(..., inputs=lambda batch: ..., target=lambda batch: ...)"))
        given = list(_given(args, kwargs))
        self.facts["batch"] = _described(given) or _kind(batch)
        if self.criterion is not None:
            if labels is None:
                what = f"the batch is {_kind(batch)}, in which there are no labels for the criterion."
                evidence = "labels are the last of a tuple, or the entry of a mapping named " + ", ".join(LABELS)
                self.fail(_Found("batch", what, evidence, "preflight(..., target=lambda batch: batch[...])"))
            self.facts["labels"] = _described(_tensors(labels, "target")) or _kind(labels)
        empty = [(name, t) for name, t in given if not t.numel()]
        if empty:
            self.fail(_Found("batch", "the batch has a tensor without elements.", _described(empty)))
        return args, kwargs, labels

    def _attempt(self, who: str, trace: _Trace, calls: _LossCalls, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        except Exception as error:
            if error is not calls.explained:
                found = _explain(error, trace) or _Found("forward", f"{who} raised {type(error).__name__}.")
                if who != "the model":
                    found = found._replace(check="criterion")
                evidence = "\n".join(filter(None, (found.evidence, _raised(error))))
                self.add("error", found._replace(evidence=evidence), error, getattr(error, "report", None))
            self._say_not_finite(trace)
            raise _Stop from None
        return result

    def _loss_of(self, output: Any, labels: Any, trace: _Trace, calls: _LossCalls) -> Any:
        if self.criterion is None:
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if loss is None and not isinstance(output, Mapping):
                loss = output[0] if isinstance(output, (tuple, list)) and output else output
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = "no criterion was given, and the model returns no loss."
                fix = "preflight(model, data, torch.nn.CrossEntropyLoss())"
                self.fail(_Found("output", what, self.facts["output"], fix))
            return loss
        scores = output
        if self.output is not None:
            scores = self._attempt("output=", trace, calls, lambda: self.output(output))  # type: ignore[misc]
        elif not isinstance(output, Tensor) and (isinstance(self.criterion, nn.Module) or _is_known(self.criterion)):
            found = dict(_tensors(output, "output"))
            if not found:
                self.fail(_Found("output", f"the model returns {_kind(output)}, in which there is no tensor."))
            name = next((name for name in ("output['logits']", "output.logits") if name in found), next(iter(found)))
            scores = found[name]
            what = f"the model returns {_kind(output)}: the criterion was given {name}."
            self.add("note", _Found("output", what, self.facts["output"], "preflight(..., output=lambda output: ...)"))
        criterion = self.criterion
        return self._attempt("the criterion", trace, calls, lambda: criterion(scores, labels))

    def _look_at_loss(self, loss: Any, trace: _Trace, calls: _LossCalls) -> None:
        if not isinstance(loss, Tensor):
            fix = "return loss  # not loss.item()" if isinstance(loss, float) else ""
            self.fail(_Found("loss", f"the loss is {_kind(loss)}, not a tensor.", repr(loss)[:100], fix))
        if loss.numel() != 1:
            fix = "criterion.reduction = 'mean'" if hasattr(self.criterion, "reduction") else "loss = loss.mean()"
            what = "the loss is not one number, so backward() raises."
            self.add("error", _Found("loss", what, _described([("loss", loss)]), fix))
        elif not loss.is_meta:
            self.facts["loss"] = f"{loss.item():.4g}" + (f" ({calls.guessing})" if calls.guessing else "")
        self._say_not_finite(trace)
        if not loss.requires_grad:
            trained = [name for name, p in self.model.named_parameters() if p.requires_grad]
            if trained:
                what = "no gradient flows from the loss to the model."
                evidence = "detach(), item(), argmax(), numpy(), or torch.no_grad() is on the way"
                fix = "loss = criterion(model(inputs), target)  # with nothing that detaches between"
            else:
                what, evidence = "the model has no parameter to be trained.", "requires_grad is False everywhere"
                fix = "model.requires_grad_(True)"
            self.fail(_Found("gradients", what, evidence, fix))

    def _look_at_gradients(self, loss: Tensor, trace: _Trace) -> None:
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if isinstance(self.criterion, nn.Module):
            of_criterion = self.criterion.named_parameters()
            parameters.update({f"criterion.{name}": p for name, p in of_criterion if p.requires_grad})
        if not parameters:
            return
        was_finite = trace.found.ok
        try:
            gradients = _gradients(loss, parameters)
        except Exception as error:
            if "use_reentrant" in str(error):
                what = "gradients were not looked at: reentrant checkpointing allows it in backward() alone."
                self.add("warning", _Found("gradients", what, "", "checkpoint(..., use_reentrant=False)"), error)
                return
            found = _Found("gradients", f"the backward raised {type(error).__name__}.", _raised(error))
            self.fail(found, error)
        if was_finite:
            self._say_not_finite(trace)
        known = [g for g in gradients.values() if g is not None and not g.is_meta]
        missing = [name for name, g in gradients.items() if g is None]
        if missing:
            names = ", ".join(missing[:_MOST_NAMES]) + (", ..." if len(missing) > _MOST_NAMES else "")
            what = f"{len(missing)} of {len(parameters)} parameters get no gradient: they have no part in the loss."
            owner = missing[0].rpartition(".")[0]
            name = missing[0] if owner in ("", "criterion") else owner
            name = name if name.startswith("criterion.") else f"model.{name}"
            self.add("warning", _Found("gradients", what, names, f"{name}.requires_grad_(False)  # or use it"))
        if known and not any(bool(g.any()) for g in known):
            what = "every gradient is 0: a step changes nothing."
            evidence = "dead ReLUs, a saturated activation, a clamp, or a loss that does not depend on the output"
            self.add("error", _Found("gradients", what, evidence))
        norm = math.sqrt(sum(float(g.detach().double().norm()) ** 2 for g in known if not g.is_complex()))
        self.facts["gradients"] = f"of {len(known)} of {len(parameters)} parameters, norm {norm:.4g}"

    def _look_at_last_batch(self, loader: Any, trace: _Trace) -> None:
        last = _last_batch(loader)
        norms = {m: name for m, name in trace.names.items() if isinstance(m, _BatchNorm) and m.training}
        if last is None or not norms:
            return
        samples, size = last
        one_value = [n for m, n in norms.items() if m in trace.shapes and _values_per_channel(trace.shapes[m]) == 1]
        name = (one_value or list(norms.values()))[0]
        what = f"the last batch of an epoch has one sample, and {name!r} is a BatchNorm: "
        what += "it raises." if one_value else "its statistics are of that one."
        evidence = f"{samples} samples in batches of {size}, drop_last=False"
        fix = f"DataLoader(..., batch_size={size}, drop_last=True)"
        self.add("error" if one_value else "warning", _Found("BatchNorm", what, evidence, fix))

    def _say_not_finite(self, trace: _Trace) -> None:
        found = trace.found
        if not found.ok:
            headline, _, rest = str(found).partition("\n")
            self.add("error", _Found("not finite", headline, rest.replace("\n  ", "\n").removeprefix("  ")))


# ---- the data


def _is_loader(data: Any) -> bool:
    if isinstance(data, torch.utils.data.DataLoader):
        return True
    is_batch = isinstance(data, (Tensor, Mapping, tuple, list, str, bytes)) or hasattr(data, "to")
    return isinstance(data, Iterable) and not is_batch


def _in_this_process(loader: Any) -> Any:
    """A DataLoader without workers: started, they would seed the first epoch's otherwise."""
    if type(loader) is not torch.utils.data.DataLoader or not loader.num_workers:
        return loader
    alone = copy.copy(loader)
    alone.__dict__.update(num_workers=0, timeout=0, persistent_workers=False, prefetch_factor=None, _iterator=None)
    return alone


def _empty_loader(loader: Any) -> tuple[str, str]:
    dataset, size = getattr(loader, "dataset", None), getattr(loader, "batch_size", None)
    n = len(dataset) if isinstance(dataset, Sized) else None
    if n and size and getattr(loader, "drop_last", False) and n < size:
        return f"{n} samples make no batch of {size}, and drop_last=True", f"DataLoader(..., batch_size={n})"
    return (f"its dataset has {n} samples" if n is not None else "", "")


def _last_batch(loader: Any) -> Optional[tuple[int, int]]:
    """The number of samples and the size of batches, if the last has one sample."""
    size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if not isinstance(size, int) or size < 2 or getattr(loader, "drop_last", True) or not isinstance(sampler, Sized):
        return None
    try:
        samples = len(sampler)
    except TypeError:  # of a dataset without a length
        return None
    return (samples, size) if samples % size == 1 else None


def _values_per_channel(shape: torch.Size) -> int:
    """Of one sample."""
    return math.prod(shape[2:])


def _kind(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {name} of " + shorten(", ".join(map(repr, value)), 100)
    if isinstance(value, (tuple, list)):
        return f"a {name} of " + shorten(", ".join(type(item).__name__ for item in value), 100)
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# ---- what a model raises


def _raised(error: BaseException) -> str:
    site = _line_of(error)
    text = f"{type(error).__name__}: {shorten(_first_line(error), 300)}"
    return f"{text}\nraised at {site}" if site else text


def _line_of(error: BaseException) -> Optional[CallSite]:
    """The innermost line of a traceback that is the caller's own."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not _callsite.is_internal(code.co_filename):
            found = _callsite._site(code.co_filename, line, code.co_name)
    return found


def _explain(error: BaseException, trace: _Trace) -> Optional[_Found]:
    """From what the module that raised is, and was given; not from the wording of the exception."""
    if isinstance(error, torch.OutOfMemoryError):
        fix = "DataLoader(..., batch_size=...)  # a smaller one"
        return _Found("forward", "the batch does not fit into the memory of the device.", fix=fix)
    within = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner in trace.names:
            within = owner
    if within is None:
        return None
    call = next((call for call in reversed(trace.running) if call.module is within), None)
    if call is None:  # it raised before it ran
        return None
    given = [(name, t) for name, t in _given(call.args, call.kwargs)]
    name = trace.names[within]
    who = f"{name!r}" if name else "the model"
    where = f"in {name!r}: {_one_line(within)}" if name else f"in the model's own code ({type(within).__name__})"
    evidence = f"{where}, given {_described(given) or 'no tensor'}"
    found = _misfit(within, call, who, [t for _, t in given])
    if found is None:
        return _Found("forward", f"{who} raised {type(error).__name__}.", evidence)
    return found._replace(evidence="\n".join(filter(None, (evidence, found.evidence))))


def _one_line(module: nn.Module) -> str:
    text = repr(module)
    return text if "\n" not in text and len(text) < 120 else type(module).__name__


def _misfit(m: nn.Module, call: _Call, who: str, given: list[Tensor]) -> Optional[_Found]:
    """Why a module cannot take what it was given; None if that is not seen."""
    try:
        inspect.signature(m.forward).bind(*call.args, **call.kwargs)
    except TypeError as error:
        wants = ", ".join(inspect.signature(m.forward).parameters) or "nothing"
        gets = [f"{len(call.args)} arguments"] if call.args else []
        gets += [f"{name}=" for name in call.kwargs]
        first = f"batch[{next(iter(call.kwargs), 0)!r}]"
        fix = f"model({first})  # preflight(..., inputs=lambda batch: {first})"
        what = f"forward of {who} takes ({wants}), and is given {', '.join(gets) or 'nothing'}."
        return _Found("batch", what, str(error), fix if call.parent is None else "")
    if not given:
        return None
    x, own = given[0], next(itertools.chain(m.parameters(recurse=False), m.buffers(recurse=False)), None)
    if own is not None:
        other = next((t for t in given if t.device != own.device), None)
        if other is not None:
            what = f"{who} is on {own.device}, and what it is given on {other.device}."
            return _Found("device", what, fix=f"batch = batch.to({str(own.device)!r})  # or model.to(...)")
    if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
        return _embedding_misfit(m, x, who)
    if isinstance(m, _BatchNorm) and m.training and x.dim() > 1 and x.shape[0] * _values_per_channel(x.shape) == 1:
        what = f"{who} normalises over the batch, which has one value per channel."
        return _Found("BatchNorm", what, fix="DataLoader(..., drop_last=True)  # and batches of 2 or more")
    is_torchs = type(m).__module__.startswith("torch.nn.")
    if is_torchs and own is not None and own.is_floating_point() and x.dtype != own.dtype:
        dtype = str(x.dtype).removeprefix("torch.")
        what = f"{who} computes in {str(own.dtype).removeprefix('torch.')}, and is given {dtype}."
        fix = f"inputs = inputs.to({own.dtype})" + (" / 255" if x.dtype is torch.uint8 else "")
        return _Found("dtype", what, fix=fix)
    return _shape_misfit(m, x, who)


def _embedding_misfit(m: Any, x: Tensor, who: str) -> Optional[_Found]:
    if x.dtype not in (torch.int32, torch.int64):
        what = f"{who} looks up ids, and is given {str(x.dtype).removeprefix('torch.')}."
        return _Found("dtype", what, fix="inputs = inputs.long()")
    bad = ((x < 0) | (x >= m.num_embeddings)).nonzero()
    if not len(bad):
        return None
    first = tuple(bad[0].tolist())
    what = f"{who} has {m.num_embeddings} rows, and {len(bad)} of {x.numel()} ids are outside [0, {m.num_embeddings})."
    fix = f"nn.Embedding({int(x.max()) + 1}, {m.embedding_dim})" if x.min() >= 0 else ""
    return _Found("labels", what, f"the first at {first}: {int(x[first])}; they run from {x.min()} to {x.max()}", fix)


def _shape_misfit(m: Any, x: Tensor, who: str) -> Optional[_Found]:
    shape = tuple(x.shape)
    if isinstance(m, nn.Linear) and x.dim() and shape[-1] != m.in_features:
        what = f"{who} wants {m.in_features} features in the last dimension, and is given {shape[-1]}."
        if math.prod(shape[1:]) == m.in_features:
            return _Found("shape", what, fix="inputs = inputs.flatten(1)")
        return _Found("shape", what, fix=f"nn.Linear({shape[-1]}, {m.out_features})")
    if isinstance(m, _ConvNd):
        dims = len(m.kernel_size)
        if x.dim() == dims + 1 and m.in_channels == 1 and shape[0] != 1:
            what = f"{who} wants (batch, channels, ...), and is given {x.dim()} dimensions: the channels are missing."
            return _Found("shape", what, fix="inputs = inputs.unsqueeze(1)")
        channels = shape[-dims - 1] if x.dim() > dims else None
        if channels is not None and channels != m.in_channels:
            what = f"{who} wants {m.in_channels} channels in dimension {x.dim() - dims - 1}, and is given {channels}."
            if x.dim() == dims + 2 and shape[-1] == m.in_channels:
                return _Found("shape", what + " They come last.", fix="inputs = inputs.movedim(-1, 1)")
            return _Found("shape", what, fix=f"nn.Conv{dims}d({channels}, {m.out_channels}, ...)")
    if isinstance(m, _BatchNorm) and x.dim() > 1 and shape[1] != m.num_features:
        what = f"{who} wants {m.num_features} channels in dimension 1, and is given {shape[1]}."
        return _Found("shape", what, fix=f"nn.{type(m).__name__}({shape[1]})")
    if isinstance(m, nn.LayerNorm) and shape[-len(m.normalized_shape) :] != tuple(m.normalized_shape):
        what = f"{who} normalises over {tuple(m.normalized_shape)}, and is given {shape}."
        return _Found("shape", what, fix=f"nn.LayerNorm({list(shape[-len(m.normalized_shape) :])})")
    if isinstance(m, nn.RNNBase) and x.dim() and shape[-1] != m.input_size:
        what = f"{who} wants {m.input_size} features in the last dimension, and is given {shape[-1]}."
        return _Found("shape", what, fix=f"nn.{type(m).__name__}({shape[-1]}, {m.hidden_size})")
    return None


# ---- calls of the four losses

_NAMES = {
    "binary_cross_entropy": "BCELoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "nll_loss": "NLLLoss",
    "cross_entropy": "CrossEntropyLoss",
}
_KNOWN = {getattr(package, name): loss for package in (F, functional) for name, loss in _NAMES.items()}


def _is_known(criterion: Any) -> bool:
    try:
        return getattr(criterion, "func", criterion) in _KNOWN  # also partial(F.cross_entropy, ...)
    except TypeError:  # without a hash
        return False


class _LossCalls(TorchFunctionMode):
    """Looks at the tensors of every call of a loss, whoever calls it, before and after it runs."""

    def __init__(self, inspection: _Inspection, batch_size: Optional[int]) -> None:
        super().__init__()
        self.inspection, self.batch_size = inspection, batch_size
        self.explained: Optional[Exception] = None  # raised by a call, and among the findings
        self.guessing = ""  # what the loss is compared with

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Optional[dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _KNOWN:
            return function(*args, **kwargs)
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises, with Python's own words
        bound.apply_defaults()
        is_ours = function.__module__ == functional.__name__
        call = _LossCall(_KNOWN[function], bound.arguments, self.batch_size, is_ours)
        misfits = call.misfits()
        if not misfits:
            self._look_at(call, function)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            for number, found in enumerate(misfits):
                evidence = f"{found.evidence}\n{_raised(error)}" if number == 0 else found.evidence
                self.inspection.add("error", found._replace(evidence=evidence), error)
            self.explained = error if misfits else None
            raise
        if misfits:  # no: some kernels take more than others
            self._look_at(call, function)
        return result

    def _look_at(self, call: _LossCall, function: Any) -> None:
        doubts = list(call.doubts())
        for severity, found in doubts:
            self.inspection.add(severity, found)
        refusal = self._validate(call, function, compare=not doubts)
        if refusal is not None:
            self.explained = refusal
            raise refusal

    def _validate(self, call: _LossCall, function: Any, compare: bool) -> Optional[Exception]:
        """By lossguard's own check, at once: natively a bad label would kill the CUDA context."""
        tensors, constants = call.tensors, call.constants
        given = {name: t.detach() for name, t in tensors.items() if isinstance(t, Tensor)}
        ours = getattr(functional, function.__name__)
        try:
            with torch.no_grad():
                value = ours(**tensors, **constants, strict=True, on_violation="raise", when="immediately")
        except LossValidationError as error:
            on_violation = call.arguments.get("on_violation") or _policy.policy()["on_violation"]
            passes = call.is_ours and on_violation != "raise"
            self.inspection.add("warning" if passes else "error", _of_report(error.report, given), error, error.report)
            return None if passes else error
        except Exception:
            return None  # the call itself will say it
        for severity, found in call.compare(value) if compare else ():
            self.inspection.add(severity, found)
        self.guessing = call.guessing() or self.guessing
        return None


@dataclass
class _LossCall:
    loss: str
    arguments: dict[str, Any]
    batch_size: Optional[int]
    is_ours: bool  # lossguard's function, not torch's

    def __post_init__(self) -> None:
        names = ("input", "target", "weight", "pos_weight")
        self.tensors = {name: self.arguments[name] for name in names if name in self.arguments}
        self.constants = {
            name: self.arguments[name] for name in ("ignore_index", "label_smoothing") if name in self.arguments
        }
        self.input, self.target = self.tensors["input"], self.tensors["target"]
        self.has_classes = self.loss in ("NLLLoss", "CrossEntropyLoss")

    @property
    def evidence(self) -> str:
        given = [(name, t) for name, t in self.tensors.items() if isinstance(t, Tensor)]
        return f"{self.loss} of " + _described((name.replace("input", "output"), t) for name, t in given)

    @property
    def classes(self) -> int:
        return self.input.shape[1] if self.input.dim() > 1 else self.input.shape[0] if self.input.dim() else 0

    @property
    def has_indices(self) -> bool:
        return self.has_classes and not self.target.is_floating_point()

    # what makes the call impossible

    def misfits(self) -> list[_Found]:
        x, t = self.input, self.target
        for name, value in (("output", x), ("target", t)):
            if not isinstance(value, Tensor):
                fix = f"{name} = torch.as_tensor({name})" if name == "target" else ""
                return [_Found(name, f"{self.loss}: the {name} is {_kind(value)}, not a tensor.", "", fix)]
        found = self._devices()
        if not x.is_floating_point():
            what = f"{self.loss}: the output is {str(x.dtype).removeprefix('torch.')}: predictions, not scores."
            fix = "loss = criterion(logits, target)  # before argmax() or round()"
            return [*found, _Found("dtype", what, self.evidence, fix)]
        found += self._class_shapes() if self.has_classes else self._binary_shapes()
        return found + self._weights()

    def _devices(self) -> list[_Found]:
        found = []
        for name, t in self.tensors.items():
            if isinstance(t, Tensor) and t.device != self.input.device:
                what = f"{self.loss}: the {name} is on {t.device}, the output on {self.input.device}."
                fix = f"criterion = criterion.to({str(self.input.device)!r})"
                fix = "target = target.to(output.device)" if name == "target" else fix
                found.append(_Found("device", what, self.evidence, fix))
        return found

    def _weights(self) -> list[_Found]:
        x, found = self.input, []
        for name in ("weight", "pos_weight"):
            w = self.tensors.get(name)
            if not isinstance(w, Tensor):
                continue
            if self.has_classes and tuple(w.shape) != (self.classes,):
                what = f"{self.loss}: {tuple(w.shape)} class weights for {self.classes} classes."
                found.append(_Found("class weights", what, self.evidence, f"weight = torch.ones({self.classes})"))
            elif not self.has_classes and not _broadcasts(w, x):
                what = f"{self.loss}: {name} {tuple(w.shape)} does not broadcast to the output, {tuple(x.shape)}."
                fix = f"{name} = torch.ones({x.shape[-1]})" if x.dim() else ""
                found.append(_Found("class weights", what, self.evidence, fix))
            elif w.dtype != x.dtype:
                what = f"{self.loss}: {name} is {w.dtype}, the output {x.dtype}.".replace("torch.", "")
                fix = f"criterion = criterion.to({x.dtype})"
                found.append(_Found("class weights", what, self.evidence, fix))
        return found

    def _class_shapes(self) -> list[_Found]:
        x, t, loss = self.input, self.target, self.loss
        rows = x.shape[:1] + x.shape[2:] if x.dim() > 1 else torch.Size()
        found = []
        if t.shape == x.shape and x.dim():
            if t.is_floating_point() and loss == "CrossEntropyLoss":
                return []
            if x.dim() > 1 and _is_one_hot(t):
                what = f"{loss} wants class indices, and the target is one-hot."
                return [_Found("target", what, self.evidence, "target = target.argmax(1)")]
        if t.shape != rows:
            found.append(self._class_shape_misfit(rows))
        if t.is_floating_point():
            what = f"{loss} wants integers for class indices, and the target is {t.dtype}.".replace("torch.", "")
            if t.is_meta or bool((t == t.round()).all()):
                found.append(_Found("dtype", what, self.evidence, "target = target.long()"))
            else:
                what += " It has fractions: is this a regression?"
                found.append(_Found("dtype", what, self.evidence, "criterion = torch.nn.MSELoss()"))
        elif t.dtype not in (torch.int64, torch.uint8):
            what = f"{loss} wants int64 for class indices, and the target is {t.dtype}.".replace("torch.", "")
            found.append(_Found("dtype", what, self.evidence, "target = target.long()"))
        elif t.dtype is torch.uint8 and t.dim() > 1:
            what = f"{loss} of torch takes uint8 for flat targets only."
            found.append(_Found("dtype", what, self.evidence, "target = target.long()"))
        return found

    def _class_shape_misfit(self, rows: torch.Size) -> _Found:
        x, t, loss = self.input, self.target, self.loss
        what = f"{loss}: the target is {tuple(t.shape)}, and for this output should be {tuple(rows)}."
        n = x.shape[0] if x.dim() else 0
        if (x.dim() == 1 or x.dim() == 2 and x.shape[1] == 1) and t.numel() == n:
            what = f"{loss} wants one output for each class, and the model has one for each sample."
            return _Found("shape", what, self.evidence, "criterion = lossguard.BCEWithLogitsLoss()  # target.float()")
        for d in range(t.dim()):
            if t.shape[d] == 1 and t.shape[:d] + t.shape[d + 1 :] == rows:
                return _Found("shape", what, self.evidence, f"target = target.squeeze({d})")
        if x.dim() > 2 and t.shape == x.shape[:-1]:
            what = f"{loss} wants the classes in dimension 1, and the output seems to have them in the last."
            return _Found("shape", what, self.evidence, "output = output.movedim(-1, 1)")
        if t.dim() and x.dim() and t.shape[0] != n:
            what = f"{loss}: {n} outputs, and {t.shape[0]} targets."
            if x.dim() == 2 and t.numel() == n:
                return _Found("shape", what, self.evidence, "target = target.flatten()")
        return _Found("shape", what, self.evidence)

    def _binary_shapes(self) -> list[_Found]:
        x, t, loss = self.input, self.target, self.loss
        found = []
        if t.shape != x.shape:
            what = f"{loss}: the target is {tuple(t.shape)}, and should be like the output, {tuple(x.shape)}."
            fix = ""
            for name, small, other, large in (("target", t, "output", x), ("output", x, "target", t)):
                for d in range(large.dim()):
                    if not fix and large.shape[d] == 1 and large.shape[:d] + large.shape[d + 1 :] == small.shape:
                        fix = f"{name} = {name}.unsqueeze({d})  # or {other}.squeeze({d})"
            if x.dim() == 2 and x.shape[1] > 1 and t.shape in (x.shape[:1], x.shape[:1] + (1,)):
                what = f"{loss} wants a target for each output, and this looks like one class of {x.shape[1]} a sample."
                return [_Found("shape", what, self.evidence, "criterion = lossguard.CrossEntropyLoss()")]
            found.append(_Found("shape", what, self.evidence, fix))
        if not t.is_floating_point():
            what = f"{loss} wants a floating-point target, and it is {t.dtype}.".replace("torch.", "")
            found.append(_Found("dtype", what, self.evidence, "target = target.float()"))
        elif t.dtype != x.dtype:
            what = f"{loss}: the output is {x.dtype}, the target {t.dtype}.".replace("torch.", "")
            found.append(_Found("dtype", what, self.evidence, "target = target.to(output.dtype)"))
        return found

    # what computes something, but hardly what is meant

    def doubts(self) -> Iterator[tuple[Severity, _Found]]:
        x, t, loss = self.input, self.target, self.loss
        if x.is_meta or not x.numel():
            return
        if self.has_classes:
            if x.dim() == 1 and self.batch_size == x.shape[0] > 1:
                what = f"{loss} takes an output of one dimension for one sample of {x.shape[0]} classes."
                fix = "criterion = lossguard.BCEWithLogitsLoss()"
                yield "error", _Found("shape", what, self.evidence, fix)
                return
            if self.classes == 1:
                what = f"{loss} of one class is 0 whatever the model says."
                fix = "criterion = lossguard.BCEWithLogitsLoss()"
                yield "error", _Found("shape", what, self.evidence, fix)
                return
            if self.has_indices and t.numel() and bool((t == self.constants["ignore_index"]).all()):
                what = f"every label is ignore_index, {self.constants['ignore_index']}: there is nothing to learn."
                yield "error", _Found("labels", what, self.evidence)
            if not self.has_indices:
                sums = t.sum(1 if t.dim() > 1 else 0)
                if not torch.isclose(sums, torch.ones_like(sums), atol=1e-2).all():
                    what = "the class probabilities of the target do not sum to 1."
                    evidence = f"{self.evidence}\nthey sum to from {sums.min():.4g} to {sums.max():.4g}"
                    fix = "criterion = lossguard.BCEWithLogitsLoss()  # if several classes can be right"
                    yield "warning", _Found("target", what, evidence, fix)
        yield from self._activation_doubts()

    def _activation_doubts(self) -> Iterator[tuple[Severity, _Found]]:
        x, loss = self.input.detach(), self.loss
        chain = _activations(self.input)
        last = chain[0] if chain else ""
        low, high = float(x.min()), float(x.max())
        seen = f"{self.evidence}\nthe output runs from {low:.4g} to {high:.4g}"
        dim = 1 if x.dim() > 1 else 0
        twice = next((a for a, b in zip(chain, chain[1:]) if a == b and a != "log_softmax"), "")
        plain = [a for a in chain if a != "log"]
        if loss == "CrossEntropyLoss" and last in ("softmax", "sigmoid"):
            what = f"{loss} applies log_softmax itself, and the output comes from a {last}: it is applied twice."
            what = what if last == "softmax" else f"{loss} wants logits, and the output comes from a sigmoid."
            yield "error", _Found("activation", what, seen, f"return logits  # without the {last}")
        elif loss == "CrossEntropyLoss" and low >= 0 and _sums_to_one(x, dim):
            what = f"{loss} wants logits, and the output looks like probabilities: each row sums to 1."
            yield "error", _Found("activation", what, seen, "return logits  # without the softmax")
        elif loss == "BCEWithLogitsLoss" and last in ("sigmoid", "softmax", "logsigmoid", "log_softmax"):
            what = f"{loss} applies sigmoid itself, and the output comes from a {last}" + (
                ": it is applied twice." if last == "sigmoid" else ", so these are no logits."
            )
            yield "error", _Found("activation", what, seen, f"return logits  # without the {last}")
        elif loss == "BCEWithLogitsLoss" and 0 <= low < 0.05 and 0.95 < high <= 1 and x.numel() >= 8:
            what = f"{loss} wants logits, and all of the output is in [0, 1]: is a sigmoid applied already?"
            yield "warning", _Found("activation", what, seen, "return logits  # without the sigmoid")
        elif twice or (loss == "NLLLoss" and plain[:2] == ["softmax", "softmax"]):
            what = f"{twice or 'softmax'} is applied twice."
            yield "error", _Found("activation", what, seen, f"return output  # of one {twice or 'softmax'}")
        elif loss == "NLLLoss":
            yield from self._log_probability_doubts(x, dim, seen, low, high)

    def _log_probability_doubts(
        self, x: Tensor, dim: int, seen: str, low: float, high: float
    ) -> Iterator[tuple[Severity, _Found]]:
        fix = "criterion = lossguard.CrossEntropyLoss()  # on the logits"
        if low >= 0 and _sums_to_one(x, dim):
            what = "NLLLoss wants log-probabilities, and the output looks like probabilities: each row sums to 1."
            yield "error", _Found("activation", what, seen, f"return logits.log_softmax({dim})  # instead of softmax")
        elif high > 1e-3:
            what = "NLLLoss wants log-probabilities, which are never above 0: these look like logits."
            yield "error", _Found("activation", what, seen, fix)
        elif math.isfinite(low + high) and not _sums_to_one(x.double().exp(), dim):
            other = next((d for d in range(x.dim()) if d != dim and _sums_to_one(x.double().exp(), d)), None)
            if other is not None:
                what = f"log_softmax was taken over dimension {other}, not over that of the classes."
                yield "error", _Found("activation", what, seen, f"output = logits.log_softmax({dim})")
            else:
                what = "NLLLoss wants log-probabilities, and the exponentials of these do not sum to 1."
                yield "warning", _Found("activation", what, seen, fix)

    # the first loss against guessing

    def guessing(self) -> str:
        if not self.has_classes:
            return "guessing: log(2) = 0.6931"
        return f"guessing: log({self.classes}) = {math.log(self.classes):.4g}" if self.classes > 1 else ""

    def compare(self, value: Tensor) -> Iterator[tuple[Severity, _Found]]:
        """The mean loss with that of an even guess, from which an untrained model is not far."""
        if value.is_meta or not math.isfinite(mean := float(value)) or not self.input.numel():
            return
        if not self.has_classes and any(self.tensors.get(name) is not None for name in ("weight", "pos_weight")):
            return
        expected = math.log(self.classes if self.has_classes else 2)
        if not expected or 0.5 * expected <= mean <= 1.5 * expected + 0.5:
            return
        largest = float(self.input.detach().abs().max())
        evidence = f"a mean of {mean:.4g} where {self.guessing()}; the largest output is {largest:.4g} in size"
        if mean > expected:
            what = f"{self.loss} begins far above guessing: the model is sure, and wrong."
            fix = "inputs = (inputs - mean) / std  # or a smaller last layer to begin with"
        else:
            what = f"{self.loss} begins far below guessing: the model is trained already, or sees its labels."
            fix = ""
        yield "note", _Found("initial loss", what, evidence, fix)


def _broadcasts(small: Tensor, large: Tensor) -> bool:
    try:
        return torch.broadcast_shapes(small.shape, large.shape) == large.shape
    except RuntimeError:
        return False


def _is_one_hot(t: Tensor) -> bool:
    if t.is_meta or not t.numel():
        return False
    numbers = t.long()
    return bool(((numbers == 0) | (numbers == 1)).all() and (numbers == t).all() and (numbers.sum(1) == 1).all())


def _sums_to_one(x: Tensor, dim: int) -> bool:
    sums = x.double().sum(dim)
    slack = 1e-3 if x.dtype in (torch.float32, torch.float64) else 2e-2
    return x.shape[dim] > 1 and bool(((sums - 1).abs() < slack).all())


_ACTIVATIONS = {
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "LogSigmoid": "logsigmoid",
    "Log": "log",
}
_PASSING = frozenset(  # nodes that move or round values, and change none
    "Alias AsStrided Clamp ClampMax ClampMin Clone Expand Index MaskedSelect NanToNum Permute Reshape Select Slice "
    "Split Squeeze T ToCopy Transpose Unbind UnsafeView Unsqueeze View".split()
)


def _activations(x: Tensor) -> list[str]:
    """The activations that a tensor comes from, the last first, as its graph tells; none where it has no graph."""
    found: list[str] = []
    node = x.grad_fn
    while node is not None:
        name = re.sub(r"Backward\d*$", "", node.name())
        if name in _ACTIVATIONS:
            found.append(_ACTIVATIONS[name])
        elif name not in _PASSING:
            break
        node = node.next_functions[0][0] if node.next_functions else None
    return found


def _of_report(report: Report, tensors: Mapping[str, Tensor]) -> _Found:
    """A refusal of lossguard's as a finding: the report's first line, and the likeliest causes."""
    section = report.sections[0]
    first = f"the first at {_index(section.indices[0])}: {_number(section.values[0], report.dtypes[section.tensor])}"
    causes = diagnose(report, tensors)
    evidence = "\n".join([f"{first}; {report._tensors()}", *(cause.what for cause in causes[:3])])
    check = "labels" if section.tensor == "target" else "activation"
    return _Found(check, str(report).partition("\n")[0], evidence, causes[0].fix if causes else "")
