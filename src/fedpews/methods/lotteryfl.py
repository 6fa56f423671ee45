"""LotteryFL: every client prunes its own winning ticket out of the global model (Li et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Upload, Work
from fedpews.methods.local_sgd import LocalSGD
from fedpews.neurons.network import Batch, Network
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "lotteryfl")
@dataclass(frozen=True)
class LotteryFL(LocalSGD):
    """Every client trains the global model under a mask of its own, which it prunes as long as it works well.

    When the masked global model is right on more than ``accuracy`` of the client's own samples and more than
    ``remaining`` of its weights are left, the client prunes the smallest ``prune`` of the remaining weights of
    each layer and rewinds the others to their initial values; then it trains. The server averages each weight
    over the clients that keep it. Biases and norm layers are not masked. A client's model is the masked global
    one.

    Args:
        accuracy: what the masked model must exceed before it is pruned.
        remaining: the part of the weights at which pruning ends.
        prune: the part of the remaining weights that one pruning takes.

    >>> LotteryFL(prune=0.2).personalised
    True
    """

    takes_warmup: ClassVar[bool] = False

    accuracy: Annotated[float, Field(ge=0, le=1)] = 0.2
    remaining: Annotated[float, Field(ge=0, le=1)] = 0.5
    prune: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @property
    def personalised(self) -> bool:
        return True

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return super().init(net, params, total) | {"initial": params, "masks": {}}

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        whole = self.broadcast(state, cohort)
        sent = []
        for client in cohort.clients:
            mask = state["masks"].get(str(client))
            if mask is not None:
                sent.append(replace(whole, params=_masked(whole.params, mask)))
            elif cohort.round == 1:
                sent.append(whole)
            else:  # a new client does not know the initial values
                sent.append(replace(whole, extra={"initial": state["initial"]}))
        return sent

    def probe(self, net: Network, download: Download, memory: Nest | None) -> Tree:
        return download.params

    def probed(self, net: Network, download: Download, memory: Nest | None, accuracy: float) -> Nest:
        if memory is None:
            full = {n: torch.ones_like(download.params[n], dtype=torch.bool) for n in _weights(net)}
            memory = {"mask": full, "initial": download.extra.get("initial", download.params)}
        return memory | {"accuracy": torch.tensor(accuracy, dtype=torch.float64)}

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        assert memory is not None, "the probe makes the first memory"
        mask, initial, params = memory["mask"], memory["initial"], download.params
        left = sum(int(part.sum()) for part in mask.values()) / sum(part.numel() for part in mask.values())
        if float(memory["accuracy"]) > self.accuracy and left > self.remaining:
            mask = {name: _pruned(params[name], part, self.prune) for name, part in mask.items()}
            params = params | trees.pick(initial, net.trainable)
        masked = replace(download, params=_masked(params, mask))
        return super().start(net, masked, None) | {"mask": mask, "initial": initial}

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        loss, grads, buffers = super().gradient(net, local, batch)
        return loss, _masked(grads, local["mask"]), buffers

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        _, upload = super().finish(net, download, local, work)
        mask = local["mask"]
        return {"mask": mask, "initial": local["initial"]}, replace(upload, mask=mask)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        masks = {str(upload.client): upload.mask for upload in uploads}
        return super().update(net, state, uploads, average) | {"masks": state["masks"] | masks}


def _weights(net: Network) -> tuple[str, ...]:
    return tuple(name for name in net.trainable if len(net.shapes[name]) > 1)


def _masked(tree: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    # not a product: the wire would have to send each −0
    return {n: torch.where(mask[n], value, 0.0) if n in mask else value for n, value in tree.items()}


def _pruned(weight: Tensor, mask: Tensor, part: float) -> Tensor:
    """The mask without the smallest of the weights it keeps."""
    sizes = torch.where(mask, weight.abs(), torch.inf).flatten()
    smallest = sizes.argsort(stable=True)[: int(part * int(mask.sum()))]
    return mask.flatten().index_fill(0, smallest, False).view_as(mask)
