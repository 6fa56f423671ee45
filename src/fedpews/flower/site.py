"""A site: its data, its share of a round, and its private memory (mask scores, control variates)."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Collection, Mapping
from contextlib import closing
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from safetensors.torch import save

from fedpews.build import build_method, build_network, schedule
from fedpews.data.loading import scale
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Job, Part, explain, sort_out
from fedpews.errors import ConfigError, FedpewsError
from fedpews.experiment import Experiment
from fedpews.flower.checks import least
from fedpews.flower.data import site_data
from fedpews.flower.deploy.keys import make_private
from fedpews.flower.hello import Facts, common_facts, data_digest
from fedpews.flower.ledger import Ledger
from fedpews.flower.logs import append_line, site_folder, site_number
from fedpews.flower.messages import Request, Scaling, SeedDownload
from fedpews.flower.statistics import answer, is_scaled, privacy_of
from fedpews.measure import personal_metric, score_personal
from fedpews.methods.contract import Download
from fedpews.methods.wire import BadMessage, decode_download, encode_upload
from fedpews.results.files import read_nest, write_atomically, write_nest
from fedpews.results.layout import SITE_STATUS
from fedpews.results.memories import Version
from fedpews.tasks.metrics import Sums
from fedpews.tasks.names import show
from fedpews.trees import Nest, Tree, flatten


class MemoryLost(FedpewsError):
    """The server goes on from a round that this site has no memory of."""


class SiteMemory:
    """A site's private memory on its own disk, a file for each seed and round.

    A site may finish a round and lose its answer on the way, so the round before is kept until the server has saved
    that it will never ask for it again.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     memory = SiteMemory(Path(folder), site=0, run="a" * 32)
    ...     memory.write(0, 1, {"scores": torch.zeros(2)}, kept=0)
    ...     memory.write(0, 2, {"scores": torch.ones(2)}, kept=1)
    ...     memory.read(0, accepted=1)["scores"]
    tensor([0., 0.])
    """

    def __init__(self, state_dir: Path, site: int, run: str) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", run):  # it comes from the network and becomes a folder's name
            raise ConfigError(f"the server's name of its run is not valid: {run!r:.50}")
        self.folder = state_dir / f"site-{site}" / run

    def read(self, seed: int, accepted: int, device: torch.device | str = "cpu") -> Nest | None:
        """The memory after the round that the server accepted last; None if there is none or it is empty."""
        if accepted == 0:
            return None
        path = self._path(seed, accepted)
        if not path.exists():
            raise MemoryLost(
                f"the server goes on from round {accepted}, but {path} does not exist. Restore the site's "
                "state-dir, or set flower.lost_memory to 'restart' to let this site start anew."
            )
        memory, _ = read_nest(path, device)
        return memory if flatten(memory)[0] else None

    def write(self, seed: int, round: int, memory: Nest, kept: int) -> None:
        """Write the memory after a round, and delete rounds older than ``kept``."""
        # readable by the site's user only: it shows what was learned of the site's data
        make_private(make_private(self.folder.parent) / self.folder.name)
        path = self._path(seed, round)
        write_nest(path, memory, {"round": round})
        path.chmod(0o600)
        for path in self.folder.glob(f"seed-{seed}-round-*.safetensors"):
            if int(path.stem.rpartition("-")[2]) < kept:
                path.unlink(missing_ok=True)

    def write_models(self, kind: str, models: Mapping[int, Tree]) -> list[Path]:
        """Write each seed's model beside the memory, as `fedpews run` writes its own; their paths."""
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [self.folder / f"{kind}-model-{seed}.safetensors" for seed in models]
        for path, model in zip(paths, models.values(), strict=True):
            write_atomically(path, save({name: value.cpu().contiguous() for name, value in model.items()}))
        return paths

    def _path(self, seed: int, round: int) -> Path:
        return self.folder / f"seed-{seed}-round-{round}.safetensors"


class AcceptedRounds:
    """The server's store in place of clients' memories: the round in which each site was last accepted.

    The memories themselves never leave their sites.
    """

    def __init__(self) -> None:
        self._accepted: dict[str, int] = {}
        # of the last two checkpoints: a server whose last checkpoint is damaged goes on from the one before
        self._saved: list[dict[str, int]] = [{}, {}]

    def restore(self, saved: Mapping[str, Version]) -> None:
        self._accepted = {key: version.number for key, version in saved.items()}
        self._saved = [{}, dict(self._accepted)]

    def get(self, seed: int, client: int) -> Nest | None:
        return None

    def put(self, seed: int, client: int, memory: Nest) -> None:
        pass

    def accept(self, seed: int, client: int, round: int) -> None:
        """Record that the client's upload of this round counts: its next round starts from this one's memory."""
        self._accepted[f"{seed}-{client}"] = round

    def accepted(self, seed: int, client: int) -> int:
        """The round whose memory a client goes on from; 0 before its first."""
        return self._accepted.get(f"{seed}-{client}", 0)

    def kept(self, seed: int, client: int) -> int:
        """The oldest round whose memory a server that resumes from one of its two checkpoints may need."""
        return self._saved[0].get(f"{seed}-{client}", 0)

    def commit(self) -> dict[str, Version]:
        self._saved = [self._saved[1], dict(self._accepted)]
        return {key: Version(round) for key, round in self._accepted.items()}

    def keep(self, files: Collection[str]) -> None:
        pass


class Site:
    """A site that trains and evaluates as the experiment says, with its own data.

    Args:
        config: the experiment.
        settings: the site's ``--node-config``: site, data, data-dir, state-dir, device, workers, threads.
    """

    def __init__(self, config: Path, settings: Mapping[str, Any]) -> None:
        self.experiment, self.settings = Experiment.load(config), settings
        self.number, self.folder = site_number(settings), site_folder(settings)
        data = site_data(self.experiment, self.number, settings)
        self.data = data.to(str(settings.get("device", "cpu")))
        if self.number >= len(data):
            raise ConfigError(
                f"this is site {self.number}, but the experiment has sites 0 to {len(data) - 1}"
            )
        self.net, _ = build_network(self.experiment, self.data)
        self.method = build_method(self.experiment)
        privacy, self.ledger = self.experiment.privacy, None
        if privacy.clip is not None and privacy.place == "client":
            self.ledger = Ledger(self.folder, self.experiment, settings.get("epsilon"))

    def scaled(self, scaling: Scaling | None) -> Site:
        """This site with its inputs scaled as the server says."""
        if scaling is None and is_scaled(self.experiment):
            raise ConfigError("data.scaling is 'federated', and the server sent no statistics to scale by")
        if scaling is None:
            return self
        site = copy(self)
        site.data = scale(self.data, scaling)
        return site

    def statistics(self, question: RecordDict) -> RecordDict:
        """Sums over this site's training samples; data.min_count and data.count_noise hide small counts."""
        content = answer(self.data, self.number, privacy_of(self.experiment), question)
        self._log(f"statistics of {len(self.data.clients[self.number])} samples are sent")
        return content

    def facts(self) -> Facts:
        """What this site declares in its hello."""
        key = _digest_key(self.folder) if "data" in self.settings else b""
        data = self.data
        return Facts(
            site=self.number,
            **common_facts(self.experiment, data),
            samples=len(data.clients[self.number]),
            test_samples=len(data.test_y),
            validation_samples=len(data.validation[self.number]) if data.validation else 0,
            data=data_digest(data, key),
            columns=list(data.columns),
            base=self.net.frozen_digest(),
        )

    def train(self, request: Request) -> dict[int, bytes]:
        """The encoded upload for each seed. The memory is on disk before any of them is sent."""
        if not 1 <= request.round <= self.experiment.rounds:
            raise BadMessage(f"round {request.round} is not one of the experiment's {self.experiment.rounds}")
        if self.ledger is None:
            return self._train(request)
        with self.ledger.lock:
            answers = {sent.seed: self.ledger.answer(request, sent) for sent in request.downloads}
            left = tuple(sent for sent in request.downloads if answers[sent.seed] is None)
            known = {seed: data for seed, data in answers.items() if data is not None}
            if not left:
                return known
            self.ledger.check(len(left))
            uploads = self._train(new := replace(request, downloads=left))
            self.ledger.add(new, uploads)
            self._log(f"{len(self.ledger.releases())} releases so far, ε {self.ledger.epsilon():.4g}")
            return known | uploads

    def _train(self, request: Request) -> dict[int, bytes]:
        memory = self._memory(request.run)
        jobs = []
        for sent in request.downloads:
            download = self._receive(sent)
            if download.round != request.round:
                raise BadMessage(f"the download is of round {download.round}, the request of {request.round}")
            try:
                kept = memory.read(sent.seed, sent.accepted, self.net.device)
            except MemoryLost:
                if self.experiment.flower.lost_memory != "restart":
                    raise
                kept = None
            half = self.method.client(download.phase)
            jobs.append(Job(sent.seed, self.number, half, download, kept, request.lr))
        with closing(self._engine()) as engine:
            finished, diverged = sort_out(self.net, engine.train(jobs))
        if diverged:
            raise explain(diverged, jobs)
        for sent, done in zip(request.downloads, finished, strict=True):
            memory.write(sent.seed, request.round, done.memory, sent.kept)
        uploads = {done.seed: encode_upload(self.net, done.upload) for done in finished}
        loss = sum(done.upload.loss for done in finished) / len(finished)
        shown = f", training loss {loss:.4g}" if loss else ""  # 0 with differential privacy
        self._log(
            f"round {request.round} ({jobs[0].download.phase}): trained on {len(self.data.clients[self.number])} "
            f"samples{shown}; {sum(map(len, uploads.values())):,} bytes to send"
        )
        return uploads

    def keep(self, kind: str, request: Request) -> None:
        """Write the models that the server sends at the end into this site's folder."""
        models = {sent.seed: self._receive(sent).params for sent in request.downloads}
        paths = ", ".join(map(str, self._memory(request.run).write_models(kind, models)))
        self._log(f"the run is finished; the {kind} model: {paths}")

    def evaluate(self, request: Request) -> dict[Part, dict[int, Sums]]:
        """For each seed's model the sums over the site's test samples, and over its validation samples."""
        models = [self._receive(sent).params for sent in request.downloads]
        seeds = [sent.seed for sent in request.downloads]
        samples: dict[Part, int] = {"test": len(self.data.test_y)}
        if self.data.validation:
            samples["validation"] = len(self.data.validation[self.number])
        sums: dict[Part, dict[int, Sums]] = {part: {seed: {} for seed in seeds} for part in samples}
        with closing(self._engine()) as engine:
            for part in (part for part, count in samples.items() if count):
                scores = zip(seeds, engine.evaluate(models, seeds, part), strict=True)
                sums[part] = {seed: least(self.data.task, score.sums) for seed, score in scores}
        if samples["test"]:
            self._log_scores(request, sums["test"])
        return sums

    def evaluate_personal(self, request: Request) -> float:
        """The metric of this site's personal model on its own test samples, or on the classes it has.

        The model itself stays in the site's folder.
        """
        (sent,) = request.downloads
        download = self._receive(sent)
        memory = self._memory(request.run).read(sent.seed, sent.accepted, self.net.device)
        if memory is None:
            raise MemoryLost(f"site {self.number} has no memory to make its own model of")
        model = self.method.client(download.phase).personal(self.net.at(sent.seed), download, memory)
        (path,) = self._memory(request.run).write_models("personal", {sent.seed: model})
        with closing(self._engine()) as engine:
            values = score_personal(engine, self.data, sent.seed, {self.number: model})
        value = values.get(self.number, math.nan)  # nan if the site's samples do not define the metric
        metric = personal_metric(self.data.task)
        shown = show(metric, None if math.isnan(value) else value)
        self._log(f"after round {request.round}: {metric} {shown} with this site's own model: {path}")
        return value

    def _memory(self, run: str) -> SiteMemory:
        return SiteMemory(self.folder.parent, self.number, run)

    def _log(self, text: str) -> None:
        append_line(self.folder / SITE_STATUS, text)

    def _log_scores(self, request: Request, sums: Mapping[int, Sums]) -> None:
        """Log the metrics of the downloaded model on this site's samples, as the mean over seeds."""
        values = [self.data.task.measure(one) for one in sums.values()]
        means = []
        for metric in values[0]:
            known = [value for scores in values if (value := scores[metric]) is not None]
            means.append(f"{metric} {show(metric, sum(known) / len(known) if known else None)}")
        tested = f"{len(self.data.test_y)} test samples of this site"
        self._log(f"after round {request.round}: {', '.join(means)} on {tested}")

    def _engine(self) -> EagerEngine:
        workers, threads = (int(self.settings.get(name, 1)) for name in ("workers", "threads"))
        return EagerEngine(self.net, self.data, schedule(self.experiment), workers, threads)

    def _receive(self, sent: SeedDownload) -> Download:
        if sent.seed not in self.experiment.seeds:
            raise BadMessage(f"{sent.seed} is no seed of the experiment")
        return decode_download(self.net, sent.data)


@cache
def _cached_site(config: Path, text: str, settings: tuple[tuple[str, Any], ...]) -> Site:
    return Site(config, dict(settings))


def warm_site(config: Path, settings: Mapping[str, Any]) -> Site:
    """The site, built once in a process, so a warm executor builds it once for all messages."""
    # with the text, so that an experiment that was changed is another one
    return _cached_site(config.resolve(), config.read_text(), tuple(sorted(settings.items())))


def _digest_key(folder: Path) -> bytes:
    """The secret under which this site's data is digested, made at first use."""
    path = folder / "digest-key"
    if not path.exists():
        make_private(folder)
        write_atomically(path, secrets.token_bytes(16))
        path.chmod(0o600)
    return path.read_bytes()
