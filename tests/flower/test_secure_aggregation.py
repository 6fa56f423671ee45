"""A warmup round of FedPeWS under Flower's SecAgg+: the server sees only sums, and gets the same model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import parameters_to_ndarrays
from flwr.server import ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD, Key
from memory_grid import MemoryGrid
from sums import pack_sums, unpack_sums
from torch import nn

from fedpews.compose import method as make
from fedpews.data import from_clients
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Job, Schedule
from fedpews.methods.contract import Cohort, Upload
from fedpews.neurons.network import Network
from fedpews.server import average_of
from fedpews.warmup import with_warmup

CLIENTS = 3


def a_round() -> tuple[Network, dict[str, torch.Tensor], list[Upload]]:
    """Three clients' uploads of a real warmup round."""
    torch.manual_seed(0)
    samples = [(torch.randn(20, 2), torch.full((20,), label)) for label in range(CLIENTS)]
    data = from_clients(samples, test=(torch.randn(3, 2), torch.arange(3)))
    net = Network(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)), data.x[:1])
    method = with_warmup(make("fedavg"), 5)
    old = net.initial()
    state = method.init(net, old, CLIENTS)
    downloads = method.downloads(net, state, Cohort(1, tuple(range(CLIENTS)), CLIENTS, seed=0))
    half = method.client(method.phase(state, 1))
    engine = EagerEngine(net, data, Schedule(batch_size=5), workers=1)
    done = engine.train([Job(0, i, half, downloads[i], None, 0.1) for i in range(CLIENTS)])
    engine.close()
    return net, old, [one.upload for one in done]


class Sender(NumPyClient):  # type: ignore[misc]
    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays

    def fit(self, parameters: Any, config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        return self.arrays, 1, {}


def sender(arrays: list[Any]) -> Any:
    def client_fn(context: Context) -> Any:
        return Sender(arrays).to_client()

    return client_fn


def secure_mean(contributions: list[list[Any]]) -> tuple[list[Any], MemoryGrid]:
    """The mean of the clients' arrays by Flower's own protocol: workflow at the server, mod at the clients."""
    grid, manager = MemoryGrid(), SimpleClientManager()
    for node, arrays in enumerate(contributions, start=1):
        app = ClientApp(client_fn=sender(arrays), mods=[secaggplus_mod])
        context = Context(1, node, {}, RecordDict(), {})
        grid.nodes[node] = lambda message, app=app, context=context: app(message, context)  # type: ignore[misc]
        manager.register(GridClientProxy(node, grid, run_id=1))  # type: ignore[arg-type]
    seen: list[Any] = []

    class Keep(FedAvg):  # type: ignore[misc]
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            seen.extend(parameters_to_ndarrays(results[0][1].parameters))
            return super().aggregate_fit(server_round, results, failures)

    strategy = Keep(fraction_fit=1.0, min_fit_clients=CLIENTS, min_available_clients=CLIENTS)
    about = ConfigRecord({Key.CURRENT_ROUND: 1})
    start = ArrayRecord([np.zeros(1, np.float32)])
    state = RecordDict({MAIN_PARAMS_RECORD: start, MAIN_CONFIGS_RECORD: about})
    context = LegacyContext(Context(1, 0, {}, state, {}), ServerConfig(num_rounds=1), strategy, manager)
    SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2, max_weight=1.0)(grid, context)
    return seen, grid


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_warmup_round_under_secure_aggregation_gives_the_same_model_and_theta() -> None:
    net, old, uploads = a_round()
    masks = [upload.ownership(net) or {} for upload in uploads]
    thetas = [upload.extra["theta"]["neurons"] for upload in uploads]
    sent = [pack_sums(u.params, m, t) for u, m, t in zip(uploads, masks, thetas, strict=True)]
    means, _ = secure_mean(sent)
    params, theta = unpack_sums(means, old, CLIENTS)
    expected = average_of(net, uploads, "uniform")([upload.params for upload in uploads], old)
    # SecAgg+ cuts [−8, 8] into 2²² steps of 3.8e-6, and the mean of three is divided by one third at least
    assert all(torch.allclose(params[name], expected[name], atol=2e-5) for name in old)
    assert torch.allclose(theta, torch.stack(thetas).mean(0), atol=1e-5)
    assert any(bool((mask["0.weight"] == 0).any()) for mask in masks)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_server_sees_of_one_client_is_noise() -> None:
    net, _, uploads = a_round()
    sent = [pack_sums(u.params, u.ownership(net) or {}, u.extra["theta"]["neurons"]) for u in uploads]
    again = [list(sent[0]), sent[1], sent[2]]
    first, second = (one_clients_vector(secure_mean(parts)[1]) for parts in (sent, again))
    assert not np.array_equal(first, second)  # the same upload, under another mask each time


def one_clients_vector(grid: MemoryGrid) -> Any:
    from flwr.common import bytes_to_ndarray

    for reply in grid.answered:
        for record in reply.content.config_records.values():
            if reply.metadata.src_node_id == 1 and "masked_params" in record:
                return bytes_to_ndarray(record["masked_params"][1])
    raise AssertionError("no masked vector was sent")
