"""The laws that every method obeys, as checks to run on your own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fedpews.methods.average import Average
from fedpews.methods.contract import (
    ClientHalf,
    ClientWrapper,
    Cohort,
    Download,
    Method,
    Rate,
    Upload,
    Work,
    Wrapper,
)
from fedpews.methods.subnetwork import AssignedClient
from fedpews.methods.wire import decode_download, decode_upload, encode_download, encode_upload
from fedpews.neurons.network import Batch, Network
from fedpews.results.files import read_nest, write_nest
from fedpews.seeds import global_generator
from fedpews.testing.playground import Played, Playground, Samples, small_clients, small_network
from fedpews.trees import Nest, flatten, leaves, pick, unflatten
from fedpews.warmup import Fixed, Learned, with_warmup
from fedpews.warmup.masks import contiguous


def check_method(
    method: Method,
    net: Network | None = None,
    clients: Sequence[Samples] | None = None,
    *,
    lr: float = 0.1,
    rounds: int = 3,
) -> None:
    """Raise an AssertionError, in a sentence that says what is wrong, unless a method keeps its contract.

    Its state, memory and local state are nested dicts of tensors that survive a checkpoint; no function changes
    what it is given; the same seed gives the same numbers; what is not sent is not used; the order of uploads
    does not matter; what no client owns stays; clients' steps can be vectorised; and if it takes a warmup, all of
    this holds inside one, where what one client alone owns moves as if there were no other.

    Args:
        net: a network to try it on; by default a small one.
        clients: (x, y) of each client; by default three clients of different classes.
        lr: local learning rate.
        rounds: how many rounds to try, with two thirds of the clients in each but the first.
    """
    net = small_network() if net is None else net
    clients = small_clients() if clients is None else clients
    check_laws(Playground(method, net, clients, lr=lr), rounds)
    if method.takes_warmup:
        check_warmup(Playground(method, net, clients, lr=lr), rounds)


def check_laws(ground: Playground, rounds: int = 3) -> None:
    """All laws but those about the warmup."""
    net = ground.net
    check_nests(ground, rounds)
    check_purity(ground, rounds)
    played = ground.partly(rounds)
    check_finite(played)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "nest"

        def through_disk(nest: Nest) -> Nest:
            write_nest(path, nest, {})
            return read_nest(path)[0]

        saved = replace(ground, keep=through_disk)
        turned = replace(
            ground,
            keep=_backwards,
            reply=lambda u: u if u.mask is None else replace(u, mask=_backwards(u.mask)),
        )
        sent = replace(
            ground,
            send=lambda d: decode_download(net, encode_download(net, d)),
            reply=lambda u: decode_upload(net, encode_upload(net, u)),
        )
        for other, sentence in (
            (ground, "two runs with the same seed differ: draw only from the noise given"),
            (
                saved,
                "a run that is saved and loaded in every round differs: go by name, not by a dict's order",
            ),
            (
                turned,
                "a run whose dicts come back in another order differs: go by name; add numbers of several tensors up "
                "in sorted(tree)'s order, as trees.norm does",
            ),
            (
                sent,
                "a run over the wire differs: something is used that is not sent. Send it (Download.extra, "
                "upload.adding), and take upload.change(net, old) for what a client changed",
            ),
        ):
            check_same(played, other.partly(rounds), sentence)
    check_order(ground, rounds)
    check_unowned(ground, rounds)
    check_vectorised(ground, rounds)


def check_warmup(ground: Playground, rounds: int = 3) -> None:
    """A method inside a warmup: no rounds are the bare method, all neurons too, and every law holds."""
    method, bare = ground.method, ground.partly(rounds)
    none = replace(ground, method=with_warmup(method, rounds=0)).partly(rounds)
    check_same(bare, none, "a warmup of no rounds differs from the bare method", deep=False)
    whole = replace(ground, method=Whole(method)).partly(rounds)
    check_same(bare, whole, "training with every neuron open differs from the bare method", deep=False)
    check_alone(method, rounds)
    for masks in (Learned(), Fixed()):
        check_laws(replace(ground, method=with_warmup(method, rounds - 1, masks)), rounds)


def check_alone(method: Method, rounds: int = 3) -> None:
    """Neurons that one client alone owns move as if there were no other client.

    It takes a network in which every parameter belongs to a neuron, so that fixed masks share nothing.
    """
    with global_generator(0):
        layers = [nn.Linear(3, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)]
    net, clients = Network(nn.Sequential(*layers), torch.zeros(1, 3)), small_clients()
    together = Playground(with_warmup(method, rounds, Fixed()), net, clients).play(rounds)
    for i, mine in enumerate(clients):
        neurons = contiguous(net.graph, i, len(clients))
        alone = Playground(Whole(method, neurons), net, [mine]).play(rounds)
        owned = net.graph.expand(neurons)
        for round, (a, b) in enumerate(zip(together.params, alone.params, strict=True), 1):
            for name, mask in owned.items():
                same = torch.allclose(a[name] * mask, b[name] * mask, atol=1e-5)
                assert same, (
                    f"in round {round} others change {name} where client {i} alone owns it: average over the owners "
                    "of an element (average), not over all clients, or set takes_warmup = False"
                )


def check_nests(ground: Playground, rounds: int) -> None:
    """State, memory and local state are nested dicts of tensors, and a step keeps the local state's shape."""

    class Watched(ClientWrapper):
        def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> Any:
            _check_nest(local, "the local state")
            moved, loss = super().step(net, local, batch, noise, lr)
            _check_nest(moved, "the local state after a step")
            before, after = _signature(local), _signature(moved)
            assert before == after, f"a step changes the local state's structure from {before} to {after}"
            assert getattr(loss, "shape", None) == (), f"a step's loss must be a scalar tensor, got {loss}"
            return moved, loss

    replace(ground, half=Watched, keep=lambda nest: _check_nest(nest, "state or memory")).partly(rounds)


def check_purity(ground: Playground, rounds: int) -> None:
    """No function changes what it is given, but for tables that ``update`` changes in place and returns."""
    guarded: Any = Guarded
    replace(ground, method=guarded(ground.method), half=guarded).partly(rounds)


def check_finite(played: Played) -> None:
    for round, params in enumerate(played.params, 1):
        for name, value in params.items():
            assert bool(torch.isfinite(value).all()), (
                f"{name} is not finite after round {round}: guard divisions, or try check_method(..., lr=0.01)"
            )


def check_same(a: Played, b: Played, sentence: str, *, deep: bool = True) -> None:
    """Two runs are equal to the bit: models after every round and, if ``deep``, states and memories."""
    for round, (one, other) in enumerate(zip(a.params, b.params, strict=True), 1):
        for name, value in one.items():
            assert equal(value, other[name]), f"{sentence} ({name} in round {round})"
    if deep:
        for what in ("state", "memories"):
            one, other = (dict(leaves(getattr(played, what))) for played in (a, b))
            assert one.keys() == other.keys(), f"{sentence} ({what} have other names)"
            for name, value in one.items():
                assert equal(value, other[name]), f"{sentence} ({what}: {name})"


def check_order(ground: Playground, rounds: int) -> None:
    """Uploads in another order give the same model, but for rounding."""

    class Turned(Wrapper):
        def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
            turned = Average(average.weights[::-1], average.masks[::-1])
            return super().update(net, state, uploads[::-1], turned)

    # FedPM and the like may round a draw the other way later on, so one round is compared
    (one,), (other,) = ground.play(1).params, replace(ground, method=Turned(ground.method)).play(1).params
    for name in ground.net.names:
        same = torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6)
        assert same, f"{name} depends on the order in which uploads arrive: use average, or sums"


def check_unowned(ground: Playground, rounds: int) -> None:
    """An element that no upload of a round covers keeps its value."""
    played = ground.partly(rounds)
    before = ground.method.params(ground.method.init(ground.net, ground.net.initial(), len(ground.clients)))
    for round, (after, uploads) in enumerate(zip(played.params, played.uploads, strict=True), 1):
        if any(u.neurons is not None or u.mask is not None for u in uploads):
            covered = ground.average(uploads).covered(before)
            for name, value in after.items():
                kept = torch.where(covered[name], value, before[name])
                assert torch.equal(value, kept), (
                    f"{name} changes in round {round} where no client owns it: mask the move with average.covered(), "
                    "or set takes_warmup = False"
                )
        before = after


def check_vectorised(ground: Playground, rounds: int) -> None:
    """A step of two clients at once gives the numbers of two steps, so that engines may run them together."""
    played, total = ground.play(rounds), len(ground.clients)
    _check_step(ground, 1, ground.method.init(ground.net, ground.net.initial(), total), {})
    _check_step(ground, rounds + 1, played.state, played.memories)


def _check_step(ground: Playground, round: int, state: Nest, memories: Mapping[int, Nest]) -> None:
    method, net, lr, total = ground.method, ground.net, ground.lr, len(ground.clients)
    half = method.client(method.phase(state, round))
    downloads = method.downloads(net, state, Cohort(round, tuple(range(total)), total, 0))[:2]
    begun = [ground.begin(half, i, d, memories.get(i)) for i, d in enumerate(downloads)]
    states, batches, noise = zip(*begun, strict=True)
    x, y = (torch.stack([b[0][k] for b in batches]) for k in (0, 1))
    one_by_one = [half.step(net, s, Batch(x[i], y[i]), noise[i][0], lr) for i, s in enumerate(states)]
    assert len({str(_signature(local)) for local in states}) == 1, (
        "clients' local states differ in structure: start gives every client the same names and shapes, with zeros for "
        "what a new one lacks"
    )
    layout = flatten(states[0])[1]
    stacked = [torch.stack(values) for values in zip(*(flatten(s)[0] for s in states), strict=True)]

    def step(values: list[Tensor], x: Tensor, y: Tensor, noise: Tensor) -> tuple[list[Tensor], Tensor]:
        moved, loss = half.step(net, unflatten(iter(values), layout), Batch(x, y), noise, lr)
        return flatten(moved)[0], loss

    try:
        moved, losses = torch.vmap(step)(stacked, x, y, torch.stack([n[0] for n in noise]))
    except RuntimeError as error:
        raise AssertionError(
            f"a step cannot be vectorised; no branch may depend on a tensor's value ({error})"
        ) from error
    for i, (local, loss) in enumerate(one_by_one):
        assert torch.allclose(losses[i], loss, atol=1e-5), "a vectorised step has another loss"
        for (name, value), together in zip(leaves(local), moved, strict=True):
            same = torch.allclose(together[i], value, rtol=1e-4, atol=1e-5)
            assert same, f"a vectorised step gives another {name}"


@dataclass(frozen=True)
class Whole(Wrapper):
    """A method whose clients are all assigned the same neurons; by default every neuron, so that nothing is masked."""

    neurons: Tensor | None = field(default=None, compare=False)

    def client(self, phase: str) -> ClientHalf:
        return AssignedClient(self.inner.client(phase))

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        neurons = torch.ones(net.graph.size, dtype=torch.bool) if self.neurons is None else self.neurons
        return [replace(download, neurons=neurons) for download in super().downloads(net, state, cohort)]


def _check_nest(nest: Nest, what: str, path: str = "") -> Nest:
    assert isinstance(nest, dict), (
        f"{what} must be a nested dict of tensors; {path or 'it'} is {type(nest).__name__}"
    )
    for key, value in nest.items():
        assert isinstance(key, str), f"{what} must have texts as keys; {path} has {key!r}"
        if not isinstance(value, Tensor):
            _check_nest(value, what, f"{path}/{key}")
    return nest


def _signature(nest: Nest) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(leaf.shape), leaf.dtype) for name, leaf in leaves(nest)]


def _backwards(nest: Nest) -> Nest:
    return {
        key: _backwards(value) if isinstance(value, dict) else value
        for key, value in reversed(list(nest.items()))
    }


class Guarded:
    """A method or a client half whose functions must not change their arguments."""

    FUNCTIONS = ("init", "params", "downloads", "update", "start", "step", "finish", "probe")

    def __init__(self, inner: Method | ClientHalf) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.inner, name)
        if name not in self.FUNCTIONS:
            return function

        def guarded(*given: Any) -> Any:
            before: list[Any] = [None if isinstance(v, Network) else copy.deepcopy(v) for v in given]
            result = function(*given)
            returned = {id(leaf) for _, leaf in leaves(result)} if name == "update" else set()
            for was, now in zip(before, given, strict=True):
                if name == "update" and isinstance(now, dict):
                    paths = tuple(path for path, leaf in leaves(now) if id(leaf) not in returned)
                    was, now = (pick(dict(leaves(nest)), paths) for nest in (was, now))
                assert isinstance(now, Network) or equal(was, now), (
                    f"{name} changes what it is given; return new values"
                )
            return result

        return guarded


def equal(a: Any, b: Any) -> bool:
    """Whether two values of a method (nests, downloads, uploads) are the same to the bit, NaN included."""
    if isinstance(a, Tensor) and a.is_floating_point():
        return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Download | Upload | Work | Average):
        return all(equal(getattr(a, part.name), getattr(b, part.name)) for part in fields(a) if part.compare)
    return bool(a == b)
