"""FedAvg and FedPeWS on the synthetic data, written a second time without the library: is a number ours or our code's?

    python benchmarks/reference.py                 FedPeWS, first column of Table 1, six seeds: 3 minutes on one core
    python benchmarks/reference.py --method fedavg
    python benchmarks/reference.py --one-shape     all clusters of one shape

Only the data are the library's. All seeds and clients train side by side in batched matrix products, with numbers
drawn by themselves, so single seeds differ from the library's; means over seeds should not.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from statistics import fmean, stdev

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedpews.data.synthetic import TILTED, sample

CLASSES = 4
WIDTHS = (5, 32, 64, 128, 32, CLASSES)
HIDDEN = WIDTHS[1:-1]
CLIENTS, BATCH, TARGET = 2, 32, 0.99

Layers = list[tuple[Tensor, Tensor]]
"""A weight (lanes, inputs, outputs) and a bias (lanes, outputs) per layer; a lane is a seed, or a client of one."""


def forward(layers: Layers, x: Tensor, gates: list[Tensor] | None = None) -> Tensor:
    for number, (weight, bias) in enumerate(layers):
        x = torch.baddbmm(bias.unsqueeze(1), x, weight)
        if number < len(HIDDEN):
            x = x.relu() if gates is None else x.relu() * gates[number].unsqueeze(1)
    return x  # (lanes, batch, classes)


def loss_of(layers: Layers, x: Tensor, y: Tensor, gates: list[Tensor] | None = None) -> Tensor:
    """Σ over lanes of their mean loss: lanes have no weight in common, so each gets its own gradient."""
    return cross_entropy(forward(layers, x, gates).flatten(0, 1), y.flatten(), reduction="sum") / BATCH


def start(seeds: int) -> Layers:
    """torch's own way to start, one network a seed."""
    networks = []
    for seed in range(seeds):
        torch.manual_seed(1000 + seed)
        networks.append([torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)])
    return [
        (torch.stack([n.weight.detach().T for n in layer]), torch.stack([n.bias.detach() for n in layer]))
        for layer in zip(*networks, strict=True)
    ]


def average(old: Tensor, new: Tensor, owned: Tensor) -> Tensor:
    """Over the clients that own an element; (seeds, clients, ...) → (seeds, ...). What nobody owns stays."""
    owners = owned.sum(1)
    return torch.where(owners > 0, (new * owned).sum(1) / owners.clamp_min(1), old)


def run(method: str, seeds: int, rounds: int, warmup: int, diversity: float, one_shape: bool) -> Tensor:
    """Accuracy on the test set after every round: (rounds, seeds)."""
    shape = TILTED if one_shape else None
    train = [sample(8000, seed % 3, "train", shape) for seed in range(seeds)]
    tests = [sample(1600, seed % 3, "test", shape) for seed in range(seeds)]
    # even classes to one client, odd ones to the other
    parts = [(x[y % 2 == client], y[y % 2 == client]) for x, y in train for client in range(CLIENTS)]
    x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
    test_x, test_y = torch.stack([x for x, _ in tests]), torch.stack([y for _, y in tests])
    lanes, size = len(parts), len(parts[0][0])
    first_row = (torch.arange(lanes) * size).unsqueeze(1)

    draw = torch.Generator().manual_seed(7)
    scores = torch.randn(lanes, sum(HIDDEN), generator=draw)  # s_i, each client's own
    # θ_g begins as ½, and a client takes its own part out of it
    others = 1 - torch.sigmoid(scores)
    layers, accuracies = start(seeds), []
    for round in range(1, rounds + 1):
        masked = method == "pews" and round <= warmup
        local = [(w.repeat_interleave(CLIENTS, 0), b.repeat_interleave(CLIENTS, 0)) for w, b in layers]
        tensors = [tensor.requires_grad_() for layer in local for tensor in layer]
        order = torch.rand(lanes, size, generator=draw).argsort(1)
        for rows in order.split(BATCH, 1):
            batch = x[first_row + rows], y[first_row + rows]
            gates = None
            if masked:
                theta = torch.sigmoid(scores)
                open_ = (torch.rand(scores.shape, generator=draw) < theta).float()
                drawn = [part.clone().requires_grad_() for part in open_.split(HIDDEN, 1)]
                frozen = [(w.detach(), b.detach()) for w, b in local]
                slope = torch.cat(torch.autograd.grad(loss_of(frozen, *batch, drawn), drawn), 1) * open_
                scores = scores - 0.1 * (slope - 2 * diversity * (theta - others)) * theta * (1 - theta)
                fresh = torch.rand(scores.shape, generator=draw) < torch.sigmoid(scores)
                gates = list(fresh.float().split(HIDDEN, 1))
            gradients = torch.autograd.grad(loss_of(local, *batch, gates), tensors)
            with torch.no_grad():
                torch._foreach_add_(tensors, gradients, alpha=-0.001)
        with torch.no_grad():
            theta = torch.sigmoid(scores)
            own = (theta >= 0.5).float() if masked else torch.ones_like(theta)
            ends = [torch.ones(lanes, WIDTHS[0]), *own.split(HIDDEN, 1), torch.ones(lanes, CLASSES)]
            new = []
            for (w, b), (mine_w, mine_b), (reads, makes) in zip(layers, local, pairwise(ends), strict=True):
                both = (reads.unsqueeze(2) * makes.unsqueeze(1)).unflatten(0, (seeds, CLIENTS))
                ones = makes.unflatten(0, (seeds, CLIENTS))
                new.append((average(w, mine_w.view_as(both), both), average(b, mine_b.view_as(ones), ones)))
            layers = new
            others = theta.unflatten(0, (seeds, CLIENTS)).flip(1).flatten(0, 1)
            accuracies.append((forward(layers, test_x).argmax(2) == test_y).float().mean(1))
    return torch.stack(accuracies)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=("fedavg", "pews"), default="pews")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--warmup", type=int, default=25, help="W")
    parser.add_argument("--diversity", type=float, default=5.0, help="λ")
    parser.add_argument("--one-shape", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = run(**vars(given))
    reached = [next((t for t, a in enumerate(seed, 1) if a >= TARGET), None) for seed in found.T.tolist()]
    print(f"rounds to {TARGET:.0%}, seed by seed: {reached}")
    known = [t for t in reached if t is not None]
    if len(known) > 1:
        print(f"mean {fmean(known):.1f} ± {stdev(known):.1f} ({len(known)} of {len(reached)} seeds)")
    shown = ", ".join(f"{t}: {100 * found[t - 1].mean():.1f}" for t in range(10, len(found) + 1, 10))
    print(f"mean accuracy %: {shown}")


if __name__ == "__main__":
    main()
