"""Training on handwritten digits, through four accidents: ``python -m lossguard demo``.

The training loop below is the one everybody has. Two things are lossguard's: the import, and the `except`
that skips a bad batch. The accidents are planted where they happen in life, in the data and in the models.
What is printed, and the proof that a skipped batch leaves no trace, is the business of `Narrator`, at the end.
"""

from __future__ import annotations

import hashlib
import os
import sys
import textwrap
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lossguard
from lossguard import BCELoss, CrossEntropyLoss  # was: from torch.nn import BCELoss, CrossEntropyLoss

BATCH_SIZE = 64
EPOCHS = 5


def train(model: nn.Module, batches: Iterable[Any], criterion: nn.Module, narrator: Narrator) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(EPOCHS):
        for inputs, targets in batches:
            narrator.batch_begins(model, optimizer)
            optimizer.zero_grad()
            outputs = model(inputs)
            try:
                loss = criterion(outputs, targets)
                loss.backward()
                optimizer.step()
            except lossguard.LossValidationError as error:
                narrator.batch_skipped(error, criterion, outputs, targets)
                continue
            narrator.batch_trained(loss.item())
        narrator.epoch_ends()


# ---- four accidents


def labels_counted_from_1(data: Digits, narrator: Narrator) -> None:
    narrator.begin(
        "Labels counted from 1",
        "A network tells the ten digits apart. Some images were labelled by somebody who counts classes from 1: "
        "two batches hold labels 1 to 10 where the network has outputs 0 to 9. Only the 10s can give them away.",
    )
    model = small_network(10)
    labels = data.labels.clone()
    labels[640:768] += 1  # the accident

    train(model, in_batches(data.images, labels), CrossEntropyLoss(), narrator)

    narrator.end(accuracy(model(data.test_images).argmax(1), data.test_labels))


def a_255_in_a_mask(data: Digits, narrator: Narrator) -> None:
    narrator.begin(
        "A 255 in a mask",
        "A small convolutional network finds the ink in noisy images: for each pixel 0, background, or 1, ink. "
        "In one mask the drawing tool left a 255, its mark for a pixel that nobody decided.",
    )
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    masks, test_masks = ink(data.images), ink(data.test_images)
    masks[400, 7, 2] = 255  # the accident

    train(model, in_batches(noisy(data.images), masks), CrossEntropyLoss(), narrator)

    narrator.end(accuracy(model(noisy(data.test_images)).argmax(1), test_masks))


def nan_probabilities(data: Digits, narrator: Narrator) -> None:
    narrator.begin(
        "NaN probabilities",
        "A network gives each digit a probability of its own. It first brings every image to mean 0 and standard "
        "deviation 1. One scan is blank: its standard deviation is 0, and 0 / 0 is NaN.",
    )

    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = small_network(10)

        def forward(self, images: Tensor) -> Tensor:
            mean = images.mean((1, 2, 3), keepdim=True)
            std = images.std((1, 2, 3), keepdim=True)
            return torch.sigmoid(self.network((images - mean) / std))

    model = Detector()
    images, present = data.images.clone(), nn.functional.one_hot(data.labels, 10).float()
    images[500], present[500] = 0, 0  # the accident

    train(model, in_batches(images, present), BCELoss(), narrator)

    narrator.end(accuracy(model(data.test_images).argmax(1), data.test_labels))


def a_forgotten_sigmoid(data: Digits, narrator: Narrator) -> None:
    narrator.begin(
        "A forgotten sigmoid",
        "A network tells even digits from odd ones. Somebody gave the last batch of an epoch, which is smaller, "
        "a path of its own that returns too early: BCELoss gets logits where it expects probabilities.",
    )

    class EvenOrOdd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = small_network(1)

        def forward(self, images: Tensor) -> Tensor:
            logits = self.network(images).squeeze(1)
            if self.training and len(images) < BATCH_SIZE:
                return logits  # the accident
            return torch.sigmoid(logits)

    model = EvenOrOdd()
    is_even, test_is_even = (labels % 2 == 0 for labels in (data.labels, data.test_labels))

    train(model, in_batches(data.images, is_even.float()), BCELoss(), narrator)

    narrator.end(accuracy(model.eval()(data.test_images) > 0.5, test_is_even))


# ---- network and data


def small_network(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, outputs)
    )


class Digits(NamedTuple):
    """Scans of handwritten digits: images (N, 1, 8, 8) in [0, 1], labels (N) in 0..9."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    from sklearn import datasets

    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(labels))
    train, test = order[:-360], order[-360:]
    return Digits(images[train], labels[train], images[test], labels[test])


def in_batches(inputs: Tensor, targets: Tensor) -> DataLoader[Any]:
    # Not shuffled again, so that each accident stays in the batch where it was planted.
    return DataLoader(TensorDataset(inputs, targets), BATCH_SIZE)


def ink(images: Tensor) -> Tensor:
    """Masks (N, 8, 8) of class indices: 1 where there is ink."""
    return (images.squeeze(1) > 0.5).long()


def noisy(images: Tensor) -> Tensor:
    return images + 0.15 * torch.randn_like(images)


def accuracy(predicted: Tensor, right: Tensor) -> float:
    return (predicted == right).float().mean().item()


# ---- what is printed

WIDTH = 100


class Narrator:
    """Tells what happens in the training loop, and checks that a skipped batch changes nothing."""

    def __init__(self) -> None:
        self.results: list[tuple[str, int, int, float]] = []  # title, batches trained on, batches skipped, accuracy
        self.losses: list[float] = []  # of the epoch
        self.colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    # The life of one network.

    def begin(self, title: str, story: str) -> None:
        self.title = f"{len(self.results) + 1}. {title}"
        self.epoch, self.batch = 1, 0
        self.trained = self.skipped = self.skipped_in_epoch = 0
        self.say()
        self.say(self.title, style="1")
        self.say("-" * len(self.title), style="1")
        self.say(story)
        self.say()

    def batch_begins(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.batch += 1
        self.model, self.optimizer = model, optimizer
        self.before = checksum(model, optimizer)

    def batch_trained(self, loss: float) -> None:
        self.trained += 1
        self.losses.append(loss)

    def batch_skipped(
        self, error: lossguard.LossValidationError, criterion: nn.Module, outputs: Tensor, targets: Tensor
    ) -> None:
        after = checksum(self.model, self.optimizer)
        if after != self.before:
            raise AssertionError(f"batch {self.batch} was skipped, but weights or optimizer changed")
        self.skipped += 1
        self.skipped_in_epoch += 1
        if self.skipped > 1:
            return  # told in the line of its epoch
        loss = type(criterion).__name__
        self.say(f"Epoch {self.epoch}, batch {self.batch}. Native torch.nn.{loss} on this batch says:")
        self.quote(native_answer(loss, outputs, targets), style="31")
        self.say(f"lossguard.{loss} says:")
        self.quote(f"{type(error).__name__}: {error}", style="32")
        self.say(
            f"The batch was skipped by `except lossguard.LossValidationError`. Weights and optimizer state are bit "
            f"for bit as before (checksum {self.before} before, {after} after). Training goes on."
        )
        if not self.results:
            self.say(
                "(On a GPU native torch says less: `CUDA error: device-side assert triggered`, no value, no index; "
                "and the process has to be restarted.)"
            )
        self.say()

    def epoch_ends(self) -> None:
        mean = sum(self.losses) / len(self.losses)
        skipped = f", {self.skipped_in_epoch} skipped" if self.skipped_in_epoch else ""
        self.say(f"epoch {self.epoch} of {EPOCHS}: mean loss {mean:.3f} over {len(self.losses)} batches{skipped}")
        self.epoch, self.batch, self.losses, self.skipped_in_epoch = self.epoch + 1, 0, [], 0

    def end(self, accuracy: float) -> None:
        if not self.skipped:
            raise AssertionError(f"{self.title}: the accident was not reported")
        self.say(f"Test accuracy: {accuracy:.1%}", style="1")
        self.results.append((self.title, self.trained, self.skipped, accuracy))

    # The whole.

    def welcome(self, data: Digits) -> None:
        images = len(data.labels) + len(data.test_labels)
        self.say(f"lossguard {lossguard.__version__}: four accidents in training", style="1")
        self.say(
            f"Data: {images:,} real handwritten digits of 8 x 8 pixels that come with scikit-learn, "
            f"{len(data.test_labels)} of them kept for testing. Four small networks are trained on the CPU."
        )

    def summary(self, seconds: float) -> None:
        trained, skipped = (sum(int(result[column]) for result in self.results) for column in (1, 2))
        self.say()
        self.say("Summary", style="1")
        self.say("-------", style="1")
        self.say(f"{'':<28}{'trained on':>12}{'skipped':>10}{'test accuracy':>16}")
        for title, trained_here, skipped_here, accuracy in self.results:
            self.say(f"{title:<28}{trained_here:>12}{skipped_here:>10}{accuracy:>16.1%}")
        self.say()
        self.say(
            f"{len(self.results)} accidents; {trained + skipped} batches in {seconds:.1f} s, {skipped} of them caught "
            f"and skipped; none left a trace in weights or optimizer, none ended the process."
        )
        self.say("Read on: README.md, for what is checked and how to use lossguard in a project of your own.")

    # On the screen.

    def say(self, text: str = "", style: str = "") -> None:
        """Prints a paragraph; `style` is an ANSI code."""
        self._print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="  "), style)

    def quote(self, message: str, style: str) -> None:
        """Prints a message line by line, each with its own indentation, and indented further where it is wrapped."""
        for line in message.split("\n"):
            start = " " * (4 + len(line) - len(line.lstrip()))
            self._print(textwrap.fill(line, WIDTH, initial_indent="    ", subsequent_indent=start + "  "), style)

    def _print(self, text: str, style: str) -> None:
        print(f"\033[{style}m{text}\033[0m" if self.colour and style else text, flush=True)


def native_answer(loss: str, outputs: Tensor, targets: Tensor) -> str:
    """What torch's own loss says to the same batch."""
    try:
        value = getattr(nn, loss)()(outputs, targets)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"nothing; the loss is {value.item()}"


def checksum(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the model's weights and buffers and of the optimizer's state."""
    state = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    tensors = [*model.state_dict().values(), *(t for s in state for t in s.values() if isinstance(t, Tensor))]
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:8]


def main() -> int:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with batches this small, threads would wait for each other most of the time
    try:
        data = load_digits()
    except ImportError:
        print("lossguard demo needs scikit-learn and the digits it ships: pip install scikit-learn", file=sys.stderr)
        return 1
    begin = time.perf_counter()
    narrator = Narrator()
    narrator.welcome(data)
    for accident in (labels_counted_from_1, a_255_in_a_mask, nan_probabilities, a_forgotten_sigmoid):
        accident(data, narrator)
    narrator.summary(time.perf_counter() - begin)
    return 0
