"""What goes wrong between ranks ends with an error that says so, on every rank and in time; nothing hangs.

Real processes on gloo with short timeouts. What each rank does is in workers/faults.py.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

WORKER = Path(__file__).parent / "workers" / "faults.py"
GROUP_TIMEOUT_S, LIMIT_S = 20, 280
LAUNCHES = (
    (
        "different_noise", "different_weights", "different_noise_unchecked", "different_noise_later",
        "different_generators", "equal_generators", "different_options", "one_refuses", "one_never_comes",
        "resolutions_in_different_orders", "verified", "first_block_cache", "unset_memory_is_nan",
        "different_constants", "one_has_a_warm_cache",
        "histories_that_differ", "automatic_dynamic_shapes", "out_of_memory_in_the_inner_compile_of_one",
        "out_of_memory_in_the_inner_compile_of_all", "the_inner_backend_of_one_raises", "dynamo_fails_on_one",
        "refusals_suppressed", "one_is_past_its_limit", "autocast_on_one", "known_graphs_in_different_orders",
        "one_raises_between_exchanges_and_goes_on", "in_and_out_of_inference_mode", "groups_that_come_and_go",
        "one_compiles_while_the_other_runs", "one_compiles_while_the_other_runs_ulysses",
        "one_compiles_while_the_other_runs_sockets", "one_compiles_while_the_other_runs_ring",
        "the_inner_backend_of_one_raises_at_run_time",
    ),
    ("one_is_killed",),
)  # fmt: skip


@cache
def launch(names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
                   str(WORKER), folder, *names]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GROUP_TIMEOUT_S": str(GROUP_TIMEOUT_S)}
        try:
            log = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S).stderr
        except subprocess.TimeoutExpired as expired:
            log = f"stopped after {LIMIT_S} s\n{(expired.stderr or b'').decode()}"

        def read(name: str, rank: int) -> dict[str, Any]:
            file = Path(folder) / f"{name}.{rank}.json"
            return json.loads(file.read_text()) if file.exists() else {"error": f"not finished\n{log[-3000:]}"}

        return {name: [read(name, rank) for rank in (0, 1)] for name in names}


def measured(name: str, ranks: tuple[int, ...] = (0, 1)) -> list[dict[str, Any]]:
    names = next(names for names in LAUNCHES if name in names)
    results = [launch(names)[name][rank] for rank in ranks]
    failures = [r["error"] for r in results if "error" in r]
    assert not failures, "\n".join(failures)
    return results


def assert_mismatch(name: str, *texts: str, ranks: tuple[int, ...] = (0, 1)) -> None:
    """Told on these ranks, and the group goes on."""
    for result in measured(name, ranks):
        assert {"RankMismatchError", "SPError", "RuntimeError"} <= set(result["raised"]), result
        for text in texts:
            assert text in result["text"], result["text"]
    assert all(r.get("goes_on", True) for r in measured(name))


def test_different_noise_names_the_argument_and_the_way_out():
    assert_mismatch(
        "different_noise", "`x` differs between ranks: rank 0 / rank 1.", "torch.manual_seed(0)", "broadcast"
    )


def test_different_weights_are_named():
    assert_mismatch("different_weights", "`model.qkv.weight`", "Load the same checkpoint")


def test_nothing_is_compared_if_that_is_off():
    assert [r["raised"] for r in measured("different_noise_unchecked")] == [[], []]


def test_later_calls_are_compared_if_asked_for():
    assert_mismatch("different_noise_later", "`x` differs between ranks")
    assert all(r["unnoticed"] for r in measured("different_noise_later"))


def test_generators_that_differ_are_told():
    assert_mismatch("different_generators", "the generators of rank 0 / rank 1 differ", "torch.manual_seed")


def test_random_numbers_are_those_of_the_model_alone():
    assert all(r["off"] < 1e-5 for r in measured("equal_generators"))


def test_options_that_differ_are_named():
    assert_mismatch("different_options", "options:", "kernel=auto", "kernel=math", "on rank 0", "on rank 1")


IN_MEMORY = (sys.platform, platform.machine()) == ("linux", "x86_64")
"""Ranks of one host exchange through memory, where exchanges say whose they are."""


def test_steps_in_and_out_of_inference_mode_on_one_group():
    for result in measured("in_and_out_of_inference_mode"):
        assert result["right"] == [True] * 27


@pytest.mark.skipif(sys.platform != "linux", reason="counts files under /proc")
def test_nothing_of_a_group_outlives_it():
    for result in measured("groups_that_come_and_go"):
        second, last = result["counts"][1], result["counts"][-1]
        assert all(now <= before for now, before in zip(last, second, strict=True)), result["counts"]


def test_autocast_on_one_rank_is_told():
    assert_mismatch("autocast_on_one", "autocast=off", "autocast=cpu torch.bfloat16", "on rank 1")


@pytest.mark.skipif(not IN_MEMORY, reason="gloo ends the process where sizes differ")
def test_known_graphs_in_different_orders_end_with_an_error_and_the_group_goes_on():
    for result in measured("known_graphs_in_different_orders"):
        for found in result["attempts"]:
            assert "RankMismatchError" in found["raised"]
            assert "[SP307]" in found["text"]
        assert result["right"]
        assert result["goes_on"]


@pytest.mark.skipif(not IN_MEMORY, reason="gloo's connections are broken by then")
def test_a_rank_that_raises_between_exchanges_ends_that_call_on_all_and_no_other():
    left, raising = measured("one_raises_between_exchanges_and_goes_on")
    assert "ValueError" in raising["raised"]
    assert "rank 1 of the group raised in the middle of this call: ValueError: out of something" in left["text"]
    assert left["right"] == raising["right"] == [True] * 4
    assert left["goes_on"]


def test_a_warm_cache_on_one_rank_only_is_right():
    warm, cold = measured("one_has_a_warm_cache")
    assert warm["hits"] == [1]
    assert cold["hits"] == [0]
    assert warm["right"]
    assert cold["right"]


def test_a_graph_that_one_rank_refuses_ends_on_all():
    waiting, refusing = measured("one_refuses")
    assert "RankMismatchError" in waiting["raised"]
    assert "strict=True, and the graph needs" in waiting["text"]
    assert "UnsupportedGraphError" in refusing["raised"]
    assert waiting["goes_on"]
    assert refusing["goes_on"]


def test_a_rank_that_never_comes_is_named_in_time():
    assert_mismatch("one_never_comes", "rank 1 of the group did not compile graph 0 within 3 s", ranks=(0,))
    assert 3 <= measured("one_never_comes")[0]["seconds"] < 10


def test_resolutions_in_different_orders_are_told():
    assert_mismatch("resolutions_in_different_orders", "inputs: ", "[2, 5, 24]", "[2, 9, 24]")


def test_a_verified_run_keeps_its_error():
    for result in measured("verified"):
        assert len(result["verified"]) == 1
        assert result["verified"][0] < 1e-5


def test_a_first_block_cache_decides_alike_on_all_ranks():
    for result in measured("first_block_cache"):
        assert result["off"] < 1e-5
        assert result["skipped"] == [2, 2]


def test_memory_that_nobody_set_reaches_no_token():
    for result in measured("unset_memory_is_nan"):
        assert all(off < 1e-4 for off in result.values()), result


def test_constants_that_differ_are_told():
    assert_mismatch("different_constants", "rewritten graph: ", "on rank 0", "on rank 1")


def test_ranks_that_compiled_other_resolutions_before_agree():
    """One has a graph with sizes and numbers as inputs, the other one without."""
    assert all(r["off"] < 1e-5 for r in measured("histories_that_differ"))


def test_automatic_dynamic_shapes_are_right():
    """Dynamo makes the second graph dynamic; every resolution has its own all the same."""
    for result in measured("automatic_dynamic_shapes"):
        assert result["off"] < 1e-5
        assert result["graphs"] == [0, 1, 1]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("out_of_memory_in_the_inner_compile_of_one", "OutOfMemoryError: tried to allocate 3 GiB"),
        ("the_inner_backend_of_one_raises", "KeyError: 'nothing by that name'"),
    ],
)
def test_what_the_inner_backend_of_one_rank_raises_is_told_to_all(name, text):
    waiting, failing = measured(name)
    assert "RankMismatchError" in waiting["raised"]
    assert f"rank 1 of the group cannot run graph 0, so no rank does: {text}" in waiting["text"]
    assert "BackendCompilerFailed" in failing["raised"]
    assert text in failing["text"]
    assert max(waiting["seconds"], failing["seconds"]) < 10
    assert waiting["goes_on"]
    assert failing["goes_on"]


def test_out_of_memory_on_all_ranks_leaves_the_group_as_it_was():
    for result in measured("out_of_memory_in_the_inner_compile_of_all"):
        assert "MemoryError: no more" in result["text"]
        assert result["goes_on"]


def test_what_dynamo_refuses_on_one_rank_ends_on_all():
    waiting, failing = measured("dynamo_fails_on_one")
    assert "rank 1 of the group did not compile graph 0 within 3 s" in waiting["text"]
    assert "found at least two devices, cpu and meta" in failing["text"]
    assert waiting["goes_on"]
    assert failing["goes_on"]


def test_a_refusal_that_is_suppressed_warns_on_every_rank():
    for result in measured("refusals_suppressed"):
        assert result["raised"] == []
        assert all(off < 1e-5 for off in result["off"])
        assert "suppress_errors is set" in result["told"][0]
        assert "strict=True, and the graph needs" in result["told"][0]
        assert result["goes_on"]


def test_a_rank_past_dynamos_limit_is_right_and_the_other_is_told():
    past, waiting = measured("one_is_past_its_limit")
    assert past["off"][0] < 1e-5
    assert "rank 0 of the group did not compile graph 1 within 3 s" in waiting["text"]
    assert "is past Dynamo's recompile limit" in waiting["text"]
    assert past["goes_on"]
    assert waiting["goes_on"]


@pytest.mark.parametrize("exchange", ["", "_ulysses", "_sockets", "_ring"])
def test_one_rank_compiling_while_the_other_runs_ends_on_both(exchange):
    """Where ranks share memory the group goes on; gloo's connections end broken."""
    running, compiling = measured(f"one_compiles_while_the_other_runs{exchange}")
    assert "rank 0 of the group did not compile graph 1 within 3 s" in compiling["text"]
    assert "RankMismatchError" in running["raised"]
    assert "rank 1 of the group waited 3 s for this rank to compile graph 1" in running["text"]
    in_memory = exchange != "_sockets" and IN_MEMORY
    assert ("go on with a new one" in running["text"]) == (not in_memory)
    assert max(running["seconds"], compiling["seconds"]) < 10
    assert running["goes_on"]
    assert compiling["goes_on"]


def test_a_rank_that_fails_at_run_time_ends_the_others_within_the_groups_timeout():
    left, failing = measured("the_inner_backend_of_one_raises_at_run_time")
    assert "a kernel failed" in failing["text"]
    assert left["raised"]
    assert left["seconds"] < 10


def test_a_rank_that_is_killed_ends_the_others():
    (left,) = measured("one_is_killed", ranks=(0,))
    assert left["raised"]
    assert left["seconds"] < GROUP_TIMEOUT_S + 10
