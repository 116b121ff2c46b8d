"""`python -m report RUN_DIR`: arguments, exit codes, what it writes, and where packages are missing."""

import pytest
import runs

from report import __main__ as report_main
from report.load import read_run


def test_the_command_writes_a_report_that_its_merge_alone_gives_again(tmp_path):
    runs.write_rows(tmp_path, runs.step("0_a", 300), runs.step("1_b", 100, note="a note"))
    ran = runs.report(tmp_path)
    assert ran.returncode == 0 and "3.00x" in ran.stdout and "1_b: a note" in ran.stdout and ran.stderr == ""
    merge, written = (tmp_path / "results.json").read_bytes(), (tmp_path / "report.md").read_text()
    assert [row.step for row in read_run(tmp_path / "results.json").steps] == ["0_a", "1_b"] and "3.00x" in written
    for path in tmp_path.glob("*_*.json"):
        path.unlink()
    assert runs.report(tmp_path, blocked=["torch"]).returncode == 0, "no torch is needed"
    assert (tmp_path / "report.md").read_text() == written and (tmp_path / "results.json").read_bytes() == merge


def test_bad_arguments_are_one_line_and_exit_code_2():
    for words in ((), ("--bogus",), ("--compare", "a"), ("a", "b"), ("/absent",)):
        ran = runs.report(*words)
        assert ran.returncode == 2 and ran.stderr.count("\n") == 1 and "error: " in ran.stderr


@pytest.mark.parametrize("name", ["package.json", "plan.json", "results.json"])
def test_a_folder_without_a_readable_record_is_one_line_and_stays_as_it_is(tmp_path, name):
    (tmp_path / name).write_text('{"name": "precious"}')
    ran = runs.report(tmp_path)
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_cannot_be_written_is_one_line_and_exit_code_1(tmp_path):
    runs.write_rows(tmp_path, runs.step("0_a"))
    (tmp_path / "report.md").mkdir()
    ran = runs.report(tmp_path)
    assert ran.returncode == 1 and "100.0" in ran.stdout and ran.stderr.count("\n") == 1


def test_the_exit_code_says_whether_every_row_is_as_it_should_be(tmp_path):
    for status, code in (("failed", 1), ("interrupted", 1), ("skipped", 0)):
        runs.write_rows(tmp_path, runs.step("0_a"), runs.step("1_b", status=status, reason="x"))
        assert runs.report(tmp_path, blocked=["matplotlib"]).returncode == code
    runs.write_plan(tmp_path, "0_a", "1_b", "2_c", left_out=["2_c"])
    ran = runs.report(tmp_path, blocked=["matplotlib"])
    assert ran.returncode == 0 and "not run" in ran.stdout
    runs.write_plan(tmp_path, "0_a", "1_b", "2_c", "3_d", left_out=["2_c"])
    assert runs.report(tmp_path, blocked=["matplotlib"]).returncode == 1


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_without_what_draws_the_table_stands_and_one_line_says_what_is_missing(tmp_path, package):
    runs.write(runs.cpu(), tmp_path)
    (tmp_path / "report.html").write_text("of an earlier report")
    ran = runs.report(tmp_path, blocked=[package])
    (said,) = [line for line in ran.stdout.splitlines() if "no report.html" in line]
    assert ran.returncode == 0 and package in said and "300.0" in ran.stdout and ran.stderr == ""
    assert (tmp_path / "report.md").exists() and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("package", ["msgspec", "tabulate"])
def test_without_msgspec_or_tabulate_a_plain_table_prints(tmp_path, package):
    runs.write_rows(tmp_path, runs.step("0_a\x1b[31m"), runs.step("1_b", status="oom", reason="too\x1b large"))
    runs.write_rows(tmp_path / "peers", runs.step("a_peer", 77.0))
    (tmp_path / "2_c.json").write_text("[" * 200_000)
    ran = runs.report(tmp_path, blocked=[package])
    assert "100.0" in ran.stdout and "too  large" in ran.stdout and "2_c.json cannot be read" in ran.stdout
    assert package in ran.stdout and "\x1b" not in ran.stdout and ran.stderr == ""
    assert "a_peer" in ran.stdout and ran.returncode == 1, "a row without a time is no success"


def test_no_locale_optimization_or_matplotlibrc_ends_the_report(tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nfont.family: no such font\nbackend: tkagg\n")
    odd = {"PYTHONOPTIMIZE": "2", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder, row = tmp_path / "run", runs.step("0_b\u00e9", note="caf\u00e9 \u4e2d")
    runs.write(runs.run(row, device="\u2603"), folder)
    ran = runs.report(folder, MATPLOTLIBRC=str(tmp_path / "matplotlibrc"), **odd)
    assert ran.returncode == 0 and "100.0" in ran.stdout and "0_b" in ran.stdout and ran.stderr == ""
    assert "no report.html" not in ran.stdout and (folder / "speedup.png").exists()
    assert "caf\u00e9 \u4e2d" in (folder / "report.html").read_text("utf-8")
    compared = runs.report("--compare", folder, folder, **odd)
    assert compared.returncode == 0 and "1.000" in compared.stdout


def test_the_folder_of_a_sweep_is_one_line_that_names_its_command(tmp_path, monkeypatch, refused):
    (tmp_path / "sweep.json").write_text("[]")
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    assert "python -m report.sweep_page" in refused(report_main.main)
