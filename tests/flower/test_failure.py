"""A run across sites that fails says so with our own words and exit code, whatever Flower's programs say."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedpews.cli import app
from fedpews.errors import ConfigError, FedpewsError, RunFailed
from fedpews.flower.logs import clear_failure, raise_failure, save_failure


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("no roster"), ConfigError.exit_code, "^no roster$"),
        (ZeroDivisionError("division by zero"), RunFailed.exit_code, "the server failed: .*division by zero"),
    ],
)
def test_what_ended_the_run_is_raised_where_it_was_started(
    tmp_path: Path, error: Exception, code: int, words: str
) -> None:
    save_failure(tmp_path, error)

    with pytest.raises(FedpewsError, match=words) as caught:
        raise_failure(tmp_path)

    assert caught.value.exit_code == code


def test_nothing_is_raised_of_an_earlier_run(tmp_path: Path) -> None:
    save_failure(tmp_path, ConfigError("no roster"))
    clear_failure(tmp_path)

    raise_failure(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"exit_code": 0, "message": ""}', '{"exit_code": 5, "message": 7}']
)
def test_a_file_that_is_damaged_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "flower-error.json").write_text(text)

    with pytest.raises(ConfigError, match=r"flower-error\.json is damaged"):
        raise_failure(tmp_path)


def test_a_run_without_an_approved_site_is_not_submitted(tmp_path: Path) -> None:
    made = CliRunner().invoke(app, ["flower", "new", str(tmp_path / "app")])
    assert made.exit_code == 0

    started = CliRunner().invoke(
        app, ["flower", "start", str(tmp_path), str(tmp_path / "app"), "--out", str(tmp_path / "run")]
    )

    assert isinstance(started.exception, ConfigError) or started.exit_code == 2
    assert "approve sites with" in started.output + str(started.exception)
