"""The UI, by a browser: materialize a demo partition, see its checks, open its samples. Leaves screenshots."""

import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from mm_assets.orchestration.checks import rules_of
from mm_assets.orchestration.launch import declared_datasets, open_instance, register_dataset
from mm_assets.pipeline.state.folder import DatasetStore

from ..pipeline.chain import record_of
from .browser import ARGUMENTS, CHROMIUM, needs_browser
from .test_daemon import WAIT, process_group, wait_for

SCREENSHOTS = Path(__file__).resolve().parents[2] / "artifacts"
JOB = "/locations/demo_project/jobs/captions_pack"
RUNS = "{ runsOrError { ... on Runs { results { status } } } }"

pytestmark = needs_browser


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def query(url: str, text: str) -> Any:
    """One GraphQL query; None while the server does not answer."""
    request = urllib.request.Request(
        f"{url}/graphql", json.dumps({"query": text}).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)["data"]
    except (urllib.error.URLError, ConnectionError):
        return None


def statuses(url: str) -> list[str]:
    answer = query(url, RUNS)
    return [run["status"] for run in answer["runsOrError"]["results"]] if answer else []


def test_a_partition_is_materialized_from_the_ui(dagster_home: Path, tmp_path: Path) -> None:
    """A partition launched from the job's page succeeds, with checks, drawn samples and a link that opens them."""
    from playwright.sync_api import sync_playwright

    (dagster_home / "dagster.yaml").write_text(
        "telemetry:\n  enabled: false\nnux:\n  enabled: false\n"
        # No waiting for the daemon, which takes runs from a queue at intervals.
        "run_coordinator:\n  module: dagster._core.run_coordinator\n  class: DefaultRunCoordinator\n"
    )
    dataset = DatasetStore(declared_datasets("demo_project")["captions"])
    with open_instance() as instance:
        register_dataset(instance, dataset)
    port, viewer_port = free_port(), free_port()
    url = f"http://127.0.0.1:{port}"
    log = tmp_path / "ui.log"
    command = [sys.executable, "-c", "from mm_assets.cli.main import main; main()", "ui", "-m", "demo_project"]
    with process_group([*command, "--port", str(port), "--viewer-port", str(viewer_port)], log, tmp_path) as server:
        wait_for(lambda: query(url, "{ version }") is not None or server.poll() is not None, WAIT, log)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            page = browser.new_page(viewport={"width": 1400, "height": 800})
            page.set_default_timeout(60_000)
            page.goto(url + JOB)
            page.get_by_role("button", name="Materialize all").first.click()
            page.get_by_text("Select a partition or create one").click()
            page.get_by_text("captions-00000", exact=True).first.click()
            page.keyboard.press("Escape")
            page.get_by_role("button", name="Launch 1 run").click()
            wait_for(lambda: bool({"SUCCESS", "FAILURE"} & set(statuses(url))), WAIT, log)
            assert statuses(url) == ["SUCCESS"]
            page.goto(url + "/assets/captions/packed_mult?view=checks")
            page.get_by_text("This is a blocking asset check").or_(page.get_by_text("blocking")).first.wait_for()
            page.get_by_text("Succeeded").first.wait_for()
            time.sleep(1)  # let the page come to rest before it is photographed
            SCREENSHOTS.mkdir(exist_ok=True)
            page.screenshot(path=SCREENSHOTS / "checks-in-the-ui.png")
            succeeded = page.get_by_text("Succeeded", exact=True).count()
            page.goto(url + "/assets/captions/filtered_rows?view=partitions&partition=captions-00000")
            page.get_by_text("chart/content_size").first.wait_for()
            page.wait_for_function(
                "() => [...document.querySelectorAll('img[src^=\"data:image/webp\"]')]"
                ".filter(picture => picture.complete && picture.naturalWidth > 20).length >= 4"
            )
            behind_a_click = page.get_by_text("[Show Markdown]").count()
            page.screenshot(path=SCREENSHOTS / "samples-in-the-ui.png", full_page=True)
            with page.context.expect_page() as opened:
                link = f'a[href^="http://127.0.0.1:{viewer_port}/captions/"][href$="part=captions-00000"]'
                page.locator(link).first.click()
            viewer = opened.value
            viewer.locator("#main .card img").first.wait_for()
            assert viewer.url == f"http://127.0.0.1:{viewer_port}/captions/?part=captions-00000"
            browser.close()
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(30) == 0
        assert query(url, "{ version }") is None
    assert behind_a_click == 0
    assert succeeded >= len(rules_of(dataset.spec, "packed_mult"))
    assert record_of(dataset, "captions-00000") is not None
