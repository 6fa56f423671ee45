"""The settings of `fedpews reproduce map`: every method has four trials, FedAdam eight, on a draw of the data of
its own.

    python benchmarks/tune_map.py trials                 # writes the study map-tuning
    fedpews reproduce map-tuning --out build/lab         # about 2 of the 6 core-hours
    python benchmarks/tune_map.py settings --out build/lab   # writes results/map-tuning.json and the study map
    fedpews reproduce map --out build/lab                # then settings again: its claims name the best methods

A trial's score is its accuracy on validation data, the mean over the last tenth of the rounds. The draw and its
validation data are used for nothing else. A cell without finished trials gets the second one. What is chosen becomes
part of the study, with a claim for each problem: does the best warmup add to the best method without one?

Measured in core-seconds: a trial of a synthetic problem takes 7 and ten seeds of a cell 32 to 39; a seed of CIFAR-MNIST
takes 6 with FedAvg and 8 with learned masks. With 24 cells and 96 trials for each of the ten problems that is about
6 core-hours.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from fedpews.paper.cells import Runner
from fedpews.paper.measures import MEASURES
from fedpews.paper.study import cells, load_study

STUDIES = Path(__file__).parent.parent / "src/fedpews/paper/studies"
PUBLISHED = Path(__file__).parent.parent / "docs/results/runs"
SCORES = Path(__file__).parent / "results/map-tuning.json"
"""Of all trials that have run."""
DRAW = 100
"""Of the data, for the trials."""
HOURS = {"map-tuning": 2, "map": 4}
CHOICE = "late_validation"
"""The measure that the trials are compared by."""

TUNING_NOTES = f"""
Data draw {DRAW}, with a fifth of each client's samples for validation. The map uses the best trial of each method,
by the mean accuracy on validation data over the last tenth of the rounds.""".replace("\n", " ").strip()

NOTES = """
Each method has the best of its four trials, FedAdam of eight, on a separate draw of the data (see the tuning for
the map; {} of {} problems are tuned, in the others each method has its second trial). A cell is the mean of the
paired differences to the same method without a warmup, with its 95 % interval. Grey is undecided: the interval
contains 0, or p (sign-flip test, Holm over the 18 comparisons of a problem) is 0.05 or more. Frames mark the
warmups of the method that is best without one. W is an eighth of the rounds, for images a quarter. A client that
diverges is left out of that round. Networks and data are small (images of 16×16 pixels), so that all of it takes
about 6 core-hours.
""".replace("\n", " ").strip()

Settings = dict[str, Any]

RATES = (0.01, 0.03, 0.1, 0.3)
SERVER_RATES = (0.003, 0.01, 0.03, 0.1)
BASES: dict[str, tuple[str, Settings, list[Settings]]] = {
    "fedavg": ("FedAvg", {"method.name": "fedavg"}, [{"train.lr": lr} for lr in RATES]),
    "momentum": (
        "FedAvg with momentum",
        {"method.name": "fedavg", "train.momentum": 0.9},
        [{"train.lr": lr} for lr in (0.003, 0.01, 0.03, 0.1)],
    ),
    "scaffold": ("SCAFFOLD", {"method.name": "scaffold"}, [{"train.lr": lr} for lr in RATES]),
    "scaffold-m": ("SCAFFOLD-M", {"method.name": "scaffold-m"}, [{"train.lr": lr} for lr in RATES]),
    "fedadam": (
        "FedAdam",
        {"method.name": "fedadam", "train.lr": 0.03},
        # it has two rates, so it has twice as many trials
        [{"train.server_lr": lr} for lr in SERVER_RATES]
        + [{"train.lr": 0.3, "train.server_lr": lr} for lr in SERVER_RATES],
    ),
    "fedprox": ("FedProx", {"method.name": "fedprox", "method.mu": 0.01}, [{"train.lr": lr} for lr in RATES]),
}
"""By row: its label, its settings, and the trials."""

WARMUPS = {
    "fixed": ("Fixed", "pews-fixed"),
    "learned": ("learned", "pews"),
    "random": ("random", "pews-random"),
}

SYNTHETIC: Settings = {"rounds": 200, "data.partition": "class", "runtime.evaluate_every": 2}
SYNTHETIC |= {"runtime.engine": "compiled", "warmup.fraction": 0.125, "warmup.diversity": 0.0}
FOUR = SYNTHETIC | {"data.name": "synthetic-3.2k", "data.train_per_class": 800, "data.test_per_class": 200}
IMAGES: Settings = {"rounds": 40, "runtime.evaluate_every": 2, "runtime.engine": "eager"}
IMAGES |= {"warmup.fraction": 0.25, "warmup.diversity": 1.0}
CNN: Settings = {"model.name": "cnn", "model.hidden": [8, 16, 32], "model.pools": 2}
CNN_OF_TEN = CNN | {"model.hidden": [12, 16, 32]}  # a neuron at least for each of ten clients
# 16×16 pixels: a step takes half the time of 32×32
PER_CLASS: Settings = {"data.train_per_class": 100, "data.test_per_class": 30, "data.image_size": 16}
TEN = IMAGES | PER_CLASS | {"data.clients": 10}
DIRICHLET = TEN | CNN_OF_TEN | {"rounds": 60, "data.name": "cifar10", "data.partition": "dirichlet"}
DISJOINT = TEN | {"data.name": "cifar100", "data.partition": "noc", "data.classes_per_client": 2}
PROBLEMS: dict[str, tuple[str, Settings]] = {
    "n4": ("synthetic, N = 4", FOUR),
    "n8": (
        "synthetic, N = 8",
        SYNTHETIC | {"data.name": "synthetic-8", "data.train_per_class": 400, "data.test_per_class": 100},
    ),
    "n16": (
        "synthetic, N = 16",
        SYNTHETIC | {"data.name": "synthetic-16", "data.train_per_class": 200, "data.test_per_class": 50},
    ),
    "cifar-mnist": (
        "CIFAR-MNIST, N = 2",
        IMAGES | CNN | PER_CLASS | {"data.name": "cifar-mnist", "data.partition": "source"},
    ),
    "cifar100": ("CIFAR-100, N = 10", DISJOINT | CNN_OF_TEN),
    "domains": (
        "domain shift, N = 4",
        IMAGES | CNN | {"rounds": 60, "data.name": "fedpews.paper.domains:digits", "data.partition": "given"},
    ),
    "dirichlet-001": ("Dirichlet 0.01, N = 10", DIRICHLET | {"data.alpha": 0.01}),
    "dirichlet-01": ("Dirichlet 0.1, N = 10", DIRICHLET | {"data.alpha": 0.1}),
    "sites": (
        "MedMNIST, N = 3",
        IMAGES | CNN | PER_CLASS | {"data.name": "pathmnist+octmnist+bloodmnist", "data.partition": "source"},
    ),
    "pretrained": (
        "pretrained, N = 4",
        FOUR
        | {
            f"pretrain.{k}": v
            for k, v in {"data": "synthetic-3.2k", "train_per_class": 10, "seed": 200}.items()
        }
        | {"pretrain.epochs": 100, "pretrain.lr": 0.01},
    ),
    "resnet": (
        "CIFAR-100, ResNet-20, N = 10",
        DISJOINT | {"model.name": "resnet", "model.depth": 20, "model.width": 8},
    ),
    "vit": ("CIFAR-100, ViT, N = 10", DISJOINT | {"model.name": "vit"}),
}

ONLY = {"resnet": ("fedavg", "momentum"), "vit": ("fedavg", "momentum")}
"""Problems that only some of the base methods have, with their warmups."""


def methods() -> dict[str, tuple[str, Settings, list[Settings]]]:
    """Every base method, then each with its three warmups: label, settings, trials."""
    every = {}
    for row, (label, settings, trials) in BASES.items():
        every[row] = label, settings, trials
        for kind, (name, suffix) in WARMUPS.items():
            warm = settings | {"method.name": f"{settings['method.name']}+{suffix}"}
            every[f"{row}-{kind}"] = f"{label}, {name}", warm, trials
    return every


def problems_of(row: str) -> list[str]:
    """The problems of a row."""
    base = next(name for name in sorted(BASES, key=len, reverse=True) if row.startswith(name))
    return [problem for problem in PROBLEMS if base in ONLY.get(problem, BASES)]


def only(row: str) -> Settings:
    """The entry of a study's row that is not in every column."""
    some = problems_of(row)
    return {} if len(some) == len(PROBLEMS) else {"columns": some}


def trials() -> dict[str, Any]:
    """The study map-tuning."""
    rows = {
        f"{row}-{number}": {"label": f"{label}: {_words(trial)}", "set": settings | trial, **only(row)}
        for row, (label, settings, some) in methods().items()
        for number, trial in enumerate(some, 1)
    }
    draw = {"data.seed": DRAW, "data.validation": 0.2}
    return {
        "order": 30,
        "item": "Beyond the paper",
        "title": "Tuning for the map, on separate data",
        "base": "synthetic-32k",
        "seeds": [0],
        "measures": [CHOICE],
        "figures": [{"kind": "curves", "options": {"rows": [f"fedavg-{number}" for number in range(1, 5)]}}],
        "notes": TUNING_NOTES,
        "rows": rows,
        "columns": {name: {"label": label, "set": some | draw} for name, (label, some) in PROBLEMS.items()},
    }


Scores = dict[str, dict[str, list[float | None]]]


def scores(out: Path, file: Path | None = None) -> Scores:
    """Method → problem → the measure of each trial, None for one that diverged; finished problems only.

    What is known from earlier is in a file, which gets what is new.
    """
    file = file or SCORES
    known: Scores = json.loads(file.read_text())["scores"] if file.exists() else {}
    runner, measure = Runner(out), MEASURES[CHOICE]
    results = {(c.row, c.column): runner.read(c) for c in cells(load_study("map-tuning"))}
    for row, (_, _, some) in methods().items():
        for column in problems_of(row):
            tried = [results[f"{row}-{number}", column] for number in range(1, len(some) + 1)]
            # a run that diverged has a folder without an end
            if any(result.runs for result in tried):
                earlier = dict(enumerate(known.get(row, {}).get(column, [])))
                known.setdefault(row, {})[column] = [
                    measure.read(r.runs[0], r.cell.experiment.goal) if r.runs else earlier.get(number)
                    for number, r in enumerate(tried)
                ]
    if known:
        text = json.dumps({"draw": DRAW, "measure": CHOICE, "scores": known}, indent=None)
        file.write_text(text.replace('}, "', '},\n"') + "\n")
    return known


def finished(out: Path) -> dict[str, dict[str, float]]:
    """Problem → method without a warmup → its mean, of the problems in which all of them have run.

    A seed that diverged is left out, so more than half of the seeds are enough.
    """
    runner, measure = Runner(out, PUBLISHED), MEASURES["late"]
    means: dict[str, dict[str, float]] = {problem: {} for problem in PROBLEMS}
    for cell in cells(load_study("map")):
        result = runner.read(cell)
        if cell.row in BASES and len(result.runs) > len(result.missing):
            values = [measure.read(run, cell.experiment.goal) for run in result.runs.values()]
            means[cell.column][cell.row] = fmean(values)
    return {problem: rows for problem, rows in means.items() if len(rows) == len(ONLY.get(problem, BASES))}


def settings(known: Scores, measured: dict[str, dict[str, float]]) -> dict[str, Any]:
    """The study map, with the best trial of each method in each problem.

    The claim of a problem is about the method that is best without a warmup: in the map where it has run, which favours
    that method, else in the trials. Which of its warmups is decided by the trials.
    """
    rows, than = {}, {}
    best = {
        (row, column): max((score, number) for number, score in enumerate(tried) if score is not None)
        for row, problems in known.items()
        for column, tried in problems.items()
    }
    for row, (label, common, some) in methods().items():
        at = {column: some[best[row, column][1]] for column in PROBLEMS if (row, column) in best}
        rows[row] = {"label": label, "set": common | some[1], "at": at, **only(row)}
        base, _, kind = row.rpartition("-")
        if kind in WARMUPS:
            than[row] = base
    claims = []
    for column, (name, _) in PROBLEMS.items():
        if any((row, column) not in best for row in rows if column in problems_of(row)):
            continue
        means = measured.get(column, {row: best[row, column] for row in ONLY.get(column, BASES)})
        base = max(means, key=lambda row: means[row])
        warm = max((f"{base}-{kind}" for kind in WARMUPS), key=lambda row: best[row, column])
        text = f"{name}: a warmup adds to the method that is best without one"
        claims.append({"text": text, "rows": [warm], "than": base, "measure": "late", "columns": [column]})
    options = {"measure": "late", "than": than, "title": "what a warmup adds to each method"}
    return {
        "order": 31,
        "item": "Beyond the paper",
        "title": "What a warmup adds to each method, problem by problem",
        "base": "synthetic-32k",
        "seeds": list(range(10)),
        "draws": 2,
        "measures": ["late"],
        "figures": [{"kind": "gains", "options": options}],
        "notes": NOTES.format(len(claims), len(PROBLEMS)),
        "rows": rows,
        "columns": {
            name: {"label": label, "set": some | {"train.diverged": "leave-out"}}
            for name, (label, some) in PROBLEMS.items()
        },
        "claims": claims,
    }


def _words(trial: Settings) -> str:
    return ", ".join(f"{key.rpartition('.')[2]} {value:g}" for key, value in trial.items())


def inline(value: Any) -> str:
    """A value as TOML in one line; a dict's dotted keys stay as they are."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(some)}" for key, some in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def write(name: str, study: dict[str, Any]) -> None:
    """The file of a study, with a line for each row, column and claim."""
    lines = [f"# fedpews reproduce {name}", "# Written by benchmarks/tune_map.py: change the tables there."]
    lines.append(f"# Expected time: {HOURS[name]} core-hours.")
    tables = {"rows", "columns"}
    lines += [f"{key} = {inline(value)}" for key, value in study.items() if key not in tables | {"claims"}]
    for table in sorted(tables, reverse=True):
        lines += ["", f"[{table}]", *(f"{key} = {inline(value)}" for key, value in study[table].items())]
    for claim in study.get("claims", []):
        lines += ["", "[[claims]]", *(f"{key} = {inline(value)}" for key, value in claim.items())]
    (STUDIES / f"{name}.toml").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["trials", "settings"])
    parser.add_argument("--out", type=Path, default=Path("build/lab"))
    options = parser.parse_args()
    if options.what == "trials":
        write("map-tuning", trials())
    else:
        write("map", settings(scores(options.out), finished(options.out)))


if __name__ == "__main__":
    main()
