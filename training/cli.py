"""What the commands that train have in common: the command line, and how a run ended."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tyro

from configs.schema import Config, LraConfig
from models import attention as attentions
from support.command import status
from support.errors import ConfigError
from training.config_validation import validate_config
from training.loop import Outcome


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """The flags that are not fields of the config; a command adds its own."""

    attention: str | None = None
    """Attention mode, or a comma-separated pattern over layers; by default the recipe's."""
    run_dir: Path | None = None
    """Folder of the run; by default runs/RECIPE-ATTENTION."""


class CommandLine[C: (Config, LraConfig), F: RunFlags](NamedTuple):
    """A command line that was understood."""

    recipe: Path
    flags: F
    """Those that are not fields of the config."""
    config: C
    """As it will run: validated, and not to be checked again."""
    run_dir: Path
    """The folder of the run."""
    asked: C
    """The config as it was asked for, before it was validated."""


def parse_command_line[C: (Config, LraConfig), F: RunFlags](
        arguments: Sequence[str], kind: type[F], load: Callable[[Path, F], C], *, prog: str, usage: str,
        own_flags: str, amend: Callable[[C, C], C] | None = None) -> CommandLine[C, F]:
    """``RECIPE [flags]``: first the flags that are not fields, then every field of the recipe's config.

    Args:
        arguments: of the process.
        kind: the flags that are not fields.
        load: gives the config of a recipe with these flags.
        prog: name of the command.
        usage: what is printed where no recipe is named.
        own_flags: what the help says of the flags that only this command has.
        amend: takes the config of the command line and that of the recipe, and returns the one that is validated.

    Raises:
        ConfigError: no recipe is named, or the config cannot be run.
        SystemExit: help was asked for; or a flag or a value is wrong, and was named.
    """
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            print(usage)
            raise SystemExit(0)
        raise ConfigError("which recipe? It comes first\n" + usage)
    recipe = Path(arguments[0])
    flags, fields = tyro.cli(kind, args=list(arguments[1:]), return_unknown_args=True, add_help=False)
    default = load(recipe, flags)
    # Fields are flags only where there are values: of each mode, its options. --model.attention may name other modes,
    # which validate_config resolves.
    model: Any = attentions.resolve(default.model)
    default = dataclasses.replace(default, model=model)
    description = (f"Train one run. Beside the flags below: --attention MODE[,MODE…] (there are "
                   f"{', '.join(attentions.modes())}), --run-dir DIR, and {own_flags}.")
    config = tyro.cli(type(default), default=default, args=fields, prog=f"{prog} {recipe}", description=description)
    asked = config if amend is None else amend(config, default)
    config = validate_config(asked)
    run_dir = flags.run_dir or Path("runs") / f"{recipe.stem}-{'-'.join(config.model.attention)}"
    return CommandLine(recipe, flags, config, run_dir, asked)


def report_outcome(run_dir: Path, outcome: Outcome) -> int:
    """Prints how a run ended; returns the exit code."""
    position = outcome.position
    status(f"{run_dir}: where {outcome.timing.wall_seconds:,.1f} s went: {outcome.timing}")
    if outcome.signal is not None:
        status(f"{run_dir}: stopped and saved at step {position.step:,}; the same command goes on from there")
        return 128 + outcome.signal
    status(f"{run_dir}: {position.step:,} steps in {position.train_seconds:,.1f} s of training "
           f"({position.wall_seconds:,.1f} s in all), val loss {outcome.val_loss:.4f}")
    return 0
