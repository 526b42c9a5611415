"""Python packages at pinned versions: a corpus that is the same on every machine, without network.

packages.txt pins wheels of pure Python, which do not differ between platforms. The packages are those of
requirements.lock; once it has moved on, ``pip`` installs the pinned ones into a folder of the cache.
"""

import hashlib
import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution
from pathlib import Path

from data.sources.formats import Format
from data.sources.source import Selection, Source
from data.sources.text import files_as_documents
from support.errors import ConfigError
from support.files import cache_folder

PACKAGES = "python-packages"
PINS = Path(__file__).with_name("packages.txt")
LICENCE = "Apache-2.0 AND BSD-3-Clause AND MIT"
_SKIPPED = {"tests", "test", "testing", "internal_test_util", "_generated"}
"""Folders of tests and of generated code."""


def open_packages(selection: Selection) -> Source:
    """The source files of the packages in packages.txt, about 30 MB; a document per file, equal ones once.

    Raises:
        ConfigError: a package is missing or has another version.
    """
    wanted = dict(re.findall(r"^([\w.-]+)==(\S+)", PINS.read_text(), re.MULTILINE))
    own = cache_folder(PACKAGES)
    found = _installed(wanted, own if own.is_dir() else None)
    if wrong := [f"{name} {version} (found {'none' if name not in found else found[name].version})"
                 for name, version in wanted.items() if name not in found or found[name].version != version]:
        raise ConfigError(f"data.source: {PACKAGES} has other versions than are installed: {', '.join(wrong)}; install "
                          f"those of {PINS} into {own} too, as docs/standings.md says")
    files, hashes = {}, set()
    for name in sorted(found):
        for file, path, digest in _sources(found[name]):
            if digest not in hashes:
                hashes.add(digest)
                files[file] = path, Format("text")
    state = hashlib.sha256("\n".join(sorted(hashes)).encode())
    version = hashlib.sha256(PINS.read_bytes()).hexdigest()[:8]
    return files_as_documents(PACKAGES, files, selection, state=state.hexdigest(), version=version, licence=LICENCE)


def _installed(wanted: Iterable[str], folder: Path | None) -> dict[str, Distribution]:
    """The wanted packages in a folder, or else in the environment."""
    path = sys.path if folder is None else [str(folder)]
    # An interrupted installation leaves a folder without a name in it.
    return {name: found for name in wanted if (found := next((
        each for each in importlib.metadata.distributions(name=name, path=path) if "Name" in each.metadata), None))}


def _sources(package: Distribution) -> Iterator[tuple[str, Path, str]]:
    """The path in the wheel, the file and the hash of each source file, as the package's RECORD lists them."""
    for file in sorted(package.files or [], key=str):
        if file.suffix == ".py" and file.hash is not None and file.size and not _SKIPPED.intersection(file.parts):
            yield file.as_posix(), Path(str(file.locate())), file.hash.value
