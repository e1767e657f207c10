"""Little that would become much: packed files, archives, tables, images, models. Each meets a limit, and is told so."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from permuteformer.folders import content_of, json_of, read_json
from permuteformer.models import PermuteFormerConfig, PermuteFormerModel
from permuteformer.tasks.own import image_bytes
from permuteformer.tasks.prepare import Prepared
from permuteformer.tasks.readers import pages, unpacking
from permuteformer.tasks.readers.archives import extract, members
from permuteformer.tasks.readers.images import MAX_PIXELS, gray_image
from permuteformer.tasks.readers.lines import lines
from permuteformer.tasks.readers.problems import BadItem, Problems
from permuteformer.tasks.readers.tables import rows
from permuteformer.train import checkpoint
from permuteformer.train.resume import put_in_place
from permuteformer.train.state import Cursor, model_tensors, optimizer_tensors, random_state


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_decompression_bombs(ending, pack, tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_FREE_BYTES", 1 << 20)
    bomb, text = tmp_path / f"bomb.txt{ending}", tmp_path / f"text.txt{ending}"
    bomb.write_bytes(pack(b"0" * (4 << 20)))
    with pytest.raises(BadItem, match=r"unpacks to more than .* times its size, as a decompression bomb does; unpack it yourself"):
        list(lines(bomb, Problems()))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        info = tarfile.TarInfo("a.png")
        info.size = 4 << 20
        tar.addfile(info, io.BytesIO(bytes(info.size)))
    (tmp_path / f"bomb.tar{ending}").write_bytes(pack(archive.getvalue()))
    with pytest.raises(BadItem, match="as a decompression bomb does"):
        list(members(tmp_path / f"bomb.tar{ending}", Problems(), wanted=lambda name: True))
    rng = np.random.default_rng(0)
    text.write_bytes(pack(b"\n".join(rng.choice([b"some", b"words", b"of", b"a", b"text"], 300_000).tolist())))
    assert len(list(lines(text, Problems()))) == 300_000


def test_a_bomb_of_many_members(tmp_path, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_FREE_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for n in range(8):
            archive.writestr(f"{n}.png", bytes(1 << 20))
    with pytest.raises(BadItem, match="as a decompression bomb does"):
        list(members(tmp_path / "bomb.zip", Problems(), wanted=lambda name: True))
    with pytest.raises(BadItem, match="as a decompression bomb does"):
        extract(tmp_path / "bomb.zip", tmp_path / "out", lambda name: True)
    assert not list((tmp_path / "out").glob("*"))


def parquet(table, **options):
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def test_a_page_that_unpacks_to_much(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(pa.table({"text": ["x" * (4 << 20)], "label": [1]}), compression="zstd", use_dictionary=False))
    assert path.stat().st_size < 20_000
    assert len(list(rows(path, Problems()))) == 1
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 1 << 20)
    with pytest.raises(BadItem, match=r"rows 1 to 1 cannot be read: a page unpacks to 4,.* the limit is 1,048,576"):
        list(rows(path, Problems()))
    monkeypatch.setattr(pages, "MAX_PAGE_BYTES", 8 << 20)
    monkeypatch.setattr(pages, "MAX_GROUP_BYTES", 1 << 20)
    with pytest.raises(BadItem, match="at a time; the limit"):
        list(rows(path, Problems()))


def test_a_list_of_many_values_in_few_bytes(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(pa.table({"text": ["a"], "more": pa.array([[None] * 100_000], pa.list_(pa.int64()))})))
    assert len(next(rows(path, Problems()))[1]["more"]) == 100_000
    monkeypatch.setattr(pages, "MAX_LIST_VALUES", 1 << 10)
    with pytest.raises(BadItem, match=r"lists of 100,000 values are said to be in .* bytes; do not trust it"):
        list(rows(path, Problems()))


@pytest.mark.parametrize("field", ["unpacked", "packed", "dictionary"])
def test_pages_that_ask_for_more_than_there_is(field, tmp_path):
    """Arrow made room for 2 GB, and wrote zeros there for half a minute."""
    whole = parquet(pa.table({"text": ["some text"] * 3}), compression="none")
    first = re.search(rb"\x15\x04\x15(.)\x15(.)\x4c\x15(.)", whole, re.DOTALL)  # a dictionary's header: kind, unpacked, packed, values
    at = {"unpacked": 1, "packed": 2, "dictionary": 3}[field]
    huge = bytes([0xFE, 0xFF, 0xFF, 0xFF, 0x0F])  # 2^31 - 1
    path = tmp_path / "a.parquet"
    path.write_bytes(whole[: first.start(at)] + huge + whole[first.end(at) :])
    with pytest.raises(BadItem):
        list(rows(path, Problems()))


def test_a_footer_that_ended_the_process(tmp_path):
    """Found by fuzzing: asked for such a column, pyarrow aborts. What the footer says is read here instead."""
    file = tmp_path / "a.parquet"
    file.write_bytes(parquet(pa.table({"a": [[1], [2]]})))
    with file.open("rb") as opened:
        ((column,),) = pages.column_chunks(opened)
    assert column.nested
    assert 0 < column.start < column.end < file.stat().st_size
    for cut in (file.read_bytes()[:-5], b"PAR1" + b"\xff" * 30 + b"\xff\0\0\0PAR1", b"PAR1"):
        file.write_bytes(cut)
        with file.open("rb") as opened, pytest.raises(unpacking.Broken, match="is damaged"):
            pages.column_chunks(opened)


def test_a_footer_that_is_read_in_two_ways(tmp_path, monkeypatch):
    """Found by fuzzing: Arrow saw a group of rows more than we did."""
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet(pa.table({"a": [1]})))
    monkeypatch.setattr("permuteformer.tasks.readers.parquet.column_chunks", lambda file: [])
    with pytest.raises(BadItem, match="its footer is damaged"):
        list(rows(path, Problems()))


def header(format, side):
    """The beginning of an image of so many pixels a side."""
    if format == "PNG":
        chunk = b"IHDR" + struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + b"\0\0\0\0IDAT" + bytes(8)
    if format == "BMP":
        return (
            b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(100)
        )
    if format == "GIF":
        side = min(side, 65535)
        return (
            b"GIF89a"
            + struct.pack("<HHBBB", side, side, 0x80, 0, 0)
            + bytes(6)
            + b","
            + struct.pack("<HHHHB", 0, 0, side, side, 0)
            + b"\x02\x01\0\0;"
        )
    if format == "PPM":
        return f"P5 {side} {side} 255\n".encode() + bytes(100)
    if format == "QOI":
        return b"qoif" + struct.pack(">IIBB", side, side, 3, 0) + bytes(20)
    if format == "TIFF":
        tags = [
            (256, 4, side),
            (257, 4, side),
            (258, 3, 8),
            (259, 3, 1),
            (262, 3, 1),
            (273, 4, 8),
            (277, 3, 1),
            (278, 4, side),
            (279, 4, 100),
        ]
        entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
        return b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(104)
    if format == "WEBP":
        size = min(side, 1 << 24) - 1
        chunk = b"VP8X" + struct.pack("<I", 10) + bytes(4) + size.to_bytes(3, "little") * 2
        return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk
    if format == "TGA":
        side = min(side, 65535)
        return struct.pack("<BBBHHBHHHHBB", 0, 0, 3, 0, 0, 0, 0, 0, side, side, 8, 0) + bytes(50)
    side = min(side, 65535)
    return struct.pack(">HBBHHHHII", 474, 0, 1, 2, side, side, 1, 0, 255) + bytes(600)  # SGI


@pytest.mark.parametrize("format", ["PNG", "BMP", "GIF", "PPM", "QOI", "TIFF", "WEBP", "TGA", "SGI"])
@pytest.mark.parametrize("side", [9_000, 20_000, 100_000])
def test_image_bombs(format, side):
    """A few bytes that tell of thousands of millions of pixels take neither memory nor time."""
    assert side * side > MAX_PIXELS
    with pytest.raises(ValueError, match=r"pixels.* limit|damaged|no image"):
        gray_image(header(format, side))


def test_the_headers_are_those_of_images():
    """Else the test above would refuse rubbish."""
    for format in ("PNG", "BMP", "GIF", "PPM", "QOI", "TIFF", "TGA", "SGI"):
        assert Image.open(io.BytesIO(header(format, 8))).size == (8, 8), format


def test_configurations_of_models_that_nobody_has(tmp_path):
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 11}
    PermuteFormerModel(PermuteFormerConfig(**config)).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for change, said in (
        ({"vocab_size": 10**8}, "800,000,4"),
        ({"vocab_size": 10**12}, "vocab_size.*1,000,000,000,000"),
        ({"num_hidden_layers": 2000}, "num_hidden_layers=2,000"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers.*1,000,000"),
        ({"hidden_size": 10**6}, "hidden_size.*1,000,000"),
        ({"num_labels": 10**9}, "num_labels.*1,000,000,000"),
        ({"position": [{"name": "learned", "max_length": 10**9}]}, "8,000,000,"),
        ({"position": [{"name": "permute"}] * 1000}, "position.*16"),
        ({"position": [{"name": "permute", "permutation": "max_order"}], "hidden_size": 8192}, "feature_size.*2,048"),
        ({"attention": {"name": "linear", "feature_multiplier": 10**5}}, "feature_size.*2 heads"),
        (
            {"attention": {"name": "linear", "feature_multiplier": 2**32}, "position": [{"name": "rope"}]},
            "feature_multiplier.*hidden_size",
        ),
        ({"attention": {"name": "linformer", "max_length": 10**9}, "position": []}, "config.json"),
        ({"dtype": "load"}, "dtype.*load"),
        ({"id2label": [1]}, "id2label"),
        ({"pad_token_id": 10**9}, "AssertionError"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(ValueError, match=said) as refusal:
            PermuteFormerModel.from_pretrained(tmp_path)
        assert str(refusal.value).isprintable()
    for text in ("[" * 100_000, "[]", "3", "", "\ud800"):
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ValueError, match="cannot be loaded"):
            PermuteFormerModel.from_pretrained(tmp_path)


def test_parts_of_a_model_are_named_within_its_folder(tmp_path):
    PermuteFormerModel(PermuteFormerConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    for name in ("../part.safetensors", "/etc/passwd", 3):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))
        with pytest.raises(ValueError, match="names of files in the folder"):
            PermuteFormerModel.from_pretrained(tmp_path)


def test_json_is_read_from_files_of_some_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="no regular file"):  # and it is not waited for
        json_of(tmp_path / "pipe")
    assert read_json(tmp_path / "pipe") == {}
    (tmp_path / "a").write_bytes(b" " * 100)
    with pytest.raises(ValueError, match="more than 10 bytes"):
        content_of(tmp_path / "a", 10)
    (tmp_path / "deep").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="nested too deeply"):
        json_of(tmp_path / "deep")


@pytest.mark.parametrize(
    "name", ["x" * 5000, "a\0b", "loop/a.png", "out.png", "../a.png", "/etc/passwd", "a/../../b", "pipe.png", "\ud800"]
)
def test_paths_of_images_that_cannot_be_followed(name, tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "out.png").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match=r"leads out|cannot be followed|there is no image") as refusal:
        image_bytes(name, tmp_path)
    assert str(refusal.value).isprintable()


def test_sums_name_files_of_their_checkpoint(tmp_path):
    """Found by reading: a name such as /dev/zero was read to its end, which it has not."""
    path = checkpoint.save(tmp_path, 1, {}, {"model": {"w": torch.zeros(1)}})
    for name in ("/dev/zero", "../../etc/passwd", "there-is-none"):
        (path / "sums.json").write_text(json.dumps({name: "0", "state.json": "0"}))
        with pytest.raises(checkpoint.Damaged, match="must name files that are there"):
            checkpoint.load(tmp_path, 1)


def test_checkpoints_that_were_made_up(tmp_path):
    """Sums are right, contents are not: NumPy read memory that was not its own, and weights of one number filled whole matrices."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 3)).sum().backward()
    optimizer.step()
    device = torch.device("cpu")
    numbers = random_state(device)
    good = {"cursor": Cursor(step=3).to_json(), "random": [numbers]}
    tensors = {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)}
    assert put_in_place(checkpoint.Checkpoint(3, good, tensors), model, optimizer, device, 0).step == 3
    of_numpy = [*numbers["numpy"][:2], 10**6, *numbers["numpy"][3:]]
    for state, weights in (
        ({**good, "random": [{**numbers, "numpy": of_numpy}]}, tensors),
        ({**good, "random": [{**numbers, "torch": "00"}]}, tensors),
        ({**good, "random": []}, tensors),
        ({**good, "cursor": {"step": "3"}}, tensors),
        ({**good, "cursor": {"steps": 3}}, tensors),
        (good, {**tensors, "model": {**tensors["model"], "weight": torch.zeros(1)}}),
        (good, {**tensors, "optimizer": {**tensors["optimizer"], "weight/exp_avg": torch.zeros(1)}}),
        (good, {**tensors, "optimizer": {"no such weight/step": torch.zeros(())}}),
    ):
        with pytest.raises(ValueError, match="the checkpoint of step 3 is not of this run"):
            put_in_place(checkpoint.Checkpoint(3, state, weights), model, optimizer, device, 0)


def test_prepared_data_whose_offsets_lead_elsewhere(tmp_path):
    schema = pa.schema([("value", pa.binary())])
    with (tmp_path / "train.arrow").open("wb") as file, pa.ipc.new_stream(file, schema) as stream:
        stream.write_batch(pa.record_batch([[b"ab", b"cd"]], schema=schema))
    (tmp_path / "info.json").write_text(json.dumps({"splits": {"train": 2}}))
    assert Prepared(tmp_path).open("train")[1]["value"] == b"cd"
    whole = (tmp_path / "train.arrow").read_bytes()
    offsets = struct.pack("<iii", 0, 2, 4)
    assert whole.count(offsets) == 1
    (tmp_path / "train.arrow").write_bytes(whole.replace(offsets, struct.pack("<iii", 0, 2, 2**30)))
    with pytest.raises(ValueError, match=r"train\.arrow is damaged .*: delete its folder, and it is made anew"):
        Prepared(tmp_path).open("train")
