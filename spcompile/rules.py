"""Stage 3, the table: for each op family, which dims of operands and results are the same.

A rule answers two questions about a call. *Forward*: given the operands' layouts, how must the operands lie
and how do the results then lie (a `Plan`), or None if the op mixes tokens. *Backward*: if a result is to
be sharded along a dim, which operand dims does that dim come from. Most ops only carry dims through, so most
rules are one small function that gives every dim a name: dims with one name are the same dim, a dim without
a name mixes its entries. The table is at the bottom; an op that is not in it is computed on full tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from spcompile.call import Call
from spcompile.layout import REPLICATED, Layout, Segment, Sharded, missing_cuts

aten = torch.ops.aten
Name = Hashable | None
Names = list[list[Name]]
Piece = tuple[int, int]
"""[start, end) along a dim."""


@dataclass(frozen=True)
class Plan:
    """How a call is computed on chunks.

    ``operands`` and ``outputs`` are layouts; where sizes change, ``target`` with ``arguments`` (by schema name)
    replaces the call; ``cuts`` are cut points ``(root, token)`` without which the plan does not hold.
    """

    operands: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    target: OpOverload | None = None
    cuts: tuple[tuple[object, int], ...] = ()

    def layout_of(self, value: Any) -> Any:
        """The result's layout; for several results a tuple, replicated where a result is no tensor."""
        if isinstance(value, torch.Tensor):
            return self.outputs[0]
        left = iter(self.outputs)
        return tuple(next(left) if isinstance(v, torch.Tensor) else REPLICATED for v in value)


class Rule(Protocol):
    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None: ...

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]: ...


def _by_size(call: Call, layouts: Sequence[Layout]) -> list[tuple[int, Sharded]]:
    """The sharded operands, largest first: the others follow its layout."""
    found = [(i, lay) for i, lay in enumerate(layouts) if isinstance(lay, Sharded)]
    return sorted(found, key=lambda f: -math.prod(call.shape(f[0])))


@dataclass(frozen=True)
class Carry:
    """Dims pass through by name. ``sized`` is the op that takes the operand and the result's shape as ``size``."""

    names: Callable[[Call], tuple[Names, Names]]
    sized: OpOverload | None = None

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        ins, outs = self.names(call)
        if any(len(n) != call.rank(i) for i, n in enumerate(ins)) or len(ins) != len(layouts):
            return None
        for i, lead in _by_size(call, layouts):
            name = ins[i][lead.dim]
            if name is not None and outs and all(o.count(name) == 1 for o in outs):
                break
        else:
            return None
        if any(names.count(name) > 1 for names in ins):
            return None
        operands = tuple(lead.at(names.index(name)) if name in names else REPLICATED for names in ins)
        outputs = tuple(lead.at(names.index(name)) for names in outs)
        if self.sized is None:
            return Plan(operands, outputs)
        size = outputs[0].local_shape(call.outputs[0], call.degree)
        return Plan(operands, outputs, {"self": call.operands[0], "size": size}, self.sized)

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        ins, outs = self.names(call)
        name = outs[output][want.dim]
        if name is None:
            return []
        return [(i, want.at(names.index(name))) for i, names in enumerate(ins) if name in names]


# ---- families that carry dims ------------------------------------------------------------------------------


def pointwise(call: Call) -> tuple[Names, Names]:
    """Right-aligned dims of one size are the same; a size-1 dim that is broadcast is not."""
    out = call.outputs[0]

    def aligned(shape: tuple[int, ...]) -> list[Name]:
        first = len(out) - len(shape)
        return [first + d if n == out[first + d] else None for d, n in enumerate(shape)]

    return [aligned(call.shape(i)) for i in range(len(call.operands))], [aligned(o) for o in call.outputs]


def _first(call: Call, names: list[Name]) -> Names:
    """``names`` for the first operand, no dim of any other operand."""
    others: Names = [[None] * call.rank(i) for i in range(1, len(call.operands))]
    return [names, *others]


def _blocked(rank: int, *dims: int) -> list[Name]:
    gone = {d % max(rank, 1) for d in dims}
    return [None if d in gone else d for d in range(rank)]


def _dims(call: Call, name: str) -> list[int]:
    """The dims argument ``name``: one, several, or (None, empty) all of the first operand."""
    value: Any = call.arguments.get(name)
    if isinstance(value, int):
        return [value]
    return list(value) if value else list(range(call.rank(0)))


def along(*dim_args: str) -> Callable[[Call], tuple[Names, Names]]:
    """The op mixes entries along the dims named by arguments; results have the operand's dims."""

    def names(call: Call) -> tuple[Names, Names]:
        dims: list[int] = []
        for arg in dim_args:
            dims += _dims(call, arg)
        kept = _blocked(call.rank(0), *dims)
        return _first(call, kept), [kept for _ in call.outputs]

    return names


def reduced(call: Call) -> tuple[Names, Names]:
    """Sums and the like over ``dim`` (one, several, or all), with or without ``keepdim``."""
    kept = _blocked(call.rank(0), *_dims(call, "dim"))
    out = kept if call.arguments.get("keepdim") else [n for n in kept if n is not None]
    return _first(call, kept), [out for _ in call.outputs]


def last_dims(call: Call) -> tuple[Names, Names]:
    """Norms over the last ``len(normalized_shape)`` dims."""
    rank = call.rank(0)
    kept = _blocked(rank, *range(rank - len(call.arguments["normalized_shape"]), rank))
    return _first(call, kept), [[n for n, _ in zip(kept, o, strict=False)] for o in call.outputs]


def only_first_dim(call: Call) -> tuple[Names, Names]:
    """Convolutions, group norm, resampling: samples of the batch stay apart."""
    batched = call.rank(0) >= 1 and all(o and o[0] == call.shape(0)[0] for o in call.outputs)
    head: list[Name] = [0 if batched else None]
    return _first(call, head + [None] * (call.rank(0) - 1)), [head + [None] * (len(o) - 1) for o in call.outputs]


def conv(call: Call) -> tuple[Names, Names]:
    """Batched input only: without a batch dim, dim 0 is channels."""
    if call.rank(0) != call.rank(1):
        return _first(call, [None] * call.rank(0)), [[None] * len(o) for o in call.outputs]
    return only_first_dim(call)


def linear(call: Call) -> tuple[Names, Names]:
    """x [..., in], weight [out, in] or [in]: rows pass, ``in`` is contracted."""
    rows: list[Name] = list(range(call.rank(0) - 1))
    ins: Names = [[*rows, None], [*(["out"] * (call.rank(1) - 1)), None]]
    ins += [["out"] * call.rank(i) for i in range(2, len(call.operands))]
    return ins, [rows + ["out"] * (call.rank(1) - 1)]


def _matmul(a: int, b: int, batch: int) -> tuple[list[Name], list[Name], list[Name]]:
    """Names of a [..., m, k] @ b [..., k, n], ranks ``a`` and ``b``, with ``batch`` batch dims in the result."""
    lead: list[Name] = [f"b{i}" for i in range(batch)]
    left: list[Name] = [None] if a == 1 else [*lead[batch - (a - 2) :], "m", None]
    right: list[Name] = [None] if b == 1 else [*lead[batch - (b - 2) :], None, "n"]
    return left, right, lead + (["m"] if a > 1 else []) + (["n"] if b > 1 else [])


def _unbroadcast(
    names: list[Name], shape: Sequence[int], out_names: list[Name], out_shape: Sequence[int]
) -> list[Name]:
    """Drop the names of dims that are broadcast."""
    size = dict(zip(out_names, out_shape, strict=True))
    return [n if n is None or shape[d] == size.get(n, shape[d]) else None for d, n in enumerate(names)]


def matmul(call: Call) -> tuple[Names, Names]:
    """mm, bmm, matmul, mv, dot."""
    a, b = call.rank(0), call.rank(1)
    left, right, out = _matmul(a, b, max(a, b, 2) - 2)
    shape = call.outputs[0]
    return [_unbroadcast(left, call.shape(0), out, shape), _unbroadcast(right, call.shape(1), out, shape)], [out]


def add_matmul(call: Call) -> tuple[Names, Names]:
    """addmm, baddbmm: bias (broadcast) + a @ b."""
    a, b = call.rank(1), call.rank(2)
    left, right, out = _matmul(a, b, a - 2)
    bias = _unbroadcast(out[len(out) - call.rank(0) :], call.shape(0), out, call.outputs[0])
    return [bias, left, right], [out]


def einsum(call: Call) -> tuple[Names, Names]:
    """Letters are names; one that is not in the result is contracted."""
    left, arrow, right = call.arguments["equation"].replace(" ", "").partition("->")
    if not arrow:  # an implicit result: rare, and not worth its rules
        return [[None] * call.rank(i) for i in range(len(call.operands))], [[None] * len(o) for o in call.outputs]
    terms = [_spelled(t, call.rank(i)) for i, t in enumerate(left.split(","))]
    right = _spelled(right, len(call.outputs[0]))
    size = {c: n for i, t in enumerate(terms) for c, n in zip(t, call.shape(i), strict=True) if n != 1}
    ins: Names = [
        [c if c in right and call.shape(i)[d] == size.get(c, 1) else None for d, c in enumerate(t)]
        for i, t in enumerate(terms)
    ]
    return ins, [list(right)]


def _spelled(term: str, rank: int) -> str:
    """A term with its ellipsis spelled out: digits, counted from the right, for dims that are broadcast."""
    hidden = rank - len(term.replace("...", ""))
    return term.replace("...", "".join(str(i) for i in reversed(range(hidden))))


def embedding(call: Call) -> tuple[Names, Names]:
    """weight [V, C], indices [...] -> [..., C]."""
    rows: list[Name] = list(range(call.rank(1)))
    return [[None] * call.rank(0), rows], [[*rows, None]]


def permuted(order: Callable[[Call], Sequence[int]]) -> Callable[[Call], tuple[Names, Names]]:
    """Result dim i is operand dim ``order[i]``."""

    def names(call: Call) -> tuple[Names, Names]:
        rank = call.rank(0)
        return [list(range(rank))], [[d % rank for d in order(call)] for _ in call.outputs]

    return names


def _swapped(call: Call, a: int, b: int) -> list[int]:
    order = list(range(call.rank(0)))
    if order:
        order[a], order[b] = order[b], order[a]
    return order


def _moved(call: Call) -> list[int]:
    rank = call.rank(0)
    source = [d % rank for d in call.arguments["source"]]
    target = [d % rank for d in call.arguments["destination"]]
    rest = iter(d for d in range(rank) if d not in source)
    return [source[target.index(i)] if i in target else next(rest) for i in range(rank)]


def expand(call: Call) -> tuple[Names, Names]:
    """Dims that keep their size pass."""
    out = call.outputs[0]
    first = len(out) - call.rank(0)
    kept: list[Name] = [first + d if n == out[first + d] else None for d, n in enumerate(call.shape(0))]
    return _first(call, kept), [[None] * first + kept]


def repeat(call: Call) -> tuple[Names, Names]:
    """Dims repeated once pass."""
    given: Any = call.arguments.get("repeats", call.arguments.get("dims"))
    repeats = [1] * (call.rank(0) - len(given)) + list(given)
    first = len(repeats) - call.rank(0)
    kept: list[Name] = [first + d if repeats[first + d] == 1 else None for d in range(call.rank(0))]
    return [kept], [[None] * first + kept]


def stack(call: Call) -> tuple[Names, Names]:
    """A new dim at ``dim``."""
    rank = call.rank(0)
    dim = call.arguments["dim"] % (rank + 1)
    out: list[Name] = list(range(rank))
    out.insert(dim, None)
    return [list(range(rank)) for _ in call.operands], [out]


def taken_apart(call: Call) -> tuple[Names, Names]:
    """select, unbind: ``dim`` is gone."""
    dim = call.dim("dim")
    kept = _blocked(call.rank(0), dim)
    return [kept], [[n for d, n in enumerate(kept) if d != dim] for _ in call.outputs]


def select_scatter(call: Call) -> tuple[Names, Names]:
    """``src`` lacks ``dim``."""
    kept = _blocked(call.rank(0), call.dim("dim"))
    return [kept, [n for n in kept if n is not None]], [kept]


def padded(call: Call) -> tuple[Names, Names]:
    """Dims without padding pass; ``pad`` counts from the last dim."""
    pad, rank = call.arguments["pad"], call.rank(0)
    touched = [rank - 1 - i // 2 for i, n in enumerate(pad) if n != 0]
    kept = [None if d in touched else d for d in range(rank)]
    return [list(kept)], [list(kept)]


def picked(call: Call) -> tuple[Names, Names]:
    """index_select: ``dim`` is looked up by a vector of indices."""
    kept = _blocked(call.rank(0), call.dim("dim"))
    return _first(call, kept), [kept]


def gathered(call: Call) -> tuple[Names, Names]:
    """gather: all dims but ``dim`` run along with the index, where they are as long."""
    dim, index = call.dim("dim"), call.shape(1)
    kept: list[Name] = [d if d != dim and n == index[d] else None for d, n in enumerate(call.shape(0))]
    return [kept, kept], [kept]


def repeat_interleaved(call: Call) -> tuple[Names, Names]:
    """Dims other than ``dim`` pass."""
    if call.arguments["dim"] is None:
        return _first(call, [None] * call.rank(0)), [[None]]
    return picked(call)


def complex_pair(extra_in: int) -> Callable[[Call], tuple[Names, Names]]:
    """view_as_real / view_as_complex: a last dim of two appears or goes."""

    def names(call: Call) -> tuple[Names, Names]:
        kept: list[Name] = list(range(call.rank(0) - extra_in))
        return [kept + [None] * extra_in], [kept + [None] * (1 - extra_in)]

    return names


def batch_norm(call: Call) -> tuple[Names, Names]:
    """With running statistics every dim but the channels passes; otherwise the op mixes all samples."""
    live = call.arguments.get("training", call.arguments.get("train", True)) or call.arguments.get("use_input_stats")
    kept: list[Name] = [None if live or d == 1 else d for d in range(call.rank(0))]
    statistics: Names = [[None] * len(o) for o in call.outputs[1:]]
    return _first(call, kept), [kept, *statistics]


# ---- rules that are not about whole dims -------------------------------------------------------------------


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
        # One op for the family: it takes local sizes, and strides that an exchange changed.
        return Plan(
            (lay, *([REPLICATED] * (len(call.operands) - 1))),
            (out,),
            {"self": call.operands[0], "shape": out.local_shape(call.outputs[0], call.degree)},
            aten.reshape.default,
        )

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        found = _regroup(want, call.outputs[0], call.shape(0), call.degree, split=False)
        return [] if found is None else [(0, found)]


def _regroup(
    lay: Sharded, shape: Sequence[int], new_shape: Sequence[int], degree: int, split: bool = True
) -> Sharded | None:
    """Where the token factor of ``shape`` lies in ``new_shape``; None if it is torn apart.

    The dim's tokens span the factors from ``outer`` (all that varies slower) to ``inner`` (all that varies faster).
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
    if split and len(lay.segments) == 1:
        return _split_tokens(lay, outer, before, new_shape, degree)
    return None


def _split_tokens(
    lay: Sharded, outer: int, before: Sequence[int], new_shape: Sequence[int], degree: int
) -> Sharded | None:
    """Tokens viewed as (frames, height * width): whole frames per rank, if they divide."""
    segment = lay.segments[0]
    for dim, extent in enumerate(new_shape):
        end = before[dim] * extent
        if outer % before[dim] or end % outer or end == outer:
            continue
        frames = end // outer
        if segment.tokens % frames or frames % degree or extent % frames:
            return None
        unit = segment.tokens // frames
        origin = segment.origin and replace(segment.origin, unit=segment.origin.unit * unit)
        return Sharded(dim, (replace(segment, tokens=frames, origin=origin),), outer // before[dim], 1)
    return None


@dataclass(frozen=True)
class Concatenate:
    """cat: along another dim all operands lie alike; along the token dim their segments are concatenated."""

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        dim = call.arguments["dim"] % max(map(len, call.outputs))
        used = [i for i in range(len(call.operands)) if call.shape(i) != (0,)]
        _, lead = _by_size(call, layouts)[0]
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
            segments += lay.segments
        return Plan(tuple(operands), (replace(lead, segments=tuple(segments)),))

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
        whole = call.shape(0)[dim]
        if want.outer != 1 or whole % want.inner:
            return []
        return [(0, replace(want, segments=(Segment(whole // want.inner),)))]


def _between(lay: Sharded, start: int, end: int) -> tuple[Segment, ...]:
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
    return [replace(lay, segments=_between(lay, *piece)) for piece in in_tokens], in_tokens, cuts


def _local_bounds(lay: Sharded, outputs: Sequence[Sharded], pieces: Sequence[Piece], degree: int) -> list[Piece]:
    """[start, end) of the pieces in one rank's share."""
    starts = [replace(lay, segments=_between(lay, 0, start)).local_extent(degree) for start, _ in pieces]
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
        (_, lead), *_ = _by_size(call, layouts)
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


# ---- the table ---------------------------------------------------------------------------------------------

POINTWISE = Carry(pointwise)


def _same(rule: Rule, *packets: Any) -> dict[OpOverload, Rule]:
    """One rule for every overload of some ops."""
    return {getattr(p, name): rule for p in packets for name in p.overloads() if not name.endswith("out")}


RULES: dict[OpOverload, Rule] = {
    # elementwise, beyond what carries torch's own `pointwise` tag
    **_same(POINTWISE, aten._to_copy, aten.to, aten.clone, aten.detach, aten.alias, aten.contiguous),
    **_same(POINTWISE, aten.lift_fresh_copy, aten.copy, aten.where, aten.masked_fill),
    **_same(POINTWISE, aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like),
    **_same(POINTWISE, aten.dropout, aten.feature_dropout, aten.alpha_dropout, aten.fill, aten._conj, aten.conj),
    **_same(POINTWISE, aten.resolve_conj, aten.real, aten.imag, aten.complex, aten.polar, aten.rsub, aten.float_power),
    # dims change places
    **_same(Carry(permuted(lambda c: c.arguments["dims"])), aten.permute),
    **_same(Carry(permuted(lambda c: _swapped(c, c.arguments["dim0"], c.arguments["dim1"]))), aten.transpose),
    aten.swapaxes.default: Carry(permuted(lambda c: _swapped(c, c.arguments["axis0"], c.arguments["axis1"]))),
    aten.swapdims.default: Carry(permuted(lambda c: _swapped(c, c.arguments["dim0"], c.arguments["dim1"]))),
    **_same(Carry(permuted(lambda c: list(range(c.rank(0)))[::-1])), aten.t, aten.numpy_T),
    **_same(Carry(permuted(lambda c: _swapped(c, -1, -2))), aten.mT, aten.adjoint),
    aten.movedim.intlist: Carry(permuted(_moved)),
    # dims are merged and split
    aten.view.default: Regroup(),  # view.dtype reads other bytes
    aten.flatten.using_ints: Regroup(),
    aten.unflatten.int: Regroup(),
    **_same(Regroup(), aten.reshape, aten._unsafe_view, aten.view_as, aten.reshape_as, aten.squeeze, aten.unsqueeze),
    **_same(Carry(complex_pair(0)), aten.view_as_real),
    **_same(Carry(complex_pair(1)), aten.view_as_complex),
    # dims are taken out, put in, repeated
    **_same(Concatenate(), aten.cat, aten.concat),
    **_same(Carry(stack), aten.stack),
    **_same(SLICE, aten.slice),
    aten.narrow.default: NARROW,
    **_same(SPLIT, aten.split, aten.split_with_sizes, aten.chunk, aten.unsafe_split, aten.unsafe_chunk),
    aten.tensor_split.sections: SPLIT,
    **_same(Carry(taken_apart), aten.select, aten.unbind),
    **_same(Carry(select_scatter), aten.select_scatter),
    **_same(SliceScatter(), aten.slice_scatter),
    aten.expand.default: Carry(expand, sized=aten.expand.default),
    **_same(Carry(repeat), aten.repeat, aten.tile),
    aten.repeat_interleave.self_int: Carry(repeat_interleaved),
    **_same(Carry(padded), aten.constant_pad_nd, aten.pad),
    **_same(Carry(picked), aten.index_select),
    **_same(Carry(gathered), aten.gather),
    **_same(Carry(embedding), aten.embedding),
    # contractions
    **_same(Carry(linear), aten.linear),
    **_same(Carry(matmul), aten.matmul, aten.mm, aten.bmm, aten.mv),
    **_same(Carry(add_matmul), aten.addmm, aten.baddbmm),
    **_same(Carry(einsum), aten.einsum),
    # norms and other ops that mix entries along some dims
    **_same(Carry(last_dims), aten.layer_norm, aten.rms_norm, aten.native_layer_norm, aten._fused_rms_norm),
    **_same(Carry(only_first_dim), aten.group_norm),
    **_same(Carry(batch_norm), aten.batch_norm, aten.native_batch_norm),
    **_same(Carry(along("dim")), aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax),
    **_same(Carry(along("dim")), aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.sort, aten.argsort, aten.topk),
    **_same(Carry(along("dim")), aten.glu),
    **_same(Carry(along("dims")), aten.flip, aten.roll),
    **_same(Carry(reduced), aten.sum, aten.mean, aten.amax, aten.amin, aten.prod, aten.any, aten.all, aten.logsumexp),
    **_same(Carry(reduced), aten.kthvalue, aten.argmax, aten.argmin, aten.std, aten.var, aten.var_mean),
    **_same(Carry(reduced), aten.norm, aten.linalg_vector_norm, aten.std_mean, aten.median),
    **{op: Carry(reduced) for op in (aten.max.dim, aten.max.default, aten.min.dim, aten.min.default)},
    # only samples of the batch are independent
    **_same(Carry(conv), aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution),
    **_same(Carry(only_first_dim), aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_nearest3d),
    # an operand lends dtype, device or shape and none of its values
    **_same(Like(0), aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty),
    **_same(Like(1), aten.type_as),
    aten.to.other: Like(1),
}


def rule_for(target: Any) -> Rule | None:
    """The rule of an op, None if it has none."""
    if target in RULES:
        return RULES[target]
    if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and not target._schema.is_mutable:
        return POINTWISE
    return None
