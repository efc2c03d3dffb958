"""How one dim is cut into chunks and joined again.

A segment written ``-n`` is mirrored: rank i holds chunk P - 1 - i.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spcompile.ops import chunks, reference

degrees = st.integers(1, 5)
layouts = st.tuples(
    st.integers(1, 3), st.integers(1, 3), st.lists(st.integers(-9, 9), min_size=1, max_size=4)
).map(lambda t: [t[0], t[1], *t[2]])  # fmt: skip
nonempty_layouts = layouts.filter(lambda layout: any(layout[2:]))
spans = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
dims = st.integers(0, 2)


def numbered(layout: list[int], dim: int) -> torch.Tensor:
    """Different positive numbers, [2, n, 3] with the cut dim at ``dim``."""
    shape = [2, 3]
    shape.insert(dim, chunks.global_extent(layout))
    return torch.arange(1.0, prod(shape) + 1).reshape(shape)


def taken(x: torch.Tensor, dim: int, layout: list[int], degree: int) -> list[torch.Tensor]:
    return [chunks.take(x, dim, layout, rank, degree) for rank in range(degree)]


def of_every_rank(values: list[int], layout: list[int], degree: int) -> list[list[int]]:
    return [chunk.tolist() for chunk in taken(torch.tensor(values), 0, layout, degree)]


@given(layouts, degrees, dims)
def test_join_undoes_take(layout, degree, dim):
    x = numbered(layout, dim)
    joined = chunks.join(torch.stack(taken(x, dim, layout, degree)), dim, layout, degree)
    assert torch.equal(joined, x)
    assert joined.is_contiguous()


@given(layouts, degrees, dims)
def test_take_gives_new_contiguous_chunks_of_one_length(layout, degree, dim):
    x = numbered(layout, dim)
    for chunk in taken(x, dim, layout, degree):
        assert chunk.is_contiguous()
        assert chunk.shape[dim] == chunks.local_extent(layout, degree)
        assert chunk.numel() == 0 or chunk.data_ptr() != x.data_ptr()


@given(nonempty_layouts, degrees, dims)
def test_take_agrees_with_the_reference(layout, degree, dim):
    x = numbered(layout, dim)
    expected = reference.shard(x, dim, layout, [1, 1, degree])
    assert all(torch.equal(a, b) for a, b in zip(taken(x, dim, layout, degree), expected, strict=True))


@given(nonempty_layouts, spans, dims)
def test_blocks_are_cut_and_joined_at_every_level(layout, factors, dim):
    """Chunks join to blocks, blocks to larger ones and to the whole; each is cut into what it was joined from."""
    inner, middle, _ = factors
    degree, x = prod(factors), numbered(layout, dim)
    levels = [1, inner, inner * middle, degree]
    for small, large in pairwise(levels):
        parts = reference.blocks(x, dim, layout, degree, small)
        for i, block in enumerate(reference.blocks(x, dim, layout, degree, large)):
            count = large // small
            mine = parts[i * count : (i + 1) * count]
            assert torch.equal(chunks.join(torch.stack(mine), dim, layout, degree, small), block)
            cut = [chunks.cut(block, dim, layout, degree, large, part, count) for part in range(count)]
            assert all(torch.equal(a, b) for a, b in zip(cut, mine, strict=True))


@given(layouts, degrees, dims)
def test_chunks_hold_nothing_but_tokens_and_all_of_them(layout, degree, dim):
    x = numbered(layout, dim)
    found = torch.cat([chunk.flatten() for chunk in taken(x, dim, layout, degree)])
    assert set(found.tolist()) == set(x.flatten().tolist())


@given(st.integers(1, 30), degrees)
def test_chunks_of_one_segment_follow_each_other_and_repeat_its_last_token(num, degree):
    x = torch.arange(1.0, num + 1)
    found = torch.cat(taken(x, 0, [1, 1, num], degree))
    assert torch.equal(found[:num], x)
    assert (found[num:] == num).all()


@given(st.integers(0, 30), degrees)
def test_a_mirrored_segment_lies_on_the_ranks_in_reverse(num, degree):
    x = torch.arange(1.0, num + 1)
    forward, mirrored = (taken(x, 0, [1, 1, n], degree) for n in (num, -num))
    assert all(torch.equal(a, b) for a, b in zip(forward, mirrored[::-1], strict=True))


@given(st.integers(-20, 20), spans)
def test_first_token_says_which_real_tokens_a_block_holds(num, factors):
    degree, span = factors[0] * factors[1], factors[0]
    x = torch.arange(abs(num))
    for block, held in enumerate(reference.blocks(x, 0, [1, 1, num], degree, span) if num else []):
        first, count = chunks.first_token(num, degree, span, block)
        assert held[:count].tolist() == list(range(first, first + count))
        assert (held[count:] == abs(num) - 1).all()


def test_each_segment_is_cut_on_its_own():
    assert of_every_rank([1, 2, 3, 4, 5, 6, 7, 8], [1, 1, 3, 5], 2) == [[1, 2, 4, 5, 6], [3, 3, 7, 8, 8]]


def test_a_balanced_causal_sequence_gives_each_rank_an_early_and_a_late_piece():
    assert of_every_rank(list(range(8)), [1, 1, 4, -4], 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_outer_repeats_the_cut_and_inner_stays_together():
    # 2 samples of 3 tokens of 2
    assert of_every_rank(list(range(12)), [2, 2, 3], 3) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_ranks_beyond_a_short_segment_hold_only_padding():
    assert of_every_rank([5], [1, 1, 1], 3) == [[5], [5], [5]]


@pytest.mark.parametrize("num", [7, -7])
def test_what_padding_holds_does_not_matter_to_join(num):
    x, layout = torch.arange(1.0, 8.0), [1, 1, num]
    parts = taken(x, 0, layout, 4)
    parts[3 if num > 0 else 0][1:] = torch.nan
    assert torch.equal(chunks.join(torch.stack(parts), 0, layout, 4), x)


def test_cut_into_fills_a_strided_buffer():
    x = torch.arange(6.0).reshape(2, 3)
    out = torch.full((2, 4), -1.0)[:, ::2]
    chunks.cut_into(out, x, 1, [1, 1, 3], 2, 2, 1, 2)
    assert out.tolist() == [[2, 2], [5, 5]]


def test_resized_forgets_strides():
    x = torch.randn(3, 4, 2).transpose(0, 1)
    resized = chunks.resized(x, (1, 5), (2, 1))
    assert (resized.shape, resized.stride()) == ((4, 5, 1), (5, 1, 1))


@pytest.mark.parametrize(
    ("layout", "degree", "size", "span", "text"),
    [
        ([1, 1, 8], 2, 7, 2, r"layout \[1, 1, 8\] over 2 ranks makes 2 of 2 chunks 8 long, the tensor has 7"),
        ([1, 1, 7], 2, 7, 1, r"layout \[1, 1, 7\] over 2 ranks makes 1 of 2 chunks 4 long, the tensor has 7"),
        ([1, 1, -7], 4, 7, 2, "makes 2 of 4 chunks 4 long, the tensor has 7"),
        ([2, 3, 5, 6], 2, 65, 2, "makes 2 of 2 chunks 66 long"),
        ([1, 1, 8], 0, 8, 1, "degree >= 1"),
        ([1, 1], 2, 0, 2, "outer, inner, .segments"),
        ([-1, 1, 2, 4], 2, 6, 2, "outer, inner, .segments"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout, degree, size, span, text):
    with pytest.raises(ValueError, match=text):
        chunks.check(layout, degree, size, span=span)
