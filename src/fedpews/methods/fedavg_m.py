"""FedAvg-M and SCAFFOLD-M: local steps with the momentum of all clients (Cheng et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods import optimizers
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Rate, Upload, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fednova import add_work, divide_by_work
from fedpews.methods.optimizers import Optimizer, Slots
from fedpews.methods.scaffold import Scaffold
from fedpews.neurons.network import Network
from fedpews.options import Share
from fedpews.registry import register
from fedpews.trees import Nest, Tree

DIRECTION = "direction"
"""In the state, in downloads and in local states: v, the mean step of all clients in the last round."""


@dataclass(frozen=True)
class Leaning(Optimizer):
    """x ← x − η·(β·g + (1 − β)·v), with a direction v that stays as it is for the round."""

    slots: ClassVar[tuple[str, ...]] = (DIRECTION,)

    beta: Share

    def step(self, value: Tensor, gradient: Tensor, slots: Slots, lr: Rate) -> tuple[Tensor, Slots]:
        direction = slots[DIRECTION]
        return value - lr * (self.beta * gradient + (1 - self.beta) * direction), {DIRECTION: direction}


@register("method", "fedavg-m")
@dataclass(frozen=True)
class FedAvgMomentum(FedAvg):
    """FedAvg-M: local steps with the momentum of all clients (Cheng et al. 2024).

    FedAvg whose steps are β·g + (1 − β)·v, with v the mean step of all clients in the last round. v starts at 0 and
    becomes mean((x_g − y_i)/(K_i·η)); the server takes the mean of the y_i, which is the paper's rate γ = K·η where all
    take K steps. Xu et al. (2021) call the same rule FedCM. Weight decay is part of g. The paper has no public program.
    `fedavgm` is another thing: momentum of the server's own steps.

    In a warmup K counts the steps in which the element took part, which a client then sends for each element, and v is
    averaged over the owners that took one; where there is none v stays.

    Args:
        beta: β, the weight of the client's own gradient; 1 equals FedAvg.

    >>> FedAvgMomentum(beta=0.2).beta
    0.2
    """

    counts_steps: ClassVar[bool] = True

    beta: Share = 0.1

    def __post_init__(self) -> None:
        if self.momentum or type(self.optimizer) is not optimizers.SGD:
            raise ConfigError(
                "fedavg-m and scaffold-m have a momentum of their own around plain SGD: leave train.momentum at 0 and "
                "train.optimizer at 'sgd'"
            )
        super().__post_init__()

    @cached_property
    def rule(self) -> Optimizer:
        return Leaning(self.beta)

    @property
    def is_plain(self) -> bool:
        return self.clip_norm is None

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        nothing = trees.zeros_like(trees.pick(params, net.trainable))
        return super().init(net, params, total) | {DIRECTION: nothing}

    def broadcast(self, state: Nest, cohort: Cohort) -> Download:
        download = super().broadcast(state, cohort)
        return replace(download, extra={**download.extra, DIRECTION: state[DIRECTION]})

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        local = super().start(net, download, memory)
        # what stays at the client (fedbn) has no common direction: v = 0
        return local | {DIRECTION: {**local[DIRECTION], **download.extra[DIRECTION]}}

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        return memory, add_work(net, local, upload, lambda steps: steps * work.lr)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        old = trees.pick(state["params"], net.trainable)
        lengths, steps = divide_by_work(old, uploads)  # K_i·η, the mean step
        moved = average
        if any("work_each" in upload.extra for upload in uploads):
            took_steps = tuple(
                {n: (way[n] > 0) & mask[n] if mask and n in mask else way[n] > 0 for n in old}
                for way, mask in zip(lengths, average.masks, strict=True)
            )
            moved = replace(average, masks=took_steps)
        direction = moved(steps, state[DIRECTION])
        return super().update(net, state, uploads, average) | {DIRECTION: direction}


@register("method", "scaffold-m")
@dataclass(frozen=True)
class ScaffoldMomentum(FedAvgMomentum, Scaffold):
    """SCAFFOLD-M: SCAFFOLD with the momentum of all clients (Cheng et al. 2024).

    A step is y ← y − η·(β·(g − c_i + c) + (1 − β)·v): FedAvg-M with SCAFFOLD's control variates. v is `fedavg-m`'s, the
    mean step of the last round. c_i⁺ is the mean of the client's own gradients g, as in the paper: ((x_g − y)/(K·η) −
    (1 − β)·v)/β + c_i − c. Everything else, and what happens in a warmup, is as in `scaffold` and `fedavg-m`. With β =
    1 it is SCAFFOLD.

    Args:
        beta: β, the weight of the client's own corrected gradient.

    >>> ScaffoldMomentum().beta
    0.1
    """

    def mean_step(self, local: Nest, name: str, drift: Tensor) -> Tensor:
        direction: Tensor = local[DIRECTION][name]
        return (drift - (1 - self.beta) * direction) / self.beta
