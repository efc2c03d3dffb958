"""Layouts: local shapes, borders, cuts, comparable forms, the text for people."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from spcompile.layout import REPLICATED, Origin, Segment, Sharded, describe, missing_cuts, same_tokens
from spcompile.ops import chunks


def sharded(*lengths: int, dim: int = 0, **factors: int) -> Sharded:
    return Sharded(dim, tuple(Segment(n) for n in lengths), **factors)


def rooted(*lengths: int, root: object = "x", start: int = 0, unit: int = 1) -> Sharded:
    """Segments that follow each other in one root, ``unit`` root tokens per token."""
    segments = []
    for n in lengths:
        segments.append(Segment(n, Origin(root, start, unit)))
        start += n * unit
    return Sharded(0, tuple(segments))


def test_a_replicated_value_keeps_its_shape():
    assert REPLICATED.local_shape((2, 7, 3), 4) == [2, 7, 3]


@pytest.mark.parametrize(
    ("layout", "degree", "local"),
    [
        (sharded(8), 2, 4),
        (sharded(7), 2, 4),
        (sharded(7, 13), 4, 2 + 4),
        (sharded(1), 8, 1),
        (sharded(0, 5), 2, 3),
        (sharded(5, outer=2, inner=3), 2, 2 * 3 * 3),
    ],
)
def test_the_local_shape_sums_padded_chunks(layout, degree, local):
    assert layout.local_extent(degree) == local
    assert layout.at(1).local_shape((4, layout.extent, 6), degree) == [4, local, 6]


def test_extent_tokens_spec_and_borders():
    layout = sharded(7, 5, 0, 1, outer=2, inner=3)
    assert (layout.tokens, layout.extent) == (13, 78)
    assert layout.spec() == [2, 3, 7, 5, 0, 1]
    assert layout.borders() == [0, 7, 12, 12, 13]


def test_where_tokens_come_from_is_no_part_of_a_layout():
    assert rooted(4, 4) == sharded(4, 4)
    assert hash(rooted(4, 4)) == hash(sharded(4, 4))
    assert sharded(4, 4) != sharded(8)


def test_splitting_a_segment_keeps_track_of_its_origin():
    head, tail = Segment(10, Origin("x", start=100, unit=3)).split(4)
    assert (head.tokens, head.origin) == (4, Origin("x", 100, 3))
    assert (tail.tokens, tail.origin) == (6, Origin("x", 112, 3))
    assert Segment(10).split(4)[1].origin is None


# inner factors as tokens


def test_inner_is_absorbed_where_nothing_is_padded():
    assert sharded(4, inner=6).absorb_inner(2) == sharded(24)
    assert sharded(4, 8, inner=3, outer=5).absorb_inner(4) == sharded(12, 24, outer=5)


def test_inner_stays_where_a_segment_is_padded():
    layout = sharded(4, 5, inner=6)
    assert layout.absorb_inner(2) is layout


@given(
    st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(0, 8), min_size=1, max_size=3), st.integers(1, 4)
)  # fmt: skip
def test_absorbing_inner_never_moves_a_token(outer, inner, lengths, degree):
    layout = sharded(*lengths, outer=outer, inner=inner)
    absorbed = layout.absorb_inner(degree)
    x = torch.arange(layout.extent)
    for rank in range(degree):
        one, other = (chunks.take(x, 0, lay.spec(), rank, degree) for lay in (layout, absorbed))
        assert torch.equal(one, other)


def test_absorbing_keeps_an_origin_that_counts_in_finer_tokens():
    (segment,) = Sharded(0, (Segment(4, Origin("x", 8, unit=6)),), inner=6).absorb_inner(2).segments
    assert segment.origin == Origin("x", 8, unit=1)
    (segment,) = Sharded(0, (Segment(4, Origin("x", 8, unit=4)),), inner=6).absorb_inner(2).segments
    assert segment.origin is None


# cuts


def test_same_tokens_looks_at_factors_not_at_cuts():
    assert same_tokens(sharded(3, 5), sharded(8))
    assert not same_tokens(sharded(8), sharded(9))
    assert not same_tokens(sharded(4, inner=2), sharded(8))
    assert not same_tokens(sharded(4, outer=2), sharded(8))


def test_a_border_inside_a_segment_is_a_missing_cut():
    assert missing_cuts(rooted(8), [0, 3, 8]) == [("x", 3)]
    assert missing_cuts(rooted(4, 4, start=10), [0, 2, 4, 6]) == [("x", 12), ("x", 16)]


def test_no_cut_is_missing_at_a_border():
    assert missing_cuts(rooted(4, 4), [0, 4, 8]) == []
    assert missing_cuts(sharded(4, 4), [0, 4, 8]) == []


def test_cuts_are_counted_in_the_tokens_of_the_root():
    assert missing_cuts(rooted(8, unit=6, start=12), [3]) == [("x", 12 + 18)]


def test_a_cut_cannot_be_asked_of_nobody():
    assert missing_cuts(sharded(8), [3]) is None


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sets(st.integers(0, 30), max_size=4))
def test_the_missing_cuts_are_all_that_is_missing(lengths, wanted):
    layout = rooted(*lengths)
    assume(all(border <= layout.tokens for border in wanted))
    cuts = {at for _, at in missing_cuts(layout, sorted(wanted)) or ()}
    borders = sorted({*layout.borders(), *cuts})
    finer = rooted(*(end - start for start, end in pairwise(borders)))
    assert missing_cuts(finer, sorted(wanted)) == []
    assert cuts <= wanted


# for people


@pytest.mark.parametrize(
    ("layout", "shape", "text"),
    [
        (REPLICATED, (1, 4608, 64), "1 4608 64"),
        (REPLICATED, (), "scalar"),
        (sharded(512, 4096, dim=1), (1, 4608, 64), "1 (512 + 4096)/2 64"),
        (sharded(7, dim=0, outer=3, inner=5), (105, 8), "(3 (7)/2 5) 8"),
        (sharded(8, dim=1, inner=4), (2, 32), "2 ((8)/2 4)"),
    ],
)
def test_describe(layout, shape, text):
    assert describe(layout, shape, 2) == text
