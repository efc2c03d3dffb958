"""Whole graphs: an op between two attentions, on tokens that are sharded when it meets them.

Every rank must return the eager result; `report().regathers` says whether the op was computed on chunks.
x is [B, S, C] = [2, 12 or 11, 24].
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from helpers import B, Between, C, H, SelfAttention, assert_exact, attend, exchanges, regathered, tokens
from torch import nn

EVEN, UNEVEN = 12, 11  # EVEN divides by 2, 3 and 4


def _scatter(x):
    x = x.clone()
    x[:, 2:7] = x[:, 2:7] * 2
    return x


def _rotate(x, angles):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(2)


def _modulate(x, table):
    shift, scale, gate = table.unflatten(-1, (3, C)).unbind(2)
    return x + gate * (F.layer_norm(x, (C,)) * (1 + scale) + shift)


def _swiglu(x):
    a, b = torch.cat([x, x], dim=-1).chunk(2, dim=-1)
    return F.silu(a) * b


def _heads_and_back(x):
    return x.unflatten(-1, (H, -1)).permute(0, 2, 1, 3).contiguous().transpose(1, 2).reshape(B, -1, C)


def _batch_first_and_back(x):
    flat = x.flatten(0, 1)
    return F.group_norm(flat, 3).view(x.shape)


def _conv_per_token(x, w):
    return x + F.conv1d(x.flatten(0, 1).unsqueeze(1), w, padding=1).squeeze(1).view(x.shape)


# op on x and side inputs -> tokens; shapes of the side inputs, with "S" for the number of tokens
ON_CHUNKS = {
    "nothing": (lambda x: x, []),
    "heads split off, permuted and merged": (_heads_and_back, []),
    "batch and tokens merged": (_batch_first_and_back, []),
    "token dim first": (lambda x: (x.transpose(0, 1) * 2).transpose(0, 1), []),
    "a size-1 dim put in and taken out": (lambda x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(-1), []),
    "linear": (lambda x, w: F.linear(x, w), [(C, C)]),
    "matmul": (lambda x, w: x @ w, [(C, C)]),
    "batched matmul": (lambda x, w: torch.bmm(x, w), [(B, C, C)]),
    "einsum": (lambda x, w: torch.einsum("bsc,cd->bsd", x, w), [(C, C)]),
    "layer_norm": (lambda x, w: F.layer_norm(x, (C,), w), [(C,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (C,), w), [(C,)]),
    "softmax over channels": (lambda x: x.softmax(-1), []),
    "norm over channels": (lambda x: F.normalize(x, dim=-1), []),
    "mean over channels": (lambda x: x - x.mean(-1, keepdim=True), []),
    "std over channels": (lambda x: x / x.std(-1, keepdim=True), []),
    "max over channels": (lambda x: x / x.max(-1, keepdim=True).values, []),
    "a sort over channels": (lambda x: x.sort(-1).values, []),
    "cumsum over channels": (lambda x: x.cumsum(-1), []),
    "channels flipped and rolled": (lambda x: x.flip(-1).roll(3, dims=2), []),
    "a lookup in the channels": (lambda x, i: x.gather(-1, i.argsort(-1)), [("B", "S", C)]),
    "modulation per sample": (lambda x, m: x * (1 + m.unsqueeze(1)), [("B", C)]),
    "modulation per token": (_modulate, [("B", "S", 3 * C)]),
    "positions [S, C]": (lambda x, p: x + p, [("S", C)]),
    "positions counted in forward": (lambda x: x + torch.arange(x.shape[1]).unsqueeze(-1).sin(), []),
    "an embedding of positions": (lambda x, w: x + F.embedding(torch.arange(x.shape[1]), w), [(EVEN, C)]),
    "complex rotary": (_rotate, [("S", C // 2)]),
    "a token mask": (lambda x, m: torch.where(m > 0, x, 0.0), [("B", "S", 1)]),
    "masked_fill": (lambda x, m: x.masked_fill(m > 0, 0.0), [("S", 1)]),
    "another dtype": (lambda x: x.float().sin().to(x), []),
    "dropout in eval": (lambda x: F.dropout(x, 0.5, training=False), []),
    "a gated MLP": (_swiglu, []),
    "glu": (lambda x: F.glu(torch.cat([x, x], -1), -1), []),
    "stack and unbind": (lambda x: sum(torch.stack([x, 2 * x], dim=2).unbind(2)), []),
    "stack and select": (lambda x: torch.stack([x, 2 * x])[1], []),
    "a new dim expanded": (lambda x: x.unsqueeze(2).expand(-1, -1, 3, -1).sum(2), []),
    "expand_as": (lambda x: x + x[..., :1].expand_as(x), []),
    "channels repeated": (lambda x: x[..., : C // 2].repeat(1, 1, 2), []),
    "channels repeated one by one": (lambda x: x[..., : C // 2].repeat_interleave(2, dim=-1), []),
    "samples repeated": (lambda x: x.repeat(2, 1, 1), []),
    "samples doubled by cat": (lambda x: torch.cat([x, x]), []),
    "samples chosen": (lambda x: x[:1], []),
    "channels padded": (lambda x: F.pad(x[..., :20], (1, 3)), []),
    "a convolution per token": (_conv_per_token, [(1, 1, 3)]),
    "text put before": (lambda x, t: torch.cat([t, x], dim=1), [("B", 5, C)]),
    "text put before and behind": (lambda x, t: torch.cat([t, x, 2 * t], dim=1), [("B", 5, C)]),
    "text put before and cut off": (lambda x, t: torch.cat([t, x], dim=1).tanh()[:, 5:], [("B", 5, C)]),
    "a cut inside the tokens": (lambda x: x[:, 3:], []),
    "a cut from the end": (lambda x: x[:, :-4], []),
    "narrow": (lambda x: x.narrow(1, 2, 5), []),
    "a split and the parts swapped": (lambda x: torch.cat(x.tensor_split([4], dim=1)[::-1], dim=1), []),
    "chunks in another order": (lambda x: torch.cat(x.chunk(3, dim=1)[::-1], dim=1), []),
    "the first token apart": (lambda x: torch.cat([x[:, :1] * 2, x[:, 1:]], dim=1), []),
    "halves added": (lambda x: x[:, :5] + x[:, 5:10], []),
    "a write into some tokens": (_scatter, []),
    "zeros of the same shape": (lambda x: x + torch.zeros_like(x) + x.new_zeros(C), []),
}  # fmt: skip

# these mix or reorder tokens in a way that chunks cannot serve
ON_ALL_TOKENS = {
    "tokens flipped": (lambda x: x.flip(1), []),
    "tokens sorted": (lambda x: x.sort(dim=1).values, []),
    "every other token of some": (lambda x: x[:, 1:8:2], []),
    "tokens looked up": (lambda x, i: x[:, i.argsort()], [("S",)]),
    "tokens gathered": (lambda x, i: x.gather(1, i.argsort(1)), [("B", "S", C)]),
    "tokens repeated": (lambda x: x.repeat(1, 2, 1), []),
    "tokens repeated one by one": (lambda x: x.repeat_interleave(2, dim=1), []),
    "tokens seen as channels": (lambda x: x.reshape(B, C, -1).mT, []),
    "no rule": (lambda x: torch.trapezoid(x, dim=-1).unsqueeze(-1) + x.triu(), []),
}  # fmt: skip

# tokens are mixed on chunks: partial sums, running sums, rows of the neighbours
OVER_TOKENS = {
    "padding with tokens": (lambda x: F.pad(x, (0, 0, 1, 1)), []),
    "cumsum over tokens": (lambda x: x.cumsum(1), []),
    "tokens rolled": (lambda x: x.roll(2, dims=1), []),
    "a convolution over tokens": (lambda x, w: F.conv1d(x.mT, w, padding=1).mT, [(C, C, 3)]),
    "group_norm over tokens": (lambda x: F.group_norm(x.mT, 3).mT, []),
    "tokens rolled back and forth": (lambda x: x.roll(3, 1).roll(-3, 1), []),
    "one token": (lambda x: x * x[:, 4:5].sigmoid() + x[:, -1, None], []),
    "mean": (lambda x: x - x.mean(1, keepdim=True), []),
    "max": (lambda x: x - x.amax(1, keepdim=True), []),
    "pooling that modulates": (lambda x, w: x * (x.mean(1) @ w).sigmoid().unsqueeze(1), [(C, C)]),
    "softmax": (lambda x: x.softmax(1), []),
    "linear attention": (lambda x: x @ torch.einsum("bsc,bsd->bcd", x.softmax(1), x), []),
    "standardised": (lambda x: (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True), []),
}

some_in_short = pytest.mark.parametrize(
    ("degree", "num_tokens"),
    [
        *((2, UNEVEN), (3, EVEN), (4, UNEVEN)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, EVEN), (3, UNEVEN), (4, EVEN), (6, UNEVEN))),
    ],
)


def check(op, side, num_tokens, degree):
    """In float64: what chunks change in the order of sums is far below any mistake."""
    sizes = {"B": B, "S": num_tokens}
    inputs = [tokens(num_tokens), *(torch.randn([sizes.get(n, n) for n in shape]) for shape in side)]
    report = assert_exact(Between(op).double(), *(x.double() for x in inputs), degree=degree, tolerance=1e-13)
    assert exchanges(report) == ["ulysses"] * 2
    return report


@pytest.mark.parametrize(("op", "side"), ON_CHUNKS.values(), ids=ON_CHUNKS.keys())
@some_in_short
def test_computed_on_chunks(op, side, num_tokens, degree):
    report = check(op, side, num_tokens, degree)
    assert regathered(report) == []
    assert report.unshards == 1


@pytest.mark.parametrize(("op", "side"), ON_ALL_TOKENS.values(), ids=ON_ALL_TOKENS.keys())
@some_in_short
def test_regathered_reported_and_right(op, side, num_tokens, degree):
    report = check(op, side, num_tokens, degree)
    assert regathered(report)
    assert all("tests" in entry.source and entry.reason and entry.bytes_per_rank for entry in report.regathers)


@pytest.mark.parametrize(("op", "side"), OVER_TOKENS.values(), ids=OVER_TOKENS.keys())
@some_in_short
def test_mixed_on_chunks(op, side, num_tokens, degree):
    report = check(op, side, num_tokens, degree)
    assert all("tests" in entry.source for entry in report.reductions)


MIXED = {name: case for name, case in OVER_TOKENS.items() if name != "linear attention"}


@pytest.mark.parametrize(("op", "side"), MIXED.values(), ids=MIXED.keys())
def test_mixing_tokens_gathers_none(op, side):
    """Where tokens are many; of few, gathering them sends less."""
    report = check(op, side, num_tokens=41, degree=2)
    assert regathered(report) == []
    sent = sum(entry.bytes_per_rank for entry in report.reductions)
    assert sent <= B * 24 * C * 8 / 2, "as much as half of gathering the tokens"


def test_linear_attention_sends_a_state_per_head():
    def attend_linearly(x):
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in (x, x.softmax(1), x * 2))
        return (q @ (k.mT @ v) / (q @ k.sum(2).unsqueeze(-1)).exp()).transpose(1, 2).flatten(2)

    report = check(attend_linearly, [], num_tokens=41, degree=4)
    assert regathered(report) == []
    assert sorted(e.op for e in report.reductions) == sorted(
        ["aten.softmax.int", "aten.matmul", "aten.sum.dim_IntList"]
    )


# chains of such ops, on any exchange

WITHOUT_SIDE_INPUTS = {
    name: op for table in (ON_CHUNKS, ON_ALL_TOKENS, OVER_TOKENS) for name, (op, side) in table.items() if not side
}


class Chain(nn.Module):
    """Attention, ops, attention, ops, attention; what an op keeps in shape is added to what it was given."""

    def __init__(self, names: list[str], residual: bool, causal: list[bool]) -> None:
        super().__init__()
        self.names, self.residual = names, residual
        self.attention = nn.ModuleList(SelfAttention(is_causal=c) for c in causal)

    def forward(self, x):
        first, second = self.attention
        x = start = x + first(x)
        for i, name in enumerate(self.names):
            y = WITHOUT_SIDE_INPUTS[name](x)
            x = x + y if self.residual and x.shape == y.shape else y
            if i == len(self.names) // 2:
                x = x + second(x)
        x = x + second(x)
        return x + start if x.shape == start.shape else x


CHAIN_DEGREES = [
    {"ulysses": 2}, {"ulysses": 3}, {"ulysses": 5}, {"ring": 2}, {"ring": 3}, {"kv_gather": 2}, {"sp": 4},
    {"ring": 2, "ulysses": 2}, {"kv_gather": 2, "ulysses": 2}, {"ring": 2, "kv_gather": 2},
]  # fmt: skip


@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(s, marks=pytest.mark.long) for s in range(15, 500))])
def test_chains_of_ops_are_exact(seed):
    draw = random.Random(seed)
    names = draw.choices(sorted(WITHOUT_SIDE_INPUTS), k=draw.randint(2, 5))
    model = Chain(names, draw.random() < 0.3, [draw.random() < 0.5 for _ in range(2)]).double()
    x, degrees = tokens(draw.choice([11, 12, 13, 16, 24])).double(), draw.choice(CHAIN_DEGREES)
    try:
        with torch.no_grad():
            fits = bool(model(x).isfinite().all())
    except RuntimeError:  # too few tokens are left for an op
        fits = False
    if fits:
        assert_exact(model, x, tolerance=1e-9, **degrees)


# where sharding begins, and how several streams share it


class Double(nn.Module):
    """Flux-like: text and image apart, joint attention; then one stream of both; the image is returned."""

    def __init__(self, text_first: bool = True) -> None:
        super().__init__()
        self.embed, self.text_qkv, self.image_qkv = nn.Linear(C, C), nn.Linear(C, 3 * C), nn.Linear(C, 3 * C)
        self.single, self.out, self.text_first = SelfAttention(), nn.Linear(C, C), text_first

    def forward(self, image, text):
        image = self.embed(image)
        streams = [text, image] if self.text_first else [image, text]
        parts = [self.text_qkv(text), self.image_qkv(image)]
        joint = torch.cat(parts if self.text_first else parts[::-1], dim=1)
        attended = attend(*joint.chunk(3, dim=-1))
        cut = streams[0].shape[1]
        first, second = streams[0] + attended[:, :cut], streams[1] + attended[:, cut:]
        whole = torch.cat([first, second], dim=1)
        whole = whole + self.single(whole)
        return self.out(whole[:, cut:] if self.text_first else whole[:, :cut])


@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize(("num_text", "num_image"), [(4, 12), (7, 15), (1, 5), (13, 12)])
@pytest.mark.parametrize("degree", [2, 4])
def test_text_and_image_share_their_cuts(num_text, num_image, text_first, degree):
    model, inputs = Double(text_first).double(), (tokens(num_image).double(), tokens(num_text).double())
    report = assert_exact(model, *inputs, degree=degree, tolerance=1e-13)
    assert exchanges(report) == ["ulysses"] * 2
    assert regathered(report) == []
    assert report.unshards == 1


class Factorised(nn.Module):
    """Latte-like: attention over space with frames in the batch, then over time with space in the batch."""

    def __init__(self, heads: int = H) -> None:
        super().__init__()
        self.space, self.time = SelfAttention(heads=heads), SelfAttention(heads=heads)

    def forward(self, x):  # [B, F, S, C]
        batch, frames, length, channels = x.shape
        x = x.flatten(0, 1)
        x = x + self.space(x)
        x = x.view(batch, frames, length, channels).transpose(1, 2).flatten(0, 1)
        x = x + self.time(x)
        return x.view(batch, length, frames, channels).transpose(1, 2)


@pytest.mark.parametrize(("frames", "length"), [(4, 6), (3, 8), (3, 7)])
@pytest.mark.parametrize("degree", [2, 4])
def test_attention_along_a_dim_that_is_not_cut_needs_no_exchange(frames, length, degree):
    x = torch.randn(B, frames, length, C, dtype=torch.double)
    report = assert_exact(Factorised().double(), x, degree=degree, tolerance=1e-13)
    assert sorted(exchanges(report)) == ["local", "ulysses"]
    assert regathered(report) == []


class Video(nn.Module):
    """Tokens (f h w) that are seen as frames in between."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = SelfAttention(), SelfAttention()

    def forward(self, x, per_frame):  # [B, F * S, C], [B, F, 1, C]
        x = x + self.before(x)
        x = (x.unflatten(1, (per_frame.shape[1], -1)) * per_frame).flatten(1, 2)
        return x + self.after(x)


@pytest.mark.parametrize(("frames", "length", "degree"), [(4, 5, 2), (8, 3, 4), (4, 4, 2), (3, 5, 2), (3, 4, 2)])
def test_frames_that_divide_are_cut_by_frames(frames, length, degree):
    x, per_frame = tokens(frames * length).double(), torch.randn(B, frames, 1, C, dtype=torch.double)
    report = assert_exact(Video().double(), x, per_frame, degree=degree, tolerance=1e-13)
    if frames % degree == 0:
        assert regathered(report) == []


@pytest.mark.parametrize("num_tokens", [B, H, C, 2 * C])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_lengths_that_look_like_other_dims_are_not_mistaken(num_tokens, batch):
    model, x = Between(lambda x: F.layer_norm(x, (C,))).double(), tokens(num_tokens, batch).double()
    report = assert_exact(model, x, tolerance=1e-13)
    assert exchanges(report) == ["ulysses"] * 2
    assert regathered(report) == []


def test_a_value_read_before_and_after_attention_stays_right():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SelfAttention()

        def forward(self, x):
            y = x * 2
            return y - self.inner(y) + x, y

    report = assert_exact(Residual(), tokens(7))
    assert regathered(report) == []


def test_q_k_and_v_used_twice_stay_right():
    def twice(x):
        q, k, v = x.chunk(3, dim=-1)
        return attend(q, k, v) + attend(k, q, v) + q

    assert exchanges(assert_exact(lambda x: twice(x @ x.mT @ x), tokens(9, channels=3 * C).double(), tolerance=1e-13))


@pytest.mark.parametrize("batch", [1, 2])
def test_sharding_begins_after_a_patch_convolution(batch):
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.block = nn.Conv2d(3, C, 2, stride=2), SelfAttention()

        def forward(self, image):
            x = self.patch(image).flatten(2).mT
            return x + self.block(x)

    report = assert_exact(Patches().double(), torch.randn(batch, 3, 10, 6).double(), tolerance=1e-13)
    assert regathered(report) == []
    assert exchanges(report) == ["ulysses"]


class Film(nn.Module):
    """Every block sees its tokens as [frames, height, width] and adds something per frame; ``text``: joined before."""

    def __init__(self, frames: int, text: int = 0) -> None:
        super().__init__()
        self.frames, self.text = frames, text
        self.blocks = nn.ModuleList(SelfAttention() for _ in range(2))
        self.time = nn.Parameter(torch.randn(1, frames, 1, C))

    def forward(self, x):
        for block in self.blocks:
            text, video = x[:, : self.text], x[:, self.text :]
            seen = video.unflatten(1, (self.frames, -1)) * self.time
            seen = seen + seen.square().mean(-1, keepdim=True)
            x = torch.cat([text, seen.flatten(1, 2)], dim=1)
            x = x + block(x)
        return x


@pytest.mark.parametrize("text", [0, 7])
@pytest.mark.parametrize(("frames", "degree"), [(3, 2), (3, 4), (5, 3), (4, 2), (7, 8)])
def test_frames_that_do_not_divide_are_shared_one_by_one(frames, degree, text):
    x = torch.randn(B, text + frames * 24, C).double()
    report = assert_exact(Film(frames, text).double(), x, degree=degree, tolerance=1e-13)
    assert regathered(report) == []


def test_frames_too_small_to_share_are_gathered():
    report = assert_exact(Film(5).double(), torch.randn(B, 15, C).double(), degree=4, tolerance=1e-13)
    assert regathered(report)


def test_tokens_of_a_batch_merged_and_parted_again():
    def op(x):
        flat = x.reshape(-1, C)
        return (flat * 2).view(x.shape) + flat.square().unflatten(0, (B, -1))

    assert regathered(assert_exact(Between(op).double(), tokens(11).double(), tolerance=1e-13)) == []


def test_an_empty_part_of_a_cat_is_no_segment():
    def op(x):
        return torch.cat([x.new_zeros(B, 0, C), x], dim=1) + x

    assert regathered(assert_exact(Between(op).double(), tokens(11).double(), tolerance=1e-13)) == []


class ExpertChoice(nn.Module):
    """Each expert takes the tokens that score highest for it, and adds to them."""

    def __init__(self, experts: int = 2, taken: int = 2) -> None:
        super().__init__()
        self.router, self.taken = nn.Linear(C, experts), taken
        self.experts = nn.ModuleList(nn.Linear(C, C) for _ in range(experts))

    def forward(self, x):
        scores, chosen = self.router(x).softmax(-1).topk(self.taken, dim=1)
        for e, expert in enumerate(self.experts):
            index = chosen[:, :, e, None].expand(-1, -1, C)
            x = x.scatter_add(1, index, expert(x.gather(1, index)) * scores[:, :, e, None])
        return x


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("experts", [1, 3])
def test_expert_choice_gathers_scores_and_no_tokens(degree, experts):
    model = ExpertChoice(experts)
    report = assert_exact(Between(model).double(), tokens(41).double(), degree=degree, tolerance=1e-13)
    assert regathered(report) == ["aten.topk"]
    assert [r.op for r in report.reductions] == ["aten.gather"] * experts


def _put(x, i, y):
    return x.transpose(0, 1).index_put((i,), y.transpose(0, 1), accumulate=True).transpose(0, 1)


def _assign(x, i, y):
    x = x.clone()
    x[:, i] = y
    return x


WRITTEN = {
    "index_add": lambda x, i, y: x.index_add(1, i, y),
    "index_add, scaled": lambda x, i, y: x.index_add(1, i, y, alpha=0.5),
    "index_add in place": lambda x, i, y: x.clone().index_add_(1, i.int(), y),
    "index_copy": lambda x, i, y: x.index_copy(1, i[1:3], y[:, 1:3]),
    "index_put": _put,
    "an assignment": lambda x, i, y: _assign(x, i[1:5], y[:, 1:5]),
    "index_put of negative places": lambda x, i, y: _put(x, i - x.shape[1], y),
    "scatter_add": lambda x, i, y: x.scatter_add(1, i[None, :, None].expand(B, -1, C), y),
    "scatter_add to some samples and channels": lambda x, i, y: x.scatter_add(1, i[None, :, None].expand(1, -1, 5), y),
    "scatter": lambda x, i, y: x.scatter(1, i[:1, None, None].expand(-1, 1, C), y),
    "scatter of a value": lambda x, i, y: x.scatter(1, i[None, :, None].expand(B, -1, C), 3.0),
    "along the flattened batch": lambda x, i, y: x.flatten(0, 1).index_add(0, i, y[0]).view(x.shape),
    "to tokens in front": lambda x, i, y: x.transpose(0, 1).index_add(0, i, y.transpose(0, 1)).transpose(0, 1),
    "a slice of tokens": lambda x, i, y: x[:, 2:].index_add(1, i - 2, y),
}


@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN.keys())
@pytest.mark.parametrize(("degree", "num_tokens"), [(2, 11), (3, 12), (4, 11)])
def test_rows_are_written_where_they_lie(write, degree, num_tokens):
    """Some rows twice. What is written and where is on every rank."""
    places, rows = torch.tensor([3, 9, 3, 2, 10, 3]), torch.randn(B, 6, C).double()
    report = assert_exact(
        Between(write).double(), tokens(num_tokens).double(), places, rows, degree=degree, tolerance=1e-13
    )
    assert regathered(report) == []
    assert report.reductions == []


def test_writing_by_two_indices_or_a_mask_is_regathered():
    for op in (
        lambda x, i: x.index_put((torch.arange(B), i), torch.ones(())),
        lambda x, i: _assign(x, torch.arange(x.shape[1]) % 2 == 0, 1.0),
    ):
        report = assert_exact(Between(op), tokens(11), torch.tensor([3, 5]), tolerance=1e-5)
        assert regathered(report)
