"""Archives and folders: what independent writers packed is read, nothing leaves the folder, and what is wrong is named."""

import contextlib
import os
import stat
import subprocess
import tarfile
import tempfile
import tracemalloc
import zipfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_data import read, tar_bytes, written, zip_bytes

from permuteformer.tasks.readers import archives, text
from permuteformer.tasks.readers.archives import extract, members, names, read_inside
from permuteformer.tasks.readers.errors import BadItem, Errors

FILES = [("b/two.txt", b"two"), ("a/one.txt", b"1" * 5000), ("a/" + "long" * 60, b"long"), ("é.txt", b""), ("z/big", b"z" * 20_000)]
both = pytest.mark.parametrize("make", [tar_bytes, zip_bytes])


def everything(name):
    return True


def read_all(path, wanted=everything):
    return list(members(path, Errors(), wanted=wanted))


def skip_bad(path, wanted=everything):
    return read(members, path, wanted=wanted)


def files_of(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


FORMS = {f"x.t{mode}": partial(tar_bytes, mode=f"w:{mode}") for mode in ("gz", "xz", "bz2")}
FORMS |= {"x.tar": tar_bytes, "gnu.tar": partial(tar_bytes, format=tarfile.GNU_FORMAT)}
FORMS |= {"x.zip": zip_bytes, "stored.zip": partial(zip_bytes, compression=zipfile.ZIP_STORED)}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("named", [True, False])
def test_archives_of_other_writers(tmp_path, name, named):
    path = written(tmp_path / (name if named else "no ending"), FORMS[name]([("a/", b""), *FILES]))
    assert read_all(path) == FILES
    assert read_all(path, lambda name: name.startswith("a/")) == FILES[1:3]
    assert names(path, Errors(), everything) == [name for name, _ in FILES]
    assert extract(path, tmp_path / "new" / "out", lambda name: name != "z/big") == 4
    with pytest.raises(FileExistsError):
        extract(path, tmp_path / "new" / "out", everything)
    assert files_of(tmp_path / "new" / "out") == dict(FILES[:4])


@pytest.mark.parametrize("format", ["gnu", "posix", "ustar", "v7"])
def test_tar_of_the_systems_tar(tmp_path, format):
    short = {name: content for name, content in FILES if len(name) < 90}
    for name, content in short.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content)
    subprocess.run(["tar", f"--format={format}", "-cf", "x.tar", "-C", "in", "."], cwd=tmp_path, check=True)
    assert dict(read_all(tmp_path / "x.tar")) == short, "without ./ before the names"
    folders_first = dict(sorted(short.items(), key=lambda item: ("/" in item[0], item[0])))
    assert read_all(tmp_path / "in") == list(folders_first.items())


def test_only_regular_files_inside_a_folder_are_read(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "real").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    bad = {"outer": "../outside/secret", "nothing": "nowhere", "loop": "loop", "folder": "../outside", "sub/up": ".."}
    for name, target in {"inner": "sub/real", **bad}.items():
        (folder / name).symlink_to(target)
    os.mkfifo(folder / "pipe")  # opening it would wait
    found, errors = skip_bad(folder)
    assert found == [("inner", b"inside"), ("sub/real", b"inside")]
    assert [error.split(":")[0] for error in errors] == [str(folder / name) for name in sorted([*bad, "pipe"])]
    found, (error,) = skip_bad(folder, lambda name: name == "inner")
    assert len(found) == 1
    assert f"{folder / 'folder'}: " in error, "a folder elsewhere, even if no file below it is wanted"


@pytest.mark.parametrize(
    "name", ["../evil", "a/../../evil", "/evil", "//evil", "C:evil", "c:/evil", "a\\..\\evil", "\\evil", "..", "a/..", "./../evil"]
)
@both
def test_names_that_lead_out_are_errors(tmp_path, name, make):
    archive = written(tmp_path / "archive", make([("good", b"1"), (name, b"evil"), ("better", b"2")]))
    found, (error,) = skip_bad(archive, lambda name: "evil" not in name)
    assert found == [("good", b"1"), ("better", b"2")]
    assert "archive: " in error
    with pytest.raises(BadItem, match="archive: "):
        extract(archive, tmp_path / "deep" / "target", everything)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["archive", "good"]


@both
@given(st.lists(st.tuples(st.text("ab/.\\:Cé\n", min_size=1, max_size=12), st.binary(max_size=30)), min_size=1, max_size=6))
def test_files_of_any_name_stay_in_the_folder(make, files):
    with tempfile.TemporaryDirectory() as place:
        archive, folder = written(Path(place, "archive"), make(files)), Path(place, "a", "b", "c", "d")
        found, _ = skip_bad(archive)
        assert not any({"..", ".", ""} & set(name.split("/")) for name, _ in found)
        left = iter([content for _, content in files])
        assert all(any(content == other for other in left) for _, content in found), "in their order"
        with contextlib.suppress(BadItem):
            assert extract(archive, folder, everything) == len(files_of(folder))
        made = [path for path in Path(place).rglob("*") if path.is_file() and path != archive]
        assert all(path.is_relative_to(folder) for path in made)


def test_a_name_with_nul_is_an_error(tmp_path):
    info = tarfile.TarInfo("good")
    info.pax_headers = {"path": "good\0evil"}
    zipped = zip_bytes([("goodXevil", b"")]).replace(b"goodX", b"good\0")
    nameless = zip_bytes([("Xevil", b"")]).replace(b"Xevil", b"\0evil")
    archives = {"x.tar": info.tobuf(tarfile.PAX_FORMAT) + bytes(1024), "x.zip": zipped, "y.zip": nameless}
    for name, data in archives.items():
        with pytest.raises(BadItem, match=rf"{name}: (good)?\\x00evil: .* NUL"):
            read_all(written(tmp_path / name, data))


def tar_entry(type, size=0, name="special"):
    info = tarfile.TarInfo(name)
    info.type, info.size, info.linkname = type, size, "/etc/passwd"
    return info.tobuf(tarfile.GNU_FORMAT)


def zip_entry(type):
    info = zipfile.ZipInfo("special")
    info.external_attr = (type | 0o644) << 16
    return info, b"/etc/passwd"


TAR_TYPES = (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V", b"S")
SPECIAL = {f"tar {type}": tar_entry(type) + tar_bytes([("special/file", b"data")]) for type in TAR_TYPES}
SPECIAL |= {f"zip {type}": zip_bytes([zip_entry(type), ("special/file", b"data")]) for type in (stat.S_IFLNK, stat.S_IFIFO)}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_read(tmp_path, kind):
    path = written(tmp_path / "archive", SPECIAL[kind])
    found, (error,) = skip_bad(path)
    assert found == [("special/file", b"data")]
    assert "special: this is a" in error
    with pytest.raises(BadItem, match="special: "):
        extract(path, tmp_path / "all", everything)
    assert files_of(tmp_path / "all") == {}
    assert extract(path, tmp_path / "some", lambda name: name == "special/file") == 1


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({2: b"\x01\x00"}, "encrypted"),
        ({4: b"\x63\x00"}, "method 99"),
        ({4: b"\x0c\x00"}, "method 12"),
        ({10: b"\0\0\0\0"}, "Bad CRC-32"),
        ({18: b"\x05\0\0\0"}, "cannot be read"),
        ({18: b"\xff\xff\xff\x7f"}, "limit of 536,870,912"),
    ],
)
def test_damaged_members_of_a_zip(tmp_path, patch, message):
    data = bytearray(zip_bytes([("first", b"1" * 1000), ("second", b"2")]))
    for signature, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):  # the same fields of both headers of the first member
        at = data.index(signature) + 4 + shift
        for offset, value in patch.items():
            data[at + offset : at + offset + len(value)] = value
    found, (error,) = skip_bad(written(tmp_path / "x.zip", data))
    assert found == [("second", b"2")]
    assert "x.zip: first: " in error
    assert message in error


def test_a_zip_whose_members_overlap(tmp_path):
    data = zip_bytes([("a", os.urandom(1000))], zipfile.ZIP_STORED)
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    tail = bytearray(data[end:])
    tail[8:12] = b"\x03\0\x03\0"
    tail[12:16] = (3 * (end - start)).to_bytes(4, "little")
    with pytest.raises(BadItem, match=r"x\.zip: .*overlap"):
        read_all(written(tmp_path / "x.zip", data[:start] + data[start:end] * 3 + tail))


@pytest.mark.parametrize("name", ["x.tgz", "x.txz", "x.tbz2", "x.zip"])
def test_a_bomb_is_refused_and_leaves_nothing(tmp_path, name, monkeypatch):
    monkeypatch.setattr(text, "MAX_FREE_BYTES", 1 << 20)
    path = written(tmp_path / "bomb", FORMS[name]([(str(n), bytes(1 << 20)) for n in range(4)]))
    for use in (read_all, lambda path: extract(path, tmp_path / "out", lambda name: name == "3")):
        with pytest.raises(BadItem, match="bomb: .*200 times its size"):
            use(path)
    assert not list((tmp_path / "out").glob("*"))


@both
def test_members_over_the_limit_are_errors_but_can_be_extracted(tmp_path, make, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 5000)
    path = written(tmp_path / "x", make(FILES))
    found, (error,) = skip_bad(path)
    assert found == FILES[:4]
    assert "x: z/big: " in error
    assert "5,000" in error
    assert extract(path, tmp_path / "out", everything) == len(FILES)
    assert skip_bad(tmp_path / "out")[1][0].startswith(f"{tmp_path / 'out' / 'z' / 'big'}: ")


def test_extraction_stops_at_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_EXTRACTED_BYTES", 6000)
    with pytest.raises(BadItem, match="at z/big: .*6,000"):
        extract(written(tmp_path / "x.tar", tar_bytes(FILES)), tmp_path / "out", everything)
    assert not (tmp_path / "out" / "z" / "big").exists()


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_a_truncated_tar_is_an_error_after_its_last_member(tmp_path, mode):
    files = [(f"member {n}", os.urandom(300)) for n in range(8)]
    whole = tar_bytes(files, mode)
    end = len(whole.rstrip(b"\0")) + 512 if mode == "w" else len(whole)
    for size in [1, 100, *range(512, end - 1024, 509), end - 513, *([end - 1] if mode != "w" else [])]:  # at the end only padding misses
        found, (error,) = skip_bad(written(tmp_path / "x.tar", whole[:size]))
        assert found == files[: len(found)]
        assert "x.tar: reading stopped" in error


@pytest.mark.parametrize("type", [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_entries_with_a_size_but_no_data(tmp_path, type):
    """The size is that of a folder on some disks, or of a link's target."""
    path = written(tmp_path / "x.tar", tar_entry(type, 5000) + tar_bytes([("file", b"data")]))
    assert read_all(path, lambda name: name == "file") == [("file", b"data")]


def extended_header(records):
    padded = records.ljust(-(-len(records) // 512) * 512, b"\0")
    return tar_entry(tarfile.XHDTYPE, len(records)) + padded + tar_bytes([("y", b"")])


UNREADABLE = {
    "empty": (b"", "is empty"),
    "zeros": (bytes(1024), "no members"),
    "zip without members": (zip_bytes([]), "no members"),
    "text": (b"none" * 200, "tar"),
    "damaged zip": (b"PK\x03\x04 no", "zip"),
    "two tars": (tar_bytes(FILES) * 2, "data follows the end"),
    "long extended header": (tar_entry(b"x", 1 << 40) + bytes(2048), "65,536"),
    "long global header": (tar_entry(b"g", 2 << 20) + bytes(2048), "65,536"),
    "long name": (tar_entry(b"L", 1 << 33) + bytes(2048), "65,536"),
    "negative size": (tar_entry(b"0", -1) + bytes(2048), "damaged"),
    "size beyond the end": (tar_entry(b"0", 1 << 50) + bytes(2048), "truncated"),
    "no length of a record": (extended_header(b"0 a=b\n"), "tar"),
    "endless length of a record": (extended_header(b"9" * 600 + b" a=b\n"), "tar"),
    "negative size in a record": (extended_header(b"11 size=-1\n"), "size"),
    "no number in a record": (extended_header(b"10 size=x\n"), "size"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_archives_are_errors(tmp_path, name):
    data, message = UNREADABLE[name]
    path = written(tmp_path / "x", data)
    assert message in skip_bad(path)[1][-1]
    with pytest.raises(BadItem, match="x: "):
        extract(path, tmp_path / "out", everything)


def test_many_members_take_no_memory(tmp_path):
    path = written(tmp_path / "x.tar.gz", tar_bytes([(f"folder/{n}", b"x") for n in range(3000)], "w:gz"))
    tracemalloc.start()
    try:
        assert sum(1 for _ in members(path, Errors(), wanted=everything)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 6 << 20  # tarfile would keep 3 kB for each
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("files", [["a", "a/b"], ["a/b", "a"], ["a", "a"], ["a", "n" * 300]])
@both
def test_a_name_that_cannot_be_written_is_an_error(tmp_path, files, make):
    path = written(tmp_path / "x", make([(name, b"%d" % n) for n, name in enumerate(files)]))
    with pytest.raises(BadItem, match=f"x: {files[1][:100]}"):
        extract(path, tmp_path / "out", everything)
    assert files_of(tmp_path / "out") == {files[0]: b"0"}


@pytest.mark.parametrize(
    "name", ["x" * 5000, "a\0b", "loop/a.png", "out.png", "../a.png", "/etc/passwd", "a/../../b", "pipe.png", "\ud800"]
)
def test_a_name_in_a_file_does_not_lead_out_of_its_folder(name, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "out.png").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match=r"outside|cannot be opened|not found") as error:
        read_inside(name, tmp_path)
    assert str(error.value).isprintable()
