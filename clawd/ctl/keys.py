# SPDX-License-Identifier: Apache-2.0
"""`clawctl keys`: keys of the gateway and tokens that are signed with them; relay_keys.py has the keys of the relay."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from clawd import protocol, units
from clawd.ctl import relay_keys, render
from clawd.errors import ConfigError
from clawd.gateway import access

HELP = "keys of clients by tcp, of the gateway, and tokens for its readers"
EXAMPLE = "clawctl keys relay new gateway-1"
ABOUT = (
    "gateway make FILE: a new key for the gateway's key_file; never replaces a file. gateway token STREAM: a token that"
    " lets its bearer read and cancel this stream, --read-only to read it; with --metrics and no STREAM, to read"
    " /metrics. It is signed with the first key of --key-file and goes into the header Authorization: Bearer TOKEN, or"
    " into ?token= where a browser sets no headers. Who can read the key file can make any token. " + relay_keys.ABOUT
)
WORDS = ("gateway", "make", "token", "relay", *relay_keys.ACTIONS)
VALID_MAX_NS = 366 * 24 * 3600 * 10**9


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("of", metavar="gateway|relay", help="whose keys")
    parser.add_argument("action", metavar="ACTION", help=f"make, token; of relay {', '.join(relay_keys.ACTIONS)}")
    parser.add_argument("operands", nargs="*", metavar="FILE|STREAM|NAME", help="of make, of token, of relay's")
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="the keys to sign with")
    parser.add_argument("--valid", default="1h", metavar="TIME", help="how long a token holds (default 1h)")
    parser.add_argument("--read-only", action="store_true", help="a token that cannot cancel")
    parser.add_argument("--metrics", action="store_true", help="a token for /metrics")
    relay_keys.arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.of == "relay":
        return relay_keys.run(options)
    if options.of != "gateway":
        return _usage(f'no keys of "{render.cell(options.of)}"; there is gateway and relay')
    if len(options.operands) > 1:
        return _usage(f"keys gateway {render.cell(options.action)} takes one word after it")
    options.operand = options.operands[0] if options.operands else None
    if options.action == "make":
        return _make(options)
    if options.action == "token":
        return _token(options)
    return _usage(f'no action "{render.cell(options.action)}" of keys gateway; there is make and token')


def _usage(message: str) -> int:
    print(f"clawctl: {message}", file=sys.stderr)
    return 2


def _make(options: argparse.Namespace) -> int:
    if not options.operand:
        return _usage("keys gateway make needs the FILE to make")
    path = Path(options.operand)
    access.make_key_file(path)
    if options.json:
        print(json.dumps({"version": 1, "key_file": str(path)}), flush=True)
    else:
        print(f"made {render.cell(path)}; let the gateway's group read it, and set key_file to it", flush=True)
    return 0


def _token(options: argparse.Namespace) -> int:
    if options.key_file is None:
        return _usage("keys gateway token needs --key-file FILE")
    if bool(options.operand) == options.metrics:
        return _usage("keys gateway token needs a STREAM, or --metrics instead")
    stream = options.operand or ""
    try:
        long = len(stream.encode())
        valid_ns = units.parse_duration(options.valid)
    except UnicodeEncodeError:
        return _usage("a stream's name is UTF-8")
    except ConfigError as error:
        return _usage(f"--valid: {error}")
    if long > protocol.NAME_MAX:
        return _usage(f"a stream's name has at most {protocol.NAME_MAX} bytes")
    if not 0 < valid_ns <= VALID_MAX_NS:
        return _usage("--valid is more than 0 and at most 8784h")
    rights = "m" if options.metrics else "r" if options.read_only else "rc"
    expiry = int(time.time() + valid_ns / 1e9)
    token = access.make_token(access.read_keys(options.key_file)[0], stream, rights, expiry)
    if options.json:
        print(json.dumps({"version": 1, "token": token, "rights": rights, "expiry": expiry}), flush=True)
    else:
        print(token, flush=True)
    return 0
