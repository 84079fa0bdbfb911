"""A learning rate far too high: the model's probabilities are NaN after a few steps."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
for step in range(10):
    x = torch.randn(64, 16)
    loss = nn.BCELoss()(model(x), (x[:, :1] > 0).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
