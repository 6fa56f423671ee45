"""What sites get back: the final model, the best one and their own, in each site's own folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from safetensors.torch import save

from fedpews.flower.messages import Part, Task, deliver, task_content
from fedpews.flower.roster import Roster
from fedpews.methods.contract import Download
from fedpews.methods.wire import encode_download
from fedpews.neurons.network import Network
from fedpews.results.files import write_atomically
from fedpews.results.records import Record, value_of
from fedpews.tasks.names import Goal, show
from fedpews.trees import Tree

FINAL, BEST, PERSONAL = "final", "best", "personal"


def tell_progress(say: Callable[[str], None], goal: Goal, records: Sequence[Record]) -> None:
    """How good each round's model is, over all sites and at each, for the stream that operators follow."""
    for record in records:
        value = value_of(record, goal.metric)
        if value is None:
            continue
        by_site = "".join(
            f", {name} {show(goal.metric, found.get(goal.metric))} of {found['samples']}"
            for name, found in record.get("sites", {}).items()
        )
        say(
            f"round {record['round']}, seed {record['seed']}: {goal.metric} {show(goal.metric, value)}, "
            f"loss {record['loss']:.4g}{by_site}"
        )


def send_models(
    grid: Grid, net: Network, roster: Roster, run: str, kind: str, models: Mapping[int, Tree], seconds: float
) -> list[str]:
    """Give every site that is connected the models; the names of those that have them now."""
    parts = tuple(
        Part(seed, encode_download(net, Download(0, kind, roster.total, model)))
        for seed, model in models.items()
    )
    content = task_content(Task(run, 0, 0.0, parts))
    nodes = roster.online()
    messages = {
        site: Message(content, node, f"{MessageType.QUERY}.{kind}", ttl=seconds)
        for site, node in nodes.items()
    }
    answers = deliver(grid, messages, seconds) if messages else {}
    return [roster.name(site) for site, reply in sorted(answers.items()) if isinstance(reply, Message)]


def keep_models(folder: Path, kind: str, models: Mapping[int, Tree]) -> list[Path]:
    """Write models into a site's folder, as `fedpews run` writes its own; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{kind}-model-{seed}.safetensors" for seed in models]
    for path, model in zip(paths, models.values(), strict=True):
        write_atomically(path, save({name: value.cpu().contiguous() for name, value in model.items()}))
    return paths
