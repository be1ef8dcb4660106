"""The contract of worker groups, local and on Ray."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from strop.checkpoint.folder import verify
from strop.checkpoint.store import Checkpoints
from strop.controller.group import LocalWorkerGroup
from strop.controller.ray.handles import RemoteTensor

from builders import random_samples
from messages import naming
from toys import PairedWorker, ToyWorker, pools, ray_group

pytestmark = pytest.mark.usefixtures("ray_session")


@contextmanager
def _on_ray(pool, **options):
    group = ray_group(pool, phase_timeout_s=60.0, **options)
    try:
        yield group
    finally:
        group.shutdown()


@pytest.fixture(scope="module", params=["local", "ray with 1", "ray with 3", "ray with 4 in pairs"])
def group(request, ray_session):
    if request.param == "local":
        yield LocalWorkerGroup(worker_cls=ToyWorker, init_kwargs={"start": 5}, name="toy")
        return
    size = int(request.param.split()[2])
    worker_cls = PairedWorker if "pairs" in request.param else ToyWorker
    with _on_ray(pools(main=[size])[0], worker_cls=worker_cls, start=5) as made:
        yield made


def _copies(group) -> int:
    """Ranks that share rows."""
    return 2 if getattr(group, "worker_cls", None) is PairedWorker else 1


@pytest.mark.fast("ray with 3")
def test_one_to_all_reaches_every_rank_and_returns_that_of_rank_zero(group):
    before = group.values()
    assert len(before) == group.world_size
    assert group.add(2, times=3) == before[0] + 6
    assert group.values() == [value + 6 + rank for rank, value in enumerate(before)]


def test_rank_zero_alone_is_called(group):
    before = group.values()
    assert group.add_on_rank_zero(7) == before[0] + 7
    assert group.values() == [before[0] + 7, *before[1:]]


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
def test_data_parallel_results_are_in_the_order_of_the_rows(group, rows):
    batch = random_samples(rows)
    result = group.double(batch, factor=3)
    assert len(result) == rows
    assert torch.equal(result.batch["doubled"], batch.batch["input_ids"] * 3)
    assert torch.equal(result.batch["half"], batch.batch["input_ids"].bfloat16() / 2)
    assert torch.equal(result.batch["counted"], batch.batch["response_mask"].sum(dim=1))
    parts = group.world_size // _copies(group)
    assert set(result.non_tensor_batch["rows"]) == {-(-rows // parts)}


def test_several_results_for_a_row_stay_together(group):
    batch = random_samples(5)
    result = group.samples(batch, 3)
    assert torch.equal(result.batch["input_ids"], batch.repeat(3).batch["input_ids"])
    assert result.batch["sample"].tolist() == [0, 1, 2] * 5


def test_workers_report_rows_while_they_work_and_each_once(group, tmp_path):
    if not isinstance(group, LocalWorkerGroup):
        group.double(random_samples(5))  # progress of one call is not taken for that of another
    batch = random_samples(10)
    batch.batch["input_ids"][:, 0] = torch.arange(10) + 100
    reported = []

    def report(row, first_id, rank):
        reported.append((row, first_id, rank))
        if len(reported) >= 3:  # in every group some rank has reported so many before its last
            (tmp_path / "go.go").touch()

    result = group.tell(batch, report=report, go=tmp_path / "go")
    assert torch.equal(result.batch["input_ids"], batch.batch["input_ids"])
    assert sorted(row for row, *_ in reported) == list(range(10))
    assert all(first_id == row + 100 for row, first_id, _ in reported)
    assert len({rank for *_, rank in reported}) == group.world_size // _copies(group)


def test_an_error_of_the_drivers_function_is_raised_by_the_call(group, tmp_path):
    (tmp_path / "go.go").touch()

    def report(row, first_id, rank):
        raise ZeroDivisionError(f"row {row}")

    with pytest.raises(ZeroDivisionError, match=r"^row \d+$"):
        group.tell(random_samples(10), report=report, go=tmp_path / "go")
    assert group.values()


def test_the_batch_may_be_given_by_name(group):
    batch = random_samples(5)
    by_name = group.double(factor=3, batch=batch)
    assert torch.equal(by_name.batch["doubled"], group.double(batch, 3).batch["doubled"])
    assert by_name.meta_info == {"rank": 0}


def test_padding_counts_nowhere_and_shared_rows_count_once_a_rank(group):
    batch = random_samples(7)
    tokens = float(batch.batch["response_mask"].sum()) * _copies(group)
    assert group.count(batch) == {"tokens": tokens, "rank": 0.0}


def test_a_workers_result_can_be_sent_back(group):
    batch = random_samples(6)
    doubled = batch.union(group.double(batch).select("doubled"))
    order = torch.tensor([5, 1, 1, 0])
    again = doubled[order].select("doubled", "attention_mask", "response_mask")
    again = type(again)({**again.batch, "input_ids": again.batch["doubled"]})
    result = group.double(again)
    assert torch.equal(result.batch["doubled"], batch.batch["input_ids"][order] * 4)
    assert group.sum_of(group.bucket()) == torch.arange(1000.0).bfloat16().float().sum().item()


def test_started_calls_run_in_their_order(group):
    before = group.values()[0]
    calls = [group.add.start(amount) for amount in (1, 10, 100)]
    assert [call.get() for call in calls] == [before + 1, before + 11, before + 111]


def test_a_run_that_is_ended_while_a_call_hangs_keeps_the_save_in_flight(ray_session, tmp_path):
    def run() -> None:
        with (
            _on_ray(pools(main=[2])[0], start=5) as group,
            Checkpoints(tmp_path, background=True, trained=["toy"]) as checkpoints,
        ):
            checkpoints.save(1, {"toy": group}, {})
            group.sleep.start(rank=1)  # longer than the groups of this file wait for any call
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    verify(tmp_path / "global_step_1")
    assert [(tmp_path / "global_step_1" / "toy" / str(rank)).read_text() for rank in (0, 1)] == ["5", "5"]


def test_only_marked_methods_can_be_called(group):
    for name in ("unmarked", "nothing", "value"):
        with pytest.raises(AttributeError, match=naming("toy", f"'{name}'")):
            getattr(group, name)


def test_every_node_sees_a_file_of_the_driver(group, tmp_path):
    (tmp_path / "file").touch()
    assert group.nodes_without(tmp_path / "file") == []


def test_ranks_that_share_data_get_the_same_rows(ray_session):
    with _on_ray(pools(main=[4])[0], worker_cls=PairedWorker) as group:
        result = group.double(random_samples(9))
        assert set(result.batch["rank"].tolist()) == {0, 2}  # collected once, from the first of each pair
        assert set(group.samples(random_samples(9), 2).batch["rank"].tolist()) == {0, 1, 2, 3}  # not in pairs
        assert len(set(group.pids())) == 4


def test_groups_of_one_pool_share_its_processes_and_others_do_not(ray_session, tmp_path):
    main, other = pools(main=[2], other=[1])
    with _on_ray(main, name="a") as a, _on_ray(main, name="b", start=9) as b, _on_ray(other, name="c") as c:
        assert a.pids() == b.pids()
        assert not set(a.pids()) & set(c.pids())
        assert (a.values(), b.values(), c.values()) == ([0, 0], [9, 9], [0])
        a.shutdown()
        assert b.values() == [9, 9]  # the processes end with their last group
        one, two = tmp_path / "one", tmp_path / "two"
        calls = b.meet.start(one, two), c.meet.start(two, one)
        assert [call.get() for call in calls] == [True, True]


def test_handles_change_no_number_and_keep_the_bytes_off_the_driver(ray_session):
    pool = pools(main=[2])[0]
    batch, traffic, results = random_samples(50), {}, {}
    with _on_ray(pool, name="with") as with_handles, _on_ray(pool, name="without", handles=False) as without:
        for group in (with_handles, without):
            doubled = batch.union(group.double(batch).select("doubled", "half"))
            doubled = doubled.select("doubled", "attention_mask", "response_mask")
            second = type(doubled)({**doubled.batch, "input_ids": doubled.batch["doubled"]})
            results[group.name] = group.double(second)
            traffic[group.name] = (group.traffic.sent, group.traffic.received)
            assert isinstance(results[group.name].batch["doubled"], RemoteTensor) == (group is with_handles)
        ids, mask = 50 * 11 * 8, 50 * 11 * 8
        everything = sum(t.nbytes for t in batch.batch.values())
        again = mask + 50 * 5 * 4  # the second call's attention_mask and response_mask are the driver's own
        returned = 50 * (11 * 8 + 8 + 4 + 11 * 2)  # doubled, rank, counted, half
        assert traffic["without"] == (everything + again + 2 * ids, 2 * returned)
        assert traffic["with"] == (everything + again, 0)
        results["with"].batch["rank"].sum()  # fetches the small columns that lie with it, and is remembered
        assert with_handles.traffic.received == returned
        with_handles.double(second).batch["rank"].sum()
        assert with_handles.traffic.received == returned + 50 * 8
        for name, column in results["without"].batch.items():
            assert torch.equal(results["with"].batch[name], column), name
