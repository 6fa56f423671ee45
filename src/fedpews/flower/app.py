"""An experiment as a Flower app: `server_app` and `client_app` are all that an app's two files need."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedpews.build import Setup, build, load_data
from fedpews.callbacks import Callback
from fedpews.data.loading import scale
from fedpews.engines.engine import Engine
from fedpews.errors import ConfigError, FedpewsError
from fedpews.experiment import Experiment
from fedpews.flower.data import server_data
from fedpews.flower.deploy.app_folder import CONFIG
from fedpews.flower.deploy.processes import leave_with_parent
from fedpews.flower.engine import FlowerEngine
from fedpews.flower.hello import Facts, hello_content
from fedpews.flower.logs import (
    clear_failure,
    log_line,
    log_scores,
    save_failure,
    site_folder,
    without_traceback,
)
from fedpews.flower.messages import Request, read_request, reply_content
from fedpews.flower.roster import REFUSED, KnownSites
from fedpews.flower.site import AcceptedRounds, Site, warm_site
from fedpews.flower.statistics import KIND, collect, is_scaled, read_statistics
from fedpews.results.folder import go_back
from fedpews.results.layout import STATISTICS
from fedpews.results.records import Record
from fedpews.running import train


def server_app(beside: str | Path) -> ServerApp:
    """The ServerApp of the experiment.toml that lies beside a file: ``app = server_app(__file__)``."""
    app, config = ServerApp(), Path(beside).with_name(CONFIG)

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        leave_with_parent()  # else a server whose SuperLink is gone would lock the run's folder for ever
        logging.getLogger("flwr").addFilter(without_traceback)
        serve(config, grid, context.run_config)

    return app


def client_app(beside: str | Path) -> ClientApp:
    """The ClientApp of the experiment.toml that lies beside a file: ``app = client_app(__file__)``."""
    return make_client_app(Path(beside).with_name(CONFIG))


def make_client_app(
    config: Path, make_site: Callable[[Path, Mapping[str, Any]], Site] = warm_site
) -> ClientApp:
    """The ClientApp of an experiment.

    Args:
        make_site: from the experiment and the ``--node-config`` to the site.
    """
    app = ClientApp()

    def answer(register: Any, work: Callable[[Site, Request], RecordDict]) -> None:
        """Answer a kind of message with what the site returns for its request."""

        def handle(message: Message, context: Context) -> Message:
            site, request = make_site(config, context.node_config), read_request(message.content)
            return Message(work(site.scaled(request.scaling), request), reply_to=message)

        register(handle)

    answer(app.train(), lambda site, request: reply_content(site.train(request)))
    answer(app.evaluate(), lambda site, request: reply_content({}, site.evaluate(request)))
    answer(
        app.evaluate("personal"), lambda site, request: _record("personal", site.evaluate_personal(request))
    )
    for kind in ("final", "best"):
        answer(app.query(kind), partial(_keep, kind))

    @app.query(KIND)  # type: ignore[untyped-decorator]
    def statistics(message: Message, context: Context) -> Message:
        site = make_site(config, context.node_config)
        return Message(site.statistics(message.content), reply_to=message)

    @app.query()  # type: ignore[untyped-decorator]
    def hello(message: Message, context: Context) -> Message:
        try:
            about: Facts | FedpewsError = make_site(config, context.node_config).facts()
        except FedpewsError as error:
            save_failure(site_folder(context.node_config), error)
            about = error
        return Message(hello_content(about), reply_to=message)

    @app.query(REFUSED)  # type: ignore[untyped-decorator]
    def refused(message: Message, context: Context) -> Message:
        record: Any = message.content.get(REFUSED)
        why = record.get("why") if isinstance(record, ConfigRecord) else None
        error = ConfigError(f"the coordinator refuses this site: {why!s:.2000}")
        save_failure(site_folder(context.node_config), error)
        return Message(_record(REFUSED, True), reply_to=message)

    return app


def _keep(kind: str, site: Site, request: Request) -> RecordDict:
    site.keep(kind, request)
    return _record("kept", True)


def _record(name: str, value: float) -> RecordDict:
    return RecordDict({name: ConfigRecord({"value": value})})


def serve(config: Path, grid: Grid, settings: Mapping[str, Any]) -> None:
    """Run the experiment with its clients at the sites; the run's folder is as in one process.

    Args:
        settings: the run's own (``flwr run -c``): out, resume, before, without, roster, test, data-dir; with stats
            the sites are only asked for their statistics.
    """
    experiment = Experiment.load(config)
    # a round among sites takes seconds at least, so saving each one costs nothing
    runtime = experiment.runtime.model_copy(update={"checkpoint_every": 1})
    experiment = experiment.model_copy(update={"runtime": runtime})
    out = Path(str(settings.get("out") or f"runs/flower-{experiment.method_label}")).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    clear_failure(out)
    accepted, scaling = AcceptedRounds(), None
    engines: list[FlowerEngine] = []
    known, resume = None, bool(settings.get("resume"))
    without = [name for name in str(settings.get("without") or "").split(",") if name]

    def make_engine(setup: Setup) -> tuple[Engine, str]:
        engines.append(FlowerEngine(setup, grid, out, accepted, known, without, scaling))
        return engines[-1], ""

    def log_round(records: Sequence[Record]) -> None:
        for record in records:
            log_scores(experiment.goal, record)

    try:
        if settings.get("roster"):
            known = KnownSites.read(Path(settings["roster"]).expanduser())
        if settings.get("before"):
            go_back(out, int(settings["before"]))
        data, data_dir = server_data(experiment, settings), settings.get("data-dir") or None
        if settings.get("stats"):
            data = load_data(experiment, data_dir=data_dir) if data is None else data
            collect(experiment, data, grid, out, known)
            return
        if data is not None and is_scaled(experiment):
            kept = resume and (out / STATISTICS).exists()
            statistics = read_statistics(out) if kept else collect(experiment, data, grid, out, known, True)
            scaling = statistics.scaling()
            data = scale(data, scaling)
        result = train(
            build(experiment, clients=data, data_dir=data_dir),
            out=out,
            resume=resume,
            callbacks=[Callback(round=log_round)],
            make_engine=make_engine,
            memories=accepted,
        )
        # the best model is chosen on validation samples, so there is none without them (stop.best)
        for kind, models in (("final", result.params), ("best", result.best)):
            if models:
                names = engines[-1].send_models(kind, models)
                log_line(f"the {kind} model is at {', '.join(names) or 'no site'}")
    except Exception as error:
        save_failure(out, error)
        raise
