"""A small trainer: predict the next byte of this file from the last byte, with NumPy. It knows nothing of sweeper.

python train.py --lr=0.5 --batch=512 prints `step 10 loss 4.312 | 812345 tok/s`.
"""

import argparse
import os
import time
from pathlib import Path

import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.5)
parser.add_argument("--batch", type=int, default=512)
parser.add_argument("--steps", type=int, default=60)
arguments = parser.parse_args()
pause_s = float(os.environ.get("PAUSE_S", "0"))  # gate.sh makes each step slower with it

text = np.frombuffer(Path(__file__).read_bytes(), dtype=np.uint8)
generator = np.random.default_rng(0)
weights = np.zeros((256, 256))
rows = np.arange(arguments.batch)

for step in range(1, arguments.steps + 1):
    started_s = time.perf_counter()
    positions = generator.integers(len(text) - 1, size=arguments.batch)
    current, following = text[positions], text[positions + 1]
    logits = weights[current]
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    loss = -np.log(probabilities[rows, following]).mean()
    probabilities[rows, following] -= 1
    np.add.at(weights, current, -arguments.lr * probabilities)
    time.sleep(pause_s)
    rate = arguments.batch / (time.perf_counter() - started_s)
    print(f"step {step} loss {loss:.3f} | {rate:.0f} tok/s", flush=True)
