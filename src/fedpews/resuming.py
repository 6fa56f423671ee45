"""Going on with a run in a folder: what it must have been begun with, and how a finished one is made longer."""

from __future__ import annotations

from collections.abc import Callable

from fedpews.build import Setup, build_engine
from fedpews.configs import flatten, override
from fedpews.engines.engine import Engine
from fedpews.errors import CheckpointError, ConfigError
from fedpews.experiment import Experiment
from fedpews.results.run_folder import Checkpoint, RunFolder

STATE_LAYOUT = "2"
"""Of what methods keep; raised when a method's state or memory changes shape, so that no run goes on wrongly."""

MakeEngine = Callable[[Setup], tuple[Engine, str]]


def about(setup: Setup, experiment: Experiment | None = None) -> dict[str, str]:
    """What a checkpoint must have been made with, to go on from it."""
    made_with = setup.experiment if experiment is None else experiment
    return {"changes": made_with.fingerprint(), "data": setup.data_hash, "layout": STATE_LAYOUT}


def reopen(
    folder: RunFolder, setup: Setup, resume: bool, make_engine: MakeEngine = build_engine
) -> Checkpoint | None:
    """What to go on from. A folder's run is never overwritten, and never continued with other settings.

    More rounds than it was begun with are no other settings, where they leave the earlier rounds as they were.
    """
    experiment = setup.experiment
    if not folder.has_run:
        folder.write_config(experiment.to_toml())
        return None
    if not resume:
        raise ConfigError(
            f"{folder.path} already holds a run; add --resume to go on with it, or give another --out"
        )
    earlier = Experiment.load(folder.config)
    # any other difference than more rounds is refused by why_not_longer
    is_longer = earlier.fingerprint() != experiment.fingerprint()
    if is_longer:
        refusal = why_not_longer(earlier, setup, make_engine)
        if refusal is not None:
            raise CheckpointError(f"{folder.path} {refusal}. Give another --out.")
    checkpoint = folder.load_checkpoint()
    if checkpoint is not None:
        # against the config it was begun with: that is the one its checkpoint was made by
        _check(folder, checkpoint, setup, earlier)
    # only after all checks, so that a refused resume leaves the folder as it was
    if is_longer:
        folder.write_config(experiment.to_toml())
    return checkpoint


def why_not_longer(earlier: Experiment, setup: Setup, make_engine: MakeEngine) -> str | None:
    """Why a run of ``earlier`` cannot become the one asked for by adding rounds; None if it can."""
    now = setup.experiment
    same = _with_rounds(earlier, now)
    if same is None or same.fingerprint() != now.fingerprint():
        return f"holds another experiment: {difference(earlier, now)}"
    longer = (
        f"was begun for {earlier.rounds} rounds, and with {now.rounds} its first ones would have been others"
    )
    if now.rounds < earlier.rounds:
        return f"holds a run of {earlier.rounds} rounds, more than the {now.rounds} asked for"
    if earlier.warmup_rounds != now.warmup_rounds:
        was, key = earlier.warmup_rounds, "warmup.rounds"
        return f"{longer}: the warmup had {was} rounds, now {now.warmup_rounds}; --set {key}={was} keeps it"
    if now.train.lr_schedule == "cosine":
        return f"{longer}: the cosine schedule of the learning rate ends with the run"
    # more rounds can make compiling worthwhile, and two engines agree only to rounding
    engines = [_engine_name(setup, experiment, make_engine) for experiment in (earlier, now)]
    if engines[0] != engines[1]:
        key = f"--set runtime.engine={engines[0]}"
        return f"{longer} to rounding: it ran on the {engines[0]} engine, now on the {engines[1]}; {key} keeps it"
    return None


def difference(earlier: Experiment, now: Experiment) -> str:
    """The first few keys in which two experiments differ."""
    a, b = flatten(earlier.to_dict()), flatten(now.to_dict())
    # workers never change a number
    changed = [key for key in a | b if a.get(key) != b.get(key) and key != "runtime.workers"]
    return ", ".join(f"{key} is {a.get(key)} there and {b.get(key)} here" for key in changed[:3])


def _with_rounds(earlier: Experiment, now: Experiment) -> Experiment | None:
    """The earlier experiment with the rounds, the way to say W and the way to choose the engine of the new one."""
    values = earlier.to_dict()
    # W can be given in rounds or as a fraction; the new way of saying it replaces the old one
    for key in ("rounds", "fraction"):
        values.get("warmup", {}).pop(key, None)
    said = {key: value for key, value in now.warmup if key in ("rounds", "fraction") and value is not None}
    changes = {f"warmup.{key}": value for key, value in said.items()}
    try:
        return Experiment(
            **override(values, {"rounds": now.rounds, "runtime.engine": now.runtime.engine} | changes)
        )
    except ConfigError:
        return None


def _engine_name(setup: Setup, experiment: Experiment, make_engine: MakeEngine) -> str:
    engine, _ = make_engine(Setup(experiment, setup.data, setup.net, setup.starts, setup.method))
    engine.close()
    return engine.name


def _check(folder: RunFolder, checkpoint: Checkpoint, setup: Setup, earlier: Experiment) -> None:
    was, now = checkpoint.about, about(setup, earlier)
    if was.get("layout") != STATE_LAYOUT:
        raise CheckpointError(
            f"{folder.path} was begun by another version of fedpews; finish it with that one, or give another --out."
        )
    # the first versions wrote a hash of all keys under "config"; there config.toml alone decides
    if was.get("data") != now["data"] or was.get("changes", now["changes"]) != now["changes"]:
        raise CheckpointError(f"{folder.path} was run on other data than is here now. Give another --out.")
