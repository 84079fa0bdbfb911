"""What the tests of the CUDA kernels share: where they run, the emulator's controls, and the regimes of csrc/cuda.

A regime is a kernel and how its threads share the work; which one a call gets is decided in csrc/cuda by shape and
layout. The tables name for each of their rows the kernels that it must launch.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import references as ref
import torch
from lossguard import _C
from torch import Tensor

EMULATED = _C.build_info().get("emulated", False)
ON_GPU = not EMULATED and bool(_C.build_info()["cuda"]) and torch.cuda.is_available()
DEVICE = "cpu" if EMULATED else "cuda" if ON_GPU else None
WHY_NO_DEVICE = "no GPU, and not the emulated build of `make test-emulated`"

f32, f64, f16, bf16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = (f32, f64, f16, bf16)
HALVES = (f16, bf16)
REDUCTIONS = ("none", "mean", "sum")
LABELS = (torch.int64, torch.uint8)


# ---- the emulator: tests/cuda_emulator/emulator.h

MULTIPROCESSORS = 4  # of its GPU
MAX_BLOCKS = 8 * MULTIPROCESSORS  # csrc/cuda/launch.h
THREADS = 256  # of a block


class Launch(NamedTuple):
    kernel: str  # "ce_forward_flat<float, (Spread)0>"
    blocks: int


class Emulator:
    def __init__(self) -> None:
        self._library = ctypes.CDLL(_C.__file__)
        self._library.lossguard_emulator_log.restype = ctypes.c_char_p
        self._library.lossguard_emulator_set_schedule.argtypes = (ctypes.c_char_p, ctypes.c_uint64)
        self._library.lossguard_emulator_create_stream.restype = ctypes.c_size_t
        self._library.lossguard_emulator_begin_capture.argtypes = (ctypes.c_size_t,)
        self._library.lossguard_emulator_end_capture.argtypes = (ctypes.c_size_t,)
        self._library.lossguard_emulator_end_capture.restype = ctypes.c_size_t
        self._library.lossguard_emulator_destroy_graph.argtypes = (ctypes.c_size_t,)
        self._library.lossguard_emulator_replay.argtypes = (ctypes.c_size_t, ctypes.c_size_t)

    def set_schedule(self, name: str, seed: int = 1) -> None:
        self._library.lossguard_emulator_set_schedule(name.encode(), seed)

    def set_driver_version(self, version: int) -> None:
        self._library.lossguard_emulator_set_driver_version(version)

    def hold_events(self, hold: bool) -> None:
        self._library.lossguard_emulator_hold_events(int(hold))

    def create_stream(self, device: int) -> int:
        return self._library.lossguard_emulator_create_stream(device)

    def begin_capture(self, stream: int) -> None:
        assert self._library.lossguard_emulator_begin_capture(stream) == 0

    def end_capture(self, stream: int) -> int:
        """A graph; 0 if something spoiled it."""
        return self._library.lossguard_emulator_end_capture(stream)

    def destroy_graph(self, graph: int) -> None:
        self._library.lossguard_emulator_destroy_graph(graph)

    def replay(self, graph: int, stream: int) -> None:
        assert self._library.lossguard_emulator_replay(graph, stream) == 0

    def launches(self) -> list[Launch]:
        """Since the last call."""
        lines = self._library.lossguard_emulator_log().decode().splitlines()
        self._library.lossguard_emulator_clear_log()
        fields = (line.split("\t") for line in lines)
        return [Launch(short(kernel), int(blocks)) for kernel, blocks, _ in fields]


@functools.cache
def emulator() -> Emulator | None:
    return Emulator() if EMULATED else None


def short(kernel: str) -> str:
    return kernel.replace("lossguard::cuda::", "")


# ---- tensors


def lay_out(values: Tensor, layout: str, device: str) -> Tensor:
    """As references.lay_out, on `device`, with three layouts more."""
    with torch.device(device):
        values = values.to(device)
        if layout.startswith("padded"):  # rows further apart than they are long: by 16 bytes, or by one element
            by = 1 if layout == "padded by one" else 16 // values.element_size()
            larger = torch.full((*values.shape[:-1], values.shape[-1] + by), math.nan, dtype=values.dtype)
            view = larger[..., : values.shape[-1]]
            view.copy_(values)
            return view
        if layout == "one class":  # for all
            return values.narrow(1, 0, 1).expand(values.shape)
        return ref.lay_out(values, layout)


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:1] + shape[2:] if len(shape) > 1 else ()


def class_count(shape: tuple[int, ...]) -> int:
    return shape[0 if len(shape) == 1 else 1]


# ---- regimes of cross-entropy and NLL

CUDA_TYPE = {f32: "float", f64: "double", f16: "__half", bf16: "__nv_bfloat16"}
SPREADS = ("none", "labels", "probabilities")  # csrc/cuda/rows.h, Spread


def pack(dtype: torch.dtype) -> int:
    """Elements of 16 bytes."""
    return 16 // dtype.itemsize


def pixels(dtype: torch.dtype) -> int:
    """That a thread has at once."""
    return 1 if dtype == f64 else pack(dtype)


def ce_kernels(kind: str, dtype: torch.dtype, spread: str) -> tuple[str, str]:
    """Of the forward and the backward."""
    names = dict(
        flat=("ce_forward_flat", "ce_backward_flat"),
        registers=("ce_forward_in_registers", "ce_backward_rows"),
        block=("ce_forward_by_block", "ce_backward_rows"),
        pixels=("ce_forward_strided", "ce_backward_strided"),
        strided=("ce_forward_strided", "ce_backward_strided"),
    )[kind]
    arguments = f"{CUDA_TYPE[dtype]}, (Spread){SPREADS.index(spread)}"
    if kind in ("pixels", "strided"):
        arguments += f", {pixels(dtype) if kind == 'pixels' else 1}"
    return f"{names[0]}<{arguments}>", f"{names[1]}<{arguments}>"


def nll_kernels(kind: str, dtype: torch.dtype) -> tuple[str, str]:
    backward = dict(
        flat=f"nll_backward_flat<{CUDA_TYPE[dtype]}>",
        pixels=f"nll_backward_strided<{CUDA_TYPE[dtype]}, {pixels(dtype)}>",
        strided=f"nll_backward_strided<{CUDA_TYPE[dtype]}, 1>",
    )[kind]
    return f"nll_forward_rows<{'double' if dtype == f64 else 'float'}>", backward


@dataclasses.dataclass(frozen=True)
class Rows:
    """Logits, and the kernels that they take."""

    name: str
    shape: Callable[[torch.dtype], tuple[int, ...]]
    hard: str  # of labels
    soft: str  # of class probabilities
    nll: str  # the backward of NLL: its forward has one kernel
    layout: str = "contiguous"
    label_layout: str = "contiguous"
    soft_layout: str = ""  # of class probabilities; empty: like the logits
    weight_layout: str = "contiguous"
    lanes: int = 0  # a row, in the forward with labels; 0: a row or a pixel a lane
    in_float64: str = ""  # where `hard` and `soft` are others there

    def kernels(self, dtype: torch.dtype, spread: str) -> tuple[str, str]:
        kind = self.soft if spread == "probabilities" else self.hard
        if dtype == f64:  # which knows no stream
            kind = self.in_float64 or ("registers" if kind == "flat" else kind)
        return ce_kernels(kind, dtype, spread)

    def blocks(self, dtype: torch.dtype) -> int | None:
        """Of the forward with labels."""
        if dtype == f64 and (self.in_float64 or self.hard == "flat"):
            return None
        n = math.prod(rows_shape(self.shape(dtype)))
        if self.lanes:
            threads = n * self.lanes
        else:
            threads = -(-n // pixels(dtype)) if self.hard == "pixels" else n
        return max(1, min(-(-threads // THREADS), MAX_BLOCKS))


def _just(*shape: int) -> Callable[[torch.dtype], tuple[int, ...]]:
    return lambda dtype: shape


def _bytes(n: int, more: int = 0, rows: int = 300) -> Callable[[torch.dtype], tuple[int, ...]]:
    return lambda dtype: (rows, n // dtype.itemsize + more)


def _packs(n: int, more: int = 0, rows: int = 77) -> Callable[[torch.dtype], tuple[int, ...]]:
    return lambda dtype: (rows, n * pack(dtype) + more)


def held(dtype: torch.dtype) -> int:
    """Classes that the 32 lanes of a warp hold in registers."""
    return 512 if dtype == f64 else 1024


def _held(rows: int, more: int = 0, times: int = 1) -> Callable[[torch.dtype], tuple[int, ...]]:
    return lambda dtype: (rows, times * held(dtype) + more)


ROWS = (
    # Short rows that are no whole packs of 16 bytes are one stream: up to 128 bytes, or 64 beside probabilities.
    Rows("64 bytes less a class", _bytes(64, -1), "flat", "flat", "flat"),
    Rows("64 bytes and a class", _bytes(64, 1), "flat", "registers", "flat"),
    Rows("128 bytes less a class", _bytes(128, -1), "flat", "registers", "flat"),
    Rows("128 bytes less a class, offset", _bytes(128, -1), "flat", "registers", "flat", "offset"),
    Rows("an odd number of classes, offset", _just(300, 5), "flat", "flat", "flat", "offset", "offset"),
    Rows("one class", _just(300, 1), "flat", "flat", "flat"),
    Rows("two classes", _just(600, 2), "flat", "flat", "flat", in_float64="registers"),
    Rows("more rows than the grid has threads", _just(THREADS * MAX_BLOCKS + 9, 3), "flat", "flat", "flat"),
    Rows("one row", _just(1, 5), "flat", "flat", "flat"),
    Rows("no batch", _just(5), "flat", "flat", "flat"),
    Rows("no rows", _just(0, 5), "flat", "flat", "flat"),
    Rows("channels_last", _just(2, 5, 4, 8), "flat", "flat", "flat", "channels_last"),
    Rows("pixels of one class", _just(2, 1, 4, 8), "flat", "flat", "flat"),
    # A group of lanes a row: a lane for 4 packs of 16 bytes, until the warp is used up.
    Rows("64 bytes", _bytes(64), "registers", "registers", "flat", lanes=2),
    Rows("64 bytes, offset", _bytes(64), "registers", "registers", "flat", "offset", lanes=2),
    Rows("128 bytes", _bytes(128), "registers", "registers", "flat", lanes=2),
    Rows("128 bytes and a class", _bytes(128, 1), "registers", "registers", "flat", lanes=4),
    Rows("2 lanes", _packs(8), "registers", "registers", "flat", "padded", lanes=2),
    Rows("2 lanes, unaligned", _packs(4), "registers", "registers", "flat", "padded by one", lanes=2),
    Rows("4 lanes", _packs(16), "registers", "registers", "flat", lanes=4),
    Rows("8 lanes, the fewest packs", _packs(17), "registers", "registers", "flat", lanes=8),
    Rows("8 lanes, the most", _packs(32), "registers", "registers", "flat", lanes=8),
    Rows("16 lanes, the fewest", _packs(33), "registers", "registers", "flat", lanes=16),
    Rows("16 lanes, unaligned", _packs(62, 1), "registers", "registers", "flat", lanes=16),
    Rows("32 lanes", _packs(65), "registers", "registers", "flat", lanes=32),
    Rows("1024 classes", _held(5), "registers", "registers", "flat", lanes=32),
    Rows("1024 classes, unaligned", lambda d: (5, held(d) - pack(d) + 1), "registers", "registers", "flat", lanes=32),
    Rows("rows repeated", _just(300, 6), "registers", "registers", "flat", "expanded", lanes=2),
    Rows("channels_last, long", lambda d: (2, 17 * pack(d), 3, 5), "registers", "registers", "flat", "channels_last",
         lanes=8),
    Rows("channels_last, targets apart", _just(2, 5, 4, 8), "registers", "strided", "strided", "channels_last",
         "permuted", "contiguous", lanes=2),
    # A block a row; with fewer rows than multiprocessors, several.
    Rows("1024 classes, offset", _held(5), "block", "block", "flat", "offset", lanes=256),
    Rows("1025 classes", _held(5, 1), "block", "block", "flat", lanes=256),
    Rows("1025 classes, more rows than blocks", _held(MAX_BLOCKS + 3, 1), "block", "block", "flat", lanes=256),
    Rows("1025 classes, no rows", _held(0, 1), "block", "block", "flat", lanes=256),
    Rows("1025 classes, no batch", lambda d: (held(d) + 1,), "block", "block", "flat", lanes=256),
    Rows("two passes of a block", _held(4, 5, times=8), "block", "block", "flat", lanes=256),
    Rows("6 blocks a row", _packs(6 * 256, 5, rows=3), "block", "block", "flat", lanes=6 * 256),
    Rows("8 blocks for one row", _packs(8 * 256, 1, rows=1), "block", "block", "flat", "offset", lanes=8 * 256),
    # Pixels beside each other.
    Rows("pixels", _just(2, 5, 4, 8), "pixels", "pixels", "pixels"),
    Rows("pixels, many classes", _just(1, 33, 3, 16), "pixels", "pixels", "pixels"),
    Rows("pixels of several blocks", _just(2, 3, 40, 56), "pixels", "pixels", "pixels"),
    Rows("transposed", _just(40, 5), "pixels", "pixels", "pixels", "permuted"),
    Rows("pixels, targets apart", _just(8, 3, 2, 5), "pixels", "strided", "pixels", "permuted", "contiguous",
         "contiguous"),
    # Anything else.
    Rows("H W odd", _just(2, 5, 3, 5), "strided", "strided", "strided"),
    Rows("pixels, offset", _just(2, 5, 4, 8), "strided", "strided", "pixels", "offset"),
    Rows("pixels repeated", _just(2, 5, 4, 8), "strided", "strided", "pixels", "expanded"),
    Rows("every second", _just(40, 9), "strided", "strided", "flat", "strided", "strided"),
    Rows("all classes one", _just(40, 9), "strided", "strided", "flat", "one class"),
    Rows("transposed, odd", _just(41, 9), "strided", "strided", "strided", "permuted"),
    Rows("class weights apart", _just(41, 9), "strided", "strided", "flat", weight_layout="strided"),
    Rows("five dimensions", _just(2, 3, 3, 1, 5), "strided", "strided", "strided", label_layout="permuted",
         soft_layout="permuted"),
)  # fmt: skip


# ---- regimes of BCE and BCE-with-logits


def bce_kernels(kind: str, dtype: torch.dtype, logits: bool) -> tuple[str, str]:
    """Of the forward and the backward."""
    own = CUDA_TYPE[dtype] if kind == "flat" else "double" if dtype == f64 else "float"
    arguments = f"{own}, {str(logits).lower()}"
    return f"bce_forward_{kind}<{arguments}>", f"bce_backward_{kind}<{arguments}>"


@dataclasses.dataclass(frozen=True)
class Elements:
    """Input and target, and the kernels that they take."""

    name: str
    shape: Callable[[torch.dtype], tuple[int, ...]]
    forward: str
    backward: str  # with one gradient for all, or each beside its element
    forward_each: str = ""  # without reduction; empty: the same
    layout: str = "contiguous"
    target_layout: str = "contiguous"


def _tiles(n: int, packs: int = 0, more: int = 0) -> Callable[[torch.dtype], tuple[int, ...]]:
    """A block's tile has two packs a thread."""
    return lambda dtype: ((n * 2 * THREADS + packs) * pack(dtype) + more,)


ELEMENTS = (
    Elements("no dimension", _just(), "flat", "flat"),
    Elements("none", _just(0), "flat", "flat"),
    Elements("one", _just(1), "flat", "flat"),
    Elements("a pack less one", _tiles(0, 1, -1), "flat", "flat"),
    Elements("a pack", _tiles(0, 1), "flat", "flat"),
    Elements("a pack and one", _tiles(0, 1, 1), "flat", "flat"),
    Elements("a tile", _tiles(1), "flat", "flat"),
    Elements("two tiles less a pack", _tiles(2, -1), "flat", "flat"),
    Elements("a tile and a tail", _tiles(1, 0, 1), "flat", "flat"),
    Elements("more than the grid at once", _tiles(MAX_BLOCKS, 3, 1), "flat", "flat"),
    Elements("permuted", _just(3, 5, 7), "flat", "flat", "flat", "permuted", "permuted"),
    Elements("channels_last", _just(2, 3, 4, 5), "flat", "flat", "flat", "channels_last", "channels_last"),
    # The loss of each and the gradient are new tensors, and not offset.
    Elements("offset", _just(3, 37), "flat", "strided", "strided", "offset", "offset"),
    Elements("offset, a head alone", _just(1), "flat", "strided", "strided", "offset", "offset"),
    Elements("input offset", _just(3, 37), "strided", "strided", "strided", "offset"),
    Elements("target offset", _just(3, 37), "strided", "strided", "strided", "contiguous", "offset"),
    Elements("input permuted", _just(3, 5, 7), "strided", "strided", "strided", "permuted"),
    Elements("target channels_last", _just(2, 3, 4, 5), "strided", "strided", "strided", "contiguous", "channels_last"),
    Elements("padded", _just(40, 9), "strided", "strided", "strided", "padded", "padded"),
    Elements("every second", _just(40, 9), "strided", "strided", "strided", "strided", "strided"),
    Elements("target repeated", _just(300, 5), "strided", "strided", "strided", "contiguous", "expanded"),
    Elements("input repeated", _just(300, 5), "strided", "strided", "strided", "expanded"),
    Elements("more elements than the grid has threads", _just(THREADS * MAX_BLOCKS + 7), "strided", "strided",
             "strided", "contiguous", "strided"),
)  # fmt: skip
