# SPDX-License-Identifier: Apache-2.0
"""Links to several clawds as one: a reading is asked for everywhere and stays with the first that has the stream. A
clawd that is down costs the others nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from clawd.errors import AttachError, ClawdError, ControlError, ReadingClosed
from clawd.farlink import SCHEME, Door, FarLink
from clawd.inbox import Inbox
from clawd.link import Link
from clawd.session import Watcher

__all__ = ["Fleet", "Key", "open_link"]

Key = str | os.PathLike[str]
_TELLING = ("denied", "limit", "lost", "gone", "unknown")
"""Codes of refusals, the one that tells most first: of several clawds most just do not have the stream."""


def open_link(
    runtime_dir: str | os.PathLike[str] | None,
    endpoint: str | Sequence[str] | None,
    key: Key | None,
    server_key: Key | Mapping[str, Key] | None,
    role: str = "consumer",
) -> Link | Fleet:
    """The link, or links, that the arguments of a Consumer name. Raises ControlError."""
    if endpoint is None:
        if key is not None or server_key is not None:
            raise ControlError("keys are for tcp", "give endpoint= too")
        return Link(runtime_dir, role)
    if runtime_dir is not None:
        raise ControlError("give runtime_dir= or endpoint=, not both", "endpoint= may be a list that has directories")
    places = [endpoint] if isinstance(endpoint, str) else list(endpoint)
    if not places:
        raise ControlError("endpoint= is empty", "name a clawd: tcp://HOST:PORT")

    def door(place: str) -> Door:
        return Door(place, key, server_key.get(place) if isinstance(server_key, Mapping) else server_key)

    doors = {place: door(place) for place in places if place.startswith(SCHEME)}
    for each in doors.values():
        each.ports()
    alone = len(places) == 1
    links: list[Link] = []
    try:
        for place in places:
            links.append(FarLink(doors[place], role) if place in doors else Link(place, role, is_patient=not alone))
    except BaseException:
        for link in links:
            link.close()
        raise
    return links[0] if alone else Fleet(links)


@dataclass(eq=False)
class _Search:
    """A reading that no clawd has answered yet."""

    inbox: Inbox
    probes: dict[Inbox, Link] = field(default_factory=dict)
    errors: list[ClawdError] = field(default_factory=list)


class Fleet:
    """As one Link, for whoever owns it."""

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = links
        self.ready: list[Inbox] = []
        self.relay_fd = -1
        """None of the descriptors stands for all."""
        self._arrived: list[Inbox] = []
        for link in links:
            link.ready = self._arrived
        self._searches: dict[Inbox, _Search] = {}
        """By what the reader has, and by each link's own."""
        self._homes: dict[Inbox, Link] = {}

    @property
    def disowned(self) -> bool:
        return self._links[0].disowned

    @property
    def degrade(self) -> int:
        return max(link.degrade for link in self._links)

    @property
    def is_idle(self) -> bool:
        return all(link.is_idle for link in self._links)

    @is_idle.setter
    def is_idle(self, value: bool) -> None:
        for link in self._links:
            link.is_idle = value

    def watch(self, watcher: Watcher) -> None:
        for link in self._links:
            link.watch(watcher)

    def unwatch(self, watcher: Watcher) -> None:
        for link in self._links:
            link.unwatch(watcher)

    def next_deadline(self) -> float | None:
        return min((at for link in self._links if (at := link.next_deadline()) is not None), default=None)

    def attach(
        self, stream: str, after: tuple[int, int] | None, wait: float, credit: int, on_gone: str, grace: float
    ) -> Inbox:
        """As Link.attach, everywhere."""
        search = _Search(Inbox(stream, after, credit, time.monotonic() + wait))
        for link in self._links:
            try:
                search.probes[link.attach(stream, after, wait, credit, on_gone, grace)] = link
            except ClawdError as error:
                search.errors.append(error)
        if not search.probes:
            raise search.errors[0]
        self._searches[search.inbox] = search
        self._searches.update(dict.fromkeys(search.probes, search))
        return search.inbox

    def grant(self, inbox: Inbox) -> None:
        home = self._homes.get(inbox)
        if home is not None:
            home.grant(inbox)

    def cancel(self, inbox: Inbox) -> None:
        """Also while it is not known who has the stream: whoever opens it cancels it then."""
        home, search = self._homes.get(inbox), self._searches.get(inbox)
        if home is not None:
            home.cancel(inbox)
        elif search is not None:
            inbox.cancel = True
            for probe, link in search.probes.items():
                link.cancel(probe)

    def detach(self, inbox: Inbox, error: ClawdError) -> None:
        home, search = self._homes.get(inbox), self._searches.get(inbox)
        if home is not None:
            home.detach(inbox, error)
            self._sort()
        elif search is not None:
            self._settle(search)
            self._fail(inbox, error)

    def pump(self, *, control: bool = True, relay: bool = False, until: Inbox | None = None, burst: int = 32) -> bool:
        arrived = False
        if control or relay:  # whose descriptor it was is not known
            self.is_idle = False
        for link in self._links:
            arrived |= link.pump(control=control or relay, burst=burst)
        self._sort()
        return arrived

    def close(self) -> None:
        for link in self._links:
            link.close()
        for inbox in [inbox for inbox, search in self._searches.items() if inbox is search.inbox]:
            self._fail(inbox, ReadingClosed("the consumer is closed"))
        self._searches.clear()
        self._sort()

    # ---- who has it

    def _sort(self) -> None:
        """What the links found: for readers, or an answer to a search."""
        while self._arrived:
            inbox = self._arrived.pop(0)
            search = self._searches.get(inbox)
            if search is None:
                if inbox in self._homes:
                    self.ready.append(inbox)
                    if inbox.done:
                        del self._homes[inbox]
            elif inbox.pending or (inbox.done and inbox.error is None):
                self._find(search, inbox)
            elif inbox.done:
                self._miss(search, inbox)

    def _find(self, search: _Search, probe: Inbox) -> None:
        home = search.probes.pop(probe)
        self._searches.pop(probe)
        self._settle(search)
        home.replace(probe, search.inbox)
        self.ready.append(search.inbox)
        if not search.inbox.done:
            self._homes[search.inbox] = home

    def _miss(self, search: _Search, probe: Inbox) -> None:
        del search.probes[probe], self._searches[probe]
        assert probe.error is not None
        search.errors.append(probe.error)
        if not search.probes:
            self._settle(search)
            self._fail(search.inbox, min(search.errors, key=_rank))

    def _settle(self, search: _Search) -> None:
        """It is over: the other clawds need not look any more."""
        self._searches.pop(search.inbox, None)
        for probe, link in search.probes.items():
            self._searches.pop(probe, None)
            link.detach(probe, ReadingClosed("found elsewhere"))

    def _fail(self, inbox: Inbox, error: ClawdError) -> None:
        inbox.error = error
        inbox.done = True
        self.ready.append(inbox)


def _rank(error: ClawdError) -> int:
    code = error.code if isinstance(error, AttachError) else ""
    return _TELLING.index(code) if code in _TELLING else len(_TELLING)
