"""The plan of recordings, with stub commands in a repository of its own: pieces, limits, resuming, taking."""

import json
import shutil
import sys
from dataclasses import asdict

import pytest
import runs
from conftest import ROOT, git

from anatomy import __main__ as anatomy
from anatomy import ablations, parity
from common import arguments
from ladder import __main__ as ladder
from ladder import plan
from report import recordings
from report.load import RecordError

STUB = f"""#!{sys.executable}
import json, os, pathlib, signal, subprocess, sys, time
def git(*words):
    return subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()
words, is_run = sys.argv[1:], sys.argv[0].endswith("run_all.sh")
with open("results/calls", "a") as file:
    print(*words, file=file)
place = pathlib.Path(words[words.index("--output") + 1] if "--output" in words else "results/run/results.json")
place.parent.mkdir(parents=True, exist_ok=True)
def leave(code):
    print("written to results/run" if is_run else "done", flush=True)
    sys.exit(code)
signal.signal(signal.SIGTERM, lambda *_: leave(130))
while "slow" in words or "together" in words and len(list(pathlib.Path("results").glob("began-*"))) < 2:
    pathlib.Path(f"results/began-{{os.environ.get('CUDA_VISIBLE_DEVICES')}}").touch()
    time.sleep(0.02)
if "study" in words:
    study = json.loads(place.read_text())
    study["runs"].append(study["runs"][0] | {{"seed": 2, "commit": git("rev-parse", "HEAD")}})
    place.write_text(json.dumps(study))
    leave(0)
run = json.loads(pathlib.Path("results/template.json").read_text())
of = {{name: os.environ.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "LADDER_BESIDE")}}
run["environment"] |= {{"commit": git("rev-parse", "HEAD"), "variables": of}}
place.write_text(json.dumps(run) if is_run or place.name == "results.json" else json.dumps(
    {{"environment": run["environment"], "words": words}}))
if "killed" in words:
    os.kill(os.getpid(), signal.SIGKILL)
leave(1 if "broken" in words else 0)
"""
MACHINES = "[machines]\nbox = 1 GPU\nbox-x2 = 2 GPU\nlaptop = 0 chip\n"


@pytest.fixture
def tree(tmp_path, monkeypatch, request):
    """A repository with stubs and, as its plan, what a test names below `plan`."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "common").mkdir()
    (tmp_path / "0_x.py").write_text("before\n")
    (tmp_path / ".gitignore").write_text("/results/\n")
    (tmp_path / "docs" / "results" / recordings.PLAN).write_text(MACHINES + request.param)
    for name in ("run_all.sh", "stub.py"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    git(tmp_path, "init", "-q")
    commit_all(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "template.json").write_text(json.dumps(asdict(runs.run(runs.step("0_x")))))
    monkeypatch.setattr(plan, "ROOT", tmp_path)
    monkeypatch.setattr(plan, "RESULTS", tmp_path / "docs" / "results")
    monkeypatch.setattr(plan, "machine", lambda: recordings.Machine(1, "GPU"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def commit_all(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")


def calls(tree):
    path = tree / "results" / "calls"
    return path.read_text().splitlines() if path.exists() else []


def planned(text):
    return pytest.mark.parametrize("tree", [text], indirect=True, ids=["plan"])


@planned("""
[box/run]
pieces = 4 ./run_all.sh --fast
[box/run/more.json]
pieces =
    1 python stub.py first
    2 python stub.py "the second,
        in two lines"
[box/broken.json]
pieces = 1 python stub.py broken
[box-x2/run]
pieces = 5 ./run_all.sh
[laptop/run]
pieces = 6 ./run_all.sh
""")
def test_what_fits_the_machine_is_recorded_once_and_put_into_place(tree, capsys):
    assert plan.main(["--status"]) == 0 and calls(tree) == []
    said = capsys.readouterr().out
    assert "to record here, on GPU: 3 of 5, about 0 minutes" in said
    assert "needs 2 x GPU" in said and "needs 0 x chip" in said
    assert plan.main([]) == 1
    said, ran = capsys.readouterr().out, calls(tree)
    assert "box/broken.json, piece 1 of 1: failed: done (see" in said and "2 of 3 recorded" in said
    assert [line.partition(" --output")[0] for line in ran] == [
        "--fast", "first", "the second, in two lines", "broken"
    ]  # fmt: skip
    assert plan.main([]) == 1 and calls(tree)[len(ran) :] == ran[-1:], "only what failed is run again"
    assert git(tree, "status", "--porcelain") == "", "what is recorded leaves the tree clean"
    (folder,) = (tree / "results" / "recordings").iterdir()
    capsys.readouterr()
    assert plan.main(["--take", str(folder)]) == 0
    assert "2 of 5 recordings are in" in capsys.readouterr().out
    results = tree / "docs" / "results" / "box" / "run"
    assert sorted(path.name for path in results.iterdir()) == ["more.json", "results.json"]
    commit_all(tree)  # another commit, the same code: nothing to do
    ran = calls(tree)
    assert plan.main(["--only", "ox/run"]) == 0 and calls(tree) == ran
    (tree / "0_x.py").write_text("after\n")
    commit_all(tree)
    assert plan.main(["--only", "box/run"]) == 0 and len(calls(tree)) == len(ran) + 1, "the one of exactly this name"
    assert plan.main(["--only", "ox/run"]) == 0 and len(calls(tree)) == len(ran) + 3, "all that have it in their names"
    capsys.readouterr()
    plan.main(["--status"])
    assert "the code has changed since" in capsys.readouterr().out


@planned("[box/run]\npieces = 1 ./run_all.sh slow\n[box/next.json]\npieces = 5 python stub.py\n")
def test_a_command_is_given_up_at_the_limit_and_goes_on_in_the_next_call(tree, capsys, monkeypatch):
    monkeypatch.setattr(plan, "GRACE_S", 58)  # of the one minute
    assert plan.main(["--minutes", "1"]) == 0
    said = capsys.readouterr().out
    assert "given up after" in said and "the next call goes on with it" in said and "0 of 2 recorded" in said
    assert calls(tree) == ["slow"], "the next one did not fit"
    assert plan.main(["--minutes", "1", "--only", "run"]) == 0
    assert calls(tree) == ["slow", "--resume results/run"] and "1 of 1 recorded" in capsys.readouterr().out


@planned("[box/largest-batch.json]\npieces = 1 ./run_all.sh slow --batch-size max\n")
def test_a_search_for_the_largest_batch_cannot_go_on_and_is_repeated(tree, capsys, monkeypatch):
    monkeypatch.setattr(plan, "GRACE_S", 58)
    for _ in range(2):
        assert plan.main(["--minutes", "1"]) == 0 and "the next call repeats it" in capsys.readouterr().out
    assert calls(tree) == ["slow --batch-size max"] * 2


@planned("[box/run]\npieces = 1 ./run_all.sh broken\n")
def test_a_row_without_memory_is_a_result_and_one_that_failed_is_none(tree, capsys):
    template, full = tree / "results" / "template.json", runs.step("0_x", status="oom", reason="full")
    late = runs.step("peers/late", status="timeout", reason="late")
    for rows, peers, code, said in (
        ([runs.step("0_x")], [], 1, "failed: written to results/run"),
        ([full, runs.step("1_x", status="failed", reason="why")], [], 1, "failed: 1_x: failed: why (see"),
        ([full], [late], 1, "failed: peers/late: timeout: late (see"),
        ([full, runs.step("1_x")], [], 0, "1 of 1 recorded"),
    ):
        template.write_text(json.dumps(asdict(runs.run(*rows, peers=peers))))
        shutil.rmtree(tree / "results" / "recordings", ignore_errors=True)  # a run that failed would be resumed
        assert plan.main([]) == code and said in capsys.readouterr().out


@planned("[box/x.json]\npieces = 1 nosuchcommand\n[box/y.json]\npieces = 1 python stub.py\n")
def test_a_command_that_is_not_there_fails_alone(tree, capsys):
    assert plan.main([]) == 1
    said = capsys.readouterr().out
    assert "box/x.json, piece 1 of 1: failed: " in said and "nosuchcommand" in said and "1 of 2 recorded" in said


@planned("[box/x.json]\npieces =\n    1 python stub.py\n    1 python stub.py killed\n")
def test_a_command_that_is_killed_leaves_no_recording(tree, capsys):
    assert plan.main([]) == 1
    assert "piece 2 of 2: failed: killed by signal 9" in capsys.readouterr().out


@planned("""
[box/a.json]
pieces = 1 python stub.py together
alone = no
[box/b.json]
pieces = 1 python stub.py together
alone = no
[box/busy]
pieces = 1 ./run_all.sh
busy = 1
""")
def test_two_gpus_record_side_by_side_and_the_record_says_what_ran_beside_it(tree, refused, monkeypatch):
    assert "needs two GPUs" in refused(plan.main, ["--side-by-side"]) and calls(tree) == []
    monkeypatch.setattr(plan, "machine", lambda: recordings.Machine(2, "GPU"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(plan.os, "cpu_count", lambda: 1)
    assert plan.main(["--side-by-side"]) == 0
    (folder,) = (tree / "results" / "recordings").iterdir()
    records = [json.loads((folder / "box" / name).read_text()) for name in ("a.json", "b.json", "busy/results.json")]
    of = [record["environment"]["variables"] for record in records]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in of[:2]} == {"0", "1"}
    assert all("another recording" in one["LADDER_BESIDE"] for one in of[:2])
    assert of[2]["LADDER_BESIDE"] == "1 processes that compute without end"


@planned("[box/anatomy]\npieces = 1 python stub.py all\n")
def test_pages_that_are_taken_lie_beside_earlier_ones_under_one_index(tree):
    environment = asdict(runs.run(commit=git(tree, "rev-parse", "HEAD")).environment) | {"device": "GPU"}
    page = {"seconds": 1.0, "checks": [], "sentences": [], "environment": environment}
    for folder, name in (("docs/results", "roofline"), ("results/one", "fusion")):
        place = tree / folder / "box" / "anatomy"
        place.mkdir(parents=True)
        (place / "anatomy.md").write_text(f"# Anatomy on GPU\n\n{name}\n")
        (place / f"{name}.json").write_text(json.dumps(page))
    commit_all(tree)
    assert plan.main(["--take", "results/one"]) == 0
    index = (tree / "docs" / "results" / "box" / "anatomy" / "anatomy.md").read_text()
    assert "[fusion](fusion.md)" in index and "[roofline](roofline.md)" in index


@planned("[box/a/parity.json]\npieces = 1 python stub.py study\n\n[box/a]\npieces = 1 ./run_all.sh\n")
def test_a_study_that_was_interrupted_goes_on_at_a_later_commit_of_the_same_code(tree, capsys):
    run = {"row": "0_x", "script": "0_x", "kind": "step", "status": "ok", "heldout_loss": 1.0, "loss": [1.0]}
    run |= {"seed": 1, "commit": git(tree, "rev-parse", "HEAD")}
    rows = [run | {"row": "1_x"}, run, run | {"seed": 2}]
    environment = asdict(runs.run(commit=run["commit"]).environment) | {"device": "GPU"}
    path = tree / "docs" / "results" / "box" / "a" / "parity.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"command": "", "environment": environment, "workload": {}, "runs": rows}))
    commit_all(tree)
    assert plan.main(["--status"]) == 0 and ", unfinished" in capsys.readouterr().out
    assert plan.main(["--only", "box/a/parity.json"]) == 0 and len(calls(tree)) == 1
    (done,) = (tree / "results" / "recordings").glob("*/box/a/parity.json")
    found = json.loads(done.read_text())["runs"]
    (tree / "x").symlink_to(done.parent.parent.parent)
    assert plan.main(["--take", "x"]) == 0
    done.write_text(path.read_text().replace('"seed": 2', '"seed": 3'))
    assert plan.main(["--take", "x"]) == 1 and "holds runs there that it lacks" in capsys.readouterr().out
    assert json.loads(path.read_text())["runs"] == found, "a smaller study replaces no larger one"
    assert [one["seed"] for one in found] == [1, 1, 2, 2] and len({one["commit"] for one in found}) == 2


@planned("[box/run]\npieces = 1 ./run_all.sh\n")
def test_what_cannot_be_recorded_or_taken_is_one_line(tree, capsys, refused):
    assert "--only y: no recording" in refused(plan.main, ["--only", "y"])
    assert "holds no recording of this plan" in refused(plan.main, ["--take", "results"])
    (tree / "0_x.py").write_text("after\n")
    assert "the tree is not what is committed (0_x.py): commit first" in refused(plan.main, [])
    assert calls(tree) == []
    head = git(tree, "rev-parse", "HEAD")
    for wrong, said in (
        ({"commit": head, "dirty": True}, "with uncommitted changes, not of one alone"),
        ({"commit": "0" * 40}, "is not part of this history"),
        ({"commit": None}, "of commit unknown"),
        ({"commit": head, "device": "other GPU"}, "recorded on other GPU, not on GPU"),
    ):
        runs.write(runs.run(runs.step("0_x"), **wrong), tree / "results" / "from" / "box" / "run")
        assert plan.main(["--take", "results/from"]) == 1 and said in capsys.readouterr().out
    (tree / "results" / "from" / "box" / "run" / "results.json").write_text("{")
    assert plan.main(["--take", "results/from"]) == 1 and "not readable JSON" in capsys.readouterr().out
    assert not (tree / "docs" / "results" / "box").exists()
    for text, said in (
        ("[box/x]\npieces = ./run_all.sh\n", "[box/x] needs pieces"),
        ("[other/x]\npieces = 1 ./run_all.sh\n", "does not begin with a machine"),
        ("[box/../../x]\npieces = 1 ./run_all.sh\n", "does not begin with a machine"),
        ("[box/x]\npieces = 1 ls 'unclosed\n", "No closing quotation"),
        ("[box/x]\npeices = 1 ./run_all.sh\n", "unknown key peices"),
        ("[box/x]\npieces = 1 ./run_all.sh\n    2 ./run_all.sh\n", "can only be one"),
        ("box", "is no plan"),
    ):
        (tree / "wrong.ini").write_text(MACHINES + text)
        assert said in refused(plan.main, ["wrong.ini", "--status"])


@planned("")
def test_what_has_changed_since_a_commit_is_found_and_where_git_cannot_tell_a_page_keeps_its_line(tree, tmp_path):
    commits, code = (git(tree, "rev-parse", "HEAD"),), recordings.CODE
    record = runs.write(runs.run(runs.step("0_x"), commit=commits[0]), tree / "results" / "a") / "results.json"
    assert recordings.changed_since(tree, commits, code) == []
    assert "The code of the scripts and of `common/` is that of this run" in recordings.readme_lines(tree, record)[0]
    (tree / "README.md").write_text("x\n")
    (tree / "common" / "new.py").write_text("x\n")
    assert recordings.changed_since(tree, commits, code) == [], "no file that was there uses it"
    (tree / "0_x.py").write_text('"""A docstring."""\n\nbefore  # a comment\n')
    assert recordings.changed_since(tree, commits, code) == [], "the same code"
    for after in ("after\n", "before(\n"):
        (tree / "0_x.py").write_text(after)
        assert recordings.changed_since(tree, commits, code) == ["0_x.py"]
    (line,) = recordings.readme_lines(tree, record)
    assert line.startswith("The code of the scripts, or of `common/`, has changed since this run.")
    assert recordings.describe_files(["0_x.py", "common/new.py"]) == "`0_x.py`, files of `common/`"
    for unknown in (("0" * 40,), ()):
        assert recordings.changed_since(tree, unknown, code) is None
    assert recordings.changed_since(tree / "docs", commits, code) is None, "not a checkout of its own"
    (tree / "page.md").write_text(f"one\n{line}\ntwo\n")
    assert recordings.made_by_git(tree / "page.md", None) == [line]
    assert recordings.made_by_git(tree / "page.md", ["new"]) == ["new"]


@planned("[box/a]\npieces = 1 ./run_all.sh\n[box/b]\npieces = 1 ./run_all.sh\n")
def test_a_record_of_a_commit_that_the_history_lost_says_so_and_the_others_are_compared(tree):
    head, lost = git(tree, "rev-parse", "HEAD"), "0" * 40
    results = tree / "docs" / "results"
    for name, commit in (("a", head), ("b", lost)):
        runs.write(runs.run(runs.step("0_x"), commit=commit), results / "box" / name)
    first, *since = recordings.page_lines(tree, results)
    assert first.startswith("Of 2 planned recordings 0 are missing, 0 unfinished, and 0 are older")
    assert [line.split(" <!--")[0] for line in since] == [
        "- Since commit 0000000: not known, because it never became part of this history.",
        f"- Since commit {head[:7]}: nothing.",
    ]
    runs.write(runs.run(runs.step("0_x"), commit=lost), results / "box" / "a")
    assert recordings.page_lines(tree, results) is None, "no commit is there: the history is not that of the records"


@planned("[box/sweep.json]\npieces = 1 ./run_all.sh --sweep\n")
def test_a_sweep_is_asked_what_changed_since_it_ran_and_since_its_roofs_were_measured(tree):
    def committed(text):
        (tree / "common" / "passes.py").write_text(text)
        commit_all(tree)
        return git(tree, "rev-parse", "HEAD")

    (one,), cells = recordings.read_plan(tree / "docs" / "results" / recordings.PLAN), tree / "results" / "sweep.json"
    ran, predicted = committed("measured = 1\n"), committed("measured = 2\n")

    def changed(**said):
        cells.write_text(json.dumps([{"step": "0_x", "commit": ran} | said]))
        return recordings.changes(tree, [cells], one)

    assert changed() == {ran: ["common/passes.py"]} and not recordings.is_of_this_code(tree, [cells], one)
    assert changed(predicted_commit=predicted) == {ran: [], predicted: []}
    assert recordings.is_of_this_code(tree, [cells], one)
    (tree / "common" / "passes.py").write_text("measured = 3\n")
    assert changed(predicted_commit=predicted) == {ran: [], predicted: ["common/passes.py"]}


def test_records_of_variants_are_about_the_patches_of_their_rows_alone(tmp_path):
    study = tmp_path / "parity.json"
    study.write_text(
        json.dumps({"runs": [{"row": "dead MLP", "script": "2_sdpa"}, {"row": "2_sdpa", "script": "2_sdpa"}]})
    )
    machine, code = recordings.Machine(0, "CPU"), (*recordings.CODE, "peers")
    one = recordings.Recording("a/parity.json", machine, (recordings.Piece(1, "python -m anatomy.parity"),))
    assert one.code(ROOT, [study]) == (*code, "anatomy/variants/dead-mlp.patch") and one.code(ROOT, []) == code
    study.write_text(json.dumps({"variants": [{"name": "BF16 head", "script": "4_transformer_engine"}]}))
    one = recordings.Recording("a/x.json", machine, (recordings.Piece(1, "python -m anatomy.ablations"),))
    assert one.code(ROOT, [study]) == (*recordings.CODE, "anatomy/variants/bf16-head.patch")
    study.write_text(json.dumps({"variants": [{"name": "a variant that is gone", "script": "2_sdpa"}]}))
    assert one.code(ROOT, [study]) == (*recordings.CODE, "anatomy/variants"), "git then shows the patch that is gone"


def test_the_plan_of_this_tree_holds_commands_that_exist():
    listed = recordings.read_plan(ROOT / "docs" / "results" / recordings.PLAN)
    variants, experiments = ablations.variants(), {}
    for name, piece in [(one.name, piece) for one in listed for piece in one.pieces]:
        first, *words = plan.shlex.split(piece.command)
        if first == recordings.RUN_ALL:
            given, rest = ladder.build_parser().parse_known_args(words)
            ladder.rows_to_run(given.only, given.peers, ladder.build_parser())
            rest = [word for word in rest if word not in ("--batch-size", "max")] if "max" in rest else rest
        elif words[1:2] == ["anatomy.ablations"]:
            kinds = "--causes" in words, "--gpus" in words
            for wanted in words[words.index("--only") + 1 :]:
                assert ablations.chosen_variants(variants, [wanted], *kinds), f"{name}: {wanted}"
            rest = [word for word in words[2 : words.index("--only")] if word not in ("--causes", "--gpus", "2")]
        elif words[1:3] == ["anatomy", "all"]:
            run = words[3 : words.index("--limit")] if "--limit" in words else words[3:]
            assert {*run} <= {*anatomy.experiments()}, name
            experiments.setdefault(name, set()).update(run or anatomy.experiments())
            continue
        elif words[1:2] == ["anatomy.parity"]:
            given, rest = parity.build_parser().parse_known_args([*words[2:], "--output", "x"])
            parity.rows_named(given.rows)
        else:
            continue
        arguments.build_parser(ROOT / "0_baseline.py", None).parse_args(rest)
    assert all(found == {*anatomy.experiments()} for found in experiments.values()) and len(experiments) == 2
    with pytest.raises(RecordError, match="cannot be read"):
        recordings.read_plan(ROOT / "none.ini")


def test_the_plan_trains_every_fault_beside_its_script_and_every_row_with_the_same_seeds():
    trained = {}
    for one in recordings.read_plan(ROOT / "docs" / "results" / recordings.PLAN):
        for piece in one.pieces:
            words = plan.shlex.split(piece.command)
            if words[1:3] == ["-m", "anatomy.parity"]:
                given, rest = parity.build_parser().parse_known_args([*words[3:], "--output", "x"])
                for row in parity.rows_named(given.rows):
                    work = one.name.partition("/")[0], *rest
                    trained.setdefault(work, {}).setdefault(row, []).extend(given.seeds)
    assert len(trained) == 2, "one study on a GPU, one on a CPU"
    for rows in trained.values():
        assert len({tuple(sorted(seeds)) for seeds in rows.values()}) == 1 and len(next(iter(rows.values()))) >= 3, rows
        faults = [row for row in rows if row.kind == "mutation"]
        assert {fault.script for fault in faults} <= {row.script for row in rows if row.kind == "step"}
        assert sum(fault.script == "2_sdpa" for fault in faults) == 3
