"""`fedpews flower`: an experiment as a Flower app, and a deployment on this machine to try it on."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpews.cli.console import err
from fedpews.cli.options import (
    Config,
    DataDir,
    Methods,
    Out,
    Quiet,
    Resume,
    Rounds,
    Seeds,
    Set,
    parse_settings,
    say,
)
from fedpews.cli.runs import progress, resolve_runs, show_runs
from fedpews.errors import ConfigError
from fedpews.flower import check_flwr

flower = typer.Typer(
    name="flower",
    help="Run an experiment across real sites with Flower.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.")]
ReadApp = Annotated[Path, typer.Argument(metavar="APP", help="The folder of the app, the same at all sites.")]
ServerTest = Annotated[Path | None, typer.Option(help="The server's test set, an .npz file or a table.")]
Metrics = Annotated[
    str | None,
    typer.Option(help="Serve metrics for Prometheus: a port on 127.0.0.1, or address:port."),
]
Unit = Annotated[bool, typer.Option("--unit", help="Print a systemd unit for this command and exit.")]


@flower.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.")],
    config: Annotated[
        str | None,
        typer.Option(help="A recipe or TOML file to start from (by default a file for data at the sites)."),
    ] = None,
    set_: Set = None,
) -> None:
    """Write a Flower app: the experiment, a client app, a server app and a README."""
    from fedpews.config import override, read_config
    from fedpews.experiment import Experiment
    from fedpews.flower.deploy.app_folder import new_app, starter

    changes = parse_settings(set_)
    if config is None and not changes:
        text = starter()
    else:
        values = tomllib.loads(starter()) if config is None else read_config(config)
        text = Experiment(**override(values, changes)).to_toml()
    for path in new_app(folder, text):
        say(str(path))


@flower.command()
def up(
    config: Config,
    sites: Annotated[
        int | None, typer.Option(help="Number of sites; by default one for each client of the data.")
    ] = None,
    site_data: Annotated[
        list[str] | None,
        typer.Option(
            help="With data.name = 'sites': the data of a site, folder:PATH or FILE.py:function. Repeat for each site."
        ),
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="With --site-data: the server's test set, an .npz file or a table.")
    ] = None,
    method: Methods = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    folder: Out = None,
    data_dir: DataDir = None,
    set_: Set = None,
    resume: Resume = False,
    quiet: Quiet = False,
) -> None:
    """Run an experiment as a complete deployment on this machine, with TLS and authentication.

    The run folder has the same files as with `fedpews run`. It also has sites.jsonl,
    which lists the replies of the sites in each round.
    """
    check_flwr("fedpews flower up")
    from fedpews.flower.deploy.loopback import up as run_up

    runs = resolve_runs(config, method, rounds, seeds, folder, set_)
    for experiment, path in runs:
        with progress(experiment, quiet, names_engine=False) as bar:
            run_up(
                experiment,
                path,
                sites=sites,
                site_data=site_data or (),
                test=test,
                resume=resume,
                data_dir=data_dir,
                callbacks=[bar],
                report=(lambda text: None) if quiet else _report,
            )
    show_runs(runs, folder)


@flower.command()
def serve(
    folder: Folder,
    name: Annotated[str, typer.Option(help="Host name or address by which sites reach this machine.")],
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="Certificate for that name. By default a trial certificate of 30 days is made in DIR."
        ),
    ] = None,
    key: Annotated[Path | None, typer.Option(help="The certificate's private key.")] = None,
    listen: Annotated[str, typer.Option(help="Port, or address:port, that sites connect to.")] = "8443",
    site_certificates: Annotated[
        bool,
        typer.Option("--site-certificates", help="Admit only sites with a certificate from `approve`."),
    ] = False,
    metrics: Metrics = None,
    unit: Unit = False,
) -> None:
    """Start a coordinator: a SuperLink on 127.0.0.1 behind a proxy.

    The proxy forwards only the requests that sites need. Run `fedpews flower approve`
    and `fedpews flower start` on the same machine to admit sites and to start runs.
    """
    check_flwr("fedpews flower serve")
    from fedpews.flower.deploy.coordinator import Coordinator, Proxy
    from fedpews.flower.deploy.keys import ServerKeys, make_server_keys, make_site_authority
    from fedpews.flower.deploy.processes import systemd_unit

    folder = folder.resolve()
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key must be given together")
    if unit:
        say(systemd_unit(f"fedpews coordinator {name}", [folder]))
        return
    if certificate is None or key is None:
        keys = ServerKeys.in_folder(folder / "certificates")
        if not keys.authority.exists():
            make_server_keys(folder / "certificates", name)
        certificate, key = keys.certificate, keys.key
        _report(f"using a trial certificate of 30 days; send {keys.authority} to the sites")
    authority = make_site_authority(folder).certificate if site_certificates else None
    if metrics is not None:
        from fedpews.flower.deploy.metrics import coordinator_metrics, serve_metrics

        _report(f"metrics on port {serve_metrics(metrics, lambda: coordinator_metrics(folder))}")
    proxy = Proxy(name, listen, certificate.resolve(), key.resolve(), authority)
    Coordinator(folder, proxy).run(_report)


@flower.command()
def approve(
    folder: Folder,
    public_key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The public key that the site sent.")],
    site: Annotated[int, typer.Option(help="The site's number, from 0; the same in all runs.")],
    name: Annotated[str, typer.Option(help="Your name for the site.")],
    fingerprint: Annotated[
        str | None,
        typer.Option(
            help="Fingerprint that the site reported (ssh-keygen -lf); without it the command asks."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Maximum number of samples that the site may declare.")
    ] = None,
) -> None:
    """Admit a site: bind its key to its number in DIR/roster.toml."""
    check_flwr("fedpews flower approve")
    from fedpews.flower.deploy.coordinator import register
    from fedpews.flower.deploy.keys import fingerprint as fingerprint_of
    from fedpews.flower.deploy.keys import issue_site_certificate
    from fedpews.flower.roster import KnownSite, KnownSites
    from fedpews.results.layout import ROSTER

    own = fingerprint_of(public_key.read_bytes())
    if fingerprint is not None and fingerprint != own:
        raise ConfigError(f"{public_key} has the fingerprint {own}, and the site read out {fingerprint}")
    if fingerprint is None and not typer.confirm(f"Did {name} read out this fingerprint: {own}?"):
        raise ConfigError(f"{name} is not approved")
    path = folder.resolve() / ROSTER
    known = KnownSites.read(path) if path.exists() else KnownSites()
    known = known.adding(KnownSite(site, name, own, samples))
    register(folder.resolve(), public_key)
    known.write(path)
    say(f"site {site}, {name}: {own}")
    say(f"its certificate: {issue_site_certificate(folder.resolve(), public_key, site)}")


@flower.command()
def start(
    folder: Folder,
    app: ReadApp,
    run_folder: Annotated[Path, typer.Option("--out", help="Run folder.")],
    test: ServerTest = None,
    data_dir: DataDir = None,
    resume: Resume = False,
    before: Annotated[
        int, typer.Option(help="With --resume: continue before this round and discard this and later rounds.")
    ] = 0,
    without: Annotated[
        list[str] | None, typer.Option(help="Exclude a site, by name or number. Repeat for several.")
    ] = None,
) -> None:
    """Run an app with the approved sites and show its log."""
    check_flwr("fedpews flower start")
    settings = {"resume": resume, "before": before, "without": ",".join(without or ())}
    follow(folder, app, run_folder, settings, test, data_dir)


def follow(
    folder: Path,
    app: Path,
    run_folder: Path,
    settings: dict[str, Any],
    test: Path | None,
    data_dir: Path | None,
) -> None:
    """Run an app with the approved sites and show its log, until it ends."""
    import subprocess

    from fedpews.flower.deploy.app_folder import app_hash
    from fedpews.flower.deploy.coordinator import run_command
    from fedpews.flower.deploy.metrics import CURRENT
    from fedpews.flower.deploy.processes import environment
    from fedpews.flower.logs import clear_failure, raise_failure
    from fedpews.flower.roster import KnownSites
    from fedpews.results.layout import ROSTER

    # here and not only in the run, where it would be one line of a long log
    KnownSites.read(folder / ROSTER)
    folder = folder.resolve()
    settings |= {"out": str(run_folder.resolve()), "roster": str(folder / ROSTER)}
    settings |= {"test": test and str(test.resolve()), "data-dir": data_dir and str(data_dir.resolve())}
    _report(f"the app's hash is {app_hash(app)}; a site runs the app only if its copy has the same hash")
    clear_failure(run_folder)
    (folder / CURRENT).write_text(str(run_folder.resolve()))
    done = subprocess.run(run_command(app.resolve(), settings), env=environment(folder / "home"), check=False)
    raise_failure(run_folder)
    if done.returncode:
        raise typer.Exit(done.returncode)


@flower.command("hash")
def hash_(app: Annotated[Path, typer.Argument(metavar="APP", help="An app's folder.")]) -> None:
    """Print the hash of an app, to compare the copies at the sites and the coordinator."""
    check_flwr("fedpews flower hash")
    from fedpews.flower.deploy.app_folder import app_hash

    say(app_hash(app))


def run_site(
    app: Annotated[
        Path,
        typer.Argument(
            metavar="APP", help="The folder of the app. Read it first; the site runs no other app."
        ),
    ],
    number: Annotated[int, typer.Option("--site", help="This site's number, from 0; the same in all runs.")],
    superlink: Annotated[str, typer.Option(help="The coordinator's host:port.")],
    ca: Annotated[Path, typer.Option(help="Certificate authority of the coordinator (ca.crt).")],
    key: Annotated[Path, typer.Option(help="This site's private key (ssh-keygen -t ecdsa -b 384).")],
    state_dir: Annotated[
        Path, typer.Option(help="Folder for this site's private memory and models; back it up.")
    ] = Path("~/.fedpews/sites"),
    folder: Annotated[Path | None, typer.Option(help="Folder for Flower's files and logs.")] = None,
    data: Annotated[
        str | None, typer.Option(help="This site's data: folder:PATH or FILE.py:function.")
    ] = None,
    data_dir: DataDir = None,
    device: Annotated[str, typer.Option(help="Device in torch's notation: cpu, cuda:0.")] = "cpu",
    workers: Annotated[int, typer.Option(help="Number of seeds trained at once.")] = 1,
    threads: Annotated[
        int, typer.Option(help="Cores per seed; with 1 the numbers equal those of `fedpews run`.")
    ] = 1,
    certificate: Annotated[
        Path | None,
        typer.Option(help="This site's certificate, if the coordinator uses --site-certificates."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="With privacy.place = 'client': the maximum ε that this site spends.")
    ] = None,
    metrics: Metrics = None,
    unit: Unit = False,
) -> None:
    """Join a federation as a site. The site runs only the given app."""
    check_flwr("fedpews site")
    from fedpews.flower.deploy.app_folder import Pin
    from fedpews.flower.deploy.processes import systemd_unit
    from fedpews.flower.deploy.site_process import SiteProcess

    state = state_dir.expanduser().resolve()
    settings = {
        "site": number,
        "state-dir": str(state),
        "device": device,
        "workers": workers,
        "threads": threads,
        "data": data,
        "epsilon": epsilon,
        "data-dir": data_dir and str(data_dir.resolve()),
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    files = state / f"flower-{number}" if folder is None else folder.resolve()
    shown = None if certificate is None else certificate.resolve()
    site = SiteProcess(Pin.of(app), superlink, ca.resolve(), key.resolve(), files, settings, shown, _report)
    if unit:
        folders = ("--state-dir", str(state), "--folder", str(files))
        say(systemd_unit(f"fedpews site {number}", [state, files], *folders))
        return
    if metrics is not None:
        from fedpews.flower.deploy.metrics import serve_metrics, site_metrics

        own = state / f"site-{number}"
        _report(f"metrics on port {serve_metrics(metrics, lambda: site_metrics(own))}")
    site.run()


def _report(text: str) -> None:
    err.print(text, soft_wrap=True, markup=False)
