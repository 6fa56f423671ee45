"""A digest of a federation's data."""

from __future__ import annotations

import hashlib

import torch

from fedpews.data.federation import Federation
from fedpews.data.inputs import Inputs, Lazy, take
from fedpews.torch_private import tree_leaves


def digest(data: Federation) -> str:
    """A digest of all samples and of their clients."""
    state = hashlib.blake2b(digest_size=8)
    rows = [torch.cat(shares) for shares in (data.clients, data.test_clients, data.validation) if shares]
    for tensor in (*_leaves(data.x), data.y, *_leaves(data.test_x), data.test_y, *rows):
        state.update(str(tuple(tensor.shape)).encode())
        state.update(tensor.cpu().contiguous().numpy().data)
    state.update(str([len(client) for client in data.clients]).encode())
    return state.hexdigest()


def _leaves(x: Inputs) -> list[torch.Tensor]:
    """The tensors of inputs; of those that are read batch by batch, the first two samples stand for all."""
    return list(tree_leaves(take(x, slice(0, 2)) if isinstance(x, Lazy) else x))
