"""The server app."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from task import Net, load_data, test

from fedpews.flower import WithWarmup

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    strategy = WithWarmup(FedAvg(fraction_evaluate=0.0), rounds=8)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["lr"]}),
        num_rounds=context.run_config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    model = Net()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": test(model, load_data(0, 2)[1])})
