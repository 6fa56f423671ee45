"""`fedpews flower up`: a SuperLink and SuperNodes on this machine, with TLS and authentication, for one experiment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
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
from fedpews.flower.deploy.keys import make_server_keys, make_site_key
from fedpews.flower.deploy.processes import Processes
from fedpews.flower.deploy.template import write_app
from fedpews.results import layout
from fedpews.results.records import Record, read_rounds

HOST, CONNECTION = "127.0.0.1", "up"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
START_SECONDS, RESTART_SECONDS, POLL_SECONDS = 120.0, 5.0, 0.5
Say = Callable[[str], None]


class Loopback:
    """A SuperLink and its SuperNodes. Leaving the context ends them all, whatever happened.

    Args:
        folder: for certificates, keys, logs and Flower's own files; made anew.
        state: where the sites keep their memories, a folder that stays.
        settings: of each site, besides its number (``--node-config``); there are as many sites.
    """

    def __init__(
        self, folder: Path, state: Path, settings: Sequence[Mapping[str, Any]], say: Say = print
    ) -> None:
        self.folder, self.state, self.sites, self.say = folder, state, len(settings), say
        self.settings = settings
        self.port, *self._site_ports = free_ports(1 + self.sites)
        self.processes = Processes()
        self._restart_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "logs").mkdir(parents=True)
        self.state.mkdir(parents=True, exist_ok=True)
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

    def submit(self, app: Path, settings: Mapping[str, Any]) -> None:
        """Start a run of an app, and follow its log."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        command = [_program("flwr"), "run", str(app), CONNECTION, "--stream", "-c", pairs]
        self.processes.start("run", command, self._env("server"), self.log("run"))

    def tend(self) -> bool:
        """See to the processes: whether the run is still going on. A site that died is started again."""
        if self.processes.ended("superlink") is not None:
            raise RunFailed(
                f"the SuperLink ended with code {self.processes.ended('superlink')} "
                f"(see {self.log('superlink')}); the rounds so far are saved, go on with --resume"
            )
        for site in range(self.sites):
            self._tend_site(site)
        return self.processes.ended("run") is None

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def pids(self) -> dict[str, int]:
        names = ["superlink", *(f"site-{site}" for site in range(self.sites))]
        return {name: self.processes.pid(name) for name in names}

    def _start(self) -> None:
        keys = make_server_keys(self.folder / "certificates", HOST)
        home = self._home("server")
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink.{CONNECTION}]\naddress = "{HOST}:{self.port}"\nroot-certificates = "{keys.authority}"\n'
        )
        command = [_program("flower-superlink"), "--host", HOST, "--port", str(self.port)]
        command += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.certificate)]
        command += ["--ssl-keyfile", str(keys.key), "--enable-supernode-auth"]
        command += ["--disable-runtime-dependency-installation"]
        self.processes.start("superlink", command, self._env("server"), self.log("superlink"))
        self._wait_for_superlink()
        for site in range(self.sites):
            _, public = make_site_key(self.folder / "keys", site)
            self._flwr("supernode", "register", str(public), CONNECTION)
        for site in range(self.sites):
            self._start_site(site)
        self._write_pids()

    def _start_site(self, site: int) -> None:
        settings = {"site": site, "state-dir": str(self.state), **self.settings[site]}
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        command = [_program("flower-supernode"), "--superlink", f"{HOST}:{self.port}"]
        command += ["--root-certificates", str(self.folder / "certificates" / "ca.crt")]
        command += ["--auth-supernode-private-key", str(self.folder / "keys" / f"site-{site}")]
        command += ["--port", str(self._site_ports[site]), "--node-config", pairs]
        name = f"site-{site}"
        self._home(name).mkdir(exist_ok=True)
        self.processes.start(name, command, self._env(name), self.log(name))

    def _tend_site(self, site: int) -> None:
        """The SuperLink takes a node back only when its old heartbeat has run out, so this may take several tries."""
        code = self.processes.ended(f"site-{site}")
        if code is None:
            return
        if site not in self._restart_at:
            self.say(f"site {site} ended with code {code}; starting it again")
            self._restart_at[site] = time.monotonic() + RESTART_SECONDS
        elif time.monotonic() >= self._restart_at[site]:
            self._start_site(site)
            self._write_pids()
            del self._restart_at[site]

    def _wait_for_superlink(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.processes.ended("superlink") is not None:
                break
            with socket.socket() as probe:
                probe.settimeout(1.0)
                if probe.connect_ex((HOST, self.port)) == 0:
                    return
            time.sleep(0.2)
        raise RunFailed(f"the SuperLink did not start; see {self.log('superlink')}")

    def _flwr(self, *arguments: str) -> None:
        done = subprocess.run(
            [_program("flwr"), *arguments],
            env=self._env("server"),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunFailed(
                f"flwr {' '.join(arguments[:2])} failed: {(done.stderr or done.stdout).strip()[-300:]}"
            )

    def _write_pids(self) -> None:
        (self.folder / "pids.json").write_text(json.dumps(self.pids()))

    def _home(self, name: str) -> Path:
        return self.folder / f"home-{name}"

    def _env(self, name: str) -> dict[str, str]:
        """Each party has its own Flower home, as on machines of its own. Flower finds its programs by PATH."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(self._home(name))}


def free_ports(count: int) -> Sequence[int]:
    """Ports that nobody uses now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _program(name: str) -> str:
    """Flower's commands lie beside the Python that runs us."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is not installed; install Flower: pip install 'fedpews[flower]'")
    return found


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
    out = out.resolve()
    if layout.is_begun(out) and not resume:
        raise ConfigError(f"{out} already holds a run; add --resume to go on with it, or give another --out")
    count = _count_sites(experiment, sites, site_data, data_dir)
    work = out / layout.SITES_WORK
    own = [{"data": name} for name in site_data] or [{}] * count
    shared = {} if data_dir is None else {"data-dir": str(data_dir.resolve())}
    settings = {"out": str(out), "resume": resume, **shared}
    if test is not None:
        settings["test"] = str(test.resolve())
    done = _last_round(out)
    try:
        with (
            _terminations(),
            Loopback(work, out / layout.SITES_MEMORY, [{**shared, **one} for one in own], say) as net,
        ):
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
    if (out / layout.SITES_ERROR).exists():
        told: dict[str, Any] = json.loads((out / layout.SITES_ERROR).read_text())
        error = FedpewsError(told["message"])
        error.exit_code = int(told["exit_code"])
        raise error
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
