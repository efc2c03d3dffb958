"""Steps from graphs: real ranks on gloo, recorded on CPUs by the stand-in of `spcompile.testing`.

What each rank does is in workers/recorded.py and workers/teardown.py. What only a GPU can show is in test_gpu.py.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from helpers import C, SelfAttention, tokens

import spcompile
from spcompile.testing import OnCPU, record_on_cpu, zoo

WORKERS = Path(__file__).parent / "workers"
LIMIT_S = 300
STEPS = {2: ("1x1x2", "1x2x1", "2x1x1"), 4: ("2x1x2",)}
MODELS = ("flux",)
LAUNCHES = {
    ("recorded.py", 2): (
        *(f"steps_{mesh}_eager" for mesh in STEPS[2]), *(f"model_{name}" for name in MODELS),
        "gathers_that_start_early", "inputs_of_any_strides", "buffers_and_inputs_that_are_written",
        "autocast_inside_the_model", "in_and_out_of_inference_mode", "parameters_that_move",
        "more_shapes_than_the_limit", "an_exchange_that_returns_new_memory", "a_piece_that_returns_new_memory",
        "buffers_that_are_shared_too_early", "opcheck_into", "full_on_gloo", "real_graphs_on_cpus",
        "sends_by_way_of_the_host",
    ),
    ("recorded.py", 4): ("closed_and_opened_again", *(f"steps_{mesh}_eager" for mesh in STEPS[4])),
    ("teardown.py", 4): (
        "in_order", "twice", "context_manager", "dropped", "out_of_order", "exit_without_close",
        "exit_without_anything",
    ),
}  # fmt: skip
LONG = {
    ("recorded.py", 2): (
        *(f"steps_{mesh}_inductor" for mesh in STEPS[2]),
        *(f"model_{name}" for name in zoo.CORE if name not in MODELS),
    ),
}


@cache
def launch(script: str, num_ranks: int, names: tuple[str, ...]) -> tuple[dict[str, list[dict[str, Any]]], str, int]:
    """What each rank measured per case, what the launch wrote to stderr, and its exit code."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
                   str(WORKERS / script), folder, *names]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GROUP_TIMEOUT_S": "60"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
            log, code = done.stderr, done.returncode
        except subprocess.TimeoutExpired as expired:
            log, code = f"stopped after {LIMIT_S} s\n{(expired.stderr or b'').decode()}", -1

        def read(name: str, rank: int) -> dict[str, Any]:
            file = Path(folder) / f"{name}.{rank}.json"
            return json.loads(file.read_text()) if file.exists() else {"error": f"not finished\n{log[-3000:]}"}

        return {name: [read(name, rank) for rank in range(num_ranks)] for name in names}, log, code


def measured(name: str, num_ranks: int = 2, script: str = "recorded.py") -> list[dict[str, Any]]:
    names = next(group[script, num_ranks] for group in (LAUNCHES, LONG) if name in group.get((script, num_ranks), ()))
    results = launch(script, num_ranks, names)[0][name]
    failures = [f"rank {rank}: {r['error']}" for rank, r in enumerate(results) if "error" in r]
    assert not failures, "\n".join(failures)
    return results


def assert_equal_steps(results: list[dict[str, Any]], num_steps: int) -> None:
    for result in results:
        assert result["different"] == []
        assert result["kept"], "an output of an earlier step was overwritten"
        assert result["pieces"] > 1
        assert result["replays"] == result["pieces"] * (num_steps - 1)  # all but the first
        assert result["recordings"] == 1


# steps


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "inner"),
    [
        *((2, mesh, "eager") for mesh in STEPS[2]),
        *((4, mesh, "eager") for mesh in STEPS[4]),
        *(pytest.param(2, mesh, "inductor", marks=pytest.mark.long) for mesh in STEPS[2]),
    ],
)
def test_steps_from_graphs_are_bitwise_those_without(num_ranks, mesh, inner):
    assert_equal_steps(measured(f"steps_{mesh}_{inner}", num_ranks), 6)


@pytest.mark.parametrize(
    "name", [*MODELS, *(pytest.param(n, marks=pytest.mark.long) for n in zoo.CORE if n not in MODELS)]
)
def test_models_from_graphs_are_bitwise_those_without(name):
    assert_equal_steps(measured(f"model_{name}"), 4)


@pytest.mark.parametrize("name", ["gathers_that_start_early", "inputs_of_any_strides", "autocast_inside_the_model"])
def test_other_steps_are_bitwise_the_same_too(name):
    assert_equal_steps(measured(name), 6)


def test_buffers_and_inputs_are_written_as_without_graphs():
    for result in measured("buffers_and_inputs_that_are_written"):
        assert all(result["equal"])
        assert result["replays"]


def test_steps_may_go_in_and_out_of_inference_mode():
    assert all(all(result["equal"]) for result in measured("in_and_out_of_inference_mode"))


# memory


def test_parameters_that_move_are_recorded_again_also_on_one_rank_alone():
    results = measured("parameters_that_move")
    assert all(all(result["equal"]) for result in results)
    assert [result["recordings"] for result in results] == [3, 2]


def test_beyond_the_limit_steps_run_without_graphs_and_say_so():
    for result in measured("more_shapes_than_the_limit"):
        assert all(result["equal"])
        first, second, third = result["replays"]
        assert first < second == third
        (text,) = result["told"]
        assert "recorded 2 times, which is the limit" in text
        assert "max_recordings" in text
        assert "recorded 2 of at most 2 times" in result["report"]


def test_an_exchange_that_returns_new_memory_is_noticed_at_the_first_replay():
    for result in measured("an_exchange_that_returns_new_memory"):
        assert result["checked"]["raised"][0] == "SPError"
        assert "piece 2 was recorded with" in result["checked"]["text"]
        assert result["checked"]["right"] == [True, True]
        assert result["unchecked"]["right"] == [True, True, False, False]  # as on a GPU: stale addresses


def test_a_piece_that_returns_new_memory_is_noticed_before_it_is_recorded():
    for result in measured("a_piece_that_returns_new_memory"):
        assert result["returned"]["raised"][0] == "SPError"
        assert "piece 2 returned new memory" in result["returned"]["text"]
        assert not any(result["left"]["right"])


def test_buffers_shared_too_early_give_wrong_values_here():
    """So that what the other tests show of the plan of buffers is worth something."""
    assert not any(any(result["right"]) for result in measured("buffers_that_are_shared_too_early"))


def test_the_stand_in_computes_nothing_while_it_records_and_reads_old_addresses():
    engine, x, out = OnCPU(), torch.ones(3), torch.zeros(3)
    recording = engine.capture(lambda x, out: out.copy_(x * 2), [x, out])
    assert torch.equal(out, torch.zeros(3))
    x.fill_(5)
    recording.replay()
    assert torch.equal(out, torch.full((3,), 10.0))
    x.data = torch.zeros(3)  # another address
    recording.replay()
    assert torch.equal(out, torch.full((3,), 10.0))
    assert engine.num_replays == 2


# exchanges


def test_opcheck_of_exchanges_into_given_memory_is_green():
    for result in measured("opcheck_into"):
        assert result
        assert all(outcome == ["SUCCESS"] for outcome in result.values())


def test_sends_by_way_of_the_host_are_exact():
    assert all(result["off"] < 1e-13 for result in measured("sends_by_way_of_the_host"))


def test_full_graphs_on_gloo_are_refused_with_what_stands_in_the_way():
    for result in measured("full_on_gloo"):
        assert "an exchange through a group that is not NCCL's runs on the host" in result["text"]
        assert "kv_gather at" in result["text"]
        assert "Use cudagraphs='piecewise'" in result["text"]


def test_real_graphs_on_cpus_are_refused():
    for result in measured("real_graphs_on_cpus"):
        assert "cudagraphs='piecewise' captures work on cuda, and this graph is on cpu" in result["text"]


# the end


def test_closed_backends_free_their_groups_and_others_go_on():
    for result in measured("closed_and_opened_again", 4):
        assert all(result["right"])
        opened, shared, closed = result["groups"][:3]
        assert opened == shared == closed + 2  # one along each axis, while somebody needs them
        assert result["groups"][3:] == result["groups"][:3]


@pytest.mark.parametrize("name", LAUNCHES["teardown.py", 4])
def test_every_order_of_ends_leaves_the_process_in_peace(name):
    raised = "" if name == "dropped" or name.startswith("exit") else "ClosedError"
    assert [result["raised"] for result in measured(name, 4, "teardown.py")] == [raised] * 4
    _, log, code = launch("teardown.py", 4, LAUNCHES["teardown.py", 4])
    assert code == 0, log
    assert "destroy_process_group" not in log
    assert "Traceback" not in log


def test_a_closed_backend_compiles_nothing_and_runs_nothing(fake_group):
    fake_group(2)
    model = SelfAttention().eval().requires_grad_(False)
    with spcompile.backend(sp=2, inner="eager") as backend:
        compiled = torch.compile(model, backend=backend)
        compiled(tokens(8))
    for length in (8, 9):  # what was compiled, and what was not
        with pytest.raises(spcompile.ClosedError, match="was closed"):
            compiled(tokens(length))


def test_one_rank_has_nothing_to_capture():
    with pytest.raises(spcompile.SPConfigError, match="there is one rank"):
        torch.compile(SelfAttention(), backend=spcompile.backend(sp=1, cudagraphs="piecewise"))(tokens(8))


def test_a_backend_lets_go_of_graphs_when_it_is_dropped(fake_group):
    fake_group(2)
    backend = spcompile.backend(sp=2, inner="eager", cudagraphs="piecewise")
    engine = record_on_cpu(backend)
    model = SelfAttention().eval().requires_grad_(False)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        compiled(torch.ones(2, 8, C))
    (replayed,) = backend._replayed
    assert engine.num_replays
    del backend, compiled
    torch._dynamo.reset()
    gc.collect()
    assert not replayed.recordings


@pytest.mark.parametrize(
    ("capturable", "named"), [(False, ["spcompile::ulysses_in", "spcompile::ulysses_out"]), (True, [])]
)
def test_graphs_that_inductor_records_leave_out_what_they_must(fake_group, monkeypatch, capturable, named):
    """Gloo's exchanges are named to its partitioner, NCCL's are not."""
    seen = {}

    def compile_fx(module, inputs, config_patches):
        seen.update(config_patches)
        return module.forward

    fake_group(2)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    monkeypatch.setattr("spcompile.ops.wire.is_capturable", lambda group: capturable)
    backend = spcompile.backend(ulysses=2, check="off", options={"triton.cudagraphs": True})
    torch.compile(SelfAttention().eval().requires_grad_(False), backend=backend)(tokens(8))
    assert [n for n in seen["custom_should_partition_ops"] if "ulysses" in n] == named
    assert ("spcompile::shard" in seen["custom_should_partition_ops"]) is False
