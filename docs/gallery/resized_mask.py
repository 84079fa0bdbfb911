"""A mask that was resized with interpolation: between the classes and 255, the void, there are now all the others."""

import torch
from torch import nn
from torch.nn.functional import interpolate

torch.manual_seed(0)
model = nn.Conv2d(3, 8, 1)
mask = torch.randint(8, (2, 1, 16, 16))
mask[:, :, :4, :4] = 255
mask = interpolate(mask.float(), size=(64, 64), mode="bilinear")[:, 0].round().long()
loss = nn.CrossEntropyLoss(ignore_index=255)(model(torch.randn(2, 3, 64, 64)), mask)
loss.backward()
