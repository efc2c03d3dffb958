"""Rules of ops that mix tokens and are computed on chunks all the same.

Sums, contractions and statistics over tokens are partial results of every rank and one small all-reduce. A running
sum needs one row per rank. Where that would send more than gathering the tokens, or is not exact, the rule says no.

Padding never counts: it is filled with what does not change the result before tokens are summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from spcompile.call import Call, tensor_of
from spcompile.layout import REPLICATED, Layout, Sharded
from spcompile.rules import names
from spcompile.rules.base import (
    Build,
    Carry,
    Name,
    Names,
    Plan,
    Rule,
    by_size,
    cheaper_reduced,
    first_only,
    value_dtype,
)

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


def _is_real(call: Call) -> bool:
    """Are operand and result floating point, not complex?"""
    operand: torch.Tensor = call.operands[0].meta["val"]
    return operand.dtype.is_floating_point and value_dtype(call).is_floating_point


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
        if not alone or not cheaper_reduced(call, sharded):
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
    if not isinstance(lay, Sharded) or lay.dim not in reduced or not cheaper_reduced(call, [0]):
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
    is_mean = call.node.target._schema.name == "aten::mean"  # type: ignore[union-attr]
    return _sum(call, *found, _kept(call), is_mean)


def pooled_to_one(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """adaptive_avg_pool to a single value: a mean over the last dims."""
    lay, size = layouts[0], call.arguments["output_size"]
    spatial = list(range(call.rank(0)))[-len(size) :]
    if not isinstance(lay, Sharded) or lay.dim not in spatial or any(n != 1 for n in size):
        return None
    return _sum(call, lay, spatial, True, is_mean=True) if cheaper_reduced(call, [0]) else None


def _sum(call: Call, lay: Sharded, reduced: list[int], kept: bool, is_mean: bool) -> Plan:
    dtype, count = value_dtype(call), math.prod(call.shape(0)[d] for d in reduced)

    def build(b: Build, given: dict[str, Any]) -> fx.Node:
        x = b.filled(given["self"], lay, 0.0)
        total = b.all_reduce(b.emit(aten.sum.dim_IntList, x, reduced, kept, dtype=_wide(dtype)), "sum")
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
        return b.cast(b.all_reduce(part, "min" if every else "max"), value_dtype(call))

    return _partial_plan(call, lay, build)


def log_sum_exp(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """logsumexp: merged by the largest part."""
    found = _over_tokens(call, layouts)
    if found is None or not _is_real(call):
        return None
    (lay, reduced), dtype = found, value_dtype(call)

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
    dtype = value_dtype(call)
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
    dtype = value_dtype(call)
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
    dtype = value_dtype(call)

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
        return b.cast(_affine(b, out, given, [channels] + [1] * len(spatial)), dtype)

    operands = first_only(lay, call)
    return Plan(operands, (lay,), build=build)


def normalised_batch(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """batch_norm of tokens in any dim but channels; by its own statistics the running ones follow them.

    Results: the normalised values, mean and reciprocal deviation of every channel, and where the op has running
    statistics the new ones at the end.
    """
    lay, running = layouts[0], call.arguments.get("running_mean") is not None
    if not isinstance(lay, Sharded) or lay.dim == 1:
        return None
    statistics = [REPLICATED] * (len(call.outputs) - 1)
    if not names.takes_statistics(call):
        return Plan(first_only(lay, call), (lay, *statistics))
    results: Any = call.node.meta["val"]
    new = 2 if isinstance(results, (tuple, list)) and len(results) > 3 else 0
    if running and not new:
        return None  # they are written in place
    shape = call.shape(0)
    reduced = [d for d in range(len(shape)) if d != 1]
    per_channel = [shape[1]] + [1] * (len(shape) - 2)

    def build(b: Build, given: dict[str, Any]) -> Any:
        wide = _wide(value_dtype(call)) if new or isinstance(results, torch.Tensor) else results[1].dtype
        x = b.cast(given["input"], wide)
        mean, squares, count = _moments(b, x, lay, reduced, shape)
        var = b.emit(aten.div.Tensor, squares, count)
        scale = b.emit(aten.rsqrt.default, b.emit(aten.add.Tensor, var, given["eps"]))
        out = b.emit(aten.mul.Tensor, b.emit(aten.sub.Tensor, x, mean), scale)
        out = _affine(b, out, given, per_channel)
        if isinstance(results, torch.Tensor):
            return b.cast(out, results.dtype)
        found = [out, *(b.emit(aten.reshape.default, s, [shape[1]]) for s in (mean, scale))]
        found += [b.emit(aten.new_empty.default, x, [0])] * (len(results) - 3 - new)  # what a kernel keeps for itself
        if new:
            part = given["momentum"]
            unbiased = b.emit(aten.div.Tensor, squares, max(count - 1, 1))
            for old, seen in (("running_mean", mean), ("running_var", unbiased)):
                kept = b.emit(aten.mul.Tensor, given[old], 1 - part)
                seen = b.emit(aten.reshape.default, seen, [shape[1]])
                found.append(b.emit(aten.add.Tensor, kept, b.emit(aten.mul.Tensor, seen, part)))
        return [b.cast(f, r.dtype) for f, r in zip(found, results, strict=True)]

    return Plan(first_only(lay, call), (lay, *statistics), build=build)


def _affine(b: Build, x: fx.Node, given: dict[str, Any], per_channel: list[int]) -> fx.Node:
    """Times ``weight`` plus ``bias``, where they are given."""
    for op, affine in ((aten.mul.Tensor, given.get("weight")), (aten.add.Tensor, given.get("bias"))):
        if affine is not None:
            x = b.emit(op, x, b.emit(aten.reshape.default, affine, per_channel))
    return x


def softmax(call: Call, layouts: Sequence[Layout]) -> Plan | None:
    """softmax and log_softmax over tokens: two small reductions, the result stays sharded."""
    lay, dtype = layouts[0], value_dtype(call)
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
    lay, dtype = layouts[0], value_dtype(call)
    if not isinstance(lay, Sharded) or (lay.outer, lay.inner) != (1, 1):
        return None
    return Plan((lay,), (lay,), build=lambda b, given: b.cumsum(b.cast(given["self"], dtype), lay))
