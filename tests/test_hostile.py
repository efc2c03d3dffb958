"""Broken, odd and hostile input: every rank gives what the unsharded model gives, or the graph is refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from helpers import SelfAttention, attend, regathered, tokens
from torch import Tensor, nn
from torch._higher_order_ops import map as map_over
from torch._higher_order_ops import scan, while_loop
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import spcompile
from spcompile.report import Report
from spcompile.testing import simulate
from spcompile.testing.simulate import _Backend, _config

S, C = 7, 24
INNER = SelfAttention().double().eval().requires_grad_(False)
DEGREES = ({"ulysses": 2}, {"kv_gather": 4}, {"ring": 4})
each_exchange = pytest.mark.parametrize("degrees", DEGREES, ids=str)


def x(length: int = S, batch: int = 2) -> Tensor:
    return tokens(length, batch).double()


def assert_equal(found: Any, expected: Any, tolerance: float = 1e-10) -> None:
    """Equal trees, NaN where NaN is expected and nowhere else."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def check(model: Callable[..., Any], *args: Any, tolerance: float = 1e-10, **degrees: Any) -> Report:
    """Every rank gives what the model gives; writes into inputs included."""
    with torch.no_grad():
        whole, inputs = copy.deepcopy((model, args))
        torch.manual_seed(3)
        want = whole(*inputs)
    torch.manual_seed(3)
    run = simulate(model, args, **(degrees or {"ulysses": 2}))
    for out in run.outputs:
        assert_equal(out, want, tolerance)
    return run.report


def refusal(model: Callable[..., Any], *args: Any, **degrees: Any) -> str:
    with pytest.raises(spcompile.UnsupportedGraphError) as info:
        simulate(model, args, **(degrees or {"ulysses": 2}))
    return str(info.value)


# NaN and infinity


KERNEL = torch.randn(C, C, 3).double()
POISONS = {
    "reciprocal": lambda h: (1 / h).clamp(-3, 3),  # of a pad that is zero: infinity; of infinity less infinity: NaN
    "normalised": lambda h: h / h.norm(dim=-1, keepdim=True),
    "log": lambda h: h.abs().log(),
}
MIXING = {
    "softmax": lambda h: h.softmax(1),
    "log_softmax": lambda h: h.log_softmax(1),
    "logsumexp": lambda h: h + h.logsumexp(1, keepdim=True),
    "mean": lambda h: h + h.mean(1, keepdim=True),
    "sum of magnitudes": lambda h: h + h.abs().sum(1, keepdim=True),
    "max": lambda h: h + h.amax(1, keepdim=True),
    "min": lambda h: h - h.amin(1, keepdim=True),
    "norm": lambda h: h / h.norm(dim=1, keepdim=True),
    "variance": lambda h: h + h.var(1, keepdim=True),
    "layer norm over tokens": lambda h: F.layer_norm(h.mT, (S,)).mT,
    "group norm": lambda h: F.group_norm(h.mT, 4).mT,
    "convolution": lambda h: F.conv1d(h.mT, KERNEL, padding=1).mT,
    "cumsum": lambda h: h + h.cumsum(1),
    "roll": lambda h: h.roll(1, 1),
    "linear attention": lambda h: h @ (h.mT @ h),
    "attention": INNER,
    "attention by hand": lambda h: (h @ h.mT).softmax(-1) @ h,
    "any": lambda h: h + h.isnan().any(1, keepdim=True),
}


@pytest.fixture
def unset_memory_is_nan():
    """What ``torch.empty`` gives, so that a read of it shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("unset_memory_is_nan")
@each_exchange
@pytest.mark.parametrize("poison", POISONS.values(), ids=POISONS.keys())
def test_what_is_not_a_number_in_pads_never_reaches_a_token(poison, degrees):
    """7 tokens on 4 ranks: the last holds a pad. Finite in every token, not finite in pads."""

    def model(a):
        h = poison(a + INNER(a))
        return {name: mix(h) * 1.0 for name, mix in MIXING.items()}

    check(model, x(), tolerance=1e-8, **degrees)


@each_exchange
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_what_is_not_a_number_in_tokens_spreads_as_without_ranks(value, degrees):
    a = x()
    a[0, 2, 3] = value
    mixes = [mix for name, mix in MIXING.items() if name not in ("convolution", "attention by hand")]
    check(lambda a: [mix(a + 0 * INNER(a.nan_to_num(0, 0, 0))) * 1.0 for mix in mixes], a, **degrees)


# lengths and batches


@each_exchange
def test_text_of_no_tokens(degrees):
    def joint(text, image):
        h = torch.cat([text, image], 1)
        h = h + INNER(h)
        return h[:, : text.shape[1]] * 1.0, INNER(h[:, text.shape[1] :])

    check(joint, x(0), x(), **degrees)
    check(lambda text, image: INNER(image) + attend(image, text, text), x(0), x(), **degrees)


@each_exchange
@pytest.mark.parametrize(("length", "batch"), [(0, 2), (S, 0), (1, 2), (1, 0), (3, 2)])
def test_no_batch_no_tokens_one_token_and_fewer_than_ranks(length, batch, degrees):
    check(INNER, x(length, batch), **degrees)
    if length:
        mixed = [MIXING[name] for name in ("softmax", "mean", "norm", "cumsum", "roll", "linear attention")]
        check(lambda a: [INNER(mix(a + INNER(a))) for mix in mixed], x(length, batch), **degrees)


def test_more_ranks_than_tokens():
    for degrees in ({"ulysses": 8}, {"kv_gather": 8}, {"ring": 8}, {"sp": 8}):
        check(lambda a: INNER((a + INNER(a)).cumsum(1).softmax(1)), x(3), **degrees)


# memory


STRIDED = {
    "transposed batch": lambda: x(2, S).transpose(0, 1),
    "transposed channels": lambda: torch.randn(2, C, S).double().mT,
    "one token expanded": lambda: x(1).expand(-1, S, -1),
    "one sample expanded": lambda: x(S, 1).expand(4, -1, -1),
    "one channel expanded": lambda: torch.randn(2, S, 1).double().expand(-1, -1, C),
    "every other token": lambda: x(2 * S)[:, ::2],
    "every other channel": lambda: torch.randn(2, S, 2 * C).double()[..., ::2],
    "a part of something larger": lambda: x(2 * S)[:, 3 : 3 + S],
}


@each_exchange
def test_inputs_that_are_not_contiguous(degrees):
    def model(inputs):
        return {name: INNER(a + INNER(a)) for name, a in inputs.items()}

    check(model, {name: make() for name, make in STRIDED.items()}, **degrees)


def _writes(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return INNER(b)


@each_exchange
def test_inputs_that_share_memory_are_right_unless_written(degrees):
    base = x(2 * S)
    a = x()
    for pair in ((a, a), (base[:, :S], base[:, S:]), (base[:, :S], base[:, 3 : S + 3])):
        check(lambda a, b: INNER(a) + b, *pair, **degrees)
    check(lambda a: (a, INNER(a), a[:, 1:]), a, **degrees)
    check(_writes, a, a, **degrees)  # one tensor passed twice is one input
    assert "shares memory with" in refusal(_writes, base[:, :S], base[:, 3 : S + 3], **degrees)


def test_a_written_input_that_overlaps_itself_is_an_error_as_without_ranks():
    with pytest.raises(RuntimeError, match="single memory location"):
        simulate(lambda a: _writes(a, a), (x(1).expand(-1, S, -1),), ulysses=2)


# dtypes and devices


def test_whole_numbers_and_bools():
    table = nn.Embedding(10, C).double()
    ids, keep = torch.randint(0, 10, (2, S)), torch.rand(2, S) > 0.3
    check(lambda i: INNER(table(i)), ids)
    check(lambda k: INNER(table(k.long())), keep)
    check(lambda i: INNER(table(i)) + i[..., None], ids.to(torch.int32))
    check(lambda a, k: INNER(a) * k[..., None], x(), keep)
    check(lambda a, k: attend(INNER(a), a, a, attn_mask=k[:, None, None]), x(), keep)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-2), (torch.bfloat16, 5e-2), (torch.float32, 1e-5)])
def test_lower_precisions(dtype, tolerance):
    for degrees in DEGREES:
        check(copy.deepcopy(INNER).to(dtype), tokens(S).to(dtype), tolerance=tolerance, **degrees)


def test_complex_tokens():
    z = torch.randn(2, S, C, dtype=torch.complex128)
    check(lambda z: INNER(z.real) + z.conj(), z)
    check(lambda z: torch.view_as_complex(INNER(z.abs()).unflatten(-1, (-1, 2))).cumsum(1), z.conj())


def compiled(model: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(model, backend=spcompile.backend(**({"sp": 2, "inner": "eager"} | options)))


def test_parameters_without_values_are_refused_by_name(fake_group):
    fake_group(2)
    model = SelfAttention().to("meta")
    with torch.no_grad(), pytest.raises(spcompile.UnsupportedGraphError) as info:
        compiled(model)(tokens(S).to("meta"))
    assert "`model.qkv.weight` is on the meta device, where tensors have no values" in str(info.value)
    assert "Load it before the first call" in str(info.value)


def test_parameters_without_values_beside_real_inputs_are_an_error_as_without_ranks():
    with pytest.raises(RuntimeError, match="found at least two devices"):
        simulate(SelfAttention().to("meta"), (tokens(S),), sp=2)


def test_a_device_that_the_group_cannot_send_from_is_refused():
    dist.init_process_group("cuda:fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        with torch.no_grad(), pytest.raises(spcompile.SPConfigError) as info:
            compiled(SelfAttention())(tokens(S))
    finally:
        dist.destroy_process_group()
    assert "is on cpu, and the process group (cuda:fake) sends between cuda devices" in str(info.value)


def test_a_graph_without_attention_may_lie_anywhere():
    dist.init_process_group("cuda:fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        assert torch.equal(compiled(lambda x: x * 2)(torch.ones(3)), torch.full((3,), 2.0))
        assert compiled(lambda x: x * 2)(torch.empty(3, device="meta")).is_meta
    finally:
        dist.destroy_process_group()


# modes


class Dropping(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.dropout, self.second = copy.deepcopy(INNER), nn.Dropout(p), copy.deepcopy(INNER)

    def forward(self, a: Tensor) -> Tensor:
        return self.second(self.dropout(self.first(a)))


def test_models_in_train_mode():
    """Dropout between attentions draws in full and alike; dropout in attention is refused."""
    assert regathered(check(Dropping(0.3).train(), x())) != []
    assert regathered(check(Dropping(0.0).train(), x())) == []
    assert regathered(check(Dropping(0.3).eval(), x())) == []
    layer = nn.TransformerEncoderLayer(C, 4, 32, dropout=0.1, batch_first=True).double()
    assert "model.eval()" in refusal(layer.train(), x())
    check(layer.eval(), x())


@pytest.mark.parametrize("mode", ["autocast", "inference", "both", "input made in inference"])
def test_under_modes(mode):
    model = SelfAttention().eval()
    with ExitStack() as stack:
        if mode != "autocast":
            stack.enter_context(torch.inference_mode())
        a = tokens(S)
        if mode == "input made in inference":
            stack.pop_all().close()
        if mode in ("autocast", "both"):
            stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
        check(lambda a: model(model(a) * 2), a, tolerance=2e-2)


class Ranks:
    """A model compiled once for two ranks; a call gives what each returns."""

    def __init__(self, model: Callable[..., Any], **options: Any) -> None:
        self.backend = _Backend(_config(2, {}), 2)
        self.compiled = torch.compile(model, backend=self.backend, **options)

    def __call__(self, a: Tensor) -> list[Any]:
        outputs, a = [], a.clone()  # equal inputs in one memory are one call
        for self.backend.rank in range(2):
            outputs.append(self.compiled(a))
        return outputs


def test_modes_that_change_from_call_to_call(fake_group):
    model, a = SelfAttention().eval(), tokens(S)
    ranks = Ranks(model)
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            assert_equal(ranks(a), [model(a)] * 2, 1e-5)
    fake_group(2)
    call = compiled(model)
    with torch.no_grad():
        call(a)
    with pytest.raises(spcompile.UnsupportedGraphError, match="gradients are not available yet"):
        call(a)


def test_weights_that_change_after_compiling():
    model, a = SelfAttention().eval().requires_grad_(False), tokens(S)
    ranks = Ranks(model)
    ranks(a)
    graphs = ranks.backend.report.graphs
    other = SelfAttention()
    model.load_state_dict(other.state_dict())
    assert_equal(ranks(a), [other(a)] * 2, 1e-5)
    model.qkv.weight.data = model.qkv.weight.data * 2
    assert_equal(ranks(a), [model(a)] * 2, 1e-5)
    model.qkv.weight.mul_(0.5)
    assert_equal(ranks(a), [other(a)] * 2, 1e-5)
    assert ranks.backend.report.graphs == graphs
    model.qkv.weight = nn.Parameter(other.qkv.weight.detach() * 3, requires_grad=False)
    assert_equal(ranks(a), [model(a)] * 2, 1e-5)
    model.double()
    assert_equal(ranks(a.double()), [model(a.double())] * 2)


HOOKS = {
    "before": lambda m: m[1].register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "after": lambda m: m[0].register_forward_hook(lambda m, a, out: out + 1),
    "that reorders": lambda m: m[0].register_forward_hook(lambda m, a, out: out.flip(1)),
    "around all": lambda m: m.register_forward_hook(lambda m, a, out: out * 3),
    "that keeps": lambda m: m[0].register_forward_hook(lambda m, a, out: m.kept.append(out)),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS.keys())
def test_hooks(register):
    model = nn.Sequential(copy.deepcopy(INNER), copy.deepcopy(INNER))
    model[0].kept = []
    register(model)
    check(model, x())


def test_hooks_registered_after_compiling_do_what_torch_compile_makes_of_them():
    for hook in HOOKS.values():
        ranked, plain = (nn.Sequential(copy.deepcopy(INNER), copy.deepcopy(INNER)) for _ in range(2))
        ranked[0].kept, plain[0].kept = [], []
        ranks, alone = Ranks(ranked), torch.compile(plain, backend="eager")
        a = x()
        ranks(a), alone(a)
        hook(ranked), hook(plain)
        assert_equal(ranks(a), [alone(a)] * 2)


# attention that hides


def _attend(a: Tensor) -> Tensor:
    return attend(a, a, a)


def _flex(a: Tensor) -> Tensor:
    q = a.unflatten(-1, (12, -1)).transpose(1, 2)
    return flex_attention(q, q, q).transpose(1, 2).flatten(2)


def _broken(a: Tensor) -> Tensor:
    q = a * 2
    torch._dynamo.graph_break()
    y = attend(q, a, a)
    torch._dynamo.graph_break()
    return y.flip(1)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return _attend(a)


@torch.library.custom_op("spcompile_tests::sealed", mutates_args=())
def _sealed(a: Tensor) -> Tensor:
    return _attend(a).clone()


@_sealed.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


@torch.compiler.allow_in_graph
def _allowed(a: Tensor) -> Tensor:
    return _attend(a)


_compiled = torch.compile(_attend, backend="eager")
_region = torch.compiler.nested_compile_region(_attend)
HIDDEN = {  # how it is hidden -> a function, and whether its attention is found
    "checkpoint": (lambda a: checkpoint(_attend, a, use_reentrant=False), True),
    "reentrant checkpoint": (lambda a: checkpoint(_attend, a, use_reentrant=True), True),
    "flex in a checkpoint": (lambda a: checkpoint(_flex, a, use_reentrant=False), True),
    "region": (lambda a: _region(a), True),
    "region in a checkpoint": (lambda a: checkpoint(_region, a, use_reentrant=False), True),
    "autograd function": (lambda a: _Function.apply(a), True),
    "compiled function": (lambda a: _compiled(a), True),
    "allowed in graph": (lambda a: _allowed(a), True),
    "graph breaks": (_broken, True),
    "decision by value": (lambda a: a * 2 if float(_attend(a).sum()) > 0 else a.flip(1), True),
    "disabled function": (torch.compiler.disable(_attend), False),
    "opaque op": (lambda a: _sealed(a), False),
    "kernel called directly": (
        lambda a: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *[a.unflatten(-1, (12, -1)).transpose(1, 2)] * 3
        )[0].transpose(1, 2).flatten(2),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("hidden", "is_found"), HIDDEN.values(), ids=HIDDEN.keys())
def test_hidden_attention_is_distributed_or_sees_full_tensors(hidden, is_found):
    report = check(lambda a: INNER(hidden(a + INNER(a))), x(), sp=4)
    assert len(report.attention) == 2 + is_found


REFUSED = {
    "cond": lambda a: torch.cond(a.sum() > 0, _attend, lambda a: a.clone(), (a,)),
    "cond in a checkpoint": lambda a: checkpoint(
        lambda a: torch.cond(a.sum() > 0, _attend, lambda a: a.clone(), (a,)), a, use_reentrant=False
    ),
    "while_loop": lambda a: while_loop(lambda i, a: i < 2, lambda i, a: (i + 1, _attend(a)), (torch.tensor(0), a))[1],
    "map": lambda a: map_over(lambda b: _attend(b[None])[0], a),
    "scan": lambda a: scan(lambda c, b: (c + _attend(b[None])[0], b * 1), a[0] * 0, a)[0].expand(2, -1, -1),
    "torch.vmap": lambda a: torch.vmap(lambda b: _attend(b[None])[0])(a),
    "torch.func.grad": lambda a: torch.func.grad(lambda b: _attend(b).sum())(a),
    "torch.func.jvp": lambda a: torch.func.jvp(lambda b: b * 2, (a,), (a,))[1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_attention_in_control_flow_and_transforms_is_refused_by_name(name):
    text = refusal(lambda a: INNER(REFUSED[name](a + INNER(a))), x())
    assert name.removesuffix(" in a checkpoint") in text
    assert ".py:" in text
    assert "Error" not in text  # no internal one shines through
    check(INNER, x())  # and nothing is left behind


def test_control_flow_without_attention_sees_full_tensors():
    check(lambda a: INNER(map_over(lambda b: b * 2, a + INNER(a))), x())
    check(lambda a: INNER(torch.cond(a.sum() > 0, lambda a: a.cumsum(1), lambda a: a.flip(1), (INNER(a),))), x())
