"""How graphs are cut for CUDA graphs: on fake CUDA tensors, so without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from helpers import C, SelfAttention, attend, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import spcompile
from spcompile import ops
from spcompile.ops import kernels
from spcompile.pieces import Partition, partition
from spcompile.testing import plan, simulate, zoo

aten = torch.ops.aten
START, GATHER = ops.kv_gather_start._opoverload, ops.kv_gather._opoverload
COMPUTE = {aten.linear.default, aten.scaled_dot_product_attention.default, aten.conv2d.default, aten.gelu.default}


def cut(model, *args, form="piecewise", kwargs=None, **degrees) -> Partition:
    planned = plan(model, args or (() if kwargs else (tokens(8),)), kwargs, device="cuda", cudagraphs=form, **degrees)
    (found,) = planned.partitions
    return found


def cut_fx(function, *args: torch.Tensor, form="piecewise") -> Partition:
    """The partition of a plain function of fake CUDA tensors."""

    def of_tuples(*args):
        results = function(*args)
        return results if isinstance(results, tuple) else (results,)

    with MODE:
        module = make_fx(of_tuples)(*args)
    return partition(module, module.graph, form, "cuda")


def on_gpu(*shape: int, device: str = "cuda", **options) -> torch.Tensor:
    with MODE:
        return torch.empty(shape, device=device, **options)


def on(x: torch.Tensor, device: str) -> torch.Tensor:
    return aten._to_copy(x, device=torch.device(device))


MODE = FakeTensorMode()


def targets(part) -> list:
    return [n.target for n in part.calls]


def kinds(found: Partition) -> str:
    """P for a piece, g for a gap."""
    return "".join("P" if p.captured else "g" for p in found.parts)


def reasons(found: Partition) -> list[str]:
    return [why for part in found.parts for _, why in part.splits]


def assert_sound(found: Partition) -> None:
    """What holds of every partition: who reads what, when, and where it lies."""
    assert "PP" not in kinds(found)
    assert "gg" not in kinds(found)
    written = {}
    for i, part in enumerate([*found.parts, found.end]):
        for name in part.reads:
            value = found.values[name]
            assert value.kind != "computed" or written[name] < i, f"part {i} reads {name} before it is there"
            if part.captured:
                assert value.kind == "parameter" or value.slot is not None, f"{name} has no address of its own"
        written |= dict.fromkeys([*part.writes, *part.returns], i)
        if part.captured:
            assert not part.returns, "a replay returns nothing"
            assert not part.splits
            assert not any(ops.DECLARED[t].exchanges(n.args) for n in part.calls if (t := n.target) in ops.DECLARED)
            assert part.calls, "a piece of nothing but views"
        else:
            assert not part.calls or part.splits
            assert not COMPUTE & set(targets(part))
    assert_buffers(found)
    for part in [*found.parts, found.end]:
        assert_runs_on_fakes(part)


def assert_buffers(found: Partition) -> None:
    """Parameters stay where they are; two values in one buffer are never needed at once."""
    assert all(v.slot is None for v in found.values.values() if v.kind == "parameter")
    held = [v for v in found.values.values() if v.slot is not None]
    assert {v.name for v in held} == set(found.lifetimes)
    for v in held:
        assert v.num_bytes <= found.slots[v.slot]
        for other in held:
            if v is not other and v.slot == other.slot:
                (start, end), (other_start, other_end) = found.lifetimes[v.name], found.lifetimes[other.name]
                assert end < other_start or other_end < start, f"{v.name} and {other.name} share a buffer"
                assert v.device == other.device
    for i, part in enumerate([*found.parts, found.end]):
        for name in part.reads:
            start, end = found.lifetimes.get(name, (-1, i))
            assert start < i <= end, f"{name} is read by part {i} after its buffer may be written again"


def assert_runs_on_fakes(part) -> None:
    """The part's own graph has the shapes that the whole one had; exchanges refuse buffers of others."""
    placeholders = part.module.graph.find_nodes(op="placeholder")
    assert [p.name for p in placeholders] == [*part.reads, *(f"{name}_buffer" for name in part.writes)]
    values = [p.meta["val"] for p in placeholders]
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), MODE)
    with mode:
        results = part.module(*values)
    output = part.module.graph.output_node().args[0]
    for node, found in zip(output, results, strict=True):
        if isinstance(found, torch.Tensor):
            assert (found.shape, found.dtype) == (node.meta["val"].shape, node.meta["val"].dtype)


# models

BY_DEFAULT = {(name, 8) for name in ("flux", "wan", "sd3", "qwenimage", "hunyuanvideo")} | {("flux", 2), ("wan", 4)}


@pytest.mark.parametrize(
    ("name", "sp"),
    [
        pytest.param(name, sp, marks=() if (name, sp) in BY_DEFAULT else pytest.mark.long)
        for name in zoo.CORE
        for sp in (2, 4, 8)
    ],
)
def test_models_are_cut_at_their_exchanges_only(name, sp):
    case = zoo.case(name, "odd")
    model, inputs = case.build(), case.inputs()
    planned = plan(model, kwargs=inputs, sp=sp, device="cuda", cudagraphs="piecewise")
    (found,), (graph,) = planned.partitions, planned.graphs
    assert_sound(found)
    assert set(reasons(found)) == {"an exchange between ranks"}
    order = [n.target for n in graph.graph.nodes if n.target in ops.INTO or n.target is START]
    cuts = [n.target for part in found.parts for n, _ in part.splits]
    assert cuts == [t for t in order if t in cuts]  # as ranks call them, each once
    assert found.num_pieces <= len(cuts) + 1
    total = sum(v.num_bytes for v in found.values.values() if v.slot is not None)
    assert sum(found.slots) < total  # buffers are used again
    assert sum(p.captured for p in planned.report.pieces) == found.num_pieces


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_a_plan_for_full_graphs_is_one_piece(name):
    case = zoo.case(name, "odd")
    found = cut(case.build(), form="full", kwargs=case.inputs(), sp=4)
    assert kinds(found) == "P"
    assert any(n.target in ops.INTO for n in found.parts[0].calls)


# what is captured


def test_a_gap_lies_at_every_exchange():
    found = cut(SelfAttention(), ulysses=2)
    assert kinds(found) == "PgPg"  # project, exchange, attend, exchange back and gather: one gap
    assert [[s.op for s in e.splits] for e in found.entries()] == [[], ["ulysses_in"], [], ["ulysses_out", "unshard"]]
    assert_sound(found)


def test_a_gap_writes_where_the_next_piece_reads():
    found = cut(SelfAttention(), ulysses=2)
    into = found.parts[1].module.graph.find_nodes(op="call_function", target=ops.INTO[ops.ulysses_in._opoverload])
    assert len(into) == 1
    assert found.parts[1].writes == [n for n in found.parts[2].reads if n in found.parts[1].writes]
    assert len(found.parts[1].writes) == 3
    assert not found.parts[1].module.graph.find_nodes(op="call_function", target=aten.copy_.default)


def test_what_only_gaps_read_is_handed_over_as_it_is():
    found = cut(SelfAttention(), ulysses=2)
    (last,) = found.end.reads
    assert found.values[last].slot is None
    assert found.parts[-1].returns == [last]


class Meanwhile(nn.Module):
    """A feed-forward layer that does not wait for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.ff = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x):
        return attend(self.q(x), self.k(x), self.v(x)) + F.gelu(self.ff(x))


def test_what_is_computed_while_keys_travel_is_a_piece():
    found = cut(Meanwhile(), kv_gather=2)
    assert_sound(found)
    assert kinds(found) == "PgPgPg"
    assert targets(found.parts[1]) == [START]
    assert aten.linear.default in targets(found.parts[2])
    assert targets(found.parts[3]) == [GATHER]
    sent = set(found.parts[1].reads) & set(found.parts[3].reads)
    assert len(sent) == 2  # keys and values, which are read until they have arrived
    for name in sent:
        start, end = found.lifetimes[name]
        assert start == 0
        assert end >= 3


def test_a_ring_is_a_gap_and_local_attention_is_not():
    def of(**degrees) -> list[bool]:
        found = cut(SelfAttention(is_causal=True), **degrees)
        return [ops.attention._opoverload in targets(p) for p in found.parts if not p.captured]

    assert any(of(ring=2))
    assert not any(of(kv_gather=2))


def test_a_kernel_that_declares_it_cannot_be_captured(monkeypatch):
    slow = replace(kernels.KERNELS["math"], name="math", capturable=False)
    monkeypatch.setitem(kernels.KERNELS, "math", slow)
    found = cut(SelfAttention(), kv_gather=2, kernel="math")
    assert "kernel math declares that it cannot be captured" in reasons(found)
    with pytest.raises(spcompile.UnsupportedGraphError, match=r"attention at .*: kernel math declares"):
        cut(SelfAttention(), kv_gather=2, kernel="math", form="full")


@torch.library.custom_op("spcompile_tests::unsafe", mutates_args=(), tags=[torch.Tag.cudagraph_unsafe])
def unsafe(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@unsafe.register_fake
def _(x):
    return torch.empty_like(x)


MASK = torch.ones(4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x.relu() + torch.rand_like(x), "it draws random numbers"),
        (lambda x: unsafe(x.relu()) + 1, "torch declares it unsafe in CUDA graphs"),
        (lambda x: on(on(x.relu(), "cpu"), "cuda") + 1, "it works on cpu memory"),
        (lambda x: aten.linalg_inv(x.relu()) + 1, "the host waits for its result"),
        (lambda x: x.add_(x.relu()) + 1, "it writes into a graph input, which may lie elsewhere in the next step"),
        (lambda x: aten.index_put(x.relu(), [x > 0], x.sum()), "torch declares it unsafe in CUDA graphs"),
    ],
)
def test_what_no_graph_can_hold_runs_between_pieces(function, why):
    found = cut_fx(function, on_gpu(4, 4))
    assert "Pg" in kinds(found)
    assert set(reasons(found)) == {why}
    assert_buffers(found)
    with pytest.raises(spcompile.UnsupportedGraphError, match=why):
        cut_fx(function, on_gpu(4, 4), form="full")


def test_an_index_of_numbers_is_captured():
    found = cut_fx(lambda x, i: aten.index(x.relu(), [i]), on_gpu(4, 4), on_gpu(3, dtype=torch.int64))
    assert kinds(found) == "P"


def test_numbers_on_the_host_that_never_change_are_captured_and_inputs_are_not():
    def scaled(x, scale):
        return x.relu() * scale

    assert kinds(cut_fx(lambda x: scaled(x, torch.scalar_tensor(2.0)), on_gpu(4))) == "P"
    found = cut_fx(scaled, on_gpu(4), on_gpu(device="cpu"))
    assert kinds(found) == "Pg"
    assert reasons(found) == ["it works on cpu memory"]


def test_work_on_the_host_is_done_before_all_pieces_where_it_can_be():
    def times_in_between(x, t):
        a = x.relu()
        t = (t * 1000).exp()
        return a.sigmoid() + on(t, "cuda")

    found = cut_fx(times_in_between, on_gpu(4), on_gpu(4, device="cpu"))
    assert kinds(found) == "gP"


def test_a_view_is_made_where_it_is_used_and_costs_no_part():
    def split(x):
        a, b = x.relu().chunk(2)
        c = unsafe(a.t())
        return c + b.t(), b

    found = cut_fx(split, on_gpu(4, 4))
    assert kinds(found) == "PgP"
    (relu,) = found.parts[0].writes
    assert [relu in p.reads for p in (*found.parts, found.end)] == [False, True, True, True]


def test_inputs_are_copied_into_buffers_and_only_those_that_pieces_read():
    found = cut_fx(lambda x, y, z: (unsafe(y) + x.relu(), z.t()), *(on_gpu(4, 4) for _ in range(3)))
    x, y, z = found.inputs
    assert found.values[x].slot is not None
    assert found.values[y].slot is None
    assert found.values[z].slot is None


@pytest.mark.parametrize(
    ("stride", "kept"), [((4, 1), (4, 1)), ((1, 3), (1, 3)), ((8, 2), (8, 2)), ((0, 1), (0, 1)), ((1, 1), (4, 1))]
)
def test_a_copied_input_keeps_its_strides_unless_entries_overlap(stride, kept):
    with MODE:
        x = torch.empty(64, device="cuda").as_strided((3, 4), stride)
    found = cut_fx(lambda x: x.relu(), x)
    assert found.values[found.inputs[0]].stride == kept


def test_the_list_of_what_stands_in_the_way_names_lines():
    class Everything(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(1)
            return super().forward(x) + torch.rand(1, device=x.device)

    with pytest.raises(spcompile.UnsupportedGraphError) as info:
        cut(Everything(), ulysses=2, form="full")
    text = str(info.value)
    assert "test_pieces.py" in text
    assert "rand at " in text
    assert "copy_ at " in text
    assert "Use cudagraphs='piecewise'" in text


@pytest.mark.parametrize("form", ["piecewise", "full"])
def test_a_graph_that_is_not_on_the_device_is_refused(form):
    with pytest.raises(
        spcompile.SPConfigError, match=f"cudagraphs='{form}' captures work on cuda, and this graph is on"
    ):
        plan(SelfAttention(), (tokens(8),), sp=2, cudagraphs=form)


# the report


def test_the_report_says_how_many_pieces_what_splits_them_and_what_they_hold():
    report = plan(SelfAttention(), (tokens(8),), ulysses=2, device="cuda", cudagraphs="piecewise").report
    plain = report.to_dict()["pieces"]
    assert [p["captured"] for p in plain] == [True, False, True, False, True, False][: len(plain)]
    assert plain[0]["holds"]["linear"] == 1
    assert plain[0]["parameters"] == 2
    assert plain[1]["splits"][0]["op"] == "ulysses_in"
    assert "helpers.py" in plain[1]["splits"][0]["source"]
    assert plain[1]["splits"][0]["reason"] == "an exchange between ranks"
    text = str(report)
    assert "ulysses_in: an exchange between" in " ".join(text.split())
    assert "captured" in text


def test_without_cuda_graphs_the_report_says_nothing_of_them():
    report = plan(SelfAttention(), (tokens(8),), ulysses=2, device="cuda").report
    assert report.pieces == []
    assert "CUDA graphs" not in str(report)


def test_the_dump_has_the_pieces(dump_folder):
    plan(SelfAttention(), (tokens(8),), ulysses=2, device="cuda", cudagraphs="piecewise", dump=str(dump_folder))
    text = (dump_folder / "graph0" / "pieces.py").read_text()
    compile(text, "pieces.py", "exec")
    assert "# piece 0" in text
    assert "# gap 1" in text
    assert "eager: ulysses_in at" in text
    assert "ulysses_in_into" in text
    assert "CUDA graphs" in (dump_folder / "graph0" / "report.txt").read_text()


# simulated ranks that replay


@pytest.mark.parametrize("degrees", [{"sp": 2}, {"ulysses": 4}, {"ring": 2, "kv_gather": 2}, {"ring": 3}], ids=str)
def test_simulated_ranks_replay_what_they_compute_without_graphs(degrees):
    model, x = nn.Sequential(Meanwhile(), nn.GELU(), SelfAttention()).eval(), tokens(11)
    want = simulate(model, (x,), **degrees).outputs
    run = simulate(model, (x,), cudagraphs="piecewise", **degrees)
    assert any(p.captured for p in run.report.pieces)
    assert all(torch.equal(a, b) for a, b in zip(run.outputs, want, strict=True))


def test_a_simulated_model_replays(monkeypatch):
    monkeypatch.setattr("spcompile.overlap.travels_aside", lambda gather: True)
    case = zoo.case("flux", "odd")
    model, inputs = case.build(), case.inputs()
    want = simulate(model, kwargs=inputs, sp=2).outputs
    found = simulate(model, kwargs=inputs, sp=2, cudagraphs="piecewise").outputs
    assert all(torch.equal(a[0], b[0]) for a, b in zip(found, want, strict=True))


def test_simulated_ranks_write_a_buffer_of_the_model_once():
    class Counts(SelfAttention):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            self.seen.add_(1)
            return super().forward(x) * self.seen

    model, x = Counts().eval(), tokens(8)
    want = simulate(model, (x,), sp=2).outputs
    found = simulate(model, (x,), sp=2, cudagraphs="piecewise").outputs
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
