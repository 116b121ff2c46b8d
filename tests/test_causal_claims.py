"""Causal claims: each stands where the page says, and its recorded figure bears it out."""

import ast
import json
import math
import re

import pytest
import runs
from conftest import ROOT, STEPS

from common.record import write_json
from report import causal_claims as claims
from report import glossary
from report.causal_figures import change, in_sweep
from report.causal_losses import last_norm_in_bf16
from report.records import Records

RESULTS = ROOT / "docs" / "results"


def plain(text):
    """Without markup and line breaks."""
    return re.sub(r"\s+", " ", re.sub(r"[*`]", "", text))


@pytest.mark.parametrize("claim", claims.CLAIMS, ids=lambda claim: f"{claim.where}: {claim.sentence[:40]}")
def test_a_claim_stands_in_its_file_and_its_figure_bears_it_out(claim):
    assert claim.sentence in plain(glossary.unlinked((ROOT / claim.where).read_text()))
    found = Records.read(RESULTS / claim.machine).measured(claim.measure)
    assert found and found.holds and re.search(r"\d", found.figure), found


@pytest.mark.parametrize("step", STEPS[1:])
def test_every_reason_that_a_script_gives_is_a_claim(step):
    docstring = ast.get_docstring(ast.parse((ROOT / f"{step}.py").read_text()))
    why = plain(docstring.partition("Why:")[2].partition("Run:")[0]).strip()
    claimed = [claim.sentence for claim in claims.CLAIMS if claim.where == f"{step}.py"]
    for sentence in claimed:
        why = why.replace(sentence, "")
    assert claimed and why.strip() in ("", ", see docs/performance.md."), why


def test_a_figure_that_only_agrees_with_its_sentence_does_not_show_it():
    lines = claims.claims_table(RESULTS).splitlines()
    (bytes_in_ms,) = [line for line in lines if "read and wrote the same tensors several times" in line]
    assert claims.CONSISTENT in bytes_in_ms and " ms" in bytes_in_ms
    assert sum(claims.CONSISTENT in line for line in lines) == sum(not claim.shown for claim in claims.CLAIMS)


def test_a_kind_of_kernel_that_appears_or_vanishes_is_a_change(tmp_path):
    def holds(before, after, ratio):
        rows = [
            runs.step(name, profile=runs.profile(100.0, times=[100.0 - ms, ms]))
            for name, ms in (("a", before), ("b", after))
        ]
        runs.write(runs.run(*rows), tmp_path / "run")
        return change("a", "b", "attention", ratio=ratio)(Records.read(tmp_path)).holds

    assert holds(0.0, 5.0, (1, math.inf)) and not holds(0.0, 5.0, (0, 1)) and not holds(0.0, 0.0, (1, math.inf))
    assert holds(10.0, 5.0, (0.45, 0.55)) and not holds(10.0, 6.0, (0.45, 0.55)) and not holds(10.0, 5.0, (1, math.inf))


def test_trends_that_the_records_lack_and_a_study_without_the_rounding_are_not_borne_out(tmp_path):
    records = Records.read(RESULTS / claims.GPU)
    assert in_sweep("0_baseline", "1_cublas", "n_embd")(records).holds
    assert not in_sweep("0_baseline", "1_cublas", "n_embd", rises=False)(records).holds
    assert not in_sweep("1_cublas", "2_sdpa", "n_embd")(records).holds
    assert not in_sweep("3_compile", "4_transformer_engine", "n_embd", ends=(1024, 2048))(records).holds
    assert last_norm_in_bf16(records).holds
    for path in (RESULTS / claims.GPU).glob("parity*/parity.json"):
        study = json.loads(path.read_text())
        for run in study["runs"]:
            run["loss"] = [loss + 0.002 * (run["row"] == "BF16 instead of FP8") for loss in run["loss"]]
        (tmp_path / path.parent.name).mkdir()
        write_json(tmp_path / path.parent.name / path.name, study)
    assert not last_norm_in_bf16(Records.read(tmp_path)).holds


def test_a_claim_without_a_record_is_not_measured_and_a_figure_against_it_says_no(tmp_path):
    empty = claims.claims_table(tmp_path)
    assert empty.count("not measured") == len(claims.CLAIMS)
    (tmp_path / claims.GPU).mkdir()
    counted = {"by hand": {"counters": 1e9, "copies": 1e9}, "fused": {"counters": 3e9, "copies": 0}}
    write_json(tmp_path / claims.GPU / "attention-traffic.json", {"bytes": counted})
    against = [line for line in claims.claims_table(tmp_path).splitlines() if "2.0 GB by hand, 3.00 fused" in line]
    assert len(against) == 3 and all(line.split("|")[-2].strip() == "no" for line in against)
