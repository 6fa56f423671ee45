"""One seed per purpose: every random draw has a name, so its value depends on nothing else."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GENERATOR = threading.RLock()


def fold(seed: int, *names: int | str) -> int:
    """A new seed from a seed and the names of what it is for.

    The result depends on all names and their order, and is the same on every machine, in every process
    and for any number of workers. It fits ``torch.Generator.manual_seed``. A client's draw in a round is
    ``fold(seed, round, client, "what")``, in every process.

    >>> fold(0, 3, "batches") == fold(0, 3, "batches")
    True
    >>> fold(0, 3, "batches") == fold(0, 4, "batches")
    False
    """
    text = "/".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def global_generator(seed: int | None = None) -> Iterator[None]:
    """torch's global generator for this thread alone: seeded, if a seed is given, and restored afterwards.

    Layers and dropout draw from it, and all threads of a process share it: without a lock, what one thread draws
    would depend on what the others seed and draw meanwhile.
    """
    import torch  # names of data sets are listed without it

    with _GENERATOR, torch.random.fork_rng(devices=[]):
        if seed is not None:
            # torch.manual_seed takes milliseconds where there is no GPU: it keeps a traceback of each call
            seed_all = (
                torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
            )
            seed_all(seed)
        yield
