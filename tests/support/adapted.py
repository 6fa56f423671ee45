"""A layer with a low-rank adapter, named as peft names it: tests of the rounds need not wait for peft."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two thin ones beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, outputs, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))
        return out


def adapted_model(rank: int = 3) -> nn.Module:
    """Three inputs, an adapted layer of four, three classes; always the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(Adapted(3, 4, rank), nn.Tanh(), nn.Linear(4, 3))


A, B = "0.lora_A.default.weight", "0.lora_B.default.weight"
