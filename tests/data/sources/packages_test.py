"""The corpus of pinned packages."""

import base64
import hashlib
import re
from pathlib import Path

import pytest

from data.sources import open_source, packages
from support.errors import ConfigError
from tests.data.sources.source_files import documents

pytestmark = pytest.mark.fast


@pytest.fixture
def installed(tmp_path: Path, monkeypatch) -> Path:
    """A cache folder with the package one 1.0, as pip installs it, which is all that is pinned."""
    monkeypatch.setattr(packages, "cache_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(packages, "PINS", tmp_path / "packages.txt")
    packages.PINS.write_text("# MIT\none==1.0 \\\n    --hash=sha256:00\n")
    folder = tmp_path / packages.PACKAGES
    files = {"one/b.py": "b = 1\n", "one/a.py": "a = 1\n", "one/again.py": "b = 1\n", "one/tests/c.py": "c = 1\n",
             "one/empty.py": "", "one/data.txt": "text"}
    record = []
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
        record.append(f"{name},sha256={digest},{len(text)}\n")
    info = folder / "one-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: One\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(record))
    return folder


def test_sources_of_packages_in_order_once_each_without_tests(installed: Path):
    assert [text for _, text in documents("python-packages")] == [b"a = 1\n", b"b = 1\n"]


def test_a_folder_that_an_installation_left_behind_is_ignored(installed: Path):
    for name in ("one-0.9", "one-2.0", "two-2.0"):
        (installed / f"{name}.dist-info").mkdir()
    assert len([*documents("python-packages")]) == 2


def test_packages_of_other_versions_are_named_with_where_to_install_them(installed: Path):
    packages.PINS.write_text("one==2.0 \\\n    --hash=sha256:00\ntwo==3.0\n")
    with pytest.raises(ConfigError, match=re.escape(
            f"one 2.0 (found 1.0), two 3.0 (found none); install those of {packages.PINS} into {installed} too")):
        open_source("python-packages")


def test_a_change_of_a_version_or_a_file_changes_the_state(installed: Path):
    before = open_source("python-packages").state
    record = next(installed.glob("*/RECORD"))
    record.write_text(record.read_text().replace("one/a.py,sha256=", "one/a.py,sha256=0"))
    assert open_source("python-packages").state != before


def test_the_pinned_packages_are_thirty_megabytes_of_python():
    try:
        source = open_source("python-packages")
    except ConfigError as error:
        pytest.skip(str(error))
    found = documents(source)
    total = sum(len(text) for _, text in found)
    assert total == source.total_bytes
    assert 25e6 < total < 35e6
    assert len({text for _, text in found}) == len(found)
    assert 0.045 < sum(len(text) for split, text in found if split == "val") / total <= 0.05
