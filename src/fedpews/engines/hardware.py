"""What this machine has to train on."""

from __future__ import annotations

import os
import platform

import torch

from fedpews.errors import ConfigError


def find_device(name: str) -> torch.device:
    """The device that ``runtime.device`` names; ``auto`` is a GPU if there is one.

    >>> find_device("cpu")
    device(type='cpu')
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, available in there.items() if available))
    device = torch.device(name)
    if not there.get(device.type, False):
        raise ConfigError(
            f"runtime.device is {name!r}, but torch finds no such device here (it was built "
            f"{'with CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'}); "
            f"use {' or '.join(kind for kind, available in there.items() if available)}, or auto"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"runtime.device is {name!r}, but there are {torch.cuda.device_count()} CUDA devices, counted from 0"
        )
    return device


def available_cores() -> int:
    """The cores this process may run on; a container or a batch system may have given it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    # macOS and Windows do not tell
    return os.cpu_count() or 1


def describe_machine(device: torch.device) -> str:
    """What a run was trained on, for its summary."""
    named = device.type == "cuda" and torch.cuda.is_available()
    gpu = torch.cuda.get_device_name(device) if named else device.type
    return f"{available_cores()} cores ({platform.machine()}), {'no GPU' if gpu == 'cpu' else gpu}"
