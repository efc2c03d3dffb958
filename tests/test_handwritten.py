"""Attention written out with matmul and softmax, in the forms that models have it; and what only looks like it.

What is attention is shared as an attention call is. What is not is computed exactly all the same.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_exact, exchanges, regathered, tokens
from test_styles import (
    CASES,
    CONTEXT,
    TOLERANCE,
    Attention,
    B,
    C,
    D,
    DiT,
    H,
    alternating,
    check,
    drawn,
    heads,
    inputs,
    merged,
    randn,
)
from torch import nn

import spcompile
from spcompile.testing import simulate

SCALE = D**-0.5
FINFO_MIN = torch.finfo(torch.float32).min


def folded(x):
    """[B, H, S, D] -> [B * H, S, D]"""
    return x.reshape(-1, *x.shape[2:])


def unfolded(x):
    return x.view(-1, H, *x.shape[1:])


def pads(length, batch=B):
    """True for tokens that are kept, [B, S]: 4 of the first sample are not."""
    return torch.arange(length) < torch.tensor([[length - 4], [length]])


def causal(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


def bias(length):
    """One per head and distance."""
    at = torch.arange(length)
    return -(at[:, None] - at).abs() * torch.logspace(-1, 0, H)[:, None, None]


# forms: q, k, v [B, H, S, D] -> [B, H, S, D]


def scaled_scores(q, k, v):
    return (q @ k.transpose(-2, -1) * SCALE).softmax(-1) @ v


def scaled_query(q, k, v):
    return ((q * SCALE) @ k.mT).softmax(dim=-1) @ v


def both_scaled(q, k, v):
    return F.softmax((q * D**-0.25) @ (k * D**-0.25).mT, dim=-1) @ v


def divided(q, k, v):
    return torch.matmul(torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(q.size(-1)), dim=-1), v)


def divided_by_a_tensor(q, k, v):
    scores = q @ k.mT / torch.sqrt(torch.tensor(D, dtype=q.dtype))
    return scores.softmax(-1) @ v


def unscaled(q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def in_place(q, k, v):
    scores = q @ k.mT
    scores *= SCALE
    return scores.softmax(-1) @ v


def einsum(q, k, v):
    weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def einsum_tokens_before_heads(q, k, v):
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q * SCALE, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).transpose(1, 2)


def einsum_keys_first(q, k, v):
    """Softmax over dim 2 of [B, K, Q, H]."""
    weights = torch.einsum("bhkd,bhqd->bkqh", k, q * SCALE).softmax(1)
    return torch.einsum("bkqh,bhkd->bhqd", weights, v)


def bmm(q, k, v):
    q, k, v = map(folded, (q, k, v))
    return unfolded(torch.bmm(torch.bmm(q * SCALE, k.transpose(1, 2)).softmax(-1), v))


def baddbmm(q, k, v):
    q, k, v = map(folded, (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    scores = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=SCALE)
    return unfolded(torch.bmm(scores.softmax(-1).to(v.dtype), v))


def baddbmm_of_a_mask(q, k, v):
    q, k, v = map(folded, (q, k, v))
    mask = bias(k.shape[1]).repeat(B, 1, 1)
    return unfolded(torch.bmm(torch.baddbmm(mask, q, k.mT, beta=1, alpha=SCALE).softmax(-1), v))


def transposed(q, k, v):
    """Channels before tokens, as in the attention of a VAE."""
    q, k, v = (folded(x).mT.contiguous() for x in (q, k, v))
    weights = F.softmax(torch.bmm(q.permute(0, 2, 1), k) * SCALE, dim=2)
    return unfolded(torch.bmm(v, weights.permute(0, 2, 1)).mT)


def keys_as_rows(q, k, v):
    """k q^T, its softmax over dim -2, and v^T times it."""
    weights = (k @ q.mT * SCALE).softmax(-2)
    return (v.mT @ weights).mT


def upcast(q, k, v):
    return F.softmax((q @ k.mT).float() * SCALE, dim=-1).type_as(q) @ v


def softmax_dtype(q, k, v):
    return F.softmax(q @ k.mT * SCALE, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def in_double(q, k, v):
    return ((q.double() @ k.double().mT * SCALE).softmax(-1) @ v.double()).float()


def dropout_off(q, k, v):
    return F.dropout((q @ k.mT * SCALE).softmax(-1), 0.1, training=False) @ v


def softmax_module(q, k, v):
    return nn.Sequential(nn.Softmax(dim=-1), nn.Dropout(0.1).eval(), nn.Identity())(q @ k.mT * SCALE) @ v


def additive_mask(q, k, v):
    mask = torch.zeros(B, 1, 1, k.shape[2]).masked_fill(~pads(k.shape[2])[:, None, None], FINFO_MIN)
    return (q @ k.mT * SCALE + mask).softmax(-1) @ v


def additive_zero_one(q, k, v):
    mask = (1.0 - pads(k.shape[2])[:, None, None].float()) * -10000.0
    return (q @ k.mT * SCALE + mask).softmax(-1) @ v


def filled_with_infinity(q, k, v):
    return (q @ k.mT * SCALE).masked_fill(~pads(k.shape[2])[:, None, None], -torch.inf).softmax(-1) @ v


def filled_with_the_least(q, k, v):
    return (q @ k.mT * SCALE).masked_fill(~pads(k.shape[2])[:, None, None], FINFO_MIN).softmax(-1) @ v


def filled_in_place(q, k, v):
    scores = q @ k.mT * SCALE
    scores.masked_fill_(~pads(k.shape[2])[:, None, None], -torch.inf)
    return scores.softmax(-1) @ v


def chosen_by_where(q, k, v):
    return torch.where(pads(k.shape[2])[:, None, None], q @ k.mT * SCALE, -torch.inf).softmax(-1) @ v


def causal_filled(q, k, v):
    return (q @ k.mT * SCALE).masked_fill(~causal(k.shape[2]), -torch.inf).softmax(-1) @ v


def causal_added(q, k, v):
    mask = torch.full((k.shape[2], k.shape[2]), -torch.inf).triu(1)
    return (q @ k.mT * SCALE + mask).softmax(-1) @ v


def biased(q, k, v):
    return (q @ k.mT * SCALE + bias(k.shape[2])).softmax(-1) @ v


def biased_and_masked(q, k, v):
    scores = q @ k.mT * SCALE + bias(k.shape[2])
    return scores.masked_fill(~pads(k.shape[2])[:, None, None], -torch.inf).softmax(-1) @ v


def mask_before_the_scale(q, k, v):
    return ((q @ k.mT + bias(k.shape[2])) * SCALE).softmax(-1) @ v


def hugging_face(q, k, v):
    """Heads in the batch; [B, H, S, T] for the mask only."""
    q, k, v = map(folded, (q * SCALE, k, v))
    scores = torch.bmm(q, k.transpose(1, 2))
    mask = torch.zeros(B, 1, 1, k.shape[1]).masked_fill(~pads(k.shape[1])[:, None, None], FINFO_MIN)
    scores = scores.view(B, H, q.shape[1], k.shape[1]) + mask
    weights = F.softmax(scores.view(B * H, q.shape[1], k.shape[1]), dim=-1)
    weights = weights.view(B, H, q.shape[1], k.shape[1]).view(B * H, q.shape[1], k.shape[1])
    return torch.bmm(F.dropout(weights, 0.1, training=False), v).view(B, H, q.shape[1], D)


def llama(q, k, v):
    k, v = (x[:, ::4, None].expand(-1, -1, 4, -1, -1).reshape(x.shape) for x in (k, v))
    weights = torch.matmul(q, k.transpose(2, 3)) * SCALE + torch.full((k.shape[2],) * 2, FINFO_MIN).triu(1)
    return torch.matmul(F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype), v)


def grouped_by_broadcast(q, k, v):
    q, k, v = q.unflatten(1, (3, 4)), k[:, ::4, None], v[:, ::4, None]
    return ((q @ k.mT * SCALE).softmax(-1) @ v).flatten(1, 2)


def stable_by_hand(q, k, v):
    scores = q @ k.mT * SCALE
    scores = (scores - scores.amax(-1, keepdim=True)).exp()
    return (scores / scores.sum(-1, keepdim=True)) @ v


def learned_keys(q, k, v):
    extra = torch.linspace(-1, 1, 3 * D).view(1, 1, 3, D).expand(B, H, -1, -1)
    k, v = torch.cat([extra, k], dim=2), torch.cat([extra, v], dim=2)
    return (q @ k.mT * SCALE).softmax(-1) @ v


def normed(q, k, v):
    return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * 10).softmax(-1) @ v


def per_head_temperature(q, k, v):
    return (q @ k.mT * torch.linspace(0.2, 2, H)[:, None, None]).softmax(-1) @ v


def wide_values(q, k, v):
    v = torch.cat([v, v.square()], dim=-1)
    return ((q @ k.mT * SCALE).softmax(-1) @ v).unflatten(-1, (2, D)).sum(-2)


FORMS = [
    scaled_scores, scaled_query, both_scaled, divided, divided_by_a_tensor, unscaled, in_place, einsum,
    einsum_tokens_before_heads, bmm, baddbmm, baddbmm_of_a_mask, transposed, upcast,
    softmax_dtype, in_double, dropout_off, softmax_module, additive_mask, additive_zero_one, filled_with_infinity,
    filled_with_the_least, filled_in_place, chosen_by_where, causal_filled, causal_added, biased, biased_and_masked,
    mask_before_the_scale, hugging_face, llama, grouped_by_broadcast, learned_keys, normed,
    per_head_temperature, wide_values,
]  # fmt: skip


def written(form):
    """A transformer whose attention is ``form``."""

    def op(m, x):
        return m.out(merged(form(*map(heads, m.qkv(x).chunk(3, dim=-1)))))

    return drawn(DiT(lambda: Attention(op)))


@pytest.mark.parametrize(("form", "sp", "length"), alternating(FORMS))
def test_a_form_is_shared(form, sp, length):
    check(written(form), *inputs(length), sp=sp)


def test_three_ranks():
    check(written(hugging_face), *inputs(35), sp=3)


class Single(nn.Module):
    """One head, x [B, S, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x, context=None):
        context = x if context is None else context
        weights = (self.q(x) @ self.k(context).mT * C**-0.5).softmax(-1)
        return x + self.out(weights @ self.v(context))


@pytest.mark.parametrize(("sp", "length"), CASES)
def test_without_heads(sp, length):
    check(drawn(nn.Sequential(Single(), Single())), randn(B, length, C), sp=sp)


@pytest.mark.parametrize(("sp", "length"), CASES)
def test_without_heads_and_batch(sp, length):
    check(drawn(nn.Sequential(Single(), Single())), randn(length, C), sp=sp)


@pytest.mark.parametrize(("sp", "length"), CASES)
def test_attention_to_a_context_is_local(sp, length):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.itself, self.context = Single(), Single()

        def forward(self, x, context):
            return self.context(self.itself(x), context)

    check(drawn(Model()), randn(B, length, C), randn(B, CONTEXT, C, seed=2), sp=sp, sites=1, local=1)


@pytest.mark.parametrize("options", [{"ring": 2}, {"ulysses": 2}, {"kv_gather": 2}, {"ring": 2, "ulysses": 2}], ids=str)
def test_by_every_exchange(options):
    report = assert_exact(written(scaled_scores), *inputs(13), tolerance=TOLERANCE, **options)
    assert len(exchanges(report)) == 2
    assert "replicated" not in exchanges(report)
    assert regathered(report) == []


# what is not attention, or means something else than a call of it would


def softmax_over_queries(q, k, v):
    return (q @ k.mT * SCALE).softmax(-2) @ v


def softmax_over_heads(q, k, v):
    return (q @ k.mT * SCALE).softmax(1) @ v


def values_of_queries(q, k, v):
    """weights^T v: each key's row over the queries."""
    return (q @ k.mT * SCALE).softmax(-1).mT @ v


def fully_masked_rows_of_the_least(q, k, v):
    """Equal weights over all tokens, masked ones too."""
    keep = causal(k.shape[2]) & (torch.arange(k.shape[2]) > 2)
    return (q @ k.mT * SCALE).masked_fill(~keep, FINFO_MIN).softmax(-1) @ v


def fully_masked_rows_without_nan(q, k, v):
    keep = causal(k.shape[2]) & (torch.arange(k.shape[2]) > 2)
    return (q @ k.mT * SCALE).masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def filled_with_a_small_number(q, k, v):
    """Masked tokens still count."""
    return (q @ k.mT * SCALE).masked_fill(~causal(k.shape[2]), -1.0).softmax(-1) @ v


def filled_with_zero(q, k, v):
    return (q @ k.mT * SCALE).masked_fill(~causal(k.shape[2]), 0.0).softmax(-1) @ v


def filled_before_the_scale(q, k, v):
    return ((q @ k.mT).masked_fill(~causal(k.shape[2]), -3.0) * SCALE).softmax(-1) @ v


def masked_after_the_softmax(q, k, v):
    return ((q @ k.mT * SCALE).softmax(-1) * pads(k.shape[2])[:, None, None]) @ v


def multiplied_mask(q, k, v):
    return (q @ k.mT * SCALE * causal(k.shape[2])).softmax(-1) @ v


def capped(q, k, v):
    return (5 * torch.tanh(q @ k.mT * SCALE / 5)).softmax(-1) @ v


def sink(q, k, v):
    scores = torch.cat([q @ k.mT * SCALE, torch.full((*q.shape[:3], 1), 0.3)], dim=-1)
    return scores.softmax(-1)[..., :-1] @ v


def talking_heads(q, k, v):
    mix = torch.eye(H) + 0.1
    weights = torch.einsum("bhqk,hg->bgqk", q @ k.mT * SCALE, mix).softmax(-1)
    return torch.einsum("bhqk,hg->bgqk", weights, mix) @ v


def best_scores_only(q, k, v):
    scores = q @ k.mT * SCALE
    least = scores.topk(4, dim=-1).values[..., -1:]
    return scores.masked_fill(scores < least, -torch.inf).softmax(-1) @ v


def weights_used_twice(q, k, v):
    weights = (q @ k.mT * SCALE).softmax(-1)
    return weights @ v * weights.amax(-1, keepdim=True)


def scores_used_twice(q, k, v):
    scores = q @ k.mT * SCALE
    return scores.softmax(-1) @ v + scores.mean(-1, keepdim=True)


def difference_of_two(q, k, v):
    """Differential attention."""
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return ((q1 @ k1.mT).softmax(-1) - 0.3 * (q2 @ k2.mT).softmax(-1)) @ v


def without_softmax(q, k, v):
    return (q @ k.mT * SCALE) @ v / k.shape[2]


def with_sigmoid(q, k, v):
    return torch.sigmoid(q @ k.mT * SCALE - 2) @ v


def with_relu(q, k, v):
    return F.relu(q @ k.mT).square() @ v / k.shape[2]


def plus_the_values(q, k, v):
    return ((q @ k.mT * SCALE).softmax(-1) + torch.eye(k.shape[2])) @ v


def among_channels(q, k, v):
    """Cross-covariance attention: D x D scores."""
    q, k = F.normalize(q, dim=2), F.normalize(k, dim=2)
    return ((q.mT @ k).softmax(-1) @ v.mT).mT


def among_heads(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q @ k.mT * SCALE).softmax(-1) @ v).transpose(1, 2)


def among_samples(q, k, v):
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    return ((q @ k.mT * SCALE).softmax(-1) @ v).permute(2, 0, 1, 3)


def scale_per_query(q, k, v):
    return (q @ k.mT * torch.linspace(0.1, 1, q.shape[2])[:, None]).softmax(-1) @ v


def scale_per_key(q, k, v):
    return (q @ k.mT * torch.linspace(0.1, 1, k.shape[2])).softmax(-1) @ v


def scaled_by_data(q, k, v):
    return (q @ k.mT * q.mean().abs()).softmax(-1) @ v


def bias_from_queries(q, k, v):
    """Relative positions by a product with each query."""
    table = torch.linspace(-1, 1, k.shape[2] * D).view(k.shape[2], D)
    return (q @ k.mT * SCALE + torch.einsum("bhqd,kd->bhqk", q, table)).softmax(-1) @ v


def shifted_keys(q, k, v):
    """Weights of tokens k, values of their neighbours."""
    return (q @ k.mT * SCALE).softmax(-1) @ v.roll(1, dims=2)


def fewer_keys(q, k, v):
    k, v = (F.avg_pool1d(folded(x).mT, 2, 2).mT.unflatten(0, (B, H)) for x in (k, v))
    return (q @ k.mT * SCALE).softmax(-1) @ v


def query_chunks(q, k, v):
    """Sliced attention: some queries at a time."""
    return torch.cat([(p @ k.mT * SCALE).softmax(-1) @ v for p in q.split(4, dim=2)], dim=2)


def head_chunks(q, k, v):
    parts = zip(*(x.split(5, dim=1) for x in (q, k, v)), strict=True)
    return torch.cat([(a @ b.mT * SCALE).softmax(-1) @ c for a, b, c in parts], dim=1)


def key_chunks(q, k, v):
    """Flash attention by hand."""
    out, total, most = torch.zeros_like(v), 0.0, torch.full((*q.shape[:3], 1), -1e30)
    for a, b in zip(k.split(5, dim=2), v.split(5, dim=2), strict=True):
        scores = q @ a.mT * SCALE
        larger = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights, shrink = (scores - larger).exp(), (most - larger).exp()
        out, total, most = out * shrink + weights @ b, total * shrink + weights.sum(-1, keepdim=True), larger
    return out / total


NOT_PLAIN = [
    einsum_keys_first, keys_as_rows, stable_by_hand,
    softmax_over_queries, softmax_over_heads, values_of_queries, fully_masked_rows_of_the_least,
    fully_masked_rows_without_nan, filled_with_a_small_number, filled_with_zero,
    filled_before_the_scale, masked_after_the_softmax, multiplied_mask, capped, sink, talking_heads, best_scores_only,
    weights_used_twice, scores_used_twice, difference_of_two, without_softmax, with_sigmoid, with_relu,
    plus_the_values, among_channels, among_heads, among_samples, scale_per_query, scale_per_key, scaled_by_data,
    bias_from_queries, shifted_keys, fewer_keys, query_chunks, head_chunks, key_chunks,
]  # fmt: skip


@pytest.mark.parametrize(("form", "sp", "length"), alternating(NOT_PLAIN))
def test_what_is_not_plain_attention_is_exact(form, sp, length):
    """Behind attention that is shared, so that it meets tokens that are sharded."""

    def op(m, x):
        q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
        x = x + merged(F.scaled_dot_product_attention(q, k, v))
        return m.out(merged(form(*map(heads, m.qkv(x).chunk(3, dim=-1)))))

    assert_exact(drawn(DiT(lambda: Attention(op))), *inputs(length), sp=sp, tolerance=TOLERANCE)


@pytest.mark.parametrize(("form", "sp", "length"), alternating(NOT_PLAIN))
@pytest.mark.long
def test_what_is_not_plain_attention_is_exact_on_its_own(form, sp, length):
    assert_exact(written(form), *inputs(length), sp=sp, tolerance=TOLERANCE)


@pytest.mark.parametrize(("form", "sp", "length"), alternating(FORMS))
@pytest.mark.long
def test_a_form_behind_a_call_is_exact(form, sp, length):
    def op(m, x):
        q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
        x = x + merged(F.scaled_dot_product_attention(q, k, v))
        return m.out(merged(form(*map(heads, m.qkv(x).chunk(3, dim=-1)))))

    assert_exact(drawn(DiT(lambda: Attention(op))), *inputs(length), sp=sp, tolerance=TOLERANCE)


@pytest.mark.parametrize("fill", [-torch.inf, FINFO_MIN], ids=["infinity", "least"])
@pytest.mark.parametrize("sp", [2, 4])
def test_rows_without_any_token(fill, sp):
    """What a row of the mask that keeps nothing gives is the model's: NaN here, equal weights there."""
    attention = drawn(Attention())

    def model(x):
        q, k, v = map(heads, attention.qkv(x + attention(x)).chunk(3, dim=-1))
        keep = (torch.arange(13) < torch.tensor([[0], [9]]))[:, None, None] & causal(13)
        keep = keep & (torch.arange(13) > 2)
        y = merged((q @ k.mT * SCALE).masked_fill(~keep, fill).softmax(-1) @ v)
        return y.isnan().float(), y.nan_to_num(7.0)

    assert_exact(model, randn(B, 13, C), sp=sp, tolerance=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    def form(q, k, v):
        return F.softmax((q @ k.mT * SCALE).float(), dim=-1).to(q.dtype) @ v

    model = written(form).to(dtype)
    report = assert_exact(model, *(x.to(dtype) for x in inputs(13)), sp=2, tolerance=0.02)
    assert "replicated" not in exchanges(report)
    assert len(exchanges(report)) == 2


def test_weights_returned():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.single = Attention(), Single()

        def forward(self, x):
            x = x + self.attention(x)
            weights = (self.single.q(x) @ self.single.k(x).mT).softmax(-1)
            return weights @ self.single.v(x), weights

    assert_exact(drawn(Model()), randn(B, 13, C), sp=2, tolerance=TOLERANCE)


LARGEST = {
    "amax": lambda a: a.amax(-1, keepdim=True),
    "max": lambda a: a.max(dim=-1, keepdim=True).values,
    "detached": lambda a: a.max(-1, keepdim=True)[0].detach(),
}


@pytest.mark.parametrize("largest", LARGEST.values(), ids=LARGEST.keys())
def test_scores_less_their_largest_are_scores(largest):
    def model(x, w):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in (x @ w, x, x * 2))
        scores = q @ k.mT / 3
        return ((scores - largest(scores)).softmax(-1) @ v).transpose(1, 2).flatten(2)

    report = assert_exact(model, tokens(7), torch.randn(24, 24), tolerance=1e-6)
    assert exchanges(report) == ["ulysses"]


def test_attention_that_is_not_recognised_warns_and_strict_refuses():
    """Less the largest of a column: no softmax of the scores."""

    def model(x, w):
        scores = (x @ w) @ x.mT
        return (scores - scores.amax(-2, keepdim=True)).softmax(-1) @ x

    inputs = (tokens(7), torch.randn(24, 24))
    with pytest.warns(spcompile.UnshardedWarning, match="may be part of attention, which is not recognised"):
        assert_exact(model, *inputs, tolerance=1e-6)
    with pytest.raises(spcompile.UnsupportedGraphError, match=r"SP211.*test_handwritten.*may be part of attention"):
        simulate(model, inputs, sp=2, strict=True)
