"""The part of an attention mask that a rank needs after the exchange: its heads and its query rows.

The mask is whole and in global order on every rank, so cutting it costs no communication. Columns stay:
keys are in global order too, and a ring takes each hop's columns itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes
from spcompile.ops.heads import HeadShare


def _local_sizes(mask: Tensor, num_heads: int, q_layout: Sequence[int], mesh: Sequence[int]) -> list[tuple[int, int]]:
    """(dim, size) of the dims that are cut."""
    meshes.check(mesh)
    degree, width, sizes = meshes.degree(mesh), mesh[2], []
    if mask.dim() < 2:
        raise ValueError(f"mask has shape {tuple(mask.shape)}: want [..., queries, keys]")
    queries = chunks.global_extent(q_layout)
    if mask.shape[-2] not in (1, queries):
        raise ValueError(f"mask has {mask.shape[-2]} rows for {queries} queries")
    if mask.dim() >= 3 and mask.shape[-3] == num_heads > 1 and width > 1:
        sizes.append((mask.dim() - 3, HeadShare(num_heads, num_heads, width).local))
    if mask.shape[-2] > 1 and width < degree:
        sizes.append((mask.dim() - 2, chunks.extent(q_layout, degree, width)))
    if not sizes:
        raise ValueError("every rank needs the whole mask: nothing to cut")
    return sizes


def needs_cut(mask: Tensor, num_heads: int, mesh: Sequence[int]) -> bool:
    """Does a rank need less than the whole mask?"""
    heads = mask.dim() >= 3 and mask.shape[-3] == num_heads > 1 and mesh[2] > 1
    return heads or (mask.shape[-2] > 1 and mesh[2] < meshes.degree(mesh))


def program(rank: int, mask: Tensor, num_heads: int, q_layout: Sequence[int], mesh: Sequence[int]) -> wire.Program:
    """This rank's part of `local_mask`: no communication."""
    degree, width = meshes.degree(mesh), mesh[2]
    for dim, size in _local_sizes(mask, num_heads, q_layout, mesh):
        if dim == mask.dim() - 3:
            start, end = HeadShare(num_heads, num_heads, width).queries(rank % width)
            padding = mask.narrow(dim, 0, 1).expand_as(mask.narrow(dim, 0, size - (end - start)))
            mask = torch.cat([mask.narrow(dim, start, end - start), padding], dim)
        else:
            mask = chunks.cut(mask, dim, q_layout, degree, degree, rank // width, degree // width)
    return mask
    yield  # a program is a generator, also when it asks for nothing


@torch.library.custom_op("spcompile::local_mask", mutates_args=())
def local_mask(mask: Tensor, num_heads: int, q_layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    """A mask cut to this rank's heads and query rows. No communication.

    Args:
        mask: bool or floating point, [..., S or 1, T or 1], with a dim of ``num_heads`` or 1 at -3 if it has one;
            whole on every rank.
        num_heads: H, query heads.
        q_layout: ``[1, 1, *segments]`` of the query tokens.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        [..., ceil(H / u) or 1, S_block or 1, T or 1], contiguous. What padding heads and rows get is unspecified.
    Raises:
        ValueError: rows that are not the queries', or a mask that no rank needs cut.
    """
    return wire.over_group(program(wire.rank_in(group), mask, num_heads, q_layout, mesh), group, mesh)


@local_mask.register_fake
def _(mask: Tensor, num_heads: int, q_layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    return chunks.resized(mask, *_local_sizes(mask, num_heads, q_layout, mesh))
