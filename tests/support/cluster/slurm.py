"""A Slurm cluster on this machine from Debian's daemons: munged, mariadbd, slurmdbd, slurmctld, and a slurmd per node.

Fake devices stand for GPUs. Everything is in one folder, runs as root without systemd, and ends with the process that
started it.
"""

import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGES = "munge mariadb-server-core mariadb-client-core slurmdbd slurmctld slurmd slurm-client"
PROGRAMS = ("munged", "mariadbd", "mariadb-install-db", "slurmdbd", "slurmctld", "slurmd", "sbatch", "setpriv")

MARIADB = """[mariadbd]
datadir={folder}/mysql
socket={folder}/mysql.sock
pid-file={folder}/mariadbd.pid
log-error={folder}/mariadbd.log
bind-address=127.0.0.1
port={database}
user=root
skip-name-resolve
skip-log-bin
performance_schema=off
innodb_buffer_pool_size=32M
innodb_log_file_size=8M
innodb_flush_log_at_trx_commit=0
innodb_doublewrite=0
innodb_lock_wait_timeout=900
"""
DATABASE = """CREATE DATABASE IF NOT EXISTS slurm;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm.* TO 'slurm'@'127.0.0.1';
"""
SLURMDBD = """AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={accounting}
SlurmUser=root
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""
# With a longer-lived credential, a requeued job waits for its end, two minutes by default.
SLURM = """ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={accounting}
AccountingStoragePass={folder}/munge.socket
KillWait=1
JobRequeue=1
GresTypes=gpu
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 DefMemPerCPU=100 State=UP
"""
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=4096 Gres=gpu:{gpus}\n"


def lacking() -> str:
    """Return why no cluster can be started here, or ""."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}: apt-get install --no-install-recommends {PACKAGES}"
    return "" if os.geteuid() == 0 else "needs root, to start the daemons of a cluster"


@contextmanager
def running(folder: Path) -> Iterator["Cluster"]:
    """Run a cluster for the duration of the block."""
    with Cluster(folder) as one:
        print(f"the cluster was up after {one.started:.1f} s")
        yield one


class Cluster:
    """Two nodes n1 and n2 with `gpus` each; `SLURM_CONF` points to it while it runs.

    Args:
        folder: a new folder for this cluster only.
    """

    def __init__(self, folder: Path, gpus: int = 2) -> None:
        self.folder, self.gpus = folder, gpus
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.started = 0.0

    def __enter__(self) -> "Cluster":
        begun = time.monotonic()
        self.before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        self.started = time.monotonic() - begun
        return self

    def __exit__(self, *_: object) -> None:
        if len(self.daemons) > 3:
            self.clear()
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        if self.before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = self.before

    def say(self, *command: str) -> str:
        """Run a Slurm command and return its output."""
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    def clear(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.say("scancel", "--user=root")
        self.over()

    def over(self) -> list[str]:
        """Wait until all jobs have ended; list names and states. A job still runs briefly after it wrote its result."""
        self._until(lambda: not self.say("squeue", "--noheader"), "the last job's end")
        return self.say("squeue", "--noheader", "--array", "--states=all", "--format=%j %T").splitlines()

    def _start(self) -> None:
        folder, [controller, database, accounting, *nodes] = self.folder, _ports(5)
        ports = {"controller": controller, "database": database, "accounting": accounting}
        for gpu in range(self.gpus):
            os.mknod(folder / f"gpu{gpu}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)
        (folder / "state").mkdir()
        named = {f"n{index}": port for index, port in enumerate(nodes, start=1)}
        written = {
            "my.cnf": MARIADB.format(folder=folder, **ports),
            "database.sql": DATABASE,
            "slurmdbd.conf": SLURMDBD.format(folder=folder, **ports),
            "slurm.conf": "".join(NODE.format(name=name, port=port, gpus=self.gpus) for name, port in named.items())
            + SLURM.format(folder=folder, **ports),
            "gres.conf": "".join(f"NodeName={name} Name=gpu File={folder}/gpu[0-{self.gpus - 1}]\n" for name in named),
        }
        for name, text in written.items():
            (folder / name).write_text(text)
        (folder / "slurmdbd.conf").chmod(0o600)
        self._daemon(
            "munged", "--foreground", "--force", "--num-threads=2", f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        subprocess.run(
            ["mariadb-install-db", f"--defaults-file={folder}/my.cnf", "--auth-root-authentication-method=normal",
             "--skip-test-db"], capture_output=True, check=True,
        )  # fmt: skip
        self._daemon(
            "mariadbd", f"--defaults-file={folder}/my.cnf", f"--init-file={folder}/database.sql", port=database
        )
        self._daemon("slurmdbd", "-D", port=accounting)
        self._daemon("slurmctld", "-D", port=controller)
        for name, port in named.items():
            self._daemon("slurmd", "-D", "-N", name, port=port)
        self._until(lambda: len(self.say("sinfo", "-hN", "-t", "idle").split("\n")) > len(named), "idle nodes")

    def _daemon(self, *command: str, port: int | None = None) -> None:
        with open(self.folder / f"{command[0]}.{len(self.daemons)}.out", "wb") as out:
            # The kernel sends this signal even if the tests are killed.
            started = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        self.daemons.append(started)
        self._until(lambda: port is None or _open(port), f"{command[0]}")

    def _until(self, holds: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if dead := [daemon for daemon in self.daemons if daemon.poll() is not None]:
                raise RuntimeError(f"{dead[0].args} ended: see {self.folder}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds} s for {what}: see {self.folder}")
            time.sleep(0.05)


def _open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def _ports(count: int) -> list[int]:
    """Find free ports."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
