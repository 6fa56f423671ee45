"""The contract of a method, and the messages between its two halves.

A round, on any engine::

    downloads = method.downloads(net, state, cohort)             # server: one for each client of the cohort
    client = method.client(phase)                                # both halves agree on the phase
    if client.probes:                                            # client: most methods do not
        model = client.probe(net, download, memory)
        download = download.with_accuracy(accuracy)              #   of that model on the client's data
    local = client.start(net, download, memory)
    for batch in batches:                                        # the runtime owns this loop
        local, loss = client.step(net, local, batch, noise, lr)  #   pure, so it can be vectorised or compiled
    memory, upload = client.finish(net, download, local, work)   # client
    state = method.update(net, state, uploads, average)          # server

State, local state and memory are nested dicts of tensors and nothing else: that is what makes a run resumable
to the bit, and a client's step compilable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.neurons.network import Batch, Network
from fedpews.options import Options
from fedpews.trees import Nest, Tree, subtract, where

K = TypeVar("K", bound=Hashable)

Rate = float | Tensor
"""A learning rate; a tensor where clients of different rates are trained together."""

# Keys that one module writes and another reads; all other keys are private to a method.

PARAMS = "params"
"""In a local state: the parameters that a client trains. A warmup's score step reads them there."""

STEPS_TAKEN = "taken"
"""In a local state, for a half that ``counts_steps``: the number of steps of each element."""

ACCURACY = "accuracy"
"""In the ``extra`` of a download at the client: the accuracy of its ``probe``."""

THETA = "theta"
"""In the ``extra`` of downloads and uploads: the probabilities of learned masks, all within [0, 1]."""


@dataclass(frozen=True)
class Cohort:
    """The clients of a round."""

    round: int  # counted from 1
    clients: tuple[int, ...]
    total: int  # N, clients in the whole federation
    seed: int  # for draws of the server half in this round
    run_seed: int = 0  # for draws that hold in all rounds
    masked: bool = False  # whether clients train subnetworks


@dataclass(frozen=True)
class Download:
    """The message from the server to one client."""

    round: int
    phase: str
    total: int  # N
    params: Tree
    neurons: Tensor | None = None
    """(neurons,) bool: the subnetwork the server assigned; params outside it are not sent."""
    extra: Mapping[str, Tree] = field(default_factory=dict)

    def with_accuracy(self, accuracy: float) -> Download:
        """The same download with the accuracy of a client's ``probe``, for its ``start``."""
        value = torch.tensor(accuracy, dtype=torch.float64)
        return replace(self, extra={**self.extra, ACCURACY: {ACCURACY: value}})


@dataclass(frozen=True)
class Work:
    """A client's local work in a round: samples, steps, learning rate, loss."""

    client: int
    samples: int  # n_i
    steps: int  # K_i
    lr: float
    loss: float  # mean over the steps
    noise: Tensor  # uniform numbers for draws after the last step
    neurons: Tensor | None = None  # (neurons,) bool: what the client will send; None is everything

    def upload(self, download: Download, params: Tree, mask: Tree | None = None) -> Upload:
        """The upload of these parameters."""
        counts = self.client, download.round, self.samples, self.steps
        return Upload(*counts, self.loss, params, neurons=self.neurons, mask=mask)


@dataclass(frozen=True)
class Upload:
    """A message from a client to the server. Elements outside ``neurons`` (or ``mask``) are neither owned nor sent."""

    client: int
    round: int
    samples: int
    steps: int
    loss: float
    params: Tree
    neurons: Tensor | None = None  # (neurons,) bool
    mask: Tree | None = None  # bool, for methods that own single weights
    extra: Mapping[str, Tree] = field(default_factory=dict)

    def ownership(self, net: Network) -> Tree | None:
        """The parameter-level mask, or None when the client owns everything.

        A name that it lacks belongs to no neuron, so the client owns all of it.
        """
        if self.mask is not None:
            return self.mask
        return None if self.neurons is None else net.graph.expand(self.neurons)

    def change(self, net: Network, old: Mapping[str, Tensor]) -> Tree:
        """y_i − x_g for every name of ``old``, with zeros where the client owns nothing."""
        sent = {name: self.params[name] for name in old}
        return subtract(where(self.ownership(net) or {}, sent, old), old)

    def adding(self, extra: Mapping[str, Tree]) -> Upload:
        """The same upload with something more to send."""
        return replace(self, extra={**self.extra, **extra})


class ClientHalf(ABC):
    """The client half. Every function is pure: it returns new values and keeps none."""

    counts_steps: ClassVar[bool] = False
    """Whether ``finish`` needs the number of steps of each element when neurons are masked: the counts are then in
    ``local[STEPS_TAKEN]``, for every name that belongs to a neuron."""

    probes: ClassVar[bool] = False
    """Whether ``start`` needs the accuracy of ``probe`` on the client's data, in ``download.extra[ACCURACY]``."""

    def noise_size(self, net: Network) -> int:
        """How many uniform random numbers a step uses; ``Work.noise`` has as many."""
        return 0

    def probe(self, net: Network, download: Download, memory: Nest | None) -> Tree:
        """The model whose accuracy is measured, for a half that ``probes``."""
        return download.params

    @abstractmethod
    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        """The local state before the first batch; ``memory`` is what this client kept, None at first."""

    @abstractmethod
    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        """The local state after one batch, and the batch's loss. No branch may depend on a tensor's value."""

    @abstractmethod
    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        """The client's memory for its next round, and its upload."""

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        """The client's personal model, given the server's latest download."""
        return download.params


@dataclass(frozen=True)
class ClientWrapper(ClientHalf):
    """A client half around another; every function is the inner half's until it is overridden.

    Its local state and its memory have the inner half's in ``"inner"``.
    """

    inner: ClientHalf

    @property
    def probes(self) -> bool:  # type: ignore[override]
        return self.inner.probes

    def noise_size(self, net: Network) -> int:
        return self.inner.noise_size(net)

    def probe(self, net: Network, download: Download, memory: Nest | None) -> Tree:
        return self.inner.probe(net, download, None if memory is None else memory["inner"])

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        inner = None if memory is None else memory["inner"]
        return {"inner": self.inner.start(net, download, inner)}

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        inner, loss = self.inner.step(net, local["inner"], batch, noise, lr)
        return local | {"inner": inner}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = self.inner.finish(net, download, local["inner"], work)
        return {"inner": memory}, upload

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return self.inner.personal(net, download, memory["inner"])


class Method(Options, ABC):
    """The server half of a method, which also makes the client halves."""

    takes_warmup: ClassVar[bool] = False
    """Whether it can have a warmup: it trains the whole network, and assigns no neurons itself."""

    uploads_weights: ClassVar[bool] = True
    """Whether clients upload the weights they train, so that some of these may stay at the client instead."""

    def phase(self, state: Nest, round: int) -> str:
        """The kind of a round; ``client`` returns the half for it."""
        return "train"

    @property
    def personalised(self) -> bool:
        """Whether each client has a personal model (``ClientHalf.personal``), evaluated on its own data."""
        return False

    def refuse_personal(self, name: str) -> None:
        """Raise a ConfigError if each client has a personal model, so that another (``name``) has no use."""
        if self.personalised:
            raise ConfigError(f"{type(self).__name__} has personal models already; leave {name} out")

    def client(self, phase: str) -> ClientHalf:
        """The client half for a phase; most methods are both halves."""
        assert isinstance(self, ClientHalf), "a method that is no client half needs a client function"
        return self

    @abstractmethod
    def init(self, net: Network, params: Tree, total: int) -> Nest:
        """The server's state before round 1, for a federation of ``total`` clients."""

    def params(self, state: Nest) -> Tree:
        """The global model."""
        params: Tree = state["params"]
        return params

    def evaluated_params(self, net: Network, state: Nest) -> Tree:
        """The parameters that are evaluated; by default ``params(state)`` itself."""
        return self.params(state)

    def measure(self, net: Network, state: Nest) -> dict[str, float]:
        """The columns that a method adds to the record of a round."""
        return {}

    def last_owned(self, state: Nest) -> dict[int, Tensor]:
        """The last neurons of each client, if the method has masks: client -> (neurons,) bool."""
        return {}

    @abstractmethod
    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        """The download of each client, in the cohort's order."""

    @abstractmethod
    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        """The state after a round. ``average`` has the weights and masks of the uploads, which are sorted by client.

        The old state is not used again. A table with a row for every client of the federation may be changed in place,
        since the cost of a copy grows with the federation; everything else is new.
        """


@dataclass(frozen=True)
class Wrapper(Method):
    """A method around another; every function is the inner method's until it is overridden.

    Its state has the inner method's state in ``"inner"``.
    """

    inner: Method

    @property
    def personalised(self) -> bool:
        return self.inner.personalised

    def phase(self, state: Nest, round: int) -> str:
        return self.inner.phase(state["inner"], round)

    def client(self, phase: str) -> ClientHalf:
        return self.inner.client(phase)

    def params(self, state: Nest) -> Tree:
        return self.inner.params(state["inner"])

    def evaluated_params(self, net: Network, state: Nest) -> Tree:
        return self.inner.evaluated_params(net, state["inner"])

    def measure(self, net: Network, state: Nest) -> dict[str, float]:
        return self.inner.measure(net, state["inner"])

    def last_owned(self, state: Nest) -> dict[int, Tensor]:
        return self.inner.last_owned(state["inner"])

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return {"inner": self.inner.init(net, params, total)}

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        return self.inner.downloads(net, state["inner"], cohort)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        return state | {"inner": self.inner.update(net, state["inner"], uploads, average)}


def change_each(
    downloads: Sequence[Download], keys: Sequence[K], change: Callable[[Download, K], Download]
) -> list[Download]:
    """``change(download, key)`` for each client.

    Clients with the same download and the same key share one result, so that its size is measured once.
    """
    pairs = [*zip(downloads, keys, strict=True)]
    changed: dict[tuple[int, K], Download] = {}
    for download, key in pairs:
        if (id(download), key) not in changed:
            changed[id(download), key] = change(download, key)
    return [changed[id(download), key] for download, key in pairs]
