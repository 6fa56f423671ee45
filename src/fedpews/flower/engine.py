"""The engine whose clients are sites: it sends them their part of a round and checks what they return."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from functools import reduce

from flwr.app import ConfigRecord, Message, MessageType
from flwr.serverapp import Grid

from fedpews.engines.engine import Done, Engine, Job
from fedpews.engines.evaluate import Part as EvaluatedPart
from fedpews.engines.evaluate import Score
from fedpews.errors import ConfigError, RunFailed
from fedpews.flower.memory import AcceptedRounds
from fedpews.flower.messages import (
    Part,
    Task,
    deliver,
    read_reply,
    size_on_wire,
    task_content,
)
from fedpews.flower.norms import NormRule, norms
from fedpews.flower.roster import Roster
from fedpews.flower.scores import ScoreCheck
from fedpews.flower.site_log import Answer, Attempt, SiteLog
from fedpews.flower.uploads import FLOWER_SLACK, UploadCheck
from fedpews.methods.contract import Download
from fedpews.methods.wire import BadMessage, encode_download
from fedpews.neurons.network import Network
from fedpews.tables import FlowerTable
from fedpews.tasks.metrics import Sums, add
from fedpews.trees import Tree

Key = tuple[int, int]
"""Seed and client."""


class TooFewSites(RunFailed):
    """Not enough sites are connected, or not enough of them answered."""


class SitesRefused(ConfigError):
    """Sites that the round needs cannot take part as they were started."""


class FlowerEngine(Engine):
    """Trains a round's clients at their sites. Uploads are checked; those refused or missing are left out.

    Args:
        local: evaluates on the server's own test set; without one the sites evaluate on theirs.
        validates: whether sites hold samples out for validation.
        holds_validation: whether the server has them, too, because the data has a name.
    """

    name = "flower"

    def __init__(
        self,
        grid: Grid,
        net: Network,
        roster: Roster,
        run: str,
        accepted: AcceptedRounds,
        site_log: SiteLog,
        limits: FlowerTable,
        check: UploadCheck,
        score_check: ScoreCheck,
        local: Engine | None,
        validates: bool = False,
        holds_validation: bool = True,
    ) -> None:
        self.grid, self.net, self.roster, self.run = grid, net, roster, run
        self.accepted, self.site_log, self.limits = accepted, site_log, limits
        self.check, self.score_check, self.local = check, score_check, local
        self._rules: dict[int, NormRule] = {}  # by seed
        # by part of the sites' data, seed and site: how good the model was
        self._found: dict[EvaluatedPart, dict[int, dict[int, Sums]]] = {}
        self._jobs: Sequence[Job] = ()
        self.validates, self.holds_validation = validates, holds_validation
        self._started = False
        self._round = 0

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        self._round = jobs[0].download.round
        self._jobs = jobs
        self._found = {"test": {job.seed: {} for job in jobs}}
        done: dict[Key, Done] = {}
        for number in range(1, self.limits.attempts + 1):
            missing = [job for job in jobs if (job.seed, job.client) not in done]
            attempt = Attempt(self._round, number, jobs[0].download.phase)
            done |= self._ask(missing, attempt)
            self._refuse_large(jobs, done, attempt)
            self.site_log.add(attempt)
            if self._enough(jobs, done):
                break
        else:
            raise TooFewSites(
                f"round {self._round} got {len(done)} good uploads of {len(jobs)} asked for in "
                f"{self.limits.attempts} attempts (flower.min_sites = {self.limits.min_sites}, "
                f"flower.max_failures = {self.limits.max_failures}); {attempt.describe()}. "
                "The rounds before are saved: go on with --resume."
            )
        good = [job for job in jobs if (job.seed, job.client) in done]
        for job in good:
            upload = done[job.seed, job.client].upload
            self._rules[job.seed].accept(norms(self.net, upload, job.download), upload.steps)
            self.accepted.accept(job.seed, job.client, self._round)
        return [done[job.seed, job.client] for job in good]

    def evaluate(
        self,
        models: Sequence[Tree],
        seeds: Sequence[int],
        part: EvaluatedPart = "test",
        owners: Sequence[int | None] | None = None,
    ) -> list[Score]:
        held_here = part == "test" or self.holds_validation
        if self.local is not None and held_here:
            return self.local.evaluate(models, seeds, part, owners)
        # one message asks a site for both parts, so validation after test costs nothing
        if part == "test" or "validation" not in self._found:
            self._evaluate_at_sites(models, seeds)
        return [self._total(self._found[part][seed]) for seed in seeds]

    def scores_on_the_way(self, jobs: Sequence[Job]) -> bool:
        """Whether the sites can say how good the model is while they train: all are asked, and all get all of it."""
        sites = {job.client for job in jobs}
        if self.local is not None or self.validates:
            return False
        return len(sites) == self.roster.total and all(map(self._is_whole, jobs))

    def scores_found(self, seeds: Sequence[int]) -> list[Score]:
        return [self._total(self._found["test"][seed]) for seed in seeds]

    def remembering(self, seed: int, clients: Sequence[int]) -> tuple[int, ...]:
        return tuple(client for client in clients if self.accepted.accepted(seed, client))

    def evaluate_personal(self, seed: int, downloads: Mapping[int, Download]) -> dict[int, float]:
        """Each site makes its own model of its memory and this download, and says how good it is."""
        nodes, encoded, messages = self.roster.online(), {}, {}
        for site, download in downloads.items():
            if site in nodes:
                if id(download) not in encoded:
                    encoded[id(download)] = encode_download(self.net, download)
                part = Part(seed, encoded[id(download)], self.accepted.accepted(seed, site))
                content = task_content(Task(self.run, self._round, 0.0, (part,)))
                kind = f"{MessageType.EVALUATE}.personal"
                messages[site] = Message(content, nodes[site], kind, ttl=self.limits.round_seconds)
        found = {}
        for site, reply in sorted(deliver(self.grid, messages, self.limits.round_seconds).items()):
            record = None if isinstance(reply, str) else reply.content.get("personal")
            value = record.get("value") if isinstance(record, ConfigRecord) else None
            if isinstance(value, float) and math.isfinite(value):
                found[site] = value
            else:
                why = reply if isinstance(reply, str) else f"{value!r:.40} is no metric"
                self.site_log.say(f"round {self._round}: site {site} did not evaluate its own model: {why}")
        return found

    def close(self) -> None:
        if self.local is not None:
            self.local.close()

    def _enough(self, jobs: Sequence[Job], done: dict[Key, Done]) -> bool:
        for seed in {job.seed for job in jobs}:
            asked = sum(job.seed == seed for job in jobs)
            if not is_enough(self.limits, asked, sum(key[0] == seed for key in done)):
                return False
        return True

    def _ask(self, jobs: Sequence[Job], attempt: Attempt) -> dict[Key, Done]:
        """One attempt: every job's site is asked, and what comes back is checked."""
        by_site: dict[int, list[Job]] = {}
        for job in jobs:
            by_site.setdefault(job.client, []).append(job)
        nodes = self._gather(list(by_site))
        attempt.sites = {
            site: Answer("absent", self.roster.refused.get(site, "not connected"))
            for site in by_site
            if site not in nodes
        }
        encoded: dict[int, bytes] = {}
        messages = {site: self._message(node, by_site[site], encoded) for site, node in sorted(nodes.items())}
        for site, message in messages.items():
            attempt.sites[site] = Answer("no answer", f"none within {self.limits.round_seconds:g} s")
            attempt.sites[site].bytes_down = size_on_wire(message)
        began = time.monotonic()
        most = self.check.most_bytes(by_site[min(by_site)])
        answers = deliver(self.grid, messages, self.limits.round_seconds, most)
        done: dict[Key, Done] = {}
        for site, reply in answers.items():
            answer = attempt.sites[site]
            answer.seconds = round(time.monotonic() - began, 3)
            if isinstance(reply, str):
                answer.outcome, answer.why = "failed", reply
            else:
                answer.bytes_up = size_on_wire(reply)
                if answer.bytes_up > most:
                    answer.outcome, answer.why = (
                        "refused",
                        f"it has {answer.bytes_up} bytes, at most {most} are possible",
                    )
                    continue
                done |= self._read(by_site[site], reply, answer)
                if self.scores_on_the_way(self._jobs):
                    self._read_scores(site, reply, "test")
        return done

    def _read(self, jobs: Sequence[Job], reply: Message, answer: Answer) -> dict[Key, Done]:
        """The good uploads of one site's answer."""
        done: dict[Key, Done] = {}
        answer.outcome, answer.why = "accepted", ""
        by_seed = {job.seed: job for job in jobs}
        for seed, data in read_reply(reply.content, list(by_seed)):
            job = by_seed[seed]
            try:
                if isinstance(data, BadMessage):
                    raise data
                upload = self.check.read(job, data, self.roster.facts[job.client].samples)
                done[seed, job.client] = Done(seed, job.client, {}, upload)
            except BadMessage as error:
                answer.outcome, answer.why = "refused", f"seed {seed}: {error}"
        return done

    def _message(self, node: int, jobs: Sequence[Job], encoded: dict[int, bytes]) -> Message:
        parts = []
        for job in jobs:
            key = id(job.download)  # most methods send the same download to everybody
            if key not in encoded:
                encoded[key] = encode_download(self.net, job.download)
            accepted = self.accepted.accepted(job.seed, job.client)
            parts.append(Part(job.seed, encoded[key], accepted, self.accepted.kept(job.seed, job.client)))
        task = Task(self.run, self._round, jobs[0].lr, tuple(parts), self.scores_on_the_way(self._jobs))
        return Message(task_content(task), node, MessageType.TRAIN, ttl=self.limits.round_seconds)

    def _gather(self, sites: Sequence[int]) -> dict[int, int]:
        """The nodes of the sites to ask: all of them at the start, later those that are there, but enough."""
        limits = self.limits
        patience = 0.0 if self._started else limits.join_seconds
        here = self.roster.wait_for(sites, patience)
        self._check_refused(sites, here)
        least = min(limits.min_sites, len(sites))
        if len(here) < least:
            self.site_log.say(f"round {self._round} needs {least} sites and {len(here)} are here; waiting")
            until = time.monotonic() + limits.wait_seconds
            while len(here) < least and time.monotonic() < until:
                here = self.roster.wait_for(sites, 2.0)
                self._check_refused(sites, here)
        if len(here) < least:
            raise TooFewSites(
                f"round {self._round} needs at least {least} sites (flower.min_sites), but only {len(here)} of "
                f"{len(sites)} came within {limits.wait_seconds:g} s (flower.wait_seconds): "
                f"{sorted(here) or 'none'}. The rounds before are saved: start the sites and go on with --resume."
            )
        self._started = True
        return here

    def _check_refused(self, sites: Sequence[int], here: Mapping[int, int]) -> None:
        """Stop at once when waiting cannot help: too few sites are left without those that were refused."""
        refused = {
            site: why for site, why in self.roster.refused.items() if site in sites and site not in here
        }
        if refused and not is_enough(self.limits, len(sites), len(sites) - len(refused)):
            each = "; ".join(
                f"{self.roster.name(site)} is refused: {why}" for site, why in sorted(refused.items())
            )
            raise SitesRefused(
                f"round {self._round} cannot begin. {each}. Correct that and go on with --resume."
            )

    def _evaluate_at_sites(self, models: Sequence[Tree], seeds: Sequence[int]) -> None:
        """Add up what the sites found on their own test samples; only sums over samples leave a site."""
        downloads = [Download(self._round, "evaluate", self.roster.total, model) for model in models]
        parts = tuple(
            Part(seed, encode_download(self.net, d)) for seed, d in zip(seeds, downloads, strict=True)
        )
        content = task_content(Task(self.run, self._round, 0.0, parts))
        messages = {
            site: Message(content, node, MessageType.EVALUATE, ttl=self.limits.round_seconds)
            for site, node in self.roster.online().items()
        }
        parts_asked: list[EvaluatedPart] = ["test", "validation"] if self.validates else ["test"]
        self._found = {part: {seed: {} for seed in seeds} for part in parts_asked}
        for site, reply in deliver(self.grid, messages, self.limits.round_seconds, FLOWER_SLACK).items():
            if isinstance(reply, str):
                self.site_log.say(f"round {self._round}: {self.roster.name(site)} did not evaluate: {reply}")
            else:
                for asked in parts_asked:
                    self._read_scores(site, reply, asked)

    def _read_scores(self, site: int, reply: Message, part: EvaluatedPart) -> None:
        facts, into = self.roster.facts[site], self._found[part]
        declared = facts.test_samples if part == "test" else facts.validation_samples
        try:
            for seed, sums in self.score_check.read(reply.content, part, into, declared).items():
                if sums:
                    into[seed][site] = sums
        except BadMessage as error:
            self.site_log.say(
                f"round {self._round}: the score of {self.roster.name(site)} is refused: {error}"
            )

    def _total(self, found: Mapping[int, Sums]) -> Score:
        """What the sites found on their own test samples: together, and each."""
        if not found:
            raise RunFailed(
                "no site has test samples and the server has none either; give the server a test set "
                "(test=FILE in its run config) or the sites theirs (test_x, test_y)"
            )
        by_site = dict(sorted(found.items()))
        named = {
            self.roster.name(site): (self.roster.facts[site].test_samples, sums)
            for site, sums in by_site.items()
        }
        return Score(reduce(add, by_site.values()), by_site, sites=named)

    def _is_whole(self, job: Job) -> bool:
        download = job.download
        return download.neurons is None and download.params.keys() == self.net.shapes.keys()

    def _refuse_large(self, jobs: Sequence[Job], done: dict[Key, Done], attempt: Attempt) -> None:
        """Take out uploads that are far larger than the others."""
        for seed in {job.seed for job in jobs}:
            rule = self._rules.setdefault(seed, NormRule(self.limits.norm_multiple))
            here = [job for job in jobs if job.seed == seed and (seed, job.client) in done]
            sizes = {}
            for job in here:
                upload = done[seed, job.client].upload
                sizes[job.client] = norms(self.net, upload, job.download), upload.steps
            for client, why in rule.judge(sizes).items():
                del done[seed, client]
                answer = attempt.sites.setdefault(client, Answer())
                answer.outcome, answer.why = "refused", f"seed {seed}: {why}"


def is_enough(limits: FlowerTable, asked: int, good: int) -> bool:
    """Whether a round in which so many of the cohort delivered may be closed."""
    if good < min(limits.min_sites, asked):
        return False
    return limits.max_failures is None or asked - good <= limits.max_failures
