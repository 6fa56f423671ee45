"""A federation small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Upload, Work
from fedpews.neurons.network import Batch, Network
from fedpews.seeds import fold, global_generator
from fedpews.trees import Nest, Tree

Samples = tuple[Tensor, Tensor]


def small_network() -> Network:
    """Three inputs, two hidden layers of four, three classes; always the same weights, and no neuron is dead."""
    with global_generator(0):
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    return Network(nn.Sequential(*layers), torch.zeros(1, 3))


def small_clients(count: int = 3, samples: int = 8) -> list[Samples]:
    """Clients with a class of their own each, of unequal sizes."""
    generator = torch.Generator().manual_seed(1)
    sizes = [samples + 2 * i for i in range(count)]
    return [
        (torch.randn(n, 3, generator=generator) + i, torch.full((n,), i % 3)) for i, n in enumerate(sizes)
    ]


@dataclass(frozen=True)
class Played:
    """What came of some rounds."""

    state: Nest
    memories: dict[int, Nest]
    params: list[Tree]  # the global model after each round
    downloads: list[list[Download]]
    uploads: list[list[Upload]]


@dataclass(frozen=True)
class Playground:
    """A federation small enough to follow by hand: every client sees its samples in order, a batch at a time.

    ``send``, ``reply`` and ``keep`` change a download, an upload, and a state or memory before they are used; ``half``
    changes each client half.
    """

    method: Method
    net: Network
    clients: Sequence[Samples]
    lr: float = 0.1
    batch_size: int = 4
    seed: int = 0
    weights: tuple[float, ...] | None = None  # of the clients in the average; equal by default
    send: Callable[[Download], Download] = lambda download: download
    reply: Callable[[Upload], Upload] = lambda upload: upload
    keep: Callable[[Nest], Nest] = lambda nest: nest
    half: Callable[[ClientHalf], ClientHalf] = lambda half: half

    def play(self, rounds: int, cohorts: Callable[[int], tuple[int, ...]] | None = None) -> Played:
        """So many rounds from the network's own start; ``cohorts`` says who takes part, by default all."""
        method, net, total = self.method, self.net, len(self.clients)
        state = self.keep(method.init(net, net.initial(), total))
        memories: dict[int, Nest] = {}
        played = Played(state, memories, [], [], [])
        for round in range(1, rounds + 1):
            chosen = tuple(range(total)) if cohorts is None else cohorts(round)
            cohort = Cohort(round, chosen, total, fold(self.seed, round, "server"), self.seed)
            half = self.half(method.client(method.phase(state, round)))
            downloads = method.downloads(net, state, cohort)
            uploads = []
            for client, download in zip(chosen, downloads, strict=True):
                memory, upload = self.turn(half, client, self.send(download), memories.get(client))
                memories[client] = self.keep(memory)
                uploads.append(self.reply(upload))
            state = self.keep(method.update(net, state, uploads, self.average(uploads)))
            played.params.append(method.params(state))
            played.downloads.append(downloads)
            played.uploads.append(uploads)
        return replace(played, state=state)

    def turn(
        self, half: ClientHalf, client: int, download: Download, memory: Nest | None
    ) -> tuple[Nest, Upload]:
        """One client's part of a round."""
        local, batches, noise = self.begin(half, client, download, memory)
        losses = []
        for batch, numbers in zip(batches, noise[:-1], strict=True):
            local, loss = half.step(self.net, local, batch, numbers, self.lr)
            losses.append(float(loss))
        mean = sum(losses) / len(losses)
        work = Work(client, len(self.clients[client][1]), len(batches), self.lr, mean, noise[-1])
        return half.finish(self.net, download, local, work)

    def begin(
        self, half: ClientHalf, client: int, download: Download, memory: Nest | None
    ) -> tuple[Nest, list[Batch], Tensor]:
        """The local state before the first step, the batches, and the noise: (steps + 1, numbers)."""
        x, y = self.clients[client]
        batches = [
            Batch(*part) for part in zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)
        ]
        generator = torch.Generator().manual_seed(fold(self.seed, download.round, client, "noise"))
        noise = torch.rand(len(batches) + 1, half.noise_size(self.net), generator=generator)
        if half.probes:
            probe = half.probe(self.net, download, memory)
            right = (self.net.predict(probe, x).argmax(1) == y).double().mean()
            download = download.with_accuracy(float(right))
        return half.start(self.net, download, memory), batches, noise

    def average(self, uploads: Sequence[Upload]) -> Average:
        weights = tuple(1.0 if self.weights is None else self.weights[u.client] for u in uploads)
        return Average(weights, tuple(upload.ownership(self.net) for upload in uploads))

    def partly(self, rounds: int) -> Played:
        """Rounds in which, after the first, one client after the other is missing."""
        total = len(self.clients)
        return self.play(
            rounds, lambda t: tuple(i for i in range(total) if t == 1 or total == 1 or i != t % total)
        )
