"""Labels of a buffer that was allocated and never filled."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 10)
labels = torch.randint(10, (64,))
labels[40:] = torch.randint(2**62, (24,))  # what memory held; torch.empty gives other numbers at every run
loss = nn.CrossEntropyLoss()(model(torch.randn(64, 16)), labels)
loss.backward()
