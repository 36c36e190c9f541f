# SPDX-License-Identifier: Apache-2.0
"""`clawctl completion SHELL`: what makes a shell complete verbs and options, made from the verbs themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

HELP = "print what makes bash or zsh complete clawctl"
ABOUT = "The line of the example belongs into ~/.bashrc; the same with zsh into ~/.zshrc, after compinit."
EXAMPLE = "source <(clawctl completion bash)"
SHELLS = ("bash", "zsh")
HAS_OWN_OPTIONS = True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help="bash or zsh")


def run(options: argparse.Namespace) -> int:
    parsers = options.parsers()
    print(bash(parsers) if options.shell == "bash" else zsh(parsers), end="", flush=True)
    return 0


def bash(parsers: dict[str, argparse.ArgumentParser]) -> str:
    lines = "\n".join(f"\t{_pattern(verb)}) words='{' '.join(words)}' ;;" for verb, words in _words(parsers))
    return f"""\
# clawctl for bash: source <(clawctl completion bash)
_clawctl() {{
	local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} verb= words= at
	COMPREPLY=()
	for ((at = 1; at < COMP_CWORD; at++)); do
		case ${{COMP_WORDS[at]}} in
		--runtime-dir) ((at++)) ;;
		-*) ;;
		*) verb=${{COMP_WORDS[at]}}; break ;;
		esac
	done
	case $prev in
	{_valued(parsers)}) return ;; # a file, if anything
	esac
	case $verb in
{lines}
	esac
	COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -o default -F _clawctl clawctl
"""


def zsh(parsers: dict[str, argparse.ArgumentParser]) -> str:
    lines = "\n".join(f"\t({_pattern(verb)}) wanted=({' '.join(words)}) ;;" for verb, words in _words(parsers))
    return f"""\
#compdef clawctl
# clawctl for zsh, after compinit: source <(clawctl completion zsh)
_clawctl() {{
	local verb= at
	local -a wanted
	for ((at = 2; at < CURRENT; at++)); do
		case ${{words[at]}} in
		(--runtime-dir) ((at++)) ;;
		(-*) ;;
		(*) verb=${{words[at]}}; break ;;
		esac
	done
	case ${{words[CURRENT-1]}} in
	({_valued(parsers)}) _files; return ;;
	esac
	case $verb in
{lines}
	esac
	compadd -a wanted || _files
}}
compdef _clawctl clawctl
"""


def _pattern(verb: str) -> str:
    return verb or "''"


def _words(parsers: dict[str, argparse.ArgumentParser]) -> Iterator[tuple[str, list[str]]]:
    """What may stand after each verb, and where there is none yet."""
    for verb, parser in parsers.items():
        words = [] if verb else [name for name in parsers if name]
        for action in parser._actions:
            words += [flag for flag in action.option_strings if flag.startswith("--")]
            if not action.option_strings:
                words += [str(choice) for choice in action.choices or ()]
        yield verb, words + list(parser.get_default("words") or ())


def _valued(parsers: dict[str, argparse.ArgumentParser]) -> str:
    """Options whose value is the next word, as a pattern."""
    flags = {
        flag
        for parser in parsers.values()
        for action in parser._actions
        if action.option_strings and action.nargs is None
        for flag in action.option_strings
    }
    return "|".join(sorted(flags))
