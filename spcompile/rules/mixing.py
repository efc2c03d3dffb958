"""Rules of ops that mix tokens and are computed on chunks all the same.

Sums, contractions and statistics over tokens are partial results of every rank and one small all-reduce. A running
sum needs one row per rank, a convolution the neighbours' nearest rows, a rotation of the tokens nothing at all. Where
that would send more than gathering the tokens, or is not exact, the rule says no.

Padding never counts: it is filled with what does not change the result before tokens are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from spcompile.call import Call, tensor_of
from spcompile.layout import REPLICATED, Layout, Segment, Sharded, missing_cuts
from spcompile.rules import names
from spcompile.rules.base import Build, Carry, Name, Names, Plan, Rule, by_size, first_only
from spcompile.rules.pieces import between

aten = torch.ops.aten
INFINITY = float("inf")


@dataclass(frozen=True)
class Mixing:
    """As ``carry`` says; where it says no, ``mixed`` gives the plan for operands sharded along what the op mixes."""

    carry: Rule
    mixed: Callable[[Call, Sequence[Layout]], Plan | None]

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        return self.carry.forward(call, layouts) or self.mixed(call, layouts)

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        return self.carry.backward(call, output, want)


def _cheaper_reduced(call: Call, sharded: Sequence[int]) -> bool:
    """Does an all-reduce of the results send less than an all-gather of the operands?"""
    results = sum(math.prod(o) for o in call.outputs)
    return 2 * results <= sum(math.prod(call.shape(i)) for i in sharded)


def _value_dtype(call: Call, output: int = 0) -> torch.dtype:
    value: Any = call.node.meta["val"]
    return (value[output] if isinstance(value, (tuple, list)) else value).dtype


def _is_real(call: Call) -> bool:
    """Are operand and result floating point, not complex?"""
    operand: torch.Tensor = call.operands[0].meta["val"]
    return operand.dtype.is_floating_point and _value_dtype(call).is_floating_point


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which half precision is summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# ---- contractions ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contract:
    """Dims pass by name; a name that no result has is contracted: partial sums, one all-reduce.

    ``bias`` is the argument that is added to the result, if the op has one.
    """

    names: Callable[[Call], tuple[Names, Names]]
    bias: str | None = None

    def forward(self, call: Call, layouts: Sequence[Layout]) -> Plan | None:
        ins, outs = self.names(call)
        (i, lead), *_ = by_size(call, layouts)
        name = ins[i][lead.dim] if len(ins) == len(layouts) else None
        if name is None or name in outs[0]:
            return Carry(self._carried).forward(call, layouts)
        return self._partial(call, name, lead, ins) or Carry(self._carried).forward(call, layouts)

    def _carried(self, call: Call) -> tuple[Names, Names]:
        ins, outs = self.names(call)
        return [[n if n in outs[0] else None for n in dims] for dims in ins], outs

    def _partial(self, call: Call, name: Name, lead: Sharded, ins: Names) -> Plan | None:
        sharded = [i for i, dims in enumerate(ins) if name in dims]
        alone = all(dims.count(name) <= 1 for dims in ins)
        if not alone or not _cheaper_reduced(call, sharded):
            return None
        operands = tuple(lead.at(dims.index(name)) if name in dims else REPLICATED for dims in ins)
        schema = [a.name for a in call.node.target._schema.arguments if not a.kwarg_only]  # type: ignore[union-attr]

        def build(b: Build, given: dict[str, Any]) -> fx.Node:
            layouts = dict(zip(_tensors(given), operands, strict=True))  # chunks of one value, cut otherwise, are two

            def masked(n: fx.Node) -> fx.Node:
                lay = layouts.get(n, REPLICATED)
                return b.filled(n, lay, 0.0) if isinstance(lay, Sharded) else n

            bias = given.get(self.bias) if self.bias else None
            args = [fx.map_arg(given[a], masked) for a in schema if a != self.bias]
            total = b.all_reduce(b.emit(call.node.target, *args), "sum")
            return total if bias is None else b.emit(aten.add.Tensor, total, bias)

        return Plan(operands, (REPLICATED,), build=build)

    def backward(self, call: Call, output: int, want: Sharded) -> list[tuple[int, Sharded]]:
        return Carry(self._carried).backward(call, output, want)


def _tensors(arguments: dict[str, Any]) -> list[fx.Node]:
    """The tensors among arguments, in order, each as often as it is there."""
    found: list[fx.Node] = []
    for value in arguments.values():
        fx.map_arg(value, lambda n: found.append(n) if tensor_of(n) is not None else None)
    return found


# ---- sums and statistics over tokens -----------------------------------------------------------------------


def _over_tokens(call: Call, layouts: Sequence[Layout]) -> tuple[Sharded, list[int]] | None:
    """The operand's layout and the reduced dims, if the token dim is one of them and reducing pays."""
    lay = layouts[0]
    reduced = [d % max(call.rank(0), 1) for d in names.dims_of(call, "dim")]
    if not isinstance(lay, Sharded) or lay.dim not in reduced or not _cheaper_reduced(call, [0]):
        return None
    return lay, reduced


def _partial_plan(call: Call, lay: Layout, build: Callable[[Build, dict[str, Any]], Any]) -> Plan:
    operands = first_only(lay, call)
    return Plan(operands, tuple(REPLICATED for _ in call.outputs), build=build)


def _kept(call: Call) -> bool:
    return bool(call.arguments.get("keepdim", False))


def summed(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """sum, mean."""
    found = _over_tokens(call, layouts)
    if found is None:
        return None
    (lay, reduced), dtype = found, _value_dtype(call)
    is_mean = call.node.target._schema.name == "aten::mean"  # type: ignore[union-attr]
    count = math.prod(call.shape(0)[d] for d in reduced)

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x = b.filled(given["self"], lay, 0.0)
        total = b.all_reduce(b.emit(aten.sum.dim_IntList, x, reduced, _kept(call), dtype=_wide(dtype)), "sum")
        return b.cast(b.emit(aten.div.Tensor, total, count) if is_mean else total, dtype)

    return _partial_plan(call, lay, build)


def extreme(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """amax, amin, max and min of everything."""
    found = _over_tokens(call, layouts)
    if found is None:
        return None
    lay, reduced = found
    high = "max" in call.node.target._schema.name  # type: ignore[union-attr]

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x = b.filled(given["self"], lay, -INFINITY if high else INFINITY)
        op = aten.amax.default if high else aten.amin.default
        return b.all_reduce(b.emit(op, x, reduced, _kept(call)), "max" if high else "min")

    return _partial_plan(call, lay, build)


def anywhere(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """any, all."""
    found = _over_tokens(call, layouts)
    if found is None:
        return None
    lay, reduced = found
    every = call.node.target._schema.name == "aten::all"  # type: ignore[union-attr]

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        true = b.emit(aten.ne.Scalar, given["self"], 0)
        x = b.cast(b.filled(true, lay, float(every)), torch.uint8)
        op = aten.amin.default if every else aten.amax.default
        part = b.emit(op, x, reduced, _kept(call))
        return b.cast(b.all_reduce(part, "min" if every else "max"), _value_dtype(call))

    return _partial_plan(call, lay, build)


def log_sum_exp(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """logsumexp: merged by the largest part."""
    found = _over_tokens(call, layouts)
    if found is None or not _is_real(call):
        return None
    (lay, reduced), dtype = found, _value_dtype(call)

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x = b.filled(b.cast(given["self"], _wide(dtype)), lay, -INFINITY)
        part = b.emit(aten.logsumexp.default, x, reduced, _kept(call))
        top = b.all_reduce(part, "max")
        finite = b.emit(aten.where.ScalarOther, b.emit(aten.isfinite.default, top), top, 0.0)
        scaled = b.emit(aten.exp.default, b.emit(aten.sub.Tensor, part, finite))
        total = b.emit(aten.log.default, b.all_reduce(scaled, "sum"))
        return b.cast(b.emit(aten.add.Tensor, total, finite), dtype)

    return _partial_plan(call, lay, build)


def length(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """linalg_vector_norm of order two."""
    found = _over_tokens(call, layouts)
    dtype = _value_dtype(call)
    if found is None or call.arguments["ord"] != 2 or not _is_real(call):
        return None
    lay, reduced = found

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x = b.filled(b.cast(given["self"], _wide(dtype)), lay, 0.0)
        squares = b.emit(aten.sum.dim_IntList, b.emit(aten.mul.Tensor, x, x), reduced, _kept(call))
        return b.cast(b.emit(aten.sqrt.default, b.all_reduce(squares, "sum")), dtype)

    return _partial_plan(call, lay, build)


def spread(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """var, std, and with the mean beside them: two passes, as torch does."""
    found = _over_tokens(call, layouts)
    dtype = _value_dtype(call)
    if found is None or not _is_real(call):
        return None
    lay, reduced = found
    correction = call.arguments.get("correction")
    if correction is None:
        correction = int(call.arguments.get("unbiased", True))
    what = call.node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]

    def build(b: Build, given: dict[str, Any]) -> Any:
        x = b.cast(given["self"], _wide(dtype))
        mean, squares, count = _moments(b, x, lay, reduced, call.shape(0))
        var = b.emit(aten.div.Tensor, squares, max(count - correction, 0))
        results = [b.emit(aten.sqrt.default, var) if what.startswith("std") else var]
        results += [mean] if what.endswith("mean") else []
        shape = list(call.outputs[0])
        results = [b.cast(b.emit(aten.reshape.default, r, shape), dtype) for r in results]
        return results if what.endswith("mean") else results[0]

    return _partial_plan(call, lay, build)


def _moments(
    b: Build, x: fx.Node, lay: Sharded, reduced: Sequence[int], shape: Sequence[int]
) -> tuple[fx.Node, fx.Node, int]:
    """Mean, sum of squared distances to it (both with all dims kept) and count, over ``reduced`` dims of all ranks."""
    count = math.prod(shape[d] for d in reduced)
    total = b.all_reduce(b.emit(aten.sum.dim_IntList, b.filled(x, lay, 0.0), list(reduced), True), "sum")
    mean = b.emit(aten.div.Tensor, total, count)
    apart = b.filled(b.emit(aten.sub.Tensor, x, mean), lay, 0.0)
    squares = b.emit(aten.sum.dim_IntList, b.emit(aten.mul.Tensor, apart, apart), list(reduced), True)
    return mean, b.all_reduce(squares, "sum"), count


def normalised_groups(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """group_norm, and instance_norm by the input's own statistics, of tokens in the spatial dims."""
    lay = layouts[0]
    name = "input" if "input" in call.arguments else "self"
    if not isinstance(lay, Sharded) or lay.dim < 2 or call.arguments.get("use_input_stats") is False:
        return None
    if call.arguments.get("running_mean") is not None:  # would be written
        return None
    batch, channels, *spatial = call.shape(0)
    groups = call.arguments.get("num_groups", channels)
    dtype = _value_dtype(call)

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        local = list(given[name].meta["val"].shape[2:])
        x = b.emit(aten.reshape.default, given[name], [batch, groups, channels // groups, *local])
        x = b.cast(x, _wide(dtype))
        inside = list(range(2, 3 + len(spatial)))
        shape = [batch, groups, channels // groups, *spatial]
        mean, squares, count = _moments(b, x, lay.at(lay.dim + 1), inside, shape)
        var = b.emit(aten.add.Tensor, b.emit(aten.div.Tensor, squares, count), given["eps"])
        out = b.emit(aten.mul.Tensor, b.emit(aten.sub.Tensor, x, mean), b.emit(aten.rsqrt.default, var))
        out = b.emit(aten.reshape.default, out, [batch, channels, *local])
        per_channel = [channels] + [1] * len(spatial)
        for op, affine in ((aten.mul.Tensor, given.get("weight")), (aten.add.Tensor, given.get("bias"))):
            if affine is not None:
                out = b.emit(op, out, b.emit(aten.reshape.default, affine, per_channel))
        return b.cast(out, dtype)

    operands = first_only(lay, call)
    return Plan(operands, (lay,), build=build)


def softmax(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """softmax and log_softmax over tokens: two small reductions, the result stays sharded."""
    lay, dtype = layouts[0], _value_dtype(call)
    if not isinstance(lay, Sharded) or lay.dim != call.dim("dim"):
        return None
    if 4 * math.prod(call.shape(0)) // max(call.shape(0)[lay.dim], 1) > math.prod(call.shape(0)):
        return None  # tokens are few: gathering them sends less
    logarithm = "log" in call.node.target._schema.name  # type: ignore[union-attr]

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x = b.cast(given["self"], _wide(dtype))
        top = b.all_reduce(b.emit(aten.amax.default, b.filled(x, lay, -INFINITY), [lay.dim], True), "max")
        apart = b.emit(aten.sub.Tensor, x, top)
        powers = b.emit(aten.exp.default, apart)
        part = b.emit(aten.sum.dim_IntList, b.filled(powers, lay, 0.0), [lay.dim], True)
        total = b.all_reduce(part, "sum")
        if logarithm:
            return b.cast(b.emit(aten.sub.Tensor, apart, b.emit(aten.log.default, total)), dtype)
        return b.cast(b.emit(aten.div.Tensor, powers, total), dtype)

    return Plan((lay,), (lay,), build=build)


def running_sum(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """cumsum."""
    lay, dtype = layouts[0], _value_dtype(call)
    if not isinstance(lay, Sharded) or (lay.outer, lay.inner) != (1, 1):
        return None
    return Plan((lay,), (lay,), build=lambda b, given: b.cumsum(b.cast(given["self"], dtype), lay))


def rolled(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """roll along the token dim: the segments change places, every rank with its own share of each."""
    lay, shifts = layouts[0], call.arguments["shifts"]
    if not isinstance(lay, Sharded) or len(shifts) != 1 or len(call.arguments["dims"]) != 1 or lay.outer != 1:
        return None
    if lay.dim != call.dim_at("dims", 0) or lay.tokens == 0 or shifts[0] % lay.inner:
        return None
    first = -(shifts[0] // lay.inner) % lay.tokens
    cuts = missing_cuts(lay, [first])
    if cuts is None or any(s.mirrored for s in lay.segments):
        return None
    head, tail = (replace(lay, segments=between(lay, *ends)) for ends in ((0, first), (first, lay.tokens)))
    out = replace(lay, segments=tail.segments + head.segments) if first else lay

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        if not first:  # once around
            return b.emit(aten.clone.default, given["self"])
        at, end = head.local_extent(call.degree), lay.local_extent(call.degree)
        parts = [b.emit(aten.slice.Tensor, given["self"], lay.dim, *ends) for ends in ((at, end), (0, at))]
        return b.emit(aten.cat.default, parts, lay.dim)

    return Plan((lay,), (out,), build=build, cuts=tuple(cuts))


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
    if not _cheaper_reduced(call, [0]) or any(isinstance(x, Sharded) for x in layouts[1:]):
        return None
    if call.rank(0) == 0 or _value_dtype(call).is_complex:
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


# ---- convolutions ------------------------------------------------------------------------------------------


def convolved(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """Convolutions of tokens in a spatial dim: by themselves, in whole patches, or with the neighbours' rows."""
    lay = layouts[0]
    if not isinstance(lay, Sharded) or call.rank(0) != call.rank(1) or lay.dim < 2:
        return None
    dim = lay.dim
    kernel = call.shape(1)[dim]
    stride, dilation = (_of_dim(call.arguments[a], dim, call.rank(0)) for a in ("stride", "dilation"))
    reach = (kernel - 1) * dilation
    paddings = _paddings(call)
    if paddings is None:
        return None
    padding = paddings[dim - 2]
    if call.arguments.get("transposed"):
        return None
    operands = first_only(lay, call)
    if (kernel, stride, padding) == (1, 1, 0):
        return Plan(operands, (lay,))
    if stride == kernel and padding == 0 and dilation == 1:
        out = _fewer(lay, stride, call.degree)
        return Plan(operands, (out,)) if out else None
    same = stride == 1 and 2 * padding == reach
    alone = len(lay.segments) == 1 and lay.outer == 1 and not lay.segments[0].mirrored
    if not same or not alone or padding > lay.local_extent(call.degree):
        return None

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x, weight, bias, *rest = given.values()
        rest[1] = [0 if d == dim else p for d, p in enumerate(paddings, start=2)]
        op = getattr(aten, call.node.target._schema.name.removeprefix("aten::")).default  # type: ignore[union-attr]
        return b.emit(op, b.halo(x, lay, padding), weight, bias, *rest)

    return Plan(operands, (lay,), build=build)


def _paddings(call: Call) -> list[int] | None:
    """Padding of each spatial dim; None if it is not the same on both sides."""
    rank, given = call.rank(0), call.arguments["padding"]
    if not isinstance(given, str):
        return [_of_dim(given, d, rank) for d in range(2, rank)]
    reach = [(call.shape(1)[d] - 1) * _of_dim(call.arguments["dilation"], d, rank) for d in range(2, rank)]
    if given == "valid":
        return [0 for _ in reach]
    return None if any(r % 2 for r in reach) else [r // 2 for r in reach]


def convolved_back(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """Transposed convolutions that make a patch of every token."""
    lay = layouts[0]
    if not isinstance(lay, Sharded) or call.rank(0) != call.rank(1) or lay.dim < 2:
        return None
    stride, padding, more, dilation = (
        _of_dim(call.arguments[a], lay.dim, call.rank(0)) for a in ("stride", "padding", "output_padding", "dilation")
    )
    if (call.shape(1)[lay.dim], padding, more, dilation) != (stride, 0, 0, 1):
        return None
    operands = first_only(lay, call)
    return Plan(operands, (replace(lay, inner=lay.inner * stride).absorb_inner(call.degree),))


def _of_dim(value: Any, dim: int, rank: int) -> int:
    """The entry of a list argument for one spatial dim."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values[dim - rank] if len(values) == rank - 2 else values[0]


def _fewer(lay: Sharded, patch: int, degree: int) -> Sharded | None:
    """Every ``patch`` tokens become one, if no patch lies on two ranks."""
    if lay.inner % patch == 0:
        return replace(lay, inner=lay.inner // patch)
    if lay.inner != 1 or any(s.tokens % (patch * degree) for s in lay.segments):
        return None

    def coarser(s: Segment) -> Segment:
        origin = s.origin and replace(s.origin, unit=s.origin.unit * patch)
        return replace(s, tokens=s.tokens // patch, origin=origin)

    return replace(lay, segments=tuple(coarser(s) for s in lay.segments))
