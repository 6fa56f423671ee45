"""The errors that a user can fix, the exit code of each kind, and their messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class FedpewsError(Exception):
    """The base of all errors that a user can fix. The message has the given value, the allowed values and the fix."""

    exit_code = 1


class ConfigError(FedpewsError):
    """The configuration, the command line or the data are invalid."""

    exit_code = 2


class FolderInUse(ConfigError):
    """Another process uses the run folder: nothing is wrong with it, and it may be finished soon."""


class DataMissing(FedpewsError):
    """A file of a data set is missing and cannot be downloaded."""

    exit_code = 3


class CheckpointError(FedpewsError):
    """A checkpoint is damaged, or belongs to another experiment."""

    exit_code = 4


class RunFailed(FedpewsError):
    """Training failed, for instance with a loss that is no longer finite."""

    exit_code = 5


class RankLost(RunFailed):
    """One of the processes that share a run ended in the middle of a round; the rounds before are complete."""


class ClientDiverged(RunFailed):
    """A client diverged in a round that is not saved yet: the state before that round can still be saved."""


class Interrupted(FedpewsError):
    """The run was asked to stop (Ctrl-C) and has saved its state."""

    exit_code = 130


def need_extra(extra: str, module: str, purpose: str) -> Any:
    """Import a module that is installed with an extra of the package, or say how to install it.

    >>> need_extra("search", "no_such_module", "--search optuna")
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: --search optuna needs: pip install 'fedpews[search]' (No module named 'no_such_module')
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{purpose} needs: pip install 'fedpews[{extra}]' ({error})") from error


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A hint for a name that does not exist: the one probably meant, or else all names.

    >>> nearest("fedprx", ["fedavg", "fedprox"]), nearest("adam", ["fedavg", "fedprox"])
    ("did you mean 'fedprox'?", 'there is fedavg, fedprox')
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return otherwise or (f"there is {', '.join(names)}" if names else "there is none")


COMMON = {
    "lr": ("learning_rate", "eta"),
    "batch_size": ("batch", "bs"),
    "epochs": ("local_epochs",),
    "steps": ("local_steps",),
    "weight_decay": ("wd", "l2"),
    "optimizer": ("opt",),
    "rounds": ("num_rounds", "n_rounds", "communication_rounds"),
    "clients": ("num_clients", "n_clients"),
    "participation": ("fraction_fit", "client_fraction"),
    "seeds": ("random_seed",),
    "diversity": ("lambda", "lam"),
    "workers": ("num_workers",),
    "device": ("gpu",),
}
"""Our keys, and their names elsewhere."""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """A hint for a dotted key that does not exist: the same name in another table, or a similar one in the same table.

    >>> nearest_key("train.learning_rate", ["train.lr", "train.aggregate"])
    "did you mean 'train.lr'?"
    """
    names = list(known)
    table, _, last = key.rpartition(".")
    last = next((ours for ours, theirs in COMMON.items() if last.lower() in theirs), last)
    here = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == table}
    same = [name for name in (here.get(last), *names) if name is not None and name.rpartition(".")[2] == last]
    close = [here[name] for name in difflib.get_close_matches(last, here, n=1, cutoff=0.5)]
    for name in (*same, *close):
        return f"did you mean {name!r}?"
    return "see `fedpews list keys`" if here else nearest(key, names, "see `fedpews list keys`")


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of its message: other people's messages may have many.

    >>> first_line(RuntimeError("shapes differ\\nlong explanation"))
    'RuntimeError: shapes differ'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__


def explain(error: ValidationError, prefix: str = "", known: Iterable[str] = ()) -> str:
    """pydantic's first error, in one line, with the key as the user writes it.

    Args:
        prefix: of the key, such as ``method.``.
        known: the keys there are, for a key that does not exist.
    """
    errors, known = error.errors(), list(known)
    first = errors[0]
    outer, key = (prefix + ".".join(map(str, parts)) for parts in (first["loc"][:-1], first["loc"]))
    if outer in known and isinstance(first["loc"][-1], str):
        # a key that takes values of several types: pydantic adds the type to the key, and has an error for each
        texts = [entry["msg"] for entry in errors if entry["loc"][:-1] == first["loc"][:-1]]
        words = ", or ".join(text.removeprefix("Input should be ") for text in texts)
        return f"{outer}: should be {words}, got {first['input']!r:.60}"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}; {nearest_key(key, known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    message = first["msg"][0].lower() + first["msg"][1:]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{key}: {message}, got {first['input']!r:.60}{more}"
