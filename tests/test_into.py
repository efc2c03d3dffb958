"""Exchanges into given memory: what the op returns, in buffers of any strides, and what is refused."""

from __future__ import annotations

import pytest
import torch
from test_ops import EXAMPLES, MESHES, Example
from torch._subclasses.fake_tensor import FakeTensorMode

from spcompile import ops
from spcompile.ops import wire

EXCHANGES = {name: make for name, make in EXAMPLES.items() if getattr(ops, name)._opoverload in ops.INTO}
every_exchange = pytest.mark.parametrize("make", EXCHANGES.values(), ids=EXCHANGES.keys())


def several(result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def places(results) -> list[torch.Tensor]:
    """A buffer for each result, with its strides, full of what must be overwritten."""
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(77) for x in several(results)]


def run_into(example: Example, outs: list[list[torch.Tensor]]) -> None:
    program = ops.PROGRAMS_INTO[ops.INTO[example.op._opoverload]]
    programs = [program(rank, *args, *outs[rank]) for rank, args in enumerate(example.ranks)]
    assert wire.in_lockstep(programs, example.ranks[0][-1]) == [None] * len(programs)


@every_exchange
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_buffers_hold_what_the_op_returns(make, mesh, strided):
    example = make(mesh=mesh)
    want = example.run()
    outs = [places(w) for w in want]
    if strided:  # another dim innermost than the op would choose
        outs = [[o.transpose(0, -1).contiguous().transpose(0, -1).fill_(77) for o in some] for some in outs]
    before = [[o.data_ptr() for o in some] for some in outs]
    run_into(example, outs)
    for results, some, addresses in zip(want, outs, before, strict=True):
        assert all(torch.equal(o, w) for o, w in zip(some, several(results), strict=True))
        assert [o.data_ptr() for o in some] == addresses


def test_heads_that_do_not_line_up_are_written_too():
    """Key/value heads are then expanded on arrival."""
    example = EXAMPLES["ulysses_in"](mesh=(1, 1, 4), heads=(6, 3))
    want = example.run()
    outs = [places(w) for w in want]
    run_into(example, outs)
    assert all(torch.equal(o, w) for some, ws in zip(outs, want, strict=True) for o, w in zip(some, ws, strict=True))


@every_exchange
def test_a_buffer_of_another_shape_is_refused(make, world_of_one):
    example = make(mesh=(1, 1, 1))
    args = (*example.ranks[0], world_of_one)
    results = several(example.op(*args))
    wrong = [x.new_empty((*x.shape[:-1], x.shape[-1] + 1)) for x in results]
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=r"out is \["):
        ops.INTO[example.op._opoverload](*args, *wrong)


def test_what_has_a_program_declares_what_a_graph_can_hold():
    assert set(ops.DECLARED) == set(ops.PROGRAMS)
    assert set(ops.INTO) <= set(ops.PROGRAMS)
    assert set(ops.INTO.values()) == set(ops.PROGRAMS_INTO)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_op_that_asks_other_ranks_says_so(name):
    """An exchange taken for local work would be captured, and hang or go wrong at replay."""
    mesh = (2, 2, 2)
    example = EXAMPLES[name](mesh=mesh)
    asks = next(ops.PROGRAMS[example.op._opoverload](0, *example.ranks[0]), None) is not None
    assert ops.DECLARED[example.op._opoverload].exchanges((*example.ranks[0], "group")) == asks
    assert (example.op._opoverload in ops.INTO) == asks


@pytest.mark.parametrize("ring", [1, 2])
def test_attention_asks_other_ranks_around_a_ring_only(ring):
    example = EXAMPLES["attention"](mesh=(ring, 2, 1))
    declared = ops.DECLARED[ops.attention._opoverload]
    assert declared.exchanges((*example.ranks[0], "group")) == (ring > 1)
    assert declared.hindrance((*example.ranks[0], "group")) is None
