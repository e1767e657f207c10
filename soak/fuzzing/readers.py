"""Files of data: every reader, on files of every format that were changed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from permuteformer.tasks.readers.archives import extract, members
from permuteformer.tasks.readers.images import FORMATS, cifar_batch, gray_image
from permuteformer.tasks.readers.lines import lines, raw_lines
from permuteformer.tasks.readers.literals import bytes_literal
from permuteformer.tasks.readers.problems import Problems
from permuteformer.tasks.readers.tables import column_names, rows
from soak.fuzzing.judge import Target, Wrong, wrong_words
from soak.fuzzing.mutation import changed_bytes

PACKERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


TAR_MEMBERS = (("a.txt", tarfile.REGTYPE, ""), ("b/ü" + "x" * 110, tarfile.REGTYPE, ""), ("l", tarfile.SYMTYPE, "/"))


class Files:
    """Files of one format, each changed and read; ``read`` gives what could not be used to ``problems``."""

    names: tuple[str, ...] = ("file",)
    """A file has the name of its place among the examples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.examples = self.make()
        self.others = list(self.examples)

    def make(self) -> list[bytes]:
        """Good files."""
        raise NotImplementedError

    def read(self, path: Path, problems: Problems, random: Random) -> None:
        """All of a file."""
        raise NotImplementedError

    def attempt(self, random: Random) -> bool:
        place = random.randrange(len(self.examples))
        path = self.folder / self.names[place % len(self.names)]
        path.write_bytes(changed_bytes(random, self.examples[place], self.others))
        problems = Problems(skip=random.random() < 0.7)
        self.read(path, problems, random)
        for said in problems.shown:
            if wrong := wrong_words(said):
                raise Wrong(f"{wrong}: {said!r:.200}")
        return not problems.count


class Lines(Files):
    """Texts, packed and not."""

    names = tuple(f"text.txt{packing}" for packing in PACKERS)

    def make(self) -> list[bytes]:
        text = "first\nsecond \r\ndritte Zeile ä\n\nlast ".encode() * 3
        return [pack(text) for pack in PACKERS.values()]

    def read(self, path: Path, problems: Problems, random: Random) -> None:
        for _ in lines(path, problems) if random.random() < 0.7 else raw_lines(path, problems):
            pass


class Tables(Files):
    """Names of columns, and rows."""

    def read(self, path: Path, problems: Problems, random: Random) -> None:
        column_names(path)
        for _ in rows(path, problems):
            pass


class Csv(Tables):
    """Packed and not."""

    names = tuple(f"table.csv{packing}" for packing in PACKERS)

    def make(self) -> list[bytes]:
        text = 'text,label,id\n"a, ""b""\nc",good,1\nplain,bad,2\n"ü",good,3\n'.encode()
        return [pack(text) for pack in PACKERS.values()]


class Tsv(Tables):
    """With one column and two."""

    names = ("table.tsv",)

    def make(self) -> list[bytes]:
        return [b"Source\tTarget\r\n( [MAX 1 2 ) ]\t2\r\n3\t3\r\n", b"text\nonly one\n\nthree\n"]


class JsonLines(Tables):
    """As ASCII and as UTF-8."""

    names = ("table.jsonl",)

    def make(self) -> list[bytes]:
        entries = [{"text": "a\u202e", "label": 1, "more": [1.5, None, {"x": True}]}, {"text": "b", "label": 2, "more": {}}]
        return ["".join(json.dumps(entry, ensure_ascii=ascii_only) + "\n" for entry in entries).encode() for ascii_only in (True, False)]


class Parquet(Tables):
    """Of several codecs."""

    names = ("table.parquet",)

    def make(self) -> list[bytes]:
        table = pa.table({"text": [f"text {n}" for n in range(12)], "label": [n % 2 for n in range(12)], "tags": [[n] for n in range(12)]})
        made = []
        for codec in ("none", "snappy", "gzip", "zstd"):
            file = io.BytesIO()
            pq.write_table(table, file, row_group_size=5, compression=codec, write_page_checksum=codec == "none")
            made.append(file.getvalue())
        return made


class Archives(Files):
    """Members, and now and then all of them unpacked."""

    def read(self, path: Path, problems: Problems, random: Random) -> None:
        if random.random() < 0.8:
            for name, _ in members(path, problems, wanted=lambda name: True):
                if not (self.folder / name).resolve().is_relative_to(self.folder.resolve()):
                    raise Wrong(f"the name {name!r} leads out")
            return
        target = self.folder / "unpacked"
        shutil.rmtree(target, ignore_errors=True)
        extract(path, target, lambda name: True, problems)
        if any(found.is_symlink() for found in target.rglob("*")):
            raise Wrong("a link was made")


class Tars(Archives):
    """Packed and not."""

    names = ("archive.tar", "archive.tar.gz", "archive.tar.xz", "archive.tar.bz2")

    def make(self) -> list[bytes]:
        made = []
        for mode in ("w", "w:gz", "w:xz", "w:bz2"):
            file = io.BytesIO()
            with tarfile.open(fileobj=file, mode=mode, format=tarfile.PAX_FORMAT) as tar:
                for name, kind, link in TAR_MEMBERS if mode in ("w:xz", "w:bz2") else TAR_MEMBERS[:2]:
                    info = tarfile.TarInfo(name)
                    info.type, info.linkname, info.size = kind, link, 20 if kind == tarfile.REGTYPE else 0
                    tar.addfile(info, io.BytesIO(bytes(20)))
            made.append(file.getvalue())
        return made


class Zips(Archives):
    """Stored and packed."""

    names = ("archive.zip",)

    def make(self) -> list[bytes]:
        made = []
        for packing in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            file = io.BytesIO()
            with zipfile.ZipFile(file, "w", packing) as archive:
                for name in ("a.txt", "b/c.txt", "ü.txt"):
                    archive.writestr(name, b"content " * 4)
            made.append(file.getvalue())
        return made


class Bytes(Files):
    """What is read from memory."""

    def attempt(self, random: Random) -> bool:
        self.take(changed_bytes(random, random.choice(self.examples), self.others), random)
        return True

    def take(self, data: bytes, random: Random) -> None:
        raise NotImplementedError


class Images(Bytes):
    """Of every format and mode that Pillow writes."""

    def make(self) -> list[bytes]:
        Image.init()
        picture = Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3))
        made = []
        for format in FORMATS:
            for mode in ("RGB", "L", "P", "RGBA", "1"):
                file = io.BytesIO()
                try:
                    picture.convert(mode).save(file, format)
                except (OSError, KeyError, ValueError):  # which it cannot write, or not in this mode
                    continue
                made.append(file.getvalue())
        return made

    def take(self, data: bytes, random: Random) -> None:
        gray_image(data, random.choice((None, (4, 4))))


class Pickles(Bytes):
    """Of every protocol."""

    def make(self) -> list[bytes]:
        batch = {"labels": [1, 2], "data": np.zeros((2, 3072), np.uint8), "more": ("x", b"y", None)}
        return [pickle.dumps(batch, protocol) for protocol in (0, 2, 4, 5)] + [pickle.dumps({b"labels": [1], b"a": list("ab")}, 2)]

    def take(self, data: bytes, random: Random) -> None:
        cifar_batch(data)


class Literals(Bytes):
    """Bytes as Python writes them."""

    def make(self) -> list[bytes]:
        return [repr(bytes(range(256))).encode(), b"b'caf\\xc3\\xa9\\n'", b'b"\\377 \\0\\\'"']

    def take(self, data: bytes, random: Random) -> None:
        bytes_literal(data.decode("utf-8", "surrogateescape"))


TARGETS: dict[str, type[Target]] = {
    "lines": Lines,
    "csv": Csv,
    "tsv": Tsv,
    "json lines": JsonLines,
    "parquet": Parquet,
    "tar": Tars,
    "zip": Zips,
    "images": Images,
    "pickles of CIFAR": Pickles,
    "literals": Literals,
}
