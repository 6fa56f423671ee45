"""One step of several clients at once, traced from a method's own code into one graph."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedpews.data.inputs import prepare
from fedpews.errors import first_line
from fedpews.methods.contract import ClientHalf
from fedpews.neurons.network import Batch, Network
from fedpews.torch_private import merge_common, tree_leaves, tree_map_only
from fedpews.trees import Layout, Nest, flatten, unflatten


class CannotCompile(Exception):
    """Why this network or method has to run on the eager engine."""


class Sheet(NamedTuple):
    """A lane group's whole round, laid out before its first step. A padded sample or step has weight 0."""

    rows: Tensor  # (steps, lanes, batch) int64, rows of the resident data
    weight: Tensor  # (steps, lanes, batch)
    noise: Tensor  # (steps, lanes, numbers)
    losses: Tensor  # (steps, lanes), written by the steps
    lr: Tensor  # (lanes,), an input so that a schedule of rates needs no second program

    @classmethod
    def blank(
        cls, steps: int, lanes: int, batch_size: int, numbers: int, device: torch.device | None = None
    ) -> Sheet:
        zeros = partial(torch.zeros, device=device)
        return cls(
            zeros(steps, lanes, batch_size, dtype=torch.int64),
            zeros(steps, lanes, batch_size),
            zeros(steps, lanes, numbers),
            zeros(steps, lanes),
            zeros(lanes),
        )

    @property
    def by_step(self) -> tuple[Tensor, ...]:
        return self[:4]

    def part(self, first: int, lanes: int) -> Sheet:
        """The sheet of so many lanes from ``first`` on; it is the same memory."""
        by_step = (values[:, first : first + lanes] for values in self.by_step)
        return Sheet._make([*by_step, self.lr[first : first + lanes]])

    def at(self, step: int) -> list[Tensor]:
        """What one step reads and writes."""
        return [*(values[step] for values in self.by_step), self.lr]


@dataclass(frozen=True)
class Program:
    """A step of ``lanes`` clients in one graph. It changes the stacked state and the sheet in place."""

    graph: fx.GraphModule  # (rows, weight, noise, lr, *x, y, *state, *constants) -> (*changed state, loss)
    constants: tuple[Tensor, ...]  # frozen parameters, integer buffers, index tables
    changes: tuple[bool, ...]  # which leaves of the state a step changes
    layout: Layout  # how the leaves make up the local state
    lanes: int

    def fingerprint(self) -> str:
        """A hash of what is compiled; the values of state and constants are inputs, so they do not count."""
        digest = hashlib.blake2b(repr((self.changes, self.lanes)).encode(), digest_size=16)
        # a node's name depends on what was traced before, its number does not
        numbers: dict[fx.Node, str] = {}
        for node in self.graph.graph.nodes:
            numbers[node] = f"%{len(numbers)}"
            given = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
            value = node.meta["val"] if node.op == "placeholder" else None
            kind = "" if value is None else f"{tuple(value.shape)}{value.dtype}"
            digest.update(f"{node.op} {node.op != 'placeholder' and node.target} {given} {kind}\n".encode())
        return digest.hexdigest()

    def example(self, x: Any, y: Tensor) -> tuple[Any, ...]:
        """Arguments of ``Step`` to compile it with: the data, and zeros for what a step reads and writes."""
        nodes = [node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"]
        zeros = [torch.zeros(value.shape, dtype=value.dtype, device=value.device) for value in nodes]
        rows, weight, noise, lr, *rest = zeros
        inputs = tree_leaves(x)
        state = rest[len(inputs) + 1 :][: len(self.changes)]
        return rows, weight, noise, torch.zeros_like(lr), lr, inputs, y, state, [*self.constants]


class Step(nn.Module):
    """The program as a module to export: it writes the results back to where they came from."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.graph, self.changes = program.graph, program.changes

    def forward(
        self,
        rows: Tensor,
        weight: Tensor,
        noise: Tensor,
        losses: Tensor,
        lr: Tensor,
        x: Sequence[Tensor],
        y: Tensor,
        state: Sequence[Tensor],
        constants: Sequence[Tensor],
    ) -> tuple[()]:
        *moved, loss = self.graph(rows, weight, noise, lr, *x, y, *state, *constants)
        changed = [leaf for leaf, changes in zip(state, self.changes, strict=True) if changes]
        # in place: the loop over steps passes the same tensors every time
        for leaf, value in zip(changed, moved, strict=True):
            leaf.copy_(value)
        losses.copy_(loss)
        return ()


def trace_step(
    net: Network, half: ClientHalf, local: Nest, lanes: int, batch_size: int, x: Any, y: Tensor
) -> Program:
    """The step of ``half`` for ``lanes`` clients whose local states look like ``local``."""
    leaves, layout = flatten(local)
    inputs, form = tree_leaves(x), x

    def step(
        rows: Tensor,
        weight: Tensor,
        noise: Tensor,
        lr: Tensor,
        x: list[Tensor],
        y: Tensor,
        state: list[Tensor],
    ) -> Any:
        # vmap takes a list of tensors; the batch has the form of the data (a tensor, a tuple or a dict)
        samples = iter([leaf[rows] for leaf in x])
        batch = Batch(prepare(tree_map_only(Tensor, lambda _: next(samples), form)), y[rows], weight)
        moved, loss = half.step(net, unflatten(iter(state), layout), batch, noise, lr)
        after, after_layout = flatten(moved)
        if after_layout != layout:
            raise CannotCompile("a step changes the structure of its local state")
        active = weight.sum() > 0
        # a client whose steps are over keeps its state to the bit; a leaf that no step touches stays the same object,
        # by which _drop_unchanged knows it
        kept = [a if a is b else torch.where(active, a, b) for a, b in zip(after, state, strict=True)]
        return kept, loss

    def all_lanes(*tensors: Tensor) -> list[Tensor]:
        rows, weight, noise, lr, *rest = tensors
        x, y, state = rest[: len(inputs)], rest[len(inputs)], rest[len(inputs) + 1 :]
        # every client has its own rows, weights, noise, rate and state; the data is common to all
        every = torch.vmap(step, in_dims=(0, 0, 0, 0, None, None, 0))
        moved, loss = every(rows, weight, noise, lr, x, y, state)
        return [*moved, loss]

    sheet = Sheet.blank(1, lanes, batch_size, half.noise_size(net), y.device)
    rows, weight, noise, _, lr = sheet.at(0)
    # (lanes, *shape of the leaf)
    stacked = [torch.stack([leaf] * lanes) for leaf in leaves]
    try:
        graph = make_fx(all_lanes)(rows, weight, noise, lr, *(leaf[:2] for leaf in inputs), y[:2], *stacked)
    except CannotCompile:
        raise
    except Exception as error:  # whatever stops a foreign module or method from being traced
        raise CannotCompile(f"its step cannot be traced: {first_line(error)}") from error
    # in this order: the state is known as the last inputs, and constants are lifted to inputs behind it
    changes = _drop_unchanged(graph, len(leaves))
    constants = _lift_constants(graph)
    # the two passes of a warmup step have their first layer in common
    graph = fx.GraphModule(graph, merge_common(graph.graph))
    return Program(graph, constants, changes, layout, lanes)


def check_padding(
    net: Network, half: ClientHalf, local: Nest, x: Any, y: Tensor, noise: Tensor, lr: float
) -> None:
    """Refuse a step in which padding is not harmless: BatchNorm, or any mixing of the samples of a batch."""
    size = min(4, len(y))
    real = torch.cat([torch.ones(size, device=y.device), torch.zeros(size, device=y.device)])
    outcomes = []
    # the same real samples beside different padding: any difference is the padding's influence
    for scale in (1.0, -3.0):
        padded = tree_map_only(Tensor, partial(_pad, size=size, scale=scale), x)
        batch = Batch(padded, torch.cat([y[:size]] * 2), real)
        moved, loss = half.step(net, local, batch, noise, lr)
        outcomes.append([loss, *flatten(moved)[0]])
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(*outcomes, strict=True)):
        raise CannotCompile(
            "samples of a batch influence each other (BatchNorm?), so batches cannot be padded"
        )


def _pad(x: Tensor, size: int, scale: float) -> Tensor:
    """Real samples, then as many padded ones: scaled, or in another order where x holds no quantities (tokens)."""
    real = x[:size]
    return torch.cat([real, scale * real if x.is_floating_point() else real if scale > 0 else real.flip(0)])


def _drop_unchanged(graph: fx.GraphModule, leaves: int) -> tuple[bool, ...]:
    """Remove the leaves that a step leaves unchanged from the outputs; for each leaf, whether it changes."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"][-leaves:] if leaves else []
    output = next(node for node in graph.graph.nodes if node.op == "output")
    *state, loss = output.args[0]
    changes = tuple(after is not before for after, before in zip(state, inputs, strict=True))
    output.args = ([node for node, changed in zip(state, changes, strict=True) if changed] + [loss],)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return changes


def _lift_constants(graph: fx.GraphModule) -> tuple[Tensor, ...]:
    """Turn the tensors that the graph holds into inputs: torch.export loses those of a nested graph."""
    constants: dict[str, tuple[fx.Node, Tensor]] = {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        # a constant that is used twice becomes one input
        if node.target not in constants:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"constant_{len(constants)}")
            value = getattr(graph, node.target).detach()
            last.meta["val"] = value
            constants[node.target] = last, value
        node.replace_all_uses_with(constants[node.target][0])
        graph.graph.erase_node(node)
    graph.recompile()
    return tuple(value for _, value in constants.values())


class Looped:
    """A step that is called once for each step of a sheet; all lanes' clients are in every call."""

    def __init__(self, step: Callable[..., object], inputs: int, state: int) -> None:
        self._step, self._inputs, self._state = step, inputs, state

    def run(self, steps: int, sheet: Sheet, inputs: Sequence[Tensor]) -> None:
        """Take the first steps of a sheet; ``inputs`` are x, y, the state and the constants.

        The state and the sheet's losses change in place.
        """
        x, (y, *rest) = list(inputs[: self._inputs]), inputs[self._inputs :]
        state, constants = rest[: self._state], rest[self._state :]
        for step in range(steps):
            self._step(*sheet.at(step), x, y, state, constants)


def load_looped(program: Program, x: Any, y: Tensor) -> Looped:
    """The program for the device of the data.

    Where torch cannot make kernels for it (no Triton, say), the traced step itself is run: many small clients still
    share each of its kernels.
    """
    step = Step(program)
    compiled: Callable[..., object] = torch.compile(step, dynamic=False)
    try:
        compiled(*program.example(x, y))
    except Exception as error:  # noqa: BLE001 - whatever the code generator cannot do
        logging.getLogger("fedpews").warning("steps run as they were traced: %s", first_line(error))
        compiled = step
    return Looped(compiled, len(tree_leaves(x)), len(program.changes))
