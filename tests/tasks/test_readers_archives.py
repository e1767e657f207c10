"""Archives from strangers: what independent writers packed comes back, nothing leaves the folder, and what is wrong is named."""

import io
import os
import stat
import tarfile
import tracemalloc
import zipfile

import pytest

from permuteformer.tasks.readers import archives, tars
from permuteformer.tasks.readers.archives import extract, members
from permuteformer.tasks.readers.entries import Entry
from permuteformer.tasks.readers.problems import BadItem, Problems


def skipped(path, wanted):
    """What comes, and the problems in words."""
    problems = Problems(skip=True)
    return list(members(path, problems, wanted=wanted)), problems.shown


def written(path, data):
    path.write_bytes(data)
    return path


def everything(name):
    return True


FILES = {"b/two.txt": b"two", "a/one.txt": b"1" * 5000, "a/" + "long" * 60 + ".txt": b"long", "é.txt": b"", "z/big": b"z" * 20_000}


def tar_bytes(files=FILES, mode="w", format=tarfile.PAX_FORMAT, folders=()):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=format) as tar:
        for name in folders:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def zip_bytes(files=FILES, packing=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", packing) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return file.getvalue()


def read_members(path, wanted=everything):
    return list(members(path, Problems(), wanted=wanted))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("x.tar", "w"),
        ("x.tar.gz", "w:gz"),
        ("x.tgz", "w:gz"),
        ("lra_release.gz", "w:gz"),
        ("x.tar.xz", "w:xz"),
        ("x.tar.bz2", "w:bz2"),
        ("no ending", "w:xz"),
    ],
)
@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_tar_of_another_writer(tmp_path, name, mode, format):
    path = written(tmp_path / name, tar_bytes(mode=mode, format=format, folders=["a", "b/"]))
    assert read_members(path) == list(FILES.items())
    assert read_members(path, lambda name: name.startswith("a/")) == [(n, d) for n, d in FILES.items() if n.startswith("a/")]


def test_tar_of_the_systems_tar(tmp_path):
    for name, data in FILES.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    for format in ("gnu", "posix", "ustar", "v7"):
        wanted = {name: data for name, data in FILES.items() if len(name) < 90}
        command = f"cd '{tmp_path}/in' && tar --format={format} -cf ../{format}.tar --exclude '*long*' ."
        assert os.system(command) == 0
        assert dict(read_members(tmp_path / f"{format}.tar")) == wanted  # without "./" before the names


@pytest.mark.parametrize("name", ["x.zip", "no ending"])
@pytest.mark.parametrize("packing", [zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])
def test_zip_of_another_writer(tmp_path, name, packing):
    path = written(tmp_path / name, zip_bytes({"a/": b"", **FILES}, packing))
    assert read_members(path) == list(FILES.items())


def test_folder(tmp_path):
    for name, data in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert dict(read_members(tmp_path)) == FILES
    assert [name for name, _ in read_members(tmp_path)] == ["é.txt", "a/" + "long" * 60 + ".txt", "a/one.txt", "b/two.txt", "z/big"]


def test_links_in_a_folder(tmp_path):
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "real").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (folder / "inner").symlink_to("sub/real")
    (folder / "outer").symlink_to("../outside/secret")
    (folder / "nothing").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    (folder / "folder").symlink_to("../outside")
    (folder / "sub" / "up").symlink_to("..")
    found, problems = skipped(folder, wanted=everything)
    assert found == [("inner", b"inside"), ("sub/real", b"inside")]
    assert [problem.split(":")[0] for problem in problems] == [str(folder / n) for n in ("circle", "folder", "nothing", "outer", "sub/up")]
    # Not wanted, not looked at; but what is behind a link out of the folder cannot be known.
    found, problems = skipped(folder, wanted=lambda name: name == "inner")
    assert len(found) == 1
    assert [problem.split(":")[0] for problem in problems] == [str(folder / "folder")]


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadItem, match="pipe: this is a pipe or a device"):
        read_members(tmp_path)


EVIL = ["../evil", "a/../../evil", "/evil", "//evil", "C:evil", "c:/evil", "a\\..\\evil", "\\evil", "..", "a/..", "./../evil"]


@pytest.mark.parametrize("name", EVIL)
@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_names_that_lead_out(tmp_path, name, make):
    archive = written(tmp_path / "archive", make({"good": b"1", name: b"evil", "better": b"2"}))
    found, problems = skipped(archive, wanted=lambda name: "evil" not in name)
    assert found == [("good", b"1"), ("better", b"2")]
    assert len(problems) == 1
    assert "archive: " in problems[0]
    assert "its name" in problems[0]
    (tmp_path / "deep" / "target").mkdir(parents=True)
    problems = Problems(skip=True)
    assert extract(archive, tmp_path / "deep" / "target", everything, problems) == 2
    assert problems.count == 1
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["archive", "better", "good"]


def test_a_name_with_nul(tmp_path):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("good")
        info.pax_headers = {"path": "good\0evil"}
        tar.addfile(info)
    with pytest.raises(BadItem, match="its name holds a NUL byte"):
        read_members(written(tmp_path / "x.tar", file.getvalue()))
    with pytest.raises(BadItem, match="its name holds a NUL byte"):
        read_members(written(tmp_path / "x.zip", zip_bytes({"goodXevil": b""}).replace(b"goodX", b"good\0")))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"V"])
def test_what_is_no_file_in_a_tar(tmp_path, kind):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("special")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
        info = tarfile.TarInfo("special/file")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"data"))
    path = written(tmp_path / "x.tar", file.getvalue())
    found, problems = skipped(path, wanted=everything)
    assert found == [("special/file", b"data")]
    assert len(problems) == 1
    assert "only regular files are read" in problems[0]
    assert extract(path, tmp_path / "out", everything, Problems(skip=True)) == 1
    assert not (tmp_path / "out" / "special").is_symlink()


@pytest.mark.parametrize(("mode", "said"), [(stat.S_IFLNK, "a link"), (stat.S_IFIFO, "a pipe or a device")])
def test_what_is_no_file_in_a_zip(tmp_path, mode, said):
    info = zipfile.ZipInfo("special")
    info.external_attr = (mode | 0o644) << 16
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr(info, "/etc/passwd")
        archive.writestr("good", "good")
    found, problems = skipped(tmp_path / "x.zip", wanted=everything)
    assert found == [("good", b"good")]
    assert f"this is {said}" in problems[0]


def patched_zip(patch):
    """A zip of "first" and "second" with bytes of the first one's two headers changed, at the same offset after their signatures."""
    data = bytearray(zip_bytes({"first": b"1" * 1000, "second": b"2"}))
    for signature, shift in ((b"PK\x03\x04", 0), (b"PK\x01\x02", 2)):
        at = data.index(signature) + 4 + shift
        for offset, value in patch.items():
            data[at + offset : at + offset + len(value)] = value
    return bytes(data)


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        ({2: b"\x01\x00"}, "an encrypted member"),
        ({4: b"\x63\x00"}, "packed by zip's method 99"),
        ({4: b"\x0c\x00"}, "packed by zip's method 12"),
        ({10: b"\0\0\0\0"}, "Bad CRC-32"),
        ({18: b"\x05\0\0\0"}, "cannot be unpacked"),
        ({18: b"\xff\xff\xff\x7f"}, "it has more than"),
    ],
)
def test_members_of_a_zip_that_cannot_be_unpacked(tmp_path, patch, said):
    path = written(tmp_path / "x.zip", patched_zip(patch))
    found, problems = skipped(path, wanted=everything)
    assert found == [("second", b"2")]
    assert len(problems) == 1
    assert "x.zip: first: " in problems[0]
    assert said in problems[0]


def test_a_zip_whose_members_overlap(tmp_path):
    data = zip_bytes({"a": os.urandom(1000)}, zipfile.ZIP_STORED)
    start, end = data.index(b"PK\x01\x02"), data.index(b"PK\x05\x06")
    tail = bytearray(data[end:])
    tail[8:12] = b"\x03\0\x03\0"
    tail[12:16] = (3 * (end - start)).to_bytes(4, "little")
    path = written(tmp_path / "x.zip", data[:start] + data[start:end] * 3 + tail)
    with pytest.raises(BadItem, match="its members overlap"):
        read_members(path)


@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_members_over_the_limit(tmp_path, make, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 5000)
    path = written(tmp_path / "x", make())
    found, problems = skipped(path, wanted=everything)
    assert [name for name, _ in found] == list(FILES)[:4]
    assert "z/big: it has more than 5,000 bytes" in problems[0]
    assert extract(path, tmp_path / "out", everything) == len(FILES)  # the disk holds more than memory does


def test_a_file_over_the_limit_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 3)
    written(tmp_path / "a", b"four")
    written(tmp_path / "b", b"yes")
    found, problems = skipped(tmp_path, wanted=everything)
    assert found == [("b", b"yes")]
    assert len(problems) == 1


def test_a_member_that_is_longer_than_it_says(monkeypatch):
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 5000)
    asked = []
    endless = iter(lambda: asked.append(1) or b"x" * 1000, None)
    with pytest.raises(BadItem, match="more than 5,000 bytes"):
        archives._whole("name", Entry("place", "name", "file", 1, lambda: endless))
    assert len(asked) == 6


def test_extracting_stops_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_EXTRACTED_BYTES", 6000)
    path = written(tmp_path / "x.tar", tar_bytes())
    with pytest.raises(BadItem, match="ends early in z/big: more than 6,000 bytes would be written"):
        extract(path, tmp_path / "out", everything)
    assert not (tmp_path / "out" / "z" / "big").exists()  # half a file would look like a whole one


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tar.xz", "x.tar.bz2"])
def test_a_tar_that_is_cut_anywhere_says_so(tmp_path, name):
    whole = tar_bytes({f"member {n}": os.urandom(300) for n in range(8)}, "w" if name == "x.tar" else f"w:{name[6:]}")
    end = len(whole.rstrip(b"\0")) + 512 if name == "x.tar" else len(whole)
    for size in [1, 100, *range(512, end - 1024, 509), end - 513, end - 1]:
        if name == "x.tar" and size > end - 513:
            continue  # only padding is missing
        problems = Problems(skip=True)
        found = list(members(written(tmp_path / name, whole[:size]), problems, wanted=everything))
        assert [member for member, _ in found] == [f"member {n}" for n in range(len(found))]
        assert all(len(data) == 300 for _, data in found)
        assert problems.count == 1, size
        assert "ends early" in problems.shown[0]


def test_two_tars_in_one_file_are_not_taken_for_one(tmp_path):
    with pytest.raises(BadItem, match="something comes after the end mark"):
        read_members(written(tmp_path / "x.tar", tar_bytes() * 2))


@pytest.mark.parametrize(
    ("type", "size", "said"),
    [
        (b"x", 1 << 40, "a header has 1,099,511,627,776 bytes"),
        (b"g", 2 << 20, "a header has 2,097,152 bytes"),
        (b"L", 1 << 33, "a header has 8,589,934,592 bytes"),
        (b"0", -1, "a negative size"),
        (b"S", 0, "a sparse file"),
        (b"0", 1 << 50, "the archive is cut off"),
    ],
)
def test_headers_that_ask_for_too_much(tmp_path, type, size, said):
    info = tarfile.TarInfo("x")
    info.type, info.size = type, size
    header = info.tobuf(tarfile.GNU_FORMAT)
    found, problems = skipped(written(tmp_path / "x.tar", header + bytes(2048)), everything)
    assert found == []
    assert said in problems[-1]


def test_a_sparse_file_of_the_newer_kind_is_not_taken_for_its_map(tmp_path):
    with open(tmp_path / "holes", "wb") as file:
        file.truncate(1 << 20)
        file.seek(500_000)
        file.write(b"data")
    written(tmp_path / "plain", b"plain")
    assert os.system(f"cd '{tmp_path}' && tar --format=posix --sparse -cf x.tar holes plain") == 0
    found, problems = skipped(tmp_path / "x.tar", everything)
    assert found == [("plain", b"plain")]
    assert "a sparse file" in problems[0]


@pytest.mark.parametrize("type", [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_what_has_a_size_but_no_data(tmp_path, type):
    info = tarfile.TarInfo("x")
    info.type, info.size = type, 5000  # of a folder on some disks, or of a link's target
    header = info.tobuf(tarfile.GNU_FORMAT)
    path = written(tmp_path / "x.tar", header + tar_bytes({"file": b"data"}))
    with tarfile.open(path) as tar:
        assert tar.getnames() == ["x", "file"]
    assert read_members(path, lambda name: name == "file") == [("file", b"data")]


@pytest.mark.parametrize(
    "records",
    [b"5 a=b\n", b"0 a=b\n", b"99 a=b\n", b"x a=b\n", b"6 ab\n\n", b"-6 a=b\n", b"9" * 600 + b" a=b\n", b"11 size=-1\n", b"10 size=x\n"],
)
def test_extended_headers_that_are_damaged(tmp_path, records):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    data = info.tobuf() + records.ljust(-(-len(records) // 512) * 512, b"\0") + tarfile.TarInfo("y").tobuf() + bytes(1024)
    with pytest.raises(BadItem, match="an extended header is damaged"):
        read_members(written(tmp_path / "x.tar", data))


def test_many_extended_records_take_linear_time():
    records = b"6 a=b\n" * ((1 << 20) // 6)
    assert tars._records(records + b"10 path=x\n") == {"path": b"x"}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the file is empty"),
        (bytes(1024), "no members"),
        (zip_bytes({}), "no members"),
        (b"no archive" * 100, "no header of a tar archive"),
        (b"PK\x03\x04 no", "zip archive"),
    ],
)
def test_what_is_no_archive(tmp_path, data, said):
    path = written(tmp_path / "x", data)
    with pytest.raises(BadItem, match=f"x: ends early at its start: .*{said}"):
        read_members(path)
    with pytest.raises(BadItem, match=said):
        extract(path, tmp_path / "out", everything)
    with pytest.raises(FileNotFoundError):
        read_members(tmp_path / "nowhere")


def test_an_archive_of_many_members_takes_no_memory(tmp_path):
    path = written(tmp_path / "x.tar.gz", tar_bytes({f"folder/{n}": b"x" for n in range(3000)}, "w:gz"))
    tracemalloc.start()
    try:
        assert sum(1 for _ in members(path, Problems(), wanted=everything)) == 3000
        assert tracemalloc.get_traced_memory()[1] < 6 << 20  # tarfile holds 3 kB for each
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_extract(tmp_path, make):
    path = written(tmp_path / "x", make())
    assert extract(path, tmp_path / "new" / "out", lambda name: name != "z/big") == len(FILES) - 1
    found = {str(file.relative_to(tmp_path / "new" / "out")): file.read_bytes() for file in (tmp_path / "new").rglob("*") if file.is_file()}
    assert found == {name: data for name, data in FILES.items() if name != "z/big"}


def test_extract_writes_over_nothing(tmp_path):
    path = written(tmp_path / "x.tar", tar_bytes({"a": b"new", "b/c": b"new"}))
    (tmp_path / "out").mkdir()
    written(tmp_path / "out" / "a", b"old")
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert (tmp_path / "out" / "a").read_bytes() == b"old"
    assert "is there already" in problems.shown[0]


@pytest.mark.parametrize("files", [{"a": b"file", "a/b": b"below"}, {"a/b": b"below", "a": b"file"}])
@pytest.mark.parametrize("make", [tar_bytes, zip_bytes])
def test_a_file_that_is_a_folder_too(tmp_path, files, make):
    path = written(tmp_path / "x", make(files))
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert problems.count == 1
    with pytest.raises(BadItem, match="is there already"):
        extract(path, tmp_path / "again", everything)


@pytest.mark.parametrize("link", ["sub", "a"])
def test_extract_goes_through_no_link(tmp_path, link):
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / link).symlink_to(tmp_path / "elsewhere")
    path = written(tmp_path / "x.tar", tar_bytes({"sub/deep/file": b"evil", "a": b"evil"}))
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert problems.count == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_member_that_cannot_be_written_is_a_problem(tmp_path):
    path = written(tmp_path / "x.tar", tar_bytes({"n" * 300: b"", "good": b""}))
    problems = Problems(skip=True)
    assert extract(path, tmp_path / "out", everything, problems) == 1
    assert "too long" in problems.shown[0]
