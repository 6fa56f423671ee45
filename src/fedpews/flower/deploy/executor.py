"""The warm executor: imports everything once, takes the SuperNode's tasks, and forks a process for each.

Flower's own executor starts a new Python for every message, which spends seconds on imports before its first contact,
and is stopped if that takes more than half a minute. A fork has everything at once, and is as isolated: what a
message changes is gone with its process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from flwr.app import Context, Error, Message, MessageType

from fedpews.flower.deploy.app_folder import CONFIG, ForeignApp, Pin
from fedpews.flower.deploy.processes import die_with_parent
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
from fedpews.flower.hello import hello_content
from fedpews.flower.logs import append_line, save_failure, site_folder
from fedpews.flower.site import warm_site
from fedpews.results.layout import SITE_STATUS

POLL_SECONDS = 0.1
PATIENCE_SECONDS = 60.0
"""How long the SuperNode may be out of reach before the executor ends, to be restarted with it."""


@dataclass(frozen=True)
class ExecutorOptions:
    """Where an executor takes tasks from, and the only app it runs."""

    address: str  # of the SuperNode's Runtime API, on this machine
    secret: bytes  # which only this site's own SuperNode and executor know
    pin: Pin
    settings: Mapping[str, Any]  # the site's ``--node-config``


def run_executor(options: ExecutorOptions) -> None:
    """Take tasks until the SuperNode is gone."""
    # the exit codes of tasks are not needed
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _warm_up(options)
    client = executor_client(options.address, options.secret)
    last_answer = time.monotonic()
    while time.monotonic() - last_answer < PATIENCE_SECONDS:
        try:
            token = acquire_task(client)
            last_answer = time.monotonic()
        except httpx.HTTPError as error:
            print(f"the SuperNode does not answer: {error}", flush=True)
            time.sleep(1.0)
            continue
        if token is None:
            time.sleep(POLL_SECONDS)
        else:
            _fork(options, token)


def _warm_up(options: ExecutorOptions) -> None:
    """Build the site, so that forks have it at once.

    On one thread: a process with several threads must not be forked, nor one that has used a GPU.
    """
    torch.set_num_threads(1)
    if str(options.settings.get("device", "cpu")) != "cpu":
        return
    try:
        net = warm_site(options.pin.folder / CONFIG, options.settings).net
        # the first step of training imports torch's compiler, which takes seconds
        torch.compiler.reset()
        # computed at first use otherwise, so again in every fork
        net.gated(torch.ones(net.graph.size))
        _ = net.can_be_cut, net.is_stochastic, net.flops, net.survives_channels_last
    except Exception as error:  # noqa: BLE001 - the first message raises it again, and is answered with it
        save_failure(site_folder(options.settings), error, "this site")


def _fork(options: ExecutorOptions, token: str) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = _run_task(options, token)
    except BaseException:  # noqa: BLE001 - a child must never return into the parent's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_task(options: ExecutorOptions, token: str) -> int:
    """Answer one message: pull it, check that it is for the app this site has read, run it, and push the reply."""
    pin, client = options.pin, task_client(options.address, token)
    heartbeat = start_heartbeat(client)
    message: Message | None = None
    context: Context | None = None
    status, details, reply = SubStatus.FAILED, "", None
    try:
        message, context, run, fab = pull_task_input(client)
        pin.check(fab.content)
        reply = load_app(pin.folder, run, pin.hash)(message=message, context=context)
        status = SubStatus.COMPLETED
    except Exception as error:  # noqa: BLE001 - the error of an app is its reply
        details = f"{type(error)}:<'{error}'>"
        status_log = site_folder(options.settings) / SITE_STATUS
        append_line(status_log, f"a message is answered with a failure: {error}")
        if not isinstance(error, ForeignApp):
            traceback.print_exc()
        if message is not None:
            reply = _failure(error, details, message)
    if reply is not None and context is not None:
        push_message(client, reply, context)
    push_task_output(client=client, context=context, sub_status=status, details=details)
    if heartbeat.is_running:
        heartbeat.stop()
    client.close()
    return 0 if status == SubStatus.COMPLETED else 1


def _failure(error: Exception, details: str, message: Message) -> Message:
    """The reply to a message that failed."""
    if not isinstance(error, ForeignApp):
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=details), reply_to=message)
    if message.metadata.message_type == MessageType.QUERY:
        return Message(hello_content(error), reply_to=message)
    return Message(Error(code=ErrorCode.INVALID_FAB, reason=details), reply_to=message)


if __name__ == "__main__":
    address, secret_file, app, app_hash, settings = sys.argv[1:]
    pin = Pin(Path(app), app_hash)
    run_executor(ExecutorOptions(address, Path(secret_file).read_bytes(), pin, json.loads(settings)))
