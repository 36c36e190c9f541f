# SPDX-License-Identifier: Apache-2.0
"""Files, drop-ins and flags: what wins, where each value came from, and every kind of bad input named with its line."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawd.config import ROWS, SETTINGS, Config
from clawd.errors import ConfigError, ConfigErrors
from clawd.sources import ERRORS_MAX, FILE_MAX, Configuration, Sources

pytestmark = pytest.mark.plain

# As the write-up has it, its comments in the language of its author
WECLAW = """\
[stream]
buffer_size=128k   # 每个生产者连接的环形缓冲区
prefetch_window=3  # 预取窗口（令牌数）
timeout=50ms       # 超时，单位毫秒

[network]
tcp_fastopen=on    # 启用 TCP Fast Open
keepalive=15s      # 保活间隔；断线频繁时改为 10s
"""


class Files:
    """A clawd.conf and its drop-ins."""

    def __init__(self, directory: Path) -> None:
        self.main = directory / "clawd.conf"
        self.beside = directory / "clawd.conf.d"

    def write(self, text: str | bytes) -> Files:
        self.main.write_bytes(text.encode() if isinstance(text, str) else text)
        return self

    def drop_in(self, name: str, text: str) -> Path:
        self.beside.mkdir(exist_ok=True)
        (self.beside / name).write_text(text)
        return self.beside / name

    def load(self, **flags: str) -> Configuration:
        return Sources(self.main, flags).load()

    def errors(self, **flags: str) -> list[str]:
        with pytest.raises(ConfigErrors) as caught:
            self.load(**flags)
        lines = [str(error).replace(str(self.main), "F") for error in caught.value.errors]
        assert not [line for line in lines if "\n" in line or not line.isprintable()]
        return lines


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.mark.parametrize("data", [WECLAW.encode(), b"\xef\xbb\xbf" + WECLAW.replace("\n", "\r\n").encode()])
def test_the_write_ups_block_loads_as_it_stands(files: Files, data: bytes) -> None:
    loaded = files.write(data).load()
    assert loaded.config == Config()
    lines = {"buffer_size": 2, "prefetch_window": 3, "timeout": 4, "tcp_fastopen": 7, "keepalive": 8}
    assert {key: origin.line for key, origin in loaded.origins.items() if origin.line} == lines
    files.write(WECLAW.replace("128k", "256k").replace("=3 ", "=8 ").replace("50ms", "1s").replace("=on", "=off"))
    config = files.load().config
    assert (config.buffer_size, config.prefetch_window) == (256 << 10, 8)
    assert (config.timeout, config.tcp_fastopen) == (10**9, False)


def test_drop_ins_come_after_the_file_in_the_order_of_their_names_and_flags_last(files: Files) -> None:
    files.write("[stream]\nkeep = 1s\nmax_clients = 1\nmax_streams = 1\nmax_producers = 1\n")
    second = files.drop_in("20.conf", "[stream]\nkeep = 3s\nmax_clients = 3\nmax_streams = 3\n")
    first = files.drop_in("10.conf", "[stream]\nkeep = 2s\nmax_clients = 2\n")
    third = files.drop_in("9.conf", "\n[stream]\nkeep = 4s\n")
    files.drop_in(".30.conf", "nonsense")
    files.drop_in("30.conf~", "nonsense")
    loaded = files.load(keep="5s")
    assert loaded.files == (files.main, first, second, third)
    config = loaded.config
    assert (config.keep, config.max_clients, config.max_streams, config.max_producers) == (5 * 10**9, 3, 3, 1)
    assert str(loaded.origins["keep"]) == "--keep"
    assert str(loaded.origins["max_clients"]) == f"{second}:3"
    assert str(loaded.origins["max_producers"]) == f"{files.main}:5"
    assert str(loaded.origins["timeout"]) == "default"
    assert files.load().config.keep == 4 * 10**9


def test_the_environment_only_moves_the_default_directory(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWD_RUNTIME_DIR", "/somewhere")
    loaded = files.write("").load()
    assert (loaded.config.runtime_dir, str(loaded.origins["runtime_dir"])) == (Path("/somewhere"), "$CLAWD_RUNTIME_DIR")
    longer = "/" + "x" * 200
    loaded = files.write(f"[daemon]\nruntime_dir = {longer}\n").load()
    assert (loaded.config.runtime_dir, str(loaded.origins["runtime_dir"])) == (Path(longer), f"{files.main}:2")


def test_the_file_of_etc_may_be_missing_and_its_drop_ins_count_then_too(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clawd.sources.DEFAULT_FILE", files.main)
    assert Sources().load().config == Config()
    made = files.drop_in("a.conf", "[stream]\nkeep = 2s\n")
    assert Sources().load().files == (made,)
    files.write("[stream]\nkeep = 1s\n")
    assert Sources().load().files == (files.main, made)
    files.main.unlink()
    files.main.symlink_to("nowhere")
    with pytest.raises(ConfigErrors, match="No such file"):
        Sources().load()


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        (
            "[stream]\nbuffer_size = 100k\n",
            ['F:2: buffer_size: "100k" is not allowed; it must be a power of two, 4k to 64M'],
        ),
        (
            "[stream]\nkeep = 10\n",
            ['F:2: keep: "10" is not a duration; write digits, then ns, us, ms, s, min or h, as in 50ms'],
        ),
        ("[stream]\nkeep = 25h # a\n", ['F:2: keep: "25h" is not allowed; it must be at most 24h']),
        ("[stream]\nprefetch_window = 0", ['F:2: prefetch_window: "0" is not allowed; it must be 1 to 8']),
        ("[network]\ntcp_fastopen = yes", ['F:2: tcp_fastopen: "yes" is not a switch; write on or off']),
        ("[network]\nkeepalive =", ['F:2: keepalive: "" is not a duration; ']),
        ("[daemon]\nruntime_dir =", ['F:2: runtime_dir: "" is not a path; write the path of a directory']),
        ("[stream]\ntimeot = 1s\n", ["F:2: timeot: no such setting; did you mean timeout?"]),
        ("[stream]\nbuffer-size = 4k\n", ["F:2: buffer-size: no such setting; did you mean buffer_size?"]),
        ("[stream]\nKEEP = 1s\n", ["F:2: KEEP: no such setting; did you mean keep?"]),
        ("[stream]\nqqqqq = 1s\n", ["F:2: qqqqq: no such setting; there is runtime_dir, buffer_size, "]),
        ("[streams]\nkeep = x\nkeep = y", ["F:1: no section [streams]; did you mean stream?"]),
        ("[DEFAULT]\nkeep = 1s", ["F:1: no section [DEFAULT]; there is daemon, stream, pace, network"]),
        ("[]\nkeep = 1s", ["F:1: no section []; there is daemon, stream, pace, network"]),
        ("keep = 1s", ["F:1: keep: it stands before the first section; it belongs below [stream]"]),
        ("[network]\nkeep = 1s", ["F:2: keep: it stands in section [network]; it belongs below [stream]"]),
        (
            "[stream]\nkeep = 1s\n[network]\n[stream]\nkeep = 2s\n",
            ['F:5: keep: "2s" comes after line 2 has set it; keep one of the two'],
        ),
        ("[stream\n", ['F:1: "[stream" is not a section; write it as in [stream]']),
        (b"[stream]\nkeep = \xff\n", ["F:2: this line is not UTF-8; save the file as UTF-8"]),
        ("[stream]\nkeep = 1s".encode("utf-16"), ["F:1: this line is not UTF-8; ", "F:2: "]),
        ("[stream]\nkeep = " + "9" * 10_000, ['F:2: keep: "' + "9" * 59 + '…" is not a duration; ']),
        (
            "[stream]\nstream_bytes = 2M\nspool_bytes = 1M\n",
            ['stream_bytes "2M" (F:2) is more than spool_bytes "1M" (F:3); lower the first or raise the second'],
        ),
        (
            "[stream]\nspool_bytes = 1M\n",
            ['stream_bytes "4M" (default) is more than spool_bytes "1M" (F:2); lower the first or raise the second'],
        ),
        (
            "[stream]\nkeep = soon\nnonsense\n[netwrk]\n",
            [
                'F:2: keep: "soon" is not a duration; ',
                'F:3: "nonsense" is not a setting; ',
                "F:4: no section [netwrk]; ",
            ],
        ),
        ("x" * (FILE_MAX + 1), ["F: longer than 256k; a clawd.conf is a few lines"]),
    ],
)
def test_bad_input_is_named_with_file_line_key_value_and_what_is_allowed(
    files: Files, text: str | bytes, complaints: list[str]
) -> None:
    found = files.write(text).errors()
    assert len(found) == len(complaints), found
    for line, complaint in zip(found, complaints, strict=True):
        assert line.startswith(complaint)


def test_a_value_that_a_later_file_replaces_must_be_good_too(files: Files) -> None:
    files.write("[stream]\nkeep = soon\n")
    files.drop_in("a.conf", "[stream]\nkeep = 1s\n")
    [line] = files.errors(keep="2s")
    assert line.startswith('F:2: keep: "soon"')


def test_a_conflict_of_a_file_with_a_flag_names_both(files: Files) -> None:
    [line] = files.write("[stream]\nstream_bytes = 8M\n").errors(spool_bytes="4M")
    assert line.startswith('stream_bytes "8M" (F:2) is more than spool_bytes "4M" (--spool-bytes)')


def test_errors_of_all_files_and_flags_come_together(files: Files) -> None:
    files.write("[stream]\nkeep = a\n")
    files.drop_in("a.conf", "[stream]\nkeep = b\n")
    lines = files.errors(keep="c")
    assert [line.split(": ")[0] for line in lines] == ["F:2", "F.d/a.conf:2", "--keep"]


def test_an_error_has_its_parts_for_programs(files: Files) -> None:
    with pytest.raises(ConfigErrors) as caught:
        files.write("[stream]\n\nkeep = soon\n").load()
    [error] = caught.value.errors
    assert (error.file, error.line, error.key, error.value) == (str(files.main), 3, "keep", "soon")


def test_too_many_errors_are_cut_off_and_counted(files: Files) -> None:
    found = files.write("nonsense\n" * 1000).errors()
    assert len(found) == ERRORS_MAX + 1
    assert found[-1] == "and 950 errors more; mend these first"


def test_what_is_no_readable_file_is_said(files: Files, tmp_path: Path) -> None:
    assert files.errors() == ["F: cannot be read: No such file or directory; is the path right, and may clawd read it?"]
    files.main.mkdir()
    assert files.errors()[0].startswith("F: cannot be read: Is a directory; ")
    files.main.rmdir()
    os.mkfifo(files.main)
    assert files.errors() == ["F: not a regular file; give the path of a clawd.conf"]
    files.main.unlink()
    files.write("")
    files.beside.write_text("no directory")
    assert files.errors()[0].startswith("F.d: cannot be read: Not a directory; ")
    files.beside.unlink()
    files.drop_in("a.conf", "").unlink()
    (files.beside / "b\x1b.conf").symlink_to("nowhere")
    assert files.errors()[0].startswith("F.d/b?.conf: cannot be read: No such file or directory; ")
    (files.beside / "b\x1b.conf").unlink()
    (files.beside / "masked.conf").symlink_to(os.devnull)
    assert files.load().config == Config()


def test_a_file_that_we_may_not_read_is_said(files: Files) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    files.write("").main.chmod(0)
    assert files.errors()[0].startswith("F: cannot be read: Permission denied; ")


_mutation = st.tuples(st.integers(0, len(WECLAW.encode())), st.integers(0, 12), st.binary(max_size=6))


@given(st.lists(_mutation, min_size=1, max_size=4))
def test_any_mutation_of_a_good_file_loads_as_it_reads_or_names_a_line(
    tmp_path_factory: pytest.TempPathFactory, cuts
) -> None:
    data = WECLAW.encode()
    for start, length, new in cuts:
        data = data[:start] + new + data[start + length :]
    files = Files(tmp_path_factory.getbasetemp()).write(data)
    try:
        loaded = files.load()
    except ConfigErrors as errors:
        for error in errors.errors:
            assert str(error).isprintable()
            assert error.file == str(files.main)
            assert 1 <= error.line <= data.count(b"\n") + data.count(b"\r") + 1
        return
    assert loaded.config == plainly_read(data)


def plainly_read(data: bytes) -> Config:
    """A file without faults, read in the simplest way."""
    values = {}
    for line in re.split(r"\r\n|\r|\n", data.decode("utf-8-sig")):
        body = re.split(r"(?:^|\s)#", line)[0].strip()
        if body and body[0] not in ";[":
            key, value = (part.strip() for part in body.split("=", 1))
            assert key not in values
            values[key] = ROWS[key].kind.parse(value)
    return Config(**values)


def test_a_single_error_of_a_flag_is_a_config_error(files: Files) -> None:
    assert issubclass(ConfigErrors, ConfigError)
    assert files.write("").errors(keep="soon")[0].startswith('--keep: "soon" is not a duration')
    assert set(ROWS) == {row.key for row in SETTINGS}
