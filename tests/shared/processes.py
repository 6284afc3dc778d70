"""What a worker process can be made to run: functions that a spawned process can import."""

import os
from typing import Any, NoReturn


def die(*_: Any) -> NoReturn:
    """End the process at once, as a crash does."""
    os._exit(1)
