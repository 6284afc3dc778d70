"""`flash-hopper inspect`: what would run for given shapes, and why. Needs no GPU; `--sass` needs the DSL and nvdisasm.

`show_plan` and `show_report` are also what `flash-hopper demo` prints on a machine without a GPU.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flash_hopper.problem.errors import ArgumentError

if TYPE_CHECKING:
    from flash_hopper.compile.inspect import KernelReport
    from flash_hopper.plan.forward import ForwardPlan
    from flash_hopper.plan.own_tiles import OwnRow
    from flash_hopper.problem.attention import AttentionOptions, AttentionProblem

# H200 SXM, dense 16-bit: NVIDIA's data sheet
SMS, PEAK_TFLOPS, PEAK_TBPS = 132, 989.0, 4.8


def inspect(
    seqlen_q: Annotated[int, typer.Option(min=1, help="Query length.")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(min=1, help="Key length; default: the query length.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    heads_k: Annotated[int | None, typer.Option(min=1, help="Key and value heads; default: the query heads.")] = None,
    head_dim: Annotated[int, typer.Option(help="Head dim of q and k.")] = 128,
    head_dim_v: Annotated[int | None, typer.Option(help="Head dim of v; default: that of q.")] = None,
    causal: Annotated[bool, typer.Option(help="Causal mask, aligned bottom-right.")] = False,
    window_left: Annotated[
        int | None, typer.Option(min=-1, help="Keys seen to the left of the diagonal; -1: all.")
    ] = None,
    window_right: Annotated[int | None, typer.Option(min=-1, help="Keys seen to its right; -1: all.")] = None,
    chunk: Annotated[int, typer.Option(min=0, help="Attention chunk; 0: none.")] = 0,
    ragged: Annotated[
        bool, typer.Option("--ragged", help="A packed batch of sequences of up to these lengths.")
    ] = False,
    lse: Annotated[bool, typer.Option(help="Also return the log-sum-exp.")] = False,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    sass: Annotated[bool, typer.Option("--sass", help="Compile offline and count registers and instructions.")] = False,
) -> None:
    """Show tile, warps, registers, shared memory, pipelines and roofline of an attention call."""
    from flash_hopper.plan.forward import choice_of, own_row, plan_forward
    from flash_hopper.problem.attention import AttentionOptions

    options = AttentionOptions(
        causal=causal, window_size=(window_left, window_right), attention_chunk=chunk, return_lse=lse
    )
    problem = _problem(
        dtype,
        (batch, seqlen_q, heads, head_dim),
        (seqlen_k or seqlen_q, heads_k or heads, head_dim_v or head_dim),
        options,
    )
    asked = _packed(problem) if ragged else problem
    plan = plan_forward(asked)
    console = Console()
    show_plan(problem, plan, console, own_row(choice_of(asked)))
    if sass:
        from flash_hopper.compile.inspect import kernel_report

        with console.status("compiling"):
            report = kernel_report(plan)
        show_report(report, console)


def show_plan(problem: "AttentionProblem", plan: "ForwardPlan", console: Console, own: "OwnRow | None" = None) -> None:
    """Print everything about a forward call that is known without compiling. `own`: the user's own row that chose the plan, if one did."""
    console.print(f"[bold]{plan.name}[/]")
    for title, rows in (
        ("tile", _tile_rows(problem, plan, own)),
        ("warps and registers", _role_rows(plan)),
        ("work", _work_rows(problem, plan)),
        (f"roofline (H200: {PEAK_TFLOPS:.0f} TFLOP/s, {PEAK_TBPS} TB/s)", _roofline_rows(problem)),
    ):
        table = _table(title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    console.print(_memory_table(plan))
    console.print(_pipeline_table(plan))


def show_report(report: "KernelReport", console: Console) -> None:
    """Print what a compiled kernel is made of."""
    from flash_hopper.compile.inspect import NOTABLE

    table = _table("compiled for sm_90a")
    table.add_row("registers a thread at launch", str(report.ptxas.registers))
    table.add_row("spills, stack", f"{report.ptxas.spill_bytes} bytes, {report.ptxas.stack_bytes} bytes")
    table.add_row("machine code, object file", f"{report.cubin_bytes} bytes, {report.object_bytes} bytes")
    table.add_row("instructions", str(sum(report.instructions.values())))
    table.add_row("compile time", f"{report.seconds:.2f} s")
    for fault in report.ptxas.faults:
        table.add_row("[red]fault[/]", escape(fault))
    console.print(table)
    counts = _table("instructions", "instruction", "count", "is")
    for op, number in report.notable.items():
        counts.add_row(op, str(number), NOTABLE.get(op, ""))
    console.print(counts)


def memory_map(plan: "ForwardPlan") -> list[tuple[str, int, str]]:
    """Shared memory of the forward in order: (buffer, bytes, what it holds or shares its place with)."""
    from flash_hopper.plan.budget import SMEM_BARRIER_BYTES, SMEM_RESERVED_BYTES

    size = plan.dtype.itemsize
    q, o = plan.tile_m * plan.tile_hdim * size, plan.tile_m * plan.tile_hdimv * size
    k, v = plan.tile_n * plan.tile_hdim * size, plan.tile_n * plan.tile_hdimv * size
    q_stage = max(q, o) if plan.o_place == "q" else q
    own = plan.o_place == "apart"
    streams, times = plan.streams, f"{plan.streams} x " if plan.streams > 1 else ""
    return [
        ("reserved", SMEM_RESERVED_BYTES, "by the runtime"),
        ("barriers", SMEM_BARRIER_BYTES, "mbarriers and tile coordinates, up to the next 1024 bytes"),
        ("sQ", streams * q_stage * plan.q_stages, f"{times}{plan.q_stages} x {plan.tile_m} x {plan.tile_hdim}"),
        ("sK", streams * k * plan.kv_stages, f"{times}{plan.kv_stages} x {plan.tile_n} x {plan.tile_hdim}"),
        ("sV", streams * v * plan.kv_stages, f"{times}{plan.kv_stages} x {plan.tile_n} x {plan.tile_hdimv}"),
        (
            "sO",
            streams * o if own else 0,
            f"{times}{plan.tile_m} x {plan.tile_hdimv}" if own else f"in s{plan.o_place.upper()}",
        ),
    ]


def _packed(problem: "AttentionProblem") -> "AttentionProblem":
    """The problem with its batch packed, for the plan; the tables about its work are those of equal lengths."""
    from flash_hopper.problem.features import Feature
    from flash_hopper.problem.ragged import Ragged

    p = problem
    rows, keys = p.batch * p.seqlen_q, p.batch * p.seqlen_k
    ragged = Ragged(True, True, False, False, rows, keys, p.seqlen_q, p.seqlen_k)
    features = p.features | {Feature.VARLEN}
    return replace(p, seqlen_q=rows, seqlen_k=keys, ragged=ragged, features=features)


def _problem(
    dtype: str, q: tuple[int, int, int, int], k: tuple[int, int, int], options: "AttentionOptions"
) -> "AttentionProblem":
    """The checked problem; q is (batch, seqlen, heads, head_dim), k (seqlen, heads, head_dim_v)."""
    from flash_hopper.problem.attention import attention_problem
    from flash_hopper.problem.dtypes import KERNEL_DTYPES
    from flash_hopper.problem.tensor import TensorSpec

    kinds = {str(d): d for d in KERNEL_DTYPES}
    if dtype not in kinds:
        raise ArgumentError(f"dtype must be one of {', '.join(kinds)}, got {dtype!r}")

    def spec(name: str, *shape: int) -> TensorSpec:
        strides = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
        return TensorSpec(name, shape, strides, kinds[dtype], dtype, "cuda:0")

    batch, _, _, head_dim = q
    return attention_problem(
        spec("q", *q),
        spec("k", batch, k[0], k[1], head_dim),
        spec("v", batch, *k),
        options,
        dtypes=KERNEL_DTYPES,
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=bool(columns), box=None)
    for column in columns:
        table.add_column(column, justify="right" if column in ("bytes", "count", "stages", "arrivals") else "left")
    return table


def _tile_rows(problem: "AttentionProblem", plan: "ForwardPlan", own: "OwnRow | None") -> list[tuple[str, str]]:
    from flash_hopper import settings
    from flash_hopper.plan.budget import choose_layout
    from flash_hopper.plan.tables.forward import choose_row

    sizes = plan.tile_hdim, plan.tile_hdimv
    row = choose_row(*sizes)
    itemsize = problem.dtype.itemsize
    choices = ", ".join(name for name, t in row.tiles.items() if choose_layout(t, *sizes, itemsize) == plan.layout)
    source, why = f"head dims up to {row.hdim} and {row.hdimv}, its tile for: {choices}", row.why
    if own is not None:
        source, why = f"of {settings.TILES}, for {own.rows_from} to {own.rows_to} rows", own.why
    return [
        ("query rows x keys a step", f"{plan.tile_m} x {plan.tile_n}"),
        *([("streams", f"{plan.streams} such tiles beside each other")] if plan.streams > 1 else []),
        ("head dims", f"{problem.head_dim} in {plan.tile_hdim}, {problem.head_dim_v} in {plan.tile_hdimv}"),
        ("table row", source),
        ("because", escape(why)),
        ("ping-pong", "warpgroups take turns at issuing MMAs" if plan.has_pingpong else "off"),
        ("scheduler", f"{plan.scheduler}, persistent CTAs"),
    ]


def _role_rows(plan: "ForwardPlan") -> list[tuple[str, str]]:
    from flash_hopper.plan.roles import REGISTER_FILE, roles_of

    roles = roles_of(plan)
    at_launch = REGISTER_FILE // roles.threads // 8 * 8
    return [
        ("threads", f"{roles.threads}: 1 warpgroup with the producer and the scheduler{' of each stream' * (plan.streams > 1)}, "
                    f"{roles.consumer_warpgroups} consumer warpgroups"),
        ("registers a thread", f"{at_launch} at launch, then {roles.producer_registers} producer, "
                               f"{roles.consumer_registers} consumer"),
    ]  # fmt: skip


def _work_rows(problem: "AttentionProblem", plan: "ForwardPlan") -> list[tuple[str, str]]:
    from flash_hopper.geometry.arith import ceil_div
    from flash_hopper.geometry.blocks import key_blocks
    from flash_hopper.geometry.masks import Lengths, MaskBounds, kernel_bounds

    lengths, mask = (
        Lengths(problem.seqlen_q, problem.seqlen_k),
        problem.mask.simplified(problem.seqlen_q, problem.seqlen_k),
    )
    bounds = MaskBounds(mask.kind, *kernel_bounds(mask))
    visited = [
        key_blocks(row, plan.tile_m, lengths, plan.tile_n, bounds) for row in range(0, problem.seqlen_q, plan.tile_m)
    ]
    tiles = ceil_div(problem.seqlen_q, plan.tile_m) * problem.heads * problem.batch
    rows = ceil_div(problem.seqlen_q, plan.tile_m) * plan.tile_m
    return [
        ("output tiles", f"{tiles}, {tiles / SMS:.2f} for each of {SMS} SMs"),
        ("query rows computed", f"{rows} for {problem.seqlen_q} ({problem.seqlen_q / rows:.0%} of them asked for)"),
        ("key blocks", f"up to {max((blocks.end - blocks.start for blocks in visited), default=0)} a tile"),
    ]


def _roofline_rows(problem: "AttentionProblem") -> list[tuple[str, str]]:
    p = problem
    q_elements = p.batch * p.seqlen_q * p.heads * (p.head_dim + p.head_dim_v)
    k_elements = p.batch * p.seqlen_k * p.heads_k * (p.head_dim + p.head_dim_v)
    moved = (q_elements + k_elements) * p.dtype.itemsize
    math_us, memory_us = p.flops / PEAK_TFLOPS / 1e6, moved / PEAK_TBPS / 1e6
    bound = "arithmetic" if math_us > memory_us else "memory"
    return [
        ("arithmetic", f"{p.flops / 1e9:.1f} GFLOP, {math_us:.1f} us at peak"),
        ("memory", f"{moved / 1e6:.1f} MB (q, k, v, out once), {memory_us:.1f} us at peak"),
        ("bound by", f"{bound}, {p.flops / moved:.0f} FLOP a byte"),
    ]


def _memory_table(plan: "ForwardPlan") -> Table:
    from flash_hopper.plan.budget import SMEM_LIMIT_BYTES

    table = _table("shared memory", "buffer", "bytes", "holds")
    rows = memory_map(plan)
    for name, size, holds in rows:
        table.add_row(name, str(size), holds)
    total = sum(size for _, size, _ in rows)
    table.add_row("total", str(total), f"of {SMEM_LIMIT_BYTES}")
    return table


def _pipeline_table(plan: "ForwardPlan") -> Table:
    from flash_hopper.plan.roles import forward_pipelines

    table = _table("pipelines", "name", "stages", "bytes", "arrivals", "freed by")
    for spec in forward_pipelines(plan).values():
        freed_by = "threads of consumers and producer" if spec.name == "tile" else "consumer warps"
        table.add_row(spec.name, str(spec.stages), str(spec.tx_bytes), str(spec.consumer_arrivals), freed_by)
    return table
