"""The blocks of the pages on running, in docs and docs/spec: what one machine can run is run, the rest is checked."""

import importlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import fsspec
import pytest
import yaml
from click.testing import CliRunner
from dagster._core.instance.ref import InstanceRef

from ..pages.blocks import ENDLESS, NOT_RUN, PARSED, REPOSITORY, Block, Reader
from ..pages.test_guides import forget_clients
from ..s3_server import serve
from .databases import open_databases

PROGRAMS: dict[str, tuple[str, str]] = {
    "dagster": ("dagster._cli", "create_dagster_cli"),
    "dagster-daemon": ("dagster._daemon.cli", "create_dagster_daemon_cli"),
    "dagster-webserver": ("dagster_webserver.cli", "create_dagster_webserver_cli"),
    "ray": ("ray.scripts.scripts", "cli"),
}
"""Where the commands of other projects are, which have to take the options of the pages."""

SERVICE = "runs until it is ended; tests/e2e/test_daemon.py and test_browser.py start it"
CLUSTER = "starts a cluster; tests/e2e/test_ray.py and test_ray_launcher.py start one"
LAUNCHED = "needs the cluster that takes the run; tests/e2e/test_ray_launcher.py launches one"
NO_ENGINE = "needs a container engine; tests/e2e/test_deploy.py checks the files"
NO_KUBERNETES = "needs a Kubernetes cluster; tests/e2e/test_deploy.py checks the files"
INDEX = NOT_RUN["pip"][0]


def program(name: str) -> click.Command:
    module, attribute = PROGRAMS[name]
    found = getattr(pytest.importorskip(module) if name == "ray" else importlib.import_module(module), attribute)
    command: click.Command = found if isinstance(found, click.Command) else found()
    return command


def parse(words: Sequence[str]) -> None:
    """Has the program itself parse a command; what stands for a file need not exist."""
    command, arguments = program(words[0]), list(words[1:])
    context = click.Context(command, info_name=words[0])
    while isinstance(command, click.Group):
        found = command.get_command(context, arguments.pop(0))
        assert found is not None, words
        command, context = found, click.Context(found, parent=context)
    try:
        command.make_context(words[0], arguments)
    except click.BadParameter as error:
        if "does not exist" not in error.message:
            raise


class Operator(Reader):
    """Follows a page with Dagster's own commands, and with those of clusters."""

    def _export(self, name: str, value: str) -> None:
        if value.startswith("/srv/"):  # a folder of the host, here one of the test
            Path(value[1:]).mkdir(parents=True, exist_ok=True)
            value = str(Path(value[1:]).absolute())
        super()._export(name, value)

    def _other(self, words: list[str], where: str) -> None:
        for file in re.findall(r"(?<![\w/])deploy/[\w-]+\.\w+", " ".join(words)):
            assert Path(file).is_file(), (where, file)
        match words:
            case ["dagster", "job", "execute", *arguments]:
                done = CliRunner().invoke(program("dagster"), ["job", "execute", *arguments])
                assert done.exit_code == 0, (where, words, done.output)
            case ["deploy/secrets.sh", folder]:
                shutil.rmtree(folder, ignore_errors=True)
                self._in_repository(words, where)
            case ["dagster", *_]:
                self._parsed(words, LAUNCHED)
            case ["dagster-daemon" | "dagster-webserver", *_]:
                self._parsed(words, SERVICE)
            case ["ray", *_]:
                self._parsed(words, CLUSTER)
            case ["docker", "compose", "-f", file, "exec", service, *inner]:
                assert service in yaml.safe_load(Path(file).read_text(encoding="utf-8"))["services"], words
                self._inner(inner, where)
                self.not_run.append(("docker", NO_ENGINE))
            case ["docker", *options]:
                if "--target" in options:
                    stages = re.findall(r"^FROM .* AS (\S+)", Path("deploy/Dockerfile").read_text(), re.M | re.I)
                    assert options[options.index("--target") + 1] in stages, words
                self.not_run.append(("docker", NO_ENGINE))
            case ["kubectl", "exec", _, "--", *inner]:
                self._inner(inner, where)
                self.not_run.append(("kubectl", NO_KUBERNETES))
            case ["envsubst", _, "<", _, "|", *piped]:
                self._other(piped, where)
            case ["kubectl" | "helm" as name, *_]:
                self.not_run.append((name, NO_KUBERNETES))
            case _:
                super()._other(words, where)

    def _parsed(self, words: Sequence[str], reason: str) -> None:
        parse(words)
        self.not_run.append((words[0], reason))

    def _inner(self, words: list[str], where: str) -> None:
        """A command in a container."""
        if words[0] == "python":
            compile(words[2], where, "exec")
        else:
            parse(words)

    def _in_repository(self, words: list[str], where: str) -> None:
        assert os.access(words[0], os.X_OK), (where, words)
        assert os.system(" ".join(words)) == 0, (where, words)

    def _yaml(self, block: Block, where: str) -> None:
        given = yaml.safe_load(block.code)
        if not {"storage", "run_monitoring"} & given.keys():
            super()._yaml(block, where)
            return
        home = Path("an instance")
        home.mkdir(exist_ok=True)
        (home / "dagster.yaml").write_text(block.code, encoding="utf-8")
        InstanceRef.from_dir(str(home))  # raises for what Dagster does not accept


@pytest.fixture
def checkout(tmp_path: Path, demo_shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project as the repository is, in a folder that may be written, with shards in `in/` and in a bucket."""
    folder = tmp_path / "checkout"
    (folder / "in").mkdir(parents=True)
    shutil.copytree(REPOSITORY / "deploy", folder / "deploy", ignore=shutil.ignore_patterns("secrets"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    (folder / "mm_assets").symlink_to(REPOSITORY / "mm_assets")
    shutil.copy(demo_shards / "captions-00000.tar", folder / "in")
    os.utime(folder / "in" / "captions-00000.tar", (0, 0))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MM_ASSETS_ROOT", raising=False)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    with open_databases():
        yield folder


@pytest.fixture
def bucket(demo_shards: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The bucket of the pages, on a server that the environment names."""
    with serve() as (url, _):
        s3 = fsspec.filesystem("s3", key="test", secret="test", endpoint_url=url)
        s3.mkdir("bucket")
        s3.put(str(demo_shards / "captions-00000.tar"), "bucket/in/captions-00000.tar")
        for one in ("bucket", "bucket/in/captions-00000.tar"):
            s3.chmod(one, acl="public-read")
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        forget_clients()
        yield
    forget_clients()


@pytest.fixture
def follow(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Counter[tuple[str, str]]]:
    """Follows a page, and gives the commands that were not run, with the reason of each."""

    def followed(page: str) -> Counter[Any]:
        reader = Operator(REPOSITORY / "docs" / page, monkeypatch)
        reader.follow()
        return Counter(reader.not_run)

    return followed


@pytest.mark.filterwarnings(
    "ignore:Function `job_execute_command` is superseded"
)  # by `dg`, which need not be installed
def test_running(follow: Callable[[str], Counter[tuple[str, str]]], bucket: None) -> None:
    """Every command runs: shards of a folder and of a bucket, registration, a job of one partition, the manifest."""
    assert follow("running.md") == {("mm-assets", ENDLESS): 1}
    assert Path("dagster_home/data/docs/manifest.json").is_file()


def test_details_of_running(follow: Callable[[str], Counter[tuple[str, str]]]) -> None:
    """Options exist, and Dagster takes the settings of its instance."""
    assert follow("spec/running.md") == {("mm-assets", ENDLESS): 2, ("mm-assets", PARSED): 1, ("pip", INDEX): 1}


def test_many_machines(follow: Callable[[str], Counter[tuple[str, str]]]) -> None:
    """The commands of a cluster and of a job array have options that exist."""
    assert follow("many-machines.md") == {("mm-assets", PARSED): 2, ("ray", CLUSTER): 2}


def test_deployments(follow: Callable[[str], Counter[tuple[str, str]]]) -> None:
    """Files, services, stages and options exist; passwords are made; what needs a cluster is what is listed here."""
    assert follow("spec/many-machines.md") == {
        ("pip", INDEX): 1,
        ("ray", CLUSTER): 2,
        ("dagster-daemon", SERVICE): 1,
        ("dagster-webserver", SERVICE): 1,
        ("dagster", LAUNCHED): 1,
        ("docker", NO_ENGINE): 8,
        ("kubectl", NO_KUBERNETES): 6,
        ("helm", NO_KUBERNETES): 5,
    }
    assert Path("srv/dagster/dagster.yaml").read_bytes() == Path("deploy/dagster.yaml").read_bytes()
    assert {path.name for path in Path("deploy/secrets").iterdir()} >= {"postgres-password", "userlist.txt"}
