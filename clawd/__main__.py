# SPDX-License-Identifier: Apache-2.0
"""The `clawd` command: flags and files to a Config, the daemon, errors to exit codes. 0 done, 1 failed, 2 usage."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from clawd import log
from clawd.errors import ClawdError, ConfigError, ConfigErrors
from clawd.sources import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        sources = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        configuration = sources.load()
    except ConfigErrors as errors:
        print(*(f"clawd: {error}" for error in errors.errors), sep="\n", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"clawd: {error} (clawd --help shows every setting)", file=sys.stderr)
        return 2
    log.start()
    try:
        from clawd.server.loop import serve

        if configuration.config.tune or configuration.config.boost:
            from clawd.kernel.boot import take_slice

            take_slice(configuration.config.profile)
        return serve(configuration, sources)
    except ModuleNotFoundError as error:
        if (error.name or "clawd").partition(".")[0] == "clawd":
            raise
        print(f"clawd: the module {error.name} is missing; run: pip install 'clawd[daemon]'", file=sys.stderr)
        return 1
    except ClawdError as error:
        print(f"clawd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    sys.exit(main())
