"""The types of the fields of JSON files."""

import json
import math
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from support import json_files
from support.errors import DataError, JsonError, RunError
from support.json_files import Digits, FileName, Natural
from support.ranges import Fraction

pytestmark = pytest.mark.fast


@dataclass
class Options:
    rate: float = 1.0
    sizes: tuple[tuple[str, int], ...] = ()


class Shard(TypedDict):
    file: FileName
    tokens: Natural


class File(TypedDict):
    name: str | None
    kind: NotRequired[Literal["a", 1]]
    shards: NotRequired[list[Shard]]
    counts: NotRequired[dict[Digits, Fraction | None]]
    options: NotRequired[Options]
    either: NotRequired[Shard | list[Shard]]
    anything: NotRequired[Any]
    flag: NotRequired[bool]


@pytest.mark.parametrize("values", [
    {"name": None}, {"name": "x", "kind": 1, "later": object}, {"name": "x", "shards": [{"file": "a", "tokens": 0}]},
    {"name": "x", "counts": {"12": 0.5, "3": None}, "anything": [1], "flag": True},
    {"name": "x", "options": {"sizes": [["a", 1]], "rate": math.nan}}, {"name": "x", "either": []}])
def test_what_fits_the_types_is_taken(values):
    json_files.check(values, File, "a.json")


@pytest.mark.parametrize(("values", "message"), [
    ([1], "it is a list of 1, expected an object"),
    ({}, "name is missing, expected a text or null"),
    ({"name": 5}, "name is 5, expected a text or null"),
    ({"name": "", "kind": True}, "kind is true, expected one of a, 1"),
    ({"name": "", "flag": 1}, "flag is 1, expected true or false"),
    ({"name": "", "shards": [{"file": "a", "tokens": 1}, {"file": "a", "tokens": True}]},
     "shards[1].tokens is true, expected a whole number"),
    ({"name": "", "shards": [{"file": "a", "tokens": 1.0}]}, "shards[0].tokens is 1.0, expected a whole number"),
    ({"name": "", "shards": [{"file": "a", "tokens": 2**63}]}, "shards[0].tokens is 9223372036854775808, expected a"),
    ({"name": "", "shards": {"a": 1}}, "shards is an object of 1, expected a list"),
    ({"name": "", "counts": {"x": 0.5}}, 'the key counts.x is "x", expected digits'),
    ({"name": "", "counts": {"1": "0.5"}}, 'counts.1 is "0.5", expected a number or null'),
    ({"name": "", "options": {"sizes": [["a"]]}}, "options.sizes[0] is a list of 1, expected a list of 2"),
    ({"name": "", "options": {"rate": "1e-3"}}, 'options.rate is "1e-3", expected a number'),
    ({"name": "", "either": {"file": "a", "tokens": -1}}, "either.tokens is -1, expected at least 0"),
    ({"name": "", "flag": "y" * 5000}, f'flag is "{"y" * 59}…, expected true or false'),
])
def test_the_first_field_of_another_type_is_named(values, message):
    with pytest.raises(JsonError) as caught:
        json_files.check(values, File, "a.json", remedy="make it again")
    assert str(caught.value).startswith(f"a.json is damaged: {message}")
    assert str(caught.value).endswith("; make it again")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("name", ["", ".", "..", "../secret.bin", "/etc/passwd", "a/b", "a\\b", "a\0b"])
def test_a_file_is_named_without_a_folder(name):
    with pytest.raises(JsonError, match="expected a name without a folder"):
        json_files.check(name, FileName, "a.json", "file")


@pytest.mark.parametrize("text", ["", "{", "[1]", "5", "\ufffd", "[" * 100_000, '{"a": ' * 100_000])
def test_what_is_no_object_is_damaged(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(JsonError, match=r"a\.json is damaged.*; restore the file") as caught:
        json_files.read(tmp_path / "a.json", File)
    assert isinstance(caught.value, RunError)
    assert isinstance(caught.value, DataError)


def test_a_checksum_is_of_the_values_whatever_their_order_and_layout(tmp_path):
    path = tmp_path / "a.json"
    json_files.write(path, {"b": (1, 2.5), "a": {1: None}, "c": "é\ud800"})
    assert json_files.read(path, dict[str, Any]) == {"b": [1, 2.5], "a": {"1": None}, "c": "é\ud800"}
    values = json.loads(path.read_text())
    assert list(values) == [json_files.CHECKSUM, "b", "a", "c"]
    path.write_text(json.dumps(values, sort_keys=True))
    json_files.read(path, dict[str, Any])
    path.write_text(json.dumps(values | {"b": [1, 2.25]}))
    with pytest.raises(JsonError, match=r"a\.json is damaged, or was changed by hand: its contents do not match its "
                                        r"entry contents_sha256; make it again or, if the change is yours, delete"):
        json_files.read(path, dict[str, Any], remedy="make it again")
    del values[json_files.CHECKSUM]
    path.write_text(json.dumps(values | {"b": []}))
    assert json_files.read(path, dict[str, Any])["b"] == []
