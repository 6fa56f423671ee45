"""What can go wrong for a user, the exit code each kind ends the command with, and how it is worded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class FedpewsError(Exception):
    """A mistake or a lack that a person can mend: the message says what was given, what is allowed, what to do."""

    exit_code = 1


class ConfigError(FedpewsError):
    """The configuration, the command line or the data handed in cannot be used."""

    exit_code = 2


class FolderInUse(ConfigError):
    """Another process holds the run folder: nothing is wrong with it, and it may be finished soon."""


class DataMissing(FedpewsError):
    """A file of a data set is neither here nor downloadable."""

    exit_code = 3


class CheckpointError(FedpewsError):
    """A checkpoint is damaged, or belongs to another experiment."""

    exit_code = 4


class RunFailed(FedpewsError):
    """Training itself broke down, for instance with a loss that is no longer finite."""

    exit_code = 5


class RankLost(RunFailed):
    """One of the processes that share a run is gone in the middle of a round; the rounds before are whole."""


class ClientDiverged(RunFailed):
    """A client's numbers broke down in a round of which nothing counts yet: where it began can still be saved."""


class Interrupted(FedpewsError):
    """The run was asked to stop (Ctrl-C) and has saved where it stands."""

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
    """What to say about a name that does not exist: the one probably meant, or else all there are.

    >>> nearest("fedprx", ["fedavg", "fedprox"]), nearest("adam", ["fedavg", "fedprox"])
    ("did you mean 'fedprox'?", 'there is fedavg, fedprox')
    """
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    return otherwise or (f"there is {', '.join(names)}" if names else "there is none")


COMMON = {
    "learning_rate": "lr",
    "eta": "lr",
    "batch": "batch_size",
    "bs": "batch_size",
    "local_epochs": "epochs",
    "local_steps": "steps",
    "wd": "weight_decay",
    "l2": "weight_decay",
    "opt": "optimizer",
    "num_rounds": "rounds",
    "n_rounds": "rounds",
    "communication_rounds": "rounds",
    "num_clients": "clients",
    "n_clients": "clients",
    "fraction_fit": "participation",
    "client_fraction": "participation",
    "random_seed": "seeds",
    "lambda": "diversity",
    "lam": "diversity",
    "num_workers": "workers",
    "gpu": "device",
}
"""What keys are called elsewhere, and here."""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """What to say about a dotted key that does not exist.

    The last part counts: the same name in the same table, or else in another one, or else a similar one there.

    >>> nearest_key("train.learning_rate", ["train.lr", "train.aggregate"])
    "did you mean 'train.lr'?"
    """
    names = list(known)
    table, _, last = key.rpartition(".")
    last = COMMON.get(last.lower(), last)
    same = [name for name in names if name.rpartition(".")[2] == last]
    here = {name.rpartition(".")[2]: name for name in names if name.rpartition(".")[0] == table}
    close = difflib.get_close_matches(last, here, n=1, cutoff=0.5)
    found = [name for name in same if name == here.get(last)] + same + [here[name] for name in close]
    if found:
        return f"did you mean {found[0]!r}?"
    return "see `fedpews list keys`" if here else nearest(key, names, "see `fedpews list keys`")


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of its message: other people's messages may have many.

    >>> first_line(RuntimeError("shapes differ\\nlong explanation"))
    'RuntimeError: shapes differ'
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200].rstrip('.')}" if lines else type(error).__name__


def explain(error: ValidationError, prefix: str = "", known: Iterable[str] = ()) -> str:
    """What pydantic found first, in one line, with the key as the user writes it.

    Args:
        prefix: of the key, such as ``method.``.
        known: the keys there are, for a key that does not exist.
    """
    found, known = error.errors(), list(known)
    first = found[0]
    key = prefix + ".".join(str(part) for part in first["loc"])
    outer = prefix + ".".join(str(part) for part in first["loc"][:-1])
    if outer in known and isinstance(first["loc"][-1], str):
        # a key that takes values of several kinds: pydantic names the kind behind the key, and finds fault with each
        ways = [entry["msg"] for entry in found if entry["loc"][:-1] == first["loc"][:-1]]
        words = ", or ".join(way.removeprefix("Input should be ") for way in ways)
        return f"{outer}: should be {words}, got {first['input']!r:.60}"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}; {nearest_key(key, known)}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    message = first["msg"][0].lower() + first["msg"][1:]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{key}: {message}, got {first['input']!r:.60}{more}"
