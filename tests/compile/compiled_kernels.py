"""Kernels compiled once a test session: each with its object file, its report and the sizes of its parameters."""

import pickle
import re
from pathlib import Path

from flash_hopper.compile.build import build
from flash_hopper.compile.disk import DiskCache
from flash_hopper.compile.inspect import KernelReport, examine
from flash_hopper.compile.parallel import map_plans


class CompiledKernels:
    """Compiles on demand into a folder that several processes may share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._reports: dict[str, KernelReport] = {}

    def prepare(self, plans) -> None:
        """Compile with all cores what will be asked for."""
        if len(plans) > 1:
            map_plans(_ensure, plans, None, None, str(self.folder))

    def report(self, plan) -> KernelReport:
        if plan.name not in self._reports:
            self._reports[plan.name] = pickle.loads(_ensure(plan, str(self.folder)).read_bytes())
        return self._reports[plan.name]

    def object_file(self, plan) -> Path:
        return _ensure(plan, str(self.folder)).with_suffix(".o")

    def parameters(self, plan) -> list[int]:
        """Bytes of each parameter of the plan's kernel, in order, not of the one that writes a table in front of it."""
        return pickle.loads(_ensure(plan, str(self.folder)).with_suffix(".parameters").read_bytes())


def _ensure(plan, folder: str) -> Path:
    """The file with the report of a plan; its object lies beside it."""
    path = Path(folder) / f"{plan.name}.report"
    with DiskCache(Path(folder)).locked(plan.name):
        if not path.exists():
            built = build(plan, artifacts=True, strict=False)
            path.with_suffix(".o").write_bytes(built.object_code)
            path.with_suffix(".parameters").write_bytes(pickle.dumps(_parameter_bytes(built.ptx)))
            path.write_bytes(pickle.dumps(examine(built)))
    return path


_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[a-z](\d+) \w+(?:\[(\d+)\])?")


def _parameter_bytes(ptx: str) -> list[int]:
    entries = re.findall(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    (entry,) = (parameters for name, parameters in entries if "ScheduleKernel" not in name)
    return [int(bits) // 8 * int(count or 1) for bits, count in _PARAMETER.findall(entry)]
