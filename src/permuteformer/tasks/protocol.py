"""The two protocols of Long-Range Arena's tasks: the paper's authors', and the benchmark's own."""

from __future__ import annotations

from permuteformer.tokens import Alphabet

PROTOCOLS = ("lra", "paper")


def alphabet(protocol: str, count: int = 256, pixels: bool = False) -> Alphabet:
    """Tokens as the authors have them (values + 3, CLS, SEP), or as LRA (text + 1, pixels as they are, and CLS)."""
    _check("protocol", protocol, PROTOCOLS)
    if protocol == "paper":
        return Alphabet.paper(count)
    return Alphabet.lra_pixels() if pixels else Alphabet.lra(count)


def text_length(protocol: str) -> int:
    """Tokens of the longest text: 4,000 with CLS and SEP by the paper; LRA has CLS beside 4,000."""
    return 4000 if protocol == "paper" else 4001


def cut(protocol: str, max_length: int) -> list[str]:
    """What must be said beside a number where texts are cut to fewer tokens than the protocol has.

    >>> cut("paper", 1024)
    ['texts are cut to 1,024 tokens, where the protocol has 4,000']
    """
    whole = text_length(protocol)
    return [f"texts are cut to {max_length:,} tokens, where the protocol has {whole:,}"] if max_length < whole else []


def validation(protocol: str, asked: str | None, without_one: str) -> str:
    """Where the validation split comes from: as ``asked``, else the test split by the paper's protocol, else ``without_one``."""
    if asked is not None:
        _check("validate_on", asked, (without_one, "test"))
    return asked or ("test" if protocol == "paper" else without_one)


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; it is {value!r}")
