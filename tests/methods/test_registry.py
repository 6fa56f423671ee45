"""Methods by name, and what a wrong option is told."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from fedpews.errors import ConfigError
from fedpews.methods import (
    METHODS,
    SERVERS,
    describe,
    make,
    make_server,
    method_class,
    takes_server,
    takes_warmup,
)
from fedpews.methods.options import defaults


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_made_described_and_documented(name: str) -> None:
    cls = method_class(name)
    assert make(name) == cls()
    assert 20 < len(describe(name)) < 160, describe(name)
    doc = inspect.getdoc(cls) or ""
    assert ">>>" in doc
    for option in defaults(cls).keys() - {"momentum", "weight_decay"}:
        assert f"{option}:" in doc, f"{name} does not explain {option}"
    module = inspect.getmodule(cls)
    assert module is not None
    assert "20" in (module.__doc__ or ""), "the reference, with its year"


@pytest.mark.parametrize("name", SERVERS)
def test_every_server_optimiser_is_made_and_described(name: str) -> None:
    assert make_server(name, lr=0.5).lr == 0.5  # type: ignore[attr-defined]
    assert "Fed" in describe(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedprx", {}, "did you mean 'fedprox'"),
        ("nothing", {}, "there is fedavg"),
        (
            "fedprox",
            {"weigth_decay": 1},
            "fedprox has no option method.weigth_decay; did you mean 'weight_decay'",
        ),
        (
            "fedprox",
            {"strength": 1},
            "fedprox has no option method.strength; there is momentum, mu, weight_decay",
        ),
        ("fedprox", {"mu": -1}, "method.mu must be at least 0, got -1"),
        ("fedprox", {"mu": "a"}, "method.mu must be a number"),
        ("fedprox", {"mu": True}, "method.mu must be a number"),
        ("fedprox", {"mu": float("nan")}, "method.mu must be a number"),
        ("fedavg", {"momentum": 1.0}, "at least 0 and below 1"),
        ("moon", {"temperature": 0}, "must be above 0"),
        ("heterofl", {"widths": [0.5, 2]}, "must be above 0 and at most 1, got 2.0"),
        ("heterofl", {"widths": 0.5}, "must be a list of numbers"),
        ("heterofl", {"widths": []}, "must not be empty"),
        ("fedpm", {"evaluate": "guess"}, "must be one of sample, threshold"),
        ("fedpm", {"momentum": 0.9}, "fedpm has no option method.momentum"),
        ("no.such.module:Method", {}, "cannot be loaded"),
        ("fedpews.trees:add", {}, "must be a dataclass"),
    ],
)
def test_a_wrong_name_or_option_is_told_what_is_right(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(name, **options)


def test_lists_and_whole_numbers_become_what_the_method_wants() -> None:
    assert make("heterofl", widths=[1, 0.5]).widths == (1.0, 0.5)  # type: ignore[attr-defined]
    assert isinstance(make("fedprox", mu=1).mu, float)  # type: ignore[attr-defined]


def test_a_method_can_be_named_by_its_module() -> None:
    assert make("fedpews.methods.fedprox:FedProx", mu=0.5).mu == 0.5  # type: ignore[attr-defined]


def test_a_method_can_be_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedpews.methods.fedavg import FedAvg\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(FedAvg):\n"
        "    strength: float = 0.5\n"
    )

    assert make(f"{tmp_path}/mine.py:Mine", strength=2.0).strength == 2.0


def test_fedpm_takes_no_server_optimiser() -> None:
    assert not takes_server("fedpm")
    with pytest.raises(ConfigError, match="takes no server optimiser"):
        make("fedpm", make_server("fedadam"))


def test_base_optimisers_take_a_warmup_and_methods_with_masks_do_not() -> None:
    takers = {name for name in METHODS if takes_warmup(name)}
    assert takers == {"fedavg", "fedprox", "scaffold", "fednova", "moon"}
