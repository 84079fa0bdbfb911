"""Draws benchmarks/timeline.svg: who waits for whom in a step, native with CUDA_LAUNCH_BLOCKING=1 and deferred.

    python -m benchmarks.timeline

A model, not a measurement: the host takes LAUNCH for every kernel it launches, the GPU runs them one after the other
for as long as STEP says, and the waits are those of the two ways to be told of a bad label before the weights change.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

LAUNCH = 8.0  # microseconds of the host for a kernel
# Kernels of a step, in microseconds.
STEP = (
    *(("forward", 30.0) for _ in range(6)),
    ("loss", 14.0),
    *(("backward", 42.0) for _ in range(7)),
    *(("optimizer", 12.0) for _ in range(2)),
)
STEPS = 2
COLORS = {
    "launch": "#555555",
    "wait": "#e9b4ae",
    "forward": "#6b8fb5",
    "loss": "#d08c3f",
    "backward": "#7fa87a",
    "optimizer": "#9b86b8",
}


@dataclass
class Span:
    row: str  # "host" or "GPU"
    start: float
    end: float
    kind: str  # of COLORS


def schedule(blocking: bool) -> tuple[list[Span], float]:
    """What host and GPU do, and when the last step is over. Times in microseconds."""
    spans: list[Span] = []
    host = gpu = loss_done = 0.0
    for _ in range(STEPS):
        previous = ""
        for kind, duration in STEP:
            if kind == "optimizer" and previous != "optimizer" and not blocking and loss_done > host:
                spans.append(Span("host", host, loss_done, "wait"))  # the one wait: for the event behind the loss
                host = loss_done
            spans.append(Span("host", host, host + LAUNCH, "launch"))
            host += LAUNCH
            start = max(host, gpu)
            gpu = start + duration
            spans.append(Span("GPU", start, gpu, kind))
            if kind == "loss":
                loss_done = gpu
            if blocking:
                spans.append(Span("host", host, gpu, "wait"))
                host = gpu
            previous = kind
    return spans, gpu


def draw(path: Path) -> None:
    panels = {
        "native, CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel, the GPU for every launch": schedule(True),
        "lossguard, deferred: one wait, for the loss, with the backward queued behind it": schedule(False),
    }
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lossguard", "font.size": 9})
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(10, 3.4), layout="constrained")
    for axis, (title, (spans, end)) in zip(axes, panels.items()):
        for height, row in enumerate(("GPU", "host")):
            for kind, color in COLORS.items():
                bars = [(s.start, s.end - s.start) for s in spans if (s.row, s.kind) == (row, kind)]
                axis.broken_barh(bars, (height - 0.4, 0.8), color=color, edgecolor="white", linewidth=0.4)
        axis.axvline(end, color="#333", linestyle=":")
        axis.text(end, 1.55, f"{end:.0f} µs", ha="right")
        axis.set_title(title, loc="left", fontsize=9, fontweight="bold")
        axis.set_yticks((0, 1), ("GPU", "host"))
        axis.spines[["top", "right"]].set_visible(False)
    least, most = (f(duration for _, duration in STEP) for f in (min, max))
    model = f"{LAUNCH:.0f} µs a launch, kernels of {least:.0f} to {most:.0f} µs"
    axes[1].set_xlabel(f"µs, in a model of {STEPS} steps: {model}")
    handles = [Patch(color=color, label="host waits" if kind == "wait" else kind) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".svg"))
