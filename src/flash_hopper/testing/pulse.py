"""Something done every few seconds while something else runs, from a thread of its own: also while a kernel hangs.

Called by `cli/verify.py`.
"""

import threading
from collections.abc import Callable
from types import TracebackType


class Pulse:
    """Within it `beat` is called every so many seconds. What it raises ends the pulse and is raised at the end of the block."""

    def __init__(self, beat: Callable[[], None], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> "Pulse":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._end.wait(self._seconds):
                self._beat()
        except BaseException as error:
            self._error = error
