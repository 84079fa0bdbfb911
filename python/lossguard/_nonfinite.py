"""Where NaN or infinity begins: a forward and a backward, watched."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn

from . import _callsite
from ._native import _describe
from ._preflight_batch import call_arguments, checked_model, restored, split_batch, tensors_given, tensors_in
from .report import CallSite, _index, _number, _plain, as_printed

_FIRST = 16  # offenders that are kept, as in a Report
MOST_NAMES = 5


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

    _repr_pretty_ = as_printed

    def __str__(self) -> str:
        if self.ok:
            return "everything is finite"
        lines = [self._headline()]
        lines += [f"  {tensor}" for tensor in self.tensors[:MOST_NAMES]]
        if len(self.tensors) > MOST_NAMES:
            lines.append(f"  ... and {len(self.tensors) - MOST_NAMES} tensors more")
        lines += [f"  given: {text}" for text in self.given]
        if self.call_site is not None:
            lines.append(f"  called at {self.call_site}")
        lines += [f"  {'or' if number else 'likely cause'}: {hint}" for number, hint in enumerate(self.hints)]
        if self.error is not None:
            lines.append(f"  afterwards the model raised {type(self.error).__name__}: {first_line(self.error)}")
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


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


# ---- a forward and a backward, watched


@dataclass(eq=False)
class TracedCall:
    """A call of a module that is under way, or was."""

    module: nn.Module
    parent: Optional[TracedCall]
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: Optional[CallSite]
    last: Optional[TracedCall] = None  # of the calls it made, the last that returned

    def is_within(self, other: TracedCall) -> bool:
        call: Optional[TracedCall] = self.parent
        while call is not None and call is not other:
            call = call.parent
        return call is not None


@dataclass(eq=False)
class _Node:
    """A tensor through which a gradient flows. It is held so that its id stays its own."""

    tensor: Tensor
    name: str
    producers: list[TracedCall] = field(default_factory=list)  # the innermost first
    consumers: list[TracedCall] = field(default_factory=list)


class Trace:
    """Hooks on every submodule: what is running, and the first that is not finite.

    Children return before their parents, so the first module with a bad output is the innermost. If a module is
    given something bad first, that was made by the code of its parent. In the backward the hooks are on tensors:
    those of modules are views that code may not change in place, as ``ReLU(inplace=True)`` does.
    """

    def __init__(self, model: nn.Module, allow_neg_inf: bool) -> None:
        self.model, self.allow_neg_inf = model, allow_neg_inf
        self.names = {module: name for name, module in model.named_modules()}
        self.running: list[TracedCall] = []
        self.shapes: dict[nn.Module, torch.Size] = {}  # of the first tensor that each was given
        self.found = NonFinite()
        self._from: Optional[CallSite] = None  # the line that asked for all this
        self._numbers: dict[nn.Module, int] = {}
        self._nodes: dict[tuple[int, int], _Node] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Trace:
        for module in self.names:
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks: it counts as code of its parent
                continue
            self._handles.append(module.register_forward_pre_hook(self._enters, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._returns, with_kwargs=True))
            for name, p in module.named_parameters(recurse=False):
                if p.requires_grad:
                    node = _Node(p, name, consumers=[TracedCall(module, None, 1, (), {}, None)])
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
        bad = _all_bad(tensors_given(args, kwargs), masks=True)
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
            bad = _all_bad(tensors_in(output, "output"), masks=self.allow_neg_inf)
            if bad:
                self.found = NonFinite("forward", "", type(self.model).__name__, tensors=bad, hints=_overflow(bad))
        return output

    def look_at_loss(self, loss: Any) -> None:
        if self.found.ok:
            bad = _all_bad(tensors_in(loss, "loss"))
            if bad:
                self.found = NonFinite("loss", "", type(self.model).__name__, tensors=bad, hints=_overflow(bad))

    # hooks of the forward

    def _enters(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._numbers[module] = self._numbers.get(module, 0) + 1
        parent = self.running[-1] if self.running else None
        site = _callsite.here()
        if parent is None and self._from is None:
            self._from = site
        call = TracedCall(module, parent, self._numbers[module], args, kwargs, None if site == self._from else site)
        if self.found.ok and parent is not None:
            bad = _all_bad(tensors_given(args, kwargs), masks=True)
            if bad:
                after = f"between the calls of {self._placed(parent.last)} and" if parent.last else "before the call of"
                named = [dataclasses.replace(b, name=f"{b.name} of {self._name(call)}") for b in bad]
                self._arose(parent, named, f"in its own code, {after} {self._placed(call)}")
        for name, t in tensors_given(args, kwargs):
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
            bad = _all_bad(tensors_in(output, "output"), masks=self.allow_neg_inf)
            if bad:
                where = f"in its own code, after the call of {self._placed(call.last)}" if call.last else ""
                self._arose(call, bad, where, output)
        for name, t in tensors_in(output, "output"):
            self._follow(t, name, producer=call)
        if call.parent is not None:
            call.parent.last = call
        call.args, call.kwargs = (), {}

    def _name(self, call: TracedCall) -> str:
        return repr(self.names[call.module]) if self.names[call.module] else "the model"

    def _placed(self, call: TracedCall) -> str:
        return self._name(call) + (f" ({call.site.short()})" if call.site else "")

    def _arose(self, call: TracedCall, bad: list[BadTensor], where: str, output: Any = None) -> None:
        module, hints = call.module, _overflow(bad)
        # What was changed in place is not what was given.
        returned = [t for _, t in tensors_in(output)]
        given = [
            (name, t) for name, t in tensors_given(call.args, call.kwargs) if not any(t is other for other in returned)
        ]
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

    def _follow(
        self, t: Tensor, name: str, producer: Optional[TracedCall] = None, consumer: Optional[TracedCall] = None
    ) -> None:
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
            where = "in " + " or ".join(dict.fromkeys(self._called(c) for c in innermost[:MOST_NAMES]))
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

    def _called(self, call: TracedCall) -> str:
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


def gradients_of(loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Optional[Tensor]]:
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

    The model runs in the mode it is in, and in the caller's autocast; nothing is changed (see the top of preflight.py,
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
    model = checked_model(model)
    rest, labels = split_batch(batch)
    args, kwargs = call_arguments(rest if inputs is None else inputs(batch))
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]
    with restored(modules), Trace(model, allow_neg_inf) as trace:
        trace.look_before(args, kwargs)
        if trace.found.ok:
            try:
                output = trace.run(args, kwargs)
                if loss is not None and trace.found.ok:
                    value = loss(output) if labels is None else loss(output, labels)
                    trace.look_at_loss(value)
                    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
                    if trace.found.ok and parameters:
                        gradients_of(value, parameters)
            except Exception as error:
                if trace.found.ok:
                    raise
                let_go(error)
                return dataclasses.replace(trace.found, error=error)
        return trace.found


def let_go(error: Optional[BaseException]) -> None:
    """Of the locals of the frames that an exception has passed: they would keep the activations alive."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            with contextlib.suppress(RuntimeError):  # it is still running
                frame.clear()
                frame.f_locals  # before Python 3.13 a copy, if somebody has looked: made anew  # noqa: B018
        error = error.__cause__ or error.__context__
