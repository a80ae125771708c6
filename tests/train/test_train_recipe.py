"""Recipes: defaults by size, one-sentence errors, TOML that reads back equal."""

import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.config import named
from openk3.errors import UserError
from openk3.model.variants import k2like
from openk3.train import toml
from openk3.train.recipe import builtin_recipes, first_difference, known_keys, load_recipe, parse_recipe


@pytest.mark.parametrize("name", ["pico", "nano", "mini", "small", "k2like"])
@pytest.mark.parametrize(
    "overrides", [[], ["train.steps=7", 'data.source=["a/*.txt", "b/\\"c\\"*"]', "model.decay=softplus"]]
)
def test_a_resolved_recipe_written_and_read_is_equal(name, overrides):
    recipe = load_recipe(name, overrides)
    text = recipe.to_toml()
    assert parse_recipe(text) == recipe
    written = {f"{section}.{key}" for section, values in tomllib.loads(text).items() for key in values}
    assert written == set(known_keys())


def test_the_builtin_recipes_are_the_files_of_the_folder():
    assert set(builtin_recipes()) >= {"pico", "nano", "mini", "small", "k2like"}


@pytest.mark.parametrize(
    ("size", "lr", "batch", "context"),
    [("nano", 4e-3, 4096, 1024), ("mini", 1.5e-3, 131072, 2048), ("small", 6e-4, 262144, 4096)],
)
def test_start_values(size, lr, batch, context):
    recipe = load_recipe(size)
    assert (recipe.optim.lr, recipe.train.batch_tokens, recipe.data.context) == (lr, batch, context)
    assert recipe.model == named(size)
    assert recipe.steps == -(-recipe.train.tokens // batch)
    assert recipe.optim.weight_decay == 0.1
    assert (recipe.optim.warmup, recipe.optim.lr_min_ratio, recipe.optim.qk_clip_tau) == (0.01, 0.1, 100)
    assert (recipe.balance.rule, recipe.balance.bins, recipe.optim.optimizer) == ("quantile", 1000, "per_head_muon")
    assert recipe.train.dtype == ("float32" if recipe.train.device == "cpu" else "bfloat16")


def test_k2like_is_what_k3_replaced_at_the_same_active_size():
    recipe = load_recipe("k2like")
    assert recipe.model == k2like(named("nano"))
    assert (recipe.balance.rule, recipe.balance.rate, recipe.optim.optimizer) == ("sign", 1e-3, "muon")
    nano = load_recipe("nano")
    same = {"data", "train"}
    assert all(getattr(recipe, section) == getattr(nano, section) for section in same)
    assert dataclasses.replace(recipe.optim, optimizer="per_head_muon") == nano.optim


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", r"there is no key 'optim.lrr'; the nearest is 'optim.lr'"),
        ("train.step=4", r"there is no key 'train.step'; the nearest is 'train.steps'"),
        ("lr=1", r"there is no key 'lr'; the nearest is 'optim.lr'"),
        ("model.optimizer=adamw", r"there is no key 'model.optimizer'; the nearest is 'optim.optimizer'"),
        ("optim.lr", r"override 'optim.lr' is not of the form section.key=value"),
        ("optim.lr='fast'", r"optim.lr = 'fast' is not a number"),
        ("optim.lr=nan", r"optim.lr = nan is not a number"),
        ("optim.lr=0", r"optim.lr = 0.0 must be above 0"),
        ("optim.warmup=2", r"optim.warmup = 2.0 must be between 0 and 1"),
        ("optim.clip=-1", r"optim.clip = -1.0 must not be negative"),
        ("optim.optimizer=sgd", r"optim.optimizer = 'sgd' is not one of per_head_muon, muon, adamw"),
        ("train.batch_tokens=8k", r"train.batch_tokens = '8k' is not a whole number"),
        ("train.batch_tokens=8.5", r"train.batch_tokens = 8.5 is not a whole number"),
        ("train.batch_tokens=true", r"train.batch_tokens = True is not a whole number"),
        ("train.sample_prompts=def", r"train.sample_prompts = 'def' is not a list of texts"),
        ("train.micro_tokens=100", r"train.micro_tokens = 100 is below data.context = 1024"),
        ("train.device=tpu", r"train.device = 'tpu' is not one of cpu, cuda"),
        ("data.source=3", r"data.source = 3 is not text in quotes"),
        ("balance.rule=luck", r"balance.rule = 'luck' is not one of quantile, sign, none"),
        ("model.size=mega", r"model.size = 'mega' is not one of pico, nano, mini, small"),
        ("model.size=[1]", r"model.size = \[1\] is not one of pico, nano, mini, small"),
        ("train.seed=9223372036854775808", r"train.seed = 9223372036854775808 is too large"),
        ("train.batch_tokens=1e12", r"train.batch_tokens = 1000000000000 is too large; at most 2147483647"),
        ("optim.lr=1" + "0" * 400, r"optim.lr = 10+ is not a number"),
        ("model.hidden_size=0", r"\[model\] hidden_size = 0"),
        ("model.num_experts_per_token=24", r"\[model\] num_experts_per_token = 24 must be below num_experts = 24"),
    ],
)
def test_wrong_values_are_named_in_one_sentence(override, message):
    with pytest.raises(UserError, match=message) as error:
        load_recipe("nano", [override])
    assert "\n" not in str(error.value)


def test_wrong_files(tmp_path):
    with pytest.raises(UserError, match=r"there is no recipe 'nanno': give a TOML file or one of .*nano.*"):
        load_recipe("nanno")
    (tmp_path / "a.toml").write_text("[model\nsize = 'nano'")
    with pytest.raises(UserError, match=r"a.toml is not TOML: .*line 1"):
        load_recipe(tmp_path / "a.toml")
    (tmp_path / "b.toml").write_text("lr = 3")
    with pytest.raises(UserError, match=r"b.toml: there is no key 'lr'; the nearest is 'optim.lr'"):
        load_recipe(tmp_path / "b.toml")
    (tmp_path / "empty.toml").write_text("[modle]\n[train]\nsteps = 1")
    with pytest.raises(UserError, match=r"empty.toml: there is no key 'modle'; the nearest is 'model"):
        load_recipe(tmp_path / "empty.toml")
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"c.toml cannot be read"):
        load_recipe(tmp_path / "c.toml")
    with pytest.raises(UserError, match=r"train.tokens = 5 and train.steps = 5: the budget is one of the two"):
        load_recipe("nano", ["train.tokens=5", "train.steps=5"])


def test_overrides_win_and_are_typed():
    recipe = load_recipe("nano", ["train.tokens=4e6", "optim.lr=1", "data.source=texts/*.txt", "train.device=cuda"])
    assert recipe.train.tokens == 4_000_000
    assert type(recipe.train.tokens) is int
    assert recipe.optim.lr == 1.0
    assert type(recipe.optim.lr) is float
    assert recipe.data.source == "texts/*.txt"
    assert recipe.train.dtype == "bfloat16"  # follows the device
    assert load_recipe("nano", ["train.batch_tokens=1000"]).train.micro_tokens == 1000
    assert load_recipe("nano", ["train.steps=9"]).steps == 9


def test_the_first_difference():
    a = load_recipe("nano")
    assert first_difference(a, a) is None
    b = load_recipe("nano", ["train.seed=1", "model.residual=plain", "optim.lr=1e-3"])
    assert first_difference(a, b) == ("model.residual", "block", "plain")
    assert first_difference(b, a) == ("model.residual", "plain", "block")


plain = st.one_of(
    st.text(st.characters(blacklist_categories=["Cs"])),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
)


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), plain | st.lists(st.text("ab\"\\\n\t'")), max_size=5)
)
def test_toml_round_trip(values):
    assert tomllib.loads(toml.dumps({"table": values, "empty": {}})) == {"table": values, "empty": {}}


def test_toml_refuses_what_it_cannot_write():
    with pytest.raises(TypeError, match="expected text, bool, int, float or a list"):
        toml.dumps({"a": {"b": None}})
