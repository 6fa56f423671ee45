"""The client app."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from task import Net, load_data, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    torch.manual_seed(message.content["config"]["server-round"])
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    site, sites = context.node_config["partition-id"], context.node_config["num-partitions"]
    loader, _ = load_data(site, sites)
    loss = train(model, loader, context.run_config["local-epochs"], message.content["config"]["lr"])
    metrics = {"train_loss": loss, "num-examples": len(loader.dataset)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)
