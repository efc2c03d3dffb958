"""`spcompile::switch`: tokens that were cut along one dim are cut along another.

Source: dynamic sequence parallelism (Zhao et al., 2024, arXiv:2403.10266). Layouts and meshes as in
`spcompile.ops.sharding`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes


def _check(
    x: Tensor, dim: int, layout: Sequence[int], new_dim: int, new_layout: Sequence[int], mesh: Sequence[int]
) -> None:
    if dim == new_dim:
        raise ValueError(f"switch from dim {dim} to dim {new_dim}: want two dims")
    degree = meshes.degree(mesh)
    chunks.check(layout, degree, x.shape[dim], span=1)
    chunks.check(new_layout, degree, x.shape[new_dim], span=degree)


def program(
    rank: int,
    x: Tensor,
    dim: int,
    layout: Sequence[int],
    new_dim: int,
    new_layout: Sequence[int],
    mesh: Sequence[int],
) -> wire.Program:
    """This rank's part of `switch`: to each rank its chunk along ``new_dim``, one all-to-all."""
    _check(x, dim, layout, new_dim, new_layout, mesh)
    degree = meshes.degree(mesh)
    shape = list(x.shape)
    shape[new_dim] = chunks.local_extent(new_layout, degree)
    send = x.new_empty((degree, *shape))
    for to, slot in enumerate(send):
        chunks.cut_into(slot, x, new_dim, new_layout, degree, degree, to, degree)
    received = yield wire.AllToAll(send)
    return chunks.join(received, dim, layout, degree)


@torch.library.custom_op("spcompile::switch", mutates_args=())
def switch(
    x: Tensor,
    dim: int,
    layout: Sequence[int],
    new_dim: int,
    new_layout: Sequence[int],
    mesh: Sequence[int],
    group: str,
) -> Tensor:
    """This rank's chunk along ``new_dim``, from the ranks' chunks along ``dim``. One all-to-all.

    Each rank keeps 1/P of its share and sends the rest; gathering and cutting again would send P times as much.

    Args:
        x: a chunk of ``layout`` along ``dim``, whole along ``new_dim``, any dtype.
        dim, new_dim: two dims, counted from the front.
        layout, new_layout: ``[outer, inner, *segments]`` of each.
        mesh: ``[ring, kv_gather, ulysses]``, of P ranks.
        group: process group name.
    Returns:
        A new contiguous tensor, whole along ``dim`` and without padding there; padding along ``new_dim`` repeats the
        last token.
    Raises:
        ValueError: one dim twice, or layouts that do not describe ``x``.

    Example, from frames to places of ``x [frames_local, places, channels]``::

        y = spcompile.ops.switch(x, 0, [1, 1, frames], 1, [1, 1, places], [1, 1, P], group)
    """
    return wire.over_group(program(wire.rank_in(group), x, dim, layout, new_dim, new_layout, mesh), group, mesh)


@switch.register_fake
def _(
    x: Tensor,
    dim: int,
    layout: Sequence[int],
    new_dim: int,
    new_layout: Sequence[int],
    mesh: Sequence[int],
    group: str,
) -> Tensor:
    _check(x, dim, layout, new_dim, new_layout, mesh)
    local = chunks.local_extent(new_layout, meshes.degree(mesh))
    return chunks.resized(x, (dim, chunks.global_extent(layout)), (new_dim, local))
