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
        None, description="how samples are assigned to clients; see `fedpews list data`"
    )
    pool: bool = Field(False, description="pool your own clients' samples and split them by data.partition")
    clients: Count | None = Field(None, description="number of clients; some partitions imply it")
    alpha: Positive | None = Field(None, description="concentration of the dirichlet and quantity partitions")
    classes_per_client: Count | None = Field(
        None, description="noc partition: number of classes of each client"
    )
    class_lists: list[list[int]] | None = Field(
        None, description="classes partition: the classes of each client"
    )
    classes: list[str] | None = Field(
        None, description="names of all classes, in the order of their labels; by default sorted by name"
    )
    train_per_class: Count | None = Field(None, description="number of training samples of each class")
    test_per_class: Count | None = Field(None, description="number of test samples of each class")
    scaling: Scaling | Literal["federated"] | list[Scaling] | None = Field(
        None,
        description="images by name: symmetric scales to [-1, 1] (the default), unit to [0, 1], standard to mean 0 and "
        "deviation 1, first by the mean and deviation of the first source; a list has one entry per source. Tables: "
        "standard. All data: federated scales by the mean and deviation over all clients",
    )
    min_count: Count = Field(5, description="statistics suppress counts below this number of samples")
    count_noise: NotNegative = Field(0.0, description="scale of the Laplace noise on counts in statistics")
    seed: int = Field(0, description="seed of the data and the partition; the same for all seeds of a run")
    validation: Annotated[float, Field(gt=0, lt=1)] | Literal["given"] | None = Field(
        None,
        description="share of each client's training samples held out for validation; given: the data set's own split",
    )
    augment: list[str] = Field(
        [], description="augmentation of training batches: crop, flip, or module:function"
    )
    partitioner: dict[str, Any] = Field({}, description="arguments of a flwr:NAME partition")
    label: str | None = Field(None, description="the label column of tables and hf data")
    inputs: list[str] | None = Field(
        None, description="the input columns of hf data; by default the only other column"
    )
    client: str | None = Field(None, description="the column of hf data that names the client of each row")
    missing: Literal["refuse", "mean"] = Field(
        "refuse", description="missing inputs of tables: refuse them, or fill in the client's training mean"
    )
    image_size: Count | None = Field(
        None,
        description="side of the square images; images of folders and hf data are cropped to their centre",
    )
    storage: Literal["numbers", "bytes"] | None = Field(
        None,
        description="storage of images by name: bytes need a quarter of the memory of numbers (the default)",
    )
    lazy: bool = Field(
        False, description="read the inputs of torch Datasets batch by batch instead of all at once"
    )
    fingerprint: str | None = Field(
        None, description="hash of the samples; written by fedpews.run(clients=…)"
    )
