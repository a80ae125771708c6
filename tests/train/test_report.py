"""The report of a run, on synthetic run folders."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from openk3.errors import UserError
from openk3.train import report_curves, report_probes
from openk3.train.report import write_report
from openk3.train.report_draw import human
from openk3.train.report_read import read_run

K3_KDA, K3_MLA = (0, 1, 2), (3, 4)
CONFIG = """[model]
size = "nano"
num_experts = 24

[data]
context = 512

[optim]
optimizer = "per_head_muon"

[balance]
rule = "quantile"
"""
SITES = [(0, "mlp", 2), (1, "attention", 2), (1, "mlp", 2), (2, "attention", 2), (2, "mlp", 3), (3, "attention", 3),
         (3, "mlp", 3), (4, "attention", 3), (4, "mlp", 4)]  # sources of nano's reads: 5 layers, 2 a block  # fmt: skip
HASH = "9f2c81d4a7e05b36c1f0"


def synthetic(folder: Path, steps: int = 600, every: int = 100, seed: int = 0) -> list[dict]:
    """A run folder that looks like a `nano` run of the named length; returns its lines."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG)
    lines = [{"kind": "corpus", "step": 0, "tokens": 0, "hash": HASH, "files": 1480, "bytes": 12_610_000,
              "held_out_files": 60, "held_out_bytes": 500_000, "order5_bpb": 2.31}]  # fmt: skip
    for step in range(1, steps + 1):
        at = {"step": step, "tokens": step * 8192}
        loss = 2.1 + 5.6 * step**-0.45 + rng.normal(0, 0.07)
        vio = 0.16 + 2.5 / step**1.5 + rng.gamma(2, 0.03, size=4)
        dead = rng.poisson(3 / step, size=4)
        lines.append({"kind": "train", **at, "loss": loss, "bpb": loss / 1.6,
                      "lr": 3e-3 * min(step / 6, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
                      "grad_norm": math.exp(rng.normal(-0.8, 0.15)) + 4 / step + (3 if step == 437 else 0),
                      "tok_per_s": 10_900 + rng.normal(0, 300), "seconds": step * 0.752,
                      "maxvio": vio.tolist(), "dead": dead.tolist(), "q": 8192 * 2 / 24})  # fmt: skip
        if step % every == 0 or step == 1:
            held = 2.16 + 5.5 * step**-0.45
            lines.append({"kind": "eval", **at, "loss": held, "bpb": held / 1.6})
            lines.append({"kind": "probe", **at, **probe(rng, step / steps)})
            lines += [{"kind": "sample", **at, "prompt": p, "text": f"self, step={step}):\n        return {p!r}\n"}
                      for p in ("def ", "class ", "import ")]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def probe(rng: np.random.Generator, progress: float) -> dict:
    """AttnRes weights that leave the mean, half-lives that spread, update norms a little apart."""
    sources = {f"layers.{i}.{part}": n for i, part, n in SITES} | {"output": 4}
    sites = [{"site": site, "weights": softmax(2 * progress**0.3 * rng.normal(size=n) * (progress > 0.01))}
             for site, n in sources.items()]  # fmt: skip
    halves = [{"layer": i, "heads": [half_life(rng, progress) for _ in range(4)]} for i in K3_KDA]
    mats = [(i, m) for i in K3_KDA for m in ("q_proj", "k_proj", "v_proj")]
    mats += [(i, m) for i in K3_MLA for m in ("q_b_proj", "kv_b_proj")]
    norms = [{"name": f"model.layers.{i}.self_attn.{m}.weight",
              "heads": (1.1 * (1.3 if "b" in m else 1) * np.exp(rng.normal(0, 0.04, 4))).tolist()}
             for i, m in mats]  # fmt: skip
    return {"attnres": sites, "half_lives": halves, "update_norms": norms}


def softmax(logits: np.ndarray) -> list[float]:
    weights = np.exp(logits)
    return (weights / weights.sum()).tolist()


def half_life(rng: np.random.Generator, progress: float) -> list[float]:
    channels = 0.14 + 2.8 * np.exp(rng.normal(0.8 * progress, 0.2 + 1.6 * progress, size=256))
    return np.quantile(channels, [0, 0.25, 0.5, 0.75, 1]).tolist()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "a & b"
    synthetic(folder)
    return folder


@pytest.fixture(scope="module")
def page(run_dir: Path) -> str:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    return path.read_text(encoding="utf-8")


def edited(folder: Path, lines: list[dict], config: str = CONFIG) -> Path:
    """A run folder with just these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def section(page: str, anchor: str) -> str:
    return re.search(rf'<section id="{anchor}">.*?</section>', page, re.S)[0]


def test_every_section_has_its_figures_and_sentences(page: str) -> None:
    counts = {"learning": 4, "experts": 2, "depth": 2, "length": 2, "optimizer": 2}
    for anchor, n in counts.items():
        text = section(page, anchor)
        assert text.count("<svg ") == n and text.count("<figcaption>") == n, anchor
    assert "Not in this run" not in page
    for words in ("Quantile Balancing", "AttnRes", "half-life", "head by head"):
        assert words in page
    assert "q = 683" in section(page, "experts")  # 8192 tokens x 2 of 24 experts


def test_summary_names_the_run(page: str) -> None:
    head = page[: page.index('<section id="learning">')]
    assert "a &amp; b" in head
    held = (2.16 + 5.5 * 600**-0.45) / 1.6
    for fact in (f"{held:.3f}", "2.310", "nano", "4.92M", "600 steps", "7 min 31 s", HASH[:8], "12.6MB"):
        assert fact in head, fact
    assert "2.65M parameters" in head and "1.27M active" in head  # counted from the config


def test_page_needs_nothing_else(page: str) -> None:
    assert not re.search(r"https?://|<script|<link|@import|<img|<iframe|xlink", page)
    assert all(ref.startswith("#") for ref in re.findall(r'(?:href|src)="([^"]*)"', page))
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", page))
    assert "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page


def test_figures_take_every_colour_from_the_style(page: str) -> None:
    body = page[page.index("<main>") :]
    used, defined = set(re.findall(r"var\(--(\w+)\)", body)), set(re.findall(r"--(\w+): #", page))
    assert used and used <= defined
    assert not re.search(r"#[0-9a-f]{6}\b(?!\")", re.sub(r'(?:href="|url\()#\w+', "", body))
    light, dark = page.split("prefers-color-scheme: dark")
    assert set(re.findall(r"--(\w+): #", light)) == set(re.findall(r"--(\w+): #", dark))


def test_references_inside_a_figure_resolve(page: str) -> None:
    ids = re.findall(r'id="([^"]*)"', page)
    wanted = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', page)
    assert len(set(ids)) == len(ids)
    assert {a or b for a, b in wanted} <= set(ids)


def test_samples_are_escaped_complete_and_foldable(tmp_path: Path) -> None:
    at = {"step": 5, "tokens": 10}
    attack = "<script>alert(1)</script><img src=x onerror=a>&\x00\ud800"
    folder = edited(tmp_path / "run", [
        {"kind": "sample", **at, "prompt": "<b>", "text": attack},
        {"kind": "sample", **at, "prompt": "p", "text": "second"},
        {"kind": "sample", "step": 9, "tokens": 20, "prompt": "p", "text": "later"},
    ])  # fmt: skip
    (folder / "samples").mkdir()
    stored = {"step": 7, "tokens": 14, "samples": [{"prompt": "f", "text": "from a file"}]}
    (folder / "samples" / "step-00000007.json").write_text(json.dumps(stored))
    (folder / "samples" / "step-00000009.json").write_text(json.dumps([{"prompt": "p", "text": "later"}]))
    (folder / "samples" / "step-00000010.json").write_text('[{"prompt": "p", "te')
    text = section(write_report(folder).read_text(encoding="utf-8"), "samples")
    assert "<script" not in text and "<img" not in text
    assert "<b>&lt;b&gt;</b>&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\u2400" in text and "\ud800" not in text
    assert [text.count(words) for words in ("second", "later", "from a file")] == [1, 1, 1]
    assert re.findall(r"<details(?: open)?><summary>Step (\d+)", text) == ["9", "7", "5"]
    assert text.count("<details open>") == 1


def test_one_step_is_enough(tmp_path: Path) -> None:
    synthetic(tmp_path, steps=1)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert page.count("<svg ") == 10  # both comparisons with an earlier probe are notes
    assert section(page, "depth").count("it takes two probes to compare") == 1


def test_what_a_run_lacks_becomes_a_note(tmp_path: Path) -> None:
    """A k2like run: no AttnRes, no KDA, the sign rule, whole-matrix Muon, no probe of norms; no evaluation yet."""
    config = CONFIG.replace('"quantile"', '"sign"').replace('"per_head_muon"', '"muon"')
    lines = [line for line in synthetic(tmp_path, steps=3) if line["kind"] == "train"]
    empty = {"kind": "probe", "step": 3, "tokens": 9, "attnres": [], "half_lives": [], "update_norms": []}
    run = read_run(edited(tmp_path / "k2like", [*lines, empty], config))
    for panel in (report_probes.attnres_map, report_probes.attnres_start, report_probes.half_lives,
                  report_probes.fading, report_probes.update_spread, report_probes.update_norms):  # fmt: skip
        made = panel(run)
        assert made.svg is None and made.text.startswith("Not in this run: "), panel.__name__
    assert "No evaluation has been written yet" in report_curves.loss(run).text
    assert "small fixed step" in report_curves.max_violation(run).text
    page = write_report(tmp_path / "k2like").read_text(encoding="utf-8")
    assert "There is no held-out evaluation yet" in page and page.count("Not in this run: ") == 7


def test_dense_run_without_config(tmp_path: Path) -> None:
    at = {"kind": "train", "step": 1, "tokens": 8}
    run = read_run(edited(tmp_path, [at | {"loss": 1.0, "maxvio": [], "dead": []}], "not = [toml"))
    for panel in (report_curves.max_violation, report_curves.dead_experts, report_curves.learning_rate):
        assert panel(run).svg is None
    assert report_curves.loss(run).svg is not None
    assert run.model is None and run.config == {}


def test_missing_and_empty_metrics_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metrics.jsonl is not there: [^.]*$"):
        write_report(tmp_path)
    for content in ("", "\n\n", '{"kind": "train", "step": 1'):
        (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(UserError, match=r"metrics.jsonl holds no whole line yet: [^.]*$"):
            write_report(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_kill_at_any_byte_of_the_last_line_is_ignored(tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": i, "tokens": 8 * i, "loss": 2.0, "note": "\u00e9"} for i in (1, 2, 3)]
    raw = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    last = raw.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(raw) - 1):
        (tmp_path / "metrics.jsonl").write_bytes(raw[:cut])
        run = read_run(tmp_path)
        assert [r["step"] for r in run.of("train")] == [1, 2] and run.left_out == []
    (tmp_path / "metrics.jsonl").write_bytes(raw[:-1])  # whole, but for its newline
    assert len(read_run(tmp_path).of("train")) == 3


def test_resumed_run_takes_the_later_line_and_counts_torn_ones(tmp_path: Path) -> None:
    rows = [(1, 3.0, 10), (2, 2.5, 20), (3, 2.2, 30), (2, 2.4, 8), (3, 2.1, 16)]
    lines = [json.dumps({"kind": "train", "step": s, "tokens": s, "loss": v, "seconds": t}) for s, v, t in rows]
    lines.insert(3, '{"kind": "train", "st')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(tmp_path)
    assert [r["loss"] for r in run.of("train")] == [3.0, 2.4, 2.1]
    assert run.left_out == [4]
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert "Unreadable lines of metrics.jsonl were left out: 4." in page
    assert "<dt>Time</dt><dd>26.0 s" in page  # 10 s before the restart, 16 s after


def test_values_that_are_not_finite_survive(tmp_path: Path) -> None:
    lines = synthetic(tmp_path, steps=4)
    for line in lines:
        if line["kind"] == "train" and line["step"] > 1:
            line |= {"loss": math.nan, "grad_norm": math.inf, "maxvio": [math.nan] * 4}
        if line["kind"] == "probe":
            line["attnres"][0]["weights"] = [math.nan, math.nan]
            line["half_lives"][0]["heads"][0] = [0.0, 1.0, math.nan, math.inf, math.inf]
            line["update_norms"][0]["heads"] = [math.nan, 1.0, 0.0, 2.0]
    run = read_run(edited(tmp_path / "nan", lines))
    assert "3 steps, the first of them step 2, gave no finite value" in report_curves.loss(run).text
    for panel in (report_curves.gradient_norm, report_probes.attnres_map, report_probes.half_lives,
                  report_probes.update_spread, report_probes.update_norms):  # fmt: skip
        assert panel(run).svg is not None, panel.__name__
    assert "NaN" in report_probes.attnres_map(run).svg


def test_the_page_is_replaced_whole(tmp_path: Path) -> None:
    edited(tmp_path, [{"kind": "corpus", "step": 0, "tokens": 0, "hash": HASH}])
    target = tmp_path / "report.html"
    target.write_text("the page before")
    reader = tmp_path / "reader"
    reader.hardlink_to(target)
    write_report(tmp_path)
    assert reader.read_text() == "the page before"  # never written into
    assert HASH in target.read_text()
    assert {p.name for p in tmp_path.iterdir()} == {"config.toml", "metrics.jsonl", "reader", "report.html"}


def test_same_run_gives_the_same_bytes(run_dir: Path, page: str) -> None:
    run = read_run(run_dir)
    assert report_curves.gradient_norm(run).svg in page
    assert report_probes.attnres_map(run).svg in page


def test_heat_map_shows_the_weights_of_the_last_probe(run_dir: Path) -> None:
    run = read_run(run_dir)
    panel = report_probes.attnres_map(run)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", panel.svg)
    weights = [w for s in run.of("probe")[-1]["attnres"] for w in s["weights"]]
    assert " ".join(f"{100 * w:.0f}" for w in weights) in " ".join(texts)
    assert [t for t in texts if "mlp" in t] == [f"{i} mlp" for i in range(5)]
    best = max(range(4), key=lambda i: weights[-4:][i])
    source = "the embedding" if best == 0 else f"block {best}"
    assert f"takes {100 * weights[-4:][best]:.0f}% from {source} and" in panel.text


def test_spread_is_largest_over_median(tmp_path: Path) -> None:
    at = {"kind": "probe", "step": 4, "tokens": 8}
    name = "model.layers.2.self_attn.q_proj.weight"
    run = read_run(edited(tmp_path, [at | {"update_norms": [{"name": name, "heads": [1.0, 2.0, 3.0, 8.0]}]}]))
    assert "Widest at the last probe: layer 2 q_proj, 3.20." in report_probes.update_spread(run).text


def test_human_numbers() -> None:
    values = (0, 0.25, 999, 1234, 8.19e6, 999.7e6, 2.78e12, math.nan)
    assert [human(v) for v in values] == ["0", "0.25", "999", "1.23k", "8.19M", "1B", "2.78T", ""]
