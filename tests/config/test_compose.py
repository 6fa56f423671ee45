"""Methods by name, and what a wrong option is told."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedpews.compose import (
    METHODS,
    OPTIMIZERS,
    PERSONAL,
    SERVERS,
    MethodName,
    describe,
    find_class,
    local_optimizer,
    method_fields,
    server_optimizer,
)
from fedpews.compose import method as make
from fedpews.errors import ConfigError
from fedpews.methods.fedprox import FedProx
from fedpews.methods.scaffold import Scaffold
from fedpews.options import option_types
from fedpews.registry import register
from fedpews.warmup import Learned, with_warmup

REGISTERED = """
import importlib, typing
from fedpews.registry import Kind, registered
read = {kind: dict(registered(kind)) for kind in typing.get_args(Kind)}
for kind in read:
    registered(kind).clear()
for path in {path for classes in read.values() for path in classes.values()}:
    importlib.import_module(path.partition(":")[0])
assert read == {kind: registered(kind) for kind in read}, "names read from the source are not those of the decorators"
"""


def test_a_name_read_from_the_source_is_the_one_that_its_class_registers() -> None:
    # in a process of its own: the modules are imported once only
    subprocess.run([sys.executable, "-c", REGISTERED], check=True)


def test_a_method_is_known_by_its_name_as_soon_as_it_is_registered() -> None:
    register("method", "mine")(FedProx)
    try:
        assert find_class("method", "mine") is FedProx
    finally:
        METHODS.pop("mine")


def test_a_list_of_names_does_not_import_torch() -> None:
    code = "import sys; from fedpews.compose import METHODS; sys.exit(not METHODS or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_made_described_and_documented(name: str) -> None:
    cls = find_class("method", name)
    assert make(name) == cls()
    assert 20 < len(describe(name)) < 160, describe(name)
    doc = inspect.getdoc(cls) or ""
    assert ">>>" in doc
    for option in option_types(cls).keys() - {"momentum", "weight_decay", "clip_norm"}:
        assert f"{option}:" in doc, f"{name} does not explain {option}"
    assert "20" in describe(name), "the reference, with its year"


@pytest.mark.parametrize("name", SERVERS)
def test_every_server_optimiser_is_made_and_described(name: str) -> None:
    assert server_optimizer(name, lr=0.5).lr == 0.5  # type: ignore[attr-defined]
    assert "Fed" in describe(name)


@pytest.mark.parametrize("name", PERSONAL)
def test_every_way_to_models_of_clients_own_is_made_and_described(name: str) -> None:
    made: Any = make(name)
    assert type(made) is find_class("personal", name)
    assert made.inner == make("fedavg")
    assert made.personalised
    assert 20 < len(describe(name)) < 160


@pytest.mark.parametrize("name", ["fedpm+fedper", "fedpm+fedrep", "fedpm+local"])
def test_weights_that_are_not_uploaded_cannot_stay_at_the_client(name: str) -> None:
    with pytest.raises(ConfigError, match="FedPM upload no weights"):
        make(name)
    assert make("fedpm+fedbn").personalised


@pytest.mark.parametrize("base", ["fedala", "fedselect", "fedweit", "lotteryfl", "spafl"])
@pytest.mark.parametrize("personal", ["ditto", "local"])
def test_a_method_with_personal_models_takes_no_second_one(base: str, personal: str) -> None:
    with pytest.raises(ConfigError, match=f"has personal models already; leave {personal} out"):
        make(f"{base}+{personal}")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_local_optimiser_is_made(name: str) -> None:
    assert type(local_optimizer(name)) is find_class("optimizer", name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fedprx", {}, "did you mean 'fedprox'"),
        ("nothing", {}, "'nothing' is unknown; there is ditto, fedadagrad"),
        ("fedavg+fedprox", {}, "'fedprox' is a second method; use only one"),
        (
            "fedprox",
            {"weigth_decay": 1},
            "fedprox has no option method.weigth_decay; did you mean 'weight_decay'",
        ),
        (
            "fedprox",
            {"strength": 1},
            "fedprox has no option method.strength; there is clip_norm, momentum, mu, weight_decay",
        ),
        ("fedprox", {"mu": -1}, "method.mu: input should be greater than or equal to 0, got -1"),
        ("fedprox", {"mu": "a"}, "method.mu: input should be a valid number, got 'a'"),
        ("fedprox", {"mu": True}, "method.mu: input should be a valid number, got True"),
        ("fedprox", {"mu": float("nan")}, "method.mu: input should be a finite number"),
        ("fedavg", {"momentum": 1.0}, "method.momentum: input should be less than 1"),
        ("moon", {"temperature": 0}, "method.temperature: input should be greater than 0"),
        ("heterofl", {"widths": [0.5, 2]}, "method.widths.1: input should be less than or equal to 1, got 2"),
        ("heterofl", {"widths": 0.5}, "method.widths: input should be a valid tuple, got 0.5"),
        ("heterofl", {"widths": []}, "method.widths: tuple should have at least 1 item"),
        ("fedpm", {"evaluate": "guess"}, "method.evaluate: input should be 'sample' or 'threshold'"),
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
    assert "server" not in method_fields("fedpm")
    with pytest.raises(ConfigError, match="accepts no server optimiser"):
        make("fedpm+fedadam")


def test_base_optimisers_take_a_warmup_and_methods_with_masks_do_not() -> None:
    takers = {name for name in METHODS if find_class("method", name).takes_warmup}
    bases = {"fedavg", "fedprox", "scaffold", "fednova", "moon", "feddyn"}
    assert takers == bases | {"fedavg-m", "scaffold-m", "feddecorr", "feduv", "fedswa", "fedmoswa"}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: FedProx(mu=-5.0), "FedProx.mu: input should be greater than or equal to 0, got -5.0"),
        (lambda: Scaffold(momentum=0.9), "scaffold needs plain SGD"),
        (lambda: Learned(mask_lr=0.0), "Learned.mask_lr: input should be greater than 0"),
        (lambda: Learned(upload="all"), "Learned.upload: input should be 'probabilities' or 'masks'"),  # type: ignore[arg-type]
        (
            lambda: with_warmup(FedProx(), rounds=-1),
            "Warmup.rounds: input should be greater than or equal to 0",
        ),
    ],
)
def test_an_option_given_in_python_is_checked_as_one_in_a_file(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made()


def test_a_composed_name_makes_the_method_it_says() -> None:
    made: Any = make(
        "scaffold+fedadam+pews+fedbn", warmup={"rounds": 4, "diversity": 2.0}, server={"lr": 0.5}
    )
    warmup = made.inner
    assert type(made).__name__ == "FedBN"
    assert (warmup.rounds, warmup.masks) == (4, Learned(diversity=2.0))
    assert warmup.inner == Scaffold(server=server_optimizer("fedadam", lr=0.5))


@pytest.mark.parametrize(
    "name", ["fedavg", "fedadam", "scaffold+fedyogi+pews-fixed", "fedavg+pews-auto+fedbn", "fedavg+ditto"]
)
def test_a_name_is_written_as_it_was_read(name: str) -> None:
    assert str(MethodName.parse(name)) == name


def test_a_warmup_without_its_length_is_told_to_give_it() -> None:
    with pytest.raises(ConfigError, match="needs a number of rounds W"):
        make("fedavg+pews")
