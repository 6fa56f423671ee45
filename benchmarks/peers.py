"""Other frameworks on our workloads, as contenders of speed.py: ``peers.py flower|pfl WORKLOAD CORES``.

Runs in the environment that `make bench-peers` makes. Start-up is left out. They run one seed, so what they
report is that times the number of seeds.
"""

from __future__ import annotations

import sys

import torch
from plain_loop import train_client
from torch.utils.data import DataLoader, TensorDataset
from turns import Turns
from workloads import WORKLOADS, Workload

ROUNDS = 10**6
"""More than anybody will ask for."""


def model_of(workload: Workload) -> torch.nn.Module:
    torch.manual_seed(0)
    return workload.plain_model()


def accuracy(model: torch.nn.Module, data) -> float:
    with torch.no_grad():
        tests = DataLoader(TensorDataset(data.test_x, data.test_y), batch_size=256)
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in tests) / len(data.test_y)


def flower(workload: Workload, cores: int, turns: Turns) -> None:
    """Flower's simulation: a ClientApp on Ray actors of one core each, averaged by its FedAvg."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    data, name = workload.data(), workload.name
    client, server = ClientApp(), ServerApp()
    kept: dict[str, object] = {}

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        here = WORKLOADS[name]
        mine = kept.setdefault("data", here.data())  # an actor serves many clients; load once
        rows = mine.clients[int(context.node_config["partition-id"])]
        model = model_of(here)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        loader = DataLoader(TensorDataset(mine.x[rows], mine.y[rows]), here.schedule.batch_size, shuffle=True)
        state = train_client(model, loader, here.lr)
        metrics = MetricRecord({"num-examples": len(rows)})
        return Message(
            content=RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message
        )

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model = model_of(workload)
        model.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(model, data)
        if round > 0:  # what it calls round 0 is the start
            turns.done(len(workload.seeds))
        turns.wait()
        return MetricRecord({"accuracy": found})

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        fraction = workload.cohort / len(data)
        strategy = FedAvg(fraction_train=fraction, fraction_evaluate=0.0, min_available_nodes=len(data))
        start = ArrayRecord(model_of(workload).state_dict())
        strategy.start(grid=grid, initial_arrays=start, num_rounds=ROUNDS, evaluate_fn=evaluate)

    resources = {"num_cpus": 1, "num_gpus": 0.0}
    backend = {"client_resources": resources, "init_args": {"num_cpus": cores}}
    run_simulation(server, client, num_supernodes=len(data), backend_config=backend)


def pfl(workload: Workload, cores: int, turns: Turns) -> None:
    """Apple's pfl-research: its simulated backend, one process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(cores)
    data = workload.data()
    module = model_of(workload)

    def loss(x, y, is_eval=False):
        module.eval() if is_eval else module.train()
        return torch.nn.functional.cross_entropy(module(x), y)

    def metrics(x, y):
        right = int((module(x).argmax(1) == y).sum())
        return {"accuracy": Weighted(right, len(y))}

    module.loss, module.metrics = loss, metrics
    model = PyTorchModel(
        model=module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )

    def user(client: int) -> Dataset:
        rows = data.clients[client]
        return Dataset([data.x[rows], data.y[rows]], user_id=str(client))

    users = FederatedDataset(user, get_user_sampler("random", list(range(len(data)))))
    backend = SimulatedBackend(training_data=users, val_data=users)

    class Clock(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            accuracy(module.eval(), data)
            turns.done(len(workload.seeds))
            turns.wait()
            return False, aggregate_metrics.__class__()

    settings = NNAlgorithmParams(
        central_num_iterations=ROUNDS,
        evaluation_frequency=10**6,  # not ours to compare: Clock evaluates
        train_cohort_size=workload.cohort,
        val_cohort_size=1,
    )
    local = NNTrainHyperParams(
        local_learning_rate=workload.lr,
        local_num_epochs=1,
        local_batch_size=workload.schedule.batch_size,
    )
    turns.wait()
    FederatedAveraging().run(
        backend=backend,
        model=model,
        algorithm_params=settings,
        model_train_params=local,
        model_eval_params=NNEvalHyperParams(local_batch_size=256),
        callbacks=[Clock()],
    )


def main() -> None:
    peer, name, cores = sys.argv[1], sys.argv[2], int(sys.argv[3])
    {"flower": flower, "pfl": pfl}[peer](WORKLOADS[name], cores, Turns())


if __name__ == "__main__":
    main()
