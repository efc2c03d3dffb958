"""`spcompile::shard` and `spcompile::unshard`: between a replicated value and its chunks.

``layout`` is ``[outer, inner, *segments]`` (see `spcompile.ops.chunks`); ``degree`` is the number of ranks P;
``group`` is the name of the process group. No rank appears: every rank compiles the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from spcompile.ops import chunks, wire
from torch import Tensor


def shard_program(rank: int, x: Tensor, dim: int, layout: Sequence[int], degree: int) -> wire.Program:
    """This rank's part of `shard`: no communication."""
    chunks.check(layout, degree, x.shape[dim], local=False)
    return chunks.take(x, dim, layout, rank, degree)
    yield  # a program is a generator, also when it asks for nothing


def unshard_program(rank: int, x: Tensor, dim: int, layout: Sequence[int], degree: int) -> wire.Program:
    """This rank's part of `unshard`: one all-gather, then the chunks in global order."""
    chunks.check(layout, degree, x.shape[dim], local=True)
    parts = yield wire.AllGather(x)
    return chunks.join(parts, dim, layout)


@torch.library.custom_op("spcompile::shard", mutates_args=())
def shard(x: Tensor, dim: int, layout: Sequence[int], degree: int, group: str) -> Tensor:
    """This rank's chunk of a replicated tensor. No communication.

    Args:
        x: [..., outer * sum(segments) * inner, ...], any dtype, the same on every rank.
        dim: the dim to cut, counted from the front.
        layout: ``[outer, inner, *segments]``.
        degree: number of ranks P.
        group: process group name.
    Returns:
        A new contiguous tensor with ``dim`` of ``outer * sum(ceil(n / P)) * inner``; padding is zero.
    Raises:
        ValueError: the layout does not describe ``x``.
    """
    return wire.over_group(shard_program(wire.rank_in(group), x, dim, layout, degree), group)


@shard.register_fake
def _(x: Tensor, dim: int, layout: Sequence[int], degree: int, group: str) -> Tensor:
    chunks.check(layout, degree, x.shape[dim], local=False)
    return chunks.fake_resized(x, dim, chunks.local_extent(layout, degree))


@torch.library.custom_op("spcompile::unshard", mutates_args=())
def unshard(x: Tensor, dim: int, layout: Sequence[int], degree: int, group: str) -> Tensor:
    """The whole tensor, on every rank, from the ranks' chunks. One all-gather; the inverse of `shard`.

    Each rank sends its share to the P - 1 others. Arguments and errors as in `shard`, with ``x`` a chunk.
    """
    return wire.over_group(unshard_program(wire.rank_in(group), x, dim, layout, degree), group)


@unshard.register_fake
def _(x: Tensor, dim: int, layout: Sequence[int], degree: int, group: str) -> Tensor:
    chunks.check(layout, degree, x.shape[dim], local=True)
    return chunks.fake_resized(x, dim, chunks.global_extent(layout))
