"""`flash-hopper demo`: attention on random tensors, on text inside a transformer block, and on your own tensors.

Forward and gradients. On a GPU of compute capability 9.0 the kernels run: error against float64, TFLOP/s against PyTorch.
Anywhere else the CPU backend gives the numbers, and the Hopper kernels are compiled and the forward's plan shown.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import flash_hopper
from flash_hopper.problem.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    import torch

    from flash_hopper.testing.bench_suites import BenchShape
    from flash_hopper.testing.block import BlockSizes
    from flash_hopper.testing.demo_run import Accuracy

CPU_SEQLEN, GPU_SEQLEN, GPU_BATCH = 512, 4096, 4


def demo(
    input: Annotated[
        Path | None,
        typer.Option(
            help="safetensors file with q, k, v (batch, seqlen, heads, head_dim) and/or hidden (batch, seqlen, hidden)."
        ),
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the demo's own tensors as such a file.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text for the block; by default a source of this package.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bf16 or fp16; fp32 on the CPU.")] = "bf16",
    seqlen: Annotated[int | None, typer.Option(min=1, help="Sequence length; 512 on the CPU, 4096 on a GPU.")] = None,
    heads: Annotated[int, typer.Option(min=1, help="Heads of q.")] = 8,
    heads_k: Annotated[int, typer.Option(min=1, help="Heads of k and v; must divide those of q.")] = 2,
    head_dim: Annotated[int, typer.Option(min=8, help="Head dim, a multiple of 8.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of random tensors and weights.")] = 0,
) -> None:
    """Run attention forward and backward and show how right and how fast it is."""
    from flash_hopper.testing import demo_run
    from flash_hopper.testing.block import BlockSizes, text_states

    console = Console()
    place, kind = _device(device, console), _dtype(dtype)
    if heads % heads_k:
        raise ArgumentError(f"heads_k must divide heads, got {heads_k} and {heads}")
    on_gpu = place.type == "cuda"
    length = seqlen or (GPU_SEQLEN if on_gpu else CPU_SEQLEN)
    sizes = BlockSizes(heads, heads_k, head_dim)
    given = demo_run.load_tensors(input) if input is not None else {}

    rows: list[Accuracy] = []
    q, k, v = demo_run.random_qkv(sizes, GPU_BATCH if on_gpu else 1, length, place, kind, seed)
    rows += _show_attention("random tensors", (q, k, v), console)
    states = text_states(_text(text), length, sizes.hidden, seed).to(place, kind)
    rows += _show_block(f"{text or 'text of this package'}", states, sizes, seed, console)
    if save is not None:
        demo_run.save_tensors(save, {"q": q, "k": k, "v": v, "hidden": states})
        console.print(f"tensors written to {save}")
    if "q" in given:
        rows += _show_attention(str(input), tuple(given[name].to(place, kind) for name in ("q", "k", "v")), console)
    if "hidden" in given:
        own = given["hidden"].to(place, kind)
        if own.shape[2] != sizes.hidden:
            raise ArgumentError(
                f"hidden in {input} is {own.shape[2]} wide; choose --heads and --head-dim whose product is that"
            )
        rows += _show_block(str(input), own, sizes, seed, console)
    if on_gpu:
        _show_speed((q, k, v), console)
    else:
        _show_kernels((q, k, v), console)
    failed = [row for row in rows if not row.passes]
    console.print(f"{len(rows) - len(failed)} passed, {len(failed)} failed: largest error at most twice PyTorch's")
    if failed:
        raise typer.Exit(1)


def _device(choice: str, console: Console) -> "torch.device":
    import torch

    if choice not in ("auto", "cpu", "cuda"):
        raise ArgumentError(f"device must be auto, cpu or cuda, got {choice!r}")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if choice == "cuda" and capability != (9, 0):
        raise DeviceError(f"the kernels need a GPU of compute capability 9.0, got {capability or 'no CUDA device'}")
    if choice == "cpu" or capability != (9, 0):
        reason = "as asked" if choice == "cpu" else f"no GPU of compute capability 9.0 here ({capability or 'no GPU'})"
        console.print(f"[bold]CPU backend[/]: {reason}; float64 is the reference")
        return torch.device("cpu")
    console.print(f"[bold]{torch.cuda.get_device_name()}[/]: Hopper kernels; float64 is the reference")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(name: str) -> "torch.dtype":
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in dtypes:
        raise ArgumentError(f"dtype must be one of {', '.join(dtypes)}, got {name!r}")
    return dtypes[name]


def _text(path: Path | None) -> bytes:
    if path is None:
        return (Path(flash_hopper.__file__).parent / "problem" / "attention.py").read_bytes()
    if not path.is_file():
        raise ArgumentError(f"text must name a file, got {path}")
    return path.read_bytes()


def _show_attention(source: str, qkv: "tuple[torch.Tensor, ...]", console: Console) -> "list[Accuracy]":
    from flash_hopper.testing.demo_run import attention_accuracy

    q, k, v = qkv
    rows = []
    masks = (False, True) if q.shape[1] == k.shape[1] else (False,)
    for causal in masks:
        title = f"attention on {source}: q {tuple(q.shape)}, k {tuple(k.shape)}, {'causal' if causal else 'full'}"
        rows += _show_accuracy(title, attention_accuracy(q, k, v, causal), console)
    return rows


def _show_block(source: str, x: "torch.Tensor", sizes: "BlockSizes", seed: int, console: Console) -> "list[Accuracy]":
    from flash_hopper.testing.demo_run import block_accuracy

    title = f"transformer block on {source}: {tuple(x.shape)}, {sizes.heads}/{sizes.heads_k} heads of {sizes.head_dim}"
    return _show_accuracy(title, block_accuracy(x, sizes, seed), console)


def _show_accuracy(title: str, rows: "list[Accuracy]", console: Console) -> "list[Accuracy]":
    console.print(f"[bold]{escape(title)}[/]", soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("largest error against float64")
    for name in ("flash-hopper", "PyTorch, same dtype", "largest value"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row.what, f"{row.ours:.2e}", f"{row.torch:.2e}", f"{row.scale:.3g}")
    console.print(table)
    console.print()
    return rows


def _show_kernels(qkv: "tuple[torch.Tensor, ...]", console: Console) -> None:
    """Compile the kernels that a Hopper GPU would run for these tensors, and show the forward's plan."""
    from flash_hopper.cli.inspect import show_plan
    from flash_hopper.compile.build import build
    from flash_hopper.plan.backward import BackwardRequest, plan_backward
    from flash_hopper.plan.forward import choice_of, own_row, plan_forward

    problem = _shape(qkv, causal=True, direction="forward").problem
    plan = plan_forward(problem)
    console.print("[bold]The kernel that a Hopper GPU would run for the causal call[/]")
    show_plan(problem, plan, console, own_row(choice_of(problem)))
    request = BackwardRequest(needs_dq=True, needs_dkdv=True, has_dlse=False, is_deterministic=False)
    backward = plan_backward(problem, request)
    table = _table("compiled for sm_90a, forward and backward", "kernel", "seconds", "registers", "spills", "KB")
    with console.status("compiling for sm_90a"):
        for each in (plan, backward.preprocess, backward.dkdv, backward.dq, backward.postprocess):
            if each is not None:
                built = build(each)
                report = built.report
                size = f"{len(built.object_code) / 1e3:.0f}"
                table.add_row(each.name, f"{built.seconds:.1f}", str(report.registers), str(report.spill_bytes), size)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _shape(qkv: "tuple[torch.Tensor, ...]", causal: bool, direction: str) -> "BenchShape":
    """The sizes of these tensors; fp32 tensors stand for the bf16 that a kernel would take."""
    import torch

    from flash_hopper.problem.dtypes import DType
    from flash_hopper.testing.bench_suites import BenchShape

    q, _, v = qkv
    dtype = DType.FP16 if q.dtype == torch.float16 else DType.BF16
    (batch, seqlen, heads, dim), (_, seqlen_k, heads_k, dim_v) = q.shape, v.shape
    return BenchShape("demo", dtype, dim, dim_v, causal, seqlen, seqlen_k, batch, heads, heads_k, direction)


def _show_speed(qkv: "tuple[torch.Tensor, ...]", console: Console) -> None:
    """TFLOP/s of these tensors against PyTorch's backends, by the burst protocol, forward and backward."""
    from flash_hopper.testing.bench_run import Settings, measure
    from flash_hopper.testing.bench_suites import DIRECTIONS

    settings = Settings(("ours", "sdpa-flash", "sdpa-cudnn"), ("burst",))
    for direction in DIRECTIONS:
        table = _table(f"speed, {direction}", "mask, provider", "us", "TFLOP/s")
        for causal in (False, True):
            for row in measure(_shape(qkv, causal, direction), settings):
                cells = (
                    (f"{row.us:.1f}", f"{row.tflops:.0f}") if row.us and row.tflops else (row.error or "absent", "-")
                )
                table.add_row(f"{'causal' if causal else 'full'}, {row.provider}", *cells)
        console.print(table)
