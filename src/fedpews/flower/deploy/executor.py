"""The warm executor: imports everything once, takes the SuperNode's tasks, and forks a process for each.

Flower's own starts a new Python for every message, which spends seconds on imports before it has made contact, and is
given up when that takes longer than half a minute. A fork has everything at once, and is as isolated: what a message
changes is gone with its process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from flwr.app import Context, Error, Message, MessageType

from fedpews.flower.deploy.pin import ForeignApp, Pin
from fedpews.flower.deploy.processes import die_with_parent, leave_with_parent
from fedpews.flower.failure import keep_failure
from fedpews.flower.flwr_private import (
    ErrorCode,
    SubStatus,
    acquire_task,
    executor_client,
    load_app,
    pull_task_input,
    push_message,
    push_task_output,
    start_heartbeat,
    task_client,
)
from fedpews.flower.handlers import site_folder
from fedpews.flower.hello import unfit_content
from fedpews.flower.notices import add_notice
from fedpews.results.layout import SITE_STATUS

if TYPE_CHECKING:
    from fedpews.flower.site import Site

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 60.0
"""How long the SuperNode may be out of reach before the executor ends, to be started again with it."""


@dataclass(frozen=True)
class Work:
    """Where an executor takes tasks from, and the only app it runs."""

    address: str  # of the SuperNode's Runtime API, on this machine
    secret: bytes  # which only this site's own SuperNode and executor know
    pin: Pin
    settings: Mapping[str, Any]  # the site's own, as messages will bring them


def run_executor(work: Work) -> None:
    """Take tasks until the SuperNode is gone."""
    leave_with_parent()
    _warm_up(work)
    client = executor_client(work.address, work.secret)
    heard = time.monotonic()
    while time.monotonic() - heard < PATIENCE_SECONDS:
        _reap()
        try:
            token = acquire_task(client)
            heard = time.monotonic()
        except httpx.HTTPError as error:
            print(f"the SuperNode does not answer: {error}", flush=True)
            time.sleep(1.0)
            continue
        if token is None:
            time.sleep(POLL_SECONDS)
        else:
            _fork(work, token)


def _warm_up(work: Work) -> None:
    """Import what a task will need, and build the site: forks have it at once.

    One thread: a process that has more threads than its own must not be forked; nor one that has used a GPU.
    """
    import torch

    torch.set_num_threads(1)
    import fedpews.build
    import fedpews.engines.eager
    import fedpews.flower.site  # noqa: F401
    from fedpews.flower.app import CONFIG, warm_site
    from fedpews.flower.handlers import site_number

    if str(work.settings.get("device", "cpu")) != "cpu":
        return
    try:
        site = warm_site(work.pin.folder / CONFIG, site_number(work.settings), work.settings)
        _import_what_training_imports(site)
        # found on first use otherwise, and so anew in every fork
        net = site.net
        net.gated(torch.ones(net.graph.size))
        _ = net.can_be_cut, net.is_stochastic, net.flops, net.survives_channels_last
    except Exception as error:  # noqa: BLE001 - the first message will meet it too, and answer with it
        keep_failure(site_folder(work.settings), error, "this site")


def _import_what_training_imports(site: Site) -> None:
    """A fork takes a step of training and tells which modules that took (torch loads some of its own late).

    Here they are only imported: a process that has run a backward pass must not be forked.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        known = set(sys.modules)
        try:
            site.rehearse()
        except Exception as error:  # noqa: BLE001 - the first message will meet it too, and answer with it
            print(f"the rehearsal failed: {type(error).__name__}: {error}", flush=True)
        finally:
            names = [name for name in sys.modules if name not in known]
            with os.fdopen(writing, "w") as pipe:
                pipe.write("\n".join(names))
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        names = pipe.read().split()
    os.waitpid(child, 0)
    for name in names:
        # some can only be imported as part of another
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _fork(work: Work, token: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    code = 1
    try:
        die_with_parent()
        code = _run_task(work, token)
    except BaseException:  # noqa: BLE001 - a child must never come back into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_task(work: Work, token: str) -> int:
    """One message: pull it, check that it belongs to the app this site has read, run it, and push the reply."""
    client = task_client(work.address, token)
    heartbeat = start_heartbeat(client)
    message: Message | None = None
    context: Context | None = None
    status, details, reply = SubStatus.FAILED, "", None
    try:
        message, context, run, fab = pull_task_input(client)
        work.pin.check(fab.content)
        reply = load_app(work.pin.folder, run, work.pin.hash)(message=message, context=context)
        status = SubStatus.COMPLETED
    except Exception as error:  # noqa: BLE001 - whatever an app raises is the reply
        details = f"{type(error)}:<'{error}'>"
        code = (
            ErrorCode.INVALID_FAB if isinstance(error, ForeignApp) else ErrorCode.CLIENT_APP_RAISED_EXCEPTION
        )
        add_notice(site_folder(work.settings) / SITE_STATUS, f"a message is answered with a failure: {error}")
        if not isinstance(error, ForeignApp):
            traceback.print_exc()
        if message is not None:
            is_hello = message.metadata.message_type == MessageType.QUERY
            reply = (
                Message(unfit_content(error), reply_to=message)
                if is_hello and isinstance(error, ForeignApp)
                else Message(Error(code=code, reason=details), reply_to=message)
            )
    if reply is not None and context is not None:
        push_message(client, reply, context)
    push_task_output(client=client, context=context, sub_status=status, details=details)
    if heartbeat.is_running:
        heartbeat.stop()
    client.close()
    return 0 if status == SubStatus.COMPLETED else 1


def _reap() -> None:
    """Collect the exit codes of tasks that ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


if __name__ == "__main__":
    place, secret_file, app, pinned, own = sys.argv[1:]
    run_executor(Work(place, Path(secret_file).read_bytes(), Pin(Path(app), pinned), json.loads(own)))
