"""Reports of one run of every kind against reviewed texts; figures, verdicts and statistics against numbers
from the head."""

import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, replace

import goldens
import matplotlib
import numpy as np
import pytest
import runs
from conftest import run_python

from common.kernels import in_words
from common.record import Proof, Row, Settings
from report import (
    ablations,
    bars,
    cells,
    changes,
    charts,
    compare,
    doubts,
    parity,
    printers,
    proof,
    scaling,
    sections,
    sentences,
    sweep,
    table,
)
from report.derive import derive, derive_study
from report.load import RecordError, load
from report.peaks import peak_flops_per_s
from report.promises import contradiction

SLICE = runs.ROOT / "docs" / "results" / "h200" / "gpt3-6.7b-slice"


@pytest.fixture(scope="module")
def recorded():
    return derive(load(SLICE))


# --- one run of every kind ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", goldens.KINDS, ids=lambda kind: kind.__name__)
def test_a_report_says_what_was_reviewed(kind):
    """tests/goldens.py writes these texts anew."""
    assert goldens.text_of(kind) == (goldens.DATA / f"{kind.__name__}.txt").read_text()


def test_a_figure_that_is_not_recorded_is_a_dash_and_no_error():
    line = derive(runs.run(runs.row("x", status="oom"))).lines[0]
    properties = [
        name for name, kind in vars(type(line)).items() if hasattr(kind, "__get__") and name[0] != "_"
    ]
    values = {
        name: getattr(line, name)
        for name in properties
        if name not in ("range_ms", "all_passes", "slowed", "slow_launch", "capability")
    }
    assert not any(value for name, value in values.items() if name not in ("name", "failure", "passes")), (
        values
    )


@pytest.mark.parametrize("kind", [goldens.ok, goldens.model, goldens.ended], ids=lambda kind: kind.__name__)
def test_a_page_asks_for_nothing_and_its_links_lead_to_sections(kind):
    html = printers.html(sections.of(kind()))
    assert "http" not in re.sub(r"xmlns\S+|https://[^\s\"]*matplotlib[^\s\"]*", "", html)
    ids = re.findall(r'<section id="([^"]+)"', html)
    assert set(re.findall(r'<a href="#([^"]+)"', html)) == set(ids) and len(ids) > 3


def test_bars_are_to_scale_the_longest_as_wide_as_the_drawing(recorded):
    drawn, _ = bars.draw(bars.ladder_bars(recorded), 100)
    ends = {}
    for x, y, width in re.findall(r'<rect x="([\d.]+)%" y="(\d+)" width="([\d.]+)%"', drawn):
        ends[y] = float(x) + float(width)
    times = [line.ms for line in recorded.steps]
    assert [*ends.values()] == pytest.approx([100 * ms / times[0] for ms in times], abs=0.01)


def test_a_picture_has_the_lines_of_the_scripts_and_nothing_of_a_record_is_markup(recorded):
    text = bars.picture(recorded, bars.NARROW)
    code = [line.strip() for line in re.findall(r">\+ (.*?)</text>", text.replace(bars.NO_BREAK, " "))]
    sources = "\n".join(line.row.source for line in recorded.steps)
    assert len(code) > 15 and all(line.rstrip("…") in sources or line.startswith("... ") for line in code)
    odd = runs.row(runs.HOSTILE, source=f"x = 1\n{runs.HOSTILE}\n", profile=runs.profile(100.0))
    drawn = bars.picture(derive(runs.run(runs.row("0_x"), odd)))
    assert "<script" not in drawn and "\x1b" not in drawn


@pytest.mark.skipif(
    f"matplotlib=={matplotlib.__version__}" not in (runs.ROOT / "requirements.txt").read_text(),
    reason="another matplotlib draws other bytes",
)
def test_the_site_is_of_the_record(recorded):
    assert (runs.ROOT / "docs" / "index.html").read_text() == printers.html(sections.of_run(recorded))


def test_the_pictures_of_readme_and_the_reports_beside_records_are_of_the_records(recorded):
    assert (SLICE / "steps-narrow-dark.svg").read_text() == bars.picture(
        recorded, bars.NARROW, "#e6edf3", "#0d1117"
    )
    folders = sorted(path.parent for path in SLICE.parent.parent.glob("*/*/results.json"))
    assert len(folders) > 20
    for folder in folders:
        text = printers.markdown(sections.of(load(folder)))
        assert (folder / "report.md").read_text() == text, f"{folder}: docs/renew.sh writes it"


# --- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("around", "busy"),
    [
        ((20.0, 20.0), False),
        ((21.5, 21.9), False),
        ((22.5, 22.5), True),
        ((20.0, 31.0, 31.0, 31.0, 20.0), True),  # a burst in the middle, on a CPU
        ((20.0, 20.0, 31.0, 20.0, 20.0), False),  # one that less than half of the steps can have felt
    ],
)
def test_slow_reference_work_is_a_busy_machine_and_marks_its_row_and_what_is_divided_by_it(around, busy):
    rows = [runs.row(runs.STEPS[k], 100.0 - k, product_ms=[20.0] * 2, copy_ms=[20.0] * 2) for k in range(3)]
    rows[1].product_ms, rows[1].copy_ms = [*around], [*around]
    figures = derive(runs.run(*rows))
    assert [row["ms"] for row in table.main_rows(figures)] == ["100.0", "99.0" + "?" * busy, "98.0"]
    assert [*table.main_rows(figures)[2].values()][4:6] == ["1.01" + "?" * busy, "1.02"]
    said = [
        text
        for text in doubts.remarks(figures)
        if re.match("The machine was busy: .* around 1_cublas .* close other", text)
    ]
    assert bool(said) is busy is bool(doubts.busy(figures))


def test_a_drift_of_half_the_steps_and_kernels_that_differ_mark_a_row():
    steady, drifting = (runs.row("2_sdpa", step_ms=[100.0] * 2 + [ms] * 2) for ms in (100.0, 106.0))
    faster = runs.row("2_sdpa", step_ms=[106.0] * 2 + [100.0] * 2)
    rows = [replace(steady, passes=[steady, other]) for other in (steady, drifting, faster)]
    said = ["", *(f"the second half of the steps took over 5% {word} time" for word in ("more", "less"))]
    assert ["; ".join(derive(runs.run(row)).lines[0].doubts) for row in rows] == said
    flash = replace(runs.SETTINGS["3_compile"], attention_kernel="flash")
    figures = derive(
        runs.run(runs.row("1_cublas"), runs.row("2_sdpa"), runs.row("3_compile", 50.0, settings=flash))
    )
    assert [line.mark for line in figures.lines] == ["", "?", "?"] and "cudnn and flash" in doubts.remarks(
        figures
    )[0]
    said = "No verdict: 3_compile has the shortest time, and ?: attention ran as cudnn and flash"
    assert sentences.headline(figures) == said
    theirs = replace(runs.workload(), model="user.py")
    in_fp32 = replace(runs.SETTINGS["0_baseline"], attention_kernel="efficient")
    rows = [runs.row("0_fp32", settings=in_fp32), runs.row("2_sdpa", changes=["AMP"])]
    figures = derive(runs.run(*rows, work=theirs))
    assert [line.mark for line in figures.lines] == ["", ""], "FP32 and BF16 have kernels of their own"


@pytest.mark.parametrize(
    ("fields", "doubted"),
    [
        ({"launch_us": [15.0, 15.0]}, True),
        ({"launch_us": [11.0, 11.0]}, False),
        ({"launch_us": [0.0, 0.0]}, False),
        ({"launch_us": [15.0, 15.0], "settings": runs.SETTINGS["3_compile"]}, False),
        ({"launch_us": [15.0, 15.0], "profile": runs.profile(100.0)}, True),
    ],
)
def test_a_host_that_is_slow_at_launching_marks_a_row_that_waits_for_it(fields, doubted):
    if "profile" in fields:
        fields["profile"].idle_ms = 10.0
    waits = {"step_ms": [80.0, 90.0, 100.0]} if "profile" not in fields else {}
    other = runs.row("1_cublas", launch_us=[6.0, 6.0])
    figures = derive(runs.run(other, runs.row("2_sdpa", **waits, **fields)))
    assert ("launching" in "".join(figures.lines[1].doubts)) is doubted


def test_the_row_that_others_are_compared_with_is_known_by_what_ran():
    mixed, fp32 = runs.SETTINGS["2_sdpa"], replace(runs.SETTINGS["2_sdpa"], amp_dtype="float32")
    rows = [runs.row("0_x"), runs.row("1_x", settings=fp32), runs.row("2_x", settings=mixed)]
    compiled = runs.row("3_x", settings=runs.SETTINGS["3_compile"])
    assert derive(runs.run(*rows, compiled)).plain.name == "2_x"
    assert derive(runs.run(*rows[:2], replace(rows[2], status="oom"))).plain.name == "1_x", "no row is mixed"
    assert derive(runs.run(rows[0], compiled)).plain is None
    assert [*table.main_rows(derive(runs.run(*rows)))[0]][4:7] == ["x above", "x 0_x", "x 2_x"]


def test_what_the_losses_are_is_told_of_every_kind_of_row():
    fp8, some = runs.SETTINGS["4_transformer_engine"], {"loss": [4.0] * 8}
    plain = runs.row("3_x", rehearsed=10, **some)
    rule = lambda *rows: sentences.loss_rule(derive(runs.run(*rows)))  # noqa: E731
    assert rule(plain).endswith("in nats, after a rehearsal of 10 steps, which was undone")
    assert rule(plain, runs.row("4_x", rehearsed=10, settings=fp8, **some)).endswith(
        "FP8 keeps the scales that it found there"
    )
    for steps, said in ((3, True), (9, True), (10, False)):
        told = rule(plain, runs.row("4_x", rehearsed=steps, settings=fp8, **some))
        assert ("may be too few" in told) is said
    windows = rule(runs.row("3_x", loss=[4.0, 3.0, 2.0], loss_every=4))
    assert "training steps 1 to 10," in windows, "the third window of four steps is of two"
    unknown = derive(replace(runs.run(plain), workload=None))
    assert "training steps 4 to 8" in sentences.loss_rule(unknown)
    assert (
        "its loss lags" in rule(plain, runs.row("4_x", settings=fp8, **some))
        and rule(runs.row("x", loss=[])) == ""
    )


def test_a_row_that_does_not_learn_says_so():
    losses = {
        "a": [4.0, 4.3, *[2.0] * 8],
        "b": [4.0, 4.5, *[2.0] * 8],
        "c": [4.0, *[3.1] * 9],
        "d": [4.0, 3.9],
    }
    figures = derive(runs.run(*(runs.row(name, loss=loss) for name, loss in losses.items())))
    notes = [line.note.partition(":")[0] for line in figures.lines]
    assert notes == ["", "did not learn as it should", "hardly learned", ""]


# --- tables and sentences -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "said"),
    [
        (
            (2000, 400, 200, 150, 100),
            "4_transformer_engine: 2.0 times faster than AMP + SDPA, 20 times faster than FP32. "
            "FP8 pays here: 1.50 x",
        ),
        (
            (300, 100, 30, 20, 25),
            "3_compile: 1.5 times faster than AMP + SDPA, 15 times faster than FP32. "
            "FP8 does not pay here: 0.80 x",
        ),
        ((300, 100, 30, 28), "3_compile: 1.07 times faster than AMP + SDPA, 11 times faster than FP32"),
        ((300, 100), "1_cublas: 3.0 times faster than FP32"),
        ((100, 99.94), "1_cublas: not clearly faster than FP32"),
        ((300,), "One training step of 0_baseline: 300.0 ms"),
        ((), "No step has a time"),
    ],
)
def test_the_headline_compares_the_fastest_step_with_what_a_reader_has(ms, said):
    assert sentences.headline(derive(runs.ladder(*ms))) == said


def test_no_gain_is_told_of_a_cpu_or_over_a_row_that_may_be_wrong():
    run = runs.ladder(300, 100, 30)
    assert sentences.headline(derive(run)) == "2_sdpa: 10 times faster than FP32"
    run.rows[0].step_ms = [300.0, 300.0, 400.0, 400.0]
    assert sentences.headline(derive(run)) == "One training step of 2_sdpa: 30.0 ms"
    run.environment.device_type = "cpu"
    assert sentences.headline(derive(run)) == sentences.CPU_SHOWS


def test_a_contradiction_names_its_cause():
    compiled = Settings(amp_dtype="float32", float32_matmul_precision="highest", compiled=True)
    fp32 = Settings("float32", "high")
    noted = Row("1_cublas", settings=fp32, note="FP32, because this CPU does not multiply BF16")
    assert not contradiction(noted, True, {}) and "AMP did not run" in contradiction(
        replace(noted, note=None), True, {}
    )
    assert contradiction(Row("0_fp32", settings=compiled), False, {}).endswith(
        "(model() returns a compiled model)"
    )


@pytest.mark.parametrize(
    ("step", "changes", "said"),
    [
        ("0_baseline", {"float32_matmul_precision": "high"}, "TF32 ran too"),
        ("1_cublas", {"amp_dtype": "float32"}, "AMP did not run"),
        (
            "2_sdpa",
            {"attention_kernel": "by hand"},
            "fused attention did not run (attention ran as by hand, whatever was asked)",
        ),
        (
            "2_sdpa",
            {"attention_kernel": "math"},
            "fused attention did not run (attention ran as math, perhaps because of dropout or a mask)",
        ),
        ("3_compile", {"compiled": False}, "compile did not run"),
        ("4_transformer_engine", {"fp8_recipe": None}, "FP8 did not run"),
        ("2_sdpa", {"attention_kernel": None, "amp_dtype": None}, ""),  # not observed
        ("5_mine", {"compiled": False}, ""),
    ],
)
def test_a_step_whose_settings_deny_its_name_is_marked(step, changes, said):
    settings = replace(runs.SETTINGS.get(step, runs.SETTINGS["2_sdpa"]), **changes)
    (line,) = derive(runs.run(runs.row(step, settings=settings))).lines
    assert line.doubts == ([f"its name is not what ran: {said}"] if said else [])
    figures = derive_study(runs.study("ablations", {"a patch of it": line.run}))
    assert not figures["a patch of it"].lines[0].doubts, "a patched script may do another thing"


def test_the_headline_tells_whether_fp8_pays_also_where_the_first_row_is_the_fastest():
    run = runs.run(runs.row("3_compile", 20.0), runs.row("4_transformer_engine", 25.0))
    said = "One training step of 3_compile: 20.0 ms. FP8 does not pay here: 0.80 x"
    assert sentences.headline(derive(run)) == said


def test_numbers_keep_their_sign_unless_they_are_zero():
    written = [cells.number(value, "+.1%") for value in (-0.012, 0.012, -0.0001, None)]
    assert written == ["-1.2%", "+1.2%", "0.0%", "-"] and cells.number(-0.01) == "0.0"
    assert [cells.milliseconds(ms) for ms in (0.0412, 9.876, 10.0, 1234.5)] == [
        "0.041",
        "9.88",
        "10.0",
        "1,234.5",
    ]
    assert [cells.three_digits(value) for value in (7.6612, 92.4, 145.2)] == ["7.66", "92.4", "145"]


def test_two_runs_are_compared_by_times_only_where_the_work_is_the_same(tmp_path):
    a = runs.write(tmp_path / "a", runs.ladder(300, 100, commit="abcdef0-dirty"))
    b = runs.write(
        tmp_path / "b", runs.ladder(150, 100, work=runs.workload(steps=50), problems=["rows differ in x"])
    )
    c = runs.write(tmp_path / "c", runs.ladder(150, 30, work=runs.workload(batch_size=9)))
    same, other = (compare.compare(a, of)[0].splitlines() for of in (b, c))
    assert "differs in steps" in same[2] and same[6].split()[1:] == [
        "300.0",
        "150.0?",
        "2.00?",
        *("0.500?", "1.000", "1.000"),
        "1.00",
        "1.00?",
    ]
    assert same[0][-8:] == " changes" and same[1][-7:] == "abcdef0" and same[-1] == "B: rows differ in x"
    assert "differs in batch_size" in other[2] and other[7].split() == [
        "1_cublas",
        "100.0",
        "30.0",
        "3.00",
        "5.00",
    ]
    d = runs.write(tmp_path / "d", runs.run(runs.row("9_x")))
    with pytest.raises(RecordError, match="no row in common"):
        compare.compare(a, d)
    e = runs.write(tmp_path / "e", runs.run(runs.row("0_baseline", 300.0), runs.row("5_mine", 9.0)))
    assert compare.compare(a, e)[0].splitlines()[3:5] == [
        "Only A has a time of 1_cublas.",
        "Only B has a time of 5_mine.",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"step_ms": [102.0] * 3}, None),
        ({"step_ms": [104.0] * 3}, "equal cards 1.040, not within 0.97 and 1.03"),
        ({"step_ms": [96.0] * 3}, "equal cards 0.960, not within 0.97 and 1.03"),
        ({"peak_bytes": 4 * 2**30}, "peak 1.333, not within 0.97 and 1.03"),
        ({"loss": [1.1 * loss for loss in runs.LEARNED]}, "loss 1.100, not within 0.97 and 1.03"),
        ({"peak_bytes": None}, "it has no peak of memory"),
        ({"loss": []}, "it has no loss"),
        (
            {"proof": Proof("0_baseline", False, 1.0, 0.5, "w", 1.0)},
            "it did other work than the run's first row",
        ),
        ({"code_sha256": "other"}, "it is of other code"),
        (
            {"settings": replace(runs.SETTINGS["1_cublas"], attention_kernel="math")},
            "other settings: attention_kernel",
        ),
        # A host that launches 1.3 times as slowly excuses as much more time; one 1.2 times as slow does not.
        ({"step_ms": [130.0] * 3, "launch_us": [13.0], "idle_ms": 13.0}, None),
        (
            {"step_ms": [110.0] * 3, "launch_us": [12.0], "idle_ms": 11.0},
            "equal cards 1.100, not within 0.97 and 1.03",
        ),
    ],
)
def test_a_second_run_bears_out_the_first_or_each_reason_is_a_line(fields, said, tmp_path):
    a, b = runs.ladder(300, 100), runs.ladder(300, 100)
    a.rows[1].launch_us = [10.0]
    fields, profile = dict(fields), b.rows[1].profile
    profile.idle_ms = fields.pop("idle_ms", profile.idle_ms)
    b.rows[1] = replace(b.rows[1], **{"launch_us": [10.0]} | fields)
    a, b = runs.write(tmp_path / "a", a), runs.write(tmp_path / "b", b)
    text, is_borne_out = compare.compare(a, b, 0.03)
    expected = f"B does not bear out A: 1_cublas: {said}" if said else "B bears out A"
    assert text.splitlines()[-1] == expected and is_borne_out == (said is None)
    assert compare.compare(a, b)[1], "without a bound nothing is asked"
    b.joinpath("results.json").unlink()
    runs.write(b, runs.ladder(300))
    assert compare.compare(a, b, 0.03)[0].endswith("B does not bear out A: 1_cublas has no time in it")


# --- drawings and code ----------------------------------------------------------------------------------


def test_a_record_that_leaves_out_defaults_is_the_same_work(tmp_path):
    whole, short = runs.ladder(10.0, 5.0), asdict(runs.ladder(10.0, 5.0))
    for name in ("model", "unit", "gpus", "parallel"):
        del short["workload"][name]
    places = [runs.write(tmp_path / "whole", whole), runs.write(tmp_path / "short", short)]
    for order in (places, places[::-1]):
        assert "The workload is the same" in compare.compare(*order)[0]
    short["rows"][0]["settings"] = {"compiled": True}
    of_settings = sections.of(load(runs.write(tmp_path / "partial", short))).sections[-1]
    assert of_settings.rows[0]["compiled"] == "True" and of_settings.rows[0]["captured"] == "-"


def test_many_losses_are_drawn_in_seconds(tmp_path):
    rows = [runs.row(step, loss=[3.0 - k / 1e6 for k in range(2 * 10**5)]) for step in runs.STEPS[:2]]
    folder, began = runs.write(tmp_path, runs.run(*rows)), time.process_time()
    above, _ = charts.loss_figure(derive(load(folder))).axes
    assert time.process_time() - began < 10, "of which most is reading"
    assert [len(line.get_xdata()) for line in above.lines] == [2000, 2000]
    assert above.lines[1].get_xdata()[-1] == 199_901 and above.lines[1].get_ydata()[-1] == 3.0 - 0.1999


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvjet_sm90_qqtst_192x192_128x4_2x1_v_bz_coopB_bias_TNN", "matrix product, FP8, 192x192 tile"),
        ("cutlass_80_simt_sgemm_128x256_8x4_nn_align1", "matrix product, FP32, 128x256 tile"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "fused attention, backward"),
        ("triton_red_fused_add_native_layer_norm_4", "compiled: add native layer norm"),
        ("void at::native::odd_kernel<4>(int)", "odd_kernel"),
        ("aten::mm", "matrix product (mm)"),
    ],
)
def test_kernels_are_named_in_plain_words(name, words):
    assert in_words(name) == words


def lines_of(axes):
    return [[*map(float, line.get_ydata())] for line in axes.lines]


def test_the_chart_of_losses_shows_each_and_how_far_it_lies_above_the_first():
    rows = [runs.row("0_x", loss=[4.0, 3.0]), runs.row("1_x", loss=[4.5, 2.0])]
    above, below = charts.loss_figure(derive(runs.run(*rows))).axes
    assert lines_of(above) == [[4.0, 3.0], [4.5, 2.0]]
    assert lines_of(below) == [[0.0, 0.0], [0.5, -1.0]] and below.get_ylabel() == "minus 0_x"


def test_the_picture_leaves_out_what_is_no_change_of_code():
    before = '"""Doc."""\nimport a\n\nx = 1\nloss = f(x)\n'
    after = '"""Other."""\nimport b\n\n# why\nx = 1  # one\nwith amp:\n    loss = f(x)\n'
    assert changes.lines_added(before, after) == ("with amp:",) and changes.lines_added(after, before) == ()
    assert changes.lines_added("", after) == ()
    loop = f"{before}def f(a):\n    for b in a:\n        b.run()\n"
    assert changes.lines_added(before, loop.replace("def f", "def g")) == (
        "def g(a):",
        "    for b in a:",
        "        b.run()",
    )
    assert changes.lines_added(f"{before}def f(a):\n    pass\n", loop) == ("for b in a:", "    b.run()")
    many = "from m import (\n    one,\n    two,\n)\n" + "".join(f"x = {k % 3}\n" for k in range(300))
    longer = (many[many.index("x") :], f"y = 2\n{many}")
    assert changes.lines_added(*longer) == ("y = 2",), "whatever is frequent in a long source"


def test_long_sources_are_compared_in_no_time():
    began = time.process_time()
    changes.lines_added(*("".join(f"x = {i * k % 3}\n" for i in range(3000)) for k in (1, 2)))
    assert time.process_time() - began < 15


@pytest.mark.parametrize("words", ["", "--only 3,4", "--only=3,4"])
def test_a_part_of_the_ladder_is_no_row_of_the_cards(words):
    run = replace(runs.ladder(200, 100), command=f"./run_all.sh {words}")
    assert table.fits_cards(derive(run)) is not bool(words)


def test_the_front_table_and_a_card_are_of_the_record(recorded):
    words = ["a", "b", "c", "d", "e"]
    rows = table.front_rows(recorded, words)
    assert [*rows[0]] == [
        "script",
        "what it adds",
        "code lines added",
        "ms",
        "x the row above",
        "x FP32",
        "GiB",
    ]
    assert [row["code lines added"] for row in rows][:3] == ["-", "4", "1"] and [
        row["what it adds"] for row in rows
    ] == words
    card = table.card_row(recorded)
    gains = [float(gain) for gain in card["gains, step by step"].partition(" = ")[0].split(" x ")]
    assert np.prod(gains) == pytest.approx(recorded.steps[-1].over_first.value, rel=0.02) and len(gains) == 4
    assert not re.search("GPU-|[0-9a-f]{8}", " ".join(card.values())), "nothing that identifies a card"
    rows = [("oom", 0), ("ok", 100.0), ("ok", 50.0), ("oom", 0), ("ok", 25.0), ("skipped", 0)]
    run = runs.run(*(runs.row(f"{k}_x", ms, status) for k, (status, ms) in enumerate(rows)))
    cells = [*table.card_row(derive(run)).values()]
    assert cells[2:5] == ["oom", "25.0", "fits x 2.00 x oom x fits = -"]


# --- studies --------------------------------------------------------------------------------------


def test_what_a_gpu_loses_among_several_adds_up():
    two, graph = runs.workload(gpus=2, parallel="ddp"), {"settings": runs.SETTINGS["3_compile"]}
    alone, beside = (
        runs.row("2_sdpa", ms, profile=runs.profile(ms), product_ms=[ms]) for ms in (100.0, 125.0)
    )
    beside.profile.categories["communication"], beside.profile.communication_ms = 2.5, 20.0
    beside.profile.idle_ms = 3.75
    one = runs.run(runs.row("1_cublas", 50.0), runs.row("2_sdpa", 80.0, **graph))
    rows = [
        runs.row("1_cublas", 50.0, profile=runs.profile(50.0), **graph),
        beside,
        runs.row("3_compile", 0, "oom"),
    ]
    places = {
        "1": one,
        "1-launched": runs.run(alone, runs.row("3_compile")),
        "2-ddp": runs.run(*rows, work=two),
    }
    rows = scaling.scaled(study := runs.study("scaling", places))
    assert [row.share() for row in rows] == ["-", "100.0 %*", "-", "-", "80.0 %?", "-", "-"]
    (row,), (*_, main, _, _) = scaling.lost_rows(rows), scaling.main_rows(rows)
    assert [*main.values()][3:] == ["125.0?", "80.0 %?", "16,384", "64", "2.5", "17.5", "3.0"]
    assert " ".join(row.values()).endswith("2 20.0 % 14.0 % 4.0 % 1.0 % 2.0 % -1.0 %")
    assert "? the machine was busy (2-ddp, 2_sdpa)" in sections.of(study).remarks, "next to another place"
    beside.profile.categories["matrix products"] += 11.0  # of 125 ms
    assert scaling.lost_rows(scaling.scaled(study)), "the rest is -9.8 %"
    beside.profile.categories["matrix products"] += 1.0
    assert scaling.lost_rows(scaling.scaled(study)) == [], "kernels explain too little"


def test_runs_on_equal_terms_stand_side_by_side():
    fp8 = Settings(captured=True, residual_dtype="bfloat16", head="FP8", fp8_recipe="torchao, tensorwise")
    delayed = replace(fp8, fp8_recipe="recipe_type=DelayedScaling", residual_dtype="float32")
    rows = {"a": runs.row("x", 50.0, settings=fp8), "b": runs.row("y", 100.0, settings=delayed)}
    study = runs.study("ablations", {name: runs.run(row) for name, row in rows.items()})
    first, second = ablations.equal_rows(study, "a", "b")
    assert [*first.values()] == ["a", "x", "captured", "BF16", "FP8", "current", "50.0", "1.00"]
    assert [*second.values()][3:] == ["FP32", "FP8", "delayed", "100.0", "0.50"]


def test_a_sweep_shows_gains_by_width():
    shapes = {}
    for width, ms in ((128, (90.0, 100.0, 100.0)), (256, (200.0, 100.0, 50.0))):
        rows = [runs.row(f"{k}_x", t) for k, t in enumerate(ms)]
        shapes[f"w{width}"] = runs.run(*rows, work=runs.workload(n_embd=width))
    late = [
        runs.row("0_x"),
        runs.row("1_x", status="oom"),
        runs.row("2_x", 50.0),
        runs.row("3_x", status="skipped"),
    ]
    shapes["late"] = runs.run(*late, work=runs.workload(n_embd=512))
    shapes["dead"] = replace(runs.run(*late[1:2]), workload=None)
    long = runs.run(runs.row("0_x", status="oom"), work=runs.workload(n_embd=64, seq_len=4096, batch_size=1))
    study = runs.study("sweep", {"long": long, **shapes})
    assert [shape.run.workload.n_embd for shape in sweep.shapes(study)] == [128, 256, 512, 64], (
        "by tokens first"
    )
    study = runs.study("sweep", shapes)
    cells = [[*sweep.gain_cells(figures).values()][5:] for figures in sweep.shapes(study)]
    said = ["90.0 0.90 1.00 100.0", "200.0 2.00 2.00 50.0", "100.0 oom fits skipped 50.0"]
    assert [" ".join(row) for row in cells] == said, "2.00 would be over step 0"


def trained(step, last, heldout=(4.0, 3.0, 2.5, 2.0), ms=50.0, **fields):
    """A run of 40 steps whose losses end at `last`, tested after every 10."""
    tests = [(10 * (k + 1), loss) for k, loss in enumerate(heldout)]
    row = runs.row(step, ms, loss=[9.0] * 30 + [last] * 10, heldout=tests, **fields)
    return runs.run(row)


def test_rows_are_compared_seed_by_seed_with_the_step_or_the_variant_that_they_change():
    fp8 = {"settings": Settings(fp8_recipe="delayed")}
    runs_by_name = {}
    for seed in (1, 2, 3):
        for label, step, loss, more in (
            ("0_x", "0_x", 2.0, {}),
            ("1_x", "1_x", 2.002 + 0.001 * seed, {}),
            ("2_fp8", "2_fp8", 2.1, fp8),
            ("bf16-head", "2_fp8", 2.1, fp8),
            ("no-fp8", "2_fp8", 2.0, {}),
            ("dead", "1_x", 2.0, {}),
            ("decays", "1_x", 2.0, {}),
            ("decays-fp8", "2_fp8", 2.0, fp8),
            ("lost", "9_x", 2.0, {}),
        ):
            runs_by_name[f"{label}, seed {seed}"] = trained(step, loss + seed, **more)
    runs_by_name["10_x, seed 1"] = trained("10_x", 2.0)
    runs_by_name["10_x, seed 2"] = runs.run(runs.row("10_x", status="oom"))
    study = runs.study("parity", runs_by_name)
    of = parity.compared_with(study)
    assert of == {"0_x": None, "1_x": "0_x", "2_fp8": "1_x", "10_x": "0_x"} | {
        "bf16-head": "10_x",
        "no-fp8": "10_x",
        "dead": "1_x",
        "decays": "1_x",
        "decays-fp8": "decays",
        "lost": "0_x",
    }
    assert [*of][:4] == ["0_x", "1_x", "2_fp8", "10_x"]
    lines = {row["row"]: row for row in parity.difference_rows(study)}
    assert [*lines["1_x"].values()][2:5] == ["0_x", "3", "+0.0% ± 0.0%"]
    assert lines["1_x"]["nats"] == "+0.0040 ± 0.0025" and lines["2_fp8"]["nats"] == "+0.0960 ± 0.0025"
    assert lines["10_x"]["nats"] == "-1.0000" and lines["10_x"]["verdict"] == "undecided", "one seed"
    assert (lines["0_x"]["verdict"], lines["0_x"]["nats"]) == ("-", "-")


def test_seconds_of_two_cards_are_marked():
    study = runs.study("parity", {f"{step}, seed {k}": trained(step, 2.0) for step in "01" for k in (1, 2)})
    for run in study.runs.values():
        run.environment = replace(run.environment, gpu_uuid="one")
    (title,) = parity.tables(study)
    assert "?" not in parity.difference_rows(study)[1]["more seconds"] + title
    study.runs["1, seed 2"].environment.gpu_uuid = "two"
    first, second = parity.difference_rows(study)
    (title,) = parity.tables(study)
    assert title.endswith(
        ". Where only the seconds have a ?, the two rows ran on different cards for some seed:"
    )
    assert (first["more seconds"], second["more seconds"][-1]) == ("-", "?") and "?" not in second[
        "more steps"
    ]


@pytest.mark.parametrize(
    "mean, half, verdict",
    [
        (0.004, 0.006, "equivalent"),
        (-0.004, 0.0061, "undecided"),
        (0.009, 0.002, "undecided"),  # leaves out zero, within the margin in the mean
        (-0.011, 0.0109, "fewer"),
        (0.011, 0.0109, "more"),
        (0.011, 0.012, "undecided"),
        (0.0, None, "undecided"),
    ],
)
def test_a_verdict_goes_by_interval_and_margin(mean, half, verdict):
    assert parity.Difference(3, mean, half).verdict == verdict and parity.MARGIN == 0.01


@pytest.mark.parametrize(
    ("scale", "repeated", "work"),
    [(4, None, "differs"), (1.06, None, "differs"), (1.04, None, "agrees"), (4, 0.9, "agrees")],
)
def test_a_loss_that_is_scaled_is_other_work_though_its_gradients_point_the_same_way(scale, repeated, work):
    alike = Proof("0_x", False, 1.0, cosine=1.0, weight="w", repeated=repeated, limit=0.99)
    rows = [runs.row("0_x", loss=[2.0] * 9), runs.row("1_x", loss=[2.0 * scale] * 9, proof=alike)]
    line = derive(runs.run(*rows)).lines[1]
    assert line.same_work == work
    assert ("its first loss is" in line.note and "that of 0_x 2" in line.note) == (work == "differs")


def test_the_lines_of_a_file_that_does_more_than_fp32_are_those_beyond_its_first_row():
    rows = [
        runs.row(name, ms, changes=changes, code=f"{name}\n", settings=Settings(compiled=ms < 50.0))
        for name, ms, changes in (
            ("2_sdpa", 100.0, ["fused attention"]),
            ("3_compile", 40.0, ["fused attention", "compile"]),
        )
    ]
    recorded = runs.run(*rows, work=runs.workload(model="m.py"))
    heading = "What to change, with the names of m.py, beyond 2_sdpa"
    assert sections.of(recorded).sections[0].heading == heading
    rows[1].code = "loss = my_file.loss(model, batch)\n"
    assert sections.of(recorded).sections[0].heading == f"{heading}, imported as my_file"


def test_the_bar_of_a_block_has_gaps_on_a_gpu_and_none_between_operators_that_hold_others():
    def launch(name, ms, start_ms):
        return runs.Kernel(name, "other", ms, 1, start_ms)

    half = [launch("outer", 4.0, 0.0), launch("inner", 1.0, 0.5), launch("next", 2.0, 6.0)]
    recorded = runs.ladder(100.0)
    profile = recorded.rows[0].profile
    profile.forward = profile.backward = half
    for idle_ms, label, drawn in (
        (1.0, "forward 8.00 ms, backward 8.00 ms", [4.0, 1.0, 2.0, 2.0] * 2),
        (None, "forward 7.00 ms, backward 7.00 ms", [4.0, 1.0, 2.0] * 2),
    ):
        profile.idle_ms = idle_ms
        bar = bars.block_bar(derive(recorded).lines[0])
        assert bar.label == label
        assert [length for _, length, _ in bar.parts] == pytest.approx(
            [ms / (16 if idle_ms else 14) for ms in drawn]
        )
    assert bar.length == pytest.approx(1.0)


def test_training_steps_and_seconds_to_the_same_loss_are_counted_seed_by_seed():
    falling = [5.0 - math.log(step) for step in (10, 20, 30, 40)]  # a nat less for e times the steps
    first = trained("0_x", 2.0, falling)
    later = trained("1_x", 2.0, [loss + math.log(1.2) for loss in falling], ms=25.0)  # 50 ms
    pair = [run.rows[0] for run in (later, first)]
    assert parity.more_steps(*pair) == pytest.approx(0.2), "each loss a fifth later"
    assert parity.more_steps(*pair[::-1]) == pytest.approx(1 / 1.2 - 1)
    assert parity.more_seconds(*pair) == pytest.approx(1.2 / 2 - 1)
    assert parity.lag(*pair, 30, 40) == pytest.approx(0.2), "read off the curve"
    assert parity.lag(*pair[::-1], 30, 40) is None, "a loss that the other has not reached"
    assert parity.lag(*pair[::-1], 20, 30) == pytest.approx(1 / 1.2 - 1)
    untested = trained("0_x", 2.0, falling[:3]).rows[0]
    assert parity.more_steps(pair[0], untested) is None, "tested at other steps"
    assert parity.more_steps(untested, untested) is None, "two tests in the second half"
    rising = trained("0_x", 2.0, falling[::-1]).rows[0]
    assert parity.more_steps(pair[0], rising) is None, "it learns nothing"
    by_name = {f"0_x, seed {seed}": first for seed in (1, 2, 3)}
    by_name |= {f"1_x, seed {seed}": later for seed in (1, 2, 3)}
    study = runs.study("parity", by_name)
    line = parity.difference_rows(study)[1]
    assert [line["more steps"], line["more seconds"]] == ["+20.0% ± 0.0%", "-40.0% ± 0.0%"]
    later.rows[0].product_ms, first.rows[0].product_ms = [2.0, 2.0], [1.0, 1.0]
    line = parity.difference_rows(study)[1]
    assert [line["ms"], line["more seconds"]] == ["25.0?", "-40.0% ± 0.0%?"], "the machine was busy"
    assert parity.picture(study)[:4] == b"\x89PNG"
    (axes,) = parity.curves_figure(study).axes
    shown = [falling[1:], [loss + math.log(1.2) for loss in falling[1:]]]
    assert np.allclose(lines_of(axes), shown), "from the second test on"


def test_a_seed_that_broke_or_cannot_be_compared_leaves_no_verdict():
    falling = [5.0 - math.log(step) for step in (10, 20, 30, 40)]
    by_name = {f"0_x, seed {seed}": trained("0_x", 2.0, falling) for seed in (1, 2, 3, 4)}
    by_name |= {f"1_x, seed {seed}": trained("1_x", 2.0, falling) for seed in (1, 2, 3, 4)}

    def line():
        return parity.difference_rows(runs.study("parity", by_name))[1]

    assert line()["verdict"] == "equivalent"
    by_name["1_x, seed 4"] = trained("1_x", 2.0, [loss + 2 for loss in falling])
    assert [line()[name] for name in ("seeds", "more steps", "verdict")] == ["3", "+0.0%", "undecided"]
    by_name["1_x, seed 4"] = runs.run(runs.row("1_x", status="failed", reason="a loss is nan"))
    assert line()["verdict"] == "undecided"
    by_name["1_x, seed 4"] = runs.run(runs.row("1_x", status="not run"))
    assert line()["verdict"] == "equivalent", "a seed that has not run yet is no broken one"


def test_curves_have_the_tests_that_all_seeds_have():
    by_name = {"0_x, seed 1": trained("0_x", 2.0, [5.0, 4.0, 3.0, 2.0])}
    by_name["0_x, seed 2"] = run = trained("0_x", 2.0, [5.0, 3.0])
    steps = [step for step, _ in by_name["0_x, seed 1"].rows[0].heldout]
    run.rows[0].heldout = [(steps[0], 5.0), (steps[2], 2.0)]
    (points,) = parity.curves(runs.study("parity", by_name)).values()
    assert [loss for _, loss in points] == [5.0, 2.5]


def test_no_verdict_comes_from_a_step_of_other_work_or_that_did_not_learn():
    def said(**fields):
        run = runs.ladder(300, 100, 50)
        for name, value in fields.items():
            setattr(run.rows[2], name, value)
        return sentences.headline(derive(run)), table.fits_cards(derive(run))

    assert said()[0].startswith("2_sdpa: ") and said()[1]
    differs = Proof("0_baseline", False, 1.0, 0.1, "w", 1.0)
    assert said(proof=differs) == ("No verdict: 2_sdpa has the shortest time, and differs in its work", False)
    rising = [4.0, 9.0, 9.0, 9.0, 9.0, 9.0]
    assert "did not learn as the first row did" in said(loss=rising)[0]


def test_a_file_that_sets_tf32_is_held_against_tf32():
    tf32 = Settings("float32", "high", "cudnn", captured=True)
    machine = {"work": runs.workload(model="x.py"), "device": "NVIDIA H200"}
    for capability, expected in (([9, 0], "tf32"), ([7, 5], "fp32")):
        run = runs.run(runs.row("0_as_it_is", settings=tf32), compute_capability=capability, **machine)
        assert derive(run).lines[0].precision == expected
    unobserved = runs.run(runs.row("3_x", settings=Settings(captured=True)), **machine)
    line = derive(unobserved).lines[0]
    assert line.precision == "" and line.mfu is None


def test_runs_of_two_files_are_not_the_same_work(tmp_path):
    folders = [
        runs.write(tmp_path / text, runs.ladder(300, 100, work=runs.workload(model="m.py", text_sha256=text)))
        for text in ("a", "b")
    ]
    assert "differs in text_sha256" in (told := compare.compare(*folders, 0.03)[0])
    assert told.endswith("B does not bear out A: it did other work")


# --- the command and the documents ----------------------------------------------------------------


def report(*words):
    return run_python("-m", "report", *words)


def test_the_interval_is_student_s_and_rows_without_a_difference_are_seen_once_in_twenty():
    for v, p, expected in ((1, 0.975, 12.706), (2, 0.975, 4.303), (9, 0.975, 2.262), (5, 0.8, 0.920)):
        assert parity.t_quantile(p, v) == pytest.approx(expected, abs=1e-3)
    assert parity.interval([0.1, 0.2, 0.3]) == pytest.approx([0.2, 4.303 * 0.1 / 3**0.5], rel=1e-3)
    drawn = np.random.default_rng(0).normal(size=(1000, 4))
    seen = np.mean([abs(mean) > half for mean, half in map(parity.interval, drawn.tolist())])
    assert seen == pytest.approx(0.05, abs=0.02)


@pytest.mark.slow
def test_the_command_writes_into_a_run_folder_and_its_code_tells_how_the_rows_ended(tmp_path):
    folder = runs.plan(tmp_path / "a", "0_baseline", "1_cublas", "2_sdpa")
    runs.put(folder, runs.row("0_baseline"))
    runs.put(folder, runs.row("1_cublas", status="skipped", reason="no FP8"))
    ended = report(folder)
    assert (ended.returncode, ended.stderr) == (1, "") and "0_baseline" in ended.stdout, (
        "2_sdpa is still to run"
    )
    written = {path.name for path in folder.iterdir()} - {"plan.json", "0_baseline.json", "1_cublas.json"}
    assert written == {"results.json", "report.md", "report.html", "steps.svg"}
    runs.put(folder, runs.row("2_sdpa"))
    assert report(folder).returncode == 0
    runs.put(folder, runs.row("2_sdpa", status="oom", reason="too large"))
    assert report(folder).returncode == 1 and load(folder).rows[2].status == "oom"
    odd = {"1": runs.run(runs.row("2_sdpa"), problems=["rows differ in x"])}
    recorded = runs.write(tmp_path / "b", runs.study("scaling", odd))
    before, ended = (recorded / "results.json").read_bytes(), report(recorded)
    assert ended.returncode == 0 and (recorded / "results.json").read_bytes() == before
    assert report("--compare", folder, folder).returncode == 0
    for words in ((), (tmp_path,), (folder, "--compare", folder, folder), ("--compare", folder, recorded)):
        ended = report(*words)
        assert (ended.returncode, ended.stdout, len(ended.stderr.splitlines())) == (2, "", 1)


def test_losses_of_variants_stand_by_training_step_and_need_as_many():
    of = {"a": [9.0, 7.004], "cold": [9.0, 8.5], "short": [9.0]}
    study = runs.study("ablations", {name: runs.run(runs.row(name, loss=loss)) for name, loss in of.items()})
    warm, cold = ablations.loss_rows(study, "a", "cold")
    assert warm == {"loss in training step": "a", "1": "9.00", "2": "7.00"} and cold["2"] == "8.50"
    with pytest.raises(ValueError, match="a, short trained different numbers of steps"):
        ablations.loss_rows(study, "a", "short")


def test_a_machine_that_is_busy_around_one_variant_marks_its_difference():
    quiet, busy = (runs.row("1_x", ms, product_ms=[work] * 2) for ms, work in ((50.0, 20.0), (60.0, 40.0)))
    for card, mark in (("a", "?"), ("b", "")):
        named = {"1_x": runs.run(quiet, gpu_uuid="a"), "x": runs.run(busy, gpu_uuid=card)}
        study = runs.study("ablations", named)
        (row,) = ablations.variant_rows(study)
        assert row["difference, ms"] == f"+10.0{mark}", "the work of another card is another time"
        assert ("? the machine was busy (x)" in sections.of(study).remarks) is bool(mark)


def test_words_of_a_record_are_no_emphasis():
    assert printers.escape("M.__init__() of *a*") == r"M.\_\_init\_\_() of \*a\*"
    assert printers.escape("n_embd") == "n_embd", "within a word it is none"


def test_a_table_of_markdown_has_one_column_to_the_left():
    text = printers.pipe([{"step": "a", "ms": "1"}])
    left, right = text.splitlines()[1].strip("|").split("|")
    assert left.startswith(":") and right.endswith(":") and not right.startswith(":")
    assert all(
        cell.startswith(":")
        for cell in printers.pipe([{"a": "x", "b": "y"}], 2).splitlines()[1].strip("|").split("|")
    )


def test_a_notebook_s_backend_and_a_broken_matplotlibrc_cost_no_report(tmp_path):
    (tmp_path / "matplotlibrc").write_bytes(b"backend: \xff\xfe")
    env = os.environ | {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "MPLCONFIGDIR": str(tmp_path),
        "MATPLOTLIBRC": str(tmp_path / "matplotlibrc"),
    }
    folder = runs.write(tmp_path / "run", runs.ladder(300, 100))
    ran = run_python("-m", "report", folder, env=env)
    assert ran.returncode == 0 and (folder / "steps.svg").exists(), ran.stderr


def test_output_that_cannot_be_written_is_no_success_and_a_letter_that_is_missing_no_loss(tmp_path):
    folder = runs.write(tmp_path / "für", runs.ladder(300, 100))
    command = [sys.executable, "-m", "report", str(folder)]
    with open("/dev/full", "w") as full:
        ran = subprocess.run(command, cwd=runs.ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "python -m report: error: cannot write its output: No space left on device\n"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ran = subprocess.run(command, cwd=runs.ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and "1_cublas" in ran.stdout and "f\\xfcr" in ran.stdout


def test_a_profile_may_differ_from_the_timed_steps_by_a_third():
    for ms, shown in ((70.0, True), (65.0, False), (130.0, True)):
        (line,) = derive(runs.run(runs.row("0_x", 100.0, profile=runs.profile(ms)))).lines
        assert bool(line.category_ms) is shown is ("left out" not in line.note)


def test_the_limit_of_means_is_lower_by_twice_what_random_numbers_turn_them():
    generator = np.random.default_rng(3)
    true = generator.normal(size=500)
    ours, theirs = ([true + generator.normal(size=500) for _ in range(8)] for _ in range(2))
    cosine, limit = proof.agreement(ours, theirs, 0.95)
    apart = 1 - proof.cosine(np.mean(ours, axis=0), np.mean(theirs, axis=0))
    assert cosine == pytest.approx(1 - apart) and 0.95 - limit == pytest.approx(2 * apart, rel=0.2)


def test_peaks_are_those_of_the_datasheets():
    for device, peaks in {
        "NVIDIA A100-SXM4-80GB": {"fp32": 19.5, "tf32": 156, "bf16": 312},
        "NVIDIA H200": {"fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp8": 1978.9},
    }.items():
        assert {name: peak_flops_per_s(device, name) / 1e12 for name in peaks} == pytest.approx(peaks)
