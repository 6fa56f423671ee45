"""Run an experiment: the loop over rounds, saved as it goes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedpews.build import Model, Setup, build, build_engine, privacy_spent, resolve
from fedpews.configs import flatten
from fedpews.data.federation import Federation, Samples
from fedpews.engines.engine import Engine
from fedpews.errors import CheckpointError, ConfigError, Interrupted
from fedpews.experiment import Experiment
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Network
from fedpews.results.memories import MemoryStore, Store
from fedpews.results.records import Record, Rounds, summarize
from fedpews.results.run_folder import Checkpoint, RunFolder
from fedpews.server import Server
from fedpews.trees import Tree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STATE_LAYOUT = "1"
"""Of what methods keep; raised when a method's state or memory changes shape, so that no run goes on wrongly."""


@dataclass(frozen=True)
class Watcher:
    """What to call as a run goes on; a progress bar, for instance."""

    begin: Callable[[Experiment, int, str], None] = lambda experiment, done, engine: None
    round: Callable[[Sequence[Record]], None] = lambda records: None
    models: Callable[[int, Mapping[int, Tree]], None] | None = None
    """Called with the round and each seed's global model."""
    stopping: Callable[[], None] = lambda: None
    """Ctrl-C was heard; the round is being finished."""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    experiment: Experiment
    rounds: Rounds
    summary: dict[str, Any]
    params: dict[int, Tree]
    """The global model by seed."""
    neurons: dict[int, dict[int, torch.Tensor]]
    """By seed and client: who owned what in the last warmup round."""
    folder: Path | None
    _net: Network

    def model(self, seed: int | None = None) -> nn.Module:
        """The global model of a seed (by default the first), ready for use."""
        return self._net.module(self.params[self.experiment.seeds[0] if seed is None else seed])

    def plot(self, path: str | Path | None = None) -> Figure:
        """Accuracy over the rounds; also written to ``path`` when one is given."""
        from fedpews.report.curves import draw_curves

        return draw_curves({self.summary["method"]: self.rounds}, self.experiment.target_accuracy, path)


def run(
    experiment: Experiment | str | Path | None = None,
    *,
    model: Model | str | None = None,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | None = None,
    graph: NeuronGraph | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    watcher: Watcher | None = None,
    **settings: Any,
) -> Result:
    """Run an experiment and return its rounds, summary and models.

    Args:
        experiment: a recipe's name, a TOML file or an ``Experiment``; by default all defaults.
        model: your own module (every seed starts from its weights), a function that makes one, or a name.
        clients: your own data: a list of ``(x, y)`` tensors or torch Datasets, one per client.
        test: the test set that goes with ``clients``.
        graph: the neurons of a model that cannot be traced.
        out: a folder to write the run to; without one nothing is kept on disk.
        resume: go on where a run in ``out`` stopped.
        data_dir: where to look for named data sets first.
        watcher: what to call as the run goes on.
        settings: changes to the experiment: ``rounds=50``, ``method="fedavg+pews"``, ``train={"lr": 0.1}``.

    >>> x, y = torch.randn(40, 5), torch.arange(40) % 2
    >>> result = run(clients=[(x[:20], y[:20]), (x[20:], y[20:])], test=(x, y), rounds=2, method="fedavg")
    >>> len(result.rounds)
    2
    """
    if isinstance(model, str | Mapping):
        settings["model"], model = {"name": model} if isinstance(model, str) else model, None
    resolved = resolve(experiment, settings)
    setup = build(resolved, model=model, clients=clients, test=test, graph=graph, data_dir=data_dir)
    return train(setup, out=out, resume=resume, watcher=watcher)


def train(
    setup: Setup,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    watcher: Watcher | None = None,
    make_engine: Callable[[Setup], tuple[Engine, str]] = build_engine,
    memories: Store | None = None,
) -> Result:
    """Run what `fedpews.build.build` put together.

    Args:
        make_engine: makes what trains the clients, and says why it was chosen; by default an engine in this process.
        memories: where clients' memories are kept; by default with the run.
    """
    with nullcontext() if out is None else closing(RunFolder(Path(out))) as folder:
        checkpoint = None if folder is None else _reopen(folder, setup, resume)
        store = memories or (MemoryStore(None) if folder is None else folder.memory_store())
        # before anything is trained: without an accountant there is no such run
        spent = privacy_spent(setup.experiment, len(setup.data))
        engine, why = make_engine(setup)
        with closing(engine):
            server = _server(setup, engine, store, checkpoint)
            records = _loop(setup, server, folder, checkpoint, watcher or Watcher(), why)
        result = _result(setup, server, records, folder)
        if spent is not None:
            result.summary["privacy"] = spent
        if folder is not None:
            folder.finish(result.summary, result.params, result.neurons)
        return result


def _server(setup: Setup, engine: Engine, memories: Store, checkpoint: Checkpoint | None) -> Server:
    if checkpoint is None:
        clients = len(setup.data)
        states = {s: setup.method.init(setup.net, params, clients) for s, params in setup.starts.items()}
    else:
        states = checkpoint.states
    memories.restore({} if checkpoint is None else checkpoint.memories)
    server = Server(setup.net, setup.method, setup.data, engine, memories, setup.rules, states)
    server.pending = [] if checkpoint is None else list(checkpoint.about.get("pending", []))
    return server


def _loop(
    setup: Setup,
    server: Server,
    folder: RunFolder | None,
    checkpoint: Checkpoint | None,
    watcher: Watcher,
    why: str,
) -> list[Record]:
    """All rounds that are left; the records of the run from its first round on."""
    experiment, done = setup.experiment, 0 if checkpoint is None else checkpoint.round
    records = [] if folder is None else folder.start_rounds(checkpoint)
    watcher.begin(experiment, done, f"{server.engine.name} engine" + (f", {why}" if why else ""))
    with _stop_signal(watcher.stopping) as stop:
        for round in range(done + 1, experiment.rounds + 1):
            new = server.run(round, last=round == experiment.rounds)
            records += new
            if watcher.models is not None:
                watcher.models(round, server.models())
            if folder is not None:
                folder.append(new)
                last = round == experiment.rounds or stop.is_set()
                if last or round % experiment.runtime.checkpoint_every == 0:
                    folder.save_checkpoint(
                        round, server.states, server.memories, _about(setup) | {"pending": server.pending}
                    )
            if new:
                watcher.round(new)
            if stop.is_set():
                kept = "nothing was saved"
                if folder is not None:
                    kept = f"go on with the same command and --resume ({folder.path})"
                raise Interrupted(f"stopped after round {round} of {experiment.rounds}; {kept}")
    return records


def _result(setup: Setup, server: Server, records: list[Record], folder: RunFolder | None) -> Result:
    experiment = setup.experiment
    return Result(
        experiment,
        Rounds(records),
        summarize(records, experiment.method_label, experiment.target_accuracy),
        server.models(),
        {seed: setup.method.last_owned(state) for seed, state in server.states.items()},
        None if folder is None else folder.path,
        setup.net,
    )


def _about(setup: Setup) -> dict[str, Any]:
    """What a checkpoint must have been made with, to go on from it."""
    return {"changes": setup.experiment.fingerprint(), "data": setup.data_hash, "layout": STATE_LAYOUT}


def _reopen(folder: RunFolder, setup: Setup, resume: bool) -> Checkpoint | None:
    """What to go on from. A folder's run is never overwritten, and never continued with other settings."""
    experiment = setup.experiment
    if not folder.has_run:
        folder.write_config(experiment.to_toml())
        return None
    if not resume:
        raise ConfigError(
            f"{folder.path} already holds a run; add --resume to go on with it, or give another --out"
        )
    earlier = Experiment.load(folder.config)
    if earlier.fingerprint() != experiment.fingerprint():
        raise CheckpointError(
            f"{folder.path} holds another experiment: {_difference(earlier, experiment)}. Give another --out."
        )
    checkpoint = folder.load_checkpoint()
    if checkpoint is None:
        return None
    about, now = checkpoint.about, _about(setup)
    if about.get("layout") != STATE_LAYOUT:
        raise CheckpointError(
            f"{folder.path} was begun by another version of fedpews; finish it with that one, or give another --out."
        )
    # the first versions wrote a hash of all keys under "config"; there config.toml alone decides
    if about.get("data") != now["data"] or about.get("changes", now["changes"]) != now["changes"]:
        raise CheckpointError(f"{folder.path} was run on other data than is here now. Give another --out.")
    return checkpoint


def _difference(earlier: Experiment, now: Experiment) -> str:
    a, b = flatten(earlier.to_dict()), flatten(now.to_dict())
    changed = [key for key in a | b if a.get(key) != b.get(key) and key != "runtime.workers"]
    return ", ".join(f"{key} is {a.get(key)} there and {b.get(key)} here" for key in changed[:3])


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
