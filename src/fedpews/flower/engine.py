"""The engine whose clients are sites: it sends them their share of a round and checks what they return."""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from fedpews.build import Setup, schedule
from fedpews.data.inputs import take
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Done, Engine, Job, Part, Score
from fedpews.errors import RunFailed
from fedpews.flower.checks import NormRule, ScoreCheck, UploadCheck, is_metric, least, norms, sample_sums
from fedpews.flower.hello import Expected, Seen
from fedpews.flower.logs import Answer, Attempt, SiteLog
from fedpews.flower.messages import (
    Request,
    Scaling,
    SeedDownload,
    deliver,
    read_reply,
    request_content,
    size_on_wire,
)
from fedpews.flower.roster import SAMPLES_MULTIPLE, KnownSites, Roster, TooFewSites, is_enough
from fedpews.flower.site import AcceptedRounds
from fedpews.measure import personal_metric
from fedpews.methods.contract import Download
from fedpews.methods.wire import BadMessage, encode_download
from fedpews.results import layout
from fedpews.tasks import Classification
from fedpews.tasks.metrics import Sums, add
from fedpews.torch_private import tree_leaves
from fedpews.trees import Tree, norm

Key = tuple[int, int]
"""Seed and client."""

Moved = tuple[dict[str, float], int]
"""The norms of an upload, and its number of steps."""


class FlowerEngine(Engine):
    """Trains a round's clients at their sites. Uploads that are refused or missing are excluded.

    Args:
        out: the run's folder.
        accepted: which rounds of each site count.
        known: the operator's roster, if there is one.
        without: sites that the operator excludes, by name or number.
        scaling: the centre and the spread of each feature, which sites scale their inputs by.
    """

    name = "flower"

    def __init__(
        self,
        setup: Setup,
        grid: Grid,
        out: Path,
        accepted: AcceptedRounds,
        known: KnownSites | None,
        without: Collection[str] = (),
        scaling: Scaling | None = None,
    ) -> None:
        experiment, data, self.scaling = setup.experiment, setup.data, scaling
        self.grid, self.net, self.accepted, self.limits = grid, setup.net, accepted, experiment.flower
        self.run, self.site_log = _run_id(out), SiteLog(out)
        expected = Expected.of(experiment, data, setup.net.frozen_digest())
        seen = Seen(out / layout.SITES_SEEN)
        self.roster = Roster(grid, expected, known, seen, self.site_log.report, without)
        self.check = UploadCheck(setup.net, experiment.flower, schedule(experiment))
        # evaluates on the server's test set; without one the sites evaluate on theirs
        self.local: Engine | None = None
        if len(data.test_y):
            self.local = EagerEngine(setup.net, data, schedule(experiment), workers=1)
        sample = tree_leaves(take(data.x, torch.zeros(1, dtype=torch.int64)))
        # if the server has a test set no site is asked for a score, so any task will do
        task = Classification() if self.local else data.task
        sums = {} if self.local else least(task, sample_sums(setup.net, task))
        self.personal_metric = personal_metric(data.task)
        self.score_check = ScoreCheck(task, sum(leaf[0].numel() for leaf in sample), sums)
        self.validates = bool(data.validation)
        self.has_validation = any(len(rows) for rows in data.validation)
        self._rules: dict[int, NormRule] = {}  # by seed
        # by part of the sites' data, seed and site
        self._sums: dict[Part, dict[int, dict[int, Sums]]] = {}
        self._started = False
        self._round = 0
        # the round that made the last model, and each site's change in it
        self._changed_in, self._changes = 0, dict[int, float]()

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        jobs = [job for job in jobs if job.client not in self.roster.excluded]
        self._round = jobs[0].download.round
        self._sums = {}
        done: dict[Key, Done] = {}
        for number in range(1, self.limits.attempts + 1):
            missing = [job for job in jobs if (job.seed, job.client) not in done]
            attempt = Attempt(self._round, number, jobs[0].download.phase)
            done |= self._ask(missing, attempt)
            moved = self._refuse_large(jobs, done, attempt)
            self.site_log.add(attempt)
            diverges = any("diverges in round" in answer.why for answer in attempt.sites.values())
            if suspect := self._suspect() if diverges else "":
                self.site_log.report(suspect)
            if self._enough(jobs, done):
                break
        else:
            raise TooFewSites(
                f"round {self._round} got {len(done)} good uploads of {len(jobs)} asked for in "
                f"{self.limits.attempts} attempts (flower.min_sites = {self.limits.min_sites}, "
                f"flower.max_failures = {self.limits.max_failures}); {attempt.describe()}. "
                + (suspect or "The rounds before are saved: go on with --resume.")
            )
        for seed, clients in moved.items():
            for client, (sizes, steps) in clients.items():
                self._rules[seed].accept(sizes, steps)
                self.accepted.accept(seed, client, self._round)
        # of the last seed
        self._changes = {client: sizes.get("params", 0.0) for client, (sizes, _) in clients.items()}
        self._changed_in = self._round
        return [done[key] for job in jobs if (key := (job.seed, job.client)) in done]

    def _suspect(self) -> str:
        """If sites cannot use the model: the round that made it, and its largest upload."""
        if not self._changes:
            return ""
        round, site = self._changed_in, max(self._changes, key=lambda site: self._changes[site])
        others = [change for other, change in self._changes.items() if other != site]
        ratio = self._changes[site] / (statistics.median_low(others or [math.inf]) or 1.0)
        name = self.roster.name(site)
        return (
            f"The model that diverges was made in round {round}, where the upload of {name} was {ratio:.3g} times as "
            f"large as the median of the others. If it is the cause, go on before that round and without that "
            f"site: fedpews flower start ... --resume --before {round} --without {name}"
        )

    def evaluate(
        self,
        models: Sequence[Tree],
        seeds: Sequence[int],
        part: Part = "test",
        owners: Sequence[int | None] | None = None,
    ) -> list[Score]:
        if self.local is not None and (part == "test" or self.has_validation):
            return self.local.evaluate(models, seeds, part, owners)
        # one message asks a site for both parts, so validation after test costs nothing
        if part == "test" or not self._sums:
            self._evaluate_at_sites(models, seeds)
        return [self._total(self._sums[part][seed]) for seed in seeds]

    def remembering(self, seed: int, clients: Sequence[int]) -> tuple[int, ...]:
        return tuple(client for client in clients if self.accepted.accepted(seed, client))

    def evaluate_personal(self, seed: int, downloads: Mapping[int, Download]) -> dict[int, float]:
        """Each site makes its own model of its memory and this download, and evaluates it."""
        sent = {site: [(seed, download)] for site, download in downloads.items()}
        messages = self._messages(f"{MessageType.EVALUATE}.personal", self.roster.online(), sent)
        values: dict[int, float] = {}
        for site, reply in sorted(self._deliver(messages)):
            record = None if isinstance(reply, str) else reply.content.get("personal")
            value: Any = record.get("value") if isinstance(record, ConfigRecord) else None
            if is_metric(self.personal_metric, value):
                values[site] = value
            else:
                why = reply if isinstance(reply, str) else f"{value!r:.40} is no {self.personal_metric}"
                self._report(f"site {site} did not evaluate its own model: {why}")
        return values

    def send_models(self, kind: str, models: Mapping[int, Tree]) -> list[str]:
        """Send every connected site the models; the names of the sites that have them now."""
        replies = sorted(self._ask_all(f"{MessageType.QUERY}.{kind}", models))
        return [self.roster.name(site) for site, reply in replies if not isinstance(reply, str)]

    def close(self) -> None:
        if self.local is not None:
            self.local.close()

    def _report(self, text: str) -> None:
        self.site_log.report(f"round {self._round}: {text}")

    def _deliver(self, messages: Mapping[int, Message], more: int = 0) -> Iterator[tuple[int, Message | str]]:
        return deliver(self.grid, messages, self.limits.round_seconds, more)

    def _messages(
        self,
        kind: str,
        nodes: Mapping[int, int],
        downloads: Mapping[int, Sequence[tuple[int, Download]]],
        lr: float = 0.0,
    ) -> dict[int, Message]:
        """A message of a kind to the node of each connected site, with its downloads and their seeds."""
        encoded: dict[int, bytes] = {}
        messages = {}
        for site in sorted(downloads.keys() & nodes.keys()):
            sent = []
            for seed, download in downloads[site]:
                # most methods send the same one to every client
                if id(download) not in encoded:
                    encoded[id(download)] = encode_download(self.net, download)
                rounds = self.accepted.accepted(seed, site), self.accepted.kept(seed, site)
                sent.append(SeedDownload(seed, encoded[id(download)], *rounds))
            content = request_content(Request(self.run, self._round, lr, tuple(sent), self.scaling))
            messages[site] = Message(content, nodes[site], kind, ttl=self.limits.round_seconds)
        return messages

    def _ask_all(
        self, kind: str, models: Mapping[int, Tree], more: int = 0
    ) -> Iterator[tuple[int, Message | str]]:
        """Send every connected site each seed's whole model; their replies."""
        nodes = self.roster.online()
        downloads = [
            (seed, Download(self._round, kind, self.roster.total, model)) for seed, model in models.items()
        ]
        return self._deliver(self._messages(kind, nodes, dict.fromkeys(nodes, downloads)), more)

    def _enough(self, jobs: Sequence[Job], done: Mapping[Key, Done]) -> bool:
        asked = [job.seed for job in jobs]
        good = [seed for seed, _ in done]
        return all(is_enough(self.limits, asked.count(seed), good.count(seed)) for seed in set(asked))

    def _ask(self, jobs: Sequence[Job], attempt: Attempt) -> dict[Key, Done]:
        """One attempt: ask every job's site, and check what comes back."""
        by_site: dict[int, list[Job]] = {}
        for job in jobs:
            by_site.setdefault(job.client, []).append(job)
        seconds = 0.0 if self._started else self.limits.join_seconds
        nodes = self.roster.gather(by_site, self.limits, seconds, f"round {self._round}")
        self._started = True
        attempt.sites = {
            site: Answer("absent", self.roster.refused.get(site, "not connected"))
            for site in by_site
            if site not in nodes
        }
        downloads = {site: [(job.seed, job.download) for job in own] for site, own in by_site.items()}
        messages = self._messages(MessageType.TRAIN, nodes, downloads, jobs[0].lr)
        for site, message in messages.items():
            why = f"none within {self.limits.round_seconds:g} s"
            attempt.sites[site] = Answer("no answer", why, bytes_down=size_on_wire(message))
        began = time.monotonic()
        done: dict[Key, Done] = {}
        for site, reply in self._deliver(messages, self.check.most_bytes(by_site[min(by_site)])):
            answer = attempt.sites[site]
            answer.seconds = round(time.monotonic() - began, 3)
            if isinstance(reply, str):
                answer.outcome, answer.why = "failed", reply
                continue
            answer.bytes_up = size_on_wire(reply)
            done |= self._read(by_site[site], reply, answer)
        return done

    def _read(self, jobs: Sequence[Job], reply: Message, answer: Answer) -> dict[Key, Done]:
        """The good uploads of one site's answer."""
        done: dict[Key, Done] = {}
        answer.outcome, answer.why = "accepted", ""
        for job in jobs:
            try:
                declared, most = self.roster.facts[job.client].samples, self.roster.most_samples(job.client)
                upload = self.check.read(job, read_reply(reply.content, job.seed), declared, most)
            except BadMessage as error:
                answer.outcome, answer.why = "refused", f"seed {job.seed}: {error}"
                continue
            done[job.seed, job.client] = Done(job.seed, job.client, {}, upload)
            if declared > most:
                self.roster.report_once(
                    f"{self.roster.name(job.client)} declares {declared} samples and counts as {most:g}, "
                    f"{SAMPLES_MULTIPLE} times the median of the others; if it has them, add samples = "
                    f"{declared} to its entry in the roster"
                )
        return done

    def _evaluate_at_sites(self, models: Sequence[Tree], seeds: Sequence[int]) -> None:
        """Ask the sites for the scores on their samples; only sums over samples leave a site."""
        kinds: dict[Part, str] = {"test": "test_samples"}
        if self.validates:
            kinds["validation"] = "validation_samples"
        self._sums = {part: {seed: {} for seed in seeds} for part in kinds}
        more = len(kinds) * len(seeds) * self.score_check.most_bytes
        refused = ""
        for site, reply in self._ask_all(MessageType.EVALUATE, dict(zip(seeds, models, strict=True)), more):
            name, facts = self.roster.name(site), self.roster.facts[site]
            if isinstance(reply, str):
                self._report(f"{name} did not evaluate: {reply}")
                continue
            for part, kind in kinds.items():
                declared = getattr(facts, kind)
                share = min(1.0, self.roster.most_samples(site, kind) / max(declared, 1))
                try:
                    scores = self.score_check.read(reply.content, part, seeds, declared)
                except BadMessage as error:
                    refused = f"the score of {name} is refused: {error}"
                    self._report(refused)
                    continue
                for seed, sums in scores.items():
                    if sums:
                        self._sums[part][seed][site] = {key: value * share for key, value in sums.items()}
        if refused and not any(self._sums["test"].values()):
            raise TooFewSites(f"round {self._round} got no score of any site: {refused}. {self._suspect()}")

    def _total(self, sums: Mapping[int, Sums]) -> Score:
        """The score on the sites' samples: of all sites together, and of each."""
        if not sums:
            raise RunFailed(
                "no site has test samples and the server has none either; give the server a test set "
                "(test=FILE in its run config) or the sites theirs (test_x, test_y)"
            )
        by_site = dict(sorted(sums.items()))
        named = {
            self.roster.name(site): (self.roster.facts[site].test_samples, scores)
            for site, scores in by_site.items()
        }
        return Score(reduce(add, by_site.values()), by_site, sites=named)

    def _refuse_large(
        self, jobs: Sequence[Job], done: dict[Key, Done], attempt: Attempt
    ) -> dict[int, dict[int, Moved]]:
        """Remove uploads that are far larger than the others; by seed and site, how far each of the rest moved."""
        moved: dict[int, dict[int, Moved]] = {job.seed: {} for job in jobs}
        for seed, clients in moved.items():
            rule, model = self._rules.setdefault(seed, NormRule(self.limits.norm_multiple)), 0.0
            for job in jobs:
                if job.seed == seed and (seed, job.client) in done:
                    upload, sent = done[seed, job.client].upload, job.download.params
                    clients[job.client] = norms(self.net, upload, job.download), upload.steps
                    weights = {name: sent[name] for name in self.net.trainable if name in sent}
                    model = max(model, float(norm(weights)) if weights else 0.0)
            for client, why in rule.check(clients, model).items():
                del done[seed, client], clients[client]
                answer = attempt.sites.setdefault(client, Answer())
                answer.outcome, answer.why = "refused", f"seed {seed}: {why}"
        return moved


def _run_id(out: Path) -> str:
    """The name of this run's memory at the sites, the same after a resume."""
    path = out / layout.SITES_RUN
    if not path.exists() or not (out / layout.CHECKPOINT).exists():
        path.write_text(uuid.uuid4().hex)
        (out / layout.SITES_SEEN).unlink(missing_ok=True)
    return path.read_text()
