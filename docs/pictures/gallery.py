"""Draw the pictures of examples/README.md: the data of each example, or what it prints.

python docs/pictures/gallery.py      (make pictures; a minute on 2 cores)
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from draw import BOTH, FIRST, NOBODY, SECOND, rings
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

EXAMPLES = Path(__file__).parents[2] / "examples"
PICTURES = EXAMPLES / "pictures"
CLASSES = (FIRST, SECOND, BOTH, "#009e73")


def example(name: str) -> dict[str, Any]:
    """The names of an example script; its main function is not called."""
    return runpy.run_path(str(EXAMPLES / name), run_name="example")


def row(count: int) -> tuple[plt.Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(3.6, 1.7), layout="constrained", squeeze=False)
    return figure, list(axes[0])


def scatter(panels: dict[str, tuple[Any, Any, Any]], xlabel: str, ylabel: str) -> plt.Figure:
    """One panel of points per client: x, y and the class of each."""
    figure, places = row(len(panels))
    xs, ys = (np.concatenate([np.asarray(panel[i]) for panel in panels.values()]) for i in (0, 1))
    for axes, (title, (x, y, label)) in zip(places, panels.items(), strict=True):
        axes.scatter(x, y, c=[CLASSES[int(one)] for one in label], s=3)
        axes.set(xticks=[], yticks=[], xlabel=xlabel, xlim=limits(xs), ylim=limits(ys))
        axes.set_title(title, fontsize=8)
    places[0].set_ylabel(ylabel)
    return figure


def limits(values: np.ndarray) -> tuple[float, float]:
    margin = 0.06 * float(np.ptp(values))
    return float(values.min()) - margin, float(values.max()) + margin


def images(panels: dict[str, Any], same_scale: bool = False) -> plt.Figure:
    figure, places = row(len(panels))
    pixels = np.concatenate([np.asarray(image).ravel() for image in panels.values()])
    scale = {"vmin": pixels.min(), "vmax": pixels.max()} if same_scale else {}
    for axes, (title, image) in zip(places, panels.items(), strict=True):
        axes.imshow(np.asarray(image), cmap="gray", interpolation="nearest", **scale)
        axes.set_title(title, fontsize=8)
        axes.axis("off")
    return figure


def sites(server: str, clients: tuple[str, str]) -> plt.Figure:
    """A server and two sites; what goes between them is a model, never data."""
    figure, (axes,) = row(1)
    axes.set(xlim=(0, 3.6), ylim=(0, 1.7))
    axes.axis("off")
    box = {"boxstyle": "round,pad=0.4", "edgecolor": "none"}
    for x, name, color in ((0.75, clients[0], FIRST), (2.85, clients[1], SECOND)):
        arrow = {"arrowstyle": "<->", "color": color, "linewidth": 1.5}
        axes.annotate("", xy=(x, 0.62), xytext=(1.8, 1.18), arrowprops=arrow)
        axes.text(
            x,
            0.4,
            name,
            ha="center",
            va="center",
            color="white",
            fontsize=8,
            bbox={**box, "facecolor": color},
        )
    axes.text(
        1.8,
        1.38,
        server,
        ha="center",
        va="center",
        color="white",
        fontsize=8,
        bbox={**box, "facecolor": BOTH},
    )
    axes.text(1.8, 0.72, "models,\nno data", ha="center", va="center", fontsize=7)
    return figure


def a_round_by_hand() -> plt.Figure:
    command = [sys.executable, str(EXAMPLES / "a_round_by_hand.py")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rounds = re.findall(r"round +(\d+) (\w+) +([\d.]+)", text)
    figure, (axes,) = row(1)
    axes.plot(
        [int(number) for number, _, _ in rounds], [100 * float(value) for _, _, value in rounds], color=FIRST
    )
    warmup = sum(kind == "warmup" for _, kind, _ in rounds)
    axes.axvspan(1, warmup + 0.5, color=FIRST, alpha=0.1, linewidth=0)
    axes.text(warmup / 2 + 0.7, 96, "warmup", ha="center", va="top", color=FIRST, fontsize=8)
    axes.set(xlabel="round", ylabel="accuracy %", ylim=(0, 100))
    return figure


def own_model_and_data() -> plt.Figure:
    sensors = example("own_model_and_data.py")["sensors"]
    parts = {
        "client 1": sensors(300, (0, 1)),
        "client 2": sensors(300, (2, 3)),
        "test": sensors(300, (0, 1, 2, 3)),
    }
    return scatter({name: (x[:, 0], x[:, 1], y) for name, (x, y) in parts.items()}, "reading 1", "reading 2")


def tour() -> plt.Figure:
    x, y = rings(800, seed=0)
    return scatter({f"client {k + 1}": (x[y == k, 0], x[y == k, 1], y[y == k]) for k in range(4)}, "", "")


def own_data() -> plt.Figure:
    make, rng = example("own-data/make_folders.py"), np.random.default_rng(1)
    motifs = {
        "anna/across": "across",
        "anna/upright": "upright",
        "bert/falling": "falling",
        "bert/rising": "rising",
    }
    return images({title: make["photo"](rng, motif) for title, motif in motifs.items()})


def own_model() -> plt.Figure:
    figure, (axes,) = row(1)
    axes.set(xlim=(0, 3.6), ylim=(0, 1.7))
    axes.axis("off")
    boxes = {
        "convolution,\nbatch norm": (0.55, 0.6),
        "depthwise": (1.6, 0.6),
        "gate": (2.2, 1.35),
        "head": (3.05, 0.6),
    }
    for name, (x, y) in boxes.items():
        style = {
            "boxstyle": "round,pad=0.35",
            "facecolor": NOBODY if name == "head" else FIRST,
            "edgecolor": "none",
        }
        ink = "black" if name == "head" else "white"
        axes.text(x, y, name, ha="center", va="center", fontsize=7.5, color=ink, bbox=style)
    for start, end in (
        ((1.02, 0.6), (1.25, 0.6)),
        ((1.95, 0.6), (2.8, 0.6)),
        ((1.7, 0.82), (2.0, 1.2)),
        ((2.3, 1.15), (2.35, 0.65)),
    ):
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": "#555555"})
    axes.text(1.45, 0.12, "blue: neurons that a mask can close", ha="center", fontsize=7, color=FIRST)
    return figure


def domain_shift() -> plt.Figure:
    module = example("tasks/domain_shift.py")
    scans = {name: module["scan"](3, *look, 1)[0][0, 0] for name, look in module["SITES"].items()}
    return images(scans, same_scale=True)


def multilabel() -> plt.Figure:
    write = example("tasks/multilabel.py")["write_made_up_chestmnist"]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "medmnist", 8)
        with np.load(Path(folder) / "medmnist" / "chestmnist.npz") as arrays:
            pictures, labels = arrays["train_images"], arrays["train_labels"]
    return images({f"findings: {labels[i].sum()}": pictures[i] for i in range(3)})


def regression() -> plt.Figure:
    clients = example("tasks/regression.py")["CLIENTS"]
    panels = {}
    for number, client in enumerate(clients):
        x, y = client["train"]
        panels[f"site {number + 1}"] = (x[:, 0], y, [number] * len(y))
    return scatter(panels, "reading", "dose")


def segmentation() -> plt.Figure:
    clients = example("tasks/segmentation.py")["CLIENTS"]
    panels = {}
    for number, client in enumerate(clients):
        x, y = client["train"]
        panels |= {
            f"hospital {number + 1}": x[0, 0],
            "labels" + " " * number: np.where(y[0] == 255, 0.5, y[0]),
        }
    return images(panels)


def tabular() -> plt.Figure:
    module = example("tasks/tabular.py")
    with tempfile.TemporaryDirectory() as folder:
        module["write_clinics"](Path(folder))
        tables = {path.parent.name: pd.read_csv(path) for path in sorted(Path(folder).glob("*/train.csv"))}
    classes = {name: number for number, name in enumerate(module["CLASSES"])}
    return scatter(
        {
            name: (table["age"], table["marker"], table["finding"].map(classes))
            for name, table in tables.items()
        },
        "age",
        "marker",
    )


def text() -> plt.Figure:
    clients = example("tasks/text.py")["CLIENTS"]
    figure, places = row(2)
    for axes, client, title in zip(places, clients, ("shop 1", "shop 2"), strict=True):
        tokens = client["train"][0]["input_ids"][:8].numpy()
        axes.imshow(np.ma.masked_equal(tokens, 0), cmap="viridis", vmin=1, vmax=58, aspect="auto")
        axes.set(xticks=[], yticks=[], xlabel="word", ylabel="review")
        axes.set_title(title, fontsize=8)
    return figure


def serve() -> plt.Figure:
    """A request, and what the model answers."""
    figure, (axes,) = row(1)
    axes.set(xlim=(0, 3.6), ylim=(0, 1.7))
    axes.axis("off")
    box = {"boxstyle": "round,pad=0.4", "edgecolor": "none", "facecolor": NOBODY}
    axes.text(
        0.9, 1.25, "[[0.3, -1.2, 0.1, 1.4, -0.4]]", ha="center", fontsize=7, family="monospace", bbox=box
    )
    axes.text(0.9, 0.35, "[[.01, .02, .95, .02]]", ha="center", fontsize=7, family="monospace", bbox=box)
    model = {**box, "facecolor": BOTH}
    axes.text(2.9, 0.8, "run.predict", ha="center", color="white", fontsize=8, bbox=model)
    for start, end in (((1.9, 1.25), (2.6, 1.02)), ((2.6, 0.68), (1.75, 0.42))):
        axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "color": BOTH})
    return figure


DRAWN: dict[str, Callable[[], plt.Figure]] = {
    "a-round-by-hand": a_round_by_hand,
    "own-model-and-data": own_model_and_data,
    "tour": tour,
    "own-data": own_data,
    "own-model": own_model,
    "domain-shift": domain_shift,
    "multilabel": multilabel,
    "regression": regression,
    "segmentation": segmentation,
    "tabular": tabular,
    "text": text,
    "serve": serve,
    "hospitals": lambda: sites("server", ("pathology", "eye clinic")),
    "flower-quickstart": lambda: sites("WithWarmup(FedAvg(...))", ("LocalWarmup", "LocalWarmup")),
}

if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    for name, draw in DRAWN.items():
        figure = draw()
        figure.savefig(PICTURES / f"{name}.png", dpi=110)
        plt.close(figure)
