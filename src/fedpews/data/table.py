"""The options of a data set: the table ``[data]`` of a configuration, and the arguments of `load`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from fedpews.options import Count, NotNegative, Positive, Table

FEDERATED = "federated"

Scaling = Literal["symmetric", "unit", "standard", "first"]


class DataTable(Table):
    name: str = Field(
        "synthetic-32k",
        description="a data set, several joined by +, folder:PATH, hf:PATH, or module:function",
    )
    partition: str | None = Field(
        None, description="how the samples are assigned to clients; see `fedpews list data`"
    )
    pool: bool = Field(
        False, description="put your own clients' samples together, to be split by data.partition"
    )
    clients: Count | None = Field(None, description="how many clients; by default what the partition implies")
    alpha: Positive | None = Field(None, description="concentration of the dirichlet and quantity partitions")
    classes_per_client: Count | None = Field(None, description="for the noc partition")
    class_lists: list[list[int]] | None = Field(
        None, description="for the classes partition: one list per client"
    )
    classes: list[str] | None = Field(
        None, description="the names of all clients' classes, in the order of their labels; by default sorted"
    )
    train_per_class: Count | None = Field(None, description="take so many training samples of each class")
    test_per_class: Count | None = Field(None, description="take so many test samples of each class")
    scaling: Scaling | Literal["federated"] | list[Scaling] | None = Field(
        None,
        description="values of named images: in [-1, 1] (by default), in [0, 1], of mean 0 and deviation 1, or (first) "
        "by the first source's mean and deviation; a list has one for each source; standard also for tables; "
        "federated, for any data: by the mean and deviation of all clients together",
    )
    min_count: Count = Field(
        5, description="of statistics that clients share: counts of fewer samples are suppressed"
    )
    count_noise: NotNegative = Field(
        0.0, description="of statistics that clients share: the scale of Laplace noise on their counts"
    )
    seed: int = Field(0, description="of the draw and the partition; the same for all of a run's seeds")
    validation: Annotated[float, Field(gt=0, lt=1)] | Literal["given"] | None = Field(
        None,
        description="share of each client's training samples held out for validation; 'given': the data set's own",
    )
    augment: list[str] = Field(
        [], description="random changes of training batches: crop, flip, or module:function"
    )
    partitioner: dict[str, Any] = Field({}, description="the options of a flwr:... partition")
    label: str | None = Field(
        None, description="of CSV and Parquet folders and of hf data: the column that holds the label"
    )
    inputs: list[str] | None = Field(
        None, description="of hf data: the columns that hold the inputs; by default the only other one"
    )
    client: str | None = Field(None, description="of hf data: the column that names each row's client")
    missing: Literal["refuse", "mean"] = Field(
        "refuse", description="of tables, missing inputs: refuse, or fill in the client's training mean"
    )
    image_size: Count | None = Field(
        None,
        description="of images in folders and hf data: the shorter side is brought to this, the middle square is kept",
    )
    storage: Literal["numbers", "bytes"] | None = Field(
        None, description="of named images: bytes take a quarter of the memory of numbers (the default)"
    )
    lazy: bool = Field(False, description="read the inputs of Datasets batch by batch instead of all at once")
    fingerprint: str | None = Field(None, description="written by fedpews.run(clients=…): of their samples")
