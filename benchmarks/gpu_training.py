"""What deferred raising promises must hold on a GPU, in training and in CUDA graphs; the session runs it.

    python -m benchmarks.gpu_training [--dry-run]
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or matrix products differ from run to run

import torch
from torch import Tensor, nn

from .gpu_checks import Wrong, same_bits
from .gpu_device import Device, Records, import_lossguard, step_arguments, the_device

CLASSES, BATCH = 10, 64
BAD_STEPS = (2, 5, 6, 9)
STEPS = 12


class NeedsGpu(Exception):
    pass


class Training:
    """A small network; each step is interrupted by a bad batch, or changes the weights."""

    def __init__(self, lossguard: Any, device: Device, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.device = device
        self.net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, CLASSES)).to(device.name)
        self.optimizer = optimizer(self.net.parameters())
        self.loss = lossguard.CrossEntropyLoss(label_smoothing=0.1)
        self.error = lossguard.LossValidationError

    def step(self, x: Tensor, t: Tensor) -> None:
        self.loss(self.net(x), t).backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        states = [t for of_p in self.optimizer.state.values() for t in of_p.values() if isinstance(t, Tensor)]
        return [t.detach().clone() for t in (*self.net.parameters(), *states)]

    def train(self, with_bad: bool) -> tuple[list[Tensor], list[list[int]]]:
        """The state afterwards, and the values that were reported."""
        told = []
        for step in range(STEPS):
            x, t = batch(step)
            if step in BAD_STEPS:
                if not with_bad:
                    continue
                t[step] = 100 + step
            self.optimizer.zero_grad()
            try:
                self.step(x.to(self.device.name), t.to(self.device.name))
            except self.error as error:
                told += [report.values for report in error.reports]
        return self.state(), told


class Scaled(Training):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.scaler = torch.amp.GradScaler(self.device.name, init_scale=1024.0, growth_interval=3)

    def step(self, x: Tensor, t: Tensor) -> None:
        with torch.autocast(self.device.name, torch.bfloat16):
            loss = self.loss(self.net(x), t)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Compiled(Training):
    """Where there is a GPU, inductor puts the forward and the backward into CUDA graphs."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        options = {"mode": "reduce-overhead"} if self.device.name == "cuda" else {"backend": self.device.compiler}
        self.forward = torch.compile(lambda x, t: self.loss(self.net(x), t), **options)

    def step(self, x: Tensor, t: Tensor) -> None:
        self.forward(x, t).backward()
        self.optimizer.step()


class ForwardElsewhere(Training):
    """The forward on a thread that has an optimizer of its own, the backward and the step on the caller's.

    Torch runs the backward of a GPU's tensors on a thread of its own: whose it is comes with it.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.other = ThreadPoolExecutor(1)
        x, t = (tensor.to(self.device.name) for tensor in batch(0))
        self.other.submit(Training(*arguments).step, x, t).result(60)

    def step(self, x: Tensor, t: Tensor) -> None:
        self.other.submit(lambda: self.loss(self.net(x), t)).result(60).backward()
        self.optimizer.step()


class Embedding(Training):
    """Native losses and an embedding, both patched: the bad label is as well a bad id."""

    def __init__(self, lossguard: Any, device: Device, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(lossguard, device, optimizer)
        self.embedding = nn.Embedding(CLASSES, 32, device=device.name)
        self.optimizer = optimizer([*self.net.parameters(), *self.embedding.parameters()])
        self.patched = lossguard.patched

    def step(self, x: Tensor, t: Tensor) -> None:
        with self.patched(indexing=True):
            nn.functional.cross_entropy(self.net(x + self.embedding(t)), t.clamp(max=CLASSES - 1)).backward()
            self.optimizer.step()


def batch(step: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 32, generator=g), torch.randint(CLASSES, (BATCH,), generator=g)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def never_seen(make: Callable[[Any, Device], Training]) -> Callable[[Any, Device], None]:
    def check(lossguard: Any, device: Device) -> None:
        (among, told), (never, none) = (make(lossguard, device).train(with_bad) for with_bad in (True, False))
        expected = [[100 + step] for step in BAD_STEPS]
        if told != expected or none:
            raise Wrong(f"reported {told} instead of {expected}, and {none} of good batches")
        if not same_bits(tuple(among), tuple(never)):  # type: ignore[arg-type]
            raise Wrong("the weights are not those of a run that never saw the bad batches")

    return check


# ---- graphs


def expect(lossguard: Any, values: list[list[int]]) -> None:
    """That a check raises just these, as of a graph; or, of none, that it passes."""
    found: list[list[int]] = []
    try:
        lossguard.check()
    except lossguard.LossValidationError as error:
        found = [report.values for report in error.reports]
        if not all(report.captured for report in error.reports):
            raise Wrong("a report does not say that it is of a graph") from error
    if found != values:
        raise Wrong(f"reported {found} instead of {values}")


def loss_in_graph(lossguard: Any, device: Device) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Callable[[], None]]:
    """(input, target, what the graph computes from them, how it is replayed)."""
    x = torch.randn(BATCH, CLASSES, device=device.name, requires_grad=True)
    t = batch(0)[1].to(device.name)
    one = torch.ones((), device=device.name)

    def loss_and_gradient() -> tuple[Tensor, ...]:
        loss = lossguard.functional.cross_entropy(x, t)
        return loss, torch.autograd.grad(loss, x, one, retain_graph=True)[0], one

    kept, replay = device.capture(loss_and_gradient)
    return x, t, kept, replay


def replays(lossguard: Any, device: Device) -> None:
    x, t, (loss, gradient, one), replay = loss_in_graph(lossguard, device)
    for step in range(20):
        t.copy_(batch(step)[1])
        if step % 3 == 1:
            t[step] = 100 + step
        replay()
        if step % 3 == 1:
            expect(lossguard, [[100 + step]])
            if gradient[step].any():
                raise Wrong("a bad row has a gradient")
            continue
        expect(lossguard, [])
        expected = lossguard.functional.cross_entropy(x, t)
        if not same_bits((loss, gradient), (expected, torch.autograd.grad(expected, x, one)[0])):
            raise Wrong("other bits than those of a call")


def replays_at_once(lossguard: Any, device: Device) -> None:
    graphs = [loss_in_graph(lossguard, device) for _ in range(4)]
    for round_ in range(25):
        for i, (_, t, _, _) in enumerate(graphs):
            t[i] = 1000 * round_ + 100 + i
        device.synchronize()
        for _, _, _, replay in graphs:
            with device.side_stream():
                replay()
        device.synchronize()
        expect(lossguard, [[1000 * round_ + 100 + i] for i in range(len(graphs))])


def with_its_optimizer(lossguard: Any, device: Device) -> None:
    """The weights are the graph's own affair; the report comes after the replay, and the process goes on."""
    if device.name == "cpu":
        raise NeedsGpu("the emulator's graphs have the kernels of lossguard alone")
    training = Training(lossguard, device, lambda p: torch.optim.SGD(p, lr=0.1, foreach=True))
    x, t = (tensor.to(device.name) for tensor in batch(0))

    def step() -> Tensor:
        loss = training.loss(training.net(x), t)
        loss.backward()
        training.optimizer.step()
        return loss

    kept, replay = device.capture(step)
    lossguard.check()
    t[3] = 77
    replay()
    device.synchronize()
    expect(lossguard, [[77]])
    t[3] = 0
    replay()
    device.synchronize()
    expect(lossguard, [])
    del kept


CHECKS = {
    "SGD with momentum": never_seen(lambda *a: Training(*a, sgd)),
    "AdamW": never_seen(lambda *a: Training(*a, torch.optim.AdamW)),
    "fused AdamW": never_seen(lambda *a: Training(*a, fused)),
    "autocast, GradScaler and clipping": never_seen(lambda *a: Scaled(*a, sgd)),
    "a graph's replays": replays,
    "four graphs at once": replays_at_once,
    "a graph with its optimizer": with_its_optimizer,
    "the forward on another thread": never_seen(lambda *a: ForwardElsewhere(*a, sgd)),
    "bad ids of an embedding": never_seen(lambda *a: Embedding(*a, sgd)),
    "compiled, reduce-overhead": never_seen(lambda *a: Compiled(*a, sgd)),
}


def main() -> None:
    arguments = step_arguments(__doc__).parse_args()
    device, records = the_device(arguments.dry_run), Records(arguments.records)
    lossguard = import_lossguard(device)
    lossguard.configure(when="deferred")
    failed = 0
    for title, check in CHECKS.items():
        said, error = "holds", None
        try:
            check(lossguard, device)
        except NeedsGpu as why:
            said = f"not in a dry run: {why}"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            failed += 1
            with contextlib.suppress(Exception):
                lossguard.check()  # none of its reports is the next one's
        records.add(f"{title}: {error or said}", check=title, error=error, outcome=error or said)
    alive = device.alive()
    records.add(f"{failed} failed; afterwards the context is {'alive' if alive else 'DEAD'}", alive=alive)
    sys.exit(0 if alive and not failed else 1)


if __name__ == "__main__":
    main()
