"""Differential privacy of clients: clipping at the client, noise at the server or at the client, ε from an accountant.

Two federations are neighbours when one client's change is zero in one of them. During a warmup with fixed masks the
number of owners of an element, Σm, is chosen by the server and so public: the noise is added to the sum of the
owners' clipped changes, and the division by Σm reveals nothing more. Learned masks depend on the clients' data and
would need noise too; they are refused. A client's loss is not sent. Not covered: the number of a client's samples,
whether it takes part, and evaluation counts from sites.

Noise comes from the operating system's random bytes, so two runs differ. It is rounded to floating-point numbers,
which an attacker with exact access to outputs could use in theory (Mironov 2012); there is no defence here.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError, need_extra
from fedpews.methods.average import Average
from fedpews.methods.contract import (
    ClientHalf,
    ClientWrapper,
    Cohort,
    Download,
    Upload,
    Work,
    Wrapper,
)
from fedpews.neurons.network import Network
from fedpews.options import NotNegative, Positive
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree

PRIVACY = "privacy"
NoiseAt = Literal["server", "client"]


@dataclass(frozen=True)
class Private(Wrapper):
    """The inner method with differential privacy for every client.

    Args:
        clip: C, the maximum norm of a client's change; with ``adaptive`` its initial value.
        noise: z, the noise multiplier: noise with deviation z·C is added to the sum of the changes.
        place: where the noise is added: ``server`` (central) or ``client`` (local, without a trusted server).
        adaptive: adapt C to a quantile of the clients' norms (Andrew et al. 2021), without increasing ε.
        quantile: with adaptive clipping, the share of the clients whose change should not be clipped.
        clip_lr: learning rate of C.
        bit_noise: deviation of the noise on the number of unclipped changes; a twentieth of the cohort is usual.
        noise_seed: for tests only, because repeatable noise protects no client.

    >>> from fedpews.methods.fedavg import FedAvg
    >>> Private(FedAvg(), clip=1.0, noise=1.1).place
    'server'
    """

    clip: Positive
    noise: NotNegative
    place: NoiseAt = "server"
    adaptive: bool = False
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    clip_lr: Positive = 0.2
    bit_noise: Positive = 1.0
    noise_seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.adaptive and self.place == "client":
            raise ConfigError(
                "adaptive clipping needs a server that adds the noise: privacy.place = 'server'"
            )

    @property
    def change_noise(self) -> float:
        """The noise multiplier of the changes, when a share of the budget goes to the bits."""
        if not self.adaptive or self.noise == 0:
            return self.noise
        rest = self.noise**-2 - (2 * self.bit_noise) ** -2
        if rest <= 0:
            raise ConfigError(
                f"privacy.bit_noise = {self.bit_noise:g} is too little beside privacy.noise = {self.noise:g}; "
                f"it must be above {self.noise / 2:g}"
            )
        return float(rest**-0.5)

    def client(self, phase: str) -> ClientHalf:
        return PrivateClient(self.inner.client(phase), self)

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        privacy = {"clip": torch.tensor(float(self.clip)), "round": torch.tensor(0)}
        return super().init(net, params, total) | {PRIVACY: privacy}

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        clip = {PRIVACY: {"clip": state[PRIVACY]["clip"][None]}}
        inner = super().downloads(net, state, cohort)
        return [replace(download, extra={**download.extra, **clip}) for download in inner]

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        if len(set(average.weights)) > 1:
            raise ConfigError(
                "differential privacy needs equal weights for all clients: train.weighting = 'uniform'"
            )
        clip, round = float(state[PRIVACY]["clip"]), uploads[0].round
        if self.place == "server":
            ones, deviation = (1.0,) * len(uploads), self.change_noise * clip
            seeds = iter([self.seed(round, "changes")])
            average = NoisyAverage(ones, average.masks, deviation=deviation, seeds=seeds)
        stripped = [replace(up, extra={k: v for k, v in up.extra.items() if k != PRIVACY}) for up in uploads]
        new = super().update(net, state, stripped, average)
        if self.adaptive:
            within = float(sum(float(up.extra[PRIVACY]["within"]) for up in uploads))
            within += float(gaussian((), self.bit_noise, self.seed(round, "bits")))
            clip *= math.exp(-self.clip_lr * (within / len(uploads) - self.quantile))
        return new | {PRIVACY: {"clip": torch.tensor(clip), "round": torch.tensor(round)}}

    def seed(self, round: int, purpose: str) -> int | None:
        """The seed of some noise; None for noise from the operating system."""
        return None if self.noise_seed is None else fold(self.noise_seed, round, purpose)


@dataclass(frozen=True)
class PrivateClient(ClientWrapper):
    """The inner half, whose change is clipped to the length C before it is sent."""

    privacy: Private

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        _check_public(download, upload)
        # a client that adds its own noise trusts no server, nor the server's C
        adds_noise = self.privacy.place == "client"
        clip = self.privacy.clip if adds_noise else float(download.extra[PRIVACY]["clip"])
        change = upload.change(net, download.params)
        length = math.sqrt(sum(float(value.double().pow(2).sum()) for value in change.values()))
        scale = min(1.0, clip / length) if length > 0 else 1.0
        if adds_noise:
            seed = self.privacy.seed(download.round, f"client {work.client}")
            noise = _noises(change, self.privacy.noise * clip, seed)
            change, scale = trees.add(noise, change, scale), 1.0
        owned = upload.ownership(net) or {}
        params = trees.where(owned, trees.add(download.params, change, scale), download.params)
        upload = replace(upload, params=params, loss=0.0)
        if self.privacy.adaptive:
            upload = upload.adding({PRIVACY: {"within": torch.tensor([float(length <= clip)])}})
        return memory, upload


@dataclass(frozen=True)
class NoisyAverage(Average):
    """(Σ m_i y_i + noise)/Σ m_i, as many times as there are seeds.

    Every average needs noise and budget of its own, and the accountant counts one for each round.
    """

    deviation: float = 0.0
    seeds: Iterator[int | None] = field(default_factory=lambda: iter([None]), compare=False)
    """For the noise of each average; None is noise from the operating system."""

    def __call__(self, values: Sequence[Mapping[str, Tensor]], old: Mapping[str, Tensor]) -> Tree:
        try:
            seed = next(self.seeds)
        except StopIteration:
            raise ConfigError(
                "this method takes several averages in a round, and differential privacy is worked out for one; "
                "use a method that averages once, such as fedavg"
            ) from None
        mean, noise = super().__call__(values, old), _noises(old, self.deviation, seed)
        result = {}
        for name, kept in old.items():
            _, owners = self.shares(name, kept)
            noisy = mean[name] + noise[name] / owners.clamp_min(1.0)
            result[name] = torch.where(owners > 0, noisy, kept)
        return result


def epsilon(
    noise: float, rounds: int, delta: float, total: int, cohort: int, place: NoiseAt = "server"
) -> float:
    """ε at δ after so many rounds, by the accountant of Google's dp-accounting (Rényi).

    Args:
        total, cohort: clients in the federation, and in each round, drawn without replacement.
    """
    if noise == 0:
        return math.inf
    dp_accounting = need_extra("privacy", "dp_accounting", "ε")
    from dp_accounting import rdp

    event = dp_accounting.GaussianDpEvent(noise)
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if place == "client":
        # a client's two possible changes lie up to 2C apart
        event = dp_accounting.GaussianDpEvent(noise / 2)
    elif cohort < total:
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            total, cohort, dp_accounting.GaussianDpEvent(noise / 2)
        )
    accountant = rdp.RdpAccountant(neighboring_relation=relation)
    accountant.compose(event, rounds)
    return float(accountant.get_epsilon(delta))


def gaussian(shape: tuple[int, ...] | torch.Size, deviation: float, seed: int | None) -> Tensor:
    """Normal noise; without a seed it comes from the operating system's random bytes.

    torch's generator can be predicted from a few of its outputs, and a server publishes millions of them.
    """
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        return deviation * torch.randn(shape, generator=generator, dtype=torch.float64)
    count = math.prod(shape)
    # two uniform numbers in (0, 1] of 53 bits for two normal ones (Box and Muller)
    half = -(-count // 2)
    bits = np.frombuffer(secrets.token_bytes(16 * half), dtype="<u8") >> np.uint64(11)
    radius, angle = torch.from_numpy((bits + 1.0) / 2.0**53).view(2, half)
    length = (-2 * radius.log()).sqrt()
    normal = torch.cat([length * (2 * math.pi * angle).cos(), length * (2 * math.pi * angle).sin()])
    return deviation * normal[:count].reshape(shape)


def _noises(like: Mapping[str, Tensor], deviation: float, seed: int | None) -> Tree:
    return {
        name: gaussian(value.shape, deviation, None if seed is None else fold(seed, name)).to(value)
        for name, value in like.items()
    }


def _check_public(download: Download, upload: Upload) -> None:
    if upload.extra:
        raise ConfigError(
            f"this method also sends {', '.join(sorted(upload.extra))}, which no noise protects; with differential "
            "privacy use a method that sends only parameters, such as fedavg, alone or with fixed masks (+pews-fixed)"
        )
    if not all(value.is_floating_point() for value in upload.params.values()):
        raise ConfigError(
            "this method sends bits, and no noise protects them; use a method that sends parameters, such as fedavg"
        )
    if upload.mask is not None or (upload.neurons is not None and download.neurons is None):
        raise ConfigError(
            "learned masks depend on the clients' data, and no noise protects them; with differential privacy use "
            "fixed masks (+pews-fixed)"
        )
