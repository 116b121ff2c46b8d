"""The command line of a step, and what the ladder asks of it."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, STEPS, arguments

from common import hardware
from common.arguments import parse_args, resolve_preset
from common.errors import Skip
from common.model import GPTConfig


def parse(*words):
    return parse_args(ROOT / f"{STEPS[0]}.py", "", list(words))


@pytest.fixture
def output(tmp_path):
    return ["--output", str(tmp_path / "record.json")]


BAD = [
    (["--preset", "gpt5"], "invalid choice"),
    (["--n-embd", "130"], "--n-embd 130 is not divisible by --n-head 4"),
    (["--seq-len", "1.5"], "'1.5' is not a whole number"),
    (["--lr", "nan"], "--lr: 'nan' is not a finite positive number"),
    (["--seed", "-1"], "--seed"),
    (["--device", "tpu"], "is not one of auto, cpu, cuda, cuda:N"),
    (["--amp-dtype", "fp16"], "needs a GPU"),
    (["--data", "/nonexistent/text.txt"], "cannot read /nonexistent/text.txt"),
    (["--data-tokens", "999999999"], "fewer than --data-tokens 999999999"),
    (["--vocab-size", "100"], "outside the vocabulary"),
    (["--output", "/proc/nowhere/x.json"], "cannot write --output"),
    (["--batch-size", "9" * 20], "2^31 - 1"),
    (["--accumulate", "3"], "a batch of 2 is not divisible by --accumulate 3"),
    (["--parallel", "fsdp"], "--parallel is for several processes"),
    (["--nonsense"], "unrecognized arguments"),
]


def test_bad_input_is_one_line_and_exit_code_2(output, refused):
    for words, said in BAD:
        assert said in refused(parse, "--device", "cpu", *output, *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU here")
def test_a_gpu_that_torch_cannot_use_is_named(output, monkeypatch, refused):
    monkeypatch.setattr(hardware, "driver_version", lambda: "999.88")
    for device in ("auto", "cuda"):
        complaint = refused(parse, "--device", device, *output)
        assert "driver 999.88" in complaint and torch.__version__ in complaint and "--device cpu" in complaint
    assert parse("--device", "cpu", *output).device.type == "cpu"


def test_auto_takes_tiny_on_a_cpu_and_every_field_can_be_overridden(output):
    args = parse("--device", "cpu", *output)
    assert (args.preset, args.batch_size, args.steps, args.warmup) == ("tiny", 2, 10, 3)
    assert "runs on a CPU" in args.notes[0]
    words = ["--n-layer", "3", "--n-embd", "64", "--batch-size", "5", "--lr", "0.5", "--data-tokens", "5000"]
    args = parse("--device", "cpu", *words, *output)
    assert (args.config.n_layer, args.config.n_embd, args.batch_size, args.lr) == (3, 64, 5, 0.5)
    assert args.preset == "custom" and args.base_preset == "tiny" and args.workload().data.tokens == 5000


def test_auto_picks_what_fits_a_gpu_also_in_micro_batches_and_recomputed(monkeypatch):
    for free_gib, preset, batch_size, *how in (
        (139, "gpt3-6.7b-slice", 8),
        (79, "gpt2", 32),
        (20, "gpt2", 8),
        (1, "gpt2", 1),
        (79, "gpt3-6.7b-slice", 8, 2),
        (20, "gpt2", 16, 2),
        (79, "gpt3-6.7b-slice", 8, 1, True),
    ):
        monkeypatch.setattr(hardware, "free_memory_bytes", lambda device, free=free_gib: free * 2**30)
        chosen = resolve_preset("auto", torch.device("cuda", 0), *how)
        assert chosen[:2] == (preset, batch_size) and str(free_gib) in chosen[2][0]


def test_a_size_that_a_kernel_cannot_take_is_named():
    config = GPTConfig(n_layer=1, n_head=2, n_embd=64, seq_len=24, vocab_size=250)
    args = arguments(STEPS[0], config=config, batch_size=3)
    args.require_multiples_of(8, "FP8", vocab=False)
    with pytest.raises(Skip, match="FP8 needs --vocab-size divisible by 8, not 250"):
        args.require_multiples_of(8, "FP8")
    with pytest.raises(Skip, match="--batch-size x --seq-len divisible by 16, not 72"):
        args.require_multiples_of(16, "FP8")


def test_the_ladder_gets_the_meaning_of_the_arguments_as_json(text_file, output):
    command = [sys.executable, "-m", "ladder.check", "--device", "cpu", "--n-embd", "64", "--data", str(text_file)]
    facts = json.loads(subprocess.run([*command, *output], cwd=ROOT, capture_output=True, check=True).stdout)
    assert facts["pinned"] == ["--preset", "tiny", "--batch-size", "2", "--data-tokens", "4000"]
    assert facts["device_type"] == "cpu" and facts["workload"]["n_embd"] == 64 and facts["notes"]
    assert facts["by_hand_bytes"] > facts["fused_bytes"] > 0


def test_a_python_without_torch_gets_one_line():
    bare = "import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; "
    bare += "import runpy; sys.argv[:] = ['x']; runpy.run_module('ladder.check', run_name='__main__', alter_sys=True)"
    ran = subprocess.run([sys.executable, "-c", bare], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    assert "torch" in ran.stderr and "numpy" in ran.stderr and "--setup" in ran.stderr
