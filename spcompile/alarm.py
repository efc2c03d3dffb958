"""A rank inside a graph is freed when another has given up waiting for it, between ranks on CPUs.

One rank compiles a new graph, another runs one that it has already: it waits in a collective that nobody joins, and
nothing tells it that the first has raised. So every rank has a thread that sleeps until it is called through the
group's store. Called while its rank stays in one call of a graph, it breaks the group's connections, and the
collective ends with an error. A call of a graph costs two additions for that.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from spcompile.errors import RankMismatchError
from spcompile.ops import wire

GRACE_S = 1.0
"""How long the same call may still go on after it was called for."""
_FOREVER = timedelta(days=1000)
_STOP = "stop"


class Alarm:
    """Of one group. ``steps`` is odd inside a call of a graph; ``reason`` says why such a call was ended."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.steps, self.reason = 0, ""
        self.store = _get_process_group_store(group)
        own: Any = self.store  # a connection waits for one thing at a time
        self.thread = Thread(target=self.watch, args=(own.clone(),), daemon=True, name="spcompile alarm")
        self.thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """A thread that waits for a store when the interpreter goes would take it down."""
        if self.thread.is_alive():
            self.store.set(_key(self.group.rank()), _STOP)
            self.thread.join(GRACE_S)

    def watch(self, store: dist.Store) -> None:
        key = _key(self.group.rank())
        while True:
            try:
                store.wait([key], _FOREVER)
                reason = store.get(key).decode()
                store.delete_key(key)
            except (dist.DistError, RuntimeError):  # the store is gone, and the group with it
                return
            if reason == _STOP:
                return
            steps = self.steps
            time.sleep(GRACE_S)
            if steps % 2 and steps == self.steps:
                self.reason = reason
                _break(self.group)

    def guard(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, whose calls can be ended."""

        def call(*inputs: Any) -> Any:
            self.steps += 1
            try:
                return compiled(*inputs)
            except RuntimeError as error:
                if not self.reason:
                    raise
                raise RankMismatchError(self.reason) from error
            finally:
                self.steps += 1

        return call


_alarms: dict[str, Alarm] = {}


def alarm_of(group: dist.ProcessGroup) -> Alarm | None:
    """The alarm of a group; None if its ranks wait elsewhere than on their CPUs."""
    if dist.get_backend(group) != "gloo":
        return None
    found = _alarms.get(group.group_name)
    if found is None or found.group is not group:
        found = _alarms[group.group_name] = Alarm(group)
    return found


def call_for(group: dist.ProcessGroup, ranks: Sequence[int], reason: str) -> None:
    """End the calls of graphs in which these ranks are."""
    store = _get_process_group_store(group)
    for rank in ranks:
        store.set(_key(rank), reason)


def _key(rank: int) -> str:
    return f"spcompile/alarm/{rank}"


def _break(group: dist.ProcessGroup) -> None:
    """End all that a group and its sub-groups wait for: a receive that times out closes gloo's connections."""
    for part in (group, *wire.sub_groups(group)):
        backend: Any = part._get_backend(torch.device("cpu"))
        peer = (part.rank() + 1) % part.size()
        try:
            backend.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError:
            continue  # as it should


_UNUSED_TAG = 0x5C0
