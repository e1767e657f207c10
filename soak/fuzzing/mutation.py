"""Files and data as a stranger might change them, drawn from a seeded ``random.Random``."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from random import Random
from typing import Any

TEXTS = (
    *(
        "",
        " ",
        "a",
        "\0",
        "\r",
        "\n",
        "\t",
        "\x07",
        "\x1b[31m",
        "\x1b]8;;http://a\x07b",
        "\x1b]52;c;eA==\x07",
        "\x9b31m",
        "\u202e",
        "\u2066",
    ),
    *(
        "\ud800",
        "\ufeff",
        "é",
        "日本",
        "\u0301" * 30,
        "[red]",
        "[/]",
        "[/red]",
        ":smile:",
        "</script><script>",
        "&amp;",
        "'",
        '"',
        "`",
        "|",
    ),
    *("\\input{a}", "$\\x$", "%s%n", "{0}", "${a}", "=1+1", "+1", "-1", "@a", "../../a", "/etc/passwd", "a/../b", "C:\\a", "con", "."),
    *("nan", "inf", "true", "null", "none", "1e999", "0x10", "1_000", "٣", "--", "-", "x" * 300, "é" * 5000, "evil/kernel"),
)
NUMBERS = (0, 1, -1, 2, 3, 7, 255, 256, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, -(10**30))
FRACTIONS = (0.0, -0.0, 0.5, 1.5, -1.0, 1e-320, 1e308, 1e15, float("inf"), float("-inf"), float("nan"))
DEEP = 3_000


def hostile_value(random: Random) -> Any:
    """Anything that JSON can hold."""
    kind = random.randrange(8)
    if kind < 2:
        return random.choice(TEXTS)
    if kind < 4:
        return random.choice(NUMBERS)
    if kind == 4:
        return random.choice(FRACTIONS)
    if kind == 5:
        return random.choice((None, True, False))
    return random.choice(([], {}, [None], [[]], {"": None}, [0] * 3, {"name": "linear"}, {"a": {"b": []}}, [{"name": "permute"}], ["a", 1]))


def changed_data(random: Random, content: Any, changes: int = 2) -> Any:
    """JSON data with a few places changed."""
    content = copy.deepcopy(content)
    for _ in range(random.randint(1, changes)):
        content = _change(random, content)
    return content


def _change(random: Random, content: Any) -> Any:
    inner: list[Any] = list(content) if isinstance(content, dict) else list(range(len(content))) if isinstance(content, list) else []
    if inner and random.random() < 0.85:
        key = random.choice(inner)
        if random.random() < 0.6 and isinstance(content[key], (dict, list)) and content[key]:
            content[key] = _change(random, content[key])
        elif random.random() < 0.15:
            content[key] = random.choice([content[key], *(content[other] for other in inner)])
        elif random.random() < 0.2:
            del content[key]
        elif isinstance(content, dict) and random.random() < 0.15:
            content[random.choice(TEXTS)] = content.pop(key)
        else:
            content[key] = hostile_value(random)
        return content
    if isinstance(content, list) and random.random() < 0.7:
        content.insert(random.randint(0, len(content)), copy.deepcopy(random.choice(content)) if content else hostile_value(random))
        return content
    if isinstance(content, dict) and random.random() < 0.7:
        content[random.choice(TEXTS)] = hostile_value(random)
        return content
    return hostile_value(random)


def changed_json(random: Random, content: Any) -> bytes:
    """JSON data, changed, as a file of it; now and then the file itself is changed too."""
    if random.random() < 0.01:
        return random.choice((b"[" * DEEP, b'{"a":' * DEEP, b"1" * 5_000, b"\xff\xfe", b"", b"nul"))
    text = json.dumps(changed_data(random, content)).encode("utf-8", "surrogatepass")
    return changed_bytes(random, text) if random.random() < 0.1 else text


def changed_bytes(random: Random, whole: bytes, others: Sequence[bytes] = (), changes: int = 3) -> bytes:
    """A file with a few places changed, cut out, doubled or put in, or cut off."""
    if random.random() < 0.01:
        return random.randbytes(random.randrange(200))
    data = bytearray(whole)
    for _ in range(random.randint(1, changes)):
        at = random.randrange(len(data) + 1)
        kind = random.randrange(9)
        if kind <= 1 and data:
            data[at % len(data)] ^= 1 << random.randrange(8)
        elif kind == 2 and data:
            data[at % len(data)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, 0x0A, 0x20, 0x22, 0x2C))
        elif kind == 3:
            size = random.choice((2, 4, 8))
            number = random.choice(NUMBERS) % (1 << 8 * size)
            data[at : at + size] = number.to_bytes(size, random.choice(("little", "big")))
        elif kind == 4:
            del data[at : at + random.choice((1, 2, 8, 64))]
        elif kind == 5:
            piece = data[at : at + random.choice((1, 4, 16, 64))]
            data[at:at] = piece * random.choice((1, 1, 2, 50))
        elif kind == 6:
            data[at:at] = random.choice(TEXTS).encode("utf-8", "surrogatepass")[:40]
        elif kind == 7 and others:
            other = random.choice(others)
            start = random.randrange(len(other) + 1)
            data[at : at + 16] = other[start : start + 16]
        elif kind == 8 and random.random() < 0.3:
            del data[at:]
    return bytes(data)


def changed_safetensors(random: Random, whole: bytes) -> bytes:
    """A file of tensors, whose header says something else, or with a few places changed: mostly in the header."""
    end = 8 + int.from_bytes(whole[:8], "little")
    if random.random() < 0.3:
        header = json.dumps(changed_data(random, json.loads(whole[8:end]))).encode("utf-8", "surrogatepass")
        return len(header).to_bytes(8, "little") + header + whole[end:]
    if random.random() < 0.95:
        return changed_bytes(random, whole[:end]) + whole[end:]
    return whole[:end] + changed_bytes(random, whole[end:])
