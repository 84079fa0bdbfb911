"""Ranks agree: all of them raise, or all go on, and their weights stay the same.

Real processes with gloo, on the CPU: there, too, nothing is raised on one rank alone where others would wait for it.
"""

from __future__ import annotations

import gc
import itertools
import os
import traceback
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lossguard
import pytest
import torch
import torch.distributed as dist
from lossguard import LossValidationError
from torch import Tensor, nn

C = 5
KINDS = ("DDP", "FSDP2")
TIMEOUT = timedelta(seconds=60)  # a rank that hangs fails, rather than wait for ever

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(16, 8, generator=g), torch.randint(C, (16,), generator=g)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, C))


def wrapped(kind: str) -> nn.Module:
    if kind == "DDP":
        return nn.parallel.DistributedDataParallel(model())
    if kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        net = model()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(net)
    return model()


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


class Bad:
    """Which batches are bad: on the ranks, at the steps."""

    def __init__(self, ranks: tuple[int, ...], steps: tuple[int, ...]) -> None:
        self.ranks, self.steps = ranks, steps


def train(kind: str, rank: int, steps: int, bad: Bad | None, skip: tuple[int, ...] = ()) -> tuple[list[Tensor], list]:
    """Weights after training; what was raised, by step."""
    net = wrapped(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    criterion = lossguard.CrossEntropyLoss()
    raised = []
    for step in range(steps):
        if step in skip:
            continue
        x, t = batch(rank, step)
        if bad and rank in bad.ranks and step in bad.steps:
            t[rank] = 100 + rank
        try:
            criterion(net(x), t).backward()
            lossguard.distributed.check()
            optimizer.step()
        except LossValidationError as error:
            raised.append((step, [(r.rank, r.indices, r.values) for r in error.reports], str(error)))
        optimizer.zero_grad()
    return [whole(p) for p in net.parameters()], raised


def run(rank: int, world: int, folder: str, work: Callable, *args: object) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    lossguard.configure(when="auto")  # whatever the environment says
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    try:
        result = work(rank, world, *args)
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, f"{folder}/{rank}")
    dist.destroy_process_group()


def in_ranks(world: int, folder: Path, work: Callable, *args: object) -> list:
    """What `work(rank, world, *args)` returned on each."""
    torch.multiprocessing.spawn(run, (world, str(folder), work, *args), nprocs=world)
    results = [torch.load(folder / str(rank), weights_only=False) for rank in range(world)]
    for result in results:
        assert not isinstance(result, str), result
    return results


def trained_with_and_without(rank: int, world: int) -> list[tuple]:
    """Of DDP and of FSDP, with bad batches on one rank and on all: weights with and without, and what was raised."""
    results = []
    for kind, ranks in itertools.product(KINDS, ((1,), tuple(range(world)))):
        bad = Bad(ranks, (2, 3))
        among, raised = train(kind, rank, 6, bad)
        never, none = train(kind, rank, 6, None, skip=bad.steps)
        assert not none
        results.append((bad.ranks, among, never, raised))
    return results


@pytest.mark.parametrize("world", (2, 4))
def test_all_ranks_raise_or_none(tmp_path, world):
    of_ranks = in_ranks(world, tmp_path, trained_with_and_without)
    for of_rank in of_ranks:
        assert len(of_rank) == 2 * len(KINDS)
        for (bad_ranks, among, never, raised), (_, of_first, _, _) in zip(of_rank, of_ranks[0]):
            expected = [(rank, [(rank,)], [100 + rank]) for rank in bad_ranks]
            assert [(step, reports) for step, reports, _ in raised] == [(2, expected), (3, expected)]
            text = raised[0][2]
            assert text.startswith(f"Target {100 + bad_ranks[0]} is out of bounds.") and f"rank {bad_ranks[0]}" in text
            for a, b, first in zip(among, never, of_first):
                assert torch.equal(a, b) and torch.equal(a, first)


def without_check(rank: int, world: int) -> tuple:
    gc.collect()
    gc.disable()
    nets: list[weakref.ref] = []
    told = stepped_without_check(rank, nets)
    return rank, told, nets[0]() is None


def stepped_without_check(rank: int, nets: list[weakref.ref]) -> str:
    """Nothing is raised between the forward and the step; there it is, on the rank alone."""
    net = wrapped("DDP")
    nets.append(weakref.ref(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, t = batch(rank, 0)
    t[0] += 50 * rank
    loss = lossguard.CrossEntropyLoss()(net(x), t)
    another = lossguard.CrossEntropyLoss()(net(x.detach()), batch(rank, 0)[1])
    (loss + another).backward()  # an all-reduce, which no rank is left alone in
    before = [p.detach().clone() for p in net.parameters()]
    try:
        optimizer.step()
    except LossValidationError as error:
        assert all(torch.equal(p, q) for p, q in zip(before, net.parameters()))
        return str(error)
    return "stepped"


def test_without_the_check_it_is_fatal_to_a_rank_and_says_so(tmp_path):
    (_, first, first_is_gone), (_, second, second_is_gone) = in_ranks(2, tmp_path, without_check)
    # The caught exception keeps no net alive: its process group's threads, running as Python ends, would abort it.
    assert first_is_gone and second_is_gone
    assert first == "stepped"
    assert second.startswith("Target 5") and "on this rank alone" in second
    assert "lossguard.distributed.check()" in second


def sharded_scaler(rank: int, world: int) -> tuple:
    """FSDP's own GradScaler, a subclass: nothing is unscaled of what is bad."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = ShardedGradScaler(device="cpu", init_scale=1024.0)
    told = []
    for step in range(3):
        x, t = batch(rank, step)
        t[0] += 50 if step == 1 else 0
        before = [p.detach().clone() for p in net.parameters()]
        scaler.scale(lossguard.CrossEntropyLoss()(net(x), t)).backward()
        try:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        except LossValidationError as error:
            told.append((step, error.report.rank, all(torch.equal(p, q) for p, q in zip(before, net.parameters()))))
        optimizer.zero_grad()
    return told, scaler.get_scale()


def test_a_sharded_scaler(tmp_path):
    assert in_ranks(2, tmp_path, sharded_scaler) == [([(1, rank, True)], 1024.0) for rank in range(2)]


def immediately(rank: int, world: int) -> tuple:
    x, t = batch(rank, 0)
    try:
        lossguard.functional.cross_entropy(torch.randn(16, C), t + 50 * rank, when="immediately")
    except LossValidationError:
        return ("raised",)
    return ("passed",)


def test_immediately_means_at_the_call(tmp_path):
    assert in_ranks(2, tmp_path, immediately) == [("passed",), ("raised",)]


def one_dies(rank: int, world: int) -> tuple:
    if rank == 1:
        os._exit(3)
    try:
        lossguard.distributed.check()
    except LossValidationError:
        return ("a violation",)
    except Exception as error:
        return ("an error", type(error).__name__)
    return ("nothing",)


def test_a_rank_that_dies_is_no_hang(tmp_path):
    with pytest.raises(Exception):  # noqa: B017
        torch.multiprocessing.spawn(run, (2, str(tmp_path), one_dies), nprocs=2)


def subgroups(rank: int, world: int) -> tuple:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    x, t = batch(rank, 0)
    lossguard.functional.cross_entropy(torch.randn(16, C), t + (50 if rank == 2 else 0))
    try:
        lossguard.distributed.check(groups[rank // 2])
    except LossValidationError as error:
        return rank, error.report.rank
    return rank, None


def test_a_group_of_some_ranks(tmp_path):
    assert in_ranks(4, tmp_path, subgroups) == [(0, None), (1, None), (2, 2), (3, 2)]


def test_without_a_process_group_it_is_check():
    lossguard.distributed.check()
    lossguard.functional.cross_entropy(torch.randn(2, C), torch.tensor([0, 9]), when="deferred")
    with pytest.raises(LossValidationError):
        lossguard.distributed.check()
    lossguard.distributed.check()
