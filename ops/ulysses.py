"""Ulysses: all-to-all between "a rank has some tokens of all heads" and "more tokens of some heads".

Source: DeepSpeed-Ulysses (Jacobs et al., 2023, arXiv:2309.14509).

Shapes: B batch (any number of leading dims), H query heads, G key/value heads, S query tokens, T key tokens,
D / E head dims, P ranks, u of them along the mesh's ulysses axis; a block is u chunks of the tokens (all of
them, without padding, if u = P). The token dim is -2 and the head dim -3, as in ``scaled_dot_product_attention``.
``q_layout`` and ``kv_layout`` are ``[1, 1, *segments]`` (see `spcompile.ops.chunks`), ``mesh`` is
``[ring, kv_gather, ulysses]``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes
from spcompile.ops.heads import HeadShare


def _check_in(
    q: Tensor, k: Tensor, v: Tensor, q_layout: Sequence[int], kv_layout: Sequence[int], mesh: Sequence[int]
) -> HeadShare:
    meshes.check(mesh)
    for name, x, layout in (("q", q, q_layout), ("k", k, kv_layout), ("v", v, kv_layout)):
        if x.dim() < 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: want [..., heads, tokens, head_dim]")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: want the same")
        chunks.check(layout, meshes.degree(mesh), x.shape[-2], span=1)
    if k.shape[-3] != v.shape[-3]:
        raise ValueError(f"k has {k.shape[-3]} heads and v {v.shape[-3]}: want the same")
    return HeadShare(q.shape[-3], k.shape[-3], mesh[2])


def _check_out(o: Tensor, num_heads: int, q_layout: Sequence[int], mesh: Sequence[int]) -> None:
    meshes.check(mesh)
    share = HeadShare(num_heads, num_heads, mesh[2])
    if o.dim() < 3 or o.shape[-3] != share.local:
        raise ValueError(f"o has shape {tuple(o.shape)}: want [..., {share.local} heads, tokens, head_dim]")
    chunks.check(q_layout, meshes.degree(mesh), o.shape[-2], span=mesh[2])


def _pack_queries(slots: Tensor, q: Tensor, share: HeadShare) -> None:
    """Fill ``slots`` [u, ..., S, H / u, D] with each rank's heads of q [..., S, H, D], padding heads with zeros."""
    for to, slot in enumerate(slots):
        start, end = share.queries(to)
        slot.narrow(-2, 0, end - start).copy_(q.narrow(-2, start, end - start))
        slot.narrow(-2, end - start, share.local - (end - start)).zero_()


def _pack_keys(slots: Tensor, x: Tensor, share: HeadShare) -> None:
    """Fill ``slots`` [u, ..., T, sent, D] with the heads of x [..., T, G, D] that each rank needs."""
    for to, slot in enumerate(slots):
        slot.copy_(x.narrow(-2, share.keys(to), share.sent))


def in_program(
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    mesh: Sequence[int],
    out: Sequence[Tensor | None] = (None, None, None),
) -> wire.Program:
    """This rank's part of `ulysses_in`: Q, K and V packed in one buffer, one all-to-all. In ``out`` if it is given."""
    share = _check_in(q, k, v, q_layout, kv_layout, mesh)
    degree, width, dim = meshes.degree(mesh), mesh[2], q.dim() - 3
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    heads = (share.local, share.sent, share.sent)
    shapes = [[*x.shape[:-2], n, x.shape[-1]] for x, n in zip((q, k, v), heads, strict=True)]
    sizes = [math.prod(s) for s in shapes]
    send = q.new_empty((width, sum(sizes)))
    slots = [slot.view(width, *s) for slot, s in zip(send.split(sizes, dim=1), shapes, strict=True)]
    _pack_queries(slots[0], q, share)
    _pack_keys(slots[1], k, share)
    _pack_keys(slots[2], v, share)
    received = yield wire.AllToAll(send, "ulysses")
    got = [slot.view(width, *s) for slot, s in zip(received.split(sizes, dim=1), shapes, strict=True)]
    layouts = (q_layout, kv_layout, kv_layout)
    stored = [None if x is None else x.transpose(-3, -2) for x in out]
    if not share.uniform:
        stored[1:] = None, None
    q, k, v = (chunks.join(g, dim, lay, degree, 1, s) for g, lay, s in zip(got, layouts, stored, strict=True))
    if not share.uniform:
        heads_of = share.index(meshes.coordinate(mesh, rank, "ulysses"))
        # not by a tensor of indices: it would come from the host, which no CUDA graph can hold
        k, v = (torch.stack([x.select(-2, i) for i in heads_of], -2) for x in (k, v))
    return q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)


def out_program(
    rank: int,
    o: Tensor,
    num_heads: int,
    q_layout: Sequence[int],
    mesh: Sequence[int],
    out: Sequence[Tensor | None] = (None,),
) -> wire.Program:
    """This rank's part of `ulysses_out`: each rank's tokens of our heads, one all-to-all. In ``out`` if it is given."""
    _check_out(o, num_heads, q_layout, mesh)
    degree, width = meshes.degree(mesh), mesh[2]
    o = o.transpose(-3, -2)
    *batch, _, heads, head_dim = o.shape
    tokens = chunks.local_extent(q_layout, degree)
    send = o.new_empty((width, *batch, tokens, heads, head_dim))
    for to in range(width):
        chunks.cut_into(send[to], o, o.dim() - 3, q_layout, degree, width, to, width)
    received = yield wire.AllToAll(send, "ulysses")
    (given,) = out
    made = o.new_empty((*batch, tokens, num_heads, head_dim)) if given is None else given.transpose(-3, -2)
    share = HeadShare(num_heads, num_heads, width)
    for source in range(width):
        start, end = share.queries(source)
        made.narrow(-2, start, end - start).copy_(received[source].narrow(-2, 0, end - start))
    return made.transpose(-3, -2)


@torch.library.custom_op("spcompile::ulysses_in", mutates_args=())
def ulysses_in(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    mesh: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block of tokens of this rank's heads, from this rank's tokens of all heads. One all-to-all for Q, K and V.

    Heads that do not divide are padded with zeros. Key/value heads go, unexpanded, to every rank whose query
    heads attend to them; only where they do not line up with the query heads are they expanded on arrival.

    Args:
        q: [..., H, S_local, D], floating point.
        k: [..., G, T_local, D]; H a multiple of G (GQA, MQA: G < H), same dtype and device as q.
        v: [..., G, T_local, E].
        q_layout, kv_layout: ``[1, 1, *segments]`` of the query and of the key tokens.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        q [..., ceil(H / u), S_block, D], k and v [..., G_local, T_block, D or E], each stored as
        [..., tokens, heads, width]. With u = P the block is the whole sequence in global order, padding gone: masks
        and ``is_causal`` mean what they meant before.
    Raises:
        ValueError: lengths that do not fit the layouts, heads that GQA cannot share, mixed dtypes.
    """
    program = in_program(wire.rank_in(group), q, k, v, q_layout, kv_layout, mesh)
    return wire.over_group(program, group, mesh)


@ulysses_in.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    mesh: Sequence[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    share = _check_in(q, k, v, q_layout, kv_layout, mesh)
    degree = meshes.degree(mesh)

    def exchanged(x: Tensor, layout: Sequence[int], heads: int) -> Tensor:
        return chunks.fake_attention_operand(x, heads, chunks.extent(layout, degree, mesh[2]))

    return (
        exchanged(q, q_layout, share.local),
        exchanged(k, kv_layout, share.local_kv),
        exchanged(v, kv_layout, share.local_kv),
    )


@torch.library.custom_op("spcompile::ulysses_out", mutates_args=())
def ulysses_out(o: Tensor, num_heads: int, q_layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    """This rank's tokens of all heads, from a block of tokens of this rank's heads. One all-to-all.

    Args:
        o: [..., ceil(H / u), S_block, E], the attention output for the heads of this rank.
        num_heads: H; padding heads are dropped.
        q_layout: ``[1, 1, *segments]`` of the query tokens.
        mesh, group: as in `ulysses_in`.
    Returns:
        [..., H, S_local, E], stored as [..., S_local, H, E]; padding repeats the last token's.
    Raises:
        ValueError: heads or lengths that do not fit.
    """
    return wire.over_group(out_program(wire.rank_in(group), o, num_heads, q_layout, mesh), group, mesh)


@ulysses_out.register_fake
def _(o: Tensor, num_heads: int, q_layout: Sequence[int], mesh: Sequence[int], group: str) -> Tensor:
    _check_out(o, num_heads, q_layout, mesh)
    return chunks.fake_attention_operand(o, num_heads, chunks.local_extent(q_layout, meshes.degree(mesh)))
