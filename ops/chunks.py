"""How one tensor dim is cut into chunks, one per rank, and put together again.

Shapes: P ranks (``degree``), ``_local`` one rank's share.

A cut dim is described by plain ints, so that it can stand in an op's schema::

    layout = [outer, inner, *segments]          # e.g. [1, 1, 512, 4096]

The dim's extent is ``outer * sum(segments) * inner``. Every segment of ``n`` tokens is cut into P chunks
of ``ceil(n / P)`` tokens; what the last chunks lack is padding, zeros that no real token ever reads.
Chunk i lives on rank i. Everything here is local: no communication, no rank of our own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def chunk_tokens(num_tokens: int, degree: int) -> int:
    """Tokens of one segment that each rank holds, padding included."""
    return -(-num_tokens // degree)


def global_extent(layout: Sequence[int]) -> int:
    """Extent of the whole dim."""
    outer, inner, *segments = layout
    return outer * sum(segments) * inner


def local_extent(layout: Sequence[int], degree: int) -> int:
    """Extent of one rank's share of the dim, padding included."""
    outer, inner, *segments = layout
    return outer * sum(chunk_tokens(n, degree) for n in segments) * inner


def check(layout: Sequence[int], degree: int, extent: int, *, local: bool) -> None:
    """Refuse a layout that does not describe a dim of ``extent``. Raises ``ValueError``."""
    if degree < 1 or len(layout) < 3 or any(n < 0 for n in layout):
        raise ValueError(f"layout {list(layout)} for degree {degree}: want [outer, inner, *segments] and degree >= 1")
    want = local_extent(layout, degree) if local else global_extent(layout)
    if extent != want:
        side = "one rank's share" if local else "the whole dim"
        raise ValueError(f"layout {list(layout)} over {degree} ranks makes {side} {want} long, the tensor has {extent}")


def take_into(out: Tensor, x: Tensor, dim: int, layout: Sequence[int], rank: int, degree: int) -> None:
    """Write rank ``rank``'s chunk of ``x`` into ``out`` (same shape but for ``dim``), padding with zeros."""
    outer, inner, *segments = layout
    src = x.unflatten(dim, (outer, sum(segments), inner))
    dst = out.unflatten(dim, (outer, local_extent([1, 1, *segments], degree), inner))
    src_start = dst_start = 0
    for n in segments:
        chunk = chunk_tokens(n, degree)
        first = min(rank * chunk, n)
        valid = min(chunk, n - first)
        dst.narrow(dim + 1, dst_start, valid).copy_(src.narrow(dim + 1, src_start + first, valid))
        if valid < chunk:
            dst.narrow(dim + 1, dst_start + valid, chunk - valid).zero_()
        src_start, dst_start = src_start + n, dst_start + chunk


def take(x: Tensor, dim: int, layout: Sequence[int], rank: int, degree: int) -> Tensor:
    """Rank ``rank``'s chunk of ``x`` along ``dim``: a new contiguous tensor, never a view."""
    shape = list(x.shape)
    shape[dim] = local_extent(layout, degree)
    out = x.new_empty(shape)
    take_into(out, x, dim, layout, rank, degree)
    return out


def join(parts: Tensor, dim: int, layout: Sequence[int]) -> Tensor:
    """The whole dim from all ranks' chunks ``parts`` [P, ...local...]: global order, padding dropped, contiguous."""
    degree = parts.shape[0]
    outer, inner, *segments = layout
    shape = list(parts.shape[1:])
    shape[dim] = global_extent(layout)
    out = parts.new_empty(shape)
    dst = out.unflatten(dim, (outer, sum(segments), inner))
    src = parts.unflatten(dim + 1, (outer, local_extent([1, 1, *segments], degree), inner))
    dst_start = src_start = 0
    for n in segments:
        chunk = chunk_tokens(n, degree)
        piece = src.narrow(dim + 2, src_start, chunk)
        if n == chunk * degree:  # no padding: one copy for all ranks
            whole = dst.narrow(dim + 1, dst_start, n).unflatten(dim + 1, (degree, chunk))
            whole.movedim(dim + 1, 0).copy_(piece)
        else:
            for rank in range(degree):
                first = min(rank * chunk, n)
                valid = min(chunk, n - first)
                dst.narrow(dim + 1, dst_start + first, valid).copy_(piece[rank].narrow(dim + 1, 0, valid))
        dst_start, src_start = dst_start + n, src_start + chunk
    return out


def fake_resized(x: Tensor, dim: int, extent: int) -> Tensor:
    """A contiguous tensor like ``x`` with ``dim`` resized: what `take` and `join` return, for fake tensors."""
    shape = list(x.shape)
    shape[dim] = extent
    return torch.empty(shape, dtype=x.dtype, device=x.device)
