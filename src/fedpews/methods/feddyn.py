"""FedDyn: dynamic regularisation that aligns the local optima with the global optimum (Acar et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import Download, Upload, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Batch, Network
from fedpews.options import Positive
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "feddyn")
@dataclass(frozen=True)
class FedDyn(FedAvg):
    """Each client remembers the slope h_i at which its last round ended, and bends its loss by it.

    A client descends on f(y) − ⟨h_i, y⟩ + (α/2)‖y − x_g‖² and then sets h_i ← h_i − α(y − x_g). The server keeps
    h ← h − α·(|S|/N)·mean(y_i − x_g) and moves to mean(y_i) − h/α. In a warmup the means run over the owners of an
    element, h_i changes only where the client uploads, and an element that no client owns keeps its value and its h.
    The authors' program divides α by the client's part of the samples, relative to the mean part; here all have one α.

    Args:
        alpha: α, the weight of the regularisation; the authors use 0.01 and 0.1.

    >>> FedDyn(alpha=0.5).alpha
    0.5
    """

    alpha: Positive = 0.1

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        slope = trees.zeros_like(trees.pick(params, net.trainable))
        return super().init(net, params, total) | {"slope": slope, "total": torch.tensor(total)}

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        anchor = trees.pick(download.params, net.trainable)
        slope = trees.zeros_like(anchor) if memory is None else memory["slope"]
        return super().start(net, download, memory) | {"slope": slope, "anchor": anchor}

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        loss, grads, buffers = super().gradient(net, local, batch)
        back = trees.subtract(local["anchor"], local["params"])  # x_g − y
        return loss, trees.add(trees.subtract(grads, local["slope"]), back, -self.alpha), buffers

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        _, upload = super().finish(net, download, local, work)
        back = trees.subtract(local["anchor"], local["params"])
        slope = trees.add(local["slope"], back, self.alpha)
        if work.neurons is not None:
            slope = trees.where(net.graph.expand(work.neurons), slope, local["slope"])
        return {"slope": slope}, upload

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        old, part = trees.pick(state["params"], net.trainable), len(uploads) / int(state["total"])
        back = trees.subtract(old, average([upload.params for upload in uploads], old))
        slope = trees.add(state["slope"], back, self.alpha * part)
        new = super().update(net, state, uploads, average)
        bent = trees.add(trees.pick(new["params"], net.trainable), slope, -1 / self.alpha)
        moved = trees.where(average.covered(old), bent, new["params"])
        return new | {"slope": slope, "params": new["params"] | moved}
