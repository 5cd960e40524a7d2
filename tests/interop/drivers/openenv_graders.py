# pyright: reportMissingImports=false
"""OpenEnv's graders of a running environment, on the package's own runtime plan, without a container.

Arguments: the address, the folder of the package. Prints the verdict of each.
"""

import json
import sys
from pathlib import Path

from openenv.validation.graders import Subject
from openenv.validation.graders.runtime import ObservationSchemaGrader, RewardWellFormedGrader, StateContractGrader
from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
from openenv.validation.runtime.collector import collect_runtime_evidence
from openenv.validation.runtime.contracts import load_runtime_plan


def main():
    address, folder = sys.argv[1], Path(sys.argv[2])
    manifest = OpenEnvYamlParser().parse(folder)
    plan = load_runtime_plan(folder, manifest.execution)
    evidence = collect_runtime_evidence(address, plan, episode_timeout_s=60)
    subject = Subject(folder, manifest, None, None, folder, evidence)
    graders = (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader())
    print(json.dumps({grader.check_id: grader.run(subject).status.value for grader in graders}))


if __name__ == "__main__":
    main()
