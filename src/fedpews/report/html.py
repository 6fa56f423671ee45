"""Runs as one HTML page that needs nothing else: settings, curves, clients, masks and bytes."""

from __future__ import annotations

import io
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from fedpews.report.compare import COLUMNS, Run, find_runs, table, verdicts
from fedpews.report.curves import curve, new_figure, plot_curves
from fedpews.results import layout
from fedpews.results.nests import write_atomically
from fedpews.results.records import Record

SHOWN_CLIENTS = 12
"""Up to so many clients, each has its own line."""

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .7rem; border-bottom: 1px solid #ddd;
text-align: left } th { border-bottom: 2px solid #888 } svg { max-width: 100%; height: auto }
.differs { background: #fff3c4 } h2 { margin-top: 2.2rem } code { background: #f4f4f4; padding: 0 .2rem }
"""


def write_report(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of one run or of several side by side."""
    runs = find_runs(folders)
    write_atomically(path, make_report(runs).encode())
    return path


def make_report(runs: Sequence[Run]) -> str:
    """The page as text."""
    names = ", ".join(run.label for run in runs)
    target = runs[0].summary["target_accuracy"]
    records = {run.label: run.records for run in runs}
    parts = [
        f"<h1>{escape(names)}</h1>",
        _table([COLUMNS, *table(runs)]),
        *(f"<p>{escape(sentence)}</p>" for sentence in verdicts(runs)),
        f"<p>Target: {100 * target:g} %. A dotted line ends a warmup; bands are one standard deviation over seeds.</p>",
        "<h2>Accuracy</h2>",
        _svg(7.5, 4.2, lambda axes: plot_curves(axes, records, target=target)),
        "<h2>Loss</h2>",
        _svg(7.5, 3.4, lambda axes: plot_curves(axes, records, "loss")),
        _svg(7.5, 3.4, lambda axes: plot_curves(axes, records, "train_loss")),
        "<h2>Accuracy at each client's own classes</h2>",
        *(_clients(run) for run in runs),
        "<h2>Masks</h2>",
        _masks(records),
        *(_owners(run) for run in runs),
        "<h2>Bytes</h2>",
        _svg(7.5, 3.4, lambda axes: _plot_bytes(axes, records)),
        "<h2>Settings</h2>",
        _settings(runs),
    ]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(names)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _clients(run: Run) -> str:
    last = run.records[-1].get("client_accuracy")
    if last is None:
        return f"<p>{escape(run.label)}: too many clients to list.</p>"

    def plot(axes: Any) -> None:
        if len(last) <= SHOWN_CLIENTS:
            for client in range(len(last)):
                rounds, mean, _ = curve(run.records, "client_accuracy", client)
                axes.plot(rounds, mean, label=f"client {client}", linewidth=1.2)
        else:
            columns = [curve(run.records, "client_accuracy", client) for client in range(len(last))]
            rounds = columns[0][0]
            every = [sorted(values) for values in zip(*(mean for _, mean, _ in columns), strict=True)]
            for part, name in ((0, "lowest"), (0.5, "median"), (1, "highest")):
                axes.plot(rounds, [values[round(part * (len(values) - 1))] for values in every], label=name)
        axes.set(xlabel="round", ylabel="accuracy (%)", title=run.label)

    return _svg(7.5, 3.2, plot)


def _masks(records: Mapping[str, Sequence[Record]]) -> str:
    warm = {
        label: [record for record in run if record["phase"] == "warmup"] for label, run in records.items()
    }
    shown = {label: run for label, run in warm.items() if run}
    if not shown:
        return "<p>No warmup: every client trains every neuron in every round.</p>"
    words = {
        "density": "part of the neurons that a client trains",
        "coverage": "part of the neurons that somebody trains",
        "overlap": "neurons two clients share, of those either has",
    }

    def plot(key: str) -> Callable[[Any], None]:
        def draw(axes: Any) -> None:
            plot_curves(axes, shown, key)
            axes.set(ylabel=key, title=words[key], ylim=(-0.03, 1.03))

        return draw

    return "".join(_svg(7.5, 2.6, plot(key)) for key in words)


def _owners(run: Run) -> str:
    """Who owned which neurons at the end of the warmup, in the first seed that has masks."""
    files = layout.masks_files(run.path)
    if not files:
        return ""
    seed, file = next(iter(files.items()))
    from safetensors.numpy import load_file

    masks = load_file(file)
    clients = sorted(masks, key=lambda name: int(name.rpartition("-")[2]))

    def plot(axes: Any) -> None:
        axes.imshow([masks[name] for name in clients], aspect="auto", cmap="Blues", vmin=0, vmax=1.4)
        axes.set(xlabel="hidden neuron, layer by layer", ylabel="client")
        axes.set_title(f"{run.label}: owned in the last warmup round (seed {seed})")

    return _svg(7.5, min(6.0, 1.4 + 0.2 * len(clients)), plot)


def _plot_bytes(axes: Any, records: Mapping[str, Sequence[Record]]) -> None:
    for index, (label, run) in enumerate(records.items()):
        for key, style in (("bytes_up", "-"), ("bytes_down", "--")):
            rounds, mean, _ = curve(run, key)
            total = [value / 1e6 for value in accumulate(mean)]
            axes.plot(rounds, total, style, color=f"C{index}", label=f"{label} {key.removeprefix('bytes_')}")
    axes.set(xlabel="round", ylabel="MB so far, one seed")


def _settings(runs: Sequence[Run]) -> str:
    """Every key with its value in each run; the ones that differ are marked."""
    settings = [dict(_flat(tomllib.loads((run.path / layout.CONFIG).read_text()))) for run in runs]
    keys = list(dict.fromkeys(key for values in settings for key in values))
    rows = []
    for key in keys:
        values = [str(setting.get(key, "")) for setting in settings]
        mark = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        rows.append(f"<tr{mark}><td><code>{escape(key)}</code></td>{cells}</tr>")
    head = "".join(f"<th>{escape(run.label)}</th>" for run in runs)
    return f"<table><tr><th>key</th>{head}</tr>{''.join(rows)}</table>"


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><tr>{head}</tr>{body}</table>"


def _svg(width: float, height: float, plot: Callable[[Any], None]) -> str:
    """A figure as text inside the page: sharp at any size, and no second file."""
    import matplotlib

    figure = new_figure(width, height)
    axes = figure.subplots()
    plot(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedpews"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = "<svg" + buffer.getvalue().partition("<svg")[2]
    return re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
