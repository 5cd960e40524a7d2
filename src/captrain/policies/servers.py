"""A server of our own under vLLM's interface: a child process that is started, watched, restarted and stopped here.

A server that has died, or no longer says that it is healthy, is started again with the adapters it had; one that does
so again and again, or never gets healthy, ends the run with its last words. Adapters are loaded under their content
hash, and before anything is asked of a name it is looked up what the server understands by it. Which port, process and
GPUs those are is no part of any result.
"""

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from captrain.config import VLLM
from captrain.errors import UserError
from captrain.models import Endpoint, TransientFault

if TYPE_CHECKING:
    import openai

LOGS = Path(".cache/servers")
KEEPER = Path(__file__).with_name("keeper.py")
GRACE = 20.0
"""Seconds that a server may take to finish what it has begun and to end."""
POLL = 0.1
HEALTH = 30.0
"""Seconds in which a server must say that it is healthy, once it is suspected."""
FRUITLESS = 3
"""Starts of one server without a single answer between them, after which it is given up."""
FATAL = 3
"""Deaths of servers during the same request, after which it is sent no more: others are answered between them."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank."""
TAIL = 20
"""Last lines of a server's log that are shown."""
ERRORS = 3
"""Last errors before these that are shown."""
RAISED = re.compile(r"\b[A-Z]\w*(Error|Exception): .*")


def served_rank(machine: VLLM) -> int:
    """Return the least --max-lora-rank that takes the sum of as many adapters as may act together, or else vLLM's
    largest.

    Raises:
        UserError: a single adapter is beyond that.
    """
    if machine.max_lora_rank > RANKS[-1]:
        raise UserError(
            f"machine.vllm.max_lora_rank = {machine.max_lora_rank}, and vLLM takes adapters up to {RANKS[-1]}",
            "set it to the rank of the adapters that are trained",
        )
    return next((rank for rank in RANKS if rank >= machine.max_lora_rank * machine.max_loras), RANKS[-1])


class Service(NamedTuple):
    """All that decides which servers are started: how (`machine`), with which model (`source`, a folder or a name),
    under which `name`, with which arguments that decide what is answered, and with how many seconds for a request."""

    machine: VLLM
    source: str
    name: str
    settings: tuple[str, ...]
    timeout: float


class Place(NamedTuple):
    """A server as it was started last: its port, the number of its starts, and the file of its output."""

    port: int
    starts: int
    log: Path


class Answering(Endpoint):
    """A server that answers requests of this process, whichever process has started it.

    Args:
        service: what it serves.
        number: among its kind.
    """

    def __init__(self, service: Service, number: int) -> None:
        self.service, self.machine, self.number = service, service.machine, number
        self.name = self.served = service.name
        self.retries, self.timeout = 0, service.timeout  # what to do after a fault is known here, not to the library
        self.endpoint = self.key = ""
        self.episodes = self.starts = 0
        self._port = 0

    @cached_property
    def client(self) -> "openai.OpenAI":
        """See `Endpoint.client`; of the server as it was started last."""
        import openai

        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self._port}/v1",
            api_key=self._secret,
            max_retries=0,
            timeout=self.timeout,
            http_client=openai.DefaultHttpxClient(trust_env=False),
        )

    @property
    def _secret(self) -> str:
        return "none-is-asked-for"

    def _mistake(self, status: int, message: str) -> UserError:
        return UserError(
            f"{self._label} refuses a request to {self.name} ({message})",
            f"correct the settings of policy vllm or machine.vllm.arguments; {self.log} has what it said",
        )

    @property
    def _label(self) -> str:
        return f"server {self.number} of policy vllm"

    @property
    def log(self) -> Path:
        """File that the server's output goes to."""
        raise NotImplementedError

    def mark_useful(self) -> None:
        """Say that the server has done something useful since its start."""
        raise NotImplementedError

    def mend(self, starts: int, request: str = "") -> None:
        """Start the server again after a fault, if it is dead or not healthy.

        Args:
            starts: `starts` as it was when the request was sent; a server that was started since is left alone.
            request: what was sent, by a digest.

        Raises:
            UserError: it is of no use to start it yet another time.
        """
        raise NotImplementedError


class Replica(Answering):
    """vLLM server of one replica, a child process that is started, watched and mended here."""

    def __init__(self, service: Service, number: int) -> None:
        super().__init__(service, number)
        self.source, self.settings = service.source, list(service.settings)
        self.adapters: dict[str, Path] = {}
        self._fruitless = 0
        self._deaths = Counter[str]()
        """Deaths of this server, by the requests that were under way."""
        self._process: subprocess.Popen[bytes] | None = None
        self._asleep = False
        self._lock = threading.RLock()

    @property
    def place(self) -> Place:
        """The server as it was started last."""
        return Place(self._port, self.starts, self.log)

    @property
    def log(self) -> Path:
        """See `Answering`."""
        return LOGS / f"{os.getpid()}-{self.number}.log"

    def mark_useful(self) -> None:
        """See `Answering`."""
        self._fruitless = 0

    def ready(self) -> None:
        """Start the server if it is not there, and wake it if it sleeps.

        Raises:
            UserError: there is no such interpreter, or the server does not get healthy, or serves another model.
        """
        with self._lock:
            if self._asleep:
                self._turn("/wake_up")
            self._asleep = False
            if self._process is None:
                self._start()

    def sleep(self) -> None:
        """Let the server give its GPUs to others; it keeps its weights and adapters in the memory of the machine."""
        with self._lock:
            self._asleep = self._process is not None and self._turn("/sleep?level=1")

    def _turn(self, path: str) -> bool:
        """Let the server fall asleep or wake; one that fails at it is stopped, and started again when it is needed."""
        try:
            self._control(path, {})
        except TransientFault as fault:
            print(f"{self._label} does not answer {path} ({fault}): it is stopped", file=sys.stderr)
            self._kill()
        return self._process is not None

    def mend(self, starts: int, request: str = "") -> None:
        """See `Answering`."""
        with self._lock:
            if starts == self.starts and self._process is not None and self._healthy(HEALTH):
                return
            self._deaths[request] += request != ""
            if self._deaths[request] >= FATAL:
                raise self._useless(f"died {FATAL} times while it answered one and the same request")
            if starts != self.starts:
                return
            problem = (
                self._exit() if self._process is not None and self._process.poll() is not None else "is not healthy"
            )
            print(f"{self._label} {problem}: it is started again", file=sys.stderr)
            self._kill()
            self._start()

    def _start(self) -> None:
        if self._fruitless >= FRUITLESS:
            raise self._useless(f"was started {FRUITLESS} times and never answered a request")
        interpreter = shutil.which(os.path.expanduser(self.machine.python))
        if interpreter is None:
            raise UserError(
                f"machine.vllm.python = {self.machine.python!r} is not an interpreter",
                "install vLLM in an environment of its own (python -m venv, pip install vllm) and name its interpreter",
            )
        self._fruitless += 1
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.__dict__.pop("client", None)
        command = [
            *(sys.executable, "-I", str(KEEPER), str(GRACE), interpreter, *self.machine.command, self.source),
            *("--host", "127.0.0.1", "--port", str(self._port), "--served-model-name", self.name, "--enable-lora"),
            *("--max-lora-rank", str(served_rank(self.machine)), "--max-loras", str(self.machine.max_loras)),
            *self.settings,
            *self.machine.arguments,
        ]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab" if self.starts else "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment(), start_new_session=True
            )
        self.starts += 1
        if not self._healthy(self.machine.start_timeout):
            dead = self._process.poll() is not None
            limit = f"is not healthy after {self.machine.start_timeout:g} seconds"
            raise self._useless(self._exit() if dead else limit)
        try:
            self._check(self.name, self.source)
            for name, folder in self.adapters.items():
                self._load(name, folder)
        except TransientFault as fault:
            raise self._useless(f"fails at once ({fault})") from None

    def _environment(self) -> dict[str, str]:
        """Copy our environment without what would lead the server's interpreter to our packages."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        env |= {"VLLM_SERVER_DEV_MODE": "1"} if self.machine.sleeps else {}
        return env | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} | devices(self.machine, self.number)

    def _healthy(self, seconds: float) -> bool:
        """Wait until the server reports that it is healthy, at most so many seconds; False as soon as it has ended."""
        assert self._process is not None
        deadline = time.monotonic() + seconds
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(TransientFault):
                self._control("/health", timeout=HEALTH)
                return True
            time.sleep(POLL)
        return False

    def _exit(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        return f"died ({f'signal {status - 128}' if status > 128 else f'exit status {status}'})"

    def _useless(self, problem: str) -> UserError:
        self._kill()
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        # What it died of may stand far above what is said at its end.
        errors = {match[0]: None for line in lines[:-TAIL] if (match := RAISED.search(line))}
        last_words = [*[*errors][-ERRORS:], *lines[-TAIL:]]
        output = "".join(f"\n    {line}" for line in last_words) or " (it said nothing)"
        return UserError(
            f"{self._label} {problem}:{output}",
            f"correct machine.vllm (python, arguments, gpus, start_timeout) and run again; {self.log} has all it said",
        )

    def _control(self, path: str, body: Mapping[str, object] | None = None, timeout: float = 600.0) -> str:
        """Send a request other than for completions, GET without a body, and return the answer's text.

        Raises:
            TransientFault: a fault of the server, or no answer.
            UserError: it refuses the request.
        """
        data = None if body is None else json.dumps(body).encode()
        url, kind = f"http://127.0.0.1:{self._port}{path}", {"Content-Type": "application/json"}
        try:
            # A proxy has no business between a process and its child.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(urllib.request.Request(url, data, kind), timeout=timeout) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            message = self._excerpt(f"{error.code}: {error.read().decode(errors='replace')}")
            raise (TransientFault(message) if error.code >= 500 else self._mistake(error.code, message)) from None
        except (OSError, http.client.HTTPException) as error:
            raise TransientFault(self._excerpt(f"{type(error).__name__}: {error}")) from None

    def _check(self, name: str, root: str) -> bool:
        """Return whether the server has a model of this name.

        Raises:
            UserError: it has, and it is another one.
        """
        models = {model["id"]: model for model in json.loads(self._control("/v1/models"))["data"]}
        if name not in models:
            return False
        model = models[name]
        # vLLM tells where it has a model from; the embedded server also what it is.
        if model.get("root") != root or (root != self.source and model.get("digest", name) != name):
            raise UserError(
                f"{self._label} serves {model.get('root')} ({model.get('digest', 'no digest')}) as {name}, and asked "
                f"was {root}",
                "remove what machine.vllm.arguments say of models and adapters",
            )
        return True

    def hold(self, adapters: Mapping[str, Path], users: Callable[[], Collection[str]]) -> None:
        """Serve adapters, each under its digest, and let go of those that nobody acts with.

        Args:
            adapters: digest -> folder, which stays as long as somebody acts with it.
            users: says which adapters anybody acts with at this moment, those of the caller among them.
        """
        with self._lock:
            for name, folder in adapters.items():
                if name not in self.adapters:
                    self._add(name, folder)
            acting = users()
            for name in [name for name in self.adapters if name not in acting]:
                self._remove(name)

    def _add(self, name: str, folder: Path) -> None:
        starts = self.starts
        try:
            self._load(name, folder)
        except TransientFault:
            self.mend(starts)
            try:
                self._load(name, folder)
            except TransientFault as fault:
                raise UserError(
                    f"{self._label} does not take adapter {name} from {folder} ({fault})",
                    f"see {self.log}; machine.vllm.max_lora_rank is {self.machine.max_lora_rank}",
                ) from None
        self.adapters[name] = folder

    def _remove(self, name: str) -> None:
        starts = self.starts
        del self.adapters[name]
        try:
            self._control("/v1/unload_lora_adapter", {"lora_name": name})
        except TransientFault as fault:
            self.mend(starts)  # one that was started again has it no more
            if self.starts == starts:
                raise UserError(
                    f"{self._label} does not let go of adapter {name} ({fault})", f"see {self.log}"
                ) from None

    def _load(self, name: str, folder: Path) -> None:
        if self._check(name, str(folder)):
            return
        self._control("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        if not self._check(name, str(folder)):
            raise TransientFault(f"model server: it took adapter {name} and does not list it")

    def dismiss(self) -> None:
        """Ask the server to end, and all that it has started; it may finish first what it has begun."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self) -> None:
        """Stop the server and wait for its end."""
        with self._lock:
            self.dismiss()
            if self._process is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE + POLL)
            self._kill()
            self.adapters.clear()

    def _kill(self) -> None:
        process, self._process, self._asleep = self._process, None, False
        if process is not None:
            process.terminate()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def devices(machine: VLLM, number: int) -> dict[str, str]:
    """Make the environment that shows a replica its GPUs, counted from the last visible one.

    Raises:
        UserError: there are not so many.
    """
    if not machine.gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        import torch

        visible = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = [gpu for gpu in visible.split(",") if gpu]
    if len(gpus) < machine.replicas * machine.gpus:
        raise UserError(
            f"machine.vllm asks for {machine.replicas} x {machine.gpus} GPUs, and {len(gpus)} are visible",
            "ask for fewer replicas or gpus; 0 gpus where the servers are to find their own",
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[::-1][number * machine.gpus :][: machine.gpus])}
