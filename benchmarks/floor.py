"""The floor: only the matrix products or convolutions of a client's step, back to back, nothing between them."""

from __future__ import annotations

from itertools import pairwise

import torch


def mlp_steps(
    steps: int, lanes: int = 3, batch: int = 32, widths: tuple[int, ...] = (5, 32, 64, 128, 32, 4)
) -> None:
    """The products of ``steps`` steps of ``lanes`` clients: forward, by the inputs, by the weights."""
    x = [torch.randn(lanes, batch, width) for width in widths]
    weights = [torch.randn(lanes, b, a) for a, b in pairwise(widths)]
    forward = [torch.empty_like(value) for value in x[1:]]
    by_input = [torch.empty_like(value) for value in x]
    by_weight = [torch.empty_like(value) for value in weights]
    for _ in range(steps):
        for i, weight in enumerate(weights):
            torch.bmm(x[i], weight.mT, out=forward[i])
        for i in reversed(range(len(weights))):
            torch.bmm(x[i + 1].mT, x[i], out=by_weight[i])
            if i:
                torch.bmm(x[i + 1], weights[i], out=by_input[i])


def cnn_steps(
    steps: int, batch: int = 64, widths: tuple[int, ...] = (3, 32, 64, 128, 128), side: int = 32
) -> None:
    """The convolutions of ``steps`` steps of one client, channels last."""
    layers = []
    for i, (a, b) in enumerate(pairwise(widths)):
        size = side // 2**i
        make = [torch.randn(batch, a, size, size), torch.randn(b, a, 3, 3), torch.randn(batch, b, size, size)]
        layers.append([value.contiguous(memory_format=torch.channels_last) for value in make])
    for _ in range(steps):
        for x, weight, _ in layers:
            torch.conv2d(x, weight, padding=1)
        for i, (x, weight, gradient) in enumerate(layers):
            torch.ops.aten.convolution_backward(
                gradient,
                x,
                weight,
                [weight.shape[0]],
                [1, 1],
                [1, 1],
                [1, 1],
                False,
                [0, 0],
                1,
                [i > 0, True, True],
            )
