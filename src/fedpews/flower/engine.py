"""The engine whose clients are sites: it sends them their share of a round and checks what they return."""

from __future__ import annotations

import math
import statistics
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from fedpews.build import Setup, schedule
from fedpews.config import FlowerTable
from fedpews.data.inputs import take
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Done, Engine, Job, Part, Score
from fedpews.errors import ConfigError, RunFailed
from fedpews.flower.limits import SAMPLES_MULTIPLE, is_metric
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
from fedpews.flower.roster import Expected, KnownSites, Roster, Seen
from fedpews.flower.scores import ScoreCheck, least
from fedpews.flower.site import AcceptedRounds
from fedpews.flower.uploads import NormRule, UploadCheck, norms, sample_sums
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

TYPES = {
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
    "personal": f"{MessageType.EVALUATE}.personal",
}
"""Flower's types of messages, by kind; all other kinds are queries."""


class TooFewSites(RunFailed):
    """Not enough sites are connected, or not enough of them answered."""


class SitesRefused(ConfigError):
    """Sites that the round needs cannot take part as they were started."""


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
        expected, seen = (
            Expected.of(experiment, data, setup.net.frozen_digest()),
            Seen(out / layout.SITES_SEEN),
        )
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
        self._scored: dict[int, Tree] = {}  # by seed: the model that the test sums are of
        self._started = False
        self._round = 0
        self._largest = (0.0, 0, 0)  # of the last round: size by the others' median, round and site

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        jobs = [job for job in jobs if job.client not in self.roster.excluded]
        self._round = jobs[0].download.round
        self._sums = {"test": {job.seed: {} for job in jobs}}
        self.evaluates_in_training = self._can_evaluate(jobs)
        self._scored = {job.seed: job.download.params for job in jobs if self.evaluates_in_training}
        done: dict[Key, Done] = {}
        for number in range(1, self.limits.attempts + 1):
            missing = [job for job in jobs if (job.seed, job.client) not in done]
            attempt = Attempt(self._round, number, jobs[0].download.phase)
            done |= self._ask(missing, attempt)
            moved = self._refuse_large(jobs, done, attempt)
            self.site_log.add(attempt)
            suspect = self._suspect(attempt)
            if suspect:
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
        changes = {
            client: sizes.get("params", 0.0) for client, (sizes, _) in clients.items()
        }  # of the last seed
        site = max(changes, key=lambda client: changes[client])
        others = [change for client, change in changes.items() if client != site]
        self._largest = (
            changes[site] / (statistics.median_low(others or [math.inf]) or 1.0),
            self._round,
            site,
        )
        return [done[key] for job in jobs if (key := (job.seed, job.client)) in done]

    def _suspect(self, attempt: Attempt) -> str:
        """Where sites diverge: the round that made the model they were sent, and its largest upload."""
        ratio, round, site = self._largest
        if not round or not any("diverges in round" in answer.why for answer in attempt.sites.values()):
            return ""
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
        is_scored = all(self._scored.get(seed) is model for seed, model in zip(seeds, models, strict=True))
        # one message asks a site for both parts, so validation after test costs nothing
        if not is_scored and (part == "test" or "validation" not in self._sums):
            self._evaluate_at_sites(models, seeds)
        return [self._total(self._sums[part][seed]) for seed in seeds]

    def _can_evaluate(self, jobs: Sequence[Job]) -> bool:
        """Whether the sites evaluate the model in the message that trains it: all are asked, and get all of it."""
        if self.local is not None or self.validates:
            return False
        whole = all(
            job.download.neurons is None and job.download.params.keys() == self.net.shapes.keys()
            for job in jobs
        )
        return whole and len({job.client for job in jobs}) == self.roster.total

    def remembering(self, seed: int, clients: Sequence[int]) -> tuple[int, ...]:
        return tuple(client for client in clients if self.accepted.accepted(seed, client))

    def evaluate_personal(self, seed: int, downloads: Mapping[int, Download]) -> dict[int, float]:
        """Each site makes its own model of its memory and this download, and evaluates it."""
        nodes, requests = self.roster.online(), {}
        encoded = self._encode(downloads.values())
        for site, download in downloads.items():
            if site in nodes:
                data = encoded[id(download)]
                requests[site] = self._request([SeedDownload(seed, data, self.accepted.accepted(seed, site))])
        values: dict[int, float] = {}
        for site, reply in sorted(self._deliver(self._messages("personal", nodes, requests))):
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
        replies = sorted(self._ask_all(kind, models))
        return [self.roster.name(site) for site, reply in replies if not isinstance(reply, str)]

    def close(self) -> None:
        if self.local is not None:
            self.local.close()

    def _report(self, text: str) -> None:
        self.site_log.report(f"round {self._round}: {text}")

    def _deliver(self, messages: Mapping[int, Message], more: int = 0) -> Iterator[tuple[int, Message | str]]:
        return deliver(self.grid, messages, self.limits.round_seconds, more)

    def _encode(self, downloads: Iterable[Download]) -> dict[int, bytes]:
        """The bytes of each download by its id: most methods send the same one to every client."""
        unique = {id(download): download for download in downloads}
        return {key: encode_download(self.net, download) for key, download in unique.items()}

    def _request(self, downloads: Iterable[SeedDownload], lr: float = 0.0, evaluate: bool = False) -> Request:
        return Request(self.run, self._round, lr, tuple(downloads), evaluate, self.scaling)

    def _messages(
        self, kind: str, nodes: Mapping[int, int], requests: Mapping[int, Request]
    ) -> dict[int, Message]:
        """A message to the node of each site."""
        # a request to all sites is converted once
        contents = {id(request): request_content(request) for request in requests.values()}
        type, seconds = TYPES.get(kind, f"{MessageType.QUERY}.{kind}"), self.limits.round_seconds
        return {
            site: Message(contents[id(request)], nodes[site], type, ttl=seconds)
            for site, request in requests.items()
        }

    def _ask_all(
        self, kind: str, models: Mapping[int, Tree], more: int = 0
    ) -> Iterator[tuple[int, Message | str]]:
        """Send every connected site each seed's whole model; their replies."""
        nodes, downloads = self.roster.online(), []
        for seed, model in models.items():
            download = Download(self._round, kind, self.roster.total, model)
            downloads.append(SeedDownload(seed, encode_download(self.net, download)))
        requests = dict.fromkeys(nodes, self._request(downloads))
        return self._deliver(self._messages(kind, nodes, requests), more)

    def _enough(self, jobs: Sequence[Job], done: Mapping[Key, Done]) -> bool:
        asked = [job.seed for job in jobs]
        good = [seed for seed, _ in done]
        return all(is_enough(self.limits, asked.count(seed), good.count(seed)) for seed in set(asked))

    def _ask(self, jobs: Sequence[Job], attempt: Attempt) -> dict[Key, Done]:
        """One attempt: ask every job's site, and check what comes back."""
        by_site: dict[int, list[Job]] = {}
        for job in jobs:
            by_site.setdefault(job.client, []).append(job)
        nodes = self._gather(list(by_site))
        attempt.sites = {
            site: Answer("absent", self.roster.refused.get(site, "not connected"))
            for site in by_site
            if site not in nodes
        }
        encoded = self._encode(job.download for job in jobs)
        requests = {}
        for site in sorted(nodes):
            downloads = [
                SeedDownload(
                    job.seed,
                    encoded[id(job.download)],
                    self.accepted.accepted(job.seed, site),
                    self.accepted.kept(job.seed, site),
                )
                for job in by_site[site]
            ]
            requests[site] = self._request(downloads, jobs[0].lr, self.evaluates_in_training)
        messages = self._messages("train", nodes, requests)
        for site, message in messages.items():
            why = f"none within {self.limits.round_seconds:g} s"
            attempt.sites[site] = Answer("no answer", why, bytes_down=size_on_wire(message))
        began = time.monotonic()
        asked = by_site[min(by_site)]
        most = self.check.most_bytes(asked)
        if self.evaluates_in_training:
            most += len(asked) * self.score_check.most_bytes
        done: dict[Key, Done] = {}
        for site, reply in self._deliver(messages, most):
            answer = attempt.sites[site]
            answer.seconds = round(time.monotonic() - began, 3)
            if isinstance(reply, str):
                answer.outcome, answer.why = "failed", reply
                continue
            answer.bytes_up = size_on_wire(reply)
            done |= self._read(by_site[site], reply, answer)
            if self.evaluates_in_training:
                self._read_scores(site, reply, "test")
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

    def _gather(self, sites: Sequence[int]) -> dict[int, int]:
        """The nodes of the sites to ask: at the start of all of them, later of those connected, but enough."""
        limits = self.limits
        connected = self.roster.wait_for(sites, 0.0 if self._started else limits.join_seconds)
        self._check_refused(sites, connected)
        least = min(limits.min_sites, len(sites))
        if len(connected) < least:
            self.site_log.report(
                f"round {self._round} needs {least} sites and {len(connected)} are connected; waiting"
            )
            until = time.monotonic() + limits.wait_seconds
            while len(connected) < least and time.monotonic() < until:
                connected = self.roster.wait_for(sites, 2.0)
                self._check_refused(sites, connected)
        if len(connected) < least:
            raise TooFewSites(
                f"round {self._round} needs at least {least} sites (flower.min_sites), but only {len(connected)} of "
                f"{len(sites)} came within {limits.wait_seconds:g} s (flower.wait_seconds): "
                f"{sorted(connected) or 'none'}. The rounds before are saved: start the sites and go on with --resume."
            )
        self._started = True
        return connected

    def _check_refused(self, sites: Sequence[int], connected: Mapping[int, int]) -> None:
        """Stop at once if waiting cannot help: without the refused sites too few are left."""
        refused = {site for site in self.roster.refused if site in sites and site not in connected}
        if refused and not is_enough(self.limits, len(sites), len(sites) - len(refused)):
            each = self.roster.describe_refused(refused)
            raise SitesRefused(
                f"round {self._round} cannot begin. {each}. Correct that and go on with --resume."
            )

    def _evaluate_at_sites(self, models: Sequence[Tree], seeds: Sequence[int]) -> None:
        """Ask the sites for the scores on their samples; only sums over samples leave a site."""
        parts: list[Part] = ["test", "validation"] if self.validates else ["test"]
        self._sums = {part: {seed: {} for seed in seeds} for part in parts}
        self._scored = {}
        more = len(parts) * len(seeds) * self.score_check.most_bytes
        for site, reply in self._ask_all("evaluate", dict(zip(seeds, models, strict=True)), more):
            if isinstance(reply, str):
                self._report(f"{self.roster.name(site)} did not evaluate: {reply}")
                continue
            for part in parts:
                self._read_scores(site, reply, part)

    def _read_scores(self, site: int, reply: Message, part: Part) -> None:
        facts, sums = self.roster.facts[site], self._sums[part]
        kind = "test_samples" if part == "test" else "validation_samples"
        declared = getattr(facts, kind)
        share = min(1.0, self.roster.most_samples(site, kind) / max(declared, 1))
        try:
            for seed, scores in self.score_check.read(reply.content, part, sums, declared).items():
                if scores:
                    sums[seed][site] = {name: value * share for name, value in scores.items()}
        except BadMessage as error:
            self._report(f"the score of {self.roster.name(site)} is refused: {error}")

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


def is_enough(limits: FlowerTable, asked: int, good: int) -> bool:
    """Whether a round is complete with so many good uploads of the clients that were asked."""
    if good < min(limits.min_sites, asked):
        return False
    return limits.max_failures is None or asked - good <= limits.max_failures


def _run_id(out: Path) -> str:
    """The name of this run's memory at the sites, the same after a resume."""
    path = out / layout.SITES_RUN
    if not path.exists() or not (out / layout.CHECKPOINT).exists():
        path.write_text(uuid.uuid4().hex)
        (out / layout.SITES_SEEN).unlink(missing_ok=True)
    return path.read_text()
