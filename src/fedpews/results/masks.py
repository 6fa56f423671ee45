"""The neurons that each client owned in a round, packed into few bytes: the lines of neurons.jsonl."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError
from fedpews.results import layout
from fedpews.results.files import is_expected
from fedpews.results.schema import FederationShape, OwnershipShape, read_lines, read_object

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BINS = 32
"""Bins of equal width from 0 to 1 in a histogram of θ."""

EACH_CLIENT_UP_TO = 200
"""In a federation of more clients than this, only the number of owners of each neuron is kept."""


@dataclass(frozen=True)
class Ownership:
    """The masks of one round of one seed; either ``owned`` or ``owners`` is given, as base64."""

    seed: int
    round: int
    clients: tuple[int, ...]  # of the cohort; empty where only numbers are kept
    neurons: int
    owned: str | None = None  # a bit for each client and neuron, client by client, the first bit highest
    owners: str | None = None  # for each neuron, the share of the cohort that owns it, in 255ths
    theta: list[list[int]] | None = None  # (layers, BINS): how many θ are in each bin

    @classmethod
    def of(
        cls,
        seed: int,
        round: int,
        clients: Sequence[int],
        owned: NDArray[np.bool_],  # (clients, neurons)
        theta: list[list[int]] | None,
        total: int,
    ) -> Ownership:
        """Packed: a bit for each client and neuron, or a byte per neuron where there are many clients."""
        import numpy as np

        size = owned.shape[1]
        if total <= EACH_CLIENT_UP_TO:
            bits = b64encode(np.packbits(owned, axis=None).tobytes()).decode()
            return cls(seed, round, tuple(clients), size, owned=bits, theta=theta)
        shares = np.rint(255 * owned.mean(0)).astype(np.uint8)
        return cls(seed, round, (), size, owners=b64encode(shares.tobytes()).decode(), theta=theta)

    def masks(self) -> NDArray[np.bool_]:
        """(clients, neurons); without clients if only the shares were kept."""
        import numpy as np

        if self.owned is None:
            return np.zeros((0, self.neurons), dtype=bool)
        count = len(self.clients) * self.neurons
        bits = np.unpackbits(np.frombuffer(b64decode(self.owned), dtype=np.uint8), count=count)
        return bits.reshape(len(self.clients), self.neurons).astype(bool)

    def shares(self) -> NDArray[np.float64]:
        """(neurons,) the share of the cohort that owns each."""
        import numpy as np

        if self.owners is None:
            return np.asarray(self.masks().mean(0), dtype=np.float64)
        return np.frombuffer(b64decode(self.owners), dtype=np.uint8) / np.float64(255)

    def is_whole(self) -> bool:
        """Whether the packed bits or bytes are as many as the numbers of clients and neurons say."""
        if (self.owned is None) == (self.owners is None):
            return False
        bits = self.neurons * (8 if self.owned is None else len(self.clients))
        try:
            return len(b64decode(self.owned or self.owners or "", validate=True)) == (bits + 7) // 8
        except ValueError:
            return False

    def record(self) -> dict[str, Any]:
        """The line of the file; keys without a value are left out."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def read_neurons(folder: Path) -> list[Ownership]:
    """The lines of neurons.jsonl; a run without masks has none."""
    file = folder / layout.NEURONS
    lines = read_lines(file, OwnershipShape) if is_expected(file) else []
    rounds = [Ownership(**line | {"clients": tuple(line["clients"])}) for line in lines]
    for number, ownership in enumerate(rounds, start=1):
        if not ownership.is_whole():
            raise ConfigError(
                f"{file}, line {number} is damaged: it does not hold a mask of {ownership.neurons}"
            )
    return rounds


def read_federation(folder: Path) -> dict[str, Any]:
    """The clients, their counts of classes and the layers that masks cover; empty before the first round."""
    file = folder / layout.FEDERATION
    if not is_expected(file):
        return {}
    federation: dict[str, Any] = read_object(file, FederationShape)
    counts = federation.get("counts") or []
    if len({len(row) for row in counts}) > 1 or not all(counts):
        raise ConfigError(f"{file} is damaged: its counts are not a table of clients by classes")
    return federation
