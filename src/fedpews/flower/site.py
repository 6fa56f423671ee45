"""One site's part of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.engines.diverging import explain, sort_out
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Job, Schedule
from fedpews.engines.evaluate import Part as EvaluatedPart
from fedpews.engines.evaluate import Score
from fedpews.flower.delivery import PERSONAL, keep_models
from fedpews.flower.hello import Facts
from fedpews.flower.memory import MemoryLost, SiteMemory
from fedpews.flower.messages import Part, Task
from fedpews.flower.scores import least
from fedpews.flower.uploads import sample_upload
from fedpews.measure import personal_metric, score_personal
from fedpews.methods.contract import Cohort, Download, Method, Upload
from fedpews.methods.wire import decode_download, encode_upload
from fedpews.neurons.network import Network
from fedpews.tasks.metrics import Sums
from fedpews.tasks.names import show
from fedpews.trees import Nest

LATE = 10**9
"""A round after every warmup."""


@dataclass(frozen=True)
class Site:
    """Everything a site needs to train: its number, its own data, and the method it agreed to run."""

    number: int
    net: Network
    method: Method
    data: Federation  # of all clients only this site's rows are used
    schedule: Schedule
    memory: Callable[[str], SiteMemory]  # by the name of the run
    facts: Callable[[], Facts]  # what it says of itself when it is met
    say: Callable[[str], None] = lambda text: None  # shows a line to the people at this site
    restart_lost: bool = False  # begin anew when the memory is gone
    workers: int = 1  # seeds trained at once
    threads: int = 1  # cores for each; the numbers are those of one process with 1 only

    def train(self, task: Task) -> dict[int, bytes]:
        """The encoded upload for each seed. The memory is on disk before any of them is sent."""
        memory = self.memory(task.run)
        jobs = []
        for part in task.parts:
            download = self._receive(part)
            try:
                kept = memory.read(part.seed, part.accepted)
            except MemoryLost:
                if not self.restart_lost:
                    raise
                kept = None
            half = self.method.client(download.phase)
            kept = None if kept is None else self._here(kept, self._device)
            jobs.append(Job(part.seed, self.number, half, download, kept, task.lr))
        with closing(self._engine()) as engine:
            finished, bad = sort_out(self.net, engine.train(jobs))
        if bad:
            raise explain(bad, jobs)
        for part, done in zip(task.parts, finished, strict=True):
            memory.write(part.seed, task.round, self._here(done.memory, "cpu"), part.kept)
        uploads = {done.seed: encode_upload(self.net, self._send(done.upload)) for done in finished}
        loss = sum(done.upload.loss for done in finished) / len(finished)
        shown = f", training loss {loss:.4g}" if loss else ""  # 0 where it is private
        size = sum(map(len, uploads.values()))
        self.say(
            f"round {task.round} ({jobs[0].download.phase}): trained on {len(self.data.clients[self.number])} "
            f"samples{shown}; {size:,} bytes to send"
        )
        return uploads

    def rehearse(self) -> None:
        """A step of every kind of round on two empty samples, and none of it kept."""
        state = self.method.init(self.net, self.net.initial(), len(self.data))
        for round in (1, LATE):
            phase = self.method.phase(state, round)
            cohort = Cohort(round, (self.number,), len(self.data), 0)
            (download,) = self.method.downloads(self.net, state, cohort)
            sample_upload(self.net, Job(0, self.number, self.method.client(phase), download, None, 0.1))

    def keep(self, kind: str, task: Task) -> None:
        """Put the models that the server hands out at the end into this site's folder."""
        models = {part.seed: self._receive(part).params for part in task.parts}
        paths = ", ".join(map(str, keep_models(self.memory(task.run).folder, kind, models)))
        self.say(f"the run is finished; the {kind} model: {paths}")

    def evaluate(self, task: Task) -> dict[EvaluatedPart, dict[int, Sums]]:
        """For each seed's model the sums over the site's own test samples, and over those it holds out."""
        models = [self._receive(part).params for part in task.parts]
        seeds = [part.seed for part in task.parts]
        found: dict[EvaluatedPart, dict[int, Sums]] = {"test": {seed: {} for seed in seeds}}
        with closing(self._engine()) as engine:
            if len(self.data.test_y):
                scores = engine.evaluate(models, seeds)
                found["test"] = self._sums(seeds, scores)
                self._say_scores(task, found["test"])
            if self.data.validation:
                found["validation"] = {seed: {} for seed in seeds}
            if self.data.validation and len(self.data.validation[self.number]):
                held = engine.evaluate(models, seeds, "validation")
                found["validation"] = self._sums(seeds, held)
        return found

    def _say_scores(self, task: Task, found: Mapping[int, Sums]) -> None:
        """How good the downloaded model is here, as the mean over seeds."""
        values = [self.data.task.measure(sums) for sums in found.values()]
        means = []
        for metric in values[0]:
            known = [value for one in values if (value := one[metric]) is not None]
            means.append(f"{metric} {show(metric, sum(known) / len(known) if known else None)}")
        when = f"round {task.round}, the model as received" if task.evaluate else f"after round {task.round}"
        self.say(f"{when}: {', '.join(means)} on {len(self.data.test_y)} test samples of this site")

    def _sums(self, seeds: Sequence[int], scores: Sequence[Score]) -> dict[int, Sums]:
        return {seed: least(self.data.task, score.sums) for seed, score in zip(seeds, scores, strict=True)}

    def evaluate_personal(self, task: Task) -> float:
        """How good this site's own model is on its own test samples, or on the classes it has.

        The model itself is left in the site's folder.
        """
        (part,) = task.parts
        download = self._receive(part)
        memory = self.memory(task.run).read(part.seed, part.accepted)
        if memory is None:
            raise MemoryLost(f"site {self.number} has no memory to make its own model of")
        memory = self._here(memory, self._device)
        model = self.method.client(download.phase).personal(self.net.at(part.seed), download, memory)
        (path,) = keep_models(self.memory(task.run).folder, PERSONAL, {part.seed: model})
        with closing(self._engine()) as engine:
            found = score_personal(engine, self.data, part.seed, {self.number: model})
        # nan where the site's samples do not define the metric
        value = found.get(self.number, math.nan)
        metric = personal_metric(self.data.task)
        shown = show(metric, None if math.isnan(value) else value)
        self.say(f"after round {task.round}: {metric} {shown} with this site's own model: {path}")
        return value

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.net.device
        return device

    def _engine(self) -> EagerEngine:
        return EagerEngine(self.net, self.data, self.schedule, self.workers, self.threads)

    def _receive(self, part: Part) -> Download:
        """A download, on the device where this site trains."""
        download = decode_download(self.net, part.data)
        if self._device.type == "cpu":
            return download
        return replace(
            download,
            params=self._here(download.params, self._device),
            neurons=None if download.neurons is None else download.neurons.to(self._device),
            extra=self._here(dict(download.extra), self._device),
        )

    def _send(self, upload: Upload) -> Upload:
        if self._device.type == "cpu":
            return upload
        return replace(
            upload,
            params=self._here(upload.params, "cpu"),
            neurons=None if upload.neurons is None else upload.neurons.cpu(),
            mask=None if upload.mask is None else self._here(upload.mask, "cpu"),
            extra=self._here(dict(upload.extra), "cpu"),
        )

    def _here(self, nest: Nest, device: torch.device | str) -> Nest:
        """Every tensor of a nest on a device."""
        if self._device.type == "cpu":
            return nest
        return {
            key: value.to(device) if isinstance(value, Tensor) else self._here(value, device)
            for key, value in nest.items()
        }
