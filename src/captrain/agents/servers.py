"""Starts, watches, restarts and stops vLLM servers as child processes.

A server that dies or becomes unhealthy is restarted with the adapters it had. If it keeps dying or never becomes
healthy, the run ends with an error that shows the last lines of the server's log. Adapters are loaded under their
content hash. Before captrain uses a model name, it checks what the server serves under that name. Ports, processes and
GPUs never change a result.

A fleet is all servers of one model. They run while they are needed. Servers belong to the process that started them, so
work items that sample from them run one after another, and the first process of a training samples for all its
processes. The fleet serves an adapter from its own copy of the folder: two trainings may use equal adapters, and each
may remove its folder at any time.
"""

import atexit
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from captrain.errors import UserError
from captrain.models import Endpoint, TransientFault, adapter_config
from captrain.records import digest
from captrain.run import VLLM, copy_clean

LOGS = Path(".cache/servers")
KEEPER = Path(__file__).with_name("keeper.py")
GRACE = 20.0
"""Seconds that a server gets to finish its requests and exit. After that it is killed."""
POLL = 0.1
HEALTH = 30.0
"""Timeout of a health check, in seconds."""
FRUITLESS = 3
"""captrain gives up on a server after this many starts without an answer in between."""
FATAL = 3
"""captrain gives up on a server that died this many times during the same request, even if it answers others."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
TAIL = 20
"""Number of last log lines that an error shows."""
ERRORS = 3
"""Number of earlier exceptions in the log that an error shows above these lines."""
RAISED = re.compile(r"\b[A-Z]\w*(Error|Exception): .*")


def served_rank(machine: VLLM) -> int:
    """Return the value of --max-lora-rank: the smallest that fits a sum of `max_loras` adapters, or vLLM's largest.

    Raises:
        UserError: a single adapter exceeds vLLM's largest rank.
    """
    if machine.max_lora_rank > RANKS[-1]:
        raise UserError(
            f"machine.vllm.max_lora_rank = {machine.max_lora_rank}, and vLLM takes adapters up to {RANKS[-1]}",
            "set it to the rank of the adapters that are trained",
        )
    return next((rank for rank in RANKS if rank >= machine.max_lora_rank * machine.max_loras), RANKS[-1])


def check_ranks(adapters: Iterable[Path], machine: VLLM) -> None:
    """Check, before any rollout, that the servers can load the adapters.

    Args:
        adapters: folders of plain PEFT adapters.
        machine: how the servers are started.

    Raises:
        UserError: the rank of an adapter exceeds that of the servers. The rank of a composition is the sum of its
            members' ranks.
    """
    limit = served_rank(machine)
    for folder in adapters:
        rank = adapter_config(folder)["r"]
        if rank > limit:
            raise UserError(
                f"the adapter in {folder} has rank {rank}, and servers of policy vllm are started for {limit}",
                f"raise machine.vllm.max_loras ({machine.max_loras}: adapters that act together, each of rank "
                f"{machine.max_lora_rank}; vLLM takes {RANKS[-1]} at most), or compose fewer (router.p, router.most)",
            )


class Service(NamedTuple):
    """Everything that decides which servers are started.

    machine: how the servers are started. source: the model, a folder or a hub name. name: the name it is served under.
    settings: server arguments that change the answers. timeout: seconds for one request.
    """

    machine: VLLM
    source: str
    name: str
    settings: tuple[str, ...]
    timeout: float


class VllmServer(Endpoint):
    """One server, a child of this process.

    Args:
        service: what it serves.
        number: its place in the fleet.
    """

    proxied = False  # requests on this machine go past any proxy

    def __init__(self, service: Service, number: int) -> None:
        self.service, self.machine, self.number = service, service.machine, number
        self.name = self.served = service.name
        self.retries, self.timeout = 0, service.timeout  # captrain retries, not the client library
        self.port, self.starts, self.log = 0, 0, LOGS
        self.endpoint = self.key = ""  # no environment variable names them
        self._label = f"server {number} of policy vllm"
        self.episodes = 0
        self.fruitful = 0
        """Number of the latest start after which the server answered a request or was stopped on purpose."""
        self.adapters: dict[str, Path] = {}
        self._deaths = Counter[str]()
        """How often this server died, by the digest of the request it was answering."""
        self._process: subprocess.Popen[bytes] | None = None
        self._writer = threading.Thread()  # of its log
        self._lock = threading.RLock()

    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def _secret(self) -> str:
        return "none-is-asked-for"

    def _mistake(self, status: int, message: str) -> UserError:
        return UserError(
            f"{self._label} refuses a request to {self.name} ({message})",
            f"correct the settings of policy vllm or machine.vllm.arguments; its log is {self.log}",
        )

    def listen(self, port: int, log: Path) -> None:
        """Count a start, and send all further requests to this port."""
        self.port, self.log, self.starts = port, log, self.starts + 1
        self.__dict__.pop("client", None)

    def ready(self) -> None:
        """Start the server if it is not running.

        Raises:
            UserError: the interpreter is missing, or the server never becomes healthy or serves another model.
        """
        with self._lock:
            if self._process is None:
                self._start()

    def mend(self, starts: int, request: str = "") -> None:
        """Restart the server after a fault, if it is dead or unhealthy.

        Args:
            starts: the value of `self.starts` when the request was sent. If the server was restarted since, it is not
                restarted again.
            request: digest of the failed request.

        Raises:
            UserError: the server failed too often, see `FRUITLESS` and `FATAL`.
        """
        with self._lock:
            problem = ""
            if starts == self.starts:
                problem = self._fault(HEALTH) if self._process is not None else "was stopped"
                if not problem:
                    return
            self._deaths[request] += request != ""
            if self._deaths[request] >= FATAL:
                raise self._given_up(f"died {FATAL} times while it answered one and the same request")
            if problem:
                print(f"{self._label} {problem}: it is started again", file=sys.stderr)
                self._kill()
                self._start()

    def _start(self) -> None:
        if self.starts - self.fruitful >= FRUITLESS:
            raise self._given_up(f"was started {FRUITLESS} times and never answered a request")
        interpreter = shutil.which(os.path.expanduser(self.machine.python))
        if interpreter is None:
            raise UserError(
                f"machine.vllm.python = {self.machine.python!r} is not an interpreter",
                "install vLLM in an environment of its own (python -m venv, pip install vllm) and name its interpreter",
            )
        log = LOGS / f"{os.getpid()}-{self.number}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.listen(free.getsockname()[1], log)
        command = [
            *(sys.executable, "-I", str(KEEPER), str(GRACE), interpreter, *self.machine.command, self.service.source),
            *("--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", self.name, "--enable-lora"),
            *("--max-lora-rank", str(served_rank(self.machine)), "--max-loras", str(self.machine.max_loras)),
            *self.service.settings,
            *self.machine.arguments,
        ]
        log.parent.mkdir(parents=True, exist_ok=True)
        if self.starts == 1:
            log.write_bytes(b"")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=server_environment(self.machine, self.number),
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._writer = threading.Thread(target=copy_clean, args=(self._process.stdout, log.absolute()), daemon=True)
        self._writer.start()
        if problem := self._fault(self.machine.start_timeout):
            raise self._given_up(problem)
        try:
            self._check(self.name, self.service.source)
            for name, folder in self.adapters.items():
                self._load(name, folder)
        except TransientFault as fault:
            raise self._given_up(f"fails at once ({fault})") from None

    def _fault(self, seconds: float) -> str:
        """Wait up to `seconds` until the server is healthy. Return "", or the problem if it is not."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            with suppress(TransientFault):
                self._control("/health", timeout=HEALTH)
                return ""
            if time.monotonic() > deadline:
                return f"is not healthy after {seconds:g} seconds"
            time.sleep(POLL)
        status = self._process.wait()
        return f"died ({f'signal {status - 128}' if status > 128 else f'exit status {status}'})"

    def _given_up(self, problem: str) -> UserError:
        """Stop the server. Return an error that quotes the end of its log."""
        self._kill()
        lines = [line for line in self.log.read_text(errors="replace", encoding="utf-8").splitlines() if line.strip()]
        # The exception that caused the failure may be far above the last lines.
        errors = {match[0]: None for line in lines[:-TAIL] if (match := RAISED.search(line))}
        last_words = [*[*errors][-ERRORS:], *lines[-TAIL:]]
        output = "".join(f"\n    {line}" for line in last_words) or " (its log is empty)"
        return UserError(
            f"{self._label} {problem}:{output}",
            f"correct machine.vllm (python, arguments, gpus, start_timeout) and run again; its log is {self.log}",
        )

    def _control(self, path: str, body: Mapping[str, object] | None = None, timeout: float = 600.0) -> str:
        """Send a request to a management path: GET if `body` is None, else POST. Return the text of the answer.

        Raises:
            TransientFault: the server failed or did not answer.
            UserError: the server refused the request.
        """
        import httpx2

        url = f"http://127.0.0.1:{self.port}{path}"
        settings = {"cast_to": httpx2.Response, "options": {"timeout": timeout}}
        if body is None:
            return self._sent(self.client.get, path=url, **settings).text
        return self._sent(self.client.post, path=url, body=body, **settings).text

    def _check(self, name: str, root: str) -> bool:
        """Return whether the server serves a model under this name.

        Raises:
            UserError: the server serves another model under this name.
        """
        models = {model["id"]: model for model in json.loads(self._control("/v1/models"))["data"]}
        if name not in models:
            return False
        model = models[name]
        # vLLM reports the path of a model; captrain's own server also its digest.
        if model.get("root") != root or (name != self.name and model.get("digest", name) != name):
            raise UserError(
                f"{self._label} serves {model.get('root')} ({model.get('digest', 'no digest')}) as {name}, and asked "
                f"was {root}",
                "remove models and adapters from machine.vllm.arguments",
            )
        return True

    def hold(self, adapters: Mapping[str, Path], users: Callable[[], Collection[str]]) -> None:
        """Load adapters under their digests, and unload adapters that are not in use.

        Args:
            adapters: digest -> folder. The folder must exist as long as the adapter is in use.
            users: returns the digests of the adapters that are in use now, including the caller's.
        """
        with self._lock:
            for name in adapters.keys() - self.adapters.keys():
                self._change(name, adapters[name])
            for name in self.adapters.keys() - set(users()):
                self._change(name, None)

    def _change(self, name: str, folder: Path | None) -> None:
        """Load an adapter from its folder, or unload it if `folder` is None. Retries once.

        `self.adapters` is updated first, so a server that is restarted in between loads the new set of adapters.
        """
        before, starts = self.adapters, self.starts
        remaining = {adapter: path for adapter, path in before.items() if adapter != name}
        self.adapters = remaining if folder is None else {**remaining, name: folder}
        try:
            try:
                if folder is not None:
                    self._load(name, folder)
                else:
                    self._control("/v1/unload_lora_adapter", {"lora_name": name})
            except TransientFault:
                self.mend(starts)
                if self.starts == starts:
                    if folder is not None:
                        self._load(name, folder)
                    elif self._check(name, str(before[name])):
                        raise  # the adapter is still loaded, so the request itself failed and not only its answer
        except BaseException as fault:
            self.adapters = before
            if not isinstance(fault, TransientFault):
                raise
            action = f"take adapter {name} from {folder}" if folder else f"let go of {name}"
            limit = f"; machine.vllm.max_lora_rank is {self.machine.max_lora_rank}" if folder else ""
            raise UserError(f"{self._label} does not {action} ({fault})", f"see {self.log}{limit}") from None

    def _load(self, name: str, folder: Path) -> None:
        if not self._check(name, str(folder)):
            self._control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
            if not self._check(name, str(folder)):
                raise TransientFault(f"model server: it took adapter {name} and does not list it")

    def dismiss(self) -> None:
        """Ask the server and its children to exit after their current requests. Does not wait."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """Stop the server and wait until it has exited."""
        with self._lock:
            self.dismiss()
            with suppress(subprocess.TimeoutExpired):
                if self._process is not None:
                    self._process.wait(GRACE + POLL)
            self._kill()
            self.adapters, self.fruitful = {}, self.starts  # earlier starts no longer count

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
            self._writer.join(1.0)  # the log is then complete


def server_environment(machine: VLLM, number: int) -> dict[str, str]:
    """Return the environment variables of a server.

    captrain's own Python settings are removed. GPUs are assigned from the last visible one downwards, so the first
    ones stay free for training.

    Raises:
        UserError: too few GPUs are visible.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
    if machine.gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None:
            import torch

            visible = ",".join(map(str, range(torch.cuda.device_count())))
        gpus = [gpu for gpu in visible.split(",") if gpu]
        if len(gpus) < machine.replicas * machine.gpus:
            raise UserError(
                f"machine.vllm asks for {machine.replicas} x {machine.gpus} GPUs, and {len(gpus)} are visible",
                "set fewer replicas or gpus; 0 gpus lets the servers find their own",
            )
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[::-1][number * machine.gpus :][: machine.gpus])
    return env


class Fleet:
    """The servers of one service: started on first use, stopped by `close` or when this process ends."""

    def __init__(self, service: Service) -> None:
        self.service, self.machine = service, service.machine
        self.servers = [VllmServer(service, number) for number in range(self.machine.replicas)]
        self.folder = (LOGS / f"{os.getpid()}-{digest(*service)[:8]}").resolve()
        """Folder with the fleet's copies of the adapters."""
        self._in_use: Counter[str] = Counter()
        self._lock = threading.Lock()
        atexit.register(self.close)

    @contextmanager
    def serving(self, adapters: Mapping[str, Path]) -> Iterator[None]:
        """Start servers that are down, and serve these adapters under their digests inside the block.

        Adapters that are no longer in use are unloaded.

        Raises:
            UserError: a server does not start, or rejects an adapter.
        """
        check_ranks(adapters.values(), self.machine)
        with self._lock:
            for name, folder in adapters.items():
                if not (self.folder / name).exists():
                    shutil.rmtree(aside := self.folder / f"{name}.new", ignore_errors=True)
                    shutil.copytree(folder, aside)
                    aside.rename(self.folder / name)
            self._in_use.update(adapters.keys())
        try:
            with ThreadPoolExecutor(len(self.servers)) as threads:
                # Wait for all, so that no server is still starting when the first error is raised.
                list(threads.map(VllmServer.ready, self.servers))
                if adapters:
                    copies = {name: self.folder / name for name in adapters}
                    list(threads.map(lambda server: server.hold(copies, self._users), self.servers))
                    self._remove_copies()
            yield
        finally:
            with self._lock:
                self._in_use.subtract(adapters.keys())

    def _remove_copies(self) -> None:
        """Remove the copies of adapters that no server has loaded."""
        with self._lock:
            loaded = {name for server in self.servers for name in server.adapters}
            for path in self.folder.iterdir():
                if path.name not in loaded and self._in_use[path.name] < 1:
                    shutil.rmtree(path)

    def _users(self) -> Collection[str]:
        with self._lock:
            return {name for name, count in self._in_use.items() if count > 0}

    @contextmanager
    def server(self) -> Iterator[VllmServer]:
        """Yield the server with the fewest episodes, and count one more for it inside the block."""
        with self._lock:
            server = min(self.servers, key=lambda candidate: candidate.episodes)
            server.episodes += 1
        try:
            yield server
        finally:
            with self._lock:
                server.episodes -= 1

    def close(self) -> None:
        """Stop all servers; they start again on the next use."""
        for server in self.servers:
            server.dismiss()
        for server in self.servers:
            server.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


fleets: dict[str, Fleet] = {}
"""Digest of a service -> its fleet, for all fleets of this process."""
_lock = threading.Lock()


def fleet_of(service: Service) -> Fleet:
    """Return the fleet of a service. Within a process, equal services share one fleet."""
    key = digest(*service)
    with _lock:
        if key not in fleets:
            fleets[key] = Fleet(service)
        return fleets[key]


def stop_servers() -> None:
    """Stop all servers of this process; they start again on the next use."""
    for fleet in fleets.values():
        fleet.close()
