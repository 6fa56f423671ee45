"""The options of a model: the table ``[model]`` of a configuration."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedpews.options import Count, Positive, Table


class LoraTable(Table):
    rank: Count = Field(8, description="number of components of each adapter")
    targets: list[str] | None = Field(
        None,
        description="layers that get an adapter, by the end of their names; by default every linear layer",
    )
    alpha: Positive | None = Field(
        None, description="the output of an adapter is multiplied by alpha/rank; by default alpha is rank"
    )
    full: list[str] | None = Field(
        None, description="patterns of parameters that are trained in full; by default the output layer"
    )
    ranks: list[Count] | None = Field(
        None, description="the rank of client 0, 1, …; the list repeats if there are more clients"
    )
    padding: bool = Field(
        False, description="average each component over all clients, with zeros for clients of smaller rank"
    )

    @model_validator(mode="after")
    def _within_rank(self) -> Self:
        if self.ranks is not None and (not self.ranks or max(self.ranks) > self.rank):
            raise ValueError(f"lora.ranks must be from 1 to lora.rank = {self.rank}, got {self.ranks}")
        if self.padding and self.ranks is None:
            raise ValueError("lora.padding needs lora.ranks, because clients of equal rank need no padding")
        return self


class ModelTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")  # the model's own options, checked when it is built
    name: str = Field(
        "mlp",
        description="a model by name, timm:NAME, torchvision:NAME, transformers:PATH, or module:Class; "
        "see `fedpews list models`",
    )
    start: str | None = Field(
        None,
        description="a safetensors file with initial weights; {seed} is replaced by the seed",
    )
    fresh: list[str] = Field(
        [],
        description="patterns of parameters that are initialised anew instead of read from model.start",
    )
    lora: LoraTable | None = Field(
        None,
        description="train low-rank adapters instead of the model: rank, targets, alpha, full, ranks, padding",
    )
