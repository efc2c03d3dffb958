"""Every test starts from the same seed, on one thread, with nothing compiled and no process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.testing._internal.distributed.fake_pg import FakeStore

settings.register_profile("spcompile", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("spcompile")


@pytest.fixture(autouse=True)
def fresh_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SPCOMPILE_DUMP"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def fake_group() -> Iterator[Callable[..., dist.ProcessGroup]]:
    """``fake_group(4)``: this process as rank 0 of a group whose collectives send nothing."""

    def start(world_size: int) -> dist.ProcessGroup:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        return dist.group.WORLD

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def world_of_one() -> Iterator[str]:
    """A gloo group of this process alone; its name."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.fixture
def dump_folder(tmp_path: Path) -> Path:
    return tmp_path / "dump"
