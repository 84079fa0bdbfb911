"""A dataset of what it is given."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Dataset


class Items(Dataset):
    def __init__(self, items: list) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]
