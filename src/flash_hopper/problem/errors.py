"""Every exception that a caller can meet, and nothing else.

A caller's mistake is raised before anything is allocated or compiled. The message names the argument, what came,
what is allowed and, where there is one, the way out. Each class also derives from the built-in exception that a
caller would expect, so `except ValueError` keeps working.
"""


class FlashHopperError(Exception):
    """Base of all errors raised by this package on purpose."""


class ArgumentError(FlashHopperError, ValueError):
    """An argument has a wrong shape, stride, range or combination."""


class DTypeError(FlashHopperError, TypeError):
    """An argument has a wrong dtype or type, or dtypes are mixed."""


class DeviceError(FlashHopperError, RuntimeError):
    """Tensors are on different devices, or on one that no backend serves."""


class UnsupportedError(FlashHopperError, NotImplementedError):
    """The request is meaningful, but no backend here supports this feature (yet). Lists the missing features."""


class MissingDependencyError(FlashHopperError, ImportError):
    """A package that this path needs is not installed; the message says what to install."""


class CompileError(FlashHopperError, RuntimeError):
    """A kernel could not be compiled, or what was compiled breaks a promise of its plan."""


class CacheError(FlashHopperError, RuntimeError):
    """A stored kernel or a pack cannot be used: damaged, built from other sources, or for another toolkit."""
