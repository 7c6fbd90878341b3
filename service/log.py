"""Structured logs: one event a line on stderr, facts as keys, never the text of a prompt.

An event is `noun.verb_past`. `warning` means that someone should look this week, `error` that a request was harmed.
"""

from __future__ import annotations

import logging
import sys

import structlog

from service.config import LogConfig


def configure_logging(config: LogConfig) -> None:
    """Set up structlog for the process; call once, at start."""
    is_console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if is_console
        else structlog.processors.JSONRenderer(default=str)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.UnicodeDecoder(errors="replace"),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[config.level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
