"""Flower's two apps, with everything that is ours handed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedpews.errors import ConfigError, FedpewsError
from fedpews.flower.deploy.processes import leave_with_parent
from fedpews.flower.failure import keep_failure

if TYPE_CHECKING:
    from fedpews.flower.site import Site

Settings = Mapping[str, Any]


def make_client_app(build: Callable[[int, Settings], Site]) -> ClientApp:
    """A ClientApp. Flower starts a process for each message, so nothing heavy is imported before it is needed.

    Args:
        build: from the site's number and its ``--node-config`` to the site.
    """
    app = ClientApp()

    @app.query()  # type: ignore[untyped-decorator]
    def hello(message: Message, context: Context) -> Message:
        from fedpews.flower.hello import hello_content, unfit_content

        number = site_number(context.node_config)
        try:
            content = hello_content(build(number, context.node_config).facts())
        except FedpewsError as error:
            keep_failure(site_folder(context.node_config), error)
            content = unfit_content(error)
        return Message(content, reply_to=message)

    @app.query("refused")  # type: ignore[untyped-decorator]
    def refused(message: Message, context: Context) -> Message:
        from fedpews.flower.hello import REFUSED

        record: Any = message.content.get(REFUSED)
        why = record.get("why") if isinstance(record, ConfigRecord) else None
        error = ConfigError(f"the coordinator refuses this site: {why!s:.2000}")
        keep_failure(site_folder(context.node_config), error)
        return Message(RecordDict({REFUSED: ConfigRecord({"heard": True})}), reply_to=message)

    def keep(kind: str) -> None:
        @app.query(kind)  # type: ignore[untyped-decorator]
        def models(message: Message, context: Context) -> Message:
            from fedpews.flower.messages import read_task

            build(site_number(context.node_config), context.node_config).keep(
                kind, read_task(message.content)
            )
            return Message(RecordDict({"kept": ConfigRecord({"kept": True})}), reply_to=message)

    for kind in ("final", "best"):
        keep(kind)

    @app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        from fedpews.flower.messages import read_task, reply_content
        from fedpews.flower.scores import score_records

        site = build(site_number(context.node_config), context.node_config)
        task = read_task(message.content)
        # the model as it was sent, before anything is trained
        scores = score_records(site.evaluate(task)) if task.evaluate else {}
        return Message(reply_content(site.train(task), scores), reply_to=message)

    @app.evaluate()  # type: ignore[untyped-decorator]
    def evaluate(message: Message, context: Context) -> Message:
        from fedpews.flower.messages import read_task
        from fedpews.flower.scores import score_records

        site = build(site_number(context.node_config), context.node_config)
        return Message(RecordDict(score_records(site.evaluate(read_task(message.content)))), reply_to=message)

    @app.evaluate("personal")  # type: ignore[untyped-decorator]
    def evaluate_personal(message: Message, context: Context) -> Message:
        from fedpews.flower.messages import read_task

        site = build(site_number(context.node_config), context.node_config)
        found = ConfigRecord({"value": site.evaluate_personal(read_task(message.content))})
        return Message(RecordDict({"personal": found}), reply_to=message)

    return app


def make_server_app(serve: Callable[[Grid, Settings], None]) -> ServerApp:
    """A ServerApp; ``serve`` gets the grid and the run's own settings (``flwr run -c``)."""
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        leave_with_parent()  # or a server whose SuperLink is gone would hold the run's folder for ever
        serve(grid, context.run_config)

    return app


def site_number(settings: Settings) -> int:
    """The site's own number, from ``--node-config "site=0"``."""
    site = settings.get("site")
    if not isinstance(site, int) or isinstance(site, bool) or site < 0:
        raise ConfigError(
            f"this SuperNode does not say which site it is: site is {site!r}; start it with "
            '--node-config "site=0", a different whole number for each site'
        )
    return site


def site_folder(settings: Settings) -> Path:
    """A site's own folder in its ``state-dir``."""
    state = Path(str(settings.get("state-dir", "~/.fedpews/sites"))).expanduser()
    return state / f"site-{site_number(settings)}"
