"""Personalised warmup via subnetworks, around any method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import (
    PARAMS,
    THETA,
    ClientHalf,
    ClientWrapper,
    Cohort,
    Download,
    Method,
    Rate,
    Upload,
    Work,
    Wrapper,
)
from fedpews.methods.subnetwork import AssignedClient, start_subnetwork, step_subnetwork
from fedpews.neurons.modules import differentiate
from fedpews.neurons.network import Batch, Network
from fedpews.trees import Nest, Tree, pick
from fedpews.warmup.masks import Auto, Learned, Masks, draw_starts

WARMUP = "warmup"

CLOSED = -1000.0
"""The score of a neuron that a client never has."""


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
            f"{type(method).__name__} trains parts of the network by its own rule, so it does not support a warmup; "
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
        masks = self.masks
        is_warm = self.phase(state, cohort.round) == WARMUP
        # ``masked``: methods with a state of their own (SCAFFOLD) then count the owners of each element
        inner = self.inner.downloads(net, state["inner"], replace(cohort, masked=is_warm or cohort.masked))
        if not is_warm:
            return inner
        if not isinstance(masks, Learned):
            assigned = [masks.assign(net.graph, client, cohort).to(net.device) for client in cohort.clients]
            return [replace(d, phase=WARMUP, neurons=n) for d, n in zip(inner, assigned, strict=True)]
        # θ_g, the mean over all N clients; a client that has not uploaded yet has the θ of `Learned.newcomer`
        each, took_part = state["warmup"]["theta"], state["warmup"]["took_part"]
        if masks.newcomer == "start" and not bool(took_part.all()):
            new = (~took_part).nonzero().flatten()
            starts = draw_starts(masks, each.shape[1], new.tolist(), cohort.run_seed).to(each)
            each = each.index_copy(0, new, torch.sigmoid(starts))
        theta = each.mean(0)
        # clients with the same download share the new one too, so that its size is measured once
        shared = {id(download): download for download in inner}
        for key, download in shared.items():
            extra = {**download.extra, THETA: {"neurons": theta}}
            shared[key] = replace(download, phase=WARMUP, extra=extra)
        sent = [shared[id(download)] for download in inner]
        is_known = took_part[list(cohort.clients)].tolist()
        for i, client in enumerate(cohort.clients):
            if masks.start_spread and not is_known[i]:
                # a new client's first scores are drawn here, so that a site needs no seed
                (start,) = draw_starts(masks, net.graph.size, [client], cohort.run_seed).to(theta)
                sent[i] = replace(sent[i], extra={**sent[i].extra, "start": {"neurons": start}})
        return sent

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


@dataclass(frozen=True)
class LearnedClient(ClientWrapper):
    """Algorithm 1: at every step first the mask scores s, then the weights of the neurons drawn by them."""

    masks: Learned

    def noise_size(self, net: Network) -> int:
        # a step draws twice: for the scores, and afresh for the weights
        return 2 * net.graph.size + self.inner.noise_size(net)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        like = next(iter(download.params.values()))
        if "start" in download.extra:
            first = download.extra["start"]["neurons"]
        else:
            first = like.new_full((net.graph.size,), self.masks.start)
        # a plain round before the warmup leaves a memory without scores
        known = memory if memory is not None and "scores" in memory else None
        scores = first if known is None else known["scores"]["neurons"]
        if download.neurons is not None:
            # of what the server lets it have: θ is exactly 0 elsewhere, and its gradient too
            scores = torch.where(download.neurons, scores, CLOSED)
        # the θ of this client in θ_g: the last it shared
        if known is not None:
            shared = known["shared"]["neurons"]
        elif self.masks.newcomer == "start":
            shared = torch.sigmoid(first)
        else:
            shared = torch.full_like(first, self.masks.first_theta)
        total, mean = download.total, download.extra[THETA]["neurons"]
        # θ_{g∖i}, the mean over the other clients; a client alone has no others
        others = ((total * mean - shared) / (total - 1)).clamp(0, 1) if total > 1 else None
        once = {"neurons": torch.full_like(scores, torch.nan)} if self.masks.draw == "round" else {}
        return {
            "inner": start_subnetwork(self.inner, net, download, None if memory is None else memory["inner"]),
            "scores": {"neurons": scores},
            "others": {} if others is None else {"neurons": others},
            # with one draw a round, the numbers of the first step; NaN until then, because a compiled step cannot add
            # keys to its state
            "drawn": once,
        }

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        h = net.graph.size
        first, second = noise[:h], noise[h : 2 * h]
        if local["drawn"]:
            kept = local["drawn"]["neurons"]
            first = second = torch.where(kept.isnan(), first, kept)
            local = local | {"drawn": {"neurons": first}}
        # first the scores, at a fresh draw of the gates and with the weights frozen
        scores: Tensor = local["scores"]["neurons"]
        params: Mapping[str, Tensor] = local["inner"][PARAMS]
        gates = (first < torch.sigmoid(scores)).to(scores.dtype)
        slope: Tensor
        # with respect to the gates alone: the weights are constants here, and this pass's buffers are dropped
        _, _, slope = differentiate(lambda gates: net.gated(gates).loss(params, batch), gates)
        scores = step_scores(self.masks, scores, slope, gates, local["others"].get("neurons"))
        gates = (second < torch.sigmoid(scores)).to(scores.dtype)  # a fresh draw for the weights
        inner, loss = step_subnetwork(self.inner, net, local["inner"], batch, noise[2 * h :], lr, gates)
        return local | {"inner": inner, "scores": {"neurons": scores}}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        h = net.graph.size
        theta = torch.sigmoid(local["scores"]["neurons"])
        if self.masks.upload_mask == "thresholded":
            neurons = theta >= 0.5
        else:
            neurons = (local["drawn"]["neurons"] if local["drawn"] else work.noise[:h]) < theta
        shared = theta if self.masks.upload == "probabilities" else neurons.to(theta.dtype)
        # the first 2h numbers are for the masks, the others for the inner method
        rest = replace(work, noise=work.noise[2 * h :], neurons=neurons)
        memory, upload = self.inner.finish(net, download, local["inner"], rest)
        if self.masks.upload == "probabilities":
            upload = upload.adding({THETA: {"neurons": theta}})
        return {"inner": memory, "scores": local["scores"], "shared": {"neurons": shared}}, upload


def step_scores(
    masks: Learned, scores: Tensor, slope: Tensor, gates: Tensor, others: Tensor | None
) -> Tensor:
    """Procedure I: s ← s − η_s·(θ·∂f/∂gate − 2λ(θ_i − θ_{g∖i}))·σ′(s).

    The gradient passes straight through the draw. A mask that multiplies the parameters has none where it
    is zero; the mean of that over draws is the factor θ. The diversity term moves the scores of all neurons.

    Args:
        slope: (neurons,) ∂f/∂gate at the gates that were drawn.
        others: (neurons,) θ_{g∖i}, the mean over the other clients; None for a client alone.
    """
    theta = scores.sigmoid()
    if masks.gradient != "gate":
        slope = slope * (theta if masks.gradient == "theta" else gates)
    if others is not None:
        slope = slope - 2 * masks.diversity * (theta - others)
    # θ(1 − θ) is σ′(s)
    return scores - masks.mask_lr * slope * theta * (1 - theta)
