"""The fast engine for small models: many clients in lockstep, each step one call of compiled code."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedpews.data.federation import Federation
from fedpews.data.inputs import Lazy, take
from fedpews.engines.compiled.native import Native, compiler_version, load
from fedpews.engines.compiled.program import (
    CannotCompile,
    Looped,
    Program,
    Sheet,
    check_padding,
    load_looped,
    trace_step,
)
from fedpews.engines.eager import ClientRound, finish, start
from fedpews.engines.engine import Diverged, Done, Engine, Job, Schedule
from fedpews.engines.hardware import keep_freed_memory
from fedpews.errors import CheckpointError
from fedpews.methods.contract import ClientHalf
from fedpews.neurons.network import Network
from fedpews.torch_private import tree_leaves
from fedpews.trees import Layout, flatten, map_leaves, unflatten


@dataclass(frozen=True, eq=False)
class Compiled:
    """A program that is ready to run, and the kind of client it was made for."""

    half: ClientHalf
    shapes: list[tuple[torch.Size, torch.dtype]]
    program: Program
    code: Native | Looped
    net: Network  # whose frozen parameters are the program's constants


@dataclass(frozen=True)
class Lane:
    """A client before its first step, its local state laid flat."""

    client: ClientRound
    leaves: list[Tensor]
    layout: Layout


@dataclass(frozen=True)
class Crowd:
    """All clients of one kind in a round, those with the most steps first: one sheet and one stacked state.

    With many small clients calls cost more than numbers, so what is done for each of them is done for all at once; the
    groups that run are slices.
    """

    compiled: Compiled
    clients: list[ClientRound]
    sheet: Sheet
    state: list[Tensor]  # stacked; it changes in place
    running: list[Future[None]]


class CompiledEngine(Engine):
    """Jobs of one kind run in lockstep, ``lanes`` at a time: their states are stacked and a step is one call.

    A lane's numbers do not depend on its neighbours, so neither the number of workers nor the mix of seeds
    and clients changes a result. A single lane would (torch multiplies a batch of one matrix by another
    routine), so there are always two or more.

    Args:
        lanes: how many clients (of any seeds) a program steps at once.
        instead: runs the jobs that cannot be compiled; without it they raise CannotCompile.
    """

    name = "compiled"

    def __init__(
        self,
        net: Network,
        data: Federation,
        schedule: Schedule,
        workers: int,
        lanes: int = 2,
        instead: Engine | None = None,
    ) -> None:
        if isinstance(data.x, Lazy):
            raise CannotCompile(
                "inputs are read from a Dataset batch by batch, and compiled steps read memory"
            )
        if schedule.augment is not None:
            raise CannotCompile("batches are augmented, and compiled steps draw no numbers")
        if net.least_batch > 1:
            raise CannotCompile("the model cannot be trained on a single sample (BatchNorm)")
        if net.is_stochastic:
            raise CannotCompile("the model is stochastic (dropout), and compiled steps draw no numbers")
        keep_freed_memory()
        self.net, self.data, self.schedule = net, data, schedule
        self.workers, self.lanes, self.instead = workers, max(lanes, 2), instead
        self._programs: list[Compiled] = []
        # the kinds of clients that cannot be compiled; of a resumed run, also those that were in earlier rounds
        self._eager: set[str] = set()
        self._were_compiled: set[str] = set()
        # a device takes one group of clients after the other, and fills itself with it
        threads = workers if data.device.type == "cpu" else 1
        self._pool = ThreadPoolExecutor(threads, "lanes", initializer=torch.set_num_threads, initargs=(1,))
        # what the server computes between two rounds is too small for several cores, too
        self._servers_threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def train(self, jobs: Sequence[Job]) -> list[Done | Diverged]:
        done: dict[int, Done | Diverged] = {}
        # in one of the engine's threads, where torch takes one core: with several its sums would depend on their number
        lanes = self._pool.submit(lambda: [self._begin(job) for job in jobs]).result()
        kinds: dict[Compiled, list[int]] = {}
        eager: list[int] = []
        # long ones together: a group takes as many steps as its longest
        for i, lane in sorted(enumerate(lanes), key=lambda pair: -len(pair[1].client.sizes)):
            try:
                kinds.setdefault(self._compiled(lane), []).append(i)
            except CannotCompile as reason:
                if self.instead is None:
                    raise
                self._refuse(_kind(lane.client.job.half), reason)
                eager.append(i)
        if self.instead is not None and eager:
            done |= zip(eager, self.instead.train([jobs[i] for i in eager]), strict=True)
        # the threads run machine code only: Python code is no faster in several threads, which wait for its lock
        crowds = [
            (members, self._launch(kind, [lanes[i] for i in members])) for kind, members in kinds.items()
        ]
        for members, crowd in crowds:
            for group in crowd.running:
                group.result()
            done |= zip(members, self._pool.submit(self._finish, crowd).result(), strict=True)
        return [done[i] for i in range(len(jobs))]

    def close(self) -> None:
        torch.set_num_threads(self._servers_threads)
        self._pool.shutdown(cancel_futures=True)
        if self.instead is not None:
            self.instead.close()

    def made_with(self) -> dict[str, str]:
        # the kinds of clients so far; each keeps its engine for the whole run
        compiled = {_kind(known.half) for known in self._programs} | self._were_compiled
        return super().made_with() | {
            "compiler": compiler_version(),
            "compiled": " ".join(sorted(compiled)),
            "eager": " ".join(sorted(self._eager)),
        }

    def go_on(self, made_with: Mapping[str, str], *, may_change: bool) -> None:
        if not may_change:
            self._were_compiled = set(made_with.get("compiled", "").split())
            self._eager = set(made_with.get("eager", "").split())

    def _begin(self, job: Job) -> Lane:
        client = start(self.net.at(job.seed), self.data, self.schedule, job)
        return Lane(client, *flatten(client.local))

    def _refuse(self, kind: str, reason: CannotCompile) -> None:
        if kind in self._were_compiled:
            raise CheckpointError(
                f"the steps of {kind} were compiled in the rounds before, and now cannot be: {reason}. Fix "
                "that, or accept numbers that differ by rounding: --set runtime.resume=changed"
            )
        if kind not in self._eager:
            self._eager.add(kind)
            logging.getLogger("fedpews").warning("%s runs on the eager engine: %s", kind, reason)

    def _compiled(self, lane: Lane) -> Compiled:
        """The program for this kind of job, made when it is the first of its kind."""
        client, data, size = lane.client, self.data, self.schedule.batch_size
        half = client.job.half
        if not all(isinstance(leaf, Tensor) for leaf in lane.leaves):
            raise CannotCompile("its local state has values that are not tensors")
        shapes = [(leaf.shape, leaf.dtype) for leaf in lane.leaves]
        net = self.net.at(client.job.seed) if self.net.frozen else self.net
        for known in self._programs:
            same = known.half == half and known.program.layout == lane.layout and known.shapes == shapes
            if same and known.net is net:
                return known
        if _kind(half) in self._eager:
            raise CannotCompile("it was refused before")
        first = client.order[: client.sizes[0]]
        batch = take(data.x, first), data.y[first]
        check_padding(net, half, client.local, *batch, client.noise[0], client.job.lr)
        program = trace_step(net, half, client.local, self.lanes, size, data.x, data.y)
        code: Native | Looped
        if data.device.type == "cpu":
            code = load(program, data.x, data.y, self.workers)
        else:
            code = load_looped(program, data.x, data.y)
        self._programs.append(Compiled(half, shapes, program, code, net))
        return self._programs[-1]

    def _launch(self, compiled: Compiled, lanes: Sequence[Lane]) -> Crowd:
        """Start the steps of all lanes of one kind."""
        clients, width = [lane.client for lane in lanes], self.lanes
        idle = -len(lanes) % width
        steps, numbers = len(clients[0].sizes), clients[0].noise.shape[1]
        sheet = Sheet.blank(steps, len(lanes) + idle, self.schedule.batch_size, numbers, self.data.device)
        fill(sheet, clients)
        # idle lanes repeat a state, read sample 0 with weight 0, and so take no step
        filled = [lane.leaves for lane in lanes]
        filled += filled[-1:] * idle
        state = [torch.stack(leaves) for leaves in zip(*filled, strict=True)]
        data = [*tree_leaves(self.data.x), self.data.y]
        running = []
        for first in range(0, len(clients), width):
            inputs = [*data, *(leaf[first : first + width] for leaf in state), *compiled.program.constants]
            group = sheet.part(first, width)
            running.append(self._pool.submit(compiled.code.run, len(clients[first].sizes), group, inputs))
        return Crowd(compiled, clients, sheet, state, running)

    def _finish(self, crowd: Crowd) -> list[Done | Diverged]:
        lengths = torch.tensor([len(client.sizes) for client in crowd.clients])
        # each client's mean over the steps it took; not every device has double precision
        sums = crowd.sheet.losses.cpu().double().cumsum(0)[lengths - 1, torch.arange(len(lengths))]
        # one call for each tensor splits it into the clients' own
        after = zip(*(leaf.unbind() for leaf in crowd.state), strict=True)
        layout = crowd.compiled.program.layout
        return [
            _apart(
                finish(self.net.at(client.job.seed), self.data, client, unflatten(iter(leaves), layout), loss)
            )
            for client, leaves, loss in zip(crowd.clients, after, (sums / lengths).tolist(), strict=False)
        ]


def _apart(done: Done | Diverged) -> Done | Diverged:
    """The result with its memory copied: a slice would keep the states of all clients alive."""
    if isinstance(done, Diverged) or not done.memory:
        return done
    return replace(done, memory=map_leaves(Tensor.clone, done.memory))


def _kind(half: ClientHalf) -> str:
    return type(half).__name__


def fill(sheet: Sheet, clients: Sequence[ClientRound]) -> None:
    """Write the clients' batches and numbers on the first lanes of a blank sheet."""
    count, (steps, _, size), device = len(clients), sheet.rows.shape, sheet.rows.device
    sheet.lr[:count] = torch.tensor([client.job.lr for client in clients], device=device)
    if sheet.noise.numel():
        sheet.noise[:, :count] = pad_sequence([client.noise[:-1] for client in clients])
    sizes = torch.tensor([client.sizes + [0] * (steps - len(client.sizes)) for client in clients])
    present = (torch.arange(size) < sizes[:, :, None]).to(device)  # (clients, steps, batch)
    # padding reads a sample of the client's own, with weight 0
    order, samples = torch.cat([client.order for client in clients]), sizes.sum(1)
    starts = (samples.cumsum(0) - samples).to(device)
    firsts = order[starts][:, None, None].expand(count, steps, size)
    rows = firsts.masked_scatter(present, order)
    sheet.rows[:, :count] = rows.transpose(0, 1)
    sheet.weight[:, :count] = present.transpose(0, 1).to(sheet.weight.dtype)
