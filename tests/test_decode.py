# SPDX-License-Identifier: Apache-2.0
"""Any bytes on a socket: JSON messages and a producer's hello are taken when they keep every rule, and refused by a
named error otherwise; nothing else comes out.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clawd import protocol
from clawd.core import lib
from clawd.errors import AttachRefused, ProtocolError
from clawd.server.ring import read_hello
from counts import count

EXAMPLES = int(os.environ.get("CLAWD_TEST_EXAMPLES", "300"))
HELLO = struct.Struct("<IIIIIIQQ64s")
ALLOWED = (*protocol.CONTROL_REQUESTS, *protocol.RELAY_REQUESTS, *protocol.RELAY_REPLIES, protocol.Welcome)

many = settings(max_examples=EXAMPLES, deadline=None)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=300)
    | st.sampled_from(["consumer", "observer", "admin", "", "\ud800", "a" * 256, 2**32, 2**63, -1, 0, 1])
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
names = st.sampled_from(sorted({row.name for kind in ALLOWED for row in fields(kind)} | {"extra", "op"}))
objects = st.builds(
    lambda op, rest: {**rest, "op": op},
    st.sampled_from([kind.op for kind in ALLOWED]) | leaves,
    st.dictionaries(names, values, max_size=10),
)


def decode(packet: bytes) -> Any:
    """The message, None when it was refused."""
    count(1, "messages decoded")
    with contextlib.suppress(ProtocolError):
        return protocol.decode(packet, ALLOWED)
    return None


def good(message: Any) -> None:
    """What was taken keeps every rule, and says the same when it is said again."""
    for row in fields(message):
        assert row.metadata["check"](getattr(message, row.name)), row.name
    assert protocol.decode(protocol.encode(message), (type(message),)) == message


@many
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="surrogatepass")))
def test_arbitrary_bytes_are_a_message_or_refused(packet: bytes) -> None:
    if (message := decode(packet)) is not None:
        good(message)


@many
@given(objects)
def test_arbitrary_objects_are_a_message_or_refused(value: dict[str, Any]) -> None:
    if (message := decode(json.dumps(value).encode())) is not None:
        good(message)


@many
@given(st.sampled_from(ALLOWED), st.data())
def test_a_good_message_with_bytes_changed_is_a_message_or_refused(kind: type, data: st.DataObject) -> None:
    samples = {"version": 1, "role": "admin", "session": "s", "instance": "i", "id": 7, "stream": "chatcmpl-1"}
    samples |= {"connection": 9, "code": "lost", "text": "why", "mode": "off"}
    message = kind(**{row.name: samples[row.name] for row in fields(kind) if row.name in samples})
    packet = bytearray(protocol.encode(message))
    good(decode(bytes(packet)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packet) - 1))
        packet[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
        packet += b" " * (not packet)
    if (changed := decode(bytes(packet))) is not None:
        good(changed)


@pytest.mark.parametrize("packet", [b"[" * 4096, b'{"op":' * 600, b'{"op":"ping"' + b" " * 4085, b"1" * 4096])
def test_what_is_deep_or_long_is_refused(packet: bytes) -> None:
    assert decode(packet) is None


@many
@given(st.binary(max_size=2 * HELLO.size), st.data())
def test_a_hello_is_read_or_refused_by_name(packet: bytes, data: st.DataObject) -> None:
    if data.draw(st.booleans()):  # a good one but for some bytes
        sizes = st.sampled_from([0, 4095, 4096, 4097, 1 << 26, 1 << 27, 1 << 63])
        start = HELLO.pack(lib.CLAW_MAGIC, 1, HELLO.size, 0, 0, 0, data.draw(sizes), 0, packet[:64])
        at = data.draw(st.integers(0, HELLO.size))
        packet = start[:at] + packet[:2] + start[at + len(packet[:2]) :] if data.draw(st.booleans()) else start
    count(1, "messages decoded")
    try:
        hello = read_hello(packet)
    except (AttachRefused, ProtocolError):
        return
    assert len(packet) == HELLO.size
    assert hello.ring_bytes == 0 or lib.CLAW_RING_BYTES_MIN <= hello.ring_bytes <= lib.CLAW_RING_BYTES_MAX
    assert hello.ring_bytes & (hello.ring_bytes - 1) == 0
    assert len(hello.name) <= 64
