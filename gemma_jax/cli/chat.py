"""`gemma-jax chat`: a conversation in the terminal, or one user message a line from a pipe."""

import argparse
import sys
from collections.abc import Sequence

from gemma_jax.chat import ChatSession
from gemma_jax.cli import EXIT_FAILED, EXIT_OK, options
from gemma_jax.errors import RequestError

HELP = """\
/reset   forget the conversation (the system message stays)
/help    show this
/exit    leave; Ctrl-D does the same
Ctrl-C   stop the answer that is being written"""

COMMANDS = ("/reset", "/help", "/exit")
PROMPT = "> "


def _parser() -> argparse.ArgumentParser:
    parser = options.parser("chat", "Chat with a Gemma 4 model.")
    parser.epilog = "In the chat, /help lists what can be typed. A pipe is read line by line."
    parser.add_argument("--system", metavar="TEXT", help="system message")
    options.add_model_flags(parser)
    options.add_sampling_flags(parser, max_tokens=None)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sub-command and return its exit code."""
    args = _parser().parse_args(argv)
    fields = options.sampling_settings(args)
    with options.load_model(args) as llm:
        params = llm.generation_defaults.sampling_params(**fields)
        if args.max_tokens is None:
            params = params.replace(max_tokens=None)
        return run(ChatSession(llm, system=args.system, sampling_params=params))


def run(session: ChatSession) -> int:
    """Answer lines of stdin until they end; return the exit code.

    On a terminal a failed turn is only shown; from a pipe it makes the exit code 1.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        _enable_line_editing()
        print("Type a message; /help lists the commands.", file=sys.stderr)
    failed = False
    while (line := _read_line(interactive)) is not None:
        text = line.strip()
        if text in COMMANDS:
            if text == "/exit":
                break
            _run_command(text, session)
        elif text.startswith("/"):
            print(f"unknown command {text.split()[0]}; /help lists them", file=sys.stderr)
            failed = True
        elif text:
            failed |= not _answer(session, text)
    return EXIT_FAILED if failed and not interactive else EXIT_OK


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  (importing it gives input() history and editing)
    except ImportError:
        pass


def _read_line(interactive: bool) -> str | None:
    """Return the next line, "" when Ctrl-C dropped one, or None at the end of the input."""
    try:
        return input(PROMPT if interactive else "")
    except EOFError:
        if interactive:
            print()
        return None
    except KeyboardInterrupt:
        if not interactive:
            raise
        print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
        return ""


def _run_command(command: str, session: ChatSession) -> None:
    if command == "/help":
        print(HELP, file=sys.stderr)
    else:
        session.reset()
        print("(the conversation starts anew)", file=sys.stderr)


def _answer(session: ChatSession, text: str) -> bool:
    """Print the answer as it comes; return whether it could be made."""
    try:
        for piece in session.stream(text):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
        return True
    except RequestError as error:
        print(f"gemma-jax: error: {error}; /reset starts anew", file=sys.stderr)
        return False
    print(flush=True)
    return True
