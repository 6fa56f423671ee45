"""The fast engine for small models: many clients in lockstep, each step one call of machine code."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from fedpews.data.federation import Federation
from fedpews.engines.client_round import ClientRound, finish, start
from fedpews.engines.compiled.native import Native, load
from fedpews.engines.compiled.program import CannotCompile, Program, Sheet, check_padding, trace_step
from fedpews.engines.engine import Done, Engine, Job, Schedule
from fedpews.engines.evaluate import Score, score_models
from fedpews.methods.contract import ClientHalf
from fedpews.neurons.network import Network
from fedpews.torch_private import tree_flatten, tree_unflatten
from fedpews.trees import Tree


@dataclass(frozen=True)
class Compiled:
    """A program that is ready to run, and what it was made for."""

    half: ClientHalf
    shapes: list[tuple[torch.Size, torch.dtype]]
    program: Program
    native: Native
    net: Network  # whose frozen parameters are the program's constants


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
        if data.x.device.type != "cpu":
            raise CannotCompile(f"the data are on {data.x.device}, and compiled steps run on the CPU")
        if net.least_batch > 1:
            raise CannotCompile("the model cannot be trained on a single sample (BatchNorm)")
        if net.is_stochastic:
            raise CannotCompile("the model is stochastic (dropout), and compiled steps draw no numbers")
        self.net, self.data, self.schedule = net, data, schedule
        self.workers, self.lanes, self.instead = workers, max(lanes, 2), instead
        self._programs: list[Compiled] = []
        self._refused: list[ClientHalf] = []
        self._pool = ThreadPoolExecutor(workers, "lanes", initializer=torch.set_num_threads, initargs=(1,))

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        done: dict[int, Done] = {}
        rounds = dict(enumerate(self._pool.map(self._begin, jobs)))
        kinds: dict[int, Compiled] = {}
        eager: list[int] = []
        for i, started in rounds.items():
            try:
                kinds[i] = self._compiled(started)
            except CannotCompile as reason:
                if self.instead is None:
                    raise
                self._refuse(started.job.half, reason)
                eager.append(i)
        if self.instead is not None and eager:
            done |= zip(eager, self.instead.train([jobs[i] for i in eager]), strict=True)
        groups = self._group(rounds, kinds)
        results = self._pool.map(lambda group: self._run(group[0], [rounds[i] for i in group[1]]), groups)
        for (_, members), finished in zip(groups, results, strict=True):
            done |= zip(members, finished, strict=True)
        return [done[i] for i in range(len(jobs))]

    def evaluate(self, models: Sequence[Tree], seeds: Sequence[int]) -> list[Score]:
        return score_models(self.net, models, seeds, self.data, self._pool)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self.instead is not None:
            self.instead.close()

    def _begin(self, job: Job) -> ClientRound:
        return start(self.net.at(job.seed), self.data, self.schedule, job)

    def _group(
        self, rounds: Mapping[int, ClientRound], kinds: Mapping[int, Compiled]
    ) -> list[tuple[Compiled, list[int]]]:
        """Jobs of one kind, ``lanes`` at a time. Long ones together: a group takes as many steps as its longest."""
        groups = []
        for compiled in self._programs:
            members = [i for i, kind in kinds.items() if kind is compiled]
            members.sort(key=lambda i: -len(rounds[i].sizes))
            groups += [(compiled, members[i : i + self.lanes]) for i in range(0, len(members), self.lanes)]
        return groups

    def _refuse(self, half: ClientHalf, reason: CannotCompile) -> None:
        if half not in self._refused:
            self._refused.append(half)
            logging.getLogger("fedpews").warning(
                "%s runs on the eager engine: %s", type(half).__name__, reason
            )

    def _compiled(self, started: ClientRound) -> Compiled:
        """The program for this kind of job, made when it is the first of its kind."""
        half, data, size = started.job.half, self.data, self.schedule.batch_size
        if half in self._refused:
            raise CannotCompile("refused before")
        leaves, spec = tree_flatten(started.local)
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        net = self.net.at(started.job.seed) if self.net.frozen else self.net
        for known in self._programs:
            same = known.half == half and known.program.spec == spec and known.shapes == shapes
            if same and known.net is net:
                return known
        first = started.order[: started.sizes[0]]
        check_padding(
            net, half, started.local, data.x[first], data.y[first], started.noise[0], started.job.lr
        )
        program = trace_step(net, half, started.local, self.lanes, size, data.x, data.y)
        sheet = Sheet.blank(1, self.lanes, size, started.noise.shape[1])
        stacked = [torch.stack([leaf] * self.lanes) for leaf in leaves]
        native = load(program, sheet, data.x, data.y, stacked, self.workers)
        self._programs.append(Compiled(half, shapes, program, native, net))
        return self._programs[-1]

    def _run(self, compiled: Compiled, rounds: list[ClientRound]) -> list[Done]:
        """All steps of a group of lanes."""
        program = compiled.program
        steps = max(len(started.sizes) for started in rounds)
        sheet = Sheet.blank(steps, self.lanes, self.schedule.batch_size, rounds[0].noise.shape[1])
        if len({len(started.sizes) for started in rounds}) > 1 or len(rounds) < self.lanes:
            sheet.noise.zero_()  # steps that are not taken still compute
        for i, started in enumerate(rounds):
            fill_lane(sheet, i, started)
        # idle lanes repeat a state, read sample 0 with weight 0, and so take no step
        filled = [
            tree_flatten(started.local)[0] for started in rounds + rounds[-1:] * (self.lanes - len(rounds))
        ]
        state = [torch.stack(leaves) for leaves in zip(*filled, strict=True)]
        compiled.native.run(steps, sheet, [self.data.x, self.data.y, *state, *program.constants])
        locals_ = [tree_unflatten([leaf[i] for leaf in state], program.spec) for i in range(len(rounds))]
        return [
            finish(
                self.net.at(started.job.seed),
                self.data,
                started,
                local,
                sheet.losses[: len(started.sizes), i],
            )
            for i, (started, local) in enumerate(zip(rounds, locals_, strict=True))
        ]


def fill_lane(sheet: Sheet, i: int, started: ClientRound) -> None:
    """Write a client's batches and numbers on the sheet; the rest of a batch, and of the steps, has weight 0."""
    steps, (_, _, size) = len(started.sizes), sheet.rows.shape
    sheet.lr[i] = started.job.lr
    sheet.noise[:steps, i] = started.noise[:-1]
    if len(started.order) == steps * size:
        sheet.rows[:steps, i] = started.order.view(steps, size)
        sheet.weight[:steps, i] = 1
    else:
        present = torch.arange(size) < torch.tensor(started.sizes)[:, None]  # (steps, batch)
        # padding reads a sample of the client's own, with weight 0
        sheet.rows[:steps, i].masked_fill_(~present, started.order[0])
        sheet.rows[:steps, i].masked_scatter_(present, started.order)
        sheet.weight[:steps, i] = present.to(sheet.weight.dtype)
