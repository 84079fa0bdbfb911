"""No hidden copies: the forward needs no temporary of the logits' size, the backward only the gradient."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
import lossguard.functional as F

layout, dtype, backward = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "backward"
MIB = 2**20
logits = {
    "rows": lambda: torch.ones(131072, 256, dtype=dtype),
    "image": lambda: torch.ones(8, 64, 256, 256, dtype=dtype),
    "channels_last": lambda: torch.ones(8, 256, 256, 64, dtype=dtype).movedim(-1, 1),
    "permuted": lambda: torch.ones(64, 256, 8, 256, dtype=dtype).permute(2, 0, 1, 3),
}[layout]()
logits.requires_grad_(backward)
target = torch.zeros(logits.shape[:1] + logits.shape[2:], dtype=torch.int64)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def step(x, t):
    loss = F.cross_entropy(x, t, label_smoothing=0.1)
    if backward:
        loss.backward()
step(logits[:1].detach().requires_grad_(backward), target[:1])  # warm up: threads, code
before = peak()
step(logits, target)
print((peak() - before) / MIB, logits.numel() * logits.element_size() / MIB)
"""


@pytest.mark.parametrize(
    "layout, dtype, direction",
    [
        ("rows", "bfloat16", "forward"),
        ("image", "bfloat16", "backward"),
        ("channels_last", "float32", "backward"),
        ("permuted", "float32", "forward"),
    ],
)
def test_peak_memory(layout, dtype, direction):
    command = [sys.executable, "-c", SCRIPT, layout, dtype, direction]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, logits = map(float, out.split())
    gradient = logits if direction == "backward" else 0
    assert grown <= gradient + 12, f"peak grew by {grown:.0f} MiB beside logits of {logits:.0f} MiB"
