"""A Slurm of its own on this machine: munged, slurmctld and two slurmd in a folder, as root, on free ports.

    python -m tests.slurm_cluster COMMAND ...

runs a command on it. Both nodes are this machine, with more cores in Slurm's book than there are. No
accounting, no cgroups: `sacct` does not work on it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.errors import InputError
from trainer.temporary import Temporary

NODES = ("splitmeter0", "splitmeter1")
CPUS_PER_NODE = 8
PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm", "munged": "munge"}
START_S, STOP_S, POLL_S = 60.0, 10.0, 0.1

CONFIG = """\
ClusterName=splitmeter
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
KillWait=5
{nodes}
PartitionName=test Nodes={names} Default=YES MaxTime=INFINITE State=UP
"""


class SlurmCluster(Temporary):
    """The cluster, for the time of a `with` block; jobs that still run in it then are ended.

    Raises:
        InputError: what it needs is not installed, or it does not come up here; one sentence.
    """

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="splitmeter-slurm-"))
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def environment(self) -> Mapping[str, str]:
        """What a command needs to speak to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, command: Sequence[str], **settings: object) -> subprocess.CompletedProcess[str]:
        """`command` to its end, with what it printed; `settings` as for subprocess.run."""
        given = {"capture_output": True, "text": True, "check": False, **settings}
        given["env"] = {**os.environ, **self.environment, **given.pop("env", {})}  # type: ignore[dict-item]
        return subprocess.run(command, **given)  # type: ignore[call-overload,no-any-return]

    def make(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise InputError("Slurm's daemons are started as root on Linux; run there")
        for program, package in PROGRAMS.items():
            if shutil.which(program) is None:
                raise InputError(f"{program} is not installed; install the package {package}")
        folder = self.folder
        folder.chmod(0o755)  # munge's socket must be within reach
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        control_port, *node_ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().partition(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE} "
            "RealMemory=1024 State=UNKNOWN"
            for name, port in zip(NODES, node_ports, strict=True)
        )
        (folder / "slurm.conf").write_text(
            CONFIG.format(
                host=host, control_port=control_port, folder=folder, nodes=nodes, names=",".join(NODES)
            )
        )
        self._daemon(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        self._wait("munge's socket", lambda: (folder / "munge.socket").exists())
        self._daemon("slurmctld", "-D", "-f", f"{folder}/slurm.conf")
        for name in NODES:
            (folder / f"spool-{name}").mkdir()
            self._daemon("slurmd", "-D", "-N", name, "-f", f"{folder}/slurm.conf")
        self._wait("idle nodes", self._is_idle)

    def _daemon(self, *command: str) -> None:
        # They end with this process, however it ends.
        tied = ["setpriv", "--pdeathsig=TERM"] if shutil.which("setpriv") else []
        log = (self.folder / f"{command[0]}-{len(self._daemons)}.out").open("wb")
        self._daemons.append(
            subprocess.Popen(
                [*tied, *command],
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )

    def _is_idle(self) -> bool:
        found = self.run(["sinfo", "--noheader", "--Node", "--format=%T"])
        return found.stdout.split() == ["idle"] * len(NODES)

    def _wait(self, what: str, is_there: object) -> None:
        deadline = time.monotonic() + START_S
        while not is_there():  # type: ignore[operator]
            for daemon in self._daemons:
                if daemon.poll() is not None:
                    raise InputError(f"{daemon.args} ended ({self._last_words()}); Slurm cannot run here")
            if time.monotonic() > deadline:
                raise InputError(f"There are no {what} after {START_S:.0f} s ({self._last_words()})")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        lines = []
        for path in (*self.folder.glob("*.out"), *self.folder.glob("*.log")):
            text = path.read_text(errors="replace").strip().splitlines()
            if text:
                lines.append(f"{path.name}: {text[-1]}")
        return "; ".join(lines)

    def close(self) -> None:
        """End the jobs and the daemons, and remove the folder."""
        if len(self._daemons) > 1:
            with suppress(subprocess.SubprocessError, OSError):
                self.run(["scancel", "--user=root", "--signal=KILL"], timeout=STOP_S)
                self.run(["scancel", "--user=root"], timeout=STOP_S)
                deadline = time.monotonic() + STOP_S
                while self.run(["squeue", "--noheader"], timeout=STOP_S).stdout and (
                    time.monotonic() < deadline
                ):
                    time.sleep(POLL_S)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with_ports = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [own.getsockname()[1] for own in with_ports]
    for own in with_ports:
        own.close()
    return ports


def main() -> int:
    try:
        with SlurmCluster() as cluster:
            return cluster.run(sys.argv[1:], capture_output=False).returncode
    except InputError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
