"""The `looseleaf` command: serve, chat, check, simulate. Imports stand inside the functions, so that `--help` costs nothing.

Exit codes: 0 after a clean end, 1 when a running service ended by a fault, 2 when it could not start (one line on stderr says why).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from service.config import FLAG_ALIASES, LoadedConfig, load_config, option_paths
from service.errors import StartupError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(is_simulation="simulate" in arguments[:1]).parse_args(arguments)
    try:
        if options.command == "chat":
            from service.terminal import chat

            return chat(options.url, api_key=options.api_key, system=options.system, max_tokens=options.max_tokens)
        if options.command == "simulate":
            from service.simulate.command import run

            return run(options)
        loaded = _load(options)
        if options.command == "check":
            from service.check import check

            return check(loaded)
        from service.app import serve

        return serve(loaded)
    except StartupError as error:
        print(f"looseleaf: {error.message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _load(options: argparse.Namespace) -> LoadedConfig:
    paths = {path for path, _ in option_paths()}
    given = {path: value for path, value in vars(options).items() if path in paths and value is not None}
    return load_config(file=options.config, environment=os.environ, flags=given)


def _parser(*, is_simulation: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="looseleaf", description="Serve a language model from a paged KV cache.")
    parser.add_argument("--version", action="version", version=f"looseleaf {version('looseleaf')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="serve | chat | check | simulate")

    serve = commands.add_parser("serve", help="serve a model: chat page, WebSocket, OpenAI API, RPC")
    check = commands.add_parser(
        "check", help="print the effective configuration and why each backend can or cannot run"
    )
    for command in (serve, check):
        command.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with the options as sections")
        _add_options(command)

    chat = commands.add_parser("chat", help="talk to a running server from the terminal")
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="where the server is (default: %(default)s)")
    chat.add_argument("--api-key", default=None, help="the server's key, if it asks for one")
    chat.add_argument("--system", default=None, help="a system prompt")
    chat.add_argument(
        "--max-tokens", type=int, default=None, help="the longest answer (default: the rest of the context)"
    )

    simulate = commands.add_parser(
        "simulate", help="replay a trace of request lengths through the scheduler and allocator"
    )
    if is_simulation:  # its options need its imports
        from service.simulate.command import add_arguments

        add_arguments(simulate)
    return parser


def _add_options(command: argparse.ArgumentParser) -> None:
    """Add every option of the tree under its dotted name, and its short flag where it has one."""
    short = {path: flag for flag, path in FLAG_ALIASES.items()}
    for path, _ in option_paths():
        dotted = "--" + path.replace("_", "-")
        flags = [short[path], dotted] if path in short else [dotted]
        command.add_argument(*flags, dest=path, default=None, metavar="VALUE", help=f"option {path}")


if __name__ == "__main__":
    sys.exit(main())
