"""Going on with a run in a folder: what it must have been begun with, and how a finished one is made longer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedpews.build import Setup, build_engine
from fedpews.configs import flatten, override
from fedpews.engines.engine import Engine
from fedpews.errors import CheckpointError, ConfigError, first_line
from fedpews.experiment import Experiment
from fedpews.given import add_fingerprints
from fedpews.neurons.structure import difference as difference_of_models
from fedpews.neurons.structure import fingerprint
from fedpews.results import layout
from fedpews.results.checkpoints import Checkpoint
from fedpews.results.run_folder import RunFolder
from fedpews.results.schema import GIVEN

STATE_LAYOUT = "3"
"""Of what methods keep; raised when a method's state or memory changes shape, so that no run goes on wrongly."""

CHANGED = "runtime.resume=changed"
"""What lets a run go on that cannot be the one that was never stopped."""

MakeEngine = Callable[[Setup], tuple[Engine, str]]


@dataclass(frozen=True)
class Reopened:
    """Where a run goes on."""

    checkpoint: Checkpoint | None = None
    went_on: tuple[str, ...] = ()
    """What was changed in between, each with its round: such a run is not the one that was never stopped."""


def about(setup: Setup, engine: Engine) -> dict[str, Any]:
    """What a checkpoint was made with, and must find again to go on from it."""
    return {
        "layout": STATE_LAYOUT,
        "experiment": setup.experiment.to_dict(),
        "data": setup.data_hash,
        "model": setup.structure,
        "made_with": engine.made_with(),
    }


def reopen(folder: RunFolder, setup: Setup, resume: bool, make_engine: MakeEngine = build_engine) -> Reopened:
    """What to go on from. A folder's run is never overwritten, and never continued with other settings.

    More rounds than it was begun with are no other settings, where they leave the earlier rounds as they were. A lower
    learning rate is one, and only goes on when asked for.
    """
    experiment = setup.experiment
    if not folder.has_run:
        folder.write_config(experiment.to_toml())
        return Reopened()
    if not resume:
        raise ConfigError(
            f"{folder.path} already holds a run; add --resume to go on with it, or give another --out"
        )
    checkpoint = folder.load_checkpoint()
    earlier = _earlier(folder, checkpoint)
    if earlier.train.diverged == "stop":
        # so far nobody was left out, whatever is to be done from now on
        earlier = Experiment(**override(earlier.to_dict(), {"train.diverged": experiment.train.diverged}))
    went_on = () if checkpoint is None else tuple(checkpoint.about.get("went_on", ()))
    # any other difference than more rounds is refused by why_not_longer
    is_other = earlier.fingerprint() != experiment.fingerprint()
    lower = _lower_rate(earlier, experiment)
    if lower is not None and checkpoint is not None and experiment.runtime.resume == "changed":
        went_on = (*went_on, f"after round {checkpoint.round}: {lower}")
    elif is_other:
        refusal = why_not_longer(earlier, setup, make_engine)
        if refusal is not None:
            hint = "" if lower is None else f" --set {CHANGED} goes on with it from the last checkpoint."
            raise CheckpointError(f"{folder.path} {refusal}. Give another --out.{hint}")
    if checkpoint is not None:
        _check(folder, checkpoint, setup)
    else:
        _check_given(folder, earlier, setup)
    # only after all checks, so that a refused resume leaves the folder as it was
    if is_other:
        folder.write_config(experiment.to_toml())
    elif not _has_config(folder, earlier):
        logging.getLogger("fedpews").warning("%s was lost or damaged; it is written again", folder.config)
        folder.write_config(experiment.to_toml())
    return Reopened(checkpoint, went_on)


def fingerprinted(setup: Setup) -> Setup:
    """The setup whose experiment says which model and data were given in Python."""
    experiment = setup.experiment
    if GIVEN not in (experiment.model.name, experiment.data.name):
        return setup
    return replace(
        setup, experiment=add_fingerprints(experiment, fingerprint(setup.structure), setup.data_hash)
    )


def hold_to(engine: Engine, why: str, reopened: Reopened, setup: Setup, folder: Path) -> Reopened:
    """See that an engine gives the numbers of the rounds before, or say that it does not."""
    checkpoint = reopened.checkpoint
    was = {} if checkpoint is None else checkpoint.about.get("made_with", {})
    if checkpoint is None or not was:
        return reopened
    now, may_change = engine.made_with(), setup.experiment.runtime.resume == "changed"
    engine.go_on(was, may_change=may_change)
    changed = [
        f"{key} was {was[key]} and is {now.get(key, 'none')}"
        for key in ("engine", "torch", "compiler", "processor")
        if key in was and was[key] != now.get(key)
    ]
    if not changed:
        return reopened
    told = ", ".join(changed) + (f" ({why})" if why and was["engine"] != now["engine"] else "")
    if not may_change:
        raise CheckpointError(
            f"{folder} cannot go on to the same numbers: {told}. Bring that back, give another --out, or go on to "
            f"numbers that differ by rounding: --set {CHANGED}"
        )
    return Reopened(checkpoint, (*reopened.went_on, f"after round {checkpoint.round}: {told}"))


def _earlier(folder: RunFolder, checkpoint: Checkpoint | None) -> Experiment:
    """The experiment that a folder's run was begun with: its checkpoint knows best, config.toml may be lost."""
    found = None if checkpoint is None else checkpoint.about.get("experiment")
    if found is not None:
        return Experiment(**found)
    try:
        return Experiment.load(folder.config)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder.config} is missing or damaged ({first_line(error)}), and there is no checkpoint that knows what "
            "was run. Start again in another folder (--out)."
        ) from error


def _has_config(folder: RunFolder, earlier: Experiment) -> bool:
    """Whether config.toml is there, whole, and that of the run."""
    if not folder.is_intact(layout.CONFIG):
        return False
    try:
        return Experiment.load(folder.config).fingerprint() == earlier.fingerprint()
    except (ConfigError, ValueError):
        return False


def _lower_rate(earlier: Experiment, now: Experiment) -> str | None:
    """What to say of a learning rate that is lower, if all else is the same."""
    was, rate = earlier.train.lr, now.train.lr
    if rate >= was:
        return None
    try:
        same = (
            Experiment(**override(earlier.to_dict(), {"train.lr": rate})).fingerprint() == now.fingerprint()
        )
    except ConfigError:
        return None
    return f"train.lr was {was:g} and is {rate:g}" if same else None


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
    free = ("runtime.workers", "runtime.resume")
    changed = [key for key in a | b if a.get(key) != b.get(key) and key not in free]
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


def _check_given(folder: RunFolder, earlier: Experiment, setup: Setup) -> None:
    """Before there is a checkpoint: the model and the data that were given are those of config.toml."""
    model = (earlier.model.model_extra or {}).get("fingerprint")
    if earlier.data.fingerprint not in (None, setup.data_hash):
        raise CheckpointError(f"{folder.path} was begun with other data. Give another --out.")
    if model not in (None, fingerprint(setup.structure)):
        raise CheckpointError(f"{folder.path} was begun with another model. Give another --out.")


def _check(folder: RunFolder, checkpoint: Checkpoint, setup: Setup) -> None:
    was = checkpoint.about
    if was.get("layout") != STATE_LAYOUT:
        raise CheckpointError(
            f"{folder.path} was begun by another version of fedpews; finish it with that one, or give another --out."
        )
    if was.get("data") != setup.data_hash:
        raise CheckpointError(f"{folder.path} was run on other data than is here now. Give another --out.")
    # checkpoints of earlier versions say nothing of their model
    other = difference_of_models(was["model"], setup.structure) if "model" in was else None
    if other is not None:
        raise CheckpointError(f"{folder.path} was run with another model: {other}. Give another --out.")
