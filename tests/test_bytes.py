"""What one rank sends, three times over: the formula, the report's count, and what lockstep moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import B, C
from test_ops import MESHES, every_mesh, gather_example, in_example, out_example, switch_example, unshard_example
from torch import nn

from spcompile import ops
from spcompile.ops import meshes, wire
from spcompile.testing import simulate

S, D, SIZE = 24, 2, 4  # tokens, head dim, bytes of a float32


class Attention(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = (heads, kv_heads, kv_heads)
        self.qkv = nn.Linear(C, D * sum(self.heads))

    def forward(self, x):
        parts = self.qkv(x).split([D * h for h in self.heads], dim=-1)
        q, k, v = (p.unflatten(-1, (-1, D)).transpose(1, 2) for p in parts)
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads[0] != self.heads[1])


def reported(heads: int = 8, kv_heads: int = 8, **degrees: int) -> int:
    """Bytes that a rank sends for one site."""
    (entry,) = simulate(Attention(heads, kv_heads), (torch.randn(B, S, C),), **degrees).report.attention
    return entry.bytes_per_rank


def share_of(heads: int, degree: int) -> int:
    """Bytes of one rank's share of a tensor with these heads."""
    return B * heads * (S // degree) * D * SIZE


def moved_between_ranks(program: wire.Program, mesh) -> Iterator[int]:
    """Bytes of each collective that leave rank 0, counted slice by slice."""
    request = next(program)
    peers = len(meshes.peers(mesh, 0, request.axis))
    if isinstance(request, wire.Collect):
        slices = [list(request.send)] * peers
    else:
        slices = [[s] for s in request.send] if isinstance(request, wire.AllToAll) else [[request.send]] * peers
    assert len(slices) == peers
    yield from (s.numel() * s.element_size() for pieces in slices[1:] for s in pieces)  # the first slice stays


@pytest.mark.parametrize("make", [in_example, out_example, gather_example, unshard_example, switch_example])
@every_mesh
def test_bytes_sent_is_what_lockstep_moves(make, mesh):
    example = make(mesh=mesh)
    start = ops.PROGRAMS[example.op._opoverload]
    moved = sum(moved_between_ranks(start(0, *example.ranks[0]), mesh))
    assert wire.bytes_sent(start(0, *example.ranks[0]), mesh) == (1, moved)


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_ulysses_sends_all_but_its_own_heads_of_four_tensors(degree):
    assert reported(ulysses=degree) == 4 * share_of(8, degree) * (degree - 1) // degree


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_gathering_sends_keys_and_values_to_all_others(degree, kv_heads):
    assert reported(kv_heads=kv_heads, kv_gather=degree) == (degree - 1) * 2 * share_of(kv_heads, degree)


@pytest.mark.parametrize("degree", [2, 3, 4, 8])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_a_ring_sends_one_block_of_keys_and_values_per_hop(degree, kv_heads):
    assert reported(kv_heads=kv_heads, ring=degree) == (degree - 1) * 2 * share_of(kv_heads, degree)


@pytest.mark.parametrize(("ring", "gather", "ulysses"), [m for m in MESHES if sum(n > 1 for n in m) > 1])
def test_a_product_sends_what_its_parts_send(ring, gather, ulysses):
    share = share_of(8, ring * gather * ulysses)  # of one rank; Ulysses keeps its size, a gather multiplies it
    parts = 4 * share * (ulysses - 1) // ulysses + (gather - 1) * 2 * share + (ring - 1) * 2 * share * gather
    degrees = {"ring": ring, "kv_gather": gather, "ulysses": ulysses}
    assert reported(**{axis: n for axis, n in degrees.items() if n > 1}) == parts


@pytest.mark.parametrize("axis", ["kv_gather", "ring"])
def test_one_key_head_for_eight_query_heads_is_an_eighth_of_the_traffic(axis):
    assert 8 * reported(kv_heads=1, **{axis: 8}) == reported(kv_heads=8, **{axis: 8})


@pytest.mark.parametrize(("degree", "fewer"), [(2, 4), (4, 2), (8, 1)])
def test_ulysses_sends_each_rank_the_one_key_head_it_needs(degree, fewer):
    """At 8 ranks each has one query head, and needs one key head, whether heads are shared or not."""
    queries_and_output = 2 * share_of(8, degree) * (degree - 1) // degree
    shared, expanded = (reported(kv_heads=g, ulysses=degree) - queries_and_output for g in (1, 8))
    assert shared == (degree - 1) * 2 * share_of(1, degree)
    assert fewer * shared == expanded
