"""`spcompile::shard` and `spcompile::unshard`: between a replicated value and its chunks.

``layout`` is ``[outer, inner, *segments]`` (see `spcompile.ops.chunks`); ``mesh`` is ``[ring, kv_gather, ulysses]``,
whose product is the number of ranks P; ``group`` is the name of the process group. No rank appears: every rank
compiles the same text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes


def shard_program(rank: int, x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int]) -> wire.Program:
    """This rank's part of `shard`: no communication."""
    degree = meshes.degree(mesh)
    chunks.check(layout, degree, x.shape[dim], span=degree)
    return chunks.take(x, dim, layout, rank, degree)
    yield  # a program is a generator, also when it asks for nothing


def unshard_program(
    rank: int, x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], out: Sequence[Tensor | None] = (None,)
) -> wire.Program:
    """This rank's part of `unshard`: one all-gather, then the chunks in global order, in ``out`` if it is given."""
    degree = meshes.degree(mesh)
    chunks.check(layout, degree, x.shape[dim], span=1)
    gather = wire.AllGather(x)
    yield gather
    parts = yield wire.Wait(gather)
    return chunks.join(parts, dim, layout, degree, 1, out[0])


@torch.library.custom_op("spcompile::shard", mutates_args=())
def shard(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    """This rank's chunk of a replicated tensor. No communication.

    Args:
        x: [..., outer * sum(segments) * inner, ...], any dtype, the same on every rank.
        dim: the dim to cut, counted from the front.
        layout: ``[outer, inner, *segments]``.
        mesh: ``[ring, kv_gather, ulysses]``, of P ranks.
        group: process group name.
    Returns:
        A new contiguous tensor with ``dim`` of ``outer * sum(ceil(n / P)) * inner``; padding repeats the last token.
    Raises:
        ValueError: the layout does not describe ``x``.
    """
    return wire.over_group(shard_program(wire.rank_in(group), x, dim, layout, mesh), group, mesh)


@shard.register_fake
def _(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    degree = meshes.degree(mesh)
    chunks.check(layout, degree, x.shape[dim], span=degree)
    return chunks.resized(x, (dim, chunks.local_extent(layout, degree)))


@torch.library.custom_op("spcompile::unshard", mutates_args=())
def unshard(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    """The whole tensor, on every rank, from the ranks' chunks. One all-gather; the inverse of `shard`.

    Each rank sends its share to the P - 1 others. Arguments and errors as in `shard`, with ``x`` a chunk.
    """
    return wire.over_group(unshard_program(wire.rank_in(group), x, dim, layout, mesh), group, mesh)


@unshard.register_fake
def _(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    chunks.check(layout, meshes.degree(mesh), x.shape[dim], span=1)
    return chunks.resized(x, (dim, chunks.global_extent(layout)))
