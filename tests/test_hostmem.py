"""Exchanges through the memory of one host, between real processes: workers/hostmem.py."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="ranks share memory on Linux on x86-64"
)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.long)])
def found(request, tmp_path_factory) -> dict[str, Any]:
    """What rank 0 saw."""
    folder = tmp_path_factory.mktemp("hostmem")
    worker, num_ranks = Path(__file__).parent / "workers" / "hostmem.py", request.param
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, str(worker), str(r), str(num_ranks), str(folder)],
                         env=environment, stderr=subprocess.PIPE, text=True)
        for r in range(num_ranks)
    ]  # fmt: skip
    logs = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert (folder / "found.json").exists(), logs
    return json.loads((folder / "found.json").read_text())


def test_what_arrives_is_what_was_sent(found):
    assert found["shared"]
    assert found["exact"] == [True] * 20
    assert found["dtypes"] == [True] * 4


def test_every_exchange_went_through_it(found):
    assert found["messages"] == 4 * 24


def test_several_on_their_way_and_large_ones_go_through_gloo(found):
    assert found["several"]
    assert found["too large"]
    assert found["more messages"] == 1


@pytest.mark.parametrize("call", ["open", "memfd_create"])
def test_a_rank_that_may_not_share_makes_all_use_gloo(found, call):
    assert not found[f"shared without {call}"]
    assert found[f"exact without {call}"]


def test_steps_go_in_and_out_of_inference_mode(found):
    assert found["in inference mode"]
    assert found["made in inference mode"]


def test_messages_without_entries(found):
    assert found["nothing"]


def test_an_exchange_that_others_have_not_begun_can_be_ended(found):
    assert found["interrupted"].startswith("an exchange that not all ranks had begun was ended")
    assert found["sent when interrupted"] == [0]  # and not a moment later
    assert found["exact after it"]
    error, off = found["interrupted before it was put"]
    assert "was ended" in error
    assert off == 0


def test_an_exchange_that_went_on_was_not_ended(found):
    assert found["interrupted as it came"] is False


def test_a_rank_that_is_late_ends_the_step_in_time(found):
    text, seconds = re.fullmatch(r"(.*) \[(\d+) s\]", found["one is late"]).groups()
    assert re.match(r"rank \d of the group sent nothing for 3.* s, the group's timeout", text)
    assert int(seconds) <= 5


def test_a_rank_that_is_gone_ends_the_step_at_once(found):
    text, seconds = re.fullmatch(r"(.*) \[(\d+) s\]", found["one is gone"]).groups()
    assert re.match(r"rank \d of the group has ended \(process \d+\) in the middle of a step", text)
    assert int(seconds) <= 5
