"""`fedpews flower up`: an experiment on a deployment of its own on this machine, with the run folder of `run`."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError, FedpewsError, Interrupted, RunFailed
from fedpews.experiment import Experiment
from fedpews.flower import AT_SITES, ERROR
from fedpews.results.records import Record, read_rounds

POLL_SECONDS = 0.5


def up(
    experiment: Experiment,
    out: Path,
    *,
    sites: int | None = None,
    site_data: Sequence[str] = (),
    test: Path | None = None,
    resume: bool = False,
    data_dir: Path | None = None,
    begin: Callable[[int], None] = lambda done: None,
    round: Callable[[Sequence[Record]], None] = lambda records: None,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Run an experiment on a SuperLink and SuperNodes on loopback, with TLS and authentication.

    Args:
        sites: how many; by default, and at most, the clients of the data.
        site_data: each site's own data, when ``data.name`` is ``sites``.
        test: the server's test set then, an npz file with x and y.
        begin, round, say: called with the rounds already done, with new records, and with news.
    """
    from fedpews.runtimes.flower.loopback import Loopback
    from fedpews.runtimes.flower.template import write_app

    out = out.resolve()
    if (out / "config.toml").exists() and not resume:
        raise ConfigError(f"{out} already holds a run; add --resume to go on with it, or give another --out")
    count = _count_sites(experiment, sites, site_data, data_dir)
    work = out / "flower"
    own = [{"data": name} for name in site_data] or [{}] * count
    shared = {} if data_dir is None else {"data-dir": str(data_dir.resolve())}
    settings = {"out": str(out), "resume": resume, **shared}
    if test is not None:
        settings["test"] = str(test.resolve())
    done = _last_round(out)
    try:
        with _terminations(), Loopback(work, out / "sites", [{**shared, **one} for one in own], say) as net:
            say(
                f"{count} sites and a SuperLink on 127.0.0.1:{net.port}, TLS and authentication on; logs in {work}/logs"
            )
            app = work / "app"
            app.mkdir()
            write_app(app, experiment.to_toml())
            net.submit(app, settings)
            begin(done)
            while net.tend():
                done = _follow(out, done, round)
                time.sleep(POLL_SECONDS)
            done = _follow(out, done, round)
    except KeyboardInterrupt:
        saved = f"go on with the same command and --resume ({out})"
        raise Interrupted(f"stopped after round {_last_round(out)} of {experiment.rounds}; {saved}") from None
    _check_end(experiment, out, work)
    shutil.rmtree(work / "keys", ignore_errors=True)


def _count_sites(
    experiment: Experiment, sites: int | None, site_data: Sequence[str], data_dir: Path | None
) -> int:
    from fedpews.running import load_data

    if experiment.data.name == AT_SITES:
        count = experiment.data.clients or len(site_data)
        if len(site_data) != count:
            raise ConfigError(f"data.name is 'sites': give --site-data {count} times, once for each site")
    else:
        if site_data:
            raise ConfigError("--site-data is for experiments whose data.name is 'sites'")
        count = len(load_data(experiment, data_dir=data_dir))
    if sites is not None and sites != count:
        raise ConfigError(
            f"the data is dealt to {count} clients, and each is a site: give --sites {count}, or set data.clients"
        )
    return count


def _last_round(out: Path) -> int:
    if not (out / "rounds.jsonl").exists():
        return 0
    return max((record["round"] for record in read_rounds(out)), default=0)


def _follow(out: Path, done: int, tell: Callable[[Sequence[Record]], None]) -> int:
    """Tell the rounds that came in since."""
    if not (out / "rounds.jsonl").exists():
        return done
    new: dict[int, list[Record]] = {}
    for record in read_rounds(out):
        if record["round"] > done:
            new.setdefault(record["round"], []).append(record)
    for number in sorted(new):
        tell(new[number])
    return max(new, default=done)


def _check_end(experiment: Experiment, out: Path, work: Path) -> None:
    """Whether the run came to its end; else what the server said, as our own error."""
    if (out / ERROR).exists():
        told: dict[str, Any] = json.loads((out / ERROR).read_text())
        error = FedpewsError(told["message"])
        error.exit_code = int(told["exit_code"])
        raise error
    if not (out / "summary.json").exists() or _last_round(out) < experiment.rounds:
        raise RunFailed(f"the run ended after round {_last_round(out)}; see {work}/logs/run.log")


@contextmanager
def _terminations() -> Iterator[None]:
    """SIGTERM ends us as Ctrl-C does, so that nothing is left behind."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
