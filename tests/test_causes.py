"""Each gain by its causes, and peers with equal heads: figures from a file of variants."""

import json
from dataclasses import asdict

import runs
from test_documents import tables_of

from report import causes


def measured(ms, **fields):
    timing = {"median_ms": ms, "p25_ms": ms, "p75_ms": ms} if ms else {"median_ms": None}
    return {"status": "ok" if ms else "failed", "reason": None if ms else "broke", "timing": timing, **fields}


def variant(script, baseline_ms, ms, rung=None, cause=None, started="1", baseline=None, **fields):
    plain = measured(baseline_ms, started_at=started, **(baseline or {}))
    known = {"name": f"{script} {cause or ms}", "script": script, "predicted": "", "rung": rung, "cause": cause}
    return measured(ms, **fields) | known | {"baseline": plain}


def write(folder, *variants):
    path = folder / "h200" / causes.FOLDER / "tiny.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    run = asdict(runs.run(runs.step("0_a")))
    content = {"environment": run["environment"], "workload": run["workload"], "variants": variants}
    path.write_text(json.dumps(content))
    return causes.read_causes(path)


def test_a_gain_is_divided_among_its_causes_and_the_rest_is_interaction(tmp_path):
    assert causes.sections(tmp_path) == []
    kinds, gaps_of_timed_step = ("optimizer", "loss"), 5.0
    shown = runs.profile(110.0, kinds, kinds, (94.0, 1.0), gpu_idle_ms=15.0)  # ten of them are the profiler's
    before = {"profile": asdict(shown)}
    after = {"profile": asdict(runs.profile(80.0, kinds, kinds, (80.0, 0.0)))}
    found = write(
        tmp_path,
        variant("2_sdpa", 999.0, 80.0, "3_compile", "only AdamW", **after),
        variant("2_sdpa", 100.0, 95.0, "3_compile", "only the model", started="2", baseline=before),
        variant("3_compile", 70.0, 75.0, "3_compile", "without the graph"),
        variant("3_compile", 70.0, None, "3_compile", "without AdamW"),
        variant("3_compile", 70.0, 60.0),
    )
    assert causes.rungs(found) == [("2_sdpa", "3_compile")] and causes.scripts(found)["2_sdpa"].ms == 100.0, "the last"
    only, *_ = causes.variants_of(found, "3_compile")
    assert causes.moved_ms(causes.scripts(found)["2_sdpa"], only) == {"optimizer": -14.0, "gaps": -gaps_of_timed_step}
    (parts,) = tables_of(causes.of_run(tmp_path / "h200" / "tiny")["3_compile"])
    assert [(name, row["measured"], row["it saves"]) for name, row in parts.items()] == [
        ("AdamW", "alone", "20.0 of 30.0 ms"), ("the model", "alone", "5.0 of 30.0 ms"),
        ("the graph", "left out", "5.0 of 30.0 ms")]  # fmt: skip
    assert causes.of_run(tmp_path / "h200" / "other") == {}
    said = "\n\n".join(causes.sections(tmp_path))
    (table,) = tables_of(said)
    assert [table[name]["saved of 2_sdpa"] for name in ("only AdamW", "without the graph", "3_compile")] == [
        "+20.0 (67%)", "+25.0 (83%)", "+30.0 (100%)"]  # fmt: skip
    assert table["without the graph"]["saved by 3_compile"] == "+5.0" and list(table)[-1] == "3_compile"
    assert table["without AdamW"]["median (p25-p75)"] == "failed: broke"
    assert "Alone, these causes save 25.0 ms in sum, and together 30.0: each helps the others." in said


def test_peers_stand_beside_step_4_with_the_same_head(tmp_path):
    def fp8(head):
        return {"settings": {"fp8_recipe": "x", "head": head}}

    write(
        tmp_path,
        variant("4_transformer_engine", 50.0, 60.0, "4_transformer_engine", "without FP8 in the head",
                baseline=fp8("FP8"), **fp8("BF16")),
        variant("peers/p", 90.0, 75.0, baseline=fp8("BF16"), **fp8("FP8")),
    )  # fmt: skip
    said = "\n\n".join(causes.sections(tmp_path))
    *_, table = tables_of(said)
    assert [(row["LM head"], row["over step 4 with this head"]) for row in table.values()] == [
        ("BF16", "1.50"), ("FP8", "1.50")
    ]  # fmt: skip
    assert [row["time over step 4"] for row in table.values()] == ["1.80", "1.50"]
    assert "without FP8 in the head |" in said and "saved by 4_transformer_engine" in said and "+10.0" in said
