# SPDX-License-Identifier: Apache-2.0
"""clawd_ring.h as an engine uses it: the one-file form, compiled as C and C++, against a clawd played by fake_clawd."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clawd.core import lib
from clawd.csrc import build
from fake_clawd import Drainer, FakeClawd, Ring

COMPILERS = {
    "c11": ("gcc", "-std=c11", "-x", "c"),
    "gnu17": ("gcc", "-std=gnu17", "-x", "c"),
    "c++17": ("g++", "-std=c++17", "-x", "c++"),
    "c++20": ("g++", "-std=c++20", "-x", "c++"),
    "clang c11": ("clang", "-std=c11", "-x", "c"),
    "clang c++17": ("clang++", "-std=c++17", "-x", "c++"),
}
# -Wconversion too: many engines are built with it, and a header's warnings are theirs
WARNINGS = ("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wsign-conversion", "-Werror", "-pedantic")

# Reads stdin in pieces of argv[2] bytes and writes each as a token; a status other than 0 names the line that failed
ENGINE = r"""
#include "clawd_ring.h"
#include <stdlib.h>
#include <sys/wait.h>

#define EXPECT(got, want) do { long r_ = (long)(got); if (r_ != (long)(want)) { \
	fprintf(stderr, "line %d: %s is %ld\n", __LINE__, #got, r_); return 1; } } while (0)

static struct claw_producer producer;

int main(int argc, char **argv)
{
	static char text[65536], long_name[256];
	struct claw_attached answer;
	struct claw_stream stream, other, streams[2];
	uint32_t lens[2] = { 3, 2 };
	struct claw_backlog backlog;
	struct claw_hint hint;
	size_t size, len;
	int status;
	void *own;
	pid_t pid;

	if (argc != 3)
		return 2;
	memset(&stream, 0, sizeof(stream));
	size = (size_t)atoi(argv[2]);
	EXPECT(claw_write(&producer, stream, "x", 1, 0, 1), -ENOTCONN);
	EXPECT(claw_hints(&producer, &hint), -ENOTCONN);
	EXPECT(claw_flush(&producer), -ENOTCONN);
	EXPECT(claw_lose(&producer, stream, "x", 1), -ENOTCONN);
	EXPECT(claw_set_overflow(&producer, 0), -ENOTCONN);
	EXPECT(claw_look_backlog(&producer, &backlog), -ENOTCONN);
	EXPECT(claw_reattach(&producer, argv[1], &answer), -ENOTCONN);
	EXPECT(claw_poll_fd(&producer), -ENOTCONN);
	EXPECT(claw_attach(&producer, argv[1], "engine", 4097, &answer), -EINVAL);
	EXPECT(claw_attach(&producer, argv[1], "engine", 4096, &answer), 0);
	EXPECT(answer.ring_bytes, 4096);
	EXPECT(claw_attach(&producer, argv[1], "engine", 4096, &answer), -EISCONN);
	EXPECT(claw_set_overflow(&producer, 4097), -EINVAL);
	EXPECT(claw_set_overflow(&producer, 0), 0);
	EXPECT(claw_state(&producer), CLAW_STATE_OPEN);
	EXPECT(claw_hints(&producer, &hint), 0);
	EXPECT(claw_poll_fd(&producer), producer.control_fd);
	EXPECT(claw_write(&producer, stream, "x", 1, 0, 1), -EBADF);
	EXPECT(claw_open_stream(&producer, "", 0, NULL, 0, 0, &stream), -EINVAL);
	EXPECT(claw_open_stream(&producer, long_name, 256, NULL, 0, 0, &stream), -EINVAL);
	EXPECT(claw_open_stream(&producer, "a", 1, text, 1008, 0, &stream), -EMSGSIZE);
	EXPECT(claw_open_stream(&producer, "a", 1, "{}", 2, 5, &stream), 0);
	EXPECT(claw_open_stream(&producer, "b", 1, NULL, 0, 0, &other), 0);
	EXPECT(claw_write(&producer, stream, "x", 1, 2, 1), -EINVAL);
	EXPECT(claw_write(&producer, stream, "", 0, 0, 1), 0);
	EXPECT(claw_write(&producer, stream, text, 4096, 0, 1), -EMSGSIZE);
	EXPECT(claw_write(&producer, stream, text, sizeof(text), 0, 1), -EMSGSIZE);
	streams[0] = stream;
	streams[1] = other;
	EXPECT(claw_write_many(&producer, streams, lens, "abcde", 2, CLAW_URGENT, 4), 2);
	EXPECT(claw_close_stream(&producer, other, "", 0), -EINVAL);
	EXPECT(claw_close_stream(&producer, other, "length", 6), 0);
	EXPECT(claw_close_stream(&producer, other, "length", 6), -EBADF);
	EXPECT(claw_write_many(&producer, streams, lens, "abcde", 2, 0, 1), -EBADF);
	EXPECT(claw_wait_room(&producer, 4097, 0), -EMSGSIZE);

	while ((len = fread(text, 1, size, stdin)) > 0) {
		int result;

		while ((result = claw_write(&producer, stream, text, len, 0, 1)) == -EAGAIN)
			EXPECT(claw_wait_room(&producer, claw_text_bytes(&producer, text, len), 20000000000), 0);
		if (result < 1)
			return 3;
	}
	pid = fork();
	if (!pid) {
		EXPECT(claw_write(&producer, stream, "x", 1, 0, 1), -ECHILD);
		EXPECT(claw_wait_room(&producer, 32, 0), -ECHILD);
		EXPECT(claw_state(&producer), -ECHILD);
		EXPECT(claw_flush(&producer), -ECHILD);
		EXPECT(claw_lose(&producer, stream, "x", 1), -ECHILD);
		EXPECT(claw_reattach(&producer, argv[1], &answer), -ECHILD);
		EXPECT(claw_hints(&producer, &hint), -ECHILD);
		EXPECT(claw_poll_fd(&producer), -ECHILD);
		/* what a child has at the parent's addresses and descriptor numbers is its own */
		own = mmap(producer.data, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
		EXPECT(own == producer.data, 1);
		claw_detach(&producer);
		memset(own, 1, 4096);
		EXPECT(write(producer.event_fd, text, 0), -1);
		EXPECT(errno, EINVAL);
		return 0;
	}
	EXPECT(waitpid(pid, &status, 0), pid);
	EXPECT(status, 0);
	while (claw_close_stream(&producer, stream, "stop", 4) == -EAGAIN)
		EXPECT(claw_wait_room(&producer, 64, 20000000000), 0);
	claw_stop(&producer);
	EXPECT(claw_state(&producer), -ENOTCONN);
	claw_detach(&producer);
	claw_detach(&producer);
	EXPECT(claw_stopped(&producer, stream), -ENOTCONN);
	return 0;
}
"""

# Makes a producer of inherited descriptors and answers what it was told, then writes until it is stopped or refused
MAPPER = r"""
#include "clawd_ring.h"
#include <stdlib.h>

static struct claw_producer producer;

int main(int argc, char **argv)
{
	struct claw_attached answer;
	struct claw_stream stream;
	struct claw_hint hint;
	int result;

	if (argc != 5)
		return 2;
	memset(&answer, 0, sizeof(answer));
	answer.magic = CLAW_MAGIC;
	answer.layout = CLAW_LAYOUT;
	answer.size = sizeof(answer);
	answer.ring_bytes = (uint64_t)atoll(argv[1]);
	answer.ring_id = 1;
	answer.record_max = claw_record_max(answer.ring_bytes);
	result = claw_map(&producer, &answer, atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), -1);
	printf("map %d\n", result);
	if (result)
		return 0;
	result = claw_hints(&producer, &hint);
	printf("hints %d", result);
	if (!result)
		printf(" %u %u %u", hint.target_rate, hint.degrade, hint.reason);
	printf("\nopen %d\n", claw_open_stream(&producer, "m", 1, NULL, 0, 0, &stream));
	printf("write %d\n", claw_write(&producer, stream, "x", 1, 0, 1));
	printf("stopped %d\n", claw_stopped(&producer, stream));
	claw_detach(&producer);
	return 0;
}
"""

# The words for each result that the header names, one a line
WORDS = r"""
#include "clawd_ring.h"

int main(void)
{
	const int results[] = { 0, 3, -ENOTCONN, -ECHILD, -ESHUTDOWN, -EPROTO, -EBADF, -EAGAIN, -ECANCELED, -EINVAL,
				-EMSGSIZE, -EMFILE, -EISCONN, -EACCES, -ENOENT, -ECONNREFUSED, -ETIMEDOUT, -9999 };
	const int stopped[] = { 0, 1, 2, 3, 4, 5, 6, -EBADF };
	size_t i;

	for (i = 0; i < sizeof(results) / sizeof(*results); i++)
		puts(claw_result_text(results[i]));
	for (i = 0; i < sizeof(stopped) / sizeof(*stopped); i++)
		puts(claw_stopped_text(stopped[i]));
	return 0;
}
"""


def compile_with(kind: str, directory: Path, name: str, source: str, *more: str) -> Path:
    compiler = COMPILERS[kind]
    if not shutil.which(compiler[0]):
        pytest.skip(f"{compiler[0]} is not installed")
    (directory / "clawd_ring.h").write_text(build.header())
    program, text = directory / name, directory / f"{name}.c"
    text.write_text(source)
    command = [*compiler, *WARNINGS, "-O2", *more, str(text), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert not done.stderr
    return program


@pytest.fixture(scope="module", params=["c11", "c++17"])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("engine")
    return tuple(
        compile_with(request.param, directory, name, source, "-fsanitize=address,undefined")
        for name, source in (("engine", ENGINE), ("mapper", MAPPER))
    )


def test_the_vendored_header_is_one_file_that_includes_only_libc() -> None:
    included = re.findall(r"^\s*#\s*include\s*(\S+)", build.header(), re.MULTILINE)
    assert included
    assert all(name.startswith("<") for name in included)


@pytest.mark.parametrize("kind", COMPILERS)
def test_the_vendored_header_compiles_alone_and_without_a_warning(tmp_path: Path, kind: str) -> None:
    compile_with(kind, tmp_path, "alone", '#include "clawd_ring.h"\nint main(void) { return 0; }\n')


def test_without_what_it_needs_of_libc_the_header_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="compile with -D_GNU_SOURCE"):
        compile_with(
            "c11", tmp_path, "late", '#include <stdio.h>\n#include "clawd_ring.h"\nint main(void) { return 0; }\n'
        )
    late = '#include <stdio.h>\n#include "clawd_ring.h"\nint main(void) { return 0; }\n'
    compile_with("c11", tmp_path, "defined", late, "-D_GNU_SOURCE")


@pytest.mark.parametrize("kind", COMPILERS)
def test_the_example_in_the_header_compiles(tmp_path: Path, kind: str) -> None:
    comment = build.header().split("*/")[1].split("A life:")[0]
    example = "\n".join(line[2:] for line in comment.splitlines() if line.startswith(" *\t"))
    assert "claw_close_stream" in example
    source = f"""#include "clawd_ring.h"
#include <err.h>
int next_token(const char **text, size_t *len);
int next_token(const char **text, size_t *len) {{ *text = "x"; *len = 1; return 0; }}
int main(void) {{ const char *text; size_t len;
{example}
return 0; }}
"""
    compile_with(kind, tmp_path, "example", source)


@pytest.mark.parametrize("kind", ["c11", "c++17"])
def test_results_have_words_of_their_own(tmp_path: Path, kind: str) -> None:
    program = compile_with(kind, tmp_path, "words", WORDS)
    lines = subprocess.run([program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[:2] == ["done", "done"]
    assert "the ring is full, and so is the overflow" in lines
    assert "Unknown error 9999" in lines
    assert lines[-8:-1] == ["open", "cancelled", "exists", "limit", "no_space", "stopping", "stopped"]
    assert len(set(lines)) == len(lines) - 3, "done, no clawd, and a closed stream are there twice"


@pytest.mark.parametrize("piece", [1, 7, 1024, 1500, 3000])
def test_an_engine_in_c_or_cpp_writes_tokens_that_arrive_whole(programs, fake: FakeClawd, piece: int) -> None:
    text = "".join(random.Random(piece).choices("aé中🙂\n", k=4000)).encode()
    with subprocess.Popen(
        [programs[0], fake.directory, str(piece)], stdin=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        fake.attached.wait(20)
        with Drainer(fake.rings[0]):
            _, errors = process.communicate(text, timeout=50)
    assert (process.returncode, errors) == (0, b"")
    ring = fake.rings[0]
    assert fake.hellos[0] == ("engine", 4096)
    assert [(row.name, row.meta, row.requested_ns, row.reason) for row in ring.streams] == [
        ("a", b"{}", 5, "stop"),
        ("b", b"", 0, "length"),
    ]
    assert ring.stream("a").data == b"abc" + text
    assert ring.stream("b").data == b"de"
    assert [(row.flags, row.count) for row in ring.records[2:4]] == [(lib.CLAW_URGENT, 4)] * 2
    assert not ring.is_held()


def mapped(program: Path, ring: Ring, ring_bytes: int, fds: tuple[int, int, int] | None = None) -> list[str]:
    fds = fds or (ring.data_fd, ring.ctl_fd, ring.event_fd)
    done = subprocess.run(
        [program, str(ring_bytes), *map(str, fds)],
        pass_fds=fds,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture
def ring() -> Iterator[Ring]:
    made = Ring(8192, 1)
    yield made
    made.close()


def test_a_producer_is_made_of_descriptors_alone(programs, ring: Ring) -> None:
    ring.words.need_wake = 1
    assert mapped(programs[1], ring, 8192) == ["map 0", "hints 0 0 0 0", "open 0", "write 1", "stopped 0"]
    ring.drain()
    assert ring.stream("m").data == b"x"
    assert ring.wakes() == 1
    assert int.from_bytes(ring.data[8:16], "little") == 8192, "the identity line is filled in"


def test_hints_are_read_whole_or_not_at_all(programs, ring: Ring) -> None:
    ring.words.hint_seq, ring.words.target_rate, ring.words.degrade, ring.words.hint_reason = 6, 25_000, 2, 3
    assert mapped(programs[1], ring, 8192)[1] == "hints 0 25000 2 3"


def test_hints_that_stay_half_written_do_not_hold_the_engine_up(programs, ring: Ring) -> None:
    ring.words.hint_seq = 7
    assert mapped(programs[1], ring, 8192)[1] == "hints -11"


def test_stopping_and_quarantine_reach_an_engine_in_c(programs, ring: Ring) -> None:
    ring.words.stopped[0] = 1 << 8 | lib.CLAW_STOPPED_CANCELLED
    assert mapped(programs[1], ring, 8192)[2:] == ["open 0", "write -125", "stopped 1"]


def test_a_quarantined_ring_takes_nothing(programs, ring: Ring) -> None:
    ring.words.state = lib.CLAW_STATE_QUARANTINED
    assert mapped(programs[1], ring, 8192)[2] == "open -108"
    assert ring.drain() == []


@pytest.mark.parametrize("ring_bytes", [0, 2048, 4095, 8191, 12288, 16384, 1 << 27])
def test_sizes_that_do_not_fit_the_descriptors_are_refused(programs, ring: Ring, ring_bytes: int) -> None:
    assert mapped(programs[1], ring, ring_bytes) == ["map -71"]


@pytest.mark.parametrize(
    ("word", "value"),
    [("magic", 0), ("layout", 2), ("size", 100), ("incompatible", 1), ("record_max", 4000), ("ring_id", 9),
     ("ring_bytes", 4096), ("ack_pos", 32)],
)  # fmt: skip
def test_a_ctl_page_that_contradicts_the_answer_is_refused(programs, ring: Ring, word: str, value: int) -> None:
    setattr(ring.words, word, value)
    assert mapped(programs[1], ring, 8192) == ["map -71"]
