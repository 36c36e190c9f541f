# SPDX-License-Identifier: Apache-2.0
"""Mutants: what clawd would be with one rule broken, and the test that must fail then. `python tests/mutants.py [--all]
[NAME]…` makes each in a tree of its own and runs just that test; without --all the rows marked `often` only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import counts
from mutant import COMMIT, DISTURB, EDGE, FUZZ, PUBLISH, RACE, TORN, Mutant
from mutants_boost import BOOST
from mutants_far import FAR
from mutants_pace import PACE
from mutants_start import START
from mutants_tune import TUNE

ROOT = Path(__file__).resolve().parent.parent
OWN_BUILD = ("test_kill_points.py", "test_race.py", "test_codegen.py", "test_fuzz.py")
"""These compile what they test: the mutant needs no core of its own for them."""


MUTANTS = (
    # the producer
    Mutant(
        "publish before copy",
        "csrc/clawd_write.h",
        "memcpy(claw_add(batch, CLAW_TOKEN, flags, handle, records ? 0 : count, piece), text, piece);",
        "uint8_t *at = claw_add(batch, CLAW_TOKEN, flags, handle, records ? 0 : count, piece);"
        " claw_store_release(&p->data->head, batch->pos); memcpy(at, text, piece);",
        PUBLISH,
        often=True,
    ),
    Mutant(
        "publish a batch record by record",
        "csrc/clawd_write.h",
        "		kept++;\n",
        "		kept++;\n		claw_store_release(&p->data->head, batch.pos);\n",
        PUBLISH,
    ),
    Mutant(
        "write over what clawd has not read",
        "csrc/clawd_room.h",
        "		if (p->head - p->ack_pos + bytes <= p->ring_bytes) {",
        "		if (1) {",
        PUBLISH,
    ),
    Mutant(
        "no fence in claw_wake",
        "csrc/clawd_room.h",
        "	claw_fence_full();\n	generation =",
        "	generation =",
        f"{EDGE}[x86_64--edge_wake-]",
        often=True,
    ),
    Mutant(
        "head is stored without release",
        "csrc/clawd_room.h",
        "claw_store_release(&p->data->head, pos)",
        "claw_store_relaxed(&p->data->head, pos)",
        RACE,
        often=True,
    ),
    Mutant(
        "ack_pos is loaded without acquire",
        "csrc/clawd_room.h",
        "uint64_t ack_pos = claw_load_acquire(&p->ctl->ack_pos);",
        "uint64_t ack_pos = claw_load_relaxed(&p->ctl->ack_pos);",
        f"{EDGE}[arm64--edge_room-]",
    ),
    Mutant(
        "one signal for ever",
        "csrc/clawd_room.h",
        "(generation & 1) && generation != p->signalled &&",
        "(generation & 1) && !p->signalled &&",
        PUBLISH,
    ),
    Mutant(
        "stopped without open_seq",
        "csrc/clawd_ring.h",
        "return stopped >> 8 == stream.open_seq ?",
        "return stopped ?",
        "test_producer.py::test_a_stop_meant_for_an_earlier_stream_does_not_touch_the_next_on_its_handle",
        often=True,
    ),
    Mutant(
        "a forked child writes",
        "csrc/clawd_attach.h",
        "MADV_WIPEONFORK",
        "MADV_NORMAL",
        "test_producer_attach.py::test_a_forked_child_is_refused_and_leaves_its_parent_alone",
    ),
    Mutant(
        "no gap for what was dropped",
        "csrc/clawd_write.h",
        "	if (!p->lost_streams || !p->lost[handle])\n		return;\n",
        "	if (1)\n		return;\n",
        "test_overflow.py::test_what_was_dropped_is_told_before_the_streams_next_record",
        often=True,
    ),
    Mutant(
        "past what waits in the overflow",
        "csrc/clawd_room.h",
        "if (p->overflow_count || p->head - p->ack_pos + bytes > p->ring_bytes)",
        "if (p->head - p->ack_pos + bytes > p->ring_bytes)",
        "test_overflow.py::test_a_short_text_does_not_pass_a_long_one_that_waits",
    ),
    Mutant(
        "the overflow without a bound",
        "csrc/clawd_room.h",
        "if (p->tail - p->head + bytes > p->overflow_bytes ||",
        "if (p->tail - p->head > p->overflow_bytes ||",
        "test_overflow.py::test_the_bound_is_exact",
    ),
    Mutant(
        "no kick after re-attach",
        "csrc/clawd_reattach.h",
        "return write(p->event_fd, &one, sizeof(one)) == (ssize_t)sizeof(one) ? 0 : -errno;",
        "return one ? 0 : -errno;",
        "test_reattach.py::test_a_signal_that_nobody_heard_is_made_good",
        often=True,
    ),
    Mutant(
        "any ring is ours",
        "csrc/clawd_reattach.h",
        "answer->ring_id == p->ring_id &&",
        "1 &&",
        "test_reattach.py::test_a_wrong_answer_is_not_taken_and_the_next_try_is",
    ),
    # clawd's side of a ring
    Mutant(
        "no fence in claw_wait",
        "csrc/wait.c",
        "		claw_fence_full();\n",
        "",
        f"{EDGE}[x86_64--claw_wait-]",
        often=True,
    ),
    Mutant(
        "head is loaded without acquire",
        "csrc/drain.c",
        "uint64_t head = claw_load_acquire(&drain->data->head);",
        "uint64_t head = claw_load_relaxed(&drain->data->head);",
        RACE,
    ),
    Mutant(
        "ack_pos is stored without release",
        "csrc/drain.c",
        "claw_store_release(&drain->ctl->ack_pos, drain->pos);",
        "claw_store_relaxed(&drain->ctl->ack_pos, drain->pos);",
        RACE,
    ),
    Mutant(
        "need_wake is a flag",
        "csrc/drain.c",
        "		drain->wake++;\n",
        "		drain->wake = 0;\n",
        "test_wait.py::test_need_wake_is_odd_only_while_asleep_and_never_the_same_twice",
        often=True,
    ),
    Mutant(
        "len is read twice",
        "csrc/drain.c",
        "sizeof(*record), record->len);",
        "sizeof(*record), *(const volatile uint32_t *)(drain->bytes + (drain->pos & (drain->ring_bytes - 1))));",
        DISTURB,
        often=True,
    ),
    Mutant(
        "len is not checked against the longest",
        "csrc/drain.c",
        "ret_record->len > drain->record_max || ",
        "",
        FUZZ + "[fuzz_core]",
    ),
    Mutant(
        "head is compared signed",
        "csrc/drain.c",
        "if (head - drain->pos > drain->ring_bytes ||",
        "if ((int64_t)(head - drain->pos) > (int64_t)drain->ring_bytes ||",
        "test_drain.py::test_a_head_is_bad_that_is",
        often=True,
    ),
    Mutant(
        "a fault is not noticed",
        "csrc/drain.c",
        "return claw_load_relaxed(&drain->faulted) != 0;",
        "return claw_load_relaxed(&drain->faulted) > 1;",
        "test_guard.py::test_a_truncated_ring_is_quarantined_and_its_neighbour_goes_on",
    ),
    Mutant(
        "a handle is opened twice",
        "csrc/intake.c",
        "	if (earlier != CLAW_NONE && earlier != CLAW_UNSURE)\n		return -CLAW_BAD_HANDLE;\n",
        "	(void)earlier;\n",
        FUZZ + "[fuzz_core]",
    ),
    # the spool
    Mutant(
        "commit before copy",
        "csrc/stream.c",
        "	return (struct claw_spooled *)(claw_spool_records(",
        "	claw_spool_block(streams->spool, block)->committed = streams->spool->slots[block].used + bytes;\n"
        "	return (struct claw_spooled *)(claw_spool_records(",
        COMMIT,
        often=True,
    ),
    Mutant(
        "ack before commit",
        "csrc/intake.c",
        "	uint64_t start = ring->drain.pos;\n",
        "	uint64_t start = ring->drain.pos;\n	claw_store_release(&ring->drain.ctl->ack_pos, ring->drain.head);\n",
        COMMIT,
        often=True,
    ),
    *FAR,
    *PACE,
    *START,
    *TUNE,
    *BOOST,
    Mutant(
        "a freed block keeps its records",
        "csrc/spool.c",
        "	claw_store_release(&claw_spool_block(spool, index)->committed, 0);\n",
        "",
        FUZZ + "[fuzz_core]",
    ),
    # the page
    Mutant(
        "a row is believed without a second look",
        "csrc/page.c",
        "		if (claw_load_relaxed(row) == seq)\n",
        "		if (seq != 1)\n",
        TORN,
    ),
    Mutant(
        "a row is written under an even number",
        "csrc/page.c",
        "	claw_store_relaxed(seq, odd);\n",
        "",
        TORN,
        often=True,
    ),
    # what readers are sent
    Mutant(
        "credit is not checked",
        "csrc/pack.c",
        "		if (attachment->credit_used >= attachment->credit_limit) {",
        "		if (0) {",
        "test_core.py::test_credit_is_overdrawn_by_one_token_at_most",
        often=True,
    ),
    Mutant(
        "the window is not checked",
        "csrc/lanes.c",
        "charged - acked + CLAW_FRAME_MAX + CLAW_FRAME_CHARGE <= windows * CLAW_WINDOW;",
        "charged + windows > acked;",
        "test_core.py::test_a_full_window_stops_a_connection_until_it_acks",
        often=True,
    ),
    Mutant(
        "no GAP for what was evicted",
        "csrc/pack.c",
        "				if (!put_gap(outbox, segment, attachment, from))\n					return FILL_ROOM;\n",
        "				attachment->next_seq = from;\n				(void)put_gap;\n",
        "test_core.py::test_a_stream_over_its_share_loses_its_oldest_blocks_and_its_readers_get_one_gap",
        often=True,
    ),
    Mutant(
        "CLOSE before the last token",
        "csrc/pack.c",
        "if (attachment->next_seq == stream->next_seq) {",
        "if (attachment->next_seq == stream->next_seq || stream->state == CLAW_STREAM_ENDED) {",
        "test_core.py::test_a_reader_gets_open_then_tokens_then_close",
        often=True,
    ),
    Mutant(
        "a cursor stays in an evicted block",
        "csrc/pack.c",
        "block != CLAW_NONE && spool->slots[block].serial == attachment->block_serial;",
        "block != CLAW_NONE;",
        FUZZ + "[fuzz_core]",
        often=True,
    ),
    Mutant(
        "a cancel before the open is forgotten",
        "csrc/intake.c",
        "if (claw_outbox_cancelled(&core->outbox, stream))",
        "if (0)",
        "test_core.py::test_a_cancel_before_the_open_waits_for_it_and_goes_with_its_attachment",
        often=True,
    ),
    Mutant(
        "acks beyond what was sent",
        "csrc/outbox.c",
        "	if (flow.acked > connection->charged)\n		return -EBADMSG;\n",
        "",
        FUZZ + "[fuzz_core]",
    ),
    Mutant(
        "a flow message's length is believed",
        "csrc/outbox.c",
        " ||\n	    len != sizeof(flow) + (size_t)flow.credits * sizeof(struct claw_credit))",
        ")",
        FUZZ + "[fuzz_core]",
    ),
    Mutant(
        "a frame's record may reach beyond its segment",
        "csrc/frame.c",
        "|| bytes > left ||",
        "||",
        FUZZ + "[fuzz_frame]",
    ),
    Mutant(
        "a reader that comes stops no timer",
        "csrc/outbox.c",
        "	if (stream->readers)\n		claw_grace_stop",
        "	if (0)\n		claw_grace_stop",
        "test_grace.py::test_a_reader_that_comes_in_time_stops_it_and_the_last_to_leave_decides",
        often=True,
    ),
    Mutant(
        "a timer taken out of the heap leaves it in disorder",
        "csrc/timers.c",
        "		down(timers, timers->place[last]);\n",
        "",
        "test_grace.py::test_many_timers_end_each_at_its_time",
    ),
    Mutant(
        "a name left before it opened is forgotten",
        "csrc/grace.c",
        "			streams->table[index].doomed = 1;\n",
        "",
        "test_grace.py::test_a_stream_that_opens_after_the_grace_is_cancelled_at_once",
    ),
    # around the core
    Mutant(
        "everybody may connect",
        "server/door.py",
        "        self.shut(fd)\n        self._refused",
        "        self._refused",
        "test_door.py::test_a_flood_of_connections_neither_ends_the_daemon_nor_keeps_others_out",
    ),
    Mutant(
        "libzmq need not wait for who looks at its monitor",
        "server/door.py",
        "setsockopt(zmq.RCVHWM, 1)",
        "setsockopt(zmq.RCVHWM, 0)",
        "test_door.py::test_libzmq_waits_for_a_daemon_that_does_not_look",
    ),
    Mutant(
        "a squatted name is taken",
        "server/memory.py",
        "posix_ipc.O_CREX",
        "posix_ipc.O_CREAT",
        "test_peers.py::test_a_squatted_name_is_refused_and_its_target_untouched",
        often=True,
    ),
    Mutant(
        "unknown fields are let through",
        "protocol.py",
        "        if name not in rows:\n            raise",
        "        if False:\n            raise",
        "test_decode.py::test_arbitrary_objects_are_a_message_or_refused",
    ),
)


class Unusable(Exception):
    """The row itself is wrong: it does not apply, does not compile, or names no test."""


def make_tree(mutant: Mutant, tree: Path) -> None:
    shutil.copytree(ROOT / "clawd", tree / "clawd", ignore=shutil.ignore_patterns("*.so", "__pycache__", "_core.c"))
    path = tree / "clawd" / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise Unusable(f"its old text is there {text.count(mutant.old)} times in {mutant.file}")
    path.write_text(text.replace(mutant.old, mutant.new))
    if mutant.file.startswith("csrc/") and not mutant.test.startswith(OWN_BUILD):
        recipe = tree / "clawd" / "csrc" / "build.py"
        recipe.write_text(recipe.read_text().replace('"-O2", "-g"', '"-O0"'))  # compiled more often than run
        run = subprocess.run([sys.executable, str(recipe), str(tree)], capture_output=True, text=True)
        if run.returncode:
            raise Unusable(f"it does not compile:\n{run.stdout}{run.stderr}")
    else:
        for built in (ROOT / "clawd").glob("_core*.so"):
            (tree / "clawd" / built.name).symlink_to(built)


def is_caught(mutant: Mutant) -> bool:
    with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
        tree = Path(directory)
        make_tree(mutant, tree)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            str(ROOT / "pyproject.toml"),
            "--rootdir",
            str(ROOT),
            "-x",
            "-q",
        ]
        command += ["-o", "addopts=", "-p", "no:cacheprovider", str(ROOT / "tests" / mutant.test)]
        environment = {name: value for name, value in os.environ.items() if name != "CLAWD_TEST_COUNTS"}
        # in the tree: the current directory is where clawd is imported from
        run = subprocess.run(
            command, cwd=tree, env=environment | {"PYTHONPATH": str(tree)}, capture_output=True, text=True
        )
        # 1 and a failure, not an error of the test's own preparations
        if run.returncode not in (0, 1) or (run.returncode == 1 and " failed" not in run.stdout.splitlines()[-1]):
            raise Unusable(f"its test does not run:\n{run.stdout}{run.stderr}")
        return run.returncode == 1


def outcome(mutant: Mutant) -> str:
    try:
        return "caught" if is_caught(mutant) else "SURVIVES"
    except Unusable as error:
        return f"UNUSABLE: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description="break clawd one rule at a time and see the tests fail")
    parser.add_argument("--all", action="store_true", help="also the rows that are not run often")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    options = parser.parse_args()
    if unknown := set(options.names) - {mutant.name for mutant in MUTANTS}:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [m for m in MUTANTS if (m.name in options.names if options.names else options.all or m.often)]
    caught = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, result in zip(chosen, pool.map(outcome, chosen), strict=True):
            caught += result == "caught"
            print(f"{result}: {mutant.name} ({mutant.test})", flush=True)
    if caught == len(chosen):
        counts.count(caught, "mutants caught")
    print(f"{caught} of {len(chosen)} mutants caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
