"""An upload that is far larger than the others of its round is refused, by default."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from fedpews.methods.contract import Download, Upload
from fedpews.neurons.network import Network

PARAMS = "params"
BOUNDED = ("theta", "privacy")
"""Parts of an upload whose values have bounds of their own."""

POWERS = (0.0, 0.5, 1.0)
"""A change grows with the steps taken: not at all, as their root, or as their number. Only what is too large in every
view is refused, so that a site with much more or much less data than the others is not."""


def norms(net: Network, upload: Upload, download: Download) -> dict[str, float]:
    """The size of everything an upload carries: the change of the parameters it owns, and each part a method adds."""
    owned = upload.ownership(net) or {}
    change = {}
    for name, value in upload.params.items():
        if value.is_floating_point():
            moved = (
                value.double() - download.params[name].double() if name in download.params else value.double()
            )
            change[name] = torch.where(owned[name].bool(), moved, 0.0) if name in owned else moved
    found = {PARAMS: _norm(change)} if change else {}
    for key, tree in upload.extra.items():
        numbers = {name: value.double() for name, value in tree.items() if value.is_floating_point()}
        if numbers and key not in BOUNDED:
            found[key] = _norm(numbers)
    return found


class NormRule:
    """Refuses an upload larger than a multiple of the median: of its round, or of the run so far if that is more.

    Of two, the median is the smaller one. The run's own median lets a round pass in which the others hardly move.

    Args:
        multiple: infinity refuses nobody.
    """

    def __init__(self, multiple: float) -> None:
        self.multiple = multiple
        self._accepted: dict[str, list[tuple[float, int]]] = {}  # by part: norm and steps

    def judge(self, found: Mapping[int, tuple[Mapping[str, float], int]]) -> dict[int, str]:
        """By client, why its upload is refused; ``found`` has each client's norms and steps."""
        bad: dict[int, str] = {}
        if self.multiple == math.inf or len(found) < 2:
            return bad
        for part in sorted({part for sizes, _ in found.values() for part in sizes}):
            here = {client: (sizes.get(part, 0.0), steps) for client, (sizes, steps) in found.items()}
            references = [
                max(_median(list(here.values()), power), _median(self._accepted.get(part, []), power))
                for power in POWERS
            ]
            if not any(references):  # nobody else moved, so there is nothing to compare with
                continue
            for client, (size, steps) in here.items():
                limits = [
                    self.multiple * reference * steps**power
                    for power, reference in zip(POWERS, references, strict=True)
                ]
                if not size <= max(limits):
                    bad[client] = (
                        f"its {part} has norm {size:.6g}, above {self.multiple:g} times the round's median "
                        f"({max(limits) / self.multiple:.6g} at {steps} steps; flower.norm_multiple)"
                    )
        return bad

    def accept(self, sizes: Mapping[str, float], steps: int) -> None:
        """An upload that counts, for the median of the run."""
        for part, size in sizes.items():
            self._accepted.setdefault(part, []).append((size, steps))


def _median(found: list[tuple[float, int]], power: float) -> float:
    return statistics.median_low([size / steps**power for size, steps in found]) if found else 0.0


def _norm(tree: Mapping[str, Tensor]) -> float:
    return float(torch.stack([value.pow(2).sum() for value in tree.values()]).sum().sqrt())
