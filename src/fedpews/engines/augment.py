"""Random changes of a training batch: a pure function of the batch and a seed, so that a run can be repeated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedpews.errors import ConfigError, first_line, nearest
from fedpews.neurons.network import Batch
from fedpews.seeds import fold
from fedpews.user_code import load_named

Augment = Callable[[Batch, int], Batch]
"""(batch, seed) -> a batch of the same shapes."""

MARGIN = 8
"""A crop moves an image by up to an eighth of its side."""


def flip(batch: Batch, seed: int) -> Batch:
    """Each image mirrored left to right with probability one half, a mask for its pixels with it."""
    generator = torch.Generator().manual_seed(seed)
    chosen = (torch.rand(len(batch.y), generator=generator) < 0.5).to(batch.y.device)

    def mirror(values: Tensor) -> Tensor:
        return torch.where(chosen.view(-1, *[1] * (values.dim() - 1)), values.flip(-1), values)

    return _changed(batch, mirror, mirror)


def crop(batch: Batch, seed: int) -> Batch:
    """Each image shifted by up to an eighth of its side; the border repeats the edge."""
    generator = torch.Generator().manual_seed(seed)
    height, width = _images(batch).shape[-2:]
    by = [max(1, side // MARGIN) for side in (height, width)]
    down, right = (
        torch.randint(0, 2 * most + 1, (len(batch.y),), generator=generator).to(batch.y.device) for most in by
    )
    rows = down[:, None] + torch.arange(height, device=batch.y.device)  # (samples, height)
    columns = right[:, None] + torch.arange(width, device=batch.y.device)
    sample = torch.arange(len(batch.y), device=batch.y.device)[:, None, None]
    border = (by[1], by[1], by[0], by[0])

    def move(images: Tensor) -> Tensor:
        wide = pad(images, border, mode="replicate").movedim(1, -1)
        return wide[sample, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)

    def move_mask(labels: Tensor) -> Tensor:
        return move(labels[:, None].double())[:, 0].to(labels.dtype)

    return _changed(batch, move, move_mask)


AUGMENTATIONS: dict[str, Augment] = {"crop": crop, "flip": flip}


def make_augment(names: Sequence[str]) -> Augment | None:
    """Augmentations by name, or ``module:function``, one after the other, each with a seed of its own."""
    if not names:
        return None
    functions = [(name, _find(name)) for name in names]

    def augment(batch: Batch, seed: int) -> Batch:
        for number, (name, function) in enumerate(functions):
            batch = function(batch, fold(seed, number, name))
        return batch

    return augment


def _find(name: str) -> Augment:
    if name in AUGMENTATIONS:
        return AUGMENTATIONS[name]
    if ":" not in name:
        known = nearest(name, AUGMENTATIONS)
        raise ConfigError(f"data.augment: there is no {name!r}; {known} (Your own: module:function.)")
    try:
        function: Augment = load_named(name)
    except Exception as error:  # whatever the user's own file raises
        raise ConfigError(f"data.augment: {name!r} cannot be loaded: {first_line(error)}") from error
    return function


def _changed(batch: Batch, images: Callable[[Tensor], Tensor], mask: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with its images changed, and labels that are a class for every pixel of them changed alike."""
    x = _images(batch)
    same_pixels = batch.y.dim() == 3 and batch.y.shape[-2:] == x.shape[-2:]
    return batch._replace(x=images(x), y=mask(batch.y) if same_pixels else batch.y)


def _images(batch: Batch) -> Tensor:
    x: Any = batch.x
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        raise ConfigError(
            "crop and flip are for images (samples, channels, height, width); use your own function."
        )
    return x
