"""Clients that diverge are detected in the round in which it happens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedpews.engines.engine import Diverged, Done, Job
from fedpews.errors import ClientDiverged
from fedpews.neurons.network import Network
from fedpews.trees import flatten, leaves, stacks

LIMIT = 1e15
"""The largest weight from which training can continue: the square of a weight 20,000 times as large is infinite."""

LIMIT_OF_SQUARES = LIMIT**2
"""The same for squares: running variances, second moments."""


def sort_out(net: Network, outcomes: Sequence[Done | Diverged]) -> tuple[list[Done], list[Diverged]]:
    """The results that can be averaged, and those that cannot: not finite, or so large that the next step would not be.

    A client's loss may still be finite when its weights or its memory are not, and an average with one such client
    makes all others diverge in the next round.
    """
    finished = [outcome for outcome in outcomes if isinstance(outcome, Done)]
    if len(finished) == len(outcomes) > 0 and _all_small(net, finished):
        return finished, []
    named = [[*_numbers(net, done)] for done in finished]
    sizes = iter(largest([value for each in named for _, value, _ in each]))
    good, bad = [], [outcome for outcome in outcomes if isinstance(outcome, Diverged)]
    for done, each in zip(finished, named, strict=True):
        # NaN is no smaller than the limit either
        beyond = [name for (name, _, limit), size in zip(each, sizes, strict=False) if not size <= limit]
        if beyond:
            bad.append(
                Diverged(done.seed, done.client, f"{beyond[0]} is not finite any more, or beyond {LIMIT:g}")
            )
        else:
            good.append(done)
    return good, bad


def _all_small(net: Network, finished: Sequence[Done]) -> bool:
    """Whether the numbers of all clients together have a length within the limits: then each number is, too."""
    flat = [
        flatten({"params": done.upload.params, "extra": dict(done.upload.extra), "memory": done.memory})
        for done in finished
    ]
    if any(layout != flat[0][1] for _, layout in flat):
        return False
    trained = set(net.trainable)
    limits = [LIMIT if name in trained else LIMIT_OF_SQUARES for name in finished[0].upload.params]
    limits += [LIMIT_OF_SQUARES] * (len(flat[0][0]) - len(limits))
    lengths: list[Tensor] = []
    most: list[float] = []
    for alike, limit in zip(zip(*(tensors for tensors, _ in flat), strict=True), limits, strict=True):
        if not alike[0].is_floating_point():
            continue
        for rows in stacks(alike):
            lengths.append(torch.linalg.vector_norm(rows).to("cpu", torch.float64))
            most.append(limit)
    norms = torch.stack(lengths).tolist() if lengths else []
    # NaN is no smaller than the limit either
    return all(length <= limit for length, limit in zip(norms, most, strict=True))


def _numbers(net: Network, done: Done) -> Iterator[tuple[str, Tensor, float]]:
    """Every tensor that a client sends or keeps, by name, with the largest value it may have."""
    trained = set(net.trainable)
    for name, value in done.upload.params.items():
        if value.is_floating_point() and value.numel():
            yield name, value, LIMIT if name in trained else LIMIT_OF_SQUARES
    for kept in (dict(done.upload.extra), done.memory):
        for name, value in leaves(kept):
            if value.is_floating_point() and value.numel():
                yield name, value, LIMIT_OF_SQUARES


def largest(tensors: Sequence[Tensor]) -> list[float]:
    """The largest absolute value in each tensor; NaN if it has one.

    >>> largest([torch.tensor([1.0, -3.0]), torch.tensor(2.0), torch.tensor([float("nan"), 0.0]), torch.tensor(-4.0)])
    [3.0, 2.0, nan, 4.0]
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[int]] = {}
    for i, value in enumerate(tensors):
        alike.setdefault((value.shape, value.dtype, value.device), []).append(i)
    sizes: list[Tensor] = []
    order: list[int] = []
    for indices in alike.values():
        order += indices
        for rows in stacks([tensors[i] for i in indices]):
            # torch.aminmax would read them once instead of twice, and takes ten times as long
            sizes.append(rows.view(len(rows), -1).abs().amax(1).to("cpu", torch.float64))
    by_index = dict(zip(order, torch.cat(sizes).tolist(), strict=True)) if sizes else {}
    return [by_index[i] for i in range(len(tensors))]


def explain(bad: Sequence[Diverged], jobs: Sequence[Job]) -> ClientDiverged:
    """The error that names the client that diverged, the round, and what to do."""
    job = next(job for job in jobs if (job.seed, job.client) == (bad[0].seed, bad[0].client))
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return ClientDiverged(
        f"client {job.client} diverges in round {job.download.round} of seed {job.seed}: {bad[0].reason}{more}; lower "
        f"train.lr (now {job.lr:g}), check the scale of its inputs, or set train.diverged to 'leave-out'"
    )
