"""What is wrong, or looks wrong, with a call of one of the four losses."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import _policy, functional
from ._preflight_batch import described
from ._preflight_explain import Found, Severity, kind_of, raised_text
from .diagnosis import diagnose
from .errors import LossValidationError
from .report import Report, _index, _number

_NAMES = {
    "binary_cross_entropy": "BCELoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "nll_loss": "NLLLoss",
    "cross_entropy": "CrossEntropyLoss",
}
_KNOWN = {getattr(package, name): loss for package in (F, functional) for name, loss in _NAMES.items()}


def is_known(criterion: Any) -> bool:
    try:
        return getattr(criterion, "func", criterion) in _KNOWN  # also partial(F.cross_entropy, ...)
    except TypeError:  # without a hash
        return False


class LossCalls(TorchFunctionMode):
    """Looks at the tensors of every call of a loss, whoever calls it, before and after it runs."""

    def __init__(self, add: Callable[..., None], batch_size: Optional[int]) -> None:
        """`add(severity, found, error=None, report=None)` takes each finding."""
        super().__init__()
        self.add, self.batch_size = add, batch_size
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
                evidence = f"{found.evidence}\n{raised_text(error)}" if number == 0 else found.evidence
                self.add("error", found._replace(evidence=evidence), error)
            self.explained = error if misfits else None
            raise
        if misfits:  # no: some kernels take more than others
            self._look_at(call, function)
        return result

    def _look_at(self, call: _LossCall, function: Any) -> None:
        doubts = list(call.doubts())
        for severity, found in doubts:
            self.add(severity, found)
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
            self.add("warning" if passes else "error", _of_report(error.report, given), error, error.report)
            return None if passes else error
        except Exception:
            return None  # the call itself will say it
        for severity, found in call.compare(value) if compare else ():
            self.add(severity, found)
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
        return f"{self.loss} of " + described((name.replace("input", "output"), t) for name, t in given)

    @property
    def classes(self) -> int:
        return self.input.shape[1] if self.input.dim() > 1 else self.input.shape[0] if self.input.dim() else 0

    @property
    def has_indices(self) -> bool:
        return self.has_classes and not self.target.is_floating_point()

    # what makes the call impossible

    def misfits(self) -> list[Found]:
        x, t = self.input, self.target
        for name, value in (("output", x), ("target", t)):
            if not isinstance(value, Tensor):
                fix = f"{name} = torch.as_tensor({name})" if name == "target" else ""
                return [Found(name, f"{self.loss}: the {name} is {kind_of(value)}, not a tensor.", "", fix)]
        found = self._devices()
        if not x.is_floating_point():
            what = f"{self.loss}: the output is {str(x.dtype).removeprefix('torch.')}: predictions, not scores."
            fix = "loss = criterion(logits, target)  # before argmax() or round()"
            return [*found, Found("dtype", what, self.evidence, fix)]
        found += self._class_shapes() if self.has_classes else self._binary_shapes()
        return found + self._weights()

    def _devices(self) -> list[Found]:
        found = []
        for name, t in self.tensors.items():
            if isinstance(t, Tensor) and t.device != self.input.device:
                what = f"{self.loss}: the {name} is on {t.device}, the output on {self.input.device}."
                fix = f"criterion = criterion.to({str(self.input.device)!r})"
                fix = "target = target.to(output.device)" if name == "target" else fix
                found.append(Found("device", what, self.evidence, fix))
        return found

    def _weights(self) -> list[Found]:
        x, found = self.input, []
        for name in ("weight", "pos_weight"):
            w = self.tensors.get(name)
            if not isinstance(w, Tensor):
                continue
            if self.has_classes and tuple(w.shape) != (self.classes,):
                what = f"{self.loss}: {tuple(w.shape)} class weights for {self.classes} classes."
                found.append(Found("class weights", what, self.evidence, f"weight = torch.ones({self.classes})"))
            elif not self.has_classes and not _broadcasts(w, x):
                what = f"{self.loss}: {name} {tuple(w.shape)} does not broadcast to the output, {tuple(x.shape)}."
                fix = f"{name} = torch.ones({x.shape[-1]})" if x.dim() else ""
                found.append(Found("class weights", what, self.evidence, fix))
            elif w.dtype != x.dtype:
                what = f"{self.loss}: {name} is {w.dtype}, the output {x.dtype}.".replace("torch.", "")
                fix = f"criterion = criterion.to({x.dtype})"
                found.append(Found("class weights", what, self.evidence, fix))
        return found

    def _class_shapes(self) -> list[Found]:
        x, t, loss = self.input, self.target, self.loss
        rows = x.shape[:1] + x.shape[2:] if x.dim() > 1 else torch.Size()
        found = []
        if t.shape == x.shape and x.dim():
            if t.is_floating_point() and loss == "CrossEntropyLoss":
                return []
            if x.dim() > 1 and _is_one_hot(t):
                what = f"{loss} wants class indices, and the target is one-hot."
                return [Found("target", what, self.evidence, "target = target.argmax(1)")]
        if t.shape != rows:
            found.append(self._class_shape_misfit(rows))
        if t.is_floating_point():
            what = f"{loss} wants integers for class indices, and the target is {t.dtype}.".replace("torch.", "")
            if t.is_meta or bool((t == t.round()).all()):
                found.append(Found("dtype", what, self.evidence, "target = target.long()"))
            else:
                what += " It has fractions: is this a regression?"
                found.append(Found("dtype", what, self.evidence, "criterion = torch.nn.MSELoss()"))
        elif t.dtype not in (torch.int64, torch.uint8):
            what = f"{loss} wants int64 for class indices, and the target is {t.dtype}.".replace("torch.", "")
            found.append(Found("dtype", what, self.evidence, "target = target.long()"))
        elif t.dtype is torch.uint8 and t.dim() > 1:
            what = f"{loss} of torch takes uint8 for flat targets only."
            found.append(Found("dtype", what, self.evidence, "target = target.long()"))
        return found

    def _class_shape_misfit(self, rows: torch.Size) -> Found:
        x, t, loss = self.input, self.target, self.loss
        what = f"{loss}: the target is {tuple(t.shape)}, and for this output should be {tuple(rows)}."
        n = x.shape[0] if x.dim() else 0
        if (x.dim() == 1 or x.dim() == 2 and x.shape[1] == 1) and t.numel() == n:
            what = f"{loss} wants one output for each class, and the model has one for each sample."
            return Found("shape", what, self.evidence, "criterion = lossguard.BCEWithLogitsLoss()  # target.float()")
        for d in range(t.dim()):
            if t.shape[d] == 1 and t.shape[:d] + t.shape[d + 1 :] == rows:
                return Found("shape", what, self.evidence, f"target = target.squeeze({d})")
        if x.dim() > 2 and t.shape == x.shape[:-1]:
            what = f"{loss} wants the classes in dimension 1, and the output seems to have them in the last."
            return Found("shape", what, self.evidence, "output = output.movedim(-1, 1)")
        if t.dim() and x.dim() and t.shape[0] != n:
            what = f"{loss}: {n} outputs, and {t.shape[0]} targets."
            if x.dim() == 2 and t.numel() == n:
                return Found("shape", what, self.evidence, "target = target.flatten()")
        return Found("shape", what, self.evidence)

    def _binary_shapes(self) -> list[Found]:
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
                return [Found("shape", what, self.evidence, "criterion = lossguard.CrossEntropyLoss()")]
            found.append(Found("shape", what, self.evidence, fix))
        if not t.is_floating_point():
            what = f"{loss} wants a floating-point target, and it is {t.dtype}.".replace("torch.", "")
            found.append(Found("dtype", what, self.evidence, "target = target.float()"))
        elif t.dtype != x.dtype:
            what = f"{loss}: the output is {x.dtype}, the target {t.dtype}.".replace("torch.", "")
            found.append(Found("dtype", what, self.evidence, "target = target.to(output.dtype)"))
        return found

    # what computes something, but hardly what is meant

    def doubts(self) -> Iterator[tuple[Severity, Found]]:
        x, t, loss = self.input, self.target, self.loss
        if x.is_meta or not x.numel():
            return
        if self.has_classes:
            if x.dim() == 1 and self.batch_size == x.shape[0] > 1:
                what = f"{loss} takes an output of one dimension for one sample of {x.shape[0]} classes."
                fix = "criterion = lossguard.BCEWithLogitsLoss()"
                yield "error", Found("shape", what, self.evidence, fix)
                return
            if self.classes == 1:
                what = f"{loss} of one class is 0 whatever the model says."
                fix = "criterion = lossguard.BCEWithLogitsLoss()"
                yield "error", Found("shape", what, self.evidence, fix)
                return
            if self.has_indices and t.numel() and bool((t == self.constants["ignore_index"]).all()):
                what = f"every label is ignore_index, {self.constants['ignore_index']}: there is nothing to learn."
                yield "error", Found("labels", what, self.evidence)
            if not self.has_indices:
                sums = t.sum(1 if t.dim() > 1 else 0)
                if not torch.isclose(sums, torch.ones_like(sums), atol=1e-2).all():
                    what = "the class probabilities of the target do not sum to 1."
                    evidence = f"{self.evidence}\nthey sum to from {sums.min():.4g} to {sums.max():.4g}"
                    fix = "criterion = lossguard.BCEWithLogitsLoss()  # if several classes can be right"
                    yield "warning", Found("target", what, evidence, fix)
        yield from self._activation_doubts()

    def _activation_doubts(self) -> Iterator[tuple[Severity, Found]]:
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
            yield "error", Found("activation", what, seen, f"return logits  # without the {last}")
        elif loss == "CrossEntropyLoss" and low >= 0 and _sums_to_one(x, dim):
            what = f"{loss} wants logits, and the output looks like probabilities: each row sums to 1."
            yield "error", Found("activation", what, seen, "return logits  # without the softmax")
        elif loss == "BCEWithLogitsLoss" and last in ("sigmoid", "softmax", "logsigmoid", "log_softmax"):
            what = f"{loss} applies sigmoid itself, and the output comes from a {last}" + (
                ": it is applied twice." if last == "sigmoid" else ", so these are no logits."
            )
            yield "error", Found("activation", what, seen, f"return logits  # without the {last}")
        elif loss == "BCEWithLogitsLoss" and 0 <= low < 0.05 and 0.95 < high <= 1 and x.numel() >= 8:
            what = f"{loss} wants logits, and all of the output is in [0, 1]: is a sigmoid applied already?"
            yield "warning", Found("activation", what, seen, "return logits  # without the sigmoid")
        elif twice or (loss == "NLLLoss" and plain[:2] == ["softmax", "softmax"]):
            what = f"{twice or 'softmax'} is applied twice."
            yield "error", Found("activation", what, seen, f"return output  # of one {twice or 'softmax'}")
        elif loss == "NLLLoss":
            yield from self._log_probability_doubts(x, dim, seen, low, high)

    def _log_probability_doubts(
        self, x: Tensor, dim: int, seen: str, low: float, high: float
    ) -> Iterator[tuple[Severity, Found]]:
        fix = "criterion = lossguard.CrossEntropyLoss()  # on the logits"
        if low >= 0 and _sums_to_one(x, dim):
            what = "NLLLoss wants log-probabilities, and the output looks like probabilities: each row sums to 1."
            yield "error", Found("activation", what, seen, f"return logits.log_softmax({dim})  # instead of softmax")
        elif high > 1e-3:
            what = "NLLLoss wants log-probabilities, which are never above 0: these look like logits."
            yield "error", Found("activation", what, seen, fix)
        elif math.isfinite(low + high) and not _sums_to_one(x.double().exp(), dim):
            other = next((d for d in range(x.dim()) if d != dim and _sums_to_one(x.double().exp(), d)), None)
            if other is not None:
                what = f"log_softmax was taken over dimension {other}, not over that of the classes."
                yield "error", Found("activation", what, seen, f"output = logits.log_softmax({dim})")
            else:
                what = "NLLLoss wants log-probabilities, and the exponentials of these do not sum to 1."
                yield "warning", Found("activation", what, seen, fix)

    # the first loss against guessing

    def guessing(self) -> str:
        if not self.has_classes:
            return "guessing: log(2) = 0.6931"
        return f"guessing: log({self.classes}) = {math.log(self.classes):.4g}" if self.classes > 1 else ""

    def compare(self, value: Tensor) -> Iterator[tuple[Severity, Found]]:
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
        yield "note", Found("initial loss", what, evidence, fix)


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


def _of_report(report: Report, tensors: Mapping[str, Tensor]) -> Found:
    """A refusal of lossguard's as a finding: the report's first line, and the likeliest causes."""
    section = report.sections[0]
    first = f"the first at {_index(section.indices[0])}: {_number(section.values[0], report.dtypes[section.tensor])}"
    causes = diagnose(report, tensors)
    evidence = "\n".join([f"{first}; {report._tensors()}", *(cause.what for cause in causes[:3])])
    check = "labels" if section.tensor == "target" else "activation"
    return Found(check, str(report).partition("\n")[0], evidence, causes[0].fix if causes else "")
