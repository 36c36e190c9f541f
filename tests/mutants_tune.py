# SPDX-License-Identifier: Apache-2.0
"""The mutants of tuning."""

from __future__ import annotations

from mutant import Mutant

CRASH = "test_journal.py::test_a_crash_at_any_step_of_an_apply_leaves_it_as_before_or_as_planned"
AGAIN = "test_journal.py::test_a_crash_at_any_step_of_the_recovery_from_a_crash_at_any_step"
TUNE = (
    Mutant(
        "written before the journal has it",
        "kernel/tuner.py",
        "            if changes:\n                self._journal.save(entries)\n",
        "",
        CRASH,
        often=True,
    ),
    Mutant(
        "one place that is written makes a run whole",
        "kernel/tuner.py",
        "if all(self._live(entry) == entry.new for entry in left)",
        "if any(self._live(entry) == entry.new for entry in left)",
        CRASH,
    ),
    Mutant(
        "the original is what was there last",
        "kernel/tuner.py",
        "old = earlier.old if earlier and earlier.new == change.old else change.old",
        "old = change.old",
        CRASH,
    ),
    Mutant(
        "a place is settled while others are not",
        "kernel/tuner.py",
        "_settled(entry, entry.before))\n        elif",
        "_settled(entry, entry.before))\n            self._journal.save(entries)\n        elif",
        AGAIN,
    ),
    Mutant(
        "what somebody else wrote is overwritten",
        "kernel/tuner.py",
        "            if not mine:\n",
        "            if False:\n",
        "test_journal.py::test_what_somebody_else_wrote_meanwhile_is_kept",
        often=True,
    ),
    Mutant(
        "the journal is written in place",
        "kernel/journal.py",
        'new = self.path.with_suffix(".new")',
        "new = self.path",
        CRASH,
    ),
    Mutant(
        "a checksum is not looked at",
        "kernel/journal.py",
        'if hashlib.sha256(body).hexdigest() != head["digest"]:',
        "if False:",
        "test_journal.py::test_a_harmed_journal_is_one_line_and_nothing_is_changed",
    ),
    Mutant(
        "a journal of another boot counts",
        "kernel/journal.py",
        "        if boot_id != self._boot_id:\n",
        "        if False:\n",
        "test_journal.py::test_a_journal_of_an_earlier_boot_counts_for_nothing",
    ),
    Mutant(
        "a floor is lowered",
        "kernel/knobs.py",
        "LEAST: max(ours, theirs)",
        "LEAST: ours",
        "test_tune.py::test_floors_are_only_raised_and_bits_only_set",
    ),
    Mutant(
        "a root that somebody made is replaced",
        "kernel/survey.py",
        '    if live.startswith("foreign "):\n',
        "    if False:\n",
        "test_kernel_tc.py::test_a_root_that_somebody_made_stays_and_so_does_clsact",
    ),
    Mutant(
        "half a queue is taken for a whole one",
        "kernel/tc.py",
        'return f"htb {rate} {express}" if whole else "partial"',
        'return f"htb {rate} {express}"',
        "test_kernel_tc.py::test_killed_between_two_calls_there_is_no_half",
    ),
    Mutant(
        "another device of that name will do",
        "kernel/tc.py",
        'if place.identity not in ("", device.identity):',
        "if False:",
        "test_kernel_tc.py::test_another_device_of_the_same_name_is_let_alone",
    ),
    Mutant(
        "what cannot be put back is changed",
        "kernel/sysctl.py",
        "        self._put(place, present, f'{place.name}: its present value \"{present}\" could not be put back')\n",
        "",
        "test_kernel_sysctl.py::test_what_could_not_be_put_back_is_not_changed",
    ),
    Mutant(
        "a helper that starts again repeats it",
        "kernel/boot.py",
        "if not config.tune or tuning.journal.profiles.get(tuning.namespace.cookie) == config.profile:",
        "if not config.tune:",
        "test_tune_boot.py::test_it_is_applied_once_a_boot_and_a_restart_neither_reverts_nor_repeats",
    ),
)
