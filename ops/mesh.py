"""Where a rank stands when ``sp = ring * kv_gather * ulysses``, and who its peers are.

A mesh is ``[ring, kv_gather, ulysses]``, ulysses innermost: neighbours share the fastest link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

AXES = ("ring", "kv_gather", "ulysses")
"""Axes, slowest first."""


def check(mesh: Sequence[int]) -> None:
    """Refuse what is not three degrees. Raises ``ValueError``."""
    if len(mesh) != 3 or min(mesh) < 1:
        raise ValueError(f"mesh {list(mesh)}: want [ring, kv_gather, ulysses], each 1 or more")


def degree(mesh: Sequence[int]) -> int:
    """Number of ranks P."""
    return math.prod(mesh)


def coordinate(mesh: Sequence[int], rank: int, axis: str) -> int:
    """The rank's position along an axis."""
    i = AXES.index(axis)
    return rank // math.prod(mesh[i + 1 :]) % mesh[i]


def peers(mesh: Sequence[int], rank: int, axis: str | None) -> list[int]:
    """The ranks that differ from ``rank`` only along ``axis``, in order; all ranks for None."""
    if axis is None:
        return list(range(degree(mesh)))
    i = AXES.index(axis)
    stride = math.prod(mesh[i + 1 :])
    base = rank - coordinate(mesh, rank, axis) * stride
    return [base + j * stride for j in range(mesh[i])]
