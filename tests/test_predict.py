"""Predictions: how far they lie from what is recorded, what they are made of, and what they refuse."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from statistics import median

import pytest
import runs
import torch
from conftest import ROOT

from common import passes
from common.record import CATEGORIES, AttentionRate, PassTime
from ladder import counts, predict
from report import predictions
from report.load import MERGED, read_run
from report.records import SLICE
from report.sweep import SWEEP, read_cells

H200 = ROOT / "docs" / "results" / "h200"


@pytest.fixture
def roofs():
    return predict.read_roofs(H200 / SLICE / MERGED)


def errors(machine):
    found = []
    for name, rows in predict.predict_records(machine).items():
        for row in read_run(machine / name / MERGED).steps:
            if row.step in rows and row.timing.median_ms:
                found.append(abs(rows[row.step].ms / row.timing.median_ms - 1))
    return found


def test_recorded_steps_lie_within_what_is_asked_of_predictions():
    """On a GPU. What is asked of no prediction, on a CPU, is no larger than when it was last looked at."""
    found = errors(H200)
    assert len(found) == 29 and median(found) < 0.10 and max(found) < 0.25
    assert max(errors(ROOT / "docs" / "results" / "epyc-2-cores")) < 0.42


def test_cells_of_the_sweep_lie_within_what_is_asked():
    off = [abs(cell.predicted_ms / cell.median_ms - 1) for cell in read_cells(H200 / SWEEP)]
    assert len(off) == 100 and median(off) < 0.10 and max(off) < 0.25


def test_the_recorded_predictions_are_those_that_would_be_made_now():
    for machine in (H200, ROOT / "docs" / "results" / "epyc-2-cores"):
        written = json.loads((machine / "predictions.json").read_text())
        now = {run: [one.ms for one in rows.values()] for run, rows in predict.predict_records(machine).items()}
        assert written.keys() == now.keys()
        for run, rows in written.items():
            assert [one["ms"] for one in rows] == pytest.approx(now[run])


def test_a_step_that_is_slower_than_foreseen_is_named_and_none_without_pairs():
    assert predictions.directions([]) == []
    (said,) = predictions.directions([("2_c at 64 channels", 1.2, 1.5), ("3_d at 64 channels", 1.05, 0.8)])
    assert said.endswith(
        "before: 1, of which 1 were predicted so; slower: 1, of which 0 were. "
        "Wrong for 3_d at 64 channels (predicted 1.05 times faster, measured 0.80)."
    )
    assert "wrong" not in predictions.directions([("a", 2.0, 1.5)])[0]


def test_predictions_of_nothing_that_ran_are_no_section(tmp_path):
    (tmp_path / "predictions.json").write_text('{"tiny": []}')
    assert predictions.section(tmp_path, [(tmp_path / "tiny", runs.run(runs.step("0_baseline")))]) == []


def test_counts_name_tensors_categories_and_kernels_that_exist():
    kernels = {passes.TE_NORM, *(name for name, _ in passes.kernels(2**12, torch.device("cpu")))}
    tensors = counts.sizes(runs.WORKLOAD)
    assert counts.IN_A_BLOCK.keys() == counts.ONCE_A_STEP.keys() == {step[0] for step in predict.STEPS}
    for one in (one for table in (counts.IN_A_BLOCK, counts.ONCE_A_STEP) for group in table.values() for one in group):
        assert one.tensor in tensors and one.category in CATEGORIES and one.kernel in kernels | {None}, one


def test_an_optimizer_moves_the_bytes_that_its_formula_names():
    assert sum(one.bytes * one.kernels for one in counts.FOREACH_ADAMW) == 80
    assert sum(one.bytes * one.kernels for one in counts.FUSED_ADAMW) == 28


def test_what_is_measured_of_a_kernel_replaces_the_copy_of_its_bytes(roofs):
    one = counts.Pass("stream", 6, 1, counts.COPIES, "to fp32", "a cast")
    roofs.passes = [timed for timed in roofs.passes if timed.kernel != "to fp32"]
    copied = predict.pass_seconds(roofs, one, 2**28, 1024)
    assert copied == pytest.approx(6 * 2**28 / roofs.copy_bytes_per_s, rel=0.03)
    roofs.passes += [PassTime("to fp32", 2**20, 1e-5), PassTime("to fp32", 2**22, 5e-5)]
    times = [predict.pass_seconds(roofs, one, numbers, 1024) for numbers in (1, 2**20, 2**21, 2**22, 2**23)]
    assert times == pytest.approx([1e-5, 1e-5, 1e-5 + 4e-5 / 3, 5e-5, 1e-4])


def test_of_a_kernel_that_was_measured_at_some_widths_the_nearest_counts(roofs):
    one = counts.Pass("stream", 9, 1, counts.POINTWISE, passes.TE_NORM, "a norm")
    roofs.passes = [timed for timed in roofs.passes if not timed.kernel.startswith(passes.TE_NORM)]
    copied = predict.pass_seconds(roofs, one, 2**20, 320)
    roofs.passes += [PassTime(f"{passes.TE_NORM}, {width}", 2**20, seconds) for width, seconds in ((256, 2), (1024, 1))]
    assert [predict.pass_seconds(roofs, one, 2**20, width) for width in (64, 320, 768, 8192)] == [2, 2, 1, 1]
    assert copied < 1e-3, "a copy's, before it was measured"


def test_attention_takes_at_least_what_a_few_heads_take(roofs):
    shape = replace(runs.WORKLOAD, n_layer=1, n_head=4, n_embd=256, batch_size=1, seq_len=4096, vocab_size=512)
    many = predict._fused_seconds(shape, roofs)
    roofs.passes += [
        PassTime(f"{passes.FEW}, {dim}", 4 * T * dim, s * dim) for dim in (64, 128) for T, s in ((1024, 1), (4096, 5))
    ]
    assert predict._fused_seconds(shape, roofs) == pytest.approx(5 * 64)
    assert predict._fused_seconds(replace(shape, batch_size=2), roofs) == pytest.approx(5 * 64), "as long as 4 heads"
    assert 1 < predict._fused_seconds(replace(shape, seq_len=2048), roofs) / 64 < 5
    assert predict._fused_seconds(replace(shape, batch_size=2**40), roofs) == pytest.approx(many * 2**40)


def test_attention_takes_the_nearest_head_dimension_and_a_slow_host_bounds_what_it_launches(roofs):
    shape = read_run(H200 / "gpt2" / MERGED).workload
    before = predict.predict(shape, roofs)
    slow = [AttentionRate(rate.seq_len, 64, rate.flops_per_s / 1000) for rate in roofs.attention if rate.head_dim == 64]
    roofs.attention = slow + [rate for rate in roofs.attention if rate.head_dim != 64]
    roofs.launch_s = 1.0
    after = predict.predict(shape, roofs)
    assert after["3_compile"].category_ms["attention"] > 500 * before["3_compile"].category_ms["attention"]
    assert after["1_cublas"].ms == pytest.approx(1e3 * after["1_cublas"].launches)
    assert after["0_baseline"].ms == pytest.approx(1e3 * after["0_baseline"].launches), "as in mixed precision"
    roofs.passes.append(PassTime(passes.LAUNCH_FP32, 1, 2.0))
    fp32 = predict.predict(shape, roofs)
    assert fp32["0_baseline"].ms == 2 * after["0_baseline"].ms and fp32["1_cublas"].ms == after["1_cublas"].ms
    assert after["3_compile"].host_ms == 0


def test_a_denser_step_runs_its_products_slower_and_never_slower_than_back_to_back(roofs):
    product = [(1, 1.0, roofs.square.ceilings["bf16"])]
    alone, beside = (predict._slowed(product, rest_s, "bf16", roofs) for rest_s in (0.0, 9.0))
    lost = roofs.ceilings["bf16"] / roofs.bf16_flops_per_s
    assert 1 < beside < 1.03 < alone <= lost


def test_what_cannot_be_predicted_is_refused_in_one_line(roofs, tmp_path):
    for change in ({"accumulate": 2}, {"gpus": 2}, {"checkpoint": True}):
        with pytest.raises(ValueError, match="only one process"):
            predict.predict(replace(runs.WORKLOAD, **change), roofs)
    with pytest.raises(ValueError, match=r"python -m common\.roofs"):
        predict.predict(runs.WORKLOAD, replace(roofs, grid=[]))
    with pytest.raises(ValueError, match="lack products, passes or attention"):
        predict.predict(
            runs.WORKLOAD, replace(roofs, passes=[one for one in roofs.passes if one.kernel != predict.COPY])
        )
    with pytest.raises(ValueError, match="these roofs are damaged"):
        predict.predict(runs.WORKLOAD, replace(roofs, square=None, ceilings={"fp32": 0.0}))
    absent = ("--roofs", str(tmp_path / "absent.json")), "absent.json"
    records = [(("--records", "x", "--y"), "--y"), (("--records", "x", "--json", "y"), "no other argument")]
    for words, said in absent, *records, (("--output", "x"), "--json FILE"):
        ran = subprocess.run([sys.executable, "-m", "ladder.predict", *words], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and said in ran.stderr


def test_a_machine_without_fp8_has_no_step_4(roofs):
    for shape in (roofs, *roofs.shapes, roofs.square, *roofs.grid):
        shape.ceilings = {"fp32": 1e12}
    roofs.fp32_flops_per_s, roofs.launch_s = 1e12, None
    predicted = predict.predict(runs.WORKLOAD, roofs)
    assert list(predicted) == list(predict.STEPS[:4]) and all(one.ms > 0 for one in predicted.values())


def test_roofs_that_were_asked_for_are_taken_before_those_of_a_run(monkeypatch, tmp_path):
    monkeypatch.setattr(predict.arguments, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="no roofs below results/"):
        predict.measured_roofs()
    old, new, asked = (tmp_path / "results" / name for name in ("1/roofs.json", "2/roofs.json", "roofs.json"))
    for k, path in enumerate((old, new)):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (k, k))
    assert predict.measured_roofs() == new
    asked.touch()
    os.utime(asked, (0, 0))
    assert predict.measured_roofs() == asked


def test_a_recorded_run_without_predictions_gets_those_that_were_made_later():
    folder = ROOT / "docs" / "results" / "h200"
    plain, again = (read_run(folder / "gpt2" / MERGED) for _ in range(2))
    filled = predictions.add_later(again, folder / "gpt2")
    assert not any(row.predicted_ms for row in plain.steps) and all(row.predicted_ms for row in filled.steps)
    assert predictions.OTHER_ROOFS in filled.problems and predictions.off(plain) == ""
    own = predictions.add_later(read_run(folder / SLICE / MERGED), folder / SLICE)
    assert predictions.OTHER_ROOFS not in own.problems and predictions.off(own).startswith("off by ")
