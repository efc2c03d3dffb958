"""How an earlier system failed, a test for each: paths that shuffle, lists that drift, guards that bite too early."""

from __future__ import annotations

import dataclasses
import warnings
from contextlib import nullcontext

import pytest
import torch
from helpers import SelfAttention, assert_exact, attend, exchanges, tokens
from test_hostile import Ranks
from torch import nn

import spcompile
from spcompile.config import kernel_names
from spcompile.ops import kernels
from spcompile.testing import plan, simulate

S = 7


def by_hand(a):
    """Rows whose keys are all masked are NaN here, and nothing in a kernel."""
    q = a.unflatten(-1, (4, -1)).transpose(1, 2)
    scores = (q @ q.mT).masked_fill(torch.eye(a.shape[1]) > 0, -torch.inf)
    return (scores.softmax(-1) @ q).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (SelfAttention(), {"ring": 2, "kernel": "sdpa"}, "ring: kernel sdpa returns no log-sum-exp"),
        (SelfAttention(), {"ring": 2, "ulysses": 2, "kernel": "sdpa"}, "kernel sdpa returns no log-sum-exp"),
        (by_hand, {"ring": 2}, "gives rows without keys what kernels do not"),
        (SelfAttention(dropout_p=0.1), {"ring": 2}, "dropout_p=0.1"),
    ],
)
def test_a_path_that_cannot_do_ring_says_so_instead_of_shuffling(model, options, why):
    with pytest.raises(spcompile.UnsupportedGraphError) as info:
        simulate(model, (tokens(S),), **options)
    assert why in str(info.value)


def test_admission_to_ring_comes_from_the_kernels_declaration():
    """The same kernel, declared with and without a log-sum-exp."""
    for returns_lse in (True, False):
        kernel = dataclasses.replace(kernels.KERNELS["math"], name="declared", returns_lse=returns_lse)
        spcompile.register_kernel(kernel)
        try:
            torch._dynamo.reset()
            if returns_lse:
                report = assert_exact(SelfAttention(), tokens(S), tolerance=1e-5, ring=2, kernel="declared")
                assert report.attention[0].kernel == "declared"
            else:
                with pytest.raises(spcompile.UnsupportedGraphError, match="declared returns no log-sum-exp"):
                    simulate(SelfAttention(), (tokens(S),), ring=2, kernel="declared")
        finally:
            del kernels.KERNELS["declared"]


def test_the_list_of_kernel_names_cannot_drift_from_the_declarations():
    assert kernel_names() == ("auto", *kernels.KERNELS)
    kernel = dataclasses.replace(kernels.KERNELS["math"], name="declared")
    spcompile.register_kernel(kernel)
    try:
        assert "declared" in kernel_names()
        spcompile.backend(sp=2, kernel="declared")
    finally:
        del kernels.KERNELS["declared"]
    for name, kernel in kernels.KERNELS.items():  # what each declares is what a ring asks for, on its own device
        device = "cpu" if "cpu" in kernel.devices else "cuda"
        dtype = torch.float32 if torch.float32 in kernel.dtypes else torch.bfloat16
        if kernel.missing():
            continue
        torch._dynamo.reset()
        model = SelfAttention(channels=256, heads=4).to(dtype)
        refused = pytest.raises(spcompile.UnsupportedGraphError, match="returns no log-sum-exp")
        with nullcontext() if kernel.returns_lse else refused:
            plan(model, (tokens(64, channels=256).to(dtype),), ring=2, kernel=name, device=device)


def test_a_masked_single_rank_call_stays_legal():
    mask = torch.randn(S, S)
    programs = {
        "additive mask under ring": (lambda a: attend(a, a, a, attn_mask=mask), {"kernel": "sdpa"}),
        "dropout": (lambda a: attend(a, a, a, dropout_p=0.5), {}),
        "cond": (lambda a: torch.cond(a.sum() > 1e9, lambda a: attend(a, a, a), lambda a: a.clone(), (a,)), {}),
        "vmap": (lambda a: torch.vmap(lambda b: attend(b[None], b[None], b[None])[0])(a), {}),
        "strict": (lambda a: attend(a, a, a).flip(1), {"strict": True}),
        "few tokens": (lambda a: attend(a, a, a), {"min_tokens": 100}),
    }
    for program, options in programs.values():
        torch._dynamo.reset()
        call = torch.compile(program, backend=spcompile.backend(sp=1, inner="eager", **options))
        a = tokens(S)
        torch.manual_seed(1)
        want = program(a)
        torch.manual_seed(1)
        torch.testing.assert_close(call(a), want)
    model, a = SelfAttention(), tokens(S)
    torch._dynamo.mark_dynamic(a, 1)
    torch.compile(model, backend=spcompile.backend(ring=1, inner="aot_eager"))(a).sum().backward()
    assert model.qkv.weight.grad is not None


def test_explicit_gather_of_keys_and_values_fails_closed_while_auto_falls_back():
    causal = SelfAttention(is_causal=True)
    with pytest.raises(spcompile.UnsupportedGraphError) as info:
        simulate(causal, (tokens(S),), kv_gather=2, kernel="sdpa")
    assert "kv_gather: kernel sdpa returns no log-sum-exp. Degrees that work here: ulysses=2" in str(info.value)
    report = assert_exact(causal, tokens(S, batch=1), tolerance=1e-5, sp=2, kernel="sdpa")
    assert exchanges(report) == ["ulysses"]
    assert "kv_gather not possible: kernel sdpa returns no log-sum-exp" in report.attention[0].reason


@pytest.mark.parametrize("degrees", [{"ulysses": 4}, {"kv_gather": 4}, {"ring": 4}, {"ulysses": 2, "ring": 2}], ids=str)
@pytest.mark.parametrize("text_first", [True, False])
def test_text_padding_that_spans_shards_is_right(degrees, text_first):
    """13 text tokens, of which 2 and 5 are valid: the padding lies on most ranks, and is all that some hold."""
    inner = SelfAttention()

    def model(text, image, lengths):
        keep = torch.arange(text.shape[1]) < lengths[:, None]
        keep_image = torch.ones(image.shape[:2], dtype=torch.bool)
        parts, masks = [text, image], [keep, keep_image]
        if not text_first:
            parts.reverse(), masks.reverse()
        h = inner(torch.cat(parts, 1), attn_mask=torch.cat(masks, 1)[:, None, None])
        cut = text.shape[1] if text_first else image.shape[1]
        first, second = h[:, :cut], h[:, cut:]
        text, image = (first, second) if text_first else (second, first)
        text = text * keep[..., None]
        return image + text.sum(1, keepdim=True) / lengths[:, None, None], text

    text = tokens(13).index_fill(1, torch.arange(5, 13), 1e6)
    assert_exact(model, text, tokens(9), torch.tensor([2, 5]), tolerance=1e-5, **degrees)


def test_a_degraded_path_is_announced_once():
    class Flipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = SelfAttention()

        def forward(self, a):
            return self.inner(self.inner(a).flip(1).flip(1))

    ranks = Ranks(Flipping())
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            ranks(tokens(S))
    told = [str(w.message) for w in caught if w.category is spcompile.RegatherWarning]
    assert len(told) == 1
    assert told[0].count("aten.flip") == 1
