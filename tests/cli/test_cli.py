"""The command line as a user meets it: exit codes, messages, output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from command_line import fedpews
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment

TINY = ["--rounds", "2", "--seeds", "0", "--set", "train.batch_size=400", "--set", "runtime.engine=eager"]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "both"
    methods = ["--method", "fedavg", "--method", "fedavg+pews"]
    done = fedpews("run", "synthetic-3.2k", *methods, *TINY, "--out", str(folder))
    assert done.code == 0, done.stderr
    assert "fedavg+pews" in done.stdout
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--set", "train.lrr=0.1"], 2, ["train.lrr", "'train.lr'?"]),
        (["--set", "train.lr=fast"], 2, ["train.lr", "valid number", "fast"]),
        (["--set", "train.lr=-1"], 2, ["train.lr", "greater than 0"]),
        (["--set", "warmup.rounds=9", "--rounds", "5"], 2, ["warmup.rounds", "9", "5"]),
        (["--set", "data.partition=iid", "--set", "data.clients=99999"], 2, ["99999"]),
        (["--set", "data.clients=0"], 2, ["data.clients"]),
        (["--method", "fedprox", "--set", "method.muu=1"], 2, ["method.muu", "mu"]),
        (["--method", "fedprox", "--set", "method.mu=-1"], 2, ["method.mu", "greater than or equal to 0"]),
        (["--set", "model.name=resmet"], 2, ["resmet"]),
        (["--set", "model.classes=2"], 2, ["outputs of shape (4,)", "shape (2,)"]),
        (["--set", "data.name=synthetic"], 2, ["synthetic"]),
        (["--seeds", "a,b"], 2, ["--seeds"]),
        (["--set", "rounds"], 2, ["key=value"]),
    ],
)
def test_bad_input_is_one_or_two_lines_and_exit_2(
    arguments: list[str], code: int, words: list[str], tmp_path: Path
) -> None:
    done = fedpews("run", "synthetic-3.2k", "--out", str(tmp_path / "run"), "--rounds", "5", *arguments)
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert all(word in done.stderr for word in words), done.stderr


@pytest.mark.parametrize(
    ("x", "y", "word"),
    [
        (np.full((4, 5), np.nan, np.float32), np.zeros(4, np.int64), "nan"),
        (np.zeros((0, 5), np.float32), np.zeros(0, np.int64), "sample"),
        (np.zeros((4, 5), np.float32), np.full(4, -1), "label"),
    ],
)
def test_bad_data_is_refused_clearly(x: np.ndarray, y: np.ndarray, word: str, tmp_path: Path) -> None:
    good = {"x": np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32), "y": np.arange(4)}
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "a.npz", **good)
    np.savez(tmp_path / "data" / "b.npz", x=x, y=y)
    np.savez(tmp_path / "data" / "test.npz", **good)
    name = ["--set", f"data.name=folder:{tmp_path / 'data'}", "--set", "data.partition=given"]
    done = fedpews("run", "synthetic-3.2k", *name, *TINY, "--out", str(tmp_path / "run"))
    assert done.code == 2, done.stderr
    assert word in done.stderr.lower()
    assert len(done.stderr.strip().splitlines()) <= 2


def test_an_unknown_recipe_names_the_nearest() -> None:
    done = fedpews("run", "synthetic-32")
    assert done.code == 2
    assert "synthetic-32k" in done.stderr


def test_debug_lets_the_error_through_with_its_traceback() -> None:
    with pytest.raises(ConfigError):
        fedpews("--debug", "run", "synthetic-32")


def test_a_run_does_not_overwrite_an_earlier_one(two_runs: Path) -> None:
    done = fedpews("run", "synthetic-3.2k", "--method", "fedavg", *TINY, "--out", str(two_runs / "fedavg"))
    assert done.code == 2
    assert "--resume" in done.stderr


def test_resuming_a_finished_run_shows_its_result(two_runs: Path) -> None:
    before = (two_runs / "fedavg" / "rounds.jsonl").read_bytes()
    done = fedpews(
        "run", "synthetic-3.2k", "--method", "fedavg", *TINY, "--out", str(two_runs / "fedavg"), "--resume"
    )
    assert done.code == 0, done.stderr
    assert (two_runs / "fedavg" / "rounds.jsonl").read_bytes() == before


def test_resuming_with_other_settings_is_exit_4(two_runs: Path) -> None:
    changed = [*TINY, "--set", "train.lr=0.5", "--out", str(two_runs / "fedavg"), "--resume"]
    done = fedpews("run", "synthetic-3.2k", "--method", "fedavg", *changed)
    assert done.code == 4, done.stderr
    assert "train.lr is 0.01 there and 0.5 here" in done.stderr


def test_a_run_that_breaks_down_is_exit_5(tmp_path: Path) -> None:
    done = fedpews("run", "synthetic-3.2k", *TINY, "--set", "train.lr=1e20", "--out", str(tmp_path / "run"))
    assert done.code == 5, done.stderr


def test_compare_finds_runs_below_a_folder_and_draws_them(two_runs: Path, tmp_path: Path) -> None:
    done = fedpews("compare", str(two_runs), "--plot", str(tmp_path / "curves.png"))
    assert done.code == 0, done.stderr
    assert "1 seed is too few to tell: " in " ".join(done.stdout.split())
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_compare_says_when_a_folder_holds_no_run(tmp_path: Path) -> None:
    done = fedpews("compare", str(tmp_path))
    assert done.code == 2
    assert "is not a run folder" in done.stderr


@pytest.mark.parametrize("what", ["methods", "data", "models", "recipes", "keys"])
def test_list_shows_what_there_is(what: str) -> None:
    done = fedpews("list", what)
    assert done.code == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_there_is_no_bar_and_no_colour_off_a_terminal(two_runs: Path, tmp_path: Path) -> None:
    done = fedpews("run", "synthetic-3.2k", "--method", "fedavg", *TINY, "--out", str(tmp_path / "run"))
    assert "\x1b" not in done.stderr + done.stdout
    assert "━" not in done.stderr


def test_every_methods_options_are_checked_before_the_first_is_trained(tmp_path: Path) -> None:
    methods = ["--method", "fedavg", "--method", "fedavg+fedadam", "--set", "fedadam.tau=-1"]
    done = fedpews("run", "synthetic-3.2k", *methods, *TINY, "--out", str(tmp_path / "both"))
    assert done.code == 2
    assert done.stderr.startswith("error: --method fedadam: server.tau: input should be greater than 0")
    assert not (tmp_path / "both").exists()


def test_an_option_of_one_method_is_set_in_a_comparison(tmp_path: Path) -> None:
    methods = [part for name in ("fedavg", "fedprox", "fedavg+fedadam+pews") for part in ("--method", name)]
    own = [
        part for text in ("fedprox.mu=0.5", "fedadam.beta1=0.7", "pews.rounds=1") for part in ("--set", text)
    ]
    done = fedpews("run", "synthetic-3.2k", *methods, *own, *TINY, "--out", str(tmp_path))
    assert done.code == 0, done.stderr
    fedavg, fedprox, both = (
        Experiment.load(tmp_path / name / "config.toml") for name in ("fedavg", "fedprox", "fedadam+pews")
    )
    assert fedprox.method.model_extra == {"mu": 0.5}
    assert (both.server["beta1"], both.warmup.rounds) == (0.7, 1)
    assert (fedavg.method.model_extra, fedavg.server, fedavg.warmup.rounds) == ({}, {}, None)


def test_an_option_that_not_all_methods_have_is_refused_with_how_to_write_it(tmp_path: Path) -> None:
    methods = ["--method", "fedprox", "--method", "fedavg", "--set", "method.mu=0.1"]
    done = fedpews("run", "synthetic-3.2k", *methods, *TINY, "--out", str(tmp_path / "both"))
    assert done.code == 2
    assert "fedavg has no option method.mu" in done.stderr
    assert "to set an option of one method, use its name: --set fedprox.mu=0.1" in done.stderr


def test_an_option_of_a_method_that_does_not_run_is_refused(tmp_path: Path) -> None:
    methods = ["--method", "fedavg", "--method", "moon", "--set", "fedprox.mu=0.1"]
    done = fedpews("run", "synthetic-3.2k", *methods, *TINY, "--out", str(tmp_path / "both"))
    assert done.code == 2
    assert "--set fedprox.mu: fedprox is not part of any method of this command (fedavg, moon)" in done.stderr
