"""A little data of every layout, written for tests."""

import bz2
import gzip
import io
import json
import lzma
import pickle
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from PIL import Image

from permuteformer.tasks.readers.errors import Errors

SHARED = Path(__file__).parents[2] / "shared" / "data"
"""Real data, in a folder beside the project; tests that need it are skipped if it is missing."""

PIECES = [b"a", b",", b"\t", b'"', b"\n", b"\n", b"\r\n", b"\r", b"\0", b"\xff", b"\xef\xbb\xbf", "é".encode(), b"{", b'{"a":1}', b"NaN"]
odd_bytes = st.lists(st.sampled_from(PIECES), max_size=40).map(b"".join) | st.binary(max_size=200)

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}

ROWS = [{"text": f'Größe {n}, "quoted"', "label": ["bad", "good", "ugly"][n % 3]} for n in range(90)]


def csv(rows, names=("text", "label")):
    quoted = [[str(row[name]).replace('"', '""') for name in names] for row in rows]
    return ",".join(names) + "\r\n" + "".join(",".join(f'"{value}"' for value in row) + "\r\n" for row in quoted)


def write(path, rows):
    if path.name.endswith(".csv"):
        path.write_text(csv(rows), newline="")
    elif path.name.endswith(".tsv"):
        path.write_text("label\ttext\n" + "".join(f"{row['label']}\t{row['text']}\n" for row in rows))
    elif path.name.endswith(".jsonl.gz"):
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


class AllErrors(Errors):
    """Skips errors and keeps all of them."""

    def __init__(self):
        super().__init__(skip=True)
        self.all = []

    def add(self, error):
        super().add(error)
        assert str(error).isprintable()
        self.all.append(error)


def read(reader, path, **options):
    """Return what a reader yields, and the messages of the errors that it skips."""
    errors = AllErrors()
    return list(reader(path, errors, **options)), [str(error) for error in errors.all]


def written(path, data):
    path.write_bytes(data)
    return path


def tar_bytes(files, mode="w", format=tarfile.PAX_FORMAT):
    """Return an archive of files, given as pairs of name and content; of folders, whose names end in ``/``."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=format) as tar:
        for name, content in files:
            info = tarfile.TarInfo(name.rstrip("/") if name.endswith("/") else name)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def zip_bytes(files, compression=zipfile.ZIP_DEFLATED):
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a name may occur twice
        with zipfile.ZipFile(file, "w", compression) as archive:
            for name, content in files:
                archive.writestr(name, content)
    return file.getvalue()


def picture(shade, size=(40, 20)):
    file = io.BytesIO()
    Image.new("L", size, shade).save(file, "PNG")
    return file.getvalue()


def acl_imdb(folder):
    texts = {}
    for split in ("train", "test"):
        for label in ("neg", "pos"):
            place = folder / "aclImdb" / split / label
            place.mkdir(parents=True)
            for n in range(10):
                texts[split, label, n] = f"{split} {label} {n} <br /> Gründe".encode()
                (place / f"{n}_{1 if label == 'neg' else 10}.txt").write_bytes(texts[split, label, n])
    (folder / "aclImdb" / "train" / "unsup").mkdir()
    (folder / "aclImdb" / "train" / "unsup" / "0_0.txt").write_text("not one of them")
    (folder / "aclImdb" / "README").write_text("nor this")
    return texts


def cifar_arrays():
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 256, (20, 3072), dtype=np.uint8) for name in [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]}


def cifar(folder):
    (folder / "cifar-10-batches-py").mkdir()
    for name, array in cifar_arrays().items():
        (folder / "cifar-10-batches-py" / name).write_bytes(pickle.dumps({b"data": array, b"labels": [n % 10 for n in range(20)]}, 2))


def png(resolution, shade):
    file = io.BytesIO()
    image = np.zeros((resolution, resolution), dtype=np.uint8)
    image[0, 0] = shade
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def pathfinder(folder, resolution=32, level="curv_contour_length_14", folders=2, images=10):
    place = folder / f"pathfinder{resolution}" / level
    (place / "metadata").mkdir(parents=True)
    number = 0
    for b in range(folders):
        (place / "imgs" / str(b)).mkdir(parents=True)
        lines = []
        for n in range(images):
            (place / "imgs" / str(b) / f"sample_{n}.png").write_bytes(png(resolution, number))
            lines.append(f"imgs/{b} sample_{n}.png {n} {number % 2} 1.0 14 4 2 0.5 1 1\n")
            number += 1
        (place / "metadata" / f"{b}.npy").write_text("".join(lines))
    return place


def listops(folder, lines):
    (folder / "listops-1000").mkdir()
    for split in ("train", "val", "test"):
        (folder / "listops-1000" / f"basic_{split}.tsv").write_bytes(
            ("Source\tTarget\r\n" + "".join(f"{a}\t{b}\r\n" for a, b in lines)).encode()
        )
