"""SCAFFOLD: control variates correct the drift of each client (Karimireddy et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import STEPS_TAKEN, Cohort, Download, Upload, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Batch, Network
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@dataclass(frozen=True)
class ControlVariates(FedAvg):
    """Plain local SGD of g − c_i + c, with c_i the client's own control and c the server's, both zero at first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_plain:
            name = type(self).__name__.lower()
            raise ConfigError(
                f"{name} needs plain SGD (train.optimizer = 'sgd', no momentum, no clip_norm): only then is x_g − y "
                "over the sum of the local rates the mean of a client's gradients. scaffold-m has a momentum of its own"
            )

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        control = download.extra["control"]
        own = trees.zeros_like(control) if memory is None else memory["control"]
        correction = trees.subtract(control, own)  # c − c_i
        return super().start(net, download, memory) | {"control": own, "correction": correction}

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        loss, grads, buffers = super().gradient(net, local, batch)
        # for what has a control; other gradients stay
        return loss, grads | trees.add(local["correction"], grads), buffers

    def new_controls(
        self, net: Network, download: Download, local: Nest, work: Work, steps: Mapping[str, Tensor]
    ) -> tuple[Tree, Tree]:
        """c_i⁺ = c_i − c + (x_g − y)/(K·η), and the elements where it is new: those that moved and are uploaded.

        Args:
            steps: K, the steps that each element really took.
        """
        owned = {} if work.neurons is None else net.graph.expand(work.neurons)
        new, moved = {}, {}
        for name, old in local["control"].items():
            taken = steps[name]
            # where K is 0 the result is not used
            length = torch.where(taken > 0, taken, 1) * work.lr
            drift = (download.params[name] - local["params"][name]) / length
            moved[name] = (taken > 0) & owned.get(name, torch.tensor(True, device=net.device))
            corrected = self.mean_step(local, name, drift) - local["correction"][name]
            new[name] = torch.where(moved[name], corrected, old)
        return new, moved

    def mean_step(self, local: Nest, name: str, drift: Tensor) -> Tensor:
        """The mean of g − c_i + c over the steps, given how far a parameter went, over K·η."""
        return drift


@register("method", "scaffold")
@dataclass(frozen=True)
class Scaffold(ControlVariates):
    """Local SGD whose gradient is corrected by control variates, so that clients do not drift apart.

    A step is y ← y − η(g − c_i + c), with c_i the client's own control and c the server's, both zero at first.
    Afterwards c_i⁺ = c_i − c + (x_g − y)/(K·η), with K the steps really taken (option II), and at the server
    c ← c + (|S|/N)·mean(c_i⁺ − c_i), which makes it Σ c_i/N. Trainable parameters only, and plain SGD: with
    momentum (x_g − y)/(K·η) is no gradient.

    In a warmup K is counted for each element, c_i changes only where the client uploads, and c is averaged over
    the clients that own the element, just as x is; a client that has not uploaded yet counts as an owner with c_i = 0.
    After the warmup the same sum is divided by N again.

    >>> Scaffold(weight_decay=1e-4).momentum
    0.0
    """

    counts_steps: ClassVar[bool] = True

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        nothing = trees.zeros_like(trees.pick(params, net.trainable))
        return super().init(net, params, total) | {
            "sum": nothing,  # Σ c_i
            "owners": nothing,  # of each element: the clients that own it in a warmup
            "took_part": torch.zeros(total, dtype=torch.bool),
            "heard": torch.tensor(0.0),  # how many took part, by their weights
        }

    def broadcast(self, state: Nest, cohort: Cohort) -> Download:
        control = {name: self.mean_control(state, name, cohort) for name in state["sum"]}
        return Download(cohort.round, "train", cohort.total, state["params"], extra={"control": control})

    def mean_control(self, state: Nest, name: str, cohort: Cohort) -> Tensor:
        """c of one parameter."""
        total: Tensor = state["sum"][name]
        if not cohort.masked:
            return total / cohort.total
        # known owners, and all clients that have not uploaded yet: each of them may own the element
        owners = state["owners"][name] + (cohort.total - state["heard"])
        # an element that none of all clients owns has a sum of zero
        return torch.where(owners > 1e-3, total / owners, 0.0).to(total.dtype)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        local = super().start(net, download, memory)
        unknown = trees.map_tree(lambda value: torch.zeros_like(value, dtype=torch.bool), local["control"])
        return local | {"known": (memory or {}).get("known", unknown)}

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        _, upload = super().finish(net, download, local, work)
        # in a warmup, the steps that each element really took; it does not move while its neuron is closed
        taken: Tree = local.get(STEPS_TAKEN, {})
        every = torch.tensor(float(work.steps), device=net.device)
        steps = {name: taken.get(name, every) for name in local["control"]}
        new, moved = self.new_controls(net, download, local, work, steps)
        upload = upload.adding({"control": trees.subtract(new, local["control"])})
        if work.neurons is None:
            return {"control": new}, upload
        # elements owned for the first time: the server counts every owner once
        first = {name: now & ~local["known"][name] for name, now in moved.items()}
        known = trees.map_tree(torch.logical_or, local["known"], moved)
        return {"control": new, "known": known}, upload.adding({"first": first})

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        controls, owners, heard, took_part = (state[key] for key in ("sum", "owners", "heard", "took_part"))
        for weight, upload in zip(average.weights, uploads, strict=True):
            # weights with mean 1, so that equal ones add plain sums
            share = weight * len(uploads) / sum(average.weights)
            # zero where the client owns nothing, so the sum needs no mask
            controls = trees.add(controls, upload.extra["control"], share)
            heard = heard if took_part[upload.client] else heard + share
            if "first" in upload.extra:
                owners = trees.add(owners, upload.extra["first"], share)
        took_part = took_part.index_fill(0, torch.tensor([upload.client for upload in uploads]), True)
        new = {"sum": controls, "owners": owners, "heard": heard, "took_part": took_part}
        return super().update(net, state, uploads, average) | new
