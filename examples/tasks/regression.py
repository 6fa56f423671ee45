"""Regression: two sites, each with its own test and validation data.

python regression.py
"""

import torch

import fedpews


def site(seed: int, centre: float, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Patients of one site: five readings each, and a dose to predict."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 5, generator=generator) + centre
    noise = 0.1 * torch.randn(samples, generator=generator)
    return x, 2 * x[:, 0] - x[:, 1] + x[:, 2] * x[:, 3] / 4 + noise


CLIENTS = [
    {"train": site(0, -0.5, 160), "test": site(1, -0.5, 60)},
    {"train": site(2, 0.5, 100), "test": site(3, 0.5, 40)},
]


def main(rounds: int = 20) -> None:
    for method in ("fedavg", "fedavg+pews"):
        result = fedpews.run(
            clients=CLIENTS,
            task="regression",
            metrics=["mae", "r2"],
            data={"validation": 0.2},
            model={"name": "mlp", "hidden": [32, 16]},
            method=method,
            rounds=rounds,
            train={"lr": 0.02, "batch_size": 16},
            warmup={"rounds": rounds // 4} if method.endswith("pews") else {},
        )
        final, sites = result.summary["final"], result.summary["clients"]["mae"]
        print(
            f"{method:12} mae {final['mae']['mean']:.3f}  r2 {final['r2']['mean']:.3f}  "
            f"worst site {sites['worst_client']} with {sites['worst']:.3f}"
        )


if __name__ == "__main__":
    main()
