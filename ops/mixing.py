"""What ops that mix tokens need besides attention: sums over ranks, running sums, rows of the neighbours.

Shapes: P ranks; ``layout`` is ``[outer, inner, *segments]`` of ``dim`` (see `spcompile.ops.chunks`); ``mesh`` is
``[ring, kv_gather, ulysses]``, whose product is P; ``group`` is the name of the process group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes


def all_reduce_program(rank: int, x: Tensor, how: str, mesh: Sequence[int]) -> wire.Program:
    """This rank's part of `all_reduce`."""
    _check_how(how)
    if how == "sum":
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (yield wire.AllReduce(wide)).to(x.dtype)
    gather = wire.AllGather(x)  # not a reduction by the collective: what those make of NaN is not agreed on
    yield gather
    parts = yield wire.Wait(gather)
    return parts.amax(0) if how == "max" else parts.amin(0)


def _check_how(how: str) -> None:
    if how not in ("sum", "max", "min"):
        raise ValueError(f"all_reduce by {how!r}: want 'sum', 'max' or 'min'")


@torch.library.custom_op("spcompile::all_reduce", mutates_args=())
def all_reduce(x: Tensor, how: str, mesh: Sequence[int], group: str) -> Tensor:
    """The sum, or the largest or smallest entry, over all ranks. One all-reduce, or one all-gather.

    Args:
        x: any shape, this rank's part. Half precision is summed in float32. NaN on any rank gives NaN.
        how: ``"sum"``, ``"max"`` or ``"min"``.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        A new tensor like ``x``, the same on every rank.
    Raises:
        ValueError: another ``how``.
    """
    return wire.over_group(all_reduce_program(wire.rank_in(group), x, how, mesh), group, mesh)


@all_reduce.register_fake
def _(x: Tensor, how: str, mesh: Sequence[int], group: str) -> Tensor:
    _check_how(how)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def fill_padding_program(
    rank: int, x: Tensor, dim: int, layout: Sequence[int], fill: float, mesh: Sequence[int]
) -> wire.Program:
    """This rank's part of `fill_padding`: no communication."""
    degree = meshes.degree(mesh)
    chunks.check(layout, degree, x.shape[dim], span=1)
    out = x.clone(memory_format=torch.contiguous_format)
    for padding in chunks.padding(out, dim, layout, rank, degree):
        padding.fill_(_in_range(fill, x.dtype))
    return out
    yield  # a program is a generator, also when it asks for nothing


def _in_range(fill: float, dtype: torch.dtype) -> float:
    """Infinity as the largest number of a dtype without one."""
    if math.isinf(fill) and not dtype.is_floating_point:
        limits = torch.iinfo(torch.uint8 if dtype == torch.bool else dtype)
        return limits.max if fill > 0 else limits.min
    return fill


@torch.library.custom_op("spcompile::fill_padding", mutates_args=())
def fill_padding(x: Tensor, dim: int, layout: Sequence[int], fill: float, mesh: Sequence[int], group: str) -> Tensor:
    """A chunk with ``fill`` in place of its padding. No communication.

    Args:
        x: [..., outer * sum(ceil(n / P)) * inner, ...], a chunk.
        dim, layout: which dim is cut and how.
        fill: the value; infinity stands for the largest or smallest number of an integer dtype.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        A new contiguous tensor of the same shape.
    Raises:
        ValueError: the layout does not describe ``x``.
    """
    return wire.over_group(fill_padding_program(wire.rank_in(group), x, dim, layout, fill, mesh), group, mesh)


@fill_padding.register_fake
def _(x: Tensor, dim: int, layout: Sequence[int], fill: float, mesh: Sequence[int], group: str) -> Tensor:
    chunks.check(layout, meshes.degree(mesh), x.shape[dim], span=1)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def cumsum_program(rank: int, x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int]) -> wire.Program:
    """This rank's part of `cumsum`: sums of its chunks, one all-gather of their totals."""
    degree = _check_order(x, dim, layout, mesh)
    segments = layout[2:]
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x.clone()
    for padding in chunks.padding(wide, dim, layout, rank, degree):
        padding.zero_()
    parts = wide.split([chunks.chunk_tokens(n, degree) for n in segments], dim)
    gather = wire.AllGather(torch.stack([p.sum(dim, dtype=wide.dtype) for p in parts]))
    yield gather
    totals = yield wire.Wait(gather)  # [P, segments, ...]
    before = torch.zeros_like(totals[0, 0])
    out = []
    for i, (n, part) in enumerate(zip(segments, parts, strict=True)):
        order = list(range(degree))[:: -1 if n < 0 else 1]
        earlier = totals[order[: order.index(rank)], i].sum(0, dtype=wide.dtype)
        out.append(part.cumsum(dim, dtype=wide.dtype) + (before + earlier).unsqueeze(dim))
        before = before + totals[:, i].sum(0, dtype=wide.dtype)
    return torch.cat(out, dim).to(x.dtype)


def _check_order(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int]) -> int:
    degree = meshes.degree(mesh)
    chunks.check(layout, degree, x.shape[dim], span=1)
    if list(layout[:2]) != [1, 1]:
        raise ValueError(f"layout {list(layout)}: want one token after the other, [1, 1, *segments]")
    return degree


@torch.library.custom_op("spcompile::cumsum", mutates_args=())
def cumsum(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    """The running sum along a cut dim. One all-gather of a row per segment.

    Args:
        x: [..., sum(ceil(n / P)), ...], a chunk, in the dtype of the result. Half precision is summed in float32.
        dim, layout: which dim is cut and how; ``[1, 1, *segments]``.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        A new contiguous tensor like ``x``: this rank's chunk of the running sum in global order.
    Raises:
        ValueError: the layout does not describe ``x``, or tokens are not one after the other.
    """
    return wire.over_group(cumsum_program(wire.rank_in(group), x, dim, layout, mesh), group, mesh)


@cumsum.register_fake
def _(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    _check_order(x, dim, layout, mesh)
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def halo_program(
    rank: int, x: Tensor, dim: int, layout: Sequence[int], before: int, after: int, wraps: bool, mesh: Sequence[int]
) -> wire.Program:
    """This rank's part of `halo`: one send to each neighbour."""
    degree = _check_halo(x, dim, layout, before, after, wraps, mesh)
    held = x.clone(memory_format=torch.contiguous_format)
    for padding in chunks.padding(held, dim, layout, rank, degree):
        padding.zero_()
    end = held.shape[dim] if not wraps else _rows_held(layout, rank, degree)
    shifts = [
        wire.Shift(held.narrow(dim, start, count).contiguous(), None, step)
        for count, start, step in ((before, end - before, 1), (after, 0, -1))
        if count
    ]
    for shift in shifts:
        yield shift
    edges = []
    for shift in shifts:
        received = yield wire.Wait(shift)
        outside = not wraps and rank == (0 if shift.step == 1 else degree - 1)
        edges.append(torch.zeros_like(received) if outside else received)
    tokens, rest = held.split([end, held.shape[dim] - end], dim)
    return torch.cat([*(edges[:1] if before else []), tokens, *(edges[-1:] if after else []), rest], dim)


def _rows_held(layout: Sequence[int], rank: int, degree: int) -> int:
    """Rows of a rank's chunk of the one segment that are no padding."""
    return chunks.first_token(layout[2], degree, 1, rank)[1] * layout[1]


def _check_halo(
    x: Tensor, dim: int, layout: Sequence[int], before: int, after: int, wraps: bool, mesh: Sequence[int]
) -> int:
    degree = meshes.degree(mesh)
    chunks.check(layout, degree, x.shape[dim], span=1)
    if len(layout) != 3 or layout[0] != 1 or layout[2] < 0:
        raise ValueError(f"layout {list(layout)}: want chunks of neighbours one after the other, [1, inner, tokens]")
    if not 0 <= max(before, after) <= x.shape[dim] or min(before, after) < 0:
        raise ValueError(f"{before} rows before and {after} after of chunks of {x.shape[dim]}")
    last = _rows_held(layout, degree - 1, degree)
    if wraps and last < max(before, after):
        raise ValueError(f"{max(before, after)} rows around a circle whose last rank has {last}")
    return degree


@torch.library.custom_op("spcompile::halo", mutates_args=())
def halo(
    x: Tensor, dim: int, layout: Sequence[int], before: int, after: int, wraps: bool, mesh: Sequence[int], group: str
) -> Tensor:
    """A chunk with the neighbours' nearest rows around it. One send to each neighbour.

    Args:
        x: [..., n, ...], a chunk of a dim that is cut into one run of neighbouring chunks.
        dim, layout: which dim is cut and how; ``[1, inner, tokens]``.
        before, after: rows of the previous and of the next rank, at most n.
        wraps: the first rank comes after the last, and its rows right after the last rank's last token.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        [..., before + n + after, ...], contiguous. Zero in place of padding and, unless it wraps, beyond both ends.
    Raises:
        ValueError: the layout does not describe ``x`` or has several segments, or more rows than a chunk has, or than
            the last chunk has tokens where it wraps.
    """
    program = halo_program(wire.rank_in(group), x, dim, layout, before, after, wraps, mesh)
    return wire.over_group(program, group, mesh)


@halo.register_fake
def _(
    x: Tensor, dim: int, layout: Sequence[int], before: int, after: int, wraps: bool, mesh: Sequence[int], group: str
) -> Tensor:
    _check_halo(x, dim, layout, before, after, wraps, mesh)
    return chunks.resized(x, (dim, x.shape[dim] + before + after))


def pick_program(
    rank: int, x: Tensor, index: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int]
) -> wire.Program:
    """This rank's part of `pick`: the rows that it has, zeros for the others, one all-reduce."""
    degree = _check_order(x, dim, layout, mesh)
    owner, place = (t.to(x.device) for t in chunks.whereabouts(layout[2:], degree))
    index = torch.where(index < 0, owner.numel(), index)  # out of range, as it is for torch.gather
    rows = torch.gather(x, dim, place[index])
    rows = torch.where(owner[index] == rank, rows, torch.zeros((), dtype=x.dtype, device=x.device))
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    wide = wide.to(torch.uint8) if wide.dtype == torch.bool else wide
    return (yield wire.AllReduce(wide)).to(x.dtype)


@torch.library.custom_op("spcompile::pick", mutates_args=())
def pick(x: Tensor, index: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    """``torch.gather`` along a cut dim, by an index that every rank has. One all-reduce of the result.

    Args:
        x: [..., sum(ceil(n / P)), ...], a chunk.
        index: int64, as for ``torch.gather`` on the whole tensor, the same on every rank.
        dim, layout: which dim is cut and how; ``[1, 1, *segments]``.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        A new contiguous tensor of the index's shape, the same on every rank.
    Raises:
        ValueError: the layout does not describe ``x``, or tokens are not one after the other.
    """
    return wire.over_group(pick_program(wire.rank_in(group), x, index, dim, layout, mesh), group, mesh)


@pick.register_fake
def _(x: Tensor, index: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    _check_order(x, dim, layout, mesh)
    return torch.empty(index.shape, dtype=x.dtype, device=x.device)


def local_rows_program(
    rank: int, index: Tensor, layout: Sequence[int], wraps: bool, mesh: Sequence[int]
) -> wire.Program:
    """This rank's part of `local_rows`: no communication."""
    degree = _check_rows(index, layout, mesh)
    owner, place = (t.to(index.device) for t in chunks.whereabouts(layout[2:], degree))
    if wraps:
        index = torch.where(index < 0, index + owner.numel(), index)
    index = torch.where(index < 0, owner.numel(), index)  # out of range, as it is for the op that takes it
    return torch.where(owner[index] == rank, place[index], chunks.local_extent(layout, degree)).contiguous()
    yield  # a program is a generator, also when it asks for nothing


def _check_rows(index: Tensor, layout: Sequence[int], mesh: Sequence[int]) -> int:
    degree = meshes.degree(mesh)
    if list(layout[:2]) != [1, 1] or len(layout) < 3:
        raise ValueError(f"layout {list(layout)}: want one token after the other, [1, 1, *segments]")
    if index.dtype != torch.int64:
        raise ValueError(f"index is {index.dtype}: want torch.int64")
    return degree


@torch.library.custom_op("spcompile::local_rows", mutates_args=())
def local_rows(index: Tensor, layout: Sequence[int], wraps: bool, mesh: Sequence[int], group: str) -> Tensor:
    """Places in this rank's chunk of tokens that are named by their place in the whole. No communication.

    Args:
        index: int64, any shape, the same on every rank.
        layout: ``[1, 1, *segments]`` of the tokens.
        wraps: a negative index counts from the end; else it is out of range.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        Like ``index``, contiguous. For tokens of other ranks one past the chunk: a row that is to be thrown away.
    Raises:
        ValueError: tokens that are not one after the other, or another dtype.
        IndexError: an index out of range.
    """
    return wire.over_group(local_rows_program(wire.rank_in(group), index, layout, wraps, mesh), group, mesh)


@local_rows.register_fake
def _(index: Tensor, layout: Sequence[int], wraps: bool, mesh: Sequence[int], group: str) -> Tensor:
    _check_rows(index, layout, mesh)
    return torch.empty(index.shape, dtype=index.dtype, device=index.device)
