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
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree

from ._loss_calls import LossCalls, is_known
from ._nonfinite import MOST_NAMES, BadTensor, NonFinite, Trace, find_nonfinite, gradients_of, let_go
from ._preflight_batch import (
    LABELS,
    call_arguments,
    checked_model,
    described,
    restored,
    split_batch,
    tensors_given,
    tensors_in,
)
from ._preflight_explain import Found, Severity, explain, kind_of, raised_text, values_per_channel
from .report import Report, as_printed, shorten

__all__ = ["BadTensor", "Finding", "NonFinite", "Preflight", "find_nonfinite", "preflight"]


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

    _repr_pretty_ = as_printed

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
    model = checked_model(model)
    if criterion is not None and not callable(criterion):
        raise TypeError(f"criterion must be a module, a function or None, got {type(criterion).__name__}")
    if isinstance(data, Iterator):
        raise TypeError("data is an iterator, whose first batch would be lost: give the DataLoader, or one batch")
    inspection = _Inspection(model, criterion, inputs, target, output)
    modules = [model, criterion] if isinstance(criterion, nn.Module) else [model]
    with restored(modules, data), contextlib.suppress(_Stop):
        inspection.run(data)
    return Preflight(type(model).__name__, inspection.findings, inspection.facts)


class _Stop(Exception):
    """What comes next needs what has just failed."""


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
        self, severity: Severity, found: Found, error: Optional[Exception] = None, report: Optional[Report] = None
    ) -> None:
        let_go(error)
        finding = Finding(severity, *found, error, report)
        if finding not in self.findings:
            self.findings.append(finding)

    def fail(self, found: Found, error: Optional[Exception] = None) -> None:
        self.add("error", found, error)
        raise _Stop

    def run(self, data: Any) -> None:
        is_loader = _is_loader(data)
        batch = self._first_of(data) if is_loader else data
        args, kwargs, labels = self._divide(batch)
        sizes = [t.shape[0] for _, t in tensors_given(args, kwargs) if t.dim() > 1]
        calls = LossCalls(self.add, sizes[0] if sizes else None)
        if not self.model.training:
            fix = "model.train()"
            self.add("note", Found("mode", "the model is in evaluation mode, and was looked at in it.", fix=fix))
        with Trace(self.model, allow_neg_inf=True) as trace, calls:
            trace.look_before(args, kwargs)
            output = self._attempt("the model", trace, calls, lambda: trace.run(args, kwargs))
            self.facts["output"] = described(tensors_in(output, "output"))
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
            self.fail(Found("loader", "the loader yields no batch.", *_empty_loader(loader)))
        except Exception as error:
            self.fail(Found("loader", "the loader raised as it made its first batch.", raised_text(error)), error)
        devices = {t.device for t in self.model.parameters()}
        if len(devices) != 1 or "meta" in str(devices):
            return batch
        return _pytree.tree_map(lambda leaf: leaf.to(*devices) if hasattr(leaf, "to") else leaf, batch)

    def _divide(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        rest, labels = (batch, None) if self.criterion is None else split_batch(batch)
        try:
            rest = rest if self.inputs is None else self.inputs(batch)
            labels = labels if self.target is None else self.target(batch)
        except Exception as error:
            what = f"inputs= or target= raised on this batch, which is {kind_of(batch)}."
            self.fail(Found("batch", what, raised_text(error)), error)
        args, kwargs = call_arguments(rest)
        if any(not isinstance(name, str) for name in kwargs):
            what = f"the batch is a mapping whose keys are not all names: {shorten(str(list(kwargs)), 100)}."
            self.fail(Found("batch", what, fix="preflight(..., inputs=lambda batch: ..., target=lambda batch: ...)"))
        given = list(tensors_given(args, kwargs))
        self.facts["batch"] = described(given) or kind_of(batch)
        if self.criterion is not None:
            if labels is None:
                what = f"the batch is {kind_of(batch)}, in which there are no labels for the criterion."
                evidence = "labels are the last of a tuple, or the entry of a mapping named " + ", ".join(LABELS)
                self.fail(Found("batch", what, evidence, "preflight(..., target=lambda batch: batch[...])"))
            self.facts["labels"] = described(tensors_in(labels, "target")) or kind_of(labels)
        empty = [(name, t) for name, t in given if not t.numel()]
        if empty:
            self.fail(Found("batch", "the batch has a tensor without elements.", described(empty)))
        return args, kwargs, labels

    def _attempt(self, who: str, trace: Trace, calls: LossCalls, call: Callable[[], Any]) -> Any:
        try:
            result = call()
        except Exception as error:
            if error is not calls.explained:
                found = explain(error, trace) or Found("forward", f"{who} raised {type(error).__name__}.")
                if who != "the model":
                    found = found._replace(check="criterion")
                evidence = "\n".join(filter(None, (found.evidence, raised_text(error))))
                self.add("error", found._replace(evidence=evidence), error, getattr(error, "report", None))
            self._say_not_finite(trace)
            raise _Stop from None
        return result

    def _loss_of(self, output: Any, labels: Any, trace: Trace, calls: LossCalls) -> Any:
        if self.criterion is None:
            loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
            if loss is None and not isinstance(output, Mapping):
                loss = output[0] if isinstance(output, (tuple, list)) and output else output
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                what = "no criterion was given, and the model returns no loss."
                fix = "preflight(model, data, torch.nn.CrossEntropyLoss())"
                self.fail(Found("output", what, self.facts["output"], fix))
            return loss
        scores = output
        if self.output is not None:
            scores = self._attempt("output=", trace, calls, lambda: self.output(output))  # type: ignore[misc]
        elif not isinstance(output, Tensor) and (isinstance(self.criterion, nn.Module) or is_known(self.criterion)):
            found = dict(tensors_in(output, "output"))
            if not found:
                self.fail(Found("output", f"the model returns {kind_of(output)}, in which there is no tensor."))
            name = next((name for name in ("output['logits']", "output.logits") if name in found), next(iter(found)))
            scores = found[name]
            what = f"the model returns {kind_of(output)}: the criterion was given {name}."
            self.add("note", Found("output", what, self.facts["output"], "preflight(..., output=lambda output: ...)"))
        criterion = self.criterion
        return self._attempt("the criterion", trace, calls, lambda: criterion(scores, labels))

    def _look_at_loss(self, loss: Any, trace: Trace, calls: LossCalls) -> None:
        if not isinstance(loss, Tensor):
            fix = "return loss  # not loss.item()" if isinstance(loss, float) else ""
            self.fail(Found("loss", f"the loss is {kind_of(loss)}, not a tensor.", repr(loss)[:100], fix))
        if loss.numel() != 1:
            fix = "criterion.reduction = 'mean'" if hasattr(self.criterion, "reduction") else "loss = loss.mean()"
            what = "the loss is not one number, so backward() raises."
            self.add("error", Found("loss", what, described([("loss", loss)]), fix))
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
            self.fail(Found("gradients", what, evidence, fix))

    def _look_at_gradients(self, loss: Tensor, trace: Trace) -> None:
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if isinstance(self.criterion, nn.Module):
            of_criterion = self.criterion.named_parameters()
            parameters.update({f"criterion.{name}": p for name, p in of_criterion if p.requires_grad})
        if not parameters:
            return
        was_finite = trace.found.ok
        try:
            gradients = gradients_of(loss, parameters)
        except Exception as error:
            if "use_reentrant" in str(error):
                what = "gradients were not looked at: reentrant checkpointing allows it in backward() alone."
                self.add("warning", Found("gradients", what, "", "checkpoint(..., use_reentrant=False)"), error)
                return
            found = Found("gradients", f"the backward raised {type(error).__name__}.", raised_text(error))
            self.fail(found, error)
        if was_finite:
            self._say_not_finite(trace)
        known = [g for g in gradients.values() if g is not None and not g.is_meta]
        missing = [name for name, g in gradients.items() if g is None]
        if missing:
            names = ", ".join(missing[:MOST_NAMES]) + (", ..." if len(missing) > MOST_NAMES else "")
            what = f"{len(missing)} of {len(parameters)} parameters get no gradient: they have no part in the loss."
            owner = missing[0].rpartition(".")[0]
            name = missing[0] if owner in ("", "criterion") else owner
            name = name if name.startswith("criterion.") else f"model.{name}"
            self.add("warning", Found("gradients", what, names, f"{name}.requires_grad_(False)  # or use it"))
        if known and not any(bool(g.any()) for g in known):
            what = "every gradient is 0: a step changes nothing."
            evidence = "dead ReLUs, a saturated activation, a clamp, or a loss that does not depend on the output"
            self.add("error", Found("gradients", what, evidence))
        norm = math.sqrt(sum(float(g.detach().double().norm()) ** 2 for g in known if not g.is_complex()))
        self.facts["gradients"] = f"of {len(known)} of {len(parameters)} parameters, norm {norm:.4g}"

    def _look_at_last_batch(self, loader: Any, trace: Trace) -> None:
        last = _last_batch(loader)
        norms = {m: name for m, name in trace.names.items() if isinstance(m, _BatchNorm) and m.training}
        if last is None or not norms:
            return
        samples, size = last
        one_value = [n for m, n in norms.items() if m in trace.shapes and values_per_channel(trace.shapes[m]) == 1]
        name = (one_value or list(norms.values()))[0]
        what = f"the last batch of an epoch has one sample, and {name!r} is a BatchNorm: "
        what += "it raises." if one_value else "its statistics are of that one."
        evidence = f"{samples} samples in batches of {size}, drop_last=False"
        fix = f"DataLoader(..., batch_size={size}, drop_last=True)"
        self.add("error" if one_value else "warning", Found("BatchNorm", what, evidence, fix))

    def _say_not_finite(self, trace: Trace) -> None:
        found = trace.found
        if not found.ok:
            headline, _, rest = str(found).partition("\n")
            self.add("error", Found("not finite", headline, rest.replace("\n  ", "\n").removeprefix("  ")))


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
