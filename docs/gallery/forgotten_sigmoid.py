"""Logits given to BCELoss, which wants probabilities."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 1)
labels = torch.randint(2, (64, 1)).float()
loss = nn.BCELoss()(model(torch.randn(64, 16)), labels)
loss.backward()
