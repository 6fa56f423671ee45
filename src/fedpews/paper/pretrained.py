"""The base of the study *lora*: a small vision transformer, pretrained on CIFAR-100 on the spot and cached."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import load_file, save
from torch.nn.functional import cross_entropy, interpolate

from fedpews.data import load
from fedpews.data.catalogue import cache_dir
from fedpews.data.federation import Federation, digest
from fedpews.data.inputs import take
from fedpews.models.networks import ViT
from fedpews.results.files import write_atomically
from fedpews.seeds import global_generator
from fedpews.trees import Tree

BATCH, RATE, DECAY = 128, 1e-3, 0.05


def vit(channels: int = 3, size: int = 28, classes: int = 21, epochs: int = 30) -> ViT:
    """The transformer with a new last layer, all else pretrained on CIFAR-100 at the data's size.

    Args:
        epochs: passes over the training images of CIFAR-100.
    """
    model = ViT(channels, size, classes)
    images = load("cifar100", partition="iid", clients=1)
    key = json.dumps([digest(images), channels, size, epochs, BATCH, RATE, DECAY])
    path = cache_dir() / "pretrained" / f"vit-{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    model.load_state_dict(_pretrained(path, images, channels, size, epochs), strict=False)
    return model


def _pretrained(path: Path, images: Federation, channels: int, size: int, epochs: int) -> Tree:
    """All but the last layer, from the cache or trained now; one process trains, others wait for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            state = _train(images, channels, size, epochs).state_dict()
            kept = {name: value for name, value in state.items() if not name.startswith("classifier.")}
            write_atomically(path, save(kept))
    base: Tree = load_file(path)
    return base


def _train(images: Federation, channels: int, size: int, epochs: int) -> ViT:
    """AdamW with a cosine schedule; images are flipped at random."""
    with global_generator(0):
        model = ViT(channels, size, images.classes)
        rows = images.clients[0]
        steps = epochs * math.ceil(len(rows) / BATCH)
        optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(epochs):
            for part in rows[torch.randperm(len(rows))].split(BATCH):
                x, y = take(images.x, part), images.y[part]
                x = interpolate(x.expand(-1, channels, -1, -1), size=(size, size), mode="bilinear")
                x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
                schedule.step()
    return model
