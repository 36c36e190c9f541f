# SPDX-License-Identifier: Apache-2.0
"""A process's writes to tcp, followed by BPF transmit timestamps (Linux 6.15). Only its own sockets cost anything."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from clawd.errors import HostError
from clawd.kernel import bpf, bpfcall, btf
from clawd.kernel.hists import Counted, set_lanes
from clawd.kernel.taken import tcp_sockets

SOURCE = "stamps.bpf.c"
CALLS = {
    # The number that the program calls: the kernel's function
    0x7FC1A001: "bpf_cast_to_kern_ctx",
    0x7FC1A002: "bpf_rdonly_cast",
    0x7FC1A003: "bpf_sock_ops_enable_tx_tstamp",
}
MEMBERS = {
    "CLAW_AT_SKB": ("bpf_sock_ops_kern", "skb"),
    "CLAW_AT_HEAD": ("sk_buff", "head"),
    "CLAW_AT_END": ("sk_buff", "end"),
    "CLAW_AT_KEY": ("skb_shared_info", "tskey"),
}
FLAG_LEVEL = 0x7FC1
"""CLAW_FLAG_LEVEL of ebpf/tracer.h."""
BACKEND = "BPF transmit timestamps"


class Stamps:
    """From entry to exit. Sockets that the process has at entry, and those that it accepts at a port in `lanes`; others
    from the next `refresh` on. `directory`: of its control group, which must be that of its sockets too.

    A tracer that is killed leaves the sockets' flags: the kernel goes on asking whatever sock_ops programs there are,
    of which none is this one, at each write, until the socket ends or another tracer does.
    """

    def __init__(self, pid: int, directory: Path, lanes: Mapping[int, str]) -> None:
        self._pid = pid
        self._directory = directory
        self._lanes = lanes
        self._stack = contextlib.ExitStack()
        self.unseen = 0
        """Sockets of the process that are another control group's, when last looked at."""

    def __enter__(self) -> Stamps:
        types = btf.look_up([*CALLS.values()], [*MEMBERS.values()])
        flags = [f"-D{name}={types.members[place]}" for name, place in MEMBERS.items()]
        flags += [f"-DCLAW_PID={self._pid}", f"-DCLAW_INFO={types.structs['skb_shared_info']}"]
        programs = {"claw_stamps": "SOCK_OPS", "claw_flag": "CGROUP_SOCKOPT"}
        with contextlib.ExitStack() as stack:
            self.loaded = bpf.load(
                SOURCE, programs, flags, calls={call: types.functions[name] for call, name in CALLS.items()}
            )
            stack.callback(self.loaded.close)
            self.counted = Counted(self.loaded)
            stack.callback(self.counted.close)
            set_lanes(self.loaded, self._lanes)
            self._group = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._group)
            # Before the flags, so that no socket that comes in between is missed
            try:
                link = bpfcall.attach(self.loaded.programs["claw_stamps"], self._group, bpfcall.SOCK_OPS)
            except OSError as error:
                raise HostError(f'cannot attach to "{self._directory}": {error.strerror}') from error
            stack.callback(os.close, link)
            stack.callback(self._flag, is_on=False)
            self._flag(is_on=True)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def refresh(self) -> None:
        """Sockets may have come since, and another tracer may have ended and cleared their flags."""
        self._flag(is_on=True)

    def _flag(self, *, is_on: bool) -> None:
        unseen = 0
        with contextlib.suppress(HostError, OSError):  # the process is gone, and its sockets with it
            # For this moment alone: while it is there, each setsockopt() of the group costs more
            link = bpfcall.attach(self.loaded.programs["claw_flag"], self._group, bpfcall.SETSOCKOPT)
            try:
                for taken in tcp_sockets(self._pid):
                    try:
                        taken.setsockopt(FLAG_LEVEL, int(is_on), 0)
                    except OSError:
                        unseen += 1
            finally:
                os.close(link)
        self.unseen = unseen
