"""The ops again, for all ranks at once, in the plainest torch: the oracle of the tests, and what to read first.

Each function takes a list with every rank's tensor and returns a list with every rank's result. Nothing here
is shared with the real ops, and the real ops never import this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def shard(x: Tensor, dim: int, layout: Sequence[int], degree: int) -> list[Tensor]:
    """Every rank's chunk of ``x``: pad each segment to a multiple of P with its last token, then cut it in P."""
    outer, inner, *segments = layout
    rows = x.movedim(dim, 0).reshape(outer, sum(segments), inner, -1)
    ranks: list[list[Tensor]] = [[] for _ in range(degree)]
    for segment in rows.split(list(segments), dim=1):
        missing = -segment.shape[1] % degree
        padded = torch.cat([segment, segment[:, -1:].expand(-1, missing, -1, -1)], dim=1) if missing else segment
        for mine, chunk in zip(ranks, padded.tensor_split(degree, dim=1), strict=True):
            mine.append(chunk)
    rest = [n for d, n in enumerate(x.shape) if d != dim]
    return [torch.cat(r, dim=1).reshape(-1, *rest).movedim(0, dim).contiguous() for r in ranks]


def unshard(xs: Sequence[Tensor], dim: int, layout: Sequence[int]) -> list[Tensor]:
    """The whole tensor on every rank: per segment all chunks in rank order, cut to the segment's length."""
    outer, inner, *segments = layout
    degree = len(xs)
    sizes = [-(-n // degree) for n in segments]
    rows = [x.movedim(dim, 0).reshape(outer, sum(sizes), inner, -1).split(sizes, dim=1) for x in xs]
    whole = [torch.cat([r[i] for r in rows], dim=1)[:, :n] for i, n in enumerate(segments)]
    rest = [n for d, n in enumerate(xs[0].shape) if d != dim]
    full = torch.cat(whole, dim=1).reshape(-1, *rest).movedim(0, dim).contiguous()
    return [full.clone() for _ in xs]


def ulysses_in(
    qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor], q_layout: Sequence[int], kv_layout: Sequence[int]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Every rank's heads with all tokens: join the tokens, then cut the heads in P."""
    per_tensor = [
        unshard(xs, xs[0].dim() - 2, layout)[0].chunk(len(xs), dim=-3)
        for xs, layout in ((qs, q_layout), (ks, kv_layout), (vs, kv_layout))
    ]
    return [(q.contiguous(), k.contiguous(), v.contiguous()) for q, k, v in zip(*per_tensor, strict=True)]


def ulysses_out(os: Sequence[Tensor], q_layout: Sequence[int]) -> list[Tensor]:
    """Every rank's tokens with all heads: join the heads, then cut the tokens in P."""
    return shard(torch.cat(list(os), dim=-3), os[0].dim() - 2, q_layout, len(os))
