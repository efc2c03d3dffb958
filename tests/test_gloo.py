"""Real processes under torchrun, on gloo. What each rank does is in workers/cases.py; what it must give is here.

Starting ranks takes seconds, so the cases of one launch run one after the other in the same processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import caches
import pytest

WORKER = Path(__file__).parent / "workers" / "cases.py"
SMALL = (
    "ops_equal_the_reference", "opcheck", "several_resolutions", "dynamic_shapes_under_inductor", "writes", "switches",
    "caches_of_steps", "running_statistics", "constants_under_inductor", "calls_written_out", "classes_with_constants",
    "different_shapes", "degrees_that_do_not_match",
    "different_dtypes",  # the last, for it may end the processes
)  # fmt: skip
ALONE = tuple(f"exchange_{mesh}_{inner}" for mesh in ("2x1x1", "1x2x1", "1x1x2") for inner in ("eager", "inductor"))
PRODUCTS = tuple(f"exchange_{mesh}_eager" for mesh in ("2x1x2", "1x2x2", "2x2x1"))
ON_FOUR = (
    *(f"exchange_{mesh}_{inner}" for mesh in ("4x1x1", "1x4x1", "1x1x4") for inner in ("eager", "inductor")),
    *(name.replace("eager", "inductor") for name in PRODUCTS),
)
SUB_GROUPS = (
    "sub_groups", "axes_of_a_mesh_with_data_parallel_groups", "process_groups_of_every_other_rank",
    "one_axis_of_a_mesh_of_every_other_rank",
)  # fmt: skip
MODELS = ("flux_float32", "wan_float32", "sd3_float32", "flux_bfloat16")
LAUNCHES = {
    2: ((*ALONE, *SMALL), MODELS, *((f"classes_{number}_of_3",) for number in range(3))),
    4: ((*SUB_GROUPS, "two_axes_of_a_mesh", *PRODUCTS, "ops_equal_the_reference", "writes"), MODELS, ON_FOUR),
}
LIMIT_S = 540


@cache
def launch(num_ranks: int, names: tuple[str, ...]) -> dict[str, list[dict[str, Any]]]:
    """Run the cases on ``num_ranks`` real ranks; per case, what each rank measured."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
                   str(WORKER), folder, *names]  # fmt: skip
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GROUP_TIMEOUT_S": "300"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
            log = done.stderr
        except subprocess.TimeoutExpired as expired:
            log = f"stopped after {LIMIT_S} s\n{(expired.stderr or b'').decode()}"

        def read(name: str, rank: int) -> dict[str, Any]:
            file = Path(folder) / f"{name}.{rank}.json"
            return json.loads(file.read_text()) if file.exists() else {"error": f"not finished\n{log[-4000:]}"}

        return {name: [read(name, rank) for rank in range(num_ranks)] for name in names}


def measured(num_ranks: int, name: str) -> list[dict[str, Any]]:
    """What each rank measured in one case, none of which may have failed."""
    names = next(names for names in LAUNCHES[num_ranks] if name in names)
    results = launch(num_ranks, names)[name]
    failures = [f"rank {rank}: {r['error']}" for rank, r in enumerate(results) if "error" in r]
    assert not failures, "\n".join(failures)
    return results


two_and_four = pytest.mark.parametrize("num_ranks", [2, 4])
two_and_long_four = pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])


@two_and_four
def test_ops_equal_the_reference(num_ranks):
    for result in measured(num_ranks, "ops_equal_the_reference"):
        assert result["ops"] > 0
        assert result["different"] == []


def test_opcheck_is_green():
    for result in measured(2, "opcheck"):
        assert result
        assert all(outcome == ["SUCCESS"] for outcome in result.values())


@two_and_four
def test_buffers_and_inputs_are_written_as_without_compiling(num_ranks):
    assert all(result["off"] < 1e-13 for result in measured(num_ranks, "writes"))


def test_caches_hold_what_they_hold_without_compiling():
    for result in measured(2, "caches_of_steps"):
        assert len(result) == 3 * len(caches.models())
        assert all(error < 1e-13 for error in result.values()), result


def test_running_statistics_follow():
    for result in measured(2, "running_statistics"):
        assert result["off"] < 1e-13
        assert result["regathers"] == 0


@pytest.mark.parametrize("name", ["constants_under_inductor", "calls_written_out"])
def test_what_tracing_adds_to_a_graph_is_compiled(name):
    assert all(result["off"] < 1e-13 for result in measured(2, name))


REFUSED = {"Kandinsky6SRTransformer3DModel"}


PARTS = [pytest.param(f"classes_{number}_of_3", 25, marks=pytest.mark.long) for number in range(3)]


@pytest.mark.parametrize(("name", "count"), [("classes_with_constants", 3), *PARTS])
def test_diffusers_classes_are_exact_as_compiled(name, count):
    for result in measured(2, name):
        assert len(result) == count
        refused = {cls for cls, found in result.items() if isinstance(found, str)}
        assert refused <= REFUSED, [result[cls] for cls in refused]
        wrong = {cls: result[cls] for cls in set(result) - refused if result[cls][0] > result[cls][1]}
        assert not wrong


def test_a_cut_that_moves_there_and_back_is_exact():
    for result in measured(2, "switches"):
        assert result["off"] < 1e-13
        assert result["exchanges"].count("switch") == 2


def test_every_resolution_is_right_also_past_dynamos_limit():
    assert all(result["off"] < 1e-13 for result in measured(2, "several_resolutions"))


def test_dynamic_shapes_are_right_under_inductor():
    assert all(result["off"] < 1e-5 for result in measured(2, "dynamic_shapes_under_inductor"))


def test_ranks_with_different_shapes_are_all_told_and_go_on():
    for result in measured(2, "different_shapes"):
        assert {"RankMismatchError", "SPError", "RuntimeError"} <= set(result["raised"])
        assert all(f"on rank {rank}" in result["text"] for rank in (0, 1))
        assert result["off"] < 1e-13


def test_ranks_with_different_dtypes_are_all_told():
    assert [result["raised"] for result in measured(2, "different_dtypes")] == ["RankMismatchError"] * 2


def test_degrees_that_do_not_match_the_group_are_refused():
    for result in measured(2, "degrees_that_do_not_match"):
        assert {"SPConfigError", "ValueError"} <= set(result["raised"])
        assert "sp=3, but the default process group has 2 ranks" in result["text"]


@pytest.mark.parametrize(
    ("num_ranks", "name"),
    [
        *((2, name) for name in ALONE),
        *((4, name) for name in PRODUCTS),
        *(pytest.param(4, name, marks=pytest.mark.long) for name in ON_FOUR),
    ],
    ids=str,
)
def test_every_exchange_gives_what_one_process_gives(num_ranks, name):
    degrees = dict(zip(("ring", "kv_gather", "ulysses"), name.split("_")[1].split("x"), strict=True))
    used = {axis: d for axis, d in degrees.items() if d != "1"}
    exchange = " x ".join(f"{axis}={d}" for axis, d in used.items()) if len(used) > 1 else next(iter(used))
    for result in measured(num_ranks, name):
        assert result["off"] < 1e-13
        assert result["exchanges"] == [exchange, exchange, exchange, "local"] * 2


@pytest.mark.parametrize("name", SUB_GROUPS)
def test_sub_groups_each_get_their_own_answer(name):
    results = measured(4, name)
    by_half = name == "axes_of_a_mesh_with_data_parallel_groups"
    assert [result["data"] for result in results] == ([0, 0, 1, 1] if by_half else [0, 1, 0, 1])
    assert all(result["degree"] == 2 and result["off"] < 1e-13 for result in results)


def test_the_axes_of_a_mesh_say_the_degrees():
    for result in measured(4, "two_axes_of_a_mesh"):
        assert result["off"] < 1e-13
        assert result["exchanges"] == ["local", "ring=2 x ulysses=2"]


@two_and_long_four
@pytest.mark.parametrize("model", ["flux", "wan", "sd3"])
def test_diffusers_models_under_inductor(model, num_ranks):
    for result in measured(num_ranks, f"{model}_float32"):
        assert result["off"] < 1e-5
        assert result["regathers"] == 0


@two_and_long_four
def test_bfloat16_is_as_exact_as_without_sharding(num_ranks):
    for result in measured(num_ranks, "flux_bfloat16"):
        assert result["dtype"] == "torch.bfloat16"
        assert result["off"] <= 2 * result["off_alone"]
        assert result["rms"] <= 2 * result["rms_alone"]
