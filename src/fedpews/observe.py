"""What a round shows besides its scores: who owned which neurons, the preferences θ, and whether updates agree.

Pure functions of what the clients uploaded, small enough to be kept for every round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedpews.methods.contract import THETA, Download, Upload
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Network
from fedpews.results.masks import BINS, Ownership
from fedpews.trees import stack

COMPARED = 8
"""Of a larger cohort, the updates of so many clients, evenly spread, are compared: 28 pairs."""

ELEMENTS = 2**18
"""Of a larger tensor, about so many elements, evenly spread, are compared: a cosine to two or three digits."""

EACH_ROUND_UP_TO = 100
"""Up to this round masks are kept of every round, from then on of every tenth."""


def observe_neurons(
    net: Network, seed: int, round: int, uploads: Sequence[Upload], total: int
) -> Ownership | None:
    """Who owned which neurons, and how θ is spread; None in a round without neuron masks, or one not kept."""
    if any(upload.neurons is None for upload in uploads) or (round > EACH_ROUND_UP_TO and round % 10):
        return None
    owned = torch.stack([upload.neurons for upload in uploads if upload.neurons is not None])
    shared = [upload.extra[THETA]["neurons"] for upload in uploads if THETA in upload.extra]
    theta = _histogram(net.graph, torch.stack(shared)) if shared else None
    clients = tuple(upload.client for upload in uploads)
    return Ownership.of(seed, round, clients, owned.cpu().numpy(), theta, total)


def _histogram(graph: NeuronGraph, theta: Tensor) -> list[list[int]]:
    """How many θ of each layer lie in each of ``BINS`` equal parts of 0 to 1; ``theta`` is (clients, neurons)."""
    layer = torch.repeat_interleave(
        torch.arange(len(graph.layers), device=theta.device),
        torch.tensor([layer.size for layer in graph.layers], device=theta.device),
    )
    # (clients, neurons): the bin of each θ, numbered through all layers, so that one count serves them all
    part = (theta * BINS).long().clamp(0, BINS - 1) + BINS * layer
    counts = torch.bincount(part.flatten(), minlength=BINS * len(graph.layers))
    found: list[list[int]] = counts.view(len(graph.layers), BINS).tolist()
    return found


def update_cosine(
    net: Network,
    uploads: Sequence[Upload],
    downloads: Sequence[Download],
    masks: Sequence[Mapping[str, Tensor] | None],
) -> float | None:
    """The mean cosine between two clients' updates, on the elements both own; below 0 they pull apart.

    None where no two clients have anything in common, or nothing moved.

    Args:
        masks: of each upload, the elements it owns; None is all of them.
    """
    # evenly spread over the cohort: no draw, so a resumed run compares the same clients
    step = max(1, -(-len(uploads) // COMPARED))
    chosen = range(0, len(uploads), step)
    if len(chosen) < 2:
        return None
    names = [
        name for name in net.trainable if all(_comparable(uploads[i], downloads[i], name) for i in chosen)
    ]
    # (i, j): the inner product of two updates; double, as it adds up millions of small products
    inner = torch.zeros(len(chosen), len(chosen), dtype=torch.float64)
    norms = torch.zeros_like(inner)  # (i, j): ‖update of i‖² on what j owns too
    for some in _blocks(net, names):
        # (clients, elements) of several parameters at once
        moved = torch.cat([_moved(name, [(uploads[i], downloads[i]) for i in chosen]) for name in some], 1)
        moved = moved.cpu().double()
        owned = [_owned(name, [masks[i] for i in chosen], uploads[chosen[0]].params[name]) for name in some]
        if all(part is None for part in owned):
            inner += (products := moved @ moved.T)
            norms += products.diagonal()[:, None]
            continue
        every = [
            torch.ones(len(chosen), _sampled(net.shapes[name].numel()), dtype=torch.bool)
            if part is None
            else part
            for name, part in zip(some, owned, strict=True)
        ]
        kept = torch.cat(every, 1).view(torch.uint8).double()
        # zeros outside what a client owns leave exactly the elements that both own in the product
        moved = moved * kept
        inner += moved @ moved.T
        norms += moved.square() @ kept.T
    pairs = torch.triu_indices(len(chosen), len(chosen), 1)
    lengths = (norms * norms.T).sqrt()[pairs[0], pairs[1]]
    cosines = (inner[pairs[0], pairs[1]] / lengths)[lengths > 0]
    # six digits: sums in another order, on another number of threads, still write the same bytes
    return round(float(cosines.mean().clamp(-1, 1)), 6) if len(cosines) else None


def _blocks(net: Network, names: Sequence[str]) -> Iterator[list[str]]:
    """The names, as many together as make up a few megabytes: small tensors cost more calls than numbers."""
    block: list[str] = []
    size = 0
    for name in names:
        count = _sampled(net.shapes[name].numel())
        if block and size + count > ELEMENTS:
            yield block
            block, size = [], 0
        block, size = [*block, name], size + count
    if block:
        yield block


def _step(elements: int) -> int:
    """Every how many elements of a tensor are compared."""
    return max(1, -(-elements // ELEMENTS))


def _sampled(elements: int) -> int:
    return -(-elements // _step(elements))


def _rows(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors, elements): those elements of each that are compared."""
    step = _step(tensors[0].numel())
    if step == 1:
        return stack(tensors).flatten(1)
    return torch.stack([tensor.reshape(-1)[::step] for tensor in tensors])


def _moved(name: str, pairs: Sequence[tuple[Upload, Download]]) -> Tensor:
    """(clients, elements): how far each client's parameter is from where it started."""
    ends = _rows([upload.params[name].detach() for upload, _ in pairs])
    starts = [download.params[name] for _, download in pairs]
    # most methods send the same to everybody: one tensor to subtract instead of a stack of copies
    alike = all(start is starts[0] for start in starts)
    return ends - _rows(starts[:1] if alike else starts)


def _comparable(upload: Upload, download: Download, name: str) -> bool:
    mine, start = upload.params.get(name), download.params.get(name)
    # FedPM sends bits where it got scores: no update to compare
    same = mine is not None and start is not None and mine.shape == start.shape
    return same and mine is not None and mine.is_floating_point()


def _owned(name: str, masks: Sequence[Mapping[str, Tensor] | None], like: Tensor) -> Tensor | None:
    """(clients, elements) bool; None where everybody owns everything."""
    parts = [None if mask is None else mask.get(name) for mask in masks]
    if all(part is None for part in parts):
        return None
    if all(part is not None and part.shape == parts[0].shape for part in parts):  # type: ignore[union-attr]
        # with many clients one call for all of them
        whole = stack([part for part in parts if part is not None])
        missing = [1] * (like.dim() + 1 - whole.dim())
        whole = whole.reshape(len(parts), *missing, *whole.shape[1:]).expand(len(parts), *like.shape)
        return (whole != 0).flatten(1)[:, :: _step(like.numel())].cpu()
    everything = torch.ones((), dtype=torch.bool, device=like.device)
    return _rows([(everything if part is None else part != 0).expand_as(like) for part in parts]).cpu()


def describe_federation(
    net: Network,
    names: Sequence[str],
    classes: Sequence[str],
    counts: Tensor | None,
    total: int,
    masked: bool,
) -> dict[str, Any]:
    """Who takes part and what each holds, for the run's folder; layers where clients own neurons.

    Args:
        counts: (clients, classes), or None where the server has nobody's samples.
    """
    return {
        "clients": total,
        "client_names": list(names),
        "class_names": list(classes),
        "counts": None if counts is None else counts.tolist(),
        "layers": [
            {"name": layer.name, "start": layer.start, "size": layer.size} for layer in net.graph.layers
        ]
        if masked
        else [],
    }
