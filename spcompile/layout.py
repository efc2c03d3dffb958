"""How a value of the graph is laid out over the ranks.

A value is `Replicated` (every rank holds all of it) or `Sharded`: one dim carries tokens, and each rank holds
one chunk of every segment of them. The dim's extent is ``outer * sum(segments) * inner``; a segment of ``n``
tokens is cut into P chunks of ``ceil(n / P)``, the last ones padded. See `spcompile.ops.chunks` for the cutting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate

from spcompile.ops import chunks


@dataclass(frozen=True)
class Origin:
    """Where a segment's tokens were first sharded: root value, first token there, root tokens per token here."""

    root: object
    start: int
    unit: int = 1


@dataclass(frozen=True)
class Segment:
    """A run of tokens that is cut into P chunks on its own. ``origin`` says whom to ask for another cut.

    Chunk i of a ``mirrored`` segment lives on rank P - 1 - i: the tail half of one that a causal ring balances.
    """

    tokens: int
    origin: Origin | None = field(default=None, compare=False)
    mirrored: bool = False

    def split(self, at: int) -> tuple[Segment, Segment]:
        """The first ``at`` tokens and the rest."""
        rest = self.origin and replace(self.origin, start=self.origin.start + at * self.origin.unit)
        return replace(self, tokens=at), replace(self, tokens=self.tokens - at, origin=rest)


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole value."""

    def local_shape(self, shape: Iterable[int], degree: int) -> list[int]:
        return list(shape)


@dataclass(frozen=True)
class Sharded:
    """``dim`` has extent ``outer * sum(segments) * inner``; the segments are spread over the ranks."""

    dim: int
    segments: tuple[Segment, ...]
    outer: int = 1
    inner: int = 1

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.segments)

    @property
    def extent(self) -> int:
        return self.outer * self.tokens * self.inner

    def spec(self) -> list[int]:
        """``[outer, inner, *segments]``, as the ops take it: a mirrored segment is negative."""
        return [self.outer, self.inner, *(-s.tokens if s.mirrored else s.tokens for s in self.segments)]

    def at(self, dim: int) -> Sharded:
        return replace(self, dim=dim)

    def local_extent(self, degree: int) -> int:
        return chunks.local_extent(self.spec(), degree)

    def local_shape(self, shape: Iterable[int], degree: int) -> list[int]:
        local = list(shape)
        local[self.dim] = self.local_extent(degree)
        return local

    def borders(self) -> list[int]:
        """Token positions between segments, 0 and the end included. A mirrored half goes with the one before."""
        ends = accumulate((s.tokens for s in self.segments), initial=0)
        followers = [*(s.mirrored for s in self.segments), False]
        return [end for end, mirrored in zip(ends, followers, strict=True) if not mirrored]

    def absorb_inner(self, degree: int) -> Sharded:
        """The same distribution with ``inner`` counted as tokens, where no segment has padding.

        Frames of 4 x 6 rows on 2 ranks are 24 rows on 2 ranks. One distribution, one description: so that
        layouts can be compared.
        """
        if self.inner == 1 or any(s.tokens % degree for s in self.segments):
            return self

        def finer(s: Segment) -> Segment:
            o = s.origin if s.origin and s.origin.unit % self.inner == 0 else None
            return Segment(s.tokens * self.inner, o and replace(o, unit=o.unit // self.inner), s.mirrored)

        return replace(self, segments=tuple(finer(s) for s in self.segments), inner=1)

    def spread_outer(self) -> Sharded:
        """The same distribution with ``outer`` counted as segments, where those are few: to compare and to join."""
        if self.outer * len(self.segments) > MAX_SEGMENTS:
            return self
        return replace(self, outer=1, segments=self.segments * self.outer)


MAX_SEGMENTS = 128
"""More are not spelled out."""

Layout = Replicated | Sharded
REPLICATED = Replicated()


def same_tokens(a: Sharded, b: Sharded) -> bool:
    """May the two carry the same tokens, perhaps with different cuts?"""
    return (a.outer, a.tokens, a.inner) == (b.outer, b.tokens, b.inner)


def missing_cuts(layout: Sharded, borders: Iterable[int]) -> list[tuple[object, int]] | None:
    """What to ask of whom so that ``layout`` has a border at each of ``borders``: (root, token) pairs.

    None if a segment that must be cut does not know where it comes from.
    """
    wanted: list[tuple[object, int]] = []
    start = 0
    for segment in layout.segments:
        for border in borders:
            if start < border < start + segment.tokens:
                if segment.origin is None:
                    return None
                wanted.append((segment.origin.root, segment.origin.start + (border - start) * segment.origin.unit))
        start += segment.tokens
    return wanted


def describe(layout: Layout, shape: Iterable[int], degree: int) -> str:
    """In einops' manner: ``1 (512 + 4096)/2 64`` is a dim of two segments, each cut over 2 ranks; ``~``: mirrored."""
    dims = [str(n) for n in shape]
    if isinstance(layout, Sharded):
        tokens = " + ".join(f"{'~' * s.mirrored}{s.tokens}" for s in layout.segments)
        cut = f"({tokens})/{degree}"
        parts = [str(layout.outer)] * (layout.outer != 1) + [cut] + [str(layout.inner)] * (layout.inner != 1)
        dims[layout.dim] = parts[0] if len(parts) == 1 else "(" + " ".join(parts) + ")"
    return " ".join(dims) or "scalar"
