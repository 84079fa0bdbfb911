"""What a bad call was given, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

import torch
from torch import Tensor

from .diagnosis import diagnose
from .report import Report

__all__ = ["describe"]

_MOST_CLASSES = 20  # rows of the histogram
_BAR = 30  # characters


def describe(report: Optional[Report], tensors: Optional[Mapping[str, Tensor]]) -> str:
    """The tensors of a call: shape, dtype, device, range, what is not finite, how often each class occurs; then the
    likely causes, each with its evidence and a fix.

    Args:
        report: of the call. tensors: its arguments by name, "input" and "target" among them; None if they are gone.
    """
    if tensors is None:
        return "the batch is not at hand: the loss was compiled, ran in another process, or later calls took its place."
    lines = ["the batch:"]
    for name, tensor in tensors.items():
        lines.append(f"  {name:<7} {tuple(tensor.shape)} {_dtype(tensor)} {tensor.device}: {_range(tensor)}")
    target = tensors.get("target")
    if target is not None and not target.is_floating_point() and report is not None and target.numel():
        lines += _histogram(target, report.num_classes or 0, report.ignore_index)
    if report is not None:
        lines += _causes(report, tensors)
    return "\n".join(lines)


def _causes(report: Report, tensors: Mapping[str, Tensor]) -> list[str]:
    try:
        causes = diagnose(report, tensors)
    except ValueError:  # not the tensors of this report
        causes = diagnose(report)
    lines = ["", "what it may be:"] if causes else []
    for cause in causes:
        lines += [f"  {line}" for line in str(cause).splitlines()]
    return lines


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _range(tensor: Tensor) -> str:
    if tensor.numel() == 0:
        return "empty"
    if not tensor.is_floating_point():
        low, high = torch.aminmax(tensor)
        return f"{int(low)} .. {int(high)}"
    finite = tensor[tensor.isfinite()].double()
    known = "none is finite"
    if finite.numel():
        known = f"{finite.min():.4g} .. {finite.max():.4g}, mean {finite.mean():.4g}"
    nan, infinite = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return known + "".join(f", {n} {what}" for n, what in ((nan, "NaN"), (infinite, "infinite")) if n)


def _histogram(target: Tensor, classes: int, ignore_index: Optional[int]) -> list[str]:
    labels, counts = target.unique(return_counts=True)
    found = sorted(zip(labels.tolist(), counts.tolist()))
    bad = [pair for pair in found if not 0 <= pair[0] < classes and pair[0] != ignore_index]
    good = [pair for pair in found if pair not in bad]
    if len(found) > _MOST_CLASSES:  # the most frequent ones, and the bad
        kept = sorted(bad, key=lambda pair: -pair[1])[: _MOST_CLASSES // 2]
        kept += sorted(good, key=lambda pair: -pair[1])[: _MOST_CLASSES - len(kept)]
        found = sorted(kept)
    most = max(count for _, count in found)
    width = max(len(str(label)) for label, _ in found)
    lines = [f"  labels: {len(labels)} different ones, of classes 0 .. {classes - 1}"]
    for label, count in found:
        note = " ignored" if label == ignore_index else "" if 0 <= label < classes else " outside"
        bar = "#" * max(1, round(_BAR * count / most))
        lines.append(f"    {label:>{width}} {count:>8} {bar}{note}")
    if len(labels) > len(found):
        lines.append(f"    ... and {len(labels) - len(found)} labels more")
    return lines
