"""Folders of saved runs."""

from pathlib import Path
from urllib.parse import unquote

from hypothesis import given
from hypothesis import strategies as st

from envbus.evaluation import default_results_path, find_latest_run

NAMES = st.text("ab-~/%. ", min_size=1, max_size=6)


@given(NAMES, NAMES)
def test_a_folder_name_reads_back_as_env_and_model(env_id, model):
    folder = default_results_path(env_id, model, Path("root")).parent
    assert folder.parent == Path("root/evals")
    assert tuple(map(unquote, folder.name.split("--"))) == (env_id, model)


def test_plain_names_stay_readable():
    assert default_results_path("reverse-text", "gpt-4.1-mini").parent == Path(
        "outputs/evals/reverse-text--gpt-4.1-mini"
    )


def test_long_names_are_cut_but_stay_apart():
    one, two = (default_results_path("env", "m" * 300 + end).parent.name for end in "ab")
    assert one != two
    assert len(one) < 120


def test_the_latest_run_of_that_env_and_model_is_found(tmp_path):
    assert find_latest_run("env", "m", tmp_path) is None
    runs = [default_results_path("env", "m", tmp_path) for _ in range(3)]
    for run in [*runs, default_results_path("env", "other", tmp_path)]:
        run.mkdir(parents=True)
        (run / "results.jsonl").touch()
    default_results_path("env", "m", tmp_path).mkdir()  # it saved nothing: not a run
    assert find_latest_run("env", "m", tmp_path) == runs[-1]
