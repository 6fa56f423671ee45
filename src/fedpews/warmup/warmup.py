"""Personalised warmup via subnetworks, around any method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import (
    THETA,
    ClientHalf,
    ClientWrapper,
    Cohort,
    Download,
    Method,
    Upload,
    Wrapper,
    change_each,
)
from fedpews.methods.subnetwork import AssignedClient
from fedpews.neurons.network import Network
from fedpews.trees import Nest, Tree, pick
from fedpews.warmup.auto import Auto
from fedpews.warmup.clients import LearnedClient
from fedpews.warmup.masks import Learned, Masks, draw_starts

WARMUP = "warmup"


def with_warmup(method: Method, rounds: int, masks: Masks | None = None) -> Method:
    """The same method, with a warmup of ``rounds`` rounds in which each client trains only its own neurons.

    During the warmup the server averages every element over the clients that own it. After it every client trains
    the whole network, and the inner method keeps its state.

    Args:
        rounds: W, the number of warmup rounds; 0 is the bare method.
        masks: ``Learned`` (FedPeWS, the default), ``Fixed`` (FedPeWS-Fixed), ``Random`` (drawn, for comparison) or
            ``Auto`` (FedPeWS-Auto, for which ``rounds`` is the most it may take).

    >>> from fedpews.methods.fedprox import FedProx
    >>> with_warmup(FedProx(mu=0.01), rounds=25, masks=Learned(diversity=5.0)).rounds
    25
    """
    if not method.takes_warmup:
        raise ConfigError(
            f"{type(method).__name__} trains parts of the network by its own rule, so it takes no warmup; "
            "use a method that trains the whole network, such as fedavg"
        )
    return Warmup(method, rounds, Learned() if masks is None else masks)


@dataclass(frozen=True)
class Warmup(Wrapper):
    """What ``with_warmup`` returns. State: the inner method's, and what is known of the clients' neurons."""

    rounds: Annotated[int, Field(ge=0)]
    masks: Masks

    def phase(self, state: Nest, round: int) -> str:
        warmup = state["warmup"]
        # with FedPeWS-Auto a plain round decides first whether there is a warmup
        is_decided = not isinstance(self.masks, Auto) or bool(warmup["auto"]["probed"])
        if round <= self.rounds and is_decided and not bool(warmup["over"]):
            return WARMUP
        return self.inner.phase(state["inner"], round)

    def client(self, phase: str) -> ClientHalf:
        if phase != WARMUP:
            return ClientWrapper(self.inner.client(phase))
        # the warmup replaces the phases of the inner method, and trains like its main one
        inner = self.inner.client("train")
        return LearnedClient(inner, self.masks) if isinstance(self.masks, Learned) else AssignedClient(inner)

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        device = next(iter(params.values())).device
        # without warmup rounds the neurons are not needed, so that the model is not traced
        shape = (total, net.graph.size) if self.rounds else (total, 0)
        theta = self.masks.first_theta if isinstance(self.masks, Learned) else 0.5
        return super().init(net, params, total) | {
            "warmup": {
                "over": torch.tensor(False),
                "auto": self.masks.begin() if isinstance(self.masks, Auto) else {},
                # one tensor for all clients: many thousands of them stay a few megabytes, quick to sum and to save
                "theta": torch.full(shape, theta, device=device),  # the last θ_i that each client shared
                "neurons": torch.zeros(shape, dtype=torch.bool, device=device),  # the last neurons of each
                "took_part": torch.zeros(total, dtype=torch.bool, device=device),
                # the clients of the last round, if it was a warmup round
                "last": torch.zeros(total, dtype=torch.bool, device=device),
            },
        }

    def evaluated_params(self, net: Network, state: Nest) -> Tree:
        """The global model; after a warmup round, with zeros where no client of that round owned the element."""
        params = self.inner.evaluated_params(net, state["inner"])
        last = state["warmup"]["last"]
        if self.masks.evaluate == "all" or not bool(last.any()):
            return params
        covered = net.graph.covered(state["warmup"]["neurons"][last])
        zeroed = {n: params[n] * mask for n, mask in covered.items() if n in net.trainable}
        return {**params, **zeroed}

    def measure(self, net: Network, state: Nest) -> dict[str, float]:
        """The inner method's columns, and ``dead``: neurons whose weights are all zero, which cannot learn."""
        columns = self.inner.measure(net, state["inner"])
        if self.masks.unowned == "keep" or not self.rounds:
            return columns
        return columns | {"dead": int(net.graph.is_zero(pick(self.params(state), net.trainable)).sum())}

    def last_owned(self, state: Nest) -> dict[int, Tensor]:
        """The neurons each client owned in its last warmup round."""
        warmup = state["warmup"]
        return {
            client: warmup["neurons"][client] for client in warmup["took_part"].nonzero().flatten().tolist()
        }

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        masks, took_part = self.masks, state["warmup"]["took_part"]
        is_warm = self.phase(state, cohort.round) == WARMUP
        # ``masked``: methods with a state of their own (SCAFFOLD) then count the owners of each element
        inner = self.inner.downloads(net, state["inner"], replace(cohort, masked=is_warm or cohort.masked))
        if not is_warm:
            return inner
        if not isinstance(masks, Learned):
            assigned = [masks.assign(net.graph, client, cohort).to(net.device) for client in cohort.clients]
            return [replace(d, phase=WARMUP, neurons=n) for d, n in zip(inner, assigned, strict=True)]
        theta = self.mean_theta(state, cohort.run_seed)

        def add_theta(download: Download, new: int | None) -> Download:
            extra = {**download.extra, THETA: {"neurons": theta}}
            if new is not None:
                # a new client's first scores are drawn here, so that a site needs no seed
                (start,) = draw_starts(masks, net.graph.size, [new], cohort.run_seed).to(theta)
                extra["start"] = {"neurons": start}
            return replace(download, phase=WARMUP, extra=extra)

        is_known = took_part[list(cohort.clients)].tolist() if masks.start_spread else [True] * len(inner)
        new = [None if known else client for client, known in zip(cohort.clients, is_known, strict=True)]
        return change_each(inner, new, add_theta)

    def mean_theta(self, state: Nest, seed: int) -> Tensor:
        """θ_g, the mean over all N clients; a client that has not uploaded yet has the θ of `Learned.newcomer`."""
        theta: Tensor = state["warmup"]["theta"]
        new = (~state["warmup"]["took_part"]).nonzero().flatten()
        assert isinstance(self.masks, Learned), "only learned masks have probabilities"
        if self.masks.newcomer == "start" and len(new):
            starts = draw_starts(self.masks, theta.shape[1], new.tolist(), seed).to(theta)
            theta = theta.index_copy(0, new, torch.sigmoid(starts))
        return theta.mean(0)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        masks, warmup, round = self.masks, dict(state["warmup"]), uploads[0].round
        is_warm = self.phase(state, round) == WARMUP
        if is_warm and masks.unowned == "zero":
            average = replace(average, zero_unowned=True)
        new = {"inner": self.inner.update(net, state["inner"], uploads, average), "warmup": warmup}
        warmup["last"] = torch.zeros_like(warmup["last"])
        if not is_warm:
            if isinstance(masks, Auto) and not bool(warmup["auto"]["probed"]) and round <= self.rounds:
                before = pick(self.params(state), net.trainable)
                cosine = masks.compare(before, [upload.params for upload in uploads])
                warmup["auto"], over = masks.decide(warmup["auto"], cosine)
                warmup["over"] = torch.tensor(over)
            return new
        clients = torch.tensor([upload.client for upload in uploads], device=net.device)
        warmup["took_part"] = warmup["took_part"].index_fill(0, clients, True)
        warmup["last"].index_fill_(0, clients, True)
        # in place: a copy of these tables would cost as much as there are clients in the federation
        owned = torch.stack([upload.neurons for upload in uploads if upload.neurons is not None])
        warmup["neurons"].index_copy_(0, clients, owned)  # (clients, neurons)
        if isinstance(masks, Learned):
            # θ itself, or only the neurons that the client uploads
            shared = [
                upload.extra[THETA]["neurons"] if THETA in upload.extra else neurons.float()
                for upload, neurons in zip(uploads, owned, strict=True)
            ]
            warmup["theta"].index_copy_(0, clients, torch.stack(shared))
        if isinstance(masks, Auto):
            # the clients' training losses, never test data: this decides when the warmup ends
            loss = sum(upload.loss for upload in uploads) / len(uploads)
            warmup["auto"], over = masks.watch(warmup["auto"], loss)
            warmup["over"] = torch.tensor(over)
        return new
