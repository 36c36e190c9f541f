# SPDX-License-Identifier: Apache-2.0
"""Units: what people write becomes an int, and the int becomes text that reads back the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawd import units
from clawd.errors import ConfigError

pytestmark = pytest.mark.plain


@pytest.mark.parametrize(
    ("text", "value"),
    [("128k", 131072), ("128K", 131072), ("64M", 64 << 20), ("64 m", 64 << 20), ("1.5G", 3 << 29), ("4096", 4096),
     ("0", 0), (" 1T ", 1 << 40)],
)  # fmt: skip
def test_a_size_is_read_as_bytes(text: str, value: int) -> None:
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("50ms", 50_000_000), ("15s", 15 * 10**9), ("0", 0), ("0s", 0), ("1.5min", 90 * 10**9), ("1us", 1000),
     ("0.5us", 500), ("2 h", 7200 * 10**9), ("7ns", 7)],
)  # fmt: skip
def test_a_duration_is_read_as_nanoseconds(text: str, value: int) -> None:
    assert units.parse_duration(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "-1k", "+1", "1e3", "1kk", "0x10", "1 2", "١٢", "1.k", ".5k", "0.1", "9" * 19]
)
def test_what_is_no_size_is_refused_with_what_was_written(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        units.parse_bytes(text)
    assert caught.value.message.startswith(f'"{text}" is ')
    assert caught.value.hint == "write digits, then k, M, G, T or nothing, as in 128k"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "15", "15 sec", "-1s", "1m", "0.5ns", "ms", "1s 2s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ns, us, ms, s, min or h"):
        units.parse_duration(text)


@pytest.mark.parametrize("text", ["", "1k", "-1", "1.5", "many"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="digits only"):
        units.parse_count(text)


def test_a_switch_is_on_or_off_and_nothing_else() -> None:
    assert units.parse_switch("on") is True
    assert units.parse_switch(" off") is False
    for text in ("", "On", "yes", "1", "true"):
        with pytest.raises(ConfigError, match="write on or off"):
            units.parse_switch(text)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (131072, "128k"), (64 << 20, "64M"), (1536, "1536")])
def test_bytes_are_written_in_the_largest_unit_that_is_exact(value: int, text: str) -> None:
    assert units.format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (60 * 10**9, "1min"), (50_000_000, "50ms"), (1_500_000, "1500us")]
)
def test_nanoseconds_are_written_in_the_largest_unit_that_is_exact(value: int, text: str) -> None:
    assert units.format_duration(value) == text


@given(st.integers(0, 10**17))
def test_what_is_written_reads_back_the_same(value: int) -> None:
    assert units.parse_bytes(units.format_bytes(value)) == value
    assert units.parse_duration(units.format_duration(value)) == value


@given(st.booleans())
def test_a_switch_reads_back_the_same(value: bool) -> None:
    assert units.parse_switch(units.format_switch(value)) is value


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused_with_a_config_error(text: str) -> None:
    for parse in (units.parse_bytes, units.parse_duration, units.parse_count):
        try:
            assert parse(text) >= 0
        except ConfigError:
            assert not text.isascii() or not text.isdigit() or parse is units.parse_duration or len(text) > 18


@pytest.mark.parametrize(
    ("text", "value"), [("off", 0), ("0", 0), ("EF", 46), ("46", 46), ("af41", 34), ("cs6", 48), ("le", 1), ("63", 63)]
)
def test_a_dscp_by_name_or_number(text: str, value: int) -> None:
    assert units.parse_dscp(text) == value


@pytest.mark.parametrize("value", range(64))
def test_every_dscp_reads_back_as_itself(value: int) -> None:
    assert units.parse_dscp(units.format_dscp(value)) == value


@pytest.mark.parametrize("text", ["", "64", "-1", "046", "cs8", "cs0", "af14", "\u0664\u0666", "on"])
def test_what_is_no_dscp_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no DSCP; write 0 to 63, or a name, as in ef, or off$"):
        units.parse_dscp(text)
