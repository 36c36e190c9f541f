# SPDX-License-Identifier: Apache-2.0
"""The mutants of the start after a crash."""

from __future__ import annotations

from mutant import COMMIT, FUZZ, Mutant

START = (
    Mutant(
        "what comes again is taken again",
        "csrc/intake.c",
        "	if (record->ring_seq <= entry->ring_seq)\n",
        "	if (0)\n",
        COMMIT,
        often=True,
    ),
    Mutant(
        "what comes again is compared with another stream's last",
        "csrc/intake.c",
        "	if (record->ring_seq <= entry->ring_seq)\n",
        "	if (record->ring_seq <= core->streams.table[0].ring_seq)\n",
        COMMIT,
        often=True,
    ),
    Mutant(
        "a connection has the number of one before the start",
        "csrc/outbox.c",
        "	if (!connection->generation)\n",
        "	if (0)\n",
        "test_recovery.py::test_what_a_client_said_to_the_clawd_before_is_not_taken_for_words_about_its_new_connection",
        often=True,
    ),
    Mutant(
        "a client that comes again does not say what it has",
        "link.py",
        "after=None if inbox.incarnation is None else inbox.expected - 1,",
        "after=None,",
        "test_link.py::test_a_cut_connection_goes_on_after_the_last_token_and_doubles_nothing",
    ),
    Mutant(
        "an OPEN that comes again is a new one",
        "csrc/adopt.c",
        "	ring->known_seq = find_known(core, ring, from, to);\n",
        "	(void)find_known;\n",
        COMMIT,
    ),
    Mutant(
        "handles of a ring that is taken over are closed",
        "csrc/adopt.c",
        "		ring->handles[handle] = CLAW_UNSURE;\n",
        "		ring->handles[handle] = CLAW_NONE;\n",
        COMMIT,
    ),
    Mutant(
        "need_wake starts anew",
        "csrc/adopt.c",
        "	ring->drain.wake = ctl->need_wake;\n",
        "	ring->drain.wake = 0;\n",
        "test_adoption.py::test_a_generation_of_the_handshake_is_not_used_twice",
    ),
    Mutant(
        "a recovered block is believed",
        "csrc/pack.c",
        "if (block != CLAW_NONE && !claw_stream_check_block(outbox->streams, block))",
        "if (0)",
        FUZZ + "[fuzz_restore]",
    ),
    Mutant(
        "the instance file is believed after another boot",
        "server/instance.py",
        'lines[1:] != [boot, ""]',
        "False",
        "test_left.py::test_what_is_of_another_boot_is_swept",
    ),
)
