"""Everything that is used of flwr and that flwr does not document, each with its reason.

A new release of flwr is tried by running tests/flower; when they pass it is added to ``SUPPORTED`` of this package.
What flwr's command line offers is used from there (``deploy/processes.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# An app as Flower sends it, without a process: `flwr build` only writes a file beside the app.
from flwr.cli.build import build_fab_from_disk

# Loads an app from a folder; `flwr-clientapp` unpacks and runs whatever app the server sent.
from flwr.clientapp.utils import get_load_client_app_fn

# Numbers and words of Flower's protocol.
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType

# A task that sends no heartbeat is stopped after half a minute.
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http

# The pieces that a message is sent in, for its size.
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

# What the SuperNode demands of each request: a version, and the secret or a task's token.
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker

# The SuperNode's API for the processes that run tasks. `flower-superexec` and `flwr-clientapp` use it, but start a new
# Python for each message.
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

__all__ = [
    "ErrorCode",
    "SubStatus",
    "acquire_task",
    "build_fab_from_disk",
    "client_of",
    "executor_client",
    "get_all_nested_objects",
    "load_app",
    "pull_task_input",
    "push_message",
    "push_task_output",
    "start_heartbeat",
    "task_client",
]

ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


def executor_client(address: str, secret: bytes) -> RuntimeHttpClient:
    """A client that may take tasks from the SuperNode at an address of this machine."""
    return _client(address, SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=ACQUIRE))


def task_client(address: str, token: str) -> RuntimeHttpClient:
    """A client that may read and answer the task of a token."""
    return _client(address, RuntimeTokenHttpInterceptor(token))


def _client(address: str, auth: Any) -> RuntimeHttpClient:
    return RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=True,  # on loopback, within one machine
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), auth],
        retry_invoker=make_simple_http_retry_invoker(),
    )


def acquire_task(client: RuntimeHttpClient) -> str | None:
    """The token of a task for a ClientApp; None when there is none now."""
    answer = client.AcquireTask(AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP}))
    return str(answer.token) if answer.HasField("task") and answer.token else None


def start_heartbeat(client: RuntimeHttpClient) -> HeartbeatSender:
    """Tell the SuperNode that a task is alive, until it is stopped."""
    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    return heartbeat


def load_app(folder: Path, run: Any, app_hash: str) -> Any:
    """The ClientApp in a folder."""
    load = get_load_client_app_fn(default_app_ref="", app_path=str(folder), multi_app=True)
    return load(run.fab_id, run.fab_version, app_hash)


def client_of(grid: Grid) -> Any | None:
    """What a grid fetches the pieces of a reply with; None for a grid that has no network."""
    return getattr(grid, "_runtime_client", None)
