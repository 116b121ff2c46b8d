"""Ablations: every patch still fits its script, and a variant runs beside the unchanged script."""

import json
import os
import subprocess
import sys

import pytest
from conftest import FAST, ROOT

from anatomy import ablations
from report import analysis, causes

VARIANTS = ablations.variants()


def test_every_patch_is_listed_applies_and_gives_another_script(tmp_path):
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) == len(list(ablations.VARIANTS.iterdir()))
    for variant in VARIANTS:
        ablations.write_script(variant, tmp_path)
        for name in ("common/parallel.py", f"{variant.script}.py"):
            changed = (tmp_path / name).read_text() != (ROOT / name).read_text()
            assert changed == (bool(variant.parallel) == name.startswith("common/")), variant.name
            compile((tmp_path / name).read_text(), variant.name, "exec")
        assert variant.kind in ("ablation", "try", "mutation") and variant.predicted


def test_a_patch_that_does_not_fit_is_one_line(tmp_path):
    patch = tmp_path / "old.patch"
    diff = "--- a/2_sdpa.py\n+++ b/2_sdpa.py\n@@ -1,1 +1,1 @@\n-no such line\n+x\n"
    patch.write_text(f"Variant: x\nScript: 2_sdpa\nKind: try\nPredicted: nothing\n\n{diff}")
    (variant,) = ablations.variants(tmp_path)
    with pytest.raises(ablations.VariantError, match=r"old.patch does not fit 2_sdpa.py: ") as raised:
        ablations.write_script(variant, tmp_path)
    assert "\n" not in str(raised.value)


def test_a_variant_whose_module_is_missing_is_left_out_of_many(capsys):
    left = ablations.with_their_modules(ablations.chosen_variants(VARIANTS, ["3_compile"]))
    assert left and not any(variant.needs for variant in left)
    assert "nanoGPT's model is left out: it needs model.py of nanoGPT" in capsys.readouterr().out


def run(tmp_path, *words, **variables):
    command = [sys.executable, "-m", "anatomy.ablations", "--output", str(tmp_path / "x.json"), *words]
    environment = os.environ | variables
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def test_what_cannot_run_is_one_line(tmp_path):
    for words, variables, message in (
        (["--only", "nonsense"], {}, "no variant is named like nonsense\n"),
        (["--only", "DDP"], {}, "runs with --gpus N"),
        (["--only", "fused AdamW", "--gpus", "2"], {}, "runs without --gpus N"),
        (["--only", "nanoGPT"], {}, "nanoGPT's model needs model.py of nanoGPT: git clone https://github.com/"),
        (["--gpus", "2", "--n-embd", "30", "--n-head", "4"], {}, "error: --n-embd 30 is not divisible by --n-head 4"),
        (["--only", "fused AdamW, step 2", *FAST], {"PATH": ""}, "git is not installed"),
    ):
        ended = run(tmp_path, *words, **variables)
        assert ended.returncode == 2 and message in ended.stderr and ended.stderr.count("\n") == 1


def test_a_variant_runs_beside_its_script_and_an_output_that_is_there_keeps_its_others(tmp_path):
    timed = {"timing": {"median_ms": 1.5}, "status": "ok", "reason": None, "loss": [1.0]}
    mine = {"name": "mine", "script": "3_compile", "kind": "try", "predicted": "", "baseline": timed}
    for workload, code in ((None, 0), ({"n_embd": 64}, 2)):
        old = {"environment": None, "workload": workload, "variants": [mine | timed]}
        (tmp_path / "x.json").write_text(json.dumps(old))
        ended = run(tmp_path, "--only", "fused AdamW, step 2", "--profile", *FAST)
        assert ended.returncode == code, ended.stderr
        written = json.loads((tmp_path / "x.json").read_text())
        if code == 0:
            (variant,) = [variant for variant in written["variants"] if variant["name"] != "mine"]
            assert variant["timing"]["median_ms"] > 0 and variant["baseline"]["timing"]["median_ms"] > 0
            (read,) = [one for one in causes.read_causes(tmp_path / "x.json").variants if one.name != "mine"]
            plain, varied = (analysis.category_ms(one.row) for one in (read.baseline, read))
            assert varied["matrix products"] > 0 and plain["gaps"] == 0
            assert len(written["variants"]) == 2 and written["workload"]["n_embd"] == 32
            assert written["command"].startswith("python -m anatomy.ablations --only 'fused AdamW, step 2' ")
    assert written == old and "another workload" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_variant_of_several_processes_runs_beside_its_script_in_as_many(tmp_path):
    patch = (ablations.VARIANTS / "ddp-large-buckets.patch").read_text()
    (tmp_path / "x.patch").write_text(patch.replace("Script: 4_transformer_engine", "Script: 0_baseline"))
    chosen = ablations.chosen_variants(ablations.variants(tmp_path), None, several=True)
    assert ablations.run_variants(chosen, FAST, tmp_path / "x.json", 2) == 0
    written = json.loads((tmp_path / "x.json").read_text())
    assert written["workload"]["gpus"] == 2 and written["workload"]["parallel"] is None
    assert [one["status"] for one in written["variants"]] == ["ok"]
    assert written["variants"][0]["loss"] == written["variants"][0]["baseline"]["loss"]
    assert not ablations.chosen_variants(ablations.variants(tmp_path), None)


def test_an_output_that_holds_something_else_stays_as_it_is(tmp_path):
    (tmp_path / "x.json").write_text('{"name": 1}')
    ended = run(tmp_path, "--only", "fused AdamW, step 2", *FAST)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert (tmp_path / "x.json").read_text() == '{"name": 1}'
