"""An environment's file and passport are checked before anything in it runs."""

import json
import os
import py_compile
from pathlib import Path

import pytest

from captrain.comparison.baselines.untargeted import narrowed_desk
from captrain.contract import load_file
from captrain.environments import load_environment, read_passports
from captrain.environments.loading import is_own_text
from captrain.environments.synthesizer import Brief
from captrain.environments.templates import CONTROLS, DEFICITS, PAIRS, TemplateSynthesizer
from captrain.errors import EnvironmentFault, UserError
from captrain.records import Capability, Passport, digest, file_digest, publish_json
from captrain.run import Machine

BASIC = Machine(workers=1, batch=1, sandbox="basic")


def text_of(name: str, description: str = "") -> str:
    return TemplateSynthesizer().synthesize(Brief(Capability(id=name, name=name, description=description), []), [])


def publish(folder: Path, name: str, text: str) -> Passport:
    """Write a file of our own text and its passport."""
    path = folder / f"{name}.py"
    path.write_text(text)
    passport = Passport(
        capability=name,
        environment=digest(name, file_digest(path)),
        attempt=0,
        passed=True,
        trusted=True,
        calibration_tasks=0,
        checks=[],
    )
    publish_json(folder / f"{name}.passport.json", passport)
    return passport


def test_a_changed_file_that_is_marked_as_ours_is_refused_before_any_of_it_runs(tmp_path: Path) -> None:
    publish(tmp_path, "wrong_record", text_of("wrong_record"))
    path, trace = tmp_path / "wrong_record.py", tmp_path / "trace"
    path.write_text(f"open({str(trace)!r}, 'w')\n{path.read_text()}")
    [passport] = read_passports(tmp_path).values()
    with pytest.raises(UserError, match="is not the file that wrong_record.passport.json was made for"):
        load_environment(tmp_path, passport, BASIC)
    assert not trace.exists()


def test_what_is_not_our_text_runs_confined_though_its_passport_was_changed_as_well(tmp_path: Path) -> None:
    text = text_of("wrong_record").replace("class Environment", f"OURS = {os.getpid()}\n\n\nclass Environment", 1)
    ours = load_environment(tmp_path, publish(tmp_path, "wrong_record", text_of("wrong_record")), BASIC)
    changed = load_environment(tmp_path, publish(tmp_path, "wrong_record", text), BASIC)
    assert type(ours.environment).__name__ == "Environment"
    assert type(changed.environment).__name__ == "ConfinedEnvironment"
    tasks = ours.tasks("training", 2)
    assert changed.tasks("training", 2) == tasks and changed.reference(tasks[0]) == ours.reference(tasks[0])


@pytest.mark.parametrize(
    "name", ["../beside", "/tmp/beside", "a/b", "", ".", ".hidden", "a\x1b[31m", "a\nb", "a\\b", "x" * 5000]
)
def test_a_passport_leads_to_no_file_but_that_of_its_own_name(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "environments"
    folder.mkdir()
    passport = publish(folder, "letters", text_of("wrong_record"))
    row = json.loads(passport.model_dump_json()) | {"capability": name}
    publish_json(folder / "letters.passport.json", row)
    with pytest.raises(UserError, match=r"letters.passport.json is not a whole Passport \(.* a name .* at capability"):
        read_passports(folder)
    publish_json(folder / "letters.passport.json", row | {"capability": "beside"})
    with pytest.raises(UserError, match="is the passport of beside, which is not its own name"):
        read_passports(folder)


def test_a_compiled_file_beside_the_one_that_was_checked_is_not_what_runs(tmp_path: Path) -> None:
    path, forged = tmp_path / "one.py", tmp_path / "two.py"
    path.write_text("class Environment:\n    name, tools = 'a', []\n    tasks = open = score = reference = print\n")
    forged.write_text(path.read_text().replace("'a'", "'b'"))
    os.utime(forged, (1, 1))
    os.utime(path, (1, 1))
    (tmp_path / "__pycache__").mkdir()
    py_compile.compile(str(forged), str(tmp_path / f"__pycache__/one.{'cpython-311'}.pyc"))
    assert load_file(path).name == "a"


@pytest.mark.parametrize("name", [*DEFICITS, *CONTROLS, *PAIRS, "untargeted"])
def test_our_own_text_is_known_to_the_byte(name: str) -> None:
    text = narrowed_desk("one", 0, 0) if name == "untargeted" else text_of(name, 'Says "yes" """\nimport os\n\\"""')
    assert is_own_text(text)
    assert not is_own_text(text + "\nimport os\n") and not is_own_text(text.replace("DIFFICULTY = 0", "x = open('a')"))
    assert not is_own_text(text.replace("return", "return  ", 1))


def test_words_of_an_analyst_do_not_leave_the_docstring_that_they_stand_in(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    path = tmp_path / "wrong_record.py"
    path.write_text(text_of("wrong_record", f'"""\nopen({str(trace)!r}, "w")\n"""'))
    assert load_file(path).name == "wrong_record" and not trace.exists()


def test_a_file_that_is_none_is_refused_with_its_kind(tmp_path: Path) -> None:
    passport = publish(tmp_path, "letters", text_of("wrong_record"))
    (tmp_path / "letters.py").unlink()
    os.mkfifo(tmp_path / "letters.py")
    with pytest.raises(UserError, match="letters.py is a pipe"):
        load_environment(tmp_path, passport, BASIC)
    with pytest.raises((UserError, EnvironmentFault), match="letters.py is a pipe"):
        load_file(tmp_path / "letters.py")
