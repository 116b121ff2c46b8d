"""The table of claims: verdicts by arithmetic, and nothing where nothing is recorded."""

import json

from report import claims, findings, questions, traffic
from report.claims import Claim
from report.findings import Finding, Machine


def test_a_range_holds_for_all_for_some_or_lies_beside():
    assert findings.within({"a": 1.6, "b": 1.9}, 1.5, 2).verdict == "holds"
    assert findings.within({"a": 1.6, "b": 7.0}, 1.5, 2) == Finding("a 1.60x, b 7.00x", "holds only for a")
    assert findings.within({"a": 3.0, "b": 7.0}, 1.5, 2).verdict == "more here"
    assert findings.within({"a": 1.0}, 1.5, 2).verdict == "less here"
    assert findings.within({"a": 1.0, "b": 3.0}, 1.5, 2).verdict == "more for b, less for the others"


def test_a_machine_without_records_says_so_and_machines_that_differ_are_named(tmp_path):
    empty = Machine.read(tmp_path)
    found = [claims.found(claim, empty) for claim in claims.CLAIMS]
    assert {one.verdict for one in found} == {claims.NO_RECORD, claims.NOT_TESTED}
    assert found[-1].verdict == claims.NOT_TESTED, "no function"
    good, bad, none = Finding("1", "holds"), Finding("2", "less here"), Finding("-", claims.NO_RECORD)
    assert claims.verdict({"H200": good, "CPU": none}) == "holds"
    assert claims.verdict({"H200": good, "CPU": bad}) == "H200: holds; CPU: less here"
    assert claims.verdict({"H200": none, "CPU": none}) == claims.NO_RECORD
    assert all(claim.source.startswith("https://") for claim in claims.CLAIMS)
    assert "nothing is recorded" in questions.path(tmp_path / "docs" / "results")


def test_verdicts_follow_the_figures():
    operations = {".item()": {"host_s": {"empty queue": 12e-6}, "waits": True},
                  "print": {"host_s": {"empty queue": 270e-6}, "waits": True}}  # fmt: skip
    machine = Machine({"sync-points": {"operations": operations}})
    assert findings.constant_sync(machine).verdict == "holds only for .item()"
    del operations["print"]
    assert findings.constant_sync(machine).verdict == "holds"
    claim = Claim("x", "https://x", "sync-points", findings.any_waits)
    assert claims.found(claim, machine).verdict == claims.NO_RECORD, "an older record lacks the case"


def test_counted_bytes_are_shares_of_a_copy_and_a_step_that_was_not_counted_says_why(tmp_path):
    assert traffic.sections(tmp_path) == []
    kernel = {"name": "softmax|fused", "launches": 12, "bytes": 2e9, "seconds": 1e-3}
    steps = {"0_baseline": {"kernels": [kernel], "bytes": 4e9, "seconds": 4e-3}, "1_cublas": {"reason": "no counters"}}
    record = {"copy_bytes_per_s": 4e12, "steps": steps}
    (tmp_path / "card").mkdir()
    (tmp_path / "card" / "step-traffic-gpt2.json").write_text(json.dumps(record))
    title, table, lines = traffic.sections(tmp_path)
    assert "gpt2" in title and "50%" in table and "softmax" in table
    assert "4.0 GB in 4.0 ms of kernels, 25% of a copy" in lines and "1_cublas was not counted: no counters." in lines
