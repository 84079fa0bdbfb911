"""lossguard.monitor, and the callbacks in the trainers of Lightning and transformers themselves."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lossguard
import pytest
import torch
import torch.nn.functional as F
from lossguard import monitor
from lossguard.integrations import Watch
from torch import Tensor, nn

COUNTS = {"calls", "elements", "bad_calls", "violations"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Each test counts from 0, and leaves policy and patch as they were."""
    lossguard.reset_stats()
    monitor._last.clear()
    policy, patched = lossguard.policy(), lossguard._patch.is_patched()
    yield
    assert lossguard.policy() == policy and lossguard._patch.is_patched() is patched


def labels(bad: int = 0, n: int = 4) -> Tensor:
    target = torch.arange(n) % 3
    target[:bad] = 7
    return target


def ours(bad: int = 0) -> None:
    lossguard.functional.cross_entropy(torch.randn(4, 3), labels(bad), on_violation="skip")  # the line of ours
    lossguard.check()  # on CUDA what is skipped is not waited for otherwise


def line_of(text: str) -> int:
    return next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith(f"# {text}"))


def site(text: str) -> str:
    path = next(name for name in lossguard.stats() if f":{line_of(text)} " in name).partition(":")[0]
    return f"{path}_{line_of(text)}_CrossEntropyLoss".lstrip("/")


# ---- scalars


def test_scalars() -> None:
    assert monitor.scalars() == {f"lossguard/{count}": 0 for count in COUNTS}
    ours()
    ours(bad=2)
    lossguard.functional.nll_loss(torch.randn(2, 3), torch.tensor([0, 1]))
    counts = monitor.scalars()
    expected = {"calls": 2, "elements": 8, "bad_calls": 1, "violations": 2}
    assert {count: counts[f"lossguard/{site('the line of ours')}/{count}"] for count in COUNTS} == expected
    totals = {"calls": 3, "elements": 10, "bad_calls": 1, "violations": 2}
    assert {count: counts[f"lossguard/{count}"] for count in COUNTS} == totals
    assert len(counts) == 12 and all(type(n) is int for n in counts.values())
    assert set(monitor.scalars(prefix="a.")) == {"a." + name.removeprefix("lossguard/") for name in counts}


def test_deltas() -> None:
    ours(bad=1)
    first = monitor.scalars(delta=True)
    assert first["lossguard/calls"] == 1 and first == monitor.scalars()
    ours(bad=2), ours()
    assert monitor.scalars(delta=True, prefix="other/")["other/calls"] == 3  # counted by prefix
    second = monitor.scalars(delta=True)
    assert (second["lossguard/calls"], second["lossguard/violations"]) == (2, 2)
    assert second[f"lossguard/{site('the line of ours')}/violations"] == 2
    assert set(monitor.scalars(delta=True).values()) == {0}
    assert monitor.scalars()["lossguard/calls"] == 3  # which deltas do not change


def test_deltas_begin_anew_with_the_stats() -> None:
    for _ in range(3):
        ours(bad=1)
    monitor.scalars(delta=True)
    lossguard.reset_stats()
    ours(bad=1)
    assert monitor.scalars(delta=True)["lossguard/violations"] == 1
    lossguard.reset_stats()
    assert set(monitor.scalars(delta=True).values()) == {0}


def test_names_are_kept_by_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    ours(bad=2)
    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in monitor.scalars().items():
            writer.add_scalar(name, value, 5)
    assert read_events(tmp_path) == {name: [(5, float(value))] for name, value in monitor.scalars().items()}


def read_events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.rglob("events.out.*"):
        events = accumulator.EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    return found


def test_a_dict_for_wandb() -> None:
    logged: list[dict[str, Any]] = []

    def log(values: dict[str, Any], step: int) -> None:
        logged.append(json.loads(json.dumps({**values, "step": step})))

    ours(bad=1)
    log(monitor.scalars(), step=3)
    assert logged == [{**monitor.scalars(), "step": 3}]


# ---- summary


def test_summary() -> None:
    assert "no loss was counted" in monitor.summary()
    ours()
    assert monitor.summary() == "lossguard: 1 call of losses with 4 elements, all valid"
    ours(bad=3)
    lines = monitor.summary().splitlines()
    assert lines[0] == "lossguard: 2 calls of losses with 8 elements; 1 call had 3 violations"
    assert f":{line_of('the line of ours')} CrossEntropyLoss: 3 violations in 1 of 2 calls, the last at " in lines[1]
    before = lossguard.stats()
    assert "no loss was counted" in monitor.summary(before)
    ours(bad=1)
    lines = monitor.summary(before).splitlines()
    assert lines[0] == "lossguard: 1 call of losses with 4 elements; 1 call had 1 violation"
    assert "1 violation in 1 of 1 calls" in lines[1]


# ---- watching


def native(bad: int = 0) -> Tensor:
    return F.cross_entropy(torch.randn(4, 3), labels(bad))  # the line of native


def test_watching_sets_and_puts_back() -> None:
    with monitor.watching(on_violation="skip"):
        assert lossguard.policy()["on_violation"] == "skip" and lossguard._patch.is_patched()
        native(bad=2)  # known at the end
    assert lossguard.policy()["on_violation"] == "raise" and not lossguard._patch.is_patched()
    assert monitor.scalars()[f"lossguard/{site('the line of native')}/violations"] == 2
    with pytest.raises(ValueError), monitor.watching(on_violation="warn"):
        raise ValueError
    assert lossguard.policy()["on_violation"] == "raise" and not lossguard._patch.is_patched()
    with monitor.watching(patch=False):
        assert not lossguard._patch.is_patched() and lossguard.policy()["on_violation"] == "raise"


def test_what_is_still_to_be_said_is_raised_at_the_end_and_the_summary_is_told_all_the_same(capsys: Any) -> None:
    watch = Watch(True, None, "lossguard/", True)
    for error in (None, KeyError("on its way")):
        watch.begin()
        lossguard.functional.cross_entropy(torch.randn(4, 3), labels(1), when="deferred")
        with pytest.raises(lossguard.LossValidationError) if error is None else contextlib.nullcontext():
            watch.end(error=error)
        assert not watch.active and not lossguard._patch.is_patched()
        assert "lossguard: 1 call of losses with 4 elements" in capsys.readouterr().out
        with contextlib.nullcontext() if error is None else pytest.raises(lossguard.LossValidationError):
            lossguard.check()  # it is not lost
    watch.begin()
    watch.begin()
    watch.end()
    watch.end()
    assert not lossguard._patch.is_patched()


def test_watching_leaves_a_patch_and_a_policy_of_the_users() -> None:
    lossguard.configure(on_violation="warn")
    try:
        with lossguard.patched(on_violation="skip"):
            options = lossguard._patch._options
            with monitor.watching():
                assert lossguard._patch._options is options and lossguard.policy()["on_violation"] == "warn"
            with monitor.watching(on_violation="skip"):
                assert lossguard.policy()["on_violation"] == "skip"
            assert lossguard._patch._options is options and lossguard.policy()["on_violation"] == "warn"
    finally:
        lossguard.configure(on_violation="raise")


def test_watching_within_a_guard_does_not_make_its_policy_the_process_s() -> None:
    with lossguard.guard(on_violation="skip"):
        with monitor.watching(on_violation="warn"):
            pass
    assert lossguard.policy()["on_violation"] == "raise"


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match="on_violation must be"):
        Watch(True, "ignore", "", True)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="patch must be True or False, got None"):
        Watch(None, None, "", True)  # type: ignore[arg-type]


# ---- Lightning

BOTH_NAMES = pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
STEPS = 6


class Lightning:
    """A tiny module and its training under one name of the package."""

    def __init__(self, package: str) -> None:
        self.pl = pytest.importorskip(package)
        from lossguard.integrations.lightning import LossguardCallback

        self.callback = LossguardCallback

    def module(self, loss: Callable[[Tensor, Tensor], Tensor], momentum: float = 0.9) -> Any:
        pl = self.pl

        class Module(pl.LightningModule):  # type: ignore[name-defined, misc]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Linear(5, 3)

            def training_step(self, batch: Any, _: int) -> Any:
                return loss(self.net(batch[0]), batch[1])

            def validation_step(self, batch: Any, _: int) -> Any:
                return loss(self.net(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1, momentum=momentum)

        return Module()

    def fit(self, module: Any, batches: list[Any], *callbacks: Any, validation: Any = None, **options: Any) -> Any:
        options = {"logger": False, **options}
        trainer = self.pl.Trainer(
            max_epochs=1,
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=list(callbacks),
            **options,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.fit(
                module,
                torch.utils.data.DataLoader(batches, batch_size=None),
                validation and torch.utils.data.DataLoader(validation, batch_size=None),
            )
        return trainer


def batches(*bad: int, n: int = STEPS) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 5, generator=generator), labels(2 if i in bad else 0)) for i in range(n)]


def lightning_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)  # the line of lightning


@BOTH_NAMES
def test_lightning_logs_and_tells(package: str, tmp_path: Path, capsys: Any) -> None:
    pl = Lightning(package)
    csv = importlib.import_module(f"{package}.loggers").CSVLogger(str(tmp_path))
    callback = pl.callback(on_violation="skip")
    trainer = pl.fit(pl.module(lightning_loss), batches(1, 4), callback, logger=csv, log_every_n_steps=2)
    assert trainer.global_step == STEPS
    rows = Path(csv.log_dir, "metrics.csv").read_text().splitlines()
    header, *rows = (row.split(",") for row in rows)
    logged = {int(row[header.index("step")]): dict(zip(header, row)) for row in rows}
    violations = f"lossguard/{site('the line of lightning')}/violations"
    assert {step: (row["lossguard/calls"], row[violations]) for step, row in logged.items()} == {
        2: ("2", "2"),
        4: ("4", "2"),
        6: ("6", "4"),
    }
    out = capsys.readouterr().out
    assert "lossguard: 6 calls of losses with 24 elements; 2 calls had 4 violations" in out
    assert f":{line_of('the line of lightning')} CrossEntropyLoss: 4 violations in 2 of 6 calls" in out


@BOTH_NAMES
def test_lightning_raises_before_the_step_and_everything_is_put_back(package: str, capsys: Any) -> None:
    pl = Lightning(package)
    module, good = pl.module(lightning_loss), pl.module(lightning_loss)
    pl.fit(good, batches(n=3), pl.callback())
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught:
        pl.fit(module, batches(3), pl.callback())
    assert caught.value.report.call_site.line == line_of("the line of lightning")
    assert not lossguard._patch.is_patched()
    torch.testing.assert_close(module.net.weight, good.net.weight, rtol=0, atol=0)
    assert "1 call had 2 violations" in capsys.readouterr().out
    with pytest.raises(IndexError) as native_error:  # torch's own again
        lightning_loss(torch.randn(4, 3), labels(1))
    assert not isinstance(native_error.value, lossguard.LossValidationError)


@BOTH_NAMES
def test_lightning_without_patch(package: str, capsys: Any) -> None:
    pl = Lightning(package)
    pl.fit(pl.module(lightning_loss), batches(), pl.callback(patch=False))
    assert "no loss was counted" in capsys.readouterr().out
    criterion = lossguard.CrossEntropyLoss()
    pl.fit(pl.module(criterion), batches(2), pl.callback(patch=False, on_violation="skip"))
    assert "6 calls of losses with 24 elements; 1 call had 2 violations" in capsys.readouterr().out
    pl.fit(pl.module(criterion), batches(), pl.callback(patch=False, summary=False))
    assert "lossguard" not in capsys.readouterr().out


@BOTH_NAMES
def test_lightning_validation_is_watched_and_evaluation_alone_is_not(package: str) -> None:
    pl = Lightning(package)
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        pl.fit(
            pl.module(lightning_loss), batches(), pl.callback(), validation=batches(0)
        )  # in the sanity check already
    seen: list[bool] = []

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        seen.append(lossguard._patch.is_patched())
        return F.cross_entropy(logits, target)

    module = pl.module(loss)
    trainer = pl.fit(module, batches(), pl.callback(), validation=batches())
    assert set(seen) == {True} and len(seen) > STEPS
    seen.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(module, torch.utils.data.DataLoader(batches(), batch_size=None), verbose=False)
    assert seen == [False] * STEPS


@BOTH_NAMES
def test_lightning_fits_again_with_the_same_callback(package: str, capsys: Any) -> None:
    pl = Lightning(package)
    callback = pl.callback()
    for _ in range(2):
        pl.fit(pl.module(lightning_loss), batches(), callback)
        assert "lossguard: 6 calls of losses with 24 elements, all valid" in capsys.readouterr().out


@BOTH_NAMES
def test_lightning_accumulates_and_logs_each_step_once(package: str) -> None:
    pl = Lightning(package)
    logged: list[int] = []

    class Logger(importlib.import_module(f"{package}.loggers").Logger):  # type: ignore[name-defined, misc]
        name, version = "mine", 0

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "lossguard/calls" in metrics:
                logged.append(step)

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    options = {"logger": [Logger()], "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    pl.fit(pl.module(lightning_loss), batches(n=7), pl.callback(), **options)
    assert logged == [1, 2, 3, 4]


@BOTH_NAMES
def test_lightning_drops_a_batch_whose_training_step_returns_none(package: str) -> None:
    """What the docstring of the callback says."""
    pl = Lightning(package)
    dropped: list[str] = []

    def careful(logits: Tensor, target: Tensor) -> Any:
        try:
            return F.cross_entropy(logits, target)
        except lossguard.LossValidationError as error:
            dropped.append(str(error))
            return None

    module, good = pl.module(careful), pl.module(careful)
    data = batches(2, 4)
    pl.fit(module, data, pl.callback())
    pl.fit(good, [batch for i, batch in enumerate(data) if i not in (2, 4)], pl.callback())
    assert len(dropped) == 2
    torch.testing.assert_close(module.net.weight, good.net.weight, rtol=0, atol=0)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("first", ["lightning.pytorch", "pytorch_lightning", None])
def test_lightning_of_the_package_that_is_imported(first: str | None) -> None:
    pytest.importorskip(first or "lightning.pytorch")
    code = f"import {first or 'lossguard'}\nfrom lossguard.integrations.lightning import LossguardCallback as C\n"
    code += "print(*(base.__module__.partition('.')[0] for base in C.__mro__ if base.__name__ == 'Callback'))"
    assert run(code) == ("pytorch_lightning" if first == "pytorch_lightning" else "lightning")


@pytest.mark.parametrize(
    "name, missing, install",
    [
        ("lightning", ["lightning", "lightning.pytorch", "pytorch_lightning"], "pip install lightning"),
        ("transformers", ["transformers"], "pip install transformers accelerate"),
    ],
)
def test_without_the_library(name: str, missing: list[str], install: str) -> None:
    code = f"""
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import lossguard.integrations, lossguard.monitor
try:
    import lossguard.integrations.{name}
except ImportError as error:
    print(error)
"""
    assert run(code).endswith(install)


# ---- transformers


@pytest.fixture
def hugging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    transformers.utils.logging.set_verbosity_error()
    return Hugging(transformers, tmp_path)


class Hugging:
    """A BERT of a few hundred weights, which computes its loss by torch's own function, and its Trainer."""

    def __init__(self, transformers: Any, folder: Path) -> None:
        self.transformers, self.folder = transformers, folder

    def model(self) -> Any:
        torch.manual_seed(0)
        config = self.transformers.BertConfig(
            vocab_size=20,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=8,
            num_labels=3,
            problem_type="single_label_classification",
        )
        return self.transformers.BertForSequenceClassification(config)

    def data(self, *bad: int, n: int = 12) -> list[dict[str, Any]]:
        return [{"input_ids": [1, 2, i % 5], "labels": 7 if i in bad else i % 3} for i in range(n)]

    def trainer(self, data: list[Any], *callbacks: Any, report_to: Any = "none", **options: Any) -> Any:
        arguments = self.transformers.TrainingArguments(
            output_dir=str(self.folder / "out"),
            per_device_train_batch_size=2,
            num_train_epochs=1,
            logging_steps=2,
            save_strategy="no",
            report_to=report_to,
            disable_tqdm=True,
            use_cpu=True,
            seed=0,
            **options,
        )
        return self.transformers.Trainer(self.model(), arguments, train_dataset=data, callbacks=list(callbacks))

    @property
    def callback(self) -> Any:
        from lossguard.integrations.transformers import LossguardCallback

        return LossguardCallback


def test_transformers_logs_and_tells(hugging: Hugging, capsys: Any) -> None:
    trainer = hugging.trainer(hugging.data(3, 8), hugging.callback(on_violation="skip"))
    trainer.train()
    history = [log for log in trainer.state.log_history if "loss" in log]
    assert [(log["step"], log["lossguard/calls"]) for log in history] == [(2, 2), (4, 4), (6, 6)]
    assert history[-1]["lossguard/violations"] == 2 and history[-1]["lossguard/elements"] == 12
    (line,) = [name for name in history[-1] if name.endswith("CrossEntropyLoss/violations")]
    assert "transformers" in line and history[-1][line] == 2  # the library's own line calls it
    out = capsys.readouterr().out
    assert "lossguard: 6 calls of losses with 12 elements; 2 calls had 2 violations" in out
    assert "lossguard/violations" in out.partition("lossguard: 6 calls")[0]  # printed by a callback that comes after it
    assert all(0 < log["loss"] < 3 for log in history)


def test_transformers_raises_before_the_step_and_with_puts_back(hugging: Hugging, capsys: Any) -> None:
    with pytest.raises(lossguard.TargetOutOfBoundsError) as caught, hugging.callback() as callback:
        trainer = hugging.trainer(hugging.data(*range(12)), callback)
        trainer.train()
    for got, initial in zip(trainer.model.parameters(), hugging.model().parameters(), strict=True):
        torch.testing.assert_close(got, initial, rtol=0, atol=0)
    assert caught.value.report.values == [7, 7] and caught.value.report.num_classes == 3
    assert not lossguard._patch.is_patched()
    assert "1 call had 2 violations" in capsys.readouterr().out


def test_transformers_without_with_is_put_back_by_close_or_the_next_training(hugging: Hugging, capsys: Any) -> None:
    callback = hugging.callback(on_violation="raise")
    for _ in range(2):
        with pytest.raises(lossguard.TargetOutOfBoundsError):
            hugging.trainer(hugging.data(*range(12)), callback).train()
        assert lossguard._patch.is_patched()
    hugging.trainer(hugging.data(), callback).train()
    assert not lossguard._patch.is_patched()
    assert "6 calls of losses with 12 elements, all valid" in capsys.readouterr().out
    callback.close()
    with pytest.raises(lossguard.TargetOutOfBoundsError):
        hugging.trainer(hugging.data(*range(12)), callback).train()
    callback.close()
    assert not lossguard._patch.is_patched()


def test_transformers_reports_to_tensorboard_what_is_attached(
    hugging: Hugging, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(hugging.folder / "events"))
    callback = hugging.callback(on_violation="skip")
    trainer = hugging.trainer(hugging.data(3), report_to=["tensorboard"])
    assert callback.attach(trainer) is callback and callback.attach(trainer) is callback
    assert [c for c in trainer.callback_handler.callbacks if c is callback] == [callback]
    trainer.train()
    events = read_events(hugging.folder)
    (name,) = [name for name in events if name.endswith("lossguard/violations")]
    assert [step for step, _ in events[name]][:3] == [2, 4, 6] and events[name][-1][1] == 1.0


def test_transformers_without_patch(hugging: Hugging, capsys: Any) -> None:
    hugging.trainer(hugging.data(), hugging.callback(patch=False)).train()
    assert "no loss was counted" in capsys.readouterr().out

    def ours(outputs: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        return lossguard.functional.cross_entropy(outputs.logits, labels)

    trainer = hugging.trainer(hugging.data(5), hugging.callback(patch=False, on_violation="skip", prefix="lg/"))
    trainer.compute_loss_func = ours
    trainer.train()
    assert trainer.state.log_history[-1]["lg/violations"] == 1
    assert "6 calls of losses with 12 elements; 1 call had 1 violation" in capsys.readouterr().out


def test_transformers_evaluation_is_not_watched(hugging: Hugging) -> None:
    trainer = hugging.trainer(hugging.data(), hugging.callback())
    trainer.evaluate(eval_dataset=hugging.data())
    assert not lossguard._patch.is_patched() and "lossguard/calls" not in trainer.state.log_history[-1]


# ---- the models of transformers in preflight and find_nonfinite


def test_preflight_of_a_model_of_transformers(hugging: Hugging) -> None:
    from lossguard.preflight import find_nonfinite, preflight

    model = hugging.model().train()
    batch = {"input_ids": torch.tensor([[1, 2, 3], [4, 5, 6]]), "labels": torch.tensor([0, 2])}
    collated = hugging.transformers.BatchEncoding(batch)
    for data in (batch, collated, [batch] and torch.utils.data.DataLoader([batch], batch_size=None)):
        result = preflight(model, data)
        assert result.findings == [] and "log(3)" in result.facts["loss"]
    result = preflight(model, {**batch, "labels": torch.tensor([1, 3])})
    assert [f.check for f in result.findings] == ["labels"] and not result.ok
    result = preflight(model, {**batch, "input_ids": batch["input_ids"] * 5})
    assert [(f.check, f.fix) for f in result.findings] == [("labels", "nn.Embedding(31, 8)")]
    result = preflight(model, batch, nn.CrossEntropyLoss())
    assert [(f.severity, f.check) for f in result.findings] == [("note", "output")]
    assert find_nonfinite(model, batch, loss=lambda output, target: F.cross_entropy(output.logits, target)).ok
    model.bert.encoder.layer[0].output.LayerNorm.register_forward_hook(lambda module, args, output: output / 0)
    found = find_nonfinite(model, collated)
    assert found.module == "bert.encoder.layer.0.output.LayerNorm" and found.class_name == "LayerNorm"
