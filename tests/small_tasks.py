"""A little data for every task, and the options to find it."""

import small_data


def table(folder):
    return {"path": small_data.write(folder / "a.csv", small_data.ROWS)}


def pairs(folder):
    (folder / "a.tsv").write_text("text1\ttext2\tlabel\n" + "".join(f"a{n}\tb{n}{n}\t{n % 2}\n" for n in range(40)))
    return {"path": str(folder / "a.tsv")}


def pictures(folder):
    for n in range(20):
        (folder / "pictures" / "ab"[n % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "pictures" / "ab"[n % 2] / f"{n}.png").write_bytes(small_data.picture(n))
    return {"path": str(folder / "pictures"), "size": 8}


def text(folder):
    (folder / "a.txt").write_text("".join(f"line number {n}\n" for n in range(200)))
    return {"path": str(folder / "a.txt"), "length": 32, "context": 8}


def wiki(name, ending):
    def write(folder):
        (folder / name).mkdir()
        for split in ("train", "valid", "test"):
            (folder / name / f"wiki.{split}.{ending}").write_text(" = Cat = \n \n the cat sat on the mat \n" * 20)
        return {"data": str(folder), "length": 32, "context": 8}

    return write


def official(write):
    def write_data(folder):
        write(folder)
        return {"data": str(folder)}

    return write_data


def aan(folder):
    for split in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(f"{n % 2}.0\ta\tb\tb'x{n}'\tb'yy{n}'\n" for n in range(8)))
    return {"data": str(folder)}


def listops(folder):
    small_data.listops(folder, [("( ( ( [MAX 2 ) 4 ) ] )", 4), ("3", 3)] * 5)
    return {"data": str(folder)}


SMALL = {
    "classify": table,
    "match": pairs,
    "images": pictures,
    "lm": text,
    "lm-bytes": lambda folder: {"corpus": "topics", "length": 32, "context": 8},
    "digits": lambda folder: {},
    "lra-text": official(small_data.acl_imdb),
    "lra-retrieval": aan,
    "lra-image": official(small_data.cifar),
    "lra-pathfinder": official(small_data.pathfinder),
    "lra-listops": listops,
    "wikitext-103": wiki("wikitext-103", "tokens"),
    "wikitext-2": wiki("wikitext-2", "tokens"),
    "wiki-en": wiki("wiki_en", "raw"),
}
"""By task: a function that writes data to a folder and returns options of the task."""
