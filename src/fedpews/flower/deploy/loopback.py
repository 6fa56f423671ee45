"""`fedpews flower up`: a coordinator and sites on this machine, with TLS and authentication, for one experiment."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedpews.build import load_data
from fedpews.callbacks import Callback
from fedpews.errors import ConfigError, Interrupted, RunFailed
from fedpews.experiment import Experiment
from fedpews.flower.data import AT_SITES
from fedpews.flower.deploy.app_folder import new_app
from fedpews.flower.deploy.coordinator import Coordinator, Proxy, find_nginx, register, run_command
from fedpews.flower.deploy.keys import ServerKeys, fingerprint, make_server_keys, make_site_key
from fedpews.flower.deploy.processes import LOOPBACK, free_port
from fedpews.flower.logs import Follower, raise_failure, read_failure
from fedpews.flower.roster import KnownSite, KnownSites
from fedpews.results import layout
from fedpews.results.records import Record, read_rounds

FEDPEWS = (sys.executable, "-c", "from fedpews.cli import main; main()")


class Loopback:
    """A coordinator and its sites, as on machines of their own.

    Sites connect to the proxy if nginx is installed; else to the SuperLink itself, which listens on loopback only.

    Args:
        folder: for certificates, keys, logs and Flower's own files; made anew.
        app: the app that all sites have agreed to.
        state: where the sites keep their memories, a folder that stays.
        settings: the options of each site's ``fedpews site``, besides its number.
    """

    def __init__(
        self,
        folder: Path,
        app: Path,
        state: Path,
        settings: Sequence[Mapping[str, Any]],
        report: Callable[[str], None] = print,
    ) -> None:
        self.folder, self.app, self.state, self.report = folder, app, state, report
        self.sites, self.settings = len(settings), settings
        keys, proxy = ServerKeys.in_folder(folder / "certificates"), None
        if find_nginx() is not None:
            address, most = f"{LOOPBACK}:{free_port()}", 64 + 8 * self.sites
            proxy = Proxy("localhost", address, keys.certificate, keys.key, connections=most)
        self.coordinator = Coordinator(folder, proxy, keep=False)
        self.processes = self.coordinator.processes
        self.address = proxy.listen if proxy else f"{LOOPBACK}:{self.coordinator.port}"
        self.authority = keys.authority if proxy else self.coordinator.inner.authority

    def submit(self, settings: Mapping[str, Any]) -> None:
        """Start a run of the app, and follow its log."""
        settings = {**settings, "roster": str(self.folder / layout.ROSTER)}
        self.processes.start("run", run_command(self.app, settings))

    def tend(self) -> bool:
        """Check the processes and restart a site that ended; whether the run still goes on."""
        self.coordinator.check()
        for site in range(self.sites):
            code = self.processes.ended(f"site-{site}")
            if code is None:
                continue
            if failure := read_failure(self.state / f"site-{site}"):
                # after a restart it would end in the same way
                why = str(failure).rstrip(".")
                failure.args = (
                    f"site {site}: {why}. Correct that and give the command again, with --resume.",
                )
                raise failure
            self.report(f"site {site} ended with code {code}; starting it again")
            self._start_site(site)
        return self.processes.ended("run") is None

    def start(self) -> None:
        """Start them all; they run until ``processes.stop_all``."""
        make_server_keys(self.folder / "certificates", LOOPBACK)
        self.coordinator.start()
        known = []
        for site in range(self.sites):
            _, public = make_site_key(self.folder / "keys", site)
            register(self.folder, public)
            known.append(KnownSite(site, f"site-{site}", fingerprint(public.read_bytes())))
        KnownSites(tuple(known)).write(self.folder / layout.ROSTER)
        for site in range(self.sites):
            self._start_site(site)

    def _start_site(self, site: int) -> None:
        name = f"site-{site}"
        options = {
            "site": site,
            "superlink": self.address,
            "ca": self.authority,
            "key": self.folder / "keys" / name,
            "folder": self.folder / name,
            "state-dir": self.state,
            **self.settings[site],
        }
        arguments = [
            text for key, value in options.items() if value is not None for text in (f"--{key}", str(value))
        ]
        self.processes.start(name, [*FEDPEWS, "site", str(self.app), *arguments])


def up(
    experiment: Experiment,
    out: Path,
    *,
    sites: int | None = None,
    site_data: Sequence[str] = (),
    test: Path | None = None,
    resume: bool = False,
    data_dir: Path | None = None,
    callbacks: Sequence[Callback] = (),
    report: Callable[[str], None] = lambda text: None,
) -> None:
    """Run an experiment on a SuperLink and SuperNodes on loopback, with TLS and authentication.

    Args:
        sites: their number; by default, and at most, the clients of the data.
        site_data: each site's own data, when ``data.name`` is ``sites``.
        test: the server's test set then, an npz file with x and y, or a table.
        callbacks: their ``begin`` and ``round`` are called as in a run in one process.
        report: called with every line for the user.
    """
    out = out.resolve()
    if layout.is_begun(out) and not resume:
        raise ConfigError(f"{out} already holds a run; add --resume to go on with it, or give another --out")
    layout.refuse_links(out)
    count = _count_sites(experiment, sites, site_data, data_dir)
    work = out / layout.SITES_WORK
    shared = {"data-dir": data_dir and str(data_dir.resolve())}
    options = [{**shared, "data": name} for name in site_data] or [shared] * count
    settings = {"out": str(out), "resume": resume, "test": test and str(test.resolve()), **shared}
    done, notices = _last_round(out), Follower(out / layout.SITES_NOTICES)

    def show_new() -> None:
        nonlocal done
        for line in notices.new():
            report(line)
        for number, records in sorted(_rounds(out).items()):
            if number > done:
                for callback in callbacks:
                    callback.round(records)
                done = number

    shutil.rmtree(work, ignore_errors=True)
    app = work / "app"
    new_app(app, experiment.to_toml())
    net = Loopback(work, app, out / layout.SITES_MEMORY, options, report)

    def start() -> None:
        net.start()
        way = "on loopback" if net.coordinator.proxy is None else "behind nginx"
        report(
            f"{count} sites and a SuperLink {way} at {net.address}, TLS and authentication on; logs in {work}/logs"
        )
        net.submit(settings)
        for callback in callbacks:
            callback.begin(experiment, done, "flower engine")

    def tend() -> bool:
        show_new()
        return net.tend()

    try:
        net.processes.run(start, tend)
    except Interrupted:
        saved = f"go on with the same command and --resume ({out})"
        raise Interrupted(f"stopped after round {_last_round(out)} of {experiment.rounds}; {saved}") from None
    finally:
        show_new()
    raise_failure(out)
    is_short = _last_round(out) < experiment.rounds and experiment.stop.patience is None
    if is_short or not layout.is_finished(out):
        raise RunFailed(f"the run ended after round {_last_round(out)}; see {work}/logs/run.log")
    shutil.rmtree(work / "keys", ignore_errors=True)


def _count_sites(
    experiment: Experiment, sites: int | None, site_data: Sequence[str], data_dir: Path | None
) -> int:
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
            f"the data is assigned to {count} clients, and each is a site: give --sites {count}, or set data.clients"
        )
    return count


def _rounds(out: Path) -> dict[int, list[Record]]:
    """The records of each round so far."""
    rounds: dict[int, list[Record]] = {}
    for record in read_rounds(out) if (out / layout.ROUNDS).exists() else ():
        rounds.setdefault(record["round"], []).append(record)
    return rounds


def _last_round(out: Path) -> int:
    return max(_rounds(out), default=0)
