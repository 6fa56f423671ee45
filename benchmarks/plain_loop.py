"""Federated averaging as papers' code has it: a deep copy, a DataLoader and an optimiser for every client."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedpews.data.federation import Federation


class PlainCNN(nn.Module):
    """The paper's CNN in the usual order: ReLU, then pooling."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 128)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.classifier = nn.Linear(128 * 16, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for depth, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            x = F.max_pool2d(x, 2) if depth < 3 else x
        return self.classifier(x.flatten(1))


def train_client(model: nn.Module, loader: DataLoader, lr: float) -> dict[str, torch.Tensor]:
    local = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(local.parameters(), lr=lr)
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(local(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return local.state_dict()


def run_round(models: list[nn.Module], data: Federation, batch_size: int, lr: float, cohort: int) -> None:
    """One round of every seed: train the cohort, average, evaluate."""
    for model in models:
        chosen = torch.randperm(len(data))[:cohort].tolist()
        states = []
        for client in chosen:
            rows = data.clients[client]
            samples = TensorDataset(data.x[rows], data.y[rows])
            states.append(train_client(model, DataLoader(samples, batch_size, shuffle=True), lr))
        model.load_state_dict({k: sum(state[k] for state in states) / len(states) for k in states[0]})
        model.eval()
        tests = DataLoader(TensorDataset(data.test_x, data.test_y), batch_size=256)
        with torch.no_grad():
            sum(int((model(x).argmax(1) == y).sum()) for x, y in tests)
