"""FedPM: the weights stay random, and the clients learn which of them to use (Isik et al. 2023)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Rate, Upload, Work
from fedpews.methods.fedavg import by_slot
from fedpews.methods.optimizers import SGD, Adam, Optimizer
from fedpews.neurons.network import Batch, Network
from fedpews.options import Positive
from fedpews.registry import register
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree


@register("method", "fedpm")
@dataclass(frozen=True)
class FedPM(Method, ClientHalf):
    """Weights and biases are frozen at ±e·√(1/fan_in); clients learn with which probability each is used.

    A step draws every weight with probability θ = σ(s) and moves s along (∂f/∂m)·θ·σ′(s) by Adam, whose moments the
    client keeps from round to round. A client uploads one draw m of its θ: one bit a weight. The server's new θ is
    0.01 + 0.98·mean(m) (the mode of a Beta(1, 1) prior, reset every round), sent back as logits. The signs come from
    a seed that clients get instead of the weights. Scores start at N(0, 1). The scale and shift of norm layers stay
    as they are; running statistics are averaged. All of this is the authors' program but for norm layers, of which
    its models have none. With ``scores="sgd"`` s ← s − η_s·(∂f/∂m)·σ′(s), and θ is mean(m) within [0.01, 0.99].

    Args:
        scores: optimiser of the scores: ``"adam"``, as in the authors' code, or ``"sgd"``, plain straight-through
            steps.
        score_lr: η_s, the learning rate of the scores, used instead of ``train.lr``; by default 0.1 for Adam and 1
            for SGD.
        evaluate: how the evaluated network is made: ``"sample"`` draws it from θ, ``"threshold"`` cuts θ at 1/2.

    >>> FedPM(score_lr=1.0).evaluate
    'sample'
    """

    uploads_weights: ClassVar[bool] = False

    scores: Literal["adam", "sgd"] = "adam"
    score_lr: Positive | None = None
    evaluate: Literal["sample", "threshold"] = "sample"

    @cached_property
    def rule(self) -> Optimizer:
        """How a client's scores move along a gradient."""
        return Adam() if self.scores == "adam" else SGD()

    @property
    def rate(self) -> float:
        """η_s."""
        return self.score_lr or (0.1 if self.scores == "adam" else 1.0)

    def noise_size(self, net: Network) -> int:
        return sum(net.shapes[name].numel() for name in _drawn(net))

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        seed = _seed_of(params)
        weights = _frozen(net, seed)
        generator = torch.Generator().manual_seed(fold(seed, "scores"))
        # drawn on the CPU, so that the numbers are the same on every device
        scores = {name: torch.randn(w.shape, generator=generator).to(w) for name, w in weights.items()}
        return {
            "theta": trees.map_tree(torch.sigmoid, scores),
            "weights": weights,
            "rest": {name: value for name, value in params.items() if name not in weights},
            "seed": torch.tensor(seed),
            "round": torch.tensor(0),
        }

    def params(self, state: Nest) -> Tree:
        generator = torch.Generator().manual_seed(fold(int(state["seed"]), int(state["round"]), "evaluate"))
        used = {}
        # sorted: a resumed state may list them in another order
        for name, theta in sorted(state["theta"].items()):
            cut: Tensor | float = 0.5
            if self.evaluate == "sample":
                cut = torch.rand(theta.shape, generator=generator).to(theta)
            used[name] = state["weights"][name] * (theta > cut)
        rest: Tree = state["rest"]
        return used | rest

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        params = trees.map_tree(torch.logit, state["theta"]) | state["rest"]
        extra = {"seed": {"seed": state["seed"]}}
        return [Download(cohort.round, "train", cohort.total, params, extra=extra)] * len(cohort.clients)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        weights = _frozen(net, int(download.extra["seed"]["seed"]))
        rest = {name: value for name, value in download.params.items() if name not in weights}
        slots = by_slot({name: self.rule.start(value) for name, value in weights.items()})
        return {
            "scores": trees.pick(download.params, tuple(weights)),
            "weights": weights,
            "rest": rest,
            **(memory or slots),
        }

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        weights, scores = local["weights"], local["scores"]
        used = {name: weights[name] * mask for name, mask in _draw(scores, noise).items()}
        loss, grads, buffers = net.gradients(used | local["rest"], batch)
        moved, slots = {}, {}
        for name, s in scores.items():
            theta = torch.sigmoid(s)
            slope = grads[name] * weights[name] * theta * (1 - theta)
            kept = {key: local[key][name] for key in self.rule.slots}
            along = slope * theta if self.scores == "adam" else slope
            moved[name], slots[name] = self.rule.step(s, along, kept, self.rate)
        return local | {"scores": moved, "rest": local["rest"] | buffers} | by_slot(slots), loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        params = _draw(local["scores"], work.noise) | trees.pick(local["rest"], net.buffers)
        memory = {key: local[key] for key in self.rule.slots}
        return memory, work.upload(download, params)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        old = state["theta"] | trees.pick(state["rest"], net.buffers)
        mean = average([trees.map_tree(Tensor.float, upload.params) for upload in uploads], old)
        theta = {name: mean[name] for name in state["theta"]}
        # the authors' clients send 0.01 and 0.99 for the two values of a bit
        inside = (lambda m: 0.01 + 0.98 * m) if self.scores == "adam" else (lambda m: m.clamp(0.01, 0.99))
        theta = trees.map_tree(inside, theta)
        rest = state["rest"] | trees.pick(mean, net.buffers)
        return state | {"theta": theta, "rest": rest, "round": state["round"] + 1}


def _drawn(net: Network) -> dict[str, int]:
    """The parameters that masks are drawn for, and the fan-in of each: weights, and biases beside a weight."""
    fans = {name: math.prod(shape[1:]) for name, shape in net.shapes.items() if len(shape) > 1}
    drawn = {}
    for name in net.trainable:
        fan = fans.get(name, fans.get(f"{name.rpartition('.')[0]}.weight".lstrip(".")))
        if fan is not None:
            drawn[name] = fan
    return drawn


def _frozen(net: Network, seed: int) -> Tree:
    """The random signs, at the size that their fan-in asks for."""
    generator = torch.Generator().manual_seed(seed)
    signs = {name: torch.rand(net.shapes[name], generator=generator).to(net.device) for name in _drawn(net)}
    return {
        n: torch.where(signs[n] < 0.5, -1.0, 1.0) * math.e / math.sqrt(fan) for n, fan in _drawn(net).items()
    }


def _draw(scores: Mapping[str, Tensor], noise: Tensor) -> Tree:
    """A mask: every weight open with probability σ(s)."""
    parts = noise.split([s.numel() for s in scores.values()])
    return {
        n: part.view(s.shape) < torch.sigmoid(s) for (n, s), part in zip(scores.items(), parts, strict=True)
    }


def _seed_of(params: Mapping[str, Tensor]) -> int:
    """A seed that is a function of the initial parameters, the only thing by which two runs differ here."""
    digest = hashlib.blake2b(digest_size=8)
    for value in params.values():
        digest.update(value.cpu().numpy().tobytes())
    return fold(0, digest.hexdigest())
