"""Which device does a rank train on, and which network do gloo and NCCL use?"""

import pytest
import torch

from fsdp_utils.train import loop
from fsdp_utils.train.config import ConfigError
from fsdp_utils.train.group import share_interface, training_device


def imagine(monkeypatch: pytest.MonkeyPatch, gpus: int, **environment: str) -> None:
    """A host with that many GPUs, and a rank that was started with these variables."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)  # main's, after a failure
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)


@pytest.mark.parametrize(
    ("gpus", "environment", "index"),
    [
        (0, {"LOCAL_RANK": "1"}, None),
        (4, {"LOCAL_RANK": "3"}, 3),
        (4, {"SLURM_LOCALID": "3"}, 3),
        (1, {"SLURM_LOCALID": "3"}, 0),  # srun --gpus-per-task=1
        (1, {}, 0),
    ],
)
def test_a_rank_has_the_device_that_is_its_own(
    monkeypatch: pytest.MonkeyPatch, gpus: int, environment: dict[str, str], index: int | None
) -> None:
    imagine(monkeypatch, gpus, **environment)
    wanted = torch.device("cpu") if index is None else torch.device("cuda", index)
    assert training_device("auto") == wanted
    assert training_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("gpus", "environment"), [(2, {"LOCAL_RANK": "2"}), (1, {"LOCAL_RANK": "1"}), (2, {"SLURM_LOCALID": "5"})]
)
def test_more_ranks_than_devices_are_refused_by_the_rank_that_has_none(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, gpus: int, environment: dict[str, str]
) -> None:
    imagine(monkeypatch, gpus, RANK="7", WORLD_SIZE="8", **environment)
    with pytest.raises(ConfigError, match=rf"expected a cuda device for each rank.*found {gpus} and rank"):
        training_device("auto")
    assert loop.main(["--out=x", "--data.source=x"]) == 2
    assert "ConfigError: parallel.device: expected a cuda device" in capfd.readouterr().err


def test_ranks_of_srun_alone_are_told_to_take_torchrun(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    imagine(monkeypatch, 0, SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2", SLURM_LOCALID="1")
    assert loop.main(["--out=x", "--data.source=x"]) == 2
    told = capfd.readouterr().err
    assert "expected torchrun to have started the 2 ranks, found RANK, WORLD_SIZE, MASTER_ADDR" in told


@pytest.mark.parametrize(
    ("given", "gloo", "nccl"),
    [
        ({}, None, None),
        ({"GLOO_SOCKET_IFNAME": "eth1"}, "eth1", "=eth1"),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "eth0", "eth"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "eth1", "=eth1"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, None, "=eth"),
        ({"NCCL_SOCKET_IFNAME": "ib,eth1"}, "eth1", "ib,eth1"),
        ({"NCCL_SOCKET_IFNAME": "^docker"}, None, "^docker"),
        ({"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth0"}, "eth0", "ib0"),
    ],
)
def test_one_named_interface_is_for_both(given: dict[str, str], gloo: str | None, nccl: str | None) -> None:
    environment = dict(given)
    share_interface(environment, ["lo", "docker0", "eth0", "eth1"])
    assert (environment.get("GLOO_SOCKET_IFNAME"), environment.get("NCCL_SOCKET_IFNAME")) == (gloo, nccl)
