"""How one tensor dim is cut into chunks, one per rank, and put together again.

Shapes: P ranks (``degree``), ``_local`` one rank's share.

A cut dim is described by plain ints, so that it can stand in an op's schema::

    layout = [outer, inner, *segments]          # e.g. [1, 1, 512, 4096]

The dim's extent is ``outer * sum(segments) * inner``. Every segment of ``n`` tokens is cut into P chunks
of ``ceil(n / P)`` tokens; what the last chunks lack is padding. No real token ever reads it, and it repeats the
segment's last token, so that nothing computed from it can fail where the real values do not.
Chunk i lives on rank i; for a segment written ``-n``, on rank P - 1 - i (the tail halves of a balanced
causal ring). A rank may hold ``span`` neighbouring chunks as one block; with ``span`` = P it holds the whole
dim and no padding. Everything here is local: no communication, no rank of our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_tokens(num_tokens: int, degree: int) -> int:
    """Tokens of one segment that each rank holds, padding included."""
    return -(-abs(num_tokens) // degree)


def block_tokens(num_tokens: int, degree: int, span: int) -> int:
    """Tokens of one segment in a block of ``span`` chunks; the block of all chunks has no padding."""
    return abs(num_tokens) if span == degree else span * chunk_tokens(num_tokens, degree)


def extent(layout: Sequence[int], degree: int, span: int = 1) -> int:
    """Extent of the dim for one that holds ``span`` of its ``degree`` chunks."""
    outer, inner, *segments = layout
    return outer * sum(block_tokens(n, degree, span) for n in segments) * inner


def global_extent(layout: Sequence[int]) -> int:
    """Extent of the whole dim."""
    return extent(layout, 1)


def local_extent(layout: Sequence[int], degree: int) -> int:
    """Extent of one rank's share of the dim, padding included."""
    return extent(layout, degree)


def check(layout: Sequence[int], degree: int, size: int, *, span: int) -> None:
    """Refuse a layout that does not describe a dim of ``size`` holding ``span`` chunks. Raises ``ValueError``."""
    if degree < 1 or len(layout) < 3 or layout[0] < 0 or layout[1] < 0:
        raise ValueError(f"layout {list(layout)} for degree {degree}: want [outer, inner, *segments] and degree >= 1")
    want = extent(layout, degree, span)
    if size != want:
        raise ValueError(
            f"layout {list(layout)} over {degree} ranks makes {span} of {degree} chunks {want} long, "
            f"the tensor has {size}"
        )


def first_token(num_tokens: int, degree: int, span: int, block: int) -> tuple[int, int]:
    """(first token, number of real tokens) of block ``block`` of a segment."""
    if num_tokens < 0:
        block = degree // span - 1 - block
    size = block_tokens(num_tokens, degree, span)
    first = min(block * size, abs(num_tokens))
    return first, min(size, abs(num_tokens) - first)


def whereabouts(segments: Sequence[int], degree: int) -> tuple[Tensor, Tensor]:
    """(rank, row of its chunk) of every token, int64 [tokens] each."""
    owners, places, start = [], [], 0
    for n in segments:
        size, token = chunk_tokens(n, degree), torch.arange(abs(n))
        block = token // max(size, 1)
        owners.append(degree - 1 - block if n < 0 else block)
        places.append(start + token % max(size, 1))
        start += size
    return torch.cat(owners), torch.cat(places)


def cut_into(
    out: Tensor, x: Tensor, dim: int, layout: Sequence[int], degree: int, span: int, part: int, parts: int
) -> None:
    """Write part ``part`` of ``parts`` of a block ``x`` of ``span`` chunks into ``out``, with padding.

    ``out`` has the shape of ``x`` but for ``dim``.
    """
    outer, inner, *segments = layout
    src = x.unflatten(dim, (outer, extent([1, 1, *segments], degree, span), inner))
    dst = out.unflatten(dim, (outer, extent([1, 1, *segments], degree, span // parts), inner))
    src_start = dst_start = 0
    for n in segments:
        have, size = block_tokens(n, degree, span), block_tokens(n, degree, span // parts)
        first = min((parts - 1 - part if n < 0 else part) * size, have)
        valid = min(size, have - first)
        dst.narrow(dim + 1, dst_start, valid).copy_(src.narrow(dim + 1, src_start + first, valid))
        if valid < size:
            last = src.narrow(dim + 1, src_start + have - 1, 1)
            dst.narrow(dim + 1, dst_start + valid, size - valid).copy_(last)
        src_start, dst_start = src_start + have, dst_start + size


def cut(x: Tensor, dim: int, layout: Sequence[int], degree: int, span: int, part: int, parts: int) -> Tensor:
    """Part ``part`` of ``parts`` of a block ``x`` of ``span`` chunks: a new contiguous tensor, never a view."""
    shape = list(x.shape)
    shape[dim] = extent(layout, degree, span // parts)
    out = x.new_empty(shape)
    cut_into(out, x, dim, layout, degree, span, part, parts)
    return out


def take(x: Tensor, dim: int, layout: Sequence[int], rank: int, degree: int) -> Tensor:
    """Rank ``rank``'s chunk of a whole ``x`` along ``dim``: a new contiguous tensor, never a view."""
    return cut(x, dim, layout, degree, degree, rank, degree)


def join(
    parts: Tensor, dim: int, layout: Sequence[int], degree: int, span: int = 1, out: Tensor | None = None
) -> Tensor:
    """One block from the neighbouring blocks ``parts`` [n, ...] of ``span`` chunks each, in global order.

    If all chunks are there the padding is dropped. Without an ``out`` to write into, the result is contiguous.
    """
    count = parts.shape[0]
    outer, inner, *segments = layout
    if out is None:
        shape = list(parts.shape[1:])
        shape[dim] = extent(layout, degree, span * count)
        out = parts.new_empty(shape)
    dst = out.unflatten(dim, (outer, extent([1, 1, *segments], degree, span * count), inner))
    src = parts.unflatten(dim + 1, (outer, extent([1, 1, *segments], degree, span), inner))
    dst_start = src_start = 0
    for n in segments:
        size, total = block_tokens(n, degree, span), block_tokens(n, degree, span * count)
        piece = src.narrow(dim + 2, src_start, size)
        if n < 0:
            piece = piece.flip(0)
        if total == size * count:  # no padding to drop: one copy for all parts
            whole = dst.narrow(dim + 1, dst_start, total).unflatten(dim + 1, (count, size))
            whole.movedim(dim + 1, 0).copy_(piece)
        else:
            for i in range(count):
                first = min(i * size, total)
                valid = min(size, total - first)
                dst.narrow(dim + 1, dst_start + first, valid).copy_(piece[i].narrow(dim + 1, 0, valid))
        dst_start, src_start = dst_start + total, src_start + size
    return out


def padding(x: Tensor, dim: int, layout: Sequence[int], rank: int, degree: int) -> list[Tensor]:
    """Views of the padding in rank ``rank``'s chunk ``x``, as far as there is any. ``x`` is contiguous."""
    outer, inner, *segments = layout
    rows = x.unflatten(dim, (outer, extent([1, 1, *segments], degree), inner))
    found, start = [], 0
    for n in segments:
        size = chunk_tokens(n, degree)
        _, real = first_token(n, degree, 1, rank)
        if real < size:
            found.append(rows.narrow(dim + 1, start + real, size - real))
        start += size
    return found


def pieces(x: Tensor, dim: int, layout: Sequence[int], degree: int, span: int, count: int) -> list[list[Tensor]] | None:
    """Views of a contiguous ``x`` that holds ``count`` blocks of ``span`` chunks: per block, its contiguous runs.

    None if blocks have padding, which is not there in ``x``, or if the runs are many and short.
    """
    outer, _, *segments = layout
    lead = math.prod(x.shape[:dim]) * outer
    sizes = [block_tokens(n, degree, span) for n in segments]
    whole = all(block_tokens(n, degree, span * count) == count * size for n, size in zip(segments, sizes, strict=True))
    if not whole or lead * len(segments) > MAX_PIECES:
        return None
    rows = x.view(lead, count * sum(sizes), -1)
    found: list[list[Tensor]] = [[] for _ in range(count)]
    start = 0
    for n, size in zip(segments, sizes, strict=True):
        for i, block in enumerate(found):
            at = start + (count - 1 - i if n < 0 else i) * size
            block += [row.narrow(0, at, size) for row in rows]
        start += count * size
    return found


MAX_PIECES = 8
"""Sends per tensor and peer, beyond which one buffer is cheaper."""


def fake_attention_operand(x: Tensor, heads: int, tokens: int) -> Tensor:
    """Like ``x`` [..., H, S, D] with other heads and tokens, stored as [..., S, H, D]: as models store them."""
    shape = (*x.shape[:-3], tokens, heads, x.shape[-1])
    return torch.empty(shape, dtype=x.dtype, device=x.device).transpose(-3, -2)


def resized(x: Tensor, *sizes: tuple[int, int]) -> Tensor:
    """A contiguous tensor like ``x`` with (dim, size) pairs replaced: what the ops return."""
    shape = list(x.shape)
    for dim, size in sizes:
        shape[dim] = size
    return torch.empty(shape, dtype=x.dtype, device=x.device)
