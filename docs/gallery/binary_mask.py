"""A black and white mask read from a PNG: its foreground is 255, not 1."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Conv2d(3, 2, 1)
mask = (torch.rand(2, 64, 64) > 0.5).long() * 255
loss = nn.CrossEntropyLoss()(model(torch.randn(2, 3, 64, 64)), mask)
loss.backward()
