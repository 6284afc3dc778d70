"""Kernels compiled once a test session: each with its object file, its report and the sizes of its parameters."""

import pickle
import re
from pathlib import Path

from machine_code import count, lines_of, matrix_loops

from flash_hopper.compile.build import build
from flash_hopper.compile.disk import DiskCache
from flash_hopper.compile.inspect import KernelReport
from flash_hopper.compile.parallel import map_plans
from flash_hopper.plan.roles import REGISTER_FILE, roles_of

GROUP = 8  # kernels that are disassembled together


class CompiledKernels:
    """Compiles on demand into a folder that several processes may share, with the kernels that `plans` has beside it."""

    def __init__(self, folder: Path, plans=()) -> None:
        self.folder = folder
        self._groups = [tuple(plans[i : i + GROUP]) for i in range(0, len(plans), GROUP)]
        self._group_of = {plan: group for group in self._groups for plan in group}
        self._reports: dict[str, KernelReport] = {}

    def prepare(self) -> None:
        """Compile with all cores what will be asked for."""
        if len(self._groups) > 1:
            map_plans(_ensure, self._groups, None, None, str(self.folder))

    def report(self, plan) -> KernelReport:
        if plan.name not in self._reports:
            self._reports[plan.name] = pickle.loads(self._file(plan, ".report").read_bytes())
        return self._reports[plan.name]

    def object_file(self, plan) -> Path:
        return self._file(plan, ".o")

    def parameters(self, plan) -> list[int]:
        """Bytes of each parameter of the plan's kernel, in order, not of the one that writes a table in front of it."""
        return pickle.loads(self._file(plan, ".parameters").read_bytes())

    def loops(self, plan) -> list[dict[str, int]]:
        """Instructions of its innermost loops with warpgroup MMAs, in the order of the code."""
        return pickle.loads(self._file(plan, ".loops").read_bytes())

    def _file(self, plan, suffix: str) -> Path:
        own, folder = self._group_of.get(plan, (plan,)), str(self.folder)
        # while another process compiles its group, this one compiles others, which some test will ask for
        for group in (own, *self._groups):
            if _path(own[-1], folder, ".report").exists():
                break
            if _claims(group, folder):
                _ensure(group, folder)
        _ensure(own, folder)
        return _path(plan, folder, suffix)


def _path(plan, folder: str, suffix: str) -> Path:
    return Path(folder) / f"{plan.name}{suffix}"


def _claims(plans, folder: str) -> bool:
    """Whether nobody has begun with a group; who asks begins with it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _path(plans[0], folder, ".claim").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _ensure(plans, folder: str) -> None:
    """The files of a group, each kernel's report last; waits for a process that is at it."""
    with DiskCache(Path(folder)).locked(plans[0].name):
        missing = [plan for plan in plans if not _path(plan, folder, ".report").exists()]
        kernels = [build(plan, artifacts=True, strict=False) for plan in missing]
        codes = lines_of([built.cubin for built in kernels]) if kernels else []
        for plan, built, lines in zip(missing, kernels, codes, strict=True):
            _path(plan, folder, ".o").write_bytes(built.object_code)
            _path(plan, folder, ".parameters").write_bytes(pickle.dumps(_parameter_bytes(built.ptx)))
            sizes = len(built.cubin), len(built.object_code)
            loops = [loop for code in lines.values() for loop in matrix_loops(code)]
            _path(plan, folder, ".loops").write_bytes(pickle.dumps(loops))
            by_kernel = {name: count(code) for name, code in lines.items()}
            report = KernelReport(built.symbol, built.report, by_kernel, *sizes, built.seconds)
            _path(plan, folder, ".report").write_bytes(pickle.dumps(report))


_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[a-z](\d+) \w+(?:\[(\d+)\])?")


def _parameter_bytes(ptx: str) -> list[int]:
    entries = re.findall(r"\.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    (entry,) = (parameters for name, parameters in entries if "ScheduleKernel" not in name)
    return [int(bits) // 8 * int(count or 1) for bits, count in _PARAMETER.findall(entry)]


def check_registers(plan, report: KernelReport) -> None:
    """Of an attention kernel: no spills, no advisories, the registers that its roles share out, each role's handed over once."""
    assert report.ptxas.faults == []
    assert report.count("LDL") == report.count("STL") == 0
    assert report.ptxas.registers == REGISTER_FILE // roles_of(plan).threads // 8 * 8
    assert report.count("USETMAXREG.DEALLOC") == report.count("USETMAXREG.TRY_ALLOC") == 1
