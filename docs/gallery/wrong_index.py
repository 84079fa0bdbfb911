"""The scores of the true answers are gathered with ids of another vocabulary."""

import torch

torch.manual_seed(0)
scores = torch.randn(8, 50).log_softmax(1)
answers = torch.randint(50, (8, 1))
answers[5] = 61
scores.gather(1, answers)
