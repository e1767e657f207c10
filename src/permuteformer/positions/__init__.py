"""Position encodings, one a file. The registry key is the file's name."""

from permuteformer.positions.base import HOOKS, POSITIONS, Compose, PositionEncoding

__all__ = ["HOOKS", "POSITIONS", "Compose", "PositionEncoding"]
