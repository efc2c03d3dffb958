"""What Dynamo hands over and what the inner backend gets: writes, aliases, autocast, nested regions, breaks.

Where memory matters and values do not, the rewritten graph runs as rank 0 of a fake group, whose collectives
send nothing.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import B, C, H, SelfAttention, assert_exact, attend, exchanges, layouts_of, regathered, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

import spcompile
from spcompile.testing import simulate

S = 7


class Inner:
    """An inner backend that runs the graph as it is and remembers it."""

    def __init__(self) -> None:
        self.modules: list[torch.fx.GraphModule] = []

    def __call__(self, module, example_inputs):
        self.modules.append(module)
        return module.forward


def run(model, *args, degree=2, **options):
    """The model's results on rank 0 of a fake group that must have been started; and what the inner backend got."""
    inner = Inner()
    with torch.no_grad():
        out = torch.compile(model, backend=spcompile.backend(ulysses=degree, inner=inner, **options))(*args)
    return out, inner.modules


def same_memory(a, b) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class Block(nn.Module):
    def __init__(self, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(C), attention or SelfAttention(), nn.Linear(C, C)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


# writes


class Counting(nn.Module):
    """Writes a buffer, reads it before and after, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = SelfAttention()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        x = x * (1 + self.steps)
        self.steps.add_(1)
        return self.inner(x) * self.steps, self.steps


def test_a_written_buffer_is_right_and_written_once(fake_group):
    fake_group(2)
    assert_exact(Counting(), tokens(S), degree=3)
    model = Counting()
    run(model, tokens(S))
    assert model.steps == 1


def test_the_state_of_several_steps_is_right():
    class Moving(nn.Module):
        """A moving average of the tokens' mean, from attention."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = SelfAttention()
            self.register_buffer("average", torch.zeros(B, C))

        def forward(self, x):
            y = self.inner(x)
            self.average.mul_(0.5).add_(y.mean(1), alpha=0.5)
            return y + self.average[:, None], self.average.clone()

    assert_exact(Moving().double(), tokens(S).double(), tolerance=1e-13)


def test_a_written_input_is_right():
    class Writing(SelfAttention):
        def forward(self, x):
            x.mul_(2)
            y = super().forward(x)
            x[:, 1:3] += 1
            return y + x, x

    assert_exact(Writing().double(), tokens(S).double(), tolerance=1e-13)


def test_a_write_into_sharded_tokens_is_right():
    def model(x, w):
        y = x @ w
        y[:, :3].mul_(2)
        view = y.view(-1, C)
        view[0] = 0
        return attend(y, y, y)

    report = assert_exact(model, tokens(S).double(), torch.randn(C, C).double(), tolerance=1e-13)
    assert exchanges(report) == ["ulysses"]


def test_an_input_transposed_in_place_is_right(fake_group):
    """Dynamo breaks the graph there."""

    def model(x, w):
        y = attend(x @ w, x, x)
        x.transpose_(1, 2)
        return y, x * 2

    fake_group(2)
    x = tokens(S)
    (_, doubled), _ = run(model, x, torch.eye(C))
    assert x.shape == (B, C, S)
    assert torch.equal(doubled, x * 2)


def test_writes_through_two_inputs_of_one_memory_are_refused():
    def model(x, y):
        x.add_(1)
        return attend(x, y, y)

    whole = tokens(S)
    with pytest.raises(spcompile.UnsupportedGraphError, match="shares memory with input"):
        simulate(model, (whole[:1], whole[:1]), ulysses=2)


# aliases


def test_a_returned_view_of_an_input_is_a_view_of_it(fake_group):
    fake_group(2)
    inner = SelfAttention()

    def model(x):
        return inner(x), x, x.view(-1), x[0, 1:], x.mT

    x = tokens(S)
    (_, *views), _ = run(model, x)
    expected = (x, x.view(-1), x[0, 1:], x.mT)
    assert views[0] is x
    for view, want in zip(views, expected, strict=True):
        assert same_memory(view, x)
        assert (view.shape, view.stride(), view.storage_offset()) == (want.shape, want.stride(), want.storage_offset())


def test_outputs_that_share_memory_still_do(fake_group):
    inner = SelfAttention()

    def model(x):
        y = inner(x)
        return y, y.view(-1, C), y[:, 2:], y

    assert_exact(model, tokens(S))
    fake_group(2)
    (y, flat, tail, again), _ = run(model, tokens(S))
    assert same_memory(y, flat)
    assert same_memory(y, tail)
    assert again is y
    assert tail.storage_offset() == 2 * C


def test_overlapping_views_and_other_dtypes_of_one_output_share_its_memory(fake_group):
    inner = SelfAttention()

    def model(x):
        y = inner(x)
        return y[:, 1:4], y[:, 2:5], y.view(torch.int32)

    assert_exact(model, tokens(S))
    fake_group(2)
    (first, second, bits), _ = run(model, tokens(S))
    first[:, 1] = 3
    assert (second[:, 0] == 3).all()
    assert (bits.view(torch.float32)[:, 2] == 3).all()


def test_outputs_have_the_strides_they_had():
    def model(x, w):
        y = attend(x @ w, x, x)
        return y.mT, y.transpose(0, 1) * 2, y.unflatten(-1, (H, -1)).transpose(1, 2) + 1

    args = tokens(S), torch.randn(C, C)
    for output in simulate(model, args, ulysses=2).outputs:
        assert [o.stride() for o in output] == [o.stride() for o in model(*args)]


def test_outputs_may_be_nested_none_and_numbers():
    def model(x, w, scale=3):
        y = attend(x @ w, x, x)
        return {"y": y, "rest": [None, scale, (x.shape[1], y * scale)]}

    assert_exact(model, tokens(S), torch.randn(C, C), tolerance=1e-6)


# dtypes


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_gives_the_dtypes_and_values_of_eager(inside):
    class Mixed(nn.Module):
        """float32 queries from a norm, bfloat16 values from a projection: SDPA itself casts them."""

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm, self.out = nn.Linear(C, 3 * C), nn.RMSNorm(C), nn.Linear(C, C)

        def body(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            return self.out(attend(self.norm(q.float()), self.norm(k.float()), v)), q, v + x

        def forward(self, x):
            if not inside:
                return self.body(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out, q, v = self.body(x)
            return out, q, v, x @ x.mT

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
        report = assert_exact(Mixed(), tokens(8), tolerance=0.02)
    assert exchanges(report) == ["ulysses"]


def test_a_region_without_autocast_stays_without():
    def model(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = attend(x @ w, x @ w, x @ w)
            with torch.autocast("cpu", enabled=False):
                z = y.float() @ w
            return y, z, z @ w

    assert_exact(model, tokens(8), torch.randn(C, C) / 5, tolerance=0.02)


def test_low_precision_exchanges_send_low_precision():
    def model(x, w):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ w
            return attend(y.float(), y.float(), y)

    report = assert_exact(model, tokens(8), torch.randn(C, C) / 5, tolerance=0.02)
    assert report.attention[0].bytes_per_rank == 4 * B * 4 * C * 2 // 2  # q, k, v, out of 4 tokens, 2 bytes, half of it


# constants


def test_constant_tensors_are_right():
    weights = torch.randn(C)

    class Constants(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = SelfAttention(), torch.tensor([1.0, 2.0, 3.0])  # no parameter, no buffer

        def forward(self, x):
            y = self.inner(x * torch.tensor([0.5, 2.0]).repeat(C // 2))
            return y * weights + self.scale.sum() + torch.ones(x.shape[1], 1)

    assert_exact(Constants(), tokens(S))


def test_a_number_computed_from_sizes_is_right():
    def model(x, w):
        return attend(x @ w, x, x, scale=x.shape[1] ** -0.5) * x.shape[1]

    assert_exact(model, tokens(S), torch.randn(C, C), tolerance=1e-6)


# attention that hides


def test_under_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    report = assert_exact(Checkpointed().double(), tokens(S).double(), tolerance=1e-13)
    assert exchanges(report) == ["ulysses"] * 2
    assert regathered(report) == []


def test_in_a_nested_compile_region():
    block = Block().double()
    region = torch.compiler.nested_compile_region(lambda x: block(x))
    report = assert_exact(lambda x: region(region(x)), tokens(S).double(), tolerance=1e-13)
    assert exchanges(report) == ["ulysses"] * 2
    assert regathered(report) == []


@pytest.mark.parametrize("masked", [False, True])
def test_in_multihead_attention_in_eval(masked):
    class Mha(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(C, H, batch_first=True)

        def forward(self, x, padding=None):
            return x + self.attention(x, x, x, need_weights=False, key_padding_mask=padding)[0]

    padding = (torch.arange(S) > torch.tensor([[4], [6]]),) if masked else ()
    report = assert_exact(Mha().double().eval(), tokens(S).double(), *padding, tolerance=1e-13)
    assert len(report.attention) == 1


@pytest.mark.parametrize("norm_first", [False, True])
def test_in_the_fused_op_of_a_transformer_encoder_layer(norm_first):
    """It is written out: alone, and beside other attention."""
    layer = nn.TransformerEncoderLayer(C, H, 2 * C, batch_first=True, norm_first=norm_first).double().eval()
    assert len(assert_exact(layer, tokens(S).double(), tolerance=1e-13).attention) == 1
    model = nn.Sequential(Block(), layer, Block()).double().eval()
    assert regathered(assert_exact(model, tokens(S).double(), tolerance=1e-13)) == []


@pytest.mark.parametrize("where", ["before", "after", "inside a block"])
def test_around_a_graph_break(where):
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)

        def forward(self, x):
            y = self.qkv(x)
            if where == "before":  # between projection and attention
                torch._dynamo.graph_break()
            y = attend(*y.chunk(3, dim=-1))
            if where == "after":  # between attention and projection
                torch._dynamo.graph_break()
            x = x + self.out(y)
            if where == "inside a block":
                torch._dynamo.graph_break()
            return x + attend(x * 2, x, x)

    report = assert_exact(Broken().double(), tokens(S).double(), tolerance=1e-13)
    assert len(report.attention) == 2
    assert report.graphs == (1 if where == "before" else 2)


@torch.compiler.disable
def _uncompiled(x):
    return attend(x, x, x)


def test_beside_attention_that_is_not_compiled():
    inner = Block().double()
    assert_exact(lambda x: inner(_uncompiled(inner(x))), tokens(S).double(), tolerance=1e-13)


def test_beside_attention_written_by_hand():
    def by_hand(x):
        q = x.unflatten(-1, (H, -1)).transpose(1, 2)
        return ((q @ q.mT).softmax(-1) @ q).transpose(1, 2).flatten(2)

    inner = SelfAttention().double()
    assert_exact(lambda x: inner(by_hand(inner(x))), tokens(S).double(), degree=3, tolerance=1e-13)


@torch.library.custom_op("spcompile_tests::attend", mutates_args=())
def _opaque(x: torch.Tensor) -> torch.Tensor:
    return attend(x, x, x)


@_opaque.register_fake
def _(x):
    return torch.empty_like(x)


def test_beside_an_opaque_custom_op():
    inner = SelfAttention().double()
    report = assert_exact(lambda x: inner(_opaque(inner(x))), tokens(S).double(), tolerance=1e-13)
    assert regathered(report) == ["spcompile_tests.attend"]


def test_inside_control_flow_is_refused():
    def model(x, w, flag):
        y = attend(x @ w, x, x)
        return torch.cond(flag, lambda y: attend(y, y, y), lambda y: y + 1, (y,))

    with pytest.raises(spcompile.UnsupportedGraphError, match="attention inside `cond`"):
        simulate(model, (tokens(S), torch.randn(C, C), torch.tensor(True)), ulysses=2)


@pytest.mark.parametrize("flag", [True, False])
def test_control_flow_without_attention_runs_on_all_tokens(flag):
    def model(x, w, flag):
        y = attend(x @ w, x, x)
        z = torch.cond(flag, lambda y: y.cumsum(1), lambda y: y + 1, (y,))
        return attend(z @ w, z, z)

    args = tokens(S).double(), torch.randn(C, C).double() / 5, torch.tensor(flag)
    assert_exact(model, *args, tolerance=1e-13)


# what the inner backend receives


def test_a_graph_without_attention_passes_through_untouched(fake_group):
    fake_group(2)
    seen = []
    inner, original = Inner(), spcompile.Backend.__call__

    class Watching(spcompile.Backend):
        def __call__(self, module, example_inputs):
            seen.append(module)
            return original(self, module, example_inputs)

    made = spcompile.backend(ulysses=2, inner=inner)
    with torch.no_grad():
        torch.compile(nn.Linear(C, C), backend=Watching(made.config, None))(tokens(S))
    assert len(seen) == 1
    assert inner.modules[0] is seen[0]


def test_parameters_and_buffers_stay_static_inputs(fake_group):
    fake_group(2)
    _, (module,) = run(Counting(), tokens(S))
    placeholders = module.graph.find_nodes(op="placeholder")
    static = {n.name for n in placeholders if "_dynamo_static_input_type" in (n.meta.get("tensor_dict") or {})}
    assert static == {n.name for n in placeholders if "parameters" in n.name or "buffers" in n.name}
    assert len(static) == 3
    assert all(n._dynamo_source is not None for n in placeholders)


def test_nodes_keep_the_users_source_and_modules(fake_group):
    fake_group(2)
    _, (module,) = run(Block(), tokens(S))
    linears = [n for n in module.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert len(linears) == 2
    assert all("self.qkv" in n.meta["stack_trace"] or "self.mlp" in n.meta["stack_trace"] for n in linears)
    assert all(n.meta["nn_module_stack"] for n in linears)


def test_no_rank_stands_in_the_graph(fake_group, dump_folder):
    fake_group(4)
    _, (module,) = run(Block(), tokens(S), degree=4, dump=str(dump_folder))
    assert "rank" not in module.code
    assert "(7)/4" in layouts_of(dump_folder)


def test_another_resolution_gets_a_graph_of_its_own():
    model = Block().double()
    compiled_lengths = [assert_exact(model, tokens(n).double(), tolerance=1e-13).attention[0].shape for n in (7, 9, 12)]
    assert [shape[2] for shape in compiled_lengths] == [7, 9, 12]


def test_automatic_dynamic_shapes_are_specialised(fake_group):
    fake_group(2)
    inner = Inner()
    compiled = torch.compile(Block(), backend=spcompile.backend(ulysses=2, inner=inner))
    with torch.no_grad():
        for num in (6, 8, 10, 10, 6):
            assert compiled(tokens(num)).shape == (B, num, C)
    assert len(inner.modules) == 3


def test_a_number_that_differs_from_call_to_call_is_right(fake_group):
    fake_group(2)
    inner = SelfAttention()
    compiled = torch.compile(lambda x, scale: inner(x * scale), backend=spcompile.backend(ulysses=2, inner=Inner()))
    with torch.no_grad():
        for scale in (0.5, 0.7, 0.9, 2):
            assert compiled(tokens(6), scale).shape == (B, 6, C)


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic_shapes_asked_for_are_specialised(fake_group, dynamic):
    fake_group(2)
    compiled = torch.compile(Block(), backend=spcompile.backend(ulysses=2, inner=Inner()), dynamic=dynamic)
    with torch.no_grad():
        for num in (6, 9):
            assert compiled(tokens(num)).shape == (B, num, C)


def test_mark_dynamic_is_refused_with_a_way_out(fake_group):
    fake_group(2)
    x = tokens(6)
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad(), pytest.raises(spcompile.UnsupportedGraphError, match="leave it out"):
        torch.compile(SelfAttention(), backend=spcompile.backend(ulysses=2, inner=Inner()))(x)


def test_a_lone_mlp_beside_dropout_in_eval_is_right():
    model = nn.Sequential(Block(), nn.Dropout(0.5)).double().eval()
    assert regathered(assert_exact(model, tokens(S).double(), tolerance=1e-13)) == []


def test_inference_mode_works_like_no_grad():
    model, x = Block(), tokens(S)
    with torch.inference_mode():
        expected = model(x)
        for output in simulate(model, (x,), ulysses=2).outputs:
            torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


def test_unused_options_of_functional_attention_pass(fake_group):
    fake_group(2)
    with torch.no_grad():
        q = torch.randn(1, H, S, 2)
        compiled = torch.compile(F.scaled_dot_product_attention, backend=spcompile.backend(ulysses=2, inner=Inner()))
        assert compiled(q, q, q, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None).shape == q.shape
