"""Experiment trackers that listen to a run: TensorBoard, Weights & Biases, MLflow and Trackio.

Each is a thin adapter on ``Callback``, an extra of the package, and imported only when asked for. A seed is a run of
its own there, and a run that goes on after a stop goes on there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedpews.callbacks import Callback
from fedpews.errors import ConfigError, need_extra
from fedpews.results.records import Record

if TYPE_CHECKING:
    from fedpews.experiment import Experiment

PROJECT = "fedpews"


class Tracker(Protocol):
    """One seed's run at a tracker."""

    def log(self, round: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


Open = Callable[[Path, str, int, Mapping[str, Any], int], Tracker]
"""(folder, label, seed, config, rounds done before) -> the seed's run."""


@contextmanager
def tracking(names: Sequence[str], folder: Path) -> Iterator[Callback]:
    """A callback that logs to the named trackers; they are closed whatever happens.

    Args:
        folder: the run's own; what a tracker keeps on disk goes there unless its own settings say otherwise.
    """
    openers = {name: _opener(name) for name in dict.fromkeys(names)}
    opened: dict[int, list[Tracker]] = {}

    def begin(experiment: Experiment, done: int, engine: str) -> None:
        for seed in experiment.seeds:
            opened[seed] = [
                start(folder, experiment.method_label, seed, experiment.to_dict(), done)
                for start in openers.values()
            ]

    def round(records: Sequence[Record]) -> None:
        for record in records:
            for tracker in opened[record["seed"]]:
                tracker.log(record["round"], scalars(record))

    try:
        yield Callback(begin=begin, round=round)
    finally:
        for trackers in opened.values():
            for tracker in trackers:
                tracker.close()


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record by themselves.

    >>> scalars({"seed": 0, "round": 3, "phase": "train", "accuracy": 0.5, "client_accuracy": [0.4, 0.6]})
    {'accuracy': 0.5}
    """
    return {
        key: float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and key not in ("seed", "round")
    }


def _opener(name: str) -> Open:
    if name not in TRACKERS:
        raise ConfigError(f"there is no tracker {name!r}; choose from {', '.join(TRACKERS)}")
    module, make = TRACKERS[name]
    need_extra(name, module, f"--log {name}")
    return make


def _identity(folder: Path, seed: int) -> str:
    """The same for the same folder and seed, so that a resumed run is found again."""
    return blake2b(f"{folder.resolve()}|{seed}".encode(), digest_size=8).hexdigest()


class _TensorBoard:
    def __init__(self, folder: Path, label: str, seed: int, config: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = folder / "tensorboard" / f"{label}-seed-{seed}"
        self._writer = SummaryWriter(str(place), purge_step=done + 1 if done else None)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, round)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, label: str, seed: int, config: Mapping[str, Any], done: int) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=PROJECT,
            group=label,
            name=f"{label}-seed-{seed}",
            id=_identity(folder, seed),
            config={**config, "seed": seed},
            dir=str(folder),
            reinit="create_new",
            resume="allow",
        )

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, folder: Path, label: str, seed: int, config: Mapping[str, Any], done: int) -> None:
        from mlflow import MlflowClient
        from mlflow.tracking import get_tracking_uri, is_tracking_uri_set

        # with no server set, a file in the run's folder: MLflow's own default would be the working directory
        uri = get_tracking_uri() if is_tracking_uri_set() else f"sqlite:///{folder.resolve()}/mlflow.db"
        folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(uri)
        known = self._client.get_experiment_by_name(PROJECT)
        place = known.experiment_id if known is not None else self._client.create_experiment(PROJECT)
        tag = _identity(folder, seed)
        found = self._client.search_runs([place], f"tags.fedpews = '{tag}'") if done else []
        if found:
            self._id = found[0].info.run_id
            return
        run = self._client.create_run(place, run_name=f"{label}-seed-{seed}", tags={"fedpews": tag})
        self._id = run.info.run_id
        for key, value in {**config, "seed": seed}.items():
            self._client.log_param(self._id, key, value)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._client.log_metric(self._id, key, value, step=round)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _Trackio:
    def __init__(self, folder: Path, label: str, seed: int, config: Mapping[str, Any], done: int) -> None:
        import trackio

        self._run = trackio.init(
            project=PROJECT,
            name=f"{label}-seed-{seed}-{_identity(folder, seed)[:6]}",
            config={**config, "seed": seed},
            resume="allow",
            embed=False,
        )

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, tuple[str, Open]] = {
    "tensorboard": ("tensorboard", _TensorBoard),
    "wandb": ("wandb", _Wandb),
    "mlflow": ("mlflow", _Mlflow),
    "trackio": ("trackio", _Trackio),
}
"""Name -> the module it needs, and how a seed's run is opened."""
