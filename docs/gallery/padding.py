"""Padded sequences, with -1 where there is no token."""

import torch
from torch import nn

torch.manual_seed(0)
vocabulary, batch, length = 1000, 4, 12
logits = torch.randn(batch, length, vocabulary)
labels = torch.randint(vocabulary, (batch, length))
labels[:, 9:] = -1
loss = nn.CrossEntropyLoss()(logits.flatten(0, 1), labels.flatten())
