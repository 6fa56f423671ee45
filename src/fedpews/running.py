"""Run an experiment: put data, model, method and engine together, and save every round."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedpews import data as data_room
from fedpews import models
from fedpews.data.federation import Federation, Samples, from_clients
from fedpews.errors import CheckpointError, ConfigError, Interrupted
from fedpews.experiment import Experiment, override
from fedpews.methods.contract import Method
from fedpews.methods.local import with_local
from fedpews.methods.registry import make, make_server
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Network
from fedpews.results.folder import Checkpoint, RunFolder
from fedpews.results.memories import MemoryStore, Store
from fedpews.results.records import Record, Rounds, summarize
from fedpews.runtimes.choose import choose_engine
from fedpews.runtimes.job import Engine, Schedule
from fedpews.runtimes.rounds import Rounds as RoundRunner
from fedpews.runtimes.rounds import Rules, cohort_size
from fedpews.seeds import fold
from fedpews.trees import Tree
from fedpews.warmup import Fixed, Learned, with_warmup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AUTO_DIVERSITY, AUTO_LOSS = 2.0, 0.03
"""FedPeWS-Auto: λ, and the part of round 1's training loss at which the warmup ends."""


READINGS = ("mask_lr", "share", "gradient", "start", "start_spread", "start_common", "upload_mask", "draw")
"""What the table of the warmup and `Learned` call by the same name."""


STATE_LAYOUT = "2"
"""Of what methods keep; raised when a method's state or memory changes shape, so that no run goes on wrongly."""


@dataclass(frozen=True)
class Watcher:
    """What to call as a run goes on; a progress bar, for instance."""

    begin: Callable[[Experiment, int, str], None] = lambda experiment, done, engine: None
    round: Callable[[Sequence[Record]], None] = lambda records: None
    models: Callable[[int, Mapping[int, Tree]], None] | None = None  # round, each seed's global model
    stopping: Callable[[], None] = lambda: None  # Ctrl-C was heard; the round is being finished


@dataclass(frozen=True)
class Elsewhere:
    """Clients that are trained outside this process: who trains them, and who keeps what they remember."""

    engine: Callable[[Network, Federation], Engine]
    memories: Store


@dataclass(frozen=True)
class Result:
    """A finished run."""

    experiment: Experiment
    rounds: Rounds
    summary: dict[str, Any]
    params: dict[int, Tree]  # by seed
    neurons: dict[int, dict[int, torch.Tensor]]  # by seed and client: who owned what in the last warmup round
    folder: Path | None
    _net: Network

    def model(self, seed: int | None = None) -> nn.Module:
        """The global model of a seed (by default the first), ready for use."""
        seed = self.experiment.seeds[0] if seed is None else seed
        return self._net.at(seed).module(self.params[seed])

    def plot(self, path: str | Path | None = None) -> Figure:
        """Accuracy over the rounds; also written to ``path`` when one is given."""
        from fedpews.report.curves import draw_curves

        return draw_curves({self.summary["method"]: self.rounds}, self.experiment.target_accuracy, path)


def run(
    experiment: Experiment | str | Path | None = None,
    *,
    model: nn.Module | Callable[[], nn.Module] | str | None = None,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | Sequence[Samples] | None = None,
    graph: NeuronGraph | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    watcher: Watcher | None = None,
    elsewhere: Elsewhere | None = None,
    **settings: Any,
) -> Result:
    """Run an experiment and return its rounds, summary and models.

    Args:
        experiment: a recipe's name, a TOML file or an ``Experiment``; by default all defaults.
        model: your own module (every seed starts from its weights), a function that makes one, or a name.
        clients: your own data: a list of ``(x, y)`` tensors or torch Datasets, one per client.
        test: the test set that goes with ``clients``, or a list with one for each of them.
        graph: the neurons of a model that cannot be traced.
        out: a folder to write the run to; without one nothing is kept on disk.
        resume: go on where a run in ``out`` stopped.
        settings: changes to the experiment: ``rounds=50``, ``method="fedavg+pews"``, ``train={"lr": 0.1}``.

    >>> x, y = torch.randn(40, 5), torch.arange(40) % 2
    >>> result = run(clients=[(x[:20], y[:20]), (x[20:], y[20:])], test=(x, y), rounds=2, method="fedavg")
    >>> len(result.rounds)
    2
    """
    if isinstance(model, str | Mapping):
        settings["model"], model = {"name": model} if isinstance(model, str) else model, None
    experiment = _settle(experiment, settings)
    watcher = watcher or Watcher()
    if (clients is None) != (test is None) and not isinstance(clients, Federation):
        raise ConfigError("clients and test belong together: give both, or a data.name")
    data = load_data(experiment, clients, test, data_dir)
    net, starts = build_model(experiment, model, graph, data)
    method = build_method(experiment)
    fingerprint = {"config": experiment.fingerprint(), "data": _hash_data(data), "layout": STATE_LAYOUT}
    if out is None:
        return _run(experiment, data, net, starts, method, None, None, fingerprint, watcher, elsewhere)
    with closing(RunFolder(Path(out))) as folder:
        checkpoint = _reopen(folder, experiment, fingerprint, resume)
        return _run(
            experiment, data, net, starts, method, folder, checkpoint, fingerprint, watcher, elsewhere
        )


def _run(
    experiment: Experiment,
    data: Federation,
    net: Network,
    starts: Mapping[int, Tree],
    method: Method,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    fingerprint: Mapping[str, str],
    watcher: Watcher,
    elsewhere: Elsewhere | None,
) -> Result:
    memories: Store = MemoryStore(None) if folder is None else folder.memory_store()
    if elsewhere is not None:
        memories = elsewhere.memories
    if checkpoint is not None:
        memories.restore(checkpoint.memories)
        states, done = checkpoint.states, checkpoint.round
    else:
        memories.restore({})
        states = {seed: method.init(net.at(seed), params, len(data)) for seed, params in starts.items()}
        done = 0
    records: list[Record] = []
    if folder is not None:
        folder.start_rounds(0 if checkpoint is None else checkpoint.rounds_bytes)
        records = folder.read_rounds()
    made, why = (
        _make_engine(experiment, net, data) if elsewhere is None else (elsewhere.engine(net, data), "")
    )
    with closing(made) as engine, _stop_signal(watcher.stopping) as stop:
        runner = RoundRunner(net, method, data, engine, memories, _rules(experiment), states)
        watcher.begin(experiment, done, f"{engine.name} engine" + (f", {why}" if why else ""))
        for round in range(done + 1, experiment.rounds + 1):
            new = runner.run(round)
            records += new
            if watcher.models is not None:
                watcher.models(round, {seed: method.params(state) for seed, state in runner.states.items()})
            if folder is not None:
                folder.append(new)
                last = round == experiment.rounds or stop.is_set()
                if last or round % experiment.runtime.checkpoint_every == 0:
                    folder.save_checkpoint(round, runner.states, memories, fingerprint)
            watcher.round(new)
            if stop.is_set():
                kept = (
                    "nothing was saved"
                    if folder is None
                    else f"go on with the same command and --resume ({folder.path})"
                )
                raise Interrupted(f"stopped after round {round} of {experiment.rounds}; {kept}")
    params = {seed: method.params(state) for seed, state in runner.states.items()}
    neurons = {seed: method.last_owned(state) for seed, state in runner.states.items()}
    summary = summarize(records, experiment.method_label, experiment.target_accuracy)
    summary["clients_judged_on"] = data.judged_on
    if folder is not None:
        whole = {seed: tree | net.at(seed).constants() for seed, tree in params.items()}
        _finish(folder, summary, whole, neurons)
    return Result(
        experiment, Rounds(records), summary, params, neurons, None if folder is None else folder.path, net
    )


def build_method(experiment: Experiment) -> Method:
    """The method an experiment names, with its server optimiser and its warmup around it."""
    base, server_name, _ = experiment.parts
    rate = {} if experiment.train.server_lr is None else {"lr": experiment.train.server_lr}
    server = make_server(server_name, **rate, **experiment.server)
    options = dict(experiment.method.model_extra or {})
    for name in ("momentum", "weight_decay"):
        value = getattr(experiment.train, name)
        if value:
            options[name] = value
    method = make(base, server, **options)
    if experiment.warmup_kind != "none":
        method = _warm_up(experiment, method)
    return with_local(method) if experiment.local_norms else method


def _warm_up(experiment: Experiment, method: Method) -> Method:
    table, kind = experiment.warmup, experiment.warmup_kind
    masks: Learned | Fixed
    if kind == "fixed":
        masks = Fixed(None if table.shares is None else tuple(table.shares))
    else:
        default = AUTO_DIVERSITY if kind == "auto" else Learned.diversity
        diversity = default if table.diversity is None else table.diversity
        masks = Learned(diversity, **table.model_dump(include=set(READINGS)))
    return with_warmup(
        method, experiment.warmup_rounds, masks, end_at_loss=AUTO_LOSS if kind == "auto" else None
    )


def _settle(experiment: Experiment | str | Path | None, settings: Mapping[str, Any]) -> Experiment:
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            changes |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            changes["method.name" if key == "method" else key] = value
    if isinstance(experiment, Experiment):
        return Experiment(**override(experiment.to_dict(), changes)) if changes else experiment
    return Experiment(**override({}, changes)) if experiment is None else Experiment.load(experiment, changes)


def load_data(
    experiment: Experiment,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | Sequence[Samples] | None = None,
    data_dir: str | Path | None = None,
) -> Federation:
    """The data handed in, or else what the experiment names."""
    if isinstance(clients, Federation):
        data = clients
    elif clients is not None and test is not None:
        data = from_clients(clients, test)
    else:
        table = experiment.data.model_dump(exclude_none=True)
        data = data_room.load(table.pop("name"), data_dir=data_dir, **table)
    device = torch.device(experiment.runtime.device)
    return data if device.type == "cpu" else data.to(device)


def build_model(
    experiment: Experiment,
    model: nn.Module | Callable[[], nn.Module] | None,
    graph: NeuronGraph | None,
    data: Federation,
) -> tuple[Network, dict[int, Tree]]:
    """The network, and each seed's start. torch's global generator is left as it was."""
    made = {}
    for seed in experiment.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fold(seed, "model"))
            if isinstance(model, nn.Module):
                made[seed] = model
            elif model is not None:
                made[seed] = model()
            else:
                table = experiment.model
                made[seed] = models.build(table.name, data.x.shape[1:], data.classes, table.model_extra or {})
        made[seed] = made[seed].to(data.x.device)
    net = Network.of_seeds(made, data.x[:1], graph=graph)
    try:
        outputs = net.predict(net.initial(), data.x[:2]).shape
    except RuntimeError as error:
        shape = tuple(data.x.shape[1:])
        raise ConfigError(
            f"the model cannot take inputs of shape {shape}: {str(error).splitlines()[0]}"
        ) from error
    if len(outputs) != 2 or outputs[1] < data.classes:
        raise ConfigError(
            f"the data has labels 0 to {data.classes - 1} but the model's output has shape {tuple(outputs[1:])}; "
            f"give the model {data.classes} outputs"
        )
    return net, {seed: net.at(seed).initial() for seed in made}


def _make_engine(experiment: Experiment, net: Network, data: Federation) -> tuple[Engine, str]:
    train = experiment.train
    return choose_engine(
        experiment.runtime.engine,
        net,
        data,
        Schedule(train.batch_size, train.epochs, train.steps),
        experiment.runtime.workers or len(os.sched_getaffinity(0)),
        rounds=experiment.rounds,
        jobs=len(experiment.seeds) * cohort_size(len(data), experiment.participation),
        phases=1 if experiment.warmup_kind == "none" else 2,
    )


def _rules(experiment: Experiment) -> Rules:
    train = experiment.train
    return Rules(
        experiment.participation, train.weighting, train.lr, tuple(train.lr_milestones), train.lr_decay
    )


def _reopen(
    folder: RunFolder, experiment: Experiment, fingerprint: Mapping[str, str], resume: bool
) -> Checkpoint | None:
    """What to go on from. A folder's run is never overwritten, and never continued with other settings."""
    if not folder.has_run:
        folder.write_text("config.toml", experiment.to_toml())
        return None
    if not resume:
        raise ConfigError(
            f"{folder.path} already holds a run; add --resume to go on with it, or give another --out"
        )
    earlier = Experiment.load(folder.path / "config.toml")
    if earlier.fingerprint() != experiment.fingerprint():
        raise CheckpointError(
            f"{folder.path} holds another experiment: {_difference(earlier, experiment)}. Give another --out."
        )
    checkpoint = folder.load_checkpoint()
    if checkpoint is not None and checkpoint.about.get("layout") != STATE_LAYOUT:
        raise CheckpointError(
            f"{folder.path} was begun by another version of fedpews; finish it with that one, or give another --out."
        )
    if checkpoint is not None and checkpoint.about != dict(fingerprint):
        raise CheckpointError(f"{folder.path} was run on other data than is here now. Give another --out.")
    return checkpoint


def _difference(earlier: Experiment, now: Experiment) -> str:
    def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    a, b = dict(flat(earlier.to_dict())), dict(flat(now.to_dict()))
    changed = [key for key in a | b if a.get(key) != b.get(key) and key != "runtime.workers"]
    return ", ".join(f"{key} is {a.get(key)} there and {b.get(key)} here" for key in changed[:3])


def _finish(
    folder: RunFolder,
    summary: Mapping[str, Any],
    params: Mapping[int, Tree],
    neurons: Mapping[int, Mapping[int, torch.Tensor]],
) -> None:
    import json

    from fedpews.report.html import write_report

    for seed, tree in params.items():
        folder.write_tensors(f"model-{seed}.safetensors", tree)
        if neurons[seed]:
            masks = {f"client-{client}": mask.to(torch.uint8) for client, mask in neurons[seed].items()}
            folder.write_tensors(f"masks-{seed}.safetensors", masks)
    folder.write_text("summary.json", json.dumps(summary, indent=2) + "\n")
    write_report([folder.path], folder.path / "report.html")


def _hash_data(data: Federation) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in (data.x, data.y, data.test_x, data.test_y, torch.cat(data.clients)):
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(tensor.cpu().contiguous().numpy().data)
    digest.update(str([len(rows) for rows in data.clients]).encode())
    return digest.hexdigest()


@contextmanager
def _stop_signal(heard: Callable[[], None]) -> Iterator[threading.Event]:
    """Set by the first Ctrl-C (or SIGTERM), so that the round is finished and saved; a second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        heard()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
