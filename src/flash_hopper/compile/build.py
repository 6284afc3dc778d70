"""A plan becomes an object file: trace, compile for the target, export.

The only module of this folder that imports the DSL, and therefore imported late, by `store` and `inspect`, when a
kernel is in no cache. Needs no GPU and no torch. One compile at a time a process: the compiler is single-threaded.
"""

import contextlib
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.base_dsl.common import DSLWarning
from cutlass.base_dsl.compiler import DumpDir, ExtraCompilerOpts

from flash_hopper.compile.key import Plan
from flash_hopper.compile.report import PtxasReport, parse_report
from flash_hopper.compile.target import GPU_ARCH, toolkit
from flash_hopper.kernels.registry import traceable
from flash_hopper.problem.errors import CompileError, FlashHopperError

# Gives the function to compile and its placeholder arguments for a plan.
Trace = Callable[[Any], tuple[Any, tuple[Any, ...]]]

_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel. `object_code` is an object file that exports `__tvm_ffi_<symbol>`; `ptx` and `cubin` are
    present if artifacts were asked for."""

    symbol: str
    object_code: bytes
    report: PtxasReport
    seconds: float
    ptx: str | None
    cubin: bytes | None


def build(plan: Plan, trace: Trace | None = None, *, artifacts: bool = False, strict: bool = True) -> Built:
    """Compile the kernel of a plan.

    `trace` replaces `kernels.registry.traceable`. With `artifacts` the PTX and the cubin are kept. Raises CompileError
    if the compiler fails or warns of arguments it dropped and, unless `strict` is off, if the kernel spills or ptxas
    ignored part of it; the message holds its report.
    """
    _check_compiler()
    symbol = plan.name
    if not symbol.isidentifier() or not symbol.isascii():
        raise CompileError(f"a plan's name must be an identifier to become a symbol, got {symbol!r}")
    with _ONE_AT_A_TIME, tempfile.TemporaryDirectory(prefix="flash-hopper-") as folder:
        start = time.perf_counter()
        compiled, report = _compile(symbol, plan, trace or traceable, Path(folder), artifacts)
        if strict and report.faults:
            raise CompileError(f"{symbol}: {'; '.join(report.faults)}\nptxas reports:\n{report.text}")
        path = Path(folder) / "kernel.o"
        compiled.export_to_c(str(path), function_name=symbol, export_only_tvm_ffi_symbols=True)
        ptx, cubin = (compiled.__ptx__, compiled.__cubin__) if artifacts else (None, None)
        return Built(symbol, path.read_bytes(), report, time.perf_counter() - start, ptx, cubin)


def _compile(symbol: str, plan: Plan, trace: Trace, folder: Path, artifacts: bool) -> tuple[Any, PtxasReport]:
    report_file = folder / "report.yaml"
    options = _options(report_file, folder if artifacts else None)
    with _watched() as warned:
        try:
            function, arguments = trace(plan)
            compiled = cute.compile[options](function, *arguments)
        except FlashHopperError:
            raise
        except Exception as error:
            raise CompileError(f"{symbol}: the compiler failed: {error}") from error
    if warned:
        raise CompileError(f"{symbol}: the compiler warned for {GPU_ARCH}: {'; '.join(warned)}")
    if compiled is None:
        raise CompileError(f"{symbol}: the compiler made nothing; is CUTE_DSL_DRYRUN set?")
    return compiled, parse_report(report_file.read_text(encoding="utf-8"))


def _options(report_file: Path, dump_dir: Path | None) -> tuple[Any, ...]:
    """Options of the DSL. `report_file` receives what ptxas says; with `dump_dir` PTX and cubin are kept.

    `remarks{ptx}` would ask for the same report and have the DSL look up the source line of every operation as well: the
    same object in 1.5 times the time (2.5 instead of 1.6 s for a forward kernel on one core).
    """
    options = (
        cute.EnableTVMFFI(True),
        cute.GPUArch(GPU_ARCH),
        cute.PtxasOptions("-v"),
        ExtraCompilerOpts("diagnostic=ptx"),
        cute.RemarkOutput(str(report_file)),
    )
    return options if dump_dir is None else (*options, cute.KeepPTX(True), cute.KeepCUBIN(True), DumpDir(str(dump_dir)))


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    """Collects the warnings that this thread gets from the DSL: each says that it ignored something it was given.

    Other warnings, and those of other threads, go where they would have gone. The DSL's exception hook is taken off.
    """
    thread, hook, show = threading.get_ident(), sys.excepthook, warnings.showwarning
    ignored: list[str] = []

    def note(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> None:
        is_of_dsl = category is UserWarning or category.__module__.startswith("cutlass")
        if threading.get_ident() != thread or not is_of_dsl:
            show(message, category, *place, **line)
        elif category is not DSLOptimizationWarning:  # advice on compile time, for loops that are long on purpose
            ignored.append(str(message))

    try:
        with warnings.catch_warnings():
            for category in (UserWarning, DSLWarning, DSLOptimizationWarning):
                warnings.simplefilter("always", category)
            warnings.showwarning = note
            yield ignored
    finally:
        sys.excepthook = hook


def _check_compiler() -> None:
    """The DSL that was imported must be the one that keys were computed for."""
    expected = toolkit()
    found = cutlass.__version__, f"cu{cutlass.CUDA_VERSION.major}"
    if found != (expected.dsl_version, expected.flavour):
        raise CompileError(
            f"the DSL imported from {cutlass.__file__} is {' '.join(found)}, the one installed is "
            f"{expected.dsl_version} {expected.flavour}; restart Python after an installation"
        )
