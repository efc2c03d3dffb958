"""One attention call: what it goes through, and that every rank gets the eager result.

Shapes: q [B, H, S, D], k and v [B, G, T, D]; masks broadcast to [B, H, S, T].
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import B, C, H, SelfAttention, assert_exact, attend, exchanges, regathered, tokens
from torch import nn

from spcompile.testing import simulate

S, T = 11, 7
TOLERANCE = 1e-13  # in float64


class Attention(nn.Module):
    """SDPA on projections of x [B, S, C], with the options of the call and a mask as an input."""

    def __init__(self, heads: int = H, kv_heads: int | None = None, value_dim: int = 2, **options) -> None:
        super().__init__()
        kv_heads = kv_heads or heads
        self.sizes = [heads * 2, kv_heads * 2, kv_heads * value_dim]
        self.heads, self.options = [heads, kv_heads, kv_heads], options
        self.qkv, self.out = nn.Linear(C, sum(self.sizes)), nn.Linear(heads * value_dim, C)
        self.double()

    def forward(self, x, mask=None):
        parts = self.qkv(x).split(self.sizes, dim=-1)
        q, k, v = (p.unflatten(-1, (h, -1)).transpose(1, 2) for p, h in zip(parts, self.heads, strict=True))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)
        return self.out(out.transpose(1, 2).flatten(2))


def x(num=S, batch=B):
    return tokens(num, batch).double()


ULYSSES, GATHER, BOTH = {"ulysses": 3}, {"kv_gather": 3}, {"ring": 2, "ulysses": 2}
OTHERS = [
    {"ulysses": 2}, {"ulysses": 4}, {"ring": 3}, {"kv_gather": 2}, {"ring": 4}, {"ring": 2, "kv_gather": 2},
    {"kv_gather": 2, "ulysses": 2}, {"ring": 2, "kv_gather": 2, "ulysses": 2}, {"sp": 2}, {"sp": 4}, {"sp": 5},
]  # fmt: skip
every_exchange = pytest.mark.parametrize("degrees", [ULYSSES, GATHER, BOTH, *OTHERS], ids=str)
some_exchanges = pytest.mark.parametrize(
    "degrees", [ULYSSES, GATHER, BOTH, *(pytest.param(d, marks=pytest.mark.long) for d in OTHERS)], ids=str
)
two_exchanges = pytest.mark.parametrize("degrees", [ULYSSES, BOTH], ids=str)


@every_exchange
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3, "value_dim": 3}], ids=str)
def test_an_exchange_keeps_what_the_call_means(options, degrees):
    report = assert_exact(Attention(**options), x(), **degrees, tolerance=TOLERANCE)
    (entry,) = report.attention
    assert entry.shape == (B, H, S, 2, S)
    if len(degrees) == 1 and "sp" not in degrees:
        assert [entry.exchange] == list(degrees)
    elif "sp" not in degrees:
        assert entry.exchange == " x ".join(f"{axis}={degree}" for axis, degree in degrees.items())
    assert entry.reason.startswith(("cheapest of", "cheaper than") if "sp" in degrees else "as asked for")
    assert regathered(report) == []


@some_exchanges
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (5, 1), (8, 2), (12, 4), (7, 7), (1, 1), (6, 2)])
def test_any_number_of_heads(heads, kv_heads, degrees):
    model = Attention(heads, kv_heads, enable_gqa=heads != kv_heads)
    report = assert_exact(model, x(), **degrees, tolerance=TOLERANCE)
    assert regathered(report) == []


@pytest.mark.parametrize(("heads", "degree", "wasted"), [(12, 8, 0.25), (30, 4, 1 / 16), (3, 2, 0.25), (12, 4, 0)])
def test_work_on_padding_heads_is_reported(heads, degree, wasted):
    (entry,) = assert_exact(Attention(heads), x(12), degree=degree, tolerance=TOLERANCE).attention
    assert entry.wasted == wasted
    assert ("padding heads" in entry.reason) == (wasted > 0)


@pytest.mark.parametrize(("heads", "kv_heads", "degree"), [(8, 2, 2), (12, 4, 4), (12, 3, 3)])
def test_grouped_queries_send_keys_and_values_unexpanded(heads, kv_heads, degree):
    report = assert_exact(Attention(heads, kv_heads, enable_gqa=True), x(12), degree=degree, tolerance=TOLERANCE)
    (entry,) = report.attention
    per_token = 2 * (heads + kv_heads) * 2 * 8  # q and the output, k and v; head dim 2, float64
    assert entry.bytes_per_rank == B * (12 // degree) * per_token * (degree - 1) // degree


@some_exchanges
@pytest.mark.parametrize("shape", [(B, 1, 1, S), (1, 1, 1, S), (1, S), (S, S), (B, 1, S, S), (B, H, S, S),
                                   (1, H, 1, S), (H, S, S), (B, H, 1, S), (S, 1)], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_masks_stay_in_global_order_and_with_their_heads(kind, shape, degrees):
    mask = torch.randn(shape).double()
    if kind == "bool":
        mask = (mask > 0) | (torch.arange(shape[-1]) == 0)  # no row may be masked out altogether
    report = assert_exact(Attention(), x(), mask, **degrees, tolerance=TOLERANCE)
    assert exchanges(report) != ["replicated"]


@pytest.mark.parametrize("shape", [(B, 1, 1, S), (S, S)], ids=str)
@some_exchanges
def test_rows_without_any_key_are_what_they_are_on_one_rank(shape, degrees):
    mask = torch.rand(shape) > 0.5
    mask[0] = False
    assert_exact(Attention(), x(), mask, **degrees, tolerance=TOLERANCE)


@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.bool])
def test_a_mask_computed_from_the_tokens_is_right(mask_dtype):
    def model(x):
        mask = (x @ x.mT).unsqueeze(1)
        mask = mask.float() if mask_dtype is torch.float32 else mask > -1e9
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2).float() for t in (x, 2 * x, 3 * x))
        return F.scaled_dot_product_attention(q @ torch.eye(2), k, v, mask).transpose(1, 2).flatten(2)

    assert_exact(model, x(), tolerance=1e-6)


@every_exchange
def test_a_mask_of_padding_in_the_middle_of_the_joint_order_is_right(degrees):
    class Joint(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention()

        def forward(self, image, text, keep):  # CFG: text of another length per sample, before the image
            joint = torch.cat([text, image], dim=1)
            whole = torch.cat([keep, keep.new_ones(keep.shape[0], image.shape[1])], dim=1).bool()
            return self.inner(joint, whole[:, None, None, :])[:, text.shape[1] :]

    keep = (torch.arange(T) < torch.tensor([[T], [3]])).long()
    report = assert_exact(Joint(), x(), x(T), keep, **degrees, tolerance=TOLERANCE)
    assert exchanges(report) != ["replicated"]
    assert regathered(report) == []


# cross-attention


class Cross(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.q, self.kv, self.options = nn.Linear(C, C), nn.Linear(C, 2 * C), options
        self.double()

    def forward(self, x, context, mask=None):
        return attend(self.q(x), *self.kv(context).chunk(2, dim=-1), attn_mask=mask, **self.options)


@two_exchanges
@pytest.mark.parametrize("num_context", [T, S, 1])
def test_attention_to_a_context_on_every_rank_costs_nothing(num_context, degrees):
    report = assert_exact(Cross(), x(), x(num_context), **degrees, tolerance=TOLERANCE)
    (entry,) = report.attention
    assert (entry.exchange, entry.collectives, entry.bytes_per_rank) == ("local", 0, 0)


@pytest.mark.parametrize("shape", [(B, 1, 1, T), (S, T), (B, H, S, T), (1, H, 1, T)], ids=str)
@two_exchanges
def test_masks_of_local_attention_are_cut_with_the_queries(shape, degrees):
    report = assert_exact(Cross(), x(), x(T), torch.randn(shape).double(), **degrees, tolerance=TOLERANCE)
    assert exchanges(report) == ["local"]


@some_exchanges
@pytest.mark.parametrize("num_context", [T, S, 14])
def test_causal_cross_attention_is_right(num_context, degrees):
    assert_exact(Cross(is_causal=True), x(), x(num_context), **degrees, tolerance=TOLERANCE)


@every_exchange
def test_two_streams_of_different_lengths_attend_to_each_other(degrees):
    class VideoAndAudio(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.video, self.audio = SelfAttention(), SelfAttention()
            self.to_video, self.to_audio = Cross(), Cross()
            self.double()

        def forward(self, video, audio):
            video, audio = video + self.video(video), audio + self.audio(audio)
            return video + self.to_video(video, audio), audio + self.to_audio(audio, video)

    report = assert_exact(VideoAndAudio(), x(), x(T), **degrees, tolerance=TOLERANCE)
    assert len(report.attention) == 4
    assert not {"local", "replicated"} & set(exchanges(report))
    assert regathered(report) == []


@every_exchange
def test_keys_and_values_can_serve_several_layers(degrees):
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kv, self.q = nn.Linear(C, 2 * C), nn.ModuleList(nn.Linear(C, C) for _ in range(3))
            self.double()

        def forward(self, x):
            k, v = self.kv(x).chunk(2, dim=-1)
            for q in self.q:
                x = x + attend(q(x), k, v)
            return x

    report = assert_exact(Shared(), x(), **degrees, tolerance=TOLERANCE)
    assert len(report.attention) == 3
    assert regathered(report) == []


# other ranks of q, k and v


@every_exchange
def test_more_batch_dims(degrees):
    def model(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, H, -1)).permute(3, 0, 1, 4, 2, 5)
        return F.scaled_dot_product_attention(q, k, v)

    inputs = torch.randn(2, 3, S, C).double(), torch.randn(C, 3 * C).double()
    assert_exact(model, *inputs, **degrees, tolerance=TOLERANCE)


@every_exchange
def test_heads_folded_into_the_batch_stay_right(degrees):
    def model(x, w):  # [B * H, S, D], as old code has it; an attention with heads beside it
        q, k, v = (x @ w).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4).flatten(1, 2)
        folded = F.scaled_dot_product_attention(q, k, v)
        return folded.unflatten(0, (-1, H)).transpose(1, 2).flatten(2) + attend(x, x @ w[:, :C], x)

    assert_exact(model, x(), torch.randn(C, 3 * C).double(), **degrees, tolerance=TOLERANCE)


def test_one_query_token_stays_on_every_rank():
    def model(x, w):
        return attend(x @ w, x, x), attend(x[:, :1] @ w, x, x)

    report = assert_exact(model, x(), torch.randn(C, C).double(), tolerance=TOLERANCE)
    assert exchanges(report)[0] == "ulysses"


@some_exchanges
@pytest.mark.parametrize("causal", [False, True])
def test_fewer_tokens_than_ranks(causal, degrees):
    report = assert_exact(Attention(is_causal=causal), x(2), **degrees, tolerance=TOLERANCE)
    assert exchanges(report) != ["replicated"]


# mixing


@some_exchanges
@pytest.mark.parametrize("changed", [0, S - 1])
def test_every_rank_attends_to_all_tokens(changed, degrees):
    """Two pictures side by side: if one token changes, the outputs of all others must."""
    model, one = Attention(), x()
    other = one.clone()
    other[:, changed] += 1
    before, after = (simulate(model, (inputs,), **degrees).outputs[0] for inputs in (one, other))
    moved = (before - after).abs().amax(-1)
    assert (moved > 1e-6).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every_exchange
def test_low_precision_is_as_exact_as_on_one_rank(degrees, dtype):
    model, inputs = SelfAttention().to(dtype), tokens(S).to(dtype)
    run = simulate(model, (inputs,), **degrees)
    with torch.no_grad():
        alone = model(inputs)
        exact = model.double()(inputs.double())
    for output in run.outputs:
        assert output.dtype == dtype
        assert (output - exact).abs().max() <= 2 * (alone - exact).abs().max()
