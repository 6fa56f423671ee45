"""The zoo as a table for docs/models.md: python tests/zoo/table.py [part of a name ...]"""

from __future__ import annotations

import logging
import sys
import time
import warnings

import hugging_face
import others
import pictures
import torch
from collection import Animal

from fedpews.errors import ConfigError
from fedpews.neurons import trace


def row(animal: Animal) -> str:
    """One architecture: what is masked, what is left whole, and the seconds of one core that tracing took."""
    torch.manual_seed(0)
    model, x = animal.build()
    start = time.process_time()
    try:
        graph = trace(model, x)
    except ConfigError:
        return f"| {animal.library} | {animal.name} | refused: {animal.refused} | | | |"
    left = [reason for reason in graph.left_whole.values() if "output" not in reason]
    why = "; ".join(f"{left.count(reason)} {reason}" for reason in dict.fromkeys(left))
    spent = time.process_time() - start
    layers = f"{len(graph.layers)} ({len(graph.uncut)})"
    return f"| {animal.library} | {animal.name} | {graph.masked_share:.0%} | {layers} | {why or '—'} | {spent:.1f} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    everything = [*hugging_face.ANIMALS, *pictures.ANIMALS, *others.ANIMALS]
    for animal in sorted(everything, key=lambda animal: animal.slow):
        if len(sys.argv) == 1 or any(part in str(animal) for part in sys.argv[1:]):
            print(row(animal), flush=True)
