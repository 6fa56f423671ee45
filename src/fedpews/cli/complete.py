"""What the shell offers on Tab, beyond the names of commands and options. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path


def _begins(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def offered(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return offered


def _recipes() -> list[str]:
    from fedpews.config import recipes

    return list(recipes())


def _studies() -> list[str]:
    from fedpews.config import STUDIES, shipped

    return list(shipped(STUDIES))


def _keys() -> list[str]:
    from fedpews.experiment import known_keys

    return [f"{key}=" for key in known_keys()]


def method_names(incomplete: str) -> list[str]:
    """Methods, and behind a ``+`` the server optimisers and warmups."""
    from fedpews.compose import METHODS, PERSONAL, SERVERS, WARMUPS

    head, plus, last = incomplete.rpartition("+")
    parts = (*SERVERS, *WARMUPS, *PERSONAL) if plus else METHODS
    return [f"{head}{plus}{part}" for part in parts if part.startswith(last)]


recipe_names = _begins(_recipes)
configs = _begins(lambda: [*_recipes(), *(str(path) for path in sorted(Path().glob("*.toml")))])
recipes_and_studies = _begins(lambda: [*_recipes(), *_studies()])
study_names = _begins(lambda: ["all", *_studies()])
key_names = _begins(_keys)
lists = _begins(lambda: ("methods", "data", "models", "recipes", "studies", "keys"))
