"""Clients that own single weights, by masks of their own: LotteryFL and FedSelect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods import optimizers
from fedpews.methods.average import Average
from fedpews.methods.contract import ACCURACY, Cohort, Download, Rate, Upload, Work
from fedpews.methods.fedavg import FedAvg, weight_names
from fedpews.neurons.network import Batch, Network
from fedpews.options import Share
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@dataclass(frozen=True)
class PersonalMasks(FedAvg):
    """Local SGD whose server keeps the last mask that each client uploaded, in ``state["masks"]``."""

    takes_warmup: ClassVar[bool] = False
    personalised = True

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return super().init(net, params, total) | {"masks": {}}

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        masks = {str(upload.client): upload.mask for upload in uploads}
        return super().update(net, state, uploads, average) | {"masks": state["masks"] | masks}


@register("method", "lotteryfl")
@dataclass(frozen=True)
class LotteryFL(PersonalMasks):
    """LotteryFL: every client prunes the global model to its own lottery ticket (Li et al. 2021).

    A client trains the global model under a mask of its own, which it prunes as long as it works well. When the masked
    global model is right on more than ``accuracy`` of the client's own samples and more than ``remaining`` of its
    weights are left, the client prunes the smallest ``prune`` of the remaining weights of each layer and rewinds the
    others to their initial values; then it trains. The server averages each weight over the clients that keep it.
    Biases and norm layers are not masked. A client's model is the masked global one. The authors' program measures the
    accuracy on a client's test samples, and reports the best that each client had in any round.

    Args:
        accuracy: the accuracy that the masked model must exceed before it is pruned.
        remaining: the share of remaining weights at which pruning ends.
        prune: the share of the remaining weights that one pruning removes.

    >>> LotteryFL(prune=0.2).personalised
    True
    """

    accuracy: Annotated[float, Field(ge=0, le=1)] = 0.2
    remaining: Annotated[float, Field(ge=0, le=1)] = 0.5
    prune: Annotated[float, Field(ge=0, lt=1)] = 0.1

    probes: ClassVar[bool] = True

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return super().init(net, params, total) | {"initial": params}

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

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        params = download.params
        if memory is None:
            full = {name: torch.ones_like(params[name], dtype=torch.bool) for name in weight_names(net)}
            memory = {"mask": full, "initial": download.extra.get("initial", params)}
        mask, initial = memory["mask"], memory["initial"]
        left = sum(int(part.sum()) for part in mask.values()) / sum(part.numel() for part in mask.values())
        if float(download.extra[ACCURACY][ACCURACY]) > self.accuracy and left > self.remaining:
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


def _masked(tree: Mapping[str, Tensor], mask: Mapping[str, Tensor]) -> Tree:
    # not a product: the wire would have to send each −0
    return {n: torch.where(mask[n], value, 0.0) if n in mask else value for n, value in tree.items()}


def _pruned(weight: Tensor, mask: Tensor, part: float) -> Tensor:
    """The mask without the smallest of the weights it keeps."""
    sizes = torch.where(mask, weight.abs(), torch.inf).flatten()
    smallest = sizes.argsort(stable=True)[: int(part * int(mask.sum()))]
    return mask.flatten().index_fill(0, smallest, False).view_as(mask)


@register("method", "fedselect")
@dataclass(frozen=True)
class FedSelect(PersonalMasks):
    """FedSelect: each client keeps the weights that move most, more of them over time (Tamirisa et al. 2024).

    Every client has a mask of single weights that are its own: trained there, never sent, never averaged. The mask is
    empty at first. After every ``every`` rounds of the client, not counting its first, the ``grow`` of the other
    weights of each layer that moved most since the last time become its own, until more than ``limit`` of a layer are.
    The first half of a round's steps move the client's own weights alone, the others the common ones alone; the server
    averages each weight over the clients whose own it is not. A client's model is the common one with its own weights
    in it.

    As in the authors' program a new weight of the client's own starts at the common value, and biases stay common.
    There each half is an epoch; here it is half of the steps that the client took in its last round.

    Args:
        grow: the share of the common weights that become personal each time.
        limit: the share of personal weights at which a layer's mask stops growing.
        every: number of rounds after which the mask grows.

    >>> FedSelect().personalised
    True
    """

    grow: Share = 0.25
    limit: Share = 0.8
    every: Annotated[int, Field(ge=1)] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.rule) is not optimizers.SGD:
            raise ConfigError("fedselect needs plain SGD (train.optimizer = 'sgd', no momentum)")

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        whole = self.broadcast(state, cohort)
        masks = [state["masks"].get(str(client), {}) for client in cohort.clients]
        # what is the client's own is not sent: zeros travel as bits
        nothing = trees.zeros_like(whole.params)
        return [replace(whole, params=trees.where(mask, whole.params, nothing)) for mask in masks]

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        params = download.params
        if memory is None:
            weights = trees.pick(params, weight_names(net))
            own = {name: torch.zeros_like(value, dtype=torch.bool) for name, value in weights.items()}
            before, rounds, steps = weights, *torch.zeros(2, dtype=torch.int64, device=net.device)
        else:
            own, before, rounds, steps = (memory[key] for key in ("own", "before", "rounds", "steps"))
            params = self.personal(net, download, memory)
            if int(rounds) > 1 and (int(rounds) - 1) % self.every == 0:
                after = trees.pick(memory["params"], before)
                own = {n: self.grown(mask, (after[n] - before[n]).abs()) for n, mask in own.items()}
                before = after
        return super().start(net, replace(download, params=params), None) | {
            "own": own,
            "before": before,
            "rounds": rounds,
            # of the last round, so that in its first one a client has no steps for its own weights
            "progress": {"taken": torch.zeros_like(steps), "of": steps},
        }

    def grown(self, own: Tensor, moved: Tensor) -> Tensor:
        """The mask with those of the other weights that moved most."""
        if float(own.float().mean()) > self.limit:
            return own
        others = int((~own).sum())
        most = torch.where(own, -1.0, moved).flatten().argsort(descending=True, stable=True)
        chosen = most[: others - round((1 - self.grow) * others)]
        return own.flatten().index_fill(0, chosen, True).view_as(own)

    def descend(self, local: Nest, grads: Mapping[str, Tensor], buffers: Tree, lr: Rate) -> Nest:
        progress, own = local["progress"], local["own"]
        is_own = 2 * progress["taken"] < progress["of"]
        moved = super().descend(local, grads, buffers, lr)
        # a parameter without a mask is common
        trained = {n: own[n] == is_own if n in own else ~is_own.expand(grads[n].shape) for n in grads}
        params = trees.where(trained, moved["params"], local["params"])
        return moved | {"params": params, "progress": progress | {"taken": progress["taken"] + 1}}

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        _, upload = super().finish(net, download, local, work)
        memory = {key: local[key] for key in ("own", "before", "params")}
        memory["rounds"] = local["rounds"] + 1
        memory["steps"] = torch.tensor(work.steps, device=net.device)
        return memory, replace(upload, mask=trees.map_tree(torch.logical_not, local["own"]))

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return download.params | trees.where(
            memory["own"], trees.pick(memory["params"], memory["own"]), download.params
        )
