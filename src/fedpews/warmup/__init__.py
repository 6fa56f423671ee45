"""FedPeWS: each client first learns which neurons are its own, and trains only those."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedpews.warmup.masks import Auto, Fixed, Learned, Random

if TYPE_CHECKING:
    from fedpews.warmup.warmup import Warmup, with_warmup

__all__ = ["Auto", "Fixed", "Learned", "Random", "Warmup", "with_warmup"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used: the configuration reads only the options."""
    if name in ("Warmup", "with_warmup"):
        from fedpews.warmup import warmup

        return getattr(warmup, name)
    raise AttributeError(f"module 'fedpews.warmup' has no attribute {name!r}")
