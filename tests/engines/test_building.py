"""The commands that build a compiled program: two files side by side, and all before linking."""

from __future__ import annotations

import threading
from subprocess import CompletedProcess
from typing import Any

import pytest
from torch._inductor import cpp_builder
from torch._inductor.exc import CppCompileError

from fedpews.torch_private import compiling_apart

WRAPPER, KERNELS, LINK = "g++ -c a.wrapper.cpp", "g++ -c a.kernel.cpp", "g++ a.o b.o"


def build(folder: Any, *commands: str) -> None:
    for command in commands:
        cpp_builder._run_compile_cmd(command, str(folder / "deleted"))


def test_the_wrapper_is_compiled_beside_the_kernels_and_linking_waits_for_both(tmp_path: Any) -> None:
    kernels_done, finished = threading.Event(), []

    def run(command: list[str], folder: str) -> CompletedProcess[str]:
        if command[-1] == "a.wrapper.cpp":
            assert folder == str(tmp_path)
            # one after the other, this would wait for ever
            assert kernels_done.wait(60)
        finished.append(command[-1])
        if command[-1] == "a.kernel.cpp":
            kernels_done.set()
        return CompletedProcess(command, 0, "")

    with compiling_apart(run):
        build(tmp_path, WRAPPER, KERNELS, LINK)
    assert finished == ["a.kernel.cpp", "a.wrapper.cpp", "b.o"]


def test_a_wrapper_that_fails_ends_this_attempt_and_not_the_next(tmp_path: Any) -> None:
    failures = [1, 0]

    def run(command: list[str], folder: str) -> CompletedProcess[str]:
        return CompletedProcess(command, failures.pop(0) if command[-1] == "a.wrapper.cpp" else 0, "no -mamx")

    with compiling_apart(run):
        with pytest.raises(CppCompileError, match="no -mamx"):
            build(tmp_path, WRAPPER, KERNELS, LINK)
        build(tmp_path, WRAPPER, KERNELS, LINK)


def test_kernels_that_fail_leave_no_wrapper_for_the_next_attempt(tmp_path: Any) -> None:
    failures = [1, 1, 0, 0]

    def run(command: list[str], folder: str) -> CompletedProcess[str]:
        return CompletedProcess(command, failures.pop(0) if "-c" in command else 0, "no -mamx")

    with compiling_apart(run):
        with pytest.raises(CppCompileError):
            build(tmp_path, WRAPPER, KERNELS)
        build(tmp_path, WRAPPER, KERNELS, LINK)
    assert not failures
