"""The batch script of deploy/slurm: with stand-ins for Slurm's commands, and,
where they are installed, with Slurm on this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from persia import _core
from tests.deploy import slurm
from tests.deploy.manifests import DEPLOY
from tests.deploy.test_manifests import variables
from tests.system.processes import environment, wait_until

if not _core.GRPC[0].isdigit():
    pytest.skip("built without gRPC", allow_module_level=True)

SCRIPT = DEPLOY / "slurm" / "persia.sbatch"
TASKS = (2, 1, 2, 2)  # of the components
JOB_ENV = """
PERSIA_TRAIN_DATA=synthetic
PERSIA_TRAIN_MODEL=dcn
PERSIA_TRAIN_THREADS=1
PERSIA_TRAIN_SAMPLES={samples}
PERSIA_TRAIN_EVAL_SPLIT=0
PERSIA_TRAIN_SAVE={folder}/saved
PERSIA_TRAIN_SAVE_EVERY=5
PERSIA_FEED_DATA=synthetic
PERSIA_FEED_SAMPLES={samples}
PERSIA_FEED_EVAL_SPLIT=0
PERSIA_SERVE_PS_CHECKPOINTS={folder}
PERSIA_CHECKPOINTS={folder}
PERSIA_SERVE_PS_INSECURE=true
PERSIA_SERVE_WORKER_INSECURE=true
PERSIA_INSECURE=1
"""
#: Slurm's commands as the script uses them: srun, whose tasks are processes of
#: this machine, squeue and scancel.
SRUN = """#!{python}
import os, signal, subprocess, sys
from pathlib import Path
words = sys.argv[1:]
group = int(words.pop(0).removeprefix("--het-group="))
name = words[0].removeprefix("--job-name=")
words = [w for w in words if not w.startswith("--")]
n = {tasks}[group]
if words == ["hostname"]:
    for i in reversed(range(n)):
        print(f"{{i}}: 127.0.0.1")
    sys.exit()
tasks = [
    subprocess.Popen(words, env=os.environ | {{
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
        "SLURM_STEP_NUM_TASKS": str(n),
    }})
    for i in range(n)
]
signal.signal(
    signal.SIGUSR1, lambda *_: [t.send_signal(signal.SIGTERM) for t in tasks]
)
(Path("steps") / str(os.getpid())).write_text(name)
sys.exit(max(t.wait() for t in tasks))
"""
SQUEUE = """#!/bin/sh
for step in steps/*; do echo "${step#steps/} $(cat $step)"; done
"""
SCANCEL = """#!/bin/sh
kill -USR1 "$2"
"""


def test_it_is_a_script() -> None:
    """Whose variables are known, and whose components are four."""
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    text = SCRIPT.read_text(encoding="utf-8")
    assert len(re.findall("^#SBATCH hetjob$", text, re.M)) == len(TASKS) - 1
    # The script's own: the file of the others.
    used = set(re.findall(r"\bPERSIA_\w+", text)) - {"PERSIA_JOB_ENV"}
    options = {u for u in used if re.match("PERSIA_(TRAIN|SERVE|FEED)_", u)}
    assert used - options <= variables()


def _ports(job: int) -> range:
    """Of a job, as the script takes them."""
    text = SCRIPT.read_text(encoding="utf-8")
    found = re.search(r"\nPORT=\$\(\((.*)\)\)\n", text)
    assert found is not None
    expression = f"SLURM_JOB_ID={job}; echo $(({found[1]}))"
    first = int(subprocess.check_output(["bash", "-c", expression]))
    return range(first, first + 192)


def _job() -> int:
    """The number of one whose ports are free."""
    for job in range(os.getpid(), os.getpid() + 117):
        ports = _ports(job)
        with (
            contextlib.suppress(OSError),
            contextlib.ExitStack() as free,
        ):
            for i in (0, 1, 64, 128):
                free.enter_context(socket.create_server(("", ports[i])))
            return job
    raise AssertionError("all ports are taken")


def test_its_ports_are_not_those_that_the_system_gives() -> None:
    """A server of the job would find its own taken by a connection."""
    given = range(32768, 61000)  # unless who runs the machine says otherwise
    of_jobs = [_ports(job) for job in range(117)]
    every = [port for ports in of_jobs for port in ports]
    assert len(every) == len({*every})
    assert not {*every} & {*given}
    assert _ports(117) == of_jobs[0]


class Slurm:
    """The script as a job of stand-ins, in a folder; idle: Persia's commands
    only wait, and trainers save nothing."""

    def __init__(self, folder: Path, samples: int, idle: bool = False) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        persia = f'#!/bin/sh\nexec {sys.executable} -m persia "$@"\n'
        if idle:
            persia = "#!/bin/sh\nexec sleep 100\n"
        (folder / "steps").mkdir(exist_ok=True)
        for name, text in (
            ("srun", SRUN.format(python=sys.executable, tasks=TASKS)),
            ("squeue", SQUEUE),
            ("scancel", SCANCEL),
            ("scontrol", f'#!/bin/sh\necho "$@" >> {folder}/scontrol\n'),
            ("persia", persia),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        path = f"{programs}:{os.environ['PATH']}"
        job_env = JOB_ENV.format(samples=samples, folder=folder)
        if idle:
            job_env = re.sub("PERSIA_TRAIN_SAVE.*\n", "", job_env)
        (folder / "job.env").write_text(job_env)
        self.process = subprocess.Popen(
            ["bash", str(SCRIPT)],
            cwd=folder,
            env=environment(
                PATH=path,
                SLURM_JOB_ID=str(_job()),
                SLURM_NTASKS_HET_GROUP_3=str(TASKS[3]),
                OMP_NUM_THREADS="1",
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def ended(self) -> tuple[int, str]:
        """Its status, and what it printed."""
        try:
            output, _ = self.process.communicate(timeout=150)
        finally:
            self.kill()
        return self.process.returncode, output

    def kill(self) -> None:
        """All of it."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_roles_train_and_end(tmp_path: Path) -> None:
    status, output = Slurm(tmp_path, 4000).ended()
    assert status == 0, output
    assert "2 ranks" in output
    assert len(re.findall(r"serving shard [01] of 2", output)) == 2
    trained = re.findall(r"(\d+) batches were trained", output)
    assert sum(map(int, trained)) == 4, output
    assert not (tmp_path / "scontrol").exists()
    assert (tmp_path / "saved" / "LATEST").exists()


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_job_whose_time_is_over_is_queued_again(tmp_path: Path) -> None:
    """It saves, and a later one continues."""
    first = Slurm(tmp_path, 400_000)
    try:
        wait_until((tmp_path / "saved" / "LATEST").exists, 120)
        first.process.send_signal(signal.SIGTERM)
        status, output = first.ended()
    finally:
        first.kill()
    assert status == 128 + signal.SIGTERM, output
    assert "requeue" in (tmp_path / "scontrol").read_text()
    status, output = Slurm(tmp_path, 4000).ended()
    assert "continues from" in output, output


def test_a_job_that_saves_nothing_is_not_queued_again(tmp_path: Path) -> None:
    """It would begin from the start, each time."""
    job = Slurm(tmp_path, 0, idle=True)
    try:
        steps = tmp_path / "steps"
        wait_until(lambda: len(list(steps.glob("*"))) == len(TASKS), 60)
        job.process.send_signal(signal.SIGTERM)
        _, output = job.ended()
    finally:
        job.kill()
    assert not (tmp_path / "scontrol").exists(), output


@pytest.mark.skipif(not slurm.installed(), reason="no Slurm, or not root")
@pytest.mark.long
@pytest.mark.timeout(400)
def test_slurm_runs_it(tmp_path: Path) -> None:
    """Debian's, with a node for each component: all roles train, and end."""
    persia = f'#!/bin/sh\nexec {sys.executable} -m persia "$@"\n'
    (tmp_path / "persia").write_text(persia)
    (tmp_path / "persia").chmod(0o755)
    (tmp_path / "slurm").mkdir()
    job_env = JOB_ENV.format(samples=4000, folder=tmp_path)
    with slurm.cluster(tmp_path / "slurm", len(TASKS)) as env:
        path = f"{tmp_path}:{env['PATH']}"
        (tmp_path / "job.env").write_text(job_env + f"PATH={path}\n")
        sizes = [f"--ntasks={n} --cpus-per-task=1" for n in TASKS]
        done = subprocess.run(
            ["sbatch", "--wait", *" : ".join(sizes).split(), str(SCRIPT)],
            cwd=tmp_path,
            env=environment(**env),
            capture_output=True,
            text=True,
            timeout=300,
        )
        files = tmp_path.glob("slurm-*.out")
        output = "".join(file.read_text() for file in files)
    assert done.returncode == 0, done.stderr + output
    assert "2 ranks" in output
    trained = re.findall(r"(\d+) batches were trained", output)
    assert sum(map(int, trained)) == 4, output
    assert output.count("stopping") == 3, output
