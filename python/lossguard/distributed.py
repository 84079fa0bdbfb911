"""More than one process: all ranks raise, or all go on."""

from __future__ import annotations

from typing import Any, Optional

import torch
import torch.distributed as dist

from . import _pending, _violations

__all__ = ["check"]


def check(group: Optional[Any] = None) -> None:
    """Raise on every rank of ``group`` if a loss of any of them was given bad values. Collective.

    Call it where every rank passes, between the backward and the step::

        try:
            criterion(model(inputs), labels).backward()
            lossguard.distributed.check()
            optimizer.step()
        except lossguard.LossValidationError as error:   # on every rank, or on none
            ...
        optimizer.zero_grad()

    It waits for the losses that this process has computed, and costs one all-reduce of one number. In a process
    group of more than one rank nothing is raised before it, on the CPU either: a rank that left the step alone would
    leave the others waiting in the backward's all-reduce. Without a process group it is :func:`lossguard.check`.

    Args:
        group: a process group; None is the default one.

    Raises:
        LossValidationError: of the type that the first rank with a violation has. ``reports`` has those of all ranks,
            in the order of ranks.
    """
    with _violations.collect() as reports:
        _pending.check()
    if not dist.is_available() or not dist.is_initialized():
        everybodys = [reports]
    else:
        bad = torch.tensor([len(reports)], dtype=torch.int32, device=_device(group))
        dist.all_reduce(bad, group=group)
        if not int(bad):
            return
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, reports, group=group)
        everybodys = gathered
    _violations.throw(_violations.exception_for([report for of_rank in everybodys for report in of_rank]))


def _device(group: Optional[Any]) -> torch.device:
    """One that the group can reduce on."""
    backend = str(dist.get_backend(group))
    if backend == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
