"""A plan becomes an object file: trace, compile for the target, export.

The only module of this folder that imports the DSL, and therefore imported late, by `store` and `inspect`, when a
kernel is in no cache. Needs no GPU and no torch. One compile at a time a process: the compiler is single-threaded.
"""

import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning

from flash_hopper.compile.key import Plan
from flash_hopper.compile.report import PtxasReport, parse_report
from flash_hopper.compile.target import GPU_ARCH, compile_options, toolkit
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
    options = compile_options(report_file, folder if artifacts else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            function, arguments = trace(plan)
            compiled = cute.compile(function, *arguments, options=options)
        except FlashHopperError:
            raise
        except Exception as error:
            raise CompileError(f"{symbol}: the compiler failed: {error}") from error
    _check_warnings(symbol, caught)
    if compiled is None:
        raise CompileError(f"{symbol}: the compiler made nothing; is CUTE_DSL_DRYRUN set?")
    return compiled, parse_report(report_file.read_text(encoding="utf-8"))


def _check_compiler() -> None:
    """The DSL that was imported must be the one that keys were computed for."""
    expected = toolkit()
    found = cutlass.__version__, f"cu{cutlass.CUDA_VERSION.major}"
    if found != (expected.dsl_version, expected.flavour):
        raise CompileError(
            f"the DSL imported from {cutlass.__file__} is {' '.join(found)}, the one installed is "
            f"{expected.dsl_version} {expected.flavour}; restart Python after an installation"
        )


def _check_warnings(symbol: str, caught: list[warnings.WarningMessage]) -> None:
    """A warning of the DSL says that it ignored something it was given: an error. Those of others are handed on."""
    ignored = [str(w.message) for w in caught if w.category is UserWarning or _is_of_dsl(w.category)]
    if ignored:
        raise CompileError(f"{symbol}: the compiler warned for {GPU_ARCH}: {'; '.join(ignored)}")
    for warning in caught:
        # advice on compile time is for the author of a loop that is long on purpose
        if warning.category is not DSLOptimizationWarning:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _is_of_dsl(category: type[Warning]) -> bool:
    return category.__module__.startswith("cutlass") and category is not DSLOptimizationWarning
