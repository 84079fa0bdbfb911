"""A token was added to the tokenizer, and the model's embedding was not resized."""

import torch
from torch import nn

torch.manual_seed(0)
embedding = nn.Embedding(32000, 8)
tokens = torch.randint(32000, (4, 128))
tokens[:, 0] = 32000  # the new [PAD]
embedding(tokens)
