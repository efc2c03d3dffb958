"""K/V gather: every rank keeps its queries and collects the keys and values of all ranks along the axis.

Source: the all-gather form of context parallelism (Llama 3 training report, arXiv:2407.21783, section 3.3.2).
Shapes and layouts as in `spcompile.ops.ulysses`; g ranks along the mesh's kv_gather axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes


def _check(k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int]) -> None:
    meshes.check(mesh)
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(f"k is {k.dtype} on {k.device}, v is {v.dtype} on {v.device}: want the same")
    for x in (k, v):
        chunks.check(kv_layout, meshes.degree(mesh), x.shape[-2], span=mesh[2])


def program(rank: int, k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int]) -> wire.Program:
    """This rank's part of `kv_gather`: K and V in one buffer, one all-gather."""
    _check(k, v, kv_layout, mesh)
    degree, dim = meshes.degree(mesh), k.dim() - 3
    k, v = k.transpose(-3, -2), v.transpose(-3, -2)  # as models store them: long runs to copy
    sizes = [k.numel(), v.numel()]
    send = k.new_empty(sum(sizes))
    for slot, x in zip(send.split(sizes), (k, v), strict=True):
        slot.view(x.shape).copy_(x)
    gathered = yield wire.AllGather(send, "kv_gather")
    parts = [p.view(mesh[1], *x.shape) for p, x in zip(gathered.split(sizes, dim=1), (k, v), strict=True)]
    k, v = (chunks.join(p, dim, kv_layout, degree, mesh[2]) for p in parts)
    return k.transpose(-3, -2), v.transpose(-3, -2)


@torch.library.custom_op("spcompile::kv_gather", mutates_args=())
def kv_gather(k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    """The keys and values of all ranks along the kv_gather axis. One all-gather for both.

    Args:
        k: [..., G, T_block, D], a block of u chunks (one chunk without Ulysses).
        v: [..., G, T_block, E], same dtype and device.
        kv_layout: ``[1, 1, *segments]`` of the key tokens.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        k and v of g * u chunks in global order, stored as [..., tokens, heads, width]; all of them, without padding,
        if g * u = P.
    Raises:
        ValueError: lengths that do not fit the layout, mixed dtypes.
    """
    return wire.over_group(program(wire.rank_in(group), k, v, kv_layout, mesh), group, mesh)


@kv_gather.register_fake
def _(k: Tensor, v: Tensor, kv_layout: Sequence[int], mesh: Sequence[int], group: str) -> tuple[Tensor, Tensor]:
    _check(k, v, kv_layout, mesh)
    tokens = chunks.extent(kv_layout, meshes.degree(mesh), mesh[1] * mesh[2])
    return tuple(chunks.fake_attention_operand(x, x.shape[-3], tokens) for x in (k, v))  # type: ignore[return-value]
