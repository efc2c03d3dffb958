"""Models written in other styles than diffusers': small transformers of two blocks, on simulated ranks.

Every rank returns the eager result, attention is shared, and tokens are gathered again nowhere, unless said.
Packages that spcompile does not need are used where they are installed.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import assert_exact, exchanges, regathered
from torch import Tensor, nn

import spcompile
from spcompile.report import Report
from spcompile.testing import simulate

B, C, H, D, CIN, CONTEXT = 2, 48, 12, 4, 5, 7
TOLERANCE = 1e-5
CASES = [(2, 35), (4, 13)]
"""(ranks, tokens)"""

both = pytest.mark.parametrize(("sp", "length"), [pytest.param(*CASES[0], marks=pytest.mark.long), CASES[1]])


def alternating(entries: Iterable[Any]) -> list[Any]:
    """Each entry by one of the cases in the default run, by the others in the long one."""
    return [
        pytest.param(entry, *case, id=f"{getattr(entry, '__name__', entry)}-{case[0]}",
                     marks=[] if i % 2 == j else pytest.mark.long)
        for i, entry in enumerate(entries)
        for j, case in enumerate(CASES)
    ]  # fmt: skip


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def heads(x: Tensor, num: int = H) -> Tensor:
    """[B, S, C] -> [B, H, S, D]"""
    return x.view(x.shape[0], x.shape[1], num, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def drawn(model: nn.Module, seed: int = 0) -> nn.Module:
    """Weights at which every part of the model matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                noise = torch.randn(p.shape, generator=generator)
                p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else p + 0.1 * noise)
    return model.eval().requires_grad_(False)


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Attention(nn.Module):
    """``op(self, x)`` with weights that most styles need."""

    def __init__(self, op: Callable[[Any, Tensor], Tensor] | None = None, channels: int = C) -> None:
        super().__init__()
        self.op, self.qkv, self.out = op, nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.extra = nn.Parameter(torch.zeros(2, 3, channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.op is not None:
            return self.op(self, x)
        q, k, v = map(heads, self.qkv(x).chunk(3, dim=-1))
        return self.out(merged(sdpa(q, k, v)))


class Mlp(nn.Sequential):
    def __init__(self, channels: int = C) -> None:
        super().__init__(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))


class Block(nn.Module):
    """Modulated as a DiT is: x [B, S, C], t [B, C]."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(C, elementwise_affine=False) for _ in range(2))
        self.attention, self.mlp, self.modulation = attention, mlp, nn.Linear(C, 4 * C)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale1, gate1, scale2, gate2 = self.modulation(F.silu(t)).unsqueeze(1).chunk(4, dim=-1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2))


class DiT(nn.Module):
    """x [B, S, CIN], t [B, C] -> [B, S, CIN]; ``call(block, x, t)`` is how a block is called."""

    def __init__(
        self,
        attention: Callable[[], nn.Module] = Attention,
        mlp: Callable[[], nn.Module] = Mlp,
        call: Callable[..., Tensor] = lambda block, x, t: block(x, t),
    ) -> None:
        super().__init__()
        self.embed, self.last, self.call = nn.Linear(CIN, C), nn.Linear(C, CIN), call
        self.blocks = nn.ModuleList(Block(attention(), mlp()) for _ in range(2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x, t)
        return self.last(x)


def inputs(length: int) -> tuple[Tensor, Tensor]:
    return randn(B, length, CIN), randn(B, C, seed=2)


def check(model: Callable[..., Any], *args: Any, sp: int, sites: int = 2, local: int = 0, **options: Any) -> Report:
    """Exact on every rank; ``sites`` exchanged and ``local`` more local, in one graph; nothing gathered again."""
    report = assert_exact(model, *args, sp=sp, tolerance=TOLERANCE, **options)
    found = exchanges(report)
    assert report.graphs == 1
    assert report.untouched == 0
    assert "replicated" not in found
    assert (len(found) - found.count("local"), found.count("local")) == (sites, local)
    assert regathered(report) == []
    assert report.unshards == 1
    return report


# how queries, keys and values are split off, and what is done to them


def _unbind(m, x):
    q, k, v = m.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
    return m.out(sdpa(*(p.transpose(1, 2) for p in (q, k, v))).transpose(1, 2).flatten(2))


def _timm_permute(m, x):
    b, n, c = x.shape
    q, k, v = m.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4).unbind(0)
    return m.out(sdpa(q, k, v).transpose(1, 2).reshape(b, n, c))


def _packed(m, x):
    qkv = m.qkv(x).view(*x.shape[:2], 3, H, D)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    return m.out(sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2))


def _packed_last(m, x):
    qkv = m.qkv(x).view(*x.shape[:2], H, 3 * D).transpose(1, 2)
    return m.out(merged(sdpa(*qkv.split(D, dim=-1))))


def _tokens_first(m, x):
    s, b, c = x.transpose(0, 1).shape
    q, k, v = m.qkv(x.transpose(0, 1).contiguous()).chunk(3, dim=-1)
    q, k, v = (p.contiguous().view(s, b * H, D).transpose(0, 1).view(b, H, s, D) for p in (q, k, v))
    return m.out(sdpa(q, k, v).permute(2, 0, 1, 3).reshape(s, b, c)).transpose(0, 1)


def _batch_folded(m, x):
    q, k, v = (heads(p).reshape(-1, x.shape[1], D) for p in m.qkv(x).chunk(3, -1))
    return m.out(merged(sdpa(q, k, v).view(-1, H, x.shape[1], D)))


def _weights_sliced(m, x):
    q, k, v = (F.linear(x, w, b) for w, b in zip(m.qkv.weight.chunk(3), m.qkv.bias.chunk(3), strict=True))
    return m.out(merged(sdpa(heads(q), heads(k), heads(v))))


def _channels_first(m, x):
    qkv = F.conv1d(x.mT, m.qkv.weight.unsqueeze(-1), m.qkv.bias)
    q, k, v = (p.unflatten(1, (H, D)).mT for p in qkv.chunk(3, dim=1))
    return m.out(sdpa(q, k, v).mT.flatten(1, 2).mT)


def _grouped(repeated):
    def op(m, x):
        q = heads(m.qkv(x)[..., :C])
        k, v = (heads(p, 3) for p in m.qkv(x)[..., C : C + C // 2].chunk(2, dim=-1))
        return m.out(merged(repeated(q, k, v)))

    return op


def _expanded(x):
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, H // h, s, d).reshape(b, H, s, d)


def _qk_norm(m, x):
    q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
    q, k = F.rms_norm(q, (D,), m.extra[0, 0, :D]), F.normalize(k, dim=-1) * D**0.5
    return m.out(merged(sdpa(q, k, v)))


def _memory(m, x):
    """Learned keys and values, in front of those of the tokens."""
    q, k, v = m.qkv(x).chunk(3, dim=-1)
    k, v = (torch.cat([e.expand(len(x), -1, -1), p], dim=1) for e, p in zip(m.extra, (k, v), strict=True))
    return m.out(merged(sdpa(heads(q), heads(k), heads(v))))


def _zero_attended(m, x):
    q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
    return m.out(merged(sdpa(q, F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)))))


def _gated(m, x):
    q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
    return m.out(merged(sdpa(q, k, v) * torch.sigmoid(q.mean(-1, keepdim=True))))


def _sample_by_sample(m, x):
    q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
    return m.out(merged(torch.stack([sdpa(q[i], k[i], v[i]) for i in range(len(x))])))


def _masked(m, x):
    keep = torch.arange(x.shape[1]) < torch.tensor([[9], [11]])
    q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
    return m.out(merged(sdpa(q, k, v, attn_mask=keep[:, None, None])))


PROJECTIONS = {
    "qkv unbound": _unbind,
    "qkv permuted and unbound": _timm_permute,
    "qkv packed [B, S, 3, H, D]": _packed,
    "qkv packed [B, S, H, 3 D]": _packed_last,
    "tokens first, [S, B, C]": _tokens_first,
    "heads folded into the batch": _batch_folded,
    "weights sliced": _weights_sliced,
    "channels first, by conv1d": _channels_first,
    "grouped queries": _grouped(lambda q, k, v: sdpa(q, k, v, enable_gqa=True)),
    "grouped queries by repeat_interleave": _grouped(
        lambda q, k, v: sdpa(q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1))
    ),
    "grouped queries by expand": _grouped(lambda q, k, v: sdpa(q, _expanded(k), _expanded(v))),
    "one key for all queries": _grouped(lambda q, k, v: sdpa(q, k[:, :1].expand(-1, H, -1, -1), _expanded(v[:, :1]))),
    "normed queries and keys": _qk_norm,
    "learned keys and values": _memory,
    "a zero key and value": _zero_attended,
    "gated": _gated,
    "sample by sample": _sample_by_sample,
    "padded samples": _masked,
}
SITES = {"sample by sample": 2 * B}


@pytest.mark.parametrize(("name", "sp", "length"), alternating(PROJECTIONS))
def test_projections(name, sp, length):
    check(drawn(DiT(lambda: Attention(PROJECTIONS[name]))), *inputs(length), sp=sp, sites=SITES.get(name, 2))


# einops


def _einops(m, x, pattern):
    from einops import rearrange

    q, k, v = rearrange(m.qkv(x), f"{pattern} -> three b h n d", three=3, h=H)
    return m.out(rearrange(sdpa(q, k, v), "b h n d -> b n (h d)"))


def _einops_everything(m, x):
    from einops import einsum, pack, rearrange, reduce, repeat, unpack

    x, shapes = pack([repeat(m.extra[0], "r c -> b r c", b=len(x)), x], "b * c")
    q, k, v = (einsum(x, w, "b n c, d c -> b n d") for w in m.qkv.weight.chunk(3))
    q, k, v = (rearrange(p, "b n (h d) -> b h n d", h=H) for p in (q, k, v))
    x = m.out(rearrange(sdpa(q, k, v), "b h n d -> b n (h d)"))
    x = x - reduce(x, "b n c -> b n 1", "mean") * repeat(m.extra[1, 0], "c -> b 1 c", b=len(x))
    return unpack(x, shapes, "b * c")[1]


EINOPS = {
    "b n (h d three)": lambda m, x: _einops(m, x, "b n (h d three)"),
    "b n (three h d)": lambda m, x: _einops(m, x, "b n (three h d)"),
    "b n (h three d)": lambda m, x: _einops(m, x, "b n (h three d)"),
    "einsum, repeat, reduce, pack": _einops_everything,
}


@pytest.mark.parametrize(("name", "sp", "length"), alternating(EINOPS))
def test_einops(name, sp, length):
    pytest.importorskip("einops")
    check(drawn(DiT(lambda: Attention(EINOPS[name]))), *inputs(length), sp=sp)


# rotary positions


def _angles(length: int) -> Tensor:
    """[S, D / 2]"""
    return torch.arange(length, dtype=torch.float32)[:, None] * 10 ** -torch.arange(0, 1, 2 / D)


def _rotate_half(x):
    cos, sin = (a.repeat(1, 2) for a in (_angles(x.shape[2]).cos(), _angles(x.shape[2]).sin()))
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def _rotate_pairs(x):
    cos, sin = (a.repeat_interleave(2, dim=-1) for a in (_angles(x.shape[2]).cos(), _angles(x.shape[2]).sin()))
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return x * cos + torch.stack([-b, a], dim=-1).flatten(-2) * sin


def _rotate_complex(x):
    turns = torch.polar(torch.ones(x.shape[2], D // 2), _angles(x.shape[2]))
    return torch.view_as_real(torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turns).flatten(3)


def _rotate_outer_product(x):
    turns = torch.outer(torch.arange(x.shape[2]).float(), torch.tensor([1.0, 0.3]))
    turns = torch.exp(1j * turns)[None, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


def _rotate_strided(x):
    cos, sin = _angles(x.shape[2]).cos(), _angles(x.shape[2]).sin()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).reshape(x.shape)


def _rotate_into_empty(x):
    cos, sin = _angles(x.shape[2]).cos(), _angles(x.shape[2]).sin()
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
    return out


def _rotate_in_place(x):
    cos, sin = _angles(x.shape[2]).cos(), _angles(x.shape[2]).sin()
    x = x.clone()
    even = x[..., ::2].clone()
    x[..., ::2].mul_(cos).sub_(x[..., 1::2] * sin)
    x[..., 1::2].mul_(cos).add_(even * sin)
    return x


def _rotate_some_channels(x):
    turned, kept = x[..., :2], x[..., 2:]
    angle = _angles(x.shape[2])[:, :1]
    a, b = turned.unbind(-1)
    turned = torch.stack([a * angle.cos()[:, 0] - b * angle.sin()[:, 0], b * angle.cos()[:, 0]], dim=-1)
    return torch.cat([turned, kept], dim=-1)


def _rotate_all_but_the_first(x):
    return torch.cat([x[:, :, :1], _rotate_half(x[:, :, 1:])], dim=2)


def _scaled_in_place(x):
    x = x * 1
    x[:, :, :5].mul_(1.5)
    x[:, :, -3:] += 0.25
    return x


def _matrices(x):
    """Each pair by a 2x2 matrix, as Flux did."""
    angle = torch.einsum("...n,d->...nd", torch.arange(x.shape[2]).float(), torch.tensor([1.0, 0.3]))
    table = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], dim=-1).unflatten(-1, (2, 2))
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (table[..., 0] * pairs[..., 0] + table[..., 1] * pairs[..., 1]).reshape(*x.shape).type_as(x)


def _two_axes(x):
    """Rows and columns of a grid, counted in forward, each for half of the channels."""
    at = torch.arange(x.shape[2])
    angle = torch.cat([(at // 5)[:, None], (at % 5)[:, None]], dim=-1) * 0.3
    a, b = x.unflatten(-1, (2, -1)).unbind(-1)
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1).flatten(-2)


ROTARY = {
    "halves": _rotate_half,
    "pairs": _rotate_pairs,
    "complex, by polar": _rotate_complex,
    "complex, by exp": _rotate_outer_product,
    "strided": _rotate_strided,
    "written into an empty tensor": _rotate_into_empty,
    "in place": _rotate_in_place,
    "some channels": _rotate_some_channels,
    "all tokens but the first": _rotate_all_but_the_first,
    "some tokens scaled in place": _scaled_in_place,
    "matrices": _matrices,
    "two axes": _two_axes,
}


@pytest.mark.parametrize(("name", "sp", "length"), alternating(ROTARY))
def test_rotary_positions(name, sp, length):
    def op(m, x):
        q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
        return m.out(merged(sdpa(ROTARY[name](q), ROTARY[name](k), v)))

    check(drawn(DiT(lambda: Attention(op))), *inputs(length), sp=sp)


# feed-forwards


class ChunkedMlp(Mlp):
    def __init__(self, cut: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(ChunkedMlp, self).forward(part) for part in self.cut(x)], dim=1)


class SlicedMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for i in range(0, x.shape[1], 4):
            out[:, i : i + 4] = super().forward(x[:, i : i + 4])
        return out


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(C, 4 * C), nn.Linear(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.into(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class DenseExperts(nn.Module):
    """Every expert sees every token; each token keeps its best two."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(C, 4), nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        share = torch.zeros_like(self.router(x)).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        return sum(share[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class BatchedExperts(nn.Module):
    """Tokens of all samples in one list, one einsum over all experts, selected by one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(C, 4, bias=False), nn.Parameter(torch.zeros(4, C, C))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, C)
        gates, chosen = self.router(flat).sigmoid().topk(2, dim=-1)
        mask = F.one_hot(chosen, 4).to(x.dtype)
        y = torch.einsum("td,edf->tef", flat, self.experts)
        return torch.einsum("tef,tke,tk->tf", y, mask, gates).view_as(x)


MLPS = {
    "chunks": lambda: ChunkedMlp(lambda x: x.chunk(4, dim=1)),
    "split": lambda: ChunkedMlp(lambda x: x.split(6, dim=1)),
    "tensor_split": lambda: ChunkedMlp(lambda x: x.tensor_split(3, dim=1)),
    "token by token": lambda: ChunkedMlp(lambda x: [x[:, :1], x[:, 1:2], x[:, 2:]]),
    "slices written into a result": SlicedMlp,
    "SwiGLU": SwiGLU,
    "experts, densely": DenseExperts,
    "experts, batched": BatchedExperts,
}


@pytest.mark.parametrize(("name", "sp", "length"), alternating(MLPS))
def test_feed_forwards(name, sp, length):
    check(drawn(DiT(mlp=MLPS[name])), *inputs(length), sp=sp)


# how blocks are called


def _checkpointed(block, x, t):
    return torch.utils.checkpoint.checkpoint(block, x, t, use_reentrant=False)


@torch.compiler.nested_compile_region
def _region(block, x, t):
    return block(x, t)


def _keyword(block, x, t):
    return block(**{"t": t, "x": x})


def _under_autocast_off(block, x, t):
    with torch.autocast("cpu", enabled=False):
        return block(x, t)


CALLS = {"checkpoint": _checkpointed, "nested region": _region, "keywords": _keyword, "autocast": _under_autocast_off}


@pytest.mark.parametrize(("name", "sp", "length"), alternating(CALLS))
def test_blocks_called(name, sp, length):
    check(drawn(DiT(call=CALLS[name])), *inputs(length), sp=sp)


def test_checkpoint_sequential():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Attention(), Mlp(), Attention(), Mlp())

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)

    check(drawn(Model()), randn(B, 13, C), sp=2, sites=1)  # one graph, which runs twice


def test_a_graph_break_between_blocks():
    def call(block, x, t):
        x = block(x, t)
        torch._dynamo.graph_break()
        return x

    check(drawn(DiT(call=call)), *inputs(13), sp=2, sites=1)  # the graph of a block, which runs twice


# torch.nn's own attention


class TorchAttention(nn.Module):
    def __init__(self, first: bool = True, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, batch_first=first, **options)
        self.context = nn.Parameter(torch.zeros(1, CONTEXT, C)) if cross else None
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        context = x if self.context is None else self.context.expand(len(x), -1, -1)
        if self.first:
            return self.attention(x, context, context)[0]
        x, context = x.transpose(0, 1), context.transpose(0, 1)
        return self.attention(x, context, context)[0].transpose(0, 1)


MULTIHEAD = [{}, {"first": False}, {"add_zero_attn": True}, {"add_bias_kv": True}]


@pytest.mark.parametrize(("options", "sp", "length"), alternating(MULTIHEAD))
def test_multihead_attention(options, sp, length):
    check(drawn(DiT(lambda: TorchAttention(**options))), *inputs(length), sp=sp)


@pytest.mark.parametrize(("first", "sp", "length"), alternating([True, False]))
def test_multihead_cross_attention(first, sp, length):
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.itself, self.context = TorchAttention(first), TorchAttention(first, cross=True)

        def forward(self, x):
            x = x + self.itself(x)
            return x + self.context(x)

    check(drawn(DiT(Both)), *inputs(length), sp=sp, local=2)


class Encoder(nn.Module):
    def __init__(self, first: bool = True, **options: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(C, H, 2 * C, batch_first=first, **options)
        self.layers, self.first = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), first

    def forward(self, x, **options):
        return self.layers(x, **options) if self.first else self.layers(x.transpose(0, 1), **options).transpose(0, 1)


ENCODERS = [{}, {"norm_first": True, "activation": "gelu"}, {"first": False}, {"bias": False}]


@pytest.fixture
def fast_path(request):
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(request.param)
    yield request.param
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("fast_path", [True, False], indirect=True)
@pytest.mark.parametrize(("options", "sp", "length"), alternating(ENCODERS))
def test_transformer_encoder(fast_path, options, sp, length):
    check(drawn(Encoder(**options)), randn(B, length, C), sp=sp)


@pytest.mark.parametrize("fast_path", [True, False], indirect=True)
@both
def test_transformer_encoder_on_padded_samples(fast_path, sp, length):
    pads = torch.arange(length) >= torch.tensor([[length - 4], [length]])
    check(drawn(Encoder()), randn(B, length, C), sp=sp, kwargs=dict(src_key_padding_mask=pads))


@pytest.mark.parametrize("fast_path", [True, False], indirect=True)
@both
def test_transformer_encoder_causal(fast_path, sp, length):
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    check(drawn(Encoder()), randn(B, length, C), sp=sp, kwargs=dict(mask=mask, is_causal=True))


@pytest.mark.parametrize(("norm_first", "sp", "length"), alternating([True, False]))
def test_transformer_decoder(norm_first, sp, length):
    layer = nn.TransformerDecoderLayer(C, H, 2 * C, batch_first=True, norm_first=norm_first)
    model = drawn(nn.TransformerDecoder(layer, 2))
    check(model, randn(B, length, C), randn(B, CONTEXT, C, seed=2), sp=sp, local=2)


# timm


class Vit(nn.Module):
    """``blocks`` on patches of an image, behind a class token and two registers that are cut off again."""

    def __init__(self, blocks: nn.Module, length: int) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(3, C, 2, 2), blocks
        self.cls, self.registers = nn.Parameter(torch.zeros(1, 1, C)), nn.Parameter(torch.zeros(1, 2, C))
        self.positions, self.norm, self.head = nn.Parameter(torch.zeros(1, length + 3, C)), nn.LayerNorm(C), Mlp()

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        prefix = torch.cat([self.cls.expand(len(x), -1, -1), self.registers.expand(len(x), -1, -1)], dim=1)
        x = self.blocks(torch.cat([prefix, x], dim=1) + self.positions)
        return self.head(self.norm(x)[:, 3:])


class LikeTimm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = nn.LayerNorm(C), nn.LayerNorm(C), Attention(_timm_permute), Mlp()
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(C)), nn.Parameter(torch.ones(C))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x)) * self.gamma1
        return x + self.mlp(self.norm2(x)).mul_(self.gamma2)


IMAGES = [pytest.param(2, (5, 7), marks=pytest.mark.long), (4, (1, 13)), (3, (5, 7))]


@pytest.mark.parametrize(("sp", "size"), IMAGES)
def test_vision_transformer(sp, size):
    model = drawn(Vit(nn.Sequential(LikeTimm(), LikeTimm()), size[0] * size[1]))
    check(model, randn(B, 3, 2 * size[0], 2 * size[1]), sp=sp)


@pytest.fixture
def timm(monkeypatch):
    """timm imports torchvision, for data and for convolutional networks; blocks need nothing of it."""
    if importlib.util.find_spec("torchvision") is None:
        for name in ("", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc", ".transforms",
                     ".transforms.functional", ".utils"):  # fmt: skip
            monkeypatch.setitem(sys.modules, "torchvision" + name, mock.MagicMock())
        sys.modules["torchvision.ops.misc"].FrozenBatchNorm2d = nn.BatchNorm2d
    return pytest.importorskip("timm")


def _timm_blocks(name: str) -> nn.Module:
    from timm.layers import SwiGLU, SwiGLUPacked
    from timm.models.eva import EvaBlock
    from timm.models.vision_transformer import Block as TimmBlock
    from timm.models.vision_transformer import ParallelScalingBlock, ResPostBlock

    make = {
        "Block": lambda: TimmBlock(C, H, qkv_bias=True),
        "Block with LayerScale and qk norm": lambda: TimmBlock(C, H, qk_norm=True, init_values=1.0),
        "Block with SwiGLU": lambda: TimmBlock(C, H, mlp_layer=SwiGLU),
        "Block with SwiGLUPacked": lambda: TimmBlock(C, H, mlp_layer=SwiGLUPacked),
        "ResPostBlock": lambda: ResPostBlock(C, H, init_values=1.0),
        "ParallelScalingBlock": lambda: ParallelScalingBlock(C, H, init_values=1.0),
        "EvaBlock": lambda: EvaBlock(C, H, swiglu_mlp=True, scale_mlp=True, init_values=1.0),
    }[name]
    return nn.Sequential(make(), make())


TIMM = [
    "Block", "Block with LayerScale and qk norm", "Block with SwiGLU", "Block with SwiGLUPacked", "ResPostBlock",
    "ParallelScalingBlock", "EvaBlock",
]  # fmt: skip


@pytest.mark.parametrize(("name", "sp", "length"), alternating(TIMM))
def test_timm_blocks(timm, name, sp, length):
    check(drawn(Vit(_timm_blocks(name), length)), randn(B, 3, 2, 2 * length), sp=sp)


@pytest.mark.parametrize("sp", [2, 4])
def test_timm_vision_transformer(timm, sp):
    from timm.models.vision_transformer import VisionTransformer

    options = dict(num_classes=0, global_pool="", reg_tokens=2, init_values=1.0, dynamic_img_size=True)
    model = VisionTransformer(img_size=(10, 14), patch_size=2, embed_dim=C, depth=2, num_heads=H, **options)
    check(drawn(model), randn(B, 3, 10, 14), sp=sp)


@pytest.mark.parametrize("sp", [2, 4])
def test_timm_rotary_attention(timm, sp):
    from timm.layers import RotaryEmbeddingCat
    from timm.models.eva import EvaBlock

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rope = RotaryEmbeddingCat(D, in_pixels=False, feat_shape=(5, 7))
            self.blocks = nn.ModuleList(EvaBlock(C, H, num_prefix_tokens=1) for _ in range(2))
            self.cls = nn.Parameter(torch.zeros(1, 1, C))

        def forward(self, x):
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
            for block in self.blocks:
                x = block(x, rope=self.rope.get_embed())
            return x[:, 1:]

    check(drawn(Model()), randn(B, 35, C), sp=sp)


# x-transformers


X_TRANSFORMERS = {
    "plain": {},
    "rotary": dict(rotary_pos_emb=True),
    "rotary, GLU, RMS norm": dict(rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True, ff_no_bias=True),
    "grouped queries": dict(attn_kv_heads=3),
    "qk norm": dict(attn_qk_norm=True),
    "qk norm per head": dict(attn_qk_norm=True, attn_qk_norm_dim_scale=True),
    "memory keys and values": dict(attn_num_mem_kv=4),
    "gated values": dict(attn_gate_values=True, attn_head_scale=True),
    "sandwich norm": dict(sandwich_norm=True),
    "causal": dict(causal=True),
}
IN_DECODERS = {"causal"}


@pytest.mark.parametrize(("name", "sp", "length"), alternating(X_TRANSFORMERS))
def test_x_transformers(name, sp, length):
    x_transformers = pytest.importorskip("x_transformers")
    options = {k: v for k, v in X_TRANSFORMERS[name].items() if k != "causal"}
    make = x_transformers.Decoder if name in IN_DECODERS else x_transformers.Encoder
    model = make(dim=C, depth=2, heads=H, attn_dim_head=8, attn_flash=True, **options)
    check(drawn(model), randn(B, length, C), sp=sp)


@both
def test_x_transformers_cross_attention(sp, length):
    x_transformers = pytest.importorskip("x_transformers")
    model = x_transformers.Encoder(dim=C, depth=2, heads=H, attn_dim_head=8, attn_flash=True, cross_attend=True)
    args = randn(B, length, C)
    check(drawn(model), args, sp=sp, local=2, kwargs=dict(context=randn(B, CONTEXT, C, seed=2)))


class LikeXTransformers(nn.Module):
    """Pre-norm, rotary, grouped queries, normed queries and keys, memory keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(C, n, bias=False) for n in (C, C // 4, C // 4, C))
        self.memory, self.scale = nn.Parameter(torch.zeros(2, 3, 4, D)), nn.Parameter(torch.ones(H, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q(x)), heads(self.k(x), 3), heads(self.v(x), 3)
        q, k = F.normalize(_rotate_half(q), dim=-1) * self.scale, F.normalize(_rotate_half(k), dim=-1)
        mk, mv = (m.unsqueeze(0).expand(len(x), -1, -1, -1) for m in self.memory)
        k, v = torch.cat([F.normalize(mk, dim=-1), k], dim=-2), torch.cat([mv, v], dim=-2)
        k, v = (p.repeat_interleave(H // 3, dim=1) for p in (k, v))
        return self.out(merged(sdpa(q, k, v, scale=10.0)))


@pytest.mark.parametrize(("sp", "length"), [*CASES, (3, 35)])
def test_like_x_transformers(sp, length):
    check(drawn(DiT(LikeXTransformers, SwiGLU)), *inputs(length), sp=sp)


# ControlNets


class ControlNet(nn.Module):
    """Returns the residuals of its blocks, as a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hint = nn.Linear(CIN, C), nn.Linear(3, C)
        self.blocks = nn.ModuleList(Block(Attention(), Mlp()) for _ in range(2))
        self.zero = nn.ModuleList(nn.Linear(C, C) for _ in range(2))

    def forward(self, x: Tensor, t: Tensor, hint: Tensor, scale: float) -> list[Tensor]:
        x, residuals = self.embed(x) + self.hint(hint), []
        for block, zero in zip(self.blocks, self.zero, strict=True):
            x = block(x, t)
            residuals.append(zero(x) * scale)
        return residuals


class Controlled(DiT):
    """Takes the residuals of its blocks, as a list."""

    def forward(self, x: Tensor, t: Tensor, residuals: list[Tensor | None]) -> Tensor:
        x = self.embed(x)
        for block, residual in zip(self.blocks, residuals, strict=True):
            x = block(x, t)
            x = x if residual is None else x + residual
        return self.last(x)


@both
def test_residuals_returned(sp, length):
    report = assert_exact(
        drawn(ControlNet()), *inputs(length), randn(B, length, 3, seed=3), 0.7, sp=sp, tolerance=TOLERANCE
    )
    assert "replicated" not in exchanges(report)
    assert regathered(report) == []
    assert report.unshards == 2


@pytest.mark.parametrize("missing", [False, True])
@both
def test_residuals_taken(missing, sp, length):
    residuals = [None if missing and i else randn(B, length, C, seed=4 + i) for i in range(2)]
    check(drawn(Controlled()), *inputs(length), residuals, sp=sp)


@both
def test_residuals_made_and_taken_in_one_graph(sp, length):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.control, self.model = ControlNet(), Controlled()

        def forward(self, x, t, hint):
            return self.model(x, t, self.control(x, t, hint, 0.5))

    check(drawn(Model()), *inputs(length), randn(B, length, 3, seed=3), sp=sp, sites=4)


TEXT, POOLED, HEADS, HEAD_DIM = 20, 16, 12, 8
FLUX = dict(
    in_channels=8, num_layers=1, num_single_layers=1, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
    joint_attention_dim=TEXT, pooled_projection_dim=POOLED, axes_dims_rope=(2, 2, 4),
)  # fmt: skip


def flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return drawn(FluxTransformer2DModel(**FLUX))


def flux_inputs(length: int, text: int = CONTEXT) -> dict[str, Any]:
    return dict(
        hidden_states=randn(B, length, 8), encoder_hidden_states=randn(B, text, TEXT, seed=2),
        pooled_projections=randn(B, POOLED, seed=3), timestep=torch.tensor([0.25, 0.5]),
        img_ids=torch.cartesian_prod(torch.arange(1), torch.arange(length), torch.arange(1)).float(),
        txt_ids=torch.zeros(text, 3), return_dict=False,
    )  # fmt: skip


@both
def test_flux_controlnet(sp, length):
    from diffusers import FluxControlNetModel

    model = drawn(FluxControlNetModel(**FLUX | dict(num_layers=2)), seed=1)
    kwargs = flux_inputs(length) | dict(controlnet_cond=randn(B, length, 8, seed=4), conditioning_scale=0.7)
    report = assert_exact(model, sp=sp, kwargs=kwargs, tolerance=TOLERANCE)
    assert len(report.attention) == 3
    assert "replicated" not in exchanges(report)
    assert regathered(report) == []
    assert report.unshards == 3


@both
def test_flux_with_control(sp, length):
    channels = HEADS * HEAD_DIM
    kwargs = flux_inputs(length) | dict(
        controlnet_block_samples=[randn(B, length, channels, seed=5)],
        controlnet_single_block_samples=[randn(B, length, channels, seed=8)],
    )
    check(flux(), sp=sp, kwargs=kwargs)


@both
def test_flux_controlnet_and_model_in_one_graph(sp, length):
    from diffusers import FluxControlNetModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.control = flux(), drawn(FluxControlNetModel(**FLUX), seed=1)

        def forward(self, condition, **inputs):
            double, single = self.control(controlnet_cond=condition, **inputs)
            return self.model(controlnet_block_samples=double, controlnet_single_block_samples=single, **inputs)

    check(Model(), randn(B, length, 8, seed=4), sp=sp, kwargs=flux_inputs(length), sites=4)


SD3 = dict(
    sample_size=32, patch_size=2, in_channels=4, num_layers=2, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
    joint_attention_dim=TEXT, caption_projection_dim=HEADS * HEAD_DIM, pooled_projection_dim=POOLED,
    pos_embed_max_size=16,
)  # fmt: skip


def sd3_inputs(size: tuple[int, int]) -> dict[str, Any]:
    return dict(
        hidden_states=randn(B, 4, 2 * size[0], 2 * size[1]), encoder_hidden_states=randn(B, CONTEXT, TEXT, seed=2),
        pooled_projections=randn(B, POOLED, seed=3), timestep=torch.tensor([250.0, 500.0]), return_dict=False,
    )  # fmt: skip


@pytest.mark.parametrize(("sp", "size"), IMAGES[:2])
def test_sd3_controlnet(sp, size):
    from diffusers import SD3ControlNetModel

    condition = randn(B, 4, 2 * size[0], 2 * size[1], seed=4)
    kwargs = sd3_inputs(size) | dict(controlnet_cond=condition, conditioning_scale=0.7)
    report = assert_exact(drawn(SD3ControlNetModel(**SD3)), sp=sp, kwargs=kwargs, tolerance=TOLERANCE)
    assert len(report.attention) == 2
    assert "replicated" not in exchanges(report)
    assert regathered(report) == []
    assert report.unshards == 2


@pytest.mark.parametrize(("sp", "size"), IMAGES[:2])
def test_sd3_with_control(sp, size):
    from diffusers import SD3Transformer2DModel

    residuals = [randn(B, size[0] * size[1], HEADS * HEAD_DIM, seed=5 + i) for i in range(2)]
    kwargs = sd3_inputs(size) | dict(block_controlnet_hidden_states=residuals)
    check(drawn(SD3Transformer2DModel(**SD3, out_channels=4)), sp=sp, kwargs=kwargs)


# adapters


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base, self.scale = base, 0.5
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features)
        self.magnitude = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight + self.scale * self.up.weight @ self.down.weight
        norm = self.magnitude / weight.norm(dim=1)
        return norm * (F.linear(x, self.base.weight) + self.up(self.down(x)) * self.scale) + self.base.bias


def replaced(model: nn.Module, make: Callable[[nn.Linear], nn.Module], where: str = "") -> nn.Module:
    """``model`` with ``make`` of each linear layer whose name has ``where`` in it."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and where in name:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, make(module))
    return model


@both
def test_own_adapters(sp, length):
    check(drawn(replaced(DiT(), LoraLinear)), *inputs(length), sp=sp)


def peft_adapted(adapters: list[str], **options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.2", "proj_mlp", "x_embedder", "norm1.linear"]
    model = flux()
    for name in adapters:
        config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False, **options)
        model.add_adapter(config, adapter_name=name)
    return model.eval().requires_grad_(False)


PEFT = ["one", "two", "merged", "rank-stabilised with bias"]


@pytest.mark.parametrize(("kind", "sp", "length"), alternating(PEFT))
def test_peft_lora(kind, sp, length):
    options = dict(use_rslora=True, lora_bias=True) if "bias" in kind else {}
    model = peft_adapted(["one", "other"] if kind == "two" else ["one"], **options)
    if kind == "two":
        model.set_adapters(["one", "other"], [0.7, -0.5])
    if kind == "merged":
        model.fuse_lora(lora_scale=0.5)
    check(model, sp=sp, kwargs=flux_inputs(length))


@pytest.mark.long
@pytest.mark.parametrize(("sp", "length"), CASES)
def test_peft_dora(sp, length):
    """Dynamo cannot trace peft's DoRA and breaks the graph at every adapter."""
    report = assert_exact(peft_adapted(["one"], use_dora=True), sp=sp, kwargs=flux_inputs(length), tolerance=TOLERANCE)
    assert len(report.attention) == 2
    assert "replicated" not in exchanges(report)
    assert regathered(report) == []


# quantised weights


class Int8Linear(nn.Module):
    """Weights in int8, one scale per output channel; activations as they are, or in int8 per token."""

    def __init__(self, linear: nn.Linear, dynamic: bool = False) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale[:, 0])
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))
        self.bias, self.dynamic = linear.bias, dynamic

    def forward(self, x: Tensor) -> Tensor:
        if not self.dynamic:
            return F.linear(x, self.weight.to(x.dtype)) * self.scale + self.bias
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        whole = torch._int_mm((x / scale).round().clamp(-128, 127).to(torch.int8), self.weight.t())
        return (whole.to(x.dtype) * scale * self.scale + self.bias).reshape(*shape[:-1], -1)


@pytest.mark.parametrize("dynamic", [False, True])
@both
def test_own_int8_weights(dynamic, sp, length):
    model = replaced(drawn(DiT()), lambda linear: Int8Linear(linear, dynamic), "mlp" if dynamic else "")
    check(model, *inputs(length), sp=sp)


def uncopied(model: nn.Module) -> Callable[..., Any]:
    """Some quantised weights cannot be copied."""
    return lambda *args, **kwargs: model(*args, **kwargs)


TORCHAO = ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"]


@pytest.mark.parametrize(("kind", "sp", "length"), alternating(TORCHAO))
def test_torchao(kind, sp, length):
    quantization = pytest.importorskip("torchao.quantization")
    model = drawn(DiT())
    quantization.quantize_(model.blocks, getattr(quantization, kind)())
    assert_exact(model, *inputs(length), sp=sp, tolerance=TOLERANCE)  # its own ops may be gathered for


@pytest.mark.parametrize(("kind", "sp", "length"), alternating(["qint8", "qint4"]))
def test_quanto(kind, sp, length):
    quanto = pytest.importorskip("optimum.quanto")
    model = drawn(DiT())
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    if kind == "qint4":
        with pytest.raises(spcompile.UnsupportedGraphError, match="cannot be traced before dispatch"):
            simulate(uncopied(model), inputs(length), sp=sp)
    else:
        assert_exact(uncopied(model), *inputs(length), sp=sp, tolerance=TOLERANCE)  # its own op is gathered for


@pytest.mark.parametrize(("kind", "sp", "length"), alternating(["Q8_0", "Q4_0"]))
def test_gguf(kind, sp, length):
    gguf = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    quant_type = getattr(gguf.GGMLQuantizationType, kind)

    def make(linear):
        if linear.in_features % 32:
            return linear
        new = GGUFLinear(linear.in_features, linear.out_features, True, torch.float32)
        data = torch.from_numpy(gguf.quants.quantize(linear.weight.numpy(), quant_type))
        new.weight = GGUFParameter(data, quant_type=quant_type)
        new.bias = linear.bias
        return new

    model = replaced(flux(), make).requires_grad_(False)
    with torch.no_grad():
        (want,) = model(**flux_inputs(length))
    run = simulate(model, kwargs=flux_inputs(length), sp=sp)
    assert run.report.attention
    assert not run.report.regathers
    for (out,) in run.outputs:  # eagerly even the output is a GGUFParameter
        torch.testing.assert_close(out.as_subclass(Tensor), want.as_subclass(Tensor), rtol=1e-5, atol=1e-5)


# what mixes tokens without attention: exact, whatever it costs


class With(nn.Module):
    """Attention, and ``op(self, y)`` on what it gives, with weights that some ops need."""

    def __init__(self, op: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.op, self.attention, self.linear, self.pooled = op, Attention(), nn.Linear(C, C), nn.Linear(C, 2 * C)
        self.over_tokens, self.over_grid = nn.Conv1d(C, C, 3, padding=1, groups=C), nn.Conv2d(C, C, 3, padding=1)
        self.group_norm, self.router, self.experts = nn.GroupNorm(4, C), nn.Linear(C, 3), nn.Parameter(randn(3, C, C))
        self.query = nn.Parameter(torch.zeros(1, 1, C))

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(x)
        return y + self.op(self, y)


def _modulated(m, x, pooled):
    shift, scale = m.pooled(pooled).unsqueeze(1).chunk(2, dim=-1)
    return x * (1 + scale) + shift


def _linear_attention(m, x):
    q, k, v = map(heads, m.attention.qkv(x).chunk(3, dim=-1))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return merged(q @ (k.mT @ v) / (q @ k.sum(2).unsqueeze(-1)))


def _linear_attention_einsum(m, x):
    q, k, v = map(heads, m.attention.qkv(x).chunk(3, dim=-1))
    q, k = q.softmax(-1), k.softmax(-2)
    return merged(torch.einsum("bhnd,bhde->bhne", q, torch.einsum("bhnd,bhne->bhde", k, v)))


def _linear_attention_sana(m, x):
    """Values with a row of ones, whose product is the denominator."""
    q, k, v = (p.mT.unflatten(1, (H, D)) for p in m.attention.qkv(x).chunk(3, dim=-1))
    v = F.pad(v, (0, 0, 0, 1), value=1.0)
    y = (v @ F.relu(k).mT) @ F.relu(q)
    return (y[:, :, :-1] / (y[:, :, -1:] + 1e-3)).flatten(1, 2).mT


def _attention_pool(m, x):
    weights = (x @ m.query.mT).softmax(dim=1)
    return _modulated(m, x, (weights * x).sum(1))


def _sdpa_pool(m, x):
    pooled = sdpa(heads(m.query.expand(len(x), -1, -1)), heads(x), heads(x))
    return _modulated(m, x, merged(pooled)[:, 0])


def _masked_mean(m, x):
    keep = (torch.arange(x.shape[1]) < x.shape[1] - 3).to(x.dtype)[None, :, None]
    return _modulated(m, x, (x * keep).sum(1) / keep.sum(1))


def _over_grid(m, x):
    grid = x.mT.unflatten(2, (-1, 5) if x.shape[1] % 5 == 0 else (-1, 13))
    return m.over_grid(grid).flatten(2).mT


def _experts_choose(m, x):
    scores = m.router(x).softmax(-1).mT
    weights, chosen = scores.topk(4, dim=-1)
    seen = x.gather(1, chosen.flatten(1).unsqueeze(-1).expand(-1, -1, C)).unflatten(1, (3, 4))
    y = torch.einsum("betc,ecd->betd", seen, m.experts) * weights.unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(1, chosen.flatten(1).unsqueeze(-1).expand(-1, -1, C), y.flatten(1, 2))


def _instance_norm(m, x):
    return F.instance_norm(x.mT).mT


def _token_shift(m, x):
    return m.linear(F.pad(x, (0, 0, 1, -1)) - x)


def _moment(m, x):
    std, mean = torch.std_mean(x, dim=1, keepdim=True)
    return (x - mean) / (std + 1e-3)


# in comments: regathers of the two blocks, two ranks, when this was written
OVER_TOKENS = {
    "mean": lambda m, x: _modulated(m, x, x.mean(1)),  # 2
    "mean of some tokens": _masked_mean,  # 2
    "max": lambda m, x: _modulated(m, x, x.amax(1)),  # 2
    "max and its place": lambda m, x: _modulated(m, x, x.max(dim=1).values),  # 2
    "first token": lambda m, x: _modulated(m, x, x[:, 0]),  # 2
    "attention pool": _attention_pool,  # 4
    "attention pool by SDPA": _sdpa_pool,  # 4
    "adaptive pool": lambda m, x: _modulated(m, x, F.adaptive_avg_pool1d(x.mT, 1).squeeze(-1)),  # 2
    "linear attention": _linear_attention,  # 6
    "linear attention by einsum": _linear_attention_einsum,  # 4
    "linear attention as in Sana": _linear_attention_sana,  # 4
    "cumsum": lambda m, x: x.cumsum(1) / 10,  # 2
    "convolution": lambda m, x: m.over_tokens(x.mT).mT,  # 2
    "convolution of the grid": _over_grid,  # 2
    "group norm": lambda m, x: m.group_norm(x.mT).mT,  # 2
    "instance norm": _instance_norm,  # 2
    "standardised": _moment,  # 2
    "token shift": _token_shift,  # 2
    "experts choose tokens": _experts_choose,  # 6
    "softmax": lambda m, x: x.softmax(1) * 10,  # 2
    "sum of squares": lambda m, x: x * x.square().sum(1, keepdim=True).rsqrt(),  # 2
    "norm": lambda m, x: x / x.norm(dim=1, keepdim=True),  # 2
    "sorted": lambda m, x: x.sort(dim=1).values,  # 2
    "mixed by a matrix": lambda m, x: torch.einsum(
        "st,btc->bsc", torch.ones(x.shape[1], x.shape[1]).tril() / 10, x
    ),  # 2
}


@pytest.mark.parametrize(("name", "sp", "length"), alternating(OVER_TOKENS))
def test_mixing_tokens_is_exact(name, sp, length):
    report = assert_exact(
        drawn(DiT(lambda: With(OVER_TOKENS[name]))), *inputs(length), sp=sp, tolerance=TOLERANCE
    )  # fmt: skip
    found = [e for e in exchanges(report) if e != "replicated"]
    assert len(found) >= 2


@both
def test_only_linear_attention_is_exact(sp, length):
    assert_exact(drawn(DiT(lambda: Attention(lambda m, x: m.out(_linear(m, x))))), *inputs(length), sp=sp,
                 tolerance=TOLERANCE)  # fmt: skip


def _linear(m, x):
    q, k, v = map(heads, m.qkv(x).chunk(3, dim=-1))
    return merged((F.elu(q) + 1) @ ((F.elu(k) + 1).mT @ v)) / x.shape[1]
