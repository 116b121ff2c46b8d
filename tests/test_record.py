"""Writing records: whole or not at all, and over nothing of the user's."""

import json
import os

import pytest

from common import record
from common.record import Row, Run


def run_of(*rows):
    return Run("python x.py", None, None, None, list(rows))


def test_a_run_is_written_as_json_with_its_schema_version(tmp_path):
    record.write_run(tmp_path / "x.json", run_of(Row("0_x", status="ok")))
    content = json.loads((tmp_path / "x.json").read_text())
    assert content["schema_version"] == 2 and content["steps"][0]["step"] == "0_x"
    assert (tmp_path / "x.json").stat().st_mode & 0o777 == 0o644, "others may read it"


def test_a_write_that_fails_leaves_the_old_record_and_no_temporary_file(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    record.write_json(path, {"old": 1})
    with pytest.raises(ValueError):
        record.write_json(path, {"new": float("nan")})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        record.write_json(path, {"new": 1})
    assert json.loads(path.read_text()) == {"old": 1} and os.listdir(tmp_path) == ["x.json"]


@pytest.mark.parametrize(
    ("content", "replaced"),
    [
        ("mine", False),
        ('{"name": "a package"}', False),
        ('{"steps": [{}, {}], "peers": []}', False),  # a whole run
        ('{"steps": [{}], "peers": [{}]}', False),
        ('{"steps": ', False),
        ("[]", False),
        ('{"steps": [{}]}', True),
        ('{"copy_bytes_per_s": 1}', True),  # roofs
        ("", True),
    ],
)
def test_only_a_record_of_one_row_is_replaced(content, replaced, tmp_path):
    path = tmp_path / "there.json"
    path.write_text(content)
    if replaced:
        record.check_writable(path, "steps", "copy_bytes_per_s")
    else:
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
    assert os.listdir(tmp_path) == ["file"]


def test_a_missing_folder_is_made(tmp_path):
    record.check_writable(tmp_path / "a" / "b" / "x.json", "steps")
    assert os.listdir(tmp_path / "a" / "b") == []


def test_differing_fields_are_named_in_order():
    a, b = Row("0_x", status="ok", note="n"), Row("1_x", status="ok")
    assert record.differing_fields(a, b) == ["step", "note"] and record.differing_fields(a, a) == []
