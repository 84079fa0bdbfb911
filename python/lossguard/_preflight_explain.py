"""Why a module raised, from what it is and what it was given."""

from __future__ import annotations

import inspect
import itertools
import math
import traceback
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from . import _callsite
from ._nonfinite import Trace, TracedCall, first_line
from ._preflight_batch import described, tensors_given
from .report import CallSite, shorten

Severity = Literal["error", "warning", "note"]


class Found(NamedTuple):
    """A finding to be."""

    check: str
    what: str
    evidence: str = ""
    fix: str = ""


def kind_of(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {name} of " + shorten(", ".join(map(repr, value)), 100)
    if isinstance(value, (tuple, list)):
        return f"a {name} of " + shorten(", ".join(type(item).__name__ for item in value), 100)
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def values_per_channel(shape: torch.Size) -> int:
    """Of one sample."""
    return math.prod(shape[2:])


def raised_text(error: BaseException) -> str:
    site = _line_of(error)
    text = f"{type(error).__name__}: {shorten(first_line(error), 300)}"
    return f"{text}\nraised at {site}" if site else text


def _line_of(error: BaseException) -> Optional[CallSite]:
    """The innermost line of a traceback that is the caller's own."""
    found = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if not _callsite.is_internal(code.co_filename):
            found = _callsite._site(code.co_filename, line, code.co_name)
    return found


def explain(error: BaseException, trace: Trace) -> Optional[Found]:
    """From what the module that raised is, and was given; not from the wording of the exception."""
    if isinstance(error, torch.OutOfMemoryError):
        fix = "DataLoader(..., batch_size=...)  # a smaller one"
        return Found("forward", "the batch does not fit into the memory of the device.", fix=fix)
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
    given = [(name, t) for name, t in tensors_given(call.args, call.kwargs)]
    name = trace.names[within]
    who = f"{name!r}" if name else "the model"
    where = f"in {name!r}: {_one_line(within)}" if name else f"in the model's own code ({type(within).__name__})"
    evidence = f"{where}, given {described(given) or 'no tensor'}"
    found = _misfit(within, call, who, [t for _, t in given])
    if found is None:
        return Found("forward", f"{who} raised {type(error).__name__}.", evidence)
    return found._replace(evidence="\n".join(filter(None, (evidence, found.evidence))))


def _one_line(module: nn.Module) -> str:
    text = repr(module)
    return text if "\n" not in text and len(text) < 120 else type(module).__name__


def _misfit(m: nn.Module, call: TracedCall, who: str, given: list[Tensor]) -> Optional[Found]:
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
        return Found("batch", what, str(error), fix if call.parent is None else "")
    if not given:
        return None
    x, own = given[0], next(itertools.chain(m.parameters(recurse=False), m.buffers(recurse=False)), None)
    if own is not None:
        other = next((t for t in given if t.device != own.device), None)
        if other is not None:
            what = f"{who} is on {own.device}, and what it is given on {other.device}."
            return Found("device", what, fix=f"batch = batch.to({str(own.device)!r})  # or model.to(...)")
    if isinstance(m, (nn.Embedding, nn.EmbeddingBag)):
        return _embedding_misfit(m, x, who)
    if isinstance(m, _BatchNorm) and m.training and x.dim() > 1 and x.shape[0] * values_per_channel(x.shape) == 1:
        what = f"{who} normalises over the batch, which has one value per channel."
        return Found("BatchNorm", what, fix="DataLoader(..., drop_last=True)  # and batches of 2 or more")
    is_torchs = type(m).__module__.startswith("torch.nn.")
    if is_torchs and own is not None and own.is_floating_point() and x.dtype != own.dtype:
        dtype = str(x.dtype).removeprefix("torch.")
        what = f"{who} computes in {str(own.dtype).removeprefix('torch.')}, and is given {dtype}."
        fix = f"inputs = inputs.to({own.dtype})" + (" / 255" if x.dtype is torch.uint8 else "")
        return Found("dtype", what, fix=fix)
    return _shape_misfit(m, x, who)


def _embedding_misfit(m: Any, x: Tensor, who: str) -> Optional[Found]:
    if x.dtype not in (torch.int32, torch.int64):
        what = f"{who} looks up ids, and is given {str(x.dtype).removeprefix('torch.')}."
        return Found("dtype", what, fix="inputs = inputs.long()")
    bad = ((x < 0) | (x >= m.num_embeddings)).nonzero()
    if not len(bad):
        return None
    first = tuple(bad[0].tolist())
    what = f"{who} has {m.num_embeddings} rows, and {len(bad)} of {x.numel()} ids are outside [0, {m.num_embeddings})."
    fix = f"nn.Embedding({int(x.max()) + 1}, {m.embedding_dim})" if x.min() >= 0 else ""
    return Found("labels", what, f"the first at {first}: {int(x[first])}; they run from {x.min()} to {x.max()}", fix)


def _shape_misfit(m: Any, x: Tensor, who: str) -> Optional[Found]:
    shape = tuple(x.shape)
    if isinstance(m, nn.Linear) and x.dim() and shape[-1] != m.in_features:
        what = f"{who} wants {m.in_features} features in the last dimension, and is given {shape[-1]}."
        if math.prod(shape[1:]) == m.in_features:
            return Found("shape", what, fix="inputs = inputs.flatten(1)")
        return Found("shape", what, fix=f"nn.Linear({shape[-1]}, {m.out_features})")
    if isinstance(m, _ConvNd):
        dims = len(m.kernel_size)
        if x.dim() == dims + 1 and m.in_channels == 1 and shape[0] != 1:
            what = f"{who} wants (batch, channels, ...), and is given {x.dim()} dimensions: the channels are missing."
            return Found("shape", what, fix="inputs = inputs.unsqueeze(1)")
        channels = shape[-dims - 1] if x.dim() > dims else None
        if channels is not None and channels != m.in_channels:
            what = f"{who} wants {m.in_channels} channels in dimension {x.dim() - dims - 1}, and is given {channels}."
            if x.dim() == dims + 2 and shape[-1] == m.in_channels:
                return Found("shape", what + " They come last.", fix="inputs = inputs.movedim(-1, 1)")
            return Found("shape", what, fix=f"nn.Conv{dims}d({channels}, {m.out_channels}, ...)")
    if isinstance(m, _BatchNorm) and x.dim() > 1 and shape[1] != m.num_features:
        what = f"{who} wants {m.num_features} channels in dimension 1, and is given {shape[1]}."
        return Found("shape", what, fix=f"nn.{type(m).__name__}({shape[1]})")
    if isinstance(m, nn.LayerNorm) and shape[-len(m.normalized_shape) :] != tuple(m.normalized_shape):
        what = f"{who} normalises over {tuple(m.normalized_shape)}, and is given {shape}."
        return Found("shape", what, fix=f"nn.LayerNorm({list(shape[-len(m.normalized_shape) :])})")
    if isinstance(m, nn.RNNBase) and x.dim() and shape[-1] != m.input_size:
        what = f"{who} wants {m.input_size} features in the last dimension, and is given {shape[-1]}."
        return Found("shape", what, fix=f"nn.{type(m).__name__}({shape[-1]}, {m.hidden_size})")
    return None
