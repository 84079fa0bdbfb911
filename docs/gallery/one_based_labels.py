"""Labels that are counted from 1, as in MATLAB, Julia and many CSV files."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 10)
labels = torch.randint(10, (256,)) + 1
loss = nn.CrossEntropyLoss()(model(torch.randn(256, 16)), labels)
loss.backward()
