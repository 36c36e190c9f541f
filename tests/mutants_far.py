# SPDX-License-Identifier: Apache-2.0
"""The mutants of lanes, keys and who may read what."""

from __future__ import annotations

from mutant import Mutant

_LANES = "test_lanes.py::"
_FARLINK = "test_farlink.py::"
_ACCESS = "test_access.py::"
_WAYS = "test_ways.py::"

FAR = (
    Mutant(
        "express has no bound",
        "csrc/lanes.c",
        "has_room(connection->express_charged, connection->express_acked, CLAW_LANE_BEHIND))",
        "1)",
        _LANES + "test_an_express_lane_that_takes_nothing_is_left_behind_so_far_and_bulk_goes_on",
        often=True,
    ),
    Mutant(
        "express may be acked for what it never got",
        "csrc/lanes.c",
        "	if (flow.acked > connection->express_charged)\n		return -EBADMSG;\n",
        "",
        _LANES + "test_flow_of_the_express_lane_is_checked",
    ),
    Mutant(
        "what was said at open is on bulk alone",
        "csrc/outbox.c",
        "	int opens = !attachment->opened && outbox->connections[attachment->connection].laned;\n",
        "	int opens = 0;\n",
        _LANES + "test_what_was_said_at_open_goes_ahead_on_both_lanes",
    ),
    Mutant(
        "a second copy counts",
        "farlink.py",
        "        if number in self._ahead:\n",
        "        if False:\n",
        _FARLINK + "test_the_first_copy_counts_and_the_second_is_dropped",
        often=True,
    ),
    Mutant(
        "what comes too early is handed on",
        "farlink.py",
        "if self._on_express and self._is_early(inbox, page):",
        "if False:",
        _FARLINK + "test_what_comes_too_early_is_held_until_the_rest_is_there",
    ),
    Mutant(
        "held without end",
        "farlink.py",
        "            if not came and self._held_count < HELD_MAX:\n",
        "            if not came:\n",
        _FARLINK + "test_no_more_is_held_than_so_much_and_nothing_is_lost_by_that",
    ),
    Mutant(
        "a session is whoever names it",
        "server/far.py",
        "        if session and session.key != route.key:\n",
        "        if False:\n",
        _ACCESS + "test_a_session_belongs_to_the_key_that_joined_it",
        often=True,
    ),
    Mutant(
        "a revoked key goes on",
        "server/far.py",
        "            if self._allow is not None and self._allow.find(route.key) is None:\n",
        "            if False:\n",
        _ACCESS + "test_a_revoked_key_is_cut_off_and_stays_out",
    ),
    Mutant(
        "an observer's key is a consumer's",
        "server/far.py",
        'if allowed is None or request.role not in ("observer", allowed.role):',
        "if allowed is None:",
        _ACCESS + "test_a_key_for_observers_may_not_be_more",
    ),
    Mutant(
        "open to everybody without keys",
        "server/far.py",
        "        if self._pair is None and not is_loopback(address):\n",
        "        if False:\n",
        _ACCESS + "test_beyond_loopback_clawd_does_not_start_without_keys",
        often=True,
    ),
    Mutant(
        "who is silent stays",
        "server/far.py",
        "            elif route.heard_ns < silent_ns:\n",
        "            elif False:\n",
        _ACCESS + "test_a_client_that_says_nothing_is_gone_though_its_sockets_answer",
    ),
    Mutant(
        "a stream's readers are everybody",
        "server/access.py",
        '        return bool(key) and f"key:{key}" in names\n',
        "        return bool(key)\n",
        "test_readers.py::test_a_stream_reaches_those_it_is_for_and_nobody_else",
        often=True,
    ),
    Mutant(
        "a cancel counts before there is a verdict",
        "csrc/turn.c",
        "	if (attachment->admitted || !core->streams.table[attachment->stream].restricted)\n",
        "",
        "test_readers.py::test_the_core_takes_no_cancel_before_there_is_a_verdict",
    ),
    Mutant(
        "a release goes by what the sweep saw",
        "csrc/pacing.c",
        "		claw_way_refresh(core, outbox->attachments[at].connection, now_ns);\n",
        "		(void)now_ns;\n",
        _WAYS + "test_a_row_that_changed_counts_at_the_very_next_release",
        often=True,
    ),
    Mutant(
        "one lost of five is a fifth",
        "csrc/ways.c",
        "	if (sent >= CLAW_WAY_SEGMENTS)\n",
        "	if (sent)\n",
        _WAYS + "test_one_lost_of_five_counts_at_once_and_is_not_a_fifth",
    ),
    Mutant(
        "an array that is too short is mapped",
        "csrc/ways.c",
        "	if (S_ISREG(stat.st_mode) && (uint64_t)stat.st_size < bytes)\n		return -EINVAL;\n",
        "	(void)stat;\n",
        _WAYS + "test_what_is_no_array_is_refused",
    ),
)
