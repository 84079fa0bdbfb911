"""On CUDA a loss does not wait for its kernel: what is wrong comes to light later, and in time.

On the emulator, whose events are held back: a launch is not known to be over until somebody waits for it, as it would
be on a GPU that has much to do. On a GPU the same is in benchmarks/gpu_checks.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lossguard
import lossguard.functional as F
import pytest
import torch
from cuda_support import EMULATED, emulator
from lossguard import _C, LossValidationError, TargetOutOfBoundsError
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(not EMULATED, reason="runs on the CUDA emulator: `make test-emulated`")

C = 5


@pytest.fixture(autouse=True)
def deferred_and_held() -> Iterator[None]:
    before = lossguard.policy()["when"]
    lossguard.configure(when="deferred")
    forget()
    lossguard.reset_stats()
    emulator().hold_events(True)
    yield
    emulator().hold_events(False)
    forget()
    lossguard.configure(when=before)


def environment() -> dict[str, str]:
    """For a process with this build."""
    return {**os.environ, "PYTHONPATH": str(Path(_C.__file__).parent.parent)}


def forget() -> None:
    with contextlib.suppress(LossValidationError):
        lossguard.check()


def batch(seed: int, n: int = 32) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=g), torch.randint(C, (n,), generator=g)


def bad(seed: int, label: int = 97, at: int = 3) -> tuple[Tensor, Tensor]:
    x, t = batch(seed)
    t[at] = label
    return x, t


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, C))


def snapshot(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights, momenta and step counters."""
    state = [t for of_p in optimizer.state.values() for t in of_p.values() if isinstance(t, Tensor)]
    return [t.detach().clone() for t in (*net.parameters(), *state)]


def assert_same(a: list[Tensor], b: list[Tensor]) -> None:
    assert len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b))


BLOCKING = (
    *("cudaDeviceSynchronize", "cudaEventSynchronize", "cudaFree", "cudaHostAlloc", "cudaMalloc", "cudaMemcpy"),
    *("cudaMemset", "cudaMemsetAsync", "cudaMemcpyAsync", "cudaStreamCreateWithFlags", "cudaStreamDestroy"),
    "cudaStreamSynchronize",
)


def calls_of(function: Callable[[], object]) -> dict[str, int]:
    """What `function` calls of the CUDA runtime."""
    before = _C.runtime_calls()
    function()
    return {name: n - before[name] for name, n in _C.runtime_calls().items() if n != before[name]}


# ---- where it comes to light


def test_the_loss_and_its_backward_do_not_wait():
    net, (x, t) = model(), bad(1)
    loss = F.cross_entropy(net(x), t)
    loss.backward()
    assert loss.isnan()
    with pytest.raises(TargetOutOfBoundsError):
        lossguard.check()


def test_a_good_step_waits_once_and_for_nothing_else():
    net, (x, t) = model(), batch(1)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        optimizer.zero_grad()
        logits = net(x)
        (F.cross_entropy(logits, t) + F.nll_loss(logits.log_softmax(1), t)).backward()
        optimizer.step()

    step()
    calls = calls_of(step)
    assert {name: n for name, n in calls.items() if name in BLOCKING} == {"cudaEventSynchronize": 1}
    assert calls["cudaLaunchKernelEx"] == 4 and calls["cudaEventRecord"] == 2
    assert set(_C.runtime_calls()) >= {"cudaEventSynchronize", "cudaStreamSynchronize", "cudaMalloc"}


def test_an_evaluation_never_waits():
    net, (x, t) = model(), batch(1)

    def evaluate() -> None:
        for no_gradients in (torch.no_grad, torch.inference_mode):
            with no_gradients():
                for _ in range(100):
                    F.cross_entropy(net(x), t)

    evaluate()
    lossguard.check()  # or the second would need slots of its own
    assert not set(calls_of(evaluate)) & set(BLOCKING)
    # Nor does an optimizer wait for what has no gradients.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    assert not set(calls_of(optimizer.step)) & set(BLOCKING)


def test_an_optimizer_with_nothing_pending_calls_nothing():
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    assert calls_of(optimizer.step) == {}


def test_the_next_call():
    net, (x, t) = model(), bad(1)
    F.cross_entropy(net(x), t)
    F.cross_entropy(net(x), batch(1)[1])  # not known yet
    emulator().hold_events(False)
    with pytest.raises(TargetOutOfBoundsError) as caught:
        F.binary_cross_entropy(torch.rand(3), torch.rand(3))
    assert caught.value.report.values == [97]
    F.binary_cross_entropy(torch.rand(3), torch.rand(3))


def test_the_next_backward():
    net, (x, t) = model(), bad(1)
    good = F.cross_entropy(net(x), batch(1)[1])
    F.cross_entropy(net(x), t)
    emulator().hold_events(False)
    with pytest.raises(TargetOutOfBoundsError):
        good.backward()
    good.backward()


def test_a_backward_that_is_to_be_differentiated_again():
    x, t = bad(1)
    x = torch.randn(32, C, requires_grad=True)
    good = F.cross_entropy(x, batch(1)[1])
    F.cross_entropy(x, t)
    emulator().hold_events(False)
    with pytest.raises(TargetOutOfBoundsError):
        torch.autograd.grad(good, x, create_graph=True)


def test_check_without_waiting():
    net, (x, t) = model(), bad(1)
    F.cross_entropy(net(x), t)
    lossguard.check(wait=False)
    with pytest.raises(TargetOutOfBoundsError):
        lossguard.check()
    lossguard.check()


def test_leaving_a_guard():
    net, (x, t) = model(), bad(1)
    with pytest.raises(TargetOutOfBoundsError), lossguard.guard(strict=False):
        F.cross_entropy(net(x), t)
        inside = True
    assert inside
    with pytest.raises(KeyError), lossguard.guard(strict=False):  # the exception under way goes first
        F.cross_entropy(net(x), t)
        raise KeyError
    with pytest.raises(TargetOutOfBoundsError):
        lossguard.check()


def test_the_end_of_the_program():
    program = textwrap.dedent(
        """
        import lossguard, torch
        lossguard.configure(when="deferred")
        lossguard.CrossEntropyLoss()(torch.randn(4, 3), torch.tensor([0, 1, 2, 3]))
        print("done")
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert run.stdout == "done\n" and run.returncode == 0
    assert "found as the program ended" in run.stderr and "Target 3 is out of bounds" in run.stderr


def test_immediately():
    net, (x, t) = model(), bad(1)
    with pytest.raises(TargetOutOfBoundsError):
        F.cross_entropy(net(x), t, when="immediately")
    with pytest.raises(TargetOutOfBoundsError), lossguard.guard(when="immediately"):
        F.cross_entropy(net(x), t)
    with pytest.raises(TargetOutOfBoundsError):
        lossguard.CrossEntropyLoss(when="immediately")(net(x), t)
    for wrong in ("later", True):
        with pytest.raises(ValueError, match="when must be"):
            F.cross_entropy(net(x), t, when=wrong)


# ---- before the weights


def sgd(p):
    return torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)


OPTIMIZERS = {
    "SGD": sgd,
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
GOOD = [batch(i) for i in range(6)]
AMONG = [bad(90), GOOD[0], GOOD[1], bad(91, -1), bad(92, 255, 31), *GOOD[2:], bad(93)]


class Training:
    """Steps that an exception may interrupt; then nothing has changed."""

    def __init__(self, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.net = model()
        self.optimizer = make_optimizer(self.net.parameters())
        self.criterion = lossguard.CrossEntropyLoss(label_smoothing=0.1)
        self.caught = 0

    def step(self, x: Tensor, t: Tensor) -> None:
        self.optimizer.zero_grad()
        self.criterion(self.net(x), t).backward()
        self.optimizer.step()

    def state(self) -> list[Tensor]:
        return snapshot(self.net, self.optimizer)

    def train(self, batches: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        for x, t in batches:
            before = self.state()
            try:
                self.step(x, t)
            except LossValidationError as error:
                assert error.report.indices[0][0] in (3, 31) and len(error.reports) == 1
                self.caught += 1
                assert_same(before, self.state())
                assert not before or len(before) == len(self.state())
            else:
                assert not all(torch.equal(a, b) for a, b in zip(before, self.state()))
        return self.state()


def check_training(make: Callable[[], Training]) -> None:
    never, among = make(), make()
    expected = never.train(GOOD)
    assert_same(expected, among.train(AMONG))
    assert (never.caught, among.caught) == (0, 4)


@optimizers
def test_no_bad_batch_reaches_an_optimizer(optimizer):
    check_training(lambda: Training(optimizer))


@optimizers
def test_nor_through_a_closure(optimizer):
    class Closure(Training):
        def step(self, x, t):
            def closure():
                self.optimizer.zero_grad()
                loss = self.criterion(self.net(x), t)
                loss.backward()
                return loss

            if self.keyword:
                self.optimizer.step(closure=closure)
            else:
                self.optimizer.step(closure)

    for Closure.keyword in (False, True):
        check_training(lambda: Closure(optimizer))


def test_nor_lbfgs():
    class LBFGS(Training):
        def step(self, x, t):
            def closure():
                self.optimizer.zero_grad()
                loss = self.criterion(self.net(x), t)
                loss.backward()
                return loss

            self.optimizer.step(closure)

        def state(self):
            return [p.detach().clone() for p in self.net.parameters()]

    check_training(lambda: LBFGS(lambda p: torch.optim.LBFGS(p, max_iter=3)))


@optimizers
@pytest.mark.parametrize("clip", (False, True))
def test_nor_through_a_grad_scaler(optimizer, clip):
    class Scaled(Training):
        def __init__(self, *args):
            super().__init__(*args)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

        def step(self, x, t):
            self.optimizer.zero_grad()
            scale = self.scaler.get_scale()
            self.scaler.scale(self.criterion(self.net(x), t)).backward()
            self.expected = scale
            if clip:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()

        def state(self):
            scaler = self.scaler.state_dict()
            return [*super().state(), torch.tensor([scaler["scale"], scaler["_growth_tracker"]])]

    check_training(lambda: Scaled(optimizer))


def test_nor_through_a_scaler_with_methods_of_its_own():
    """Like FSDP's."""
    unscaled = []

    class Own(torch.amp.GradScaler):
        def unscale_(self, optimizer):
            unscaled.append(optimizer)
            super().unscale_(optimizer)

    net, (x, t) = model(), bad(1)
    optimizer, scaler = sgd(net.parameters()), Own("cpu")
    scaler.scale(F.cross_entropy(net(x), t)).backward()
    with pytest.raises(TargetOutOfBoundsError):
        scaler.unscale_(optimizer)
    assert not unscaled


@pytest.mark.parametrize("options", ({"backend": "aot_eager"}, {"mode": "reduce-overhead"}), ids=str)
def test_nor_through_a_compiled_step(options):
    class Compiled(Training):
        def __init__(self, *args):
            super().__init__(*args)
            self.compiled = torch.compile(super().step, **options)

        def step(self, x, t):
            self.compiled(x, t)

    torch._dynamo.reset()
    check_training(lambda: Compiled(sgd))


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_nor_through_activation_checkpointing(use_reentrant):
    class Checkpointed(Training):
        def step(self, x, t):
            self.optimizer.zero_grad()
            x.requires_grad_()
            loss = torch.utils.checkpoint.checkpoint(
                lambda x, t: self.criterion(self.net(x), t), x, t, use_reentrant=use_reentrant
            )
            loss.backward()
            self.optimizer.step()

    check_training(lambda: Checkpointed(sgd))


def test_nor_through_a_graph_that_is_retained():
    class Retained(Training):
        def step(self, x, t):
            self.optimizer.zero_grad()
            loss = self.criterion(self.net(x), t)
            loss.backward(retain_graph=True)
            loss.backward()
            self.optimizer.step()

    check_training(lambda: Retained(sgd))


def test_nor_through_a_double_backward():
    class Penalised(Training):
        def step(self, x, t):
            self.optimizer.zero_grad()
            x = x.clone().requires_grad_()
            loss = self.criterion(self.net(x), t)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + gradient.square().sum()).backward()
            self.optimizer.step()

    check_training(lambda: Penalised(sgd))


def test_accumulated_gradients():
    """The window with the bad batch is dropped whole."""

    class Accumulating(Training):
        def step(self, x, t):
            self.optimizer.zero_grad()
            for inputs, labels in ((x, t), GOOD[0], GOOD[1]):
                (self.criterion(self.net(inputs), labels) / 3).backward()
            self.optimizer.step()

    check_training(lambda: Accumulating(sgd))


def test_several_optimizers():
    class Two(Training):
        def step(self, x, t):
            self.optimizer.zero_grad()
            self.criterion(self.net(x), t).backward()
            for optimizer in self.halves:
                optimizer.step()

        def __init__(self, *args):
            super().__init__(*args)
            p = [*self.net.parameters()]
            self.halves = [sgd(p[:2]), torch.optim.AdamW(p[2:])]

        def state(self):
            return [t for optimizer in self.halves for t in snapshot(self.net, optimizer)]

    check_training(lambda: Two(sgd))


def test_a_loop_of_lightning():
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.criterion = model(), lossguard.CrossEntropyLoss()

        def training_step(self, data, _):
            return self.criterion(self.net(data[0]), data[1])

        def configure_optimizers(self):
            return sgd(self.parameters())

    def fit(batches):
        module = Module()
        trainer = lightning.Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
            except LossValidationError as error:
                return snapshot(module, trainer.optimizers[0]), error
        return snapshot(module, trainer.optimizers[0]), None

    expected, none = fit(GOOD[:3])
    got, error = fit([*GOOD[:3], bad(9), *GOOD])
    assert none is None and error.report.values == [97]
    assert error.report.call_site.source == "return self.criterion(self.net(data[0]), data[1])"
    assert_same(expected, got)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")

    class Accelerated(Training):
        def __init__(self, *args):
            super().__init__(*args)
            self.accelerator = accelerate.Accelerator(cpu=True)
            self.net, self.optimizer = self.accelerator.prepare(self.net, self.optimizer)

        def step(self, x, t):
            self.optimizer.zero_grad()
            self.accelerator.backward(self.criterion(self.net(x), t))
            self.accelerator.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()

    check_training(lambda: Accelerated(sgd))


# ---- what it says


def test_the_call_site_is_the_forwards_and_the_traceback_shows_both():
    net = model()
    optimizer = sgd(net.parameters())
    x, t = bad(1)
    loss = F.cross_entropy(net(x), t)  # the forward
    loss.backward()
    with pytest.raises(TargetOutOfBoundsError) as caught:
        optimizer.step()  # where it comes to light
    site = caught.value.report.call_site
    assert (site.file, site.source) == (__file__, "loss = F.cross_entropy(net(x), t)  # the forward")
    assert f"test_deferred.py:{site.line} in test_the_call_site" in str(caught.value)
    text = "".join(traceback.format_exception(caught.value))
    forward, cause = text.index("# the forward"), text.index("The above exception was the direct cause")
    assert forward < cause < text.index("# where it comes to light")
    assert f'line {site.line}, in test_the_call_site' in text[:cause] and "LossCall" in text[:cause]


def test_the_call_site_under_compile():
    net, (x, t) = model(), bad(1)

    def loss_of(x, t):
        return F.cross_entropy(net(x), t)  # in the graph

    torch._dynamo.reset()
    torch.compile(loss_of, backend="aot_eager", fullgraph=True)(x, t)
    with pytest.raises(TargetOutOfBoundsError) as caught:
        lossguard.check()
    assert caught.value.report.call_site.source == "return F.cross_entropy(net(x), t)  # in the graph"


def test_a_pending_launch_keeps_no_frame_alive():
    class Local:
        pass

    def step() -> weakref.ref:
        local = Local()
        local.activations = torch.zeros(10)
        F.cross_entropy(torch.randn(4, 3), torch.tensor([0, 1, 2, 9]))
        return weakref.ref(local)

    gc.disable()
    try:
        reference = step()
        assert reference() is None
    finally:
        gc.enable()
    with pytest.raises(TargetOutOfBoundsError):
        lossguard.check()


def test_the_sample_of_a_vmap():
    x, t = torch.randn(4, 3), torch.tensor([0, 1, 7, 2])
    torch.func.vmap(lambda x, t: F.cross_entropy(x, t))(x, t)
    with pytest.raises(TargetOutOfBoundsError) as caught:
        lossguard.check()
    assert caught.value.report.vmap == (2,)
    assert caught.value.report.call_site.file == __file__


def test_several_failures_come_in_one_exception():
    net = model()
    for label in (50, 60, 70):
        F.cross_entropy(net(batch(1)[0]), bad(1, label)[1])
    F.binary_cross_entropy(torch.tensor([0.5, 2.0]), torch.tensor([0.5, 0.5]))
    with pytest.raises(TargetOutOfBoundsError) as caught:
        lossguard.check()
    assert [r.values for r in caught.value.reports] == [[50], [60], [70], [2.0]]
    text = str(caught.value)
    assert text.startswith("Target 50 is out of bounds.") and len(text) < 4000
    for line in ("and: Target 60 is out of bounds.", "and: Target 70 is", "and: all elements of input should be"):
        assert line in text
    assert text.count("called at") == 4
    again = copy.copy(caught.value)
    assert str(again) == text and len(again.reports) == 4


def test_fifty_failures_are_readable():
    for label in range(50):
        F.cross_entropy(torch.randn(32, C), bad(1, 100 + label)[1])
    with pytest.raises(TargetOutOfBoundsError) as caught:
        lossguard.check()
    assert [r.values for r in caught.value.reports] == [[100 + i] for i in range(50)]
    assert len(str(caught.value)) < 4000 and "and 44 calls more" in str(caught.value)


def test_nothing_sticks():
    for label in (6, 7):
        F.cross_entropy(*[torch.randn(32, C), bad(1, label)[1]])
        with pytest.raises(TargetOutOfBoundsError) as caught:
            lossguard.check()
        assert caught.value.report.values == [label] and len(caught.value.reports) == 1
        lossguard.check()


TOO_MANY = """
import ctypes, lossguard, torch
ctypes.CDLL(lossguard._C.__file__).lossguard_emulator_hold_events(1)
lossguard.configure(when="deferred")
lossguard._C.limit_slots(100)
for i in range(300):
    with torch.no_grad():
        lossguard.functional.cross_entropy(torch.zeros(4, 3), torch.tensor([0, 1, 2, 3 + i]), when="deferred")
try:
    lossguard.check()
except IndexError as error:
    print([r.values for r in error.reports] == [[3 + i] for i in range(len(error.reports))])
    print(len(error.reports), str(error).splitlines()[-1])
lossguard.check()
"""


def test_more_launches_than_slots():
    """None is overwritten: the first are reported, the others counted. In a process that has few slots yet."""
    run = subprocess.run([sys.executable, "-c", TOO_MANY], capture_output=True, text=True, env=environment())
    in_order, counted = run.stdout.splitlines()
    reported, _, lost = counted.partition(" ")
    assert in_order == "True" and 95 <= int(reported) <= 100, run.stderr
    assert lost.startswith(f"{300 - int(reported)} calls failed their checks whose reports were lost")


def test_a_callback_that_fails_does_not_hide_the_violation(caplog):
    def fails(report):
        raise OSError("the disk is full")

    lossguard.on_report(fails)
    try:
        F.cross_entropy(torch.randn(32, C), bad(1)[1])
        with pytest.raises(TargetOutOfBoundsError):
            lossguard.check()
    finally:
        lossguard.off_report(fails)
    assert "the disk is full" in caplog.text


# ---- skip, warn, count


def ignored(t: Tensor) -> Tensor:
    return torch.where((t < 0) | (t >= C), torch.full_like(t, -100), t)


@pytest.mark.parametrize("action", ("skip", "warn"))
def test_bad_elements_count_as_ignored(action):
    x, t = torch.randn(32, C), bad(1)[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = F.cross_entropy(x, t, on_violation=action)
        assert torch.equal(got, F.cross_entropy(x, ignored(t)))
        lossguard.check()
    said = [w for w in caught if issubclass(w.category, lossguard.LossValidationWarning)]
    assert len(said) == (action == "warn")
    if said:
        assert said[0].filename == __file__ and said[0].message.report.values == [97]


def test_stats():
    x, good, wrong = torch.randn(32, C), batch(1)[1], bad(1)[1]
    for t in (good, wrong, wrong):
        F.cross_entropy(x, t, on_violation="skip")
    F.binary_cross_entropy(torch.rand(3, 2), torch.rand(3, 2))
    (name, before), _ = sorted(lossguard.stats().items(), key=lambda item: item[1].loss, reverse=True)
    assert (before.calls, before.elements, before.bad_calls, before.violations) == (3, 96, 0, 0)
    lossguard.check()
    after = lossguard.stats()
    assert after[name].violations == after[name].bad_calls == 2 and after[name].last_bad > 0
    assert name.endswith("CrossEntropyLoss") and f"test_deferred.py:{before.call_site.line} " in name
    (bce,) = (s for s in after.values() if s.loss == "BCELoss")
    assert (bce.calls, bce.elements, bce.violations, bce.last_bad) == (1, 6, 0, None)
    lossguard.reset_stats()
    assert lossguard.stats() == {}


def test_on_report():
    seen = []
    assert lossguard.on_report(seen.append) == seen.append
    try:
        for action in ("skip", "warn", "raise"):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                F.cross_entropy(torch.randn(32, C), bad(1)[1], on_violation=action)
                with contextlib.suppress(LossValidationError):
                    lossguard.check()
        assert [r.values for r in seen] == [[97]] * 3
    finally:
        lossguard.off_report(seen.append)
    with pytest.raises(ValueError, match="was not given to on_report"):
        lossguard.off_report(seen.append)
    with pytest.raises(TypeError, match="a function of one report, got None"):
        lossguard.on_report(None)


# ---- streams, devices, threads, processes, graphs


@contextlib.contextmanager
def on(device: int = 0, stream: int = 0) -> Iterator[None]:
    _C.emulate_on(device, stream)
    try:
        yield
    finally:
        _C.emulate_on(0, 0)


def test_streams_and_devices():
    net = model()
    optimizer = sgd(net.parameters())
    places = [(device, emulator().create_stream(device)) for device in (0, 0, 1, 1)]
    for step in range(5):
        losses = []
        for i, (device, stream) in enumerate(places):
            with on(device, stream):
                x, t = bad(1, 60 + i) if step == i + 1 else batch(step)
                losses.append(F.cross_entropy(net(x), t))
        torch.stack(losses).sum().backward()
        before = snapshot(net, optimizer)
        if step == 0:
            optimizer.step()
            continue
        with pytest.raises(TargetOutOfBoundsError) as caught:
            optimizer.step()
        assert caught.value.report.values == [59 + step]
        assert_same(before, snapshot(net, optimizer))


def test_a_side_stream_that_is_not_part_of_the_step_is_not_waited_for():
    net, (x, t) = model(), batch(1)
    optimizer = sgd(net.parameters())
    before = _C.pending()
    with on(stream=emulator().create_stream(0)), torch.no_grad():
        F.cross_entropy(net(x), t)
    F.cross_entropy(net(x), t).backward()
    assert calls_of(optimizer.step)["cudaEventSynchronize"] == 1
    assert _C.pending() == before + 1


def test_eight_threads_with_optimizers_of_their_own():
    """Each is told of its own batches, of all of them, and of nobody else's once it has stepped."""
    numbers = range(8)

    def batches(number: int, without: bool = False) -> list[tuple[Tensor, Tensor]]:
        everything = [bad(i, 1000 * number + 100 + i) if i % 3 == number % 3 else batch(i) for i in range(1, 31)]
        return [batch(0), *(b for b in everything if not (without and b[1].max() >= C))]

    trainings, alone = [Training(sgd) for _ in numbers], [Training(sgd) for _ in numbers]
    first_steps, started = threading.Barrier(8), threading.Barrier(8)

    def run(number: int) -> list[int]:
        told = []
        for i, (x, t) in enumerate(batches(number)):
            if i == 0:
                started.wait(60)
            try:
                trainings[number].step(x, t)
            except LossValidationError as error:
                told += [r.values[0] for r in error.reports]
            if i == 0:
                first_steps.wait(60)
        return told

    emulator().hold_events(False)
    with ThreadPoolExecutor(8) as pool:
        for number, told in zip(numbers, pool.map(run, numbers)):
            assert told == [1000 * number + 100 + i for i in range(1, 31) if i % 3 == number % 3]
            assert_same(trainings[number].state(), alone[number].train(batches(number, without=True)))


def test_what_another_thread_was_told_of_is_not_stepped_on():
    """A thread that has never stepped is not known to have an optimizer: another may be told. So is it, at its step."""
    training = Training(sgd)
    before = training.state()
    launched, told = threading.Event(), threading.Event()

    def work() -> str:
        x, t = bad(1)
        training.criterion(training.net(x), t).backward()
        launched.set()
        told.wait(60)
        try:
            training.optimizer.step()
        except TargetOutOfBoundsError as error:
            return str(error)
        return "stepped"

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(work)
        launched.wait(60)
        emulator().hold_events(False)
        with pytest.raises(TargetOutOfBoundsError, match="Target 97"):
            F.cross_entropy(*[torch.randn(32, C), batch(1)[1]])
        told.set()
        assert result.result(60).startswith("Target 97 is out of bounds")
    assert_same(before, training.state())


class Workers:
    """Threads that do as they are told, one thing at a time."""

    def __enter__(self) -> Workers:
        self.pools = {}
        emulator().hold_events(False)
        return self

    def __exit__(self, *_) -> None:
        for pool in self.pools.values():
            pool.shutdown()

    def in_thread(self, name: str, work: Callable[[], object]) -> object:
        if name == "main":
            return work()
        return self.pools.setdefault(name, ThreadPoolExecutor(1)).submit(work).result(60)


@pytest.mark.parametrize("watched", (True, False), ids=("", "unwatched"))
@pytest.mark.parametrize("forward, backward, step", list(itertools.product(("main", "A", "B"), repeat=3)))
def test_a_step_spread_over_threads(monkeypatch, forward, backward, step, watched):
    """Whichever threads run the forward, the backward and the step, and have run them before: never a bad step."""
    if not watched:  # as where torch does not go through `torch.autograd`, or has changed its inside
        run = torch.autograd.graph._engine_run_backward
        monkeypatch.setattr(torch.autograd, "_engine_run_backward", getattr(run, "__wrapped__", run))
    with Workers() as workers:
        training = Training(sgd)
        optimizer = training.optimizer

        def loss_of(x: Tensor, t: Tensor) -> Tensor:
            return workers.in_thread(forward, lambda: training.criterion(training.net(x), t))

        def stepped_in(thread: str, loss: Tensor) -> None:
            workers.in_thread(backward, loss.backward)
            workers.in_thread(thread, optimizer.step)
            optimizer.zero_grad()

        for i, thread in enumerate(("main", "A", "B", step)):  # all of them have stepped
            stepped_in(thread, loss_of(*batch(i)))
        for i in range(3):
            before = training.state()
            with pytest.raises(TargetOutOfBoundsError, match=f"Target {77 + i} is"):
                stepped_in(step, loss_of(*bad(i, 77 + i)))
            optimizer.zero_grad()
            assert_same(before, training.state())
            for thread in (step, "main", "A", "B"):  # nobody is told of it again at this optimizer's step
                stepped_in(thread, loss_of(*batch(i)))


def test_a_thread_that_first_steps_on_the_gradients_of_another():
    """The forward in one that has optimizers; the backward and the step in one that never had to do with any."""
    with Workers() as workers:
        others, training = Training(sgd), Training(sgd)
        workers.in_thread("A", lambda: others.step(*batch(0)))
        loss = workers.in_thread("A", lambda: training.criterion(training.net(bad(1)[0]), bad(1)[1]))
        before = training.state()

        def backward_and_step() -> None:
            loss.backward()
            training.optimizer.step()

        with pytest.raises(TargetOutOfBoundsError):
            workers.in_thread("B", backward_and_step)
        assert_same(before, training.state())
        workers.in_thread("A", lambda: others.step(*batch(2)))  # is not told of what is not its own


def test_the_backward_says_whose_gradients_they_are():
    """The forward in a thread with an optimizer of its own, backward and step in another that has long had one."""
    with Workers() as workers:
        others, training = Training(sgd), Training(sgd)
        for i in range(2):
            training.step(*batch(i))
            workers.in_thread("A", functools.partial(others.step, *batch(i)))
        for i in range(3):
            before = training.state()
            loss = workers.in_thread("A", lambda: training.criterion(training.net(bad(1)[0]), bad(1)[1]))
            with pytest.raises(TargetOutOfBoundsError):
                loss.backward()
                training.optimizer.step()
            training.optimizer.zero_grad()
            assert_same(before, training.state())
            training.step(*batch(i))
            workers.in_thread("A", functools.partial(others.step, *batch(i)))


def test_a_thread_does_not_hear_of_what_another_trains():
    """Both have optimizers, and gradients of their own, when one of them steps."""
    with Workers() as workers:
        trainings = {name: Training(sgd) for name in "AB"}
        for name in "ABAB":
            workers.in_thread(name, functools.partial(trainings[name].step, *batch(0)))
        workers.in_thread("A", lambda: trainings["A"].criterion(trainings["A"].net(bad(1)[0]), bad(1)[1]).backward())
        workers.in_thread("B", lambda: trainings["B"].step(*batch(1)))
        before = trainings["A"].state()
        with pytest.raises(TargetOutOfBoundsError):
            workers.in_thread("A", trainings["A"].optimizer.step)
        assert_same(before, trainings["A"].state())
        workers.in_thread("B", lambda: trainings["B"].step(*batch(2)))


def test_an_evaluation_is_not_blamed_on_the_training():
    """Without gradients nobody can step on it: its own thread is told, at its next call."""
    with Workers() as workers:
        training = Training(sgd)
        training.step(*batch(0))

        def evaluate(x: Tensor, t: Tensor) -> None:
            with torch.no_grad():
                training.criterion(training.net(x), t)

        workers.in_thread("evaluation", functools.partial(evaluate, *bad(1)))
        for i in range(3):
            training.step(*batch(i))
        with pytest.raises(TargetOutOfBoundsError):
            workers.in_thread("evaluation", functools.partial(evaluate, *batch(1)))


def test_what_two_are_told_of_counts_once():
    seen = []
    lossguard.on_report(seen.append)
    try:
        with Workers() as workers:
            shared, own = Training(sgd), Training(sgd)
            shared.step(*batch(0))
            workers.in_thread("A", lambda: own.criterion(own.net(bad(1)[0]), bad(1)[1]).backward())
            with pytest.raises(TargetOutOfBoundsError):  # A is not known to step
                shared.step(*batch(1))
            with pytest.raises(TargetOutOfBoundsError):
                workers.in_thread("A", own.optimizer.step)
    finally:
        lossguard.off_report(seen.append)
    assert len(seen) == 1
    assert sum(s.violations for s in lossguard.stats().values()) == 1


def test_the_backward_of_a_backward_is_its_callers():
    """The thread that torch is told of is the one that called, however deep, and is forgotten after it."""
    _pending = lossguard._pending
    with Workers() as workers:
        Training(sgd).step(*batch(0))  # two threads, whichever tests came before
        workers.in_thread("A", lambda: Training(sgd).step(*batch(0)))
        seen = []

        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                seen.append(_pending._thread_of_backward() is not None)
                with torch.enable_grad():
                    x = grad.detach().clone().requires_grad_()
                    x.register_hook(lambda g: seen.append(_pending._thread_of_backward() is not None))
                    (x * x).sum().backward()
                seen.append(_pending._thread_of_backward() is not None)
                return grad

        Inner.apply(torch.ones(3, requires_grad=True)).sum().backward()
        assert seen == [True] * 3
        if hasattr(torch._C, "_remove_obj_from_tls"):
            assert _pending._thread_of_backward() is None


def test_replicas_in_threads():
    """As in DataParallel: forwards in threads of their own, one backward, one step."""
    net = model()
    optimizer = sgd(net.parameters())

    def forward(i: int) -> Tensor:
        x, t = bad(i, 66) if i == 2 else batch(i)
        with on(device=i % 2):
            return F.cross_entropy(net(x), t)

    for device in range(2):  # the first use of a device waits for it, and may bring news from others
        with on(device):
            F.cross_entropy(net(batch(0)[0]), batch(0)[1])
    lossguard.check()
    losses = [None] * 4
    threads = [threading.Thread(target=lambda i=i: losses.__setitem__(i, forward(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = snapshot(net, optimizer)
    with pytest.raises(TargetOutOfBoundsError, match="Target 66"):
        torch.stack(losses).mean().backward()
        optimizer.step()
    assert_same(before, snapshot(net, optimizer))


FORK = """
import os, sys, torch, lossguard
lossguard.configure(when="deferred")
loss = lossguard.CrossEntropyLoss()
x = torch.randn(4, 3)
loss(x, torch.tensor([0, 1, 2, 7]))           # pending in the parent
child = os.fork()
if child == 0:
    try:
        loss(x, torch.tensor([0, 1, 2, 0]))
    except RuntimeError as error:
        print("child:", error, flush=True)
    lossguard.check()
    torch.optim.SGD([x], lr=0.1).step()
    os._exit(0)
print("status", os.waitpid(child, 0)[1], flush=True)
try:
    lossguard.check()
except IndexError as error:
    print("parent:", str(error).splitlines()[0])
"""


def test_a_forked_child_says_what_to_do_and_the_parent_goes_on():
    run = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, env=environment(), timeout=100)
    child, status, parent = run.stdout.splitlines()
    assert "was forked from one that had used CUDA" in child and "spawn" in child, run.stderr
    assert status == "status 0" and parent.startswith("parent: Target 7 is out of bounds")


SPAWN = """
import multiprocessing, torch, lossguard
import lossguard.functional as F

def train(label, answers):
    w = torch.zeros(5, requires_grad=True)
    F.cross_entropy(w.expand(4, 5), torch.tensor([0, 1, 2, label])).backward()
    try:
        torch.optim.SGD([w], lr=0.1).step()
    except IndexError as error:
        answers.put((error.report.values, w.any().item()))

if __name__ == "__main__":
    lossguard.configure(when="deferred")
    F.cross_entropy(torch.randn(4, 5), torch.tensor([0, 1, 2, 7]))  # pending in the parent
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=train, args=(66, answers))
    child.start()
    print(answers.get(timeout=100))
    child.join(100)
    try:
        lossguard.check()
    except IndexError as error:
        print(error.report.values, child.exitcode)
"""


def test_a_spawned_child_trains_on_its_own(tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=200,
        env={**environment(), "LOSSGUARD_WHEN": "deferred"},
    )  # fmt: skip
    assert run.stdout.splitlines() == ["([66], False)", "[7] 0"], run.stderr


class Exported(nn.Module):
    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(x, t)


def test_an_exported_program(tmp_path):
    """Also compiled ahead of time: what it finds comes to light in Python all the same."""
    x, (_, t) = torch.randn(32, C), batch(1)
    program = torch.export.export(Exported(), (x, t))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "loss.pt2"))
    for run in (program.module(), torch._inductor.aoti_load_package(package)):
        assert torch.equal(run(x, t), F.cross_entropy(x, t))
        lossguard.check()
        assert run(x, bad(1)[1]).isnan()
        with pytest.raises(TargetOutOfBoundsError) as caught:
            lossguard.check()
        assert caught.value.report.values == [97]


# The emulator's graphs have the kernels of lossguard alone: what torch computes while one is recorded, is not in it.


class Graph:
    """`function`, recorded. What it returns is kept: a replay writes there."""

    def __init__(self, function: Callable[[], object]) -> None:
        stream = emulator().create_stream(0)
        emulator().begin_capture(stream)
        try:
            with on(stream=stream):
                self.kept = function()
        finally:
            self.graph = emulator().end_capture(stream)
        assert self.graph, "the capture was spoiled"

    def replay(self, stream: int = 0) -> None:
        emulator().replay(self.graph, stream)

    def __del__(self) -> None:
        emulator().destroy_graph(self.graph)


def loss_and_gradient(x: Tensor, t: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(x, t, **options)
    one = torch.ones(())
    return loss, torch.autograd.grad(loss, x, one, retain_graph=True)[0], one


def test_a_graph():
    """Each replay is checked, and its results are those of a call; a report says that it is of a graph."""
    x, t = torch.randn(32, C, requires_grad=True), batch(1)[1]
    graph = Graph(lambda: loss_and_gradient(x, t))
    lossguard.check()  # nothing has run
    for labels in (batch(1)[1], bad(2)[1], batch(3)[1], bad(4, -1)[1], batch(5)[1]):
        t.copy_(labels)
        graph.replay()
        loss, gradient, _ = graph.kept
        if labels.max() < C and labels.min() >= 0:
            lossguard.check()
            expected = loss_and_gradient(x, t)
            assert torch.equal(loss, expected[0]) and torch.equal(gradient, expected[1])
            continue
        assert loss.isnan() and not gradient[3].any()
        with pytest.raises(TargetOutOfBoundsError) as caught:
            lossguard.check()
        assert caught.value.report.captured and caught.value.report.values == [labels[3]]
        assert "captured at" in str(caught.value) and "loss = F.cross_entropy(x, t" in str(caught.value)


def test_a_graph_recorded_before_the_device_was_used():
    run = subprocess.run(
        [sys.executable, "-c", FIRST_USE], capture_output=True, text=True, env=environment(), timeout=100
    )
    assert run.stdout == "Target 9 is out of bounds.\n", run.stderr


FIRST_USE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lossguard, torch
from test_deferred import Graph
lossguard.configure(when="deferred")
x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
graph = Graph(lambda: torch.ops.lossguard.cross_entropy_forward(x, t, None, -100, 0.0, 1, 0))
t[1] = 9
graph.replay()
try:
    lossguard.check()
except IndexError as error:
    print(str(error).partition(" CrossEntropyLoss")[0])
"""


def test_graphs_replayed_at_the_same_time():
    x = torch.randn(32, C)
    targets = [bad(i, 90 + i)[1] for i in range(4)]
    forward = torch.ops.lossguard.cross_entropy_forward
    graphs = [Graph(lambda t=t: forward(x, t, None, -100, 0.0, 1, 0)) for t in targets]
    for graph in graphs:
        graph.replay(emulator().create_stream(0))
    graphs[2].replay()
    with pytest.raises(TargetOutOfBoundsError) as caught:
        lossguard.check()
    assert [r.values for r in caught.value.reports] == [[90], [91], [92], [93]]
    assert "1 calls failed their checks whose reports were lost" in str(caught.value)
    lossguard.check()


def test_a_step_waits_for_the_replays_before_it():
    net, t = model(), batch(1)[1]
    optimizer = sgd(net.parameters())
    logits = net(batch(1)[0]).detach().requires_grad_()
    graph = Graph(lambda: loss_and_gradient(logits, t))
    for label in (0, 77):
        t[5] = label
        optimizer.zero_grad()
        graph.replay()
        net(batch(1)[0]).backward(graph.kept[1])
        if not label:
            assert calls_of(optimizer.step)["cudaStreamSynchronize"] == 1
            continue
        before = snapshot(net, optimizer)
        with pytest.raises(TargetOutOfBoundsError, match="Target 77"):
            optimizer.step()
        assert_same(before, snapshot(net, optimizer))


def test_a_graph_without_gradients_is_not_waited_for_by_a_step():
    gc.collect()  # other tests' graphs
    x, t = torch.randn(32, C), batch(1)[1]
    graph = Graph(lambda: torch.ops.lossguard.cross_entropy_forward(x, t, None, -100, 0.0, 1, 0))
    graph.replay()
    net = model()
    optimizer = sgd(net.parameters())
    F.cross_entropy(net(batch(1)[0]), t).backward()
    assert "cudaStreamSynchronize" not in calls_of(optimizer.step)


def test_a_graph_that_is_gone_leaves_nothing_behind():
    gc.collect()
    x, t = torch.randn(32, C, requires_grad=True), bad(1)[1]
    lossguard.check()
    before = _C.pending()
    graphs = [Graph(lambda: loss_and_gradient(x, t)) for _ in range(3)]
    assert _C.pending() == before + 3
    for graph in graphs:
        graph.replay()
    del graph, graphs
    with pytest.raises(TargetOutOfBoundsError) as caught:
        lossguard.check()
    assert len(caught.value.reports) == 3 and _C.pending() == before
    slots = calls_of(lambda: [Graph(lambda: loss_and_gradient(x, t)) for _ in range(3)])
    lossguard.check()
    assert _C.pending() == before and slots["cudaUserObjectCreate"] == 3


def test_nothing_is_waited_for_while_a_graph_is_recorded():
    """Nor is what another thread does then allowed to spoil the graph."""
    net, (x, t) = model(), batch(1)
    optimizer = sgd(net.parameters())

    def step() -> object:
        loss = F.cross_entropy(net(x), t)
        loss.backward()
        optimizer.step()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(train_elsewhere).result()
        return loss

    def train_elsewhere() -> None:
        other = Training(sgd)
        for seed in range(3):
            other.step(*batch(seed))
        with on(stream=emulator().create_stream(1), device=1):  # a stream and a device that are new
            other.step(*batch(3))
        lossguard.check()

    step()
    graphs = []
    calls = calls_of(lambda: graphs.append(Graph(step)))
    assert calls["cudaEventSynchronize"] == 4  # of the other thread's steps
