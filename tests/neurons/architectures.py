"""Small models of every kind the neuron graph has to understand, each with an input."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
    ), torch.randn(7, 5)


def mlp_batchnorm() -> tuple[nn.Module, Tensor]:
    return (
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        torch.randn(7, 5),
    )


def cnn() -> tuple[nn.Module, Tensor]:
    """Convolution, pooling, flatten, linear; ends in a log-softmax."""
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 4, 9),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Linear(9, 4),
        nn.LogSoftmax(dim=1),
    )
    return model, torch.randn(5, 3, 8, 8)


def cnn_batchnorm() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.BatchNorm1d(54),
        nn.Linear(54, 4),
    )
    return model, torch.randn(5, 3, 8, 8)


def conv1d_instancenorm_prelu() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv1d(2, 6, 3),
        nn.InstanceNorm1d(6),
        nn.PReLU(6),
        nn.Conv1d(6, 4, 3),
        nn.PReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return model, torch.randn(5, 2, 12)


def transposed() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 6, 3),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 6, 3, groups=6),
        nn.ConvTranspose2d(6, 4, 3, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    )
    return model, torch.randn(5, 3, 4, 4)


def groupnorm() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.GroupNorm(4, 12),
        nn.ReLU(),
        nn.Conv2d(12, 6, 3),
        nn.GroupNorm(3, 6, affine=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 4, 4),
    )
    return model, torch.randn(5, 3, 6, 6)


class TwoGroupNorms(nn.Module):
    """GroupNorms of four and of six groups on one stream of twelve channels: gcd(4, 6) = 2 neurons."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 1)
        self.four, self.six = nn.GroupNorm(4, 12), nn.GroupNorm(6, 12)
        self.head = nn.Conv2d(12, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.four(x)) + self.six(x))


def two_groupnorms() -> tuple[nn.Module, Tensor]:
    return TwoGroupNorms(), torch.randn(5, 3, 4, 4)


class Block(nn.Module):
    """A basic residual block; a change of width goes through a 1×1 convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs)
        self.skip: nn.Module = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(hidden)) + self.skip(x))


def residual() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        Block(6, 6),
        Block(6, 8),
        Block(8, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    return model, torch.randn(5, 3, 8, 8)


def depthwise() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.BatchNorm2d(8),
        nn.Hardswish(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        nn.Conv2d(8, 5, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(5, 4),
    )
    return model, torch.randn(5, 3, 6, 6)


def depthwise_multiplier() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.ReLU(),
        nn.Conv2d(4, 8, 3, groups=4),
        nn.ReLU(),
        nn.Conv2d(8, 2, 1),
        nn.Flatten(),
    )
    return model, torch.randn(5, 3, 4, 4)


def grouped() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, groups=4),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 2, 1),
    )
    return model, torch.randn(5, 3, 4, 4)


class Dense(nn.Module):
    """DenseNet's way: every layer reads all earlier ones, here the model's input too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.norm2, self.conv2 = nn.BatchNorm2d(7), nn.Conv2d(7, 5, 3, padding=1)
        self.norm3, self.conv3 = nn.BatchNorm2d(12), nn.Conv2d(12, 6, 1)
        self.head = nn.Linear(6 * 16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.conv1(x)], 1)
        x = torch.cat([x, self.conv2(F.relu(self.norm2(x)))], 1)
        return self.head(F.relu(self.conv3(self.norm3(x))).flatten(1))


def dense() -> tuple[nn.Module, Tensor]:
    return Dense(), torch.randn(5, 3, 4, 4)


class Gated(nn.Module):
    """A gated linear unit: half of a layer multiplies the other half, so units i and i + 6 are one neuron."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 12), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, dim=1)
        return self.down(value * torch.sigmoid(gate))


def gated() -> tuple[nn.Module, Tensor]:
    return Gated(), torch.randn(7, 5)


class SqueezeExcite(nn.Module):
    """Channel attention, and a spatial attention of one channel that multiplies all others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.squeeze, self.excite = nn.Linear(8, 4), nn.Linear(4, 8)
        self.where = nn.Conv2d(8, 1, 1)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        channel = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))
        x = x * channel[:, :, None, None] * torch.sigmoid(self.where(x)) * self.scale
        return self.head(x.mean((2, 3)))


def squeeze_excite() -> tuple[nn.Module, Tensor]:
    return SqueezeExcite(), torch.randn(5, 3, 6, 6)


def encoder() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Linear(3, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 4)
    )
    return model, torch.randn(5, 6, 3)


class Transformer(nn.Module):
    """A hand-written pre-norm block on embedded tokens, with a learned position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.position = nn.Parameter(torch.randn(1, 6, 8))
        self.norm1, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm2, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm3, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(self.norm3(x).mean(1))


def transformer() -> tuple[nn.Module, Tensor]:
    return Transformer(), torch.randint(0, 11, (5, 6))


ALL: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], list[tuple[str, int]]]] = {
    "mlp": (mlp, [("0", 8), ("2", 6)]),
    "mlp_batchnorm": (mlp_batchnorm, [("0", 8)]),
    "cnn": (cnn, [("0", 6), ("3", 5), ("7", 9)]),
    "cnn_batchnorm": (cnn_batchnorm, [("0", 6)]),
    "conv1d_instancenorm_prelu": (conv1d_instancenorm_prelu, [("0", 6), ("3", 4)]),
    "transposed": (transposed, [("0 + 2 + 3", 2)]),
    "groupnorm": (groupnorm, [("0", 4), ("3", 3)]),
    "two_groupnorms": (two_groupnorms, [("stem", 2)]),
    "residual": (
        residual,
        [
            ("0 + 2.conv2", 6),
            ("2.conv1", 6),
            ("3.conv1", 8),
            ("3.conv2 + 3.skip + 4.conv2", 8),
            ("4.conv1", 8),
        ],
    ),
    "depthwise": (depthwise, [("0 + 3", 8), ("6", 5)]),
    "depthwise_multiplier": (depthwise_multiplier, [("0 + 2", 4)]),
    "grouped": (grouped, [("0 + 2", 4)]),
    "dense": (dense, [("conv1", 4), ("conv2", 5), ("conv3", 6)]),
    "gated": (gated, [("up", 6)]),
    "squeeze_excite": (squeeze_excite, [("conv + excite", 8), ("squeeze", 4)]),
    "encoder": (
        encoder,
        [
            ("1.layers.0.self_attn.in_proj_weight", 2),
            ("1.layers.0.linear1", 12),
            ("1.layers.1.self_attn.in_proj_weight", 2),
            ("1.layers.1.linear1", 12),
        ],
    ),
    "transformer": (transformer, [("attention.in_proj_weight", 2), ("up", 12)]),
}
