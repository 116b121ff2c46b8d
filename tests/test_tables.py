"""docs/tables.py: what documents show of records, and which records are of other code."""

import json
import math
import sys

import pytest
import runs

from common import fingerprint
from ladder import running
from ladder.rows import Planned

sys.path.insert(0, str(runs.ROOT / "docs"))
import tables


@pytest.fixture(autouse=True)
def results(tmp_path, monkeypatch):
    """An empty folder of records."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    tables.record.cache_clear()
    tables.figures.cache_clear()
    yield
    tables.record.cache_clear()
    tables.figures.cache_clear()


def test_tables_of_documents_hold_one_state_of_the_code(tmp_path, monkeypatch):
    for name, code in (("a", "1111111"), ("b", "1111111"), ("c", "2222222"), ("d", "1")):
        problems = [tables.DIFFER] if name == "d" else []
        run = runs.ladder(200, 100, 25, measured=runs.roofs(), problems=problems)
        run.rows[0].code_sha256 = code
        runs.write(tmp_path / "m" / name, run)
    for make in (tables.ladder, tables.categories, tables.limits, tables.roofs):
        assert make("m/a").startswith("| ")
    assert tables.gains("m/a", "m/b").splitlines()[-1].split(" | ")[-2].strip() == "4.00"
    mixed = "The rows are of several versions of the code."
    assert tables.gains("m/a", "m/c").endswith(f"\n\n{mixed}") and mixed not in tables.gains("m/a", "m/b")
    with pytest.raises(ValueError, match=r"m/a, m/c: 0_baseline is of several states of the code"):
        tables.milliseconds([runs.STEPS[0]], "m/a", "m/c")
    with pytest.raises(ValueError, match="m/d: rows differ in"):
        tables.gains("m/d")
    times = tables.milliseconds(list(runs.STEPS[1:3]), "m/a", "m/b").splitlines()
    assert times[0].split()[1::2] == ["workload", *runs.STEPS[1:3]]
    assert [row.split()[1::2] for row in times[2:]] == [["m/a", "100.0", "25.0"], ["m/b", "100.0", "25.0"]]
    kernels = tables.figures("m/a").lines[0].row.profile.kernels
    (row,) = tables.kernels(runs.STEPS[0], kernels[0].name, "m/a").splitlines()[2:]
    assert row.split()[1::2] == ["m/a", kernels[0].name, f"{kernels[0].ms:.1f}"]
    named = (("0", "0", 9.0), ("1", "1", 5.0), ("x", "1", 7.0), ("y", "lost", 3.0))
    variants = {name: runs.run(runs.row(step, ms)) for name, step, ms in named}
    runs.write(tmp_path / "m" / "x", runs.study("ablations", variants))
    assert tables.ablations("m/x").split()[-8::2] == ["5.00", "7.00", "+2.0", "0"]


def test_a_confirmation_is_told_of_the_code_that_it_confirmed(tmp_path, monkeypatch):
    runs.write(tmp_path / "m" / "told", runs.run(runs.row("1_x", code_sha256="1"), gpu_uuid="a"))
    told = "GPU, measured 2026-01-01 at commit abcdef0"
    on_date = "2026-01-01 at commit 1234567"
    cases = [("1", card, f", confirmed {on_date}") for card in ("a", None)]
    cases += [("1", "b", f", confirmed on another card {on_date}"), ("2", "b", "")]
    for code, card, confirmed in cases:
        again = runs.run(runs.row("1_x", code_sha256=code), commit="123456789", gpu_uuid=card)
        runs.write(tmp_path / "m" / "told-confirmation", again)
        tables.record.cache_clear()
        assert tables.measured("m/told") == told + confirmed
    assert tables.warmups("m/told", "1_x") == "1.5 s", "of a single pass"


def test_the_first_table_of_an_experiment_is_shown(tmp_path, monkeypatch):
    page = (
        "# Anatomy\n\n## a: Why?\n\nTitle\n\n| x |\n|---|\n| 1 |\n\nMore\n\n| y |\n\n## b: What?\n\n| z |\n"
    )
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "report.md").write_text(page)
    with pytest.raises(ValueError, match="m has no experiment c"):
        tables.experiment("m", "c")
    assert tables.experiment("m", "a") == "| x |\n|---|\n| 1 |" and tables.experiment("m", "b") == "| z |"


def test_a_machine_s_records_are_of_one_kind_of_card(tmp_path, monkeypatch, capsys):
    runs.write(tmp_path / "h200" / "gpt2", runs.run(runs.row("x"), device="NVIDIA H200"))
    assert tables.of_another_device("h200", "NVIDIA H200") == tables.of_another_device("new", "T4") == 0
    assert tables.of_another_device("h200", "NVIDIA H100") == 1
    assert "h200 has records of NVIDIA H200, and this is NVIDIA H100" in capsys.readouterr().out


def row_of(step, source, measured_by=fingerprint.ROOTS, **fields):
    """A row as the present code leaves it, of this source."""
    code = fingerprint.row_sha256(source, runs.ROOT, measured_by)
    return runs.row(step, source=source, code_sha256=code, **fields)


def test_a_record_is_stale_when_a_step_a_peer_or_a_patch_has_other_code(tmp_path, monkeypatch):
    present = {"peer": ("", "nanogpt"), "patch": ("cold-scales", runs.STEPS[4])}
    for kind, (variant, step) in present.items():
        script = f"{step}.py" if variant else f"peers/{step}.py"
        with running.script_of(Planned(script, [], "", patch=variant or None)) as path:
            source = path.read_text()
        assert "cold" in source or not variant
        for name, text in (("same", f"{source}\n# a comment"), ("other", f"{source}\nx = 1")):
            for ending, seed in (("", ""), ("-seed", ", seed 1")):
                studied = runs.study("ablations", {f"{variant or step}{seed}": runs.run(row_of(step, text))})
                runs.write(tmp_path / kind / f"{name}{ending}", studied)
    program = (runs.ROOT / "mine" / "program.py").read_text()
    for name, text in (("same", program), ("other", program.replace("optimizer.step()", "pass"))):
        brought = runs.run(row_of(runs.STEPS[2], text), work=runs.workload(model="x.py"))
        runs.write(tmp_path / "model" / name, brought)
    for name, added in (("same", "# a comment"), ("other", "x = 1")):
        states = [row_of(step, f"{text}\n{added}", ()) for step, text in tables.loop_states().items()]
        runs.write(tmp_path / "loop" / name, runs.run(*states, work=runs.workload(model="loop.py")))
    clock = fingerprint.row_sha256("", runs.ROOT, fingerprint.CLOCKS)
    for name, code in (("same", clock), ("other", "0123")):
        (tmp_path / "anatomy" / name).mkdir(parents=True)
        (tmp_path / "anatomy" / name / "anatomy.json").write_text(json.dumps({"code_sha256": code}))
    assert tables.stale() == ["anatomy/other", "loop/other", "model/other"] + [
        f"{kind}/other{ending}" for kind in ("patch", "peer") for ending in ("", "-seed")
    ]
    assert tables.stale("a/b") == ["a/b"] and not tables.stale("model/same", "anatomy/same")
    assert tables.present().count("/same") == 7


def test_the_command_names_the_records_that_are_stale_and_what_it_takes(tmp_path, monkeypatch, capsys):
    runs.write(tmp_path / "of" / "old", runs.run(runs.row("x", code_sha256="0123")))
    source = (runs.ROOT / "2_sdpa.py").read_text()
    runs.write(tmp_path / "of" / "new", runs.run(row_of("2_sdpa", source)))

    def said(*words):
        monkeypatch.setattr(sys, "argv", ["tables.py", *words])
        return tables.main(), capsys.readouterr().out

    assert said("--stale") == (1, "of/old: of other code\n")
    assert said("--stale", "of/new") == (0, "every record is of the present code\n")
    assert said("--stale", "of/no") == (1, "of/no: not recorded\n")
    monkeypatch.setattr(sys, "argv", ["tables.py", "--fresh"])
    with pytest.raises(SystemExit, match="2"):
        tables.main()
    assert capsys.readouterr().err.count("\n") == 1


def test_no_text_of_a_record_is_a_marker_of_cog(tmp_path):
    marker = "x]]] [[[end]]] [[[cog import os ]]]"
    run = runs.run(runs.row(marker, note=marker), runs.row("b", status="oom", reason=marker), device=marker)
    run.started_at = run.command = marker
    runs.write(tmp_path / "of" / "odd", run)
    page = f"## {marker}: x\n\n| {marker} |\n|---|\n| 1 |\n"
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "report.md").write_text(f"# Anatomy\n\n{page}")
    shown = [
        tables.measured("of/odd"),
        tables.ladder("of/odd"),
        tables.cards("of/odd"),
        tables.decision("of/odd"),
    ]
    shown.append(tables.experiment("m", marker))
    assert not any("[[[" in text or "]]]" in text for text in shown)


def test_a_table_of_several_cards_says_so(tmp_path, monkeypatch):
    for name, uuid in (("a", "1"), ("b", "2"), ("c", None)):
        runs.write(tmp_path / "of" / name, runs.run(runs.row("x"), gpu_uuid=uuid))
    assert tables.several_cards("of/a", "of/b", "of/c") == "\n\nRecorded on 2 cards."
    assert tables.several_cards("of/a", "of/c") == tables.several_cards("of/c") == ""
    assert tables.several_cards("of/a", other_card="3") == "\n\nRecorded on 2 cards."
    assert tables.several_cards("of/a", other_card="1") == ""


def test_a_table_says_why_figures_of_its_own_rows_bear_a_mark(tmp_path):
    steady, drifting = [10.0] * 40, [10.0] * 20 + [11.0] * 20

    def written(place, **times):
        rows = [runs.row(step, step_ms=of_row) for step, of_row in times.items()]
        runs.write(tmp_path / "m" / place, runs.run(*rows))

    written("a", s0=steady, s1=drifting)
    written("b", s0=steady, s1=steady)
    written("c", s0=drifting, s1=drifting, s2=drifting)
    why = "? the second half of the steps took over 5% more time"
    assert tables.ladder("m/a").count(f"|\n\n{why} (s1).") == 1 and "?" not in tables.ladder("m/b")
    assert f"|\n\n{why} (s0; s1; s2)." in tables.ladder("m/c")
    assert f"|\n\n{why} (m/a, s1)." in tables.gains("m/a", "m/b")
    assert f"|\n\n{why} (m/a, s1)." in tables.cards("m/a", "m/b")
    named = {"0_x": drifting, "bf16-head": steady, "fast-accumulation": drifting}
    variants = {name: runs.run(runs.row("0_x", step_ms=times)) for name, times in named.items()}
    runs.write(tmp_path / "m" / "x", runs.study("ablations", variants))
    assert tables.ablations("m/x", "bf16-head").endswith(f"|\n\n{why} (0_x).")
    assert tables.ablations("m/x", "fast-accumulation").endswith(f"{why} (0_x; fast-accumulation).")


def test_a_lag_is_of_all_seeds_and_grows_seed_by_seed(tmp_path):
    tested = [(10, 4.0), (20, 3.0), (40, 2.0)]  # a nat less for twice the training steps

    def trained(step, lags):
        heldout = [(at, loss + math.log2(1 + lag)) for (at, loss), lag in zip(tested, lags, strict=True)]
        return runs.run(runs.row(step, heldout=heldout))

    by_name = {f"3_compile, seed {seed}": trained("3_compile", (0, 0, 0)) for seed in (1, 2, 3)}
    f8 = "4_transformer_engine"
    later = {f"{f8}, seed {seed}": trained(f8, (0, 0.1, 0.1 * (seed + 1))) for seed in (1, 2, 3)}
    runs.write(tmp_path / "of" / "a", runs.study("parity", by_name | later))
    assert tables.lag("of/a", 20, 40) == "+20.0% ± 12.4%" and tables.lag("of/a", 80, 80) == "-"
    assert tables.growth("of/a", (20, 20), (40, 40)) == "+20.0% ± 24.8%"
    assert tables.heldout("of/a", 20, f8) == f"+{math.log2(1.1):.2f} ± 0.00"
    table = tables.lags({"mine": "of/a"})
    assert "| mine" in table and "|     3 |" in table
    later[f"{f8}, seed 1"] = trained(f8, (0, 0.1, -0.1))
    runs.write(tmp_path / "of" / "b", runs.study("parity", by_name | later))
    with pytest.raises(ValueError, match="of/b: 4_transformer_engine has a lag at 40 for 2 seeds alone"):
        tables.lag("of/b", 40, 40)
