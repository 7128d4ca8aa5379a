"""A training loop of one's own, for one GPU, made tensor parallel: the five changed lines are numbered.

tpconvert shard LLAMA --tp 2 -o llama-tp2
torchrun --nproc-per-node 2 --local-ranks-filter 0 examples/own_loop.py llama-tp2 corpus.txt trained-tp2
tpconvert merge trained-tp2 -o trained
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoTokenizer

import tpconvert
from tpconvert.checkpoint import read_plan
from tpconvert.train.saving.save import save

STEPS, BATCH, LENGTH = 20, 4, 64


def main(folder: str, text: str, out: str) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")  # 1: ranks
    mesh, plan = tpconvert.make_mesh(2, device=device()), read_plan(Path(folder))  # 2: who holds what
    model = tpconvert.load(folder, mesh).train()  # 3: was AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.tensor(AutoTokenizer.from_pretrained(folder)(Path(text).read_text())["input_ids"])
    torch.manual_seed(0)

    for step in range(1, STEPS + 1):
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH,))
        batch = torch.stack([ids[i : i + LENGTH + 1] for i in starts]).to(mesh.device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = tpconvert.clip_grad_norm_(model, 1.0, mesh, plan)  # 4: was nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:2}  loss {loss.item():.4f}  grad norm {norm.item():.3f}", flush=True)

    save(model, folder, out, mesh)  # 5: was model.save_pretrained(out)
    dist.destroy_process_group()


def device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_node_local_rank())
    return torch.device("cuda", dist.get_node_local_rank())


if __name__ == "__main__":
    main(*sys.argv[1:4])
