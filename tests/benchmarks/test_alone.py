"""A group in which nobody else is."""

import subprocess
import sys

SCATTERED = """
import torch, torch.distributed as dist
from benchmarks.compare.alone import join_alone
from tpconvert.parallel.comm.peers import scatter_into

held = join_alone(2, torch.device("cpu"))
given = torch.arange(12.0).view(4, 3)
eager = torch.full((2, 3), 7.0)
scatter_into(eager, given, dist.group.WORLD)
group = dist.group.WORLD.group_name
compiled = torch.ops._c10d_functional.reduce_scatter_tensor(given, "sum", 2, group)
assert torch.equal(eager, given[:2]), eager
assert torch.equal(torch.ops._c10d_functional.wait_tensor(compiled), given[:2]), compiled
"""


def test_what_is_scattered_alone_is_this_rank_s_part_and_not_what_was_in_memory():
    made = subprocess.run([sys.executable, "-W", "ignore", "-c", SCATTERED], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
