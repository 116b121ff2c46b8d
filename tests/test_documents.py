"""The tables of README and docs/performance.md say which runs, scripts and commands they come from."""

import json

import runs
from conftest import ROOT, STEPS

from common import documents

SCRIPT = (ROOT / f"{STEPS[3]}.py").read_text()
OTHER_TEXT = SCRIPT.replace('"""Step 3', '"""STEP 3', 1)
OTHER_CODE = SCRIPT + "\nprint()\n"


def write(folder, name, made):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(made))


def row(ms, source=SCRIPT, **fields):
    return runs.step(STEPS[3], ms, source=source, **fields)


def test_other_runs_are_told_apart_by_commit_and_by_code(tmp_path):
    folder = tmp_path / "gpu" / "tiny"
    write(folder, "results.json", runs.run(row(100.0)))
    write(folder, "results-2.json", runs.run(row(101.0, OTHER_TEXT)))
    write(folder, "results-3.json", runs.run(row(150.0, OTHER_CODE), commit="def"))
    said = documents.readme_table(tmp_path)
    assert "those of the same commit by +1.0% to +1.0%, earlier ones by +50.0% to +50.0%" in said
    drawn = documents.performance_tables(tmp_path).splitlines()
    (second,) = [line for line in drawn if "+1.0%" in line]
    (third,) = [line for line in drawn if "+50.0%" in line]
    assert "same" in second and "abc" in second and "another" in third and "def" in third


def test_only_other_code_is_an_earlier_version(tmp_path):
    for source, earlier in ((SCRIPT, False), (OTHER_TEXT, False), (OTHER_CODE, True)):
        write(tmp_path / "gpu" / "tiny", "results.json", runs.run(row(100.0, source)))
        assert ("earlier version of the script" in documents.readme_table(tmp_path)) is earlier


def test_a_row_that_left_no_script_is_no_earlier_version(tmp_path):
    ended = runs.step(STEPS[4], status="timeout", reason="too slow", source=None)
    write(tmp_path / "gpu" / "tiny", "results.json", runs.run(row(100.0), ended))
    said = documents.readme_table(tmp_path)
    assert "timeout" in said and "earlier version" not in said


def test_rows_that_no_ladder_made_say_how_they_were_run(tmp_path):
    roofs = {"copy_bytes_per_s": 4e12, "shapes": [], "square": {}, "notes": []}
    whole = runs.run(runs.step(STEPS[0], 300.0), row(100.0))
    parts = runs.run(row(100.0), roofs=roofs) | {"command": "python 3_compile.py"}
    write(tmp_path / "gpu" / "whole", "results.json", whole)
    write(tmp_path / "gpu" / "parts", "results.json", parts)
    said = documents.readme_table(tmp_path)
    assert "Of parts only the rows shown were run, one command a row, and its roofs measured by" in said
    assert "Of whole" not in said


def test_a_profile_that_is_off_is_said_once_and_anew(tmp_path):
    off = runs.profile(98.0) | {"step_ms": 150.0, "gpu_idle_ms": 52.0}
    old = "AMP is off; the profiled step is +50% off the timed median: as older records say"
    write(tmp_path / "gpu" / "tiny", "results.json", runs.run(row(100.0, profile=off, note=old)))
    said = documents.performance_tables(tmp_path)
    assert f"- {STEPS[3]}: AMP is off\n" in said and "older records" not in said
    assert said.count("+50% off the timed median: its kernels' times fit the timed step, its gaps do not") == 1
