"""Text files line by line, plain and compressed: what is wrong is an error with its file and line."""

import ast
import bz2
import gzip
import lzma
import os
import tracemalloc
import zlib
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_data import COMPRESS, AllErrors, odd_bytes, read, written

from permuteformer.tasks.readers import text
from permuteformer.tasks.readers.errors import BadItem, Errors
from permuteformer.tasks.readers.text import bytes_literal, lines

COMPRESSED = [ending for ending in COMPRESS if ending]


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("named", [True, False])
def test_compression_is_recognized_by_name_or_first_bytes(tmp_path, ending, named):
    data = "eins\nzwei\r\n\n dr\u0085e\u2028i\rx\n\nvier".encode()
    path = written(tmp_path / (f"text.txt{ending}" if named else "text"), COMPRESS[ending](data))
    assert list(lines(path, Errors())) == [(1, "eins"), (2, "zwei"), (3, ""), (4, " dr\u0085e\u2028i\rx"), (5, ""), (6, "vier")]


def test_a_name_that_is_wrong_about_the_compression(tmp_path):
    for data in (lzma.compress(b"a"), b"plain"):
        with pytest.raises(BadItem, match=r"x\.gz.* gzip"):
            list(lines(written(tmp_path / "x.gz", data), Errors()))
    assert list(lines(written(tmp_path / "z", b"BZh9 starts this text"), Errors())) == [(1, "BZh9 starts this text")]


@given(odd_bytes)
@example(b"\xef\xbb\xbf\n")
@example(b"\xef\xbb\xbfa\n\xef\xbb\xbfb")
@example(b"a\r\r\na\r")
@example(b"a\0b\n\n")
def test_every_line_is_read_or_an_error(tmp_path_factory, data):
    *ended, last = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = [line.removesuffix(b"\r") for line in ended] + ([last] if last else [])
    errors = AllErrors()
    found = dict(lines(written(tmp_path_factory.getbasetemp() / "odd", data), errors))
    wrong = {error.line for error in errors.all}
    assert sorted([*found, *wrong]) == list(range(1, len(expected) + 1)) if expected else wrong == {None}
    for number, line in enumerate(expected, 1):
        assert (number in wrong) == (line.decode(errors="replace").encode() != line)
        assert number in wrong or found[number].encode() == line


def test_a_line_over_the_limit_is_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 10)
    monkeypatch.setattr(text, "CHUNK", 7)
    found, errors = read(lines, written(tmp_path / "x", b"0123456789\r\n01234567890\nafter\n" + b"x" * 100 + b"\n0123456789"))
    assert found == [(1, "0123456789"), (3, "after"), (5, "0123456789")]
    assert [error.split(":")[0].split(", ")[1] for error in errors] == ["line 2", "line 4"]


def test_a_line_over_the_limit_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1 << 20)
    path = written(tmp_path / "x.gz", gzip.compress(bytes(200 << 20), compresslevel=1))
    tracemalloc.start()
    try:
        assert read(lines, path)[0] == []
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_decompression_bomb_is_refused_and_text_is_not(tmp_path, ending, monkeypatch):
    monkeypatch.setattr(text, "MAX_FREE_BYTES", 1 << 20)
    with pytest.raises(BadItem, match="bomb.*1,048,576 bytes and 200 times"):
        list(lines(written(tmp_path / f"bomb{ending}", COMPRESS[ending](b"0" * (4 << 20))), Errors()))
    words = b"\n".join(Random(0).choices([b"some", b"words", b"of", b"a", b"text"], k=300_000))
    assert sum(1 for _ in lines(written(tmp_path / f"text{ending}", COMPRESS[ending](words)), Errors())) == 300_000


@pytest.mark.parametrize("ending", COMPRESSED)
def test_truncated_data_is_an_error_after_its_last_line(tmp_path, ending):
    content = b"".join(b"line %d %s\n" % (n, os.urandom(20).hex().encode()) for n in range(20_000))
    whole = bz2.compress(content, 1) if ending == ".bz2" else COMPRESS[ending](content)  # else its blocks have 900 kB
    found, (error,) = read(lines, written(tmp_path / f"x{ending}", whole[: len(whole) * 3 // 4]))
    assert [line.encode() for _, line in found] == content.split(b"\n")[: len(found)]
    assert len(found) > 1_000
    assert f"after line {len(found):,}: the {text.COMPRESSIONS[ending].name} data is truncated" in error


@pytest.mark.parametrize("ending", COMPRESSED)
@pytest.mark.parametrize("garbage", [b"garbage", b"\0\0\0\0garbage"])
def test_garbage_after_compressed_data_is_an_error(tmp_path, ending, garbage):
    found, (error,) = read(lines, written(tmp_path / f"x{ending}", COMPRESS[ending](b"one\ntwo\n") + garbage))
    assert found == [(1, "one"), (2, "two")]
    assert "after line 2" in error


@pytest.mark.parametrize("ending", COMPRESSED)
def test_compressed_streams_in_a_row_with_padding(tmp_path, ending):
    compress = COMPRESS[ending]
    path = written(tmp_path / f"x{ending}", compress(b"one\ntw") + bytes(8) + compress(b"") + compress(b"o\n") + bytes(4))
    assert list(lines(path, Errors())) == [(1, "one"), (2, "two")]


def test_a_wrong_checksum_is_an_error(tmp_path):
    packed = bytearray(gzip.compress(b"one\n" * 500_000))
    packed[-8] ^= 1
    found, (error,) = read(lines, written(tmp_path / "x.gz", packed))
    assert 200_000 < len(found) < 500_000
    assert f"after line {len(found):,}" in error


def test_an_xz_header_that_requests_much_memory_is_refused(tmp_path):
    small = lzma.compress(b"a\n", filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 4096}])
    assert list(lines(written(tmp_path / "a.xz", small), Errors())) == [(1, "a")]
    header = bytearray(small)
    header[header.index(b"\x21\x01") + 2] = 40  # the size of the dictionary: 4 GiB
    block = header[12 : 12 + (header[12] + 1) * 4 - 4]
    header[12 + len(block) : 12 + len(block) + 4] = zlib.crc32(block).to_bytes(4, "little")
    with pytest.raises(BadItem, match=r"b\.xz.*emory usage limit"):
        list(lines(written(tmp_path / "b.xz", header), Errors()))


def test_only_regular_files_are_read(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(lines(tmp_path / "nowhere", Errors()))
    os.mkfifo(tmp_path / "pipe")
    for name, message in ((".", "folder"), ("pipe", "pipe: .* a pipe or a device"), ("nul\0", "cannot be opened")):
        with pytest.raises(BadItem, match=message):
            list(lines(f"{tmp_path}/{name}", Errors()))


@given(st.binary(), st.sampled_from(["repr", "hex", "octal"]))
@example(b"\\x41\\", "repr")
@example(b"'\"", "repr")
def test_literals_of_python_are_read(data, form):
    escaped = "".join(f"\\x{byte:02X}" if form == "hex" else f"\\{byte:03o}" for byte in data)
    assert bytes_literal(repr(data) if form == "repr" else f"b'{escaped}'") == data


@pytest.mark.parametrize(
    "text", ["", "'a'", "rb'a'", " b'a'", "b'", "b'a' ", r"b'a\'", "b'a'b'c'", "b'a' + b'c'", r"b'\400'", "b'é'", "b'\n'"]
)
def test_other_text_is_no_literal(text):
    with pytest.raises(ValueError, match=r"at offset \d+: "):
        bytes_literal(text)


VALID = [*(f"\\{c}" for c in "\\'\"nrtabfv"), r"\x4a", r"\xFF", r"\0", r"\12", r"\377", *"ax7b #+"]
ODD = [r"\q", r"\8", "\\\n", r"\x4", r"\400", r"\u0041", *"'\"\\é\n\r\0"]


@given(st.lists(st.sampled_from(VALID + ODD), max_size=8), st.sampled_from("'\""))
@example(VALID, "'")
def test_what_is_read_as_a_literal_is_what_python_reads(pieces, quote):
    literal = f"b{quote}{''.join(pieces)}{quote}"
    try:
        found = bytes_literal(literal)
    except ValueError:
        assert set(pieces) & set(ODD)
    else:
        assert found == ast.literal_eval(literal)  # the warning about an unknown escape would be an error
