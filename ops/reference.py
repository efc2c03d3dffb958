"""The ops again, for all ranks at once, in the plainest torch: the oracle of the tests, and what to read first.

Each function takes a list with every rank's tensor and returns a list with every rank's result. Nothing here
is shared with the real ops, and the real ops never import this. A mesh is [ring, kv_gather, ulysses]; rank
``(i * kv_gather + j) * ulysses + h`` stands at (i, j, h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def blocks(x: Tensor, dim: int, layout: Sequence[int], degree: int, span: int) -> list[Tensor]:
    """A whole dim as blocks of ``span`` chunks: pad each segment with its last token, cut it, number the pieces."""
    outer, inner, *segments = layout
    rows = x.movedim(dim, 0).reshape(outer, sum(map(abs, segments)), inner, -1)
    if span == degree:
        return [x.contiguous()]
    pieces: list[list[Tensor]] = [[] for _ in range(degree // span)]
    for n, segment in zip(segments, rows.split([abs(n) for n in segments], dim=1), strict=True):
        missing = -abs(n) % degree
        padded = torch.cat([segment, segment[:, -1:].expand(-1, missing, -1, -1)], dim=1) if missing else segment
        cut = padded.tensor_split(degree // span, dim=1)
        for mine, piece in zip(pieces, cut if n >= 0 else cut[::-1], strict=True):
            mine.append(piece)
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    return [torch.cat(p, dim=1).reshape(-1, *rest).movedim(0, dim).contiguous() for p in pieces]


def shard(x: Tensor, dim: int, layout: Sequence[int], mesh: Sequence[int]) -> list[Tensor]:
    """Every rank's chunk of ``x``."""
    return blocks(x, dim, layout, math.prod(mesh), 1)


def whole(xs: Sequence[Tensor], dim: int, layout: Sequence[int]) -> Tensor:
    """A whole dim from every rank's chunk: per segment all chunks in order, cut to the segment's length."""
    outer, inner, *segments = layout
    sizes = [-(-abs(n) // len(xs)) for n in segments]
    rows = [x.movedim(dim, 0).reshape(outer, sum(sizes), inner, -1).split(sizes, dim=1) for x in xs]
    in_order = [rows if n >= 0 else rows[::-1] for n in segments]
    joined = [torch.cat([r[i] for r in in_order[i]], dim=1)[:, : abs(n)] for i, n in enumerate(segments)]
    rest = [n for d, n in enumerate(xs[0].shape) if d != dim]
    return torch.cat(joined, dim=1).reshape(-1, *rest).movedim(0, dim).contiguous()


def unshard(xs: Sequence[Tensor], dim: int, layout: Sequence[int], mesh: Sequence[int]) -> list[Tensor]:
    """The whole tensor on every rank."""
    return [whole(xs, dim, layout) for _ in xs]


def switch(
    xs: Sequence[Tensor], dim: int, layout: Sequence[int], new_dim: int, new_layout: Sequence[int], mesh: Sequence[int]
) -> list[Tensor]:
    """The whole tensor, cut along another dim."""
    return shard(whole(xs, dim, layout), new_dim, new_layout, mesh)


def ulysses_in(
    qs: Sequence[Tensor],
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    q_layout: Sequence[int],
    kv_layout: Sequence[int],
    mesh: Sequence[int],
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every rank's query heads without padding, with the key and value head of each, for its block of tokens."""
    degree, width = math.prod(mesh), mesh[2]
    num_heads, num_kv_heads = qs[0].shape[-3], ks[0].shape[-3]
    share = -(-num_heads // width)
    per_tensor = [
        blocks(whole(xs, xs[0].dim() - 2, layout), xs[0].dim() - 2, layout, degree, width)
        for xs, layout in ((qs, q_layout), (ks, kv_layout), (vs, kv_layout))
    ]
    results = []
    for rank in range(degree):
        q, k, v = (blocks_of_one[rank // width] for blocks_of_one in per_tensor)
        heads = [h for h in range(num_heads) if h // share == rank % width]
        group = [h * num_kv_heads // num_heads for h in heads]
        results.append((q[..., heads, :, :], k[..., group, :, :], v[..., group, :, :]))
    return results


def ulysses_out(os: Sequence[Tensor], num_heads: int, q_layout: Sequence[int], mesh: Sequence[int]) -> list[Tensor]:
    """Every rank's tokens with all heads: join the heads of each block, cut the block into its chunks."""
    width, results = mesh[2], []
    for start in range(0, len(os), width):
        block = torch.cat(list(os[start : start + width]), dim=-3)[..., :num_heads, :, :]
        if width == math.prod(mesh):
            results += blocks(block, block.dim() - 2, q_layout, width, 1)
            continue
        sizes = [width * -(-abs(n) // math.prod(mesh)) for n in q_layout[2:]]
        local = [1, 1, *(s if n >= 0 else -s for s, n in zip(sizes, q_layout[2:], strict=True))]
        results += blocks(block, block.dim() - 2, local, width, 1)
    return results


def kv_gather(
    ks: Sequence[Tensor], vs: Sequence[Tensor], kv_layout: Sequence[int], mesh: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of g blocks of u chunks. All ranks of a Ulysses group hold different heads of one block."""
    _, gather, width = mesh
    degree, results = math.prod(mesh), []
    for rank in range(degree):
        first = rank // (gather * width) * (gather * width) + rank % width
        peers = [first + j * width for j in range(gather)]
        results.append(tuple(_join([xs[p] for p in peers], kv_layout, degree, width) for xs in (ks, vs)))
    return results  # type: ignore[return-value]


def _join(parts: Sequence[Tensor], layout: Sequence[int], degree: int, span: int) -> Tensor:
    """One block from neighbouring blocks of ``span`` chunks along dim -2."""
    segments = layout[2:]
    sizes = [abs(n) if span == degree else span * -(-abs(n) // degree) for n in segments]
    split = [p.split(sizes, dim=-2) for p in parts]
    joined = []
    for i, n in enumerate(segments):
        run = torch.cat([s[i] for s in (split if n >= 0 else split[::-1])], dim=-2)
        joined.append(run[..., : abs(n), :] if span * len(parts) == degree else run)
    return torch.cat(joined, dim=-2)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    """What all the exchanges together compute, on whole tensors, in float64."""
    groups = q.shape[-3] // k.shape[-3]
    k, v = (x.double().repeat_interleave(groups, -3) for x in (k, v))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num(0) @ v


def _wide(x: Tensor) -> Tensor:
    """Half precision is summed in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def all_reduce(xs: Sequence[Tensor], how: str) -> list[Tensor]:
    """The sum, or the largest or smallest entry, on every rank."""
    every = torch.stack(list(xs))
    total = _wide(every).sum(0).to(xs[0].dtype) if how == "sum" else every.amax(0) if how == "max" else every.amin(0)
    return [total.clone() for _ in xs]


def fill_padding(xs: Sequence[Tensor], dim: int, layout: Sequence[int], fill: float) -> list[Tensor]:
    """Every rank's chunk with ``fill`` in place of padding."""
    outer, inner, *segments = layout
    found = []
    for rank, x in enumerate(xs):
        real: list[bool] = []
        for n in segments:
            size, place = -(-abs(n) // len(xs)), rank if n >= 0 else len(xs) - 1 - rank
            real += [place * size + i < abs(n) for i in range(size)]
        keep = torch.tensor(real, dtype=torch.bool).repeat_interleave(inner).repeat(outer)
        rows = x.movedim(dim, 0).clone()
        rows[~keep] = fill
        found.append(rows.movedim(0, dim).contiguous())
    return found


def cumsum(xs: Sequence[Tensor], dim: int, layout: Sequence[int], mesh: Sequence[int]) -> list[Tensor]:
    """The running sum of the whole dim, cut again."""
    total = whole(xs, dim, layout)
    return shard(_wide(total).cumsum(dim).to(total.dtype), dim, layout, mesh)


def halo(
    xs: Sequence[Tensor], dim: int, layout: Sequence[int], before: int, after: int, wraps: bool = False
) -> list[Tensor]:
    """Every rank's chunk with the rows around it, of the whole dim: around that zeros, or its other end."""
    size = xs[0].shape[dim]
    rows = whole(xs, dim, layout).movedim(dim, 0)
    zeros = rows.new_zeros(len(xs) * size - len(rows), *rows.shape[1:])
    if wraps:
        rows = torch.cat([rows[len(rows) - before :], rows, rows[:after], zeros])
    else:
        rows = torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows, zeros, rows.new_zeros(after, *rows.shape[1:])])
    cut = [rows[r * size : r * size + before + size + after] for r in range(len(xs))]
    return [c.movedim(0, dim).contiguous() for c in cut]


def pick(xs: Sequence[Tensor], index: Tensor, dim: int, layout: Sequence[int]) -> list[Tensor]:
    """``torch.gather`` of the whole dim."""
    return [whole(xs, dim, layout).gather(dim, index) for _ in xs]


def local_rows(index: Tensor, layout: Sequence[int], wraps: bool, mesh: Sequence[int]) -> list[Tensor]:
    """Where every rank's chunk has the tokens, one past its end for those that it does not have."""
    total = sum(map(abs, layout[2:]))
    found = []
    for held in fill_padding(shard(torch.arange(total), 0, layout, mesh), 0, layout, -1):
        places = {int(token): place for place, token in enumerate(held) if token >= 0}
        found.append(torch.tensor([places.get(int(i) % total, len(held)) for i in index.flatten()]).view(index.shape))
    return found
