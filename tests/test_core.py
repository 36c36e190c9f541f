# SPDX-License-Identifier: Apache-2.0
"""Spool, streams and outbox by themselves: rings and clients are played by the rig, the clock is real."""

from __future__ import annotations

import errno
import time

import pytest

from clawd.core import lib
from clawd.errors import CoreError
from rig import Item, Rig

TOKEN, OPEN, CLOSE, GAP = lib.CLAW_TOKEN, lib.CLAW_OPEN, lib.CLAW_CLOSE, lib.CLAW_GAP


def texts(items: list[Item], attachment: int = 1) -> bytes:
    return b"".join(item.data for item in items if item.kind == TOKEN and item.attachment == attachment)


def kinds(items: list[Item], attachment: int = 1) -> list[int]:
    return [item.kind for item in items if item.attachment == attachment]


def attach(rig: Rig, connection: int, id: int, name: bytes, **options: int) -> int:
    return rig.core.attach(connection, id, name, **{"credit": 1 << 20, **options})  # type: ignore[arg-type]


def later_ns(seconds: float = 30) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


def test_a_reader_gets_open_then_tokens_then_close() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s", b'{"m":1}')
        ring.write(0, b"Hel")
        ring.write(0, b"lo")
        ring.close(0, b"length")
        rig.turn()
        assert attach(rig, client, 1, b"s") == 0
        items = rig.turn()
        assert kinds(items) == [OPEN, TOKEN, TOKEN, CLOSE]
        assert [item.data for item in items] == [b'{"m":1}', b"Hel", b"lo", b"length"]
        assert [item.seq for item in items] == [0, 0, 1, 2]
        assert [item.klass for item in items][1:3] == [lib.CLAW_CRITICAL, lib.CLAW_NORMAL]
        assert {item.incarnation for item in items} == {items[0].incarnation}
        assert rig.core.refresh_totals().attachments == 1
        rig.turn()
        assert rig.core.refresh_totals().attachments == 0, "it ended with the frame that carried its end"


def test_the_ring_is_given_back_once_records_are_committed() -> None:
    with Rig() as rig:
        ring = rig.ring(4096)
        ring.open(0, "s")
        for number in range(1000):
            ring.write(0, b"%d" % number)
            if number % 20 == 0:
                rig.turn()
                assert ring.ctl.ack_pos == ring.head


def test_an_attach_before_the_open_gets_everything() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        assert attach(rig, client, 1, b"s", deadline_ns=later_ns()) == 1
        assert rig.turn() == []
        ring.open(0, "s")
        ring.write(0, b"a")
        assert kinds(rig.turn()) == [OPEN, TOKEN]


def test_an_attach_that_may_not_wait_is_unknown_at_once() -> None:
    with Rig() as rig:
        assert attach(rig, rig.core.connect(), 1, b"s") == -errno.ENOENT


def test_an_attach_that_waits_in_vain_is_told_once() -> None:
    with Rig() as rig:
        client = rig.core.connect()
        assert attach(rig, client, 1, b"s", deadline_ns=1) == 1
        assert attach(rig, client, 2, b"s", deadline_ns=later_ns()) == 1
        rig.turn()
        assert rig.core.unmet() == [(client, 1)]
        assert rig.core.unmet() == []
        assert rig.core.detach(client, 2)
        assert rig.core.refresh_totals().streams_awaited == 0, "nobody waits for the name any more"


def test_every_position_can_be_resumed_from() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        words = [b"%03d|" % number for number in range(300)]  # some blocks full
        for word in words:
            ring.write(0, word)
            rig.turn()
        incarnation = rig.core.stream_row(0).incarnation
        for after in range(-1, 300):
            assert attach(rig, client, 1, b"s", after=after, incarnation=incarnation) == 0
            items = rig.turns()
            assert texts(items) == b"".join(words[after + 1 :])
            assert items[0].kind == OPEN
        assert attach(rig, client, 1, b"s", after=300, incarnation=incarnation) == -errno.EREMCHG
        assert attach(rig, client, 1, b"s", after=1, incarnation=incarnation ^ 1) == -errno.EREMCHG
        assert attach(rig, client, 1, b"other", after=1, incarnation=incarnation) == -errno.EREMCHG


def test_a_full_window_stops_a_connection_until_it_acks() -> None:
    with Rig({"stream_bytes": 1 << 20}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        for _ in range(200):
            ring.write(0, bytes(1000))
            rig.turn()
        attach(rig, client, 1, b"s")
        first = []
        while items := rig.turn():
            first += items
        assert rig.charged[client] <= lib.CLAW_WINDOW
        assert rig.charged[client] > lib.CLAW_WINDOW - 2 * (lib.CLAW_FRAME_MAX + lib.CLAW_FRAME_CHARGE)
        assert not rig.ack(client, rig.charged[client] + 1), "nobody can have received what was not sent"
        assert rig.ack(client, rig.charged[client])
        rest = rig.turns()
        assert len(texts(first + rest)) == 200_000


def test_credit_is_overdrawn_by_one_token_at_most() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        for _ in range(10):
            ring.write(0, bytes(100))
        rig.turn()
        attach(rig, client, 1, b"s", credit=200)
        items = rig.turns()
        used = sum(item.cost for item in items)
        assert 200 <= used < 200 + 128
        assert rig.ack(client, rig.charged[client], {1: used})
        assert rig.turns() == [], "no more than before"
        assert rig.ack(client, rig.charged[client], {1: used + 1})
        assert len(rig.turns()) == 1
        assert rig.ack(client, rig.charged[client], {1: 1 << 40})
        assert len(texts(items)) + len(texts(rig.turns())) == 900


def test_a_stream_over_its_share_loses_its_oldest_blocks_and_its_readers_get_one_gap() -> None:
    with Rig({"stream_bytes": 16384}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s", b"{}")
        for number in range(400):
            ring.write(0, b"%0100d" % number)
            rig.turn()
        attach(rig, client, 1, b"s")
        items = rig.turns()
        gaps = [item for item in items if item.kind == GAP]
        assert len(gaps) == 1
        assert gaps[0].data == b"evicted"
        seqs = [item.seq for item in items if item.kind == TOKEN]
        missing = set(range(400)) - set(seqs)
        assert missing == set(range(gaps[0].seq, gaps[0].seq + gaps[0].count))
        assert seqs == sorted(seqs)
        assert rig.core.stream_row(0).spool_bytes <= 16384


def test_eviction_moves_the_cursor_of_a_reader_that_fell_behind() -> None:
    with Rig({"stream_bytes": 16384}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        attach(rig, client, 1, b"s", deadline_ns=later_ns(), credit=150)
        seen = []
        for number in range(400):
            ring.write(0, b"%0100d" % number)
            seen += rig.turn()
        assert rig.ack(client, rig.charged[client], {1: 1 << 40})
        seen += rig.turns()
        covered: list[int] = []
        for item in seen:
            if item.kind == TOKEN:
                covered.append(item.seq)
                assert item.data == b"%0100d" % item.seq
            elif item.kind == GAP:
                covered.extend(range(item.seq, item.seq + item.count))
        assert covered == list(range(400))
        assert len([item for item in seen if item.kind == GAP]) == 1


def test_a_full_spool_lets_go_of_what_ended_first() -> None:
    with Rig({"spool_bytes": 16 * 4096, "stream_bytes": 8192}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        for number in range(16):
            ring.open(0, f"s{number}")
            ring.write(0, b"x")
            ring.close(0)
            rig.turn()
        assert rig.core.refresh_totals().spool_free == 0
        ring.open(0, "new")
        ring.write(0, b"y")
        rig.turn()
        assert attach(rig, client, 1, b"s0") == -errno.ESTALE
        assert attach(rig, client, 2, b"s1") == 0
        assert attach(rig, client, 3, b"new") == 0
        assert texts(rig.turns(), 3) == b"y"


def test_a_reader_of_an_evicted_stream_still_gets_gap_and_end() -> None:
    with Rig({"spool_bytes": 4 * 4096, "stream_bytes": 8192}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s0")
        attach(rig, client, 1, b"s0", deadline_ns=later_ns())
        rig.turn()
        attach(rig, client, 1, b"s0", credit=1)
        for _ in range(5):
            ring.write(0, b"x")
        ring.close(0, b"length")
        seen = rig.turn()
        for number in range(4):
            ring.open(1 + number, f"n{number}")
        seen += rig.turn()
        rig.ack(client, rig.charged[client], {1: 1 << 20})
        seen += rig.turns()
        assert kinds(seen)[-2:] == [GAP, CLOSE]
        assert seen[-1].data == b"length"
        gap = seen[-2]
        assert gap.seq + gap.count == 5


def test_tokens_without_room_become_a_gap_and_the_stream_goes_on() -> None:
    with Rig({"spool_bytes": 2 * 4096, "stream_bytes": 8192}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "a")
        ring.open(1, "b")
        rig.turn()
        for number in range(60):  # the two first blocks are all there is, and stay
            ring.write(0, b"%0100d" % number)
        rig.turn()
        totals = rig.core.refresh_totals()
        assert totals.dropped > 0
        ring.close(1)
        rig.turn()
        ring.write(0, b"after")
        ring.close(0)
        rig.turn()
        attach(rig, client, 1, b"a")
        items = rig.turns()
        covered = 0
        for item in items:
            covered += item.count if item.kind == GAP else item.kind == TOKEN
        assert covered == 61
        assert texts(items).endswith(b"after")
        assert items[-1].kind == CLOSE


def test_an_open_that_finds_no_block_is_refused() -> None:
    with Rig({"spool_bytes": 2 * 4096, "stream_bytes": 8192}) as rig:
        ring = rig.ring()
        seqs = [ring.open(handle, f"s{handle}") for handle in range(3)]
        rig.turn()
        assert ring.stopped(2) == (seqs[2], lib.CLAW_STOPPED_NO_SPACE)
        ring.write(2, b"dropped")
        ring.close(2)
        rig.turn()
        totals = rig.core.refresh_totals()
        assert (totals.refused, totals.discarded, totals.quarantined) == (1, 1, 0)


def test_a_name_that_is_live_or_kept_is_refused_and_the_first_is_unharmed() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        ring.write(0, b"one")
        again = ring.open(1, "s")
        ring.write(1, b"two")
        ring.close(1)
        rig.turn()
        assert ring.stopped(1) == (again, lib.CLAW_STOPPED_EXISTS)
        ring.close(0)
        again = ring.open(0, "s")
        ring.close(0)
        rig.turn()
        assert ring.stopped(0) == (again, lib.CLAW_STOPPED_EXISTS)
        attach(rig, client, 1, b"s")
        assert texts(rig.turns()) == b"one"


def test_the_stream_table_full_of_live_streams_refuses_and_of_ended_ones_does_not() -> None:
    with Rig({"max_streams": 4}) as rig:
        ring = rig.ring()
        for handle in range(4):
            ring.open(handle, f"s{handle}")
        over = ring.open(4, "s4")
        ring.close(4)
        rig.turn()
        assert ring.stopped(4) == (over, lib.CLAW_STOPPED_LIMIT)
        ring.close(0)
        ring.open(5, "s5")
        rig.turn()
        assert ring.stopped(5) == (0, 0)


def test_names_that_nobody_opens_cannot_fill_the_table() -> None:
    with Rig({"max_streams": 8}) as rig:
        client = rig.core.connect()
        results = [attach(rig, client, id, b"n%d" % id, deadline_ns=later_ns()) for id in range(1, 9)]
        assert results == [1] * 4 + [-errno.EDQUOT] * 4


def test_an_ended_stream_is_kept_then_gone_then_forgotten() -> None:
    with Rig({"keep_ns": 1}) as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        ring.close(0)
        rig.turn()
        # each turn sees a later clock than the one before
        states = [rig.core.refresh_totals().streams_gone or rig.core.turn() for _ in range(3)]
        assert any(states) or attach(rig, client, 1, b"s") == -errno.ENOENT
        rig.turn()
        rig.turn()
        assert attach(rig, client, 1, b"s") == -errno.ENOENT
        ring.open(0, "s")
        rig.turn()
        assert ring.stopped(0) == (0, 0)


def test_cancel_ends_the_stream_for_all_and_tells_the_producer_once() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        seq = ring.open(0, "s")
        ring.write(0, b"a")
        rig.turn()
        attach(rig, client, 1, b"s")
        attach(rig, client, 2, b"s")
        assert rig.core.cancel(client, 1)
        assert rig.core.cancel(client, 2)
        assert ring.stopped(0) == (seq, lib.CLAW_STOPPED_CANCELLED)
        ring.write(0, b"late")
        ring.close(0)
        items = rig.turn()
        assert kinds(items, 1) == kinds(items, 2) == [OPEN, TOKEN, CLOSE]
        assert items[-1].data == b"cancelled"
        totals = rig.core.refresh_totals()
        assert (totals.cancelled, totals.discarded, totals.quarantined) == (1, 1, 0)
        rig.turn()
        assert not rig.core.cancel(client, 1)


def test_a_cancel_before_the_open_waits_for_it_and_goes_with_its_attachment() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        for id, name in ((1, b"a"), (2, b"b")):
            attach(rig, client, id, name, deadline_ns=later_ns())
            assert rig.core.cancel(client, id)
        rig.core.detach(client, 2)
        a = ring.open(0, "a")
        ring.open(1, "b")
        ring.write(0, b"x")
        items = rig.turn()
        assert ring.stopped(0) == (a, lib.CLAW_STOPPED_CANCELLED)
        assert ring.stopped(1) == (0, 0)
        assert kinds(items) == [OPEN, CLOSE]


def test_a_producer_that_leaves_ends_its_streams_after_its_last_token() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        attach(rig, client, 1, b"s", deadline_ns=later_ns())
        for _ in range(3000):  # more than one turn takes
            ring.write(0, b"")
            if ring.head - ring.ctl.ack_pos > 60000:
                break
        rig.core.leave_ring(ring.index)
        items = rig.turns()
        assert items[-1].kind == CLOSE
        assert items[-1].data == b"producer_lost"
        assert rig.core.ring_row(ring.index).state == lib.CLAW_RING_DONE
        rig.core.drop_ring(ring.index)
        with pytest.raises(CoreError):
            rig.core.drop_ring(ring.index)


def test_critical_tokens_go_before_the_backlog_of_other_streams() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "bulk")
        ring.open(1, "urgent")
        ring.write(1, b"first")
        rig.turn()
        attach(rig, client, 1, b"bulk")
        attach(rig, client, 2, b"urgent")
        rig.turns()
        for _ in range(60):
            ring.write(0, bytes(900))
        ring.write(1, b"now", urgent=True)
        items = rig.turn()
        assert items[0].attachment == 1, "the bulk stream's own first token is critical too"
        rig.ack(client, rig.charged[client])
        rest = items + rig.turns()
        for _ in range(60):
            ring.write(0, bytes(900))
        ring.write(1, b"again", urgent=True)
        items = rig.turn()
        assert (items[0].attachment, items[0].data) == (2, b"again")
        assert len(texts(rest + items + rig.turns(), 1)) == 120 * 900


def test_every_frame_keeps_its_bound_and_streams_share_frames() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        for handle in range(30):
            ring.open(handle, f"s{handle}")
            attach(rig, client, handle + 1, b"s%d" % handle, deadline_ns=later_ns())
        rig.turn()
        for handle in range(30):
            ring.write(handle, b"hi")
        items = rig.turn()
        assert len(rig.frames) == 1, "thirty tokens at once go out as one frame"
        assert {item.attachment for item in items if item.kind == TOKEN} == set(range(1, 31))
        for _ in range(15):
            for handle in range(30):
                ring.write(handle, bytes(100))
        while rig.turn():
            assert max(map(len, rig.frames)) <= lib.CLAW_FRAME_MAX
            rig.ack(client, rig.charged[client])


def test_a_connection_number_is_not_given_twice_in_a_row_and_an_old_one_is_refused() -> None:
    with Rig({"max_connections": 1}) as rig:
        first = rig.core.connect()
        assert first
        assert rig.core.connect() == 0, "no room"
        rig.core.disconnect(first)
        second = rig.core.connect()
        assert second not in (0, first)
        with pytest.raises(CoreError):
            rig.core.disconnect(first)
        assert attach(rig, first, 1, b"s", deadline_ns=later_ns()) == -errno.ENOENT
        assert rig.ack(second, 0)


def test_a_blocked_connection_keeps_what_is_its() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        attach(rig, client, 1, b"s", deadline_ns=later_ns())
        rig.core.block(client, True)
        ring.write(0, b"a")
        assert rig.turn() == []
        rig.core.block(client, False)
        assert texts(rig.turn()) == b"a"


def test_the_same_attach_again_starts_anew() -> None:
    with Rig() as rig:
        ring, client = rig.ring(), rig.core.connect()
        ring.open(0, "s")
        ring.write(0, b"a")
        rig.turn()
        for _ in range(3):
            assert attach(rig, client, 1, b"s") == 0
            assert kinds(rig.turn()) == [OPEN, TOKEN]
        assert rig.core.refresh_totals().attachments == 1


def test_a_ring_that_is_full_of_rings_is_refused() -> None:
    with Rig({"max_rings": 1}) as rig:
        rig.ring()
        with pytest.raises(CoreError, match="EDQUOT"):
            rig.ring()
