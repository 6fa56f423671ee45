"""The model, the data of each site, and the training loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def load_data(partition: int, partitions: int, batch_size: int = 32) -> tuple[DataLoader, TensorDataset]:
    """Sixteen clusters of four classes on a ring; every site has different classes."""
    x, y = _ring(4000, seed=0)
    mine = y % partitions == partition
    return DataLoader(TensorDataset(x[mine], y[mine]), batch_size, shuffle=True), TensorDataset(
        *_ring(800, seed=1)
    )


def _ring(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    cluster = torch.arange(samples) % 16
    angle = cluster * torch.pi / 8
    centre = torch.stack([angle.cos(), angle.sin()], dim=1) * 2
    return centre + 0.15 * torch.randn(samples, 2, generator=random), cluster % 4


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / len(loader) / epochs


def test(net: nn.Module, data: TensorDataset) -> float:
    x, y = data.tensors
    net.eval()
    with torch.no_grad():
        return float((net(x).argmax(1) == y).float().mean())
