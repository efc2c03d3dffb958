"""What a backend did to the graphs it compiled, for people and for programs."""

from __future__ import annotations

import io
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from spcompile.errors import RegatherWarning


@dataclass(frozen=True)
class AttentionEntry:
    """One attention site.

    ``shape`` is q's and the key length; ``bytes_per_rank`` what one rank sends per call; ``runner_up`` the next
    cheapest exchange, if there was a choice; ``wasted`` the share of attention work on padding heads or sequences.
    """

    name: str
    source: str
    shape: tuple[int, ...]
    exchange: str
    kernel: str
    reason: str
    collectives: int
    bytes_per_rank: int
    runner_up: str = ""
    wasted: float = 0.0


@dataclass(frozen=True)
class RegatherEntry:
    """An all-gather forced by an op that cannot be computed on chunks.

    ``between_sites``: attention comes before it and after it in the graph, so that it costs in every block.
    """

    op: str
    source: str
    reason: str
    bytes_per_rank: int
    between_sites: bool = False


@dataclass(frozen=True)
class ReductionEntry:
    """What ranks send for an op that mixes tokens and is computed on chunks: sums, statistics, convolutions."""

    op: str
    source: str
    collectives: int
    bytes_per_rank: int


@dataclass(frozen=True)
class SplitEntry:
    """A call that runs eagerly between two CUDA graphs, and why."""

    op: str
    source: str
    reason: str


@dataclass(frozen=True)
class PieceEntry:
    """A part of a graph under ``cudagraphs=``: a captured piece, or the eager gap between two.

    ``holds`` counts its calls by op. It reads ``parameters`` where they lie, ``inputs`` from their static buffers if
    it is captured, and ``reads`` values that other parts computed; it writes ``writes`` values into buffers.
    ``splits`` is what keeps a gap from being captured.
    """

    captured: bool
    holds: dict[str, int]
    parameters: int
    inputs: int
    reads: int
    writes: int
    bytes_written: int
    splits: list[SplitEntry]


@dataclass
class Report:
    """All graphs compiled so far. ``graphs`` counts those with attention; ``shards`` cost no communication.

    ``untouched`` are graphs in which no attention was recognised: each rank computes all of them.

    ``verified`` are the largest differences that ``verify="first"`` found, one per output of each graph that ran.

    ``unshards`` are the all-gathers by which results leave the sharded region, ``unshard_bytes`` what a rank
    sends for them per step.

    ``pieces`` are the parts of all graphs under ``cudagraphs=``, ``buffer_bytes`` the memory between them.
    ``recordings`` counts how often graphs were recorded, for a new shape or because parameters had moved, and
    ``recording_limit`` how often they may be.
    """

    degree: int | None = None
    graphs: int = 0
    attention: list[AttentionEntry] = field(default_factory=list)
    reductions: list[ReductionEntry] = field(default_factory=list)
    regathers: list[RegatherEntry] = field(default_factory=list)
    shards: int = 0
    unshards: int = 0
    unshard_bytes: int = 0
    untouched: int = 0
    verified: list[float] = field(default_factory=list)
    pieces: list[PieceEntry] = field(default_factory=list)
    buffer_bytes: int = 0
    recordings: int = 0
    recording_limit: int | None = None

    def add(self, other: Report) -> None:
        """Count another graph's report in."""
        self.degree = other.degree
        self.graphs += other.graphs
        self.attention += other.attention
        self.reductions += other.reductions
        self.regathers += other.regathers
        self.shards += other.shards
        self.unshards += other.unshards
        self.unshard_bytes += other.unshard_bytes
        self.untouched += other.untouched
        self.verified += other.verified
        self.pieces += other.pieces
        self.buffer_bytes += other.buffer_bytes

    @property
    def collectives(self) -> int:
        """Collectives of one call of every graph."""
        needed = sum(a.collectives for a in self.attention) + sum(r.collectives for r in self.reductions)
        return needed + len(self.regathers) + self.unshards

    @property
    def bytes_per_rank(self) -> int:
        """Bytes that one rank sends in one call of every graph."""
        entries: list[Any] = [*self.attention, *self.reductions, *self.regathers]
        return sum(e.bytes_per_rank for e in entries) + self.unshard_bytes

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain lists, dicts, strings and numbers."""
        plain = asdict(self)
        for entry in plain["attention"]:
            entry["shape"] = list(entry["shape"])
        return plain | {"totals": {"collectives": self.collectives, "bytes_per_rank": self.bytes_per_rank}}

    def __str__(self) -> str:
        buffer = io.StringIO()
        console = Console(file=buffer, width=_WIDTH)
        console.print(self._summary(), soft_wrap=True)
        if self.attention:
            console.print(_table("attention", _grouped(self.attention)))
        tables: list[tuple[str, list[Any]]] = [("reductions", self.reductions), ("regathers", self.regathers)]
        for title, entries in tables:
            if entries:
                console.print(_table(title, [_row(e) for e in entries]))
        if self.pieces:
            console.print(_table("CUDA graphs: captured pieces, and the gaps between them", _alike(self.pieces)))
        return buffer.getvalue().rstrip()

    def _summary(self) -> str:
        return (
            f"spcompile: {_count(self.graphs, 'graph')} over {_count(self.degree or 1, 'rank')}, "
            f"{_count(len(self.attention), 'attention site')}, {_count(self.collectives, 'collective')} "
            f"{'per step' if self.graphs < 2 else 'if each graph runs once'} "
            f"({_bytes(self.bytes_per_rank)} sent per rank): {_count(self.shards, 'shard')} (free), "
            f"{_count(self.unshards, 'unshard')}, {_count(len(self.reductions), 'reduction')}, "
            f"{_count(len(self.regathers), 'regather')}"
            + (f"; {_count(self.untouched, 'graph')} without attention on every rank" if self.untouched else "")
            + (self._recorded() if self.recording_limit is not None else "")
            + (f"; verified, largest difference {max(self.verified):.1e}" if self.verified else "")
        )

    def _recorded(self) -> str:
        num_pieces = sum(p.captured for p in self.pieces)
        return (
            f"; CUDA graphs of {_count(num_pieces, 'piece')} ({_bytes(self.buffer_bytes)} of buffers), recorded "
            f"{self.recordings} of at most {_count(self.recording_limit or 0, 'time')}"
        )


def warn_of_regathers(report: Report) -> None:
    """One `RegatherWarning` for a graph that needs regathers: they cost speed, never exactness."""
    if not report.regathers:
        return
    total = sum(r.bytes_per_rank for r in report.regathers)
    listed = "".join(
        f"  before `{r.op}` ({r.source}), {_bytes(r.bytes_per_rank)}: {r.reason}\n" for r in report.regathers
    )
    warnings.warn(
        f"{_count(len(report.regathers), 'all-gather')} ({_bytes(total)} sent per rank and step) for ops that ranks "
        f"cannot compute on their own tokens:\n{listed}strict=True refuses them.",
        RegatherWarning,
        stacklevel=2,
    )


def _grouped(entries: list[AttentionEntry]) -> list[dict[str, Any]]:
    """Sites that differ only in their name share a row."""
    rows: dict[Any, dict[str, Any]] = {}
    for e in entries:
        key = tuple(v for k, v in asdict(e).items() if k != "name")
        if key in rows:
            rows[key]["sites"] += 1
            continue
        rows[key] = {
            "sites": 1,
            "first site": f"{e.name}\n{_short(e.source)}",
            "shape": "x".join(map(str, e.shape)),
            "exchange, kernel": f"{e.exchange}\n{e.kernel}",
            "reason": e.reason + (f"\nnext: {e.runner_up}" if e.runner_up else ""),
            "sent": f"{_bytes(e.bytes_per_rank)}\n{_count(e.collectives, 'collective')}",
        }
    return list(rows.values())


def _alike(entries: list[PieceEntry]) -> list[dict[str, Any]]:
    """Parts that differ in nothing share a row."""
    rows: dict[Any, dict[str, Any]] = {}
    for e in entries:
        holds = ", ".join(f"{op} x{n}" if n > 1 else op for op, n in e.holds.items())
        why = {f"{s.op}: {s.reason}": _short(s.source) for s in reversed(e.splits)}
        splits = "; ".join(f"{what} ({source})" for what, source in reversed(why.items()))
        reads = f"{e.parameters} parameters, {e.inputs} inputs, {e.reads} values"
        part = "captured" if e.captured else "eager"
        row = {"part": part, "holds": holds, "reads": reads, "writes": e.writes, "bytes_per_rank": e.bytes_written,
               "reason, and first source": splits}  # fmt: skip
        key = tuple(row.values())
        rows[key] = {"times": rows[key]["times"] + 1, **row} if key in rows else {"times": 1, **row}
    return [{k.replace("bytes_per_rank", "written"): _bytes(v) if k == "bytes_per_rank" else v
             for k, v in row.items()} for row in rows.values()]  # fmt: skip


def _row(entry: ReductionEntry | RegatherEntry) -> dict[str, Any]:
    row = {k: v for k, v in asdict(entry).items() if k not in ("between_sites", "bytes_per_rank")}
    return row | {"source": _short(entry.source), "sent": _bytes(entry.bytes_per_rank)}


def _short(source: str) -> str:
    """Without the folders: enough to find it, and it fits a row."""
    return source.rpartition("/")[2]


_WIDTH = 1000
"""Of a table at most: they are as wide as what they hold."""


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Reasons and what is held are wrapped, between words; all else is kept as it is, to be copied and searched for."""
    table = Table(title=title, title_justify="left")
    for name in rows[0]:
        wrapped = name == "holds" or "reason" in name
        table.add_column(name, no_wrap=not wrapped, max_width=48 if wrapped else None)
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + "s" * (n != 1)


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.4g} {unit}"
        n /= 1024  # type: ignore[assignment]
    return f"{n:.4g} GiB"
