"""How help is laid out: commands in the order of learning, examples that run as they stand."""

from __future__ import annotations

from typing import Any

import click

from quota.cli.failures import PipeClosed

__all__ = ["Defaulted", "Ordered", "Sections", "examples"]


def examples(*lines: str) -> str:
    r"""Returns the epilog that shows command lines, one each; `\b` keeps click from joining them."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Ordered(click.Group):
    """A group that lists its commands in the order of their definition."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """The names, as defined."""
        return list(self.commands)


class Defaulted(Ordered):
    """A group of which one command is meant when none is named: `quota demo --json` is `quota demo fleet --json`.

    Arguments: `default`, that command's name; all others as in `click.Group`.
    """

    def __init__(self, *args: Any, default: str, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "no_args_is_help": False})
        self.default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts the default command first where an option stands, or nothing."""
        # Whoever asks for completions with nothing written yet wants to see the commands.
        unnamed = args[0].startswith("-") if args else not ctx.resilient_parsing
        if unnamed and args[:1] not in ([name] for name in ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class Sections(Ordered):
    """The top group: commands under headings.

    Fields:
        sections: heading to command names; commands in none of them are not listed.
    """

    sections: dict[str, tuple[str, ...]] = {}  # noqa: RUF012 - set once, where the commands are

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; a reader that left is told apart from a refusal, which click does not do."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise PipeClosed from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Writes one block per heading."""
        width = max(len(name) for name in self.commands)
        for heading, names in self.sections.items():
            with formatter.section(heading):
                room = formatter.width - width - 6
                formatter.write_dl(
                    [(name.ljust(width), self.commands[name].get_short_help_str(room)) for name in names]
                )
