# SPDX-License-Identifier: Apache-2.0
"""Config: every row has a good default, keeps its bounds, and complains in one line that names the value. Also the
flags made of the rows.
"""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from clawd import units
from clawd.config import SETTINGS, SIZE, TIME, Config
from clawd.errors import ConfigError
from clawd.sources import Sources, make_parser, parse_arguments

pytestmark = pytest.mark.plain


@pytest.fixture(autouse=True)
def no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever this host has in /etc."""
    monkeypatch.setattr("clawd.sources.DEFAULT_FILE", tmp_path / "clawd.conf")


def config_of(*arguments: str) -> Config:
    return parse_arguments(arguments).load().config


def test_without_flags_every_setting_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLAWD_RUNTIME_DIR", raising=False)
    assert config_of() == Config()
    assert Config() == Config(
        runtime_dir=Path("/run/clawd"),
        buffer_size=128 << 10,
        spool_bytes=64 << 20,
        stream_bytes=4 << 20,
        keep=60 * 10**9,
        max_streams=16384,
        user_streams=12288,
        max_producers=64,
        user_producers=48,
        max_ring_bytes=1 << 30,
        user_ring_bytes=768 << 20,
        max_clients=1024,
        user_clients=768,
        max_attachments=65536,
        user_attachments=49152,
        prefetch_window=3,
        timeout=50 * 10**6,
        tcp_listen=(),
        keys_dir=Path("/etc/clawd/keys"),
        loss_threshold=2,
        express_dscp=0,
        congestion="kernel",
        tcp_fastopen=True,
        keepalive=15 * 10**9,
        producers=("any",),
        consumers=("any",),
        observers=("any",),
        admins=(),
    )


def test_the_runtime_directory_comes_from_the_flag_else_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAWD_RUNTIME_DIR", "/somewhere")
    assert config_of().runtime_dir == Path("/somewhere")
    assert config_of("--runtime-dir", "/else").runtime_dir == Path("/else")
    monkeypatch.setenv("CLAWD_RUNTIME_DIR", "")
    assert Config().runtime_dir == Path("/run/clawd")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().keep = 1  # type: ignore[misc]


def test_every_field_is_one_row_with_help_and_a_flag() -> None:
    assert [row.key for row in SETTINGS] == [column.name for column in fields(Config)]
    assert [row.key for row in SETTINGS if not row.help or row.flag != f"--{row.key.replace('_', '-')}"] == []
    assert {row.section for row in SETTINGS} == {"daemon", "stream", "pace", "network", "access", "kernel", "gateway"}


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row.key)
def test_a_default_reads_back_as_itself(row) -> None:
    text = row.kind.format(row.default_value())
    assert row.parse(text, row.flag) == row.parse(row.default_text, row.flag) == getattr(Config(), row.key)


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.low], ids=lambda row: row.key)
def test_a_bound_is_allowed_and_one_less_is_not(row) -> None:
    low = row.kind.parse(row.low)
    row.check(low, row.flag)
    with pytest.raises(ConfigError, match=row.low):
        row.check(low - 1, row.flag)


@pytest.mark.parametrize("row", [row for row in SETTINGS if row.high], ids=lambda row: row.key)
def test_an_upper_bound_is_allowed_and_one_more_is_not(row) -> None:
    high = row.kind.parse(row.high)
    row.check(high, row.flag)
    with pytest.raises(ConfigError, match=row.high):
        row.check(high + 1, row.flag)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--buffer-size", "100k"], '--buffer-size: "100k" is not allowed; it must be a power of two, 4k to 64M'),
        (["--buffer-size", "2k"], '--buffer-size: "2k" is not allowed; it must be a power of two, 4k to 64M'),
        (["--spool-bytes=5000000"], '--spool-bytes: "5000000" is not allowed; it must be 1M to 1T, a multiple of 4k'),
        (["--stream-bytes", "8k"], '--stream-bytes: "8k" is not allowed; it must be 16k to 1T'),
        (["--keep", "10"], '--keep: "10" is not a duration; write digits, then ns, us, ms, s, min or h, as in 50ms'),
        (["--max-clients", "0"], '--max-clients: "0" is not allowed; it must be 1 to 65536'),
        (["--runtime-dir", ""], '--runtime-dir: "" is not a path; write the path of a directory'),
        (["--buffer", "4k"], "unrecognized arguments: --buffer 4k"),
        (["now"], "unrecognized arguments: now"),
        (["--keep"], "argument --keep: expected one argument"),
        (["--prefetch-window", "9"], '--prefetch-window: "9" is not allowed; it must be 1 to 8'),
        (["--tcp-fastopen", "yes"], '--tcp-fastopen: "yes" is not a switch; write on or off'),
        (["--express-dscp", "64"], '--express-dscp: "64" is no DSCP; write 0 to 63, or a name, as in ef, or off'),
        (["--express-dscp", "af44"], '--express-dscp: "af44" is no DSCP; write 0 to 63, or a name, as in ef, or off'),
        (
            ["--congestion", "vegas"],
            '--congestion: "vegas" is none of them; write kernel or cubic or reno or bbr or dctcp',
        ),
        (["--config", ""], '--config: "" is not a path; give the path of a clawd.conf'),
        (
            ["--spool-bytes", "1M"],
            'stream_bytes "4M" (default) is more than spool_bytes "1M" (--spool-bytes); lower the first or raise the'
            " second",
        ),
    ],
)
def test_a_bad_flag_gets_one_line_that_names_it_and_what_is_allowed(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(*arguments)
    assert str(caught.value) == complaint


def test_a_config_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match='buffer_size: "3000" is not allowed'):
        Config(buffer_size=3000)
    with pytest.raises(ConfigError, match='stream_bytes "4M" is more than spool_bytes "1M"; '):
        Config(spool_bytes=1 << 20)


def test_flags_become_sources_and_a_file_named_by_one_does_not_move_with_us(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_arguments(["--config", "a.conf", "--keep", "1s"]) == Sources(tmp_path / "a.conf", {"keep": "1s"})
    assert parse_arguments([]) == Sources(None, {})


def test_what_nothing_uses_yet_does_not_claim_otherwise() -> None:
    unused: set[str] = set()
    assert {row.key for row in SETTINGS if "in this version" in row.help} == unused
    assert {row.key for row in SETTINGS if "nothing uses it yet" in row.detail} == unused


@pytest.mark.parametrize("program", ["clawd", "clawd-gateway"])
def test_help_fits_eighty_columns_and_shows_every_setting(program: str) -> None:
    shown = make_parser(program).format_help()
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    words = " ".join(shown.split())
    for row in SETTINGS:
        assert (f"{row.flag} {row.kind.name} {row.help}" in words) == (program in row.programs)
    assert "(default 15s; 1s to 1h)" in words or program == "clawd"


def test_sizes_and_times_are_shown_in_the_units_people_write() -> None:
    assert SIZE.format(131072) == units.format_bytes(131072) == "128k"
    assert TIME.format(50_000_000) == "50ms"
