"""Ablations: every replacement still fits its script, and a variant runs beside the unchanged script."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

from anatomy import ablations
from common import documents

FAST = ["--device", "cpu", "--n-layer", "1", "--n-head", "2", "--n-embd", "32", "--seq-len", "32", "--steps", "2"]


@pytest.mark.parametrize("variant", ablations.VARIANTS, ids=lambda variant: variant.name)
def test_every_replacement_fits_and_gives_a_script(variant):
    text = variant.source()
    compile(text, variant.name, "exec")
    assert text != (ROOT / f"{variant.script}.py").read_text() and variant.kind in ("ablation", "try")


def test_names_are_unique():
    assert len({variant.name for variant in ablations.VARIANTS}) == len(ablations.VARIANTS)


def test_a_replacement_that_no_longer_fits_is_an_error():
    variant = ablations.Variant("x", "2_sdpa", "?", "try", (("no such line", ""),))
    with pytest.raises(ablations.VariantError, match="has no line 'no such line'"):
        variant.source()


def run(tmp_path, *words):
    command = [sys.executable, "-m", "anatomy.ablations", "--output", str(tmp_path / "x.json"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_a_variant_runs_beside_its_script(tmp_path):
    ran = run(tmp_path, "--only", "fused AdamW without", *FAST)
    assert ran.returncode == 0, ran.stderr
    found = json.loads((tmp_path / "x.json").read_text())
    (variant,) = found["variants"]
    assert variant["median_ms"] > 0 and variant["baseline"]["median_ms"] > 0
    assert found["workload"]["n_embd"] == 32 and "fused AdamW without compile" in ran.stdout


@pytest.mark.parametrize(
    ("words", "said"), [(["--only", "nonsense"], "no variant is named like"), (["--n-embd", "x"], "--n-embd")]
)
def test_bad_input_is_one_line(tmp_path, words, said):
    ran = run(tmp_path, *words)
    assert ran.returncode != 0 and said in ran.stderr and ran.stderr.count("\n") == 1


def test_an_output_that_is_there_keeps_its_other_variants(tmp_path):
    mine = {"name": "CUDA graphs, step 3", "script": "3_compile", "kind": "try", "predicted": ""}
    mine |= {"baseline": timed(2.0) | {"loss": [1.0]}, "loss": [1.0]} | timed(1.5)
    for workload, returncode in ((None, 0), ({"n_embd": 64}, 2)):
        (tmp_path / "x.json").write_text(json.dumps({"environment": None, "workload": workload, "variants": [mine]}))
        ran = run(tmp_path, "--only", "fused AdamW without", *FAST)
        assert ran.returncode == returncode, ran.stderr
        kept = [variant["name"] for variant in json.loads((tmp_path / "x.json").read_text())["variants"]]
        assert kept == (
            ["CUDA graphs, step 3"] if returncode else ["fused AdamW without compile", "CUDA graphs, step 3"]
        )
    assert "another workload" in ran.stderr and ran.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ['{"name": 1}', '{"environment": null, "workload": null, "variants": [{"x": 1}]}'])
def test_an_output_that_holds_something_else_stays_as_it_is(content, tmp_path):
    (tmp_path / "x.json").write_text(content)
    ran = run(tmp_path, "--only", "fused AdamW without", *FAST)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and (tmp_path / "x.json").read_text() == content


def timed(ms):
    return {"median_ms": ms, "timing": {"median_ms": ms, "step_ms": [ms - 1, ms, ms + 2]}}


def test_a_recorded_ablation_is_a_table():
    common = {"script": "2_sdpa", "kind": "try", "predicted": "-3 ms", "baseline": {"loss": [2.0]} | timed(280.0)}
    variants = [
        common | timed(275.5) | {"name": "faster", "loss": [2.1], "status": "ok", "reason": None},
        common | {"name": "broken", "median_ms": None, "status": "failed", "loss": None, "reason": "no such kernel"},
    ]
    drawn = documents.ablation_table(variants)
    assert "-4.5 ms" in drawn and "275.5" in drawn and "+5.00%" in drawn and "no such kernel" in drawn
