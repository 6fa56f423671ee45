"""FedBN: some parameters never leave the client (Li et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Upload, Work
from fedpews.neurons.network import Batch, Network
from fedpews.trees import Nest, Tree


def with_local(method: Method, names: Sequence[str] | str = "norms") -> Method:
    """The same method, with some parameters kept at each client: trained there, never sent, never averaged.

    A client starts them from the model's own initial values and goes on with what it has. ``ClientHalf.personal``
    is the global model with the client's own part in it, and that is what should be judged: the global model
    alone keeps the initial values in their place. Put it outside a warmup: with_local(with_warmup(…)).

    Args:
        names: ``"norms"`` for scale, shift and statistics of all norm layers, which is FedBN; else names of
            parameters or of modules, for instance ``["classifier"]``.

    >>> from fedpews.methods.fedavg import FedAvg
    >>> with_local(FedAvg()).personalised
    True
    """
    return Local(method, names if isinstance(names, str) else tuple(names))


@dataclass(frozen=True)
class Local(Method):
    """What ``with_local`` returns. State: the inner method's."""

    inner: Method
    names: tuple[str, ...] | str = "norms"

    @property
    def personalised(self) -> bool:
        return True

    def phase(self, state: Nest, round: int) -> str:
        return self.inner.phase(state, round)

    def client(self, phase: str) -> ClientHalf:
        return LocalClient(self.inner.client(phase), self.names)

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        find(net, self.names)  # a wrong name is found before the first round
        return self.inner.init(net, params, total)

    def params(self, state: Nest) -> Tree:
        return self.inner.params(state)

    def last_owned(self, state: Nest) -> dict[int, Tensor]:
        return self.inner.last_owned(state)

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        kept = find(net, self.names)
        sent: dict[int, Download] = {}
        whole = self.inner.downloads(net, state, cohort)
        for d in whole:  # what was one download for all stays one
            if id(d) not in sent:
                extra = {key: _without(tree, kept) for key, tree in d.extra.items()}
                sent[id(d)] = replace(d, params=_without(d.params, kept), extra=extra)
        return [sent[id(d)] for d in whole]

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        kept = find(net, self.names)
        old = trees.pick(self.inner.params(state), kept)
        filled = [
            replace(
                upload,
                params=old | upload.params,
                extra={key: _filled(net, tree, kept) for key, tree in upload.extra.items()},
            )
            for upload in uploads
        ]
        nobodys = {name: torch.tensor(False, device=net.device) for name in kept}
        masks = tuple({**(mask or {}), **nobodys} for mask in average.masks)
        return self.inner.update(net, state, filled, replace(average, masks=masks))


@dataclass(frozen=True)
class LocalClient(ClientHalf):
    """Puts the client's own part in when a download comes, and takes it out of the upload."""

    inner: ClientHalf
    names: tuple[str, ...] | str

    def noise_size(self, net: Network) -> int:
        return self.inner.noise_size(net)

    def probe(self, net: Network, download: Download, memory: Nest | None) -> Tree | None:
        return self.inner.probe(net, self._whole(net, download, memory), _inner(memory))

    def probed(self, net: Network, download: Download, memory: Nest | None, accuracy: float) -> Nest:
        inner = self.inner.probed(net, self._whole(net, download, memory), _inner(memory), accuracy)
        return {"inner": inner, "own": self._own(net, memory)}

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        whole = self._whole(net, download, memory)
        return {"inner": self.inner.start(net, whole, _inner(memory)), "own": self._own(net, memory)}

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        inner, loss = self.inner.step(net, local["inner"], batch, noise, lr)
        return local | {"inner": inner}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        own: Tree = local["own"]
        memory, upload = self.inner.finish(net, self._whole(net, download, local), local["inner"], work)
        sent = replace(
            upload,
            params=_without(upload.params, own),
            mask=None if upload.mask is None else _without(upload.mask, own),
            extra={key: _without(tree, own) for key, tree in upload.extra.items()},
        )
        return {"inner": memory, "own": own | {n: upload.params[n] for n in own if n in upload.params}}, sent

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return self.inner.personal(net, self._whole(net, download, memory), memory["inner"])

    def _own(self, net: Network, memory: Nest | None) -> Tree:
        own: Tree = trees.pick(net.initial(), find(net, self.names)) if memory is None else memory["own"]
        return own

    def _whole(self, net: Network, download: Download, memory: Nest | None) -> Download:
        """The download with the client's own part in it; what it brings besides lacks that part."""
        return replace(download, params=download.params | self._own(net, memory))


def find(net: Network, names: Sequence[str] | str) -> tuple[str, ...]:
    """The parameters and buffers that are meant, in the network's order."""
    if names == "norms":
        found = net.norms
    else:
        wanted = (names,) if isinstance(names, str) else names
        found = tuple(n for n in net.names if any(n == w or n.startswith(f"{w}.") for w in wanted))
    if not found:
        raise ConfigError(
            f"nothing to keep local: the model has no {names}; it has {', '.join(net.names[:6])}, …"
        )
    return found


def _without(tree: Mapping[str, Tensor], names: Sequence[str] | Mapping[str, object]) -> Tree:
    return {name: value for name, value in tree.items() if name not in names}


def _filled(net: Network, tree: Mapping[str, Tensor], names: Sequence[str] | Mapping[str, object]) -> Tree:
    """A tree of parameters with zeros for the names it lacks; any other tree as it is."""
    if not set(tree) <= set(net.names):
        return dict(tree)
    like = next(iter(tree.values()), torch.zeros((), device=net.device))
    return dict(tree) | {n: like.new_zeros(net.shapes[n]) for n in names if n not in tree}


def _inner(memory: Nest | None) -> Nest | None:
    return None if memory is None else memory["inner"]
