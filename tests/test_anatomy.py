"""Experiments of anatomy/: what holds by arithmetic or semantics, on a CPU; and what `python -m anatomy` promises."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch
from conftest import FAST, ROOT, quick

from anatomy import attention_forms, experiment, host_cost, learning, memory_hierarchy, precision, traffic
from anatomy.experiment import Check, Seconds, with_quartiles
from common import benchmark

cli = importlib.import_module("anatomy.__main__")


def test_fusion_counts_bytes_and_launches():
    N = 2**16
    result = quick("fusion", "--numbers", str(N), "--edge", "64")
    cases = result.figures["cases"]
    eager, compiled = (cases["sigmoid(relu(x*w+b))"][variant] for variant in ("eager", "compiled"))
    assert (eager["bytes"], eager["launches"]) == (40 * N, 4) and (compiled["bytes"], compiled["launches"]) == (
        16 * N,
        1,
    )
    assert cases["relu(x)"]["eager"]["bytes"] == cases["relu(x)"]["compiled"]["bytes"], "nothing to save"
    loop, together = (cases["64 small x*2"][variant] for variant in ("eager", "_foreach_mul"))
    assert loop["launches"] == 64 and together["launches"] == 1 and loop["bytes"] == together["bytes"]
    assert 'extern "C"' in "".join(result.listings.values())


def test_attention_by_hand_moves_the_scores():
    results = quick("attention", "--lengths", "256", "--nhead", "2", "--head-dim", "16").figures["attention"]
    by_hand, flash = results["by hand"][256], results["SDPA flash"][256]
    tensor, scores = 4 * 2 * 256 * 16, 4 * 2 * 256 * 256
    assert flash["bytes"] == 12 * tensor and by_hand["bytes"] == 12 * tensor + 23 * scores
    assert by_hand["peak_bytes"] > scores > flash["peak_bytes"]


def test_precision_orders_the_errors_and_knows_the_ranges():
    figures = quick("precision", "--size", "128").figures
    products, ranges = figures["products"], figures["ranges"]
    error = {name: row["error"] for name, row in products.items()}
    assert error["FP64"] == 0 < error["FP32"] < error["FP16"] < error["BF16"] < error["FP8"]
    assert error["TF32"] is None and "Ampere" in products["TF32"]["reason"] and products["FP8"]["seconds"] is None
    assert [row["bytes"] / 128**2 for row in products.values()] == [24, 12, 12, 6, 6, 4]
    for name in ("BF16", "FP16", "FP8"):
        assert 0.5 < error[name] / products[name]["predicted_error"] < 2, name
    assert ranges["1e5"]["lost"][0] == "FP16" and all(row["lost"] == row["predicted_lost"] for row in ranges.values())
    delayed, current, blocks = figures["quantization"]["recipes"].values()
    assert current["elsewhere"] > 2 * blocks["elsewhere"] and delayed["outlier"] > 0.9 > current["outlier"]
    chosen = argparse.Namespace(dtype=torch.bfloat16, device=torch.device("cpu"), iters=1)
    assert list(precision.matrix_products(128, chosen)) == ["FP32", "BF16"]


def test_contiguity_and_sync_points_say_what_holds_and_what_needs_a_gpu():
    figures = quick("contiguity", "--m", "64", "--n", "48", "--k", "32").figures
    assert figures["view_shares_memory"] and figures["copy_bytes"] == 2 * 64 * 32 * 4
    result = quick("sync_points", "--work", "64", "--numbers", "1024", "--loop", "20")
    needs_gpu = [row[0] for row in result.tables[0].rows if "needs a GPU" in row]
    assert needs_gpu == [".to(), blocking", ".to(), pinned and non-blocking"]
    assert not any(row["waits"] for row in result.figures["operations"].values()), "a CPU has no queue"


def test_roofline_is_arithmetic_where_it_can_be_and_memory_hierarchy_ends_with_the_largest_set():
    result = quick("roofline", "--numbers", "65536", "--edges", "16", "256", "--length", "64")
    results, ridge = result.figures["operations"], result.figures["ridge"]
    assert results["product n 256"]["intensity"] == pytest.approx(2 * 256 / 12)
    assert results["attention T 64"]["intensity"] == pytest.approx(64 / 8)
    assert results["ReLU"]["intensity"] == 1 / 8 and results["LayerNorm"]["flops"] == 8 * 65536
    for row in results.values():
        roof = "memory" if row["intensity"] < ridge else "compute"
        assert row["bound"] == ("launch" if row["launch_s"] > row["roof_s"] else roof)
        assert row["predicted_s"] == pytest.approx(row["launch_s"] + row["roof_s"]), "a CPU launches, then works"
    assert result.figures["ceilings"]["fp8"] is None
    assert memory_hierarchy.working_sets(2**16, 2**20, 4) == [2**16, 2**18, 2**20]
    sets = quick("memory_hierarchy", "--smallest", "64", "--largest", "1").figures["working_sets"]
    assert [row["bytes"] for row in sets] == [2**16, 2**18, 2**20]


def test_traffic_of_attention_is_analytic_where_no_counters_can_be_read(monkeypatch, capsys, tmp_path, refused):
    qkv = torch.randn(3, 2, 3, 16, 8).unbind()
    torch.testing.assert_close(attention_forms.attention_by_hand(*qkv), attention_forms.attention_fused(*qkv))
    monkeypatch.setattr(traffic.shutil, "which", lambda _: None)
    monkeypatch.setattr("sys.argv", ["x", "--output", str(tmp_path / "x.json")])
    traffic.main()
    assert "ncu) is not installed" in capsys.readouterr().out
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["bytes"]["by hand"] == {"analytic": 50_197_430_272, "counters": None, "copies": None}
    assert written["command"] == "python -m anatomy.traffic" and written["started_at"]
    for words in (["--shape", "8", "0", "4", "4"], ["--scripts", "2", "--preset", "gpt2"], ["--preset", "gpt2"]):
        monkeypatch.setattr("sys.argv", ["x", *words])
        refused(traffic.main)


def test_traffic_of_a_step_adds_up_its_kernels_and_profiles_one_step(monkeypatch):
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    metrics = [("dram__bytes_read.sum", "Mbyte", "1,000.5"), ("dram__bytes_write.sum", "Kbyte", "500"),
               ("gpu__time_duration.sum", "usecond", "10"), ("other", "%", "5")]  # fmt: skip
    lines = [f'"{k}","{name}","{m}","{unit}","{value}"' for k, name in enumerate("aba") for m, unit, value in metrics]
    monkeypatch.setattr(traffic.shutil, "which", lambda _: "/ncu")
    ended = subprocess.CompletedProcess([], 0, "\n".join(["==PROF== x", head, *lines]), "")
    monkeypatch.setattr(traffic.subprocess, "run", lambda *_, **__: ended)
    step = traffic.count_step("2_sdpa", [])
    assert [(kernel["name"], kernel["launches"]) for kernel in step["kernels"]] == [("a", 2), ("b", 1)]
    assert step["bytes"] == pytest.approx(3 * 1.001e9) and step["seconds"] == pytest.approx(3e-5)
    ended.stdout = "==ERROR== ERR_NVGPUCTRPERM"
    assert "ERR_NVGPUCTRPERM" in traffic.count_step("2_sdpa", [])["reason"]

    profiled = Mock(side_effect=lambda work, _: work())
    monkeypatch.setattr(traffic, "while_profiled", profiled)
    monkeypatch.setattr(torch.cuda, "set_device", Mock())
    monkeypatch.setattr(benchmark, "run", benchmark.run)  # which the function replaces
    monkeypatch.setattr("sys.argv", sys.argv)
    traffic.run_step("2_sdpa", [*FAST[:-6], *FAST[-2:]])
    assert profiled.call_count == 1


def test_times_have_quartiles_and_differ_only_beyond_their_spread():
    fast, slow, wide = Seconds.of([1.0, 1.1, 1.2]), Seconds.of([2.0, 2.1, 2.2]), Seconds.of([1.0, 1.1, 3.0])
    assert fast.quartiles == pytest.approx((1.05, 1.15)) and float(fast) == 1.1
    assert experiment.less(fast, slow) and not experiment.less(slow, fast)
    assert not experiment.differ(fast, wide) and not experiment.differ(wide, slow)
    assert experiment.us(fast * 1.0) == "1100000.0" and experiment.us(fast) == "1100000.0 (1050000.0-1150000.0)"
    assert with_quartiles({"s": fast, "rows": [{"t": 1}]}) == {
        "s": 1.1, "s_p25_p75": list(fast.quartiles), "rows": [{"t": 1}],
    }  # fmt: skip
    assert "spread" in Check("x", 2.0, wide, "ms").row()["verdict"], "its p75 is within 25 % of 2"
    for far in (Check("x", 0.5, wide, "ms"), Check("x", 1.0, 2.0, ""), Check("x", 5, 4, "")):
        assert not far.hit and "says why" in far.row()["verdict"]
    assert Check("x", 1.0, 1.24, "").hit and not Check("x", 1.0, 0.79, "").hit
    assert Check("x", 1.0, 0.1, "", at_most=True).hit and not Check("x", 1.0, 1.1, "", at_most=True).hit


def test_host_cost_rewrites_and_learning_show_what_holds_by_semantics():
    cores = os.sched_getaffinity(0)
    figures = quick("host_cost", "--elements", "8").figures
    assert os.sched_getaffinity(0) == cores
    assert list(figures["cores"]) == list(map(str, sorted(cores)[: host_cost.MOST_CORES]))
    assert figures["times"]["a loop over 8 elements"] > figures["times"]["vector.sum()"]
    cases = quick("rewrites", "--edge", "16", "--only", "dead code", "two products in a row").figures["cases"]
    assert {name: (row["eager_launches"], row["launches"]) for name, row in cases.items()} == {
        "dead code": (3, 1), "two products in a row": (2, 2),
    }  # fmt: skip
    trained = quick("learning", "--steps", "3", "--vocab", "300").figures["trained"]
    assert trained["FP32"]["losses"][0] == pytest.approx(5.7, abs=0.2), "ln 300"
    assert trained["FP32, default initialization"]["losses"][0] > 10


def test_a_difference_of_two_times_spreads_as_far_as_both():
    few, many = Seconds.of([1.0, 2.0, 3.0]), Seconds.of([4.0, 5.0, 6.0])
    assert many.minus(few) == 3.0 and many.minus(few).quartiles == pytest.approx((2.0, 4.0))


def test_a_form_that_diverges_has_no_loss_in_the_table_of_learning(monkeypatch):
    none, some = ({"losses": [5.5, loss], "last": loss, "skipped": [], "zero_share": 0.5} for loss in (None, 5.4))
    monkeypatch.setattr(learning, "train", lambda form, *_: none if form == learning.FORMS["FP16"] else some)
    result = quick("learning", "--steps", "2")
    assert ["FP16", "5.500", "-", "0", "50.0%"] in result.tables[0].rows
    assert any("FP16 is not a number" in sentence for sentence in result.sentences)


def test_each_has_a_question_a_prediction_a_source_a_run_line_and_is_short(capsys):
    assert cli.main([]) == 0
    printed, questions = capsys.readouterr().out, cli.experiments()
    assert len(questions) == 16
    for name, question in questions.items():
        assert question.endswith("?") and f"{name} " in printed and question in printed
        text = (ROOT / "anatomy" / f"{name.replace('-', '_')}.py").read_text()
        docstring = text.split('"""')[1]
        assert all(part in docstring for part in ("Prediction", "\nSource:", f"python -m anatomy {name}"))
        asked = cli.lesson(docstring)
        assert asked["predict"].count("?") and asked["change"] and asked["prediction"].startswith("Prediction")
        assert "Source:" not in asked["change"] and len(text.splitlines()) <= 210, name


def test_bad_input_is_one_line_and_exit_code_2_and_a_folder_of_other_files_stays_as_it_is(capsys, tmp_path):
    (tmp_path / "anatomy.md").write_text("# Anatomy: my own page\n")
    for words, expected_text in (
        (["nonsense"], "no experiment is named nonsense"),
        (["fusion", "--dtype", "int3"], "--dtype"),
        (["fusion", "--device", "tpu"], "--device tpu"),
        (["contiguity", "--device", "cpu", "--output", "/proc/no/such"], "--output"),
        (["autograd", "--device", "cpu", "--dmodel", "10", "--nhead", "4"], "not divisible"),
        (["all", "--device", "cpu", "--output", str(tmp_path)], "holds other files"),
        (["all", "roofline", "flash"], "no experiment is named flash: attention, "),
    ):
        try:
            code = cli.main(words)
        except SystemExit as error:
            code = error.code
        err = capsys.readouterr().err
        assert code == 2 and expected_text in err and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["anatomy.md"]
    bare = [sys.executable, "-S", "-m", "anatomy", "fusion"]
    ended = subprocess.run(bare, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and "needs torch, tabulate" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_missing_compiler_is_exit_code_2_and_a_failure_1(monkeypatch, capsys):
    failing = Mock(side_effect=RuntimeError("No working C++ compiler found in x"))
    monkeypatch.setattr("anatomy.contiguity.run", failing)
    with pytest.raises(SystemExit) as caught:
        cli.main(["contiguity", "--device", "cpu"])
    assert caught.value.code == 2 and "install one" in capsys.readouterr().err
    failing.side_effect = RuntimeError("CUDA out of memory")
    assert cli.main(["contiguity", "--device", "cpu"]) == 1 and "smaller sizes" in capsys.readouterr().err
    failing.side_effect = ValueError("boom\nmore")
    assert cli.main(["contiguity", "--device", "cpu"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("ValueError: boom")


def test_output_is_a_record_without_the_paths_of_this_machine_and_attachments_lie_beside_it(tmp_path, capsys):
    words = ["contiguity", "--device", "cpu", "--quick", "--m", "32", "--n", "32", "--k", "32"]
    assert cli.main([*words, "--output", str(tmp_path / "x.json")]) == 0
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["experiment"] == "contiguity" and record["command"] == "python -m anatomy " + " ".join(words)
    assert record["environment"]["device_type"] == "cpu" and record["tables"]
    assert record["sentences"][0] in capsys.readouterr().out
    result = experiment.Result([], ["It is."], {}, attachments={"a.svg": "<svg/>", "b.bin": b"b"})
    for output, folder in (("y.json", "y"), ("z", "z-files")):
        cli.write_result(tmp_path / output, {}, result)
        assert json.loads((tmp_path / output).read_text())["attachments"] == [f"{folder}/a.svg", f"{folder}/b.bin"]
        assert (tmp_path / folder / "b.bin").read_bytes() == b"b"


def fake_command(name, shared, folder):
    """In place of an experiment's process: a good one, and four that end badly."""
    near, far = Check("near", 1.0, Seconds.of([1.0, 1.1, 1.2]), "ms"), Check("far", 1.0, 2.0, "", cause="a reason")
    record = {
        "experiment": name, "question": "Does it?", "command": "python -m anatomy good", "started_at": "now",
        "seconds": 1.0,
        "environment": {"device": "x", "torch": "2"}, "tables": [{"title": "T", "headers": ["a"], "rows": [["1"]]}],
        "lesson": {"predict": "how many?", "prediction": "Prediction: two.", "change": "--n 3"},
        "checks": [with_quartiles(asdict(check) | {"hit": check.hit}) for check in (near, far)],
        "sentences": ["It does."], "figures": {}, "attachments": ["good/x.svg"], "listings": {"Code:": "a = 1"},
    }  # fmt: skip
    ends = {
        "bad": "print('Traceback'); raise SystemExit('python -m anatomy bad: error: it broke')",
        "refuses": "import sys; print('python -m anatomy refuses: error: no Triton', file=sys.stderr); sys.exit(2)",
        "slow": "import time; time.sleep(60)",
        "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "good": f"import pathlib; pathlib.Path({str(folder / 'good.json')!r}).write_text({json.dumps(record)!r})",
    }
    return [sys.executable, "-c", ends[name]]


def test_all_goes_on_after_a_failure_and_is_0_where_all_came_to_a_result(monkeypatch, capsys, tmp_path):
    names = ("bad", "refuses", "slow", "killed", "good")
    monkeypatch.setattr(cli, "experiments", lambda: {name: f"What about {name}?" for name in names})
    monkeypatch.setattr(cli, "child_command", fake_command)
    assert cli.main(["all", "--device", "cpu", "--limit", "3", "--output", str(tmp_path / "run")]) == 1
    index = (tmp_path / "run" / "anatomy.md").read_text()
    for expected in ("it broke", "cannot run: no Triton", "took longer than 3 s", "signal 9", "It does."):
        assert expected in index, expected
    page = (tmp_path / "run" / "good.md").read_text()
    before, answer = page.split("<details><summary>How this experiment predicts it</summary>")
    assert "Does it?" in before and "how many?" in before and "It does." not in before
    assert "1 of 2 predictions hold (within 25 %, or under their bound)" in answer and "a reason" in answer
    assert "1100 (1050-1150)" in answer, "median and quartiles, in ms"
    assert "| a   |" in page and "![good/x.svg](good/x.svg)" in page and "    a = 1" in page and "--n 3" in page
    assert "it broke" in (tmp_path / "run" / "bad.md").read_text() and "it broke" in capsys.readouterr().out
    monkeypatch.setattr(cli, "experiments", lambda: {"bad": "Does it break?", "good": "Does it?", "old": "Is it?"})
    (tmp_path / "run" / "old.json").write_text('{"figures": {}}')
    assert cli.main(["all", "good", "--device", "cpu", "--output", str(tmp_path / "run")]) == 0
    assert cli.main(["all", "bad", "--device", "cpu", "--output", str(tmp_path / "run")]) == 1
    index = (tmp_path / "run" / "anatomy.md").read_text()
    assert "1 of 2" in index and "it broke" in index, "what an earlier call recorded stays beside what this one ran"
    cli.renew_index(tmp_path / "run")
    index = (tmp_path / "run" / "anatomy.md").read_text()
    assert "1 of 2" in index and "it broke" not in index, "records alone"
