"""Attention of a rank's queries to keys that may still be elsewhere: named kernels, causal blocks, the ring.

Source: Ring Attention (Liu et al., 2023, arXiv:2310.01889); merging by log-sum-exp as in FlashAttention
(arXiv:2205.14135, section 3.1).

Shapes: H query heads, G key/value heads, S query and T key tokens, D / E head dims, P ranks on a mesh
``[ring, kv_gather, ulysses]`` = [r, g, u]. The queries are a block of u chunks, the keys one of g * u, which is
all of them without a ring.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spcompile.ops import chunks, wire
from spcompile.ops import mesh as meshes
from spcompile.ops.kernels import attend, wide


@dataclass(frozen=True)
class Run:
    """Neighbouring real tokens of a block: where they begin in the block, and in the whole sequence."""

    local: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


def runs(layout: Sequence[int], degree: int, span: int, block: int) -> list[Run]:
    """The real tokens of block ``block`` of ``span`` chunks, segment by segment; neighbours are joined."""
    found: list[Run] = []
    local = segment_start = 0
    for n in layout[2:]:
        first, count = chunks.first_token(n, degree, span, block)
        run = Run(local, segment_start + first, count)
        if found and found[-1].local + found[-1].count == local and found[-1].end == run.start:
            found[-1] = Run(found[-1].local, found[-1].start, found[-1].count + count)
        elif count:
            found.append(run)
        local += chunks.block_tokens(n, degree, span)
        segment_start += abs(n)
    return found


def padding(layout: Sequence[int], degree: int, span: int, block: int) -> list[Run]:
    """The padding of block ``block``: copies of their segment's last token, as whose queries they count."""
    found: list[Run] = []
    local = segment_start = 0
    for n in layout[2:]:
        _, count = chunks.first_token(n, degree, span, block)
        size = chunks.block_tokens(n, degree, span)
        if count < size:
            found.append(Run(local + count, segment_start + abs(n) - 1, size - count))
        local, segment_start = local + size, segment_start + abs(n)
    return found


def _pick(x: Tensor, dim: int, pieces: Sequence[tuple[int, int]]) -> Tensor:
    """The (start, count) pieces of a dim, one after the other: a view if there is one piece."""
    parts = [x.narrow(dim, start, count) for start, count in pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def visible(q: Run, k: Run) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool]]:
    """Causal attention of a run of queries to a run of keys, as (query range, key range, is a causal square).

    Ranges are [start, end) in the whole sequence; what is not covered is invisible.
    """
    before = min(k.end, q.start)
    if k.start < before:
        yield (q.start, q.end), (k.start, before), False
    low, high = max(k.start, q.start), min(k.end, q.end)
    if low < high:
        yield (low, high), (low, high), True
        if high < q.end:
            yield (high, q.end), (low, high), False


class Merged:
    """Partial outputs over disjoint keys, weighted by their log-sum-exp: float32, safe for rows without a key."""

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        high = wide(like.dtype)
        self.out = torch.zeros(shape, dtype=high, device=like.device)
        self.lse = torch.full(shape[:-1], -math.inf, dtype=high, device=like.device)

    def add(self, start: int, out: Tensor, lse: Tensor) -> None:
        """Merge a partial result for the queries from ``start`` on."""
        rows, old = (x.narrow(d, start, lse.shape[-1]) for x, d in ((self.out, -2), (self.lse, -1)))
        top = torch.maximum(old, lse)
        top = top.masked_fill(top == -math.inf, 0)
        weight_old, weight_new = (old - top).exp(), (lse - top).exp()
        total = weight_old + weight_new
        share = weight_new / total.masked_fill(total == 0, 1)
        # a row that has no key here may hold anything, so it is replaced, not multiplied by 0
        new = out.to(rows.dtype).masked_fill((lse == -math.inf).unsqueeze(-1), 0)
        rows.add_((new - rows) * share.unsqueeze(-1))
        old.copy_(top + total.log())


def program(
    rank: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    causal: bool,
    scale: float,
    kernel: str,
    mesh: Sequence[int],
) -> wire.Program:
    """This rank's part of `attention`: r - 1 hops, each in flight while the block before it is attended to."""
    _check(q, k, v, mask, q_layout, kv_layout, causal, mesh)
    ring, gather, width = mesh
    degree, at = meshes.degree(mesh), meshes.coordinate(mesh, rank, "ring")
    queries = runs(q_layout, degree, width, rank // width % (degree // width))
    copies = padding(q_layout, degree, width, rank // width % (degree // width))
    shape = (*torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]), *q.shape[-3:-1], v.shape[-1])
    square = width == degree and q.shape[-2] == k.shape[-2]
    if ring == 1 and (square or not causal):  # one call does it: no merging
        out, _ = attend(kernel, q, k, v, mask, causal, scale, False)
        return out.contiguous()  # as the fake promises
    merged = Merged(shape, q)
    held = torch.cat([k.reshape(-1), v.reshape(-1)]) if ring > 1 else None
    for hop in range(ring):
        shift = wire.Shift(held, "ring") if held is not None and hop < ring - 1 else None
        if shift is not None:
            yield shift
        keys = runs(kv_layout, degree, gather * width, (at - hop) % ring)
        if causal:
            _add_causal(merged, q, k, v, queries, keys, scale, kernel)
            _add_causal_padding(merged, q, k, v, copies, keys, scale, kernel)
        elif keys:
            _add_block(merged, q, k, v, mask, keys, scale, kernel)
        if shift is not None:
            held = yield wire.Wait(shift)
            k_part, v_part = held.split([k.numel(), v.numel()])
            k, v = k_part.view(k.shape), v_part.view(v.shape)
    return merged.out.to(q.dtype)


def _add_block(
    merged: Merged,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keys: Sequence[Run],
    scale: float,
    kernel: str,
) -> None:
    """All queries to the real keys of one block, with their columns of the mask."""
    pieces = [(r.local, r.count) for r in keys]
    shift = None
    if mask is not None and mask.dtype != torch.bool and kernel == "math":  # of all keys: the same for every block
        shift = mask.amax(-1, keepdim=True)
        shift = shift.masked_fill(shift.isinf(), 0)
    if mask is not None and mask.shape[-1] > 1:
        mask = _pick(mask, -1, [(r.start, r.count) for r in keys])
    elif mask is not None:
        mask = mask.expand(*mask.shape[:-1], sum(r.count for r in keys))
    out, lse = attend(kernel, q, _pick(k, -2, pieces), _pick(v, -2, pieces), mask, False, scale, True, shift)
    assert lse is not None
    merged.add(0, out, lse)


def _add_causal(
    merged: Merged,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequence[Run],
    keys: Sequence[Run],
    scale: float,
    kernel: str,
) -> None:
    """Whatever part of one block's keys each query may see."""
    for rows in queries:
        for cols in keys:
            for (q0, q1), (k0, k1), square in visible(rows, cols):
                some_q = q.narrow(-2, rows.local + q0 - rows.start, q1 - q0)
                some_k, some_v = (x.narrow(-2, cols.local + k0 - cols.start, k1 - k0) for x in (k, v))
                out, lse = attend(kernel, some_q, some_k, some_v, None, square, scale, True)
                assert lse is not None
                merged.add(rows.local + q0 - rows.start, out, lse)


def _add_causal_padding(
    merged: Merged,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    copies: Sequence[Run],
    keys: Sequence[Run],
    scale: float,
    kernel: str,
) -> None:
    """Padding queries see what the token they repeat sees."""
    for rows in copies:
        for cols in keys:
            seen = min(cols.end, rows.start + 1) - cols.start
            if seen > 0:
                some_q = q.narrow(-2, rows.local, rows.count)
                some_k, some_v = (x.narrow(-2, cols.local, seen) for x in (k, v))
                out, lse = attend(kernel, some_q, some_k, some_v, None, False, scale, True)
                assert lse is not None
                merged.add(rows.local, out, lse)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    causal: bool,
    mesh: Sequence[int],
) -> None:
    meshes.check(mesh)
    degree, (_, gather, width) = meshes.degree(mesh), mesh
    chunks.check(q_layout, degree, q.shape[-2], span=width)
    for x in (k, v):
        chunks.check(kv_layout, degree, x.shape[-2], span=gather * width)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"key or value is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: want the same")
        if q.shape[-3] % x.shape[-3]:
            raise ValueError(f"{q.shape[-3]} query heads cannot share {x.shape[-3]} key/value heads equally")
    if causal and mask is not None:
        raise ValueError("a mask and causal at once")
    if mask is not None and mask.shape[-1] not in (1, chunks.global_extent(kv_layout)):
        raise ValueError(f"mask has {mask.shape[-1]} columns for {chunks.global_extent(kv_layout)} keys")
    if mask is not None and mask.shape[-2] not in (1, q.shape[-2]):
        raise ValueError(f"mask has {mask.shape[-2]} rows for {q.shape[-2]} queries")


@torch.library.custom_op("spcompile::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    causal: bool,
    scale: float,
    kernel: str,
    mesh: Sequence[int],
    group: str,
) -> Tensor:
    """Attention of a block of queries to all keys, with a kernel by name; r - 1 hops around the ring.

    Each hop's keys are cut to its source's real tokens and take their own columns of the mask; causal masking
    goes by positions in the whole sequence. Partial outputs are merged in float32 by their log-sum-exp.

    Args:
        q: [..., H, S_block, D], a block of u chunks (the whole sequence if u = P).
        k, v: [..., G, T_block, D or E], a block of g * u chunks, same dtype and device.
        mask: None, bool or additive, [..., S_block or 1, T or 1]: rows of this block, columns of all keys.
        q_layout, kv_layout: ``[1, 1, *segments]``.
        causal: query i sees keys 0 to i of the whole sequence.
        scale: factor of the scores.
        kernel: a name in `spcompile.ops.kernels.KERNELS`; it must return a log-sum-exp for a ring or causal blocks.
        mesh: ``[ring, kv_gather, ulysses]``.
        group: process group name.
    Returns:
        [..., H, S_block, E], contiguous; padding repeats the last token's.
    Raises:
        ValueError: shapes that do not fit the layouts, mixed dtypes, a mask with ``causal``.
    """
    args = (q, k, v, mask, q_layout, kv_layout, causal, scale, kernel, mesh)
    return wire.over_group(program(wire.rank_in(group), *args), group, mesh)


@attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    causal: bool,
    scale: float,
    kernel: str,
    mesh: Sequence[int],
    group: str,
) -> Tensor:
    _check(q, k, v, mask, q_layout, kv_layout, causal, mesh)
    batch = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    return torch.empty((*batch, *q.shape[-3:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
