"""What the server knows of the sites' memories: only in which round each was last accepted."""

from __future__ import annotations

from collections.abc import Mapping

from fedpews.methods.contract import Nest


class Ledger:
    """Stands where clients' memories are kept in one process. The memories themselves never leave their sites."""

    def __init__(self) -> None:
        self._accepted: dict[str, int] = {}
        self._saved: dict[str, int] = {}

    def restore(self, versions: Mapping[str, int]) -> None:
        self._accepted, self._saved = dict(versions), dict(versions)

    def get(self, seed: int, client: int) -> Nest | None:
        return None

    def put(self, seed: int, client: int, memory: Nest) -> None:
        pass

    def accept(self, seed: int, client: int, round: int) -> None:
        """The client's upload of this round counts, so its next round starts from this one's memory."""
        self._accepted[f"{seed}-{client}"] = round

    def accepted(self, seed: int, client: int) -> int:
        """The round whose memory a client goes on from; 0 before its first."""
        return self._accepted.get(f"{seed}-{client}", 0)

    def kept(self, seed: int, client: int) -> int:
        """The oldest round whose memory a server that goes on from its checkpoint could ask for."""
        return self._saved.get(f"{seed}-{client}", 0)

    def commit(self, round: int) -> dict[str, int]:
        self._saved = dict(self._accepted)
        return dict(self._saved)

    def forget_old(self) -> None:
        pass
