"""FedWeIT: shared weights, local weights, and a weighted sum of other clients' weights (Yoon et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Rate, Upload, Work
from fedpews.methods.fedavg import by_row, weight_names
from fedpews.methods.server_optimizers import SGD, ServerOptimizer
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative, Share
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "fedweit")
@dataclass(frozen=True)
class FedWeIT(Method, ClientHalf):
    """Every client's weights are θ = B⊙σ(m) + A + Σ_j α_j·A_j: shared, own, and other clients' own.

    B comes from the server and m is one number per output unit (row); A is the client's own, sparse by
    λ₁‖A‖₁; the A_j of the others come with the download and are frozen, weighed by α_j, one per layer. A client
    trains B, m, A and α by SGD on the loss + λ₁‖A‖₁ + λ₂‖B − B_g‖², and uploads the rows of B with the largest
    |m| and A where |A| > λ₁; the server averages B over those who sent it. Biases and norm layers stay at the
    client. A starts at B/3 as in the reference, m and α at 0. The reference's drift term compares with earlier
    tasks; with one task per client it is compared with the server's B. The download grows with the clients.

    Args:
        sparsity: λ₁, the L1 penalty on a client's own weights A.
        drift: λ₂, the penalty on the distance between B and the server's B.
        keep: share of the rows of B that are uploaded, in each layer.

    >>> FedWeIT(keep=0.5).personalised
    True
    """

    personalised = True

    sparsity: NotNegative = 1e-3
    drift: NotNegative = 0.01
    keep: Share = 0.7
    server: ServerOptimizer = field(default=SGD(), kw_only=True)

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return self.server.init(net, params) | {"adaptive": {}}

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        known: dict[str, Tree] = state["adaptive"]
        sent = []
        for client in cohort.clients:
            # a new client gets a first version of everything that stays at the client
            met = str(client) in known
            params = trees.pick(state["params"], weight_names(net)) if met else state["params"]
            others = [j for j in range(cohort.total) if j != client]
            extra = {f"adaptive-{k}": known[str(j)] for k, j in enumerate(others) if str(j) in known}
            sent.append(Download(cohort.round, "train", cohort.total, params, extra=extra))
        return sent

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        base = trees.pick(download.params, weight_names(net))
        if memory is None:
            count = download.total - 1
            memory = {
                "gates": {name: value.new_zeros(len(value)) for name, value in base.items()},
                "adaptive": {name: value / 3 for name, value in base.items()},
                "attention": {name: value.new_zeros(count) for name, value in base.items()},
                "rest": {n: value for n, value in download.params.items() if n not in base},
            }
        return memory | {"base": base, "anchor": base, "others": _others(download, base)}

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        loss, grads, buffers = net.gradients(_compose(local) | local["rest"], batch)
        base, gates, adaptive = dict(local["base"]), dict(local["gates"]), dict(local["adaptive"])
        attention = dict(local["attention"])
        for name, m in local["gates"].items():
            B, A, slope, others = base[name], adaptive[name], grads[name], local["others"][name]
            open = torch.sigmoid(m)
            pull = 2 * self.drift * (B - local["anchor"][name])
            base[name] = B - lr * (slope * by_row(open, B) + pull)
            gates[name] = m - lr * (slope * B).flatten(1).sum(1) * open * (1 - open)
            adaptive[name] = A - lr * (slope + self.sparsity * torch.sign(A))
            attention[name] = attention[name] - lr * (slope * others).flatten(1).sum(1)
        rest = local["rest"]
        rest = rest | {n: rest[n] - lr * grads[n] for n in net.trainable if n in rest} | buffers
        moved = {"base": base, "gates": gates, "adaptive": adaptive, "attention": attention, "rest": rest}
        return local | moved, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        sparse = {n: torch.where(A.abs() > self.sparsity, A, 0.0) for n, A in local["adaptive"].items()}
        mask = {n: by_row(_largest(m, self.keep), local["base"][n]) for n, m in local["gates"].items()}
        upload = work.upload(download, local["base"], mask).adding({"adaptive": sparse})
        return {key: local[key] for key in ("gates", "adaptive", "attention", "rest")}, upload

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        local = self.start(net, download, memory)
        rest: Tree = local["rest"]
        return _compose(local) | rest

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        old = state["params"]
        values = [upload.params for upload in uploads]
        aggregate = old | average(values, trees.pick(old, weight_names(net)))
        adaptive = {str(upload.client): upload.extra["adaptive"] for upload in uploads}
        moved = self.server.move(net, state, aggregate, values, average)
        return moved | {"adaptive": state["adaptive"] | adaptive}


def _compose(local: Nest) -> Tree:
    """θ = B⊙σ(m) + A + Σ_j α_j·A_j."""
    theta = {}
    for name, B in local["base"].items():
        others = local["others"][name]  # (clients − 1, *shape)
        mixed = (local["attention"][name].view(-1, *[1] * B.dim()) * others).sum(0)
        theta[name] = B * by_row(torch.sigmoid(local["gates"][name]), B) + local["adaptive"][name] + mixed
    return theta


def _others(download: Download, base: Mapping[str, Tensor]) -> Tree:
    """The A_j of the other clients, zero for one that has not uploaded yet: (clients − 1, *shape)."""
    sent = [download.extra.get(f"adaptive-{k}", {}) for k in range(download.total - 1)]
    return {
        n: torch.stack([tree.get(n, torch.zeros_like(B)) for tree in sent])
        if sent
        else B.new_zeros(0, *B.shape)
        for n, B in base.items()
    }


def _largest(m: Tensor, part: float) -> Tensor:
    """Which rows have the largest |m|; of equals the first."""
    kept = m.abs().argsort(descending=True, stable=True)[: max(1, round(part * len(m)))]
    return torch.zeros_like(m, dtype=torch.bool).index_fill(0, kept, True)
