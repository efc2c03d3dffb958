"""Programs that were once wrong, crashed one rank, or raised something else than an `SPError`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import SelfAttention, assert_exact, tokens
from torch import nn

import spcompile
from spcompile.testing import simulate
from spcompile.testing.simulate import _Backend, _config

B, S, C = 2, 7, 24
INNER = SelfAttention().double().requires_grad_(False)
TABLE = torch.randn(40, C, dtype=torch.float64)


def x(length: int = S, seed: int = 0) -> torch.Tensor:
    return torch.randn(B, length, C, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cat_of_flattened_batches(a, b):
    return torch.cat([(a + INNER(a)).flatten(0, 1), (b + INNER(b)).flatten(0, 1)], 0) * 1


def cat_of_a_flattened_batch_and_a_whole_value(a, b):
    return torch.cat([(a + INNER(a)).flatten(0, 1), b.flatten(0, 1)], 0) * 1


def keys_and_values_folded_differently(a, b):
    p = (a + INNER(a)).unflatten(-1, (2, -1))
    k, v = p.flatten(1, 2), p.transpose(1, 2).flatten(1, 2)
    q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (k, k, v))
    return F.scaled_dot_product_attention(q, k, v)


def lookup_of_shifted_ids(a, b):
    ids = a[..., 0].abs().long() + 1
    return INNER(a + F.embedding(ids - 1, TABLE))


def lookup_of_normalised_values(a, b):
    h = INNER(a)
    return INNER(h + F.embedding(((h / h.norm(dim=-1, keepdim=True))[..., 0] * 4 + 4).long(), TABLE))


def integer_remainder(a, b):
    whole = INNER(a).abs().ceil().long()
    return INNER(a + (7 * whole) % whole)


def mask_that_is_the_query(a, b):
    q = (a + INNER(a)).unflatten(-1, (4, -1)).transpose(1, 2)[..., : a.shape[1] - 1]
    q = torch.cat([q, q[..., :1]], -1)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=q)


def gradients_switched_on_inside(a, b):
    with torch.enable_grad():
        h = INNER(a)
    return h * 2


PROGRAMS = [
    cat_of_flattened_batches, cat_of_a_flattened_batch_and_a_whole_value, keys_and_values_folded_differently,
    lookup_of_shifted_ids, lookup_of_normalised_values, integer_remainder, mask_that_is_the_query,
    gradients_switched_on_inside,
]  # fmt: skip


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"sp": 4}, {"ring": 3}], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_rank_gives_the_unsharded_answer(program, degrees):
    inputs = (x(), x(5, 1))
    with torch.no_grad():
        want = program(*inputs)
    for out in simulate(program, inputs, **degrees).outputs:
        torch.testing.assert_close(out, want, rtol=0, atol=1e-11)


def test_outputs_that_share_memory_do_so_for_other_inputs_too():
    """What lies in whose memory must not be fixed by where the first call's tensors lay."""
    backend = _Backend(_config(2, {}), 2)
    big = torch.randn(6, S, C, dtype=torch.float64)

    def model(a, b):
        return INNER(a), b[:, 1:]

    compiled = torch.compile(model, backend=backend)
    first, other = big[2:4], x(seed=2)
    with torch.no_grad():
        for a, b in ((first, first[:]), (first, other), (big[0:2], big[4:6])):
            for found, want in zip(compiled(a, b), model(a, b), strict=True):
                torch.testing.assert_close(found, want)
            assert compiled(a, b)[1].untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_reading_memory_by_strides_is_refused_where_sharding_moved_it():
    for model in (
        lambda a: (a + INNER(a))[0][2:].as_strided((3, 8), (8, 1), 0).sin(),
        lambda a: (a + INNER(a))[0].split(2, 0)[0].as_strided((6, C), (C, 1)).sin(),
    ):
        torch._dynamo.reset()
        with pytest.raises(spcompile.UnsupportedGraphError, match="reads memory by strides"):
            simulate(model, (x(),), ulysses=2)


def test_random_numbers_in_a_branch_are_refused_if_nobody_compares_generators():
    def model(a):
        return INNER(a) * torch.cond(a.sum() < 1e9, lambda y: torch.rand_like(y), lambda y: y * 1.0, (a,))

    with pytest.raises(spcompile.UnsupportedGraphError, match="random numbers"):
        simulate(model, (x(),), ulysses=2, check="off")


def test_asserts_stay():
    def model(a):
        torch._assert_async(a.sum() > 1e9)
        return INNER(a)

    with pytest.raises(RuntimeError):
        simulate(model, (x(),), ulysses=2)


def test_vmap_without_attention_passes_and_with_it_is_refused():
    def positions(a):
        return torch.vmap(lambda i: i * 2)(torch.arange(a.shape[1])).to(a.dtype)

    (out, _) = simulate(lambda a: a + positions(a)[:, None], (x(),), sp=2).outputs
    torch.testing.assert_close(out, x() + positions(x())[:, None])
    with pytest.raises(spcompile.UnsupportedGraphError, match="cannot be traced"):
        simulate(lambda a: INNER(a) + positions(a)[:, None], (x(),), sp=2)


def test_one_query_token_alone_is_no_reason_to_refuse():
    token = tokens(1).double()
    run = simulate(INNER, (token,), sp=2)
    torch.testing.assert_close(run.outputs[1], INNER(token))
    assert [a.exchange for a in run.report.attention] == ["replicated"]


@pytest.mark.parametrize("degrees", [{"ring": 2}, {"kv_gather": 2}, {"ring": 3}])
@pytest.mark.parametrize("causal", [False, True])
def test_heads_that_are_not_dense(degrees, causal):
    """CPU flash attention, called below SDPA, takes the last dim for dense."""
    qkv = nn.Linear(16, 48).double()

    def model(x):
        q, k, v = (z.unflatten(-1, (8, 2)).permute(0, 3, 1, 2) for z in qkv(x).chunk(3, -1))  # channels are (d h)
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    assert_exact(model, torch.randn(2, 13, 16).double(), tolerance=1e-13, **degrees)


def test_block_lists_are_not_attention_to_everything():
    """Kernels for GPUs visit the listed blocks only, whatever the mask function says."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    def model(x, counts, indices):
        q, k, v = (x.view(1, 256, 2, 16).transpose(1, 2) * i for i in (1, 2, 3))
        mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=128)
        return flex_attention(q, k, v, block_mask=mask)

    counts = torch.ones(1, 1, 2, dtype=torch.int32)
    indices = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32).view(1, 1, 2, 2)
    with pytest.raises(spcompile.UnsupportedGraphError, match="flex_attention with a score_mod, or a block mask"):
        simulate(model, (torch.randn(1, 256, 32), counts, indices), sp=2)


# what an attack on sums over tokens and on attention by hand found


def heads(a):
    return a.view(2, 13, 2, 4).transpose(1, 2)


def attended(a):
    q = heads(a)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(2, 13, 8)


def tokens8():
    return torch.randn(2, 13, 8).double()


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min, -torch.inf])
@pytest.mark.parametrize(
    "degrees", [{"ring": 2}, {"ring": 3}, {"ring": 2, "ulysses": 2}, {"ulysses": 2, "kernel": "math"}]
)
def test_rows_whose_keys_are_all_masked_by_a_number(degrees, fill):
    """Their scores are all near that number, and a log-sum-exp there has no room for the size of the sum."""
    keep = torch.rand(2, 1, 13, 13) > 0.4
    keep[0, 0, 3] = False
    mask = torch.zeros(keep.shape).masked_fill(~keep, fill)

    def model(a):
        q = heads(a.float())
        return F.scaled_dot_product_attention(q, q, q, mask).transpose(1, 2).reshape(2, 13, 8) + 0

    assert_exact(model, tokens8(), tolerance=2e-3 if fill == -1e4 else 1e-6, **degrees)


@pytest.mark.parametrize("degree", [2, 3, 8])
def test_a_tensor_contracted_with_itself_in_two_layouts(degree):
    def model(a):
        s = attended(a) @ attended(a).mT
        z = s[0]
        both = torch.einsum("ij,jk->", z, z), torch.einsum("bij,bjk->b", s, s), torch.einsum("bst,bts->b", s, s)
        return *both, torch.mm(z.t(), z.t()), s @ s

    assert_exact(model, tokens8(), tolerance=1e-12, degree=degree)


def test_lengths_and_spreads_of_complex_tokens():
    def model(a):
        z = torch.view_as_complex(attended(a).reshape(2, 13, 4, 2))
        return torch.linalg.vector_norm(z, dim=1), z.var(1), z.std(1), z.norm(dim=1), *torch.var_mean(z, 1)

    assert_exact(model, tokens8(), tolerance=1e-12)


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"kv_gather": 2}, {"sp": 3}])
def test_rows_without_keys_are_nan_by_hand_as_without_ranks(degrees):
    keep = torch.rand(2, 1, 13, 13) > 0.4
    keep[0, 0, 3] = False

    def model(a):
        q = heads(a)
        s = (q @ q.mT).masked_fill(~keep, -torch.inf)
        return (s.softmax(-1) @ q).transpose(1, 2).reshape(2, 13, 8)

    a = tokens8()
    for out in simulate(model, (a,), **degrees).outputs:
        torch.testing.assert_close(out, model(a), equal_nan=True)
    with pytest.raises(spcompile.UnsupportedGraphError, match="gives rows without keys what kernels do not"):
        simulate(model, (a,), ring=2)


@pytest.mark.parametrize("shape", [(), (13,), (13, 13), (1, 1, 13)])
@pytest.mark.parametrize("degrees", [{"sp": 2}, {"ulysses": 2}])
def test_masks_of_few_dims_by_hand(shape, degrees):
    def model(a, mask):
        q = heads(a)
        return ((q @ q.mT + mask).softmax(-1) @ q).transpose(1, 2).reshape(2, 13, 8)

    assert_exact(model, tokens8(), torch.randn(shape).double(), tolerance=1e-12, **degrees)


def test_attention_by_hand_that_broadcasts_otherwise():
    def crossed(a):
        q = attended(a).view(2, 13, 2, 4).transpose(1, 2)
        return ((q[:, :1] @ q[:, :1].mT).softmax(-1) @ q[:1]).sum(1)

    def narrow(a):
        q = attended(a).view(2, 13, 2, 4)
        weights = torch.einsum("bshd,bthd->bhst", q[..., :1], q).softmax(-1)
        return (weights @ q.transpose(1, 2)).transpose(1, 2).flatten(2)

    def widened(a, factor):
        q = heads(attended(a)).float()
        return ((q @ q.mT) * factor).softmax(-1).to(q.dtype) @ q

    assert_exact(crossed, tokens8(), tolerance=1e-12)
    assert_exact(narrow, tokens8(), tolerance=1e-12)
    assert_exact(widened, tokens8(), torch.rand(2, 1, 1).double(), tolerance=1e-5)


def test_any_and_all_of_bytes_are_bytes():
    def model(a):
        positive = (attended(a) > 0).to(torch.uint8)
        return positive.any(1), positive.all(1)

    assert_exact(model, tokens8())


# what reading it all again found


@pytest.mark.parametrize(
    "op",
    [
        lambda s, v: (s * 3).to(torch.int32).to(s.dtype).softmax(-1) @ v,
        lambda s, v: s.softmax(-1).to(torch.int64).to(s.dtype) @ v,
        lambda s, v: s.to(torch.bfloat16).to(s.dtype).softmax(-1) @ v,
    ],
    ids=["whole scores", "whole weights", "coarse scores"],
)
def test_casts_that_change_values_are_part_of_the_formula(op):
    def model(a):
        q = heads(attended(a))
        return op(q @ q.mT, q)

    assert_exact(model, tokens8(), tolerance=1e-12)


def test_an_index_out_of_range_is_an_error_as_without_ranks():
    index = torch.tensor([-1])
    long = torch.randn(2, 40, 8).double()

    def model(a):
        y = F.scaled_dot_product_attention(*(a.view(2, 40, 2, 4).transpose(1, 2),) * 3).transpose(1, 2).flatten(2)
        return y.index_select(1, index)

    with pytest.raises((IndexError, RuntimeError)):
        model(long)
    with pytest.raises((IndexError, RuntimeError)):
        simulate(model, (long,), sp=2)


def test_the_fused_encoder_layer_takes_any_number_in_a_mask_for_true():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    mask = torch.zeros(13, 13).double().index_fill(1, torch.tensor([2, 5]), 0.5)
    assert_exact(lambda a: layer(a, src_mask=mask), tokens8(), tolerance=1e-12)


# what the choice of factors brought


@pytest.mark.parametrize(
    "op",
    [
        lambda y: torch.addmm(torch.zeros(()).double(), y.flatten(0, 1), torch.eye(C).double()).view_as(y),
        lambda y: torch.baddbmm(y.new_zeros(()), y, torch.eye(C).double().expand(B, C, C)),
        lambda y: torch.einsum(",bsc->bsc", torch.tensor(2.0).double(), y),
        lambda y: y * torch.einsum(",->", torch.tensor(2.0), torch.tensor(3.0)),
    ],
    ids=["addmm", "baddbmm", "einsum", "einsum of scalars"],
)
def test_a_product_may_have_an_operand_without_dims(op):
    assert_exact(lambda a: op(a + INNER(a)), x(), tolerance=1e-12, sp=2)


class Noisy(nn.Module):
    """Frames of which one value goes with noise: cutting them would cut the noise."""

    def forward(self, a):
        a = a + INNER(a.flatten(0, 1)).view(a.shape)
        noisy = a.mean(2) + torch.randn(a.shape[1], C, dtype=a.dtype)
        return a + INNER(a.flatten(0, 1)).view(a.shape), noisy


def test_what_one_factor_may_not_cut_another_may():
    """Nobody compares the generators of ranks."""
    run = simulate(Noisy(), (torch.randn(B, 4, 600, C).double(),), sp=2, check="off")
    assert {entry.exchange for entry in run.report.attention} <= {"kv_gather", "switch"}


@pytest.mark.parametrize("pool", [F.avg_pool2d, F.max_pool2d])
def test_pools_without_a_batch_that_overlap_along_the_tokens(pool):
    small = SelfAttention(8, 2).double().requires_grad_(False)

    def model(a):
        y = (a + small(a))[0].t().reshape(4, 2, -1)
        return pool(y, (2, 3), 2, (0, 1)).reshape(1, 4, -1)

    assert_exact(model, torch.randn(1, 16, 8).double(), tolerance=1e-12, sp=2)


@pytest.mark.parametrize("scale", [2.1, 1.1, 1.01, 2.0])
def test_nearest_upsampling_by_what_the_sizes_do_not_say(scale):
    def model(a):
        y = F.interpolate((a + INNER(a)).mT, scale_factor=scale, mode="nearest").mT
        return y + INNER(y)

    assert_exact(model, x(8), tolerance=1e-12, sp=2)
