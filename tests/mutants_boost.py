# SPDX-License-Identifier: Apache-2.0
"""The mutants of boosts."""

from __future__ import annotations

from mutant import Mutant

DECISION = "test_boost.py::test_whatever_happens"
STORM = "test_booster.py::test_a_storm_of_asks_is_bounded_and_comes_back"
DEATH = "test_booster.py::test_a_death_at_any_step_is_put_back_by_the_next"
ANY = "test_booster.py::test_whatever_is_asked"
BOOST = (
    Mutant(
        "a slot that is another stream's stays in the list",
        "csrc/stream.c",
        "	claw_first_stop(streams, index);\n	uint32_t *link",
        "	uint32_t *link",
        "test_first.py::test_a_slot_that_is_another_streams_by_now_waits_for_that_one",
    ),
    Mutant(
        "a first token that was sent is waited for",
        "csrc/stream.c",
        "	stream->row.first_sent_ns = sent_ns;\n	claw_first_stop(streams, index);\n",
        "	stream->row.first_sent_ns = sent_ns;\n",
        "test_first.py::test_from_its_open_until_its_first_token_is_sent",
    ),
    Mutant(
        "a boost changes without a pause",
        "server/boost.py",
        "if now_ns < self._changed_ns + PAUSE_NS:",
        "if False:",
        DECISION,
    ),
    Mutant(
        "a boost falls at once",
        "server/boost.py",
        "if now_ns < self._wanted_ns[level] + HOLD_NS)",
        "if now_ns < self._wanted_ns[level])",
        "test_boost.py::test_a_stream_is_boosted_half_a_second_and_no_longer",
    ),
    Mutant(
        "a lease is not renewed",
        "server/boost.py",
        "            times.append(self._asked_ns + RENEW_NS)\n",
        "",
        DECISION,
    ),
    Mutant("the ways back need no room", "kernel/boost.py", " + back > WRITES_PER_S", " > WRITES_PER_S", STORM),
    Mutant("weights are written before the journal", "kernel/boost.py", "        self._arm(writes)\n", "", DEATH),
    Mutant("what was there is what was there first", "kernel/boost.py", "known.old != str(rest)", "False", DEATH),
    Mutant(
        "somebody's value is written over",
        "kernel/boost.py",
        "if held and found not in (held.now, held.rest):",
        "if False:",
        ANY,
        often=True,
    ),
    Mutant(
        "a helper puts back what is no more its own",
        "kernel/boost.py",
        "if self._weights.read(entry.place) in entry.new.split():",
        "if True:",
        "test_helper_boost.py::test_a_helper_that_was_killed",
    ),
)
