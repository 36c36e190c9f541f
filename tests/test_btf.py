# SPDX-License-Identifier: Apache-2.0
"""The kernel's description of its types: a small one made here, the running kernel's where it has one, and bad ones."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from clawd.errors import HostError
from clawd.kernel import btf

pytestmark = pytest.mark.plain
TEXT = b"\0int\0frame\0seq\0odd\0send\0x_send\0"
WORDS = {word: TEXT.index(b"\0" + word + b"\0") + 1 for word in TEXT.split(b"\0") if word}


def described(tmp_path: Path, *, magic: int = 0xEB9F, cut: int = 0) -> Path:
    """int (1); struct frame (2) with seq at byte 4 and a bit field at byte 8; functions x_send (3) and send (4)."""
    rows = struct.pack("=IIII", WORDS[b"int"], 1 << 24, 4, 0)
    rows += struct.pack("=III", WORDS[b"frame"], 1 << 31 | 4 << 24 | 2, 12)
    rows += struct.pack("=III", WORDS[b"seq"], 1, 32) + struct.pack("=III", WORDS[b"odd"], 1, 3 << 24 | 66)
    rows += struct.pack("=III", WORDS[b"x_send"], 12 << 24, 1) + struct.pack("=III", WORDS[b"send"], 12 << 24, 1)
    header = struct.pack("=HBBIIIII", magic, 1, 0, 24, 0, len(rows), len(rows), len(TEXT))
    path = tmp_path / "vmlinux"
    path.write_bytes((header + rows + TEXT)[: -cut or None])
    return path


def test_numbers_and_places_are_found_by_whole_names(tmp_path: Path) -> None:
    found = btf.look_up(["send", "x_send"], [("frame", "seq"), ("frame", "odd")], described(tmp_path))
    assert found.functions == {"x_send": 3, "send": 4}
    assert found.structs == {"frame": 2}
    assert found.members == {("frame", "seq"): 4, ("frame", "odd"): 8}


@pytest.mark.parametrize(
    ("functions", "members", "told"),
    [
        (["sen"], [], "this kernel has no sen()"),
        (["frame"], [], "this kernel has no frame()"),
        ([], [("frame", "len")], "this kernel has no frame.len"),
        ([], [("send", "seq")], "this kernel has no send.seq"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, functions: list[str], members: list[tuple[str, str]], told: str
) -> None:
    with pytest.raises(HostError) as raised:
        btf.look_up(functions, members, described(tmp_path))
    assert raised.value.message == told


@pytest.mark.parametrize("wrong", [{"magic": 7}, {"cut": len(TEXT) + 3}, {"cut": 200}])
def test_another_file_is_told(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(HostError, match="no description of types that is known here"):
        btf.look_up(["send"], [], described(tmp_path, **wrong))


def test_a_kernel_without_one_is_told(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="does not describe its types"):
        btf.look_up([], [], tmp_path / "none")


def test_the_running_kernel_describes_itself() -> None:
    if not btf.FILE.exists():
        pytest.skip("this kernel does not describe its types")
    found = btf.look_up(["tcp_sendmsg"], [("list_head", "next"), ("list_head", "prev")])
    assert found.functions["tcp_sendmsg"] > found.structs["list_head"] > 0
    assert [found.members["list_head", name] for name in ("next", "prev")] == [0, struct.calcsize("P")]
