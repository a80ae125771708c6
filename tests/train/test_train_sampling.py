"""`openk3 generate`: finding the checkpoint, and a vocabulary that is not the model's."""

import shutil

import pytest

from openk3.errors import UserError
from openk3.train.loop import train
from openk3.train.sampling import find, stream


@pytest.fixture(scope="module")
def run(make_recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sampling") / "run"
    train(make_recipe("train.steps=1"), folder, progress=False)
    return folder


def test_a_run_its_checkpoint_and_its_model_write_the_same(run):
    settings = {"max_new_tokens": 5, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    checkpoint = run / "checkpoints" / "step-00000001"
    texts = {"".join(stream(path, "ba", **settings)) for path in (run, checkpoint, checkpoint / "model")}
    assert len(texts) == 1


def test_what_is_no_run_is_told(run, tmp_path):
    for path, words in [
        (tmp_path / "nowhere", "there is no folder .*nowhere"),
        (tmp_path, "is no run folder and no checkpoint"),
        (run / "config.toml", "there is no folder"),
    ]:
        with pytest.raises(UserError, match=words):
            find(path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match="has no checkpoint yet; train it first"):
        find(tmp_path)


def test_a_rank_file_cut_between_two_lines(run, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(run / "checkpoints" / "step-00000001" / "model", model)
    lines = (model / "tiktoken.model").read_bytes().splitlines(keepends=True)
    (model / "tiktoken.model").write_bytes(b"".join(lines[:-100]))
    with pytest.raises(UserError, match="gives 668 ids, but the model beside it has 768; the file is cut short, or"):
        list(stream(model, "ba", max_new_tokens=1))
