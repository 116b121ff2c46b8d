"""The command line of a step: what it refuses, in one line and before it takes time, and what `auto`
means."""

import json
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
from conftest import ROOT, STEPS

from common import data, flops, hardware, options
from common.model import PRESETS
from common.record import write_json
from common.text import Skip, portable_command, run_command
from ladder import __main__ as command
from ladder import facts


def parse(*words):
    return options.parse_args(ROOT / f"{STEPS[0]}.py", None, ["--device", "cpu", *map(str, words)])


@pytest.mark.parametrize(
    "words, said",
    [
        ("--steps 0", "is not a whole number"),
        ("--n-head 3", "--n-embd 128 is not divisible by --n-head 3"),
        ("--device mps", "invalid choice"),
        ("--parallel ddp", "--parallel is for several processes"),
        ("--n-layer 100000", "needs 369 GiB in training (20 bytes a parameter), but cpu has"),
        ("--seq-len 100000000", "GiB in training"),
        ("--vocab-size 100", "a multiple of 64"),
        ("--data tests/no-such-file", "cannot read tests/no-such-file: No such file or directory"),
        ("--output /dev/null", "exists and is no record: it stays as it is"),
        (f"--output {__file__}", "exists and is no record: it stays as it is"),
        (f"--output {ROOT}/tests/data/te-2.9.0.json", "exists and is no record: it stays as it is"),
        ("--output /proc/x.json", "cannot write /proc/x.json: No such file or directory"),
        ("--lr 1e25", "is not above 0 and at most 1"),
        ("--lr nan", "is not above 0 and at most 1"),
        ("--unknown 1", "unrecognized arguments: --unknown 1"),
        ("--batchsize=2", "unrecognized arguments: --batchsize=2: did you mean --batch-size?"),
    ],
)
def test_bad_input_is_one_line_and_takes_no_time(words, said, refused):
    began = time.process_time()
    assert said in refused(parse, *words.split())
    assert time.process_time() - began < 10


def test_the_home_of_a_user_is_found_and_a_file_beside_the_record_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "r.json.trial").write_text("mine")
    assert parse("--output=~/r.json").output == tmp_path / "r.json"
    assert [path.name for path in tmp_path.iterdir()] == ["r.json.trial"]
    assert command.with_absolute_files(["--data=~/book.txt"]) == ["--data", str(tmp_path / "book.txt")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_line(refused):
    assert "--device cpu runs on the CPU" in refused(parse, "--device", "cuda")


def test_a_file_with_too_few_tokens_or_too_large_ones_is_one_line(tmp_path, refused):
    tokens = np.arange(200, dtype="<u2") % 100
    (tmp_path / "few.bin").write_bytes(tokens[:64].tobytes())
    assert "few.bin has 64 tokens" in refused(parse, "--data", tmp_path / "few.bin", "--seq-len", 32)
    (tmp_path / "enough.bin").write_bytes(tokens[:66].tobytes())
    assert len(data.load_text(tmp_path / "enough.bin", 32, 256).tokens) == 66, "two sequences with targets"
    (tmp_path / "wide.bin").write_bytes((tokens + 60000).astype("<u2").tobytes())
    said = refused(parse, "--data", tmp_path / "wide.bin", "--seq-len", 64)
    assert "--vocab-size 60160, a multiple of 64" in said
    assert "rename the file" in refused(parse, "--data", "/tmp/\udcff.txt")


@pytest.mark.parametrize(("tokens", "seq_len", "count"), [(66, 32, 1), (4000, 128, 1), (40_000, 16, 117)])
def test_batches_depend_on_the_seed_and_never_on_what_is_held_out(tokens, seq_len, count):
    text = data.Text(data.standard_library_text().tokens[:tokens], "so short that all starts are drawn")
    few, many = (data.draw_starts(text, n, 4, seq_len, 7) for n in (3, 30_000))
    assert (few == many[:3]).all()
    held_out = data.heldout_starts(text, seq_len)
    assert held_out.shape == (count, 1) and held_out.max() <= tokens - seq_len - 1
    use = np.zeros(tokens, int)
    for start in held_out.flatten():
        use[start : start + seq_len + 1] += 1
    assert use.max() == 1 and use.sum() <= max(0.05 * tokens, seq_len + 1)
    trained = np.zeros(tokens, bool)
    for start in np.unique(many):
        trained[start : start + seq_len + 1] = True
    assert not (trained & (use > 0)).any() and trained.sum() > 0.99 * (tokens - use.sum()) - count
    if count > 1:
        assert (data.draw_starts(text, 3, 4, seq_len, 8) != few).any()


def test_a_batch_is_pairs_of_tokens_and_the_next_ones():
    text = data.standard_library_text()
    assert data.stretches(text, 1024)[0] == 128 and data.heldout_starts(text, 1024).size * 1025 > 100_000
    starts = data.draw_starts(text, 1, 4, 128, 7)
    tokens, targets = data.stage_batches(text, starts, 128, torch.device("cpu"))[0]
    assert torch.equal(tokens[:, 1:], targets[:, :-1]) and tokens.shape == (4, 128)


def launched_by_torchrun(monkeypatch, rank, processes):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    for name, value in zip(names, (rank, processes, rank, "run"), strict=True):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(
    "left", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}]
)
def test_what_a_launcher_left_behind_is_one_line_and_never_a_wait(left, monkeypatch, refused):
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    assert "torchrun did not start this: unset RANK WORLD_SIZE LOCAL_RANK" in refused(parse)


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (ImportError("No module named 'x'"), "step: error: No module named 'x': ./run_all.sh --setup ", 1),
        (
            PermissionError(13, "Permission denied", "a.txt"),
            "step: error: [Errno 13] Permission denied: 'a.txt'",
            1,
        ),
        (KeyboardInterrupt(), "step: interrupted", 130),
        (SystemExit("step: error: no such file"), "step: error: no such file", 1),
    ],
)
def test_what_ends_a_command_is_one_line_and_its_exit_code(error, said, code, monkeypatch, capsys):
    monkeypatch.setattr("os._exit", sys.exit)

    def main():
        raise error

    with pytest.raises(SystemExit) as ended:
        run_command(main, "step")
    err = capsys.readouterr().err
    assert ended.value.code == code and err.startswith(said) and err.count("\n") == 1


def test_of_several_processes_each_has_its_share_of_the_batch(monkeypatch):
    launched_by_torchrun(monkeypatch, 1, 4)
    args = parse("--n-layer", 1, "--seq-len", 32, "--batch-size", 2)
    assert args.parallel == "ddp" and args.workload().gpus == 4 and args.workload().batch_size == 2
    starts = data.draw_starts(args.text, 15, 8, 32, args.seed)
    expected = data.stage_batches(args.text, starts[:, 2:4], 32, args.device)
    assert all(
        torch.equal(a, b)
        for pair in zip(args.batches(), expected, strict=True)
        for a, b in zip(*pair, strict=True)
    )


def test_auto_takes_what_fits_a_gpu(monkeypatch):
    resolve, device = options.resolve_preset, torch.device("cuda", 0)
    for gib, expected in (
        (83, ("gpt3-6.7b-slice", 8)),
        (82.9, ("gpt2", 32)),
        (66, ("gpt2", 32)),
        (65.9, ("gpt2", 16)),
        (34, ("gpt2", 16)),
        (33.9, ("gpt2", 8)),
        (18, ("gpt2", 8)),
        (17.9, ("gpt2", 4)),
        (10, ("gpt2", 4)),
        (9.9, ("gpt2", 2)),
        (6, ("gpt2", 2)),
        (5.9, ("gpt2", 1)),
    ):
        monkeypatch.setattr(hardware, "free_memory_bytes", lambda _, gib=gib: int(gib * 2**30))
        assert resolve("auto", device) == expected and resolve("gpt2", device) == ("gpt2", 32), gib


def test_a_record_is_written_whole_or_not_at_all_and_never_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "record.json").symlink_to(tmp_path / "mine")
    write_json(tmp_path / "record.json", {})
    assert (tmp_path / "mine").read_text() == "mine" and (tmp_path / "record.json").read_text() == "{}\n"
    with pytest.raises(FileNotFoundError):
        write_json(tmp_path / "absent" / "record.json", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "record.json"]


def test_fp8_is_skipped_where_a_size_does_not_fit(monkeypatch):
    monkeypatch.setattr(hardware, "compute_capability", lambda _: (9, 0))
    args = parse("--n-layer", 1, "--seq-len", 32, "--batch-size", 2)
    args.require_fp8()
    args.config = replace(args.config, vocab_size=50257)
    with pytest.raises(Skip, match="--vocab-size divisible by 16, not 50257"):
        args.require_fp8()
    monkeypatch.setattr(hardware, "compute_capability", lambda _: (8, 0))
    with pytest.raises(Skip, match="Ada, Hopper or newer"):
        args.require_fp8()


def test_steps_by_default_take_a_fixed_amount_of_work_between_two_bounds():
    gpu, shapes = torch.device("cuda", 0), {name: config for name, (config, _) in PRESETS.items()}
    work = {
        name: flops.flops_per_step(shapes[name], size)
        for name, size in (("gpt3-6.7b-slice", 8), ("tiny", 2), ("gpt2", 32))
    }
    assert options.default_steps(work["gpt3-6.7b-slice"], gpu) == 8
    assert options.default_steps(work["tiny"], gpu) == options.default_steps(0, gpu) == 30
    assert options.default_steps(work["gpt2"] // 2, gpu) == int(4e14 / work["gpt2"]) == 15
    assert options.default_steps(work["gpt2"], torch.device("cpu")) == 14


@pytest.mark.parametrize(
    ("device", "shares", "cold", "gib"),
    [("cpu", 1, False, 20), ("cpu", 1, True, 16), ("cuda", 1, False, 16), ("cuda", 4, False, 4)],
)
def test_a_model_must_fit_the_free_memory(device, shares, cold, gib, monkeypatch):
    monkeypatch.setattr(flops, "parameters", lambda config: 2**30)
    monkeypatch.setattr(hardware, "shares_memory", lambda _: False)
    asked = PRESETS["tiny"][0], torch.device(device), shares, cold
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _: gib * 2**30)
    options.check_memory(*asked)
    monkeypatch.setattr(hardware, "free_memory_bytes", lambda _: gib * 2**30 - 1)
    with pytest.raises(ValueError, match=f"needs {gib} GiB in training"):
        options.check_memory(*asked)


@pytest.mark.parametrize(("how", "shares"), [("ddp", 1), ("fsdp", 4)])
def test_only_fsdp_shares_the_memory_of_a_model(how, shares, monkeypatch):
    launched_by_torchrun(monkeypatch, 1, 4)
    checked = []
    monkeypatch.setattr(options, "check_memory", lambda *asked: checked.append(asked[2:]))
    parse("--parallel", how, "--n-layer", 1, "--seq-len", 32)
    assert checked == [(shares, False)]


def test_a_gpu_is_described(monkeypatch):
    properties = SimpleNamespace(uuid="GPU-1", total_memory=80 * 2**30)
    answers = {"get_device_name": "H", "get_device_capability": (9, 0), "get_device_properties": properties}
    answers |= {"clock_rate": 1500, "power_draw": 700_000, "mem_get_info": (5, 80)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    gpu = torch.device("cuda", 0)
    found = hardware.describe(gpu)
    assert (found.device, found.device_type, found.gpu_memory_bytes) == ("H", "cuda", 80 * 2**30)
    assert found.compute_capability == (9, 0) and re.fullmatch("[0-9a-f]{8}", found.gpu_uuid)
    assert hardware.clock_and_power(gpu) == (1500.0, 700.0) and hardware.free_memory_bytes(gpu) == 5
    assert hardware.has_bf16_matrix_instructions(gpu) and set(found.versions) >= {"python", "torch", "cudnn"}
    monkeypatch.setattr(hardware, "ROOT", Path("/proc"))
    here = hardware.describe(torch.device("cpu"))
    assert here.commit is None, "no checkout"
    assert here.gpu_uuid is None and "transformers" in here.versions and here.cpu_threads >= 1


def test_what_a_user_is_told_before_the_first_row(monkeypatch):
    few = conftest.arguments(STEPS[0])
    assert [line[:4] for line in hardware.about(few.device)] == ["CPU:"]
    long = conftest.arguments(STEPS[0], config=PRESETS["gpt2"][0], batch_size=32)
    assert 0 < facts.least_step_s(few, edge=64) < 1 < facts.least_step_s(long)
    needed = [facts.needed_bytes(args) for args in (few, conftest.arguments(STEPS[0], processes=2))]
    assert needed[1][f"{STEPS[0]}.py"] == 2 * needed[0][f"{STEPS[0]}.py"]
    assert needed[0][f"{STEPS[2]}.py"] < needed[0][f"{STEPS[1]}.py"], "it keeps no scores"


@pytest.mark.parametrize("name, batch_size", [("gpt2", 32), ("gpt3-6.7b-slice", 8)])
def test_the_needed_memory_is_not_less_than_what_was_recorded_and_at_most_half_more(name, batch_size):
    rows = json.loads((ROOT / "docs" / "results" / "h200" / name / "results.json").read_text())["rows"]
    recorded = {row["step"]: row["peak_bytes"] for row in rows}
    for step, by_hand in ((STEPS[0], True), (STEPS[2], False)):
        assert 1 <= facts.peak_bytes(PRESETS[name][0], batch_size, by_hand) / recorded[step] <= 1.5


@pytest.mark.parametrize("name", hardware.VARIABLES)
def test_a_variable_that_changes_what_runs_is_told_at_the_first_line(name, monkeypatch):
    harmless, effect = hardware.VARIABLES[name]
    for value, lines in ((harmless, 0), ("", 0), ("1" if harmless == "0" else "0", 1)):
        monkeypatch.setenv(name, value)
        told = hardware.about(torch.device("cpu"))[
            : -1 if len(hardware.about(torch.device("cpu"))) > 1 else 0
        ]
        assert told == [f"{name}={value}: {effect}"] * lines and len(hardware.set_variables()) == lines


@pytest.mark.slow
def test_a_long_training_step_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(facts, "LONG_S", 0.0)
    answer = tmp_path / "facts.json"
    words = ["--device", "cpu", "--n-layer", "1", "--seq-len", "32", "--output", str(answer)]
    monkeypatch.setattr(sys, "argv", ["facts", *words])
    facts.main()
    said = json.loads(answer.read_text())["messages"][-1]
    assert "takes at least 0.0 minutes here" in said and "--step-timeout" in said


def test_a_command_to_repeat_names_no_folder_of_this_machine():
    words = ["--data=/home/me/book.txt", "--data", "/home/me/book.txt", "--output=/tmp/x", "--lr=1e-3"]
    command = portable_command("python 2_sdpa.py", words)
    assert command == "python 2_sdpa.py --data=book.txt --data book.txt --lr=1e-3"
