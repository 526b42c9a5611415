"""Command line and final report of the commands that train."""

import dataclasses
import itertools
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from configs.schema import RunConfig, load_recipe
from models import attention as attentions
from support.errors import ConfigError
from support.flags import checked_flags, flag_types, flags_by_field
from training.config_validation import validate_config
from training.processes import Distributed


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Flags that are not fields of the config; a command adds its own."""

    attention: str | None = None
    """Attention mode, or a comma-separated pattern over layers. None: the recipe's."""
    run_dir: Path | None = None
    """Run folder. None: runs/RECIPE-ATTENTION."""


@dataclasses.dataclass(frozen=True)
class DataFlags(RunFlags):
    """:class:`RunFlags` of a command whose data may be in a folder."""

    data_dir: str | None = None
    """Folder of the data: --data.dir."""


def run_flags(kind: type[RunFlags], *configs: type[RunConfig]) -> dict[str, str]:
    """The flag of each field, for :func:`support.flags.with_flags`: the command's own, and those of its configs."""
    fields = [flags_by_field(_Fields(config(), Distributed())) for config in configs]
    return dict(ChainMap({"model.attention": "--attention"}, flags_by_field(kind), *fields))


def load_config[C: RunConfig](kind: type[C], recipe: Path, flags: DataFlags, **given: Any) -> C:
    """The config of a recipe with these flags; ``given`` as in :func:`configs.schema.load_recipe`."""
    config: Any = load_recipe(recipe, flags.attention, kind, **given)
    if flags.data_dir is None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dir=flags.data_dir))


class CommandLine[C: RunConfig, F: RunFlags](NamedTuple):
    """A parsed command line."""

    recipe: Path
    flags: F
    """Flags that are not fields of the config."""
    config: C
    """The validated config."""
    run_dir: Path
    """Run folder."""
    asked: C
    """The config before validation."""
    distributed: Distributed
    """Flags of the processes."""


@dataclasses.dataclass(frozen=True)
class _Fields[C: RunConfig]:
    """Flags with a group: the fields of the config and those of the processes."""

    config: Annotated[C, tyro.conf.arg(name="")]
    distributed: Distributed


def parse_command_line[C: RunConfig, F: RunFlags](
        arguments: Sequence[str], kind: type[F], load: Callable[[Path, F], C], *, prog: str, usage: str,
        own_flags: str, amend: Callable[[C, C], C] | None = None,
        join: Callable[[Distributed], None] | None = None, explain: Callable[[C, F], str] = lambda config, flags: "",
        ) -> CommandLine[C, F]:
    """Parses ``RECIPE [flags]``: first the flags that are not fields, then every field of the recipe's config.

    Args:
        arguments: command-line arguments.
        kind: the flags that are not fields.
        load: returns the config of a recipe with these flags.
        prog: name of the command.
        usage: printed if no recipe is given.
        own_flags: description of the flags of this command alone, for its help.
        amend: takes the config of the command line and that of the recipe, and returns the one to validate.
        join: called before the config is validated, which asks jax for its devices.
        explain: text to append to the message about a config that cannot be run, from it and the flags.

    Raises:
        ConfigError: no recipe is given, or the config cannot be run.
        SystemExit: help was printed, or a flag or value is invalid.
    """
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            print(usage)
            raise SystemExit(0)
        raise ConfigError("expected a recipe as the first argument\n" + usage)
    recipe = Path(arguments[0])
    own = flag_types(kind)
    words = ["None" if word.lower() == "none" and before in own else word
             for before, word in itertools.pairwise(arguments)]
    flags, fields = tyro.cli(kind, args=words, return_unknown_args=True, add_help=False)
    default = load(recipe, flags)
    # tyro makes flags of existing values only, so fill in the options of each mode. --model.attention may name other
    # modes, which validate_config resolves.
    model: Any = attentions.resolve(default.model)  # pyright: ignore[reportArgumentType]
    default = dataclasses.replace(default, model=model)
    for flag in fields:
        mode = flag.removeprefix("--model.modes.").partition(".")[0]
        if flag.startswith("--model.modes.") and mode in attentions.modes() and mode not in model.modes:
            raise ConfigError(f"{flag} is an option of attention mode {mode}; this run has "
                              f"{', '.join(model.modes)}: give --attention {mode}")
    description = (
        "Train one run. Flags of the command, besides the fields of the config below:\n"
        f"--attention MODE[,MODE…]: one or more of {', '.join(attentions.modes())}. The options below are those of "
        "the modes given here.\n"
        f"--run-dir DIR: run folder. Default: runs/{recipe.stem}-ATTENTION.\n{own_flags}\n"
        "Switches take True and False too: --data.no-verify is --data.verify False.")
    groups = _Fields(default, Distributed())
    fields = checked_flags(fields, groups, others=own)
    parsed = tyro.cli(_Fields[type(default)], default=groups, args=fields, prog=f"{prog} {recipe}",
                      description=description)
    asked = parsed.config if amend is None else amend(parsed.config, default)
    if join is not None:
        join(parsed.distributed)
    try:
        config = validate_config(asked)
    except ConfigError as error:
        raise ConfigError("; ".join(filter(None, (str(error), explain(asked, flags))))) from error
    run_dir = flags.run_dir or Path("runs") / f"{recipe.stem}-{'-'.join(config.model.attention)}"
    return CommandLine(recipe, flags, config, run_dir, asked, parsed.distributed)
