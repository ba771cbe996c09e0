from __future__ import annotations

import pytest

import pipedist
from pipedist.errors import UsageError
from pipedist.scheduler import SchedulerLimits
from pipedist.worker.devices import VISIBLE, Devices, DevicesUnseen


def seen(environment: dict[str, str], *shown: tuple[str, ...], loaded: tuple[str, ...] = ()) -> str | None:
    devices = Devices(environment, loaded)
    for each in shown:
        devices.show(each)
    return environment.get(VISIBLE)


def test_a_process_sees_the_union_of_its_replicas_devices() -> None:
    assert seen({}, ("cuda:3", "cuda:1", "cuda:3")) == "1,3"
    assert seen({}, ("cuda:3",), ("cuda:0", "cuda:1")) == "0,1"


def test_without_cuda_devices_nothing_is_changed() -> None:
    assert seen({}, ("", "cpu:0")) is None
    assert seen({VISIBLE: "4"}, ()) == "4"


def test_the_initial_value_limits_and_orders_the_visible_devices() -> None:
    assert seen({VISIBLE: "7,5,6"}, ("cuda:5", "cuda:7")) == "7,5"
    with pytest.raises(UsageError, match=r"cuda:8, but .* CUDA_VISIBLE_DEVICES=5,6"):
        seen({VISIBLE: "5,6"}, ("cuda:5", "cuda:8"))


def test_a_value_that_a_library_has_read_is_not_changed() -> None:
    environment: dict[str, str] = {}
    loaded: list[str] = []
    devices = Devices(environment, loaded)
    devices.show(("cuda:0", "cuda:2"))
    loaded.append("torch")
    devices.show(("cuda:2",))
    assert environment[VISIBLE] == "0,2"
    with pytest.raises(DevicesUnseen, match=r"CUDA_VISIBLE_DEVICES=1,2, but torch was loaded with 0,2"):
        devices.show(("cuda:1", "cuda:2"))
    assert environment[VISIBLE] == "0,2"


@pytest.mark.parametrize(
    ("device", "visible", "name"),
    [
        ("cuda:3", "2,3", "cuda:1"),
        ("cuda:3", "", "cuda:3"),
        ("cpu:1", "0", "cpu:1"),
    ],
)
def test_a_device_is_named_as_the_process_sees_it(device: str, visible: str, name: str) -> None:
    assert Devices({VISIBLE: visible}, ()).name_of(device) == name


@pytest.mark.asyncio
async def test_a_worker_that_cannot_see_its_replicas_devices_is_replaced_by_a_new_process() -> None:
    def look() -> str:
        import os
        import sys
        import types

        sys.modules.setdefault("torch", types.ModuleType("torch"))
        ctx = pipedist.get_replica_context()
        assert ctx is not None
        return f"{os.environ['CUDA_VISIBLE_DEVICES']} {ctx.device} {os.getpid()}"

    async with pipedist.LocalCluster(workers=1, limits=SchedulerLimits(deaths_max=1)) as cluster:  # no death
        first = pipedist.Strategy(cluster, devices=["cuda:2", "cuda:5"])
        here, also = (await first.run(look)).components
        assert [here.split()[:2], also.split()[:2]] == [["2,5", "cuda:0"], ["2,5", "cuda:1"]]
        (then,) = (await pipedist.Strategy(cluster, devices=["cuda:5"]).run(look)).components
        assert then.split()[:2] == ["2,5", "cuda:1"]
        (other,) = (await pipedist.Strategy(cluster, devices=["cuda:7"]).run(look)).components
        assert other.split()[:2] == ["7", "cuda:0"]
        assert other.split()[2] != here.split()[2]
