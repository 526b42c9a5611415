"""Each JSON file of a run, a corpus, a study and a state, with every value replaced by others: it is read, or refused
with an error that names the file."""

import contextlib
import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from comparison import compare
from comparison.page import payload
from comparison.reading import Reader
from comparison.study import read_study
from comparison.table import as_csv
from configs.schema import Config, ModelConfig
from data import journal
from data.documents import Document, write_corpus
from data.parts import PartName, PartWriter, find_parts
from data.prepare import verify_files
from data.sources.images import ImageFormat
from data.sources.source import Block
from data.texts import TextChunk, TextChunks
from data.token_files import TokenFiles, TokenFilesWriter, Vocabulary
from data.tokenizers import Encoded
from lra import accuracy
from models import attention as attentions
from support import json_files
from support.errors import ConfigError, JsonError, LineargptError
from tests.comparison.run_folders import write_run, write_windows
from tests.edited import contents, edited
from tests.lra import accuracy_test
from training import accounting, checkpoint, loading
from training.environment import add_to_environment
from training.position import Position, is_finished
from training.position import read_position as position_of
from training.run_files import load_config, read_environment, write_run_files

OTHERS = (None, True, -1, math.nan, 10**30, "../\ud800\x1b[31m", [], {"x": 10**30}, ...)
"""In place of each value; the last one: it is missing."""
VOCABULARY = Vocabulary("bytes", None, 257, 256)


def changed(values: Any) -> Iterator[tuple[str, Any]]:
    """JSON values with one of them changed, and where; of lists, only the first element is."""
    def places(value: Any, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        inside = value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ()
        for name in inside:
            yield (*at, name)
            yield from places(value[name], (*at, name))

    for number, (*path, last) in enumerate(places(values, ())):
        for other in OTHERS[number % 3::3]:  # all of them take minutes
            made = copy.deepcopy(values)
            parent = made
            for name in path:
                parent = parent[name]
            if other is ...:
                del parent[last]
            else:
                parent[last] = other
            yield f"{'.'.join(map(str, (*path, last)))} is {other!r}", made


class Kind(NamedTuple):
    """A JSON file."""

    make: Callable[[Path], Path]
    """Writes it, with what belongs to it, into a folder."""
    read: Callable[[Path], object]
    """Reads it, and uses what it says."""


def compared_run(folder: Path) -> Path:
    path = write_run(folder / "run", steps=3, every=1, step_bytes=5, peak_bytes=7, devices=["cpu"], tokenizer="bytes",
                     versions={"jax": "1"}, commit="a", device_count=1, corpus_checksum="a", dtype="float32")
    return write_windows(path, [1.0, 2.0], step=3)


def draw(file: Path) -> None:
    """What compare.py does, and what the other commands do first."""
    with contextlib.suppress(LineargptError, ConfigError):
        load_config(file.parent)
    other = file.parent.with_name("other")
    if not other.exists():
        write_run(other, "chunked", steps=3, every=1)
    found = Reader([file.parent, other]).read()
    if found.damaged:
        raise found.damaged[0]
    payload(compared := compare(found.runs))
    compared.as_json()
    as_csv(compared.rows, compared.columns).encode()
    compared.default_title.encode()


def environment(folder: Path) -> Path:
    path = compared_run(folder) / "environment.json"
    values = contents(path) | {"vocabulary_size": 257, "mesh": {"data": 1}, "peak_flops": None, "command": ["train.py"],
                               "image": {"shape": [2, 2, 1], "levels": 256}, "init_from": {"run": "a", "step": 1},
                               "published_weights": {"source": "a", "dtypes": {"w": "float32"}, "tokens": {"eos": 1}}}
    path.write_text(json.dumps(values))
    return path


def use_environment(file: Path) -> None:
    draw(file)
    loading.image_format(read_environment(file.parent))


def corpus(folder: Path) -> Path:
    documents = [Document(np.arange(4, dtype=np.int32), np.ones(4, np.uint8))]
    write_corpus(folder / "tokens", {"train": documents, "val": documents}, source="numbers", skipped={"empty": 0},
                 replaced=0)
    return folder / "tokens" / "meta.json"


def images(folder: Path) -> Path:
    image = ImageFormat(2, 2, 1, 256)
    documents = [Document(np.arange(4, dtype=np.int32))]
    write_corpus(folder / "tokens", {"train": documents, "val": documents}, source="squares",
                 vocabulary=image.vocabulary, unit="dimension", image=image.as_json(), pixel_histogram={"val": 1.5})
    return folder / "tokens" / "meta.json"


def read_corpus(file: Path) -> None:
    for files in (TokenFiles.open(file.parent), TokenFiles.open(str(file.parent))):
        if files.image is not None:
            ImageFormat.of(files.image)
        for split in files.meta["splits"]:
            files.text_bytes(split)
            files.scored(split, 0, files.read(split, 0, files.tokens(split)))
    verify_files(file.parent)


def part(folder: Path) -> Path:
    place = PartName(1, 1).folder(folder / "tokens")
    place.mkdir(parents=True)
    writer = PartWriter(place, VOCABULARY)
    encoded = Encoded(np.arange(4, dtype=np.uint16), np.array([4]), np.array([3]), np.array([True]), bytes(32), 0, {})
    writer.write(encoded, Block(TextChunks([TextChunk(b"abc", False, True)]), (1, 0)))
    writer.finish(PartName(1, 1), {"source": "a", "tokenizer": "bytes", "state": "s"},
                  {"source": "a", "source_version": None, "licence": None, "split": None, "column": None,
                   "val_documents": None, "val_share": 0.5})
    return place / "part.json"


def partial(folder: Path) -> Path:
    """The journal of an unfinished preparation."""
    with journal.UnfinishedFolder(folder / "tokens", {"source": "a"}) as unfinished:
        writer = unfinished.open_writer(TokenFilesWriter, VOCABULARY)
        for split in ("train", "val"):
            writer.write(split, np.arange(4), text_bytes=4, documents=1)
        unfinished.state = {"start": [1, 0], "revision": None, "checksum": "00", "replaced": 0, "skipped": {"empty": 0},
                            "splits": writer.state()}
        unfinished.commit_when_due(journal.COMMIT_BYTES)
    return unfinished.path / "journal.json"


def read_partial(file: Path) -> None:
    directory = file.parent.with_name("tokens")
    for name in ("train-00000.bin", "val-00000.bin"):
        file.with_name(name).write_bytes(bytes(8))  # as open_writer deletes what it does not know
    unfinished = journal.UnfinishedFolder(directory, {"source": "a"})
    with unfinished.open_writer(TokenFilesWriter, VOCABULARY) as writer:
        writer.documents("val")


def study(folder: Path) -> Path:
    path = folder / "study.json"
    path.write_text(json.dumps({"format": 1, "study": "studies/taylor.py", "quick": False,
                                "runs": [{"name": "a", "hash": "0"}]}))
    return path


def position(folder: Path) -> Path:
    path = folder / "5" / checkpoint.JSON_ITEM / checkpoint.JSON_FILE
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(vars(Position(5, 5, 1.5, 2.5))))
    return path


def read_position(file: Path) -> None:
    items = checkpoint.Checkpoints(file.parents[2]).load(5, {checkpoint.JSON_ITEM: None})
    is_finished(Config(), position_of(items[checkpoint.JSON_ITEM], file.parents[1]))


def loss(folder: Path) -> Path:
    path = folder / "5" / checkpoint.LOSS
    path.parent.mkdir()
    path.write_text('{"loss": 2.5}')
    return path


def timing(folder: Path) -> Path:
    found = accounting.Timing(folder / "timing.json", 0.0)
    found.write()
    return folder / "timing.json"


def published(folder: Path) -> Path:
    return accuracy_test.write_run(folder / "run", last=0.5) / "test.json"


def sampled_run(folder: Path) -> Path:
    """As of train.py, without checkpoints."""
    model = attentions.resolve(ModelConfig())
    write_run_files(folder, Config(model=model), {"vocabulary_size": 257})
    return folder / "config.json"


KINDS = {
    "config.json": Kind(lambda folder: compared_run(folder) / "config.json", draw),
    "environment.json": Kind(environment, use_environment),
    "evaluation.json": Kind(lambda folder: compared_run(folder) / "evaluation.json", draw),
    "test.json": Kind(published, lambda file: accuracy.load(file.parent)),
    "timing.json": Kind(timing, lambda file: str(accounting.Timing.of_run(file.parent, 0.0))),
    "data.json": Kind(position, read_position),
    "loss.json": Kind(loss, lambda file: checkpoint.Checkpoints(file.parents[1]).best()),
    "meta.json": Kind(corpus, read_corpus),
    "meta.json of images": Kind(images, read_corpus),
    "part.json": Kind(part, lambda file: find_parts(file.parents[1].with_suffix(""))[0].vocabulary),
    "journal.json": Kind(partial, read_partial),
    "study.json": Kind(study, lambda file: read_study(file.parent)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:the evaluation of .* is left out")
def test_a_value_of_another_type_is_read_or_refused_by_name(kind, tmp_path):
    file = KINDS[kind].make(tmp_path)
    KINDS[kind].read(file)
    refused: list[str] = []
    for where, values in changed(contents(file)):
        file.write_text(json.dumps(values))
        try:
            KINDS[kind].read(file)
        except JsonError as error:
            refused.append(str(error))
        except (LineargptError, ConfigError):
            pass
        except Exception as error:
            raise AssertionError(f"{kind}: {where}") from error
    assert all(message.startswith(f"{file} is damaged") for message in refused)
    assert refused or kind in ("evaluation.json", "timing.json", "loss.json")  # which are left out, or begun again


@pytest.mark.parametrize(("group", "field", "value", "message"), [
    ("model", "heads", 0, " is damaged: model.heads is 0, expected at least 1; restore the file"),
    ("train", "accumulate", 0, " is damaged: train.accumulate is 0, expected at least 1; restore the file"),
    ("model", "attention", ["nothing"], ": model.attention nothing: no such mode"),
    ("model", "modes", {"chunked": {"chunk_size": "64"}},
     ' is damaged: model.modes.chunked.chunk_size is "64", expected a whole number or null; restore the file'),
])
def test_a_config_that_no_run_can_have_is_refused_by_its_file(group, field, value, message, tmp_path):
    with edited(file := sampled_run(tmp_path)) as values:
        values[group][field] = value
    with pytest.raises((ConfigError, JsonError)) as caught:
        loading.read_run(tmp_path)
    assert str(caught.value).startswith(f"{file}{message}")


def test_a_seed_that_a_changed_bit_makes_is_noticed_and_one_of_the_user_is_taken(tmp_path):
    file = sampled_run(tmp_path)
    whole = file.read_text()
    file.write_text(whole.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(JsonError, match=r"config\.json is damaged, or was changed by hand: .*contents_sha256; restore "
                                        r"the file or, if the change is yours, delete that entry$"):
        load_config(tmp_path)
    with edited(file):
        pass
    assert load_config(tmp_path).train.seed == 1


def test_environment_json_keeps_a_checksum_of_what_is_added(tmp_path):
    file = tmp_path / "environment.json"
    json_files.write(file, {"parameters": 5, "dtype": "float32"})
    add_to_environment(tmp_path, step_bytes=7)
    assert read_environment(tmp_path) == {"parameters": 5, "dtype": "float32", "step_bytes": 7}
    file.write_text(file.read_text().replace(": 7", ": 5"))
    with pytest.raises(JsonError, match=r"environment\.json is damaged, or was changed by hand"):
        read_environment(tmp_path)


@pytest.mark.parametrize("make", [partial, corpus, part, sampled_run],
                         ids=["journal.json", "meta.json", "part.json", "config.json"])
def test_no_changed_bit_goes_unnoticed(make, tmp_path):
    file = make(tmp_path)
    whole = file.read_bytes()
    values = json_files.read(file, dict[str, Any])
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1:])
        try:
            found = json_files.read(file, dict[str, Any])
        except JsonError:
            continue
        assert found | values == found  # the bit is in the layout, or in the name of the checksum


def test_a_changed_place_in_the_source_does_not_resume(tmp_path):
    file = partial(tmp_path)
    text = file.read_text()
    assert '"documents": 1' in text
    file.write_text(text.replace('"documents": 1', '"documents": 3'))
    with pytest.raises(JsonError, match=r"journal\.json is damaged, or was changed by hand: .*; delete the folder "
                                        rf"{file.parent} and start over or, if the change is yours, delete that entry"):
        journal.UnfinishedFolder(tmp_path / "tokens", {"source": "a"})
    assert file.is_file()
