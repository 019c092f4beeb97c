"""Rows on disk: damage, full disks, values without a JSON form."""

import asyncio
import json
import logging
import resource

import pytest
from eval_runners import example, output_for
from hypothesis import given
from hypothesis import strategies as st

from envbus.errors import UsageError
from envbus.evaluation import load_results
from envbus.evaluation.results import ResultsWriter, read_metadata, read_rows, write_metadata


def row(n):
    return output_for(example(n), float(n))


async def save(folder, rows):
    writer = ResultsWriter(folder)
    await writer.append(rows)
    return writer.close()


async def test_rows_and_metadata_come_back(tmp_path):
    run = tmp_path / "deep" / "run"
    assert await save(run, {1: row(1), 0: row(0)}) is None
    write_metadata(run, {"env_id": "e"})
    expected = {"outputs": [row(0), row(1)], "metadata": {"env_id": "e"}}
    assert load_results(run) == load_results(run / "results.jsonl") == expected
    assert sorted(path.name for path in run.iterdir()) == ["metadata.json", "results.jsonl"]


async def test_the_newest_row_of_an_index_holds(tmp_path):
    await save(tmp_path, {0: row(5), 1: row(1)})
    await save(tmp_path, {0: row(7)})
    assert read_rows(tmp_path) == {0: row(7), 1: row(1)}


@given(cut=st.integers(0, 10_000))
def test_a_file_cut_anywhere_is_read_and_repaired(cut, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(save(folder, {n: row(n) for n in range(4)}))
    file = folder / "results.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: cut % len(whole)])
    lines_left = whole[: cut % len(whole)].count(b"\n")
    assert read_rows(folder) == {n: row(n) for n in range(lines_left)}
    asyncio.run(save(folder, {9: row(9)}))
    assert read_rows(folder) == {n: row(n) for n in [*range(lines_left), 9]}
    assert file.read_bytes().count(b"\n") == lines_left + 1


async def test_damaged_lines_are_skipped_with_a_warning(tmp_path, caplog):
    await save(tmp_path, {0: row(0)})
    with (tmp_path / "results.jsonl").open("ab") as file:
        file.write(b'\0\0\0\n[1]\n{"index": -1}\n{"index": true}\n{"index": 1, "x": {"$float": null}}\n')
    await save(tmp_path, {2: row(2)})
    assert read_rows(tmp_path) == {0: row(0), 2: row(2)}
    assert len(caplog.records) == 5


async def test_a_torn_write_is_repaired_and_tried_again(tmp_path, caplog):
    """A disk that fills up and has room again later: no row is lost and none is glued to half a line."""
    writer = ResultsWriter(tmp_path)
    await writer.append({0: row(0)})
    limit_bytes = (tmp_path / "results.jsonl").stat().st_size + 20
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limits[1]))
    try:
        await writer.append({1: row(1)})
        await writer.append({2: row(2)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    await writer.append({3: row(3)})
    assert writer.close() is None
    assert list(read_rows(tmp_path)) == [0, 3, 1, 2]
    assert caplog.text.count("cannot write results") == 1


async def test_a_full_disk_is_told_once_and_at_the_end(tmp_path, caplog):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    writer = ResultsWriter(tmp_path)
    await writer.append({0: row(0)})
    await writer.append({1: row(1)})
    problem = writer.close()
    assert problem.startswith("2 rows could not be saved")
    assert "No space left" in problem
    assert caplog.text.count("cannot write results") == 1


async def test_an_output_that_cannot_be_written_leaves_an_error_row(tmp_path, caplog):
    """P16: the other rows are saved, and a resume runs this one again."""
    loop = []
    loop.append(loop)
    with caplog.at_level(logging.ERROR):
        problem = await save(tmp_path, {0: row(0), 1: row(1) | {"loop": loop}})
    assert problem.startswith("1 rows could not be saved: EncodeError")
    rows = read_rows(tmp_path)
    assert rows[0] == row(0)
    assert rows[1]["reward"] is None
    assert rows[1]["error"]["error"] == "EncodeError"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="another results path"):
        ResultsWriter(tmp_path / "file" / "run")


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_damaged_metadata_is_a_usage_error(text, tmp_path):
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(UsageError, match="metadata"):
        read_metadata(tmp_path)


def test_metadata_is_replaced_whole(tmp_path):
    write_metadata(tmp_path, {"avg_reward": float("nan"), "model": "m"})
    text = (tmp_path / "metadata.json").read_text()
    assert json.loads(text) == {"avg_reward": {"$float": "nan"}, "model": "m"}
    with pytest.raises(OSError, match="No such file"):
        write_metadata(tmp_path / "absent", {"model": "n"})


def test_a_missing_run_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        load_results(tmp_path / "absent")
