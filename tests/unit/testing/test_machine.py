"""`python -m torchstrategy` says what the machine has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from conditions import for_changes, needs_simulated_devices
from torchstrategy.testing import _machine, simulated_devices


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _machine._OF_CLUSTERS:
        monkeypatch.delenv(name, raising=False)


def command(*options: str) -> str:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _machine._OF_CLUSTERS
    }
    arguments = [sys.executable, "-W", "error", "-m", "torchstrategy", *options]
    return subprocess.run(
        arguments, capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_it_tells_versions_devices_and_strategies() -> None:
    found = _machine.report()
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    first = found["devices"][0]
    assert (
        first["device"] == "cpu:0"
        and first["step"] == "runs"
        and not first["simulated"]
    )
    assert first["memory_gib"] is None or first["memory_gib"] > 0.1
    four = found["strategies"]['CentralStorageStrategy(["cpu"] * 4)']
    assert four == "CentralStorageStrategy(4 replicas on cpu:0, parameters on cpu:0)"
    if not torch.cuda.is_available():
        assert [device["device"] for device in found["devices"][1:]] == [
            str(device) for device in simulated_devices()
        ]


@needs_simulated_devices
def test_simulated_devices_run_a_step_each() -> None:
    found = _machine.report()
    simulated = [device for device in found["devices"] if device["simulated"]]
    assert [device["step"] for device in simulated] == ["runs"] * 5
    assert found["strategies"]["MirroredStrategy()"].startswith(
        "MirroredStrategy(5 replicas on sim:0, sim:1"
    )


def test_the_command_prints_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert _machine.main([]) == 0
    said = capsys.readouterr().out
    for heading in ("Versions", "Devices", "Strategies, as they would be made here"):
        assert f"{heading}\n" in said
    assert "cpu:0" in said and "a small step: runs" in said


@for_changes
@pytest.mark.slow
def test_the_command_simulates_devices_and_prints_json() -> None:
    found = json.loads(command("--json", "--simulate-devices=2"))
    assert [device["device"] for device in found["devices"]] == [
        "cpu:0",
        "sim:0",
        "sim:1",
    ]
    assert [device["simulated"] for device in found["devices"]] == [False, True, True]
    assert {device["step"] for device in found["devices"]} == {"runs"}
    assert found["strategies"]["CentralStorageStrategy()"] == (
        "CentralStorageStrategy(2 replicas on sim:0, sim:1, parameters on cpu:0)"
    )


def test_a_device_on_which_the_step_fails_says_why_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: torch.device) -> str:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(_machine, "_step", broken)
    assert _machine.main([]) == 1
    assert (
        "a small step: RuntimeError: no kernel image is available"
        in capsys.readouterr().out
    )


def test_in_a_cluster_it_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    found: dict[str, Any] = _machine.report()
    assert found["cluster"] == {"RANK": "0", "WORLD_SIZE": "2"}
    made = found["strategies"]["MultiWorkerMirroredStrategy()"]
    assert "would wait for the other processes, of RANK, WORLD_SIZE" in made
    assert "  RANK=0\n" in _machine.text(found)
