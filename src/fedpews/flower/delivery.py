"""What sites get back at the end: the final model and the best one, in each site's own folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from safetensors.torch import save

from fedpews.flower.messages import Part, Task, deliver, task_content
from fedpews.flower.roster import Roster
from fedpews.methods.contract import Download
from fedpews.methods.wire import encode_download
from fedpews.neurons.network import Network
from fedpews.results.nests import write_atomically
from fedpews.trees import Tree

FINAL, BEST = "final", "best"


class Best:
    """The model of the round with the highest accuracy, for each seed. A round's record may come a round later."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._recent: dict[int, Mapping[int, Tree]] = {}  # by round
        self._accuracy: dict[int, float] = {}
        self.models: dict[int, Tree] = {}
        self.rounds: dict[int, int] = {}

    def keep(self, round: int, models: Mapping[int, Tree]) -> None:
        """The global models after a round."""
        self._recent[round] = models
        self._recent.pop(round - 2, None)

    def judge(self, records: Sequence[Mapping[str, Any]]) -> None:
        """What is known of rounds now; each is also told in the stream."""
        for record in records:
            seed, round, accuracy = record["seed"], record["round"], record.get("accuracy")
            if accuracy is None:
                continue
            by_site = record.get("sites", {})
            told = "".join(f", {name} {found['accuracy']:.1%}" for name, found in by_site.items())
            self._say(f"round {round}, seed {seed}: accuracy {accuracy:.1%}, loss {record['loss']:.4g}{told}")
            if accuracy > self._accuracy.get(seed, -1.0) and round in self._recent:
                self._accuracy[seed], self.rounds[seed] = accuracy, round
                self.models[seed] = self._recent[round][seed]


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


def keep_models(folder: Path, kind: str, models: Mapping[int, Tree]) -> None:
    """Write models into a site's folder, as `fedpews run` writes its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, model in models.items():
        data = save({name: value.cpu().contiguous() for name, value in model.items()})
        write_atomically(folder / f"{kind}-model-{seed}.safetensors", data)
