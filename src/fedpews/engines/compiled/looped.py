"""Programs on a GPU: torch's code generator makes kernels of a step, and the interpreter takes the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedpews.engines.compiled.program import Program, Sheet, Step
from fedpews.errors import first_line
from fedpews.torch_private import tree_leaves


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


def load_looped(program: Program, example: Sheet, x: Any, y: Tensor, state: Sequence[Tensor]) -> Looped:
    """The program for the device where the data lie.

    Where torch cannot make kernels for it (no Triton, say), the traced step itself is run: many small clients still
    share each of its kernels.
    """
    step, inputs = Step(program), tree_leaves(x)
    compiled: Callable[..., object] = torch.compile(step, dynamic=False)
    try:
        # a step writes to its arguments, so the first one, in which the kernels are made, is given copies
        sheet = [tensor.clone() for tensor in example.at(0)]
        compiled(*sheet, inputs, y, [leaf.clone() for leaf in state], [*program.constants])
    except Exception as error:  # noqa: BLE001 - whatever the code generator cannot do
        logging.getLogger("fedpews").warning("steps run as they were traced: %s", first_line(error))
        compiled = step
    return Looped(compiled, len(inputs), len(state))
