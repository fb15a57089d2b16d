"""Check each file of launch/ with the program that reads it, where this machine has it.

The shell scripts pass shellcheck, Ray accepts its cluster file, and MLflow's server starts as in the compose file and
answers only to its own names. The manifests are compared with the part of Kubernetes' and KubeRay's schemas that they
use, written here. That finds a misspelt or misplaced key; it does not show that an operator makes pods of them. Docker
reads the compose file where it is installed. The Dockerfiles have tests of their own (`test_images.py`).
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from sqlalchemy import make_url

from sweeper.config.resolution import CONF
from tests.conftest import REPOSITORY, environment, wait_for

LAUNCH = REPOSITORY / "launch"
COMPOSE = LAUNCH / "docker" / "compose.yaml"
TOOLS = Path(sys.executable).parent


def shell_scripts() -> list[Path]:
    files = [path for path in LAUNCH.rglob("*") if path.is_file()]
    return [path for path in files if re.match(rb"#!.*\b(ba)?sh\b", path.read_bytes()[:64])]


def test_the_shell_scripts_pass_shellcheck() -> None:
    assert shell_scripts()
    result = subprocess.run([TOOLS / "shellcheck", *shell_scripts()], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ray_up_takes_the_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = yaml.safe_load((LAUNCH / "ray" / "cluster.yaml").read_text())
    prepared = prepare_config(config)
    validate_config(prepared)
    node = prepared["available_node_types"]["local.cluster.node"]
    assert node["min_workers"] == len(config["provider"]["worker_ips"])
    usage = subprocess.run([TOOLS / "ray", "start", "--help"], capture_output=True, text=True, check=True).stdout
    for role in ("head", "worker"):
        *_, start = config[f"{role}_start_ray_commands"]
        assert "RAY_AUTH_MODE=token" in start
        result = subprocess.run(["bash", "-n", "-c", start], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        # Every option is one that this version of Ray knows.
        options = [argument for argument in shlex.split(start[start.index("ray start") :]) if argument.startswith("--")]
        assert all(re.search(rf"{option.partition('=')[0]}\b", usage) for option in options), options


# ── Kubernetes ──────────────────────────────────────────────────────────────────────────────────────────────


def record(required: str, optional: str = "", /, **kinds: Any) -> dict[str, Any]:
    """Return the JSON schema of a mapping with only these keys, of these types; strings by default."""
    names = [*required.split(), *optional.split()]
    return {
        "type": "object",
        "required": required.split(),
        "properties": {name: kinds.get(name, {"type": "string"}) for name in names},
        "additionalProperties": False,
    }


def many(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": kind, "minItems": 1}


NUMBER, BOOLEAN, ANY = {"type": "integer", "minimum": 0}, {"type": "boolean"}, {"type": "object"}
WORDS = {"type": "object", "additionalProperties": {"type": "string"}}  # amounts too: a bare 8 would be no Quantity
SECRET = record("secretKeyRef", secretKeyRef=record("name key", "optional", optional=BOOLEAN))
CONTAINER = record(
    "name image resources securityContext volumeMounts",
    "env",
    env=many({"oneOf": [record("name value"), record("name valueFrom", valueFrom=SECRET)]}),
    resources=record("requests limits", requests=WORDS, limits=WORDS),
    securityContext=record(
        "allowPrivilegeEscalation capabilities", allowPrivilegeEscalation={"const": False}, capabilities=ANY
    ),
    volumeMounts=many(record("name mountPath")),
)
VOLUME = record(
    "name",
    "persistentVolumeClaim emptyDir",
    persistentVolumeClaim=record("claimName"),
    emptyDir=record("medium sizeLimit", medium={"const": "Memory"}),
)
IDENTITY = record(
    "runAsNonRoot runAsUser fsGroup",
    "supplementalGroups",
    runAsNonRoot={"const": True},
    runAsUser=NUMBER,
    fsGroup=NUMBER,
    supplementalGroups=many(NUMBER),
)
POD = record(
    "automountServiceAccountToken securityContext containers volumes",
    "tolerations",
    automountServiceAccountToken={"const": False},
    securityContext=IDENTITY,
    containers=many(CONTAINER),
    volumes=many(VOLUME),
    tolerations=many(record("key operator effect")),
)
TEMPLATE = record("spec", spec=POD)
CLUSTER = record(
    "rayVersion authOptions headGroupSpec workerGroupSpecs",
    authOptions=record("mode", mode={"const": "token"}),
    headGroupSpec=record("rayStartParams template", rayStartParams=WORDS, template=TEMPLATE),
    workerGroupSpecs=many(
        record(
            "groupName replicas minReplicas maxReplicas rayStartParams template",
            **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), NUMBER),
            rayStartParams=WORDS,
            template=TEMPLATE,
        )
    ),
)
RAY_JOB = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=record("name"),
    spec=record(
        "entrypoint submissionMode backoffLimit shutdownAfterJobFinishes ttlSecondsAfterFinished rayClusterSpec",
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes=BOOLEAN,
        ttlSecondsAfterFinished=NUMBER,
        rayClusterSpec=CLUSTER,
    ),
)
CLAIM = record(
    "apiVersion kind metadata spec",
    apiVersion={"const": "v1"},
    kind={"const": "PersistentVolumeClaim"},
    metadata=record("name"),
    spec=record(
        "accessModes resources",
        accessModes=many({"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]}),
        resources=record("requests", requests=record("storage")),
    ),
)


@pytest.mark.parametrize(("vendor", "resource"), [("nvidia", "nvidia.com/gpu"), ("amd", "amd.com/gpu")])
def test_the_manifests_request_the_resources_of_a_sweep(vendor: str, resource: str) -> None:
    import ray

    claim, job = yaml.safe_load_all((LAUNCH / "kubernetes" / f"rayjob-{vendor}.yaml").read_text())
    jsonschema.validate(claim, CLAIM)
    jsonschema.validate(job, RAY_JOB)
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__  # the operator and the image have to speak of one Ray
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    pods = [head["template"]["spec"], group["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    (worker,) = pods[1]["containers"]
    assert worker["resources"]["limits"][resource] == worker["resources"]["requests"][resource]
    assert resource in {toleration["key"] for toleration in pods[1]["tolerations"]}
    # /dev/kfd belongs to the node's group render; NVIDIA's devices are open to every user.
    assert ("supplementalGroups" in pods[1]["securityContext"]) == (vendor == "amd")
    # Results go onto the claim, and the kind of GPU is one of the catalogue.
    claims = [v["persistentVolumeClaim"]["claimName"] for v in pods[0]["volumes"] if "persistentVolumeClaim" in v]
    assert claims == [claim["metadata"]["name"]]
    arguments = dict(argument.split("=") for argument in job["spec"]["entrypoint"].split() if "=" in argument)
    assert arguments["dir"] in {mount["mountPath"] for mount in pods[0]["containers"][0]["volumeMounts"]}
    hardware = yaml.safe_load((CONF / "hardware" / f"{arguments['hardware']}.yaml").read_text())
    assert (hardware["architecture"].startswith("gfx")) == (vendor == "amd")


# ── Docker ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_servers_of_the_compose_file_listen_on_this_machine_alone() -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    published = [port for service in services.values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    kept = subprocess.run(["git", "check-ignore", "launch/docker/.env"], cwd=REPOSITORY, capture_output=True)
    assert kept.returncode == 0
    variables = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    example = (LAUNCH / "docker" / ".env.example").read_text().splitlines()
    assert {line.rstrip("=") for line in example if line and line[0] != "#"} == variables  # named, and without a value


@pytest.mark.soak
def test_the_compose_file_starts_mlflow(tmp_path: Path) -> None:
    service = yaml.safe_load(COMPOSE.read_text())["services"]["mlflow"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = shlex.split(service["command"])
    here = {"--host": "127.0.0.1", "--port": str(port), "--workers": "1", "--artifacts-destination": str(tmp_path)}
    here["--backend-store-uri"] = f"sqlite:///{tmp_path}/mlflow.db"  # PostgreSQL is not here
    for option, value in here.items():
        arguments[arguments.index(option) + 1] = value
    env = environment(MLFLOW_SERVER_ENABLE_JOB_EXECUTION=service["environment"]["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"])
    log = (tmp_path / "log").open("w")
    server = subprocess.Popen(
        [TOOLS / arguments[0], *arguments[1:]], env=env, stdout=log, stderr=log, start_new_session=True
    )

    def answer(host: str) -> int:
        url = f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search"
        body = json.dumps({"max_results": 1}).encode()
        headers = {"Host": host, "Content-Type": "application/json"}
        try:
            return urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            assert server.poll() is None, (tmp_path / "log").read_text()
            return 0

    try:
        assert wait_for(lambda: answer("127.0.0.1:5000"), 90) == 200
        assert answer("elsewhere.example") == 403
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def test_mlflows_image_has_the_driver_of_the_database_address() -> None:
    """Since SQLAlchemy 2.1 `postgresql://` is psycopg, which is another package than psycopg2."""
    words = shlex.split(yaml.safe_load(COMPOSE.read_text())["services"]["mlflow"]["command"])
    driver = make_url(words[words.index("--backend-store-uri") + 1]).get_driver_name()
    assert f"{driver}-binary" in (LAUNCH / "docker" / "Dockerfile.mlflow").read_text()


def test_docker_reads_the_compose_file() -> None:
    docker = shutil.which("docker")
    if not docker or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("docker compose is not here")
    command = [docker, "compose", "--file", str(COMPOSE), "config", "--quiet"]
    result = subprocess.run(command, env=environment(POSTGRES_PASSWORD="x"), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    env = {name: value for name, value in environment().items() if name != "POSTGRES_PASSWORD"}
    refused = subprocess.run(command, env=env, capture_output=True, text=True)
    assert refused.returncode != 0 and "launch/docker/.env" in refused.stderr


def test_the_documented_command_for_four_nodes_makes_a_valid_job_of_the_manifest() -> None:
    documented = (REPOSITORY / "docs" / "guides" / "cluster.md").read_text()
    (command,) = re.findall(r"`(sed '.*?' launch/kubernetes/rayjob-nvidia\.yaml) ", documented)
    printed = subprocess.run(shlex.split(command), cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    _, job = yaml.safe_load_all(printed)
    jsonschema.validate(job, RAY_JOB)
    (group,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert {group[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {4}
    assert "workload=parallel model=llama3_8b gpus=32 hardware=h200" in job["spec"]["entrypoint"]


def test_the_documented_command_for_an_acceptance_makes_a_valid_job_that_does_not_run_again_for_its_verdict() -> None:
    documented = (REPOSITORY / "docs" / "guides" / "accept.md").read_text()
    (command,) = re.findall(r"^    (sed '.*?' launch/kubernetes/rayjob-nvidia\.yaml) ", documented, re.MULTILINE)
    printed = subprocess.run(shlex.split(command), cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    _, job = yaml.safe_load_all(printed)
    jsonschema.validate(job, RAY_JOB)
    assert job["metadata"]["name"] == "sweeper-accept" and job["spec"]["backoffLimit"] == 0
    assert job["spec"]["entrypoint"] == "python -m sweeper accept dir=/results profile=quick"
