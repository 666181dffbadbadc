"""benchmarks/gpu.py: parts run end to end, nothing measured is lost, and a dry run is no recording."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import gpu
from benchmarks.gpu_parts import NAMES, memory, recorder, smoke, train
from benchmarks.gpu_parts.recorder import RECORDED, Run
from tests import imagined_part
from tests.forking_worker import forking

IMAGINED = "tests.imagined_part"
PLAN = [
    {"name": "a", "environment": "x"},
    {"name": "b", "environment": "y"},
    {"name": "g", "environment": "x"},
    {"name": "c", "environment": "x", "does": "raise"},
    {"name": "d", "environment": "x"},
    {"name": "e", "environment": "y", "does": "die"},
    {"name": "f", "environment": "y"},
]


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Workers that are forks, for an environment that has no Jupyter."""
    stubs = tmp_path_factory.mktemp("stubs")
    for package in ("IPython", "ipykernel", "ipyparallel"):
        (stubs / f"{package}.py").write_text("raise ImportError('recording is to need no Jupyter')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(stubs))
        with forking() as run:
            yield run


def imagine(folder: Path, settings: list[dict], *, worker: Any = None, **options: Any) -> dict | None:
    """Record the imagined part with these settings, in processes of its own or in forks."""
    (folder / "plan.json").write_text(json.dumps(settings))
    options = {"device": "cpu", "tiny": True, "command": "a command", "commit": "a commit", **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(imagined_part.PLAN, str(folder / "plan.json"))
        patch.setattr(recorder, "_worker", worker or recorder._worker)
        return recorder.record(IMAGINED, Run(folder=folder, **options))


def log(folder: Path) -> list[str]:
    """The settings that were measured, in order."""
    file = folder / "log"
    return file.read_text().split() if file.exists() else []


def result_of(recording: dict, name: str) -> dict:
    (result,) = [e["result"] for e in recording["settings"] if e["setting"]["name"] == name]
    return result


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which PLAN was recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    assert imagine(folder, PLAN)
    return folder


@pytest.fixture
def recording(recorded: Path) -> dict:
    return json.loads((recorded / "imagined_part.json").read_text())


def test_a_recording_says_where_when_and_from_which_code_it_is(recording: dict) -> None:
    assert recording["part"] == "imagined_part"
    assert (
        recording["question"] == "Does the recorder keep what it measures, whatever becomes of the process?"
    )
    assert recording["dry_run"] is True
    assert (recording["command"], recording["commit"]) == ("a command", "a commit")
    assert recording["torch"] == torch.__version__
    assert {"device", "device_memory_gib", "driver", "cuda", "python", "transformers", "date"} <= set(
        recording
    )
    assert sorted(e["setting"]["name"] for e in recording["settings"]) == list("abcdefg")


def test_settings_share_a_process_unless_their_environment_differs(recording: dict) -> None:
    a, b, g = (result_of(recording, name) for name in "abg")
    assert (a["environment"], b["environment"], g["environment"]) == ("x", "y", "x")
    assert a["pid"] == g["pid"] != b["pid"]


def test_a_setting_that_raises_is_a_result_and_the_others_go_on(recording: dict) -> None:
    assert result_of(recording, "c") == {"error": "RuntimeError: this setting cannot run"}
    # in another process: a kernel that failed spoils all that its process calls on the GPU after it
    assert result_of(recording, "d")["pid"] != result_of(recording, "a")["pid"]


def test_a_setting_that_kills_its_process_is_a_result_and_the_others_go_on(recording: dict) -> None:
    assert result_of(recording, "e") == {"error": "the process ended with code 7, see imagined_part.log"}
    assert result_of(recording, "f")["pid"] != result_of(recording, "b")["pid"]


def test_what_failed_is_left_out_of_what_lessons_quote(recording: dict) -> None:
    assert sorted(recording["results"]["measured"]) == list("abdfg")


def test_nothing_is_measured_twice_and_no_partial_file_remains(recorded: Path) -> None:
    assert sorted(log(recorded)) == list("abcdefg")
    assert "RuntimeError: this setting cannot run" in (recorded / "imagined_part.log").read_text()
    assert list(recorded.glob("*.partial.jsonl")) == []


def partial_file(folder: Path, **origin: str) -> Path:
    """As an interrupted run would leave it: a is measured, b not."""
    file = folder / "imagined_part.partial.jsonl"
    first = {"code": recorder.code_hash(IMAGINED), "dry_run": True, **recorder.machine("cpu"), **origin}
    kept = {"setting": {"name": "a"}, "result": {"pid": 0}}
    file.write_text(json.dumps(first) + "\n" + json.dumps(kept) + "\n")
    return file


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path, forks: Any) -> None:
    file = partial_file(tmp_path)
    assert not imagine(tmp_path, [{"name": "a"}, {"name": "b"}], ends=0)
    assert file.exists()
    assert imagine(tmp_path, [{"name": "a"}, {"name": "b"}], worker=forks)
    assert log(tmp_path) == ["b"]
    assert not (tmp_path / "imagined_part.log").exists()  # nothing failed
    recording = json.loads((tmp_path / "imagined_part.json").read_text())
    assert recording["results"] == {"measured": ["a", "b"]}


def test_a_result_that_was_cut_short_while_it_was_written_is_measured_again(
    tmp_path: Path, forks: Any
) -> None:
    file = partial_file(tmp_path)
    with file.open("a") as lines:
        lines.write('{"setting": {"name": "b"}, "resu')
    assert imagine(tmp_path, [{"name": "a"}, {"name": "b"}], worker=forks)
    assert log(tmp_path) == ["b"]


def test_a_number_that_is_not_finite_is_an_error_of_its_setting(tmp_path: Path, forks: Any) -> None:
    recording = imagine(tmp_path, [{"name": "a", "does": "nan"}, {"name": "b"}], worker=forks)
    assert recording is not None
    assert "not JSON compliant" in result_of(recording, "a")["error"]
    assert recording["results"] == {"measured": ["b"]}


def test_a_setting_that_hangs_is_ended_and_the_others_go_on(tmp_path: Path, forks: Any) -> None:
    recording = imagine(tmp_path, [{"name": "a", "does": "hang"}, {"name": "b"}], worker=forks)
    assert recording is not None
    assert "the process ended with code 1" in result_of(recording, "a")["error"]
    assert recording["results"] == {"measured": ["b"]}


@pytest.mark.parametrize("other", [{"code": "older"}, {"device": "another GPU"}])
def test_results_of_other_code_or_another_device_are_not_taken_over(tmp_path: Path, other: dict) -> None:
    file = partial_file(tmp_path, **other)
    assert not imagine(tmp_path, [{"name": "a"}, {"name": "b"}], ends=0)
    assert len(file.read_text().splitlines()) == 1


def test_settings_may_follow_from_results(tmp_path: Path, forks: Any) -> None:
    assert imagine(tmp_path, [{"name": "a"}, {"name": "b"}, {"name": "c"}], tiny=False, worker=forks)
    assert log(tmp_path) == ["a", "b", "c"]
    assert json.loads((tmp_path / "imagined_part.json").read_text())["dry_run"] is False


def test_a_recording_is_stale_when_its_code_has_changed(
    recorded: Path, recording: dict, tmp_path: Path
) -> None:
    assert recorder.state(IMAGINED, tmp_path) == "not recorded"
    made = f"{recording['date']} on {recording['device']}"
    assert recorder.state(IMAGINED, recorded) == f"current, {made}"
    (tmp_path / "imagined_part.json").write_text(json.dumps({**recording, "code": "older"}))
    assert recorder.state(IMAGINED, tmp_path) == f"older than its code, {made}"


def test_a_dry_run_cannot_be_kept_among_the_recordings() -> None:
    with pytest.raises(ValueError, match="a dry run is no recording"):
        Run("cpu", True, RECORDED, "", "")


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory, forks: Any) -> Path:
    """The folder in which a dry run of all parts was recorded."""
    folder = tmp_path_factory.mktemp("dry_run")
    kept = sorted(RECORDED.glob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "_worker", forks)
        gpu.main(["--all", "--device", "cpu", "--tiny", "--out", str(folder)])
    assert sorted(RECORDED.glob("*")) == kept
    return folder


@pytest.mark.timeout(300)  # a minute where the cores are busy
@pytest.mark.parametrize("name", NAMES)
def test_every_part_runs_end_to_end_on_the_cpu(dry_run: Path, name: str) -> None:
    recording = json.loads((dry_run / f"{name}.json").read_text())
    assert recording["dry_run"] is True
    assert recording["settings"]
    assert [e for e in recording["settings"] if "error" in e["result"]] == []
    assert recording["results"]


def test_all_smoke_checks_pass_on_the_cpu(dry_run: Path) -> None:
    results = json.loads((dry_run / "smoke.json").read_text())["results"]
    assert results == {"passed": list(smoke.CHECKS), "of": 7}


def test_recomputation_costs_operations_and_moving_activations_does_not(dry_run: Path) -> None:
    eager = json.loads((dry_run / "activation_checkpointing.json").read_text())["results"]["eager"]
    ratio = {policy: result["flop_ratio"] for policy, result in eager.items()}
    assert ratio["full"] > ratio["every second block"] > ratio["selective by operator"] == 1
    assert ratio["offload"] == ratio["none"] == 1


def test_the_batch_of_the_memory_part_doubles_and_then_closes_in_on_the_largest_that_fits() -> None:
    fits: dict[int, bool] = {}
    for _ in range(50):
        sizes = memory._sizes(fits, largest=512)
        if len(sizes) == len(fits):
            break
        fits[sizes[-1]] = sizes[-1] <= 77
    assert list(fits)[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert (fits[77], fits[78]) == (True, False)
    assert len(fits) < 20


def test_the_memory_part_compares_the_best_quiet_batch_with_the_largest() -> None:
    def ran(size: int, speed: float, retries: int) -> tuple[dict, dict]:
        result = {
            "samples_per_s": speed,
            "num_alloc_retries": retries,
            "peak_reserved_gib": 1.0,
            "peak_allocated_gib": 0.9,
        }
        return {"expandable_segments": False, "batch_size": size}, result

    full = ({"expandable_segments": False, "batch_size": 18}, {"out_of_memory": True})
    summary = memory.summarize([ran(8, 2.0, 0), ran(16, 2.93, 0), ran(17, 2.34, 9), full])["default"]
    assert summary["best_without_retry"]["batch_size"] == 16
    assert summary["largest"]["batch_size"] == 17
    assert summary["gain"] == pytest.approx(2.93 / 2.34)


@pytest.mark.parametrize(
    ("device", "mfu", "held"),
    [("NVIDIA H200", 0.45, True), ("NVIDIA H200", 0.449, False), ("NVIDIA A100", 0.6, None)],
)
def test_the_limit_of_the_train_part_is_for_the_best_compiled_setting_on_an_h200(
    device: str, mfu: float, held: bool | None
) -> None:
    told = {"memory_maximizer": {"device": device, "advice": []}}
    ran = {"step_s": {"median": 1.0}, "tokens_per_s": 1.0, **told}
    results = train.summarize(
        [
            ({"compile": False, "batch_size": 8}, {"mfu": 0.9, **ran}),
            ({"compile": True, "batch_size": 8}, {"mfu": mfu, **ran}),
            ({"compile": True, "batch_size": 16}, {"out_of_memory": True, **told}),
        ]
    )
    assert (results["best_compiled_mfu"], results["limit_held"]) == (mfu, held)
    assert [row["mfu"] for row in results["rows"]] == [0.9, mfu, None]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_command_says_so_in_one_sentence(capsys: pytest.CaptureFixture) -> None:
    assert gpu.main(["--all"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "no part is called speed; there are smoke, train, "),
        (["--all", "--device", "cpu"], "add --tiny"),
        ([], "name a part, or all by --all"),
    ],
)
def test_a_wrong_call_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert message in capsys.readouterr().err


def test_list_names_each_part_with_its_question(capsys: pytest.CaptureFixture) -> None:
    assert gpu.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[::2]] == list(NAMES)
    assert all(line.strip().endswith("?") for line in lines[1::2])
