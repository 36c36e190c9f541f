# SPDX-License-Identifier: Apache-2.0
"""What is written about the settings, made from their rows: the README's table, `clawd.conf`, its manual page, and the
text of `clawctl config explain`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from clawd import __version__
from clawd.config import AT_MOST, SETTINGS, Setting
from clawd.sources import DEFAULT_FILE, SECTIONS

UNITS = (
    "Sizes are bytes, or have k, M, G or T (a k is 1,024). Times have ns, us, ms, s, min or h; only 0 needs no unit."
    " Switches are on or off."
)


def _wrap(text: str, columns: int, first: str = "", rest: str = "") -> list[str]:
    # a flag stays in one piece
    return textwrap.wrap(text, max(20, columns), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def default(row: Setting) -> str:
    """The default as it stands in texts, which must not depend on the environment they are made in."""
    return "/run/clawd" if row.variable else row.default_text


def table() -> str:
    """The README's table."""
    lines = ["| Section | Key | Default | Allowed | Applied by | Meaning |", "|---|---|---|---|---|---|"]
    for row in SETTINGS:
        shown = f"`${row.variable}`, else `{default(row)}`" if row.variable else f"`{default(row)}`"
        lines.append(
            f"| `[{row.section}]` | `{row.key}` | {shown} | {row.allowed or 'any'} | {row.applied} | {row.help} |"
        )
    return "\n".join(lines)


def sample() -> str:
    """A `clawd.conf` that explains itself and changes nothing: every setting with its default, commented out."""
    lines = [
        f"# {DEFAULT_FILE}: settings of clawd. See clawd.conf(5), or: clawctl config explain KEY",
        "#",
        "# A value here is taken from the line's start to a # with white space before it. Take away the first # of a",
        f"# setting to change it. Files in {DEFAULT_FILE}.d/*.conf come after this one, and flags last; later wins.",
        "# Before a restart or reload: clawctl config check",
        "#",
        *_wrap(UNITS, 110, "# ", "# "),
    ]
    for section in SECTIONS:
        lines += ["", f"[{section}]"]
        for row in SETTINGS:
            if row.section == section:
                facts = "; ".join(part for part in (row.help, row.allowed, f"applied by a {row.applied}") if part)
                lines += ["", f"# {facts}", f"#{row.key} = {default(row)}"]
    return "\n".join(lines) + "\n"


def _facts(row: Setting) -> Iterator[tuple[str, str]]:
    yield "default", default(row) + (f", or ${row.variable}" if row.variable else "")
    yield "allowed", row.allowed or "any"
    for low, high in AT_MOST:
        if row.key in (low, high):
            yield "", f"{low} must be at most {high}"
    yield "set in", f"section [{row.section}] of clawd.conf, or {row.flag} {row.kind.name}"
    if row.reload:
        yield "change", "a reload applies it: clawctl reload, or SIGHUP to clawd"
    else:
        yield "change", "a restart is needed; a reload says so and goes on with the old value"


def explanation(row: Setting, columns: int = 79) -> str:
    """The text of `clawctl config explain KEY`."""
    meaning = f"{row.help[:1].upper()}{row.help[1:]}." + (f" {row.detail}" if row.detail else "")
    lines = [f"{row.key} = {row.kind.name}", ""]
    lines += [*_wrap(meaning, columns), ""]
    for name, text in _facts(row):
        lines += _wrap(text, columns, f"{name:<9}", " " * 9)
    return "\n".join(lines)


def overview(columns: int = 79) -> str:
    """Every key with its meaning."""
    width = max(len(row.key) for row in SETTINGS) + 2
    lines = []
    for row in SETTINGS:
        lines += _wrap(row.help, columns, f"{row.key:<{width}}", " " * width)
    return "\n".join(lines)


def roff(text: str) -> str:
    """`text` as it stands in a manual page."""
    # A line that starts with a dot or a quote would be a request; a plain - may become a hyphen
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def man_page() -> str:
    """clawd.conf(5), as roff."""
    lines = [
        '.\\" SPDX-License-Identifier: Apache-2.0',
        f'.TH CLAWD.CONF 5 "" "clawd {__version__}" "clawd"',
        ".nh",
        ".ad l",
        ".SH NAME",
        "clawd.conf \\- settings of clawd, the daemon that relays LLM tokens",
        ".SH SYNOPSIS",
        f".I {roff(str(DEFAULT_FILE))}",
        ".br",
        f".I {roff(f'{DEFAULT_FILE}.d/*.conf')}",
        ".SH DESCRIPTION",
        roff(
            "Each line is a section as in [stream], a setting as in keep = 60s, or a comment. A comment starts with #"
        ),
        roff("or ; at the start of a line, or with a # that has white space before it. The text is UTF-8."),
        ".PP",
        roff("The files of the directory are read after the main one, in the order of their names; flags of clawd win"),
        roff("over files. A later value takes the place of an earlier one, but one file may set a key only once."),
        roff("With --config FILE, FILE and FILE.d/*.conf are read instead."),
        ".PP",
        roff(UNITS),
        ".PP",
        roff(
            "Anything that is wrong is told with file, line, key, value and what is allowed, and nothing is applied: a"
        ),
        roff("clawd that starts exits with 2, one that runs goes on with its old settings and says so in its status."),
    ]
    for section in SECTIONS:
        lines.append(f".SH {roff(f'[{section}]').upper()}")
        for row in SETTINGS:
            if row.section == section:
                lines += [".TP", f".B {roff(row.key)}", f"{roff(row.help[:1].upper() + row.help[1:])}."]
                lines += [roff(row.detail)] if row.detail else []
                lines += [".br", roff("; ".join(f"{name}: {text}" if name else text for name, text in _facts(row)))]
    lines += [
        ".SH SEE ALSO",
        roff("clawctl config show, clawctl config check, clawctl config explain KEY, clawctl reload"),
    ]
    return "\n".join(lines) + "\n"
