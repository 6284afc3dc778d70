"""A stored file becomes a callable: through tvm-ffi alone, or through the DSL's loader for an object file.

Called by `store` and `pack`; launchers hand tuples over by `as_argument`. Importing tvm-ffi takes 20 ms where torch is up; otherwise it imports torch first, by
design of tvm-ffi, which takes about a second.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from flash_hopper.compile.target import INSTALL, INSTALL_FFI, require_ffi, wanted_flavour
from flash_hopper.problem.errors import CacheError, MissingDependencyError

Kernel = Callable[..., None]


def load_function(path: Path, symbol: str) -> Kernel:
    """The function `symbol` of a linked library (`.so`) or of an object file (`.o`, which imports the DSL).

    Raises CacheError if the file cannot be loaded, MissingDependencyError without tvm-ffi.
    """
    return _function(path, load_library(path), symbol)


def load_library(path: Path) -> Any:
    """The module in a linked library or an object file; its functions are attributes."""
    tvm_ffi = import_ffi()
    try:
        if path.suffix == ".o":
            return _dsl_loader()(str(path), enable_tvm_ffi=True)
        # tvm-ffi finds a library by its absolute path only
        return tvm_ffi.load_module(str(path.resolve()))
    except (OSError, RuntimeError) as error:
        raise CacheError(f"{path} cannot be loaded: {error}") from error


@lru_cache(maxsize=4096)
def as_argument(value: tuple[Any, ...]) -> Any:
    """A tuple of ints, None and tuples of these in the form in which a kernel gets it.

    tvm-ffi converts a tuple in every call, which takes 1 us for what a ragged batch passes. Here it is converted once, and looked up
    by its value from then on.
    """
    return import_ffi().convert(value)


def _function(path: Path, library: Any, symbol: str) -> Kernel:
    try:
        kernel: Kernel = getattr(library, symbol)
    except (AttributeError, RuntimeError) as error:
        raise CacheError(f"{path} has no kernel {symbol}: {error}") from error
    return kernel


def _dsl_loader() -> Callable[..., Any]:
    try:
        from cutlass.cute.runtime import load_module
    except ImportError as error:
        raise MissingDependencyError(f"the DSL cannot be imported: {error}; {INSTALL[wanted_flavour()]}") from error
    loader: Callable[..., Any] = load_module
    return loader


def import_ffi() -> Any:
    """The tvm_ffi module. Raises MissingDependencyError saying what to install."""
    require_ffi()
    try:
        import tvm_ffi
    except (ImportError, OSError) as error:
        raise MissingDependencyError(f"tvm-ffi cannot be imported: {error}; {INSTALL_FFI}") from error
    return tvm_ffi
