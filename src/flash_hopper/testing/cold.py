"""Time of the first attention call of a process, from a filled kernel cache.

A fresh process brings up torch and the GPU, then imports this package and calls it once. Used by the `cold` suite.
"""

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass

from flash_hopper.problem.errors import CompileError
from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.inputs import TORCH_DTYPES

REPEATS = 5

# torch and its GPU context come first: they belong to the caller's process, not to the first call
PROGRAM = """
import json, sys, time
import torch
batch, seqlen, heads, dim, causal, dtype = json.loads(sys.argv[1])
q, k, v = (torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=getattr(torch, dtype)) for _ in range(3))
(q.float() @ k.float().mT).sum().item()
start = time.perf_counter()
import flash_hopper
flash_hopper.flash_attn_func
imported = time.perf_counter()
flash_hopper.flash_attn_func(q, k, v, causal=causal)
torch.cuda.synchronize()
done = time.perf_counter()
print(json.dumps([1e6 * (imported - start), 1e6 * (done - imported), "cutlass" in sys.modules]))
"""


@dataclass(frozen=True, slots=True)
class ColdCall:
    """Medians in microseconds: importing the package, and the first call up to its result. torch was up before."""

    import_us: float
    call_us: float
    imported_compiler: bool


def cold_call(shape: BenchShape, repeats: int = REPEATS) -> ColdCall:
    """Run the first call in fresh processes. One more before them fills the cache. Raises CompileError if one fails."""
    _fresh_process(shape)
    runs = [_fresh_process(shape) for _ in range(repeats)]
    return ColdCall(
        statistics.median(run[0] for run in runs),
        statistics.median(run[1] for run in runs),
        any(run[2] for run in runs),
    )


def _fresh_process(shape: BenchShape) -> tuple[float, float, bool]:
    dtype = str(TORCH_DTYPES[shape.dtype]).removeprefix("torch.")
    sizes = json.dumps([shape.batch, shape.seqlen_q, shape.heads, shape.d, shape.causal, dtype])
    done = subprocess.run([sys.executable, "-c", PROGRAM, sizes], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"the first call failed in a fresh process: {done.stderr.strip()[-500:]}")
    import_us, call_us, imported_compiler = json.loads(done.stdout.splitlines()[-1])
    return float(import_us), float(call_us), bool(imported_compiler)
