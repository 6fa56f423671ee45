"""Class names: whether those of all clients fit each other and the list of all classes. Nothing needs torch."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence

from fedpews.errors import ConfigError

LIST = "data.classes"


def check_spellings(holders: Mapping[str, Collection[str]]) -> None:
    """Refuse names that differ only in case, spaces or Unicode form: whether they are one class is not guessed.

    Args:
        holders: the class names of each client.

    >>> check_spellings({"north": ["cnv"], "south": ["CNV"]})
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: classes 'cnv' (north) and 'CNV' (south) differ only in case or spaces; use one name.
    """
    spellings: dict[str, dict[str, list[str]]] = {}
    for holder, names in holders.items():
        for name in names:
            plain = " ".join(unicodedata.normalize("NFKC", name).casefold().split())
            spellings.setdefault(plain, {}).setdefault(name, []).append(holder)
    for ways in spellings.values():
        if len(ways) > 1:
            shown = " and ".join(f"{name!r} ({', '.join(names)})" for name, names in ways.items())
            raise ConfigError(f"classes {shown} differ only in case or spaces; use one name.")


def check_listed(holders: Mapping[str, Collection[str]], classes: Sequence[str], where: str = LIST) -> None:
    """Refuse a name that is not in the list of all classes; the error shows both lists."""
    check_spellings({where: classes, **holders})
    for holder, names in holders.items():
        unknown = sorted(set(names) - set(classes))
        if unknown:
            raise ConfigError(
                f"class {unknown[0]!r} is not in {where}: {holder} has {', '.join(sorted(names))}; {where} has "
                f"{', '.join(classes)}."
            )


def check_list(classes: Sequence[str], counts: Mapping[str, int | None]) -> None:
    """Refuse a list of all classes that contradicts itself, or the number of classes in another table."""
    check_spellings({LIST: classes})
    if not classes or len(set(classes)) < len(classes) or not all(name.strip() for name in classes):
        raise ConfigError(f"{LIST} must name every class, and none twice")
    for table, count in counts.items():
        if count not in (None, len(classes)):
            raise ConfigError(
                f"{table}.classes is {count}, but {LIST} has {len(classes)} names; leave {table}.classes out"
            )
