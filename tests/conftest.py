"""What the tests share: the step scripts as modules, and a training step without its benchmark."""

import argparse
import functools
import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from common import benchmark, data, passes, roofs  # noqa: E402
from common.model import GPTConfig  # noqa: E402
from common.record import Row  # noqa: E402
from ladder.cells import load_script  # noqa: E402

# A shell starts what runs in the background without these, and what tests start would ignore them too.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

STEPS = sorted(path.stem for path in ROOT.glob("[0-9]_*.py"))
CPU_STEPS = STEPS[:4]
SMALL = GPTConfig(n_layer=2, n_head=4, n_embd=64, seq_len=64, vocab_size=256)
COMPILED = GPTConfig(n_layer=1, n_head=2, n_embd=32, seq_len=32, vocab_size=256)  # as in FAST
# The words of one small run. Tests that compile share this shape, and with it what the compiler keeps on disk.
FAST = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32", "--steps", "2"]
FAST += ["--warmup", "1", "--amp-dtype", "fp32"]
scratch = []  # the folder of the test that runs


def load_step(name: str):
    return load_script(ROOT / f"{name}.py")


def git(folder, *words) -> str:
    """What git prints, in a repository of a test."""
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x.example", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def trace_only(patch) -> None:
    """Let torch.compile trace and differentiate, but generate no kernels: they take most of its time."""
    patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def arguments(step: str, config=SMALL, device="cpu", amp_dtype=torch.float32, **overrides) -> benchmark.Arguments:
    fields = {
        "script": ROOT / f"{step}.py", "base_preset": "tiny", "config": config, "batch_size": 2, "steps": 6,
        "warmup": 2, "lr": 1e-3, "seed": 1337, "text": data.standard_library_text(), "device": torch.device(device),
        "accumulate": 1,
        "amp_dtype": amp_dtype, "amp_note": None, "profile": False, "output": scratch[-1] / "unused.json", "notes": (),
    }  # fmt: skip
    return benchmark.Arguments(**(fields | overrides))


def built(step: str, monkeypatch, **overrides) -> SimpleNamespace:
    """Run a script's `main` up to `benchmark.run`: its train_step, model, args, and staged batches.

    A train_step that asked for capture is launched until its `record` is called.
    """
    module, caught = load_step(step), {}

    def catch(train_step, model, args, **settings):
        caught.update(train_step=train_step, model=model, args=args, settings=settings)
        return Row(args.step)

    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "run", catch)
        module.main(arguments(step, **overrides))
    args = caught["args"]
    drawn = data.read_batches(args.text, args.batch_starts(), args.config.seq_len)
    batches = data.stage_batches(drawn, args.device)
    if (optimizer := caught["settings"].pop("rehearse", None)) is not None:
        benchmark.rehearsal(caught["train_step"], batches[: args.warmup], optimizer)
    return SimpleNamespace(module=module, batches=batches, **caught)


def quick(name: str, *words: str):
    """The Result of an experiment of anatomy/ in quick form on a CPU; its figures and tables are fit for JSON."""
    module, parser = importlib.import_module(f"anatomy.{name}"), argparse.ArgumentParser()
    module.add_arguments(parser)
    given = argparse.Namespace(device=torch.device("cpu"), dtype=None, iters=1, quick=True)
    result = module.run(parser.parse_args(words, given))
    json.dumps(result.record(), allow_nan=False)
    for table in result.tables:
        assert table.rows and len(set(table.headers)) == len(table.headers), "equal headers would hide a column"
        assert all(len(row) == len(table.headers) for row in table.rows), table.title
        assert all(isinstance(cell, str) for row in table.rows for cell in row), table.title
    assert result.sentences and all(sentence.endswith(".") for sentence in result.sentences)
    return result


@pytest.fixture(autouse=True)
def leave_nothing(tmp_path, monkeypatch):
    scratch.append(tmp_path)
    monkeypatch.setattr(roofs, "REFERENCE_S", 0.01)  # roofs of a CPU are measured in seconds
    monkeypatch.setattr(roofs, "COPY_BYTES", 2**22)
    for sizes, few in ((roofs.GRID, (16, 64)), (passes.SIZES, (2**12,)), (passes.TOKENS, 256)):
        monkeypatch.setitem(sizes, "cpu", few)
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)
    scratch.pop()


@pytest.fixture
def refused(capsys):
    """What a call says that ends with exit code 2 and one line: refused(main, words)."""

    def call(work, *words, code=2, **options):
        with pytest.raises(SystemExit) as ended:
            work(*words, **options)
        said = capsys.readouterr().err
        assert ended.value.code == code and said.count("\n") == 1, said
        return said

    return call


@pytest.fixture
def text_file(tmp_path):
    """A file of 4000 printable bytes."""
    path = tmp_path / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(32, 127, 4000, dtype=np.uint8).tobytes())
    return path
