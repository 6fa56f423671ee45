"""Everything that is used of torch and that torch does not promise to keep, each with its reason.

A new release of torch is tried by running the tests of this file's users, and then allowed in pyproject.toml; nothing
else in the package reaches below torch's public surface. Without a function in ``NEEDED_TO_COMPILE`` the eager engine
runs, and a run's first line says so; everything else here is needed for any run.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

# Sees every kernel of a pass, whatever Python code calls it; nothing public does.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# A module's outputs and an autograd by-product may be any nest of lists, tuples and dicts. The public
# torch.utils.pytree lacks tree_map_only.
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

# Labels of tensors that live as long as these; a plain dict would compare their elements.
from torch.utils.weak import WeakTensorKeyDictionary as WeakTensorKeyDictionary

NEEDED_TO_COMPILE = (
    "torch._functorch.compile_utils.fx_graph_cse",
    "torch._inductor.aot_compile",
    "torch._inductor.codecache._HEADER_DIR",
    "torch._inductor.codecache._HEADER_LOCK_DIR",
    "torch._inductor.codegen.cpp.CppScheduling",
    "torch._inductor.cpp_builder._run_compile_cmd",
    "torch._inductor.cpu_vec_isa.valid_vec_isa_list",
    "torch._inductor.exc.CppCompileError",
    "torch._inductor.exc.InductorError",
    "torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors",
)


def lacking_to_compile() -> list[str]:
    """What of ``NEEDED_TO_COMPILE`` this version of torch does not have."""
    return [name for name in NEEDED_TO_COMPILE if not _exists(name)]


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(import_module(module), attribute)
    except ImportError:
        return False


def is_transformed() -> bool:
    """Whether this code runs inside vmap or a functional gradient, where a branch on a tensor's value is impossible.

    There is no public way to ask; inside a transform plain autograd would raise.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention, transformer layers and recurrent layers step by step instead of in one fused kernel.

    oneDNN has a public switch too, but that one warns about graphics cards that are not there.
    """
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)


def merge_common(graph: fx.Graph) -> fx.Graph:
    """The graph with equal subexpressions computed once: the two passes of a warmup step share their first layer."""
    from torch._functorch.compile_utils import fx_graph_cse

    return fx_graph_cse(graph)


def compiler_command() -> str:
    """The C++ compiler that torch's own code generator would call."""
    from torch._inductor import config

    command = config.cpp.cxx[1] if isinstance(config.cpp.cxx, tuple) else config.cpp.cxx
    return str(command)


def compile_step(module: torch.nn.Module, arguments: tuple[Any, ...], shapes: Any, output: Path) -> Path:
    """A module as a shared object with a C interface.

    The public torch._inductor.aoti_compile_and_package makes an archive that is unpacked at every load, and a
    Python object that holds the interpreter's lock while it runs.
    """
    from torch._inductor import aot_compile, config
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list
    from torch._inductor.exc import CppCompileError, InductorError

    settings = {
        # a group of lanes has one core; several cores take several groups
        "cpp.threads": 1,
        "aot_inductor.package": False,
        "aot_inductor.output_path": str(output),
        # precompiled headers take 10 s and save 3 s for each program; most users compile one or two
        "aot_inductor.precompile_headers": False,
        # use what the processor has without building a test program for each of its instruction sets, which takes 5 s
        "cpp.vec_isa_ok": True,
    }
    with _cached_in(output.parent.parent / "torch"):
        exported = torch.export.export(module, arguments, dynamic_shapes=shapes).module()
        try:
            with config.patch(settings):
                return Path(str(aot_compile(exported, arguments)))
        except InductorError as error:
            if isinstance(error.inner_exception, CppCompileError):
                # a compiler older than the processor: now build the test programs
                valid_vec_isa_list.cache_clear()
                with config.patch(settings | {"cpp.vec_isa_ok": None}):
                    return Path(str(aot_compile(exported, arguments)))
            if isinstance(error.inner_exception, KeyError):
                with config.patch(settings), _no_outer_fusion():
                    return Path(str(aot_compile(exported, arguments)))
            raise


@contextmanager
def _no_outer_fusion() -> Iterator[None]:
    """Loops are not fused at outer levels only: torch then sometimes reads a buffer by a name that is gone (KeyError).

    Clipped gradients with momentum are such a step. There is no setting for it.
    """
    from torch._inductor.codegen.cpp import CppScheduling

    scheduling: Any = CppScheduling
    before = scheduling._get_outer_loop_fusion_depth
    scheduling._get_outer_loop_fusion_depth = lambda self, node1, node2: 0
    try:
        yield
    finally:
        scheduling._get_outer_loop_fusion_depth = before


@contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    """torch's code generator keeps what it makes, loads and runs in a folder of ours.

    By default it uses /tmp/torchinductor_USER, which another user may have created before, with shared objects and
    precompiled headers in it. There is a variable for the first; the headers' path is set when torch is imported.
    """
    from torch._inductor import codecache

    folder.mkdir(mode=0o700, exist_ok=True)
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
    before = {name: os.environ.get(name) for name in variables}
    headers = codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR
    os.environ.update(variables)
    codecache._HEADER_DIR = str(folder / "headers")
    codecache._HEADER_LOCK_DIR = str(folder / "headers" / "locks")
    try:
        yield
    finally:
        codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = headers
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def compiling_apart(run: Callable[..., Any]) -> Iterator[None]:
    """While this lasts, torch's code generator starts the compiler by ``run(command, folder=...)``.

    It has no setting for that: its own call puts the compiler into our process group, where Ctrl-C kills it. The two
    large files of a program, its kernels and the wrapper that calls them, are compiled side by side.
    """
    from torch._inductor import cpp_builder, exc

    beside: list[Future[None]] = []

    def compile_now(command: list[str], folder: str) -> None:
        done = run(command, folder=folder)
        if done.returncode:
            raise exc.CppCompileError(command, done.stdout)

    def compile_apart(command_line: str, folder: str) -> None:
        command = shlex.split(command_line)
        if any(word.endswith(".wrapper.cpp") for word in command):
            # there is another one if an earlier attempt failed
            wait(beside)
            # the caller deletes the folder when this returns
            beside[:] = [pool.submit(compile_now, command, str(Path(folder).parent))]
            return
        if "-c" not in command:  # links the objects
            for wrapper in beside:
                wrapper.result()
        compile_now(command, folder)

    before = cpp_builder._run_compile_cmd
    cpp_builder._run_compile_cmd = compile_apart  # type: ignore[assignment]
    try:
        with ThreadPoolExecutor(1, "compiler") as pool:
            yield
    finally:
        cpp_builder._run_compile_cmd = before


def tensor_handles(tensors: list[torch.Tensor]) -> list[Any]:
    """Capsules with the C interface's handles to tensors; the caller must delete them."""
    from torch._C._aoti import unsafe_alloc_void_ptrs_from_tensors

    handles: list[Any] = unsafe_alloc_void_ptrs_from_tensors(tensors)
    return handles


def library_path() -> Path:
    """The library that has the functions which compiled steps call."""
    name = {"darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}.get(sys.platform, "libtorch_cpu.so")
    return Path(torch.__file__).parent / "lib" / name
