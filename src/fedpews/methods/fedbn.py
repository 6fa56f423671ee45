"""Some parameters never leave the client: FedBN, FedPer, FedRep, and clients that share nothing at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import (
    ClientHalf,
    ClientWrapper,
    Cohort,
    Download,
    Rate,
    Upload,
    Work,
    Wrapper,
    change_each,
)
from fedpews.neurons.network import Batch, Network
from fedpews.registry import register
from fedpews.trees import Nest, Tree

MET = "met"
"""In the state: which clients have been sent the first values of what stays with them."""
FIRST = "first"
"""In a download: these values."""


@dataclass(frozen=True)
class Local(Wrapper):
    """The inner method, with some parameters kept at each client: trained there, never sent, never averaged.

    A client gets their initial values with its first download and goes on with what it has.
    ``ClientHalf.personal`` is the global model with the client's local parameters, and should be evaluated: in the
    global model alone these parameters keep their initial values. Put it around a warmup: Local(with_warmup(…)).
    ``"norms"`` are scale, shift and statistics of all norm layers, ``"head"`` is the layer that makes the outputs.

    Args:
        names: the local layers: ``"norms"``, ``"head"``, ``"all"``, or names of parameters or modules.

    >>> from fedpews.methods.fedavg import FedAvg
    >>> Local(FedAvg()).personalised
    True
    """

    personalised = True

    names: tuple[str, ...] | str = "norms"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names != "norms" and not self.inner.uploads_weights:
            raise ConfigError(
                f"clients of {type(self.inner).__name__} upload no weights, so none can stay at the client; "
                "choose another method"
            )

    def client(self, phase: str) -> ClientHalf:
        return LocalClient(self.inner.client(phase), self.names)

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        find(net, self.names)  # raises an error for a wrong name before the first round
        met = torch.zeros(total, dtype=torch.bool)
        return super().init(net, params, total) | {MET: {"met": met}}

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        kept = find(net, self.names)
        # under other names: of a parameter's name, a client is sent only what its neurons own
        first = {f"{FIRST}:{name}": v for name, v in self.params(state).items() if name in kept}

        def without_local(download: Download, is_new: bool) -> Download:
            extra = {key: _without(tree, kept) for key, tree in download.extra.items()}
            extra |= {FIRST: first} if is_new else {}
            return replace(download, params=_without(download.params, kept), extra=extra)

        is_new = [not bool(state[MET]["met"][client]) for client in cohort.clients]
        return change_each(super().downloads(net, state, cohort), is_new, without_local)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        kept = find(net, self.names)
        old = trees.pick(self.params(state), kept)
        filled = [
            replace(
                upload,
                params=old | upload.params,
                extra={key: _filled(net, tree, kept) for key, tree in upload.extra.items()},
            )
            for upload in uploads
        ]
        not_owned = {name: torch.tensor(False, device=net.device) for name in kept}
        masks = tuple({**(mask or {}), **not_owned} for mask in average.masks)
        clients = torch.tensor([upload.client for upload in uploads])
        met = state[MET]["met"].index_fill(0, clients, True)
        return super().update(net, state, filled, replace(average, masks=masks)) | {MET: {"met": met}}


@register("personal", "fedbn")
@dataclass(frozen=True)
class FedBN(Local):
    """FedBN: norm layers stay at each client (Li et al. 2021)."""


@register("personal", "fedper")
@dataclass(frozen=True)
class FedPer(Local):
    """FedPer: each client has its own last layer on a common body (Arivazhagan et al. 2019)."""

    names: tuple[str, ...] | str = "head"


@register("personal", "fedrep")
@dataclass(frozen=True)
class FedRep(Local):
    """FedRep: each client's own last layer is trained first, then the common body (Collins et al. 2021).

    The first steps of a round move the head alone, all others the body alone.

    Args:
        head_steps: number of steps per round that train the head.
    """

    names: tuple[str, ...] | str = "head"
    head_steps: Annotated[int, Field(ge=0)] = 10

    def client(self, phase: str) -> ClientHalf:
        return RepClient(self.inner.client(phase), self.names, self.head_steps)


@register("personal", "local")
@dataclass(frozen=True)
class LocalOnly(Local):
    """Local training: every client trains its own model and shares nothing; the baseline without federation."""

    names: tuple[str, ...] | str = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inner.refuse_personal("local")


@dataclass(frozen=True)
class LocalClient(ClientWrapper):
    """Adds the client's local parameters to each download, and removes them from the upload."""

    names: tuple[str, ...] | str

    def probe(self, net: Network, download: Download, memory: Nest | None) -> Tree:
        return super().probe(net, self._whole(net, download, memory), memory)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        local = {"own": self._own(net, download, memory)}
        return super().start(net, self._whole(net, download, memory), memory) | local

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        own: Tree = local["own"]
        memory, upload = super().finish(net, self._whole(net, download, local), local, work)
        sent = replace(
            upload,
            params=_without(upload.params, own),
            mask=None if upload.mask is None else _without(upload.mask, own),
            extra={key: _without(tree, own) for key, tree in upload.extra.items()},
        )
        return memory | {"own": own | {n: upload.params[n] for n in own if n in upload.params}}, sent

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return super().personal(net, self._whole(net, download, memory), memory)

    def _own(self, net: Network, download: Download, memory: Nest | None) -> Tree:
        if memory is not None:
            own: Tree = memory["own"]
            return own
        # a site that lost its memory is not sent the first values again
        initial, sent = net.initial(), download.extra.get(FIRST, {})
        return {name: sent.get(f"{FIRST}:{name}", initial[name]) for name in find(net, self.names)}

    def _whole(self, net: Network, download: Download, memory: Nest | None) -> Download:
        """The download with the client's local parameters."""
        return replace(download, params=download.params | self._own(net, download, memory))


@dataclass(frozen=True)
class RepClient(LocalClient):
    """First trains the local parameters, then the others; what a step does not train keeps its optimiser's slots."""

    head_steps: int

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        return super().start(net, download, memory) | {"taken": {"steps": torch.tensor(0, device=net.device)}}

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        moved, loss = super().step(net, local, batch, noise, lr)
        taken = local["taken"]["steps"]
        chosen = _choose(net, local["own"], taken < self.head_steps, moved["inner"], local["inner"])
        return moved | {"inner": chosen, "taken": {"steps": taken + 1}}, loss


def _choose(net: Network, own: Mapping[str, object], is_own: Tensor, after: Nest, before: Nest) -> Nest:
    """The state after a step that trains only the local parameters (``is_own``), or only the others."""
    if after is before:
        return after
    chosen: Nest = {}
    for key, value in after.items():
        if isinstance(value, dict):
            chosen[key] = _choose(net, own, is_own, value, before[key])
        elif key in net.names:
            chosen[key] = torch.where(is_own if key in own else ~is_own, value, before[key])
        else:
            chosen[key] = value
    return chosen


def find(net: Network, names: Sequence[str] | str) -> tuple[str, ...]:
    """The parameters and buffers with these names, in the network's order."""
    if names == "norms":
        kept = net.norms
    elif names == "all":
        kept = net.names
    else:
        wanted = [net.classifier] if names == "head" else [names] if isinstance(names, str) else names
        kept = tuple(n for n in net.names if any(n == w or n.startswith(f"{w}.") for w in wanted))
    if not kept:
        raise ConfigError(
            f"nothing to keep local: the model has no {names}; it has {', '.join(net.names[:6])}, …"
        )
    return kept


def _without(tree: Mapping[str, Tensor], names: Sequence[str] | Mapping[str, object]) -> Tree:
    return {name: value for name, value in tree.items() if name not in names}


def _filled(net: Network, tree: Mapping[str, Tensor], names: Sequence[str] | Mapping[str, object]) -> Tree:
    """A tree of parameters with zeros for the names it lacks; any other tree as it is."""
    if not set(tree) <= set(net.names):
        return dict(tree)
    like = next(iter(tree.values()), torch.zeros((), device=net.device))
    return dict(tree) | {n: like.new_zeros(net.shapes[n]) for n in names if n not in tree}
