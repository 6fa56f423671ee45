"""Your own model: any torch.nn.Module. These arguments are filled in from the data:

``inputs`` (features of a sample), ``channels``, ``size`` (of images) and ``classes``. Other arguments are options:
``[model] width = 24`` in the configuration, or ``--set model.width=24``.
"""

from torch import Tensor, nn


class Net(nn.Module):
    """A convolution with batch norm, a depthwise convolution, and a second branch that gates the channels."""

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.mix = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.ReLU())
        self.gate = nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width), nn.Sigmoid())
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.stem(x))  # (samples, width, height, width)
        pooled = x.amax((2, 3))
        return self.head(pooled * self.gate(pooled))
