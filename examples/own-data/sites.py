"""Your own data from a function: it returns the clients and the test set.

A client is a pair (x, y) of tensors or arrays, or a torch Dataset. Here each of four sites has two of four classes.
"""

import torch

TYPICAL = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 3.0], [-2.0, -2.0, -2.0]])


def make(seed: int = 0) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(classes: list[int], each: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tensor(classes).repeat_interleave(each)
        return TYPICAL[y] + torch.randn(len(y), 3, generator=generator), y

    clients = [draw(classes, 30) for classes in ([0, 1], [1, 2], [2, 3], [3, 0])]
    return clients, draw([0, 1, 2, 3], 25)
