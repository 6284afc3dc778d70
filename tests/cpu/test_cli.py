"""The command line: every command explains itself quickly, refuses by name, and shows what it computed."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import flash_hopper
from flash_hopper.cli.main import app
from flash_hopper.problem.errors import ArgumentError, DeviceError, FlashHopperError, UnsupportedError

SOURCE = Path(flash_hopper.__file__).parent.parent
COMMANDS = {"demo", "verify", "bench", "tune", "inspect", "compile", "cache", "env"}


def run(*arguments: str, code: int = 0) -> str:
    """Run the command in this process; its output. Errors of the package come through as exceptions."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if isinstance(result.exception, FlashHopperError):
        raise result.exception
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


def as_a_user(*arguments: str) -> subprocess.CompletedProcess:
    """Run `python -m flash_hopper` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "flash_hopper", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"},
    )


def every_command(command, path: tuple[str, ...] = ()):
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from every_command(child, (*path, name))


def test_the_commands_are_there_and_each_explains_itself():
    root = typer.main.get_command(app)
    paths = list(every_command(root))
    assert {path[0] for path in paths if path} == COMMANDS
    for path in paths:
        shown = run(*path, "--help")
        assert "Usage" in shown, path
        assert len(shown.splitlines()) > 5, path


def test_help_loads_nothing_heavy():
    program = (
        "import sys\n"
        "import flash_hopper\n"
        "before = set(sys.modules)\n"
        "from typer.testing import CliRunner\n"
        "from flash_hopper.cli.main import app\n"
        "for command in sys.argv[1:]:\n"
        "    assert CliRunner().invoke(app, [command, '--help']).exit_code == 0\n"
        "heavy = {'torch', 'cutlass', 'tvm_ffi', 'matplotlib', 'safetensors', 'torch.nn.attention'}\n"
        "assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)\n"
    )
    subprocess.run(
        [sys.executable, "-c", program, *sorted(COMMANDS)],
        check=True,
        timeout=120,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
    )


def test_an_error_is_one_message_and_a_failure_code():
    refused = as_a_user("bench", "--suite", "decode")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: suite decode")
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("--suite", "cold", "--direction", "backward"), ArgumentError, "first forward call"),
        (("--direction", "sideways"), ArgumentError, "direction"),
        (("--suite", "decode"), UnsupportedError, "suite decode"),
        (("--suite", "everything"), ArgumentError, "suite must be one of paper, train, host, cold"),
        (("--dims", "100"), ArgumentError, "head dims are"),
        (("--seqlens", "8x"), ArgumentError, "16k"),
        (("--mask", "diagonal"), ArgumentError, "mask must be"),
        (("--dtype", "fp32"), ArgumentError, "dtype must be"),
        (("--cells", "17"), ArgumentError, "18 or 36"),
        (("--protocol", "sprint"), ArgumentError, "burst, steady, graph"),
        (("--suite", "host", "--protocol", "burst"), ArgumentError, "host-idle"),
        (("--providers", "ours,theirs"), ArgumentError, "theirs"),
        (("--tables", "nowhere.md"), ArgumentError, "nowhere.md"),
        (("--from-json", "nowhere.json"), ArgumentError, "nowhere.json"),
    ],
)
def test_bench_refuses_by_name(arguments, error, message):
    with pytest.raises(error, match=message):
        run("bench", *arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="claims something about machines without a GPU")
@pytest.mark.parametrize("arguments", [(), ("--direction", "backward"), ("--suite", "train")])
def test_bench_without_a_gpu_says_what_it_needs(arguments):
    with pytest.raises(DeviceError, match=r"compute capability 9\.0"):
        run("bench", *arguments)


def test_env_shows_every_fact_and_the_same_as_json(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_HOPPER_CACHE", str(tmp_path))
    facts = json.loads(run("env", "--json"))
    assert facts["flash_hopper"] == flash_hopper.__version__
    assert facts["torch"] == torch.__version__
    assert facts["cache"] == str(tmp_path)
    assert (facts["gpu"] is None) == (not torch.cuda.is_available())
    table = run("env")
    for fact in (facts["torch"], facts["python"], facts["cutlass_dsl"], facts["tvm_ffi"]):
        assert fact in table


def small(*arguments: str) -> str:
    return run(
        "demo", "--device", "cpu", "--seqlen", "40", "--heads", "2", "--heads-k", "1", "--head-dim", "16", *arguments
    )


def test_demo_without_a_gpu_checks_values_and_gradients_and_compiles_the_kernel(tmp_path):
    shown = small()
    for part in (
        "gradient of q",
        "gradient of the block's input",
        "shared memory",
        "compiled for sm_90a, forward and backward",
        "preprocess_bf16",
        "backward_dkdv_bf16",
        "postprocess_bf16",
        "11 passed, 0 failed",
    ):
        assert part in shown


def test_demo_reads_the_tensors_that_it_writes(tmp_path, monkeypatch):
    from flash_hopper.compile import build

    monkeypatch.setattr(build, "build", functools.cache(build.build))  # both runs show the same kernels
    file = tmp_path / "tensors.safetensors"
    small("--save", str(file), "--dtype", "fp32")
    shown = small("--input", str(file), "--dtype", "fp32")
    assert shown.count(str(file)) == 3
    assert "22 passed, 0 failed" in shown


def test_demo_takes_any_text(tmp_path, monkeypatch):
    monkeypatch.setattr("flash_hopper.cli.demo._show_kernels", lambda *_: None)
    text = tmp_path / "short.txt"
    text.write_text("to be or not to be")
    assert f"transformer block on {text}" in small("--text", str(text))


def test_demo_refuses_bad_input_by_name(tmp_path):
    from safetensors.torch import save_file

    def stored(**tensors: torch.Tensor) -> str:
        path = tmp_path / f"{'_'.join(tensors) or 'none'}.safetensors"
        save_file({name: t.clone() for name, t in tensors.items()}, path)
        return str(path)

    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"not tensors")
    q = torch.zeros(1, 4, 2, 16)
    for arguments, message in (
        (("--input", str(tmp_path / "absent")), "must name a safetensors file"),
        (("--input", str(garbage)), "is no safetensors file"),
        (("--input", stored(q=q, k=q)), "must hold q, k and v, or hidden"),
        (("--input", stored(other=q)), "must hold q, k and v, or hidden"),
        (("--input", stored(hidden=q)), "hidden .* must have 3 dimensions"),
        (("--input", stored(q=q[0], k=q, v=q)), "q .* must have 4 dimensions"),
        (("--text", str(tmp_path / "absent")), "text must name a file"),
        (("--dtype", "int8"), "dtype must be one of"),
        (("--device", "tpu"), "device must be"),
        (("--heads-k", "3"), "heads_k must divide heads"),
    ):
        with pytest.raises(ArgumentError, match=message):
            small(*arguments)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ((), "_full_static"),
        (("--causal",), "_causal_"),
        (("--causal", "--window-left", "-1", "--window-right", "7"), "_causal_"),
        (("--window-left", "128", "--causal"), "_local_"),
        (("--window-right", "5"), "_local_"),
        (("--chunk", "64"), "_chunk_"),
        (("--ragged",), "_full_dynamic_ragged"),
        (("--ragged", "--causal", "--lse"), "_causal_dynamic_ragged_lse"),
        (("--ragged", "--window-left", "100"), "_local_dynamic_ragged"),
    ],
)
def test_inspect_shows_the_kernel_of_every_mask_and_of_packed_batches(arguments, shown):
    name, *tables = run("inspect", *arguments).splitlines()
    assert name.startswith("forward_bf16_d128_dv128_")
    assert shown in name
    assert any("shared memory" in line for line in tables)
