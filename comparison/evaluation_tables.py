"""The tables of an evaluation, as eval.py prints them: title and rows, which map headings to cells."""

from collections.abc import Mapping, Sequence
from typing import Any

from training.task_evaluation import By


def tables(entries: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, str]]]]:
    """The tables of evaluations of corpora at contexts."""
    several = len({entry["corpus"] for entry in entries}) > 1
    found: list[tuple[str, list[dict[str, str]]]] = [("", [])]
    for entry in entries:
        perplexity = entry["perplexity"]
        found[0][1].append(
            ({"corpus": entry["corpus"]} if several else {})
            | {"context": f"{entry['context']:,}", "windows": f"{entry['windows']:,}",
               "tokens": f"{entry['tokens']:,}", "loss": with_error(entry),
               "perplexity": "–" if perplexity is None else f"{perplexity:,.3f}"}
            | {heading: f"{entry[name]:.4f}" for name, heading in (
                ("bits_per_byte", "bits per byte"), ("bits_per_dimension", "bits per dimension"),
                ("accuracy", "accuracy")) if name in entry})
    for entry in entries:
        of = f"context {entry['context']:,}" + (f", {entry['corpus']}" if several else "")
        found.append((f"by tokens of context seen, {of}", [
            {"seen": f"{p['first']:,}" if p["first"] == p["last"] else f"{p['first']:,} to {p['last']:,}",
             "tokens": f"{p['tokens']:,}", "loss": with_error(p)}
            | ({"accuracy": f"{p['accuracy']:.4f}"} if "accuracy" in p else {}) for p in entry["positions"]]))
        if entry["short_context"]:
            found.append((f"gain over a short window, {of}", [
                {"window": f"{s['least']:,} to {s['window']:,}", "tokens": f"{s['tokens']:,}",
                 "loss in window": f"{s['loss_window']:.4f}", "loss in full": with_error(s),
                 "gain": f"{s['gain']:.4f}"}
                | ({"accuracy in window": f"{s['accuracy_window']:.4f}", "accuracy in full": f"{s['accuracy']:.4f}"}
                   if "accuracy" in s else {}) for s in entry["short_context"]]))
        for partition in entry.get("token_classes", ()):
            found.append((f"{partition['partition']}, {of}", [
                {"class": c["class"], "tokens": f"{c['tokens']:,}", "share": f"{c['share']:.2%}", "loss": with_error(c)}
                for c in partition["classes"]]))
    return found


def task_tables(entries: Sequence[dict[str, Any]], by: By | None) -> list[tuple[str, list[dict[str, str]]]]:
    """The tables of an evaluation of a synthetic task; with ``by`` those of depth or distance too."""
    found = [("", [{"length": f"{entry['length']:,}", "documents": f"{entry['documents']:,}",
                    "tokens": f"{entry['tokens']:,}", "accuracy": f"{entry['accuracy']:.4f}",
                    "loss": loss_text(entry["loss"]), "accuracy at the last": f"{entry['accuracy_last']:.4f}",
                    "loss at the last": loss_text(entry["loss_last"])} for entry in entries])]
    heading = {"depth": "depth", "distance": "tokens since the answer", None: ""}[by]
    unit = "%" if by == "depth" else ""
    return found + [(f"by {by}, length {entry['length']:,}", [
        {heading: f"{p['first']:,}" if p["first"] == p["last"] else f"{p['first']:,} to {p['last']:,}{unit}",
         "tokens": f"{p['tokens']:,}", "accuracy": f"{p['accuracy']:.4f}", "loss": loss_text(p["loss"])}
        for p in entry[by]]) for entry in entries if by is not None and by in entry]


def loss_text(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def with_error(figures: dict[str, Any]) -> str:
    """A loss with its standard error, if known."""
    error = figures["standard_error"]
    return f"{figures['loss']:.4f}" + ("" if error is None else f" ± {error:.4f}")


def harness_rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
    """A row for each task and metric of lm-evaluation-harness, whose keys are ``METRIC,FILTER``."""
    found = []
    for task, figures in results.items():
        for key, value in figures.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = figures.get(f"{metric}_stderr,{kind}")
            found.append({"task": task, "metric": metric if kind == "none" else f"{metric} ({kind})",
                          "value": f"{value:.4g}",
                          "standard error": f"{error:.2g}" if isinstance(error, float) else "–"})
    return found
