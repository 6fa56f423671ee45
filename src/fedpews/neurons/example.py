"""Running a model on an example of its inputs, whatever these and its outputs look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedpews.seeds import global_generator
from fedpews.torch_private import tree_leaves, tree_map_only


def run(model: nn.Module, example: Any) -> Any:
    """The model's outputs; a tuple or dict holds its arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same for a functional call: (args, kwargs)."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def outputs_of(value: Any) -> list[Tensor]:
    """Every tensor in what a model returned."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) or hasattr(leaf, "logits"):
            found += [part for part in vars(leaf).values() if isinstance(part, Tensor)]
    return found


@dataclass(frozen=True)
class Batches:
    """Inputs that a model was seen to run on."""

    evaluation: list[Any]
    training: list[Any]

    @staticmethod
    def tensors(batch: Any) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]


def batches(model: nn.Module, example: Any) -> Batches:
    """Small batches like the example: for a pass in evaluation, and for one in training if the model can do that.

    In training a norm over the batch needs several samples that differ.
    """
    generator = torch.Generator().manual_seed(0)
    training = model.training

    def more(value: Tensor, size: int) -> Tensor:
        """So many samples near the example's own."""
        if value.dim() == 0:
            return value
        value = value.detach().repeat(-(-size // max(1, len(value))), *[1] * (value.dim() - 1))[:size]
        if value.is_floating_point():
            return value + 0.5 * torch.randn(value.shape, generator=generator).to(value)
        return value

    def first(value: Tensor) -> Tensor:
        return value[:2] if value.dim() else value

    def runs(batch: Any) -> bool:
        try:
            with torch.no_grad(), global_generator():
                run(model, batch)
        except Exception:  # noqa: BLE001  whatever keeps a foreign model from running on this batch
            return False
        return True

    model.eval()
    few = tree_map_only(Tensor, first, example)
    # the first dimension is not the batch
    if not runs(few):
        few = example
        with torch.no_grad():
            run(model, few)
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]  # a norm writes its statistics in place
    model.train()
    many = [tree_map_only(Tensor, lambda value: more(value, 8), example), example]
    able = [batch for batch in many if runs(batch)][:1]
    for buffer, value in before:
        buffer.copy_(value)
    model.train(training)
    return Batches([few], able)


def main_output(value: Any) -> Tensor:
    """The one tensor that a loss is taken of: ``logits`` (or ``out``, as torchvision says), else the first tensor.

    >>> import torch
    >>> main_output({"aux": torch.ones(1), "logits": torch.zeros(1)}), main_output((torch.ones(2), None))
    (tensor([0.]), tensor([1., 1.]))
    """
    if isinstance(value, Tensor):
        return value
    logits = getattr(value, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(value, Mapping):
        named = next((value[name] for name in ("logits", "out", "output") if name in value), None)
        candidates = [*value.values()] if named is None else [named]
    else:
        candidates = [*value] if isinstance(value, tuple | list) else []
    for found in candidates:
        if isinstance(found, Tensor):
            return found
    raise TypeError(
        f"the model returns a {type(value).__name__} in which there is no tensor; return a tensor, a tuple whose "
        "first entry is one, a dict with 'logits', or an object with .logits"
    )


def made_up(example: Any, generator: torch.Generator) -> Any:
    """Two made-up inputs like the example: random numbers, and the example's own tokens."""

    def make(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf[:1].expand(2, *leaf.shape[1:])
        return torch.rand(2, *leaf.shape[1:], generator=generator).to(leaf)

    return tree_map_only(Tensor, make, example)


def doubled(leaf: Tensor) -> Tensor:
    """Numbers in double precision; tokens stay what they are."""
    return leaf.double() if leaf.is_floating_point() else leaf
