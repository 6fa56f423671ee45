"""Local SGD and plain averaging: what all base optimisers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Upload, Work
from fedpews.methods.options import Momentum, NotNegative
from fedpews.methods.server_optimizers import SGD, ServerOptimizer, init_server, step_server
from fedpews.neurons.network import Batch, Network
from fedpews.trees import Nest, Tree


@dataclass(frozen=True)
class LocalSGD(Method, ClientHalf):
    """Both halves of a method whose clients run SGD from the global model and whose server averages.

    A base optimiser writes only its difference: a gradient rule, something more to remember, or something more
    to send. The server's state is the params and its optimiser's slots, the client keeps nothing.
    """

    takes_warmup: ClassVar[bool] = True

    momentum: Momentum = 0.0
    weight_decay: NotNegative = 0.0
    server: ServerOptimizer = field(default=SGD(), kw_only=True)

    def client(self, phase: str) -> ClientHalf:
        return self

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return {"params": params, "server": init_server(self.server, net, params)}

    def params(self, state: Nest) -> Tree:
        params: Tree = state["params"]
        return params

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        return [self.broadcast(state, cohort)] * len(cohort.clients)

    def broadcast(self, state: Nest, cohort: Cohort) -> Download:
        """The one download that every client gets."""
        return Download(cohort.round, "train", cohort.total, state["params"])

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        local: Nest = {"params": download.params}
        if self.momentum:
            local["momentum"] = trees.zeros_like(trees.pick(download.params, net.trainable))
        return local

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        loss, grads, buffers = self.gradient(net, local, batch)
        return self.descend(local, grads, buffers, lr), loss

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        """Loss, direction of descent and new buffers: the rule in which base optimisers differ."""
        return net.gradients(local["params"], batch)

    def descend(self, local: Nest, grads: Mapping[str, Tensor], buffers: Tree, lr: float | Tensor) -> Nest:
        """One step of SGD, with momentum and weight decay when they are asked for."""
        params = local["params"]
        if self.weight_decay:
            grads = {name: grad + self.weight_decay * params[name] for name, grad in grads.items()}
        moved = dict(local)
        if self.momentum:
            grads = trees.add(grads, local["momentum"], self.momentum)
            moved["momentum"] = grads
        moved["params"] = params | {name: params[name] - lr * grad for name, grad in grads.items()} | buffers
        return moved

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        return {}, Upload(
            client=work.client,
            round=download.round,
            samples=work.samples,
            steps=work.steps,
            loss=work.loss,
            params=local["params"],
            neurons=work.neurons,
        )

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        aggregate = self.aggregate(net, state["params"], uploads, average)
        params, slots = step_server(self.server, net, state["params"], aggregate, state["server"], average)
        return state | {"params": params, "server": slots}

    def aggregate(self, net: Network, old: Tree, uploads: Sequence[Upload], average: Average) -> Tree:
        """Where the uploads say the model should go, before the server's own step."""
        return average([upload.params for upload in uploads], old)
