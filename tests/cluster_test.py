"""The files for launchers in docs/cluster."""

import re
import shlex
import subprocess

import pytest
import yaml

import train
from tests import small_run

pytestmark = pytest.mark.fast

FOLDER = small_run.ROOT / "docs" / "cluster"


def jobset() -> dict:
    return yaml.safe_load((FOLDER / "jobset.yaml").read_text())["spec"]


def shell(name: str) -> str:
    """What a file gives to the shell."""
    if name == "slurm.sbatch":
        return (FOLDER / name).read_text()
    (job,) = jobset()["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return container["args"][0]


NAMES = ("slurm.sbatch", "jobset.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_the_shell_can_read_a_launcher(name):
    checked = subprocess.run(["bash", "-n"], input=shell(name), capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("name", NAMES)
def test_the_flags_of_a_launcher_exist(name):
    text = shell(name).replace("\\\n", " ").replace('"$JOB_COMPLETION_INDEX"', "3")
    (command,) = re.findall(r"python train\.py (.*)", text)
    recipe, *flags = shlex.split(command)
    line = train.parse([str(small_run.ROOT / recipe), *flags])
    assert line.config.train.rows_per_device == 4
    if name == "jobset.yaml":
        assert (line.distributed.processes, line.distributed.process) == (4, 3)


def test_a_command_that_cannot_run_is_not_retried_and_a_fault_is_20_times():
    (job,) = jobset()["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 4
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["values"]) == ("FailJob", [2])
    policy = jobset()["failurePolicy"]
    assert policy["maxRestarts"] == 20
    assert (policy["rules"][0]["action"], policy["rules"][0]["onJobFailureReasons"]) == (
        "FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize(("code", "restarts", "requeued"), [
    (0, 0, False), (2, 0, False), (130, 0, False), (143, 0, True), (1, 19, True), (134, 20, False)])
def test_the_batch_script_requeues_after_a_stop_and_a_fault(tmp_path, code, restarts, requeued):
    tools = {"srun": f"exit {code}", "scontrol": f"echo $* > {tmp_path}/said"}
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    script = shell("slurm.sbatch").replace(". .venv/bin/activate\n", "")
    ended = subprocess.run(["bash"], input=script, text=True, check=False, env={
        "PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)})
    assert ended.returncode == code
    assert (tmp_path / "said").exists() == requeued
    if requeued:
        assert (tmp_path / "said").read_text() == "requeue 7\n"
