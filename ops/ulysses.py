"""Ulysses: all-to-all between "every rank has some tokens of all heads" and "all tokens of some heads".

Source: DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509).

Shapes: B batch (any number of leading dims), H query heads, G key/value heads, S query tokens, T key tokens,
D / E head dims, P ranks. The token dim is -2 and the head dim -3, as in ``scaled_dot_product_attention``.
``q_layout`` and ``kv_layout`` are ``[1, 1, *segments]`` (see `spcompile.ops.chunks`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from spcompile.ops import chunks, wire
from torch import Tensor


def _check_in(q: Tensor, k: Tensor, v: Tensor, q_layout: Sequence[int], kv_layout: Sequence[int], degree: int) -> None:
    for name, x, layout in (("q", q, q_layout), ("k", k, kv_layout), ("v", v, kv_layout)):
        if x.dim() < 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: want [..., heads, tokens, head_dim]")
        if x.shape[-3] % degree:
            raise ValueError(f"{name} has {x.shape[-3]} heads, which {degree} ranks cannot share equally")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: want the same")
        chunks.check(layout, degree, x.shape[-2], local=True)


def _check_out(o: Tensor, q_layout: Sequence[int], degree: int) -> None:
    if o.dim() < 3:
        raise ValueError(f"o has shape {tuple(o.shape)}: want [..., heads, tokens, head_dim]")
    chunks.check(q_layout, degree, o.shape[-2], local=False)


def _heads_first(x: Tensor, degree: int) -> Tensor:
    """[..., H, S, D] -> a view [P, ..., H / P, S, D]: slice i holds the heads of rank i."""
    return x.unflatten(-3, (degree, x.shape[-3] // degree)).movedim(-4, 0)


def in_program(
    rank: int, q: Tensor, k: Tensor, v: Tensor, q_layout: Sequence[int], kv_layout: Sequence[int], degree: int
) -> wire.Program:
    """This rank's part of `ulysses_in`: Q, K and V packed in one buffer, one all-to-all."""
    _check_in(q, k, v, q_layout, kv_layout, degree)
    parts = [_heads_first(x, degree) for x in (q, k, v)]
    sizes = [math.prod(p.shape[1:]) for p in parts]
    send = q.new_empty((degree, sum(sizes)))
    for slot, part in zip(send.split(sizes, dim=1), parts, strict=True):
        slot.view(part.shape).copy_(part)
    received = yield wire.AllToAll(send)
    slots = [slot.view(p.shape) for slot, p in zip(received.split(sizes, dim=1), parts, strict=True)]
    dim = q.dim() - 2
    return tuple(chunks.join(s, dim, lay) for s, lay in zip(slots, (q_layout, kv_layout, kv_layout), strict=True))


def out_program(rank: int, o: Tensor, q_layout: Sequence[int], degree: int) -> wire.Program:
    """This rank's part of `ulysses_out`: each rank's tokens of our heads, one all-to-all."""
    _check_out(o, q_layout, degree)
    *batch, heads, _, head_dim = o.shape
    tokens = chunks.local_extent(q_layout, degree)
    send = o.new_empty((degree, *batch, heads, tokens, head_dim))
    for to in range(degree):
        chunks.take_into(send[to], o, o.dim() - 2, q_layout, to, degree)
    received = yield wire.AllToAll(send)
    out = _empty_out(o, tokens, heads * degree)
    out.unflatten(-3, (degree, heads)).movedim(-4, 0).copy_(received)
    return out


def _empty_out(o: Tensor, tokens: int, heads: int) -> Tensor:
    """[..., H, S, D], stored as [..., S, H, D]: models flatten heads next, which then is free."""
    *batch, _, _, head_dim = o.shape
    return torch.empty((*batch, tokens, heads, head_dim), dtype=o.dtype, device=o.device).transpose(-3, -2)


@torch.library.custom_op("spcompile::ulysses_in", mutates_args=())
def ulysses_in(
    q: Tensor, k: Tensor, v: Tensor, q_layout: Sequence[int], kv_layout: Sequence[int], degree: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads, from this rank's tokens of all heads. One all-to-all for Q, K and V.

    Args:
        q: [..., H, S_local, D], floating point; H divisible by P.
        k: [..., G, T_local, D]; G divisible by P (GQA: G < H), same dtype and device as q.
        v: [..., G, T_local, E].
        q_layout, kv_layout: ``[1, 1, *segments]`` of the query and of the key tokens.
        degree: number of ranks P.
        group: process group name.
    Returns:
        q [..., H / P, S, D], k [..., G / P, T, D], v [..., G / P, T, E], contiguous; tokens in global order,
        padding gone, so that masks and ``is_causal`` mean what they meant before.
    Raises:
        ValueError: heads that do not divide, lengths that do not fit the layouts, mixed dtypes.
    """
    program = in_program(wire.rank_in(group), q, k, v, q_layout, kv_layout, degree)
    return wire.over_group(program, group)


@ulysses_in.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, q_layout: Sequence[int], kv_layout: Sequence[int], degree: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    _check_in(q, k, v, q_layout, kv_layout, degree)

    def exchanged(x: Tensor, layout: Sequence[int]) -> Tensor:
        fewer_heads = chunks.fake_resized(x, x.dim() - 3, x.shape[-3] // degree)
        return chunks.fake_resized(fewer_heads, x.dim() - 2, chunks.global_extent(layout))

    return exchanged(q, q_layout), exchanged(k, kv_layout), exchanged(v, kv_layout)


@torch.library.custom_op("spcompile::ulysses_out", mutates_args=())
def ulysses_out(o: Tensor, q_layout: Sequence[int], degree: int, group: str) -> Tensor:
    """This rank's tokens of all heads, from all tokens of this rank's heads. One all-to-all.

    Args:
        o: [..., H / P, S, E], the attention output for the heads of this rank, tokens in global order.
        q_layout: ``[1, 1, *segments]`` of the query tokens.
        degree, group: as in `ulysses_in`.
    Returns:
        [..., H, S_local, E], stored as [..., S_local, H, E]; padding rows are zero.
    Raises:
        ValueError: lengths that do not fit the layout.
    """
    return wire.over_group(out_program(wire.rank_in(group), o, q_layout, degree), group)


@ulysses_out.register_fake
def _(o: Tensor, q_layout: Sequence[int], degree: int, group: str) -> Tensor:
    _check_out(o, q_layout, degree)
    return _empty_out(o, chunks.local_extent(q_layout, degree), o.shape[-3] * degree)
