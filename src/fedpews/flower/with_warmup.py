"""The warmup for a Flower app that has its own training loop: the server's half.

A client sends the elements that it owns, and a bit for each element. So the server needs only names and shapes, and no
graph of the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from fedpews.errors import ConfigError, nearest
from fedpews.methods.wire import BadMessage
from fedpews.warmup.masks import Auto, Fixed, Learned, Masks

ABOUT, OTHERS, OWNED, OWNERSHIP, THETA = "fedpews", "others", "owned", "ownership", "theta"
NEURONS, HIDDEN = "neurons", "hidden"
LOG = logging.getLogger("flwr")

KINDS: dict[str, type[Masks]] = {"learned": Learned, "fixed": Fixed, "auto": Auto}
SENT = ("diversity", "mask_lr", "gradient", "start", "start_spread", "upload_mask")
"""The options of learned masks that `LocalWarmup` follows."""
AT_SERVER = ("flat_at", "learnt_at")

Arrays = Mapping[str, NDArray[Any]]


class MaskedUpload(NamedTuple):
    """What a client sent: its arrays, zero where it owns nothing, their masks, and its weight in the average."""

    arrays: dict[str, NDArray[Any]]
    masks: dict[str, NDArray[np.bool_]]
    weight: float


class WithWarmup(Strategy):  # type: ignore[misc]
    """Flower's own averaging strategy with a warmup in which each client trains only its own neurons.

    ``WithWarmup(FedAvg(...), rounds=25)``; clients use `LocalWarmup` in their loop. Any strategy that averages
    the clients' arrays will do (FedAvg, FedAvgM, FedAdam, ...): the arrays are filled in such that its average is the
    one over the owners of each element. It needs no knowledge of the model.

    Args:
        strategy: one of Flower's, or your own.
        rounds: W, rounds of the warmup; 0 is the strategy as it is.
        masks: ``learned`` at the clients; ``fixed``, one contiguous group of every layer for each of ``sites`` nodes in
            the order in which they connect; ``auto``, learned until the training loss is flat; or an object such as
            `fedpews.Learned`.
        first_round: the absolute number of this start's first round, if it goes on from an earlier one.
        sites: their number; for fixed masks.
        loss_key: with ``auto``, the name of the training loss among the clients' metrics.
        options: those of `fedpews.Learned` or `fedpews.Auto`: diversity (λ), mask_lr (η_s), gradient, start,
            start_spread, upload_mask. Each site draws its own start.
    """

    def __init__(
        self,
        strategy: Strategy,
        rounds: int,
        masks: Literal["learned", "fixed", "auto"] | Masks = "learned",
        *,
        first_round: int = 1,
        sites: int | None = None,
        loss_key: str = "train_loss",
        **options: Any,
    ) -> None:
        if rounds < 0:
            raise ConfigError(f"rounds must not be negative, got {rounds}")
        if isinstance(masks, str) and masks not in KINDS:
            raise ConfigError(f"there are no masks {masks!r}; {nearest(masks, KINDS)}")
        self.masks = KINDS[masks](**options) if isinstance(masks, str) else masks
        for option in fields(self.masks):
            is_default = getattr(self.masks, option.name) == option.default
            if option.name not in (*SENT, *AT_SERVER) and not is_default:
                raise ConfigError(
                    f"a Flower app's own training loop does not support the option {option.name}"
                )
        if isinstance(self.masks, Fixed) and not sites:
            raise ConfigError("fixed masks need the number of sites: WithWarmup(..., sites=4)")
        self.strategy, self.rounds, self.first_round = strategy, rounds, first_round
        self.sites, self.loss_key = sites, loss_key
        self.refused: dict[int, int] = {}  # uploads by node
        self._old: dict[str, NDArray[Any]] = {}
        self._types: dict[str, np.dtype[Any]] = {}  # the model's own
        self._theta: dict[int, NDArray[Any]] = {}  # by node: the last that it shared
        self._groups: dict[int, int] = {}  # by node: its group of neurons, if they are fixed
        self._losses: list[float] = []  # of the warmup's rounds, by which auto decides
        self._over = False

    def is_warmup(self, server_round: int) -> bool:
        return server_round + self.first_round - 1 <= self.rounds and not self._over

    def state(self) -> dict[str, Any]:
        """All that a restarted server needs to go on, ready for JSON; with `first_round`, a run resumes."""
        return {
            "theta": {str(node): theta.tolist() for node, theta in self._theta.items()},
            "groups": {str(node): group for node, group in self._groups.items()},
            "losses": self._losses,
            "over": self._over,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from an earlier ``state``."""
        self._theta = {int(node): np.asarray(theta, np.float32) for node, theta in state["theta"].items()}
        self._groups = {int(node): int(group) for node, group in state["groups"].items()}
        self._losses, self._over = [float(loss) for loss in state["losses"]], bool(state["over"])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        if not self.is_warmup(server_round):
            return messages
        old = {name: array.numpy() for name, array in arrays.items()}
        self._types = self._types or {name: value.dtype for name, value in old.items()}
        # averaging may have changed the model's types (FedAdam's steps are in double precision)
        self._old = {name: value.astype(self._types[name]) for name, value in old.items()}
        nodes = set(grid.get_node_ids())  # also those not asked this time: their last θ counts
        self._theta = {node: theta for node, theta in self._theta.items() if node in nodes}
        for message in messages:
            node = message.metadata.dst_node_id
            content = dict(message.content.items()) | {ABOUT: self._about(server_round, node)}
            others = self._others(node, nodes)
            if others is not None:
                content[OTHERS] = ArrayRecord({NEURONS: Array(others)})
            message.content = RecordDict(content)
        return messages

    def _about(self, server_round: int, node: int) -> ConfigRecord:
        """What a client needs to know of the warmup in this round."""
        learned = self.masks if isinstance(self.masks, Learned) else Learned()
        about: dict[str, Any] = {name: getattr(learned, name) for name in SENT}
        about["round"] = server_round + self.first_round - 1
        if isinstance(self.masks, Fixed):
            group = self._groups.setdefault(node, len(self._groups))
            if group >= (self.sites or 0):
                raise ConfigError(f"there are more nodes than sites={self.sites}, so there is no group left")
            about |= {"group": group, "total": self.sites}
        return ConfigRecord(about)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if not self.is_warmup(server_round):
            return self.strategy.aggregate_train(server_round, replies)  # type: ignore[no-any-return]
        arrays, metrics = self.strategy.aggregate_train(server_round, self._fill_in(replies))
        if isinstance(self.masks, Auto) and metrics is not None:
            if self.loss_key not in metrics:
                raise ConfigError(
                    f"the clients report no {self.loss_key!r}, by which auto decides; see loss_key"
                )
            self._losses.append(float(metrics[self.loss_key]))
            if self.masks.is_flat(self._losses):
                self._over = True
                LOG.info("the warmup is over after round %d", server_round + self.first_round - 1)
        if arrays is not None:
            arrays = ArrayRecord({n: Array(a.numpy().astype(self._types[n])) for n, a in arrays.items()})
        return arrays, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)  # type: ignore[no-any-return]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        LOG.info("\t├──> Warmup: %d rounds, %s", self.rounds, self.masks)
        self.strategy.summary()

    def _others(self, node: int, nodes: set[int]) -> NDArray[Any] | None:
        """θ_{g∖i}: the mean over the other nodes; a node without θ yet counts with the mean of the start."""
        if not isinstance(self.masks, Learned) or not self._theta or len(nodes) < 2:
            return None
        start = np.full_like(next(iter(self._theta.values())), self.masks.first_theta)
        known = np.stack([self._theta.get(other, start) for other in sorted(nodes) if other != node])
        mean: NDArray[Any] = known.mean(axis=0, dtype=np.float32)
        return mean

    def _fill_in(self, replies: list[Message]) -> list[Message]:
        """The replies as the inner strategy expects them; those with an error as they are."""
        good, uploads = [], []
        for message in replies:
            if message.has_error():
                continue
            node = message.metadata.src_node_id
            try:
                upload, self._theta[node] = self._read(message.content)
            except BadMessage as error:
                self.refused[node] = self.refused.get(node, 0) + 1
                LOG.warning("upload of node %d refused: %s", node, error)
                continue
            good.append(message)
            uploads.append(upload)
        key = getattr(self.strategy, "arrayrecord_key", "arrays")
        for message, arrays in zip(good, fill_in(uploads, self._old), strict=True):
            metrics = dict(message.content.metric_records.items())
            record = ArrayRecord({name: Array(value) for name, value in arrays.items()})
            message.content = RecordDict({key: record, **metrics})
        return good + [message for message in replies if message.has_error()]

    def _read(self, content: RecordDict) -> tuple[MaskedUpload, NDArray[Any]]:
        """A client's upload and its θ, both checked."""
        try:
            records = {key: content[key] for key in (OWNED, OWNERSHIP, THETA)}
            # Flower reads an array with pickling off
            arrays = {k: {n: array.numpy() for n, array in record.items()} for k, record in records.items()}
            (metrics,) = content.metric_records.values()
            weight = float(metrics[getattr(self.strategy, "weighted_by_key", "num-examples")])
            value, mask = restore(arrays[OWNED], arrays[OWNERSHIP], self._old)
            theta = arrays[THETA][HIDDEN]
        except BadMessage:
            raise
        except Exception as error:  # a message from outside may raise anything
            raise BadMessage(f"not a reply of LocalWarmup: {type(error).__name__}: {error!s:.100}") from error
        size = len(next(iter(self._theta.values()), theta))
        if theta.dtype != np.float32 or theta.shape != (size,) or not ((theta >= 0) & (theta <= 1)).all():
            raise BadMessage(f"theta must be {size} numbers from 0 to 1")
        if not 0 < weight < 1e12:
            raise BadMessage(f"its weight is {weight}")
        return MaskedUpload(value, mask, weight), theta


def restore(
    sent: Arrays, packed: Arrays, like: Arrays
) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[np.bool_]]]:
    """The arrays in their shapes (zero where not owned) and their masks; both checked against the global model.

    Args:
        sent: of each array the owned elements in a row; an array without a mask as it is.
        packed: the masks, eight elements to a byte.
        like: the global model, with the names, shapes and types that everything must have.
    """
    if sent.keys() != like.keys() or not packed.keys() <= like.keys():
        odd = sorted((sent.keys() ^ like.keys()) | (packed.keys() - like.keys()))
        raise BadMessage(f"other names than the model: {odd[:3]!r:.200}")
    values, masks = {}, {}
    for name, old in like.items():
        mask, shape = np.ones(old.shape, bool), old.shape
        if name in packed:
            bits = packed[name]
            if bits.dtype != np.uint8 or bits.shape != ((old.size + 7) // 8,):
                raise BadMessage(f"the mask of {name} has {bits.size} bytes for {old.size} elements")
            mask = np.unpackbits(bits, count=old.size).astype(bool).reshape(old.shape)
            shape = (int(mask.sum()),)
        value = sent[name]
        if value.dtype != old.dtype or value.shape != shape:
            raise BadMessage(f"{name} is {value.dtype} {value.shape} where {old.dtype} {shape} is expected")
        if not np.isfinite(value).all():
            raise BadMessage(f"{name} has values that are not finite")
        values[name] = np.zeros_like(old)
        values[name][mask] = value.reshape(-1)
        masks[name] = mask
    return values, masks


def fill_in(uploads: Sequence[MaskedUpload], old: Arrays) -> list[dict[str, NDArray[Any]]]:
    """Uploads whose plain weighted average is the average over the owners of each element.

    An element that a client does not own gets the mean of its owners, or its old value if it has none:
    (Σ_owners p_i·x_i + Σ_others p_i·mean)/Σ p_i = mean. So a strategy that averages them needs no mask.
    """
    filled: list[dict[str, NDArray[Any]]] = [{} for _ in uploads]
    for name, kept in old.items():
        if not np.issubdtype(kept.dtype, np.floating):
            for arrays, upload in zip(filled, uploads, strict=True):
                arrays[name] = upload.arrays[name]
            continue
        total, mean = np.zeros(kept.shape), np.zeros(kept.shape)
        for upload in uploads:
            total += upload.weight * upload.masks[name]
            mean += upload.weight * np.where(upload.masks[name], upload.arrays[name], 0.0)
        mean = np.where(total > 0, mean / np.where(total > 0, total, 1.0), kept).astype(kept.dtype)
        for arrays, upload in zip(filled, uploads, strict=True):
            arrays[name] = np.where(upload.masks[name], upload.arrays[name], mean)
    return filled
