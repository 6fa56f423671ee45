"""SCAFFOLD: local SGD corrected for each client's drift (Karimireddy et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Upload, Work
from fedpews.methods.local_sgd import LocalSGD
from fedpews.neurons.network import Batch, Network
from fedpews.trees import Nest, Tree


@dataclass(frozen=True)
class Scaffold(LocalSGD):
    """Local SGD whose gradient is corrected by control variates, so that clients do not drift apart.

    A step is y ← y − η(g − c_i + c), with c_i the client's own control and c the server's, both zero at first.
    Afterwards c_i⁺ = c_i − c + (x_g − y)/(K·η), with K the steps really taken (option II), and at the server
    c ← c + (|S|/N)·mean(c_i⁺ − c_i). In a warmup K is counted for each element, and c_i changes only where the
    client uploads. Trainable parameters only, and plain SGD: with momentum (x_g − y)/(K·η) is no gradient.

    >>> Scaffold(weight_decay=1e-4).momentum
    0.0
    """

    counts_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum:
            raise ConfigError(f"scaffold needs plain SGD; its momentum must be 0, got {self.momentum:g}.")

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        control = trees.zeros_like(trees.pick(params, net.trainable))
        return super().init(net, params, total) | {"control": control, "total": torch.tensor(total)}

    def broadcast(self, state: Nest, cohort: Cohort) -> Download:
        return Download(
            cohort.round, "train", cohort.total, state["params"], extra={"control": state["control"]}
        )

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        control = download.extra["control"]
        own = trees.zeros_like(control) if memory is None else memory["control"]
        correction = trees.subtract(control, own)  # c − c_i
        return super().start(net, download, memory) | {"control": own, "correction": correction}

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        loss, grads, buffers = super().gradient(net, local, batch)
        return loss, grads | trees.add(local["correction"], grads), buffers

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        _, upload = super().finish(net, download, local, work)
        owned = {} if work.neurons is None else net.graph.expand(work.neurons)
        taken: Tree = local.get("taken", {})
        new: Tree = {}
        for name, old in local["control"].items():
            steps = taken.get(name, torch.tensor(float(work.steps)))
            drift = (download.params[name] - local["params"][name]) / (steps.clamp_min(1) * work.lr)
            moves = (steps > 0) & owned.get(name, torch.tensor(True))
            new[name] = torch.where(moves, drift - local["correction"][name], old)
        change = {"control": trees.subtract(new, local["control"])}
        return {"control": new}, upload.adding(change)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        scale = len(uploads) / int(state["total"]) / sum(average.weights)
        control = state["control"]
        for weight, upload in zip(average.weights, uploads, strict=True):
            # zero where the client owns nothing, so the sum needs no mask
            control = trees.add(control, upload.extra["control"], scale * weight)
        return super().update(net, state, uploads, average) | {"control": control}
