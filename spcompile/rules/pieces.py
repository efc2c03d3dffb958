"""Rules about parts of dims: merged, split, joined, cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch._ops import OpOverload

from spcompile.call import Call
from spcompile.layout import REPLICATED, Layout, Segment, Sharded, missing_cuts
from spcompile.rules.base import Plan, by_size, first_only

aten = torch.ops.aten
Piece = tuple[int, int]
"""[start, end) along a dim."""


@dataclass(frozen=True)
class Regroup:
    """view, reshape, flatten, squeeze, ...: dims are merged and split, memory order stays."""

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        lay = layouts[0]
        if not isinstance(lay, Sharded):
            return None
        out = _regroup(lay, call.shape(0), call.outputs[0], call.degree)
        if out is None:
            return None
        operands = first_only(lay, call)
        if not isinstance(out, Sharded):  # cuts without which the tokens would be torn apart
            return Plan(operands, tuple(REPLICATED for _ in call.outputs), cuts=tuple(out))
        out = out.spread_outer()
        # One op for the family: it takes local sizes, and strides that an exchange changed.
        return Plan(
            operands,
            (out,),
            {"self": call.operands[0], "shape": out.local_shape(call.outputs[0], call.degree)},
            aten.reshape.default,
        )

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        found = _regroup(want, call.outputs[0], call.shape(0), call.degree, split=False)
        return [(0, found)] if isinstance(found, Sharded) else []


def _regroup(
    lay: Sharded, shape: Sequence[int], new_shape: Sequence[int], degree: int, split: bool = True
) -> Sharded | list[tuple[object, int]] | None:
    """Where the token factor of ``shape`` lies in ``new_shape``; None if it is torn apart.

    The dim's tokens span the factors from ``outer`` (all that varies slower) to ``inner`` (all that varies faster).
    A list: the cuts (see `missing_cuts`) with which it would not be torn apart.
    """
    if math.prod(shape) == 0:
        return None
    outer = math.prod(shape[: lay.dim]) * lay.outer
    inner = lay.inner * math.prod(shape[lay.dim + 1 :])
    before = list(accumulate(new_shape, lambda a, b: a * b, initial=1))
    for dim, extent in enumerate(new_shape):
        after = math.prod(new_shape[dim + 1 :])
        if outer % before[dim] or inner % after:
            continue
        new_outer, new_inner = outer // before[dim], inner // after
        if new_outer * lay.tokens * new_inner == extent:
            return replace(lay, dim=dim, outer=new_outer, inner=new_inner).absorb_inner(degree)
    return _split_tokens(lay, outer, before, new_shape, degree) if split else None


def _split_tokens(
    lay: Sharded, outer: int, before: Sequence[int], new_shape: Sequence[int], degree: int
) -> Sharded | list[tuple[object, int]] | None:
    """Tokens viewed as (frames, height * width): whole frames per rank, if they divide; else a share of every frame."""
    for dim, extent in enumerate(new_shape):
        end = before[dim] * extent
        if outer % before[dim] or end % outer or end == outer:
            continue
        frames = end // outer
        if lay.tokens % frames or extent % frames:
            return None
        unit = lay.tokens // frames
        if all(s.tokens % (unit * degree) == 0 for s in lay.segments):
            return Sharded(dim, tuple(_fewer(s, unit) for s in lay.segments), outer // before[dim], 1)
        return _share_of_each(lay, frames, unit, outer, new_shape, degree)
    return None


MAX_FRAMES = 128
"""Runs of tokens that are worth cutting one by one."""
MAX_WASTE = 0.1
"""Share of padding that is worth it."""


def _share_of_each(
    lay: Sharded, frames: int, unit: int, outer: int, new_shape: Sequence[int], degree: int
) -> Sharded | list[tuple[object, int]] | None:
    """Every one of ``frames`` runs of ``unit`` tokens cut alike, so that the runs can be a dim of their own."""
    borders = [i * unit for i in range(frames + 1)]
    missing = missing_cuts(lay, borders)
    if missing is None or frames > MAX_FRAMES or (missing and -(-unit // degree) * degree > (1 + MAX_WASTE) * unit):
        return None
    if missing:
        return missing
    runs = [between(lay, *ends) for ends in pairwise(borders)]
    if any(run != runs[0] for run in runs):
        return None
    first = replace(lay, segments=runs[0], outer=1)
    shape = (outer * frames, unit * lay.inner, -1)  # as one dim of runs and one within
    rest = math.prod(new_shape) // (shape[0] * shape[1])
    found = _regroup(first.at(1), (shape[0], shape[1], rest), new_shape, degree)
    if not isinstance(found, list):
        return found
    more = [_regroup(replace(first.at(1), segments=run), (shape[0], shape[1], rest), new_shape, degree) for run in runs]
    return [cut for cuts in more if isinstance(cuts, list) for cut in cuts]


@dataclass(frozen=True)
class Concatenate:
    """cat: along another dim all operands lie alike; along the token dim their segments are concatenated."""

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        dim = call.arguments["dim"] % max(map(len, call.outputs))
        used = [i for i in range(len(call.operands)) if call.shape(i) != (0,)]
        _, lead = by_size(call, layouts)[0]
        if lead.dim != dim:
            return Plan(tuple(lead if i in used else REPLICATED for i in range(len(layouts))), (lead,))
        if lead.outer != 1:  # the result is all of one operand, then all of the next, not row by row
            return None
        segments: list[Segment] = []
        operands: list[Layout] = [REPLICATED] * len(layouts)
        for i in used:
            lay = layouts[i]
            if not (isinstance(lay, Sharded) and (lay.dim, lay.outer, lay.inner) == (dim, lead.outer, lead.inner)):
                tokens, left = divmod(call.shape(i)[dim], lead.inner)
                if left:
                    return None
                lay = replace(lead, segments=call.new_root((call.node, i), tokens))
            operands[i] = lay
            segments += [s for s in lay.segments if s.tokens]
        return Plan(tuple(operands), (replace(lead, segments=tuple(segments) or lead.segments[:1]),))

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        dim = call.arguments["dim"] % len(call.outputs[0])
        used = [i for i in range(len(call.operands)) if call.shape(i) != (0,)]
        if want.dim != dim:
            return [(i, want) for i in used]
        if want.outer != 1 or any(call.shape(i)[dim] % want.inner for i in used):
            return []
        return [(i, replace(want, segments=(Segment(call.shape(i)[dim] // want.inner),))) for i in used]


@dataclass(frozen=True)
class Slice:
    """slice, narrow, split, chunk: along the token dim at segment borders, which it asks for.

    ``pieces`` gives each output's [start, end) along ``dim``; ``bounds`` gives the arguments for local ones.
    """

    pieces: Callable[[Call], list[Piece] | None]
    bounds: Callable[[Call, list[Piece]], tuple[OpOverload, dict[str, Any]]]

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        lay = layouts[0]
        assert isinstance(lay, Sharded)
        if lay.dim != call.dim("dim"):
            return Plan((lay,), tuple(lay for _ in call.outputs))
        if _steps_evenly(call):
            step = call.arguments["step"]
            out = coarser(lay, step, call.degree)
            local = {
                "dim": lay.dim,
                "start": call.arguments["start"] or 0,
                "end": lay.local_extent(call.degree),
                "step": step,
            }
            return Plan((lay,), (out,), {"self": call.operands[0], **local}, aten.slice.Tensor) if out else None
        found = _cut(lay, self.pieces(call))
        if found is None:
            return None
        outputs, pieces, cuts = found
        target, arguments = self.bounds(call, _local_bounds(lay, outputs, pieces, call.degree))
        arguments = {"self": call.operands[0], "dim": lay.dim, **arguments}
        return Plan((lay,), tuple(outputs), arguments, target, tuple(cuts))

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        dim = call.dim("dim")
        if want.dim != dim:
            return [(0, want)]
        if _steps_evenly(call):
            return [(0, replace(want, inner=want.inner * call.arguments["step"]))]
        whole = call.shape(0)[dim]
        if want.outer != 1 or whole % want.inner:
            return []
        return [(0, replace(want, segments=(Segment(whole // want.inner),)))]


def _steps_evenly(call: Call) -> bool:
    """Is it a slice that takes one of every ``step`` entries, from the first to the last of them?"""
    step, whole, dim = call.arguments.get("step", 1), call.shape(0), call.dim("dim")
    return step > 1 and 0 <= (call.arguments["start"] or 0) < step and call.outputs[0][dim] * step == whole[dim]


def coarser(lay: Sharded, patch: int, degree: int) -> Sharded | None:
    """Every ``patch`` entries of a dim become one, if no patch lies on two ranks."""
    if lay.inner % patch == 0:
        return replace(lay, inner=lay.inner // patch)
    if lay.inner != 1 or any(s.tokens % (patch * degree) for s in lay.segments):
        return None
    return replace(lay, segments=tuple(_fewer(s, patch) for s in lay.segments))


def _fewer(segment: Segment, patch: int) -> Segment:
    """Every ``patch`` tokens are one."""
    origin = segment.origin and replace(segment.origin, unit=segment.origin.unit * patch)
    return replace(segment, tokens=segment.tokens // patch, origin=origin)


def between(lay: Sharded, start: int, end: int) -> tuple[Segment, ...]:
    """The segments from token ``start`` to ``end``; one that reaches over a border is split there."""
    found, position = [], 0
    for segment in lay.segments:
        stop = position + segment.tokens
        low, high = max(start, position), min(end, stop)
        if low < high or (low == high and segment.tokens == 0 and start <= position <= end):
            _, tail = segment.split(low - position)
            found.append(tail.split(high - low)[0])
        position = stop
    return tuple(found) or (Segment(0),)


def _cut(
    lay: Sharded, pieces: list[Piece] | None
) -> tuple[list[Sharded], list[Piece], list[tuple[object, int]]] | None:
    """Layouts of the pieces of the token dim, the pieces in tokens, and the cuts it takes; None if it cannot be."""
    if pieces is None:
        return None
    if pieces == [(0, lay.extent)]:
        return [lay], [(0, lay.tokens)], []
    if lay.outer != 1 or any(b % lay.inner for piece in pieces for b in piece):
        return None
    in_tokens = [(start // lay.inner, end // lay.inner) for start, end in pieces]
    cuts = missing_cuts(lay, sorted({b for piece in in_tokens for b in piece}))
    if cuts is None:
        return None
    return [replace(lay, segments=between(lay, *piece)) for piece in in_tokens], in_tokens, cuts


def _local_bounds(lay: Sharded, outputs: Sequence[Sharded], pieces: Sequence[Piece], degree: int) -> list[Piece]:
    """[start, end) of the pieces in one rank's share."""
    starts = [replace(lay, segments=between(lay, 0, start)).local_extent(degree) for start, _ in pieces]
    return [(s, s + out.local_extent(degree)) for s, out in zip(starts, outputs, strict=True)]


def _sliced(call: Call) -> list[Piece] | None:
    if call.arguments["step"] != 1:
        return None
    length = call.shape(0)[call.dim("dim")]
    start, end, _ = slice(call.arguments["start"], call.arguments["end"]).indices(length)
    return [(start, max(start, end))]


def _narrowed(call: Call) -> list[Piece] | None:
    start = call.arguments["start"]
    if not isinstance(start, int):
        return None
    start %= max(call.shape(0)[call.dim("dim")], 1)
    return [(start, start + call.arguments["length"])]


def _all_pieces(call: Call) -> list[Piece]:
    """Pieces of an op whose outputs cover the dim in order."""
    dim = call.dim("dim")
    borders = list(accumulate((o[dim] for o in call.outputs), initial=0))
    return list(pairwise(borders))


def _one_slice(call: Call, pieces: list[Piece]) -> tuple[OpOverload, dict[str, Any]]:
    return aten.slice.Tensor, {"start": pieces[0][0], "end": pieces[0][1], "step": 1}


def _split_sizes(call: Call, pieces: list[Piece]) -> tuple[OpOverload, dict[str, Any]]:
    return aten.split_with_sizes.default, {"split_sizes": [end - start for start, end in pieces]}


SLICE = Slice(_sliced, _one_slice)
NARROW = Slice(_narrowed, _one_slice)
SPLIT = Slice(_all_pieces, _split_sizes)


@dataclass(frozen=True)
class SliceScatter:
    """x[:, a:b] = src in functional form: along the token dim at segment borders, ``src`` lying like the slice."""

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        dim, pieces = call.dim("dim"), _sliced(call)
        (_, lead), *_ = by_size(call, layouts)
        if lead.dim != dim:
            return Plan((lead, lead), (lead,))
        lay = layouts[0]
        if not isinstance(lay, Sharded) or lay.dim != dim:
            lay = Sharded(dim, call.new_root((call.node, 0), call.shape(0)[dim]))
        found = _cut(lay, pieces)
        if found is None:
            return None
        (piece,), ((start, end),), cuts = found[0], _local_bounds(lay, *found[:2], call.degree), found[2]
        arguments = {"self": call.operands[0], "src": call.operands[1], "dim": dim, "start": start, "end": end}
        return Plan((lay, piece), (lay,), arguments, aten.slice_scatter.default, tuple(cuts))

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        if want.dim != call.dim("dim"):
            return [(0, want), (1, want)]
        part = call.shape(1)[want.dim]
        if want.outer != 1 or part % want.inner:
            return [(0, want)]
        return [(0, want), (1, replace(want, segments=(Segment(part // want.inner),)))]


@dataclass(frozen=True)
class Like:
    """new_zeros, type_as: operands from ``first`` on lend dtype, device or shape, and may lie as they like.

    With ``first=0`` the result is whole; with ``first=1`` it lies like the first operand.
    """

    first: int

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        return Plan(tuple(layouts), tuple(layouts[0] if self.first else REPLICATED for _ in call.outputs))

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        return [(0, want)] if self.first else []
