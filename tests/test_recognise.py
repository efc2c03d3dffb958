"""Attention calls other than ``scaled_dot_product_attention``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

import spcompile
from spcompile.recognise import CALLS
from spcompile.testing import simulate

B, S, H, D = 2, 11, 6, 8
DEGREES = [{"sp": 2}, {"ulysses": 3}, {"ulysses": 4}, {"kv_gather": 2}, {"ring": 3}, {"ring": 2, "ulysses": 2}]
WEIGHTS = [torch.randn(H * D, H * D, generator=torch.Generator().manual_seed(i)) * (H * D) ** -0.5 for i in range(3)]


def project(x: torch.Tensor, *shape: int) -> list[torch.Tensor]:
    return [F.linear(x, w).view(*shape) for w in WEIGHTS]


@torch.library.custom_op("spcompile_tests::users_attend", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False, scale: float | None = None
) -> torch.Tensor:
    """The user's own op, [B, S, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2).contiguous()


@attend.register_fake
def _(query, key, value, causal=False, scale=None):
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)


@torch.library.custom_op("flash_attn::_flash_attn_varlen_forward", mutates_args=())
def flash_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The signature of the flash-attn package's op, computed on the CPU."""
    out = []
    for i in range(len(cu_seqlens_q) - 1):
        rows, cols = slice(cu_seqlens_q[i], cu_seqlens_q[i + 1]), slice(cu_seqlens_k[i], cu_seqlens_k[i + 1])
        one = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1), k[cols].transpose(0, 1), v[cols].transpose(0, 1), is_causal=causal,
            scale=softmax_scale,
        )  # fmt: skip
        out.append(one.transpose(0, 1))
    return torch.cat(out), q.new_zeros(q.shape[1], q.shape[0])


@flash_varlen.register_fake
def _(q, *args, **kwargs):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[1], q.shape[0])


@pytest.fixture
def registered():
    call = spcompile.AttentionCall(q="query", k="key", v="value", shape="bshd", causal="causal", scale="scale")
    spcompile.register_attention(attend, call)
    yield
    del CALLS["spcompile_tests::users_attend"]


def users_op(x):
    return attend(*project(x, B, S, H, D), False, 0.3).flatten(2) * 2


def users_causal_op(x):
    return attend(*project(x, B, S, H, D), True).flatten(2) * 2


def varlen(x):
    offsets = torch.arange(0, B * S + 1, S, dtype=torch.int32)
    out, _ = flash_varlen(*project(x, B * S, H, D), offsets, offsets, S, S, 0.0, 0.3, False)
    return out.view(B, S, H * D)


def plain_flex(x):
    q, k, v = (p.transpose(1, 2) for p in project(x, B, S, H, D))
    return flex_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2)


def assert_distributed(model, degrees):
    x = torch.randn(B, S, H * D, generator=torch.Generator().manual_seed(3))
    run = simulate(model, (x,), **degrees)
    want = model(x)
    for out in run.outputs:
        torch.testing.assert_close(out, want, rtol=0, atol=2e-6)
    (site,) = run.report.attention
    assert site.exchange != "replicated"
    assert not run.report.regathers
    return site


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("model", [users_op, users_causal_op])
def test_a_registered_op_is_distributed(registered, model, degrees):
    assert_distributed(model, degrees)


def test_a_registered_op_stays_the_op_that_runs(registered):
    assert assert_distributed(users_op, {"ulysses": 3}).kernel == "spcompile_tests.users_attend"


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("model", [varlen, plain_flex])
def test_flash_varlen_of_equal_lengths_and_plain_flex_are_distributed(model, degrees):
    assert_distributed(model, degrees)


def test_an_op_nobody_registered_is_gathered_around_and_reported():
    def model(x):
        q, k, v = project(x, B, S, H, D)
        seen = F.scaled_dot_product_attention(*(p.transpose(1, 2) for p in (q, k, v))).transpose(1, 2)
        return attend(seen, k, v).flatten(2)

    x = torch.randn(B, S, H * D)
    run = simulate(model, (x,), ulysses=2)
    torch.testing.assert_close(run.outputs[1], model(x), rtol=0, atol=2e-6)
    assert {r.op for r in run.report.regathers} == {"spcompile_tests.users_attend"}
    with pytest.raises(spcompile.UnsupportedGraphError, match=r"spcompile_tests\.users_attend"):
        simulate(model, (x,), ulysses=2, strict=True)


def test_unequal_varlen_lengths_are_not_taken_for_a_batch():
    def model(x):
        q, k, v = project(x, B * S, H, D)
        seen = F.scaled_dot_product_attention(*(p.view(B, S, H, D).transpose(1, 2) for p in (q, k, v)))
        q = seen.transpose(1, 2).reshape(B * S, H, D)
        offsets = torch.tensor([0, 5, B * S], dtype=torch.int32)
        return flash_varlen(q, k, v, offsets, offsets, 17, 17, 0.0, 0.3, False)[0].view(B, S, H * D)

    x = torch.randn(B, S, H * D)
    run = simulate(model, (x,), ulysses=2)
    torch.testing.assert_close(run.outputs[1], model(x), rtol=0, atol=2e-6)
    assert [a.kernel for a in run.report.attention] == ["sdpa"]
    assert run.report.regathers


def test_flex_attention_with_a_score_mod_is_refused_with_a_way_out():
    def model(x):
        q, k, v = (p.transpose(1, 2) for p in project(x, B, S, H, D))
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.1)

    with pytest.raises(spcompile.UnsupportedGraphError, match=r"torch\.compiler\.disable"):
        simulate(model, (torch.randn(B, S, H * D),), ulysses=2)


def test_register_attention_names_what_the_schema_lacks():
    with pytest.raises(spcompile.SPConfigError, match="has no argument q, k, v; its arguments are query, key, value"):
        spcompile.register_attention(attend, spcompile.AttentionCall())
    with pytest.raises(spcompile.SPConfigError, match="wants an OpOverload"):
        spcompile.register_attention(F.scaled_dot_product_attention, spcompile.AttentionCall())


def test_simplifying_flex_attention_leaves_writes_in_place_alone():
    def model(x):
        y = x * 1
        y.add_(1)
        q, k, v = (p.transpose(1, 2) for p in project(y, B, S, H, D))
        out = flex_attention(q, k, v).transpose(1, 2).flatten(2)
        out.mul_(2)
        return out

    assert_distributed(model, {"ulysses": 2})


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_multihead_attention_whose_weights_nobody_uses_is_distributed(degrees):
    torch.manual_seed(0)
    mha = torch.nn.MultiheadAttention(H * D, H, batch_first=True).eval()
    with torch.no_grad():
        assert_distributed(lambda x: mha(x, x, x)[0], degrees)


def test_multihead_attention_whose_weights_are_used_runs_whole():
    torch.manual_seed(0)
    mha = torch.nn.MultiheadAttention(H * D, H, batch_first=True).eval()
    x = torch.randn(B, S, H * D)
    with torch.no_grad():
        run = simulate(lambda x: mha(x, x, x), (x,), sp=2)
        torch.testing.assert_close(run.outputs[1][1], mha(x, x, x)[1])
    assert run.report.untouched == 1
    assert "1 graph without attention on every rank" in str(run.report)
