"""Writing records: whole or not at all, and over nothing of the user's."""

import json
import os

import pytest
import runs

from common import record
from common.record import Row
from report.load import read_run


def test_a_write_that_fails_leaves_the_old_record_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    record.write_json(path, {"old": 1})
    assert path.stat().st_mode & 0o777 == 0o644, "others may read it"
    with pytest.raises(ValueError):
        record.write_json(path, {"new": float("nan")})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        record.write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1} and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize("content", ["mine", '{"name": "a package"}', '{"steps": [{}, {}], "peers": []}', "[]"])
def test_only_a_record_of_one_row_is_replaced(content, tmp_path):
    path = tmp_path / "there.json"
    for replaced in ('{"steps": [{}]}', '{"copy_bytes_per_s": 1}', ""):
        path.write_text(replaced)
        record.check_writable(path, "steps", "copy_bytes_per_s")
    path.write_text(content)
    with pytest.raises(ValueError, match="is no record of this kind: it stays"):
        record.check_writable(path, "steps", "copy_bytes_per_s")
    assert path.read_text() == content


def test_an_output_that_cannot_become_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path, said in (
        (tmp_path, "not a regular file"),
        (tmp_path / "file" / "record.json", "cannot write"),
        (tmp_path / ("é" * 128), "too long"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            record.check_writable(path, "steps")
        assert "\n" not in str(caught.value)
    record.check_writable(tmp_path / "a" / "b" / "x.json", "steps")
    assert sorted(os.listdir(tmp_path)) == ["a", "file"], "a missing folder is made"


def test_what_is_written_is_read_again_and_differing_fields_are_named_in_order(tmp_path):
    record.write_run(tmp_path / "results.json", runs.full())
    assert json.loads((tmp_path / "results.json").read_text())["schema_version"] == 2
    assert read_run(tmp_path / "results.json") == runs.full()
    a, b = Row("0_x", status="ok", note="n"), Row("1_x", status="ok")
    assert record.differing_fields(a, b) == ["step", "note"] and record.differing_fields(a, a) == []
