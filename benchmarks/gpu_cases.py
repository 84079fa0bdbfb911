"""What a session on a GPU checks and times: losses, sizes and layouts, and the bytes that each has to move."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

SECTOR = 32  # bytes: the least that a GPU reads from its memory
PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes a pass moves when the gradient is computed in the backward, as a sum of whole tensors.

    "3 input + 2 target + 2 lse": the forward reads input and target and saves a number a row, the backward reads all
    of them again and writes a gradient of the input's size. "picked": the one logit of each row that NLL reads, at a
    sector each.
    """

    forward: str
    both: str

    def bytes(self, which: str, sizes: dict[str, int]) -> int:
        terms = re.findall(r"(\d*) ?([a-z]+)", self.forward if which == "forward" else self.both)
        return sum(int(times or 1) * sizes[name] for times, name in terms)


CROSS_ENTROPY = Traffic("input + target", "3 input + 2 target + 2 lse")
BCE = Traffic("input + target", "3 input + 2 target")
NLL = Traffic("picked + target", "input + picked + 2 target")


@dataclass(frozen=True)
class Case:
    name: str
    loss: str  # in torch.nn.functional and lossguard.functional
    shape: tuple[int, ...]  # of the input
    traffic: Traffic
    target: str = "labels"  # or "binary", "distribution"
    options: dict[str, Any] = field(default_factory=dict)
    class_weights: str = ""  # an option that takes a tensor of one number a class
    channels_last: bool = False
    autocast: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    back_to_back: int = 1  # calls between two looks at the clock, caches warm: above 1, what a call costs the host

    @property
    def classes(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def image(self) -> tuple[int, ...]:
        return self.shape[2:]

    def tiny(self) -> Case:
        """Small enough for an emulator, and yet for the same kernel: every class, and pixels as aligned as before."""
        rows, *rest = self.shape
        if not rest:
            shape: tuple[int, ...] = (5001,)
        elif self.image:
            shape = (2, self.classes, 3, 8 if math.prod(self.image) % 8 == 0 else 9)
        else:
            shape = (min(rows // 8, max(5, 4000 // self.classes)), self.classes)
        return dataclasses.replace(self, shape=shape)

    def batch(self, dtype: torch.dtype, device: str) -> Batch:
        """The same values each time, on one kind of device."""
        shape, g = self.shape, torch.Generator(device).manual_seed(0)
        given: dict[str, Any] = {"device": device, "dtype": dtype, "generator": g}
        if self.loss == "binary_cross_entropy":
            input = torch.rand(shape, **given) * 0.96 + 0.02
        else:
            input = torch.randn(shape, **given)
        if self.loss == "nll_loss":
            input = input.log_softmax(1)
        if self.target == "labels":
            target = torch.randint(self.classes, (shape[0], *self.image), device=device, generator=g)
        elif self.target == "binary":
            target = torch.rand(shape, **given).round()
        else:
            target = torch.randn(shape, **given).softmax(1)
        if self.channels_last:
            input = input.to(memory_format=torch.channels_last)
        weights = torch.rand(self.classes, **given) if self.class_weights else None
        return Batch(self, input, target, weights)

    def title(self, dtype: torch.dtype) -> str:
        return f"{self.name}, {' x '.join(map(str, self.shape))}, {str(dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Batch:
    case: Case
    input: Tensor
    target: Tensor
    weights: Tensor | None

    def options(self) -> dict[str, Any]:
        return {**self.case.options, **({self.case.class_weights: self.weights} if self.case.class_weights else {})}

    def to(self, device: str, dtype: torch.dtype | None = None, offset: int = 0) -> Batch:
        """A copy with the same strides. `dtype` is that of everything but labels; `offset`: of the first element, in
        elements, from where memory is aligned."""

        def move(t: Tensor) -> Tensor:
            t = t.to(dtype if t.is_floating_point() else t.dtype)
            storage = torch.empty(t.numel() + offset, dtype=t.dtype, device=device)
            return storage.as_strided(t.shape, t.stride(), offset).copy_(t)

        weights = None if self.weights is None else move(self.weights)
        return Batch(self.case, move(self.input), move(self.target), weights)

    def useful_bytes(self, which: str) -> int:
        rows = self.input.numel() // self.case.classes
        of_input = self.input.numel() * self.input.element_size()
        sizes = {
            "input": of_input,
            "target": self.target.numel() * self.target.element_size(),
            "lse": rows * 4,
            "picked": min(rows * SECTOR, of_input),
        }
        return self.case.traffic.bytes(which, sizes)


# fmt: off
CASES = (
    Case("CE, MNIST", "cross_entropy", (1 << 20, 10), CROSS_ENTROPY),
    Case("CE, ImageNet", "cross_entropy", (16384, 1000), CROSS_ENTROPY),
    Case("CE, Llama 2", "cross_entropy", (8192, 32000), CROSS_ENTROPY),
    Case("CE, Llama 3", "cross_entropy", (2048, 128256), CROSS_ENTROPY),
    Case("CE, Cityscapes", "cross_entropy", (8, 19, 512, 1024), CROSS_ENTROPY, options={"ignore_index": 255}),
    Case("BCE, 64M", "binary_cross_entropy", (1 << 26,), BCE, "binary"),
    Case("BCE-with-logits, 64M", "binary_cross_entropy_with_logits", (1 << 26,), BCE, "binary"),
    Case("NLL, ImageNet", "nll_loss", (16384, 1000), NLL),
    Case("CE, soft labels", "cross_entropy", (16384, 1000), CROSS_ENTROPY, "distribution"),
    Case("CE, small batch", "cross_entropy", (128, 10), CROSS_ENTROPY, back_to_back=100),
    Case("CE, BERT", "cross_entropy", (8192, 30522), CROSS_ENTROPY),
    Case("CE, ADE20K", "cross_entropy", (4, 150, 512, 512), CROSS_ENTROPY, options={"ignore_index": 255}),
    Case("BCE-with-logits, COCO", "binary_cross_entropy_with_logits", (1 << 18, 80), BCE, "binary",
         class_weights="pos_weight"),
    Case("CE, label smoothing", "cross_entropy", (16384, 1000), CROSS_ENTROPY, options={"label_smoothing": 0.1}),
    Case("CE, Cityscapes channels_last", "cross_entropy", (8, 19, 512, 1024), CROSS_ENTROPY,
         options={"ignore_index": 255}, channels_last=True),
    Case("CE, Pascal VOC", "cross_entropy", (8, 21, 513, 513), CROSS_ENTROPY, options={"ignore_index": 255}),
    Case("CE, Llama 3, few rows", "cross_entropy", (16, 128256), CROSS_ENTROPY),
    Case("CE, Llama 2, autocast", "cross_entropy", (8192, 32000), CROSS_ENTROPY, autocast=True,
         dtypes=(torch.bfloat16,)),
    Case("NLL, Cityscapes", "nll_loss", (8, 19, 512, 1024), NLL, options={"ignore_index": 255}),
    Case("BCE, 8M", "binary_cross_entropy", (1 << 23,), BCE, "binary"),
    Case("BCE-with-logits, 8M", "binary_cross_entropy_with_logits", (1 << 23,), BCE, "binary"),
)  # in the order of what a session short of time should not lose
# fmt: on
