"""What several commands ask of their options and of the machine."""

from flash_hopper.problem.errors import ArgumentError, DeviceError


def names_of(text: str | None) -> list[str]:
    """The parts of a comma-separated option."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def length_of(text: str) -> int:
    """512 or 16k. Raises ArgumentError."""
    number, factor = (text[:-1], 1024) if text.lower().endswith("k") else (text, 1)
    if not (number.isascii() and number.isdigit()):
        raise ArgumentError(f"a size must be a number such as 512 or 16k, got {text!r}")
    return int(number) * factor


def require_hopper(command: str, otherwise: str = "") -> None:
    """Raise DeviceError unless the current GPU is one that the command can measure on; `otherwise` says what goes without one."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            f"{command} measures on a GPU of compute capability 9.0; torch sees no CUDA device here{otherwise}"
        )
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        raise DeviceError(
            f"{command} measures on a GPU of compute capability 9.0, this one has {capability}{otherwise}"
        )
