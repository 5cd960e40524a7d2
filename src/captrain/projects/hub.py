"""Writes adapters and environments into a folder for the Hugging Face Hub, and sends it.

Everything is checked first: each adapter must match its index, each environment its passport, and no text may contain
something that looks like a key. Only `send` sends anything.
"""

import json
import shutil
from pathlib import Path
from typing import Literal

import yaml

from captrain import __version__
from captrain.environments import load_environment, read_passports
from captrain.errors import UserError
from captrain.models import Adapter, adapter_config, require_trained
from captrain.records import file_digest, publish_json, publish_text, read_index, redacted
from captrain.run import Machine, load_spec

ShippedKind = Literal["adapters", "environments"]
REPOSITORIES: dict[ShippedKind, str] = {"adapters": "model", "environments": "dataset"}
"""Repository types on the hub."""
ROUTES = ("routes.csv", "compositions.json")
LISTING = "digests.json"
"""File with the digest of every other."""


def write_shipment(kind: ShippedKind, root: Path, folder: Path, stage: str = "adapters") -> list[str]:
    """Write the files to send.

    Args:
        kind: adapters or environments.
        root: the project.
        folder: folder to write into.
        stage: stage that trained the adapters, or wrote the environments.

    Returns:
        The files, relative to the folder.

    Raises:
        UserError: there is none, one was altered, or a text contains something that looks like a key.
        EnvironmentFault: an environment does not load.
    """
    (_write_adapters if kind == "adapters" else _write_environments)(root, folder, stage)
    spec = load_spec(root / "results/spec.yaml").model_dump(mode="json", by_alias=True, exclude={"machine"})
    publish_text(folder / "spec.yaml", yaml.safe_dump(spec, sort_keys=False, allow_unicode=True))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in paths:
        text = path.read_bytes().decode(errors="replace") if path.suffix != ".safetensors" else ""
        if redacted(text) != text:
            raise UserError(
                f"{path.relative_to(folder)} contains something that looks like a key", "remove the key from it"
            )
    digests = {str(path.relative_to(folder)): file_digest(path) for path in paths}
    lock = root / "dvc.lock"
    locked = {"dvc.lock": file_digest(lock)} if lock.exists() else {}
    publish_json(folder / LISTING, {"captrain": __version__, "stage": stage, **locked, "files": digests})
    return [*digests, LISTING]


def send(kind: ShippedKind, folder: Path, repository: str, private: bool) -> str:
    """Send a folder to the hub, and return the address of the commit.

    Args:
        kind: adapters or environments.
        folder: the folder that `write_shipment` wrote.
        repository: OWNER/NAME, created if it is missing. Its other files stay.
        private: whether a new repository is private.

    Raises:
        UserError: the hub refuses it, or does not answer.
    """
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    hub, type_on_hub = HfApi(library_name="captrain", library_version=__version__), REPOSITORIES[kind]
    try:
        hub.create_repo(repository, repo_type=type_on_hub, private=private, exist_ok=True)
        commit = hub.upload_folder(
            repo_id=repository,
            repo_type=type_on_hub,
            folder_path=folder,
            commit_message=f"{kind.capitalize()} of captrain {__version__}",
        )
    except (HfHubHTTPError, LocalTokenNotFoundError, HFValidationError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"the hub refuses {repository}: {error}",
            "name it OWNER/NAME, unset HF_HUB_OFFLINE, and run `hf auth login` or set HF_TOKEN with write access",
        ) from error
    except httpx2.HTTPError as error:
        raise UserError(
            f"the hub does not answer: {error}", "check the network and HF_ENDPOINT, and send it again"
        ) from error
    return commit.commit_url


def _write_adapters(root: Path, folder: Path, stage: str) -> None:
    """Write the adapters of a stage in PEFT format with their model cards, and the routes to them."""
    index = root / "results" / stage / "index.json"
    rows = read_index(index, f"run `dvc repro {stage}`, or name another stage with --stage")
    if not rows:
        raise UserError(f"{index} names no adapter", "name another stage with --stage")
    bases = set[str]()
    for name, row in rows.items():
        source = root / row.path
        require_trained(Adapter(str(source), row.digest), stage)
        shutil.copytree(source, folder / name)
        bases.add(str(adapter_config(source)["base_model_name_or_path"]))
    shutil.copy(index, folder / "index.json")
    routes = [root / "results/routes" / name for name in ROUTES if stage == "adapters"]
    for path in filter(Path.exists, routes):
        (folder / "routes").mkdir(exist_ok=True)
        shutil.copy(path, folder / "routes" / path.name)
    [base] = bases
    table = "".join(f"| [{name}]({name}/README.md) | `{row.digest}` |\n" for name, row in rows.items())
    first = next(iter(rows))
    publish_text(
        folder / "README.md",
        f"""---
library_name: peft
base_model: {json.dumps(base)}
tags: [captrain, lora]
---
# LoRA adapters of captrain

One adapter for each capability that the agent lacked, in plain PEFT format, named by its content; `digests.json` has
the digest of every file, `spec.yaml` the settings of the run, `routes/` which task is given to which adapter.

| adapter | content hash |
|---|---|
{table}
```python
from peft import PeftModel

model = PeftModel.from_pretrained(base, "OWNER/NAME", subfolder={json.dumps(first)})  # base: {base}
```
""",
    )


def _write_environments(root: Path, folder: Path, stage: str) -> None:
    """Write the environments that passed, with passports and pages."""
    stage = "environments" if stage == "adapters" else stage
    source, spec = root / "results" / stage, load_spec(root / "results/spec.yaml")
    passports = {name: passport for name, passport in read_passports(source).items() if passport.passed}
    if not passports:
        raise UserError(f"{source} has no environment with a passport", "run `dvc repro environments`")
    machine: Machine = spec.machine
    for name, passport in passports.items():
        load_environment(source, passport, machine)  # raises if the file was changed
        for ending in (".py", ".passport.json", ".md"):
            if (path := source / f"{name}{ending}").exists():
                shutil.copy(path, folder / path.name)
    table = "".join(f"| [{name}]({name}.py) | `{passport.environment}` |\n" for name, passport in passports.items())
    publish_text(
        folder / "README.md",
        f"""---
tags: [captrain, environment, reinforcement-learning, agent]
---
# Training environments of captrain

One self-contained file of Python for each capability that the agent lacked, with the passport that it has earned;
`digests.json` has the digest of every file. `captrain validate FILE` examines one again, and
`captrain export-environment FILE --to openenv|verifiers|trl` makes a package of it.

| environment | fingerprint |
|---|---|
{table}""",
    )
