"""The workspace names what runs log and nothing else, is the same each time, and is sent only with a key."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sweep_table import ROWS
from tests.wandb_case import no_account, online
from tests.wandb_stub import WandbStub, closed_port
from trainer import dashboard_cli
from trainer.config import RunConfig
from trainer.wandb_labels import wandb_config
from trainer.wandb_sweep import scaling_rows, sweep_summary
from trainer.worker import VERDICT_KEYS

dashboard = pytest.importorskip("trainer.dashboard", reason="needs wandb-workspaces (extra dashboard)")

__all__ = ["no_account"]  # a fixture

ROOT = Path(__file__).resolve().parent.parent
MEDIA = {"report", "jobs"}  # the page and the table
Keys = dict[str, set[str]]


def spec(**options: Any) -> dict[str, Any]:
    made = dashboard.make_workspace(**{"entity": "tester", "project": "splitmeter", **options})
    found: dict[str, Any] = dashboard.workspace_spec(made)
    return found


def strings(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Every text in a spec, with the key under which it stands."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from strings(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item, name)
    elif isinstance(value, str):
        yield name, value


def named(made: dict[str, Any]) -> Keys:
    """What a spec names, by kind: `row` keys and `pattern`s of them, `summary` and `config` keys, `media`."""
    keys: Keys = {kind: set() for kind in ("row", "pattern", "summary", "config", "media")}
    section = made["spec"]["section"]
    panels = [panel for own in section["panelBankConfig"]["sections"] for panel in own["panels"]]
    for own in section["panelBankConfig"]["sections"]:
        keys["row"].add(own["localPanelSettings"]["xAxis"])
    keys["row"].add(section["settings"]["xAxis"])
    texts = list(section["runSets"][0]["runFeed"]["columnPinned"])
    for panel in panels:
        config = panel["config"]
        if panel["viewType"] == "Weave":
            keys["media"] |= set(re.findall(r'"type": "string", "val": "(\w+)"', json.dumps(config)))
        elif panel["viewType"] == "Bar Chart":
            keys["summary"] |= set(config["metrics"])
        else:
            for name, text in strings(config):
                if name == "metrics" or (name == "xAxis" and ":" not in text):
                    keys["row"].add(text)
                elif name == "expressions":
                    keys["row"] |= set(re.findall(r"\$\{(.+?)\}", text))
                elif name == "metricRegex":
                    keys["pattern"].add(text)
                elif name == "mediaKeys":
                    keys["media"].add(text)
                elif name in ("xAxis", "yAxis", "accessor"):
                    texts.append(text)
    for text in texts:
        kind, _, key = text.partition(":")
        if kind != "run":
            keys[kind].add(key.removesuffix(".value") if kind == "config" else key)
    return keys


def flat(values: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
    return found


def of_a_sweep() -> tuple[set[str], set[str]]:
    """The keys of a summary run's rows, and of its summary."""
    rows = scaling_rows([*ROWS, {**ROWS[0], "problem": 1}])
    table = {"rows": ROWS, "sentences": []}
    return {key for row in rows for key in row}, flat({"sweep": sweep_summary(table, {})})


def check_all_are_known(rows: set[str], summary: set[str], config: set[str]) -> None:
    keys = named(spec())
    assert {kind: bool(found) for kind, found in keys.items()} == dict.fromkeys(keys, True)
    assert keys["row"] - rows == set()
    assert [pattern for pattern in keys["pattern"] if not any(map(re.compile(pattern).search, rows))] == []
    assert keys["summary"] - summary == set()
    assert keys["config"] - config == set()
    assert keys["media"] == MEDIA


def test_every_key_is_defined() -> None:
    """In docs/metrics.md, or by what a sweep's summary run logs."""
    table = (ROOT / "docs" / "metrics.md").read_text().partition("## How the time is cut")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {key.replace("/R/", "/1/") for cell in cells for key in re.findall("`(.+?)`", cell)}
    rows, summary = of_a_sweep()
    summary |= {f"steady.{key}.median" for key in documented} | {f"verdict.{key}" for key in VERDICT_KEYS}
    config = wandb_config(RunConfig("/run").to_mapping(), {"world_size": 2}, "train")
    check_all_are_known(documented | rows, summary, set(config))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_every_key_is_one_that_real_runs_log(tmp_path: Path) -> None:
    """A pipeline's, on two ranks, as W&B has it: with rows, config and summary read from its own file."""
    command = [
        sys.executable,
        "scripts/train.py",
        "strategy=pipeline",
        "world_size=2",
        "trainer.max_steps=30",
    ]
    command += ["trainer.wire_every=5", "logger.mode=offline", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    leet = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    read = subprocess.run([*leet, str(path)], capture_output=True, text=True, timeout=60, check=True)
    records = [json.loads(line) for line in read.stdout.splitlines()]
    rows = {key for record in records if record["type"] == "history" for key in record["history"]["item"]}
    (run,) = (record["run"] for record in records if record["type"] == "run")
    head = [*leet[:-1], "--summary", "--json", str(path)]
    read = subprocess.run(head, capture_output=True, text=True, timeout=60, check=True)
    summary = flat(json.loads(read.stdout)["summary"])
    assert run["job_type"] == "train" and run["tags"] == ["pipeline", "world_size=2"]
    of_rows, of_summary = of_a_sweep()
    check_all_are_known(rows | of_rows, summary | of_summary, set(run["config"]["update"]))


def test_the_same_input_gives_the_same_spec() -> None:
    ids = [text for name, text in strings(spec(group="g")) if name == "__id__"]
    assert len(ids) == len(set(ids)) > 25
    assert spec(group="g", ranks=3) == spec(group="g", ranks=3)


def test_ranks_can_be_named_one_by_one() -> None:
    keys = named(spec(ranks=3))
    found = {key for key in keys["row"] if key.startswith("rank/")}
    assert found == {f"rank/{rank}/{key}" for rank in range(3) for key in dashboard.PER_RANK}
    assert not [pattern for pattern in keys["pattern"] if "rank" in pattern]


@pytest.mark.parametrize("group", ["2026-11-30_10-00-00-sweep", "a=1, \"b\" or 'c' \\"])
def test_a_group_is_the_only_filter(group: str) -> None:
    (runs,) = spec(group=group)["spec"]["section"]["runSets"]
    (rule,) = runs["filters"]["filters"]
    assert (rule["key"], rule["op"], rule["value"]) == ({"section": "run", "name": "group"}, "=", group)


def test_the_spec_is_printed_or_saved_without_account_and_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dashboard_cli.main(["--project", "p"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == spec(entity="", project="p")
    assert dashboard_cli.main(["--project", "p", "--json", str(tmp_path / "spec.json")]) == 0
    assert (tmp_path / "spec.json").read_text() == printed


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--push"],
            "--push needs a key for api.wandb.ai, and there is none; set WANDB_API_KEY or run wandb login, "
            "or leave out --push for the spec alone",
        ),
        (["--ranks", "0"], "--ranks=0 is out of range; give 1 to 256"),
        (["--project", " "], "--project=' ' is not a name; give the one that W&B shows"),
        (
            ["--json", "/nowhere/spec.json"],
            "--json=/nowhere/spec.json cannot be written (No such file or directory); name a file in a "
            "folder that this user can write",
        ),
        (["--jsn"], "unrecognized arguments: --jsn; --help lists what there is"),
    ],
)
def test_wrong_input_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dashboard_cli.main(arguments) == 2
    assert capsys.readouterr() == ("", sentence + "\n")


def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trainer.dashboard", None)
    assert dashboard_cli.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("run pip install 'splitmeter[dashboard]'")


def test_help_answers_without_wandb_and_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "from trainer.dashboard_cli import main\n"
        "try: main()\n"
        "except SystemExit: print(sorted({'torch', 'wandb'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_it_is_sent_with_a_key(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        assert dashboard_cli.main(["--push", "--group", "g"]) == 0
        view = stub.variables("UpsertView2")
        url = stub.url
    assert (view["entityName"], view["projectName"], view["type"]) == ("tester", "splitmeter", "project-view")
    assert json.loads(view["spec"]) == spec(group="g")["spec"]
    assert capsys.readouterr().out.startswith(f"workspace  {url}/tester/splitmeter?nw=")


@pytest.mark.slow
def test_a_server_that_does_not_take_it_costs_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    online(monkeypatch, url)
    assert dashboard_cli.main(["--push", "--entity", "e"]) == 1
    down = capsys.readouterr().err
    assert down == f"W&B did not take the workspace (OSError: {url}: Connection refused)\n"
    with WandbStub("refuse") as stub:
        online(monkeypatch, stub.url)
        assert dashboard_cli.main(["--push"]) == 1
    (refused,) = capsys.readouterr().err.splitlines()
    assert refused.startswith("W&B did not take the workspace (AuthenticationError: ")
    monkeypatch.setattr("trainer.dashboard_push.PUSH_S", 4.0)
    with WandbStub("hang") as stub:
        online(monkeypatch, stub.url)
        assert dashboard_cli.main(["--push"]) == 1
    assert capsys.readouterr().err == "W&B did not take the workspace (no answer in 4 s)\n"
