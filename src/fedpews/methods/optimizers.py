"""Optimisers: how one parameter moves along a gradient. Clients and the server use the same rules.

A rule is pure: what it remembers about a parameter are its slots, an argument and a result. Every slot has the
parameter's shape, or is a single number where all elements took the same steps; under masks the slots of a closed
neuron stay as they are, like its weights. `with_warmup` and the like give such a number to each element, so that a
bias correction counts the steps that the element really took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpews import options
from fedpews.methods.contract import Rate
from fedpews.options import Options, Positive
from fedpews.registry import register

Slots = dict[str, Tensor]


class Optimizer(Options, ABC):
    """The rule for one parameter."""

    slots: ClassVar[tuple[str, ...]] = ()
    """The names of what it remembers."""
    weight_decay: ClassVar[float] = 0.0
    """A client's weight decay if none is set."""
    decouples: ClassVar[bool] = False
    """Whether weight decay shrinks the parameter itself, past the rule, instead of adding to the gradient."""

    def start(self, like: Tensor) -> Slots:
        """The slots before the first step: zeros, unless a rule says otherwise."""
        return {key: torch.zeros_like(like) for key in self.slots}

    @abstractmethod
    def step(self, value: Tensor, gradient: Tensor, slots: Slots, lr: Rate) -> tuple[Tensor, Slots]:
        """The parameter's new value and slots."""


@register("optimizer", "sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """x ← x − η·g.

    >>> SGD().step(torch.tensor(1.0), torch.tensor(0.5), {}, lr=0.5)
    (tensor(0.7500), {})
    """

    def step(self, value: Tensor, gradient: Tensor, slots: Slots, lr: Rate) -> tuple[Tensor, Slots]:
        return value - lr * gradient, {}


@register("optimizer", "momentum")
@dataclass(frozen=True)
class Momentum(Optimizer):
    """v ← β·v + g, x ← x − η·v.

    Args:
        momentum: β, the share of the last step that is kept.
    """

    slots: ClassVar[tuple[str, ...]] = ("velocity",)

    momentum: options.Momentum = 0.9

    def step(self, value: Tensor, gradient: Tensor, slots: Slots, lr: Rate) -> tuple[Tensor, Slots]:
        velocity = self.momentum * slots["velocity"] + gradient
        return value - lr * self.direction(velocity, gradient), {"velocity": velocity}

    def direction(self, velocity: Tensor, gradient: Tensor) -> Tensor:
        return velocity


@register("optimizer", "nesterov")
@dataclass(frozen=True)
class Nesterov(Momentum):
    """Momentum that looks ahead: v ← β·v + g, x ← x − η·(g + β·v)."""

    def direction(self, velocity: Tensor, gradient: Tensor) -> Tensor:
        return gradient + self.momentum * velocity


@dataclass(frozen=True)
class Adaptive(Optimizer):
    """m ← β₁m + (1−β₁)g, v by the variant's own rule, x ← x − η·m/(√v + τ); v starts at τ².

    Args:
        beta1: β₁, decay of the first moment.
        beta2: β₂, decay of the second moment.
        tau: τ, added to √v to keep the step finite.
    """

    slots: ClassVar[tuple[str, ...]] = ("first", "second")

    beta1: options.Momentum = 0.9
    beta2: options.Momentum = 0.99
    tau: Positive = 1e-3

    def start(self, like: Tensor) -> Slots:
        return {"first": torch.zeros_like(like), "second": torch.full_like(like, self.tau**2)}

    def step(self, value: Tensor, gradient: Tensor, slots: Slots, lr: Rate) -> tuple[Tensor, Slots]:
        first = self.beta1 * slots["first"] + (1 - self.beta1) * gradient
        second = self.second(slots["second"], gradient * gradient)
        return value - lr * first / (second.sqrt() + self.tau), {"first": first, "second": second}

    @abstractmethod
    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """The new second moment from the old one and g²."""


@register("optimizer", "adagrad")
@dataclass(frozen=True)
class Adagrad(Adaptive):
    """A rate that shrinks where gradients were large, v ← v + g², without a first moment."""

    beta1: options.Momentum = 0.0
    tau: Positive = 1e-10

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@register("optimizer", "yogi")
@dataclass(frozen=True)
class Yogi(Adaptive):
    """Adam with a slower second moment, v ← v − (1−β₂)·g²·sign(v − g²)."""

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


@dataclass(frozen=True)
class Smoothed(Adaptive):
    """v ← β₂v + (1−β₂)g²: Adam as Reddi et al. (2021) use it at the server, without bias correction."""

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@register("optimizer", "rmsprop")
@dataclass(frozen=True)
class RMSprop(Optimizer):
    """v ← β₂v + (1−β₂)g², x ← x − η·g/(√v + τ); v starts at 0.

    Args:
        beta2: β₂, decay of the second moment.
        tau: τ, added to √v to keep the step finite.
    """

    slots: ClassVar[tuple[str, ...]] = ("second",)

    beta2: options.Momentum = 0.99
    tau: Positive = 1e-8

    def step(self, value: Tensor, gradient: Tensor, slots: Slots, lr: Rate) -> tuple[Tensor, Slots]:
        second = self.beta2 * slots["second"] + (1 - self.beta2) * gradient * gradient
        return value - lr * gradient / (second.sqrt() + self.tau), {"second": second}


@register("optimizer", "adam")
@dataclass(frozen=True)
class Adam(Smoothed):
    """Adam with bias correction (Kingma and Ba 2015): both moments start at 0 and are divided by 1 − βᵏ.

    k counts the steps that an element took, which under masks are not those of its neighbour. 1 − βᵏ is kept as
    what it is: the moment that a gradient of 1 would have.
    """

    slots: ClassVar[tuple[str, ...]] = ("first", "second", "first_of_one", "second_of_one")

    beta2: options.Momentum = 0.999
    tau: Positive = 1e-8

    def start(self, like: Tensor) -> Slots:
        moments = {key: torch.zeros_like(like) for key in ("first", "second")}
        return moments | {key: like.new_zeros(()) for key in ("first_of_one", "second_of_one")}

    def step(self, value: Tensor, gradient: Tensor, slots: Slots, lr: Rate) -> tuple[Tensor, Slots]:
        first = self.beta1 * slots["first"] + (1 - self.beta1) * gradient
        second = self.second(slots["second"], gradient * gradient)
        first_of_one = self.beta1 * slots["first_of_one"] + (1 - self.beta1)
        second_of_one = self.beta2 * slots["second_of_one"] + (1 - self.beta2)
        root = (second / second_of_one).sqrt() + self.tau
        return value - (lr / first_of_one) * first / root, {
            "first": first,
            "second": second,
            "first_of_one": first_of_one,
            "second_of_one": second_of_one,
        }


@register("optimizer", "adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay shrinks the parameter itself (Loshchilov and Hutter 2019), by default 0.01."""

    weight_decay: ClassVar[float] = 0.01
    decouples: ClassVar[bool] = True
