"""Programs as machine code: compiled ahead of time, kept on disk, run without the interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import platform
import shutil
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedpews.engines.compiled.cache import c_library, cache_dir, digest, find, keep, processor, run_apart
from fedpews.engines.compiled.program import CannotCompile, Program, Sheet, Step
from fedpews.errors import first_line
from fedpews.torch_private import (
    compile_step,
    compiler_command,
    compiling_apart,
    lacking_to_compile,
    library_path,
    tensor_handles,
)

LOOP = """
/* Takes many steps in one call: the interpreter's lock is free meanwhile, so groups run side by side. */
#include <stddef.h>
#include <stdint.h>
typedef int32_t (*run_model)(void*, void**, size_t, void**, size_t, void*, void*);
typedef int32_t (*copy_handle)(void*, void**);
typedef int32_t (*view_tensor)(void*, int64_t, const int64_t*, const int64_t*, int64_t, void**);
struct slice { int64_t dims, sizes[2], strides[2], stride; }; /* of a tensor whose first dimension is the step */

int32_t take_steps(run_model run, copy_handle copy, view_tensor view, void* model, void** tensors, size_t count,
                   const struct slice* slices, size_t by_step, int64_t steps) {
  void* given[count]; /* a run takes its handles over, so every step needs new ones */
  for (int64_t step = 0; step < steps; ++step) {
    for (size_t i = 0; i < by_step; ++i) {
      const struct slice* s = slices + i;
      if (view(tensors[i], s->dims, s->sizes, s->strides, step * s->stride, &given[i])) return 1;
    }
    for (size_t i = by_step; i < count; ++i)
      if (copy(tensors[i], &given[i])) return 1;
    if (run(model, given, count, NULL, 0, NULL, NULL)) return 2;
  }
  return 0;
}
"""


class Slice(ctypes.Structure):
    """The slice of one step of a tensor with one entry per step, for the loop in C."""

    # the fields of ``struct slice`` in the loop; behind its step a tensor has at most two dimensions
    _fields_ = (
        ("dims", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * 2),
        ("strides", ctypes.c_int64 * 2),
        ("stride", ctypes.c_int64),
    )

    @classmethod
    def of(cls, tensor: Tensor) -> Slice:
        (_, *sizes), (stride, *strides) = tensor.shape, tensor.stride()
        pair = ctypes.c_int64 * 2
        return cls(len(sizes), pair(*sizes), pair(*strides), stride)


class Native:
    """A compiled program in this process. Several threads may run it at once."""

    def __init__(self, library: Path, loop: Path, runners: int) -> None:
        self._model, self._loop = ctypes.CDLL(str(library)), ctypes.CDLL(str(loop))
        self._torch = torch_library()
        self._container = ctypes.c_void_p()
        # a runner holds the buffers of one call, so there are as many as threads
        if self._model.AOTInductorModelContainerCreateWithDevice(
            ctypes.byref(self._container), ctypes.c_size_t(runners), b"cpu", None
        ):
            raise OSError(f"{library} cannot be opened")

    def run(self, steps: int, sheet: Sheet, inputs: Sequence[Tensor]) -> None:
        """Take the first steps of a sheet; ``inputs`` are x, y, the state and the constants.

        The state and the sheet's losses change in place.
        """
        # in the order of Step.forward's arguments; those that have an entry per step come first
        tensors = [*sheet.by_step, sheet.lr, *inputs]
        slices = (Slice * len(sheet.by_step))(*map(Slice.of, sheet.by_step))
        with _handles(self._torch, tensors) as handles:
            failed = self._loop.take_steps(
                self._model.AOTInductorModelContainerRun,
                self._torch.aoti_torch_new_tensor_handle,
                self._torch.aoti_torch__reinterpret_tensor,
                self._container,
                handles,
                ctypes.c_size_t(len(tensors)),
                slices,
                ctypes.c_size_t(len(slices)),
                ctypes.c_int64(steps),
            )
        if failed:
            raise RuntimeError(
                "a compiled step failed; run with runtime.engine=eager, and please report this"
            )


@contextlib.contextmanager
def _handles(library: ctypes.CDLL, tensors: list[Tensor]) -> Iterator[Any]:
    """The C interface's handles to tensors, in one array."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsules = tensor_handles(tensors)
    handles = (ctypes.c_void_p * len(tensors))(*(pointer(capsule, None) for capsule in capsules))
    try:
        yield handles
    # the loop works on copies of the handles; these stay ours, also after a step that failed
    finally:
        for handle in handles:
            library.aoti_torch_delete_tensor_object(ctypes.c_void_p(handle))


def load(program: Program, x: Any, y: Tensor, runners: int) -> Native:
    """The program from the cache on disk, compiled first when it is not there or does not load.

    A shared object is code that will run in this process. It is trusted because it lies in a folder that only this
    user can write to, and loaded only if its bytes give the digest in its name.
    """
    compiler, folder = compiler_path(), cache_dir()
    # machine code fits one program, processor, compiler and version of torch
    system = torch.__version__, torch.backends.cpu.get_cpu_capability(), processor(), _version(compiler)
    key = digest(repr((program.fingerprint(), system)).encode())
    # the C++ compiler is known to be there, so it compiles the C loop too
    loop = c_library("loop", LOOP, compiler, "-O2")
    library = find(folder, key)
    if library is not None:
        with contextlib.suppress(OSError, AttributeError):
            return Native(library, loop, runners)
        # intact (its digest is right), but not for the system as it is now: build it anew
        library.unlink(missing_ok=True)
    library = keep(folder, key, lambda scratch: _compile(program, x, y, scratch))
    try:
        return Native(library, loop, runners)
    except (OSError, AttributeError) as error:
        raise CannotCompile(f"what the compiler built does not load: {error}") from error


NEEDED = (
    "aoti_torch_new_tensor_handle",
    "aoti_torch__reinterpret_tensor",
    "aoti_torch_delete_tensor_object",
)
"""Functions of torch's C interface that the loop over steps calls. Some versions of torch lack them."""


def torch_library() -> ctypes.CDLL:
    """torch's library; an error if it lacks a function that compiled steps call."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except OSError as error:
        raise CannotCompile(f"torch's library cannot be opened: {first_line(error)}") from error
    missing = [name for name in NEEDED if not hasattr(library, name)] or lacking_to_compile()
    if missing:
        raise CannotCompile(f"torch {torch.__version__} has no {missing[0]}")
    return library


def compiler_path() -> str:
    """The C++ compiler that torch would call."""
    if platform.system() == "Windows":
        raise CannotCompile("compiled steps need Linux or macOS")
    command = compiler_command()
    path = shutil.which(command)
    if path is None:
        raise CannotCompile(f"there is no C++ compiler ({command})")
    return path


def compiler_version() -> str:
    """The compiler in words, such as g++ 12.2.0; empty where there is none."""
    try:
        compiler = compiler_path()
    except CannotCompile:
        return ""
    return f"{Path(compiler).name} {_version(compiler)}"


@cache
def _version(compiler: str) -> str:
    return run_apart([compiler, "-dumpfullversion"]).stdout.strip()


def _compile(program: Program, x: Any, y: Tensor, scratch: Path) -> Path:
    """The shared object of a program."""
    # The number of samples stays open: one program serves data of any size. torch.export would fix a size
    # of 0 or 1.
    samples = {0: torch.export.Dim("samples", min=2)}
    *sheet, inputs, y, state, constants = arguments = program.example(x, y)
    # None is a fixed shape
    fixed = [[None] * len(tensors) for tensors in (state, constants)]
    shapes = (*[None] * len(sheet), [samples] * len(inputs), samples, *fixed)
    # torch warns about its own internals while it compiles
    with warnings.catch_warnings(), compiling_apart(run_apart):
        warnings.simplefilter("ignore")
        try:
            return compile_step(Step(program), arguments, shapes, scratch / "model.so")
        except Exception as error:  # anything the compiler cannot do is a reason to run eagerly
            logging.getLogger(__name__).debug("compilation failed", exc_info=True)
            raise CannotCompile(f"its step cannot be compiled: {first_line(error)}") from error
