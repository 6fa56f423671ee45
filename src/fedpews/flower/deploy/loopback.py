"""`fedpews flower up`: a coordinator and sites on this machine, with TLS and authentication, for one experiment."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedpews.errors import ConfigError, FedpewsError, Interrupted, RunFailed
from fedpews.experiment import Experiment
from fedpews.flower.app import AT_SITES
from fedpews.flower.deploy.coordinator import Coordinator, run_command
from fedpews.flower.deploy.keys import fingerprint, make_server_keys, make_site_key
from fedpews.flower.deploy.programs import LOOPBACK, environment, free_ports
from fedpews.flower.deploy.proxy import Door, find_nginx
from fedpews.flower.deploy.template import write_app
from fedpews.flower.failure import raise_failure
from fedpews.flower.known_sites import KnownSite, KnownSites
from fedpews.flower.notices import Follower
from fedpews.results import layout
from fedpews.results.records import Record, read_rounds

RESTART_SECONDS, POLL_SECONDS = 5.0, 0.5
FEDPEWS = (sys.executable, "-c", "from fedpews.cli import main; main()")
Say = Callable[[str], None]


class Loopback:
    """A coordinator and its sites, as on machines of their own. Leaving the context ends them all.

    Sites come in by the proxy where nginx is installed; else straight to the SuperLink, which listens on loopback only.

    Args:
        folder: for certificates, keys, logs and Flower's own files; made anew.
        app: the app that all sites have agreed to.
        state: where the sites keep their memories, a folder that stays.
        settings: options of each site's ``fedpews site``, besides its number; there are as many sites.
    """

    def __init__(
        self,
        folder: Path,
        app: Path,
        state: Path,
        settings: Sequence[Mapping[str, Any]],
        say: Say = print,
    ) -> None:
        self.folder, self.app, self.state, self.say = folder, app, state, say
        self.sites, self.settings = len(settings), settings
        (outer,) = free_ports(1)
        certificates = folder / "certificates"
        self.door = (
            None
            if find_nginx() is None
            else Door(
                "localhost", f"{LOOPBACK}:{outer}", certificates / "server.pem", certificates / "server.key"
            )
        )
        self.coordinator = Coordinator(folder / "coordinator", self.door, keep=False)
        self.processes = self.coordinator.processes
        self.port = self.coordinator.port if self.door is None else outer
        self._restart_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        self.state.mkdir(parents=True, exist_ok=True)
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self.processes.stop_all()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.processes.stop_all()

    @property
    def roster(self) -> Path:
        return self.coordinator.folder / layout.ROSTER

    def submit(self, settings: Mapping[str, Any]) -> None:
        """Start a run of the app, and follow its log."""
        command = run_command(self.app, {**settings, "roster": str(self.roster)})
        home = environment(self.coordinator.folder / "home")
        self.processes.start("run", command, home, self.log("run"))

    def tend(self) -> bool:
        """See to the processes: whether the run is still going on. A site that died is started again."""
        self.coordinator.check()
        for site in range(self.sites):
            self._tend_site(site)
        return self.processes.ended("run") is None

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def pids(self) -> dict[str, int]:
        names = ["superlink", *(f"site-{site}" for site in range(self.sites))]
        return {name: self.processes.pid(name) for name in names}

    def _start(self) -> None:
        make_server_keys(self.folder / "certificates", LOOPBACK)
        self.coordinator.start()
        known = []
        for site in range(self.sites):
            _, public = make_site_key(self.folder / "keys", site)
            self.coordinator.register(public)
            known.append(KnownSite(site, f"site-{site}", fingerprint(public.read_bytes())))
        KnownSites(tuple(known)).write(self.roster)
        for site in range(self.sites):
            self._start_site(site)
        self._write_pids()

    def _start_site(self, site: int) -> None:
        authority = self.coordinator.inner.authority
        if self.door is not None:
            authority = self.folder / "certificates" / "ca.crt"
        name = f"site-{site}"
        command = [*FEDPEWS, "site", str(self.app), "--site", str(site)]
        command += ["--superlink", f"{LOOPBACK}:{self.port}", "--ca", str(authority)]
        command += ["--key", str(self.folder / "keys" / name), "--folder", str(self.folder / name)]
        command += ["--state-dir", str(self.state)]
        for option, value in self.settings[site].items():
            command += [f"--{option}", str(value)]
        home = environment(self.folder / name / "home")
        self.processes.start(name, command, home, self.log(name))

    def _tend_site(self, site: int) -> None:
        code = self.processes.ended(f"site-{site}")
        if code is None:
            return
        self._check_failure(site)
        if site not in self._restart_at:
            self.say(f"site {site} ended with code {code}; starting it again")
            self._restart_at[site] = time.monotonic() + RESTART_SECONDS
        elif time.monotonic() >= self._restart_at[site]:
            self._start_site(site)
            self._write_pids()
            del self._restart_at[site]

    def _check_failure(self, site: int) -> None:
        """Raise what keeps a site from taking part: started again, it would end in the same way."""
        try:
            raise_failure(self.state / f"site-{site}")
        except FedpewsError as error:
            why = str(error).rstrip(".")
            found = FedpewsError(
                f"site {site}: {why}. Correct that and give the command again, with --resume."
            )
            found.exit_code = error.exit_code
            raise found from None

    def _write_pids(self) -> None:
        (self.folder / "pids.json").write_text(json.dumps(self.pids()))


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
        test: the server's test set then, an npz file with x and y, or a table.
        begin, round, say: called with the rounds already done, with new records, and with news.
    """
    out = out.resolve()
    if layout.is_begun(out) and not resume:
        raise ConfigError(f"{out} already holds a run; add --resume to go on with it, or give another --out")
    layout.refuse_links(out)
    count = _count_sites(experiment, sites, site_data, data_dir)
    work = out / layout.SITES_WORK
    own = [{"data": name} for name in site_data] or [{}] * count
    shared = {} if data_dir is None else {"data-dir": str(data_dir.resolve())}
    settings = {"out": str(out), "resume": resume, **shared}
    if test is not None:
        settings["test"] = str(test.resolve())
    done, notices = _last_round(out), Follower(out / layout.SITES_NOTICES)

    def show_notices() -> None:
        for line in notices.new():
            say(line)

    shutil.rmtree(work, ignore_errors=True)
    app = work / "app"
    app.mkdir(parents=True)
    write_app(app, experiment.to_toml())
    try:
        with (
            _terminations(),
            Loopback(work, app, out / layout.SITES_MEMORY, [{**shared, **one} for one in own], say) as net,
        ):
            way = "behind nginx" if net.door is not None else "on loopback"
            say(
                f"{count} sites and a SuperLink {way} at {LOOPBACK}:{net.port}, TLS and authentication on; "
                f"logs in {work}/logs"
            )
            net.submit(settings)
            begin(done)
            try:
                while net.tend():
                    show_notices()
                    done = _follow(out, done, round)
                    time.sleep(POLL_SECONDS)
            finally:
                show_notices()
            done = _follow(out, done, round)
    except KeyboardInterrupt:
        saved = f"go on with the same command and --resume ({out})"
        raise Interrupted(f"stopped after round {_last_round(out)} of {experiment.rounds}; {saved}") from None
    _check_end(experiment, out, work)
    shutil.rmtree(work / "keys", ignore_errors=True)


def _count_sites(
    experiment: Experiment, sites: int | None, site_data: Sequence[str], data_dir: Path | None
) -> int:
    from fedpews.build import load_data

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


def _last_round(out: Path) -> int:
    if not (out / layout.ROUNDS).exists():
        return 0
    return max((record["round"] for record in read_rounds(out)), default=0)


def _follow(out: Path, done: int, tell: Callable[[Sequence[Record]], None]) -> int:
    """Tell the rounds that came in since."""
    if not (out / layout.ROUNDS).exists():
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
    raise_failure(out)
    if not layout.is_finished(out) or _last_round(out) < experiment.rounds:
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
