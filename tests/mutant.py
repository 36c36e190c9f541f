# SPDX-License-Identifier: Apache-2.0
"""A mutant, and the tests that several of them are for."""

from __future__ import annotations

from dataclasses import dataclass

PUBLISH = "test_kill_points.py::test_a_producer_killed_at_any_instruction_leaves_a_whole_record_or_none"
TORN = "test_page.py::test_a_row_is_never_torn_while_another_process_writes_it"
COMMIT = (
    "test_kill_points.py::"
    "test_clawd_killed_at_any_instruction_leaves_whole_records_and_gives_back_only_what_is_committed"
)
RACE = "test_race.py::test_the_threads_share_nothing_but_what_they_release_and_acquire[stream]"
EDGE = "test_codegen.py::test_the_edge_is_in_the_code"
FUZZ = "test_fuzz.py::test_no_input_breaks_the_core"
DISTURB = "test_fuzz.py::test_no_change_under_its_eyes_breaks_the_core"


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    """Below clawd/."""
    old: str
    new: str
    test: str
    often: bool = False
