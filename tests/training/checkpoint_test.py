"""Checkpoints survive crashes, damage and a full disk, and load bit for bit."""

import errno
import gc
import hashlib
import itertools
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from support.errors import CheckpointError, ConfigError
from tests import several_devices
from training import checkpoint
from training.checkpoint import CHECKSUMS, TRIES, UNFINISHED, Checkpoints

ROOT = Path(__file__).parents[2]
POSITION = {"step": 2**40 + 1, "batches": 7, "train_seconds": 0.1 + 0.2, "wall_seconds": 1e9 + 1e-6}


class Model(nnx.Module):
    """Parameters of two dtypes, and variables that are not parameters: a count and a random key."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, width, rngs=rngs)
        self.scale = nnx.Param(jax.random.normal(rngs(), (width,), jnp.bfloat16))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


def make_items(seed: int = 0, width: int = 6) -> dict:
    _, parameters, variables = nnx.split(Model(width, nnx.Rngs(seed)), nnx.Param, ...)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lambda step: 1e-3)).init(parameters)
    optimizer = jax.tree.map(lambda x: x + 1, optimizer)
    return {"parameters": parameters, "variables": variables, "optimizer": optimizer, "position": dict(POSITION)}


def small_items(value: float) -> dict:
    return {"parameters": {"w": jnp.full((3,), float(value))}, "position": {"step": value}}


def abstract_of(items: dict) -> dict:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else None, items)


def bits(tree) -> list[tuple]:
    arrays = [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
              for x in jax.tree.leaves(tree)]
    return [(x.dtype, x.tobytes()) for x in arrays]


def save_all(directory: Path, losses: dict[int, float | None], keep: int = 10) -> None:
    with Checkpoints(directory, keep=keep) as checkpoints:
        for step, loss in losses.items():
            checkpoints.save(step, small_items(step), loss=loss)


def value_of(restored) -> int:
    assert restored is not None
    step, items = restored
    assert items["position"]["step"] == items["parameters"]["w"][0]
    assert step == items["position"]["step"]
    return step


SMALL = abstract_of(small_items(0))


class KilledError(BaseException):
    """The process is killed."""


def kill_at(monkeypatch, number: int, *, thread: str) -> list[str]:
    """Makes the call with this number, from 0, that changes the disk from a thread of this name, and all later ones,
    raise :class:`KilledError`. Of equal calls in a row, such as deletions, the first two count.

    Returns:
        the names of the calls so far.
    """
    calls: list[str] = []

    def stopped(name: str, real: Callable) -> Callable:
        def call(*arguments, **options):
            if threading.current_thread().name.startswith(thread):
                if calls[-2:] != [name, name]:
                    calls.append(name)
                if len(calls) > number:
                    if name == "write_bytes":
                        real(arguments[0], arguments[1][:len(arguments[1]) // 2])
                    raise KilledError
            return real(*arguments, **options)
        return call

    for name in ("rename", "replace", "mkdir", "fsync"):
        monkeypatch.setattr(os, name, stopped(name, getattr(os, name)))
    for name in ("rmdir", "unlink"):
        monkeypatch.setattr(os, name, stopped("delete", getattr(os, name)))
    monkeypatch.setattr(Path, "write_bytes", stopped("write_bytes", Path.write_bytes))
    return calls


@pytest.mark.fast
def test_every_item_comes_back_bit_for_bit(tmp_path):
    items = make_items()
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(12, items)
        checkpoints.wait()
        assert checkpoints.steps() == [12]
    restored = Checkpoints(tmp_path / "checkpoints").restore(abstract_of(items))
    assert restored is not None
    assert restored[0] == 12
    assert restored[1]["position"] == POSITION
    assert jax.tree.structure(restored[1]) == jax.tree.structure(items)
    for name in ("parameters", "variables", "optimizer"):
        assert bits(restored[1][name]) == bits(items[name])


def test_position_may_hold_numpy_and_jax_numbers(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"position": {"step": np.int64(3), "train_seconds": np.float64(0.1), "x": jnp.float32(2)}})
        restored = checkpoints.restore({"position": None})
    assert restored == (1, {"position": {"step": 3, "train_seconds": 0.1, "x": 2.0}})


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: x * 0 - 1, tree), donate_argnums=0)
    parameters = {str(i): jax.random.normal(jax.random.key(i), (256, 256)) for i in range(8)}
    expected, abstract = bits(parameters), abstract_of({"parameters": parameters})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"parameters": parameters})
        for _ in range(3):
            parameters = overwrite(parameters)
        jax.block_until_ready(parameters)
        restored = checkpoints.restore(abstract)
    assert restored is not None
    assert bits(restored[1]["parameters"]) == expected


def test_an_empty_tree_is_an_item_like_any_other(tmp_path):
    items = {"parameters": {"w": jnp.ones(2)}, "variables": {}, "optimizer": optax.identity().init({"w": jnp.ones(2)})}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, items)
        restored = checkpoints.restore(abstract_of(items))
    assert restored is not None
    assert restored[1]["variables"] == {}
    assert restored[1]["optimizer"] == items["optimizer"]


def test_parameters_alone_need_no_other_item(tmp_path):
    items = make_items()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, items)
    for name in ("optimizer", "position"):
        shutil.rmtree(tmp_path / "1" / name)
    wanted = {name: abstract_of(items)[name] for name in ("parameters", "variables")}
    restored = Checkpoints(tmp_path).restore(wanted)
    assert restored is not None
    assert bits(restored[1]["parameters"]) == bits(items["parameters"])


def test_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    assert checkpoints.steps() == []
    assert checkpoints.restore(SMALL) is None
    assert not (tmp_path / "run").exists()


def test_a_step_is_restored_by_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_all(Path("run"), {10: None, 20: None})
    assert value_of(Checkpoints(Path("run")).restore(SMALL, step=10)) == 10
    with pytest.raises(ConfigError, match=r"^run: no checkpoint at step 15; expected one of 10, 20"):
        Checkpoints(Path("run")).restore(SMALL, step=15)


def test_newest_and_best_are_kept_across_restarts(tmp_path):
    save_all(tmp_path, {10: 3.0, 20: 2.0, 30: 2.5}, keep=2)
    assert Checkpoints(tmp_path).steps() == [20, 30]
    assert list((tmp_path / UNFINISHED).iterdir()) == []  # the removed one takes no space
    save_all(tmp_path, {40: 2.6, 50: float("nan"), 60: None}, keep=2)
    assert Checkpoints(tmp_path).steps() == [20, 50, 60]
    save_all(tmp_path, {70: 1.0, 80: 1.5, 90: 1.5}, keep=2)
    assert Checkpoints(tmp_path).steps() == [70, 80, 90]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.keep is 0; expected at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_a_flipped_byte_in_any_file_is_noticed(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_items(), loss=1.0)
        checkpoints.wait()
        abstract = abstract_of(make_items())
        files = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
        assert len(files) > 20
        for path in files:
            content = path.read_bytes()
            middle = len(content) // 2
            flipped = bytes([content[middle] ^ 1]) if content else b"x"
            path.write_bytes(content[:middle] + flipped + content[middle + 1:])
            with pytest.raises(CheckpointError, match=rf"{tmp_path}/1 is damaged") as error:
                checkpoints.restore(abstract, step=1)
            if path.name != CHECKSUMS:
                assert path.relative_to(tmp_path / "1").as_posix() in str(error.value)
            path.write_bytes(content)
        assert checkpoints.restore(abstract, step=1) is not None


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def drop_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("parameters/_METADATA", Path.unlink, "parameters/_METADATA is missing"),
    ("parameters/manifest.ocdbt", truncate, "parameters/manifest.ocdbt .* truncated or altered"),
    ("parameters", shutil.rmtree, "parameters/.* is missing"),
    (CHECKSUMS, Path.unlink, f"{CHECKSUMS} is missing"),
    (CHECKSUMS, truncate, f"{CHECKSUMS} is truncated or altered"),
    (CHECKSUMS, drop_last_line, f"{CHECKSUMS} is truncated or altered"),
    (CHECKSUMS, empty, f"{CHECKSUMS} is truncated or altered"),
])
def test_a_damaged_checkpoint_is_skipped_with_a_note(tmp_path, capsys, name, damage, message):
    save_all(tmp_path, {10: None, 20: None, 30: None})
    damage(tmp_path / "30" / name)
    truncate(tmp_path / "20" / "position" / "data.json")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert value_of(checkpoints.restore(SMALL)) == 10
    first, second = capsys.readouterr().err.splitlines()
    assert re.search(rf"note: skipping the damaged checkpoint {tmp_path}/30: .*{message}", first)
    assert f"note: skipping the damaged checkpoint {tmp_path}/20: position/data.json" in second
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/30 is damaged: .*{message}"):
        checkpoints.restore(SMALL, step=30)


def test_a_run_goes_on_before_and_over_damaged_checkpoints(tmp_path, capsys):
    save_all(tmp_path, {10: None, 20: None, 30: None})
    for step in (20, 30):
        (tmp_path / str(step) / CHECKSUMS).unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert value_of(checkpoints.restore(SMALL)) == 10
        assert capsys.readouterr().err.count("skipping") == 2
        checkpoints.save(15, small_items(15))
        checkpoints.save(20, small_items(20))
        checkpoints.save(25, small_items(25))
        checkpoints.wait()
        assert value_of(checkpoints.restore(SMALL)) == 25
        assert f"{tmp_path}/30: {CHECKSUMS} is missing" in capsys.readouterr().err
        checkpoints.save(30, small_items(30))
        assert value_of(checkpoints.restore(SMALL)) == 30
    assert Checkpoints(tmp_path).steps() == [25, 30]


def test_saving_after_an_earlier_step_was_restored_removes_no_later_one(tmp_path):
    save_all(tmp_path, {10: None, 20: None, 30: None})
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.restore(SMALL, step=10)
        checkpoints.save(15, small_items(15))
    assert Checkpoints(tmp_path).steps() == [15, 20, 30]


def test_damaged_checkpoints_do_not_count_among_the_kept(tmp_path):
    save_all(tmp_path, {10: None, 20: None, 30: None})
    for step in (20, 30):
        (tmp_path / str(step) / CHECKSUMS).unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        checkpoints.restore(SMALL)
        checkpoints.save(40, small_items(40))
        checkpoints.wait()
        assert value_of(checkpoints.restore(SMALL, step=10)) == 10


def test_without_any_intact_checkpoint_there_is_none(tmp_path, capsys):
    save_all(tmp_path, {10: None})
    (tmp_path / "10" / CHECKSUMS).unlink()
    assert Checkpoints(tmp_path).restore(SMALL) is None
    assert f"{tmp_path}/10: {CHECKSUMS} is missing" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
        Checkpoints(tmp_path).resume(SMALL)
    assert Checkpoints(tmp_path / "empty").resume(SMALL) is None


@pytest.mark.parametrize(("other", "message"), [
    ({"w": jnp.zeros((4,))}, r"parameter w has shape \(3,\), expected \(4,\)"),
    ({"w": jnp.zeros((3,), jnp.bfloat16)}, r"parameter w has dtype float32, expected bfloat16"),
    ({"w": jnp.zeros((3,)), "b": jnp.zeros(1)}, r"it has no parameter b"),
    ({}, r"it has parameter w, which this model has not"),
    ({"w": {"deep": jnp.zeros((3,))}}, r"it has parameter w, which"),
])
def test_a_checkpoint_of_another_model_is_refused(tmp_path, other, message):
    save_all(tmp_path, {10: None})
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/10 is a checkpoint of another model: .*{message}"):
        Checkpoints(tmp_path).restore(abstract_of({"parameters": other}))


def test_the_parameter_that_differs_is_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_items(width=6))
        with pytest.raises(CheckpointError, match=r"parameter linear\.bias has shape \(6,\), expected \(8,\)"):
            checkpoints.restore(abstract_of(make_items(width=8)))


def test_an_unwritable_folder_is_one_clear_error(tmp_path):
    (tmp_path / "run").write_text("a file where the run directory should be")
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints, \
            pytest.raises(CheckpointError, match=r"step 5 could not be written to .*run/checkpoints.*permissions"):
        checkpoints.save(5, small_items(5))
    assert (tmp_path / "run").is_file()


def test_a_checkpoint_is_on_disk_before_it_is_renamed(tmp_path, monkeypatch):
    happened = []

    def fsync(descriptor):
        happened.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    rename = Path.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda self, to: happened.append(f"rename {to.name}") or rename(self, to))
    save_all(tmp_path, {10: None})
    renamed = happened.index("rename 10")
    written = {str(path.relative_to(tmp_path / "10")) for path in (tmp_path / "10").rglob("*")}
    assert {f"{UNFINISHED}/10/{name}" for name in written} <= set(happened[:renamed])
    assert CHECKSUMS in written
    assert happened[renamed + 1:] == ["."]


def test_a_checkpoint_replaced_by_one_of_the_same_step_is_there_whenever_the_process_is_killed(tmp_path, monkeypatch):
    save_all(tmp_path / "first", {3: None, 4: None})
    for number in itertools.count():
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "first", folder)
        checkpoints = Checkpoints(folder)
        with monkeypatch.context() as patch:
            calls = kill_at(patch, number, thread="checkpoint_")
            checkpoints.save(4, small_items(4), loss=1.0)
            try:
                checkpoints.wait()
                break
            except KilledError:
                pass
        assert value_of(Checkpoints(folder).restore(SMALL, 4)) == 4, calls
        with Checkpoints(folder) as again:
            assert value_of(again.resume(SMALL)) == 4, calls
            assert (folder / "4").is_dir(), calls
            again.save(5, small_items(5))
            again.wait()
            assert sorted(path.name for path in folder.iterdir()) == ["4", "5", UNFINISHED], calls
    assert calls.count("rename") == 3  # the old one aside, the new one in its place, and the old one to be deleted


def test_a_folder_that_is_renamed_during_a_save_is_not_made_anew(tmp_path, monkeypatch):
    (run := tmp_path / "run").mkdir()
    checkpoints = Checkpoints(run / "checkpoints")
    checkpoints.save(1, small_items(1))
    checkpoints.wait()

    def renamed(written):
        run.rename(tmp_path / "there")
        written.mkdir(parents=True)  # as Orbax does

    monkeypatch.setattr(checkpoint, "sync", renamed)
    checkpoints.save(2, small_items(2))
    with pytest.raises(CheckpointError, match="run: it was deleted or renamed"):
        checkpoints.close()
    assert not run.exists()
    assert Checkpoints(tmp_path / "there" / "checkpoints").steps() == [1]


@pytest.mark.parametrize("number", range(3))
def test_a_checkpoint_stays_when_the_rename_of_one_of_the_same_step_fails(tmp_path, monkeypatch, number):
    save_all(tmp_path, {4: None})
    rename, failed = Path.rename, []

    def fails(path, target):
        renamed.append(path)
        if len(renamed) == number + 1:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return rename(path, target)

    with Checkpoints(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            renamed: list[Path] = []
            patch.setattr(Path, "rename", fails)
            checkpoints.save(4, small_items(4), loss=1.0)
            with pytest.raises(CheckpointError, match=r"step 4 could not be written .* intact\. .*Input/output error"):
                checkpoints.wait()
        assert failed
        assert value_of(Checkpoints(tmp_path).restore(SMALL, 4)) == 4
        assert (tmp_path / "4").is_dir()
        checkpoints.save(4, small_items(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", UNFINISHED]


@pytest.mark.parametrize("surfaces_in", ["wait", "the next save"])
def test_a_full_disk_is_one_clear_error_and_loses_nothing(tmp_path, caplog, surfaces_in):
    save_all(tmp_path, {10: None})
    large = {"parameters": {"w": jax.random.normal(jax.random.key(0), (300_000,))}}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        # No file may grow past 100 kB: the write fails midway, on another thread, as it does on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        try:
            checkpoints.save(20, large)
            with pytest.raises(CheckpointError, match=r"step 20 could not be written to .*free space") as error:
                checkpoints.wait() if surfaces_in == "wait" else checkpoints.save(30, large)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "\n" not in str(error.value)
        assert caplog.records == []
        assert not (tmp_path / UNFINISHED).exists()
        checkpoints.wait()  # raised once only
        assert value_of(checkpoints.restore(SMALL)) == 10
        checkpoints.save(20, small_items(20))
        assert value_of(checkpoints.restore(SMALL)) == 20


@pytest.mark.thorough
def test_whatever_is_on_disk_at_any_moment_of_a_save_can_be_resumed_from(tmp_path):
    """Copies of the folder before every change are what a process killed at that moment would leave."""
    directory, copies = tmp_path / "checkpoints", tmp_path / "copies"
    moments: list[tuple[str, set[int]]] = []
    allowed: set[int] = set()
    watching = threading.local()

    def copy_before_changes(event: str, arguments: tuple) -> None:
        changes = event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove") or (
            event == "open" and isinstance(arguments[1], str) and "w" in arguments[1])
        if not allowed or not changes or getattr(watching, "paused", False) or str(directory) not in str(arguments):
            return
        watching.paused = True
        try:
            copy = copies / str(len(moments))
            moments.append((f"{event} {arguments}", set(allowed)))
            complete = [path for path in directory.iterdir() if path.name != UNFINISHED]
            for path in complete:
                shutil.copytree(path, copy / path.name)
            if (directory / UNFINISHED).exists():
                # Names suffice here, because these files are ignored; TensorStore renames them meanwhile.
                for folder in [path for path in (directory / UNFINISHED).rglob("*") if path.is_dir()]:
                    (copy / UNFINISHED / folder.relative_to(directory / UNFINISHED)).mkdir(parents=True, exist_ok=True)
        finally:
            watching.paused = False

    sys.addaudithook(copy_before_changes)
    with Checkpoints(directory, keep=2) as checkpoints:
        checkpoints.save(1, small_items(1), loss=2.0)
        checkpoints.wait()
        # Steps to which a crash may fall back; the second save of 3 replaces the first.
        for step, newest in ((2, {1, 2}), (3, {2, 3}), (4, {3, 4}), (4, {3, 4})):
            allowed = newest
            checkpoints.save(step, small_items(step), loss=2.0 + step)
            checkpoints.wait()
    allowed = set()
    assert any("4.replaced" in what for what, _ in moments)
    assert any("3.removed" in what or "2.removed" in what for what, _ in moments)
    for number, (what, newest) in enumerate(moments):
        with Checkpoints(copies / str(number)) as checkpoints:
            step = value_of(checkpoints.restore(SMALL))
            assert step in newest, what
            if "rename" in what:
                checkpoints.save(step + 1, small_items(step + 1))
                assert value_of(checkpoints.restore(SMALL)) == step + 1, what


def run_python(code: str, *arguments: object, **environment: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment)


KILLED_IN_A_SAVE = """
import sys, threading
from pathlib import Path
import jax.numpy as jnp
from training.checkpoint import Checkpoints

def freeze(event, arguments):
    if event == "os.rename" and str(arguments[1]).endswith("unfinished/2"):
        print("written and not yet in place", flush=True)
        threading.Event().wait()

checkpoints = Checkpoints(Path(sys.argv[1]))
for step in (1, 2):
    checkpoints.save(step, {"parameters": {"w": jnp.full((3,), float(step))}, "position": {"step": step}})
    checkpoints.wait() if step == 1 else None
    sys.addaudithook(freeze) if step == 1 else None
checkpoints.wait()
"""


def test_kill_9_in_a_save(tmp_path):
    process = run_python(KILLED_IN_A_SAVE, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "written and not yet in place\n"
    process.kill()
    process.communicate()
    assert list((tmp_path / UNFINISHED).iterdir()) != []
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        assert value_of(checkpoints.restore(SMALL)) == 1
        assert (tmp_path / UNFINISHED).exists()  # for all that a reader knows, another process is writing it
        assert value_of(checkpoints.resume(SMALL)) == 1
        assert not (tmp_path / UNFINISHED).exists()
        checkpoints.save(2, small_items(2))
    assert value_of(Checkpoints(tmp_path).restore(SMALL)) == 2
    assert list((tmp_path / UNFINISHED).iterdir()) == []


ON_TWO_DEVICES = """
import sys
from pathlib import Path
from training.checkpoint import Checkpoints
assert not any(name.startswith("orbax") for name in sys.modules), "Orbax is to be imported only when it is used"
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
with Checkpoints(Path(sys.argv[1])) as checkpoints:
    _, items = checkpoints.restore({"parameters": {"w": jax.ShapeDtypeStruct((8, 3), jnp.float32, sharding=sharding)}})
    w = items["parameters"]["w"]
    assert w.sharding == sharding and len(w.addressable_shards) == 2, w.sharding
    checkpoints.save(2, {"parameters": {"w": w * 2}})
"""


def test_a_checkpoint_moves_between_numbers_of_devices(tmp_path):
    w = jax.random.normal(jax.random.key(0), (8, 3))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"parameters": {"w": w}})
    process = run_python(ON_TWO_DEVICES, tmp_path, **several_devices.environment(2))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert errors == ""
    restored = Checkpoints(tmp_path).restore(abstract_of({"parameters": {"w": w}}))
    assert restored is not None
    assert restored[0] == 2
    assert bits(restored[1]["parameters"]) == bits({"w": w * 2})
    assert len(restored[1]["parameters"]["w"].devices()) == 1


TRAINED = {step: small_items(step) | {"optimizer": {"m": jnp.full((3,), float(step))}} for step in (10, 20, 30)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The checkpoints of a finished run, of which the first is the best."""
    folder = tmp_path_factory.mktemp("trained")
    with Checkpoints(folder, keep=3) as checkpoints:
        for step, items in TRAINED.items():
            checkpoints.save(step, items, loss={10: 1.0}.get(step, 2.0))
    return folder


def test_a_finished_run_keeps_the_parameters_of_the_best_and_the_last(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.keep_parameters()
        assert checkpoints.steps() == [10, 30]
        before = {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]}
        checkpoints.keep_parameters()
        assert {path: path.stat().st_mtime_ns for path in [tmp_path, *tmp_path.rglob("*")]} == before
    assert not list(tmp_path.glob("*/optimizer"))
    with Checkpoints(tmp_path) as checkpoints:
        for step in (10, 30):
            assert value_of(checkpoints.restore(SMALL, step)) == step
        assert checkpoints.resume({"position": None}, verify=("parameters", "optimizer"))[0] == 30
        with pytest.raises(CheckpointError, match="has no optimizer state"):
            checkpoints.resume(abstract_of(TRAINED[30]))


def test_a_finished_run_can_be_killed_at_any_point_of_the_removal_of_its_optimizer_state(trained, tmp_path, capsys,
                                                                                         monkeypatch):
    for number in itertools.count():
        folder = Path(shutil.copytree(trained, tmp_path / str(number)))
        checkpoints = Checkpoints(folder)
        with monkeypatch.context() as patch:
            calls = kill_at(patch, number, thread="MainThread")
            try:
                checkpoints.keep_parameters()
                break
            except KilledError:
                pass
        for step in (10, 30):
            wanted = abstract_of(TRAINED[step]) if checkpoints.has_optimizer_state(step) else SMALL
            assert value_of(checkpoints.restore(wanted, step)) == step, calls
        found = Checkpoints(folder).resume({"position": None}, verify=("parameters", "variables", "optimizer"))
        assert found == (30, {"position": {"step": 30}}), calls
        checkpoints.keep_parameters()
        assert sorted(path.name for path in folder.iterdir()) == ["10", "30"], calls
        assert not list(folder.glob("*/optimizer")), calls
        assert not list(folder.glob("*/.*")), calls
    assert (calls.count("replace"), calls.count("rename")) == (2, 3)
    assert capsys.readouterr().err == ""


def test_files_that_are_not_of_a_checkpoint_are_ignored(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    for name in (".DS_Store", f".{CHECKSUMS}.13404.tmp", "parameters/.DS_Store", "parameters/d/._x", "Thumbs.db",
                 "notes/mine.txt", "optimizer/.nfs01"):
        (tmp_path / "30" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "30" / name).touch()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(abstract_of(TRAINED[30])) is not None
        assert value_of(checkpoints.restore(SMALL)) == 30
        assert checkpoints.best() == 10
        checkpoints.keep_parameters()
        assert value_of(checkpoints.restore(SMALL)) == 30
    assert capsys.readouterr().err == ""


def test_checksums_are_those_of_sha256sum_and_of_earlier_versions(tmp_path):
    save_all(tmp_path, {10: 1.0})
    heading, *lines = (tmp_path / "10" / CHECKSUMS).read_text().splitlines(keepends=True)
    assert heading.startswith("# ")  # a comment, for sha256sum
    for line in lines:
        checksum, name = line.rstrip("\n").split("  ")
        assert hashlib.sha256((tmp_path / "10" / name).read_bytes()).hexdigest() == checksum
    (tmp_path / "10" / CHECKSUMS).write_text("".join(lines))
    assert value_of(Checkpoints(tmp_path).restore(SMALL)) == 10
    assert Checkpoints(tmp_path).best() == 10
    for damaged in ("".join(lines)[:-1] + "x", "", "".join(lines)[1:], "".join(lines).replace("\n", "\0", 1)):
        (tmp_path / "10" / CHECKSUMS).write_text(damaged)
        with pytest.raises(CheckpointError, match="10 is damaged"):
            Checkpoints(tmp_path).restore(SMALL, 10)


READS = ("_identity", "_content", "_sha256", "_from_orbax")
"""The functions through which a checkpoint is read."""


def at_read(monkeypatch, number: int, act: Callable[[], object]) -> list[str]:
    """Calls ``act`` before the read with this number, from 0. Returns the list of the reads so far."""
    reads: list[str] = []

    def acting(name: str, real: Callable) -> Callable:
        def call(*arguments):
            reads.append(name)
            if len(reads) == number + 1:
                act()
            return real(*arguments)
        return call

    for name in READS:
        monkeypatch.setattr(checkpoint, name, acting(name, getattr(checkpoint, name)))
    return reads


@pytest.fixture(scope="module")
def pruned(tmp_path_factory) -> Path:
    """Checkpoints of steps 20, which has the lowest loss and will be pruned, and 30, which will come then."""
    folder = tmp_path_factory.mktemp("pruned")
    save_all(folder / "now", {20: 2.0})
    save_all(folder / "then", {30: 1.0})
    return folder


@pytest.mark.parametrize("step", [None, "best"])
def test_a_checkpoint_that_is_pruned_while_it_is_read_is_no_error(pruned, tmp_path, capfd, caplog, monkeypatch, step):
    for number in itertools.count():
        folder = Path(shutil.copytree(pruned / "now", tmp_path / str(number)))

        def prune(folder=folder):
            shutil.copytree(pruned / "then" / "30", folder / "30")
            (folder / "20").rename(folder / UNFINISHED / "20.removed")
            shutil.rmtree(folder / UNFINISHED)

        with monkeypatch.context() as patch:
            reads = at_read(patch, number, prune)
            found = value_of(Checkpoints(folder).restore(SMALL, step))
        if len(reads) <= number:
            break
        assert found == 30, reads
    assert set(READS) <= set(reads)
    assert capfd.readouterr().err == ""
    assert caplog.records == []


def test_a_step_that_is_pruned_while_it_is_read_is_not_there(pruned, tmp_path, monkeypatch):
    shutil.copytree(pruned / "then", tmp_path, dirs_exist_ok=True)
    shutil.copytree(pruned / "now", tmp_path, dirs_exist_ok=True)
    at_read(monkeypatch, 3, lambda: shutil.rmtree(tmp_path / "20"))
    with pytest.raises(ConfigError, match="no checkpoint at step 20; expected one of 30"):
        Checkpoints(tmp_path).restore(SMALL, 20)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(pruned, tmp_path, monkeypatch):
    for number in range(3, 12, 2):
        folder = Path(shutil.copytree(pruned / "now", tmp_path / str(number)))

        def replace(folder=folder):
            (folder / "20").rename(folder / "20.replaced")
            shutil.copytree(pruned / "now" / "20", folder / "20")
            truncate(folder / "20.replaced" / "parameters" / "_METADATA")

        with monkeypatch.context() as patch:
            at_read(patch, number, replace)
            assert value_of(Checkpoints(folder).restore(SMALL)) == 20
        assert (folder / "20.replaced").exists()


def test_checkpoints_that_are_deleted_at_each_try_end_in_an_error(pruned, tmp_path, monkeypatch):
    shutil.copytree(pruned / "now" / "20", tmp_path / "0")
    read, tries = Path.read_bytes, []

    def pruned_first(path):
        if path.name == CHECKSUMS:
            tries.append(path)
            path.parent.rename(path.parent.with_name(str(len(tries))))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", pruned_first)
    with pytest.raises(CheckpointError, match=f"deleted {TRIES} checkpoints, each while it was read"):
        Checkpoints(tmp_path).restore(SMALL)
    assert len(tries) == TRIES


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_file_that_cannot_be_read_is_not_damage(trained, capsys, monkeypatch, code):
    def unreadable(*_):
        raise OSError(code, os.strerror(code))  # as of a read, without the file's name

    with Checkpoints(trained) as checkpoints:
        for step in (None, 30):
            for name, patched in (("file_digest", hashlib), ("read_bytes", Path)):
                with monkeypatch.context() as patch:
                    patch.setattr(patched, name, unreadable)
                    with pytest.raises(OSError, match=os.strerror(code)) as error:
                        checkpoints.restore(SMALL, step)
                assert error.value.errno == code
                assert str(error.value.filename).startswith(str(trained / "30"))
        monkeypatch.setattr(Path, "read_bytes", unreadable)
        with pytest.raises(OSError, match=os.strerror(code)):
            checkpoints.best()
    assert capsys.readouterr().err == ""


def test_a_damaged_loss_is_not_taken_for_none(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    (tmp_path / "10" / "loss.json").write_text('{"loss":9.0}')
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        assert checkpoints.best() == 20
        assert capsys.readouterr().err == (f"note: skipping the damaged checkpoint {tmp_path}/10: loss.json does not "
                                           "match its checksum: it is truncated or altered\n")
        checkpoints.save(40, small_items(40), loss=3.0)
        checkpoints.wait()
        assert checkpoints.steps() == [10, 20, 40]  # neither the best nor, what it may be, the damaged one is deleted


@pytest.mark.parametrize(("before", "message"), [
    ({}, r"permissions\. There is no earlier checkpoint\. \("),
    ({10: None}, r"permissions\. Earlier checkpoints are intact\. \("),
])
def test_a_failed_save_says_whether_there_are_earlier_checkpoints(tmp_path, monkeypatch, before, message):
    save_all(tmp_path, before)

    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint, "sync", full)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(20, small_items(20))
        with pytest.raises(CheckpointError, match=message):
            checkpoints.wait()


FAILED_SAVE = """
import resource, sys
from pathlib import Path
import jax.numpy as jnp
from support.command import run_command
from training.checkpoint import Checkpoints

def command(_):
    with Checkpoints(Path(sys.argv[1])) as checkpoints:
        items = {"parameters": {str(number): jnp.full((300_000,), float(number)) for number in range(20)}}
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        checkpoints.save(1, items | {"optimizer": items["parameters"]})

sys.exit(run_command("x.py", command, []))
"""


def test_a_failed_save_is_one_line_on_standard_error(tmp_path):
    """The first array that fails ends Orbax's event loop, to which TensorStore then reports those of all others."""
    process = run_python(FAILED_SAVE, tmp_path)
    _, errors = process.communicate()
    assert process.returncode == 1
    assert re.fullmatch(f"x.py: the checkpoint of step 1 could not be written to {tmp_path}; check its free space and "
                        r"permissions\. There is no earlier checkpoint\. \(.*File too large\)\n", errors)


def test_a_failed_save_does_not_warn_of_what_orbax_did_not_come_to(tmp_path, monkeypatch):
    async def write():
        """Not called to its end."""

    def unwritable(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(checkpoint, "sync", unwritable)
    with warnings.catch_warnings(record=True) as warned, Checkpoints(tmp_path) as checkpoints:
        warnings.simplefilter("always")
        checkpoints.save(1, small_items(1))
        with pytest.raises(CheckpointError):
            checkpoints.wait()
        write()  # pyright: ignore[reportUnusedCoroutine]
        gc.collect()
    assert warned == []


RAISES_IN_THE_BACKGROUND = """
import sys
from pathlib import Path
import jax.numpy as jnp
from training.checkpoint import Checkpoints

with Checkpoints(Path(sys.argv[1])) as checkpoints:
    checkpoints.save(1, {"parameters": {"w": jnp.ones(3)}})

def raised_through(modules):
    '''An error that was raised in the last of these modules, and passed through the others.'''
    called, code = None, f"raise ZeroDivisionError('seen in {' '.join(modules)}')"
    for module in reversed(modules):
        names = {"__name__": module, "called": called}
        exec(f"def call(): {code}", names)
        called, code = names["call"], "called()"
    try:
        called()
    except ZeroDivisionError as error:
        return type(error), error, error.__traceback__.tb_next  # without the frame of this function

for modules in sys.argv[2:]:
    sys.excepthook(*raised_through(modules.split()))
"""


def test_only_tracebacks_of_libraries_in_the_background_are_dropped(tmp_path):
    dropped = ["asyncio.base_events", "uvloop.loop", "threading orbax.checkpoint jax.x"]
    shown = ["threading", "train", "train orbax.checkpoint", "asyncio.events __main__"]
    _, errors = run_python(RAISES_IN_THE_BACKGROUND, tmp_path, *dropped, *shown).communicate()
    assert [modules for modules in [*dropped, *shown] if f"seen in {modules}\n" in errors] == shown
