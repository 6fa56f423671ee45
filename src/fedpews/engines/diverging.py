"""Clients that diverge are detected in the round in which it happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedpews.engines.engine import Diverged, Done, Job
from fedpews.errors import ClientDiverged
from fedpews.neurons.network import Network
from fedpews.trees import leaves, stacks

LIMIT = 1e15
"""The largest weight from which training can continue: the square of a weight 20,000 times as large is infinite."""

SQUARES = LIMIT**2
"""The same for squares: running variances, second moments."""


def sort_out(net: Network, outcomes: Sequence[Done | Diverged]) -> tuple[list[Done], list[Diverged]]:
    """The results that can be averaged, and those that cannot: not finite, or so large that the next step would not be.

    A client's loss may still be finite when its weights or its memory are not, and an average with one such client
    makes all others diverge in the next round.
    """
    finished = [outcome for outcome in outcomes if isinstance(outcome, Done)]
    limits = dict.fromkeys(net.trainable, LIMIT)
    # tensors of one name and shape are stacked: with many small clients calls cost more than numbers
    alike: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
    for i, done in enumerate(finished):
        tensors = [(name, value, limits.get(name, SQUARES)) for name, value in done.upload.params.items()]
        for kept in (done.upload.extra, done.memory):
            tensors += [(name, value, SQUARES) for name, value in leaves(kept)]
        for name, value, limit in tensors:
            if value.is_floating_point() and value.numel():
                key = (name, limit, value.shape, value.dtype, value.device)
                alike.setdefault(key, []).append((i, value))
    beyond: dict[int, str] = {}  # index of a result -> the first of its tensors that is too large
    for (name, limit, *_), members in alike.items():
        rows = iter(members)
        for stacked in stacks([value for _, value in members]):
            # torch.aminmax would read them once instead of twice, and takes ten times as long
            for size, (i, _) in zip(
                stacked.view(len(stacked), -1).abs().amax(1).tolist(), rows, strict=False
            ):
                # NaN is no smaller than the limit either
                if not size <= limit:
                    beyond.setdefault(i, name)
    bad = [outcome for outcome in outcomes if isinstance(outcome, Diverged)]
    for i, name in sorted(beyond.items()):
        reason = f"{name} is not finite any more, or beyond {LIMIT:g}"
        bad.append(Diverged(finished[i].seed, finished[i].client, reason))
    return [done for i, done in enumerate(finished) if i not in beyond], bad


def explain(bad: Sequence[Diverged], jobs: Sequence[Job]) -> ClientDiverged:
    """The error that names the client that diverged, the round, and what to do."""
    job = next(job for job in jobs if (job.seed, job.client) == (bad[0].seed, bad[0].client))
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return ClientDiverged(
        f"client {job.client} diverges in round {job.download.round} of seed {job.seed}: {bad[0].reason}{more}; lower "
        f"train.lr (now {job.lr:g}), check the scale of its inputs, or set train.diverged to 'leave-out'"
    )
