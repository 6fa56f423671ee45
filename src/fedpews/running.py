"""Run an experiment: the loop over rounds, saved as it goes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedpews.build import (
    Model,
    Setup,
    build,
    build_engine,
    build_task,
    privacy_spent,
)
from fedpews.callbacks import Callback, progress_bar, stop_signal
from fedpews.data.federation import Federation
from fedpews.data.inputs import Samples
from fedpews.engines.engine import Engine
from fedpews.engines.hardware import settled
from fedpews.errors import ClientDiverged, ConfigError, Interrupted, RankLost, RunFailed
from fedpews.experiment import Experiment
from fedpews.finetuning import check_finetuning, fine_tune, pretrain
from fedpews.given import describe_object, record_given, resolve, task_settings
from fedpews.methods.contract import Method
from fedpews.neurons.graph import NeuronGraph
from fedpews.notices import of_setup
from fedpews.result import Result
from fedpews.results import layout
from fedpews.results.folder import RunFolder
from fedpews.results.memories import MemoryStore, Store
from fedpews.results.records import Record, Rounds, summarize, value_of
from fedpews.saving import Saver, add_fingerprints
from fedpews.server import Server
from fedpews.tasks import Task
from fedpews.tasks.names import Goal
from fedpews.trees import Tree, place_like

NO_VALIDATION = (
    "stopping early or keeping the best model needs validation data, and there are none; set stop.on to 'test' if the "
    "test data may choose (the metric on them is then no longer an honest estimate)"
)


def run(
    experiment: Experiment | str | Path | None = None,
    *,
    model: Model | str | None = None,
    method: Method | str | Mapping[str, Any] | None = None,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | Sequence[Samples] | None = None,
    task: str | Task | Mapping[str, Any] | None = None,
    metrics: Sequence[str] = (),
    loss: Callable[..., Any] | None = None,
    graph: NeuronGraph | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = False,
    **settings: Any,
) -> Result:
    """Run an experiment and return its rounds, summary and models.

    Args:
        experiment: a recipe's name, a TOML file or an ``Experiment``; by default all defaults.
        model: your own module (every seed starts from its weights), a function that makes one, or a name.
        method: a name such as ``"fedavg+pews"``, or a method's object; see `fedpews list methods`.
        clients: your own data: a list of ``(x, y)`` pairs of tensors or torch Datasets, one per client.
        test: the test set for ``clients``, or a list with one per client; omit it if each client is a dict with its
            own ``test``.
        task: a name, a table of options with a ``name``, or your own ``fedpews.tasks.Task``.
        metrics: names of metrics, the main metric first.
        loss: replaces the task's loss: (outputs, labels) -> one number per sample, or their mean.
        graph: the neurons of a model that cannot be traced.
        out: the run folder; without it nothing is written to disk.
        resume: continue the run in ``out``.
        data_dir: the folder to search for data sets first.
        callbacks: functions that are called during the run.
        progress: show a progress bar in a terminal, elsewhere print a line from time to time.
        settings: changes to the experiment: ``rounds=50``, ``train={"lr": 0.1}``.

    >>> import torch
    >>> x, y = torch.randn(40, 5), torch.arange(40) % 2
    >>> result = run(clients=[(x[:20], y[:20]), (x[20:], y[20:])], test=(x, y), rounds=2, method="fedavg")
    >>> len(result.rounds)
    2
    """
    if isinstance(model, str | Mapping):
        settings["model"], model = {"name": model} if isinstance(model, str) else model, None
    named, own_task = task_settings(task, metrics, clients)
    settings |= named
    if isinstance(method, Method):
        settings["method"] = describe_object(method)
    elif method is not None:
        settings["method"] = method
    resolved = record_given(resolve(experiment, settings), model, clients)
    setup = build(
        resolved,
        model=model,
        clients=clients,
        test=test,
        graph=graph,
        data_dir=data_dir,
        method=method if isinstance(method, Method) else None,
        task=build_task(resolved, own_task, loss),
    )
    with progress_bar(resolved.method_label) if progress else nullcontext(Callback()) as bar:
        return train(setup, out=out, resume=resume, callbacks=[bar, *callbacks])


def train(
    setup: Setup,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    make_engine: Callable[[Setup], tuple[Engine, str]] = build_engine,
    memories: Store | None = None,
) -> Result:
    """Run what `fedpews.build.build` put together.

    Args:
        make_engine: makes what trains the clients, and says why it was chosen; by default an engine in this process.
        memories: where clients' memories are kept; by default with the run.
    """
    setup = setup if out is None else add_fingerprints(setup)
    check_finetuning(setup)
    if (
        stop_rule(setup) is not None
        and setup.experiment.stop.on == "validation"
        and not setup.data.validation
    ):
        raise ConfigError(NO_VALIDATION)
    with nullcontext() if out is None else closing(RunFolder(Path(out))) as folder:
        saver = Saver(folder, setup, resume)
        path = None if folder is None else folder.path / layout.CHECKPOINT / layout.MEMORIES
        store = memories or MemoryStore(path, setup.net.device)
        # before anything is trained: without an accountant there is no such run
        spent = privacy_spent(setup)
        engine, why = make_engine(setup)
        with closing(engine), settled():
            records = saver.start(engine, why, store)
            server = _server(setup, engine, store, saver)
            training = Training(setup, server, saver, callbacks, records)
            try:
                training.run(why)
            except KeyboardInterrupt:
                # the second Ctrl-C: each file is complete or absent
                raise Interrupted(f"stopped at once; {saver.describe()}") from None
        result = training.result()
        if spent is not None:
            result.summary["privacy"] = spent
        saver.finish(result)
        return result


def _server(setup: Setup, engine: Engine, memories: Store, saver: Saver) -> Server:
    clients, checkpoint = len(setup.data), saver.resumed
    starts = pretrain(setup) if checkpoint is None else setup.starts
    states = {s: setup.method.init(setup.net.at(s), params, clients) for s, params in starts.items()}
    if checkpoint is not None:
        states = {
            seed: place_like(state, states[seed], setup.net.device)
            for seed, state in checkpoint.states.items()
        }
    return Server(setup, engine, memories, states, observes=saver.path is not None)


class Training:
    """A run from its first round, or the one after its checkpoint, to its last."""

    def __init__(
        self, setup: Setup, server: Server, saver: Saver, callbacks: Sequence[Callback], records: list[Record]
    ) -> None:
        self.setup, self.server, self.saver, self.callbacks = setup, server, saver, callbacks
        self.records = records
        self.best: dict[int, Tree] = {} if saver.resumed is None else saver.resumed.best
        self.rule, self.saves = stop_rule(setup), saver.path is not None
        for line in of_setup(setup):
            logging.getLogger("fedpews").warning("%s", line)

    def run(self, why: str) -> None:
        """All rounds that are left.

        Args:
            why: why this engine was chosen.
        """
        experiment, done = self.setup.experiment, self.saver.saved
        engine = f"{self.server.engine.name} engine" + (f", {why}" if why else "")
        for callback in self.callbacks:
            callback.begin(experiment, done, engine)
        active = self._active(experiment.seeds)
        with stop_signal([callback.stopping for callback in self.callbacks]) as stop:
            for round in range(done + 1, experiment.rounds + 1):
                if not active:
                    break
                new = self._round(round, active)
                if self.rule is not None:
                    active = self._active(active)
                is_last = round == experiment.rounds or stop.is_set() or not active
                if self.saves and (is_last or round % experiment.runtime.checkpoint_every == 0):
                    self.saver.checkpoint(round, self.server, self.best)
                is_ended = True in [callback.round(new) for callback in self.callbacks]
                if is_ended or stop.is_set():
                    self.saver.checkpoint(round, self.server, self.best)
                if is_ended:
                    break
                if stop.is_set():
                    raise Interrupted(
                        f"stopped after round {round} of {experiment.rounds}; {self.saver.describe()}"
                    )

    def _round(self, round: int, seeds: Sequence[int]) -> list[Record]:
        """One round of these seeds; its records, saved."""
        server, rule = self.server, self.rule
        try:
            new = server.run(round, seeds)
        except (RankLost, ClientDiverged) as failure:
            # the states are still those of the round before, and a run can continue there
            if round > 1:
                self.saver.checkpoint(round - 1, server, self.best)
            if isinstance(failure, RankLost):
                raise
            raise RunFailed(f"{failure}. {self.saver.describe()}") from failure
        if self.saves:
            new = self.saver.record(new, server.measurer.observed)
        self.records += new
        if rule is not None:
            rule.check(new)
            models = server.models()
            for seed in seeds:
                records = self._of_seed(seed)
                if rule.best(records) == len(records) - 1:
                    self.best[seed] = models[seed]
        for callback in self.callbacks:
            if callback.models is not None:
                callback.models(round, server.models())
        return new

    def _active(self, seeds: Sequence[int]) -> list[int]:
        """The seeds that early stopping has not ended."""
        if self.rule is None:
            return [*seeds]
        return [seed for seed in seeds if not self.rule.is_over(self._of_seed(seed))]

    def _of_seed(self, seed: int) -> list[Record]:
        return [record for record in self.records if record["seed"] == seed]

    def result(self) -> Result:
        """The result of the rounds so far."""
        setup, experiment, rule, models = self.setup, self.setup.experiment, self.rule, self.server.models()
        summary = summarize(self.records, experiment.method_label, experiment.goal, setup.data.client_names)
        runs = {seed: self._of_seed(seed) for seed in experiment.seeds}
        if any(run[-1]["round"] < experiment.rounds for run in runs.values()):
            summary["ended_after"] = [run[-1]["round"] for run in runs.values()]
        if rule is not None:
            best = [run[rule.best(run)] for run in runs.values()]
            summary["best"] = {
                "on": rule.on,
                "rounds": [record["round"] for record in best],
                rule.goal.metric: [value_of(record, rule.goal.metric) for record in best],
            }
        finetuned: dict[int, dict[int, Tree]] = {}
        if experiment.finetune.epochs is not None:
            finetuned, summary["finetuned"] = fine_tune(setup, models)
        return Result(
            experiment=experiment,
            rounds=Rounds(self.records),
            summary=summary,
            params=models,
            best=self.best,
            neurons={seed: setup.method.last_owned(state) for seed, state in self.server.states.items()},
            finetuned=finetuned,
            folder=self.saver.path,
            _net=setup.net,
        )


@dataclass(frozen=True)
class StopRule:
    """A seed ends when ``patience`` rounds in a row were no better than the best before them by ``min_delta``.

    Rounds of a warmup do not count: their models are not meant to be used.

    >>> rule = StopRule(patience=2, on="test")
    >>> [rule.is_over([{"accuracy": a, "phase": "train"} for a in seen]) for seen in ([0.1, 0.3], [0.3, 0.2, 0.3])]
    [False, True]
    """

    patience: int | None = None
    min_delta: float = 0.0
    on: Literal["validation", "test"] = "validation"
    goal: Goal = field(default_factory=Goal)

    def check(self, records: Sequence[Record]) -> None:
        """Refuse a metric that is undefined on the samples, such as auroc on a single class."""
        for record in records:
            values = record.get("metrics" if self.on == "test" else "validation", {})
            if self.goal.metric in values and values[self.goal.metric] is None:
                raise ConfigError(
                    f"{self.goal.metric} is to choose the best round, but it is undefined on the {self.on} samples; "
                    "choose another metric first in task.metrics, or samples of every class"
                )

    def is_over(self, records: Sequence[Record]) -> bool:
        """Whether a seed with these records ends."""
        if self.patience is None or not records:
            return False
        since = records[self.best(records) + 1 :]
        return len([record for record in since if record["phase"] != "warmup"]) >= self.patience

    def best(self, records: Sequence[Record]) -> int:
        """The position of the last record that was better than the best before it."""
        values = [self._value(record) for record in records]
        best = 0
        for i, value in enumerate(values):
            if value > values[best] + self.min_delta:
                best = i
        return best

    def _value(self, record: Record) -> float:
        """The metric that chooses, its sign changed if lower is better; an undefined value is worse than any other."""
        metric = self.goal.metric
        value = value_of(record, metric) if self.on == "test" else record["validation"].get(metric)
        return -math.inf if value is None else float(value) * (1 if self.goal.higher_is_better else -1)


def stop_rule(setup: Setup) -> StopRule | None:
    """The rule of early stopping; None if the run neither stops early nor keeps its best model."""
    table = setup.experiment.stop
    if table.patience is None and not table.best:
        return None
    return StopRule(table.patience, table.min_delta, table.on, setup.experiment.goal)
