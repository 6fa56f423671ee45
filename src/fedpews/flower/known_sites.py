"""The operator's roster: which key is which site's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from fedpews.errors import ConfigError
from fedpews.outside import MOST_TOML, parse_toml, read_text
from fedpews.results.files import write_atomically


@dataclass(frozen=True)
class KnownSite:
    """One line of the roster."""

    number: int
    name: str
    key: str  # the public key's fingerprint, as ssh-keygen -lf shows it


@dataclass(frozen=True)
class KnownSites:
    """Every site that the operator has approved. A node with any other key is nobody.

    >>> roster = KnownSites((KnownSite(0, "north", "SHA256:aaa"),))
    >>> roster.by_key["SHA256:aaa"].number
    0
    """

    sites: tuple[KnownSite, ...] = ()

    @cached_property
    def by_key(self) -> dict[str, KnownSite]:
        return {site.key: site for site in self.sites}

    @cached_property
    def names(self) -> dict[int, str]:
        return {site.number: site.name for site in self.sites}

    def adding(self, new: KnownSite) -> KnownSites:
        """With one more site, which takes nobody's number, name or key."""
        for site in self.sites:
            for field in ("number", "name", "key"):
                if getattr(site, field) == getattr(new, field):
                    raise ConfigError(
                        f"{field} {getattr(new, field)} is already that of site {site.number}, {site.name!r} "
                        f"({site.key}); take that one out of the roster first"
                    )
        return KnownSites(tuple(sorted((*self.sites, new), key=lambda site: site.number)))

    def write(self, path: Path) -> None:
        rows = [{"number": s.number, "name": s.name, "key": s.key} for s in self.sites]
        write_atomically(path, tomli_w.dumps({"site": rows}).encode())

    @classmethod
    def read(cls, path: Path) -> KnownSites:
        if not path.exists():
            raise ConfigError(f"there is no roster {path}; approve sites with: fedpews flower approve")
        try:
            rows = parse_toml(read_text(path, MOST_TOML), str(path)).get("site", [])
            known = cls()
            for row in rows:
                known = known.adding(_site(row))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(f"{path} is no roster: {error}") from error
        return known


def _site(row: Mapping[str, Any]) -> KnownSite:
    number, name, key = row["number"], row["name"], row["key"]
    if not isinstance(number, int) or number < 0 or not str(key).startswith("SHA256:"):
        raise ValueError(f"site {number!r} with the key {key!r:.60}")
    return KnownSite(number, str(name), str(key))
