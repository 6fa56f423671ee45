"""FedPeWS: each client first learns which neurons are its own, and trains only those."""

from fedpews.warmup.auto import Auto
from fedpews.warmup.masks import Fixed, Learned, Random
from fedpews.warmup.warmup import Warmup, with_warmup

__all__ = ["Auto", "Fixed", "Learned", "Random", "Warmup", "with_warmup"]
