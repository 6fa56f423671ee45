"""FjORD: ordered dropout, a random width for every batch (Horváth et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedpews.methods.contract import ClientHalf, Cohort, Download, Upload, Work
from fedpews.methods.local_sgd import LocalSGD
from fedpews.methods.subnetwork import start_subnetwork, step_subnetwork, window
from fedpews.neurons.network import Batch, Network
from fedpews.options import Share
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "fjord")
@dataclass(frozen=True)
class FjORD(LocalSGD):
    """Every batch trains the first ⌈p·K⌉ units of each layer, with p drawn from the widths a client can carry.

    A client's tier is the largest width it can carry. The server averages each element over the clients whose
    tier covers it. With the one tier 1 this is FedAvg. With distillation α a step descends on
    (1−α)·CE(f_p) + α·KL(f_max ‖ f_p), where f_max is the output at the client's tier and carries no gradient.

    Args:
        tiers: the tier of client 0, 1, …, again from the start when there are more clients; all together they
            are the widths that batches are drawn from.
        distill: α, the weight of the distillation; 0 for none.

    >>> FjORD(tiers=(1.0, 0.5)).distill
    0.0
    """

    takes_warmup: ClassVar[bool] = False

    tiers: Annotated[tuple[Share, ...], Field(min_length=1)] = (1.0, 0.8, 0.6, 0.4, 0.2)
    distill: Annotated[float, Field(ge=0, le=1)] = 0.0

    def client(self, phase: str) -> ClientHalf:
        return FjordClient(self)

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        whole = self.broadcast(state, cohort)
        tiers = [self.tiers[client % len(self.tiers)] for client in cohort.clients]
        return [replace(whole, neurons=window(net.graph, tier, device=net.device)) for tier in tiers]

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        if not self.distill:
            return super().gradient(net, local, batch)
        teacher = log_softmax(local["teacher"]["outputs"], 1)

        def term(features: Tensor, outputs: Tensor) -> Tensor:
            learnt = kl_div(log_softmax(outputs, 1), teacher, reduction="none", log_target=True).sum(1)
            return self.distill * (learnt - net.sample_loss(outputs, batch.y))

        return net.gradients(local["params"], batch, term)


@dataclass(frozen=True)
class FjordClient(ClientHalf):
    """Draws a width for every batch."""

    method: FjORD

    def noise_size(self, net: Network) -> int:
        return 1

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        assert download.neurons is not None, "the server half assigns the neurons"
        like = next(iter(download.params.values()))
        tiers = sorted(set(self.method.tiers))
        widths = [window(net.graph, tier, device=net.device) for tier in tiers]
        fitting = sum(bool((units <= download.neurons).all()) for units in widths)
        return {
            "inner": start_subnetwork(self.method, net, download, None),
            "widths": {"gates": torch.stack(widths).to(like)},  # (tiers, neurons)
            "tier": {
                "gates": download.neurons.to(like),
                "fitting": torch.tensor(fitting, device=like.device),
            },
        }

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        widths, tier, inner = local["widths"]["gates"], local["tier"], local["inner"]
        drawn = (noise[0] * tier["fitting"]).floor()
        gates = (
            (torch.arange(len(widths), device=widths.device) == drawn).to(widths.dtype)[:, None] * widths
        ).sum(0)
        if self.method.distill:
            with torch.no_grad():
                _, outputs, _ = net.gated(tier["gates"]).features(inner["params"], batch.x)
            inner = inner | {"teacher": {"outputs": outputs}}
        inner, loss = step_subnetwork(self.method, net, inner, batch, noise, lr, gates)
        inner.pop("teacher", None)
        return local | {"inner": inner}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        return self.method.finish(net, download, local["inner"], replace(work, neurons=download.neurons))
