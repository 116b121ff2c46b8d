"""The table, the lines under it, and report.md."""

import re
from dataclasses import replace

import pytest
import runs

from report import table


def test_speedups_are_against_the_previous_row_the_first_and_plain_training():
    rows = table.table_rows(
        runs.run(runs.step("0_a", 300), runs.step("1_b", 100), runs.step("2_sdpa", 120, loss=[2.0]))
    )
    assert [row["vs previous"] for row in rows] == ["-", "3.00x", "0.83x"]
    assert [row["vs baseline"] for row in rows] == ["1.00x", "3.00x", "2.50x"]
    assert [row["vs 2_sdpa"] for row in rows] == ["0.40x", "1.20x", "1.00x"]
    assert rows[1]["ms/step"] == "100.0" and rows[1]["tokens/s"] == "20,480" and rows[1]["peak GiB"] == "3.0"
    assert rows[0]["loss"] == "2.5075" and rows[2]["loss difference"] == "-20.24%"


def test_the_workload_says_how_it_was_divided():
    divided = replace(runs.WORKLOAD, gpus=2, parallel="fsdp", accumulate=4, checkpoint=True)
    run = runs.run(runs.step("0_a"), workload=divided)
    said = "2 processes by fsdp, each with a batch of this size, 4 micro-batches a step, blocks recomputed in backward"
    assert said in table.describe_workload(run) and said in table.render_markdown(run)
    assert table.table_rows(run)[0]["tokens/s per GPU"] == "10,240"
    assert table.ON_A_CPU not in table.remarks(run)
    on_a_cpu = runs.run(runs.step("0_a"), workload=divided, device_type="cpu")
    assert table.ON_A_CPU in table.remarks(on_a_cpu) and table.ON_A_CPU not in table.remarks(runs.cpu())


def test_a_commit_that_is_not_known_has_a_reason_where_there_is_one():
    made = runs.run(runs.step("0_a"), commit=None)
    assert table.describe_machine(made.environment).endswith(", commit unknown")
    made.environment.commit_reason = "git is not installed"
    assert table.describe_machine(made.environment).endswith(", commit unknown: git is not installed")


def test_rows_without_a_time_stay_with_their_reason():
    run = runs.run(runs.step("0_a", 300), runs.step("1_b", status="skipped", reason="no such thing"), runs.step("2_c"))
    rows = table.table_rows(run)
    assert rows[1]["status"] == "skipped" and {rows[1][name] for name in ("ms/step", "loss", "peak GiB")} == {"-"}
    assert rows[2]["vs previous"] == "3.00x", "against the last row that has a time"
    assert "1_b: no such thing" in table.render_text(run)


def test_peers_stand_under_the_steps_and_no_row_with_a_time_is_still_a_table():
    rows = table.table_rows(runs.run(runs.step("0_a", 300), peers=[runs.step("z", 150)]))
    assert rows[1]["step"] == "peer: z" and rows[1]["vs baseline"] == "2.00x" and rows[1]["vs previous"] == "-"
    run = runs.run(*(runs.step(name, status="failed", reason="x") for name in "01234"))
    assert len(table.table_rows(run)) == 5 and "4: x" in table.render_markdown(run)


def test_what_binds_a_row_and_the_roofs_are_explained():
    run = runs.run(runs.step("0_a", profile=runs.profile(100.0)), runs.step("1_b"), roofs=runs.ROOFS)
    assert [row["most time in"] for row in table.table_rows(run)] == ["compute 60%", "-"]
    said = table.render_text(run)
    for part in (
        "the largest share of the step", "copy 4,000 GB/s", "FP8 1,300 TFLOP/s", "fp4 not measured: too new",
        "BF16 700 TFLOP/s back to back (1480 MHz, 699 W), 800 at most, in bursts (1980 MHz)",
        "a product of zeros is faster, because zeros draw less power: 900 TFLOP/s instead of 700 in BF16",
    ):  # fmt: skip
        assert part in said


def test_energy_has_a_column_where_a_row_has_it():
    rows = [runs.step(name, tokens_per_joule=j) for name, j in (("0_a", 7.923), ("1_b", 151.31), ("2_c", None))]
    assert [row["tokens/J"] for row in table.table_rows(runs.run(*rows))] == ["7.92", "151.3", "-"]
    assert "tokens/J" not in table.table_rows(runs.run(rows[2]))[0]


ADDRESSES = ("https://a.example/x", "www.a.example", "# heading", "- item")


@pytest.mark.parametrize("text", [*runs.HOSTILE.values(), *ADDRESSES])
def test_nothing_that_a_record_says_is_markup_in_markdown(text):
    prose = table.render_markdown(runs.hostile(text)).partition("\nReproduce:")[0]  # what follows is a block of code
    bare = re.sub(r"\\[!-/:-@\[-`{-~]", "", prose)  # without what a backslash makes plain
    assert not set("[]<`") & set(bare)
    assert len({line.count("|") for line in bare.splitlines() if line.startswith("|")}) == 1, "no text ends a cell"
    assert all(character.isprintable() or character == "\n" for character in bare)
    assert text not in ADDRESSES or not ("://" in prose or "www." in prose), "GitHub makes a link of a bare address"
    assert not re.search(r"^[-#*] [-#] ", prose, re.MULTILINE)
