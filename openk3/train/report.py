"""Writes report.html: what a run was, how it learned, and what its K3 mechanisms did.

One file that needs nothing else: style and figures are inside, there is no script, and a policy in its head forbids
the browser to load anything, whatever a sample may say.
"""

from __future__ import annotations

import html
import math
import os
from pathlib import Path

import numpy as np

from openk3.train import report_curves as curves
from openk3.train import report_probes as probes
from openk3.train.report_draw import Panel, human
from openk3.train.report_read import Run, Sample, column, number, read_run
from openk3.train.report_style import CSS

_SECTIONS = (
    ("learning", "Learning", "How well the model predicts text, against the tokens it has read.",
     (curves.loss, curves.bits_per_byte, curves.learning_rate, curves.gradient_norm)),
    ("experts", "Width: balance of the experts", "A token visits a few experts of many. Balance is kept by a bias that "
     "only selects: it enters neither the weights of the experts nor the loss.",
     (curves.max_violation, curves.dead_experts)),
    ("depth", "Depth: Attention Residuals", "AttnRes replaces the sum of all earlier layers by a softmax over finished "
     "blocks: every sub-layer learns which depths it reads, by a query that sees no input.",
     (probes.attnres_map, probes.attnres_start)),
    ("length", "Length: memory of KDA", "A KDA head keeps one matrix of fixed size, and each of its key channels fades "
     "at a pace of its own.", (probes.half_lives, probes.fading)),
    ("optimizer", "Optimizer: per-head Muon", "Muon gives every direction of a matrix an equal step. K3 does so head "
     "by head for queries, keys and values.", (probes.update_spread, probes.update_norms)),
)  # fmt: skip


def write_report(run_dir: Path) -> Path:
    """Write `run_dir`/report.html from config.toml, metrics.jsonl and samples/, and return its path.

    Raises UserError where metrics.jsonl is absent or holds no whole line. The page is written beside and renamed, so
    that a reader never meets half of it.
    """
    run = read_run(Path(run_dir))
    target = Path(run_dir) / "report.html"
    beside = target.with_name(f".report.html.{os.getpid()}")
    try:
        beside.write_text(_page(run), encoding="utf-8", errors="replace")  # a sample may hold half a character
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    return target


def _page(run: Run) -> str:
    sections = [(anchor, title) for anchor, title, *_ in _SECTIONS] + [("samples", "Samples"), ("config", "Config")]
    links = "".join(f'<a href="#{anchor}">{title.split(":")[0]}</a>' for anchor, title in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{title}</h2><p>{intro}</p><div class="figures">'
        + "".join(_figure(panel(run)) for panel in panels)
        + "</div></section>\n"
        for anchor, title, intro, panels in _SECTIONS
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{_text(run.name)} - openk3 run</title>
<style>{CSS}</style>
</head>
<body>
<main>
<header>
<p class="kind">openk3 run</p>
<h1>{_text(run.name)}</h1>
{_summary(run)}
{_facts(run)}
<nav>{links}</nav>
</header>
{body}{_samples(run.samples)}
{_config(run)}
</main>
</body>
</html>
"""


def _figure(panel: Panel) -> str:
    note = ' class="note"' if panel.svg is None else ""
    return (
        f"<figure{note}><h3>{panel.title}</h3>{panel.svg or ''}<figcaption>{_text(panel.text)}</figcaption></figure>\n"
    )


def _last(run: Run, kind: str, key: str) -> float:
    values = column(run.of(kind), key)
    return float(values[-1]) if values.size else math.nan


def _summary(run: Run) -> str:
    bpb, baseline = _last(run, "eval", "bpb"), number(run.corpus.get("order5_bpb"))
    parts = []
    if math.isfinite(bpb):
        parts.append(f"On files it has never read, the model needs {bpb:.3f} bits per byte")
        if math.isfinite(baseline):
            word = "less" if bpb < baseline else "more"
            parts[-1] += f"; a count of what follows five bytes needs {baseline:.3f}"
            parts[-1] += f" ({abs(1 - bpb / baseline):.0%} {word} for the model)" if baseline > 0 else ""
        parts[-1] += "."
    else:
        parts.append("There is no held-out evaluation yet.")
    if run.left_out:
        lines = ", ".join(map(str, run.left_out[:8])) + (" ..." if len(run.left_out) > 8 else "")
        parts.append(f"Unreadable lines of metrics.jsonl were left out: {lines}.")
    return f"<p>{_text(' '.join(parts))}</p>"


def _facts(run: Run) -> str:
    """The run in numbers. A fact that was not written is left out."""
    train, corpus = run.of("train"), run.corpus
    ends = [v for v in (_last(run, "train", "tokens"), _last(run, "eval", "tokens")) if math.isfinite(v)]
    speed = column(train, "tok_per_s")
    speed = float(np.nanmedian(speed)) if np.isfinite(speed).any() else math.nan
    bpb, baseline = _last(run, "eval", "bpb"), number(corpus.get("order5_bpb"))
    rows = [
        ("Held-out bits/byte", _fixed(bpb), f"order-5 bytes: {_fixed(baseline)}"),
        ("Final loss", _fixed(_last(run, "train", "loss")), f"held-out: {_fixed(_last(run, 'eval', 'loss'))}"),
        ("Model", *_size(run)),
        ("Tokens", human(max(ends, default=math.nan)), f"{train[-1]['step']:,} steps" if train else ""),
        ("Time", _time(_seconds(run)), ""),
        ("Tokens per second", human(speed), "median over steps"),
        ("Corpus", str(corpus.get("hash", ""))[:8], _corpus(run)),
    ]
    cells = [f"<div><dt>{k}</dt><dd>{_text(v)}<small>{_text(more)}</small></dd></div>" for k, v, more in rows if v]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def _size(run: Run) -> tuple[str, str]:
    """Name and parameters: as the run wrote them, else counted from the config."""
    total = number(run.fact("parameters", "total_parameters"))
    active = number(run.fact("active_parameters"))
    if not math.isfinite(total) and run.model is not None:
        from openk3.model.audit import audit  # brings torch along, which nothing else here needs

        counted = audit(run.model)
        total, active = counted.total, counted.active
    words = [f"{human(total)} parameters"] if math.isfinite(total) else []
    words += [f"{human(active)} active"] if math.isfinite(active) else []
    name = run.fact("size")
    return (str(name), ", ".join(words)) if name else (human(total), ", ".join(words))


def _corpus(run: Run) -> str:
    files, size = number(run.corpus.get("files")), number(run.corpus.get("bytes"))
    parts = [f"{files:,.0f} documents"] if math.isfinite(files) else []
    parts += [f"{human(size)}B"] if math.isfinite(size) else []
    return ", ".join(parts)


def _seconds(run: Run) -> float:
    """Seconds of the whole run. A resumed run starts its clock anew, so every restart adds its own."""
    clock = column(run.of("train"), "seconds")
    clock = clock[np.isfinite(clock)]
    if not clock.size:
        return math.nan
    ends = np.append(clock[1:] < clock[:-1], True)
    return float(clock[ends].sum())


def _fixed(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else ("-" if math.isnan(value) else "infinite")


def _time(seconds: float) -> str:
    if not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _samples(samples: list[Sample]) -> str:
    head = '<section id="samples"><h2>Samples through training</h2>'
    if not samples:
        return head + "<p>Not in this run: no sample has been written.</p></section>"
    by_step: dict[int, list[Sample]] = {}
    for sample in samples:
        by_step.setdefault(sample.step, []).append(sample)
    out = [head, "<p>What the model writes after a prompt (in colour), the latest first.</p>"]
    for i, (step, group) in enumerate(reversed(by_step.items())):
        count = f"{len(group)} sample" + ("s" if len(group) > 1 else "")
        out.append(f"<details{' open' if i == 0 else ''}><summary>Step {step:,} <span>{count}</span></summary>")
        out += map(_sample, group)
        out.append("</details>")
    return "\n".join([*out, "</section>"])


def _sample(sample: Sample) -> str:
    return f'<div class="sample"><b>{_text(sample.prompt)}</b>{_text(sample.text)}</div>'


def _config(run: Run) -> str:
    out = ['<section id="config"><h2>Config and evaluations</h2>']
    evals = run.of("eval")
    if evals:
        rows = "".join(
            f"<tr><td>{r['step']:,}</td><td>{human(number(r.get('tokens')))}</td>"
            f"<td>{_fixed(number(r.get('loss')))}</td><td>{_fixed(number(r.get('bpb')))}</td></tr>"
            for r in evals
        )
        head = "<tr><th>step</th><th>tokens</th><th>held-out loss</th><th>bits per byte</th></tr>"
        out.append(f"<details><summary>Evaluations <span>{len(evals)}</span></summary>")
        out.append(f'<div class="scroll"><table>{head}{rows}</table></div></details>')
    if run.config_text.strip():
        out.append(
            f'<details><summary>config.toml</summary><div class="sample">{_text(run.config_text)}</div></details>'
        )
    else:
        out.append("<p>Not in this run: config.toml.</p>")
    if run.corpus:
        facts = "\n".join(f"{k}: {v}" for k, v in run.corpus.items() if k not in ("kind", "step", "tokens"))
        out.append(f'<details><summary>Corpus</summary><div class="sample">{_text(facts)}</div></details>')
    return "\n".join([*out, "</section>"])


_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}  # control characters, made visible


def _text(text: str) -> str:
    return html.escape(text.replace("\r\n", "\n").translate(_PICTURES))
