"""The configuration: defaults, precedence, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpews.build import build_method
from fedpews.compose import WARMUPS, find_class
from fedpews.config import WarmupTable, override, parse_setting, recipes
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.methods.fedavg import FedAvg
from fedpews.options import option_types
from fedpews.warmup import with_warmup


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.lrr": 1}, "unknown key train.lrr; did you mean 'train.lr'?"),
        ({"round": 1}, "unknown key round; did you mean 'rounds'?"),
        ({"train.learning_rate": 1}, "unknown key train.learning_rate; did you mean 'train.lr'?"),
        ({"learning_rate": 1}, "unknown key learning_rate; did you mean 'train.lr'?"),
        ({"train.rounds": 1}, "unknown key train.rounds; did you mean 'rounds'?"),
        ({"train.wd": 1}, "unknown key train.wd; did you mean 'train.weight_decay'?"),
        ({"warmup.lambda": 1}, "unknown key warmup.lambda; did you mean 'warmup.diversity'?"),
        ({"train.quux": 1}, "unknown key train.quux; see `fedpews list keys`"),
        ({"train.lr": "fast"}, "train.lr: input should be a valid number"),
        ({"train.lr": -0.1}, "train.lr: input should be greater than 0"),
        ({"rounds": 0}, "rounds: input should be greater than or equal to 1"),
        ({"rounds": 2.5}, "rounds: input should be a valid integer"),
        ({"warmup.rounds": 11, "rounds": 10}, "warmup.rounds is 11, but rounds is 10"),
        ({"seeds": [1, 1]}, "seeds contains the same seed twice"),
        ({"seeds": []}, "seeds: list should have at least 1 item"),
        ({"method.name": "fedagv"}, "'fedagv' is unknown; did you mean 'fedavg'?"),
        ({"method.name": "fedavg+pews+pews"}, "'pews' is a second warmup; use only one"),
        ({"method.name": "fedavg+pews", "warmup.kind": "fixed"}, "remove one of them"),
        (
            {"train.epochs": 1, "train": {"epochs": 1, "steps": 1}},
            "set train.epochs or train.steps, not both",
        ),
        ({"participation": 1.5}, "participation: input should be less than or equal to 1"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Experiment.load("synthetic-32k", changes)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rounds", "fraction", "expected"), [(200, 0.125, 25), (250, 0.2, 50), (400, 0.1875, 75), (500, 0.1, 50)]
)
def test_the_warmup_of_table_1_has_the_papers_length(rounds: int, fraction: float, expected: int) -> None:
    assert Experiment(rounds=rounds, warmup={"fraction": fraction}).warmup_rounds == expected


@pytest.mark.parametrize(
    ("name", "parts", "kind"),
    [
        ("fedavg", ("fedavg", None, None), "none"),
        ("FedProx+PeWS", ("fedprox", None, None), "learned"),
        ("scaffold+pews-fixed", ("scaffold", None, None), "fixed"),
        ("fedadam+pews-auto", ("fedavg", "fedadam", None), "auto"),
        ("moon+fedyogi", ("moon", "fedyogi", None), "none"),
        ("fedbn", ("fedavg", None, "fedbn"), "none"),
        ("ditto+pews-random", ("fedavg", None, "ditto"), "random"),
        ("fedprox+pews+fedbn", ("fedprox", None, "fedbn"), "learned"),
    ],
)
def test_method_names_compose_with_plus(name: str, parts: object, kind: str) -> None:
    experiment = Experiment(method={"name": name})
    parsed = experiment.method_name
    assert (parsed.base, parsed.server, parsed.personal) == parts
    assert experiment.warmup_kind == kind


def test_warmup_kind_alone_also_asks_for_a_warmup() -> None:
    experiment = Experiment(method={"name": "fedprox"}, warmup={"kind": "fixed"})
    assert experiment.method_label == "fedprox+pews-fixed"


def test_another_method_leaves_the_files_options_behind() -> None:
    values = {"method": {"name": "fedprox", "mu": 0.5}, "warmup": {"kind": "learned", "rounds": 3}}
    assert override(values, {"method.name": "fedavg"}) == {
        "method": {"name": "fedavg"},
        "warmup": {"rounds": 3},
    }
    assert override(values, {"method.name": "fedprox+pews"})["method"] == {"name": "fedprox+pews", "mu": 0.5}


def test_warmup_rounds_replace_the_files_fraction() -> None:
    assert Experiment.load("synthetic-32k", {"warmup.rounds": 7}).warmup_rounds == 7


def test_settings_are_read_as_toml_or_else_as_words() -> None:
    assert parse_setting("seeds=[1, 2]") == ("seeds", [1, 2])
    assert parse_setting("data.name=cifar-mnist") == ("data.name", "cifar-mnist")
    with pytest.raises(ConfigError, match="key=value"):
        parse_setting("rounds")


def test_a_written_config_reads_back_as_the_same_experiment(tmp_path: Path) -> None:
    experiment = Experiment.load(
        "synthetic-3.2k", {"warmup.shares": [1, 3], "method.name": "fedprox+pews-fixed"}
    )
    (tmp_path / "config.toml").write_text(experiment.to_toml())
    assert Experiment.load(tmp_path / "config.toml") == experiment


def test_the_fingerprint_depends_on_the_numbers_only() -> None:
    experiment = Experiment()
    assert experiment.fingerprint() == Experiment(runtime={"workers": 7, "checkpoint_every": 1}).fingerprint()
    assert experiment.fingerprint() != Experiment(train={"lr": 0.02}).fingerprint()


def test_table_1_ships_as_named_configs() -> None:
    first, fourth = Experiment.load("synthetic-32k"), Experiment.load("synthetic-3.2k")
    assert (first.rounds, first.train.server_lr, first.warmup.diversity, first.warmup_rounds) == (
        200,
        1.0,
        5.0,
        25,
    )
    assert (fourth.rounds, fourth.train.server_lr, fourth.warmup.diversity, fourth.warmup_rounds) == (
        500,
        0.1,
        2.0,
        50,
    )
    assert {"synthetic-32k", "synthetic-3.2k"} <= set(recipes())


def test_what_a_recipe_sets_and_the_method_asked_for_has_no_use_for_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experiment = Experiment.load("synthetic-3.2k", {"method.name": "fedpm"})
    assert experiment.train.server_lr is None
    assert "fedpm does not use train.server_lr, which synthetic-3.2k sets; it is ignored" in caplog.text


def test_a_key_that_the_user_writes_stays_although_the_method_has_no_use_for_it() -> None:
    given = Experiment.load("synthetic-3.2k", {"method.name": "fedpm", "train.server_lr": 0.5})
    assert given.train.server_lr == 0.5


def test_a_key_that_is_added_later_changes_no_fingerprint() -> None:
    whole = Experiment(**Experiment(rounds=7).to_dict())
    assert whole.fingerprint() == Experiment(rounds=7).fingerprint()


@pytest.mark.parametrize("suffix", WARMUPS)
def test_every_option_of_the_masks_is_a_key_with_the_same_default(suffix: str) -> None:
    masks = find_class("masks", WARMUPS[suffix])
    assert set(option_types(masks)) <= set(WarmupTable.model_fields)
    built = build_method(Experiment(method={"name": f"fedavg+{suffix}"}, warmup={"rounds": 3}))
    assert built == with_warmup(FedAvg(), 3, masks())


def test_where_auto_ends_is_set_by_a_configuration() -> None:
    method = build_method(
        Experiment.load("synthetic-3.2k", {"method.name": "pews-auto", "warmup.flat_at": 0.3})
    )
    assert method.masks.flat_at == 0.3  # type: ignore[attr-defined]
