"""lm-evaluation-harness gets the answers of the model, whatever else it asks."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig
from data import tokenizers
from models.gpt import GPT, resolve_config
from sampling.harness import HarnessModel, load_tasks, run_tasks
from sampling.sampler import Sampler, Sampling
from sampling.samples import sample_text
from support.errors import ConfigError, DataError

BYTES = tokenizers.load("bytes")
CONTEXT = 24
TASK = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
task: {kind}
output_type: {kind}
doc_to_text: {text}
doc_to_target: {target}
metric_list: {metrics}
"""
QUESTIONS = [{"text": "ab", "choices": ["a", "bc", "  "], "label": 0},
             {"text": "a longer text ", "choices": ["xyz", "b", "."], "label": 2}]


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def model() -> GPT:
    config = ModelConfig(layers=1, heads=2, width=16, context=CONTEXT, positions="learned", dtype="float32",
                         attention=("chunked",), initial_scale=0.3)
    with jax.numpy_rank_promotion("allow"):
        return GPT(resolve_config(config), BYTES.n_vocab, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def harness(model) -> HarnessModel:
    return HarnessModel(model, BYTES, CONTEXT, rows=2)


def log_likelihood(model: GPT, tokens: list[int], scored: int) -> float:
    """Of the last tokens, from one loss of the model."""
    padding = CONTEXT + 1 - len(tokens)
    targets_T = [-1] * (len(tokens) - 1 - scored) + tokens[-scored:] + [-1] * padding
    return -float(loss_sum(model, jnp.array([tokens[:-1] + [0] * padding]), jnp.array([targets_T])))


@nnx.jit
def loss_sum(model: GPT, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
    return model.head.loss_sum(model.forward(tokens_BT)[0], targets_BT)


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def test_a_continuation_is_scored_after_as_much_of_its_context_as_the_model_reads(model, harness):
    text = "a text that is longer than the model's context"
    asked = [(text, " and on"), ("", "ab"), ("ab ", "c"), (text, "!")]
    found = harness.loglikelihood(requests(*asked), disable_tqdm=True)
    expected = [[*(text + " and on").encode()[-CONTEXT - 1:]], [BYTES.eot_token, *b"ab"], [*b"ab c"],
                [*(text + "!").encode()[-CONTEXT - 1:]]]
    for (score, _), tokens, scored in zip(found, expected, (7, 2, 2, 1), strict=True):
        assert score == pytest.approx(log_likelihood(model, tokens, scored), rel=1e-5)
    assert found[::-1] == harness.loglikelihood(requests(*asked[::-1]), disable_tqdm=True)


def test_the_perplexity_of_a_text_is_that_of_its_losses_in_windows(model, harness):
    text = "x" * 5 + "windows of the context, disjoint, the first after end-of-text" * 2
    tokens = [BYTES.eot_token, *text.encode()]
    windows = [tokens[start:start + CONTEXT + 1] for start in range(0, len(tokens) - 1, CONTEXT)]
    *whole, last = windows
    # The last window begins as far before its own tokens as the context reaches; lm-evaluation-harness scores the rest.
    assert len(last) - 1 < CONTEXT
    found, short = harness.loglikelihood_rolling(requests((text,), ("ab",)), disable_tqdm=True)
    expected = sum(log_likelihood(model, window, CONTEXT) for window in whole)
    expected += log_likelihood(model, tokens[-CONTEXT - 1:], len(last) - 1)
    assert found == pytest.approx(expected, rel=1e-5)
    assert short == pytest.approx(log_likelihood(model, [BYTES.eot_token, *b"ab"], 2), rel=1e-5)


def test_continuations_are_those_of_a_greedy_sampler(model, harness):
    contexts, greedy = ["a", "bcd", "a context that has no room", ""], Sampling(temperature=0.0)
    sampler = Sampler(model, end_of_text=BYTES.eot_token)
    expected = [sample_text(sampler, BYTES, context.encode()[-CONTEXT + 6:], greedy, max_new_tokens=6)
                for context in contexts]
    stop = next(text[2] for text in expected if len(text) > 3)
    asked = requests(*((context, {"until": [], "max_gen_toks": 6}) for context in contexts),
                     *((context, {"until": stop, "max_gen_toks": 6}) for context in contexts))
    found = harness.generate_until(asked, disable_tqdm=True)
    assert found == [*expected, *(text.partition(stop)[0] for text in expected)]
    assert harness.generate_until(asked[::-1], disable_tqdm=True) == found[::-1]


def test_contexts_follow_end_of_text_where_training_documents_did(model):
    harness = HarnessModel(model, BYTES, CONTEXT, by_document=True, rows=2)
    found = harness.loglikelihood(requests(("ab", "c"), ("", "c")), disable_tqdm=True)
    for (score, _), text in zip(found, (b"abc", b"c"), strict=True):
        assert score == pytest.approx(log_likelihood(model, [BYTES.eot_token, *text], 1), rel=1e-5)


def write_task(folder: Path, kind: str, *, text: str, target: str, metrics: str, more: str = "") -> str:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / f"{kind}.yaml").write_text(TASK.format(kind=kind, data=data, text=text, target=target, metrics=metrics)
                                         + more)
    return kind


def test_a_task_file_is_evaluated(tmp_path, monkeypatch, model, harness):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    names = [write_task(tmp_path, "multiple_choice", text="'{{text}}'", target="'{{label}}'", metrics="[{metric: acc}]",
                        more="doc_to_choice: '{{choices}}'"),
             write_task(tmp_path, "loglikelihood_rolling", text="''", target="'{{text}}'",
                        metrics="[{metric: byte_perplexity}]")]
    tasks = load_tasks(names, tmp_path)
    assert "hellaswag" not in tasks.task_index  # reading all tasks of the package takes ten seconds
    found = run_tasks(harness, tasks, names)
    bytes_ = [question["text"].encode() for question in QUESTIONS]
    total = sum(log_likelihood(model, [BYTES.eot_token, *text], len(text)) for text in bytes_)
    assert found["results"]["loglikelihood_rolling"]["byte_perplexity,none"] == pytest.approx(
        np.exp(-total / sum(map(len, bytes_))), rel=1e-5)
    right = 0
    for question in QUESTIONS:
        scores = harness.loglikelihood(requests(*((question["text"], f" {x}") for x in question["choices"])), True)
        right += int(np.argmax([score for score, _ in scores])) == question["label"]
    assert found["results"]["multiple_choice"]["acc,none"] == right / 2
    assert run_tasks(harness, tasks, names, limit=1)["n-samples"]["multiple_choice"][
        "effective"] == 1


@pytest.mark.thorough
def test_a_group_in_the_folder_may_name_tasks_of_the_package(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    name = write_task(tmp_path, "loglikelihood_rolling", text="''", target="'{{text}}'",
                      metrics="[{metric: byte_perplexity}]")
    (tmp_path / "group.yaml").write_text(f"group: several\ntask: [{name}]\n")
    assert "hellaswag" in load_tasks(["several"], tmp_path).task_index


def test_what_cannot_be_answered_is_refused(tmp_path, harness):
    with pytest.raises(ConfigError, match=r"no task 'hellaswagg'; perhaps you meant hellaswag"):
        load_tasks(["hellaswagg"], tmp_path)
    (tmp_path / "missing.yaml").write_text(TASK.format(
        kind="multiple_choice", data=tmp_path / "none.jsonl", text="text", target="label", metrics="[{metric: acc}]"))
    with pytest.raises(DataError, match=r"task multiple_choice: its data cannot be read \(FileNotFoundError: "):
        load_tasks(["multiple_choice"], tmp_path)
    with pytest.raises(ConfigError, match="a continuation has 25 tokens; expected at most 24, the length of the model"):
        harness.loglikelihood(requests(("a", "b" * 25)), disable_tqdm=True)
    with pytest.raises(ConfigError, match="max_gen_toks is 24; expected less than 24, the length of the model"):
        harness.generate_until(requests(("a", {"max_gen_toks": 24})), disable_tqdm=True)
    with pytest.raises(ConfigError, match=r"generation by num_beams is not supported; expected until, "):
        harness.generate_until(requests(("a", {"max_gen_toks": 2, "num_beams": 3})), disable_tqdm=True)
