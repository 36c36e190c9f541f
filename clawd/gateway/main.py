# SPDX-License-Identifier: Apache-2.0
"""The `clawd-gateway` command: flags and files to a Config, errors to exit codes. 0 done, 1 failed, 2 usage."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from clawd import log
from clawd.errors import ClawdError, ConfigError, ConfigErrors
from clawd.gateway.serving import Gateway
from clawd.sources import make_parser, sources_of


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        parser = make_parser("clawd-gateway")
        parser.add_argument("--metrics-only", action="store_true", help="serve /metrics and no streams")
        given = vars(parser.parse_args(sys.argv[1:] if arguments is None else arguments))
        gateway = Gateway(sources_of(given).load().config, metrics_only=given["metrics_only"])
    except ConfigErrors as errors:
        print(*(f"clawd-gateway: {error}" for error in errors.errors), sep="\n", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"clawd-gateway: {error} (clawd-gateway --help shows every setting)", file=sys.stderr)
        return 2
    log.start()
    try:
        asyncio.run(gateway.run())
    except ClawdError as error:
        print(f"clawd-gateway: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0
