"""Category ids of an annotation file, such as COCO's: 80 classes with ids up to 90."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(16, 80)
ids = torch.tensor([i for i in range(1, 91) if i not in (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)])
labels = ids[torch.randint(80, (512,))]
loss = nn.CrossEntropyLoss()(model(torch.randn(512, 16)), labels)
loss.backward()
