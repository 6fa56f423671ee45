"""The client app."""

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from task import Net, load_data, train

from fedpews.flower import LocalWarmup

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    torch.manual_seed(message.content["config"]["server-round"])
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    site, sites = context.node_config["partition-id"], context.node_config["num-partitions"]
    loader, _ = load_data(site, sites)
    warmup = LocalWarmup(message, context, model, example=torch.zeros(1, 2))
    loss = train(model, loader, context.run_config["local-epochs"], message.content["config"]["lr"], warmup)
    return warmup.reply({"train_loss": loss, "num-examples": len(loader.dataset)})
