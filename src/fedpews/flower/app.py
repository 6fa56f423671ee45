"""An experiment as a Flower app: `server_app` and `client_app` are all that an app's two files need.

Flower starts a process for every message to a site, so nothing heavy is imported before it is needed.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError
from fedpews.experiment import Experiment
from fedpews.flower.failure import forget_failure, keep_failure
from fedpews.results import layout

if TYPE_CHECKING:
    from torch import Tensor

    from fedpews.build import Setup
    from fedpews.data import Federation
    from fedpews.engines.engine import Engine
    from fedpews.flower.engine import FlowerEngine
    from fedpews.flower.memory import AcceptedRounds
    from fedpews.flower.site import Site
    from fedpews.tasks import Task

CONFIG = "experiment.toml"
AT_SITES = "sites"
"""The data.name of an experiment whose every site brings its own data."""


def server_app(beside: str | Path) -> Any:
    """The ServerApp of the experiment.toml that lies beside a file: ``app = server_app(__file__)``."""
    from fedpews.flower.handlers import make_server_app

    config = Path(beside).with_name(CONFIG)
    return make_server_app(lambda grid, settings: serve(config, grid, settings))


def client_app(beside: str | Path) -> Any:
    """The ClientApp of the experiment.toml that lies beside a file: ``app = client_app(__file__)``."""
    from fedpews.flower.handlers import make_client_app

    config = Path(beside).with_name(CONFIG)
    return make_client_app(lambda number, settings: warm_site(config, number, settings))


def warm_site(config: Path, number: int, settings: Mapping[str, Any]) -> Site:
    """The site, built once in a process, and so in a warm executor once for all messages."""
    return _warm_site(config.resolve(), config.read_text(), number, tuple(sorted(settings.items())))


@cache
def _warm_site(config: Path, text: str, number: int, settings: tuple[tuple[str, Any], ...]) -> Site:
    # the text is there so that an experiment that was changed is another one
    return build_site(config, number, dict(settings))


def build_site(config: Path, number: int, settings: Mapping[str, Any]) -> Site:
    """A site from the experiment and the site's own ``--node-config``."""
    from fedpews.build import build_method, build_network, schedule
    from fedpews.flower.handlers import site_folder
    from fedpews.flower.hello import site_facts
    from fedpews.flower.memory import SiteMemory
    from fedpews.flower.notices import add_notice
    from fedpews.flower.site import Site

    experiment = Experiment.load(config)
    data = _site_data(experiment, number, settings).to(str(settings.get("device", "cpu")))
    if number >= len(data):
        raise ConfigError(f"this is site {number}, but the experiment has sites 0 to {len(data) - 1}")
    net, _ = build_network(experiment, data)
    own = site_folder({**settings, "site": number})
    return Site(
        number,
        net,
        build_method(experiment),
        data,
        schedule(experiment),
        lambda run: SiteMemory(own.parent, number, run),
        lambda: site_facts(experiment.fingerprint(), number, data, "data" in settings, own.parent),
        lambda text: add_notice(own / layout.SITE_STATUS, text),
        experiment.flower.lost_memory == "restart",
        int(settings.get("workers", 1)),
        int(settings.get("threads", 1)),
    )


def serve(config: Path, grid: Any, settings: Mapping[str, Any]) -> None:
    """Run the experiment with its clients at the sites; the run's folder is as in one process."""
    from fedpews.build import build
    from fedpews.flower.delivery import BEST, FINAL, send_models, tell_progress
    from fedpews.flower.memory import AcceptedRounds
    from fedpews.flower.site_log import log_line
    from fedpews.running import Watcher, train

    experiment = Experiment.load(config)
    # a round among sites takes seconds at least, so saving each one costs nothing
    experiment = experiment.model_copy(
        update={"runtime": experiment.runtime.model_copy(update={"checkpoint_every": 1})}
    )
    out = Path(str(settings.get("out") or f"runs/flower-{experiment.method_label}")).expanduser()
    out.mkdir(parents=True, exist_ok=True)
    forget_failure(out)
    accepted = AcceptedRounds()
    engines: list[FlowerEngine] = []

    def make_engine(setup: Setup) -> tuple[Engine, str]:
        engines.append(_engine(setup, grid, out, accepted, settings))
        return engines[0], ""

    try:
        result = train(
            build(
                experiment,
                clients=_server_data(experiment, settings),
                data_dir=settings.get("data-dir") or None,
            ),
            out=out,
            resume=bool(settings.get("resume", False)),
            watcher=Watcher(round=lambda records: tell_progress(log_line, experiment.goal, records)),
            make_engine=make_engine,
            memories=accepted,
        )
        for engine in engines:
            # which is best is decided on validation samples, so there is none without them (stop.best)
            for kind, models in ((FINAL, result.params), *([(BEST, result.best)] if result.best else [])):
                given = send_models(
                    grid, engine.net, engine.roster, engine.run, kind, models, engine.limits.round_seconds
                )
                log_line(f"the {kind} model is at {', '.join(given) or 'no site'}")
    except Exception as error:
        keep_failure(out, error)
        raise


def _engine(
    setup: Setup, grid: Any, out: Path, accepted: AcceptedRounds, settings: Mapping[str, Any]
) -> FlowerEngine:
    """The engine whose clients are the sites."""
    import torch

    from fedpews.build import schedule
    from fedpews.data.inputs import take
    from fedpews.engines.eager import EagerEngine
    from fedpews.flower.engine import FlowerEngine
    from fedpews.flower.hello import Seen, expected_of
    from fedpews.flower.known_sites import KnownSites
    from fedpews.flower.notices import add_notice
    from fedpews.flower.roster import Roster
    from fedpews.flower.scores import ScoreCheck
    from fedpews.flower.site_log import SiteLog, log_line
    from fedpews.flower.uploads import UploadCheck
    from fedpews.tasks import Classification
    from fedpews.torch_private import tree_leaves

    experiment, net, data = setup.experiment, setup.net, setup.data
    run = _run_id(out)
    given = str(settings.get("roster") or "")
    known = KnownSites.read(Path(given).expanduser()) if given else None
    expected = expected_of(experiment.fingerprint(), data, named=experiment.data.name != AT_SITES)

    def say(text: str) -> None:
        log_line(text)
        add_notice(out / layout.SITES_NOTICES, text)

    roster = Roster(grid, expected, known, Seen(out / layout.SITES_SEEN), say)
    has_test = len(data.test_y) > 0
    local = EagerEngine(net, data, schedule(experiment), workers=1) if has_test else None
    check = UploadCheck(net, experiment.flower, schedule(experiment))
    site_log = SiteLog(out / layout.SITES, say)
    numbers = sum(leaf[0].numel() for leaf in tree_leaves(take(data.x, torch.zeros(1, dtype=torch.int64))))
    # where the server has a test set no site is asked for a score, so any metric will do
    score_check = ScoreCheck(Classification() if local else data.task, places=numbers)
    return FlowerEngine(
        grid,
        net,
        roster,
        run,
        accepted,
        site_log,
        experiment.flower,
        check,
        score_check,
        local,
        validates=bool(data.validation),
        holds_validation=any(len(rows) for rows in data.validation),
    )


def _run_id(out: Path) -> str:
    """What names this run's memory at the sites, the same after a resume."""
    path = out / layout.SITES_RUN
    if not path.exists() or not (out / layout.CHECKPOINT).exists():
        path.write_text(uuid.uuid4().hex)
        (out / layout.SITES_SEEN).unlink(missing_ok=True)
    return path.read_text()


def _server_data(experiment: Experiment, settings: Mapping[str, Any]) -> Federation | None:
    """What the server has itself: a test set or nothing, when the data is at the sites; None is data by name."""
    if experiment.data.name != AT_SITES:
        return None
    import torch

    from fedpews.build import build_task

    sites, table, task = experiment.data.clients, experiment.flower, build_task(experiment)
    names = experiment.data.classes
    known = _class_count(experiment)
    columns: tuple[str, ...] = ()
    if sites is None:
        raise ConfigError("data.name is 'sites', so data.clients must say how many sites there are")
    test = str(settings.get("test") or "")
    if test and experiment.data.scaling is not None:
        raise ConfigError(
            "data.scaling is by each site's own samples, so the server's test set has none; leave one of them out"
        )
    if test:
        import numpy as np

        from fedpews.data.client_folders import TABLES, read_client_npz
        from fedpews.data.client_tables import read_table
        from fedpews.data.samples import from_clients
        from fedpews.tasks.class_names import check_listed

        file = Path(test).expanduser()
        if file.suffix in TABLES:
            found = read_table(file, experiment.data.label)
            pair, columns = (found.x, found.y), found.columns
        else:
            pair = read_client_npz(file)
        if names and pair[1].dtype.kind in "UO":
            check_listed({test: {str(value) for value in pair[1].flat}}, names)
            pair = pair[0], np.array([names.index(str(value)) for value in pair[1].flat])
        checked = from_clients([pair], pair, known, task=task)
        test_x, test_y, classes = checked.test_x, checked.test_y, known or checked.classes
        shape = checked.shape
    elif table.input_shape and known:
        shape, classes = tuple(table.input_shape), known
        test_x, test_y = torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64)
    else:
        raise ConfigError(
            "data.name is 'sites' and the server has no test set, so flower.input_shape and data.classes (or "
            "flower.classes) must say what the model is for (or give the server one: test=FILE)"
        )
    server = _federation(torch.zeros(1, *shape), test_y[:0], sites, -1, test_x, test_y, classes, task)
    return replace(server, columns=columns)


def _site_data(experiment: Experiment, number: int, settings: Mapping[str, Any]) -> Federation:
    """The site's own data: what its node config names, or its part of the experiment's data."""
    from fedpews.build import build_task, load_data

    own = settings.get("data")
    if own is None and experiment.data.name == AT_SITES:
        raise ConfigError(
            "the experiment leaves the data to the sites: start this SuperNode with data in its --node-config, "
            'such as data="folder:/path" with one entry and a test, or data="/path/file.py:function"'
        )
    if own is None:
        return load_data(experiment, data_dir=settings.get("data-dir"))
    from fedpews import data as data_room
    from fedpews.data.federation import hold_out

    task, table = build_task(experiment), experiment.data
    found = data_room.load(
        str(own),
        seed=table.seed,
        data_dir=settings.get("data-dir"),
        task=_with_classes(task, _class_count(experiment)),
        classes=table.classes,
        label=table.label,
        missing=table.missing,
        scaling=table.scaling,
        image_size=table.image_size,
        lazy=table.lazy,
    )
    if len(found) != 1:
        raise ConfigError(f"data {own!r} has {len(found)} clients; a site is one, so it must have one")
    if found.class_names and not table.classes:
        raise ConfigError(
            f"this site's classes are {', '.join(found.class_names)}, and the experiment has no data.classes: list the "
            "classes of all sites there, so that a label means the same at each"
        )
    classes = _class_count(experiment) or found.classes
    if classes < found.classes:
        raise ConfigError(f"this site has labels up to {found.classes - 1}, but flower.classes is {classes}")
    sites = experiment.data.clients or number + 1
    own_rows = replace(found, classes=classes)
    mine = _federation(own_rows.x, own_rows.y, sites, number, found.test_x, found.test_y, classes, task)
    mine = replace(mine, columns=found.columns)
    return hold_out(mine, table.validation, table.seed) if isinstance(table.validation, float) else mine


def _class_count(experiment: Experiment) -> int | None:
    """How many classes the experiment says there are at all sites together."""
    return len(experiment.data.classes) if experiment.data.classes else experiment.flower.classes


def _with_classes(task: Task, classes: int | None) -> Task:
    """The task told how many classes there are, where it can be: one site need not have all of them."""
    if not classes or not hasattr(task, "classes"):
        return task
    changes: dict[str, Any] = {"classes": classes}
    return replace(task, **changes)


def _federation(
    x: Any, y: Tensor, sites: int, mine: int, test_x: Any, test_y: Tensor, classes: int, task: Task
) -> Federation:
    """A Federation of which only client ``mine`` (or nobody, −1) is here."""
    import torch

    from fedpews.data import Federation

    nobody = torch.zeros(0, dtype=torch.int64)
    rows = tuple(torch.arange(len(y)) if site == mine else nobody for site in range(sites))
    # what a site tests on is its own
    owner = None if mine < 0 else torch.full((len(test_y),), mine)
    return Federation(x, y, rows, test_x, test_y, classes, task=task, test_owner=owner)
