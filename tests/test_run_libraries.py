"""`lossguard run` on unmodified code of real libraries."""

from __future__ import annotations

import json
import textwrap
import warnings
from pathlib import Path

import lossguard
import pytest
from lossguard.__main__ import main

# Some of them warn on their own account.
pytestmark = pytest.mark.filterwarnings("ignore")

LANGUAGE_MODEL = """
    import sys
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        tokens = torch.randint(97, (4, 16))
        labels = tokens.clone()
        if step == 1:
            (labels if sys.argv[1] == "labels" else tokens)[2, 5] = 97
        loss = model(input_ids=tokens, labels=labels).loss  # the model's
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained")
"""

SEGMENTATION = """
    import torch
    from torch import nn

    class FCNHead(nn.Sequential):  # as torchvision's
        def __init__(self, channels, classes):
            super().__init__(
                nn.Conv2d(channels, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1),
                nn.Conv2d(4, classes, 1),
            )

    def criterion(outputs, target):  # torchvision's reference script, without its ignore_index=255
        return nn.functional.cross_entropy(outputs["out"], target)

    torch.manual_seed(0)
    head = FCNHead(3, 19)
    masks = torch.randint(19, (2, 16, 16))
    masks[:, :2] = 255
    criterion({"out": head(torch.randn(2, 3, 16, 16))}, masks).backward()
"""

SEGMENTATION_MODELS = """
    import sys
    import torch
    from segmentation_models_pytorch import losses

    logits = torch.randn(2, 4, 8, 8, requires_grad=True)
    masks, binary = torch.randint(4, (2, 8, 8)), torch.randint(2, (2, 1, 8, 8)).float()
    masks[0, 0, 0] = binary[0, 0, 0, 0] = 255
    loss = sys.argv[1]
    if loss == "SoftBCEWithLogitsLoss":
        losses.SoftBCEWithLogitsLoss()(logits[:, :1], binary).backward()
    elif loss == "FocalLoss":
        losses.FocalLoss("binary")(logits[:, :1], binary).backward()
    elif loss == "DiceLoss":
        losses.DiceLoss("multiclass")(logits, masks).backward()
    else:
        losses.SoftCrossEntropyLoss(smooth_factor=0.1)(logits, masks).backward()
"""

LIGHTNING = """
    import logging
    import lightning
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.loss = nn.Linear(8, 5), nn.CrossEntropyLoss()

        def training_step(self, batch, index):
            x, labels = batch
            return self.loss(self.net(x), labels)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    lightning.seed_everything(0, verbose=False)
    labels = torch.randint(5, (64,)) + 1  # counted from 1
    labels[labels == 1] = 2
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(torch.randn(64, 8), labels), batch_size=64))
"""


def run(tmp_path: Path, text: str, *arguments: str, options: tuple[str, ...] = ()) -> tuple[int, list[dict]]:
    script, log = tmp_path / "train.py", tmp_path / "violations.jsonl"
    script.write_text(textwrap.dedent(text))
    status = main(["run", "--immediately", "--json", str(log), *options, str(script), *arguments])
    return status, [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.parametrize("where, loss", [("labels", "CrossEntropyLoss"), ("tokens", "embedding")])
def test_a_transformers_model(where: str, loss: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("transformers")
    status, (report,) = run(tmp_path, LANGUAGE_MODEL, where)
    assert status == 65
    assert (report["loss"], report["num_classes"], report["values"], report["count"]) == (loss, 97, [97], 1)
    out, err = capsys.readouterr()
    assert "trained" not in out and "# the model's" in err  # the user's own line is in the traceback
    if where == "tokens":
        assert report["indices"] == [[2, 5]]


def test_a_segmentation_head_and_its_void_pixels(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    status, (report,) = run(tmp_path, SEGMENTATION)
    assert status == 65
    assert (report["count"], report["values"], report["shapes"]["target"]) == (64, [255] * 16, [2, 16, 16])
    assert "ignore_index=255" in report["hints"][0]
    assert 'nn.functional.cross_entropy(outputs["out"], target)' in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, calls",
    [
        ("SoftBCEWithLogitsLoss", "BCEWithLogitsLoss"),
        ("FocalLoss", "BCEWithLogitsLoss"),
        ("DiceLoss", "one_hot"),
        ("SoftCrossEntropyLoss", "gather"),
    ],
)
def test_losses_of_segmentation_models_pytorch(name: str, calls: str, tmp_path: Path) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    status, (report,) = run(tmp_path, SEGMENTATION_MODELS, name, options=("--strict",))
    assert (status, report["loss"], report["values"]) == (65, calls, [255])


def test_a_lightning_loop(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        status, (report,) = run(tmp_path, LIGHTNING)
    assert status == 65
    assert report["values"] == [5] * len(report["values"]) and report["num_classes"] == 5
    assert "1-based" in report["hints"][0]
    assert "return self.loss(self.net(x), labels)" in capsys.readouterr().err
    assert not lossguard._patch.is_patched()
