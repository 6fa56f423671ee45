"""Your own model and your own data: a module, a list of clients, one call.

Run it: python examples/own_model_and_data.py
"""

import torch
from torch import nn

import fedpews


class Net(nn.Module):
    """Any module works; fedpews finds its neurons by tracing."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.classifier = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def sensors(count: int, labels: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Readings of machines, each in one of the given states."""
    y = torch.tensor(labels)[torch.randint(len(labels), (count,))]
    centres = torch.tensor([[2.0, 0], [-2, 0], [0, 2], [0, -2]])
    return torch.cat([centres[y] + torch.randn(count, 2), torch.randn(count, 6)], 1), y


torch.manual_seed(0)
result = fedpews.run(
    model=Net,
    clients=[sensors(800, (0, 1)), sensors(600, (2, 3))],
    test=sensors(1000, (0, 1, 2, 3)),
    method="fedavg+pews",
    rounds=20,
    seeds=[0, 1],
    train={"lr": 0.05, "batch_size": 32},
    warmup={"rounds": 4},
)
print(f"accuracy {result.summary['final_accuracy']['mean']:.3f}")
print(f"model    {result.model()}")
print(f"masks    {[int(mask.sum()) for mask in result.neurons[0].values()]} of 64 neurons each")
