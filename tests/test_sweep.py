"""Every exchange, mask form, length, head count and kernel against float64: right or refused, no third outcome.

The tolerance is the error of the unsharded run in the same dtype, not a number found by trial.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spcompile
from spcompile.testing import simulate

MASKS = ("none", "bool [S,T]", "bool [B,1,1,T]", "bool [B,1,S,T]", "bool [B,H,S,T]", "add [S,T]", "add [B,1,1,T]",
         "add [B,H,S,T]", "add [H,S,T]", "add [1,H,1,T]")  # fmt: skip
MESHES = [
    m
    for m in ((r, g, u) for r in (1, 2, 3, 4) for g in (1, 2, 3, 4) for u in (1, 2, 3, 4, 8))
    if 2 <= m[0] * m[1] * m[2] <= 8
]


@dataclass(frozen=True)
class Case:
    mesh: tuple[int, int, int] | None
    degree: int
    mask: str
    causal: bool
    heads: int
    kv_heads: int
    text: int
    image: int
    batch: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    kernel: str
    two_streams: bool


@st.composite
def cases(draw) -> Case:
    mesh = draw(st.sampled_from([None, *MESHES, *MESHES]))
    degree = draw(st.integers(2, 8)) if mesh is None else mesh[0] * mesh[1] * mesh[2]
    kv_heads = draw(st.sampled_from([1, 2, 3, 4]))
    causal = draw(st.booleans())
    head_dim = draw(st.sampled_from([4, 8, 12]))
    return Case(
        mesh=mesh,
        degree=degree,
        mask="none" if causal else draw(st.sampled_from(MASKS)),
        causal=causal,
        heads=kv_heads * draw(st.sampled_from([1, 1, 2, 3])),
        kv_heads=kv_heads,
        text=draw(st.sampled_from([0, 0, 1, 3, 7, 8])),
        image=draw(st.integers(2, 23)),
        batch=draw(st.integers(1, 3)),
        head_dim=head_dim,
        value_dim=draw(st.sampled_from([head_dim, head_dim, head_dim, 6])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16])),
        kernel=draw(st.sampled_from(["auto", "auto", "auto", "math", "cpu_flash", "sdpa"])),
        two_streams=draw(st.booleans()) and not causal,
    )


class Attention(torch.nn.Module):
    """Text and image projected, joined, attended to, and taken apart again; or the image attends to the text."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, width = case, case.heads * case.head_dim
        generator = torch.Generator().manual_seed(0)
        sizes = {"q": width, "k": case.kv_heads * case.head_dim, "v": case.kv_heads * case.value_dim}
        for name, size in sizes.items():
            weight = torch.randn(size, width, generator=generator, dtype=torch.float64) * width**-0.5
            self.register_parameter(name, torch.nn.Parameter(weight))

    def heads(self, x: torch.Tensor, weight: torch.Tensor, count: int) -> torch.Tensor:
        return F.linear(x, weight).unflatten(-1, (count, -1)).transpose(1, 2)

    def attend(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        case = self.case
        q = self.heads(x, self.q, case.heads)
        k, v = self.heads(y, self.k, case.kv_heads), self.heads(y, self.v, case.kv_heads)
        out = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=case.causal, enable_gqa=case.heads != case.kv_heads, scale=0.7
        )
        return out.transpose(1, 2).flatten(2)

    def forward(self, text: torch.Tensor, image: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if self.case.two_streams:
            q = self.heads(text, self.q, self.case.heads)
            inner = F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
            return self.attend(image, text + inner, mask)
        out = self.attend(*[torch.cat([text, image], 1)] * 2, mask)
        return torch.cat([out[:, self.case.text :] * 2, out[:, : self.case.text]], 1)


def make_mask(case: Case, generator: torch.Generator) -> torch.Tensor | None:
    if case.mask == "none":
        return None
    kind, form = case.mask.split()
    queries = case.image if case.two_streams else case.text + case.image
    keys = max(case.text, 1) if case.two_streams else case.text + case.image
    sizes = {"B": case.batch, "H": case.heads, "S": queries, "T": keys, "1": 1}
    shape = [sizes[d] for d in form.strip("[]").split(",")]
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "add":
        return noise
    return (noise > 0.3).index_fill(-1, torch.tensor([keys // 2]), True)  # every query keeps a key


def check(case: Case) -> str:
    """``right`` or ``refused``; anything else raises."""
    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(case.image)
    width = case.heads * case.head_dim
    text, image = (
        torch.randn(case.batch, n, width, generator=generator, dtype=torch.float64)
        for n in (max(case.text, 1) if case.two_streams else case.text, case.image)
    )
    mask = make_mask(case, generator)
    model = Attention(case).requires_grad_(False)

    def run(dtype: torch.dtype):
        cast = [x if x is None or x.dtype == torch.bool else x.to(dtype) for x in (text, image, mask)]
        return model.to(dtype), cast

    exact, inputs = run(torch.float64)
    want = exact(*inputs)
    rounded, inputs = run(case.dtype)
    own_error = (rounded(*inputs).double() - want).abs().max().item()
    degrees = {} if case.mesh is None else dict(zip(("ring", "kv_gather", "ulysses"), case.mesh, strict=True))
    try:
        ranks = simulate(rounded, inputs, sp=case.degree, kernel=case.kernel, **degrees).outputs
    except spcompile.SPError:
        return "refused"
    scale, eps = want.abs().max().item(), torch.finfo(case.dtype).eps
    slack = 64 if case.dtype == torch.float64 else 4  # the float64 run is its own reference: it has no error
    allowed = 2 * own_error + slack * eps * scale
    for rank, out in enumerate(ranks):
        error = (out.double() - want).abs().max().item()
        assert out.dtype == case.dtype
        assert error <= allowed, f"rank {rank} is off by {error:.1e}, allowed {allowed:.1e}: {case}"
    return "right"


def sweep(examples: int) -> dict[str, int]:
    counts: dict[str, int] = {"right": 0, "refused": 0}

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def one(case: Case) -> None:
        counts[check(case)] += 1

    one()
    return counts


def test_a_small_sweep_is_right_or_refused():
    counts = sweep(40)
    assert counts["right"] >= 20, counts


@pytest.mark.long
def test_two_thousand_cases_are_right_or_refused():
    counts = sweep(2000)
    print(counts)
    assert counts["right"] >= 1500, counts
