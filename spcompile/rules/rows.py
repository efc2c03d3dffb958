"""Rules of ops that take, write, add or move single tokens: every rank does it for those it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from spcompile.call import Call
from spcompile.layout import REPLICATED, Layout, Segment, Sharded, missing_cuts
from spcompile.rules.base import Build, Plan, Rule, cheaper_reduced, first_only, value_dtype
from spcompile.rules.pieces import between

aten = torch.ops.aten


def one_token(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """select along the token dim: that token alone goes to every rank."""
    return _token(call, layouts[0], call.arguments["index"], keep=False)


@dataclass(frozen=True)
class OneToken:
    """slice: as ``rule`` says, but a single token goes to every rank."""

    rule: Rule

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        dim, start = call.dim("dim"), call.arguments["start"] or 0
        alone = call.outputs[0][dim] == 1 and call.shape(0)[dim] > 1
        return (_token(call, layouts[0], start, keep=True) if alone else None) or self.rule.forward(call, layouts)

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        return self.rule.backward(call, output, want)


def _token(call: Call, lay: Layout, index: int, keep: bool) -> Plan | None:
    """A plan for the token at ``index``, with or without its dim."""
    if not isinstance(lay, Sharded) or lay.dim != call.dim("dim") or (lay.outer, lay.inner) != (1, 1):
        return None
    index = index + lay.tokens if index < 0 else index
    cuts = missing_cuts(lay, [index, index + 1])
    if cuts is None or not 0 <= index < lay.tokens:
        return None
    token = replace(lay, segments=between(lay, index, index + 1))
    start = replace(lay, segments=between(lay, 0, index)).local_extent(call.degree) if index else 0

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        whole = b.unshard(b.emit(aten.slice.Tensor, given["self"], lay.dim, start, start + 1), token)
        return whole if keep else b.emit(aten.select.int, whole, lay.dim, 0)

    return Plan((lay,), (REPLICATED,), build=build, cuts=tuple(cuts))


def looked_up(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """gather and index_select along the token dim, of few tokens: each rank gives those it has."""
    lay = layouts[0]
    if not isinstance(lay, Sharded) or lay.dim != call.dim("dim") or (lay.outer, lay.inner) != (1, 1):
        return None
    if not cheaper_reduced(call, [0]) or any(isinstance(x, Sharded) for x in layouts[1:]):
        return None
    if call.rank(0) == 0 or value_dtype(call).is_complex:
        return None
    select = call.node.target._schema.name == "aten::index_select"  # type: ignore[union-attr]
    shape = list(call.outputs[0])

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        index = b.cast(given["index"], torch.int64)
        if select:
            single = [shape[lay.dim] if d == lay.dim else 1 for d in range(len(shape))]
            index = b.emit(aten.expand.default, b.emit(aten.reshape.default, index, single), shape)
        return b.pick(given["self"], index, lay)

    return Plan(first_only(lay, call), (REPLICATED,), build=build)


@dataclass(frozen=True)
class Written:
    """scatter, index_add, index_put: as ``carry`` says; along the token dim each rank writes the rows that it has.

    Index and source are whole on every rank. Rows of others go to one row more, which is cut off again.
    """

    carry: Rule | None
    dim: Callable[[Call], int | None]
    wraps: bool = False

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        carried = self.carry.forward(call, layouts) if self.carry else None
        return carried or self.written(call, layouts)

    def written(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        lay = layouts[0]
        if not isinstance(lay, Sharded) or (lay.outer, lay.inner) != (1, 1) or lay.dim != self.dim(call):
            return None
        if any(isinstance(x, Sharded) for x in layouts[1:]):
            return None
        rows, rank = lay.local_extent(call.degree), call.rank(0)
        schema = call.node.target._schema.arguments  # type: ignore[union-attr]

        def build(b: Build, given: dict[str, Any]) -> fx.Node:
            def place(index: fx.Node) -> fx.Node:
                return b.local_rows(b.cast(index, torch.int64), lay, self.wraps)

            one_more = [0, 0] * (rank - 1 - lay.dim) + [0, 1]
            arguments = given | {"self": b.emit(aten.constant_pad_nd.default, given["self"], one_more)}
            if "index" in given:
                arguments["index"] = place(given["index"])
            else:
                arguments["indices"] = [index if index is None else place(index) for index in given["indices"]]
            args = [arguments[a.name] for a in schema if not a.kwarg_only]
            named = {a.name: arguments[a.name] for a in schema if a.kwarg_only}
            out = b.emit(call.node.target, *args, **named)
            return b.emit(aten.slice.Tensor, out, lay.dim, 0, rows)

        return Plan(first_only(lay, call), (lay,), build=build)

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        if self.dim(call) == want.dim:
            return [(0, want)]
        return self.carry.backward(call, output, want) if self.carry else []


def indexed_dim(call: Call) -> int | None:
    """The only dim of an index_put that integers index."""
    indices = call.arguments["indices"]
    used = [d for d, index in enumerate(indices) if index is not None]
    plain = len(used) == 1 and indices[used[0]].meta["val"].dtype in (torch.int64, torch.int32)
    return used[0] if plain else None


def rolled(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """roll of the tokens: by few, rows of a neighbour; else the segments change places, each rank keeps its rows."""
    lay, dims, shifts = layouts[0], call.arguments["dims"], call.arguments["shifts"]
    if not isinstance(lay, Sharded) or lay.outer != 1 or not dims or lay.tokens == 0:
        return None
    amounts: dict[int, int] = {}
    for at, amount in enumerate(shifts):
        dim = call.dim_at("dims", at)
        amounts[dim] = amounts.get(dim, 0) + amount
    shift = amounts.pop(lay.dim) % lay.extent
    others = [list(amounts.values()), list(amounts)]

    def along_others(b: Build, x: fx.Node) -> fx.Node:
        return b.emit(aten.roll.default, x, *others) if amounts else x

    if shift == 0:  # once around
        return Plan((lay,), (lay,), build=lambda b, given: along_others(b, b.emit(aten.clone.default, given["self"])))
    rows, extent = min(shift, lay.extent - shift), lay.local_extent(call.degree)
    alone = len(lay.segments) == 1 and not lay.segments[0].mirrored
    if alone and rows <= lay.extent - (call.degree - 1) * extent:  # which the last rank has
        before, after = (rows, 0) if rows == shift else (0, rows)

        def build(b: Build, given: dict[str, Any]) -> fx.Node:
            x = b.halo(given["self"], lay, before, after, wraps=True)
            return along_others(b, b.emit(aten.slice.Tensor, x, lay.dim, after, after + extent))

        return Plan((lay,), (lay,), build=build)
    first, torn = divmod(lay.extent - shift, lay.inner)
    cuts = missing_cuts(lay, [first])
    if torn or cuts is None or any(s.mirrored for s in lay.segments):
        return None
    head, tail = (replace(lay, segments=between(lay, *ends)) for ends in ((0, first), (first, lay.tokens)))
    at = head.local_extent(call.degree)

    def swap(b: Build, given: dict[str, Any]) -> fx.Node:
        parts = [b.emit(aten.slice.Tensor, given["self"], lay.dim, *ends) for ends in ((at, extent), (0, at))]
        return along_others(b, b.emit(aten.cat.default, parts, lay.dim))

    out = replace(lay, segments=tail.segments + head.segments)
    return Plan((lay,), (out,), build=swap, cuts=tuple(cuts))


def padded(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """A constant before or after the tokens: runs of tokens of their own, which no rank needs to be sent."""
    lay, pad = layouts[0], call.arguments["pad"]
    constant = call.arguments.get("mode", "constant") == "constant"
    if not isinstance(lay, Sharded) or not constant or (lay.outer, lay.inner) != (1, 1):
        return None
    position = 2 * (call.rank(0) - 1 - lay.dim)
    amounts = pad[position : position + 2]
    if min(amounts) < 0:
        return None
    before, after = ((Segment(n),) if n else () for n in amounts)
    out = replace(lay, segments=before + lay.segments + after)

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        value = given["value"] if given["value"] is not None else 0
        others = [n if i not in (position, position + 1) else 0 for i, n in enumerate(pad)]
        x = b.emit(aten.constant_pad_nd.default, given["self"], others, value) if any(others) else given["self"]
        shape = list(x.meta["val"].shape)
        parts = [x]
        for new, at in ((before, 0), (after, 1)):
            if new:
                shape[lay.dim] = replace(lay, segments=new).local_extent(call.degree)
                parts.insert(at * len(parts), b.emit(aten.new_full.default, x, shape, value))
        return b.emit(aten.cat.default, parts, lay.dim)

    return Plan((lay,), (out,), build=build)
