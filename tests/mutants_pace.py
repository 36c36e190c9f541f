# SPDX-License-Identifier: Apache-2.0
"""Mutants of pacing and of the order under pressure: when a token goes, what goes before it, and what is told of it."""

from __future__ import annotations

from mutant import Mutant

MODEL = "test_pacer.py::test_the_step_does_what_the_model_says"
FLOOD = "test_order.py::test_an_engine_all_of_whose_tokens_are_urgent_leaves_its_neighbours_their_share"
QUEUED = "test_accounting.py::test_what_waits_for_room_at_a_client_waits_between_its_release_and_its_sending"
URGENT = "test_accounting.py::test_urgent_tokens_are_accounted_and_gaps_are_not"

PACE = (
    Mutant(
        "an even stream is held like any",
        "csrc/pacer.c",
        "	int64_t early_ns = pace_ns / 8 - 2 * pacer->uneven_ns;\n",
        "	int64_t early_ns = 0;\n",
        "test_pacer.py::test_an_even_stream_that_its_host_disturbs_is_hardly_held",
        often=True,
    ),
    Mutant(
        "a heap is even",
        "csrc/pacer.c",
        "pacer->run_tokens > 1 ? pacer->gap_ns :",
        "pacer->run_tokens > 100 ? pacer->gap_ns :",
        "test_pacer.py::test_ten_at_once_leave_one_by_one",
    ),
    Mutant(
        "what is saved goes all at once",
        "csrc/pacer.c",
        "spare_ns > 0 ? spare_ns / 12 :",
        "spare_ns > 0 ? spare_ns :",
        MODEL,
    ),
    Mutant(
        "urgent tokens leave nothing to others",
        "csrc/pack.c",
        "connection->queue[CLAW_CRITICAL].head != CLAW_NONE && !is_others_turn)",
        "connection->queue[CLAW_CRITICAL].head != CLAW_NONE && (1 || is_others_turn))",
        FLOOD,
        often=True,
    ),
    Mutant(
        "a first token waits while it is NORMAL's turn before HIGH",
        "csrc/pack.c",
        "connection->overtaken[CLAW_CRITICAL] == CLAW_OVERTAKES &&",
        "1 &&",
        "test_order.py::test_an_urgent_token_goes_before_those_whose_turn_it_is_among_the_others",
    ),
    Mutant(
        "clients get their frames in the order of their news",
        "csrc/pack.c",
        "	queue_by_class(outbox);\n",
        "	(void)queue_by_class;\n",
        "test_order.py::test_clients_whose_news_is_of_a_better_class_are_served_first_in_a_turn",
    ),
    Mutant("a gap is a token", "csrc/pacing.c", "stream->arrived_seq > stream->gap_seq ? ", "1 ? ", URGENT),
    Mutant(
        "what waits at a client is timed anew with each token",
        "csrc/pack.c",
        "if (attachment->timed_ns || ",
        "if (",
        QUEUED,
    ),
    Mutant(
        "a new engine is not told of the pressure",
        "csrc/hints.c",
        "if (!core->hints_due_ns && (core->pressure ||",
        "if (!core->hints_due_ns && (0 ||",
        "test_hints.py::test_an_engine_that_comes_later_is_told_of_the_pressure_too",
    ),
    Mutant(
        "one who only watches slows all down",
        "csrc/pacing.c",
        "		if (outbox->attachments[at].observes)\n			continue;\n",
        "",
        "test_hints.py::test_one_who_only_watches_and_does_not_take_slows_nobody_down",
    ),
)
