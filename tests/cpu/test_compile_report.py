"""Reading what ptxas and the disassembler say."""

import pytest

from flash_hopper.compile.inspect import KernelReport
from flash_hopper.compile.report import parse_report
from flash_hopper.compile.sass import by_kernel, count_instructions
from flash_hopper.problem.errors import CompileError

REMARK = """--- !Analysis
Pass:            ptxas info
Args:
  - RemarkId:    1
  - Remark:      'ptxas output: {advice}ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function ''kernel_a'' for ''sm_90a''
ptxas info    : Function properties for kernel_a
ptxas         .     {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 2 barriers
ptxas info    : Compile time = 139.458 ms
'
...
"""


def remark(advice="", stack=0, stores=0, loads=0, registers=168) -> str:
    return REMARK.format(advice=advice, stack=stack, stores=stores, loads=loads, registers=registers)


def test_a_clean_kernel_has_registers_and_no_faults():
    report = parse_report(remark())
    assert (report.registers, report.stack_bytes, report.spill_bytes, report.faults) == (168, 0, 0, [])
    assert "Compiling entry function 'kernel_a' for 'sm_90a'" in report.text


@pytest.mark.parametrize(
    "sizes", [{"stack": 8}, {"stores": 4}, {"loads": 4}, {"stack": 8, "stores": 4, "loads": 12}], ids=str
)
def test_any_spill_or_stack_is_a_fault(sizes):
    report = parse_report(remark(**sizes))
    assert report.faults and report.spill_bytes == sizes.get("stores", 0) + sizes.get("loads", 0)


@pytest.mark.parametrize(
    "advice",
    ["ptxas info    : (C7508) Potential Performance Loss: ''setmaxnreg'' ignored\n",
     "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n",
     "ptxas info    : (C7517) wgmma.wait_group is injected\nptxas info    : (C7519) more\n"],
)  # fmt: skip
def test_every_advisory_is_a_fault_of_its_own(advice):
    faults = parse_report(remark(advice)).faults
    assert faults == [line.replace("''", "'") for line in advice.splitlines()]


def test_the_worst_of_several_kernels_counts():
    report = parse_report(remark(registers=32) + remark(registers=96, stores=4) + remark(registers=64))
    assert (report.registers, report.spill_bytes) == (96, 4)


@pytest.mark.parametrize(
    "text", ["", "--- !Analysis\n", remark().replace("Used", "Uses"), remark().replace("stack frame", "frame")]
)
def test_a_report_that_cannot_be_read_is_an_error_and_not_a_clean_kernel(text):
    with pytest.raises(CompileError, match="no register report"):
        parse_report(text)


SASS = """
.text.kernel_a:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
        /*0080*/             @!UP2 UTMALDG.4D [UR8], [UR4], desc[UR6] ;
.L_x_72:
        /*01a0*/                   SYNCS.EXCH.64 URZ, [UR4], UR6 ;
        /*2f90*/                   HGMMA.64x80x16.F32.BF16 R88, gdesc[UR20], RZ, !UPT ;
        /*2fb0*/                   HGMMA.64x80x16.F32.BF16 R88, gdesc[UR24], R88, gsb0 ;
        /*30d0*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR20].tnspB, R24 ;
        /*3100*/                   MUFU.EX2 R4, R4 ;
        /*3110*/              @!P1 MUFU.RCP R4, R4 ;
       /*13100*/                   VIMNMX3 R4, R4, R5, R6, PT ;
"""


@pytest.mark.parametrize(
    ("mnemonic", "count"),
    [("LDC", 1), ("BRA", 1), ("UTMALDG", 1), ("UTMALDG.4D", 1), ("SYNCS", 1), ("HGMMA", 3), ("HGMMA.SS", 2), ("HGMMA.RS", 1),
     ("HGMMA.64x128x16.RS", 1), ("HGMMA.64x128x16.SS", 0), ("MUFU", 2), ("MUFU.EX2", 1), ("VIMNMX3", 1), ("VIMNMX", 0), ("LD", 0)],
)  # fmt: skip
def test_instructions_are_counted_by_leading_and_later_parts_of_their_names(mnemonic, count):
    report = KernelReport("a", parse_report(remark()), {"kernel_a": count_instructions(SASS)}, 0, 0, 0.0)
    assert report.count(mnemonic) == count
    assert sum(report.instructions.values()) == 10


def test_kernels_of_one_object_are_counted_each_by_itself():
    both = SASS + SASS.replace("kernel_a", "kernel_b").replace("UTMALDG", "UTMASTG")
    kernels = {name: count_instructions(text) for name, text in by_kernel(both).items()}
    assert list(kernels) == ["kernel_a", "kernel_b"]
    report = KernelReport("a", parse_report(remark()), kernels, 0, 0, 0.0)
    assert report.counts("UTMALDG") == [1, 0] and report.counts("HGMMA") == [3, 3]
    assert report.count("HGMMA") == 6 and sum(report.instructions.values()) == 20
