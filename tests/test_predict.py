"""Roofs and predictions: products add up, a made machine gives the times that its rates imply, damage is one
line."""

import contextlib
import json
import sys

import pytest
import runs as runs_by_hand
import torch
from conftest import ROOT, arguments, run_python

from common import flops
from common.model import PRESETS, GPTConfig
from common.record import Environment, ProductRate, Roofs, write_json
from ladder import roofs as bare
from predict import __main__ as predict
from predict import errors, roofs
from predict.machine import COPY, Machine
from report.derive import derive
from report.load import load


def roofs_with(flops_per_s=1e12, bytes_per_s=1e11, launch_s=0.0, steady=1.0):
    """Roofs of a machine with one rate for all products and kernels that move bytes at one speed."""
    grid = [(m, n, k) for m in roofs.GRID["cuda"] for n in roofs.GRID["cuda"] for k in roofs.GRID["cuda"]]
    products = [ProductRate(p, m, n, k, 0, flops_per_s) for p in ("fp32", "bf16", "fp8") for m, n, k in grid]
    for product in products:
        if product.m == product.n == product.k == 8192:
            product.flops_per_s = steady * flops_per_s
    kernels = [(COPY, n, 8 * n / bytes_per_s) for n in (2**10, 2**26)]
    attention = [
        (T, D, flops_per_s * 64 / max(D, 128) * max(2, T / 512))
        for T in (256, 1024, 16384)
        for D in (64, 128)
    ]
    hopper = Environment("GPU", "cuda", compute_capability=(9, 0))
    return Roofs(bytes_per_s, products, kernels, attention, launch_s, environment=hopper)


def test_a_machine_of_one_rate_gives_the_flops_over_it_and_the_bytes_over_its_speed():
    shape = PRESETS["gpt2"][0]
    predicted = predict.predict("3_compile", shape, 8, roofs_with())
    attention = 6 * shape.n_layer * shape.seq_len * shape.n_embd * 8 * shape.seq_len
    products = flops.flops_per_step(shape, 8) - attention
    assert (predicted.products_ms, predicted.attention_ms) == pytest.approx((products / 1e9, attention / 1e9))
    assert predicted.host_ms == 0 and predicted.ms == predicted.busy_ms


# By step: ms of products, of fused attention, of other kernels and of the host, and bytes of memory, at 1
# TFLOP/s, 0.1 TB/s and 0.1 ms a launch. They were checked when `recorded_roofs_predict_the_recorded_steps`
# held, and change only where somebody counts kernels again.
COUNTED = {
    "0_baseline": (41.8759, 0.0, 11.6213, 22.8, 184151040),
    "1_cublas": (41.8759, 0.0, 10.6901, 31.6, 151645184),
    "2_sdpa": (32.2123, 4.8318, 5.2165, 25.0, 119663616),
    "3_compile": (32.2123, 4.8318, 3.2537, 19.5, 98692096),
    "4_transformer_engine": (32.2123, 4.8318, 3.5253, 25.4, 96594944),
}


@pytest.mark.parametrize("step", COUNTED)
def test_kernels_and_bytes_of_a_step_are_those_that_were_counted(step):
    shape = GPTConfig(n_layer=3, n_head=2, n_embd=256, seq_len=512, vocab_size=1024)
    predicted = predict.predict(step, shape, 4, roofs_with(1e12, 1e11, launch_s=1e-4), capture=False)
    times = (predicted.products_ms, predicted.attention_ms, predicted.others_ms, predicted.host_ms)
    assert (*times, predict.peak_bytes(step, shape, 4)) == pytest.approx(COUNTED[step], rel=1e-4)


def test_between_the_sizes_of_the_grid_a_product_is_linear_in_each():
    machine = Machine(roofs_with(1e12))
    flops_s = 2 * 1000 * 3000 * 700 / 1e12
    assert machine.product_s("bf16", 1000, 3000, 700) == pytest.approx(flops_s)
    assert machine.product_s("bf16", 16384, 8192, 8192) == pytest.approx(2 * 16384 * 8192**2 / 1e12)
    assert machine.product_s("bf16", 32, 128, 128) == pytest.approx(2 * 64 * 128**2 / 1e12), (
        "half of the least"
    )


def test_a_head_dimension_between_those_of_kernels_takes_as_long_as_the_next_one():
    machine = Machine(roofs_with(1e12))
    assert machine.attention_s(1024, 96, 4) == machine.attention_s(1024, 128, 4)
    with pytest.raises(ValueError, match="a head of 256 channels is not predicted"):
        machine.attention_s(1024, 256, 4)


def test_a_prediction_says_whether_a_step_fits_the_gpu():
    args = arguments("2_sdpa", config=PRESETS["gpt2"][0], batch_size=32)
    predictions, _ = predict.predict_all(args, roofs_with(1e12))
    peak = predict.peak_bytes("2_sdpa", args.config, 32)
    fits = {row["step"]: row["fits"] for row in predict.table(predictions, args, int(peak / 0.97) + 2**20)}
    assert (fits["1_cublas"], fits["2_sdpa"], fits["3_compile"]) == ("no", "yes", "yes")
    rows = predict.table(predictions, args, None)
    assert (
        "GiB" not in rows[0]
        and rows[1]["x above"] == f"{predictions['0_baseline'].ms / predictions['1_cublas'].ms:.2f}"
    )


def test_what_a_card_allows_is_products_attention_and_every_tensor_once():
    shape = GPTConfig(n_layer=3, n_head=2, n_embd=256, seq_len=512, vocab_size=1024)
    args, products = arguments("0_baseline", config=shape, batch_size=4), []
    for precision, rate in (("bf16", 1e12), ("fp8", 2e12)):
        products += [
            ProductRate(precision, *mnk, count, rate)
            for mnk, count in flops.matrix_products(shape, 2048).items()
        ]
    measured = Roofs(1e11, products)
    bare.add_limits(measured, args)
    tokens, C = 4 * 512, 256
    moved = 3 * 16 * tokens * C + 4 * tokens * 1024 + 28 * flops.parameters(shape)
    attention = flops.attention_flops(3 * 4 * 2, 512, 128)
    others_s = attention / 1e12 + moved / 1e11
    products_s = (flops.flops_per_step(shape, 4) - attention) / 1e12
    expected = {"bf16": 1e3 * (products_s + others_s), "fp8": 1e3 * (products_s / 2 + others_s)}
    assert measured.allows_ms == pytest.approx(expected, rel=1e-6)
    measured.products, measured.allows_ms = products[:3], {}
    bare.add_limits(measured, args)
    assert measured.allows_ms.keys() == {"bf16"}, "FP8 was not measured"
    measured.copy_bytes_per_s, measured.allows_ms = None, {}
    bare.add_limits(measured, args)
    assert measured.allows_ms == {}


def test_the_power_limit_slows_attention_as_it_slows_products():
    shape = PRESETS["gpt3-6.7b-slice"][0]
    cold, hot = (
        predict.predict("4_transformer_engine", shape, 8, roofs_with(steady=rate)) for rate in (1.0, 0.7)
    )
    slowdown = hot.products_ms / cold.products_ms
    assert slowdown > 1.2 and hot.attention_ms / cold.attention_ms == pytest.approx(slowdown)
    assert hot.others_ms == cold.others_ms


def test_products_of_one_shape_are_added():
    square = GPTConfig(n_layer=1, n_head=2, n_embd=128, seq_len=64, vocab_size=256)
    assert [*roofs.batched_products(square, 1).values()] == [6], "T is D"
    assert sum(roofs.batched_products(PRESETS["gpt2"][0], 1).values()) == 6


def test_the_host_bounds_a_launched_step_and_power_a_large_product():
    shape = PRESETS["gpt2"][0]
    predicted, slower = (
        predict.predict("2_sdpa", shape, 1, roofs_with(1e18, 1e18, launch_s=s)) for s in (1e-5, 3e-5)
    )
    assert predicted.ms == predicted.host_ms == pytest.approx(853e-5 * 1e3) and slower.ms == pytest.approx(
        3 * predicted.ms
    )
    cold, hot = (
        predict.predict("3_compile", shape, 8, roofs_with(1e12, 1e16, steady=rate)) for rate in (1.0, 0.5)
    )
    assert hot.products_ms > 1.4 * cold.products_ms and cold.host_ms == 0
    assert predict.predict(
        "3_compile", shape, 1, roofs_with(launch_s=1e-5), capture=False
    ).host_ms == pytest.approx(6.45)


def test_roofs_that_lack_a_part_predict_no_step_that_needs_it():
    short = roofs_with()
    short.products = [p for p in short.products if p.precision == "bf16"]
    with pytest.raises(ValueError, match="FP32 products"):
        predict.predict("0_baseline", PRESETS["gpt2"][0], 8, short)


def test_the_roofs_of_this_machine_predict_its_steps(monkeypatch, tmp_path):
    for module, name, few in (
        (roofs, "GRID", (16, 64)),
        (roofs, "SIZES", (2**9,)),
        (bare, "COPY_BYTES", 2**22),
        (bare, "SQUARE", 64),
    ):
        monkeypatch.setitem(getattr(module, name), "cpu", few)
    monkeypatch.setattr(roofs, "LENGTHS", (64,))
    for module in (roofs, bare):
        monkeypatch.setattr(module, "steady_seconds", lambda work, *_: (work(), 2**-10)[1])
    monkeypatch.setattr(bare, "mean_seconds", lambda work, n, device: 2**-11)
    measured = roofs.measure(args := arguments("0_baseline"))
    for rate in measured.products:
        work = 2 * rate.m * rate.n * rate.k
        assert rate.burst_flops_per_s == 2**11 * work and rate.flops_per_s in (None, 2**10 * work)
    sizes = {(rate.m, rate.n, rate.k) for rate in measured.products if rate.precision == "fp32"}
    assert sizes >= {*roofs.batched_products(args.config, args.batch_size), (16, 64, 16)}
    assert (
        measured.rate("fp32", burst=True)
        >= measured.rate("fp32")
        == pytest.approx(2**10 * 6 * 32768 * 64 / 27)
    )
    assert "fp8 not" in "".join(measured.notes) and (measured.copy_bytes_per_s, measured.attention[0][2]) == (
        2**33,
        3 * 2**27,
    )
    assert 2**9 in {size for _, size, _ in measured.kernels}, "of no tensor"
    write_json(tmp_path / "roofs.json", measured)
    read, _ = predict.read_roofs(str(tmp_path / "roofs.json"))
    for step in ("0_baseline", "2_sdpa"):
        assert 0 < predict.predict(step, args.config, args.batch_size, read).ms < 1e4


def test_roofs_are_printed(capsys):
    bare.tell(Roofs(1e12, [ProductRate("fp32", 10, 10, 10, 1, 3e12, 2e12)], notes=["odd"]))
    said = "FP32 2 TFLOP/s back to back, 3 in bursts\ncopy 1,000 GB/s\nodd\n"
    assert capsys.readouterr().out == said


@pytest.mark.slow
def test_the_command_answers_for_a_card_that_is_not_here_and_refuses_damage_in_one_line(
    tmp_path, monkeypatch, capsys, refused
):
    def answer(*words):
        monkeypatch.setattr(sys, "argv", ["predict", *map(str, words), "--device", "cpu"])
        predict.main()
        return capsys.readouterr().out

    write_json(tmp_path / "card.json", roofs_with())
    card = ("--machine", tmp_path / "card.json", "--preset", "gpt2")
    ran = run_python("-m", "predict", *card, "--device", "cpu")
    assert ran.returncode == 0 and "4_transformer_engine" in ran.stdout, ran.stderr
    said = answer("--machine", "h200", "--preset", "gpt3-xl")
    assert float(said.splitlines()[3].split()[2]) > 2, "it need not fit this machine"
    said = answer("--machine", "h200", "--vocab-size", "50257")
    assert "4_transformer_engine is not predicted: FP8 needs" in said and "3_compile  " in said
    nowhere = json.dumps(json.loads((tmp_path / "card.json").read_text()) | {"environment": None})
    for damage in ("[]", "{", '{"products": 1}', '{"products": [{}]}', nowhere):
        (tmp_path / "card.json").write_text(damage)
        assert "holds no roofs that can be read" in refused(answer, *card)


@pytest.mark.parametrize("place", ["h200/gpt3-6.7b-slice", "h200/gpt2"])
def test_recorded_roofs_predict_the_recorded_steps(place):
    run = load(ROOT / "docs" / "results" / place)
    shape = GPTConfig(**{name: getattr(run.workload, name) for name in GPTConfig.__dataclass_fields__})
    roofs, _ = predict.read_roofs("h200")
    predicted = [predict.predict(row.step, shape, run.workload.batch_size, roofs).ms for row in run.rows]
    assert predicted == pytest.approx([line.ms for line in derive(run).steps], rel=0.12)
    cells = errors.error_cells([run], roofs, [run])
    assert cells["predicted times"] == "5" and cells["largest error of the nearest shape's gains"] == "0 %"
    assert [step.measured for step in errors.predicted_steps(run, roofs)] == [
        row.ms for row in derive(run).steps
    ]


def test_the_nearest_shape_differs_by_the_least_factors():
    runs = [run_of(channels, tokens) for channels, tokens in ((768, 8192), (768, 32768), (4096, 8192))]
    assert errors.nearest(run_of(1024, 16384).workload, runs) is runs[0], "the first of two that are as near"
    assert errors.nearest(run_of(2048, 8192).workload, runs) is runs[2]


def run_of(n_embd, tokens):
    return runs_by_hand.run(work=runs_by_hand.workload(n_embd=n_embd, tokens_per_step=tokens))


@pytest.mark.parametrize("place", ["gpt3-6.7b-slice", "gpt3-xl", "wide-8192"])
def test_the_estimate_of_memory_is_near_what_was_recorded(place):
    run = load(ROOT / "docs" / "results" / "h200" / place)
    shape = GPTConfig(**{name: getattr(run.workload, name) for name in GPTConfig.__dataclass_fields__})
    predicted = [predict.peak_bytes(row.step, shape, run.workload.batch_size) for row in run.rows]
    assert predicted == pytest.approx([row.peak_bytes for row in run.rows], rel=0.07)


def test_sizes_that_slow_a_product_down_are_named():
    assert predict.unaligned(GPTConfig(1, 1, 770, 1023, 50257), 1) == [
        "channels 770",
        "tokens 1023",
        "vocabulary 50257",
    ]
    assert predict.unaligned(GPTConfig(1, 1, 768, 1023, 50304), 8) == []


def test_the_host_s_launches_are_timed_in_the_median_of_tiny_steps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.profiler, "profile", lambda activities: contextlib.nullcontext())
    monkeypatch.setattr(roofs.profile, "launches_of", lambda profiler, on_gpu: ["kernel"] * 1000)
    seconds = roofs.launch_seconds(torch.device("cpu"))
    assert 1e-7 < seconds < 1e-3
    monkeypatch.setattr(roofs.profile, "launches_of", lambda profiler, on_gpu: [])
    with pytest.raises(RuntimeError, match="shows no kernels"):
        roofs.launch_seconds(torch.device("cpu"))
