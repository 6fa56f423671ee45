"""Three hosts on one machine, as network namespaces: a coordinator, two sites, and a link that is cut for a minute.

    sudo python benchmarks/two_hosts.py            # needs iproute2 and nginx; prints a transcript

Nothing but the bridge connects them: what works here works between machines. The link of the second site is cut in the
middle of a round, and the run must come to the numbers of one process nevertheless.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedpews.experiment import Experiment
from fedpews.flower.deploy.app_folder import new_app
from fedpews.flower.deploy.keys import fingerprint, make_site_key
from fedpews.flower.deploy.processes import Processes
from fedpews.results.records import read_rounds

HOSTS = {"hub": "10.77.0.1", "north": "10.77.0.2", "south": "10.77.0.3"}
BRIDGE = "fedpews-br"
FEDPEWS = (sys.executable, "-c", "from fedpews.cli import main; main()")
CONFIG = {
    "data": {"name": "synthetic-3.2k", "partition": "parity", "train_per_class": 40, "test_per_class": 20},
    "train": {"batch_size": 16},
    "method": {"name": "scaffold+pews"},
    "warmup": {"rounds": 2},
    "runtime": {"engine": "eager"},
    "flower": {"max_failures": 0, "round_seconds": 600, "join_seconds": 300},
}
began = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def hosts() -> Iterator[None]:
    """The namespaces, each with one cable to the bridge."""
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for name, address in HOSTS.items():
            ip("netns", "add", f"fp-{name}")
            ip("link", "add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", f"fp-{name}")
            ip("link", "set", f"v-{name}", "master", BRIDGE, "up")
            for command in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                ip("-n", f"fp-{name}", *command)
            ip("-n", f"fp-{name}", "link", "set", "lo", "up")
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", f"fp-{name}"], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, stderr=subprocess.DEVNULL)


def at(host: str, *command: str) -> list[str]:
    """A command on one of the hosts."""
    return ["ip", "netns", "exec", f"fp-{host}", *command]


def call(host: str, *command: str) -> str:
    done = subprocess.run(at(host, *command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[-6:])}: {done.stdout}{done.stderr}")
    return done.stdout.strip()


def rounds_done(out: Path) -> int:
    return len(read_rounds(out)) if (out / "rounds.jsonl").exists() else 0


def wait(
    processes: Processes, what: str, names: Sequence[str], ready: Path | None, out: Path, rounds: int
) -> None:
    while (ready is None or not ready.exists()) and (ready is not None or rounds_done(out) < rounds):
        for name in names:
            if processes.ended(name) is not None:
                raise SystemExit(f"{name} ended while waiting for {what}")
        time.sleep(0.5)


def trial(folder: Path, rounds: int, cut_seconds: float) -> None:
    processes = Processes(folder)
    app, out, place = folder / "app", folder / "run", folder / "coordinator"
    new_app(app, Experiment(rounds=rounds, **CONFIG).to_toml())
    address = HOSTS["hub"]
    try:
        serve = [*FEDPEWS, "flower", "serve", str(place), "--name", address, "--listen", f"{address}:8443"]
        processes.start("hub", at("hub", *serve))
        wait(processes, "the coordinator", ["hub"], place / "proxy" / "nginx.pid", out, 0)
        say(f"coordinator at {address}:8443; its SuperLink listens on its own 127.0.0.1")
        for number, name in enumerate(("north", "south")):
            _, public = make_site_key(folder / name, number)
            shown = fingerprint(public.read_bytes())
            approve = ["flower", "approve", str(place), str(public), "--site", str(number), "--name", name]
            say("approved: " + call("hub", *FEDPEWS, *approve, "--fingerprint", shown))
            command = [*FEDPEWS, "site", str(app), "--site", str(number), "--superlink", f"{address}:8443"]
            command += ["--ca", str(place / "certificates" / "ca.crt")]
            command += [
                "--key",
                str(folder / name / f"site-{number}"),
                "--folder",
                str(folder / name / "flower"),
            ]
            command += ["--state-dir", str(folder / name / "state")]
            processes.start(name, at(name, *command))
        address_of = tomllib.loads((place / "home" / "config.toml").read_text())["superlink"]["here"][
            "address"
        ]
        for port in (8443, int(address_of.rpartition(":")[2])):
            probe = f"import socket; print(socket.socket().connect_ex(('{address}', {port})))"
            open_ = call("north", sys.executable, "-c", probe) == "0"
            say(f"from north, port {port} of the coordinator is {'open' if open_ else 'closed'}")
        start = [*FEDPEWS, "flower", "start", str(place), str(app), "--out", str(out)]
        processes.start("run", at("hub", *start))
        wait(processes, "round 2", ["hub", "run"], None, out, 2)
        say("round 2 is done; round 3 goes on")
        time.sleep(1.0)
        ip("link", "set", "v-south", "down")
        say("south's link is cut")
        time.sleep(cut_seconds)
        say(f"after {cut_seconds:g} s {rounds_done(out)} rounds are done; south's link is up again")
        ip("link", "set", "v-south", "up")
        while processes.ended("run") is None:
            time.sleep(0.5)
        say(f"the run ended with code {processes.ended('run')}, {rounds_done(out)} rounds")
        for line in (out / "sites.jsonl").read_text().splitlines():
            say(
                line
                if "refused" in line or '"failed"' in line or "no answer" in line
                else line[:120] + " ..."
            )
    finally:
        processes.stop_all()
    alone = folder / "alone"
    subprocess.run(
        [*FEDPEWS, "run", str(app / "experiment.toml"), "--out", str(alone), "--quiet"], check=True
    )
    ours, theirs = ([{**r, "seconds": 0} for r in read_rounds(place)] for place in (out, alone))
    say(f"the same numbers as in one process: {ours == theirs}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--cut", type=float, default=60.0, help="seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, hosts():
        trial(Path(place), options.rounds, options.cut)


if __name__ == "__main__":
    main()
