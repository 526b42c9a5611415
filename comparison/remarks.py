"""Warnings about a comparison: invalid metrics, and differences between the runs."""

import json
from collections.abc import Callable, Sequence

from comparison.runs import Run, group, group_by
from comparison.wording import few, listed


def remarks(runs: Sequence[Run]) -> list[str]:
    """One sentence per warning."""
    return [*(note for run in runs for note in _lines(run)), *_same_seeds(runs), *short_seeds(runs),
            *_differences(runs)]


def short_seeds(runs: Sequence[Run]) -> list[str]:
    """Runs that ended before the other seeds of their set-up."""
    return [f"Means over the seeds of {setup.label} leave out runs that are more than a tenth shorter than the "
            f"longest: {listed([f'{run.name} (to step {run.end("step"):,.0f})' for run in short])}."
            for setup in group(runs) for lasting in [{run.name for run in setup.lasting}]
            if (short := [run for run in setup.runs if run.name not in lasting])]


def _same_seeds(runs: Sequence[Run]) -> list[str]:
    """Runs with the same config and seed."""
    return [f"{' and '.join(run.name for run in alike)} have the same config and seed: they are not averaged."
            for alike in group_by(runs, lambda run: (run.setup, run.seed)).values() if len(alike) > 1]


def _lines(run: Run) -> list[str]:
    """Warnings about the metrics of a run."""
    notes = []
    if not run.has_curve:
        notes.append(f"{run.name} is not compared: it has an evaluation, but no training log.")
    elif not run.val:
        notes.append(f"{run.name} is not compared: it has no val loss. The plot shows its train loss.")
    for split, curve in (("train", run.train), ("val", run.val)):
        if curve.not_finite:
            notes.append(f"{run.name}: the {split} loss is not finite from step {curve.first_not_finite:,.0f} on "
                         f"({curve.not_finite:,} of {curve.lines:,} points).")
        if curve.repeated:
            notes.append(f"{run.name}: {curve.repeated:,} {split} line(s) repeat the step of a later line, which is "
                         "used.")
        if curve.turned_back:
            notes.append(f"{run.name}: the steps of the {split} lines decrease {curve.turned_back:,} time(s); the "
                         "lines are sorted.")
        if curve.without_step:
            notes.append(f"{run.name}: {curve.without_step:,} {split} line(s) have no step and are ignored.")
    return notes


def _differences(runs: Sequence[Run]) -> list[str]:
    notes, trained = [], [run for run in runs if run.has_curve]
    if tokenizers_differ(runs):
        notes.append(f"Different tokenizers ({_values(runs, tokenizer)}): losses per token cannot be compared; bits "
                     "per byte can, on the same text.")
    if data_differs(trained):
        notes.append(f"Different data ({_values(trained, corpus)}): their losses cannot be compared.")
    notes += [f"Different {what} ({text}): their times cannot be compared." for what, value_of in HARDWARE
              if (text := _values(trained, value_of))]
    if len(trained) > 1 and (shared := [run.name for run in trained if run.environment.get("shared_device")]):
        notes.append(f"Trained on a device that other runs used too: {few(shared)}. Their times cannot be compared.")
    for what, value_of in (("compute dtypes", dtype), ("versions of the code", commit)):
        if text := _values(runs, value_of):
            notes.append(f"Different {what} ({text}).")
    packages = dict.fromkeys(name for run in runs for name in run.environment.get("versions") or {})
    for name in packages:
        if text := _values(runs, lambda run, name=name: (run.environment.get("versions") or {}).get(name)):
            notes.append(f"Different versions of {name} ({text}).")
    return notes


def tokenizer(run: Run) -> str | None:
    data = run.config.get("data", {})
    return run.environment.get("tokenizer") or data.get("tokenizer") or ("task-specific" if "task" in data else None)


def corpus(run: Run) -> str | None:
    """The checksum of the run's tokens, or else their source."""
    checksum = run.environment.get("corpus_checksum")
    return run.config.get("data", {}).get("source") if checksum is None else f"checksum {str(checksum)[:12]}"


def dtype(run: Run) -> str | None:
    return run.environment.get("dtype") or run.config["model"].get("dtype")


def devices(run: Run) -> str:
    found = run.environment.get("devices")
    count = run.environment.get("device_count", 1)
    return "unknown" if found is None else ", ".join(map(str, found)) + (f" × {count}" if count != 1 else "")


def processor(run: Run) -> str | None:
    """The name of the CPU, of a run that trained on it; None if unknown."""
    return run.environment.get("processor") if run.environment.get("devices") == ["cpu"] else None


def cores(run: Run) -> str | None:
    """The number of the CPU's cores that a run had which trained on it; None if unknown."""
    found = run.environment.get("cores") if run.environment.get("devices") == ["cpu"] else None
    return None if found is None else str(found)


HARDWARE = (("devices", devices), ("CPUs", processor), ("numbers of CPU cores", cores))
"""What must be equal for times to be compared, and its value for a run."""


def commit(run: Run) -> str | None:
    """The abbreviated commit of the code."""
    found = run.environment.get("commit")
    return None if found is None else found[:12] + ("-dirty" if found.endswith("-dirty") else "")


def tokenizers_differ(runs: Sequence[Run]) -> bool:
    return len({tokenizer(run) for run in runs}) > 1


def data_differs(runs: Sequence[Run]) -> bool:
    """Whether the runs read different text. Checksums of different tokenizers cannot be compared."""
    if tokenizers_differ(runs) or any(run.environment.get("corpus_checksum") is None for run in runs):
        return len({json.dumps(_text(run)) for run in runs}) > 1
    return len({corpus(run) for run in runs}) > 1


def _text(run: Run) -> list:
    data = run.config.get("data", {})
    return [data.get("source"), data.get("mixture")]


def devices_differ(runs: Sequence[Run]) -> bool:
    """Whether runs had other devices, CPUs or numbers of cores, as far as these are known."""
    return any(_values(runs, value_of) for _, value_of in HARDWARE)


def times_compare(runs: Sequence[Run]) -> bool:
    """Whether all runs had a device of the same kind to themselves."""
    return not devices_differ(runs) and not any(run.environment.get("shared_device") for run in runs)


def _values(runs: Sequence[Run], value_of: Callable[[Run], str | None]) -> str:
    """The runs by value; empty if all known values are the same."""
    known = group_by([run for run in runs if value_of(run) is not None], value_of)
    return "; ".join(f"{value}: {few([run.name for run in alike])}" for value, alike in known.items()
                     if len(known) > 1)
