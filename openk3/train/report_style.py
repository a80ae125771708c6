"""The look of report.html: one style sheet, light and dark, wide and narrow.

The series s0 to s5 and the layer shades d0 to d7 were chosen by their distance under simulated protanopia, deuteranopia
and tritanopia: no two series are closer than 19 (light) and 22 (dark) in CIELAB. Shades fall in lightness with depth.
"""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fcfcfa; --card: #ffffff; --line: #e4e4df; --ink: #22262b; --muted: #5d656e; --grid: #dcdcd6;
  --heat: #0e6fa8;
  --s0: #0e6fa8; --s1: #b75e3c; --s2: #2fa373; --s3: #62286b; --s4: #b2891e; --s5: #606b7c;
  --d0: #b7af47; --d1: #78a753; --d2: #249969; --d3: #13807a; --d4: #00687c; --d5: #044f7d; --d6: #252f79;
  --d7: #340f5b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #14171a; --card: #1a1e22; --line: #2b3137; --ink: #e3e6e9; --muted: #9aa4ae; --grid: #333a41;
    --heat: #74a1ef;
    --s0: #74a1ef; --s1: #ee8c74; --s2: #7af1c6; --s3: #fdc1ff; --s4: #bda138; --s5: #858b9e;
    --d0: #f7f08a; --d1: #b9eb94; --d2: #76e1ad; --d3: #32d0c6; --d4: #19b8d8; --d5: #489cdc; --d6: #6b7ecf;
    --d7: #8061b2;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "Noto Sans", Arial, sans-serif; -webkit-text-size-adjust: 100%; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 64px; }
header p { max-width: 46em; margin: 6px 0 0; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0; font-weight: 650; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 2px; font-weight: 650; }
h3 { font-size: 1rem; margin: 0 0 6px; font-weight: 600; }
.kind { color: var(--muted); font-size: .875rem; margin: 0; }
section { margin-top: 40px; padding-top: 18px; border-top: 1px solid var(--line); }
section > p { max-width: 46em; color: var(--muted); margin: 0 0 16px; }
dl.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(132px, 1fr)); gap: 1px; margin: 20px 0 0;
  background: var(--card); border: 1px solid var(--line); border-radius: 8px; overflow: hidden; }
dl.facts div { padding: 10px 14px 11px; box-shadow: 0 0 0 1px var(--line); }
dl.facts dt { color: var(--muted); font-size: .8125rem; }
dl.facts dd { margin: 0; font-size: 1.3rem; line-height: 1.3; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere; }
dl.facts dd small { display: block; font-size: .8125rem; color: var(--muted); line-height: 1.35; }
nav { margin-top: 16px; font-size: .9375rem; display: flex; flex-wrap: wrap; gap: 4px 18px; }
a { color: var(--s0); text-underline-offset: 3px; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 30px 36px;
  align-items: start; }
figure { margin: 0; min-width: 0; max-width: 560px; }
figure svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; }
figcaption { color: var(--muted); font-size: .9375rem; line-height: 1.45; margin-top: 6px; max-width: 36em; }
figure.note { border: 1px dashed var(--line); border-radius: 8px; padding: 14px 16px; }
figure.note figcaption { margin: 0; }
details { border-top: 1px solid var(--line); }
details:last-of-type { border-bottom: 1px solid var(--line); }
summary { cursor: pointer; padding: 9px 2px; }
summary span { color: var(--muted); }
.sample { margin: 0 0 14px; padding: 12px 14px; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; font: .875rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; tab-size: 4; }
.sample b { font-weight: inherit; color: var(--s0); }
.scroll { overflow-x: auto; margin: 0 0 14px; }
table { border-collapse: collapse; font-size: .9375rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 4px 18px 4px 0; border-bottom: 1px solid var(--line); }
th { color: var(--muted); font-weight: 500; }
@media (max-width: 520px) {
  main { padding: 18px 14px 48px; }
  h1 { font-size: 1.45rem; }
  dl.facts { grid-template-columns: repeat(2, 1fr); }
  dl.facts dd { font-size: 1.15rem; }
}
@media print { section { break-inside: avoid; } }
"""
