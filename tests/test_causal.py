"""Causal attention over ranks: exact, and under a ring with the same work on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from spcompile.ops.blockwise import Run, runs, visible
from spcompile.testing import plan, simulate

WEIGHTS = [torch.randn(32, 32, generator=torch.Generator().manual_seed(i)) * 0.2 for i in range(3)]


def causal(text, image):
    x = torch.cat([text, image], 1)
    q, k, v = (F.linear(x, w).unflatten(-1, (4, 8)).transpose(1, 2) for w in WEIGHTS)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return out[:, text.shape[1] :] + image


def streams(text=7, image=18):
    make = torch.Generator().manual_seed(9)
    return [torch.randn(2, n, 32, generator=make, dtype=torch.float64).float() for n in (text, image)]


@pytest.mark.parametrize(
    "degrees",
    [{"ring": 2}, {"ring": 3}, {"kv_gather": 4}, {"ulysses": 3}, {"ring": 2, "ulysses": 2}, {"ring": 2, "kv_gather": 2},
     {"kv_gather": 2, "ulysses": 4}, {"ring": 8}, {"sp": 5}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("lengths", [(7, 18), (1, 5), (8, 16)], ids=str)
def test_causal_attention_is_exact_under_every_exchange(degrees, lengths):
    inputs = streams(*lengths)
    for out in simulate(causal, inputs, **degrees).outputs:
        torch.testing.assert_close(out, causal(*inputs), rtol=0, atol=3e-6)


def attended(layout: list[int], degree: int, rank: int) -> int:
    """How many query-key pairs a rank computes, over all hops of the ring."""
    pairs = 0
    for hop in range(degree):
        for q in runs(layout, degree, 1, rank):
            for k in runs(layout, degree, 1, (rank - hop) % degree):
                for (q0, q1), (k0, k1), square in visible(q, k):
                    pairs += (q1 - q0) * (k1 - k0) if not square else (q1 - q0) * (q1 - q0 + 1) // 2
    return pairs


def test_head_and_tail_halves_balance_the_ring():
    degree, tokens = 4, 64
    plain = [attended([1, 1, tokens], degree, r) for r in range(degree)]
    balanced = [attended([1, 1, tokens // 2, -tokens // 2], degree, r) for r in range(degree)]
    assert sum(plain) == sum(balanced) == tokens * (tokens + 1) // 2
    assert max(plain) > 6 * min(plain)
    assert max(balanced) == min(balanced)


def shard_layouts(module) -> list[list[int]]:
    return [n.args[2] for n in module.graph.nodes if "spcompile.shard" in str(n.target)]


def test_a_causal_ring_is_balanced_and_nothing_else_is():
    inputs = streams()
    (ring,) = plan(causal, inputs, ring=2).graphs
    assert shard_layouts(ring) == [[1, 1, 4, -3], [1, 1, 9, -9]]
    (gathered,) = plan(causal, inputs, kv_gather=2).graphs
    assert shard_layouts(gathered) == [[1, 1, 7], [1, 1, 18]]


def test_visible_covers_each_pair_a_causal_mask_lets_through_once():
    for q_start in range(6):
        for k_start in range(6):
            q, k = Run(0, q_start, 3), Run(0, k_start, 4)
            seen = torch.zeros(10, 10, dtype=torch.int64)
            for (q0, q1), (k0, k1), square in visible(q, k):
                block = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
                seen[q0:q1, k0:k1] += block.tril() if square else block
            want = torch.zeros(10, 10, dtype=torch.int64)
            want[q.start : q.end, k.start : k.end] = 1
            assert torch.equal(seen, want.tril())


def test_causal_attention_of_folded_tokens_to_a_context_is_exact():
    def model(x, context):
        frames = x[0].unflatten(1, (2, 7)).transpose(0, 1) * 2
        frames = F.scaled_dot_product_attention(frames, frames, frames)  # shards space, not frames x space
        x = frames.transpose(0, 1).flatten(1, 2)[None]
        return F.scaled_dot_product_attention(x, context, context, is_causal=True)

    make = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 4, n, 2, generator=make, dtype=torch.float64) for n in (14, 5)]
    for degrees in ({"sp": 2}, {"ulysses": 3}, {"ring": 2}):
        for out in simulate(model, inputs, **degrees).outputs:
            torch.testing.assert_close(out, model(*inputs))
