"""Loads FOLDER with plain transformers, no tpconvert in sight, and goes on from a prompt.

python examples/generate.py FOLDER [PROMPT]
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: str, prompt: str = "And God said, Let ") -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.no_grad():
        torch.manual_seed(0)
        output = model.generate(**inputs, max_new_tokens=120, do_sample=True, temperature=0.6)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:3])
