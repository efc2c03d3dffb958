"""Which heads a rank works on when heads are spread over ``ulysses`` ranks.

H query heads, G key/value heads (GQA: H a multiple of G), u ranks. Each rank takes ``ceil(H / u)`` query heads,
the last ones padded with zeros, and those key/value heads that they attend to, sent to each rank that needs
them rather than expanded first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadShare:
    """How H query and G key/value heads are spread over ``degree`` ranks."""

    num_heads: int
    num_kv_heads: int
    degree: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads equally")

    @property
    def local(self) -> int:
        """Query heads per rank, padding included."""
        return -(-self.num_heads // self.degree)

    @property
    def wasted(self) -> float:
        """The share of the attention work that is done on padding heads."""
        return 1 - self.num_heads / (self.local * self.degree)

    def queries(self, rank: int) -> tuple[int, int]:
        """[start, end) of the query heads of a rank, without padding."""
        start = min(rank * self.local, self.num_heads)
        return start, min(start + self.local, self.num_heads)

    def _needed(self, rank: int) -> tuple[int, int]:
        start, end = self.queries(rank)
        group = self.num_heads // self.num_kv_heads
        return (start // group, (end - 1) // group + 1) if end > start else (0, 0)

    @property
    def sent(self) -> int:
        """Key/value heads that each rank receives."""
        return max(end - start for start, end in map(self._needed, range(self.degree)))

    def keys(self, rank: int) -> int:
        """The first of the `sent` key/value heads that a rank receives."""
        start, _ = self._needed(rank)
        return min(start, self.num_kv_heads - self.sent)

    @property
    def uniform(self) -> bool:
        """Do the received key/value heads serve equal runs of local query heads on every rank?"""
        return self.local % self.sent == 0 and all(
            self.index(r) == [i // (self.local // self.sent) for i in range(self.local)] for r in range(self.degree)
        )

    @property
    def local_kv(self) -> int:
        """Key/value heads per rank after the exchange: as sent, or one per query head where they do not line up."""
        return self.sent if self.uniform else self.local

    def index(self, rank: int) -> list[int]:
        """For each local query head, which of the received key/value heads it attends to."""
        start, end = self.queries(rank)
        group, first = self.num_heads // self.num_kv_heads, self.keys(rank)
        real = [h // group - first for h in range(start, end)]
        if not real:  # nothing but padding: any head will do
            return [i // max(self.local // self.sent, 1) % self.sent for i in range(self.local)]
        if self.local % self.sent == 0:  # padding continues the pattern if it can
            pattern = [i // (self.local // self.sent) for i in range(self.local)]
            if pattern[: len(real)] == real:
                return pattern
        return real + [real[-1]] * (self.local - len(real))
