"""What can go wrong for a user, and the exit code each kind ends the command with."""

from __future__ import annotations


class FedpewsError(Exception):
    """A mistake or a lack that a person can mend: the message says what was given, what is allowed, what to do."""

    exit_code = 1


class ConfigError(FedpewsError):
    """The configuration, the command line or the data handed in cannot be used."""

    exit_code = 2


class DataMissing(FedpewsError):
    """A file of a data set is neither here nor downloadable."""

    exit_code = 3


class CheckpointError(FedpewsError):
    """A checkpoint is damaged, or belongs to another experiment."""

    exit_code = 4


class RunFailed(FedpewsError):
    """Training itself broke down, for instance with a loss that is no longer finite."""

    exit_code = 5


class Interrupted(FedpewsError):
    """The run was asked to stop (Ctrl-C) and has saved where it stands."""

    exit_code = 130
