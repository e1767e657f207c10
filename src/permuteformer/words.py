"""Numbers as people read them."""

from __future__ import annotations


def short(number: float) -> str:
    """A number to three digits.

    >>> short(1234), short(267_744), short(1.2e9)
    ('1,234', '268 k', '1.2 G')
    """
    for limit, unit in ((1e15, ""), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            return f"{number:.1e}" if not unit else f"{number / (limit if unit != 'k' else 1e3):.3g} {unit}"
    return f"{number:,.0f}"


def size_in_words(size: int) -> str:
    """A number of bytes.

    >>> size_in_words(8_230_000_000), size_in_words(1_500)
    ('8.2 GB', '1.5 kB')
    """
    for unit, bytes_each in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bytes_each:
            return f"{size / bytes_each:.1f} {unit}"
    return f"{size} bytes"


def duration(seconds: float) -> str:
    """Time as people say it.

    >>> duration(12.34), duration(754), duration(86_000), duration(1e6), duration(4e8)
    ('12.3 s', '12 min 34 s', '23 h 53 min', '12 days', '12.7 years')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, days = round(seconds) // 60, seconds / 86_400
    if days >= 3:
        return f"{days:.0f} days" if days < 730 else f"{days / 365.25:.1f} years"
    return f"{minutes} min {round(seconds) % 60} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
