# SPDX-License-Identifier: Apache-2.0
"""The command of `scripts/demo`: flags, files and signals to the job, its account to people and programs."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

from clawd import __version__
from clawd.ctl import render
from clawd.ctl.demo import account, job
from clawd.ctl.demo.job import Source
from clawd.ctl.demo.screen import Screen
from clawd.errors import ClawdError, ConfigError, HostError

TEXTS = ("english", "chinese", "figures")
RATE = 40.0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ABOUT = """\
Start a private clawd, let producer processes write tokens into it, read them
back as they arrive, and account for every one. Nothing is left behind. Without
--text three producers run at once: English prose, Chinese prose and figures.
Tokens are 1 to 7 bytes, so characters are cut in two, as a real engine does.
"""
EXAMPLES = """\
examples:
  scripts/demo                   three streams live, then the table
  scripts/demo --rate 5          slowly, one token after the other
  scripts/demo --json | jq .added_us
  scripts/demo --text F --output G --rate 0 --json && cmp F G

exit codes: 0 all arrived, 1 not all of it or failed, 2 wrong usage
"""


class Interrupted(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"demo: {message} (scripts/demo --help shows the flags)", file=sys.stderr)
        raise SystemExit(2)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not (math.isfinite(rate) and rate >= 0):
        raise argparse.ArgumentTypeError(f'"{text}" is not a rate; write tokens a second, 0 for as fast as possible')
    return rate


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="scripts/demo",
        usage="scripts/demo [--text FILE] [--output FILE] [--rate N] [--seed N] [--json]",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=20, width=79),
        allow_abbrev=False,
    )
    arguments(parser)
    parser.add_argument("--version", action="version", version=f"clawd {__version__}", help="show the version")
    return parser.parse_args(words)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, metavar="FILE", help="stream this file instead, whatever is in it")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write what the client got, byte for byte; three streams in a row",
    )
    parser.add_argument(
        "--rate", type=_rate, default=RATE, metavar="N",
        help=f"tokens a second of each stream, 0 = as fast as possible (default {RATE:.0f})",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, metavar="N", help="cut the text as in the run that showed this seed")
    parser.add_argument(
        "--json", action="store_true",
        help="last line of stdout is one object; live text and table go to stderr, if that is a terminal",
    )  # fmt: skip


@contextlib.contextmanager
def _open_output(path: Path | None) -> Iterator[BinaryIO | None]:
    """The file to write, taken away again if it is ours and the job fails."""
    if path is None:
        yield None
        return
    is_new = not path.exists()
    output = path.open("wb")
    try:
        yield output
        try:
            output.close()
        except OSError as error:
            raise HostError(f'cannot write "{path}": {error.strerror}') from error
    except BaseException:
        with contextlib.suppress(OSError):  # what it could not write is why we are here
            output.close()
        if is_new:
            path.unlink(missing_ok=True)
        raise


def _open_sources(options: argparse.Namespace, stack: contextlib.ExitStack) -> list[Source]:
    """What to stream. The one given file is written as it comes; several streams wait for each other."""
    if options.text:
        file = stack.enter_context(options.text.open("rb"))
        if options.output and options.output.exists() and options.output.samefile(options.text):
            raise ConfigError(f'--output "{options.output}" is the file of --text', "write to another")
        return [Source("text", file, stack.enter_context(_open_output(options.output)))]
    output = stack.enter_context(_open_output(options.output))
    sources = []
    for name in TEXTS:
        file = stack.enter_context((Path(__file__).parent / f"{name}.txt").open("rb"))
        sources.append(Source(name, file, io.BytesIO() if output else None))
    if output:
        stack.callback(lambda: output.writelines(source.output.getvalue() for source in sources))  # type: ignore[union-attr]
    return sources


def demo(options: argparse.Namespace) -> bool:
    """Do it and show it. Returns whether all arrived."""
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    out: TextIO | None = sys.stdout
    if options.json:
        out = sys.stderr if sys.stderr.isatty() else None
    screen = None
    with contextlib.ExitStack() as stack:
        sources = _open_sources(options, stack)
        if out:
            pace = f"{options.rate:g} tokens/s each" if options.rate else "as fast as possible"
            count = "one producer" if len(sources) == 1 else f"{len(sources)} producers"
            print(f"clawd {__version__}: {count}, {pace}, seed {seed}\n", file=out, flush=True)
            screen = Screen(out, [source.name for source in sources], render.width(), _lines())
        accounts = job.run(sources, seed, options.rate, screen)
    if out and screen:
        screen.finish()
        print("" if out.isatty() else "\n", account.show(accounts), sep="", file=out, flush=True)
    summary: dict[str, Any] = account.summary(accounts)
    if options.json:
        print(json.dumps(summary), flush=True)
    return bool(summary["intact"])


def _lines() -> int:
    return shutil.get_terminal_size((80, 24)).lines


def _interrupt(number: int, _frame: object) -> None:
    for each in STOPS:
        signal.signal(each, signal.SIG_IGN)  # once is enough, and what is being tidied up gets tidied up
    raise Interrupted(number)


def main(words: Sequence[str] | None = None) -> int:
    return run(parse(words))


def run(options: argparse.Namespace) -> int:
    """The whole command, with its exit code."""
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # not where nohup says otherwise
            signal.signal(number, _interrupt)
    try:
        return 0 if demo(options) else 1
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except BrokenPipeError:
        # Whoever read our output has enough; Python would complain at exit otherwise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ConfigError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f'cannot use "{error.filename}": ' if error.filename else ""
        print(f"demo: {where}{error.strerror or error}", file=sys.stderr)
        return 1
    except ClawdError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
