"""The files of `deploy/`: they parse, fit the schemas of the programs that read them, and agree with each other.

`test_ray_launcher.py` runs loads with them. This needs no container engine and no Kubernetes: a server of this test
receives what Dagster's launcher sends.
"""

import configparser
import io
import json
import re
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import dagster as dg
import pytest
import yaml
from click.testing import CliRunner
from dagster._core.definitions.run_request import InstigatorType

from mm_assets.cli.main import main

compose_spec = pytest.importorskip("compose_spec")
kubernetes_validate = pytest.importorskip("kubernetes_validate")
dockerfile_parse = pytest.importorskip("dockerfile_parse")

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "deploy"
KUBERNETES = "1.34"
MANIFESTS = ("indexed-job.yaml", "pgbouncer.yaml", "raycluster.yaml")
SECRETS = "/run/secrets/"


def text(name: str) -> str:
    return (DEPLOY / name).read_text()


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all(text(name)))


def helm_values(*names: str) -> dict[str, Any]:
    """The values of files, as Helm merges them."""

    def merged(old: Any, new: Any) -> Any:
        if isinstance(old, dict) and isinstance(new, dict):
            return {key: merged(old.get(key), new.get(key, old.get(key))) for key in {**old, **new}}
        return new

    found: Any = {}
    for name in names:
        (values,) = documents(name)
        found = merged(found, values)
    return found


def pod_specs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The specification of each pod that a manifest describes."""
    spec = document["spec"]
    if document["kind"] == "RayCluster":
        return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    return [spec["template"]["spec"]] if "template" in spec else []


def check_manifest(document: dict[str, Any]) -> None:
    """Raises `kubernetes_validate.ValidationError` for what the API of Kubernetes does not accept."""
    if document["kind"] == "RayCluster":  # its own schema is KubeRay's; a pod of it is one of Kubernetes
        for spec in pod_specs(document):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node"}, "spec": spec}
            kubernetes_validate.validate(pod, KUBERNETES, strict=True)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def check_manifests(content: str) -> None:
    for document in yaml.safe_load_all(content):
        check_manifest(document)


def check_compose(content: str) -> dict[str, Any]:
    """Raises `ValueError` for what the Compose specification does not allow."""
    content = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", content)  # as Compose replaces variables that are not set
    found = yaml.safe_load(content)  # which also merges
    compose_spec.PyCompose.from_json(json.dumps(found)).validate()
    services = found["services"]
    for name, service in services.items():
        if unknown := set(service.get("depends_on", ())) - set(services):
            raise ValueError(f"service {name} depends on {unknown}, which are not services")
    return found


@pytest.fixture
def compose() -> dict[str, Any]:
    return check_compose(text("compose.yaml"))


@pytest.fixture
def settings() -> dict[str, Any]:
    (found,) = documents("dagster.yaml")
    return found


@pytest.fixture
def pgbouncer() -> configparser.SectionProxy:
    found = configparser.ConfigParser()
    found.read(DEPLOY / "pgbouncer.ini")
    return found["pgbouncer"]


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """What `deploy/secrets.sh` makes."""
    subprocess.run([DEPLOY / "secrets.sh", tmp_path / "secrets"], check=True)
    return tmp_path / "secrets"


# -- each file


@pytest.mark.parametrize("name", ["slurm.sbatch", "secrets.sh"])
def test_shells_read_the_scripts(name: str) -> None:
    """A script has no syntax error for the shell that its first line names."""
    shell = text(name).splitlines()[0].removeprefix("#!")
    subprocess.run([shell, "-n", DEPLOY / name], check=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_accepts_the_manifests(name: str) -> None:
    """Every object, and every pod of the Ray cluster, fits the schemas of the API of Kubernetes."""
    check_manifests(text(name))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("indexed-job.yaml", "completions: 20", "completions: twenty"),
        ("indexed-job.yaml", "volumeMounts:", "volumeMount:"),
        ("indexed-job.yaml", "operator: In, values: [2]", "operator: In, value: 2"),
        ("pgbouncer.yaml", "minAvailable: 1", "minimum: 1"),
        ("pgbouncer.yaml", "secretName: pgbouncer", "secret: pgbouncer"),
        ("pgbouncer.yaml", "selector: {app: pgbouncer}", "selector: [app]"),
        ("raycluster.yaml", "- {name: scratch, mountPath: /scratch}", "- {name: scratch}"),
        ("raycluster.yaml", "valueFrom:", "valuesFrom:"),
    ],
)
def test_a_broken_manifest_is_refused(name: str, old: str, new: str) -> None:
    """The check of the manifests fails for a wrong type, an unknown key and a missing one."""
    assert old in text(name)
    with pytest.raises(kubernetes_validate.ValidationError):
        check_manifests(text(name).replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("restart: unless-stopped", "restart: sometimes"),
        ("condition: service_healthy", "condition: healthy"),
        ("secrets: [s3.json]", "secrets: [s4.json]"),
        ("postgres: {condition", "postgresql: {condition"),
        ("shm_size: 1gb", "shared_memory: 1gb"),
    ],
)
def test_a_broken_compose_file_is_refused(compose: dict[str, Any], old: str, new: str) -> None:
    """The check of the Compose file fails for wrong values and keys, and for names of nothing."""
    assert old in text("compose.yaml")
    with pytest.raises(ValueError, match=r"."):
        check_compose(text("compose.yaml").replace(old, new))


def test_the_image_is_built_from_files_that_exist(compose: dict[str, Any]) -> None:
    """Each source of COPY is in the repository, no stage ends as root, and Compose builds stages that there are."""
    parsed = dockerfile_parse.DockerfileParser(fileobj=io.BytesIO((DEPLOY / "Dockerfile").read_bytes())).structure
    stages: dict[str, list[tuple[str, str]]] = {}
    for line in parsed:
        if line["instruction"] == "FROM":
            stage = stages[line["value"].split(" AS ")[1]] = []
        elif line["instruction"] != "COMMENT":
            stage.append((line["instruction"], line["value"]))
    assert set(stages) == {"mm-assets", "pgbouncer"}
    for instructions in stages.values():
        given = {name for name, _ in instructions}
        assert given <= {"ARG", "CMD", "COPY", "ENV", "EXPOSE", "RUN", "USER", "WORKDIR"}
        users = [value for name, value in instructions if name == "USER"]
        assert users
        assert users[-1] != "root"
    copied = [value.split()[:-1] for name, value in stages["mm-assets"] if name == "COPY"]
    assert copied
    assert [source for sources in copied for source in sources if not (REPO / source).exists()] == []
    for service in compose["services"].values():
        if "build" in service:
            assert service["build"]["target"] in stages
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_secrets_are_made_once_and_are_closed(secrets: Path, compose: dict[str, Any]) -> None:
    """The script makes every secret of the Compose file, in a closed folder that it does not overwrite."""
    made = {path.name for path in secrets.iterdir()}
    assert {entry["file"] for entry in compose["secrets"].values()} == {f"secrets/{name}" for name in made}
    assert set(compose["secrets"]) == made
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert stat.S_IMODE((secrets / "pgpass").stat().st_mode) == 0o600
    password = (secrets / "postgres-password").read_text()
    assert len(password) == 48
    assert (secrets / "pgpass").read_text() == f"*:*:dagster:dagster:{password}\n"
    assert (secrets / "userlist.txt").read_text() == f'"dagster" "{password}"\n'
    (identity,) = json.loads((secrets / "s3.json").read_text())["identities"]
    credentials = configparser.ConfigParser()
    credentials.read(secrets / "aws-credentials")
    (pair,) = identity["credentials"]
    assert dict(credentials["default"]) == {
        "aws_access_key_id": pair["accessKey"],
        "aws_secret_access_key": pair["secretKey"],
    }
    assert subprocess.run([DEPLOY / "secrets.sh", secrets], capture_output=True, check=False).returncode != 0
    assert (secrets / "postgres-password").read_text() == password
    assert "/deploy/secrets/" in (REPO / ".gitignore").read_text().splitlines()


# -- the files together


def test_the_parts_of_compose_find_each_other(
    compose: dict[str, Any], settings: dict[str, Any], pgbouncer: configparser.SectionProxy
) -> None:
    """Hosts, ports, folders and secrets that one file names are those that another one has."""
    services = compose["services"]
    database = settings["storage"]["postgres"]["postgres_db"]
    assert database["hostname"] in services
    assert str(database["port"]) == pgbouncer["listen_port"]
    assert re.search(r"host=(\S+)", text("pgbouncer.ini")).group(1) in services  # type: ignore[union-attr]
    jobs = urlsplit(settings["run_launcher"]["config"]["ray"]["address"])
    assert f"127.0.0.1:{jobs.port}:{jobs.port}" in services[jobs.hostname]["ports"]
    assert f"--address={jobs.hostname}:6379" in services["ray-worker"]["command"]
    assert "--port=6379" in services[jobs.hostname]["command"]
    ours = {name: service for name, service in services.items() if service["image"].startswith("mm-assets:")}
    assert set(ours) == {"webserver", "daemon", "ray-head", "ray-worker"}
    for service in ours.values():
        named = {database["params"]["passfile"], service["environment"]["AWS_SHARED_CREDENTIALS_FILE"]}
        assert named == {SECRETS + name for name in service["secrets"]}
        assert urlsplit(service["environment"]["AWS_ENDPOINT_URL"]).hostname in services
    assert pgbouncer["auth_file"].removeprefix(SECRETS) in services["pgbouncer"]["secrets"]
    assert any(f"-s3.config={SECRETS}{name}" in services["s3"]["command"] for name in services["s3"]["secrets"])
    home = re.search(r"DAGSTER_HOME=(\S+)", text("Dockerfile")).group(1)  # type: ignore[union-attr]
    for name in ("webserver", "daemon"):
        assert {"source": "dagster.yaml", "target": f"{home}/dagster.yaml"} in services[name]["configs"]
    assert {entry["file"] for entry in compose["configs"].values()} <= {path.name for path in DEPLOY.iterdir()}


def test_runs_leave_processors_to_the_partitions_of_loads(compose: dict[str, Any], settings: dict[str, Any]) -> None:
    """The runs that the queue lets through do not hold every processor of a cluster: tasks of loads need one."""
    command = compose["services"]["ray-worker"]["command"]
    (option,) = [part for part in command if part.startswith("--num-cpus=")]
    assert "--num-cpus=0" in compose["services"]["ray-head"]["command"]
    num_processors = {
        "compose": compose["services"]["ray-worker"]["deploy"]["replicas"] * int(option.partition("=")[2])
    }
    cluster, *_ = documents("raycluster.yaml")
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    num_processors["kuberay"] = workers["minReplicas"] * int(workers["rayStartParams"]["num-cpus"])
    values = helm_values("helm-values.yaml", "helm-values-ray.yaml")
    queues = {
        "compose": (settings["concurrency"], settings["run_launcher"]["config"]),
        "kuberay": (
            values["additionalInstanceConfig"]["concurrency"],
            values["runLauncher"]["config"]["customRunLauncher"]["config"],
        ),
    }
    for name, (concurrency, launcher) in queues.items():
        num_held = concurrency["runs"]["max_concurrent_runs"] * launcher["ray"]["num_cpus"]
        assert 0 < num_held < num_processors[name], name


def test_no_secret_is_in_a_variable_of_a_container(compose: dict[str, Any]) -> None:
    """Variables that name a password or key name a file with it, or a secret of Kubernetes."""
    secret = re.compile(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY|CREDENTIALS")
    seen = []
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if secret.search(name):
                seen.append(name)
                assert value.startswith(SECRETS), name
    for document in (document for name in MANIFESTS for document in documents(name)):
        for container in (container for spec in pod_specs(document) for container in spec["containers"]):
            for variable in container.get("env", ()):
                if secret.search(variable["name"]):
                    seen.append(variable["name"])
                    assert "secretKeyRef" in variable["valueFrom"], variable
    assert set(seen) == {"AWS_SHARED_CREDENTIALS_FILE", "POSTGRES_PASSWORD_FILE", "DAGSTER_PG_PASSWORD"}


def test_the_manifests_and_the_values_agree(settings: dict[str, Any], pgbouncer: configparser.SectionProxy) -> None:
    """Images, service account, secret, addresses and the settings of runs are the same in all files."""
    values = helm_values("helm-values.yaml", "helm-values-ray.yaml")
    assert {key: settings[key] for key in values["additionalInstanceConfig"]} == values["additionalInstanceConfig"]
    database, theirs = settings["storage"]["postgres"]["postgres_db"], values["postgresql"]
    assert theirs["postgresqlScheme"] == database["scheme"]
    assert (theirs["postgresqlUsername"], theirs["postgresqlDatabase"]) == (database["username"], database["db_name"])
    service, _, deployment = documents("pgbouncer.yaml")
    assert (theirs["postgresqlHost"], theirs["service"]["port"]) == (
        service["metadata"]["name"],
        service["spec"]["ports"][0]["port"],
    )
    assert str(theirs["service"]["port"]) == pgbouncer["listen_port"]
    (pooler,) = pod_specs(deployment)
    assert Path(pgbouncer["auth_file"]).parent.as_posix() in {
        mount["mountPath"] for mount in pooler["containers"][0]["volumeMounts"]
    }
    image = values["dagsterDaemon"]["image"]
    assert image == values["dagsterWebserver"]["image"]
    assert image == values["dagster-user-deployments"]["deployments"][0]["image"]
    (cluster, *_), (job,) = documents("raycluster.yaml"), documents("indexed-job.yaml")
    for spec in (*pod_specs(cluster), *pod_specs(job)):
        assert spec["serviceAccountName"] == values["global"]["serviceAccountName"]
        assert spec["containers"][0]["image"] == f"{image['repository']}:{image['tag']}"
    launcher = values["runLauncher"]["config"]["customRunLauncher"]
    ours = settings["run_launcher"]
    assert (launcher["module"], launcher["class"]) == (ours["module"], ours["class"])
    address = f"http://{cluster['metadata']['name']}-head-svc:8265"  # as KubeRay names the service
    assert launcher["config"]["ray"] == {**ours["config"]["ray"], "address": address}
    (password,) = [v for v in pod_specs(cluster)[1]["containers"][0]["env"] if v["name"] == "DAGSTER_PG_PASSWORD"]
    assert password["valueFrom"]["secretKeyRef"]["name"] == values["global"]["postgresqlSecretName"]


def test_the_ray_cluster_has_the_version_and_the_space_of_its_image() -> None:
    """Its version is that of `constraints.txt`, and its nodes have the scratch space that they announce."""
    cluster, *_ = documents("raycluster.yaml")
    pinned = re.search(r"^ray==(\S+)$", (REPO / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert cluster["spec"]["rayVersion"] == pinned.group(1)
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    (container,) = workers["template"]["spec"]["containers"]
    assert workers["rayStartParams"]["num-cpus"] == container["resources"]["requests"]["cpu"]
    announced = json.loads(json.loads(workers["rayStartParams"]["resources"]))  # the shell removes the outer quotes
    assert announced["scratch"] <= int(container["resources"]["limits"]["ephemeral-storage"].removesuffix("Gi")) << 30


def test_every_image_has_the_tag_of_the_release() -> None:
    """Each image of the project has the tag of one variable, and no image is `latest`, of ours or of others."""
    (compose,) = documents("compose.yaml")
    images = [service["image"] for service in compose["services"].values()]
    found = [document for name in MANIFESTS for document in documents(name)]
    images += [container["image"] for one in found for spec in pod_specs(one) for container in spec["containers"]]
    values = helm_values("helm-values.yaml")
    images += [":".join((values["dagsterDaemon"]["image"][key]) for key in ("repository", "tag"))]
    tags = {image: image.rpartition("/")[2].partition(":")[2] for image in images}
    assert [image for image, tag in tags.items() if tag in ("", "latest")] == []
    ours = {tag for image, tag in tags.items() if "mm-assets" in image}
    assert ours == {"${MM_ASSETS_TAG}", "${MM_ASSETS_TAG:-local}"}
    page = (REPO / "docs" / "spec" / "many-machines.md").read_text()
    for name in ("indexed-job.yaml", "pgbouncer.yaml", "raycluster.yaml", "helm-values.yaml"):
        assert f"deploy/{name}" in re.findall(r"envsubst '\$MM_ASSETS_TAG' < (\S+)", page + text(name)), name


def test_budgets_select_pods_and_let_some_go() -> None:
    """Each disruption budget selects pods by their labels, and lets one of several go."""
    (_, workers, head), (_, pooler, deployment) = documents("raycluster.yaml"), documents("pgbouncer.yaml")
    (cluster, *_) = documents("raycluster.yaml")
    name, (group,) = cluster["metadata"]["name"], cluster["spec"]["workerGroupSpecs"]
    labels = {"ray.io/cluster": name, "ray.io/node-type": "worker"}  # which KubeRay sets
    assert workers["spec"]["selector"]["matchLabels"] == labels
    assert head["spec"] == {"minAvailable": 1, "selector": {"matchLabels": {**labels, "ray.io/node-type": "head"}}}
    assert 0 < workers["spec"]["minAvailable"] < group["replicas"]
    assert pooler["spec"]["selector"] == deployment["spec"]["selector"]
    assert 0 < pooler["spec"]["minAvailable"] < deployment["spec"]["replicas"]


def test_a_slice_fails_for_good_by_a_wrong_declaration_alone(tmp_path: Path) -> None:
    """The exit code that fails the Job is that of a wrong declaration; evictions are ignored; others are retried."""
    (job,) = documents("indexed-job.yaml")
    ignored, fatal = job["spec"]["podFailurePolicy"]["rules"]
    assert ignored == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert fatal["onExitCodes"]["containerName"] == container["name"]
    assert fatal["action"] == "FailJob"
    place = ["--shards", str(tmp_path), "--root", str(tmp_path / "out"), "--slice", "1/20", "--no-record"]
    wrong = CliRunner().invoke(main, ["run", *place, "--set", "checks=wrong"])
    empty = CliRunner().invoke(main, ["run", *place])
    assert (fatal["onExitCodes"]["values"], wrong.exit_code, empty.exit_code) == ([2], 2, 1)


def test_s3_accepts_the_rule_for_unfinished_uploads() -> None:
    """S3 takes the rule of the file, which removes parts of an upload after a week and no object."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    configuration = json.loads(text("s3-lifecycle.json"))
    with moto.mock_aws():
        client = boto3.client("s3", region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test")
        client.create_bucket(Bucket="packed")
        client.put_bucket_lifecycle_configuration(Bucket="packed", LifecycleConfiguration=configuration)
        (rule,) = client.get_bucket_lifecycle_configuration(Bucket="packed")["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert "Expiration" not in rule


def test_the_page_links_every_file() -> None:
    """docs/spec/many-machines.md links each file of the folder."""
    page = (REPO / "docs" / "spec" / "many-machines.md").read_text()
    names = [path.name for path in DEPLOY.iterdir() if path.is_file()]
    assert len(names) >= 10
    assert [name for name in names if f"(../../deploy/{name})" not in page] == []


# -- Dagster


def chart_launcher(values: dict[str, Any]) -> dict[str, Any]:
    """The run launcher of the `dagster.yaml` that the chart writes for values."""
    launcher = values["runLauncher"]
    if launcher["type"] == "CustomRunLauncher":
        found: dict[str, Any] = launcher["config"]["customRunLauncher"]
        return found
    given = launcher["config"]["k8sRunLauncher"]
    assert set(given) <= {"imagePullPolicy", "envVars", "resources", "volumeMounts", "volumes", "runK8sConfig"}
    return {
        "module": "dagster_k8s",
        "class": launcher["type"],
        "config": {
            "load_incluster_config": True,
            "job_namespace": "default",
            "service_account_name": values["global"]["serviceAccountName"],
            "dagster_home": "/opt/dagster/dagster_home",
            "instance_config_map": "dagster-instance",
            "postgres_password_secret": values["global"]["postgresqlSecretName"],
            "image_pull_policy": given["imagePullPolicy"],
            "env_vars": given["envVars"],
            "resources": given["resources"],
            "volume_mounts": given["volumeMounts"],
            "volumes": given["volumes"],
            "run_k8s_config": {"job_spec_config": given["runK8sConfig"]["jobSpecConfig"]},
        },
    }


@pytest.fixture
def open_instance(tmp_path: Path, settings: dict[str, Any]) -> Iterator[Callable[..., dg.DagsterInstance]]:
    """Opens an instance with settings of `deploy/dagster.yaml`, but SQLite in place of the server."""
    opened = []

    def get(launcher: dict[str, Any] | None) -> dg.DagsterInstance:
        here = {key: value for key, value in settings.items() if key not in ("storage", "run_launcher")}
        (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(here | ({"run_launcher": launcher} if launcher else {})))
        opened.append(dg.DagsterInstance.from_config(str(tmp_path)))
        return opened[-1]

    yield get
    for instance in opened:
        instance.dispose()


def test_dagster_loads_the_instance(open_instance: Callable[..., dg.DagsterInstance], settings: dict[str, Any]) -> None:
    """The settings are valid: launcher, queue, monitoring and retries are those of the file."""
    pytest.importorskip("dagster_ray")
    instance = open_instance(settings["run_launcher"])
    assert type(instance.run_launcher).__name__ == "RayRunLauncher"
    assert instance.run_launcher.address == "http://ray-head:8265"
    assert type(instance.run_coordinator).__name__ == "QueuedRunCoordinator"
    assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 3
    assert instance.run_monitoring_enabled
    assert (instance.run_retries_enabled, instance.run_retries_max_retries) == (True, 2)
    assert not instance.run_retries_retry_on_asset_or_op_failure
    for kind in InstigatorType:
        days = {status.value: number for status, number in instance.get_tick_retention_settings(kind).items()}
        assert days == {"STARTED": -1, "SKIPPED": 7, "SUCCESS": 90, "FAILURE": 90}
    assert type(instance.compute_log_manager).__name__ == "NoOpComputeLogManager"
    assert type(open_instance(None).run_launcher).__name__ == "DefaultRunLauncher"


def test_dagster_finds_the_database(settings: dict[str, Any]) -> None:
    """The storage is Postgres by the driver that is installed, with a file in place of a password."""
    sqlalchemy = pytest.importorskip("sqlalchemy")
    utils = pytest.importorskip("dagster_postgres.utils")
    url = sqlalchemy.make_url(utils.pg_url_from_config(settings["storage"]["postgres"]))
    assert url.get_driver_name() == "psycopg2"
    assert url.password is None
    _, options = url.get_dialect()().create_connect_args(url)
    assert options == {
        "host": "pgbouncer",
        "port": 6432,
        "user": "dagster",
        "dbname": "dagster",
        "passfile": "/run/secrets/pgpass",
    }


def test_a_launcher_with_a_wrong_setting_is_refused(
    open_instance: Callable[..., dg.DagsterInstance], settings: dict[str, Any]
) -> None:
    """Settings outside `ray:`, as older versions of dagster-ray took them, do not load."""
    pytest.importorskip("dagster_ray")
    launcher = settings["run_launcher"]
    with pytest.raises(dg.DagsterInvalidConfigError, match="ray"):
        _ = open_instance({**launcher, "config": launcher["config"]["ray"]}).run_launcher


@pytest.mark.parametrize(
    ("job", "engine", "expected"),
    [
        ("web_load", {"type": "ray"}, 0.001),
        ("web_load", {}, 1),
        ("web_pack", {"type": "ray"}, 1),
    ],
)
def test_a_driver_on_the_cluster_leaves_its_processors_alone(
    open_instance: Callable[..., dg.DagsterInstance],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    job: str,
    engine: dict[str, str],
    expected: float,
) -> None:
    """The Ray job of a load that waits for tasks asks for little, and that of a run that works for a processor."""
    launchers = pytest.importorskip("dagster_ray")
    from dagster._core.definitions.reconstruct import ReconstructableRepository
    from dagster._core.launcher import LaunchRunContext

    submitted: list[dict[str, Any]] = []
    client = SimpleNamespace(submit_job=lambda **job: submitted.append(job))
    monkeypatch.setattr(launchers.RayRunLauncher, "client", client)
    instance = open_instance(settings["run_launcher"])
    (tmp_path / "code.py").write_text(CODE.replace('"root"', f'"engine": {engine}, "root"'))
    found = ReconstructableRepository.for_file(str(tmp_path / "code.py"), "defs").get_reconstructable_job(job)
    definition = found.get_definition()
    tags = dict(definition.run_tags)  # Dagster merges them into those of a request
    run = instance.create_run_for_job(definition, tags=tags, job_code_origin=found.get_python_origin())
    instance.run_launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
    assert [job["entrypoint_num_cpus"] for job in submitted] == [expected]


def test_the_charts_ray_launcher_loads(open_instance: Callable[..., dg.DagsterInstance]) -> None:
    """The values for a Ray cluster on Kubernetes give a launcher of its head."""
    pytest.importorskip("dagster_ray")
    launcher = chart_launcher(helm_values("helm-values.yaml", "helm-values-ray.yaml"))
    assert open_instance(launcher).run_launcher.address == "http://mm-assets-head-svc:8265"


class Api(HTTPServer):
    """The part of Kubernetes's API that takes a job."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.jobs: list[dict[str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/apis/batch/v1/namespaces/default/jobs", self.path
        self.server.jobs.append(body)
        answer = json.dumps({**body, "apiVersion": "batch/v1", "kind": "Job"}).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def api() -> Iterator[Api]:
    with Api() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


CODE = """
from mm_assets.orchestration import build_definitions
from mm_assets.pipeline.spec import DatasetSpec

SPEC = DatasetSpec.from_config({"name": "web", "shards": "/in/*.tar", "root": "/out"}, where="test")
defs = build_definitions(SPEC)
"""


@pytest.fixture
def launched(
    open_instance: Callable[..., dg.DagsterInstance], api: Api, tmp_path: Path
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Launches a load with the launcher of values: the job that Kubernetes gets."""
    pytest.importorskip("dagster_k8s")
    from dagster._core.definitions.reconstruct import ReconstructableRepository
    from dagster._core.launcher import LaunchRunContext

    def launch(values: dict[str, Any]) -> dict[str, Any]:
        kubeconfig = {
            "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
            "users": [{"name": "test", "user": {}}],
            "current-context": "test",
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
        launcher = chart_launcher(values)
        launcher["config"] |= {"load_incluster_config": False, "kubeconfig_file": str(tmp_path / "kubeconfig")}
        instance = open_instance(launcher)
        (tmp_path / "code.py").write_text(CODE)
        (deployment,) = values["dagster-user-deployments"]["deployments"]
        repository = ReconstructableRepository.for_file(
            str(tmp_path / "code.py"),
            "defs",
            container_image=f"{deployment['image']['repository']}:{deployment['image']['tag']}",
            container_context={"k8s": {"env": deployment["env"]}},  # as the chart gives it to the code server
        )
        job = repository.get_reconstructable_job("web_load")
        run = instance.create_run_for_job(job.get_definition(), job_code_origin=job.get_python_origin())
        instance.run_launcher.launch_run(LaunchRunContext(dagster_run=run, workspace=None))
        (sent,) = api.jobs
        (container,) = sent["spec"]["template"]["spec"]["containers"]
        assert run.run_id in container["args"][-1]
        return {"apiVersion": "batch/v1", "kind": "Job", **sent}

    return launch


def test_kubernetes_accepts_the_job_of_a_load(launched: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """What K8sRunLauncher sends for a load fits the schema of a Job, and has image, account, space and secret."""
    values = helm_values("helm-values.yaml")
    job = launched(values)
    check_manifest(job)
    (spec,) = pod_specs(job)
    (container,) = spec["containers"]
    assert container["image"] == "registry.example.org/mm-assets:${MM_ASSETS_TAG}"
    assert container["args"][:3] == ["dagster", "api", "execute_run"]
    assert spec["serviceAccountName"] == "mm-assets"
    assert spec["restartPolicy"] == "Never"
    assert container["resources"] == values["runLauncher"]["config"]["k8sRunLauncher"]["resources"]
    assert {"name": "scratch", "mountPath": "/scratch"} in container["volumeMounts"]
    assert {"name": "scratch", "emptyDir": {}} in spec["volumes"]
    variables = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert variables["MM_ASSETS_ROOT"] == "s3://bucket/packed"
    assert variables["TMPDIR"] == "/scratch"
    secret = {"name": "dagster-postgresql", "key": "postgresql-password"}
    assert variables["DAGSTER_PG_PASSWORD"]["secretKeyRef"].items() >= secret.items()
    assert job["spec"]["ttlSecondsAfterFinished"] == 86400


def test_a_broken_job_of_a_load_is_refused(launched: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The check of the job fails for a wrong type deep in it, and dagster-k8s for a setting of one."""
    values = helm_values("helm-values.yaml")
    job = launched(values)
    pod_specs(job)[0]["containers"][0]["command"] = "dagster"
    with pytest.raises(kubernetes_validate.ValidationError, match="dagster"):
        check_manifest(job)
    values["runLauncher"]["config"]["k8sRunLauncher"]["runK8sConfig"]["jobSpecConfig"] = {"backoffLimit": "soon"}
    with pytest.raises(ValueError, match="int"):
        launched(values)
