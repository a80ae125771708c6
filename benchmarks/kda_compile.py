"""Compile every KDA kernel for sm_90 without a GPU: registers, spills, tensor-core instructions (kernels.md 9.7).

    python benchmarks/kda_compile.py [--dump FOLDER]

Exits with 1 if a kernel that lives on wgmma shows no HGMMA, or one spills more than it is known to.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from openk3.ops.kda import triton_backward as backward
from openk3.ops.kda import triton_forward as forward
from openk3.ops.kda import triton_launch as launch
from openk3.ops.kda.triton_common import CHUNK, EPS, SPAN_FIELDS
from openk3.ops.kda.triton_decode import step_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
FLOAT32 = "A_log dt_bias decay start final at_offsets maps part_bias part_rate d_final d_offsets d_start state".split()
TABLES = "chunk_table span_table first_span first_piece slots".split()
NUMBERS = "scale lower_bound".split()
INTEGERS = "max_chunks h0 H M".split()
WALK = {"R": launch.ROWS, "FIELDS": SPAN_FIELDS, "HAS_START": True, "HAS_OFFSETS": False}
LOCAL = {"EPS": EPS, "OP": tl.bfloat16}
# kernel, constants, options, HGMMA expected, spilled loads allowed (what triton 3.7.1 does now; 3.6.0 spills more)
KERNELS = [
    (forward.factor_kernel, {**LOCAL, "HAS_Q": True}, {"maxnreg": launch.FACTOR_REGISTERS}, False, 16),
    (forward.inverse_kernel, LOCAL, {"num_warps": 1}, False, 0),
    *(
        (forward.scan_kernel, {**WALK, **LOCAL, "MODE": mode, "STAGES": launch.STAGES}, {}, True, 0)
        for mode in ("whole", "maps", "spans")
    ),
    (forward.fold_kernel, {**WALK, "R": launch.FOLD_ROWS, "AS_MAP": False}, {"num_warps": launch.FOLD_WARPS}, False, 0),
    (backward.save_kernel, {**WALK, **LOCAL, "STAGES": launch.SAVE_STAGES}, {}, True, 0),
    (backward.reverse_kernel, {**WALK, **LOCAL, "HAS_FINAL": True, "STAGES": launch.SAVE_STAGES}, {}, True, 0),
    (backward.query_kernel, {**LOCAL, **launch.QUERY}, {}, False, 0),
    (backward.overlap_kernel, {}, {}, False, 0),
    (backward.key_kernel, {**LOCAL, **launch.KEY}, {}, False, 16),
    (backward.gate_kernel, LOCAL, {}, False, 0),
    (step_kernel, {"R": 32, "EPS": EPS}, {}, False, 0),
]


def signature(name: str) -> str:
    """The type of an argument, by its name."""
    if name in NUMBERS:
        return "fp32"
    if name in INTEGERS or re.fullmatch(r"\w+_[ths]", name):
        return "i32"
    return "*fp32" if name in FLOAT32 else "*i32" if name in TABLES else "*bf16"


def build(kernel, constants: dict, options: dict, folder: Path) -> tuple[dict[str, int], str]:
    """({REG, STACK, instruction: count}, SASS) of one kernel at K = V = 128."""
    names = kernel.arg_names
    known = {"K": 128, "V": 128, "C": CHUNK, **constants}
    constants = {name: known[name] for name in names if name in known}
    types = {name: "constexpr" if name in constants else signature(name) for name in names}
    even = [i for i, name in enumerate(names) if types[name][0] == "*" or re.fullmatch(r"\w+_[ths]", name)]
    source = ASTSource(kernel, types, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in even})
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, **options})
    path = folder / f"{kernel.__name__}.cubin"
    path.write_bytes(binary.asm["cubin"])

    def ask(flag: str) -> str:
        return subprocess.run([CUOBJDUMP, flag, path], capture_output=True, text=True).stdout

    sass = ask("-sass")
    counts = {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", ask("-res-usage"))}
    for op in ("HGMMA", "HMMA", "LDL", "BAR"):
        counts[op] = len(re.findall(rf"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?{op}\b", sass, re.MULTILINE))
    return counts, sass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dump", type=Path, help="folder for the machine code as text")
    dump, wrong = parser.parse_args().dump, 0
    with tempfile.TemporaryDirectory() as folder:
        for kernel, constants, options, wgmma, spills in KERNELS:
            options = {**options, **{k: constants[k] for k in ("num_warps", "maxnreg") if k in constants}}
            counts, sass = build(kernel, constants, options, Path(folder))
            good = counts["LDL"] <= spills and (counts["HGMMA"] > 0) >= wgmma
            wrong += not good
            mode = constants.get("MODE", "")
            figures = "  ".join(f"{key} {value:3}" for key, value in counts.items())
            print(f"{kernel.__name__:16} {mode:6} {figures}  {'ok' if good else 'WRONG'}", flush=True)
            if dump is not None:
                dump.mkdir(parents=True, exist_ok=True)
                (dump / f"{kernel.__name__}{mode}.sass").write_text(sass, encoding="utf-8")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
