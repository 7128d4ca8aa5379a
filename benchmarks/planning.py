"""What does a plan cost?  Llama-70B sizes at 20, 40, 80 and 160 layers, one thread, a process each.

python benchmarks/planning.py [LAYERS ...]
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "dtype": "bfloat16",
}


def measure(folder: str) -> None:
    """Print the seconds of opening and planning, and the peak memory, of this process."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  (importing is no part of planning)

    from tpconvert.planning import make_plan
    from tpconvert.source import open_source

    torch.set_num_threads(1)
    start = time.perf_counter()
    source = open_source(folder)
    opened = time.perf_counter()
    plan = make_plan(source.module, source.inputs, tp=8)
    planned = time.perf_counter()
    cut = sum(v.layout.cut for v in plan.verdicts)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(json.dumps([opened - start, planned - opened, peak, cut]))


def main(counts: list[int]) -> None:
    import torch
    import transformers

    print(f"python {' '.join(sys.argv)}")
    print(f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("layers   open s   plan s   plan ms a layer   peak GB   tensors cut")
    for layers in counts:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": layers}))
            command = [sys.executable, __file__, "--measure", folder]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
        opened, planned, peak, cut = json.loads(done.stdout)
        print(f"{layers:6} {opened:8.2f} {planned:8.2f} {1e3 * planned / layers:17.1f} {peak:9.2f} {cut:13}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        main([int(a) for a in sys.argv[1:]] or [20, 40, 80, 160])
