"""The warmup for a Flower app that has its own training loop: the server's half."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedpews.errors import ConfigError
from fedpews.flower.adopt.owned import fill_in, restore
from fedpews.methods.wire import BadMessage
from fedpews.warmup.auto import Auto

ABOUT, OTHERS, OWNED, NEURONS, THETA, HIDDEN = "fedpews", "others", "owned", "neurons", "theta", "hidden"
LOG = logging.getLogger("flwr")


class WithWarmup(Strategy):  # type: ignore[misc]
    """Flower's own averaging strategy with a warmup in which each client trains only its own neurons.

    ``WithWarmup(FedAvg(...), rounds=25)``; clients use `LocalWarmup` in their loop. Any strategy that averages
    the clients' arrays will do (FedAvg, FedAvgM, FedAdam, ...): what it gets to average is filled in such that
    its average is the one over the owners of each element. It needs to know nothing of the model.

    Args:
        strategy: one of Flower's, or your own.
        rounds: W, rounds of the warmup; 0 is the strategy as it is.
        diversity: λ, how strongly clients are pushed to different neurons.
        mask_lr: η_s, learning rate of the clients' scores.
        gradient, start, start_spread, upload_mask: as in `fedpews.Learned`; each site draws its own start.
        first_round: the absolute number of this start's first round, when it goes on from an earlier one.
        masks: ``learned`` at the clients; ``fixed``, one contiguous group of every layer for each of ``sites`` nodes in
            the order in which they are met; or ``auto``, learned until the training loss has become flat.
        sites: how many there are; for fixed masks.
        loss_key: with ``auto``, what the clients call their training loss among their metrics.
    """

    def __init__(
        self,
        strategy: Strategy,
        rounds: int,
        diversity: float = 1.0,
        mask_lr: float = 0.1,
        first_round: int = 1,
        *,
        gradient: Literal["theta", "open", "gate"] = "theta",
        start: float = 0.0,
        start_spread: float = 1.0,
        upload_mask: Literal["drawn", "thresholded"] = "thresholded",
        masks: Literal["learned", "fixed", "auto"] = "learned",
        sites: int | None = None,
        loss_key: str = "train_loss",
    ) -> None:
        if rounds < 0 or diversity < 0 or mask_lr <= 0 or start_spread < 0:
            raise ConfigError(
                "rounds, diversity and start_spread must not be negative, and mask_lr must be positive"
            )
        if masks == "fixed" and not sites:
            raise ConfigError("fixed masks need to know how many sites there are: WithWarmup(..., sites=4)")
        self._reading: dict[str, str | float] = {
            "gradient": gradient,
            "start": float(start),
            "start-spread": float(start_spread),
            "upload-mask": upload_mask,
        }
        self.strategy, self.rounds, self.diversity = strategy, rounds, diversity
        self.mask_lr, self.first_round = mask_lr, first_round
        self.masks, self.sites, self.loss_key = masks, sites, loss_key
        self.refused: dict[int, int] = {}  # by node
        self._old: dict[str, NDArray[Any]] = {}
        self._types: dict[str, np.dtype[Any]] = {}  # the model's own
        self._theta: dict[int, NDArray[Any]] = {}  # by node: what it last shared
        self._places: dict[int, int] = {}  # by node: its group of neurons, when they are fixed
        self._losses: list[float] = []  # of the warmup's rounds, by which auto decides
        self._over = False

    def is_warmup(self, server_round: int) -> bool:
        return server_round + self.first_round - 1 <= self.rounds and not self._over

    def state(self) -> dict[str, Any]:
        """All that a restarted server needs to go on, as JSON takes it; with `first_round`, a run resumes."""
        return {
            "theta": {str(node): theta.tolist() for node, theta in self._theta.items()},
            "places": {str(node): place for node, place in self._places.items()},
            "losses": self._losses,
            "over": self._over,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self._theta = {int(node): np.asarray(theta, np.float32) for node, theta in state["theta"].items()}
        self._places = {int(node): int(place) for node, place in state["places"].items()}
        self._losses, self._over = [float(loss) for loss in state["losses"]], bool(state["over"])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not self.is_warmup(server_round):
            return messages
        self._old = {name: array.numpy() for name, array in arrays.items()}
        self._types = self._types or {name: value.dtype for name, value in self._old.items()}
        # averaging may have left the model's own types (FedAdam's steps are in double precision)
        self._old = {name: value.astype(self._types[name]) for name, value in self._old.items()}
        nodes = set(grid.get_node_ids())  # also those not asked this time: their last word counts
        self._theta = {node: theta for node, theta in self._theta.items() if node in nodes}
        for message in messages:
            node = message.metadata.dst_node_id
            content = dict(message.content.items()) | {ABOUT: self._about(server_round, node)}
            others = None if self.masks == "fixed" else self._others(node, nodes)
            if others is not None:
                content[OTHERS] = ArrayRecord({NEURONS: Array(others)})
            message.content = RecordDict(content)
        return messages

    def _about(self, server_round: int, node: int) -> ConfigRecord:
        about: dict[str, Any] = {
            "round": server_round + self.first_round - 1,
            "diversity": self.diversity,
            "mask-lr": self.mask_lr,
            **self._reading,
        }
        if self.masks == "fixed":
            place = self._places.setdefault(node, len(self._places))
            if place >= (self.sites or 0):
                raise ConfigError(f"there are more nodes than sites={self.sites}, so there is no group left")
            about |= {"place": place, "total": self.sites}
        return ConfigRecord(about)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if not self.is_warmup(server_round):
            result: tuple[ArrayRecord | None, MetricRecord | None]
            result = self.strategy.aggregate_train(server_round, replies)
            return result
        replies = self._whole(replies)
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        if self.masks == "auto" and metrics is not None:
            self._look_at_loss(server_round, metrics)
        if arrays is not None:
            arrays = ArrayRecord({n: Array(a.numpy().astype(self._types[n])) for n, a in arrays.items()})
        return arrays, metrics

    def _look_at_loss(self, server_round: int, metrics: MetricRecord) -> None:
        if self.loss_key not in metrics:
            raise ConfigError(f"the clients report no {self.loss_key!r}, by which auto decides; see loss_key")
        self._losses.append(float(metrics[self.loss_key]))
        if Auto().is_flat(self._losses):
            self._over = True
            LOG.info("the warmup is over after round %d", server_round + self.first_round - 1)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages: Iterable[Message]
        messages = self.strategy.configure_evaluate(server_round, arrays, config, grid)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        LOG.info("\t├──> Warmup: %d rounds, diversity %g", self.rounds, self.diversity)
        self.strategy.summary()

    def _others(self, node: int, nodes: set[int]) -> NDArray[Any] | None:
        """θ_{g∖i}: the mean over the other nodes; one not heard of yet counts with the start's mean."""
        if not self._theta or len(nodes) < 2:
            return None
        middle = 1 / (1 + math.exp(-float(self._reading["start"])))
        start = np.full_like(next(iter(self._theta.values())), middle)
        known = np.stack([self._theta.get(other, start) for other in sorted(nodes) if other != node])
        mean: NDArray[Any] = known.mean(axis=0, dtype=np.float32)
        return mean

    def _whole(self, replies: list[Message]) -> list[Message]:
        """The replies as the inner strategy expects them, and those with an error as they are."""
        good, values, masks, weights = [], [], [], []
        for message in replies:
            if message.has_error():
                continue
            node = message.metadata.src_node_id
            try:
                value, mask, theta, weight = self._read(message.content)
            except BadMessage as error:
                self.refused[node] = self.refused.get(node, 0) + 1
                LOG.warning("upload of node %d refused: %s", node, error)
                continue
            self._theta[node] = theta
            good.append(message)
            values.append(value)
            masks.append(mask)
            weights.append(weight)
        key = getattr(self.strategy, "arrayrecord_key", "arrays")
        for message, arrays in zip(good, fill_in(values, masks, weights, self._old), strict=True):
            metrics = dict(message.content.metric_records.items())
            record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
            message.content = RecordDict({key: record, **metrics})
        return good + [message for message in replies if message.has_error()]

    def _read(self, content: RecordDict) -> tuple[dict[str, Any], dict[str, Any], NDArray[Any], float]:
        try:
            records = {key: content[key] for key in (OWNED, NEURONS, THETA)}
            arrays = {k: {n: _array(a) for n, a in record.items()} for k, record in records.items()}
            (metrics,) = content.metric_records.values()
            weight = float(metrics[getattr(self.strategy, "weighted_by_key", "num-examples")])
            value, mask = restore(arrays[OWNED], arrays[NEURONS], self._old)
            theta = arrays[THETA][HIDDEN]
        except BadMessage:
            raise
        except Exception as error:  # whatever a foreign message brings about
            raise BadMessage(f"not a reply of LocalWarmup: {type(error).__name__}: {error!s:.100}") from error
        size = len(next(iter(self._theta.values()), theta))
        if theta.dtype != np.float32 or theta.shape != (size,) or not ((theta >= 0) & (theta <= 1)).all():
            raise BadMessage(f"theta must be {size} numbers from 0 to 1")
        if not 0 < weight < 1e12:
            raise BadMessage(f"its weight is {weight}")
        return value, mask, theta, weight


def _array(array: Array) -> NDArray[Any]:
    """The array; Flower reads it with pickling off."""
    value: NDArray[Any] = array.numpy()
    return value
