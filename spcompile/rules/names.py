"""Families of ops that carry dims through: which dims of operands and results are the same.

Each function gives every dim of a call's operands and results a name. Dims with one name are the same dim; a dim
without a name mixes its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from spcompile.call import Call
from spcompile.rules.base import Name, Names


def pointwise(call: Call) -> tuple[Names, Names]:
    """Right-aligned dims of one size are the same; a size-1 dim that is broadcast is not."""
    out = call.outputs[0]

    def aligned(shape: tuple[int, ...]) -> list[Name]:
        first = len(out) - len(shape)
        return [first + d if n == out[first + d] else None for d, n in enumerate(shape)]

    return [aligned(call.shape(i)) for i in range(len(call.operands))], [aligned(o) for o in call.outputs]


def of_first(call: Call, names: list[Name]) -> Names:
    """``names`` for the first operand, no dim of any other operand."""
    others: Names = [[None] * call.rank(i) for i in range(1, len(call.operands))]
    return [names, *others]


def blocked(rank: int, *dims: int) -> list[Name]:
    gone = {d % max(rank, 1) for d in dims}
    return [None if d in gone else d for d in range(rank)]


def dims_of(call: Call, name: str) -> list[int]:
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
            dims += dims_of(call, arg)
        kept = blocked(call.rank(0), *dims)
        return of_first(call, kept), [kept for _ in call.outputs]

    return names


def reduced(call: Call) -> tuple[Names, Names]:
    """Sums and the like over ``dim`` (one, several, or all), with or without ``keepdim``."""
    kept = blocked(call.rank(0), *dims_of(call, "dim"))
    out = kept if call.arguments.get("keepdim") else [n for n in kept if n is not None]
    return of_first(call, kept), [out for _ in call.outputs]


def last_dims(call: Call) -> tuple[Names, Names]:
    """Norms over the last ``len(normalized_shape)`` dims."""
    rank = call.rank(0)
    kept = blocked(rank, *range(rank - len(call.arguments["normalized_shape"]), rank))
    return of_first(call, kept), [[n for n, _ in zip(kept, o, strict=False)] for o in call.outputs]


def only_first_dim(call: Call) -> tuple[Names, Names]:
    """Convolutions, group norm, resampling: samples of the batch stay apart."""
    batched = call.rank(0) >= 1 and all(o and o[0] == call.shape(0)[0] for o in call.outputs)
    head: list[Name] = [0 if batched else None]
    return of_first(call, head + [None] * (call.rank(0) - 1)), [head + [None] * (len(o) - 1) for o in call.outputs]


def pooled(call: Call) -> tuple[Names, Names]:
    """Samples and channels stay apart; the spatial dims, as many as the op's name says, do not."""
    spatial = int(call.node.target._schema.name[-2])  # type: ignore[union-attr]
    head: list[Name] = list(range(call.rank(0) - spatial))
    return [head + [None] * spatial], [head + [None] * spatial for _ in call.outputs]


def conv(call: Call) -> tuple[Names, Names]:
    """Batched input only: without a batch dim, dim 0 is channels."""
    if call.rank(0) != call.rank(1):
        return of_first(call, [None] * call.rank(0)), [[None] * len(o) for o in call.outputs]
    return only_first_dim(call)


def linear(call: Call) -> tuple[Names, Names]:
    """x [..., in], weight [out, in] or [in]: rows pass, ``in`` is contracted."""
    rows: list[Name] = list(range(call.rank(0) - 1))
    ins: Names = [[*rows, "in"], [*(["out"] * (call.rank(1) - 1)), "in"]]
    ins += [["out"] * call.rank(i) for i in range(2, len(call.operands))]
    return ins, [rows + ["out"] * (call.rank(1) - 1)]


def _matmul(a: int, b: int, batch: int) -> tuple[list[Name], list[Name], list[Name]]:
    """Names of a [..., m, k] @ b [..., k, n], ranks ``a`` and ``b``, with ``batch`` batch dims in the result."""
    lead: list[Name] = [f"b{i}" for i in range(batch)]
    left: list[Name] = ["k"] if a == 1 else [*lead[batch - (a - 2) :], "m", "k"]
    right: list[Name] = ["k"] if b == 1 else [*lead[batch - (b - 2) :], "k", "n"]
    return left, right, lead + (["m"] if a > 1 else []) + (["n"] if b > 1 else [])


def _unbroadcast(
    names: list[Name], shape: Sequence[int], out_names: list[Name], out_shape: Sequence[int]
) -> list[Name]:
    """Drop the names of dims that are broadcast."""
    size = dict(zip(out_names, out_shape, strict=True))
    return [n if n is None or shape[d] == size.get(n, shape[d]) else None for d, n in enumerate(names)]


def matmul(call: Call) -> tuple[Names, Names]:
    """mm, bmm, matmul, mv, dot: k is contracted."""
    a, b = call.rank(0), call.rank(1)
    left, right, out = _matmul(a, b, max(a, b, 2) - 2)
    shape = call.outputs[0]
    return [_unbroadcast(left, call.shape(0), out, shape), _unbroadcast(right, call.shape(1), out, shape)], [out]


def add_matmul(call: Call) -> tuple[Names, Names]:
    """addmm, baddbmm: bias (broadcast) + a @ b."""
    a, b = call.rank(1), call.rank(2)
    left, right, out = _matmul(a, b, a - 2)
    bias = _unbroadcast(out[len(out) - call.rank(0) :], call.shape(0), out, call.outputs[0])
    left[-1] = right[-2] = None  # the bias would be added on every rank
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
        [c if call.shape(i)[d] == size.get(c, 1) else None for d, c in enumerate(t)] for i, t in enumerate(terms)
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


def swapped(call: Call, a: int, b: int) -> list[int]:
    order = list(range(call.rank(0)))
    if order:
        order[a], order[b] = order[b], order[a]
    return order


def moved(call: Call) -> list[int]:
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
    return of_first(call, kept), [[None] * first + kept]


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
    kept = blocked(call.rank(0), dim)
    return [kept], [[n for d, n in enumerate(kept) if d != dim] for _ in call.outputs]


def select_scatter(call: Call) -> tuple[Names, Names]:
    """``src`` lacks ``dim``."""
    kept = blocked(call.rank(0), call.dim("dim"))
    return [kept, [n for n in kept if n is not None]], [kept]


def padded(call: Call) -> tuple[Names, Names]:
    """Dims without padding pass; ``pad`` counts from the last dim."""
    pad, rank = call.arguments["pad"], call.rank(0)
    touched = [rank - 1 - i // 2 for i, n in enumerate(pad) if n != 0]
    kept = [None if d in touched else d for d in range(rank)]
    return [list(kept)], [list(kept)]


def picked(call: Call) -> tuple[Names, Names]:
    """index_select: ``dim`` is looked up by a vector of indices."""
    kept = blocked(call.rank(0), call.dim("dim"))
    return of_first(call, kept), [kept]


def gathered(call: Call) -> tuple[Names, Names]:
    """gather: all dims but ``dim`` run along with the index, where they are as long."""
    dim, index = call.dim("dim"), call.shape(1)
    kept: list[Name] = [d if d != dim and n == index[d] else None for d, n in enumerate(call.shape(0))]
    return [kept, kept], [kept]


def scattered(call: Call) -> tuple[Names, Names]:
    """scatter: all dims but ``dim`` run along with the index and the source, where those are as long."""
    dim, shapes = call.dim("dim"), [call.shape(i) for i in range(len(call.operands))]
    kept: list[Name] = [d if d != dim and all(s[d] == n for s in shapes) else None for d, n in enumerate(shapes[0])]
    return [list(kept) for _ in shapes], [kept]


def rows_added(call: Call) -> tuple[Names, Names]:
    """index_add, index_copy: ``dim`` is indexed by a vector, the other dims run along with the source."""
    kept = blocked(call.rank(0), call.dim("dim"))
    return [kept, [None] * call.rank(1), kept], [kept]


def one_hot(call: Call) -> tuple[Names, Names]:
    """A new last dim."""
    kept: list[Name] = list(range(call.rank(0)))
    return [kept], [[*kept, None]]


def repeat_interleaved(call: Call) -> tuple[Names, Names]:
    """Dims other than ``dim`` pass."""
    if call.arguments["dim"] is None:
        return of_first(call, [None] * call.rank(0)), [[None]]
    return picked(call)


def indexed(call: Call) -> tuple[Names, Names]:
    """x[..., index, ...]: dims without an index pass; indices are broadcast against each other."""
    indices = call.arguments["indices"]
    rank = call.rank(0)
    used = [d for d, index in enumerate(indices) if index is not None]
    ranks = [len(call.shape(i)) for i in range(1, len(call.operands))]
    together = used == list(range(used[0], used[-1] + 1)) if used else True
    kept: list[Name] = [None if d in used else d for d in range(rank)]
    new: list[Name] = [None] * max(ranks, default=0)
    at = used[0] if used and together else 0
    rest = [n for n in kept if n is not None]
    before = [n for n in rest if isinstance(n, int) and n < at] if together else []
    out = before + new + rest[len(before) :]
    boolean = any(isinstance(i, fx.Node) and i.meta["val"].dtype == torch.bool for i in indices)
    if boolean or len(out) != len(call.outputs[0]):
        return of_first(call, [None] * rank), [[None] * len(o) for o in call.outputs]
    return of_first(call, kept), [out]


def complex_pair(extra_in: int) -> Callable[[Call], tuple[Names, Names]]:
    """view_as_real / view_as_complex: a last dim of two appears or goes."""

    def names(call: Call) -> tuple[Names, Names]:
        kept: list[Name] = list(range(call.rank(0) - extra_in))
        return [kept + [None] * extra_in], [kept + [None] * (1 - extra_in)]

    return names


def batch_norm(call: Call) -> tuple[Names, Names]:
    """With running statistics every dim but the channels passes; otherwise the op mixes all samples."""
    kept: list[Name] = [None if takes_statistics(call) or d == 1 else d for d in range(call.rank(0))]
    statistics: Names = [[None] * len(o) for o in call.outputs[1:]]
    return of_first(call, kept), [kept, *statistics]


def takes_statistics(call: Call) -> bool:
    """Does a batch norm take its statistics from its input?"""
    alone = "no_training" not in call.node.target._schema.name  # type: ignore[union-attr]
    return bool(call.arguments.get("training", call.arguments.get("train", alone)))


def instance_norm(call: Call) -> tuple[Names, Names]:
    """By its own statistics samples stay apart, unless the running ones, which are over all, are written."""
    if not call.arguments["use_input_stats"]:
        kept = blocked(call.rank(0), 1)
        return of_first(call, kept), [kept]
    if call.arguments["running_mean"] is not None:
        nothing: list[Name] = [None] * call.rank(0)
        return of_first(call, nothing), [nothing]
    return only_first_dim(call)
