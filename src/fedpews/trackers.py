"""Experiment trackers that listen to a run: TensorBoard, Weights & Biases, MLflow and Trackio.

Each is a thin adapter on ``Callback``, an extra of the package, and imported only when it is used. A seed is a separate
run there, and a resumed run is continued there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.callbacks import Callback
from fedpews.errors import ConfigError, need_extra
from fedpews.results.records import Record

if TYPE_CHECKING:
    from fedpews.experiment import Experiment

PROJECT = "fedpews"


Log = Callable[[int, dict[str, float]], Any]
"""Called with a round and its numbers."""

Opened = tuple[Log, Callable[[], Any]]
"""A seed's run at a tracker: how to log to it, and how to close it."""

Open = Callable[[Path, str, int, dict[str, Any], int], Opened]
"""(folder, name, seed, config, rounds done before) -> the seed's run."""


@contextmanager
def tracking(names: Sequence[str], folder: Path) -> Iterator[Callback]:
    """A callback that logs to the named trackers; they are closed whatever happens.

    Args:
        folder: the run's; a tracker's files go there unless its own settings say otherwise.
    """
    openers = []
    for name in dict.fromkeys(names):
        if name not in TRACKERS:
            raise ConfigError(f"there is no tracker {name!r}; choose from {', '.join(TRACKERS)}")
        need_extra(name, name, f"--log {name}")
        openers.append(TRACKERS[name])
    logs: dict[int, list[Log]] = {}
    with ExitStack() as stack:

        def begin(experiment: Experiment, done: int, engine: str) -> None:
            for seed in experiment.seeds:
                logs[seed] = []
                config = experiment.to_dict() | {"seed": seed}
                for start in openers:
                    log, close = start(folder, f"{experiment.method_label}-seed-{seed}", seed, config, done)
                    stack.callback(close)
                    logs[seed].append(log)

        def round(records: Sequence[Record]) -> None:
            for record in records:
                for log in logs[record["seed"]]:
                    log(record["round"], scalars(record))

        yield Callback(begin=begin, round=round)


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record.

    >>> scalars({"seed": 0, "round": 3, "phase": "train", "accuracy": 0.5, "client_accuracy": [0.4, 0.6]})
    {'accuracy': 0.5}
    """
    return {
        key: float(value)
        for key, value in record.items()
        if isinstance(value, int | float) and key not in ("seed", "round")
    }


def _identity(folder: Path, seed: int) -> str:
    """An identifier of a folder and seed, by which a resumed run is continued."""
    return blake2b(f"{folder.resolve()}|{seed}".encode(), digest_size=8).hexdigest()


def _tensorboard(folder: Path, name: str, seed: int, config: dict[str, Any], done: int) -> Opened:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard" / name), purge_step=done + 1 if done else None)

    def log(round: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            writer.add_scalar(key, value, round)

    return log, writer.close


def _wandb(folder: Path, name: str, seed: int, config: dict[str, Any], done: int) -> Opened:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(
        project=PROJECT,
        group=name.removesuffix(f"-seed-{seed}"),
        name=name,
        id=_identity(folder, seed),
        config=config,
        dir=str(folder),
        reinit="create_new",
        resume="allow",
    )
    return lambda round, values: run.log(values, step=round), run.finish


def _mlflow(folder: Path, name: str, seed: int, config: dict[str, Any], done: int) -> Opened:
    from mlflow import MlflowClient
    from mlflow.tracking import get_tracking_uri, is_tracking_uri_set

    # with no server set, a file in the run's folder: MLflow's own default would be the working directory
    uri = get_tracking_uri() if is_tracking_uri_set() else f"sqlite:///{folder.resolve()}/mlflow.db"
    folder.mkdir(parents=True, exist_ok=True)
    client = MlflowClient(uri)
    known = client.get_experiment_by_name(PROJECT)
    project = known.experiment_id if known is not None else client.create_experiment(PROJECT)
    tag = _identity(folder, seed)
    runs = client.search_runs([project], f"tags.fedpews = '{tag}'") if done else []
    run = runs[0] if runs else client.create_run(project, run_name=name, tags={"fedpews": tag})
    run_id = run.info.run_id
    for key, value in () if runs else config.items():
        client.log_param(run_id, key, value)

    def log(round: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            client.log_metric(run_id, key, value, step=round)

    return log, lambda: client.set_terminated(run_id)


def _trackio(folder: Path, name: str, seed: int, config: dict[str, Any], done: int) -> Opened:
    import trackio

    name = f"{name}-{_identity(folder, seed)[:6]}"
    run = trackio.init(project=PROJECT, name=name, config=config, resume="allow", embed=False)
    return lambda round, values: run.log(values, step=round), run.finish


TRACKERS: Mapping[str, Open] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""By the name of the module that each needs."""
