"""Checkpoints survive crashes, damage and a full disk, and load bit for bit."""

import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from support.errors import CheckpointError, ConfigError
from tests import several_devices
from training.checkpoint import CHECKSUMS, UNFINISHED, Checkpoints

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
    with pytest.raises(ConfigError, match=r"checkpoint\.keep: expected at least 1, got 0"):
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


@pytest.mark.parametrize(("name", "damage", "message"), [
    ("parameters/_METADATA", Path.unlink, "parameters/_METADATA is missing"),
    ("parameters/manifest.ocdbt", truncate, "parameters/manifest.ocdbt .* truncated or altered"),
    ("parameters", shutil.rmtree, "parameters/.* is missing"),
    (CHECKSUMS, Path.unlink, f"{CHECKSUMS} cannot be read"),
    (CHECKSUMS, drop_last_line, f"is not in {CHECKSUMS}"),
])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, name, damage, message):
    save_all(tmp_path, {10: None, 20: None, 30: None})
    damage(tmp_path / "30" / name)
    truncate(tmp_path / "20" / "position" / "data.json")
    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.warns(UserWarning, match="skipping the damaged checkpoint") as warned:
        assert value_of(checkpoints.restore(SMALL)) == 10
    first, second = (str(w.message) for w in warned)
    assert re.search(rf"{tmp_path}/30: .*{message}", first)
    assert f"{tmp_path}/20: position/data.json" in second
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/30 is damaged: .*{message}"):
        checkpoints.restore(SMALL, step=30)


def test_a_run_goes_on_before_and_over_damaged_checkpoints(tmp_path):
    save_all(tmp_path, {10: None, 20: None, 30: None})
    for step in (20, 30):
        (tmp_path / str(step) / CHECKSUMS).unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with pytest.warns(UserWarning, match="skipping"):
            assert value_of(checkpoints.restore(SMALL)) == 10
        checkpoints.save(15, small_items(15))
        checkpoints.save(20, small_items(20))
        checkpoints.save(25, small_items(25))
        checkpoints.wait()
        with pytest.warns(UserWarning, match="/30"):
            assert value_of(checkpoints.restore(SMALL)) == 25
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
        with pytest.warns(UserWarning, match="skipping"):
            checkpoints.restore(SMALL)
        checkpoints.save(40, small_items(40))
        checkpoints.wait()
        assert value_of(checkpoints.restore(SMALL, step=10)) == 10


def test_without_any_intact_checkpoint_there_is_none(tmp_path):
    save_all(tmp_path, {10: None})
    (tmp_path / "10" / CHECKSUMS).unlink()
    with pytest.warns(UserWarning, match="/10"):
        assert Checkpoints(tmp_path).restore(SMALL) is None
    with (pytest.warns(UserWarning, match="/10"),
          pytest.raises(CheckpointError, match="all checkpoints are damaged")):
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
    assert any("4.removed" in what for what, _ in moments)
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


def test_a_finished_run_keeps_the_parameters_of_the_best_and_the_last(tmp_path, monkeypatch):
    saved = {step: small_items(step) | {"optimizer": {"m": jnp.full((3,), float(step))}} for step in (10, 20, 30)}
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step, items in saved.items():
            checkpoints.save(step, items, loss={10: 1.0}.get(step, 2.0))
        checkpoints.wait()
        # Killed once the checksums of the first are without those of the optimizer state, and once more after that.
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                checkpoints.keep_parameters()
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
            checkpoints.resume(abstract_of(saved[30]))
