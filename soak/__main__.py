"""Run parts of the soak, two at a time; a file of JSON lines a part comes of it.

``python -m soak --list`` says what each part proves. Ends with 1 where a case is not ok, and prints it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console

from soak.runner import parts, soak


def main() -> int:
    """The command."""
    there = parts()
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"{', '.join(there)}; all unless told")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of it; 1 takes about 25 minutes on two cores, most of it fuzz")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn by chance (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("results/reliability"), help="folder of the JSON lines (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="say what each part proves")
    arguments = parser.parse_args()
    console = Console()
    if arguments.list:
        for name, proves in there.items():
            console.print(f"{name}: {proves}", highlight=False)
        return 0
    if unknown := [name for name in arguments.part if name not in there]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(there)}")
    if not arguments.scale > 0:
        parser.error(f"scale must be above 0; it is {arguments.scale}")
    failures = soak(list(dict.fromkeys(arguments.part)) or list(there), arguments.scale, arguments.seed, arguments.output, console)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
