"""Segmentation: a small U-Net, a class for every pixel, unlabelled pixels ignored, Dice at each hospital.

python segmentation.py
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, max_pool2d

import fedpews

UNLABELLED = 255


class UNet(nn.Module):
    """Two levels with a skip connection."""

    def __init__(self, classes: int = 2, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.below = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.up = nn.Conv2d(2 * width, width, 3, padding=1)
        self.joined = nn.Conv2d(2 * width, width, 3, padding=1)
        self.pixels = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = self.first(x).relu()
        below = self.below(max_pool2d(across, 2)).relu()
        up = self.up(interpolate(below, scale_factor=2.0)).relu()
        joined = self.joined(torch.cat([across, up], 1)).relu()
        out: Tensor = self.pixels(joined)
        return out


def hospital(seed: int, brightness: float, samples: int) -> tuple[Tensor, Tensor]:
    """Bright discs on a noisy background; the first and the last row are not labelled."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    centre = torch.randint(4, 12, (samples, 2, 1, 1), generator=generator)
    y = ((rows - centre[:, 0]) ** 2 + (columns - centre[:, 1]) ** 2 < 12).long()
    x = brightness * y[:, None] + 0.3 * torch.randn(samples, 1, 16, 16, generator=generator)
    y[:, 0], y[:, -1] = UNLABELLED, UNLABELLED
    return x, y


CLIENTS = [
    {"train": hospital(0, 1.0, 40), "test": hospital(1, 1.0, 20)},
    {"train": hospital(2, 2.0, 40), "test": hospital(3, 2.0, 20)},
]


def main(rounds: int = 12) -> None:
    for method in ("fedavg", "fedavg+pews"):
        result = fedpews.run(
            clients=CLIENTS,
            model=UNet,
            task={"name": "segmentation", "ignore_index": UNLABELLED},
            metrics=["dice", "iou"],
            method=method,
            rounds=rounds,
            data={"augment": ["flip"]},
            train={"lr": 0.3, "batch_size": 8},
            warmup={"rounds": rounds // 4} if method.endswith("pews") else {},
        )
        final, sites = result.summary["final"], result.summary["clients"]["dice"]["by_client"]
        print(
            f"{method:12} dice {final['dice']['mean']:.3f}  iou {final['iou']['mean']:.3f}  "
            f"at the hospitals {', '.join(f'{value:.3f}' for value in sites.values())}"
        )


if __name__ == "__main__":
    main()
