"""Draw the pictures of docs/idea.md, docs/speed.md and the README; the curves are those of the published runs.

python docs/pictures/draw.py      (make pictures)
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from statistics import median

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure, SubFigure
from matplotlib.patches import Circle, Patch

import fedpews
from fedpews.paper.cells import read_published
from fedpews.paper.study import cells, load_study

HERE = Path(__file__).parent
NOBODY, FIRST, SECOND, BOTH = "#e9e9e6", "#0072b2", "#e69f00", "#6d4c7d"
PLAIN = "#777777"
WARMUP = 50
"""Rounds of the warmup in the study of four clients."""
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
    """Four classes in interleaved clusters on two rings; the data of the tutorial."""
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


def accuracy(row: str) -> np.ndarray:
    """Test accuracy in percent of every published seed after every round, (seeds, rounds), with four clients."""
    cell = next(cell for cell in cells(load_study("four-clients")) if cell.row == row)
    runs = read_published(HERE.parent / "results" / "runs", cell).runs
    return 100 * np.array([[record["accuracy"] for record in run] for run in runs.values()])


def draw_idea(path: Path) -> None:
    """Left, the masks of two clients separate; right, accuracy with and without a warmup."""
    figure = plt.figure(figsize=(8.6, 3.3), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1, 1.15])
    draw_masks(left, masks_over_rounds(rounds=10, shown=20))
    draw_curves(right.subplots(), {"FedAvg": accuracy("fedavg"), "FedAvg + warmup": accuracy("pews")})
    figure.savefig(path)


def draw_masks(figure: SubFigure, owners: np.ndarray) -> None:
    axes = figure.subplots()
    axes.pcolormesh(owners, cmap=COLORS, vmin=0, vmax=3, edgecolors="white", linewidth=0.7)
    axes.invert_yaxis()
    axes.set(xlabel="neuron", ylabel="warmup round", xticks=[])
    axes.set(yticks=[0.5, 4.5, 9.5], yticklabels=[1, 5, 10])
    axes.spines[:].set_visible(False)
    axes.set_title("Each client learns which neurons are its own", loc="left", fontsize=10)
    _key(figure, columns=2)


def draw_curves(axes: Axes, runs: dict[str, np.ndarray]) -> None:
    for (label, curves), color in zip(runs.items(), (PLAIN, FIRST), strict=True):
        steps = np.arange(1, curves.shape[1] + 1)
        low, high = np.quantile(curves, [0.25, 0.75], axis=0)
        axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
        axes.plot(steps, curves.mean(0), color=color, linewidth=1.6)
        text = f"{label}\n{curves[:, -1].mean():.0f} %"
        axes.text(len(steps) * 1.02, curves[:, -20:].mean(), text, color=color, va="center")
    axes.axvspan(0.5, WARMUP + 0.5, color=FIRST, alpha=0.1, linewidth=0)
    axes.text(WARMUP + 6, 4, "← warmup", va="center", color=FIRST)
    axes.set(xlim=(0.5, len(steps)), ylim=(0, 102), xlabel="round", ylabel="test accuracy (%)")
    axes.set_title(f"Four clients, one class each ({len(curves)} seeds)", loc="left", fontsize=10)


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
    titles = ("first hidden layer", "second hidden layer", "output layer")
    labels = ("input", "neuron of the first layer", "neuron of the second layer", "output")
    for axes, name, title, (column, row) in zip(
        places, ("0.weight", "2.weight", "4.weight"), titles, pairwise(labels), strict=True
    ):
        shape = net.initial()[name].shape
        owned = [net.graph.expand(neurons)[name].expand(shape).numpy() for neurons in (first, second)]
        axes.pcolormesh(owned[0] + 2 * owned[1], cmap=COLORS, vmin=0, vmax=3, edgecolors="white", linewidth=1)
        axes.invert_yaxis()
        axes.set_title(title, fontsize=9)
        axes.set(xticks=[], yticks=[], xlabel=column, ylabel=row)
        axes.spines[:].set_visible(False)
    _key(figure)
    figure.savefig(path)


# two clients' probabilities for the neurons of two hidden layers; a neuron is open from a half on
THETA = (
    ((0.9, 0.8, 0.6, 0.1), (0.8, 0.2, 0.9, 0.1)),
    ((0.2, 0.1, 0.7, 0.9), (0.1, 0.9, 0.7, 0.2)),
)
STEPS = {
    "1  Learn masks": "Each client learns a probability\nfor every neuron.",
    "2  Train subnetworks": "A client trains and sends its likely\nneurons. Each weight is averaged\n"
    "over the clients that own it.",
    "3  Train everything": "The masks are removed. All clients\ntrain the whole network.",
}

NOTES = (
    "The server sends the mean to all clients.",
    "Purple: both clients own it. Grey: neither.",
    "From now on: the plain method, e.g. FedAvg.",
)


def draw_steps(path: Path) -> None:
    """The method in three steps: two clients and the global model, in a small network."""
    figure = plt.figure(figsize=(9, 6.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 9), ylim=(0, 6.2), aspect="equal")
    axes.axis("off")
    for column, (title, text) in enumerate(STEPS.items()):
        left = 1.05 + 2.72 * column
        axes.text(left, 5.95, title, fontsize=12, weight="bold", va="top")
        axes.text(left, 5.65, text, fontsize=8.5, va="top", linespacing=1.25)
        for row, top in enumerate((4.75, 3.3, 1.85)):
            _draw_network(axes, left, top, column, row)
    for top, name, color in (
        (4.75, "client 1", FIRST),
        (3.3, "client 2", SECOND),
        (1.85, "global\nmodel", BOTH),
    ):
        axes.text(0.12, top - 0.45, name, color=color, weight="bold", fontsize=10, va="center")
    for column, text in enumerate(NOTES):
        axes.text(1.05 + 2.72 * column, 0.74, text, fontsize=7.5, color="#555555", va="center")
    for start, end, text, color in (
        (1.05, 6.25, "warmup: rounds 1 to W, both steps in every batch", FIRST),
        (6.49, 8.9, "rounds W + 1 to T", BOTH),
    ):
        arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.6}
        axes.annotate("", xy=(end, 0.42), xytext=(start, 0.42), arrowprops=arrow)
        axes.text((start + end) / 2, 0.2, text, ha="center", va="center", color=color, fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def _draw_network(axes: Axes, left: float, top: float, column: int, row: int) -> None:
    """One network: owners of its neurons are drawn as colours, in step 1 its probabilities as numbers."""
    mean = [[sum(pair) / 2 for pair in zip(*layer, strict=True)] for layer in zip(*THETA, strict=True)]
    theta = (*THETA, mean)[row]
    colors = (NOBODY, FIRST, SECOND, BOTH)
    owners = [
        [int(a >= 0.5) + 2 * int(b >= 0.5) for a, b in zip(*layer, strict=True)]
        for layer in zip(*THETA, strict=True)
    ]
    if column == 2:
        owners = [[3] * 4, [3] * 4]
    mine = (1, 2, 3)[row]
    layers = [[mine] * 3, *[[owner & mine for owner in layer] for layer in owners], [mine] * 2]
    points = [
        [(left + 0.12 + 0.68 * i, top - 0.45 - 0.27 * (j - (len(layer) - 1) / 2)) for j in range(len(layer))]
        for i, layer in enumerate(layers)
    ]
    for i in range(3):
        for start, one in zip(points[i], layers[i], strict=True):
            for end, other in zip(points[i + 1], layers[i + 1], strict=True):
                owner = 0 if column == 0 else one & other
                width, depth = (1.0, 2) if owner else (0.5, 1)
                axes.plot(
                    *zip(start, end, strict=True),
                    color=colors[owner] if owner else "#d9d9d5",
                    linewidth=width,
                    zorder=depth,
                )
    for i, layer in enumerate(layers):
        for j, (x, y) in enumerate(points[i]):
            hidden = i in (1, 2)
            face = colors[layer[j]] if hidden else "white"
            alpha = 1.0
            if column == 0 and hidden:
                face, alpha = colors[mine], 0.08 + 0.92 * theta[i - 1][j]
            axes.add_patch(Circle((x, y), 0.115, facecolor="white", edgecolor="none", zorder=3))
            edge = colors[mine] if column == 0 or not hidden else colors[layer[j]] if layer[j] else "#b5b5b0"
            axes.add_patch(
                Circle((x, y), 0.115, facecolor=to_rgba(face, alpha), edgecolor=edge, linewidth=0.8, zorder=4)
            )
            if column == 0 and hidden:
                value = theta[i - 1][j]
                ink = "white" if value > 0.55 else "#333333"
                axes.text(
                    x,
                    y,
                    f"{value:.2g}".lstrip("0"),
                    color=ink,
                    fontsize=6,
                    ha="center",
                    va="center",
                    zorder=5,
                )


def _key(figure: Figure | SubFigure, columns: int = 4) -> None:
    kinds = {"client 1 alone": FIRST, "client 2 alone": SECOND, "both": BOTH, "no client": NOBODY}
    marks = [Patch(color=color, label=label) for label, color in kinds.items()]
    figure.legend(handles=marks, ncols=columns, frameon=False, loc="outside lower center", fontsize=8)


def round_seconds(workload: str) -> dict[str, float]:
    """Seconds of a measured round by program, on two cores: the plain loop's, and what others take within a turn."""
    path = HERE.parents[1] / "benchmarks" / "results" / "amd-epyc-avx512-2-cores.json"
    results = {result["workload"]: result for result in json.loads(path.read_text())["results"]}
    measured = results[workload]["seconds"]["2"]
    seconds = {}
    for name, values in measured.items():
        # Flower took turns with a plain loop of its own
        beside = measured["plain loop, beside Flower" if name == "Flower simulation" else "plain loop"]
        ratios = [theirs / plain for theirs, plain in zip(values, beside, strict=True)]
        seconds[name] = median(measured["plain loop"]) * median(ratios)
    return seconds


FIRST_COLUMN = 56
"""Seconds from start to end on that machine, nothing compiled before: ``fedpews run synthetic-32k --method fedavg
--method fedavg+pews``."""

OTHERS = {"plain loop": "a plain PyTorch loop", "Flower simulation": "Flower", "pfl-research": "pfl-research"}


def minutes_of_table1() -> dict[str, float]:
    """FedAvg with and without a warmup, 200 rounds each; a measured round has the three seeds.

    Only fedpews has the warmup: for the others its rounds count as plain ones.
    """
    a = round_seconds("A2")
    return {"fedpews": FIRST_COLUMN / 60} | {label: 400 * a[name] / 60 for name, label in OTHERS.items()}


def hours_of_cifar_mnist() -> dict[str, float]:
    """FedAvg with one seed, 300 rounds; batches of 64 from 50,000 images at one client and 60,000 at the other."""
    b, steps = round_seconds("B"), (782, 938)
    # a measured round has 40 steps; where every client has a core of its own, all wait for the larger one
    both, larger = sum(steps) / 40, 2 * max(steps) / 40
    hours = {"fedpews": b["eager"] * larger}
    hours |= {label: b[name] * (larger if label == "Flower" else both) for name, label in OTHERS.items()}
    return {label: 300 * value / 3600 for label, value in hours.items()}


def draw_waiting(path: Path) -> None:
    """How long two results of the paper take with four programs."""
    figure, places = plt.subplots(1, 2, figsize=(8.6, 1.9), layout="constrained")
    panels = (
        ("Table 1, first column: 2 methods, 3 seeds", "minutes", minutes_of_table1()),
        ("CIFAR-MNIST: FedAvg, one seed", "hours", hours_of_cifar_mnist()),
    )
    for axes, (title, unit, values) in zip(places, panels, strict=True):
        colors = [FIRST if label == "fedpews" else PLAIN for label in values]
        bars = axes.barh(list(values), list(values.values()), height=0.65, color=colors)
        axes.bar_label(
            bars,
            [f" {value:.1f}" if value < 10 else f" {value:.0f}" for value in values.values()],
            fontsize=9,
        )
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.set(xlabel=unit)
        axes.tick_params("y", length=0)
        axes.set_title(title, loc="left", fontsize=10)
    figure.savefig(path)


if __name__ == "__main__":
    draw_steps(HERE / "steps.png")
    draw_ownership(HERE / "ownership.png")
    draw_idea(HERE / "idea.png")
    draw_waiting(HERE / "waiting.png")
