"""Text for a terminal: one line of anything, commands to repeat, a reader who left."""

import io
import os

from common import text


def test_anything_becomes_one_harmless_line_and_a_command_names_no_folder():
    for given, line in (
        ("first\nsecond", "first"),
        ("\n\n a \n", "a"),
        (MemoryError(), "MemoryError"),
        ("red \x1b[31m alert\x07", "red  [31m alert "),
        ("x" * 400, "x" * 299 + "…"),
    ):
        assert text.one_line(given) == line
    for words, command in (
        (["./run_all.sh", "--data", "/home/me/two words"], "./run_all.sh --data 'two words'"),
        (["x.py", "--output", "/tmp/r.json", "--steps", "2"], "x.py --steps 2"),
        (["x.py", "--output=/tmp/r.json", "--data=/a/b"], "x.py --data=b"),
    ):
        assert text.portable_command(words) == command


def test_a_reader_who_left_and_a_letter_that_a_terminal_lacks_end_nothing():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", encoding="ascii") as stream:
        text.say("née", stream)
        text.say("again", stream)
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    text.say("née", written)
    assert written.buffer.getvalue() == b"n\\xe9e\n"


def test_a_table_is_aligned_and_nothing_is_read_as_a_number():
    table = text.aligned([{"step": "1e5", "ms": "10.50"}, {"step": "b", "ms": "9"}])
    assert "1e5" in table and "10.50" in table and table.splitlines()[-1].endswith(" 9")
    assert text.aligned([]) == ""
