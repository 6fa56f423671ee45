"""Resuming a run in a folder: what must be as it was when the run began, and how a finished run is made longer."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedpews.build import Setup
from fedpews.config import flatten, override
from fedpews.engines.engine import Engine
from fedpews.errors import CheckpointError, ConfigError, first_line
from fedpews.experiment import Experiment
from fedpews.neurons.structure import difference as difference_of_models
from fedpews.neurons.structure import fingerprint
from fedpews.results import checkpoint as checkpoints
from fedpews.results import layout
from fedpews.results.checkpoint import Checkpoint
from fedpews.results.folder import RunFolder
from fedpews.results.schema import GIVEN

STATE_LAYOUT = "4"
"""Of what methods keep; raised when a method's state or memory changes shape, so that no run is resumed wrongly."""

CHANGED = "runtime.resume=changed"
"""The setting that lets a run continue even if its numbers will differ from those of a run that never stopped."""


@dataclass(frozen=True)
class Resumed:
    """Where a run continues."""

    checkpoint: Checkpoint | None = None
    earlier: Experiment | None = None
    """The experiment that the folder's run was started with; None for a new run."""
    changes: tuple[str, ...] = ()
    """What was changed in between, each with its round: such a run is not the one that never stopped."""


def about(setup: Setup, engine: Engine) -> dict[str, Any]:
    """What a checkpoint was made with; a run that is resumed from it must have the same."""
    return {
        "layout": STATE_LAYOUT,
        "experiment": setup.experiment.to_dict(),
        "data": setup.data_hash,
        "model": setup.structure,
        "made_with": engine.made_with(),
    }


def add_fingerprints(setup: Setup) -> Setup:
    """The setup whose experiment has the fingerprints of a model and data given in Python."""
    values = setup.experiment.to_dict()
    if values["model"]["name"] == GIVEN:
        values["model"]["fingerprint"] = fingerprint(setup.structure)
    if values["data"]["name"] == GIVEN:
        values["data"]["fingerprint"] = setup.data_hash
    return replace(setup, experiment=Experiment(**values))


def find_resumed(folder: RunFolder, setup: Setup, resume: bool) -> Resumed:
    """Where the run in a folder continues; changes nothing in the folder.

    A folder's run is never overwritten, and never continued with other settings. More rounds are allowed if they leave
    the earlier rounds as they were. A lower learning rate is allowed only with ``runtime.resume=changed``.
    """
    experiment = setup.experiment
    if not folder.has_run:
        return Resumed()
    if not resume:
        raise ConfigError(
            f"{folder.path} already holds a run; add --resume to go on with it, or give another --out"
        )
    checkpoint = checkpoints.newest(folder.path)
    begun = earlier = _earlier(folder, checkpoint)
    if earlier.train.diverged == "stop":
        # no client was left out so far, whatever happens to those that diverge from now on
        earlier = Experiment(**override(earlier.to_dict(), {"train.diverged": experiment.train.diverged}))
    changes = () if checkpoint is None else tuple(checkpoint.about["went_on"])
    lower = _lower_rate(earlier, experiment)
    if lower is not None and checkpoint is not None and experiment.runtime.resume == "changed":
        changes = (*changes, f"after round {checkpoint.round}: {lower}")
    elif earlier.fingerprint() != experiment.fingerprint():
        refusal = _why_not_longer(earlier, experiment)
        if refusal is not None:
            hint = "" if lower is None else f" --set {CHANGED} goes on with it from the last checkpoint."
            raise CheckpointError(f"{folder.path} {refusal}. Give another --out.{hint}")
    if checkpoint is not None:
        _check(folder, checkpoint, setup)
    else:
        _check_given(folder, earlier, setup)
    return Resumed(checkpoint, begun, changes)


def check_engine(engine: Engine, why: str, checkpoint: Checkpoint, setup: Setup, folder: Path) -> str:
    """Refuse an engine whose numbers differ from those of the checkpoint; if they may, say how it differs.

    Args:
        why: why this engine was chosen.
    """
    was, now = checkpoint.about["made_with"], engine.made_with()
    may_change = setup.experiment.runtime.resume == "changed"
    engine.go_on(was, may_change=may_change)
    changed = ", ".join(
        f"{key} was {was[key]} and is {now.get(key, 'none')}"
        for key in ("engine", "torch", "compiler", "processor")
        if key in was and was[key] != now.get(key)
    )
    if changed and was["engine"] != now["engine"]:
        changed += f" ({why}; --set runtime.engine={was['engine']} keeps it)"
    if changed and not may_change:
        raise CheckpointError(
            f"{folder} cannot go on to the same numbers: {changed}. Bring that back, give another --out, or go on to "
            f"numbers that differ by rounding: --set {CHANGED}"
        )
    return changed


def update_config(folder: RunFolder, experiment: Experiment, earlier: Experiment | None) -> None:
    """Write config.toml, unless the run's is there and intact."""
    if earlier is not None and earlier.fingerprint() == experiment.fingerprint():
        if folder.is_intact(layout.CONFIG):
            return
        if folder.is_listed(layout.CONFIG) or not _is_config_of(folder, earlier):
            logging.getLogger("fedpews").warning("%s was lost or damaged; it is written again", folder.config)
    folder.write_config(experiment.to_toml())


def _earlier(folder: RunFolder, checkpoint: Checkpoint | None) -> Experiment:
    """The experiment that a folder's run was started with; the checkpoint has it even if config.toml is lost."""
    if checkpoint is not None:
        return Experiment(**checkpoint.about["experiment"])
    try:
        return Experiment.load(folder.config)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder.config} is missing or damaged ({first_line(error)}), and there is no checkpoint that knows what "
            "was run. Start again in another folder (--out)."
        ) from error


def _is_config_of(folder: RunFolder, experiment: Experiment) -> bool:
    try:
        return Experiment.load(folder.config).fingerprint() == experiment.fingerprint()
    except (ConfigError, ValueError):
        return False


def _lower_rate(earlier: Experiment, now: Experiment) -> str | None:
    """What to log about a learning rate that is lower, if all else is the same."""
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


def _why_not_longer(earlier: Experiment, now: Experiment) -> str | None:
    """Why a run of ``earlier`` cannot become one of ``now`` by adding rounds; None if it can."""
    same = _with_rounds(earlier, now)
    if same is None or same.fingerprint() != now.fingerprint():
        return f"holds another experiment: {_difference(earlier, now)}"
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
    return None


def _difference(earlier: Experiment, now: Experiment) -> str:
    """The first few keys in which two experiments differ."""
    a, b = flatten(earlier.to_dict()), flatten(now.to_dict())
    # workers never change a number
    free = ("runtime.workers", "runtime.resume")
    changed = [key for key in a | b if a.get(key) != b.get(key) and key not in free]
    return ", ".join(f"{key} is {a.get(key)} there and {b.get(key)} here" for key in changed[:3])


def _with_rounds(earlier: Experiment, now: Experiment) -> Experiment | None:
    """The earlier experiment with the rounds and the engine of the new one; None if it is not valid."""
    values = earlier.to_dict()
    # a warmup can be given in rounds or as a fraction; the new way replaces the old one
    for key in ("rounds", "fraction"):
        values.get("warmup", {}).pop(key, None)
    given = {key: value for key, value in now.warmup if key in ("rounds", "fraction") and value is not None}
    changes = {f"warmup.{key}": value for key, value in given.items()}
    try:
        return Experiment(
            **override(values, {"rounds": now.rounds, "runtime.engine": now.runtime.engine} | changes)
        )
    except ConfigError:
        return None


def _check_given(folder: RunFolder, earlier: Experiment, setup: Setup) -> None:
    """Without a checkpoint: refuse a model or data, given in Python, that config.toml does not know."""
    model = (earlier.model.model_extra or {}).get("fingerprint")
    if earlier.data.fingerprint not in (None, setup.data_hash):
        raise CheckpointError(f"{folder.path} was begun with other data. Give another --out.")
    if model not in (None, fingerprint(setup.structure)):
        raise CheckpointError(f"{folder.path} was begun with another model. Give another --out.")


def _check(folder: RunFolder, checkpoint: Checkpoint, setup: Setup) -> None:
    """Refuse data or a model that are not those of the checkpoint."""
    was = checkpoint.about
    if was["layout"] != STATE_LAYOUT:
        raise CheckpointError(
            f"{folder.path} was begun by another version of fedpews; finish it with that one, or give another --out."
        )
    if was["data"] != setup.data_hash:
        raise CheckpointError(f"{folder.path} was run on other data than is here now. Give another --out.")
    other = difference_of_models(was["model"], setup.structure)
    if other is not None:
        raise CheckpointError(f"{folder.path} was run with another model: {other}. Give another --out.")
