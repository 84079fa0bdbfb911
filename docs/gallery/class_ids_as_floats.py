"""Class ids given to BCE-with-logits: native torch computes on, and trains on nonsense."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 5)
labels = torch.randint(5, (64, 5)).float()
loss = nn.BCEWithLogitsLoss()(model(torch.randn(64, 16)), labels)
loss.backward()
print("loss", round(loss.item(), 3))
