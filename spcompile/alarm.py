"""A rank inside a graph is freed when another has given up waiting for it, between ranks on CPUs.

One rank compiles a new graph, another runs one that it has already: it waits in an exchange that nobody joins, and
nothing tells it that the first has raised. So every rank has a thread that sleeps until it is called through the
group's store. Called while its rank stays in one call of a graph, it ends the exchange: in memory that the ranks share
as if it had never begun, else by breaking the group's connections. A call of a graph costs two additions for that.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from spcompile.errors import RankMismatchError
from spcompile.ops import hostmem, wire

GRACE_S = 1.0
"""How long the same call may still go on after it was called for, and then how long it may take to end."""
_FOREVER = timedelta(days=1000)
_STOP = "stop"
BROKEN = ". The connections of this process group are broken; go on with a new one"


class Alarm:
    """Of one group. ``steps`` is odd inside a call of a graph; ``reason`` says why such a call was ended."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = weakref.ref(group)  # a group that is destroyed must take its store with it
        self.rank = group.rank()
        self.steps, self.reason = 0, ""
        store: Any = _get_process_group_store(group)
        self.store = store.clone()  # a connection waits for one thing at a time: one to wait, one to end that
        self.thread = Thread(target=self.watch, args=(store.clone(),), daemon=True, name="spcompile alarm")
        self.store.set(_key(self.rank, "on"), "")
        self.thread.start()
        weakref.finalize(group, self.stop)

    def stop(self) -> None:
        """End the thread, with its group or at exit: one that waits for a store would take the interpreter down."""
        if self.thread.is_alive():
            with contextlib.suppress(dist.DistError, RuntimeError):  # no store, no wait
                self.store.set(_key(self.rank), _STOP)
            self.thread.join(GRACE_S)

    def watch(self, store: dist.Store) -> None:
        """What the thread does. ``store`` is its own connection."""
        key = _key(self.rank)
        while True:
            try:
                store.wait([key], _FOREVER)
                reason = store.get(key).decode()
                store.delete_key(key)
            except (dist.DistError, RuntimeError):  # the store is gone, and the group with it
                return
            group = self.group()
            if reason == _STOP or group is None:
                return
            self.end(group, reason)
            store.set(_key(self.rank, "heard"), "")
            del group

    def end(self, group: dist.ProcessGroup, reason: str) -> None:
        """End the call of a graph in which this rank is, if it stays in it."""
        steps = self.steps
        start = time.monotonic()
        while time.monotonic() < start + GRACE_S:
            if steps % 2 == 0 or steps != self.steps:
                return
            time.sleep(GRACE_S / 100)
        parts = (group, *wire.sub_groups(group))
        self.reason = reason
        if not any(hostmem.interrupt(part) for part in parts):
            self.reason = reason + BROKEN
            for part in parts:
                _break(part)

    def guard(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """``compiled``, whose calls can be ended."""

        def call(*inputs: Any) -> Any:
            self.steps += 1
            try:
                return compiled(*inputs)
            except RuntimeError as error:
                if not self.reason:
                    raise
                reason, self.reason = self.reason, ""
                raise RankMismatchError("SP307", reason) from error
            finally:
                self.steps += 1

        return call


_alarms: weakref.WeakKeyDictionary[dist.ProcessGroup, Alarm] = weakref.WeakKeyDictionary()


def alarm_of(group: dist.ProcessGroup) -> Alarm | None:
    """The alarm of a group; None if its ranks wait elsewhere than on their CPUs."""
    if dist.get_backend(group) != "gloo":
        return None
    if group not in _alarms:
        _alarms[group] = Alarm(group)
    return _alarms[group]


def call_for(group: dist.ProcessGroup, ranks: Sequence[int], reason: str) -> None:
    """End the calls of graphs in which these ranks are, and wait until they have ended."""
    store = _get_process_group_store(group)
    ranks = [r for r in ranks if store.check([_key(r, "on")])]
    for rank in ranks:
        store.set(_key(rank), reason)
    heard = [_key(r, "heard") for r in ranks]
    if heard:
        with contextlib.suppress(dist.DistStoreError):  # one is gone for good
            store.wait(heard, timedelta(seconds=3 * GRACE_S))
        for key in heard:
            store.delete_key(key)


def _key(rank: int, what: str = "call") -> str:
    return f"spcompile/alarm/{rank}/{what}"


def _break(group: dist.ProcessGroup) -> None:
    """End all that a group waits for: a receive that times out closes gloo's connections."""
    backend: Any = group._get_backend(torch.device("cpu"))
    peer = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):  # as it should
        backend.recv([torch.empty(1)], peer, _UNUSED_TAG).wait(timedelta(milliseconds=1))


_UNUSED_TAG = 0x5C0
