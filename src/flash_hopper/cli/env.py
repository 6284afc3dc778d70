"""`flash-hopper env`: what this machine has, what would be used, and what to install."""

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

# Shown beside the facts of `testing.environment`, in this order
LABELS = {
    "gpu": "GPU",
    "gpus": "GPUs",
    "capability": "compute capability",
    "sms": "SMs",
    "driver": "driver",
    "driver_cuda": "CUDA of the driver",
    "torch": "torch",
    "torch_cuda": "CUDA of torch",
    "cutlass_dsl": "CuTe DSL",
    "dsl_flavour": "flavour of the DSL in use",
    "dsl_flavours_installed": "flavours installed",
    "tvm_ffi": "tvm-ffi",
    "python": "Python",
    "flash_hopper": "flash-hopper",
    "commit": "commit",
    "date": "date",
    "backend": "attention runs on",
    "linker": "kernels are linked by",
    "cache": "kernel cache",
    "cache_kernels": "kernels in it",
    "cache_mb": "its size in MB",
    "packs": "packs",
}


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False) -> None:
    """Show GPU, driver, versions, DSL flavour, kernel cache and packs."""
    facts = machine_facts()
    if as_json:
        print(json.dumps(facts, indent=1))
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        table.add_row(LABELS[key], "-" if shown in (None, "") else str(shown))
    Console().print(table)


def machine_facts() -> dict[str, object]:
    """The facts that `env` shows; JSON types."""
    from flash_hopper import settings
    from flash_hopper.compile.disk import DiskCache
    from flash_hopper.compile.link import describe
    from flash_hopper.testing.environment import environment

    folder = settings.cache_folder()
    cache = DiskCache(folder) if folder is not None else None
    records = [record for record in map(cache.record, cache.stems()) if record is not None] if cache else []
    facts = environment()
    return {
        **facts,
        "backend": "the Hopper kernels" if facts["capability"] == "9.0" else "the CPU reference (CPU tensors)",
        "linker": describe(),
        "cache": str(folder) if folder is not None else "off",
        "cache_kernels": len(records),
        "cache_mb": round(sum(record.bytes for record in records) / 1e6, 3),
        "packs": [str(path) for path in settings.pack_paths()],
    }
