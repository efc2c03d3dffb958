"""Each op's program for all ranks in lockstep, against the reference; its fake, its refusals, opcheck.

Shapes: B batch, H query heads, G key/value heads, S query tokens, T key tokens, D / E head dims; P ranks on a
mesh [ring, kv_gather, ulysses] = [r, g, u].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spcompile import ops
from spcompile.ops import chunks, gathering, mixing, reference, wire
from spcompile.ops.heads import HeadShare

Cut = tuple[Sequence[int], int]
"""The layout of a token dim at -2, and how many chunks of it a rank holds."""


@dataclass(frozen=True)
class Example:
    """``ranks[r]`` are rank r's arguments, without the group; ``expected[r]`` is its result.

    ``tolerance`` is absolute, 0 where data only moves. ``held`` says which arguments and which results (by place)
    have tokens at dim -2, and how they are cut.
    """

    op: Any
    ranks: Sequence[tuple[Any, ...]]
    expected: Sequence[Any]
    tolerance: float = 0.0
    held: dict[str, Cut] = field(default_factory=dict)
    given: Sequence[Cut] = ()

    def run(self) -> list[Any]:
        program = ops.PROGRAMS[self.op._opoverload]
        return wire.in_lockstep([program(rank, *args) for rank, args in enumerate(self.ranks)], self.ranks[0][-1])

    def differences(self, rank: int, found: Any) -> list[str]:
        """How one rank's result differs from what is expected."""
        return [
            f"rank {rank}, result {i}: {text}"
            for i, (a, b) in enumerate(zip(self.leaves(rank, found), self.leaves(rank), strict=True))
            if (text := _difference(a, b, self.tolerance))
        ]

    def leaves(self, rank: int, found: Any = None) -> list[Tensor]:
        """Results (the expected ones by default) as the reference gives them: of real heads, K/V one per query."""
        leaves = pytree.tree_leaves(self.expected[rank] if found is None else found)
        if self.op is not ops.ulysses_in or found is None:
            return leaves
        q, k, v = leaves
        heads = self.expected[rank][0].shape[-3]
        serves = [i // (q.shape[-3] // k.shape[-3]) for i in range(heads)]
        return [q[..., :heads, :, :], k[..., serves, :, :], v[..., serves, :, :]]


def _difference(a: Tensor, b: Tensor, tolerance: float) -> str | None:
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}"
    if tolerance == 0:
        return None if torch.equal(a, b) else "not bitwise the same"
    off = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    return None if off <= tolerance else f"off by {off:.1e}, allowed {tolerance:.1e}"


# how a tensor lies in memory: as it is, another dim innermost, one batch entry read twice, every other entry


def _plain(x: Tensor) -> Tensor:
    return x


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand(x.shape)


def _spread(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(0)], dim=-1)[..., 0]


MEMORY = [_plain, _transposed, _expanded, _spread]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 100, shape).to(dtype)


# examples


def shard_example(layout=(1, 1, 5, 2), mesh=(1, 1, 2), dim=2, dtype=torch.float32, memory=_plain) -> Example:
    shape = [2, 3, 4]
    shape.insert(dim, chunks.global_extent(layout))
    x = memory(random(*shape, dtype=dtype))
    args = (x, dim, list(layout), list(mesh))
    return Example(ops.shard, [args] * math.prod(mesh), reference.shard(x, dim, layout, mesh))


def unshard_example(layout=(1, 1, 5, 2), mesh=(1, 1, 2), dim=2, dtype=torch.float32, memory=_plain) -> Example:
    shape, degree = [2, 3, 4], math.prod(mesh)
    shape.insert(dim, chunks.local_extent(layout, degree))
    xs = [memory(random(*shape, dtype=dtype)) for _ in range(degree)]
    return Example(
        ops.unshard,
        [(x, dim, list(layout), list(mesh)) for x in xs],
        reference.unshard(xs, dim, layout, mesh),
        held={"x": (layout, 1)},
        given=[(layout, degree)],
    )


def switch_example(
    layout=(1, 1, 5, 2), mesh=(1, 1, 2), dims=(2, 0), new_layout=(1, 1, 3, 1), dtype=torch.float32, memory=_plain
) -> Example:
    """``dims`` are the old and the new one. Padding along the old holds anything."""
    degree, (dim, new_dim) = math.prod(mesh), dims
    shape = [2, 3, 4, 5]
    shape[dim], shape[new_dim] = chunks.local_extent(layout, degree), chunks.global_extent(new_layout)
    xs = [memory(random(*shape, dtype=dtype)) for _ in range(degree)]
    cuts = (dim, list(layout), new_dim, list(new_layout))
    return Example(
        ops.switch,
        [(x, *cuts, list(mesh)) for x in xs],
        reference.switch(xs, *cuts, mesh),
        held={"x": (layout, 1)},
        given=[(layout, degree)],
    )


def in_example(
    layout=(1, 1, 5, 2), kv_layout=(1, 1, 3), mesh=(1, 1, 2), heads=(4, 2), dims=(4, 3), batch=(2,),
    dtype=torch.float32, memory=_plain,
) -> Example:  # fmt: skip
    """``heads`` are (H, G), ``dims`` are (D, E). Padding holds what sharding leaves in it, as in a run."""

    def ranks(num_heads: int, layout: Sequence[int], dim: int) -> list[Tensor]:
        whole = random(*batch, num_heads, chunks.global_extent(layout), dim, dtype=dtype)
        return [memory(x) for x in reference.shard(memory(whole), len(batch) + 1, layout, mesh)]

    qs, ks = ranks(heads[0], layout, dims[0]), ranks(heads[1], kv_layout, dims[0])
    vs = ranks(heads[1], kv_layout, dims[1])
    return Example(
        ops.ulysses_in,
        [(q, k, v, list(layout), list(kv_layout), list(mesh)) for q, k, v in zip(qs, ks, vs, strict=True)],
        reference.ulysses_in(qs, ks, vs, layout, kv_layout, mesh),
        held={"q": (layout, 1), "k": (kv_layout, 1), "v": (kv_layout, 1)},
        given=[(layout, mesh[2]), (kv_layout, mesh[2]), (kv_layout, mesh[2])],
    )


def out_example(
    layout=(1, 1, 5, 2), mesh=(1, 1, 2), heads=4, dim=4, batch=(2,), dtype=torch.float32, memory=_plain
) -> Example:
    degree, width = math.prod(mesh), mesh[2]
    shape = (*batch, HeadShare(heads, heads, width).local, chunks.extent(layout, degree, width), dim)
    xs = [memory(random(*shape, dtype=dtype)) for _ in range(degree)]
    return Example(
        ops.ulysses_out,
        [(x, heads, list(layout), list(mesh)) for x in xs],
        reference.ulysses_out(xs, heads, layout, mesh),
        held={"o": (layout, width)},
        given=[(layout, 1)],
    )


def gather_example(
    layout=(1, 1, 5, 2), mesh=(1, 2, 1), heads=2, dims=(4, 3), batch=(2,), dtype=torch.float32, memory=_plain
) -> Example:
    degree, (_, gather, width) = math.prod(mesh), mesh
    tokens = chunks.extent(layout, degree, width)
    ks, vs = ([memory(random(*batch, heads, tokens, d, dtype=dtype)) for _ in range(degree)] for d in dims)
    return Example(
        ops.kv_gather,
        [(k, v, None, list(layout), list(mesh)) for k, v in zip(ks, vs, strict=True)],
        reference.kv_gather(ks, vs, layout, mesh),
        held={"k": (layout, width), "v": (layout, width)},
        given=[(layout, gather * width)] * 2,
    )


def attention_example(
    layout=(1, 1, 5, 2), kv_layout=None, mesh=(2, 1, 1), heads=(2, 1), dims=(4, 3), batch=(2,),
    mask=None, causal=False, scale=0.7, kernel="math", dtype=torch.float32, memory=_plain,
) -> Example:  # fmt: skip
    """Ranks along the Ulysses axis hold heads of their own. ``mask`` is the whole one; ``heads`` are (H, G)."""
    degree, (_, gather, width) = math.prod(mesh), mesh
    kv_layout = layout if kv_layout is None else kv_layout
    shapes = [
        (*batch, heads[0], chunks.global_extent(layout), dims[0]),
        (*batch, heads[1], chunks.global_extent(kv_layout), dims[0]),
        (*batch, heads[1], chunks.global_extent(kv_layout), dims[1]),
    ]
    held = [(layout, width), (kv_layout, gather * width), (kv_layout, gather * width)]
    ranks: list[Any] = [None] * degree
    expected: list[Any] = [None] * degree
    own_error = scale_of_output = 0.0
    for column in range(width):
        whole = [memory(random(*shape, dtype=dtype)) for shape in shapes]
        exact = reference.attention(*whole, mask, causal, scale)
        alone, _ = ops.kernels.attend("math", *whole, mask, causal, scale, False)
        own_error = max(own_error, float((alone.double() - exact).abs().max()))
        scale_of_output = max(scale_of_output, float(exact.abs().max()))
        pieces = [_blocks(x, *cut, degree) for x, cut in zip(whole, held, strict=True)]
        outs = _blocks(exact.to(dtype), layout, width, degree)
        rows = None if mask is None or mask.shape[-2] == 1 else _blocks(mask, layout, width, degree)
        for rank in range(column, degree, width):
            q, k, v = (memory(p[rank // span]) for p, (_, span) in zip(pieces, held, strict=True))
            my_mask = mask if rows is None else rows[rank // width]
            options = (list(layout), list(kv_layout), causal, scale, kernel, list(mesh))
            ranks[rank], expected[rank] = (q, k, v, my_mask, *options), outs[rank // width]
    tolerance = 2 * own_error + 4 * torch.finfo(dtype).eps * scale_of_output
    named = dict(zip("qkv", held, strict=True))
    return Example(ops.attention, ranks, expected, tolerance, named, [(layout, width)])


def _blocks(x: Tensor, layout: Sequence[int], span: int, degree: int) -> list[Tensor]:
    return reference.blocks(x, x.dim() - 2, layout, degree, span)


def mask_example(
    layout=(1, 1, 5, 2), mesh=(1, 2, 2), shape=(2, 4, 7, 3), heads=4, dtype=torch.float32, memory=_plain
) -> Example:
    """``shape`` is the whole mask's. Padding heads get the first head's."""
    degree, width = math.prod(mesh), mesh[2]
    mask = memory(random(*shape, dtype=dtype))
    rows = _blocks(mask, layout, width, degree) if shape[-2] > 1 else [mask] * (degree // width)
    by_heads = len(shape) > 2 and shape[-3] == heads > 1
    share = HeadShare(heads, heads, width)

    def of_rank(rank: int) -> Tensor:
        start, end = share.queries(rank % width)
        part = rows[rank // width]
        if not by_heads or width == 1:
            return part
        return torch.cat([part[..., start:end, :, :], *[part[..., :1, :, :]] * (share.local - end + start)], -3)

    args = (mask, heads, list(layout), list(mesh))
    return Example(ops.local_mask, [args] * degree, [of_rank(r) for r in range(degree)])


def _chunks(layout, mesh, dim=2, dtype=torch.float32, memory=_plain) -> list[Tensor]:
    """Every rank's chunk of a tensor with a cut dim."""
    shape = [2, 3, 4]
    shape.insert(dim, chunks.global_extent(layout))
    return [memory(x) for x in reference.shard(random(*shape, dtype=dtype), dim, layout, mesh)]


def reduce_example(layout=(1, 1, 8), mesh=(1, 1, 2), how="sum", dtype=torch.float32, memory=_plain) -> Example:
    xs = _chunks(layout, mesh, dtype=dtype, memory=memory)
    return Example(ops.all_reduce, [(x, how, list(mesh)) for x in xs], reference.all_reduce(xs, how), tolerance=1e-5)


def fill_example(layout=(2, 3, 5, -2), mesh=(1, 1, 2), fill=7.0, dtype=torch.float32, memory=_plain) -> Example:
    xs = _chunks(layout, mesh, dtype=dtype, memory=memory)
    args = [(x, 2, list(layout), fill, list(mesh)) for x in xs]
    return Example(ops.fill_padding, args, reference.fill_padding(xs, 2, layout, fill))


def cumsum_example(layout=(1, 1, 5, 2), mesh=(1, 1, 2), dtype=torch.float32, memory=_plain) -> Example:
    xs = _chunks(layout, mesh, dtype=dtype, memory=memory)
    args = [(x, 2, list(layout), list(mesh)) for x in xs]
    return Example(ops.cumsum, args, reference.cumsum(xs, 2, layout, mesh), tolerance=1e-4)


def halo_example(
    layout=(1, 1, 9), mesh=(1, 1, 2), around=(1, 1), wraps=False, dtype=torch.float32, memory=_plain
) -> Example:
    xs = _chunks(layout, mesh, dtype=dtype, memory=memory)
    args = [(x, 2, list(layout), *around, wraps, list(mesh)) for x in xs]
    return Example(ops.halo, args, reference.halo(xs, 2, layout, *around, wraps))


def pick_example(layout=(1, 1, 5, -2, 3), mesh=(1, 1, 2), dtype=torch.float32, memory=_plain) -> Example:
    xs = _chunks(layout, mesh, dtype=dtype, memory=memory)
    index = torch.randint(0, chunks.global_extent(layout), (2, 3, 6, 4))
    args = [(x, index, 2, list(layout), list(mesh)) for x in xs]
    return Example(ops.pick, args, reference.pick(xs, index, 2, layout))


def rows_example(layout=(1, 1, 5, -2, 3), mesh=(1, 1, 2), wraps=True, dtype=torch.int64, memory=_plain) -> Example:
    total = chunks.global_extent(layout)
    index = memory(torch.randint(-total if wraps else 0, total, (2, 3, 6, 4)))
    args = (index, list(layout), wraps, list(mesh))
    return Example(ops.local_rows, [args] * math.prod(mesh), reference.local_rows(index, layout, wraps, mesh))


EXAMPLES: dict[str, Callable[..., Example]] = {
    "shard": shard_example,
    "unshard": unshard_example,
    "switch": switch_example,
    "ulysses_in": in_example,
    "ulysses_out": out_example,
    "kv_gather": gather_example,
    "attention": attention_example,
    "local_mask": mask_example,
    "all_reduce": reduce_example,
    "fill_padding": fill_example,
    "cumsum": cumsum_example,
    "halo": halo_example,
    "pick": pick_example,
    "local_rows": rows_example,
}
MESHES = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]

every_op = pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())
MIXING = ("all_reduce", "fill_padding", "cumsum", "halo", "pick", "local_rows")
"""Ops whose padding, order and neighbours have tests of their own."""
every_op_that_sends = pytest.mark.parametrize(
    "make", [m for name, m in EXAMPLES.items() if name not in ("shard", "local_mask", *MIXING)]
)
every_op_of_segments = pytest.mark.parametrize("make", [m for name, m in EXAMPLES.items() if name != "halo"])
every_mesh = pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "x".join(map(str, m)))
alone = (1, 1, 1)


def usable(make: Callable[..., Example], mesh: Sequence[int]) -> bool:
    """A mask that every rank needs whole is refused, and nothing is left of it to test."""
    return make is not mask_example or math.prod(mesh) > 1


def assert_right(example: Example) -> None:
    differences = [d for rank, found in enumerate(example.run()) for d in example.differences(rank, found)]
    assert not differences, "\n".join(differences)


def test_every_op_has_an_example_here():
    assert {make().op._opoverload for make in EXAMPLES.values()} == set(ops.PROGRAMS) - {
        ops.kv_gather_start._opoverload
    }


# values


@every_op
@every_mesh
def test_equals_the_reference_on_every_mesh(make, mesh):
    assert_right(make(mesh=mesh))


@every_op_of_segments
@every_mesh
def test_equals_the_reference_where_a_segment_is_mirrored(make, mesh):
    assert_right(make(mesh=mesh, layout=(1, 1, 4, -3)))


@every_op
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_reference_in_any_memory(make, dtype, memory):
    assert_right(make(dtype=dtype, memory=memory))


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("make", [shard_example, unshard_example])
def test_shard_and_unshard_take_any_dtype(make, dtype, memory):
    assert_right(make(dtype=dtype, memory=memory))


@every_mesh
@pytest.mark.parametrize("shape", [(2, 4, 7, 3), (4, 7, 1), (7, 3), (2, 1, 7, 3), (2, 4, 1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_local_mask_cuts_heads_and_rows(mesh, shape, dtype):
    heads_cut = len(shape) > 2 and shape[-3] == 4 and mesh[2] > 1
    rows_cut = shape[-2] > 1 and mesh[2] < math.prod(mesh)
    if heads_cut or rows_cut:
        assert_right(mask_example(mesh=mesh, shape=shape, dtype=dtype))


MASKS = {
    "bool rows and keys": lambda s, t: torch.rand(s, t) > 0.4,
    "bool keys": lambda s, t: (torch.rand(2, 1, 1, t) > 0.4).index_fill(-1, torch.tensor(0), True),
    "additive of heads": lambda s, t: torch.randn(1, 2, s, t),
    "additive rows": lambda s, t: torch.randn(s, 1),
    "nothing to see for some rows": lambda s, t: (torch.arange(s) % 3 > 0)[:, None].expand(s, t),
    "nothing to see in the first keys": lambda s, t: torch.arange(t).expand(s, t) >= t // 2,
}


@every_mesh
@pytest.mark.parametrize("make_mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
def test_attention_takes_masks(mesh, make_mask, kernel):
    layout, kv_layout = (1, 1, 5, 2), (1, 1, 3, 6)
    dims = (4, 4) if kernel == "cpu_flash" else (4, 3)
    assert_right(attention_example(layout, kv_layout, mesh, mask=make_mask(7, 9), kernel=kernel, dims=dims))


@every_mesh
@pytest.mark.parametrize("layout", [(1, 1, 7), (1, 1, 5, 2), (1, 1, 4, -4), (1, 1, 5, -3, 1), (1, 1, 16)], ids=str)
@pytest.mark.parametrize("kernel", ["math", "cpu_flash"])
def test_causal_attention_goes_by_places_in_the_whole_sequence(mesh, layout, kernel):
    dims = (4, 4) if kernel == "cpu_flash" else (4, 3)
    assert_right(attention_example(layout, mesh=mesh, causal=True, kernel=kernel, dims=dims))


@every_mesh
def test_attention_is_as_exact_as_unsharded_in_float64(mesh):
    example = attention_example((1, 1, 9, 4), mesh=mesh, dtype=torch.float64)
    assert example.tolerance < 1e-13
    assert_right(example)


meshes = st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
segments = st.lists(st.integers(-9, 9), min_size=1, max_size=3).filter(any)
token_layouts = segments.map(lambda s: [1, 1, *s])
cuts = st.tuples(st.integers(1, 3), st.integers(1, 3), segments).map(lambda t: [t[0], t[1], *t[2]])
batches = st.lists(st.integers(1, 2), max_size=2).map(tuple)
grouped_heads = st.tuples(st.integers(1, 3), st.integers(1, 4)).map(lambda t: (t[0] * t[1], t[1]))


@given(cuts, meshes, st.integers(0, 3), st.sampled_from([shard_example, unshard_example]))
def test_shard_and_unshard_equal_the_reference_for_any_layout(layout, mesh, dim, make):
    assert_right(make(layout=layout, mesh=mesh, dim=dim))


@given(cuts, cuts, meshes, st.permutations(range(4)))
def test_switch_equals_the_reference_for_any_layouts(layout, new_layout, mesh, dims):
    assert_right(switch_example(layout, mesh, dims[:2], new_layout))


@given(cuts, cuts, meshes, st.permutations(range(4)))
def test_switching_back_undoes_it(layout, new_layout, mesh, dims):
    there = switch_example(layout, mesh, dims[:2], new_layout)
    shape = [2, 3, 4, 5]
    shape[dims[0]], shape[dims[1]] = chunks.global_extent(layout), chunks.global_extent(new_layout)
    chunked = reference.shard(random(*shape), dims[0], layout, mesh)
    for args, x in zip(there.ranks, chunked, strict=True):
        args[0].copy_(x)
    program = ops.PROGRAMS[ops.switch._opoverload]
    back = [program(r, y, dims[1], new_layout, dims[0], layout, mesh) for r, y in enumerate(there.run())]
    for found, x in zip(wire.in_lockstep(back, mesh), chunked, strict=True):
        assert torch.equal(found, x)


@given(token_layouts, token_layouts, meshes, grouped_heads, st.integers(1, 5), batches)
def test_ulysses_in_equals_the_reference_for_any_shape(q_layout, kv_layout, mesh, heads, value_dim, batch):
    assert_right(in_example(q_layout, kv_layout, mesh, heads, dims=(4, value_dim), batch=batch))


@given(token_layouts, meshes, st.integers(1, 5), st.integers(1, 5), batches)
def test_ulysses_out_equals_the_reference_for_any_shape(layout, mesh, heads, dim, batch):
    assert_right(out_example(layout, mesh, heads, dim, batch))


@given(token_layouts, meshes, st.integers(1, 3), batches)
def test_kv_gather_equals_the_reference_for_any_shape(layout, mesh, heads, batch):
    assert_right(gather_example(layout, mesh, heads, batch=batch))


@given(token_layouts, token_layouts, meshes, grouped_heads, st.booleans(), batches)
def test_attention_equals_the_reference_for_any_shape(q_layout, kv_layout, mesh, heads, causal, batch):
    kv_layout = q_layout if causal else kv_layout
    assert_right(attention_example(q_layout, kv_layout, mesh, heads, batch=batch, causal=causal))


@given(token_layouts, meshes, st.integers(1, 5))
def test_ulysses_out_undoes_ulysses_in(layout, mesh, heads):
    entering = in_example(layout, layout, mesh, (heads, heads))
    program = ops.PROGRAMS[ops.ulysses_out._opoverload]
    blocks = [program(r, q, heads, layout, list(mesh)) for r, (q, _, _) in enumerate(entering.run())]
    for left, args in zip(wire.in_lockstep(blocks, mesh), entering.ranks, strict=True):
        assert torch.equal(left, args[0])


def is_padding(cut: Cut, rank: int, degree: int) -> Tensor:
    """Which tokens of a rank's block are padding."""
    layout, span = cut
    found = []
    for n in layout[2:]:
        _, count = chunks.first_token(n, degree, span, rank // span)
        found.append(torch.arange(chunks.block_tokens(n, degree, span)) >= count)
    return torch.cat(found)


@every_op_that_sends
@every_mesh
@pytest.mark.parametrize("layout", [(1, 1, 5, 2), (1, 1, 5, -1)], ids=str)
def test_what_padding_holds_never_reaches_a_real_token(make, mesh, layout):
    examples = [make(mesh=mesh, layout=layout)]
    if make is attention_example:
        examples.append(make(mesh=mesh, layout=layout, causal=True))
    names = [a.name for a in examples[0].op._opoverload._schema.arguments]
    for example in examples:
        for rank, args in enumerate(example.ranks):
            for name, cut in example.held.items():
                args[names.index(name)][:, :, is_padding(cut, rank, math.prod(mesh))] = torch.nan
        for rank, results in enumerate(example.run()):
            for result, cut in zip(pytree.tree_leaves(results), example.given, strict=True):
                assert not result[:, :, ~is_padding(cut, rank, math.prod(mesh))].isnan().any()


@every_op
@pytest.mark.parametrize("mesh", [alone, (1, 1, 2), (1, 2, 1), (2, 1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_inputs_are_neither_returned_nor_changed(make, mesh, causal):
    if not usable(make, mesh):
        return
    options = {mask_example: dict(shape=(2, 4, 4, 3)), attention_example: dict(causal=causal, heads=(2, 2))}
    example = make(layout=(1, 1, 4), mesh=mesh, **options.get(make, {}))
    inputs = [x for x in pytree.tree_leaves(example.ranks) if isinstance(x, Tensor)]
    before = [x.clone() for x in inputs]
    memory = {x.untyped_storage().data_ptr() for x in inputs}
    for result in pytree.tree_leaves(example.run()):
        assert result.untyped_storage().data_ptr() not in memory
    for x, saved in zip(inputs, before, strict=True):
        assert torch.equal(x, saved)


# heads


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_each_real_query_head_gets_the_head_it_attends_to(group, num_kv_heads, degree):
    share = HeadShare(group * num_kv_heads, num_kv_heads, degree)
    seen = []
    for rank in range(degree):
        start, end = share.queries(rank)
        received = range(share.keys(rank), share.keys(rank) + share.sent)
        assert received.start >= 0
        assert received.stop <= num_kv_heads
        assert len(share.index(rank)) == share.local
        for local, head in enumerate(range(start, end)):
            assert received[share.index(rank)[local]] == head // group
            if share.uniform:
                assert received[local // (share.local // share.local_kv)] == head // group
        seen += range(start, end)
    assert seen == list(range(share.num_heads))
    assert share.wasted == pytest.approx(1 - share.num_heads / (share.local * degree))


@pytest.mark.parametrize(
    ("heads", "degree", "sent", "local_kv"),  # where runs do not line up, one K/V head per query head on arrival
    [
        ((8, 8), 4, 2, 2),
        ((8, 1), 8, 1, 1),
        ((8, 2), 4, 1, 1),
        ((12, 3), 2, 2, 6),
        ((12, 3), 4, 2, 3),
        ((6, 6), 4, 2, 2),
    ],
)
def test_heads_are_sent_unexpanded(heads, degree, sent, local_kv):
    share = HeadShare(*heads, degree)
    assert share.sent == sent
    assert share.local_kv == local_kv


def test_query_heads_that_do_not_share_are_refused():
    with pytest.raises(ValueError, match="7 query heads cannot share 2 key/value heads equally"):
        HeadShare(7, 2, 2)


# fakes


def fake_result(example: Example, rank: int = 0) -> list[Tensor]:
    with FakeTensorMode() as mode:
        args = pytree.tree_map_only(Tensor, mode.from_tensor, example.ranks[rank])
        return pytree.tree_leaves(example.op(*args, "no such group"))


@every_op
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("mesh", [alone, *MESHES], ids=lambda m: "x".join(map(str, m)))
def test_the_fake_has_the_real_shape_strides_and_dtype(make, mesh, memory):
    if not usable(make, mesh):
        return
    example = make(mesh=mesh, memory=memory, dtype=torch.bfloat16)
    for real, fake in zip(pytree.tree_leaves(example.run()[0]), fake_result(example), strict=True):
        assert (real.shape, real.stride(), real.dtype) == (fake.shape, fake.stride(), fake.dtype)


@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (6, 3), (1, 1), (5, 1)], ids=str)
@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 1, 4), (2, 1, 3)], ids=str)
def test_the_fake_of_ulysses_knows_heads_that_do_not_divide(heads, mesh):
    example = in_example(mesh=mesh, heads=heads)
    fakes = [x.shape for x in fake_result(example)]
    assert all([x.shape for x in results] == fakes for results in example.run())


def _with(example: Example, **changes: Any) -> Example:
    """The example with some of the op's arguments changed on every rank."""
    names = [a.name for a in example.op._opoverload._schema.arguments]
    new = [tuple(changes.get(n, a) for n, a in zip(names, args, strict=False)) for args in example.ranks]
    return Example(example.op, new, example.expected)


REFUSED = {
    "shard of another length": (_with(shard_example(), layout=[1, 1, 8]), "makes 2 of 2 chunks 8 long, the tensor ha"),
    "shard without segments": (_with(shard_example(), layout=[1, 1]), "outer, inner, .segments"),
    "shard over no ranks": (_with(shard_example(), mesh=[1, 0, 1]), "degree >= 1"),
    "unshard of another length": (_with(unshard_example(), layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long"),
    "switch to the same dim": (_with(switch_example(), new_dim=2), "from dim 2 to dim 2: want two dims"),
    "switch of another length": (_with(switch_example(), layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long"),
    "switch to another length": (_with(switch_example(), new_layout=[1, 1, 9]), "makes 2 of 2 chunks 9 long"),
    "heads that cannot share": (
        _with(in_example(), k=random(2, 3, 2, 4), v=random(2, 3, 2, 3)),
        "4 query heads cannot share 3 key/value heads equally",
    ),
    "heads of k and v": (_with(in_example(), v=random(2, 4, 2, 3)), "k has 2 heads and v 4: want the same"),
    "dtypes": (_with(in_example(), v=random(2, 2, 2, 3).double()), "v is torch.float64 on cpu, q is torch.float32"),
    "no heads": (_with(in_example(), k=random(4, 4)), r"k has shape \(4, 4\): want \[..., heads, tokens, head_dim\]"),
    "a mesh of two": (_with(in_example(), mesh=[1, 2]), r"mesh \[1, 2\]: want \[ring, kv_gather, ulysses\]"),
    "length of q": (_with(in_example(), q_layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long, the tensor has 4"),
    "length of k": (_with(in_example(), kv_layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long, the tensor has 2"),
    "no heads out": (_with(out_example(), o=random(7, 4)), r"o has shape \(7, 4\): want \[..., 2 heads, tokens"),
    "heads of o": (_with(out_example(), num_heads=6), "want .*3 heads, tokens, head_dim"),
    "length of o": (_with(out_example(), q_layout=[1, 1, 9]), "makes 2 of 2 chunks 9 long, the tensor has 7"),
    "dtypes to gather": (
        _with(gather_example(), v=random(2, 2, 4, 3).half()),
        "k is torch.float32 on cpu, v is",
    ),
    "length to gather": (_with(gather_example(), kv_layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long, the tensor has 4"),
    "queries": (_with(attention_example(), q_layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long, the tensor has 4"),
    "keys": (_with(attention_example(), kv_layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long, the tensor has 4"),
    "dtypes to attend": (_with(attention_example(), k=random(2, 1, 4, 4).double()), "key or value is torch.float64"),
    "heads to attend": (_with(attention_example(heads=(4, 2)), k=random(2, 3, 4, 4)), "4 query heads cannot share 3"),
    "mask and causal": (_with(attention_example(causal=True), mask=torch.ones(4, 7) > 0), "a mask and causal at once"),
    "columns of the mask": (_with(attention_example(), mask=torch.ones(4, 4)), "mask has 4 columns for 7 keys"),
    "rows of the mask": (_with(attention_example(), mask=torch.ones(7, 7)), "mask has 7 rows for 4 queries"),
    "a mask of one dim": (_with(mask_example(), mask=torch.ones(7)), r"mask has shape \(7,\): want \[..., queries, ke"),
    "rows to cut": (_with(mask_example(), mask=torch.ones(5, 7)), "mask has 5 rows for 7 queries"),
    "how to reduce": (_with(reduce_example(), how="mean"), "all_reduce by 'mean': want 'sum', 'max' or 'min'"),
    "length to fill": (_with(fill_example(), layout=[1, 1, 9]), "makes 1 of 2 chunks 5 long, the tensor has"),
    "groups to sum": (_with(cumsum_example((1, 1, 8)), layout=[2, 1, 3]), "want one token after the other"),
    "runs with neighbours": (_with(halo_example(), layout=[1, 1, 5, 4]), "want chunks of neighbours one after the"),
    "rows with neighbours": (_with(halo_example(), before=9), "9 rows before and 1 after of chunks of 5"),
    "padding in a circle": (
        _with(halo_example((1, 1, 7), (1, 1, 4)), before=2, wraps=True),
        "2 rows around a circle whose last rank has 1",
    ),
    "tokens in groups": (_with(rows_example(), layout=[2, 1, 5]), "want one token after the other"),
    "index of another dtype": (_with(rows_example(), index=torch.ones(3)), "index is torch.float32: want torch.int64"),
    "nothing to cut": (_with(mask_example(), mask=torch.ones(1, 7)), "every rank needs the whole mask"),
}


@pytest.mark.parametrize(("example", "text"), REFUSED.values(), ids=REFUSED.keys())
def test_the_op_and_its_fake_refuse_alike(example, text):
    with pytest.raises(ValueError, match=text):
        example.run()
    with pytest.raises(ValueError, match=text):
        fake_result(example)


# one form of every attention call


def call(memory: Callable[[Tensor], Tensor] = _plain, dropout: float = 0.0) -> tuple[Any, ...]:
    q, k, v = (memory(random(2, heads, n, dim)) for heads, n, dim in ((4, 5, 4), (2, 3, 4), (2, 3, 6)))
    return (q, k, v, torch.randn(5, 3), dropout, False, 0.7)


@pytest.mark.parametrize("memory", MEMORY)
def test_attention_call_equals_the_reference(memory):
    q, k, v, mask, _, causal, scale = call(memory)
    found = ops.attention_call(q, k, v, mask, 0.0, causal, scale)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), reference.attention(q, k, v, mask, causal, scale), rtol=0, atol=1e-6)


@pytest.mark.parametrize("memory", MEMORY)
def test_opcheck_of_attention_call(memory):
    torch.library.opcheck(ops.attention_call, call(memory))


def test_attention_call_cannot_draw_dropout():
    with pytest.raises(ValueError, match=r"dropout=0\.1: only the captured op can draw it"):
        ops.attention_call(*call(dropout=0.1))


# torch's own checks


@every_op
@pytest.mark.parametrize("memory", MEMORY)
def test_opcheck_in_a_world_of_one(make, memory, world_of_one):
    if usable(make, alone):
        example = make(mesh=alone, memory=memory)
        torch.library.opcheck(example.op, (*example.ranks[0], world_of_one))


@every_op
@pytest.mark.parametrize("mesh", [(1, 1, 4), (1, 4, 1), (4, 1, 1), (2, 1, 2)], ids=lambda m: "x".join(map(str, m)))
def test_opcheck_of_schema_and_fake_in_a_world_of_four(make, mesh, fake_group):
    example = make(mesh=mesh)
    utils = ("test_schema", "test_faketensor")  # the fake group sends nothing, so values mean nothing
    torch.library.opcheck(example.op, (*example.ranks[0], fake_group(4).group_name), test_utils=utils)


@every_op
def test_the_op_runs_its_program_in_a_world_of_one(make, world_of_one):
    if usable(make, alone):
        example = make(mesh=alone)
        assert example.differences(0, example.op(*example.ranks[0], world_of_one)) == []


@every_mesh
def test_a_gather_that_was_started_gives_the_same(mesh):
    example = gather_example(mesh=mesh, layout=(1, 1, 8 * math.prod(mesh)))
    starts = [gathering.start_program(r, k, v, *rest) for r, (k, v, _, *rest) in enumerate(example.ranks)]
    tickets = wire.in_lockstep(starts, mesh)
    ends = [
        gathering.program(r, k, v, t, *rest)
        for r, ((k, v, _, *rest), t) in enumerate(zip(example.ranks, tickets, strict=True))
    ]
    for r, result in enumerate(wire.in_lockstep(ends, mesh)):
        assert example.differences(r, result) == []


def test_a_ticket_can_be_handed_in_once(world_of_one):
    k, v, _, *rest = gather_example(mesh=alone).ranks[0]
    ticket = ops.kv_gather_start(k, v, *rest, world_of_one)
    ops.kv_gather(k, v, ticket, *rest, world_of_one)
    with pytest.raises(KeyError):
        ops.kv_gather(k, v, ticket, *rest, world_of_one)


def test_opcheck_of_starting_a_gather(world_of_one):
    k, v, _, *rest = gather_example(mesh=alone).ranks[0]
    torch.library.opcheck(ops.kv_gather_start, (k, v, *rest, world_of_one))


@pytest.mark.parametrize("how", ["sum", "max", "min"])
@every_mesh
def test_all_reduce_equals_the_reference(how, mesh):
    assert_right(reduce_example(mesh=mesh, how=how))


@pytest.mark.parametrize("layout", [(1, 1, 5), (1, 1, 5, -2), (1, 1, 1), (1, 1, 3, 0, 7)])
@every_mesh
def test_cumsum_equals_the_reference(layout, mesh):
    assert_right(cumsum_example(layout, mesh, dtype=torch.float64))


@pytest.mark.parametrize("around", [(1, 1), (2, 0), (0, 2), (0, 0), (2, 1)])
@pytest.mark.parametrize("layout", [(1, 1, 16), (1, 3, 13), (1, 1, 9)])
@every_mesh
def test_halo_equals_the_reference(around, layout, mesh):
    if max(around) <= chunks.local_extent(layout, math.prod(mesh)):
        assert_right(halo_example(layout, mesh, around))


@pytest.mark.parametrize("around", [(1, 1), (2, 0), (0, 2), (1, 2)])
@pytest.mark.parametrize("layout", [(1, 1, 24), (1, 3, 24), (1, 1, 23), (1, 2, 15)])
@every_mesh
def test_halo_in_a_circle_equals_the_reference(around, layout, mesh):
    assert_right(halo_example(layout, mesh, around, wraps=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@every_mesh
def test_pick_equals_the_reference(dtype, mesh):
    assert_right(pick_example(mesh=mesh, dtype=dtype))


@pytest.mark.parametrize(("wraps", "wrong"), [(True, 10), (True, -11), (False, -1)])
def test_an_index_out_of_range_is_one_here_too(wraps, wrong):
    index = torch.tensor([3, wrong])
    with pytest.raises(IndexError):
        wire.in_lockstep([mixing.local_rows_program(0, index, [1, 1, 5, 5], wraps, [1, 1, 1])], (1, 1, 1))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool])
def test_infinity_fills_integers_with_their_limits(dtype):
    _, (x, dim, layout, _, mesh) = fill_example(fill=0, dtype=dtype).ranks
    (out,) = wire.in_lockstep([mixing.fill_padding_program(1, x, dim, layout, -math.inf, mesh)], (1, 1, 1))
    assert out.min() == (0 if dtype == torch.bool else torch.iinfo(dtype).min)


# lockstep


def _gather(x, axis=None):
    gather = wire.AllGather(x, axis)
    yield gather
    return (yield wire.Wait(gather))


def _silent(x):
    return x
    yield


def _exchange(x, axis=None):
    return (yield wire.AllToAll(x, axis))


def _around(x, hops):
    seen = [x]
    for _ in range(hops):
        shift = wire.Shift(seen[-1], "ring")
        assert (yield shift) is None
        seen.append((yield wire.Wait(shift)))
    return torch.cat(seen).tolist()


def test_lockstep_answers_like_the_collectives():
    xs = [torch.tensor([[r, 0], [r, 1]]) for r in range(2)]
    mesh = [1, 1, 2]
    assert wire.in_lockstep([_exchange(x) for x in xs], mesh)[1].tolist() == [[0, 1], [1, 1]]
    assert torch.equal(wire.in_lockstep([_gather(x) for x in xs], mesh)[1], torch.stack(xs))


def test_lockstep_answers_along_an_axis():
    mesh, xs = [2, 2, 2], torch.arange(8)
    peers = {"ulysses": [6, 7], "kv_gather": [5, 7], "ring": [3, 7], None: list(range(8))}
    for axis, expected in peers.items():
        assert wire.in_lockstep([_gather(x, axis) for x in xs], mesh)[7].tolist() == expected


def test_a_shift_goes_to_the_next_peer_around_the_ring():
    mesh = [3, 1, 2]
    assert wire.in_lockstep([_around(torch.tensor([r]), 2) for r in range(6)], mesh) == [
        [0, 4, 2], [1, 5, 3], [2, 0, 4], [3, 1, 5], [4, 2, 0], [5, 3, 1],
    ]  # fmt: skip


def test_lockstep_says_where_real_ranks_would_hang():
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks ask for .*AllGather.*: real ranks would hang"):
        wire.in_lockstep([_gather(torch.zeros(2)), _silent(torch.zeros(2))], [1, 1, 2])


@pytest.mark.parametrize(
    ("other", "text"), [(_exchange, "AllToAll"), (lambda x: _gather(x, "ring"), "ring")], ids=["kind", "axis"]
)
def test_lockstep_refuses_ranks_in_different_collectives(other, text):
    with pytest.raises(RuntimeError, match=f"AllGather.*{text}|{text}.*AllGather"):
        wire.in_lockstep([_gather(torch.zeros(2)), other(torch.zeros(2))], [1, 1, 2])
