"""The same classes, different inputs: each site's scanner has its own brightness and contrast.

FedBN keeps norm layers at the sites; FedPeWS starts with subnetworks. The output is the accuracy at each site on its
own test images.

    python domain_shift.py
"""

import torch
from torch import Tensor, nn

import fedpews

SITES = {"bright": (2.0, 0.5), "dark": (-2.0, 1.0), "inverted": (0.0, -1.5)}


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 4),
    )


def scan(seed: int, brightness: float, contrast: float, samples: int) -> tuple[Tensor, Tensor]:
    """A bar in one of four positions, with a scanner's brightness and contrast."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (samples,), generator=generator)
    x = 0.3 * torch.randn(samples, 1, 8, 8, generator=generator)
    x[y == 0, :, 1:3] += 1
    x[y == 1, :, 5:7] += 1
    x[y == 2, :, :, 1:3] += 1
    x[y == 3, :, :, 5:7] += 1
    return contrast * x + brightness, y


def main(rounds: int = 15, samples: int = 96) -> None:
    clients = [
        {"train": scan(10 * n, *look, samples), "test": scan(10 * n + 1, *look, samples)}
        for n, look in enumerate(SITES.values())
    ]
    data = fedpews.from_clients(clients, client_names=tuple(SITES))
    for method in ("fedavg", "fedavg+fedbn", "fedavg+pews"):
        result = fedpews.run(
            model=model,
            clients=data,
            method=method,
            rounds=rounds,
            train={"lr": 0.05, "batch_size": 16},
            warmup={"rounds": rounds // 4} if method.endswith("pews") else {},
            runtime={"engine": "eager"},
        )
        last = result.rounds[-1]
        accuracies = last.get("client_personal_accuracy") or last["client_accuracy"]
        shown = [f"{name} {value:.3f}" for name, value in zip(SITES, accuracies, strict=True)]
        print(f"{method:12}", "  ".join(shown))


if __name__ == "__main__":
    main()
