"""The command `flash-hopper`: one module per subcommand, registered here.

Those modules import what is heavy (torch, the DSL, matplotlib) inside their functions, so that every `--help` is quick.
"""

import sys

import typer
from rich.console import Console
from rich.markup import escape

from flash_hopper.cli.bench import bench
from flash_hopper.cli.cache import cache_app
from flash_hopper.cli.compile import compile_kernels
from flash_hopper.cli.demo import demo
from flash_hopper.cli.env import env
from flash_hopper.cli.inspect import inspect
from flash_hopper.cli.tune import tune
from flash_hopper.cli.verify import verify
from flash_hopper.problem.errors import FlashHopperError

app = typer.Typer(
    name="flash-hopper",
    help="FlashAttention-3 for Hopper GPUs in Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(verify)
app.command()(bench)
app.command()(tune)
app.command()(inspect)
app.command("compile")(compile_kernels)
app.add_typer(cache_app, name="cache")
app.command()(env)


def main() -> None:
    """Run the command line. An error that is the caller's or the installation's is one message, not a traceback."""
    try:
        app()
    except FlashHopperError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
