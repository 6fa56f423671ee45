"""Draw the pictures of docs/idea.md and the README from runs made on the spot.

python docs/pictures/draw.py      (make pictures; minutes on 2 cores)
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Patch

import fedpews

HERE = Path(__file__).parent
NOBODY, FIRST, SECOND, BOTH = "#e9e9e6", "#0072b2", "#e69f00", "#6d4c7d"
PLAIN = "#777777"
METHOD, WARMUP = "fedavg+pews-fixed", {"rounds": 15}
ROUNDS, SEEDS, SAMPLES = 100, range(10), 3200
COLORS = ListedColormap([NOBODY, FIRST, SECOND, BOTH])

mpl.rcParams |= {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 100,
    "savefig.dpi": 160,
}


def rings(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four classes in interleaved clusters on two rings; the data of the README and the tutorial."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    k = torch.randint(2, (2, count), generator=generator)
    angle = (y + 4 * k[0] + 2.5 * k[1]) * math.pi / 4
    a, b = (4 - 2 * k[1]) * torch.stack([angle.cos(), angle.sin()]) + 0.1 * torch.randn(
        2, count, generator=generator
    )
    return torch.stack([a, b, a * a, b * b, a * b], 1), y


def network() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(5, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 32),
        torch.nn.ReLU(),
        torch.nn.Linear(32, 4),
    )


def masks_over_rounds(rounds: int, shown: int) -> np.ndarray:
    """Who owns each of the first hidden neurons in each round of a learned warmup, (rounds, neurons).

    Two clients, two classes each; 0 nobody, 1 the first, 2 the second, 3 both.
    """
    x, y = rings(800, seed=0)
    clients = [(x[y % 2 == part], y[y % 2 == part]) for part in (0, 1)]
    torch.manual_seed(0)
    net = fedpews.Network(network(), x[:1])
    method = fedpews.method("fedavg+pews", warmup={"rounds": rounds, "diversity": 5.0})
    state, memories, found = method.init(net, net.initial(), total=2), {}, []
    for t in range(1, rounds + 1):
        cohort = fedpews.Cohort(t, clients=(0, 1), total=2, seed=t)
        half = method.client(method.phase(state, t))
        uploads = []
        for i, download in zip(cohort.clients, method.downloads(net, state, cohort), strict=True):
            inputs, labels = clients[i]
            batches = torch.randperm(len(labels)).split(32)
            noise = torch.rand(len(batches) + 1, half.noise_size(net))
            local, losses = half.start(net, download, memories.get(i)), []
            for rows, numbers in zip(batches, noise[:-1], strict=True):
                local, loss = half.step(net, local, fedpews.Batch(inputs[rows], labels[rows]), numbers, 0.01)
                losses.append(float(loss))
            work = fedpews.Work(i, len(labels), len(batches), 0.01, sum(losses) / len(losses), noise[-1])
            memories[i], upload = half.finish(net, download, local, work)
            uploads.append(upload)
        owned = [upload.neurons[:shown].int().numpy() for upload in uploads]
        found.append(owned[0] + 2 * owned[1])
        average = fedpews.Average((1.0, 1.0), tuple(upload.ownership(net) for upload in uploads))
        state = method.update(net, state, uploads, average)
    return np.stack(found)


def accuracy(method: str) -> np.ndarray:
    """Held-out accuracy in percent of every seed after every round, (seeds, rounds): the README's run."""
    x, y = rings(SAMPLES, seed=0)
    result = fedpews.run(
        model=network,
        clients=[(x[y == label], y[y == label]) for label in range(4)],
        test=rings(2000, seed=1),
        method=method,
        rounds=ROUNDS,
        seeds=list(SEEDS),
        train={"lr": 0.01, "batch_size": 8},
        warmup=WARMUP if "pews" in method else {},
    )
    return 100 * np.array(
        [[row["accuracy"] for row in result.rounds if row["seed"] == seed] for seed in SEEDS]
    )


def draw_idea(path: Path) -> None:
    """Masks that part, curves that cross."""
    figure = plt.figure(figsize=(7.2, 5.2), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.25])
    draw_masks(above, masks_over_rounds(rounds=10, shown=32))
    runs = {"FedAvg": (accuracy("fedavg"), PLAIN), "with warmup\n(fixed masks)": (accuracy(METHOD), FIRST)}
    draw_curves(below.subplots(), runs)
    figure.savefig(path)


def draw_masks(figure: SubFigure, owners: np.ndarray) -> None:
    axes = figure.subplots()
    axes.pcolormesh(owners, cmap=COLORS, vmin=0, vmax=3, edgecolors="white", linewidth=0.7)
    axes.invert_yaxis()
    axes.set(xlabel="neuron of the first hidden layer", ylabel="warmup round", xticks=[])
    axes.set(yticks=[0.5, 4.5, 9.5], yticklabels=[1, 5, 10])
    axes.spines[:].set_visible(False)
    axes.set_title("Masks part: which of two clients trains a neuron", loc="left")
    _key(figure)


def draw_curves(axes: Axes, runs: dict[str, tuple[np.ndarray, str]]) -> None:
    for label, (curves, color) in runs.items():
        steps = np.arange(1, curves.shape[1] + 1)
        axes.plot(steps, curves.T, color=color, alpha=0.25, linewidth=0.8)
        axes.plot(steps, curves.mean(0), color=color, linewidth=2.2)
        axes.text(ROUNDS + 1, curves[:, -5:].mean(), label, color=color, va="center")
    axes.axvspan(0.5, WARMUP["rounds"] + 0.5, color=FIRST, alpha=0.1, linewidth=0)
    axes.text(WARMUP["rounds"] / 2 + 0.5, 95, "warmup", ha="center", va="center", color=FIRST)
    axes.set(xlim=(0.5, ROUNDS), ylim=(0, 102), xlabel="round", ylabel="held-out accuracy %")
    count = len(SEEDS)
    axes.set_title(f"Curves cross: four clients, one class each; {count} seeds and their mean", loc="left")


def draw_ownership(path: Path) -> None:
    """Which elements of the weights two clients with different neurons own."""
    x, _ = rings(8, seed=0)
    sizes = (5, 8, 8, 4)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    model = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    net = fedpews.Network(model, x[:1])
    first = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1, 0.0])
    second = torch.tensor([0, 0, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0.0])
    figure, places = plt.subplots(1, 3, figsize=(7.2, 2.5), layout="constrained", width_ratios=[5, 8, 8])
    titles = ("inputs → first layer", "first → second layer", "second layer → outputs")
    rows = ("neuron", "neuron", "output")
    for axes, name, title, row in zip(
        places, ("0.weight", "2.weight", "4.weight"), titles, rows, strict=True
    ):
        shape = net.initial()[name].shape
        owned = [net.graph.expand(neurons)[name].expand(shape).numpy() for neurons in (first, second)]
        axes.pcolormesh(owned[0] + 2 * owned[1], cmap=COLORS, vmin=0, vmax=3, edgecolors="white", linewidth=1)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.set(xticks=[], yticks=[], xlabel="what it reads", ylabel=row)
        axes.spines[:].set_visible(False)
    _key(figure)
    figure.savefig(path)


def _key(figure: Figure | SubFigure) -> None:
    kinds = {
        "client 1 alone": FIRST,
        "client 2 alone": SECOND,
        "both": BOTH,
        "nobody (keeps its value)": NOBODY,
    }
    marks = [Patch(color=color, label=label) for label, color in kinds.items()]
    figure.legend(handles=marks, ncols=4, frameon=False, loc="outside lower center", fontsize=8)


if __name__ == "__main__":
    draw_ownership(HERE / "ownership.png")
    draw_idea(HERE / "idea.png")
